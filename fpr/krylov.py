"""GMRES for a batch of linear systems, one per sample: what `fpr.adjoints.Implicit` solves with.

A linear fixed point u = b + A u is the system (I - A) u = b. Iterating it converges only where the
spectrum of A allows; a Krylov method needs no more of I - A than that it can be inverted.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fpr.solvers import Damped, PyTree, SolverState, StepFn, residual


@dataclasses.dataclass(frozen=True)
class GMRES(Damped):
    """Solves z = f(z) for an affine f and one (B, n) array z, by restarted GMRES in each sample.

    Of `Damped`'s options it uses `tolerance` (on the same residual) and `max_steps` (on the
    products with A). It also ends a sample that a whole cycle no longer improves: rounding. Memory:
    `restart` + 1 vectors of the size of z.

    Attributes:
      restart: products with A in one cycle, at least 1.
    """

    restart: int = 20

    def run(
        self, step: StepFn, state: SolverState, max_steps: jax.Array | int | None = None
    ) -> SolverState:
        """As `Damped.run`; `step` must be affine."""
        cap = self.max_steps if max_steps is None else max_steps
        size = min(self.restart, state.z.shape[1])
        constant = step(jnp.zeros_like(state.z))

        def product(v: jax.Array) -> jax.Array:  # (I - A) v
            return v - (step(v) - constant)

        def going(carry: tuple[jax.Array, SolverState]) -> jax.Array:
            i, s = carry
            return jnp.any(~s.halted & (i < cap))

        def cycle(carry: tuple[jax.Array, SolverState]) -> tuple[jax.Array, SolverState]:
            i, s = carry
            rest = step(s.z) - s.z
            z = s.z + _correction(product, rest, size)
            new = step(z)
            lower = _norm(new - z) < _norm(rest)
            take = ~s.halted & lower
            z = jnp.where(take[:, None], z, s.z)
            r = jnp.where(take, residual(new, z), s.residual)
            failed = s.failed | (~s.halted & ~jnp.isfinite(_norm(rest)))
            return i + size + 2, s._replace(
                z=z,
                residual=r,
                best_residual=r,
                steps=jnp.where(s.halted, s.steps, s.steps + size + 2),
                halted=s.halted | ~lower | failed | (r < self.tolerance),
                failed=failed,
            )

        return jax.lax.while_loop(going, cycle, (jnp.zeros((), jnp.int32), state))[1]


def _norm(v: jax.Array) -> jax.Array:
    """Euclidean norms (B,) of (B, n)."""
    return jnp.sqrt(jnp.sum(jnp.square(v), axis=1))


def _correction(product: StepFn, rest: jax.Array, size: int) -> jax.Array:
    """The d in the Krylov space of dimension `size` that minimises ‖rest - product(d)‖₂, (B, n)."""
    b, n = rest.shape
    eps = jnp.finfo(rest.dtype).eps
    beta = _norm(rest)

    def unit(v: jax.Array, norm: jax.Array, floor: jax.Array) -> jax.Array:
        sound = norm > floor
        return jnp.where(sound[:, None], v / jnp.where(sound, norm, 1.0)[:, None], 0.0)

    def arnoldi(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        basis, hessenberg = carry  # (size + 1, B, n), later rows zero; (B, size + 1, size)
        w = product(basis[j])
        floor = 10 * eps * _norm(w)
        column = jnp.zeros((b, size + 1), rest.dtype)
        for _ in range(2):  # Twice, or rounding spoils the orthogonality.
            part = jnp.einsum("kbn,bn->bk", basis, w)
            w = w - jnp.einsum("bk,kbn->bn", part, basis)
            column = column + part
        norm = _norm(w)
        # Where the space is exhausted, the basis goes on with zeros, which change nothing.
        column = column.at[:, j + 1].set(jnp.where(norm > floor, norm, 0.0))
        return basis.at[j + 1].set(unit(w, norm, floor)), hessenberg.at[:, :, j].set(column)

    basis = jnp.zeros((size + 1, b, n), rest.dtype).at[0].set(unit(rest, beta, 0.0 * beta))
    hessenberg = jnp.zeros((b, size + 1, size), rest.dtype)
    basis, hessenberg = jax.lax.fori_loop(0, size, arnoldi, (basis, hessenberg))
    return jnp.einsum("bk,kbn->bn", _least_squares(hessenberg, beta), basis[:-1])


def _least_squares(hessenberg: jax.Array, beta: jax.Array) -> jax.Array:
    """The y (B, k) that minimises ‖beta e_1 - H y‖₂ for upper Hessenberg H (B, k + 1, k).

    By Givens rotations and back substitution, with plain arithmetic: batched LAPACK calls on CPU
    wait in the thread pool that they run in, and two at once can wait for each other for ever.
    """
    b, _, size = hessenberg.shape
    eps = jnp.finfo(hessenberg.dtype).eps
    rhs = jnp.zeros((b, size + 1, 1), hessenberg.dtype).at[:, 0, 0].set(beta)

    def rotate(j: jax.Array, both: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(both, j, 2, axis=1)  # (B, 2, k + 1)
        top, low = rows[:, 0, j], rows[:, 1, j]
        length = jnp.sqrt(top * top + low * low)
        sound = length > 0
        cos = jnp.where(sound, top / jnp.where(sound, length, 1.0), 1.0)[:, None]
        sin = jnp.where(sound, low / jnp.where(sound, length, 1.0), 0.0)[:, None]
        turned = [cos * rows[:, 0] + sin * rows[:, 1], cos * rows[:, 1] - sin * rows[:, 0]]
        return jax.lax.dynamic_update_slice_in_dim(both, jnp.stack(turned, 1), j, axis=1)

    both = jnp.concatenate([hessenberg, rhs], axis=2)
    both = jax.lax.fori_loop(0, size, rotate, both)
    triangle, target = both[:, :size, :size], both[:, :size, size]
    floor = 2 * eps * jnp.max(jnp.abs(triangle), axis=(1, 2))

    def substitute(i: jax.Array, y: jax.Array) -> jax.Array:
        j = size - 1 - i
        pivot = triangle[:, j, j]
        rest = target[:, j] - jnp.sum(triangle[:, j] * y, axis=1)
        # A direction that the space does not hold: leave it out.
        sound = jnp.abs(pivot) > floor
        return y.at[:, j].set(jnp.where(sound, rest / jnp.where(sound, pivot, 1.0), 0.0))

    return jax.lax.fori_loop(0, size, substitute, jnp.zeros((b, size), hessenberg.dtype))


def ravel(tree: PyTree) -> jax.Array:
    """Leaves (B, ...) -> one (B, n) array in at least float32."""
    leaves = jax.tree.leaves(tree)
    dtype = jnp.result_type(jnp.float32, *leaves)
    return jnp.concatenate([a.reshape(a.shape[0], -1).astype(dtype) for a in leaves], axis=1)


def unravel(flat: jax.Array, like: PyTree) -> PyTree:
    """The inverse of `ravel`, with the shapes and types of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    parts, start = [], 0
    for leaf in leaves:
        end = start + leaf.size // leaf.shape[0]
        parts.append(flat[:, start:end].reshape(leaf.shape).astype(leaf.dtype))
        start = end
    return jax.tree.unflatten(treedef, parts)
