"""TRM, the Tiny Recursive Model: one small network refines a latent state and an answer in turns.

Spec 2 section 4. States z_H (read by the head) and z_L; one application of f is one segment of deep
supervision: `h_cycles` × { `l_cycles` × z_L ← net(z_L; z_H + x); then z_H ← net(z_H; z_L) }.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fpr import layers
from fpr.models import base
from fpr.models.fprm import FPRM, FPRMConfig, FPRMLayer
from fpr.models.transformer import fixed_loops

PyTree = Any
States = dict[str, Any]  # {"H": (B, T, D), "L": one (B, T, D) for each low level}
Net = Callable[[jax.Array, jax.Array], jax.Array]  # (x, z) -> z


@dataclasses.dataclass(frozen=True)
class TRMConfig(FPRMConfig):
    """Options of TRM: those of `FPRMConfig`, which describe its network, and

    Attributes:
      h_cycles: updates of z_H in one segment.
      l_cycles: updates of every low state before each update of z_H.
      num_levels: low states. 1 is TRM. 0 is the single-state variant, whose z is updated
        l_cycles + 1 times a cycle (the same depth). n > 1 is the n-level hierarchy: each low state
        in turn sees x + z_H and the sum of the others, z_H sees the sum of all; with l_cycles=1
        and n=6 it is as deep as TRM.
      gradient: what of a segment is differentiated: "cycle" the last cycle (TRM), "step" the last
        update of each state (HRM's one-step gradient), "all" everything.

    The +convolution variant is `conv="conv1d"`. The starts of the states are vectors of standard
    deviation `z0_std`, held with the parameters but without a gradient, and broadcast over tokens
    (z0="fixed"); z0="random" redraws all tokens for each sample. The default solver runs one
    segment in training (the carry brings the state of the last one) and 16 in evaluation.
    """

    norm_type: str = "post"
    residual_scale: str = "none"
    z0: str = "fixed"
    z0_std: float = 1.0
    h_cycles: int = 3
    l_cycles: int = 6
    num_levels: int = 1
    gradient: str = "cycle"
    solver: Mapping[str, Any] = dataclasses.field(default_factory=lambda: fixed_loops(1, 16))
    adjoint: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "unrolled"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("h_cycles", 1), ("l_cycles", 1), ("num_levels", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"model.{name}={getattr(self, name)!r}, allowed: >= {least}")
        if self.dropout:
            raise ValueError(
                f"model.dropout={self.dropout!r}, allowed: 0 (the recursion has no dropout)"
            )
        if self.base == "fp_rnn":
            raise ValueError(
                "model.base='fp_rnn' carries iterates of its own, which the recursion over z_H and "
                "z_L does not; allowed: cnn, mamba, mlp_mixer, transformer"
            )
        if self.gradient not in ("cycle", "step", "all"):
            choices = ("cycle", "step", "all")
            raise ValueError(
                f"model.gradient={self.gradient!r}{base.nearest(self.gradient, choices)}"
            )

    @property
    def calls_per_cycle(self) -> int:
        """Applications of a network in one cycle."""
        return self.l_cycles * max(self.num_levels, 1) + 1

    @property
    def layers_per_step(self) -> int:
        """Blocks that one segment runs in sequence."""
        return self.h_cycles * self.calls_per_cycle * self.num_layers


class TRMLayer(base.Layer):
    """The recursion; f is one segment. HRM is a subclass with two networks."""

    config: TRMConfig

    def setup(self) -> None:
        self.net = self._network()
        self.start = self._start()

    def _network(self) -> FPRMLayer:
        # The starts are the recursion's: a network holds none of its own.
        return FPRMLayer(dataclasses.replace(self.config, z0="random"))

    def _start(self) -> jax.Array:
        """Starts of z_H and of the low states, (1 + num_levels, D)."""
        c = self.config
        init = layers.truncated_normal_init(c.z0_std)
        return self.param("start", init, (1 + c.num_levels, c.hidden_size))

    def nets(self) -> tuple[FPRMLayer, FPRMLayer]:
        """The networks of the low states and of z_H."""
        return self.net, self.net

    def inject(self, h: jax.Array) -> jax.Array:
        return self.nets()[0].inject(h)

    def init_state(self, x: jax.Array, key: jax.Array | None) -> States:
        c = self.config
        if c.z0 == "random" and key is not None:
            keys = [base.fold_in(key, i) for i in range(1 + c.num_levels)]
            high, *lows = (self.nets()[0].init_state(x, k) for k in keys)
        else:
            start = jax.lax.stop_gradient(self.start).astype(jnp.float32)
            high, *lows = (jnp.broadcast_to(s, x.shape) for s in start)
        return {"H": high, "L": tuple(lows)}

    def step(self, x: jax.Array, z: States) -> States:
        # Cut off from z before and after, the cycles without gradient keep nothing for it.
        return self._segment(x, z, jax.lax.stop_gradient)

    def differentiable_step(self, x: jax.Array, z: States) -> States:
        return self._segment(x, z, lambda z: z)

    def _segment(self, x: jax.Array, z: States, cut: Callable[[States], States]) -> States:
        """f; `cut` is applied to the states on both sides of the cycles without gradient."""
        c = self.config
        if self.is_initializing():
            for net in self.nets():
                net.step(x, z["H"])
            return z
        functions, params = zip(*(base.as_function(net) for net in self.nets()))
        dtype = base.dtype_of(c.dtype)
        z = jax.tree.map(lambda a: a.astype(dtype), z)

        def updates(params: PyTree, x: jax.Array) -> Updates:
            low, high = (
                lambda x, z, f=f, p=p: f(p, x, z) for f, p in zip(functions, params, strict=True)
            )
            return Updates(low, high, x)

        live = updates(params, x)
        detached = updates(*jax.lax.stop_gradient((params, x)))

        def without_gradient(update: Callable[[States], States], z: States, n: int) -> States:
            return cut(repeat(update, cut(z), n))

        if c.gradient == "all":
            return repeat(lambda z: live.cycle(z, c.l_cycles), z, c.h_cycles)
        z = without_gradient(lambda z: detached.cycle(z, c.l_cycles), z, c.h_cycles - 1)
        if c.gradient == "step":
            z = without_gradient(detached.lows, z, c.l_cycles if not z["L"] else c.l_cycles - 1)
            return live.high(z if not z["L"] else live.lows(z))
        return live.cycle(z, c.l_cycles)

    def readout(self, h: jax.Array, x: jax.Array, z: States) -> jax.Array:
        return z["H"]


@dataclasses.dataclass(frozen=True)
class Updates:
    """The state updates that a cycle is made of.

    Attributes:
      low_net, high_net: (x, z) -> z.
      x: (B, T, D) embedded input.
    """

    low_net: Net
    high_net: Net
    x: jax.Array

    def lows(self, z: States) -> States:
        """Each low state once, in order; of a single state, one more application."""
        high, lows = z["H"], list(z["L"])
        if not lows:
            return {"H": self.low_net(self.x, high), "L": ()}
        for i, low in enumerate(lows):
            others = sum(lows[:i] + lows[i + 1 :])
            lows[i] = self.low_net(self.x + high + others, low)
        return {"H": high, "L": tuple(lows)}

    def high(self, z: States) -> States:
        """z_H once."""
        if not z["L"]:
            return self.lows(z)
        total = functools.reduce(jnp.add, z["L"])
        return {"H": self.high_net(total, z["H"]), "L": z["L"]}

    def cycle(self, z: States, l_cycles: int) -> States:
        """l_cycles updates of the low states, then one of z_H."""
        return self.high(repeat(self.lows, z, l_cycles))


def repeat(update: Callable[[States], States], z: States, times: int) -> States:
    """update^times(z), compiled once."""
    return jax.lax.scan(lambda z, _: (update(z), None), z, None, length=times)[0]


class TRM(FPRM):
    """Embedding (and registers), the recursion, a linear head on z_H and a Q head on position 0."""

    config: TRMConfig
    block: ClassVar[Any] = TRMLayer
