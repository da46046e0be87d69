"""DeltaNet, Gated DeltaNet and (Gated) DeltaProduct, chosen by three options (spec 1 section 5).

Yang et al., arXiv 2406.06484 and 2412.06464; Siems et al., arXiv 2502.10297.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fpr import layers
from fpr.delta import delta_rule
from fpr.mixers import l2_normalize
from fpr.models.backbone import PlainBlock, Stack, StackConfig, state_dtype, wide
from fpr.models.fp_mamba import init_dt_bias
from fpr.models.fp_mamba2 import init_rate

PyTree = Any


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig(StackConfig):
    """Options of the delta-rule models: those of `StackConfig`, and

    Attributes:
      num_heads: H.
      head_dim: K, width of keys and queries; 0 is hidden_size / num_heads.
      expand_v: width of values per width of keys.
      num_householder: delta-rule steps per token, each with keys, values and β of its own; 1 is
        DeltaNet, more is DeltaProduct.
      decay: a forget gate for each head, exp(-a softplus(Δ)) as in Mamba-2: Gated DeltaNet, Gated
        DeltaProduct.
      output_gate: multiply the normed output with SiLU of a projection.
      negative_eigenvalues: β in (0, 2) instead of (0, 1), so that I - β k kᵀ may reflect.
      conv: causal depthwise convolutions with SiLU on q, k and v.
      conv_kernel: their taps.
      chunk_size: steps per chunk of the parallel form.
    """

    num_heads: int = 4
    head_dim: int = 0
    expand_v: int = 1
    num_householder: int = 1
    decay: bool = False
    output_gate: bool = False
    negative_eigenvalues: bool = False
    conv: bool = True
    conv_kernel: int = 4
    chunk_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "expand_v", "num_householder", "conv_kernel", "chunk_size"):
            self.require(name, getattr(self, name) >= 1, "a whole number >= 1")
        self.require("head_dim", self.head_dim >= 0, "a whole number >= 0")
        if not self.head_dim:
            fits = self.hidden_size % self.num_heads == 0
            self.require("num_heads", fits, f"a divisor of hidden_size={self.hidden_size}")

    @property
    def key_width(self) -> int:
        """K of each head."""
        return self.head_dim or self.hidden_size // self.num_heads


class DeltaNetLayer(PlainBlock):
    """One layer: projections, convolutions, delta rule, norm of each head, gate, projection."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        steps, keys = c.num_householder, c.num_heads * c.key_width
        values = c.expand_v * keys
        self.norm = layers.RMSNorm(c.norm_eps)
        self.q_proj = layers.Linear(keys, dtype=dtype)
        self.k_proj = layers.Linear(steps * keys, dtype=dtype)
        self.v_proj = layers.Linear(steps * values, dtype=dtype)
        self.beta_proj = layers.Linear(steps * c.num_heads, dtype=dtype)
        if c.conv:
            self.q_conv, self.k_conv, self.v_conv = (
                layers.ShortConv(c.conv_kernel, False, dtype) for _ in range(3)
            )
        if c.decay:
            self.dt_proj = layers.Linear(c.num_heads, dtype=dtype)
            self.dt_bias = self.param("dt_bias", init_dt_bias, (c.num_heads,))
            self.a_log = self.param("A_log", init_rate, (c.num_heads,))
        if c.output_gate:
            self.gate_proj = layers.Linear(values, dtype=dtype)
        self.head_norm = layers.RMSNorm(c.norm_eps)
        self.out_proj = layers.Linear(c.hidden_size, dtype=dtype)

    def init_cache(self, batch_size: int) -> PyTree:
        """The state (B, H, K, V), and the last inputs of the convolutions of q, k and v."""
        c = self.config
        shape = (batch_size, c.num_heads, c.key_width, c.expand_v * c.key_width)
        cache = {"h": jnp.zeros(shape, state_dtype(self.dtype))}
        if c.conv:
            keys = c.num_heads * c.key_width
            widths = (keys, c.num_householder * keys, c.num_householder * c.expand_v * keys)
            taps = c.conv_kernel - 1
            for name, width in zip("qkv", widths):
                cache[name] = jnp.zeros((batch_size, taps, width), self.dtype)
        return cache

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        c, cache = self.config, cache or {}
        q, k, v = self.q_proj(u), self.k_proj(u), self.v_proj(u)
        past = [cache.get(name) for name in "qkv"]
        windows = {n: layers.next_window(a, w) for n, a, w in zip("qkv", (q, k, v), past)}
        if c.conv:
            convs = (self.q_conv, self.k_conv, self.v_conv)
            q, k, v = (conv(a, w) for conv, a, w in zip(convs, (q, k, v), past))
        q, k, v = (jax.nn.silu(a) for a in (q, k, v))
        beta = jax.nn.sigmoid(wide(self.beta_proj(u)))
        x = {
            "cache": cache, "windows": windows, "q": q, "k": k, "v": v,
            "beta": 2.0 * beta if c.negative_eigenvalues else beta,
        }  # fmt: skip
        if c.decay:
            step = jax.nn.softplus(wide(self.dt_proj(u)) + self.dt_bias)
            x["log_decay"] = -jnp.exp(self.a_log) * step
        if c.output_gate:
            x["gate"] = jax.nn.silu(self.gate_proj(u))
        return x

    def step(self, x: PyTree, z: Any) -> tuple[jax.Array, jax.Array]:
        """The output of the delta rule, (B, T, H, V), and the state after the last token."""
        c = self.config
        b, t = x["q"].shape[:2]
        factors = (c.num_householder, c.num_heads) if c.num_householder > 1 else (c.num_heads,)
        # Float32 keys: of length 1 + 2^-8, reflections with β near 2 would grow without bound.
        q = l2_normalize(wide(x["q"]).reshape(b, t, c.num_heads, -1))
        k = l2_normalize(wide(x["k"]).reshape(b, t, *factors, -1))
        v = x["v"].reshape(b, t, *factors, -1)
        beta = x["beta"].reshape(b, t, *factors)
        chunk = c.num_householder * c.chunk_size
        return delta_rule(q, k, v, beta, x.get("log_decay"), x["cache"].get("h"), chunk=chunk)

    def next_cache(self, x: PyTree, z: tuple[jax.Array, jax.Array]) -> PyTree:
        return {"h": z[1]} | (x["windows"] if self.config.conv else {})

    def output(self, x: PyTree, z: tuple[jax.Array, jax.Array]) -> jax.Array:
        out = self.head_norm(z[0])
        out = out.reshape(*out.shape[:2], -1)
        return self.out_proj(out * x["gate"] if self.config.output_gate else out)


class DeltaNet(Stack):
    """Sequence model of delta-rule layers."""

    block = DeltaNetLayer
