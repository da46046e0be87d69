"""LSTM, the nonlinear recurrence that learns every group where linear ones fail (spec 1 section 7).

The cell and its loop over time are Flax's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import layers
from fpr.models.backbone import PlainBlock, Stack, StackConfig

PyTree = Any


@dataclasses.dataclass(frozen=True)
class LSTMConfig(StackConfig):
    """Options of the LSTM: those of `StackConfig`, and

    Attributes:
      expand: cells per channel of the stream.
    """

    expand: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("expand", self.expand >= 1, "a whole number >= 1")


class LSTMLayer(PlainBlock):
    """One LSTM over time and a projection back to the stream."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        self.norm = layers.RMSNorm(c.norm_eps)
        self.lstm = nn.RNN(
            nn.OptimizedLSTMCell(c.expand * c.hidden_size, dtype=dtype), return_carry=True
        )
        self.out_proj = layers.Linear(c.hidden_size, dtype=dtype)

    def init_cache(self, batch_size: int) -> PyTree:
        """c and h, (B, cells)."""
        zeros = jnp.zeros((batch_size, self.config.expand * self.config.hidden_size))
        return zeros, zeros

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        return {"cache": cache, "u": u}

    def step(self, x: PyTree, z: Any) -> PyTree:
        """(c, h) after the last token, and h at all tokens (B, T, cells)."""
        return self.lstm(x["u"], initial_carry=x["cache"])

    def next_cache(self, x: PyTree, z: PyTree) -> PyTree:
        return z[0]

    def output(self, x: PyTree, z: PyTree) -> jax.Array:
        return self.out_proj(z[1])


class LSTM(Stack):
    """Sequence model of LSTM layers."""

    block = LSTMLayer
