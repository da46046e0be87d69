"""mLSTM and sLSTM, the two cells of xLSTM (Beck et al., arXiv 2405.04517), as sequence models.

mLSTM has a matrix memory and runs in parallel over chunks of time; sLSTM feeds its output back into
its gates, so it runs step by step. Both have exponential input gates, kept finite by a running
maximum m: results do not depend on m, so it counts as a constant in the gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import layers
from fpr.models.backbone import PlainBlock, Stack, StackConfig, state_dtype, wide

PyTree = Any
NEVER = -1e30  # Logarithm of a shut gate: finite, so that differences are not NaN.
FORGET_BIAS = (3.0, 6.0)  # Forget gates start at sigmoid of 3 to 6, evenly spaced.


class Memory(NamedTuple):
    """State of an mLSTM, everything scaled by exp(-m).

    Attributes:
      c: (B, H, K, V) sum of i k vᵀ, decayed.
      n: (B, H, K) sum of i k, decayed.
      m: (B, H) the scale.
    """

    c: jax.Array
    n: jax.Array
    m: jax.Array

    @classmethod
    def empty(cls, batch: int, heads: int, keys: int, values: int, dtype: Any) -> Memory:
        """Nothing put in yet."""
        c = jnp.zeros((batch, heads, keys, values), dtype)
        return cls(c, c[..., 0], jnp.full((batch, heads), NEVER, dtype))


class Cell(NamedTuple):
    """State of an sLSTM; c and n are scaled by exp(-m). All (B, H, K).

    Attributes:
      h: output.
      c: cell.
      n: normaliser.
      m: the scale.
    """

    h: jax.Array
    c: jax.Array
    n: jax.Array
    m: jax.Array

    @classmethod
    def empty(cls, batch: int, heads: int, width: int, dtype: Any) -> Cell:
        """Nothing put in yet."""
        zeros = jnp.zeros((batch, heads, width), dtype)
        return cls(zeros, zeros, zeros, jnp.full_like(zeros, NEVER))


def segment_sums(x: jax.Array) -> jax.Array:
    """(..., L) -> (..., L, L): [t, s] = x_{s+1} + … + x_t for s ≤ t, `NEVER` for s > t.

    Sums of few terms stay exact where differences of long cumulative sums would cancel.
    """
    length = x.shape[-1]
    later = jnp.tril(jnp.ones((length, length), bool), -1)  # [t, s]: t > s
    terms = jnp.where(later, x[..., :, None], 0.0)
    return jnp.where(jnp.tril(jnp.ones_like(later)), jnp.cumsum(terms, axis=-2), NEVER)


def split(x: jax.Array, length: int, fill: float = 0.0) -> jax.Array:
    """(B, T, H, ...) -> (chunks, B, H, length, ...), the last chunk filled up with `fill`."""
    b, t = x.shape[:2]
    pad = ((0, 0), (0, -t % length)) + ((0, 0),) * (x.ndim - 2)
    x = jnp.pad(x, pad, constant_values=fill).reshape(b, -1, length, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def join(x: jax.Array, time: int) -> jax.Array:
    """The inverse of `split`: (chunks, B, H, L, ...) -> (B, time, H, ...)."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :time]


def mlstm(
    q: jax.Array, k: jax.Array, v: jax.Array, i: jax.Array, f: jax.Array,
    state: Memory | None = None, *, chunk_size: int = 64,
) -> tuple[jax.Array, Memory]:  # fmt: skip
    """The mLSTM recurrence, in chunks: quadratic inside a chunk, recurrent between them.

    C_t = σ(f_t) C_{t-1} + exp(i_t) k_t v_tᵀ, n_t = σ(f_t) n_{t-1} + exp(i_t) k_t,
    h_t = C_tᵀ q_t / max(|n_t·q_t|, 1), with q scaled by 1/sqrt(K).

    Args:
      q, k: (B, T, H, K).
      v: (B, T, H, V).
      i, f: (B, T, H) gates before their nonlinearity.
      state: memory before the first step; None is empty.
      chunk_size: steps per chunk; T need not be a multiple.

    Returns:
      h (B, T, H, V), in at least float32, and the memory after the last step.
    """
    b, t, heads, width = q.shape
    q, k, v, i, f = (wide(a) for a in (q, k, v, i, f))
    q, log_f = q / width**0.5, jax.nn.log_sigmoid(f)
    if state is None:
        state = Memory.empty(b, heads, width, v.shape[-1], q.dtype)
    length = min(chunk_size, t)

    def chunk(state: Any, inputs: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        q, k, v, i, log_f = inputs
        inside = segment_sums(log_f) + i[..., None, :]  # (B, H, t, s)
        before = jnp.cumsum(log_f, axis=-1) + state.m[..., None]  # (B, H, t)
        m = jax.lax.stop_gradient(jnp.maximum(before, inside.max(axis=-1)))
        weight = jnp.exp(inside - m[..., None])
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k) * weight
        old = jnp.exp(before - m)
        top = jnp.einsum("bhts,bhsv->bhtv", scores, v)
        top += old[..., None] * jnp.einsum("bhtk,bhkv->bhtv", q, state.c)
        bottom = scores.sum(axis=-1) + old * jnp.einsum("bhtk,bhk->bht", q, state.n)
        # exp(-m) is the 1 of the unscaled equation. Clipped where it is below rounding or the
        # output is 0 either way, so that the gradient's 1/bottom² stays finite.
        bottom = jnp.maximum(jnp.abs(bottom), jnp.exp(jnp.clip(-m, -30.0, 40.0)))
        keys = k * weight[..., -1, :, None]
        new = Memory(
            old[..., -1, None, None] * state.c + jnp.einsum("bhsk,bhsv->bhkv", keys, v),
            old[..., -1, None] * state.n + keys.sum(axis=-2),
            m[..., -1],
        )
        return new, top / bottom[..., None]

    # Filled-up steps put nothing in (i) and forget nothing (log f = 0).
    inputs = (*(split(a, length) for a in (q, k, v)), split(i, length, NEVER), split(log_f, length))
    last: Memory
    last, h = jax.lax.scan(chunk, state, inputs)
    return join(h, t), last


def slstm(
    gates: jax.Array, recurrent: jax.Array, state: Cell | None = None
) -> tuple[jax.Array, Cell]:
    """The sLSTM recurrence, one step after the other.

    With (i, f, z, o) = gates_t + R h_{t-1}: c_t = σ(f) c_{t-1} + exp(i) tanh(z),
    n_t = σ(f) n_{t-1} + exp(i), h_t = σ(o) c_t / n_t.

    Args:
      gates: (B, T, 4, H, K) input parts of i, f, z, o, biases included.
      recurrent: (4, H, K, K) the matrices R, one for each gate and head.
      state: before the first step; None is empty.

    Returns:
      h (B, T, H, K), in at least float32, and the state after the last step.
    """
    gates = wide(gates)
    recurrent = recurrent.astype(gates.dtype)
    if state is None:
        b, _, _, heads, width = gates.shape
        state = Cell.empty(b, heads, width, gates.dtype)

    def step(carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        h, c, n, m = carry
        i, f, z, o = jnp.moveaxis(x + jnp.einsum("bhk,ghkl->bghl", h, recurrent), 1, 0)
        log_f = jax.nn.log_sigmoid(f) + m
        m = jax.lax.stop_gradient(jnp.maximum(log_f, i))
        forget, put = jnp.exp(log_f - m), jnp.exp(i - m)
        c = forget * c + put * jnp.tanh(z)
        n = forget * n + put
        h = jax.nn.sigmoid(o) * c / n
        return Cell(h, c, n, m), h

    last: Cell
    last, h = jax.lax.scan(step, state, jnp.moveaxis(gates, 1, 0))
    return jnp.moveaxis(h, 0, 1), last


class BlockLinear(nn.Module):
    """Block-diagonal linear map of the last axis; kernel (blocks, d/blocks, d/blocks)."""

    blocks: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1] // self.blocks
        init = layers.truncated_normal_init(width**-0.5)
        kernel = self.param("kernel", init, (self.blocks, width, width)).astype(self.dtype)
        parts = x.astype(self.dtype).reshape(*x.shape[:-1], self.blocks, width)
        return jnp.einsum("...hk,hkl->...hl", parts, kernel).reshape(x.shape)


class HeadNorm(nn.Module):
    """LayerNorm of each head (..., H, K) with a gain for each channel; returns (..., H·K)."""

    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = wide(x)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        x = x.reshape(*x.shape[:-2], -1)
        return x * self.param("scale", nn.initializers.ones_init(), x.shape[-1:])


def init_forget_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """`FORGET_BIAS`, evenly spaced along the last axis."""
    del key
    return jnp.broadcast_to(jnp.linspace(*FORGET_BIAS, shape[-1], dtype=dtype), shape)


@dataclasses.dataclass(frozen=True)
class MLSTMConfig(StackConfig):
    """Options of the mLSTM: those of `StackConfig`, and

    Attributes:
      expand: channels inside the block per channel of the stream.
      num_heads: H; divides expand·hidden_size.
      conv_kernel: taps of the causal convolution before q and k.
      qkv_block: width of the blocks of the block-diagonal q, k and v maps.
      chunk_size: steps per chunk of the parallel form.
    """

    expand: int = 2
    num_heads: int = 4
    conv_kernel: int = 4
    qkv_block: int = 4
    chunk_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("expand", "num_heads", "conv_kernel", "qkv_block", "chunk_size"):
            self.require(name, getattr(self, name) >= 1, "a whole number >= 1")
        d = self.expand * self.hidden_size
        for name in ("num_heads", "qkv_block"):
            self.require(name, d % getattr(self, name) == 0, f"a divisor of the width {d}")


class MLSTMLayer(PlainBlock):
    """One mLSTM block: up, convolution, memory, norm of each head, skip, gate, down."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        d = c.expand * c.hidden_size
        self.norm = layers.RMSNorm(c.norm_eps)
        self.in_proj = layers.Linear(2 * d, dtype=dtype)
        self.conv1d = layers.ShortConv(c.conv_kernel, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj = (
            BlockLinear(d // c.qkv_block, dtype) for _ in range(3)
        )
        zeros = nn.initializers.zeros_init()
        self.i_gate = layers.Linear(c.num_heads, True, dtype, zeros, nn.initializers.normal(0.1))
        self.f_gate = layers.Linear(c.num_heads, True, dtype, zeros, init_forget_bias)
        self.head_norm = HeadNorm(c.norm_eps)
        self.skip = self.param("skip", nn.initializers.ones_init(), (d,))
        self.out_proj = layers.Linear(c.hidden_size, dtype=dtype)

    def init_cache(self, batch_size: int) -> PyTree:
        c = self.config
        d = c.expand * c.hidden_size
        k = d // c.num_heads
        memory = Memory.empty(batch_size, c.num_heads, k, k, state_dtype(self.dtype))
        conv = jnp.zeros((batch_size, c.conv_kernel - 1, d), self.dtype)
        return {"memory": memory, "conv": conv}

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        cache = cache or {}
        x, gate = jnp.split(self.in_proj(u), 2, axis=-1)
        window = cache.get("conv")
        conv = jax.nn.silu(self.conv1d(x, window))
        q, k, v = self.q_proj(conv), self.k_proj(conv), self.v_proj(x)
        qkv = jnp.concatenate([q, k, v], axis=-1)
        return {
            "q": q, "k": k, "v": v, "i": self.i_gate(qkv), "f": self.f_gate(qkv),
            "conv": conv, "gate": gate, "cache": cache, "window": layers.next_window(x, window),
        }  # fmt: skip

    def step(self, x: PyTree, z: Any) -> tuple[jax.Array, Memory]:
        """The cell's output (B, T, H, V) and its memory after the last token."""
        c = self.config
        q, k, v = (x[n].reshape(*x[n].shape[:2], c.num_heads, -1) for n in ("q", "k", "v"))
        memory = x["cache"].get("memory")
        return mlstm(q, k, v, x["i"], x["f"], memory, chunk_size=c.chunk_size)

    def next_cache(self, x: PyTree, z: tuple[jax.Array, Memory]) -> PyTree:
        return {"memory": z[1], "conv": x["window"]}

    def output(self, x: PyTree, z: tuple[jax.Array, Memory]) -> jax.Array:
        h = self.head_norm(z[0]).astype(self.dtype) + self.skip.astype(self.dtype) * x["conv"]
        return self.out_proj(h * jax.nn.silu(x["gate"]))


class MLSTM(Stack):
    """Sequence model of mLSTM blocks."""

    block = MLSTMLayer


@dataclasses.dataclass(frozen=True)
class SLSTMConfig(StackConfig):
    """Options of the sLSTM: those of `StackConfig`, and

    Attributes:
      num_heads: H; divides hidden_size. A cell hears only the cells of its own head.
      conv_kernel: taps of the causal convolution before the input and forget gates.
      ff_expansion: width of the gated GELU network behind the cell, per channel of the stream,
        rounded up to a multiple of 8.
    """

    num_heads: int = 4
    conv_kernel: int = 4
    ff_expansion: float = 4 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "conv_kernel"):
            self.require(name, getattr(self, name) >= 1, "a whole number >= 1")
        d = self.hidden_size
        self.require("num_heads", d % self.num_heads == 0, f"a divisor of hidden_size={d}")
        self.require("ff_expansion", self.ff_expansion > 0, "> 0")

    @property
    def ff_width(self) -> int:
        """Inner width of the network behind the cell."""
        return -(-round(self.ff_expansion * self.hidden_size) // 8) * 8


class SLSTMLayer(PlainBlock):
    """One sLSTM block: convolution, cell, norm of each head; then a gated GELU network."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        width = c.hidden_size // c.num_heads
        self.norm = layers.RMSNorm(c.norm_eps)
        self.conv1d = layers.ShortConv(c.conv_kernel, dtype=dtype)
        self.i_proj, self.f_proj, self.z_proj, self.o_proj = (
            BlockLinear(c.num_heads, dtype) for _ in range(4)
        )
        zeros = nn.initializers.zeros_init()
        shape = (c.num_heads, width)
        self.f_bias = self.param("f_bias", init_forget_bias, shape)
        self.i_bias, self.z_bias, self.o_bias = (
            self.param(f"{gate}_bias", zeros, shape) for gate in "izo"
        )
        self.recurrent = self.param("recurrent", zeros, (4, c.num_heads, width, width))
        self.head_norm = HeadNorm(c.norm_eps)
        self.ff_norm = layers.RMSNorm(c.norm_eps)
        self.ff_up = layers.Linear(2 * c.ff_width, dtype=dtype)
        self.ff_down = layers.Linear(c.hidden_size, dtype=dtype)

    def init_cache(self, batch_size: int) -> PyTree:
        c = self.config
        width = c.hidden_size // c.num_heads
        cell = Cell.empty(batch_size, c.num_heads, width, state_dtype(self.dtype))
        conv = jnp.zeros((batch_size, c.conv_kernel - 1, c.hidden_size), self.dtype)
        return {"cell": cell, "conv": conv}

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        cache = cache or {}
        window = cache.get("conv")
        conv = jax.nn.silu(self.conv1d(u, window))
        parts = self.i_proj(conv), self.f_proj(conv), self.z_proj(u), self.o_proj(u)
        biases = self.i_bias, self.f_bias, self.z_bias, self.o_bias
        shape = (*u.shape[:2], *self.f_bias.shape)
        gates = jnp.stack([wide(p).reshape(shape) + b for p, b in zip(parts, biases)], axis=2)
        return {"gates": gates, "cache": cache, "window": layers.next_window(u, window)}

    def step(self, x: PyTree, z: Any) -> tuple[jax.Array, Cell]:
        """The cell's output (B, T, H, K) and its state after the last token."""
        return slstm(x["gates"], self.recurrent, x["cache"].get("cell"))

    def next_cache(self, x: PyTree, z: tuple[jax.Array, Cell]) -> PyTree:
        return {"cell": z[1], "conv": x["window"]}

    def output(self, x: PyTree, z: tuple[jax.Array, Cell]) -> jax.Array:
        return self.head_norm(z[0])

    def readout(self, h: jax.Array, x: PyTree, z: PyTree) -> jax.Array:
        h = super().readout(h, x, z)
        gate, up = jnp.split(self.ff_up(self.ff_norm(h)), 2, axis=-1)
        return h + self.ff_down(jax.nn.gelu(gate) * up).astype(h.dtype)


class SLSTM(Stack):
    """Sequence model of sLSTM blocks."""

    block = SLSTMLayer
