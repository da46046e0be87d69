"""What stands in the place of attention in FPRM's loop: the token mixers of `FPRMConfig.base`.

The paper tries attention only and names convolutions, MLPs and state-space models as untried. Each
base here is a g of equation 2: FPRM adds residual scaling, norms, SwiGLU sublayers and the solver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import layers
from fpr.models import base
from fpr.models.backbone import StackConfig
from fpr.models.fp_rnn import FPRNNConfig, FPRNNLayer
from fpr.models.mamba import MambaConfig, MambaLayer


class TokenMLP(nn.Module):
    """A SwiGLU over the positions of each channel (MLP-Mixer): (B, T, D), T fixed by its weights.

    FPRM's `mlp_t` is this with the sublayer's norm over positions, as released; here the norm is
    over channels, as in MLP-Mixer.
    """

    expansion: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = layers.SwiGLU(self.expansion, self.dtype, name="mlp")(x.swapaxes(1, 2))
        return mixed.swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class CNNConfig:
    """Options of the CNN base.

    Attributes:
      kernel: taps of each depthwise convolution (per side on a grid).
    """

    kernel: int = 3

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ValueError(f"model.base_options.kernel={self.kernel!r}, allowed: >= 2")


class GatedConv(nn.Module):
    """(SiLU(gate) ⊙ conv(value)) W_out with a depthwise convolution: over time if causal, else 2-D.

    One application sees kernel // 2 cells each way (2-D); the loop carries information further.
    """

    kernel: int
    causal: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d = x.shape[-1]
        form = layers.ShortConv if self.causal else layers.GridConv
        projected = layers.Linear(2 * d, dtype=self.dtype, name="in_proj")(x)
        gate, value = jnp.split(projected, 2, axis=-1)
        value = form(self.kernel, dtype=self.dtype, name="conv")(value)
        out = layers.Linear(d, dtype=self.dtype, name="out_proj")
        return out(jax.nn.silu(gate) * value)


def flip(x: jax.Array) -> jax.Array:
    """x with its time axis (1) reversed."""
    return jnp.flip(x, axis=1)


class Readers(nn.Module):
    """Recurrent layers that mix tokens: one reads forwards and, unless causal, one backwards.

    Their outputs are added, so that each position sees all others within one sublayer.

    Attributes:
      make: name -> recurrent layer (its norm and residual connection are not used).
      causal: forwards only.
    """

    make: Callable[[str], Any]
    causal: bool

    def setup(self) -> None:
        self.forwards = self.make("forwards")
        if not self.causal:
            self.backwards = self.make("backwards")


class BothWays(Readers):
    """Layers without a loop of their own: (B, T, D) -> (B, T, D)."""

    def __call__(self, u: jax.Array) -> jax.Array:
        out = self._read(self.forwards, u)
        return out if self.causal else out + flip(self._read(self.backwards, flip(u)))

    def _read(self, layer: Any, u: jax.Array) -> jax.Array:
        x = layer.prepare(u)
        return layer.output(x, layer.step(x, ()))


class BothWaysLooped(Readers):
    """Layers with a fixed point of their own, whose iterates the outer loop carries.

    One application of FPRM's f applies each inner f once, from the iterate of the last time; where
    the outer loop stands still, so do the inner ones, and they are solved.
    """

    def init_inner(self, u: jax.Array) -> tuple[jax.Array, ...]:
        """Zeros (B, T, d) for each direction: the inner iterates, in the direction's time order."""
        shape = (*u.shape[:2], self.forwards.config.inner_size)
        return (jnp.zeros(shape, jnp.float32),) * (1 if self.causal else 2)

    def __call__(
        self, u: jax.Array, inner: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out, first = self._advance(self.forwards, u, inner[0])
        if self.causal:
            return out, (first,)
        back, second = self._advance(self.backwards, flip(u), inner[1])
        return out + flip(back), (first, second)

    def _advance(self, layer: Any, u: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = layer.prepare(u)
        y = layer.step(x, y)
        return layer.output(x, y), y


def _recurrent_options(config: Any, cls: Any) -> Any:
    """Options of a recurrent base: those of its own model but for what FPRM decides."""
    for field in dataclasses.fields(StackConfig):
        if field.name in config.base_options:
            raise ValueError(
                f"unknown key {field.name!r} in model.base_options: with model.base="
                f"{config.base!r} it is set by the model; allowed: " + ", ".join(_own_fields(cls))
            )
    defaults: dict[str, Any] = {"expand": 1}
    if cls is FPRNNConfig:
        defaults["mixer_scale"] = 1.0  # Contracts; with 2 the joint loop need not converge.
    outer = {
        "vocab_size": config.vocab_size,
        "seq_len": config.seq_len,
        "hidden_size": config.hidden_size,
        "norm_eps": config.norm_eps,
        "dtype": config.dtype,
    }
    return base.parse_options(cls, defaults | dict(config.base_options) | outer, _WHERE)


def _own_fields(cls: Any) -> list[str]:
    shared = {field.name for field in dataclasses.fields(StackConfig)}
    return sorted({field.name for field in dataclasses.fields(cls)} - shared)


_WHERE = "model.base_options"


def _no_options(config: Any) -> None:
    if config.base_options:
        raise ValueError(
            f"model.base_options={dict(config.base_options)!r}, allowed with model.base="
            f"{config.base!r}: none"
        )


def _attention(config: Any) -> nn.Module:
    return layers.Attention(
        config.num_heads, config.causal, config.rope, config.softmax_temp,
        base.dtype_of(config.dtype),
    )  # fmt: skip


def _cnn(config: Any) -> nn.Module:
    options = base.parse_options(CNNConfig, config.base_options, _WHERE)
    return GatedConv(options.kernel, config.causal, base.dtype_of(config.dtype))


def _mamba(config: Any) -> nn.Module:
    options = _recurrent_options(config, MambaConfig)
    dtype = base.dtype_of(config.dtype)
    return BothWays(lambda name: MambaLayer(options, dtype, name=name), config.causal)


def _fp_rnn(config: Any) -> nn.Module:
    options = _recurrent_options(config, FPRNNConfig)
    dtype = base.dtype_of(config.dtype)
    return BothWaysLooped(lambda name: FPRNNLayer(options, dtype, name=name), config.causal)


def _token_mlp(config: Any) -> nn.Module:
    return TokenMLP(config.expansion, base.dtype_of(config.dtype))


# One line per base: name -> (checks its options, builds the token mixer of one block).
BASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], nn.Module]]] = {
    "cnn": (lambda c: base.parse_options(CNNConfig, c.base_options, _WHERE), _cnn),
    "fp_rnn": (lambda c: _recurrent_options(c, FPRNNConfig), _fp_rnn),
    "mamba": (lambda c: _recurrent_options(c, MambaConfig), _mamba),
    "mlp_mixer": (_no_options, _token_mlp),
    "transformer": (_no_options, _attention),
}


def check(config: Any) -> None:
    """Checks `base` and `base_options` of an FPRM config.

    Raises:
      ValueError: an unknown base or option, or options that a base cannot work with.
    """
    name = config.base
    if name not in BASES:
        raise ValueError(f"model.base={name!r}{base.nearest(str(name), BASES)}")
    if not isinstance(config.base_options, Mapping):
        raise ValueError(f"model.base_options={config.base_options!r}, allowed: a mapping")
    BASES[name][0](config)
    if name != "transformer" and config.mlp_t:
        raise ValueError(f"model.mlp_t replaces attention: with model.base={name!r} there is none")
    if name == "mlp_mixer" and config.causal:
        raise ValueError("model.base='mlp_mixer' mixes all positions: it cannot be causal")
    if name == "cnn" and not config.causal:
        if round(config.seq_len**0.5) ** 2 != config.seq_len:
            raise ValueError(
                f"model.base='cnn' needs a square grid or model.causal=True, got model.seq_len="
                f"{config.seq_len}"
            )
        if config.num_registers:
            raise ValueError(
                f"model.num_registers={config.num_registers}: a convolution over the grid does not "
                "reach registers; allowed with model.base='cnn': 0"
            )
