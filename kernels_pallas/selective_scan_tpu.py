"""Selective scan on TPU (Mosaic): discretise, recur, contract with C, skip and gate in one pass.

The state (N, channels) stays in registers; per time step only u, delta, z are read and y written.
The gradient recomputes the states of a chunk from the state that entered it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import common

MAX_N = 64  # states per channel: the gradient keeps a chunk of them in VMEM
CHUNK = common.LANES  # time steps per block: B and C arrive with time in the lanes


def _sum_n(x):
    return jnp.sum(x, axis=0, keepdims=True)


def _sum_d(x):
    return jnp.sum(x, axis=1, keepdims=True)


def _lanes(ref, i, rows):
    """Columns for the i-th tile of `rows` time steps of a (1, N, CHUNK) block, moved to lane 0."""
    shift = lax.rem(CHUNK - i * rows, CHUNK)
    return pltpu.roll(ref[0].astype(jnp.float32), shift, 1)


class _Tiles:
    """Reads float32 tiles (rows, channels), zero past the end of time and of the channels."""

    def __init__(self, shape, time, dim, rows, chunk):
        _, self.block_t, self.block_d = shape
        self.time, self.dim, self.rows = time, dim, rows
        self.t0, self.d0 = chunk * self.block_t, pl.program_id(1) * self.block_d

    def at(self, i):
        return pl.ds(pl.multiple_of(i * self.rows, self.rows), self.rows)

    def __call__(self, ref, i):
        x = ref[0, self.at(i), :].astype(jnp.float32)
        if self.time % self.block_t or self.dim % self.block_d:
            t = self.t0 + i * self.rows + lax.broadcasted_iota(jnp.int32, x.shape, 0)
            d = self.d0 + lax.broadcasted_iota(jnp.int32, x.shape, 1)
            x = jnp.where((t < self.time) & (d < self.dim), x, 0.0)
        return x


def _forward_kernel(*refs, time, dim, rows, gated):
    """y = (C h + D u) silu(z) for one (sequence, channel block), chunk after chunk."""
    u_ref, dt_ref, *rest = refs
    z_ref, *rest = rest if gated else [u_ref, *rest]
    a_ref, b_ref, c_ref, d_ref, h0_ref, y_ref, start_ref, last_ref, state_ref = rest
    step = pl.program_id(2)
    read = _Tiles(u_ref.shape, time, dim, rows, step)

    @pl.when(step == 0)
    def _():
        state_ref[...] = h0_ref[0]

    start_ref[0, 0] = state_ref[...]
    a = a_ref[...]

    def tile(i, h):
        u, dt = read(u_ref, i), read(dt_ref, i)
        b, c = _lanes(b_ref, i, rows), _lanes(c_ref, i, rows)
        dtu, out = dt * u, []
        for r in range(rows):
            h = jnp.exp(dt[r : r + 1] * a) * h + dtu[r : r + 1] * b[:, r : r + 1]
            out.append(_sum_n(h * c[:, r : r + 1]))
        y = jnp.concatenate(out, axis=0) + d_ref[...] * u
        if gated:
            y = y * jax.nn.silu(read(z_ref, i))
        y_ref[0, read.at(i), :] = y.astype(y_ref.dtype)
        return h

    h = lax.fori_loop(0, u_ref.shape[1] // rows, tile, state_ref[...])
    state_ref[...] = h

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        last_ref[0] = h


def _backward_kernel(*refs, time, dim, rows, gated):
    """Cotangents of everything, chunks in reverse; states recomputed into VMEM chunk by chunk."""
    u_ref, dt_ref, *rest = refs
    z_ref, *rest = rest if gated else [u_ref, *rest]
    a_ref, b_ref, c_ref, d_ref, start_ref, dy_ref, dlast_ref, *rest = rest
    du_ref, ddt_ref, *rest = rest
    dz_ref, *rest = rest if gated else [du_ref, *rest]
    da_ref, db_ref, dc_ref, dd_ref, dh0_ref, states_ref, g_ref = rest
    step, steps = pl.program_id(2), pl.num_programs(2)
    read = _Tiles(u_ref.shape, time, dim, rows, steps - 1 - step)
    tiles = u_ref.shape[1] // rows
    a, d = a_ref[...], d_ref[...]
    lane = lax.broadcasted_iota(jnp.int32, b_ref.shape[1:], 1)

    @pl.when(step == 0)
    def _():
        g_ref[...] = dlast_ref[0]
        da_ref[...] = jnp.zeros_like(da_ref)
        dd_ref[...] = jnp.zeros_like(dd_ref)

    def recompute(i, h):
        u, dt = read(u_ref, i), read(dt_ref, i)
        b = _lanes(b_ref, i, rows)
        dtu = dt * u
        for r in range(rows):
            states_ref[i * rows + r] = h  # the state before step r
            h = jnp.exp(dt[r : r + 1] * a) * h + dtu[r : r + 1] * b[:, r : r + 1]
        return h

    lax.fori_loop(0, tiles, recompute, start_ref[0, 0])

    def tile(k, carry):
        g, da, db, dc, dd = carry
        i = tiles - 1 - k
        u, dt, dy = read(u_ref, i), read(dt_ref, i), read(dy_ref, i)
        b, c = _lanes(b_ref, i, rows), _lanes(c_ref, i, rows)
        dtu = dt * u
        dout = dy
        if gated:
            z = read(z_ref, i)
            gate = jax.nn.sigmoid(z)
            dy = dout * z * gate
        du: list[jax.Array] = []
        ddt: list[jax.Array] = []
        y: list[jax.Array] = []
        for r in reversed(range(rows)):
            row = slice(r, r + 1)
            before = states_ref[i * rows + r]
            decay = jnp.exp(dt[row] * a)
            kept = decay * before
            h = kept + dtu[row] * b[:, row]
            g = g + c[:, row] * dy[row]
            here = lane == i * rows + r
            dc = jnp.where(here, _sum_d(h * dy[row]), dc)
            db = jnp.where(here, _sum_d(g * dtu[row]), db)
            through_b, through_a = _sum_n(g * b[:, row]), g * kept
            du.insert(0, dt[row] * through_b)
            ddt.insert(0, u[row] * through_b + _sum_n(through_a * a))
            da = da + through_a * dt[row]
            if gated:
                y.insert(0, _sum_n(h * c[:, row]))
            g = decay * g
        at = read.at(i)
        du_ref[0, at, :] = (jnp.concatenate(du, axis=0) + d * dy).astype(du_ref.dtype)
        ddt_ref[0, at, :] = jnp.concatenate(ddt, axis=0).astype(ddt_ref.dtype)
        if gated:
            ungated = jnp.concatenate(y, axis=0) + d * u
            dz = dout * ungated * gate * (1 + z * (1 - gate))
            dz_ref[0, at, :] = dz.astype(dz_ref.dtype)
        return g, da, db, dc, dd + _sum_n(dy * u)

    zero = jnp.zeros(lane.shape, jnp.float32)
    start = (g_ref[...], da_ref[0], zero, zero, dd_ref[0])
    g, da_ref[0], db_ref[0, 0], dc_ref[0, 0], dd_ref[0] = lax.fori_loop(0, tiles, tile, start)
    g_ref[...] = g

    @pl.when(step == steps - 1)
    def _():
        dh0_ref[0] = g


class _Layout:
    """Grid, blocks and padding shared by both passes."""

    def __init__(self, u, streams, n, block_d):
        self.batch, self.time, self.dim = u.shape
        self.n, self.rows = n, common.row_tile(*(v.dtype for v in streams))
        self.block_d = self.dim if self.dim <= block_d else block_d
        self.block_t = min(CHUNK, common.round_up(self.time, self.rows))
        self.chunks = common.cdiv(self.time, self.block_t)
        self.columns = common.cdiv(self.dim, self.block_d)
        self.wide, self.long = self.columns * self.block_d, common.round_up(self.time, CHUNK)
        self.grid = (self.batch, self.columns, self.chunks)

    def specs(self, backwards):
        """Block specs by what an array holds: time x channels, N x time, N x channels, ..."""
        c = (lambda i: self.chunks - 1 - i) if backwards else (lambda i: i)
        n, d = self.n, self.block_d
        return {
            "td": pl.BlockSpec((1, self.block_t, d), lambda b, j, i: (b, c(i), j)),
            "nt": pl.BlockSpec((1, n, CHUNK), lambda b, j, i: (b, 0, c(i))),
            "nt_part": pl.BlockSpec((1, 1, n, CHUNK), lambda b, j, i: (b, j, 0, c(i))),
            "bnd": pl.BlockSpec((1, n, d), lambda b, j, i: (b, 0, j)),
            "b1d": pl.BlockSpec((1, 1, d), lambda b, j, i: (b, 0, j)),
            "nd": pl.BlockSpec((n, d), lambda b, j, i: (0, j)),
            "1d": pl.BlockSpec((1, d), lambda b, j, i: (0, j)),
            "start": pl.BlockSpec((1, 1, n, d), lambda b, j, i: (b, c(i), 0, j)),
        }

    def channels(self, v):
        """(..., D) filled with zeros to whole channel blocks."""
        return jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, self.wide - self.dim)])

    def small(self, v):
        """B or C (B, T, N) as (B, N, T) with whole chunks of time."""
        return jnp.pad(v.swapaxes(1, 2), ((0, 0), (0, 0), (0, self.long - self.time)))


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def forward(u, delta, a, b, c, d, z, h0, *, interpret=False):
    """y (B, T, D) in u's type, the last state (B, N, D) and the states that enter each chunk.

    Args:
      u, delta, z: (B, T, D); z may be None.
      a: float32 (N, D). b, c: (B, T, N). d: float32 (D,). h0: float32 (B, N, D).
      interpret: as for pallas_call.
    """
    streams: list[jax.Array] = [u, delta, *([] if z is None else [z])]
    at = _Layout(u, streams, a.shape[0], 512)
    spec = at.specs(False)
    n, batch = at.n, at.batch
    y, start, last = pl.pallas_call(
        functools.partial(
            _forward_kernel, time=at.time, dim=at.dim, rows=at.rows, gated=z is not None
        ),
        grid=at.grid,
        in_specs=[spec["td"]] * len(streams)
        + [spec["nd"], spec["nt"], spec["nt"], spec["1d"], spec["bnd"]],
        out_specs=[spec["td"], spec["start"], spec["bnd"]],
        out_shape=[
            jax.ShapeDtypeStruct(u.shape, u.dtype),
            _f32(batch, at.chunks, n, at.wide),
            _f32(batch, n, at.wide),
        ],
        scratch_shapes=[pltpu.VMEM((n, at.block_d), jnp.float32)],
        compiler_params=common.time_semantics(2),
        interpret=interpret,
        name="selective_scan",
    )(*streams, at.channels(a), at.small(b), at.small(c), at.channels(d[None]), at.channels(h0))
    return y, last[..., : at.dim], start[..., : at.dim]


def backward(u, delta, a, b, c, d, z, start, dy, dlast, *, interpret=False):
    """Cotangents of u, delta, a, b, c, d, z, h0; `start` as saved by `forward`."""
    streams: list[jax.Array] = [u, delta, *([] if z is None else [z])]
    at = _Layout(u, streams, a.shape[0], common.LANES)
    spec = at.specs(True)
    n, batch = at.n, at.batch
    part = _f32(batch, at.columns, n, at.long)
    outs = pl.pallas_call(
        functools.partial(
            _backward_kernel, time=at.time, dim=at.dim, rows=at.rows, gated=z is not None
        ),
        grid=at.grid,
        in_specs=[spec["td"]] * len(streams)
        + [spec["nd"], spec["nt"], spec["nt"], spec["1d"], spec["start"], spec["td"], spec["bnd"]],
        out_specs=[spec["td"]] * len(streams)
        + [spec["bnd"], spec["nt_part"], spec["nt_part"], spec["b1d"], spec["bnd"]],
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in streams]
        + [_f32(batch, n, at.wide), part, part, _f32(batch, 1, at.wide), _f32(batch, n, at.wide)],
        scratch_shapes=[
            pltpu.VMEM((at.block_t, n, at.block_d), jnp.float32),
            pltpu.VMEM((n, at.block_d), jnp.float32),
        ],
        compiler_params=common.time_semantics(2),
        interpret=interpret,
        name="selective_scan_bwd",
    )(
        *streams, at.channels(a), at.small(b), at.small(c), at.channels(d[None]),
        at.channels(start), dy, at.channels(dlast),
    )  # fmt: skip
    du, ddelta, *rest = outs
    dz, rest = (rest[0], rest[1:]) if z is not None else (None, rest)
    da, db, dc, dd, dh0 = rest
    db, dc = (v.sum(1)[..., : at.time].swapaxes(1, 2) for v in (db, dc))
    return (
        du, ddelta, da.sum(0)[:, : at.dim], db.astype(b.dtype), dc.astype(c.dtype),
        dd.sum((0, 1))[: at.dim], dz, dh0[..., : at.dim],
    )  # fmt: skip
