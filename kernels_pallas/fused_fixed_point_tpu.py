"""The fused fixed-point iteration on TPU (Mosaic): all channels of a chunk of time in VMEM.

Time chunks run in order; the state and the largest change so far stay on the chip between them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import common

BLOCK_BYTES = 8 * 2**20  # of VMEM for all blocks, double buffers included


def mix(v, units, alpha, *, mixer: str, scale: float):
    """Q v on (..., D): `units` r arrays of v's shape, alpha (..., r); unit 0 acts first."""
    result = v
    for i, unit in enumerate(units):
        along = jnp.sum(unit * (result if mixer == "householder" else v), axis=-1, keepdims=True)
        result = result - scale * alpha[..., i : i + 1] * along * unit
    return result


def _kernel(
    h_ref, bx_ref, decay_ref, unit_ref, alpha_ref, new_ref, residual_ref, state_ref,
    *, time, rows, rank, mixer, scale,
):  # fmt: skip
    """All channels of one sequence, chunk after chunk of time."""
    step = pl.program_id(1)
    _, block_t, dim = h_ref.shape

    @pl.when(step == 0)
    def _reset():
        state_ref[...] = jnp.zeros_like(state_ref)
        residual_ref[...] = jnp.zeros_like(residual_ref)

    def tile(i, carry):
        state, worst = carry
        at = pl.ds(pl.multiple_of(i * rows, rows), rows)
        h = h_ref[:, at, :].astype(jnp.float32)
        decay = decay_ref[:, at, :].astype(jnp.float32)
        alpha = alpha_ref[:, at, :].astype(jnp.float32)
        units = [unit_ref[:, at, pl.ds(k * dim, dim)].astype(jnp.float32) for k in range(rank)]
        v = bx_ref[:, at, :].astype(jnp.float32) - h
        x = (1 - decay) * (mix(v, units, alpha, mixer=mixer, scale=scale) + h)
        if time % block_t:
            t = step * block_t + i * rows + lax.broadcasted_iota(jnp.int32, h.shape, 1)
            inside = t < time
            # Past the end the state stays as it is and nothing changes.
            h, decay, x = (
                jnp.where(inside, h, 0),
                jnp.where(inside, decay, 1),
                jnp.where(inside, x, 0),
            )
        out = []
        for r in range(0, rows, common.SUBLANES):
            part = slice(r, r + common.SUBLANES)
            new = common.tile_scan(decay[:, part], x[:, part], state, False)
            state = common.last_row(new, False)
            out.append(new)
        new = out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)
        new_ref[:, at, :] = new.astype(new_ref.dtype)
        change = jnp.max(jnp.abs(new - h), axis=-1, keepdims=True)
        size = jnp.max(jnp.abs(new), axis=-1, keepdims=True)
        ratio = change / (size + common.EPS)
        if time % block_t:
            ratio = jnp.where(inside[..., :1], ratio, 0)
        return state, jnp.maximum(worst, jnp.max(ratio, axis=1, keepdims=True))

    state, worst = lax.fori_loop(0, block_t // rows, tile, (state_ref[...], residual_ref[...]))
    state_ref[...] = state
    residual_ref[...] = worst


def forward(h, bx, decay, units, alpha, mixer, scale, chunk, interpret):
    """The new iterate (B, T, D) and the residual (B,); arguments as for `fused_fixed_point`."""
    batch, time, dim = h.shape
    rank = alpha.shape[-1]
    rows = common.row_tile(h.dtype, bx.dtype, decay.dtype, units.dtype, alpha.dtype)
    itemsize = max(jnp.dtype(v.dtype).itemsize for v in (h, bx, decay, units))
    fits = BLOCK_BYTES // (2 * (4 + rank) * dim * itemsize)
    block_t = min(chunk or 256, max(rows, fits), common.round_up(time, rows))
    block_t = max(rows, block_t // rows * rows)

    def per_time(width):
        return pl.BlockSpec((1, block_t, width), lambda b, c: (b, c, 0))

    new, residual = pl.pallas_call(
        functools.partial(_kernel, time=time, rows=rows, rank=rank, mixer=mixer, scale=scale),
        grid=(batch, common.cdiv(time, block_t)),
        in_specs=[*[per_time(dim)] * 3, per_time(rank * dim), per_time(rank)],
        out_specs=[per_time(dim), pl.BlockSpec((1, 1, 1), lambda b, c: (b, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(h.shape, h.dtype),
            jax.ShapeDtypeStruct((batch, 1, 1), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((1, 1, dim), jnp.float32)],
        compiler_params=common.time_semantics(1),
        interpret=interpret,
        name="fused_fixed_point",
    )(h, bx, decay, units.reshape(batch, time, rank * dim), alpha)
    return new, residual[:, 0, 0]
