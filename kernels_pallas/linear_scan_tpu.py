"""Diagonal linear recurrence on TPU (Mosaic): one kernel body for both directions and both passes.

The grid is (batch, channels, time chunks) with time innermost and in order; the carry lives in VMEM
scratch and is reset at the first chunk. Ragged shapes are handled in the kernel: no padded copies.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import common

MAX_BLOCK = 512  # channels (times batch rows) in one block: four lanes' worth of registers a row
MAX_CHUNK = 256  # time steps in one block


def _blocks(shape: tuple[int, int, int], rows: int, chunk: int | None) -> tuple[int, int, int]:
    """Block (batch, time, channels) for arrays of `shape`; few channels take more batch rows."""
    batch, time, dim = shape
    block_d = dim if dim <= MAX_BLOCK else MAX_BLOCK
    block_b = max(1, min(batch, MAX_BLOCK // common.round_up(block_d, common.LANES)))
    block_t = min(common.round_up(time, rows), common.round_up(chunk or MAX_CHUNK, rows))
    return block_b, block_t, block_d


def _scan_kernel(*refs, time: int, rows: int, reverse: bool, adjoint: bool):
    """One (batch, time, channel) block.

    Forward: reads a, x, h0; writes h_t = a_t h_{t-1} + x_t and the last state.
    Adjoint: runs against the forward's direction. Reads a, the cotangents of h and of the last
    state (in the place of h0), h, h's neighbouring rows and h0; with c_t = a_{t+1} g_{t+1} it
    writes g_t = dh_t + c_t (cotangent of x), g_t h_{t-1} (that of a) and a_0 g_0 (that of h0).
    """
    if adjoint:
        a_ref, x_ref, first_ref, h_ref, edge_ref, h0_ref, out_ref, da_ref, last_ref, carry_ref = (
            refs
        )
    else:
        a_ref, x_ref, first_ref, out_ref, last_ref, carry_ref = refs
    backwards = reverse != adjoint
    step, steps = pl.program_id(2), pl.num_programs(2)
    chunk = (steps - 1 - step) if backwards else step
    block_t = a_ref.shape[1]
    tiles = block_t // rows
    ragged = time % block_t != 0

    @pl.when(step == 0)
    def _():
        carry_ref[...] = first_ref[...]

    def tile(i, carry):
        i = (tiles - 1 - i) if backwards else i
        at = pl.ds(pl.multiple_of(i * rows, rows), rows)
        a = a_ref[:, at, :].astype(jnp.float32)
        x = x_ref[:, at, :].astype(jnp.float32)
        if adjoint or ragged:
            t = chunk * block_t + i * rows + lax.broadcasted_iota(jnp.int32, a.shape, 1)
        if ragged:  # rows past the end leave the state as it is
            a = jnp.where(t < time, a, 1.0)
            x = jnp.where(t < time, x, 0.0)
        out: list[jax.Array] = []
        for r in range(0, rows, common.SUBLANES):
            r = rows - common.SUBLANES - r if backwards else r
            a8, x8 = a[:, r : r + common.SUBLANES], x[:, r : r + common.SUBLANES]
            if adjoint:
                # The carry already holds the neighbouring tile's a·g, so its factor here is 1.
                g = common.tile_scan(
                    common.shift_rows(a8, jnp.ones_like(carry), backwards), x8, carry, backwards
                )
                carry = common.last_row(a8 * g, backwards)
            else:
                g = common.tile_scan(a8, x8, carry, backwards)
                carry = common.last_row(g, backwards)
            out.insert(0, g) if backwards else out.append(g)
        g = out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)
        out_ref[:, at, :] = g.astype(out_ref.dtype)
        if adjoint:
            before = i + 1 if reverse else i - 1
            inside = jnp.clip(before, 0, tiles - 1)
            near = h_ref[:, pl.ds(pl.multiple_of(inside * rows, rows), rows), :]
            near = common.last_row(near.astype(jnp.float32), reverse)
            edge = common.last_row(edge_ref[...].astype(jnp.float32), reverse)
            near = jnp.where(before == inside, near, edge)
            h = common.shift_rows(h_ref[:, at, :].astype(jnp.float32), near, reverse)
            h = jnp.where(t == (time - 1 if reverse else 0), h0_ref[...], h)
            da_ref[:, at, :] = (g * h).astype(da_ref.dtype)
        return carry

    carry = lax.fori_loop(0, tiles, tile, carry_ref[...])
    carry_ref[...] = carry

    @pl.when(step == steps - 1)
    def _():
        last_ref[...] = carry


def _call(arrays, first, *, reverse, adjoint, h0=None, out_dtypes, chunk, interpret):
    """Runs the kernel: arrays (a, x) or (a, dh, h) of (B, T, D); first and h0 (B, 1, D) float32."""
    batch, time, dim = arrays[0].shape
    rows = common.row_tile(*(v.dtype for v in arrays), *out_dtypes)
    block = _blocks((batch, time, dim), rows, chunk)
    grid = (common.cdiv(batch, block[0]), common.cdiv(dim, block[2]), common.cdiv(time, block[1]))
    backwards = reverse != adjoint
    per_time = common.time_spec(block, grid[2], backwards)
    per_channel = pl.BlockSpec((block[0], 1, block[2]), lambda b, d, c: (b, 0, d))
    in_specs = [per_time, per_time, per_channel]
    operands = [*arrays[:2], first]
    if adjoint:
        # h once more, one tile of rows: the one that holds the row just outside the chunk.
        per_chunk, count = block[1] // rows, common.cdiv(time, rows)

        def edge(b, d, c):
            c = grid[2] - 1 - c if backwards else c
            at = (c + 1) * per_chunk if reverse else c * per_chunk - 1
            return b, jnp.clip(at, 0, count - 1), d

        in_specs += [per_time, pl.BlockSpec((block[0], rows, block[2]), edge), per_channel]
        operands += [arrays[2], arrays[2], h0]
    state = jax.ShapeDtypeStruct((batch, 1, dim), jnp.float32)
    return pl.pallas_call(
        functools.partial(_scan_kernel, time=time, rows=rows, reverse=reverse, adjoint=adjoint),
        grid=grid,
        in_specs=in_specs,
        out_specs=[per_time] * len(out_dtypes) + [per_channel],
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, d) for d in out_dtypes] + [state],
        scratch_shapes=[pltpu.VMEM((block[0], 1, block[2]), jnp.float32)],
        compiler_params=common.time_semantics(2),
        interpret=interpret,
        name="linear_scan_bwd" if adjoint else "linear_scan",
    )(*operands)


def _aggregate_kernel(
    a_ref, x_ref, last_ref, prod_ref, state_ref, factor_ref, *, time, rows, reverse
):
    """The composition of all steps of one (batch, channel) block: last state from 0, product."""
    step, steps = pl.program_id(2), pl.num_programs(2)
    chunk = (steps - 1 - step) if reverse else step
    block_t = a_ref.shape[1]
    tiles = block_t // rows

    @pl.when(step == 0)
    def _reset():
        state_ref[...] = jnp.zeros_like(state_ref)
        factor_ref[...] = jnp.ones_like(factor_ref)

    def tile(i, carry):
        state, factor = carry
        i = (tiles - 1 - i) if reverse else i
        at = pl.ds(pl.multiple_of(i * rows, rows), rows)
        a, x = (ref[:, at, :].astype(jnp.float32) for ref in (a_ref, x_ref))
        if time % block_t:
            t = chunk * block_t + i * rows + lax.broadcasted_iota(jnp.int32, a.shape, 1)
            a, x = jnp.where(t < time, a, 1.0), jnp.where(t < time, x, 0.0)
        for r in range(0, rows, common.SUBLANES):
            r = rows - common.SUBLANES - r if reverse else r
            part = slice(r, r + common.SUBLANES)
            p, y = common.tile_compose(a[:, part], x[:, part], reverse)
            p, y = common.last_row(p, reverse), common.last_row(y, reverse)
            state, factor = p * state + y, p * factor
        return state, factor

    state, factor = lax.fori_loop(0, tiles, tile, (state_ref[...], factor_ref[...]))
    state_ref[...], factor_ref[...] = state, factor

    @pl.when(step == steps - 1)
    def _finish():
        last_ref[...], prod_ref[...] = state, factor


def aggregate(a, x, *, reverse=False, chunk=None, interpret=False):
    """The last state from a zero start and the product of a, float32 (B, D); reads a, x once."""
    batch, time, dim = x.shape
    rows = common.row_tile(a.dtype, x.dtype)
    block = _blocks((batch, time, dim), rows, chunk)
    grid = (common.cdiv(batch, block[0]), common.cdiv(dim, block[2]), common.cdiv(time, block[1]))
    per_time = common.time_spec(block, grid[2], reverse)
    per_channel = pl.BlockSpec((block[0], 1, block[2]), lambda b, d, c: (b, 0, d))
    state = jax.ShapeDtypeStruct((batch, 1, dim), jnp.float32)
    last, prod = pl.pallas_call(
        functools.partial(_aggregate_kernel, time=time, rows=rows, reverse=reverse),
        grid=grid,
        in_specs=[per_time, per_time],
        out_specs=[per_channel, per_channel],
        out_shape=[state, state],
        scratch_shapes=[pltpu.VMEM((block[0], 1, block[2]), jnp.float32)] * 2,
        compiler_params=common.time_semantics(2),
        interpret=interpret,
        name="linear_scan_aggregate",
    )(a, x)
    return last[:, 0], prod[:, 0]


def forward(a, x, h0, *, reverse=False, chunk=None, interpret=False):
    """The scan itself.

    Args:
      a, x: (B, T, D), any of the supported float types.
      h0: float32 (B, D).
      reverse: from t = T-1 down to 0.
      chunk: time steps per block (rounded up to whole register tiles); None chooses.
      interpret: as for pallas_call.

    Returns:
      h (B, T, D) in x's type, h_last float32 (B, D).
    """
    h, last = _call(
        (a, x), h0[:, None], reverse=reverse, adjoint=False, out_dtypes=(x.dtype,), chunk=chunk,
        interpret=interpret,
    )  # fmt: skip
    return h, last[:, 0]


def backward(a, h, h0, dh, dlast, *, reverse=False, chunk=None, interpret=False):
    """Cotangents of a, x and h0 for cotangents dh (B, T, D) and dlast float32 (B, D).

    `h` is the forward's output. Five streams over memory: reads a, dh, h; writes dx, da.
    """
    dx, da, dh0 = _call(
        (a, dh, h), dlast[:, None], reverse=reverse, adjoint=True, h0=h0[:, None],
        out_dtypes=(dh.dtype, a.dtype), chunk=chunk, interpret=interpret,
    )  # fmt: skip
    return da, dx, dh0[:, 0]
