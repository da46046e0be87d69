"""The fused fixed-point iteration on TPU (Mosaic): all channels of a chunk of time in VMEM.

Time chunks run in order; the states of the two scans and the largest change stay on the chip
between them. Numbers per token travel with time in lanes: (r, T), not (T, r) padded to 128 lanes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import common

MAX_RANK = 32
BLOCK_BYTES = 8 * 2**20  # of VMEM for the blocks with channels, double buffers included
VMEM_BYTES = 64 * 2**20  # what wide channels may take: a block has at least 128 steps


def _kernel(*refs, time: int, rows: int, rank: int):
    """All channels of one sequence, chunk after chunk of time.

    Reads λ, Bx, ū, weights (of the iterate, then of its change), masses (the same) and h0; writes
    ū·(Bx - h), the residual and, where there is a place for it, h.
    """
    decay_ref, bx_ref, unit_ref, weight_ref, mass_ref, h0_ref, along_ref, residual_ref, *rest = refs
    h_refs, (state_ref, change_ref, weight_t, along_t) = rest[:-4], rest[-4:]
    step = pl.program_id(1)
    block_t = bx_ref.shape[1]
    mass = [mass_ref[:, :, k : k + 1] for k in range(2)]

    @pl.when(step == 0)
    def _reset():
        state_ref[...] = mass[0] * h0_ref[...]
        change_ref[...] = mass[1] * h0_ref[...]
        residual_ref[...] = jnp.zeros_like(residual_ref)

    weight_t[...] = weight_ref[0].T

    def tile(i, carry):
        states, worst = carry
        at = pl.ds(pl.multiple_of(i * rows, rows), rows)
        decay, bx = (ref[:, at, :].astype(jnp.float32) for ref in (decay_ref, bx_ref))
        units = [unit_ref[:, k, at, :].astype(jnp.float32) for k in range(rank)]
        weights = weight_t[at, :][None]
        xs = []
        for k in range(2):
            x = mass[k] * bx
            for j, unit in enumerate(units):
                at_w = k * rank + j
                x = x - weights[..., at_w : at_w + 1] * unit
            xs.append((1 - decay) * x)
        inside = None
        if time % block_t:  # past the end the states stay as they are and count for nothing
            t = step * block_t + i * rows + lax.broadcasted_iota(jnp.int32, decay.shape, 1)
            inside = t < time
            decay = jnp.where(inside, decay, 1)
            xs = [jnp.where(inside, x, 0) for x in xs]
        out: list[list[jax.Array]] = [[], []]
        for r in range(0, rows, common.SUBLANES):
            part = slice(r, r + common.SUBLANES)
            p, ys = common.tile_compose(decay[:, part], [x[:, part] for x in xs], False)
            tiles = [p * s + y for s, y in zip(states, ys, strict=True)]
            states = [common.last_row(v, False) for v in tiles]
            for k, v in enumerate(tiles):
                out[k].append(v)
        h, change = (v[0] if len(v) == 1 else jnp.concatenate(v, axis=1) for v in out)
        for ref in h_refs:  # one, if h is kept
            ref[:, at, :] = h.astype(ref.dtype)
        # Past the end this may be anything: the caller cuts it off.
        for j, unit in enumerate(units):
            along = jnp.sum(unit * (bx - h), axis=-1, keepdims=True)
            along_t[at, j : j + 1] = along[0]
        largest = [jnp.max(jnp.abs(v), axis=-1, keepdims=True) for v in (change, h)]
        ratio = largest[0] / (largest[1] + common.EPS)
        if inside is not None:
            ratio = jnp.where(inside[..., :1], ratio, 0)
        return states, jnp.maximum(worst, jnp.max(ratio, axis=1, keepdims=True))

    start = [state_ref[...], change_ref[...]], residual_ref[...]
    (state, change), worst = lax.fori_loop(0, block_t // rows, tile, start)
    state_ref[...] = state
    change_ref[...] = change
    residual_ref[...] = worst
    along_ref[0] = along_t[...].T


def forward(decay, bx, units, weights, mass, h0, keep, chunk, interpret):
    """ū·(Bx - h) (B, T, r), the residual (B,) and h (B, T, D) or None.

    Args:
      decay, bx: (B, T, D). units: (B, T, r, D). h0: float32 (B, D).
      weights: float32 (B, T, 2 r), of the iterate and of its change. mass: float32 (B, 2), same.
      keep, chunk, interpret: as for `fused_fixed_point`.
    """
    batch, time, dim = bx.shape
    rank = units.shape[2]
    rows = common.row_tile(decay.dtype, bx.dtype, units.dtype)
    itemsize = max(jnp.dtype(v.dtype).itemsize for v in (decay, bx, units))
    fits = BLOCK_BYTES // (2 * (2 + rank + keep) * dim * itemsize)
    # Time is in lanes for the numbers per token: whole registers of 128, or all of it.
    fits = max(common.LANES, min(256, fits // common.LANES * common.LANES))
    block_t = common.round_up(min(chunk or fits, time), rows)
    chunks = common.cdiv(time, block_t)
    tokens = common.round_up(2 * rank, common.SUBLANES), common.round_up(rank, common.SUBLANES)
    grow = [(0, 0), (0, tokens[0] - 2 * rank), (0, chunks * block_t - time)]
    weights = jnp.pad(weights.swapaxes(1, 2), grow)

    per_time = pl.BlockSpec((1, block_t, dim), lambda b, c: (b, c, 0))
    per_unit = pl.BlockSpec((1, rank, block_t, dim), lambda b, c: (b, 0, c, 0))

    def per_token(count):
        return pl.BlockSpec((1, count, block_t), lambda b, c: (b, 0, c))

    def per_sequence(width):
        return pl.BlockSpec((1, 1, width), lambda b, c: (b, 0, 0))

    along, residual, *h = pl.pallas_call(
        functools.partial(_kernel, time=time, rows=rows, rank=rank),
        grid=(batch, chunks),
        in_specs=[
            per_time,
            per_time,
            per_unit,
            per_token(tokens[0]),
            per_sequence(2),
            per_sequence(dim),
        ],
        out_specs=[per_token(tokens[1]), per_sequence(1), *[per_time] * keep],
        out_shape=[
            jax.ShapeDtypeStruct((batch, tokens[1], chunks * block_t), jnp.float32),
            jax.ShapeDtypeStruct((batch, 1, 1), jnp.float32),
            *[jax.ShapeDtypeStruct(bx.shape, bx.dtype)] * keep,
        ],
        scratch_shapes=[
            *[pltpu.VMEM((1, 1, dim), jnp.float32)] * 2,
            *[pltpu.VMEM((block_t, count), jnp.float32) for count in tokens],
        ],
        compiler_params=common.time_semantics(1, vmem_bytes=VMEM_BYTES),
        interpret=interpret,
        name="fused_fixed_point",
    )(decay, bx, units.swapaxes(1, 2), weights, mass[:, None], h0[:, None])
    return along[:, :rank, :time].swapaxes(1, 2), residual[:, 0, 0], h[0] if keep else None
