"""Gradient rules: how a cotangent of the solution z* becomes one of the parameters and of x.

At a fixed point z* = f(θ, x, z*) the implicit function theorem gives, with J = ∂f/∂z at z*,

    dz* = (I - J)^-1 (∂f/∂θ dθ + ∂f/∂x dx),   so   θ̄ = (∂f/∂θ)ᵀ u,   u = (I - Jᵀ)^-1 z̄.

The rules differ in what they put for u: `Implicit` solves for it, `Neumann(k)` sums k terms of its
series, `OneStep(k)` differentiates k more applications of f. None of the three keeps the iterates:
their memory does not grow with the number of steps. `Unrolled` differentiates the whole loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fpr import krylov, solvers
from fpr.solvers import Damped, SolverState, select

PyTree = Any
Fn = Callable[[PyTree, PyTree, PyTree], PyTree]
Cap = jax.Array | int | None


def _shield(failed: jax.Array, tree: PyTree) -> PyTree:
    """Replaces failed samples by the first sound one.

    Their cotangent is zero, but 0 · ∂f is NaN where ∂f is inf; a sound sample in their place keeps
    the sum over the batch, and so the gradient of shared parameters, clean.
    """
    index = jnp.where(failed, jnp.argmin(failed), jnp.arange(failed.shape[0]))

    def swap(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.take(leaf, index, axis=0), tree)

    return jax.lax.cond(jnp.any(failed), swap, lambda tree: tree, tree)


def _unless_all(failed: jax.Array, tree: PyTree) -> PyTree:
    """Zeroes the cotangents of shared parameters where no sample was left to `_shield` with."""
    return _mask(jnp.all(failed), tree)


def _mask(failed: jax.Array, tree: PyTree) -> PyTree:
    """Zeroes cotangents where `failed`, (B,) or (); float0 leaves (of integers) pass through."""

    def leaf(a: jax.Array) -> jax.Array:
        if a.dtype == jax.dtypes.float0:
            return a
        mask = solvers.per_sample(failed, a) if failed.ndim else failed
        return jnp.where(mask, jnp.zeros_like(a), a)

    return jax.tree.map(leaf, tree)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def guarded(f: Fn, params: PyTree, x: PyTree, z: PyTree) -> PyTree:
    """f, except that samples for which it returns NaN or inf pass no gradient to anything."""
    return f(params, x, z)


def _guarded_fwd(f: Fn, params: PyTree, x: PyTree, z: PyTree) -> tuple[PyTree, PyTree]:
    out, pullback = jax.vjp(f, params, x, z)
    return out, (pullback, params, x, z, ~solvers.finite(out))


def _guarded_bwd(f: Fn, saved: PyTree, ct: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    pullback, params, x, z, failed = saved
    ct = _mask(failed, ct)

    def redo(ct: PyTree) -> PyTree:
        _, safe = jax.vjp(f, params, _shield(failed, x), _shield(failed, z))
        return _real(safe(ct))

    grads = jax.lax.cond(jnp.any(failed), redo, lambda ct: _real(pullback(ct)), ct)
    # float0 cotangents of integer inputs cannot leave a cond: put them back here.
    dparams, dx, dz = _with_float0(grads, (params, x, z))
    return _unless_all(failed, dparams), _mask(failed, dx), _mask(failed, dz)


guarded.defvjp(_guarded_fwd, _guarded_bwd)


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _real(tree: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0]


def _with_float0(real: list[jax.Array], like: PyTree) -> PyTree:
    leaves, treedef = jax.tree.flatten(like)
    rest = iter(real)
    out = [
        next(rest) if _is_float(leaf) else jnp.zeros(jnp.shape(leaf), jax.dtypes.float0)
        for leaf in leaves
    ]
    return jax.tree.unflatten(treedef, out)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _solve(
    f: Fn,
    solver: Damped,
    adjoint: Adjoint,
    params: PyTree,
    x: PyTree,
    state: SolverState,
    max_steps: Cap,
) -> tuple[PyTree, SolverState]:
    """z* and the final state, with the gradient that `adjoint.pullback` defines."""
    state = solver.run(lambda z: f(params, x, z), state, max_steps)
    return solver.value(state), state


def _solve_fwd(f, solver, adjoint, params, x, state, max_steps):
    # Calling _solve itself, not its body, lets a second derivative differentiate z* by this rule.
    value, new_state = _solve(f, solver, adjoint, params, x, state, max_steps)
    # The no-op cuts the flags off from tangents that a second derivative cannot take through `all`.
    failed = jnp.bitwise_or(new_state.failed, False)
    return (value, new_state), (params, x, value, failed, state, max_steps)


def _solve_bwd(f, solver, adjoint, saved, cts):
    params, x, z, failed, state, max_steps = saved
    ct = _mask(failed, cts[0])  # The state is bookkeeping: no gradient through cts[1].
    dparams, dx = adjoint.pullback(f, params, _shield(failed, x), _shield(failed, z), ct)
    no_grad = jax.tree.map(_zero_cotangent, (state, max_steps))
    return (_unless_all(failed, dparams), _mask(failed, dx), *no_grad)


_solve.defvjp(_solve_fwd, _solve_bwd)


def _zero_cotangent(leaf: jax.Array) -> jax.Array:
    dtype = jnp.result_type(leaf) if _is_float(leaf) else jax.dtypes.float0
    return jnp.zeros(jnp.shape(leaf), dtype)


class Adjoint:
    """Base of the gradient rules: solve without gradient, then `pullback` at the solution."""

    def solve(
        self, f: Fn, solver: Damped, params: PyTree, x: PyTree, state: SolverState, max_steps: Cap
    ) -> tuple[PyTree, SolverState]:
        """Runs the solver: (value, final state); the value carries this rule's gradient."""
        return _solve(f, solver, self, params, x, state, max_steps)

    def pullback(
        self, f: Fn, params: PyTree, x: PyTree, z: PyTree, ct: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Cotangents of (params, x) for the cotangent `ct` of the solution `z`."""
        raise TypeError(f"{type(self).__name__} has no pullback: it differentiates its own loop")


def _apply_transpose(f: Fn, params: PyTree, x: PyTree, z: PyTree, u: PyTree):
    """(∂f/∂θ)ᵀ u and (∂f/∂x)ᵀ u at z."""
    return jax.vjp(lambda p, xx: f(p, xx, z), params, x)[1](u)


@dataclasses.dataclass(frozen=True)
class OneStep(Adjoint):
    """Gradient of k applications of f that start at the detached fixed point.

    k = 1 is the papers' one-step gradient: u = z̄. Under the assumption of v3 theorem 3.2 (spec 1)
    it is a descent direction. Memory: k applications of f.

    Attributes:
      k: how many applications are differentiated, at least 1.
      refine: False: the value is z* and only the gradient comes from the k applications. True: the
        value is that after the k applications, undamped, which is what both papers' training code
        feeds to the loss. The two agree where the solver has converged.
    """

    k: int = 1
    refine: bool = False

    def __post_init__(self) -> None:
        _check_positive("OneStep", "k", self.k)

    def solve(self, f, solver, params, x, state, max_steps):
        if not self.refine:
            return super().solve(f, solver, params, x, state, max_steps)
        value, state = jax.lax.stop_gradient(
            _solve(f, solver, self, *jax.lax.stop_gradient((params, x, state)), max_steps)
        )
        z = value
        for _ in range(self.k):
            new = _cast(guarded(f, params, x, z), z)
            z = select(solvers.finite(jax.lax.stop_gradient(new)) & ~state.failed, new, z)
        return z, state

    def pullback(self, f, params, x, z, ct):
        def refined(p: PyTree, xx: PyTree) -> PyTree:
            y = z
            for _ in range(self.k):
                y = _cast(f(p, xx, y), y)
            return y

        return jax.vjp(refined, params, x)[1](ct)


@dataclasses.dataclass(frozen=True)
class Neumann(Adjoint):
    """u = Σ_{i<k} (Jᵀ)^i z̄, the first k terms of the Neumann series of (I - Jᵀ)^-1.

    `Neumann(1)` is `OneStep(1)`; for ‖J‖₂ = σ < 1 the error of the truncated Jacobian is at most
    sqrt(D) σ^k / (1 - σ) in Frobenius norm (spec 2 proposition 1). Memory: one application of f.

    Attributes:
      k: number of terms, at least 1.
    """

    k: int = 5

    def __post_init__(self) -> None:
        _check_positive("Neumann", "k", self.k)

    def pullback(self, f, params, x, z, ct):
        transpose = jax.vjp(lambda z: _cast(f(params, x, z), z), z)[1]

        def add_term(carry: tuple[PyTree, PyTree], _: None) -> tuple[tuple[PyTree, PyTree], None]:
            total, term = carry
            (term,) = transpose(term)
            return (jax.tree.map(jnp.add, total, term), term), None

        (u, _), _ = jax.lax.scan(add_term, (ct, ct), None, length=self.k - 1)
        return _apply_transpose(f, params, x, z, _cast(u, jax.eval_shape(f, params, x, z)))


@dataclasses.dataclass(frozen=True)
class Implicit(Adjoint):
    """The exact gradient: solves u = z̄ + Jᵀ u to a tolerance, whatever the spectrum of J.

    Iterating that equation would do only where the spectral radius of J is below 1; GMRES in each
    sample needs only that I - J can be inverted. It starts at u = z̄, scaled by the largest entry
    of z̄. Reverse derivatives of any order work, because the linear solve is itself a `fixed_point`
    with this rule. Memory: one application of f and `restart` + 1 iterates.

    Attributes:
      tolerance: relative change ‖u_new - u‖_∞ / ‖u_new‖_∞ at which a sample's solve stops.
      max_steps: cap on the products with Jᵀ, tested between cycles.
      restart: products in one cycle of GMRES.
    """

    tolerance: float = 1e-6
    max_steps: int = 500
    restart: int = 20

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise ValueError(f"Implicit: tolerance={self.tolerance!r}, allowed: tolerance > 0")
        _check_positive("Implicit", "max_steps", self.max_steps)
        _check_positive("Implicit", "restart", self.restart)

    def pullback(self, f, params, x, z, ct):
        from fpr.fixed_point import fixed_point  # The rule is defined by the thing it serves.

        transpose = jax.vjp(lambda z: _cast(f(params, x, z), z), z)[1]
        target = krylov.ravel(ct)
        scale = jax.lax.stop_gradient(jnp.max(jnp.abs(target), axis=1, keepdims=True))
        scale = jnp.where(scale > 0, scale, 1.0)
        target = target / scale

        # All of a sample is one token: entries that the loss hardly sees are measured against
        # those that it does, not against themselves.
        def g(_: PyTree, target: jax.Array, u: jax.Array) -> jax.Array:
            (ju,) = transpose(krylov.unravel(u, ct))
            return target + krylov.ravel(ju)

        solver = krylov.GMRES(
            tolerance=self.tolerance, max_steps=self.max_steps, restart=self.restart
        )
        u = fixed_point(g, (), target, target, solver=solver, adjoint=self).value
        u = krylov.unravel(u * scale, ct)
        return _apply_transpose(f, params, x, z, _cast(u, jax.eval_shape(f, params, x, z)))


@dataclasses.dataclass(frozen=True)
class Unrolled(Adjoint):
    """Differentiates every iteration, damping included. Memory grows with `max_steps`.

    The one rule with a gradient to z0; it is what one window of deep supervision uses (spec 2
    section 3). The step sizes count as constants. `max_steps` must be a Python whole number.
    """

    def solve(self, f, solver, params, x, state, max_steps):
        length = solver.max_steps if max_steps is None else max_steps
        if not isinstance(length, int) or length < 0:
            raise ValueError(
                f"Unrolled: max_steps={length!r}, allowed: a Python whole number >= 0 (its loop is "
                "unrolled to a fixed length, the same for all samples)"
            )

        def body(s: SolverState, _: None) -> tuple[SolverState, None]:
            return solver.update(s, guarded(f, params, x, s.z)), None

        state, _ = jax.lax.scan(body, state, None, length=length)
        return solver.value(state), state


def _cast(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a.astype(b.dtype), tree, like)


def _check_positive(rule: str, name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{rule}: {name}={value!r}, allowed: a whole number >= 1")
