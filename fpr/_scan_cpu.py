"""CPU forms of the scans: loops over time whose blocks XLA compiles to one native kernel each.

Private to `fpr.scan`, which holds the public functions, the gradient rules and the other forms.

XLA:CPU runs a loop as a list of small kernels and pays about a microsecond for each of them in
each iteration. A call that carries the attributes of `_one_kernel` is emitted as one function
instead: its loops become machine loops. Where XLA does not know the attributes they mean nothing:
same numbers, slower. Two limits of XLA (jaxlib 0.10) shape this file:

- A constant operand of such a call aborts the compiler. So kernels only see the index and the
  carries of an outer loop of at least two turns, and blocks cut at that index: these are never
  constants. A block also fits in the cache, so cutting it costs little.
- Matrix products and reductions may go to a library, which such a call cannot reach. So sums are
  additions of halves.

What was tried at (8, 4096, 256), float32, forward, with no page faults, in milliseconds of
processor time: this file 8.8 (27 with gradient, copying x, dh included), with x and h cut into
blocks too 10.1 (32), the whole array as one kernel 6.7 (constants may abort), the same steps as an
ordinary XLA loop 9.0, a copy of x 3.5, one pass in C 5.2. Two or four steps per iteration with
static slices take 100 times longer: XLA copies the buffer between the updates. Where the result is
allocated anew, page faults add 15 (8193 faults): see experiments/memory.py.
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


def _get(x: Array, at: tuple[Any, ...], sizes: tuple[int, ...]) -> Array:
    """A part of x along its leading axes, from the indices `at`."""
    at = (*at, *(_ZERO,) * (x.ndim - len(at)))
    return lax.dynamic_slice(x, at, (*sizes, *x.shape[len(sizes) :]))


def _set(x: Array, part: Array, at: tuple[Any, ...]) -> Array:
    """x with a part replaced from the indices `at` on; in place inside a loop."""
    return lax.dynamic_update_slice(x, part.astype(x.dtype), (*at, *(_ZERO,) * (x.ndim - len(at))))


def _row(x: Array, b: Any, t: Any) -> Array:
    """x[b, t] of (B, T, n) as (1, 1, n)."""
    return lax.dynamic_slice(x, (b, t, _ZERO), (1, 1, x.shape[2]))


def _put_row(x: Array, row: Array, b: Any, t: Any) -> Array:
    """x (B, T, n) with x[b, t] replaced; in place inside a loop."""
    return lax.dynamic_update_slice(x, row.reshape(1, 1, -1).astype(x.dtype), (b, t, _ZERO))


def _block_length(time: int, row: int) -> int:
    """Steps of one sample that fit in a block."""
    return min(time, max(1, _BLOCK // row))


def _grid(batch: int, time: int, size: int, row: int) -> tuple[int, int, int]:
    """Samples per block and the grid of blocks, samples by times.

    Blocks are long in time first: rows of several samples lie a power of two apart in memory and
    push each other out of the cache.
    """
    most = max(1, _BLOCK // (size * row))
    samples = max(n for n in range(1, min(batch, most) + 1) if batch % n == 0)
    return samples, batch // samples, -(-time // size)


def _place(
    i: Any, samples: int, along: int, size: int, time: int, *, flipped: bool, reverse: bool = False
) -> tuple[Any, Any, Any, Any]:
    """The place of block i of a grid.

    The last block in time is moved back to lie inside the array: its first steps belong to the
    block before and are left as they are.

    Args:
      samples, along, size: samples per block, blocks in time, steps per block.
      flipped: the last block in time is visited first (gradients).
      reverse: processing runs from the last step in time to the first.

    Returns:
      First sample; block in the order of processing; where it starts in time; its first step still
      to do, in the order of processing.
    """
    group, k = lax.div(i, np.int32(along)), lax.rem(i, np.int32(along))
    k = np.int32(along - 1) - k if flipped else k
    wanted = k * np.int32(size)
    inside = jnp.minimum(wanted, np.int32(time - size))
    start = np.int32(time - size) - inside if reverse else inside
    return group * np.int32(samples), k, start, wanted - inside


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
    size = _block_length(time, dim)
    samples, across, along = _grid(batch, time, size, dim)
    if across * along == 1:
        size, along = -(-time // 2), 2
    place = functools.partial(
        _place, samples=samples, along=along, size=size, time=time, flipped=False, reverse=reverse
    )

    @_one_kernel
    def block(a, x, last, i):
        corner, _, start, first = place(i)

        def sample(s, carry):
            b = corner + s

            def step(j, carry):
                h, x = carry
                t = np.int32(size - 1) - j if reverse else j
                h = _row(a, s, t).astype(wide) * h + _row(x, b, start + t).astype(wide)
                return h, _put_row(x, h, b, start + t)

            x, last = carry
            h, x = _loop(first, size, step, (_cut(last, b, 1, 0)[:, None], x))
            return x, _put(last, h[:, 0], b, 0)

        return _loop(0, samples, sample, (x, last))

    def run(i, carry):
        b, _, start, _ = place(i)
        return block(_get(a, (b, start), (samples, size)), *carry, i)

    return _loop(0, across * along, run, (x, h0))


def linear_scan_grad(
    a: Array, h: Array, h0: Array, dh: Array, dlast: Array, *, reverse: bool
) -> tuple[Array, Array, Array]:
    """da, dx, dh0 of `linear_scan` in one pass: the reversed scan and its products together.

    The adjoint λ_t = dh_t + a_{t+1} λ_{t+1} is dx and overwrites dh; da_t = λ_t h_{t-1}. The inner
    loop carries λ and not a λ: only then XLA updates dh in place.
    """
    batch, time, dim = h.shape
    wide = h0.dtype
    size = _block_length(time, dim)
    samples, across, along = _grid(batch, time, size, dim)
    if across * along == 1:
        size, along = -(-time // 2), 2
    place = functools.partial(
        _place, samples=samples, along=along, size=size, time=time, flipped=True, reverse=reverse
    )

    @_one_kernel
    def block(a, h, edge, da, dx, dh0, i):
        corner, _, start, first = place(i)

        def at(j):
            return np.int32(size - 1) - j if reverse else j

        def sample(s, carry):
            da, dx, dh0 = carry
            b = corner + s
            end = at(np.int32(size - 1))
            lam = _row(dx, b, start + end).astype(wide) + _cut(dh0, b, 1, 0)[:, None]
            dx = _put_row(dx, lam, b, start + end)

            def step(i, carry):
                lam, da, dx = carry
                j = np.int32(size - 1) - i
                t, before = at(j), at(j - _ONE)
                da = _put_row(da, _row(h, s, before).astype(wide) * lam, b, start + t)
                dx_t = _row(dx, b, start + before).astype(wide)
                lam = _row(a, s, t).astype(wide) * lam + dx_t
                return lam, da, _put_row(dx, lam, b, start + before)

            lam, da, dx = _loop(0, np.int32(size - 1) - first, step, (lam, da, dx))
            da = _put_row(da, _cut(edge, s, 1, 0)[:, None] * lam, b, start + at(first))
            lam = _row(a, s, at(first)).astype(wide) * lam
            return da, dx, _put(dh0, lam[:, 0], b, 0)

        return _loop(0, samples, sample, (da, dx, dh0))

    def run(i, carry):
        b, k, start, _ = place(i)
        done = k * np.int32(size)
        before = np.int32(time) - done if reverse else done - _ONE
        edge = _get(h, (b, jnp.clip(before, 0, time - 1)), (samples, 1))[:, 0].astype(wide)
        edge = jnp.where(k == 0, _get(h0, (b,), (samples,)), edge)
        a_k, h_k = (_get(v, (b, start), (samples, size)) for v in (a, h))
        return block(a_k, h_k, edge, *carry, i)

    return _loop(0, across * along, run, (jnp.zeros_like(a), dh, dlast))


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


def _never_constant(x: Array, i: Any) -> Array:
    """x, in a form that XLA cannot fold to a constant; i ≥ 0 is the index of a running loop."""
    return jnp.where(i < 0, jnp.zeros_like(x), x)


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
    batch, time, dim = u.shape
    wide = h0.dtype
    size, blocks = selective_length(time, chunk)
    samples, across, along = _grid(batch, time, size, dim)
    part = (samples, size)
    place = functools.partial(
        _place, samples=samples, along=along, size=size, time=time, flipped=False
    )

    @_one_kernel
    def block(u, dt, a, b_in, c_out, y, h, i):
        first = place(i)[-1]

        def sample(b, carry):
            def step(t, carry):
                h, y = carry
                h = _selective_step(a, u, dt, b_in, b, t, h, wide)[1]
                c_t = _row(c_out, b, t)[0, 0].astype(wide)
                return h, _put_row(y, _sum(c_t[:, None] * h, 0), b, t)

            y, last = carry
            h, y = _loop(first, size, step, (_cut(last, b, 1, 0)[0], y))
            return y, _put(last, h[None], b, 0)

        return _loop(0, samples, sample, (y, h))

    def run(i, carry):
        y, last, kept = carry
        b, k, start, _ = place(i)
        h = _get(last, (b,), (samples,))
        if keep:
            kept = _set(kept, h[:, None], (b, k))
        u_k, dt_k, b_k, c_k, y_k = (_get(v, (b, start), part) for v in (u, dt, b_in, c_out, y))
        y_k, h = block(u_k, dt_k, _never_constant(a, i), b_k, c_k, y_k, h, i)
        return _set(y, y_k, (b, start)), _set(last, h, (b,)), kept

    kept = None
    if keep:
        kept = jnp.broadcast_to(jnp.zeros_like(h0)[:, None], (batch, blocks, *h0.shape[1:]))
    y, h, kept = _loop(0, across * along, run, (jnp.zeros_like(u), h0, kept))
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
    batch, time, dim = u.shape
    wide = dlast.dtype
    size, _ = selective_length(time, chunk)
    samples, across, along = _grid(batch, time, size, dim)
    part = (samples, size)
    place = functools.partial(
        _place, samples=samples, along=along, size=size, time=time, flipped=True
    )

    @_one_kernel
    def block(u, dt, a, b_in, c_out, dy, before, du, ddt, db, dc, da, lam, i):
        first = place(i)[-1]

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
        return _loop(0, samples, sample, (du, ddt, db, dc, da, lam, buffer, buffer))[:6]

    def run(i, carry):
        *long, da, lam = carry
        b, k, start, _ = place(i)
        at = (b, start)
        u_k, dt_k, b_k, c_k, dy_k = (_get(v, at, part) for v in (u, dt, b_in, c_out, dy))
        before = _get(kept, (b, k), (samples, 1))[:, 0]
        sums = [_get(v, at, part) for v in long] + [_get(v, (b,), (samples,)) for v in (da, lam)]
        a_k = _never_constant(a, i)
        *parts, da_k, lam_k = block(u_k, dt_k, a_k, b_k, c_k, dy_k, before, *sums, i)
        long = [_set(v, done, at) for v, done in zip(long, parts)]
        return *long, _set(da, da_k, (b,)), _set(lam, lam_k, (b,))

    start = (jnp.zeros_like(v) for v in (u, dt, b_in, c_out))
    state = (*start, jnp.zeros_like(dlast), dlast)
    du, ddt, db, dc, da, dh0 = _loop(0, across * along, run, state)
    return du, ddt, da, db, dc, dh0
