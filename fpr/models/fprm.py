"""FPRM, the fixed-point reasoning model: a small Transformer applied to its own output (spec 2).

z ← f(z; x) until nothing changes, answer = head(z). x is the embedded input; f mixes it in and runs
`num_layers` Transformer blocks, each with attention and SwiGLU, on scaled residuals (equation 2 and
3 of arXiv 2606.18206).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import layers
from fpr.models import base, bases

_CHOICES = {
    "norm_type": ("pre", "post", "peri"),
    "norm_placement": ("none", "input", "output"),
    "conv": ("none", "conv1d", "conv2d"),
    "residual_scale": ("none", "fixed", "input_independent", "input_dependent"),
    "z0": ("random", "fixed"),
}


@dataclasses.dataclass(frozen=True)
class FPRMConfig:
    """Options of FPRM; the names in brackets are those of spec 2 section 1.

    Attributes:
      vocab_size: V; token 0 is padding.
      seq_len: T of training (grid area for conv2d, exact length for mlp_t); a causal model without
        positions runs at any length.
      hidden_size: D.
      num_heads: divides hidden_size.
      num_layers: L blocks of attention and SwiGLU, so 2L sublayers.
      expansion: SwiGLU inner width = round(expansion·D·2/3) up to a multiple of 256.
      causal: causal or full attention.
      rope: rotary positions, or none.
      softmax_temp: divides the attention logits.
      mlp_t: an MLP over positions instead of attention.
      base: what mixes tokens, see `fpr.models.bases`: transformer (attention), mlp_mixer, cnn,
        mamba or fp_rnn. All but mlp_mixer can be causal; a recurrent base that is not causal reads
        forwards and backwards in every sublayer. rope, num_heads and softmax_temp are attention's.
      base_options: options of the base: {"kernel": 3} for cnn, fields of `MambaConfig` and
        `FPRNNConfig` for mamba and fp_rnn (their `expand` and `mixer_scale` are 1 by default).
      norm_type: pre, post (norm after the sum) or peri (before and on the sublayer's output).
      norm_placement: where f has one more RMSNorm: none, input, output.
      norm_eps: epsilon of every RMSNorm.
      conv: depthwise convolution on the non-register tokens of z: none, conv1d (causal), conv2d.
      conv_kernel: its number of taps (per side).
      conv_bias: whether it has a bias.
      residual_scale: none (all 1), fixed, input_independent (a logit per channel), input_dependent
        (linear + sigmoid of z after the convolution).
      outer_only: a1 = b1 = 1 and b2 = 1 - a2.
      alpha_1: initial a1 in (0, 1).
      alpha_2: initial a2 in (0, 1).
      normalize_input: RMSNorm on x [normalize_input_injection].
      num_registers: P register tokens in front.
      num_puzzles: rows of the per-puzzle embedding held by the registers; 0 has none.
      z0: "random": truncated normal redrawn for each sample from its key (one shared draw where
        no key is given); "fixed": always one vector for all samples and tokens, drawn once and
        held with the parameters, but without a gradient (with z0_std=0 it is 0, and not held).
      z0_std: its standard deviation.
      dropout: rate of variational dropout in training (where a key is given): a mask on the
        channels of each sublayer's output, one for each sample, the same for all tokens and all
        iterations of its solve.
      dtype: compute type, float32 or bfloat16; iterate, parameters and norms stay float32.
      solver, adjoint: see `base.make_solver` and `base.make_adjoint`.
    """

    vocab_size: int
    seq_len: int
    hidden_size: int = 512
    num_heads: int = 8
    num_layers: int = 2
    expansion: float = 4.0
    causal: bool = False
    rope: bool = True
    softmax_temp: float = 1.0
    mlp_t: bool = False
    base: str = "transformer"
    base_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norm_type: str = "pre"
    norm_placement: str = "none"
    norm_eps: float = 1e-5
    conv: str = "none"
    conv_kernel: int = 4
    conv_bias: bool = False
    residual_scale: str = "input_independent"
    outer_only: bool = False
    alpha_1: float = 0.75
    alpha_2: float = 0.25
    normalize_input: bool = False
    num_registers: int = 0
    num_puzzles: int = 0
    z0: str = "random"
    z0_std: float = 6.0
    dropout: float = 0.0
    dtype: str = "float32"
    solver: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"preset": "fprm"})
    adjoint: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "one_step"})

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"model.{name}={value!r}{base.nearest(value, allowed)}")
        positive = ("vocab_size", "seq_len", "hidden_size", "num_heads", "num_layers")
        for name in (*positive, "conv_kernel", "expansion", "softmax_temp", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}={getattr(self, name)!r}, allowed: > 0")
        for name in ("num_registers", "num_puzzles", "z0_std"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name}={getattr(self, name)!r}, allowed: >= 0")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} does not divide model.hidden_size="
                f"{self.hidden_size}"
            )
        if self.rope and (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"model.rope needs an even head width, got {self.hidden_size // self.num_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout!r}, allowed: 0 <= dropout < 1")
        for name in ("alpha_1", "alpha_2"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"model.{name}={getattr(self, name)!r}, allowed: 0 < alpha < 1")
        if self.conv == "conv2d" and math.isqrt(self.seq_len) ** 2 != self.seq_len:
            raise ValueError(
                f"model.conv='conv2d' needs a square grid, got model.seq_len={self.seq_len}, "
                f"nearest squares: {math.isqrt(self.seq_len) ** 2}, "
                f"{(math.isqrt(self.seq_len) + 1) ** 2}"
            )
        if self.mlp_t and self.causal:
            raise ValueError("model.mlp_t mixes all positions: it cannot be causal")
        if self.num_puzzles and not self.num_registers:
            raise ValueError(
                f"model.num_puzzles={self.num_puzzles} needs model.num_registers >= 1 to hold it"
            )
        base.dtype_of(self.dtype)
        bases.check(self)

    @property
    def layers_per_step(self) -> int:
        """Blocks that one application of f runs in sequence: effective layers per step."""
        return self.num_layers


def tied_scales(a1: Any, a2: Any, sublayers: int) -> tuple[Any, Any]:
    """b1, b2 tied to a1, a2 so that the loop stays bounded by its input (spec 2 section 1).

    b2 = 1 - a2 a1^{2L} and b1 = b2 (1 - a1) / (1 - a1^{2L} + 1e-5) for 2L sublayers.
    """
    power = a1**sublayers
    b2 = 1.0 - a2 * power
    return b2 * (1.0 - a1) / (1.0 - power + 1e-5), b2


class FPRMLayer(base.Layer):
    """The looped layer: f is `step`, with x the (registers and) embedded tokens."""

    config: FPRMConfig

    def setup(self) -> None:
        c = self.config
        dtype = base.dtype_of(c.dtype)
        self.conv: Any
        self.token_mixers: Any
        if c.conv == "conv1d":
            self.conv = layers.ShortConv(c.conv_kernel, c.conv_bias, dtype)
        elif c.conv == "conv2d":
            self.conv = layers.GridConv(c.conv_kernel, c.conv_bias, dtype)
        if c.mlp_t:
            self.token_mixers = [layers.SwiGLU(c.expansion, dtype) for _ in range(c.num_layers)]
        else:
            make_mixer = bases.BASES[c.base][1]
            self.token_mixers = [make_mixer(c) for _ in range(c.num_layers)]
        self.mlps = [layers.SwiGLU(c.expansion, dtype) for _ in range(c.num_layers)]
        if c.z0 == "fixed" and c.z0_std:
            init = layers.truncated_normal_init(c.z0_std)
            self.start = self.param("start", init, (c.hidden_size,))
        names = ("alpha_2",) if c.outer_only else ("alpha_1", "alpha_2")
        if c.residual_scale == "input_independent":
            for name in names:
                init = nn.initializers.constant(_logit(getattr(c, name)))
                setattr(self, name, self.param(name, init, (c.hidden_size,)))
        elif c.residual_scale == "input_dependent":
            for name in names:
                bias = nn.initializers.constant(_logit(getattr(c, name)))
                zeros = nn.initializers.zeros_init()
                setattr(self, name, layers.Linear(c.hidden_size, True, dtype, zeros, bias))

    def inject(self, h: jax.Array) -> jax.Array:
        return layers.rms_norm(h, self.config.norm_eps) if self.config.normalize_input else h

    def init_state(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        c = self.config
        if c.z0 == "fixed":
            start = jax.lax.stop_gradient(self.start) if c.z0_std else jnp.zeros(())
            return jnp.broadcast_to(start.astype(jnp.float32), x.shape)

        def draw(key: jax.Array) -> jax.Array:
            init = layers.truncated_normal_init(c.z0_std)
            return init(key, x.shape[1:], jnp.float32)

        if key is None:
            # The key of the one shared draw: part of the model, so that evaluation repeats.
            return jnp.broadcast_to(draw(jax.random.PRNGKey(0)), x.shape)
        return jax.vmap(draw)(base.sample_keys(key, x.shape[0]))

    def scales(self, z: jax.Array) -> tuple[Any, Any, Any, Any]:
        """(a1, b1, a2, b2) of equations 2 and 3: floats, (D,) or (B, T, D)."""
        c = self.config
        if c.residual_scale == "none":
            return 1.0, 1.0, 1.0, 1.0

        def alpha(name: str) -> Any:
            if c.residual_scale == "fixed":
                return getattr(c, name)
            logit = getattr(self, name)
            return jax.nn.sigmoid(logit(z) if c.residual_scale == "input_dependent" else logit)

        a2 = alpha("alpha_2")
        if c.outer_only:
            return 1.0, 1.0, a2, 1.0 - a2
        a1 = alpha("alpha_1")
        b1, b2 = tied_scales(a1, a2, 2 * c.num_layers)
        return a1, b1, a2, b2

    @property
    def dropout(self) -> float:
        return self.config.dropout

    def drop(self, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(x, masks (B, 2L, D)): 0 or 1/(1 - dropout) for each sublayer's channels."""
        shape, keep = (2 * self.config.num_layers, self.config.hidden_size), 1.0 - self.dropout
        masks = jax.vmap(lambda k: jax.random.bernoulli(k, keep, shape))(key)
        return x, masks / keep

    def step(self, x: Any, z: jax.Array) -> jax.Array:
        """f. x: (B, T, D), or what `drop` returns."""
        return self.update(x, z, self.token_mixers)

    def update(self, x: Any, z: jax.Array, token_mixers: Sequence[Any]) -> jax.Array:
        """f with the given maps (B, T, D) -> (B, T, D) in the place of attention."""
        c = self.config
        dtype = base.dtype_of(c.dtype)
        x, masks = x if isinstance(x, tuple) else (x, None)
        z, x = z.astype(dtype), x.astype(dtype)

        def norm(v: jax.Array, axis: int = -1) -> jax.Array:
            return layers.rms_norm(v, c.norm_eps, axis)

        if c.conv != "none":
            p = c.num_registers
            z = jnp.concatenate([z[:, :p], self.conv(z[:, p:])], axis=1) if p else self.conv(z)
        a1, b1, a2, b2 = (jnp.asarray(s, dtype) for s in self.scales(z))
        if c.norm_placement == "input":
            z = norm(z)
        z = a2 * z + b2 * x

        def sublayer(i: int, g: Any, z: jax.Array, axis: int = -1) -> jax.Array:
            out = g(z if c.norm_type == "post" else norm(z, axis))
            if c.norm_type == "peri":
                out = norm(out, axis)
            if masks is not None:
                out = out * masks[:, i, None].astype(dtype)
            z = a1 * z + b1 * out
            return norm(z, axis) if c.norm_type == "post" else z

        for i, (mixer, mlp) in enumerate(zip(token_mixers, self.mlps)):
            if c.mlp_t:
                # As released: this sublayer's norm, too, runs over each channel's positions.
                z = sublayer(
                    2 * i, lambda v, g=mixer: g(v.swapaxes(1, 2)).swapaxes(1, 2), z, axis=1
                )
            else:
                z = sublayer(2 * i, mixer, z)
            z = sublayer(2 * i + 1, mlp, z)
        return norm(z) if c.norm_placement == "output" else z

    def readout(self, h: jax.Array, x: jax.Array, z: jax.Array) -> jax.Array:
        return z


class InnerLoopLayer(FPRMLayer):
    """FPRM's loop around token mixers with fixed points of their own (`base="fp_rnn"`).

    The iterate is {"z": (B, T, D), "inner": each block's inner iterates}: one loop solves both.
    """

    def init_state(self, x: jax.Array, key: jax.Array | None) -> base.PyTree:
        inner = tuple(mixer.init_inner(x) for mixer in self.token_mixers)
        return {"z": super().init_state(x, key), "inner": inner}

    def step(self, x: Any, z: base.PyTree) -> base.PyTree:
        inner = []

        def advance(mixer: Any, y: base.PyTree) -> Any:
            def g(v: jax.Array) -> jax.Array:
                out, new = mixer(v, y)
                inner.append(new)
                return out

            return g

        mixers = [advance(m, y) for m, y in zip(self.token_mixers, z["inner"], strict=True)]
        return {"z": self.update(x, z["z"], mixers), "inner": tuple(inner)}

    def readout(self, h: jax.Array, x: jax.Array, z: base.PyTree) -> jax.Array:
        return z["z"]


class FPRM(base.Model):
    """Embedding (and registers), one `FPRMLayer`, a linear head and a Q head on position 0.

    The other reasoners are subclasses that name another `block`.
    """

    config: FPRMConfig
    block: ClassVar[Any] = FPRMLayer

    def setup(self) -> None:
        c = self.config
        self.embedding = self.param(
            "embedding",
            layers.truncated_normal_init(c.hidden_size**-0.5),
            (c.vocab_size, c.hidden_size),
        )
        if c.num_puzzles:
            self.puzzle_embedding = self.param(
                "puzzle_embedding", nn.initializers.zeros_init(), (c.num_puzzles, c.hidden_size)
            )
        # Only FPRM's own loop carries inner iterates; the other blocks refuse such a base.
        self.layers = [InnerLoopLayer(c) if c.base == "fp_rnn" else self.block(c)]
        dtype = base.dtype_of(c.dtype)
        self.lm_head = layers.Linear(c.vocab_size, dtype=dtype)
        zeros = nn.initializers.zeros_init()
        self.q_head = layers.Linear(
            2, True, kernel_init=zeros, bias_init=nn.initializers.constant(-5.0)
        )

    def embed(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        c = self.config
        tokens = batch["tokens"]
        _check_length(c, tokens.shape)
        h = self.embedding[tokens]
        if c.num_registers:
            registers = jnp.zeros((tokens.shape[0], c.num_registers, c.hidden_size))
            if c.num_puzzles:
                ids = batch.get("puzzle_ids", jnp.zeros((tokens.shape[0],), jnp.int32))
                registers = registers.at[:, 0].set(self.puzzle_embedding[ids])
            h = jnp.concatenate([registers, h], axis=1)
        return h * c.hidden_size**0.5

    def head(self, h: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits = self.lm_head(h[:, self.config.num_registers :]).astype(jnp.float32)
        return logits, self.q_head(h[:, 0])


def _check_length(config: FPRMConfig, shape: tuple[int, ...]) -> None:
    grid_cnn = config.base == "cnn" and not config.causal
    named = {
        "mlp_t": config.mlp_t,
        "conv2d": config.conv == "conv2d",
        f"base {config.base}": config.base == "mlp_mixer" or grid_cnn,
    }
    fixed = next((name for name, is_fixed in named.items() if is_fixed), None)
    if fixed and shape[1] != config.seq_len:
        raise ValueError(
            f"batch['tokens'] has length {shape[1]}, but {fixed} fixes it to model.seq_len="
            f"{config.seq_len}"
        )


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))
