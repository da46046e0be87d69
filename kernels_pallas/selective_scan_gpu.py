"""Selective scan on GPU (Mosaic GPU): one channel a thread, its N states in registers.

B and C of a tile of time come through shared memory as scalars. The gradient recomputes the states
of a tile from the one that entered it; its sums over channels are taken 128 rows at a time. Where
sequences and channels leave multiprocessors idle, spans of time run side by side: a pass of its own
finds the state (or its cotangent) that enters each.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import common, linear_scan_gpu

LANES = 128  # threads of one warpgroup; one channel each
GROUP = 8  # time steps whose rows are loaded together
ROWS = 128  # (time step, state) pairs per sum over channels
PITCH = LANES + 8  # of their buffer in shared memory: no bank conflicts in rows or columns
MIN_N, MAX_N = 8, 32  # states per channel: fewer are padded, more do not fit shared memory
LOG2_E = 1 / math.log(2)


def _tile(n: int) -> int:
    """Time steps per tile: what the boundary states leave room for in shared memory."""
    return 32 if n <= 16 else 16


def _place(columns: int):
    """This block's sequence, column of channels, and slice of channels."""
    block = lax.axis_index("block")
    column = lax.rem(block, columns)
    return lax.div(block, columns), column, pl.ds(pl.multiple_of(column * LANES, LANES), LANES)


def _fill(refs, copies, b, at):
    """Copies rows of B and C into shared memory, between two barriers."""
    plgpu.commit_smem()
    for ref, copy in zip(refs, copies, strict=True):
        copy[...] = ref[b, at, :]
    plgpu.commit_smem()


def _advance(h, u, dt, rates, b_copy, t):
    """h after one step; rates are A log2(e)."""
    dtu = dt * u
    return [jnp.exp2(dt * a) * s + dtu * b_copy[t, n] for n, (s, a) in enumerate(zip(h, rates))]


def _forward_kernel(*refs, time, columns, n, gated):
    """u, delta, [z], A log2(e), B, C, D, h0 -> y, states entering each tile, last state."""
    streams, rest = refs[: 2 + gated], refs[2 + gated :]
    a_ref, b_ref, c_ref, d_ref, h0_ref, y_ref, start_ref, last_ref, b_copy, c_copy = rest
    b, _, at_d = _place(columns)
    tile = _tile(n)
    rates = [a_ref[k, at_d] for k in range(n)]
    skip = d_ref[0, at_d]

    def rows(t0):
        t0 = jnp.minimum(t0, time - GROUP)
        return [[ref[b, t0 + k, at_d] for ref in streams] for k in range(GROUP)]

    def group(j, carry, t0):
        h, ready = carry
        ahead = rows(t0 + (j + 1) * GROUP)
        for k in range(GROUP):
            u, dt, *z = (v.astype(jnp.float32) for v in ready[k])
            t = j * GROUP + k
            h = _advance(h, u, dt, rates, b_copy, t)
            y = skip * u
            for s, state in enumerate(h):
                y = y + state * c_copy[t, s]
            if gated:
                y = y * z[0] / (1 + jnp.exp2(-LOG2_E * z[0]))
            y_ref[b, t0 + t, at_d] = y.astype(y_ref.dtype)
        return h, ahead

    def one_tile(i, carry):
        for k, state in enumerate(carry[0]):
            start_ref[b, i, k, at_d] = state
        t0 = i * tile
        _fill((b_ref, c_ref), (b_copy, c_copy), b, pl.ds(t0, tile))
        return lax.fori_loop(0, tile // GROUP, functools.partial(group, t0=t0), carry)

    h = [h0_ref[b, k, at_d] for k in range(n)]
    h, _ = lax.fori_loop(0, time // tile, one_tile, (h, rows(jnp.int32(0))))
    for k, state in enumerate(h):
        last_ref[b, k, at_d] = state


def _row_sums(ref, interpret):
    """Sums over channels of a (ROWS, PITCH) buffer."""
    at = slice(None), pl.ds(0, LANES)
    if interpret:  # the interpreter knows no register layouts
        return jnp.sum(ref[at], axis=1)
    return jnp.sum(plgpu.load(ref, at, layout=plgpu.Layout.WGMMA), axis=1)


def _backward_kernel(*refs, time, columns, n, gated, interpret):
    """Tiles in reverse; in each, sub-tiles of ROWS / n steps in reverse.

    u, delta, [z], A log2(e), B, C, D, states entering tiles, dy, dlast
    -> du, ddelta, [dz], parts of dA (B), dB and dC (columns, B), dD (B), and dh0
    """
    k_in = 2 + gated
    streams, rest = refs[:k_in], list(refs[k_in:])
    a_ref, b_ref, c_ref, d_ref, start_ref, dy_ref, dlast_ref, *rest = rest
    grads, rest = rest[:k_in], rest[k_in:]
    da_ref, db_ref, dc_ref, dd_ref, dh0_ref, b_copy, c_copy, bound, keep, prod = rest
    b, column, at_d = _place(columns)
    tile, sub, channel = _tile(n), ROWS // n, pl.ds(0, LANES)
    rates = [a_ref[k, at_d] for k in range(n)]
    skip = d_ref[0, at_d]

    def rows(refs, t0):
        return [[ref[b, t0 + k, at_d].astype(jnp.float32) for ref in refs] for k in range(sub)]

    def one_tile(i, carry):
        i = time // tile - 1 - i
        t0 = i * tile
        _fill((b_ref, c_ref), (b_copy, c_copy), b, pl.ds(t0, tile))

        def to_boundary(j, h):
            for k, state in enumerate(h):
                bound[j * n + k] = state
            for k, (u, dt) in enumerate(rows(streams[:2], t0 + j * sub)):
                h = _advance(h, u, dt, rates, b_copy, j * sub + k)
            return h

        lax.fori_loop(0, tile // sub, to_boundary, [start_ref[b, i, k, at_d] for k in range(n)])

        def one_sub(j, carry):
            g, da, dd = carry
            j = tile // sub - 1 - j
            loaded = rows((*streams, dy_ref), t0 + j * sub)
            h = [bound[j * n + k] for k in range(n)]
            for k, (u, dt, *_) in enumerate(loaded):
                for s, state in enumerate(h):
                    keep[k * n + s, channel] = state
                if k < sub - 1:
                    h = _advance(h, u, dt, rates, b_copy, j * sub + k)
            for k in reversed(range(sub)):
                t = j * sub + k
                u, dt, *z, dout = loaded[k]
                dtu, dy = dt * u, dout
                if gated:
                    gate = 1 / (1 + jnp.exp2(-LOG2_E * z[0]))
                    dy = dout * z[0] * gate
                y, du, ddt = skip * u, skip * dy, jnp.zeros_like(dy)
                through_b = jnp.zeros_like(dy)
                new_g, new_da = [], []
                for s in range(n):
                    decay = jnp.exp2(dt * rates[s])
                    kept = decay * keep[k * n + s, channel]
                    state = kept + dtu * b_copy[t, s]
                    g_s = g[s] + c_copy[t, s] * dy
                    prod[k * n + s, channel] = state * dy
                    keep[k * n + s, channel] = g_s * dtu
                    through_b = through_b + g_s * b_copy[t, s]
                    through_a = g_s * kept
                    ddt = ddt + through_a * rates[s]
                    new_da.append(da[s] + through_a * dt)
                    new_g.append(decay * g_s)
                    y = y + state * c_copy[t, s]
                g, da, dd = new_g, new_da, dd + dy * u
                du = du + dt * through_b
                ddt = ddt / LOG2_E + u * through_b
                dz = [dout * y * gate * (1 + z[0] * (1 - gate))] if gated else []
                for ref, value in zip(grads, (du, ddt, *dz), strict=True):
                    ref[b, t0 + t, at_d] = value.astype(ref.dtype)
            plgpu.commit_smem()
            at = pl.ds((t0 + j * sub) * n, ROWS)
            db_ref[column, b, at] = _row_sums(keep, interpret)
            dc_ref[column, b, at] = _row_sums(prod, interpret)
            plgpu.commit_smem()
            return g, da, dd

        return lax.fori_loop(0, tile // sub, one_sub, carry)

    g = [dlast_ref[b, k, at_d] for k in range(n)]
    zero = [jnp.zeros_like(v) + 0 * v for v in g]
    g, da, dd = lax.fori_loop(0, time // tile, one_tile, (g, zero, zero[0]))
    for k in range(n):
        da_ref[b, k, at_d] = da[k]
        dh0_ref[b, k, at_d] = g[k]
    dd_ref[b, at_d] = dd


def _summary_kernel(*refs, time, columns, n, gated, adjoint):
    """What leaves a span of time that zero enters.

    delta, u, A log2(e), B, zeros -> the last state, or, against time,
    delta, dy, [z], A log2(e), C, zeros -> the cotangent of the state before the first step.
    """
    streams, rest = refs[: 2 + gated], refs[2 + gated :]
    a_ref, map_ref, zero_ref, out_ref, copy = rest
    b, _, at_d = _place(columns)
    tile = _tile(n)
    rates = [a_ref[k, at_d] for k in range(n)]
    order = list(reversed(range(GROUP))) if adjoint else list(range(GROUP))

    def one_tile(i, state):
        t0 = ((time // tile - 1 - i) if adjoint else i) * tile
        _fill((map_ref,), (copy,), b, pl.ds(t0, tile))

        def group(j, state):
            first = ((tile // GROUP - 1 - j) if adjoint else j) * GROUP
            loaded = [[ref[b, t0 + first + k, at_d] for ref in streams] for k in range(GROUP)]
            for k in order:
                dt, v, *z = (x.astype(jnp.float32) for x in loaded[k])
                if adjoint:
                    v = v * z[0] / (1 + jnp.exp2(-LOG2_E * z[0])) if gated else v
                    added = [g + copy[first + k, m] * v for m, g in enumerate(state)]
                    state = [jnp.exp2(dt * a) * g for a, g in zip(rates, added)]
                else:
                    state = _advance(state, v, dt, rates, copy, first + k)
            return state

        return lax.fori_loop(0, tile // GROUP, group, state)

    state = [zero_ref[b, k, at_d] for k in range(n)]
    for k, value in enumerate(lax.fori_loop(0, time // tile, one_tile, state)):
        out_ref[b, k, at_d] = value


class _Layout:
    """Sizes and padding shared by both passes."""

    def __init__(self, u, n):
        self.batch, self.time, self.dim = u.shape
        self.n = MIN_N if n <= MIN_N else 16 if n <= 16 else MAX_N
        self.short = n
        self.long = common.round_up(self.time, _tile(self.n))
        self.wide = common.round_up(self.dim, LANES)
        self.columns, self.tiles = self.wide // LANES, self.long // _tile(self.n)
        self.blocks = self.batch * self.columns
        self.copies = [plgpu.SMEM((_tile(self.n), self.n), jnp.float32)] * 2

    def _grow(self, v, **sizes):
        want = [sizes.get(str(k), s) for k, s in enumerate(v.shape)]
        pads = [(0, w - s) for w, s in zip(want, v.shape)]
        return jnp.pad(v, pads) if any(p for _, p in pads) else v

    def stream(self, v):
        """(B, T, D): zero steps leave the state as it is."""
        return self._grow(v, **{"1": self.long, "2": self.wide})

    def small(self, v):
        """B or C (B, T, N)."""
        return self._grow(v.astype(jnp.float32), **{"1": self.long, "2": self.n})

    def state(self, v):
        """(..., N, D)."""
        return self._grow(v, **{str(v.ndim - 2): self.n, str(v.ndim - 1): self.wide})

    def channels(self, v):
        """(1, D)."""
        return self._grow(v, **{"1": self.wide})

    def cut(self, v):
        """The part of (..., N, D) that was asked for."""
        return v[..., : self.short, : self.dim]


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _kernel(body, at, out_type, scratch, name, interpret):
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        # One flat axis: it becomes the launch's x dimension, the only one allowed past 65,535.
        grid=(at.blocks,),
        grid_names=("block",),
        # Barriers are placed by hand, where threads read what others wrote. exp2 may be the
        # hardware's (2 ulp): sixteen of them per channel and step bound this kernel.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        interpret=interpret or None,
        kernel_name=name,
    )


def _forward(u, delta, a, b, c, d, z, h0, interpret):
    """`forward` in one span of time."""
    at, gated = _Layout(u, a.shape[0]), z is not None
    streams = [at.stream(v) for v in (u, delta, *([z] if gated else []))]
    state = _f32(at.batch, at.n, at.wide)
    body = functools.partial(_forward_kernel, time=at.long, columns=at.columns, n=at.n, gated=gated)
    outs = (
        jax.ShapeDtypeStruct(streams[0].shape, u.dtype),
        _f32(at.batch, at.tiles, at.n, at.wide),
        state,
    )
    y, start, last = _kernel(body, at, outs, at.copies, "selective_scan", interpret)(
        *streams, at.state(a * LOG2_E), at.small(b), at.small(c), at.channels(d[None]), at.state(h0)
    )
    return y[:, : at.time, : at.dim], at.cut(last), at.cut(start)


def _backward(u, delta, a, b, c, d, z, start, dy, dlast, interpret):
    """`backward` in one span of time."""
    at, gated = _Layout(u, a.shape[0]), z is not None
    inputs = (u, delta, *([z] if gated else []))
    streams = [at.stream(v) for v in inputs]
    state, part = _f32(at.batch, at.n, at.wide), _f32(at.columns, at.batch, at.long * at.n)
    body = functools.partial(
        _backward_kernel, time=at.long, columns=at.columns, n=at.n, gated=gated,
        interpret=bool(interpret),
    )  # fmt: skip
    outs = (
        *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in streams),
        state, part, part, _f32(at.batch, at.wide), state,
    )  # fmt: skip
    subs = _tile(at.n) * at.n // ROWS
    scratch = [
        *at.copies,
        plgpu.SMEM((subs * at.n, LANES), jnp.float32),
        plgpu.SMEM((ROWS, PITCH), jnp.float32),
        plgpu.SMEM((ROWS, PITCH), jnp.float32),
    ]
    *grads, da, db, dc, dd, dh0 = _kernel(body, at, outs, scratch, "selective_scan_bwd", interpret)(
        *streams, at.state(a * LOG2_E), at.small(b), at.small(c), at.channels(d[None]),
        at.state(start), at.stream(dy), at.state(dlast),
    )  # fmt: skip
    du, ddelta, *dz = (v[:, : at.time, : at.dim] for v in grads)
    small = [
        v.sum(0).reshape(at.batch, at.long, at.n)[:, : at.time, : at.short].astype(like.dtype)
        for v, like in ((db, b), (dc, c))
    ]
    return (
        du, ddelta, at.cut(da).sum(0), *small, dd.sum(0)[: at.dim], dz[0] if gated else None,
        at.cut(dh0),
    )  # fmt: skip


def _spans(shape: tuple[int, ...], n: int) -> int:
    """How many spans of time run side by side for (B, T, D): 1 if B and D fill the chip."""
    batch, time, dim = shape
    tiles = common.cdiv(time, _tile(n))
    blocks = batch * common.cdiv(dim, LANES)
    wanted = min(linear_scan_gpu.FILL // blocks, time // linear_scan_gpu.MIN_SPAN)
    if wanted < 4:  # the pass that finds the entering states takes most of what is won
        return 1
    return max(k for k in range(1, wanted + 1) if tiles % k == 0)


class _Cut:
    """A sequence as spans of time, whole tiles each, in the place of sequences."""

    def __init__(self, u, delta, a):
        self.batch, self.time, dim = u.shape
        self.spans = _spans(u.shape, a.shape[0])
        self.long = common.round_up(self.time, _tile(a.shape[0]))
        self.a, self.delta = a, self.rows(delta)
        total = self.delta.astype(jnp.float32).sum(1).reshape(self.batch, self.spans, 1, dim)
        self.factor = jnp.exp(total * a)  # by which a state shrinks over each span

    def rows(self, v):
        """(B, T, .) as (B spans, T / spans, .); steps added at the end are zero."""
        if v is None:
            return None
        v = jnp.pad(v, [(0, 0), (0, self.long - self.time), (0, 0)])
        return v.reshape(self.batch * self.spans, -1, v.shape[-1])

    def whole(self, v):
        """The inverse of `rows`."""
        return v.reshape(self.batch, self.long, -1)[:, : self.time]

    def entering(self, streams, maps, first, adjoint, interpret):
        """The state, or its cotangent, that enters each span, (B spans, N, D)."""
        at = _Layout(self.delta, self.a.shape[0])
        zero = jnp.zeros((at.batch, at.n, at.wide), jnp.float32)
        inputs = [at.stream(v) for v in (self.delta, *streams)]
        body = functools.partial(
            _summary_kernel, time=at.long, columns=at.columns, n=at.n, gated=len(inputs) > 2,
            adjoint=adjoint,
        )  # fmt: skip
        name = f"selective_scan_{'adjoint_' if adjoint else ''}summary"
        out = _kernel(body, at, _f32(*zero.shape), at.copies[:1], name, interpret)(
            *inputs, at.state(self.a * LOG2_E), at.small(maps), zero
        )
        left = at.cut(out).reshape(self.factor.shape)
        entering = linear_scan_gpu.chain(self.factor, left, first, adjoint)
        return entering.reshape(-1, *first.shape[1:])


def forward(u, delta, a, b, c, d, z, h0, *, interpret=False):
    """y (B, T, D), the last state (B, N, D) and the states that enter each tile of time.

    Args:
      u, delta, z: (B, T, D); z may be None.
      a: float32 (N, D). b, c: (B, T, N). d: float32 (D,). h0: float32 (B, N, D).
      interpret: parameters of the Mosaic GPU interpreter, or False.
    """
    if _spans(u.shape, a.shape[0]) == 1:
        return _forward(u, delta, a, b, c, d, z, h0, interpret)
    cut = _Cut(u, delta, a)
    u, b, c, z = map(cut.rows, (u, b, c, z))
    h0 = cut.entering((u,), b, h0, False, interpret)
    y, last, start = _forward(u, cut.delta, a, b, c, d, z, h0, interpret)
    last = last.reshape(cut.factor.shape)[:, -1]
    return cut.whole(y), last, start.reshape(cut.batch, -1, *start.shape[2:])


def backward(u, delta, a, b, c, d, z, start, dy, dlast, *, interpret=False):
    """Cotangents of u, delta, a, b, c, d, z, h0; `start` as saved by `forward`."""
    if _spans(u.shape, a.shape[0]) == 1:
        return _backward(u, delta, a, b, c, d, z, start, dy, dlast, interpret)
    cut = _Cut(u, delta, a)
    u, b, c, z, dy = map(cut.rows, (u, b, c, z, dy))
    dlast = cut.entering((dy,) if z is None else (dy, z), c, dlast, True, interpret)
    start = start.reshape(cut.batch * cut.spans, -1, *start.shape[2:])
    du, ddelta, da, db, dc, dd, dz, dh0 = _backward(
        u, cut.delta, a, b, c, d, z, start, dy, dlast, interpret
    )
    du, ddelta, db, dc = map(cut.whole, (du, ddelta, db, dc))
    dz = None if dz is None else cut.whole(dz)
    return du, ddelta, da, db, dc, dd, dz, dh0.reshape(cut.factor.shape)[:, 0]
