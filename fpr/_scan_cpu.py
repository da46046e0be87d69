"""CPU forms of the scans: loops over time whose blocks XLA compiles to one native kernel each.

Private to `fpr.scan`, which holds the public functions, the gradient rules and the other forms.

XLA:CPU runs a loop as a list of small kernels and pays about a microsecond for each of them in
each iteration. A call that carries the attributes of `_one_kernel` is emitted as one function
instead: its loops become machine loops. Where XLA does not know the attributes they mean nothing:
same numbers, slower. Two limits of XLA (jaxlib 0.10) shape this file:

- A constant operand of such a call aborts the compiler. So kernels only see blocks, cut at an index
  that changes as an outer loop runs, and carries: these are never constants. A block also fits in
  the cache, so cutting it costs little.
- Matrix products and reductions may go to a library, which such a call cannot reach. So sums are
  additions of halves.

What else was tried at (8, 4096, 256), float32, forward, page faults avoided, beside one pass in C
(3.7 ms): the same steps as an ordinary XLA loop 8-11 ms; one native kernel for the whole array over
samples 5.6 ms, over whole time steps 8.5 ms (both may abort on constants); two or four steps per
iteration with static slices 100 times slower (XLA copies the buffer between the updates).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

Array = jax.Array

_ZERO = np.int32(0)
_ONE = np.int32(1)
_BLOCK = 1 << 15  # elements of one operand of a kernel: 128 KiB of float32


def _one_kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn as one native kernel on CPU: a call that XLA neither inlines nor splits.

    The attributes go on the call alone: on the operations inside they would keep XLA from fusing.
    """
    call = jax.jit(fn)

    @functools.wraps(fn)
    def tagged(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(call(*args))
        leaves[0] = set_xla_metadata(leaves[0], inlineable="false", xla_cpu_small_call="true")
        return jax.tree.unflatten(tree, leaves)

    return tagged


def _loop(first: Any, last: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """fori_loop with an int32 index whatever the x64 setting."""
    return lax.fori_loop(jnp.int32(first), jnp.int32(last), body, carry)


def _cut(x: Array, start: Any, size: int, axis: int = 1) -> Array:
    """`size` entries of x along an axis; the index is trusted to be in range."""
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: Array, part: Array, start: Any, axis: int = 1) -> Array:
    """x with a part replaced along an axis; in place inside a loop."""
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis)


def _row(x: Array, b: Any, t: Any) -> Array:
    """x[b, t] of (B, T, n) as (1, 1, n)."""
    return lax.dynamic_slice(x, (b, t, _ZERO), (1, 1, x.shape[2]))


def _put_row(x: Array, row: Array, b: Any, t: Any) -> Array:
    """x (B, T, n) with x[b, t] replaced; in place inside a loop."""
    return lax.dynamic_update_slice(x, row.reshape(1, 1, -1).astype(x.dtype), (b, t, _ZERO))


def _block_length(time: int, row: int) -> int:
    """Steps per block: the cache's share, and at least two blocks (one would not be a loop)."""
    return max(1, min(_BLOCK // max(row, 1), -(-time // 2)))


def _place(k: Any, size: int, time: int, reverse: bool) -> tuple[Any, Any]:
    """Where block k, in the order of processing, starts in time, and its first step still to do.

    The last block is moved back to lie inside the array: its first steps belong to the block before
    and are left as they are.
    """
    wanted = k * np.int32(size)
    inside = jnp.minimum(wanted, np.int32(time - size))
    start = np.int32(time - size) - inside if reverse else inside
    return start, wanted - inside


def linear_scan(a: Array, x: Array, h0: Array, *, reverse: bool) -> tuple[Array, Array]:
    """h_t = a_t h_{t-1} + x_t, written over x: no copy where x is free or donated.

    Args:
      a, x: (B, T, D), T ≥ 2; h0: (B, D) in the type of the carry.
      reverse: run from the last step to the first.

    Returns:
      h in x's type and layout; the state after the last step processed, in h0's type.
    """
    batch, time, dim = x.shape
    wide = h0.dtype
    size = _block_length(time, batch * dim)

    @_one_kernel
    def block(a, x, h, first):
        def sample(b, carry):
            def step(j, carry):
                h, x = carry
                t = np.int32(size - 1) - j if reverse else j
                h = _row(a, b, t).astype(wide) * h + _row(x, b, t).astype(wide)
                return h, _put_row(x, h, b, t)

            x, last = carry
            h, x = _loop(first, size, step, (_cut(last, b, 1, 0)[:, None], x))
            return x, _put(last, h[:, 0], b, 0)

        return _loop(0, batch, sample, (x, h))

    def run(k, carry):
        out, h = carry
        start, first = _place(k, size, time, reverse)
        part, h = block(_cut(a, start, size), _cut(out, start, size), h, first)
        return _put(out, part, start), h

    return _loop(0, -(-time // size), run, (x, h0))


def linear_scan_grad(
    a: Array, h: Array, h0: Array, dh: Array, dlast: Array, *, reverse: bool
) -> tuple[Array, Array, Array]:
    """da, dx, dh0 of `linear_scan` in one pass: the reversed scan and its products together.

    The adjoint λ_t = dh_t + a_{t+1} λ_{t+1} is dx and overwrites dh; da_t = λ_t h_{t-1} overwrites
    the cut of h. The inner loop carries λ and not a λ: only then XLA updates dh in place.
    """
    batch, time, dim = h.shape
    wide = h0.dtype
    size = _block_length(time, batch * dim)
    blocks = -(-time // size)

    @_one_kernel
    def block(a, h, edge, dx, carried, first):
        def at(j):
            return np.int32(size - 1) - j if reverse else j

        def sample(b, carry):
            da, dx, carried = carry
            end = at(np.int32(size - 1))
            lam = _row(dx, b, end).astype(wide) + _cut(carried, b, 1, 0)[:, None]
            dx = _put_row(dx, lam, b, end)

            def step(i, carry):
                lam, da, dx = carry
                j = np.int32(size - 1) - i
                before = at(j - _ONE)
                da = _put_row(da, _row(h, b, before).astype(wide) * lam, b, at(j))
                lam = _row(a, b, at(j)).astype(wide) * lam + _row(dx, b, before).astype(wide)
                return lam, da, _put_row(dx, lam, b, before)

            lam, da, dx = _loop(0, np.int32(size - 1) - first, step, (lam, da, dx))
            da = _put_row(da, _cut(edge, b, 1, 0)[:, None] * lam, b, at(first))
            lam = _row(a, b, at(first)).astype(wide) * lam
            return da, dx, _put(carried, lam[:, 0], b, 0)

        return _loop(0, batch, sample, (jnp.zeros_like(a), dx, carried))

    def run(i, carry):
        da, dx, carried = carry
        k = np.int32(blocks - 1) - i
        start, first = _place(k, size, time, reverse)
        done = k * np.int32(size)
        before = np.int32(time) - done if reverse else done - _ONE
        edge = _cut(h, jnp.clip(before, 0, time - 1), 1)[:, 0].astype(wide)
        edge = jnp.where(k == 0, h0, edge)
        args = (_cut(a, start, size), _cut(h, start, size), edge, _cut(dx, start, size))
        da_part, dx_part, carried = block(*args, carried, first)
        return _put(da, da_part, start), _put(dx, dx_part, start), carried

    return _loop(0, blocks, run, (jnp.zeros_like(a), dh, dlast))


def _sum(x: Array, axis: int) -> Array:
    """Sum over an axis by halving, with additions alone (see the head of this file)."""
    n = x.shape[axis]
    odd = []
    while n > 1:
        if n % 2:
            odd.append(lax.slice_in_dim(x, n - 1, n, axis=axis))
        n //= 2
        left, right = (lax.slice_in_dim(x, i, i + n, axis=axis) for i in (0, n))
        x = left + right
    return jnp.squeeze(functools.reduce(jnp.add, odd, x), axis)


def _never_constant(x: Array, k: Any) -> Array:
    """x, in a form that XLA cannot fold to a constant; k ≥ 0 is the index of a running loop."""
    return jnp.where(k < 0, jnp.zeros_like(x), x)


def _selective_step(a, u, dt, b_in, b, t, h, wide):
    """One step of one sample; (N, D) decays and the next state. Rows are read as vectors."""
    u_t, dt_t, b_t = (_row(v, b, t)[0, 0].astype(wide) for v in (u, dt, b_in))
    decay = jnp.exp(dt_t * a)
    return decay, decay * h + b_t[:, None] * (dt_t * u_t)


def selective_length(time: int, chunk: int) -> tuple[int, int]:
    """Steps per block and number of blocks of the selective scan for T ≥ 2 steps."""
    size = min(chunk, -(-time // 2))
    return size, -(-time // size)


def selective_scan(
    u: Array, dt: Array, a: Array, b_in: Array, c_out: Array, h0: Array, *, chunk: int, keep: bool
) -> tuple[Array, ...]:
    """One pass of h_t = exp(Δ_t A) h_{t-1} + Δ_t u_t B_t, y_t = C_t·h_t; h never leaves the cache.

    Args:
      u, dt: (B, T, D), T ≥ 2; a: (N, D); b_in, c_out: (B, T, N); h0: (B, N, D) in the carry's type.
        Channels come last in the state, so that every operation is a vector operation.
      chunk: largest number of steps per block.
      keep: also return the state before each block.

    Returns:
      y in u's type, the last state, and if `keep` the kept states (B, blocks, N, D).
    """
    batch, time, _ = u.shape
    wide = h0.dtype
    size, blocks = selective_length(time, chunk)

    @_one_kernel
    def block(u, dt, a, b_in, c_out, y, h, first):
        def sample(b, carry):
            def step(t, carry):
                h, y = carry
                h = _selective_step(a, u, dt, b_in, b, t, h, wide)[1]
                c_t = _row(c_out, b, t)[0, 0].astype(wide)
                return h, _put_row(y, _sum(c_t[:, None] * h, 0), b, t)

            y, last = carry
            h, y = _loop(first, size, step, (_cut(last, b, 1, 0)[0], y))
            return y, _put(last, h[None], b, 0)

        return _loop(0, batch, sample, (y, h))

    def run(k, carry):
        y, h, kept = carry
        if keep:
            kept = _put(kept, h[:, None], k)
        start, first = _place(k, size, time, False)
        u_k, dt_k, b_k, c_k, y_k = (_cut(v, start, size) for v in (u, dt, b_in, c_out, y))
        y_k, h = block(u_k, dt_k, _never_constant(a, k), b_k, c_k, y_k, h, first)
        return _put(y, y_k, start), h, kept

    kept = None
    if keep:
        kept = jnp.broadcast_to(jnp.zeros_like(h0)[:, None], (batch, blocks, *h0.shape[1:]))
    y, h, kept = _loop(0, blocks, run, (jnp.zeros_like(u), h0, kept))
    return (y, h, kept) if keep else (y, h)


def selective_scan_grad(
    u: Array, dt: Array, a: Array, b_in: Array, c_out: Array, kept: Array,
    dy: Array, dlast: Array, *, chunk: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Gradients of `selective_scan`, block by block from the end.

    Each block first recomputes its states from the kept one into a buffer that stays in the cache.
    With Λ_t = C_t dy_t + exp(Δ_{t+1} A) Λ_{t+1} and W_t = Λ_t h_{t-1} exp(Δ_t A):
    du = Δ Σ_N Λ B, dΔ = u Σ_N Λ B + Σ_N W A, dA = Σ W Δ, dB = Σ_D Λ Δ u, dC = Σ_D h dy.

    Returns:
      du, dΔ (B, T, D); dA (B, N, D) per sample; dB, dC (B, T, N); dh0 (B, N, D).
    """
    batch, time, _ = u.shape
    wide = dlast.dtype
    size, blocks = selective_length(time, chunk)

    @_one_kernel
    def block(u, dt, a, b_in, c_out, dy, before, du, ddt, db, dc, da, lam, first):
        def sample(b, carry):
            du, ddt, db, dc, da, lam, states, decays = carry

            def forward(t, carry):
                h, states, decays = carry
                states = _put(states, h[None], t, 0)
                decay, h = _selective_step(a, u, dt, b_in, b, t, h, wide)
                return h, states, _put(decays, decay[None], t, 0)

            def backward(i, carry):
                h, lam, da, du, ddt, db, dc, states, decays = carry
                t = np.int32(size - 1) - i
                rows = (_row(v, b, t)[0, 0].astype(wide) for v in (u, dt, b_in, c_out, dy))
                u_t, dt_t, b_t, c_t, dy_t = rows
                previous, decay = _cut(states, t, 1, 0)[0], _cut(decays, t, 1, 0)[0]
                dc = _put_row(dc, _sum(h * dy_t, 1), b, t)
                lam = lam + c_t[:, None] * dy_t
                db = _put_row(db, _sum(lam * (dt_t * u_t), 1), b, t)
                inflow = _sum(b_t[:, None] * lam, 0)
                du = _put_row(du, dt_t * inflow, b, t)
                lam = lam * decay
                weight = lam * previous
                ddt = _put_row(ddt, u_t * inflow + _sum(weight * a, 0), b, t)
                return previous, lam, da + weight * dt_t, du, ddt, db, dc, states, decays

            h = _cut(before, b, 1, 0)[0]
            h, states, decays = _loop(first, size, forward, (h, states, decays))
            sums = (_cut(lam, b, 1, 0)[0], _cut(da, b, 1, 0)[0])
            start = (h, *sums, du, ddt, db, dc, states, decays)
            end = _loop(0, np.int32(size) - first, backward, start)
            _, lam_b, da_b, du, ddt, db, dc, states, decays = end
            lam, da = _put(lam, lam_b[None], b, 0), _put(da, da_b[None], b, 0)
            return du, ddt, db, dc, da, lam, states, decays

        buffer = jnp.broadcast_to(jnp.zeros_like(a), (size, *a.shape))
        return _loop(0, batch, sample, (du, ddt, db, dc, da, lam, buffer, buffer))[:6]

    def run(i, carry):
        *long, da, lam = carry
        k = np.int32(blocks - 1) - i
        start, first = _place(k, size, time, False)
        cuts = [_cut(v, start, size) for v in (u, dt, b_in, c_out, dy, *long)]
        before = _cut(kept, k, 1)[:, 0]
        cuts[2:2] = [_never_constant(a, k)]
        *parts, da, lam = block(*cuts[:6], before, *cuts[6:], da, lam, first)
        return *(_put(v, part, start) for v, part in zip(long, parts)), da, lam

    start = (jnp.zeros_like(v) for v in (u, dt, b_in, c_out))
    du, ddt, db, dc, da, dh0 = _loop(0, blocks, run, (*start, jnp.zeros_like(dlast), dlast))
    return du, ddt, da, db, dc, dh0
