"""FP-RNN: a dense linear RNN with a vector state, found as the fixed point of a diagonal one.

Each iteration mixes the channels with a structured Q and runs one diagonal scan over time
(spec 1 sections 1 and 3, arXiv 2503.10799 equation 7).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fpr import layers
from fpr.mixers import ACTIVATIONS, MIXERS, ChannelMixer, Factors, Mixer, MixerOptions
from fpr.models.backbone import Block, Stack, StackConfig, shift, state_dtype, wide
from fpr.scan import linear_scan

PyTree = Any
MIXER_ARGS = ("concat", "symmetric", "x")


@dataclasses.dataclass(frozen=True)
class MixerConfig(StackConfig):
    """Options of every model with a channel mixer inside its fixed point.

    Attributes:
      expand: channels inside the block per channel of the stream.
      mixer: a name of `fpr.mixers.MIXERS`.
      mixer_rank: rank, block size or number of mixers, see `fpr.mixers.MixerOptions`.
      mixer_scale: 2 (released code, may not contract) or 1 (paper).
      mixer_arg: what generates Q: "concat" is [x, shift(y)], "symmetric" x + shift(y), "x" has no
        dependence on the iterate.
      act: activation of the mixer's generated vectors.
      proj_rank: width of a low-rank generator; 0 is one full map.
      spectral: divide Kronecker factors by their spectral norm.
      weight_norm: weight-normalised generators.
    """

    expand: int = 2
    mixer: str = "householder"
    mixer_rank: int = 1
    mixer_scale: float = 2.0
    mixer_arg: str = "concat"
    act: str = "silu"
    proj_rank: int = 0
    spectral: bool = False
    weight_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("expand", self.expand >= 1, "a whole number >= 1")
        self.require_choice("mixer", tuple(MIXERS))
        self.require_choice("mixer_arg", MIXER_ARGS)
        self.require_choice("act", tuple(ACTIVATIONS))
        self.channel_mixer()

    @property
    def inner_size(self) -> int:
        """d, the channels inside the block."""
        return self.expand * self.hidden_size

    @property
    def mixer_form(self) -> str:
        """The argument form in force; models with a finer choice of dependence override it."""
        return self.mixer_arg

    def channel_mixer(self) -> ChannelMixer:
        """The mixer, its sizes checked."""
        options = MixerOptions(
            self.mixer, self.mixer_rank, self.mixer_scale, self.act,
            self.proj_rank or None, self.spectral, self.weight_norm,
        )  # fmt: skip
        d = self.inner_size
        return ChannelMixer(options, 2 * d if self.mixer_form == "concat" else d, d)


class MixerBlock(Block):
    """A block whose Q is generated from an input part, once, and from shift(y), each iteration."""

    def make_mixer(self) -> Mixer:
        """The submodule that holds the mixer's parameters."""
        return Mixer(self.config.channel_mixer())

    def prepare_mixer(self, x: jax.Array) -> PyTree:
        """The part of Q's generation that depends on x (B, T, d) alone."""
        projected = self.mixer.project(x)
        if self.config.mixer_form == "x" and self.mixer.channel.selective:
            return self.mixer.factors(projected)
        return projected

    def mixer_factors(self, prepared: PyTree, y_shifted: jax.Array) -> Factors:
        """Factors of Q for the shifted iterate (B, T, d) in the compute type."""
        form = self.config.mixer_form
        if form == "x":
            return prepared if self.mixer.channel.selective else self.mixer.factors(prepared)
        start = self.config.inner_size if form == "concat" else 0
        return self.mixer.factors(
            jax.tree.map(jnp.add, prepared, self.mixer.project(y_shifted, start))
        )


@dataclasses.dataclass(frozen=True)
class FPRNNConfig(MixerConfig):
    """Options of FP-RNN: those of `MixerConfig` and `StackConfig`, and

    Attributes:
      conv: causal depthwise convolutions with SiLU, one each for x, mixer, b, λ and c.
      conv_kernel: taps of each.
    """

    conv: bool = True
    conv_kernel: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("conv_kernel", self.conv_kernel >= 1, "a whole number >= 1")


class FPRNNLayer(MixerBlock):
    """One FP-RNN layer; the iterate is the hidden state h (B, T, d)."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        d = c.inner_size
        self.norm = layers.RMSNorm(c.norm_eps)
        self.in_proj = layers.Linear(2 * d, dtype=dtype)
        if c.conv:
            self.conv_x = layers.ShortConv(c.conv_kernel, dtype=dtype)
            self.conv_mixer = layers.ShortConv(c.conv_kernel, dtype=dtype)
            self.conv_b = layers.ShortConv(c.conv_kernel, dtype=dtype)
            self.conv_lambda = layers.ShortConv(c.conv_kernel, dtype=dtype)
            self.conv_c = layers.ShortConv(c.conv_kernel, dtype=dtype)
        self.lambda_proj = layers.Linear(d, use_bias=True, dtype=dtype)
        self.b_proj = layers.Linear(d, dtype=dtype)
        self.c_proj = layers.Linear(d, dtype=dtype)
        self.mixer = self.make_mixer()
        self.out_norm = layers.RMSNorm(c.norm_eps)
        self.out_proj = layers.Linear(c.hidden_size, dtype=dtype)

    def init_cache(self, batch_size: int) -> PyTree:
        """h (B, d), and with convolutions the last inputs of those before and after the loop."""
        c, dtype = self.config, self.dtype
        cache = {"h": jnp.zeros((batch_size, c.inner_size), state_dtype(dtype))}
        if c.conv:
            taps = c.conv_kernel - 1
            cache["conv"] = jnp.zeros((batch_size, taps, c.inner_size), dtype)
            cache["conv_c"] = jnp.zeros((batch_size, taps, 2 * c.inner_size), dtype)
        return cache

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        cache = cache or {}
        x, z = jnp.split(self.in_proj(u), 2, axis=-1)
        window = cache.get("conv")
        next_window = layers.next_window(x, window)
        x_mixer = x_b = x_lambda = x
        if self.config.conv:
            x_mixer, x_b, x_lambda, x = (
                jax.nn.silu(conv(x, window))
                for conv in (self.conv_mixer, self.conv_b, self.conv_lambda, self.conv_x)
            )
        return {
            "cache": cache,
            "window": next_window,
            "x": x,
            "z": z,
            "bx": jax.nn.silu(self.b_proj(x_b)) * x,
            "lambda": jax.nn.sigmoid(wide(self.lambda_proj(x_lambda))),
            "mixer": self.prepare_mixer(x_mixer),
        }

    def init_state(self, x: PyTree, key: jax.Array | None) -> jax.Array:
        return jnp.zeros_like(wide(x["bx"]))

    def step(self, x: PyTree, z: jax.Array) -> jax.Array:
        y = z.astype(self.dtype)
        before = x["cache"].get("h")
        q = self.mixer_factors(x["mixer"], shift(y, before))
        mixed = self.mixer.transform(q, x["bx"] - y) + y
        decay = x["lambda"]
        return linear_scan(decay, (1.0 - decay) * mixed, before)[0]

    def next_cache(self, x: PyTree, z: jax.Array) -> PyTree:
        cache: dict[str, Any] = {"h": z[:, -1]}
        if self.config.conv:
            xy = jnp.concatenate([x["x"], z.astype(self.dtype)], axis=-1)
            cache["conv"] = x["window"]
            cache["conv_c"] = layers.next_window(xy, x["cache"]["conv_c"])
        return cache

    def output(self, x: PyTree, z: jax.Array) -> jax.Array:
        y = z.astype(self.dtype)
        if self.config.conv:
            xy = jnp.concatenate([x["x"], y], axis=-1)
            c = jax.nn.silu(self.conv_c(xy, x["cache"].get("conv_c")))
        else:
            c = jnp.concatenate([x["x"], shift(y, x["cache"].get("h"))], axis=-1)
        gated = jax.nn.silu(x["z"]) * jax.nn.silu(self.c_proj(c)) * y
        return self.out_proj(self.out_norm(gated))


class FPRNN(Stack):
    """Sequence model of FP-RNN layers."""

    block = FPRNNLayer
