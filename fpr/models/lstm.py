"""LSTM, the nonlinear recurrence that learns every group where linear ones fail (spec 1 section 7).

The cell and its loop over time are Flax's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from fpr import layers
from fpr.models.backbone import PlainBlock, Stack, StackConfig


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
        self.lstm = nn.RNN(nn.OptimizedLSTMCell(c.expand * c.hidden_size, dtype=dtype))
        self.out_proj = layers.Linear(c.hidden_size, dtype=dtype)

    def prepare(self, u: jax.Array) -> jax.Array:
        return u

    def step(self, x: jax.Array, z: Any) -> jax.Array:
        h: Any = self.lstm(x)
        return h

    def output(self, x: jax.Array, z: jax.Array) -> jax.Array:
        return self.out_proj(z)


class LSTM(Stack):
    """Sequence model of LSTM layers."""

    block = LSTMLayer
