"""Mamba-2, whose state decays at one rate per head, so that it runs as matrix products in chunks.

Dao and Gu, arXiv 2405.21060; sizes and initial values as in FP-Mamba-2 (spec 1 section 3).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import layers
from fpr.models.backbone import PlainBlock, Stack, StackConfig, state_dtype, wide
from fpr.models.fp_mamba import init_dt_bias
from fpr.models.fp_mamba2 import init_rate
from fpr.ssd import ssd

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Mamba2Config(StackConfig):
    """Options of Mamba-2: those of `StackConfig`, and

    Attributes:
      expand: channels inside the block per channel of the stream.
      state_size: N.
      head_dim: channels per head; divides expand·hidden_size.
      num_groups: groups of heads that share b and c; divides the number of heads.
      conv: causal depthwise convolution with SiLU on x, b and c.
      conv_kernel: its taps.
      chunk_size: steps per chunk of the scan.
    """

    expand: int = 2
    state_size: int = 128
    head_dim: int = 64
    num_groups: int = 1
    conv: bool = True
    conv_kernel: int = 4
    chunk_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("expand", "state_size", "conv_kernel", "chunk_size"):
            self.require(name, getattr(self, name) >= 1, "a whole number >= 1")
        d = self.inner_size
        ok = self.head_dim >= 1 and d % self.head_dim == 0
        self.require("head_dim", ok, f"a divisor of expand·hidden_size={d}")
        ok = self.num_groups >= 1 and self.num_heads % self.num_groups == 0
        self.require("num_groups", ok, f"a divisor of the number of heads {self.num_heads}")

    @property
    def inner_size(self) -> int:
        """Channels inside the block."""
        return self.expand * self.hidden_size

    @property
    def num_heads(self) -> int:
        """Heads of the scan."""
        return self.inner_size // self.head_dim


class Mamba2Layer(PlainBlock):
    """One layer: h_t = exp(Δ_t a) h_{t-1} + Δ_t x_t b_tᵀ, y_t = h_t c_t + D x_t for each head."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        d, heads, groups = c.inner_size, c.num_heads, c.num_groups * c.state_size
        self.norm = layers.RMSNorm(c.norm_eps)
        self.in_proj = layers.Linear(2 * d + 2 * groups + heads, dtype=dtype)
        if c.conv:
            self.conv1d = layers.ShortConv(c.conv_kernel, dtype=dtype)
        self.dt_bias = self.param("dt_bias", init_dt_bias, (heads,))
        self.a_log = self.param("A_log", init_rate, (heads,))
        self.skip = self.param("D", nn.initializers.ones_init(), (heads,))
        self.out_norm = layers.RMSNorm(c.norm_eps)
        self.out_proj = layers.Linear(c.hidden_size, dtype=dtype)

    def init_cache(self, batch_size: int) -> PyTree:
        c = self.config
        shape = (batch_size, c.num_heads, c.head_dim, c.state_size)
        cache = {"h": jnp.zeros(shape, state_dtype(self.dtype))}
        if c.conv:
            width = c.inner_size + 2 * c.num_groups * c.state_size
            cache["conv"] = jnp.zeros((batch_size, c.conv_kernel - 1, width), self.dtype)
        return cache

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        c, cache = self.config, cache or {}
        b, t, _ = u.shape
        d, groups = c.inner_size, c.num_groups * c.state_size
        gate, mixed, dt = jnp.split(self.in_proj(u), (d, 2 * d + 2 * groups), axis=-1)
        window = cache.get("conv")
        next_window = layers.next_window(mixed, window)
        if c.conv:
            mixed = self.conv1d(mixed, window)
        x, b_in, c_out = jnp.split(jax.nn.silu(mixed), (d, d + groups), axis=-1)
        return {
            "cache": cache,
            "window": next_window,
            "x": x.reshape(b, t, c.num_heads, c.head_dim),
            "b": b_in.reshape(b, t, c.num_groups, c.state_size),
            "c": c_out.reshape(b, t, c.num_groups, c.state_size),
            "dt": jax.nn.softplus(wide(dt) + self.dt_bias),
            "gate": jax.nn.silu(gate),
        }

    def step(self, x: PyTree, z: Any) -> tuple[jax.Array, jax.Array]:
        """The scan's output (B, T, H, P) and the state after the last token."""
        return ssd(
            x["x"], x["dt"], -jnp.exp(self.a_log), x["b"], x["c"], self.skip,
            h0=x["cache"].get("h"), chunk=self.config.chunk_size,
        )  # fmt: skip

    def next_cache(self, x: PyTree, z: tuple[jax.Array, jax.Array]) -> PyTree:
        cache = {"h": z[1]}
        return cache | {"conv": x["window"]} if self.config.conv else cache

    def output(self, x: PyTree, z: tuple[jax.Array, jax.Array]) -> jax.Array:
        y = z[0].reshape(*z[0].shape[:2], -1) * x["gate"]
        return self.out_proj(self.out_norm(y))


class Mamba2(Stack):
    """Sequence model of Mamba-2 layers."""

    block = Mamba2Layer
