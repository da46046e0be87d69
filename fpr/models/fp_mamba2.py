"""FP-Mamba-2: channel mixing inside a fixed point around the Mamba-2 scan, one decay per head.

The iterate is the normalised output y (B, T, d) (spec 1 section 3, arXiv 2503.10799).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import layers
from fpr.mixers import NormedLinear
from fpr.models.backbone import Stack, shift, state_dtype, wide
from fpr.models.fp_mamba import SelectiveBlock, SelectiveConfig, init_dt_bias
from fpr.ssd import ssd

PyTree = Any
RATE_RANGE = (1.0, 16.0)  # -A at initialisation (Mamba-2).


@dataclasses.dataclass(frozen=True)
class FPMamba2Config(SelectiveConfig):
    """Options of FP-Mamba-2: those of `SelectiveConfig`, and

    Attributes:
      head_dim: channels per head; divides expand · hidden_size.
      num_groups: groups of heads that share b and c; divides the number of heads.
      chunk_size: steps per chunk of the scan.
    """

    state_size: int = 128
    head_dim: int = 64
    num_groups: int = 1
    chunk_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("chunk_size", self.chunk_size >= 1, "a whole number >= 1")
        d = self.inner_size
        ok = self.head_dim >= 1 and d % self.head_dim == 0
        self.require("head_dim", ok, f"a divisor of expand·hidden_size={d}")
        ok = self.num_groups >= 1 and self.num_heads % self.num_groups == 0
        self.require("num_groups", ok, f"a divisor of the number of heads {self.num_heads}")

    @property
    def num_heads(self) -> int:
        """Heads of the scan."""
        return self.inner_size // self.head_dim


def init_rate(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """log of U(1, 16): -A per head."""
    return jnp.log(jax.random.uniform(key, shape, dtype, *RATE_RANGE))


class FPMamba2Layer(SelectiveBlock):
    """One FP-Mamba-2 layer; the iterate is y (B, T, d)."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        d, heads = c.inner_size, c.num_heads
        bc = c.num_groups * c.state_size
        self.setup_shared(bc)
        self.in_proj = layers.Linear(2 * d + 2 * bc + heads, dtype=dtype)
        if c.conv:
            self.conv1d = layers.ShortConv(c.conv_kernel, dtype=dtype)
        self.dt_bias = self.param("dt_bias", init_dt_bias, (heads,))
        self.a_log = self.param("A_log", init_rate, (heads,))
        self.skip = self.param("D", nn.initializers.ones_init(), (heads,))
        if "lambda" in c.hidden_dependence:
            self.dt_y_proj = NormedLinear(heads, c.weight_norm)
        self.out_norm = layers.RMSNorm(c.norm_eps)

    def init_cache(self, batch_size: int) -> PyTree:
        c = self.config
        shape = (batch_size, c.num_heads, c.head_dim, c.state_size)
        bc = c.num_groups * c.state_size
        return self.make_cache(jnp.zeros(shape, state_dtype(self.dtype)), c.inner_size + 2 * bc)

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        c, cache = self.config, cache or {}
        d, bc = c.inner_size, c.num_groups * c.state_size
        z, x, dt = jnp.split(self.in_proj(u), (d, 2 * d + 2 * bc), axis=-1)
        window = cache.get("conv")
        next_window = layers.next_window(x, window)
        if c.conv:
            x = jax.nn.silu(self.conv1d(x, window))
        x, b, out = jnp.split(x, (d, d + bc), axis=-1)
        b, out = (v.reshape(*v.shape[:2], c.num_groups, c.state_size) for v in (b, out))
        depends = c.hidden_dependence
        return {
            "cache": cache,
            "window": next_window,
            "x": x,
            "gate": z,
            "delta": dt if "lambda" in depends else self.step_size(dt),
            "b": b if "b" in depends else self.normalize(b),
            "c": out if "c" in depends else self.normalize(out),
            "mixer": self.prepare_mixer(x),
        }

    def step_size(self, raw: jax.Array) -> jax.Array:
        """Δ (B, T, H)."""
        return jax.nn.softplus(wide(raw) + self.dt_bias)

    def scan(self, x: PyTree, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        c, cache = self.config, x["cache"]
        y = z.astype(self.dtype)
        before = shift(y, cache.get("y"))
        mixed = self.mix_channels(x, y, before)
        delta = x["delta"]
        if "lambda" in c.hidden_dependence:
            delta = self.step_size(delta + self.dt_y_proj(before))
        b, out = self.selected(x, before)
        heads = mixed.reshape(*y.shape[:2], c.num_heads, c.head_dim)
        a = -jnp.exp(self.a_log)
        scanned, last = ssd(
            heads, delta, a, b, out, self.skip, h0=cache.get("h"), chunk=c.chunk_size
        )
        out = self.out_norm(wide(scanned.reshape(y.shape)) * jax.nn.silu(wide(x["gate"])))
        return out, last


class FPMamba2(Stack):
    """Sequence model of FP-Mamba-2 layers."""

    block = FPMamba2Layer
