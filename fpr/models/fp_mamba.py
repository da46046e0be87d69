"""FP-Mamba-1: a selective state-space layer whose channels are mixed inside a fixed point.

v1 of the paper calls it Bedouin. The iterate is the contracted output y (B, T, d), never the matrix
state (B, T, d, N) (spec 1 section 3, arXiv 2503.10799).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fpr import layers
from fpr.mixers import NormedLinear, l2_normalize
from fpr.models.backbone import Stack, shift, state_dtype, wide
from fpr.models.fp_rnn import MixerBlock, MixerConfig
from fpr.scan import selective_scan

PyTree = Any
COMPONENTS = ("lambda", "Q", "b", "c")
DT_RANGE = (1e-3, 0.1)  # Step sizes at initialisation (Mamba).
LAMBDA_RANGE = (0.9, 0.999)  # v1: decays at initialisation,
LAMBDA_RATE = 8.0  # and its constant c.


@dataclasses.dataclass(frozen=True)
class SelectiveConfig(MixerConfig):
    """Options of the fixed-point state-space models: those of `MixerConfig`, and

    Attributes:
      state_size: N.
      hidden_dependence: which of lambda, Q, b, c depend on shift(y) (v1 table 1).
      glu_in_loop: no gate after the loop (language modelling). In FP-Mamba-1 the gate then
        multiplies inside the loop, before the norm; otherwise it depends on shift(y) as well.
      bc_norm: L2-normalise b and c over the state.
      conv: causal depthwise convolution with SiLU on the scan's inputs.
      conv_kernel: its taps.
    """

    state_size: int = 16
    hidden_dependence: tuple[str, ...] = ("Q", "b", "c")
    glu_in_loop: bool = False
    bc_norm: bool = True
    conv: bool = True
    conv_kernel: int = 4
    solver: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"preset": "fp_mamba"})

    def __post_init__(self) -> None:
        depends = self.hidden_dependence
        known = not isinstance(depends, str) and set(depends) <= set(COMPONENTS)
        self.require("hidden_dependence", known, f"any of {', '.join(COMPONENTS)}")
        super().__post_init__()
        self.require("state_size", self.state_size >= 1, "a whole number >= 1")
        self.require("conv_kernel", self.conv_kernel >= 1, "a whole number >= 1")
        if "Q" in depends and self.mixer_arg == "x":
            raise ValueError(
                "model.mixer_arg='x' makes Q independent of y: take 'Q' out of "
                f"model.hidden_dependence={depends!r}, or use concat or symmetric"
            )

    @property
    def mixer_form(self) -> str:
        return self.mixer_arg if "Q" in self.hidden_dependence else "x"


@dataclasses.dataclass(frozen=True)
class FPMambaConfig(SelectiveConfig):
    """Options of FP-Mamba-1: those of `SelectiveConfig`, and

    Attributes:
      dt_rank: rank of the step-size projection; 0 is ceil(hidden_size / 16).
      decay: "mamba" is exp(Δ A) with Δ a softplus; "v1" is exp(-8 softplus(ω) Δ) with Δ a sigmoid
        whose input weights start at 0.
    """

    dt_rank: int = 0
    decay: str = "mamba"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("dt_rank", self.dt_rank >= 0, "a whole number >= 0")
        self.require_choice("decay", ("mamba", "v1"))

    @property
    def step_rank(self) -> int:
        """Rank of the step-size projection."""
        return self.dt_rank or -(-self.hidden_size // 16)


def inverse_softplus(y: jax.Array) -> jax.Array:
    """x with log(1 + exp(x)) = y, for y > 0."""
    return y + jnp.log(-jnp.expm1(-y))


def init_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Biases whose softplus is log-uniform in `DT_RANGE`."""
    low, high = np.log(DT_RANGE)
    return inverse_softplus(jnp.exp(jax.random.uniform(key, shape, dtype, low, high)))


def init_omega(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """ω of v1: exp(-8 softplus(ω) / 2) uniform in `LAMBDA_RANGE` (Δ starts at 1/2)."""
    decay = jax.random.uniform(key, shape, dtype, *LAMBDA_RANGE)
    return inverse_softplus(-jnp.log(decay) / (0.5 * LAMBDA_RATE))


def init_a_log(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """log(1..N) in every channel."""
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=dtype)), shape)


class LayerNorm(nn.Module):
    """scale (x - mean) / sqrt(var + eps) + bias over the last axis, in at least float32."""

    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = wide(x)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        shape = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones_init(), shape)
        return x * scale + self.param("bias", nn.initializers.zeros_init(), shape)


class SelectiveBlock(MixerBlock):
    """What both state-space layers share: b and c, and the gate after the loop; the iterate is y.

    Subclasses call `setup_shared` in `setup`, and put "b", "c" (before normalisation where they
    depend on y) and "gate" into x.
    """

    def setup_shared(self, bc_size: int) -> None:
        """Submodules; bc_size is the width of b (and of c)."""
        c = self.config
        self.norm = layers.RMSNorm(c.norm_eps)
        self.bc_parts = tuple(part for part in ("b", "c") if part in c.hidden_dependence)
        if self.bc_parts:
            self.bc_y_proj = NormedLinear(bc_size * len(self.bc_parts), c.weight_norm)
        self.mixer = self.make_mixer()
        if not c.glu_in_loop:
            self.z_y_proj = NormedLinear(c.inner_size, c.weight_norm)
        self.out_proj = layers.Linear(c.hidden_size, dtype=self.dtype)

    def normalize(self, v: jax.Array) -> jax.Array:
        """b or c as the scan takes it."""
        return l2_normalize(v) if self.config.bc_norm else v

    def selected(self, x: PyTree, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        """b and c for the shifted iterate."""
        bc = {"b": x["b"], "c": x["c"]}
        if self.bc_parts:
            added = jnp.split(self.bc_y_proj(before), len(self.bc_parts), axis=-1)
            for part, value in zip(self.bc_parts, added):
                bc[part] = self.normalize(bc[part] + value.reshape(bc[part].shape))
        return bc["b"], bc["c"]

    def mix_channels(self, x: PyTree, y: jax.Array, before: jax.Array) -> jax.Array:
        """x̃ = Q (x - y) + y."""
        q = self.mixer_factors(x["mixer"], before)
        return self.mixer.transform(q, x["x"] - y) + y

    def init_state(self, x: PyTree, key: jax.Array | None) -> jax.Array:
        return jnp.zeros_like(wide(x["x"]))

    def scan(self, x: PyTree, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One application of f, and the matrix state after the last token."""
        raise TypeError(f"{type(self).__name__} does not define scan")

    def step(self, x: PyTree, z: jax.Array) -> jax.Array:
        return self.scan(x, z)[0]

    def make_cache(self, state: jax.Array, conv_size: int) -> PyTree:
        """The cache before the first token: its matrix state, y, and the convolution's inputs."""
        c, b = self.config, state.shape[0]
        cache = {"h": state, "y": jnp.zeros((b, c.inner_size), state.dtype)}
        if c.conv:
            cache["conv"] = jnp.zeros((b, c.conv_kernel - 1, conv_size), self.dtype)
        return cache

    def next_cache(self, x: PyTree, z: jax.Array) -> PyTree:
        # The solver keeps y only; one more application at the solution gives its matrix state.
        cache = {"h": self.scan(x, z)[1], "y": z[:, -1]}
        return cache | {"conv": x["window"]} if self.config.conv else cache

    def output(self, x: PyTree, z: jax.Array) -> jax.Array:
        y = z.astype(self.dtype)
        if not self.config.glu_in_loop:
            before = shift(y, x["cache"].get("y"))
            y = jax.nn.silu(x["gate"] + self.z_y_proj(before)) * y
        return self.out_proj(y)


class FPMambaLayer(SelectiveBlock):
    """One FP-Mamba-1 layer; the iterate is y (B, T, d)."""

    def setup(self) -> None:
        c, dtype = self.config, self.dtype
        d, n = c.inner_size, c.state_size
        self.setup_shared(n)
        self.in_proj = layers.Linear(2 * d, dtype=dtype)
        if c.conv:
            self.conv1d = layers.ShortConv(c.conv_kernel, dtype=dtype)
        self.x_proj = layers.Linear(c.step_rank + 2 * n, dtype=dtype)
        zeros = nn.initializers.zeros_init()
        v1 = c.decay == "v1"
        self.dt_proj = layers.Linear(
            d,
            use_bias=True,
            dtype=dtype,
            kernel_init=zeros if v1 else layers.fan_in_init,
            bias_init=zeros if v1 else init_dt_bias,
        )
        if v1:
            self.omega = self.param("omega", init_omega, (d, n))
        else:
            self.a_log = self.param("A_log", init_a_log, (d, n))
        self.skip = self.param("D", nn.initializers.ones_init(), (d,))
        if "lambda" in c.hidden_dependence:
            self.dt_y_proj = NormedLinear(c.step_rank, c.weight_norm)
        self.out_norm = LayerNorm(c.norm_eps)

    def init_cache(self, batch_size: int) -> PyTree:
        c = self.config
        shape = (batch_size, c.inner_size, c.state_size)
        return self.make_cache(jnp.zeros(shape, state_dtype(self.dtype)), c.inner_size)

    def prepare(self, u: jax.Array, cache: PyTree = None) -> PyTree:
        c, cache = self.config, cache or {}
        x, z = jnp.split(self.in_proj(u), 2, axis=-1)
        window = cache.get("conv")
        next_window = layers.next_window(x, window)
        if c.conv:
            x = jax.nn.silu(self.conv1d(x, window))
        ends = (c.step_rank, c.step_rank + c.state_size)
        low, b, out = jnp.split(self.x_proj(x), ends, axis=-1)
        depends = c.hidden_dependence
        return {
            "cache": cache,
            "window": next_window,
            "x": x,
            "gate": jax.nn.silu(z) if c.glu_in_loop else z,
            "delta": low if "lambda" in depends else self.step_size(low),
            "b": b if "b" in depends else self.normalize(b),
            "c": out if "c" in depends else self.normalize(out),
            "mixer": self.prepare_mixer(x),
        }

    def step_size(self, low: jax.Array) -> jax.Array:
        """Δ (B, T, d) from its low-rank projection."""
        raw = wide(self.dt_proj(low))
        return jax.nn.sigmoid(raw) if self.config.decay == "v1" else jax.nn.softplus(raw)

    def rate(self) -> jax.Array:
        """A (d, N), negative: the decay is exp(Δ A)."""
        if self.config.decay == "v1":
            return -LAMBDA_RATE * jax.nn.softplus(self.omega)
        return -jnp.exp(self.a_log)

    def scan(self, x: PyTree, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        c, cache = self.config, x["cache"]
        y = z.astype(self.dtype)
        before = shift(y, cache.get("y"))
        mixed = self.mix_channels(x, y, before)
        delta = x["delta"]
        if "lambda" in c.hidden_dependence:
            delta = self.step_size(delta + self.dt_y_proj(before))
        b, out = self.selected(x, before)
        out, last = selective_scan(mixed, delta, self.rate(), b, out, self.skip, h0=cache.get("h"))
        return self.out_norm(out * x["gate"] if c.glu_in_loop else out), last


class FPMamba(Stack):
    """Sequence model of FP-Mamba-1 layers."""

    block = FPMambaLayer
