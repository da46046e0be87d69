"""The fused fixed-point iteration on GPU (Mosaic GPU): one block walks one span of a sequence.

All channels sit in the registers of a warpgroup, rows of the next steps already on their way. With
few sequences, time is cut into spans: one pass finds the state that enters each, another writes h.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import common, linear_scan_gpu

PIECE = 256  # channels per register array: two a thread, for 2- and 4-byte types alike
AHEAD = 2  # time steps whose rows are in flight
MIN_SPAN = 64  # shorter spans of time are not worth a second pass


def _total(pieces):
    """Sum of all elements of all pieces."""
    return jnp.sum(functools.reduce(jnp.add, pieces))


def _largest(pieces):
    """Largest magnitude over all pieces."""
    return jnp.max(functools.reduce(jnp.maximum, [jnp.abs(p) for p in pieces]))


def _mix(v, units, alpha, mixer, scale):
    """Q v for one token; v and every unit are lists of pieces, alpha a list of scalars."""
    result = v
    for unit, a in zip(units, alpha, strict=True):
        source = result if mixer == "householder" else v
        weight = scale * a * _total([u * s for u, s in zip(unit, source)])
        result = [r - weight * u for r, u in zip(result, unit)]
    return result


def _kernel(*refs, dims, piece, rank, mixer, scale, aggregate):
    """One span of time of one sequence.

    aggregate: h, bx, λ, units, alpha, 0, 1 -> last state from zero, product of λ
    otherwise: h, bx, λ, units, alpha, entering state -> new h, residual
    """
    h_ref, bx_ref, decay_ref, unit_ref, alpha_ref, state_ref, *rest = refs
    one_ref, first_out, second_out = rest if aggregate else [state_ref, *rest]
    time, dim = dims
    b = lax.axis_index("block")
    at = [slice(k, k + piece) for k in range(0, dim, piece)]

    def rows(t):
        """What step t needs from memory, in its stored type."""
        t = jnp.minimum(t, time - 1)
        wide = [[ref[b, t, s] for s in at] for ref in (h_ref, bx_ref, decay_ref)]
        units = [
            [unit_ref[b, t, k * dim + s.start : k * dim + s.stop] for s in at] for k in range(rank)
        ]
        return wide, units, [alpha_ref[b, t, k] for k in range(rank)]

    def step(t, carry):
        state, other, ahead = carry
        ready, ahead = ahead[0], [*ahead[1:], rows(t + AHEAD)]
        (h, bx, decay), units, alpha = jax.tree.map(lambda v: v.astype(jnp.float32), ready)
        v = [x - y for x, y in zip(bx, h)]
        mixed = _mix(v, units, alpha, mixer, scale)
        state = [
            d * s + (1 - d) * (m + y) for d, s, m, y in zip(decay, state, mixed, h, strict=True)
        ]
        if aggregate:
            return state, [p * d for p, d in zip(other, decay)], ahead
        for s, value in zip(at, state):
            first_out[b, t, s] = value.astype(first_out.dtype)
        change = _largest([x - y for x, y in zip(state, h)])
        return state, jnp.maximum(other, change / (_largest(state) + common.EPS)), ahead

    start = [state_ref[b, s] for s in at]
    other = [one_ref[b, s] for s in at] if aggregate else jnp.float32(0)
    ahead = [rows(jnp.int32(t)) for t in range(AHEAD)]
    state, other, _ = lax.fori_loop(0, time, step, (start, other, ahead))
    if aggregate:
        for s, value, factor in zip(at, state, other, strict=True):
            first_out[b, s] = value
            second_out[b, s] = factor
    else:
        second_out[b, :] = jnp.full((common.LANES,), other)


def _call(inputs, states, *, rank, mixer, scale, aggregate, interpret):
    """Runs the kernel; inputs (R, T, .) in one type, states float32 (R, D)."""
    rows, time, dim = inputs[0].shape
    state = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
    residual = jax.ShapeDtypeStruct((rows, common.LANES), jnp.float32)
    new = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)
    return plgpu.kernel(
        functools.partial(
            _kernel, dims=(time, dim), piece=min(dim, PIECE), rank=rank, mixer=mixer, scale=scale,
            aggregate=aggregate,
        ),
        out_type=(state, state) if aggregate else (new, residual),
        grid=(rows,),
        grid_names=("block",),
        interpret=interpret or None,
        kernel_name="fused_fixed_point_aggregate" if aggregate else "fused_fixed_point",
    )(*inputs, *states)  # fmt: skip


def _spans(batch: int, time: int, chunk: int | None) -> int:
    """How many spans to cut time into: enough blocks to fill the chip, equal lengths."""
    if chunk is not None:
        wanted = common.cdiv(time, chunk)
    else:
        wanted = min(linear_scan_gpu.FILL // batch, time // MIN_SPAN)
    return max(n for n in range(1, max(1, min(wanted, time)) + 1) if time % n == 0)


def _width(dim: int) -> int:
    """Channels after padding: one a thread, or whole pieces."""
    return common.LANES if dim <= common.LANES else common.round_up(dim, PIECE)


def forward(h, bx, decay, units, alpha, mixer, scale, chunk, interpret):
    """The new iterate (B, T, D) and the residual (B,); arguments as for `fused_fixed_point`."""
    batch, time, dim = h.shape
    rank, width = alpha.shape[-1], _width(dim)
    # Channels added here are zero in every input, so their state and their part of Q v are zero.
    grow = [(0, 0)] * 2 + [(0, width - dim)]
    wide = [v if width == dim else jnp.pad(v, grow) for v in (h, bx.astype(h.dtype))]
    decay = jnp.pad(decay.astype(h.dtype), grow)
    units = jnp.pad(units.astype(h.dtype), [(0, 0), *grow]).reshape(batch, time, rank * width)
    spans = _spans(batch, time, chunk)
    inputs = [
        v.reshape(batch * spans, time // spans, v.shape[-1])
        for v in (*wide, decay, units, alpha.astype(jnp.float32))
    ]
    run = functools.partial(_call, inputs, rank=rank, mixer=mixer, scale=scale, interpret=interpret)
    entering = jnp.zeros((batch * spans, width), jnp.float32)
    if spans > 1:
        last, prod = run([entering, entering + 1], aggregate=True)
        shape = (batch, spans, width)
        first = jnp.zeros((batch, width), jnp.float32)
        chained = linear_scan_gpu.chain(prod.reshape(shape), last.reshape(shape), first, False)
        entering = chained.reshape(entering.shape)
    new, residual = run([entering], aggregate=False)
    residual = residual[:, 0].reshape(batch, spans).max(1)
    return new.reshape(batch, time, width)[..., :dim], residual
