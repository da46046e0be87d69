"""fixed_point(f, params, x, z0): a layer whose output is z* = f(params, x, z*).

It ties three independent things together: an iteration rule that finds z* (`fpr.solvers`), a
gradient rule that differentiates it without differentiating the iterations (`fpr.adjoints`), and a
`Solution` that says how the search went. An ordinary layer computes z = f(x); an implicit layer
says which z it wants and lets a solver find it, so depth becomes the number of iterations, which
each sample chooses for itself:

    >>> f = lambda w, x, z: jnp.tanh(z @ w + x)
    >>> solution = fixed_point(f, w, x, jnp.zeros_like(x), solver=Damped(tolerance=1e-4))
    >>> solution.value, solution.steps, solution.converged
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from fpr import solvers
from fpr.adjoints import Adjoint, OneStep
from fpr.solvers import Damped, SolverState

PyTree = Any


class Solution(NamedTuple):
    """What the solver found.

    Attributes:
      value: z*, with the structure and types of z0; carries the gradient.
      steps: (B,) int32, applications of f until the sample halted.
      residual: (B,) float32, the residual that was compared with the tolerance: the last, or the
        best so far if the solver says so; inf for a sample in which f returned NaN or inf (with
        `return_best`, that of the value returned).
      converged: (B,) bool, residual < tolerance and never NaN or inf. A sample that ran into the
        cap or into the smallest step size has not converged.
      state: the solver's state, detached; pass it as `state` to go on where this call stopped.
    """

    value: PyTree
    steps: jax.Array
    residual: jax.Array
    converged: jax.Array
    state: SolverState


def fixed_point(
    f: Callable[[PyTree, PyTree, PyTree], PyTree],
    params: PyTree,
    x: PyTree,
    z0: PyTree,
    *,
    solver: Damped = Damped(),
    adjoint: Adjoint = OneStep(),
    state: SolverState | None = None,
    max_steps: jax.Array | int | None = None,
    key: jax.Array | None = None,
) -> Solution:
    """Solves z = f(params, x, z) for each sample of a batch.

    A halted sample is frozen: its value, steps and residual are the same alone or in any batch (up
    to rounding, and as long as f treats samples independently). A sample in which f returns NaN or
    inf ends there with converged=False and keeps its last finite iterate; it neither stops nor
    changes its neighbours, nor their gradient.

    f may close over arrays and over values being differentiated, vmapped or traced by jit: they are
    made explicit, and get their gradient. Inside a Flax module, f must not call submodules of that
    module: pass their parameters, as `fpr.models.base` does.

    Args:
      f: (params, x, z) -> z, any pytrees; returns the structure and shapes of z. Its float type may
        differ from z0's (bfloat16 compute): it is converted back.
      params: shared parameters.
      x: input, leaves (B, ...).
      z0: initial iterate, leaves (B, ...) of a float type.
      solver: iteration rule. See `fpr.solvers.Damped`.
      adjoint: gradient rule: `OneStep(k)`, `Neumann(k)`, `Implicit(...)` or `Unrolled()`.
      state: continue from an earlier Solution's state instead of z0 (which then only gives shapes).
      max_steps: cap for this call, overriding the solver's; whole number or (B,), may be traced
        (not for `Unrolled`).
      key: (B, K) uint32 key data, one per sample (`jax.random.key_data`), for a solver with noise;
        kept in the state, and not used when going on from one.

    Returns:
      A `Solution`.

    Raises:
      ValueError: f changes the structure or shape of z; batch axes disagree; empty or non-float z0;
        a state of other shapes; max_steps that is neither a whole number nor (B,) of them.
    """
    z0 = jax.tree.map(jnp.asarray, z0)
    _check(x, z0)
    f, (params, consts) = _explicit(f, params, x, z0)
    fresh = solver.init(z0)
    if state is None:
        state = fresh._replace(key=key)
    else:
        _check_state(state, fresh._replace(key=state.key))
    value, state = adjoint.solve(f, solver, (params, consts), x, state, max_steps)
    state = jax.lax.stop_gradient(state)
    return Solution(
        value, state.steps, solver.tested_residual(state), solver.converged(state), state
    )


class Trace(NamedTuple):
    """Every iteration of a solve; N iterations, batch B.

    Attributes:
      value: iterates after each update, leaves (N, B, ...).
      residual: (N, B) float32, residual measured in each iteration.
      best_residual: (N, B) float32, smallest so far.
      step_size: (N, B) float32, η after each iteration.
      patience: (N, B) int32, iterations left before the next decay.
      active: (N, B) bool, False where the sample was already frozen: its entries repeat the last.
    """

    value: PyTree
    residual: jax.Array
    best_residual: jax.Array
    step_size: jax.Array
    patience: jax.Array
    active: jax.Array


def trace(
    f: Callable[[PyTree, PyTree, PyTree], PyTree],
    params: PyTree,
    x: PyTree,
    z0: PyTree,
    *,
    solver: Damped = Damped(),
    steps: int = 50,
) -> Trace:
    """Runs the solver for `steps` iterations and keeps all of them. Works under jit.

    Frozen samples repeat their last entry, so the first `Solution.steps` rows are the path that
    `fixed_point` takes. Use `halting="never"` to watch past convergence.

    Raises:
      ValueError: steps < 1, or as `fixed_point`.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"trace: steps={steps!r}, allowed: a whole number >= 1")
    z0 = jax.tree.map(jnp.asarray, z0)
    _check(x, z0)
    f, (params, consts) = _explicit(f, params, x, z0)

    def body(state: SolverState, _: None) -> tuple[SolverState, Trace]:
        new = solver.update(state, f((params, consts), x, state.z))
        row = Trace(
            new.z, new.residual, new.best_residual, new.step_size, new.patience, ~state.halted
        )
        return new, row

    return jax.lax.scan(body, solver.init(z0), None, length=steps)[1]


def _check(x: PyTree, z0: PyTree) -> None:
    b = solvers.batch_size(z0)
    for leaf in jax.tree.leaves(z0):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"fixed_point: z0 must be of a float type, got {leaf.dtype}")
        if leaf.size == 0:
            raise ValueError(f"fixed_point: z0 of shape {leaf.shape} has no elements")
    for leaf in jax.tree.leaves(x):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != b:
            raise ValueError(
                f"fixed_point: x has a leaf of shape {shape}, z0 has batch size {b}; every leaf of "
                "x needs the same leading batch axis (put what samples share into params)"
            )


def _check_state(state: SolverState, fresh: SolverState) -> None:
    def spec(field: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: (jnp.shape(leaf), str(jnp.result_type(leaf))), field)

    for name in SolverState._fields:
        got, want = spec(getattr(state, name)), spec(getattr(fresh, name))
        if got != want:
            raise ValueError(
                f"fixed_point: state.{name} is {got}, but the solver and z0 need {want}: a state "
                "goes on with the batch, the shapes of z0 and the `return_best` it came from"
            )


def _explicit(
    f: Callable[[PyTree, PyTree, PyTree], PyTree], params: PyTree, x: PyTree, z0: PyTree
) -> tuple[Callable[[PyTree, PyTree, PyTree], PyTree], tuple[PyTree, list[jax.Array]]]:
    """Makes what f closes over an argument: ((params, consts), x, z) -> z, and (params, consts).

    A custom gradient rule sees only explicit arguments: a closed-over parameter would silently get
    no gradient, or leak a tracer.
    """
    closed, out = jax.make_jaxpr(f, return_shape=True)(params, x, z0)
    want: Any = jax.tree.structure(z0)
    got: Any = jax.tree.structure(out)
    if want != got:
        raise ValueError(f"fixed_point: f returns the structure {got}, but z0 has {want}")
    for a, b in zip(jax.tree.leaves(z0), jax.tree.leaves(out)):
        if a.shape != b.shape:
            raise ValueError(f"fixed_point: f maps an iterate of shape {a.shape} to {b.shape}")

    def explicit(params_consts: PyTree, x: PyTree, z: PyTree) -> PyTree:
        params, consts = params_consts
        fun = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(closed.jaxpr, consts))
        return jax.tree.unflatten(got, fun(*jax.tree.leaves((params, x, z))))

    return explicit, (params, closed.consts)
