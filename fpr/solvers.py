"""Iteration rules: how an iterate moves towards z = f(z), and when each sample stops.

A rule is a frozen dataclass (hashable, so it can be a static argument of `jax.jit`) with three pure
methods: `init` makes the state, `update` takes one application of f into it, `active` says which
samples go on. `run` is the one loop that all gradient rules share.

The residual of a sample (specs 1 and 2) is

    r = max over tokens of ‖f(z) - z‖_∞ / (‖f(z)‖_∞ + 1e-8)

with the norms over the last axis and the maximum over every axis between batch and last; for
pytrees also over the leaves.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any
StepFn = Callable[[PyTree], PyTree]

_EPS = 1e-8  # Both papers' codes: keeps the residual of an all-zero token finite.


class SolverState(NamedTuple):
    """Everything a solve carries from one iteration to the next; every leaf leads with batch B.

    Attributes:
      z: the iterate, a pytree of (B, ...).
      step_size: (B,) float32, the damping η.
      patience: (B,) int32, iterations left without a new best residual before η decays.
      residual: (B,) float32, residual measured in the latest iteration; inf before the first.
      best_residual: (B,) float32, smallest residual so far; inf before the first.
      best_z: the iterate at which `best_residual` was measured, or None unless `return_best`.
      steps: (B,) int32, applications of f that this sample took part in.
      halted: (B,) bool, the sample is frozen.
      failed: (B,) bool, f returned NaN or inf for this sample.
      key: (B, K) uint32, key data of the randomness that belongs to the sample's solve (noise,
        dropout masks), or None without any.
    """

    z: PyTree
    step_size: jax.Array
    patience: jax.Array
    residual: jax.Array
    best_residual: jax.Array
    best_z: PyTree
    steps: jax.Array
    halted: jax.Array
    failed: jax.Array
    key: jax.Array | None = None


class Measured(NamedTuple):
    """f(z) with its residual (B,), for a z that only stands for the iterate that is measured."""

    value: PyTree
    residual: jax.Array


def batch_size(tree: PyTree) -> int:
    """Length of the leading axis that all leaves of `tree` share.

    Raises:
      ValueError: no leaves, a leaf without axes, or leaves that disagree.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError(
            "fixed_point: z0 has no arrays; it must hold at least one of shape (B, ...)"
        )
    shapes = [jnp.shape(leaf) for leaf in leaves]
    if any(not shape for shape in shapes):
        raise ValueError(f"fixed_point: every leaf of z0 needs a leading batch axis, got {shapes}")
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"fixed_point: leaves of z0 disagree on the batch size, got {shapes}")
    return shapes[0][0]


def per_sample(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    """Reshapes a (B,) vector so that it broadcasts against a (B, ...) leaf."""
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - 1))


def select(mask: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Chooses whole samples: `mask` (B,), both trees with leaves (B, ...)."""
    return jax.tree.map(lambda a, b: jnp.where(per_sample(mask, a), a, b), on_true, on_false)


def residual(new: PyTree, old: PyTree) -> jax.Array:
    """Residual of each sample (B,), float32: the equation above with `new` = f(`old`).

    Computed in float32, in float64 for float64 iterates; inf where it is not a number.
    """

    def leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        if a.size == 0:
            raise ValueError(f"fixed_point: an iterate of shape {a.shape} has no elements")
        dtype = jnp.promote_types(a.dtype, jnp.float32)
        a, b = a.astype(dtype), b.astype(dtype)
        if a.ndim == 1:  # A scalar per sample is its own only channel.
            a, b = a[:, None], b[:, None]
        change = jnp.max(jnp.abs(a - b), axis=-1) / (jnp.max(jnp.abs(a), axis=-1) + _EPS)
        worst = jnp.max(change.reshape(a.shape[0], -1), axis=1).astype(jnp.float32)
        return jnp.where(jnp.isnan(worst), jnp.inf, worst)

    new, old = jax.lax.stop_gradient((new, old))
    leaves = [leaf(a, b) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old))]
    return jnp.max(jnp.stack(leaves), axis=0)


def finite(tree: PyTree) -> jax.Array:
    """(B,) bool: the sample holds neither NaN nor inf in any leaf."""
    flags = [jnp.isfinite(a).reshape(a.shape[0], -1).all(axis=1) for a in jax.tree.leaves(tree)]
    return jnp.stack(flags).all(axis=0)


@dataclasses.dataclass(frozen=True)
class Damped:
    """Damped iteration z ← η f(z) + (1-η) z with patience: the solver of both papers.

    η starts at `step_size`. After `patience` iterations in a row without a new best residual,
    η ← `decay`·η and the count starts again (spec 1 section 4; spec 2 section 2, FPOPT).

    Attributes:
      step_size: initial η in (0, 1].
      decay: factor on η in (0, 1]; 1 never decays.
      patience: iterations without a new best residual before a decay, at least 1.
      tolerance: τ; a sample has converged when its tested residual is below it.
      max_steps: cap on the applications of f in one call, at least 1.
      min_step_size: a sample whose η falls below this stops, not converged.
      halting: "sample": each sample stops by itself and is frozen; "batch": all run until the
        `stop_fraction` quantile of the tested residuals is below τ or every η is below
        `min_step_size`; "never": exactly `max_steps` iterations.
      stop_fraction: share of the batch, in (0, 1], that must have converged to stop a batch.
      residual: which residual is tested against τ: "current" or "best" (so far).
      return_best: the value is the iterate with the smallest measured residual instead of the last
        one. It is defined from the first iteration on (z0 is the first candidate), and its residual
        is the one that `Solution.residual` then reports.
      noise: standard deviation of normal noise added to the iterate after each move, fresh in
        every iteration (spec 2 section 2, off by default); needs the state to have a `key`.
    """

    step_size: float = 1.0
    decay: float = 0.9
    patience: int = 5
    tolerance: float = 0.1
    max_steps: int = 1000
    min_step_size: float = 1e-3
    halting: str = "sample"
    stop_fraction: float = 1.0
    residual: str = "current"
    return_best: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise ValueError(f"Damped: {name}={getattr(self, name)!r}, allowed: {allowed}")

        check("step_size", 0.0 < self.step_size <= 1.0, "0 < step_size <= 1")
        check("decay", 0.0 < self.decay <= 1.0, "0 < decay <= 1")
        check("patience", _whole(self.patience), "a whole number >= 1")
        check("tolerance", self.tolerance >= 0.0, "tolerance >= 0")
        check("max_steps", _whole(self.max_steps), "a whole number >= 1")
        check("max_steps", self.max_steps < 2**31, "a whole number below 2**31")
        check("min_step_size", self.min_step_size >= 0.0, "min_step_size >= 0")
        check("halting", self.halting in ("sample", "batch", "never"), "sample, batch, never")
        check("stop_fraction", 0.0 < self.stop_fraction <= 1.0, "0 < stop_fraction <= 1")
        check("noise", self.noise >= 0.0, "noise >= 0")
        check("residual", self.residual in ("current", "best"), "current, best")

    def init(self, z0: PyTree) -> SolverState:
        """State before the first iteration. `z0`: pytree of (B, ...)."""
        z0 = jax.tree.map(jnp.asarray, z0)
        b = batch_size(z0)
        return SolverState(
            z=z0,
            step_size=jnp.full((b,), self.step_size, jnp.float32),
            patience=jnp.full((b,), self.patience, jnp.int32),
            residual=jnp.full((b,), jnp.inf, jnp.float32),
            best_residual=jnp.full((b,), jnp.inf, jnp.float32),
            best_z=z0 if self.return_best else None,
            steps=jnp.zeros((b,), jnp.int32),
            halted=jnp.zeros((b,), bool),
            failed=jnp.zeros((b,), bool),
        )

    def update(self, state: SolverState, fz: PyTree, go: jax.Array | None = None) -> SolverState:
        """One iteration. `fz` = f(state.z), pytree of (B, ...); `go` (B,): who takes part.

        An `fz` of the type `Measured` brings its own residual.
        """
        live = ~state.halted if go is None else ~state.halted & go
        fz, measured = fz if isinstance(fz, Measured) else (fz, None)
        fz = jax.tree.map(lambda new, old: new.astype(old.dtype), fz, state.z)
        ok = finite(jax.lax.stop_gradient(fz))
        moved = live & ok
        r = residual(fz, state.z) if measured is None else measured
        r = jnp.where(ok, r, jnp.inf)

        # η before any decay moves the iterate; frozen and failed samples keep theirs.
        eta = state.step_size

        def move(new: jax.Array, old: jax.Array) -> jax.Array:
            s = per_sample(eta, old).astype(old.dtype)
            # f(z) itself at η = 1: η f + (1-η) z would cost it a rounding.
            return jnp.where(s == 1, new, s * new + (1 - s) * old)

        target = jax.tree.map(move, fz, state.z)
        if self.noise:
            target = jax.tree.map(jnp.add, target, self._noise(state))
        z = select(moved, target, state.z)

        better = moved & (r < state.best_residual)
        best_z = select(better, state.z, state.best_z) if self.return_best else None
        best = jnp.where(better, r, state.best_residual)
        patience = jnp.where(better, self.patience, state.patience - 1)
        decay = (patience <= 0) & moved
        if self.residual == "current":
            # FPOPT does not decay below τ. The FP-RNN code decays whatever the residual is, which
            # shows where a batch-wide stop keeps converged samples running.
            decay &= r >= self.tolerance
        failed = state.failed | (live & ~ok)
        new = SolverState(
            z=z,
            step_size=jnp.where(decay, self.decay * eta, eta),
            patience=jnp.where(moved, jnp.where(decay, self.patience, patience), state.patience),
            residual=jnp.where(live, r, state.residual),
            best_residual=best,
            best_z=best_z,
            steps=state.steps + live.astype(jnp.int32),
            halted=state.halted,
            failed=failed,
            key=state.key,
        )
        return new._replace(halted=state.halted | failed | (live & self._stop(new)))

    def _noise(self, state: SolverState) -> PyTree:
        """The noise of this iteration, like z: a function of each sample's key and steps."""
        if state.key is None:
            raise ValueError(f"Damped: noise={self.noise!r} needs a key for every sample")
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(state.key), state.steps)
        leaves, treedef = jax.tree.flatten(state.z)

        def draw(i: int, leaf: jax.Array) -> jax.Array:
            return self.noise * jax.vmap(
                lambda key: jax.random.normal(jax.random.fold_in(key, i), leaf.shape[1:])
            )(keys).astype(leaf.dtype)

        return jax.tree.unflatten(treedef, [draw(i, leaf) for i, leaf in enumerate(leaves)])

    def tested_residual(self, state: SolverState) -> jax.Array:
        """(B,) the residual that is compared with the tolerance and reported."""
        if self.return_best or self.residual == "best":
            return jnp.where(state.failed & ~self.return_best, jnp.inf, state.best_residual)
        return state.residual

    def converged(self, state: SolverState) -> jax.Array:
        """(B,) bool: the tested residual is below the tolerance and the sample did not fail."""
        return (self.tested_residual(state) < self.tolerance) & ~state.failed

    def value(self, state: SolverState) -> PyTree:
        """The iterate to return: the last, or the best with `return_best`."""
        return state.best_z if self.return_best else state.z

    def _stop(self, state: SolverState) -> jax.Array:
        """(B,) bool: which samples stop after this iteration (failures aside)."""
        if self.halting == "never":
            return jnp.zeros_like(state.halted)
        tested = state.best_residual if self.residual == "best" else state.residual
        if self.halting == "sample":
            return (tested < self.tolerance) | (state.step_size < self.min_step_size)
        # A failed sample has ended: it must not hold the batch back or turn the quantile to NaN.
        tested = jnp.where(state.failed, 0.0, tested)
        step_size = jnp.where(state.failed, 0.0, state.step_size)
        # Infinities would make the quantile's interpolation NaN.
        tested = jnp.minimum(tested, jnp.finfo(tested.dtype).max)
        stop = jnp.quantile(tested, self.stop_fraction) < self.tolerance
        stop |= jnp.max(step_size) < self.min_step_size
        return jnp.broadcast_to(stop, state.halted.shape)

    def run(
        self, step: StepFn, state: SolverState, max_steps: jax.Array | int | None = None
    ) -> SolverState:
        """Iterates until every sample has halted or reached its cap, in one `lax.while_loop`.

        Args:
          step: z -> f(z).
          state: where to start, from `init` or from an earlier run.
          max_steps: cap of this call, a whole number or (B,) whole numbers, possibly traced
            (random caps); None takes `self.max_steps`.

        Returns:
          The state after the last iteration.
        """
        cap = jnp.asarray(self.max_steps if max_steps is None else max_steps)
        b = state.halted.shape[0]
        if not jnp.issubdtype(cap.dtype, jnp.integer) or cap.shape not in ((), (b,)):
            raise ValueError(
                f"fixed_point: max_steps of shape {cap.shape} and type {cap.dtype}, allowed: a "
                f"whole number or whole numbers of shape ({b},), one per sample"
            )
        cap = jnp.broadcast_to(cap, (b,))

        def going(carry: tuple[jax.Array, SolverState]) -> jax.Array:
            i, s = carry
            return jnp.any(~s.halted & (i < cap))

        def body(carry: tuple[jax.Array, SolverState]) -> tuple[jax.Array, SolverState]:
            i, s = carry
            return i + 1, self.update(s, step(s.z), i < cap)

        return jax.lax.while_loop(going, body, (jnp.zeros((), jnp.int32), state))[1]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_PRESETS: dict[tuple[str, bool], dict[str, Any]] = {
    # Spec 1 section 4. The cap in training varies by task (10..1000); 100 is catbAbI's.
    ("fp_rnn", True): dict(
        step_size=1.0, decay=1.0, patience=15, halting="batch", stop_fraction=0.9, residual="best",
        max_steps=100,
    ),
    ("fp_rnn", False): dict(
        step_size=1.0, decay=1.0, patience=15, halting="batch", stop_fraction=1.0, residual="best",
        max_steps=1000,
    ),
    ("fp_mamba", True): dict(
        step_size=0.99, decay=0.9, patience=15, halting="batch", stop_fraction=0.75,
        residual="best", max_steps=100,
    ),
    ("fp_mamba", False): dict(
        step_size=0.99, decay=0.9, patience=15, halting="batch", stop_fraction=1.0,
        residual="best", max_steps=1000,
    ),
    # Spec 2 sections 2 and 3: 12 windows of 6 iterations in training, 1000 in evaluation.
    ("fprm", True): dict(decay=0.9, patience=5, max_steps=72),
    ("fprm", False): dict(decay=0.99, patience=5, max_steps=1000),
}  # fmt: skip


def preset(name: str, train: bool) -> Damped:
    """The solver of a paper, batch-wide halting included.

    Args:
      name: "fp_rnn" or "fp_mamba" (spec 1 section 4), or "fprm" (spec 2 section 2).
      train: the settings used in training; otherwise those of evaluation.

    Raises:
      ValueError: an unknown name.
    """
    if (name, bool(train)) not in _PRESETS:
        names = sorted({key for key, _ in _PRESETS})
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown solver preset {name!r}{hint}, allowed: {', '.join(names)}")
    return Damped(**_PRESETS[name, bool(train)])
