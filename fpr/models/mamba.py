"""Mamba, the selective state-space model that FP-Mamba-1 puts inside a fixed point (spec 1).

Gu and Dao, arXiv 2312.00752; the maps are named and initialised as in `fpr.models.fp_mamba`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import layers
from fpr.models.backbone import PlainBlock, Stack, StackConfig, state_dtype
from fpr.models.fp_mamba import init_a_log, init_dt_bias
from fpr.scan import selective_scan

PyTree = Any


@dataclasses.dataclass(frozen=True)
class MambaConfig(StackConfig):
    """Options of Mamba: those of `StackConfig`, and

    Attributes:
      expand: channels inside the block per channel of the stream.
      state_size: N.
      dt_rank: rank of the step-size projection; 0 is ceil(hidden_size / 16).
      conv: causal depthwise convolution with SiLU on x.
      conv_kernel: its taps.
    """

    expand: int = 2
    state_size: int = 16
    dt_rank: int = 0
    conv: bool = True
    conv_kernel: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("expand", "state_size", "conv_kernel"):
            self.require(name, getattr(self, name) >= 1, "a whole number >= 1")
        self.require("dt_rank", self.dt_rank >= 0, "a whole number >= 0")

    @property
    def step_rank(self) -> int:
        """Rank of the step-size projection."""
        return self.dt_rank or -(-self.hidden_size // 16)


class MambaLayer(PlainBlock):
    """h_t = exp(Δ_t A) h_{t-1} + Δ_t b_t x_t, y_t = (c_t·h_t + D x_t) SiLU(z_t)."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        d, n = c.expand * c.hidden_size, c.state_size
        self.norm = layers.RMSNorm(c.norm_eps)
        self.in_proj = layers.Linear(2 * d, dtype=dtype)
        if c.conv:
            self.conv1d = layers.ShortConv(c.conv_kernel, dtype=dtype)
        self.x_proj = layers.Linear(c.step_rank + 2 * n, dtype=dtype)
        self.dt_proj = layers.Linear(d, dtype=dtype)
        self.dt_bias = self.param("dt_bias", init_dt_bias, (d,))
        self.a_log = self.param("A_log", init_a_log, (d, n))
        self.skip = self.param("D", nn.initializers.ones_init(), (d,))
        self.out_proj = layers.Linear(c.hidden_size, dtype=dtype)

    def init_cache(self, batch_size: int) -> PyTree:
        c = self.config
        d = c.expand * c.hidden_size
        cache = {"h": jnp.zeros((batch_size, d, c.state_size), state_dtype(self.dtype))}
        if c.conv:
            cache["conv"] = jnp.zeros((batch_size, c.conv_kernel - 1, d), self.dtype)
        return cache

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        c, cache = self.config, cache or {}
        x, z = jnp.split(self.in_proj(u), 2, axis=-1)
        window = cache.get("conv")
        next_window = layers.next_window(x, window)
        if c.conv:
            x = jax.nn.silu(self.conv1d(x, window))
        low, b, out = jnp.split(self.x_proj(x), (c.step_rank, c.step_rank + c.state_size), axis=-1)
        return {
            "cache": cache, "window": next_window,
            "x": x, "z": z, "delta": self.dt_proj(low), "b": b, "c": out,
        }  # fmt: skip

    def step(self, x: PyTree, z: Any) -> tuple[jax.Array, jax.Array]:
        """The scan's output (B, T, d) and the state after the last token."""
        return selective_scan(
            x["x"], x["delta"], -jnp.exp(self.a_log), x["b"], x["c"], self.skip, x["z"],
            x["cache"].get("h"), delta_bias=self.dt_bias, delta_softplus=True,
        )  # fmt: skip

    def next_cache(self, x: PyTree, z: tuple[jax.Array, jax.Array]) -> PyTree:
        cache = {"h": z[1]}
        return cache | {"conv": x["window"]} if self.config.conv else cache

    def output(self, x: PyTree, z: tuple[jax.Array, jax.Array]) -> jax.Array:
        return self.out_proj(z[0])


class Mamba(Stack):
    """Sequence model of Mamba layers."""

    block = MambaLayer
