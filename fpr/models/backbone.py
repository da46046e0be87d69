"""The stack around every recurrent model: embedding, n × (h + block(RMSNorm(h))), RMSNorm, head.

A model of this kind is a `Block` (what happens between the norm and the residual sum), its options
and one subclass of `Stack` that names the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import layers
from fpr.models import base

PyTree = Any


@dataclasses.dataclass(frozen=True)
class StackConfig:
    """Options that all recurrent models share.

    Attributes:
      vocab_size: V; token 0 is padding.
      seq_len: T of training; only `fpr.init` without a batch uses it.
      hidden_size: D, width of the stream between the layers.
      num_layers: number of blocks, each with its own parameters and its own solve.
      norm_eps: epsilon of every norm.
      dtype: compute type, float32 or bfloat16; iterates, parameters, norms and scans stay float32.
      solver, adjoint: see `base.make_solver` and `base.make_adjoint`.
    """

    vocab_size: int
    seq_len: int
    hidden_size: int = 512
    num_layers: int = 1
    norm_eps: float = 1e-5
    dtype: str = "float32"
    solver: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"preset": "fp_rnn"})
    adjoint: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"name": "one_step", "refine": True}
    )

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "hidden_size", "num_layers", "norm_eps"):
            self.require(name, getattr(self, name) > 0, "> 0")
        base.dtype_of(self.dtype)

    def require(self, name: str, ok: bool, allowed: str) -> None:
        """Raises ValueError naming the option's value and what is allowed, unless ok."""
        if not ok:
            raise ValueError(f"model.{name}={getattr(self, name)!r}, allowed: {allowed}")

    def require_choice(self, name: str, choices: tuple[str, ...]) -> None:
        """Raises ValueError with the nearest choice unless the option is one of them."""
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"model.{name}={value!r}{base.nearest(str(value), choices)}")


class Block(base.SequentialLayer):
    """A layer h + block(RMSNorm(h)). Subclasses set `self.norm` in `setup`.

    Attributes:
      config: the model's options.
      dtype: compute type.
    """

    config: Any
    dtype: Any = jnp.float32

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        """`inject` behind the norm: u (B, T, D) -> x."""
        raise TypeError(f"{type(self).__name__} does not define prepare")

    def output(self, x: PyTree, z: PyTree) -> jax.Array:
        """What the block adds to the stream, (B, T, D)."""
        raise TypeError(f"{type(self).__name__} does not define output")

    def inject(self, h: jax.Array, cache: PyTree = None) -> PyTree:
        return self.prepare(self.norm(h), cache)

    def readout(self, h: jax.Array, x: PyTree, z: PyTree) -> jax.Array:
        return h + self.output(x, z).astype(h.dtype)


class PlainBlock(Block):
    """A block without a loop: `step` maps what `prepare` gives to what `output` reads."""

    loop = False

    def init_state(self, x: PyTree, key: jax.Array | None) -> tuple[()]:
        return ()


class Stack(base.Model):
    """Embedding, `config.num_layers` blocks of class `block`, RMSNorm and a head without bias."""

    block: ClassVar[type[Block]]

    def setup(self) -> None:
        c = self.config
        dtype = base.dtype_of(c.dtype)
        # Each block normalises its input, so a small embedding would only move fast under Adam:
        # FP-Mamba at learning rate 1e-3 had 0.91 of S3's sequences of length 16 right after 1500
        # steps with a deviation of 1, and 0.24 with 0.02 (measured, one seed each).
        init = nn.initializers.normal(1.0)
        self.embedding = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=init)
        self.layers = [self.block(c, dtype, name=f"layer_{i}") for i in range(c.num_layers)]
        self.final_norm = layers.RMSNorm(c.norm_eps)
        self.lm_head = layers.Linear(c.vocab_size, dtype=dtype)

    def embed(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return self.embedding(batch["tokens"])

    def head(self, h: jax.Array) -> tuple[jax.Array, None]:
        return self.lm_head(self.final_norm(h)).astype(jnp.float32), None


def shift(y: jax.Array, before: jax.Array | None = None) -> jax.Array:
    """shift(y)[t] = y[t-1] along axis 1; at t = 0 `before` (B, ...), or zero."""
    if before is None:
        return jnp.pad(y[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (y.ndim - 2))
    return jnp.concatenate([before[:, None].astype(y.dtype), y[:, :-1]], axis=1)


def state_dtype(dtype: Any) -> Any:
    """Type of a state that is carried over time, for the compute type `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """x in float32, or in float64 if it already is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
