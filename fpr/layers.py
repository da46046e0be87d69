"""Building blocks shared by the models: norms, rotary positions, attention, SwiGLU, convolutions.

Parameters are float32; `dtype` is the type of the computation (float32 or bfloat16).
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Dtype = Any
# Truncated normal at ±2σ, σ corrected for the truncation, std 1/sqrt(fan_in) (spec 2 section 1).
fan_in_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def truncated_normal_init(std: float) -> nn.initializers.Initializer:
    """Truncated normal at ±2σ whose own standard deviation is `std`."""
    return nn.initializers.truncated_normal(stddev=std / 0.87962566103423978)


def rms_norm(x: jax.Array, eps: float = 1e-5, axis: int = -1) -> jax.Array:
    """x / sqrt(mean(x²) + eps) over one axis, without gain, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=axis, keepdims=True) + eps)
    return y.astype(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned gain `scale` (D,)."""

    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
        return rms_norm(x, self.eps) * scale.astype(x.dtype)


class Linear(nn.Module):
    """y = x W (+ b); W (in, out) float32, cast to `dtype` for the product."""

    features: int
    use_bias: bool = False
    dtype: Dtype = jnp.float32
    kernel_init: nn.initializers.Initializer = fan_in_init
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        y = x.astype(self.dtype) @ kernel.astype(self.dtype)
        if self.use_bias:
            y = y + self.param("bias", self.bias_init, (self.features,)).astype(self.dtype)
        return y


def rotary(x: jax.Array, base: float = 1e4, start: jax.Array | None = None) -> jax.Array:
    """Rotary position embedding in the rotate-half form.

    Args:
      x: (..., T, K) queries or keys, K even; position t is the index on the time axis.
      base: wavelength base.
      start: (B,) position of the first step, or None for 0.
    """
    t, k = x.shape[-2:]
    inv = 1.0 / base ** (jnp.arange(0, k, 2, dtype=jnp.float32) / k)
    position = jnp.arange(t, dtype=jnp.float32)
    if start is not None:
        position = start[:, None, None].astype(jnp.float32) + position  # (B, 1, T)
    angle = position[..., None] * inv  # (T, K/2), or (B, 1, T, K/2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Multi-head self-attention without biases: (B, T, D) -> (B, T, D).

    Written out with the heads before the time axis, so that both products run on contiguous
    matrices: on CPU its core took 0.7 of the time of `jax.nn.dot_product_attention`, forward and
    backward in one run at FPRM's size. The softmax is in float32.

    Attributes:
      num_heads: H, divides D.
      causal: each position sees itself and the past only.
      rope: rotary positions on queries and keys.
      softmax_temp: divides the logits q·k / sqrt(D/H).

    With `past` (keys, values, position), those (B, H, S, K) of up to S positions of which the first
    `position` (B,) are filled in, it attends to them as well and also returns `past` with x added;
    outputs beyond S positions are NaN.
    """

    num_heads: int
    causal: bool = False
    rope: bool = True
    softmax_temp: float = 1.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, past: tuple[jax.Array, ...] | None = None) -> Any:
        b, t, d = x.shape
        head = d // self.num_heads
        start = None if past is None else past[2]
        qkv = Linear(3 * d, dtype=self.dtype, name="qkv_proj")(x)
        qkv = qkv.reshape(b, t, 3, self.num_heads, head)
        q, k, v = jnp.transpose(qkv, (2, 0, 3, 1, 4))  # Each (B, H, T, K).
        if self.rope:
            q, k = rotary(q, start=start), rotary(k, start=start)
        if past is not None:
            at = past[2][:, None] + jnp.arange(t)  # (B, T)
            rows = jnp.arange(b)[:, None]
            k, v = (
                old.at[rows, :, at].set(new.swapaxes(1, 2).astype(old.dtype), mode="drop")
                for old, new in zip(past, (k, v))
            )
            past = (k, v, past[2] + t)
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k, preferred_element_type=jnp.float32)
        scores *= 1.0 / (head**0.5 * self.softmax_temp)
        if self.causal:
            if past is None:
                seen = jnp.tril(jnp.ones((t, t), bool))
            else:
                seen = (jnp.arange(k.shape[2]) <= at[..., None])[:, None]  # (B, 1, T, S)
            scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("bhts,bhsk->bthk", weights, v)
        out = Linear(d, dtype=self.dtype, name="o_proj")(out.reshape(b, t, d))
        if past is None:
            return out
        return jnp.where((at < k.shape[2])[..., None], out, jnp.nan), past


def swiglu_width(dim: int, expansion: float) -> int:
    """Inner width of SwiGLU: round(expansion·dim·2/3), rounded up to a multiple of 256."""
    return -(-round(expansion * dim * 2 / 3) // 256) * 256


class SwiGLU(nn.Module):
    """(SiLU(gate) ⊙ up) W_down with [gate, up] from one matrix, over the last axis."""

    expansion: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d = x.shape[-1]
        inner = swiglu_width(d, self.expansion)
        gate_up = Linear(2 * inner, dtype=self.dtype, name="gate_up_proj")(x)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return Linear(d, dtype=self.dtype, name="down_proj")(jax.nn.silu(gate) * up)


def depthwise_init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> jax.Array:
    """`fan_in_init` for a depthwise kernel (taps..., D), whose fan-in is the number of taps."""
    taps = functools.reduce(int.__mul__, shape[:-1])
    return truncated_normal_init(taps**-0.5)(key, shape, dtype)


def next_window(x: jax.Array, window: jax.Array | None) -> jax.Array | None:
    """The last inputs (B, K-1, D) of a causal convolution after x (B, T, D).

    `window` holds those before x; None stays None: nobody asked.
    """
    if window is None:
        return None
    return jnp.concatenate([window, x.astype(window.dtype)], axis=1)[:, x.shape[1] :]


class ShortConv(nn.Module):
    """Causal depthwise convolution over time, y_t = Σ_j w_j x_{t-K+1+j} (+ b): (B, T, D).

    `window` (B, K-1, D) holds the inputs before the first step; None is zeros.

    Written as shifted adds, which beats the convolution primitive on CPU (2.1 s against 2.4 s for
    six differentiated FPRM iterations, `shared/kernels.md`) and fuses everywhere.
    """

    kernel_size: int = 4
    use_bias: bool = True
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, window: jax.Array | None = None) -> jax.Array:
        k, (_, t, d) = self.kernel_size, x.shape
        kernel = self.param("kernel", depthwise_init, (k, d)).astype(self.dtype)
        x = x.astype(self.dtype)
        if window is None:
            padded = jnp.pad(x, ((0, 0), (k - 1, 0), (0, 0)))
        else:
            padded = jnp.concatenate([window.astype(self.dtype), x], axis=1)
        taps = [kernel[j] * padded[:, j : j + t] for j in range(k)]
        y = functools.reduce(jnp.add, taps)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros_init(), (d,)).astype(self.dtype)
        return y


class GridConv(nn.Module):
    """Depthwise 2-D convolution, zero padding "same", on a square grid by rows: (B, G·G, D)."""

    kernel_size: int = 3
    use_bias: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        k, (b, t, d) = self.kernel_size, x.shape
        side = round(t**0.5)
        kernel = self.param("kernel", depthwise_init, (k, k, d)).astype(self.dtype)
        low, high = (k - 1) // 2, k // 2
        grid = x.astype(self.dtype).reshape(b, side, side, d)
        padded = jnp.pad(grid, ((0, 0), (low, high), (low, high), (0, 0)))
        taps = [
            kernel[i, j] * padded[:, i : i + side, j : j + side] for i in range(k) for j in range(k)
        ]
        y = functools.reduce(jnp.add, taps)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros_init(), (d,)).astype(self.dtype)
        return y.reshape(b, t, d)
