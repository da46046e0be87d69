"""The fused fixed-point iteration on GPU (Mosaic GPU): a block owns some channels of a sequence.

It streams time through shared memory with the bulk copy engine, several tiles ahead, one or two
channels a thread. What goes over all channels (ū·(Bx - h), the two maxima of the residual) is
summed per block, a tile of steps at a time, off the path from one step to the next; the sum over
blocks is a small array's. So a few sequences still fill the chip; with fewer, time is cut into
spans.
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
from kernels_pallas.linear_scan_gpu import LANES

MAX_RANK = 14  # what shared memory holds
PITCH = LANES + 8  # of the buffer of terms in shared memory: no bank conflicts in rows or columns
TERMS = 64  # rows of terms (time step, quantity) are reduced in multiples of this many
STAGES = 4  # tiles in flight, at most; two at least
SHARED = 200 * 1024  # bytes of shared memory for a block


def _sizes(rank: int, batch: int, dim: int) -> tuple[int, int, int]:
    """Quantities per step (a power of two), time steps per tile, channels per block."""
    quantities = max(4, 2 ** math.ceil(math.log2(rank + 2)))
    tile = 16 if quantities == 4 else 8
    # Two channels a thread halve the traffic of terms in shared memory, where blocks are plenty.
    plenty = quantities <= 8 and batch * (dim // (2 * LANES)) >= linear_scan_gpu.FILL
    return quantities, tile, 2 * LANES if plenty else LANES


def _kernel(*refs, dims, rank: int, tile: int, stages: int, mode: str, interpret):
    """One span of time of some channels of one sequence. Two scans: the iterate and its change.

    mode "aggregate": λ, Bx, ū, weights, mass, 0, 0, 1 -> two last states from zero, product of λ
    mode "measure", "keep": λ, Bx, ū, weights, mass, two entering states -> sums, maxima, [h]
    """
    aggregate, keep = mode == "aggregate", mode == "keep"
    decay_ref, bx_ref, unit_ref, weight_ref, mass_ref, *rest = refs
    states, rest = rest[: 2 + aggregate], rest[2 + aggregate :]
    outs, rest = rest[: 2 + (aggregate or keep)], rest[2 + (aggregate or keep) :]
    decay_s, bx_s, unit_s, weight_s, *terms, barrier = rest
    time, dim, width = dims
    tiles, quantities = time // tile, terms[0].shape[0] // tile if terms else 0
    block = lax.axis_index("block")
    columns = dim // width
    b, column = lax.div(block, columns), lax.rem(block, columns)
    first = pl.multiple_of(column * width, width)
    pieces = [slice(k, k + LANES) for k in range(0, width, LANES)]
    at = [pl.ds(pl.multiple_of(first + s.start, LANES), LANES) for s in pieces]
    mass = [mass_ref[b, k] for k in range(2)]

    def fetch(i):
        slot, at_t = lax.rem(i, stages), pl.ds(i * tile, tile)
        copies = [(ref.at[b, at_t, pl.ds(first, width)], smem.at[slot])
                  for ref, smem in ((decay_ref, decay_s), (bx_ref, bx_s))]  # fmt: skip
        copies += [
            (unit_ref.at[b, k, at_t, pl.ds(first, width)], unit_s.at[slot, k]) for k in range(rank)
        ]
        copies.append((weight_ref.at[b, i], weight_s.at[slot]))
        for src, dst in copies:
            plgpu.copy_gmem_to_smem(src, dst, barrier.at[slot])

    for i in range(min(stages, tiles)):
        fetch(jnp.int32(i))

    def advance(states, which, decay, bx, units, weights):
        """One step of scan `which` for every piece of channels."""
        out = []
        for p, (s, d) in enumerate(zip(states, decay)):
            x = mass[which] * bx[p]
            for w, unit in zip(weights, units):
                x = x - w * unit[p]
            out.append(d * s + (1 - d) * x)
        return out

    def one_step(t, carry, i):
        h, change, prod = carry
        slot = lax.rem(i, stages)
        decay, bx = (
            [ref[slot, t, s].astype(jnp.float32) for s in pieces] for ref in (decay_s, bx_s)
        )
        units = [[unit_s[slot, k, t, s].astype(jnp.float32) for s in pieces] for k in range(rank)]
        weights = [[weight_s[slot, j * rank + k, t] for k in range(rank)] for j in range(2)]
        h, change = (advance(s, j, decay, bx, units, weights[j]) for j, s in enumerate((h, change)))
        if aggregate:
            return h, change, [p * d for p, d in zip(prod, decay)]
        rows = [
            functools.reduce(jnp.add, [u * (x - s) for u, x, s in zip(unit, bx, h)])
            for unit in units
        ]
        rows += [functools.reduce(jnp.maximum, [jnp.abs(s) for s in v]) for v in (change, h)]
        for q, row in enumerate(rows):
            terms[0][t * quantities + q, pl.ds(0, LANES)] = row
        if keep:
            for s, value in zip(at, h):
                outs[2][b, i * tile + t, s] = value.astype(outs[2].dtype)
        return h, change, prod

    def one_tile(i, carry):
        plgpu.barrier_wait(barrier.at[lax.rem(i, stages)])
        step = functools.partial(one_step, i=i)
        if interpret:  # it compiles every step written out
            carry = lax.fori_loop(0, tile, step, carry)
        else:
            for t in range(tile):
                carry = step(t, carry)
        # Every thread is done with this input slot, and its terms are visible to the others.
        plgpu.commit_smem()

        @pl.when(i + stages < tiles)
        def _():
            fetch(i + stages)

        if not aggregate:
            values = _load(terms[0], interpret)
            at_rows = pl.ds(i * tile * quantities, tile * quantities)
            outs[0][column, b, at_rows] = jnp.sum(values, axis=1)
            outs[1][column, b, at_rows] = jnp.max(values, axis=1)
            plgpu.commit_smem()
        return carry

    h, change = ([ref[b, s] for s in at] for ref in states[:2])
    prod = [states[2][b, s] for s in at] if aggregate else []
    h, change, prod = lax.fori_loop(0, tiles, one_tile, (h, change, prod))
    if aggregate:
        for out, values in zip(outs, (h, change, prod), strict=True):
            for s, value in zip(at, values):
                out[b, s] = value


def _load(terms, interpret):
    """All terms in the layout that reduces rows in registers; the interpreter knows no layouts."""
    at = slice(None), pl.ds(0, LANES)
    return terms[at] if interpret else plgpu.load(terms, at, layout=plgpu.Layout.WGMMA)


def _call(inputs, states, sizes, mode: str, interpret):
    """Runs the kernel on whole tiles of time; λ, Bx (R, T, D), ū (R, r, T, D), states (R, D).

    The terms of a tile that are no quantity stay what shared memory held: nothing reads their sums.
    """
    decay, bx, units, weights, _ = inputs
    (rows, rank, time, dim), (quantities, tile, width) = units.shape, sizes
    per_stage = (
        tile * width * sum(n * v.dtype.itemsize for n, v in ((1, decay), (1, bx), (rank, units)))
    )
    buffer = quantities * tile, PITCH
    stages = (SHARED - 4 * math.prod(buffer)) // per_stage
    stages = min(max(2, min(STAGES, stages)), time // tile)
    state = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
    part = jax.ShapeDtypeStruct((dim // width, rows, time * quantities), jnp.float32)
    outs = {
        "aggregate": (state,) * 3, "measure": (part,) * 2,
        "keep": (part, part, jax.ShapeDtypeStruct(bx.shape, bx.dtype)),
    }[mode]  # fmt: skip
    smem = [
        plgpu.SMEM((stages, tile, width), decay.dtype),
        plgpu.SMEM((stages, tile, width), bx.dtype),
        plgpu.SMEM((stages, rank, tile, width), units.dtype),
        plgpu.SMEM((stages, *weights.shape[2:]), jnp.float32),
    ]
    if mode != "aggregate":
        smem.append(plgpu.SMEM(buffer, jnp.float32))
    return plgpu.kernel(
        functools.partial(
            _kernel, dims=(time, dim, width), rank=rank, tile=tile, stages=stages, mode=mode,
            interpret=interpret,
        ),
        out_type=outs,
        scratch_types=(*smem, plgpu.Barrier(num_arrivals=3 + rank, num_barriers=stages)),
        # One flat axis: it becomes the launch's x dimension, the only one allowed past 65,535.
        grid=(rows * (dim // width),),
        grid_names=("block",),
        # Barriers are placed by hand, where threads read what others wrote.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret or None,
        kernel_name=f"fused_fixed_point_{mode}",
    )(*inputs, *states)  # fmt: skip


def _spans(blocks: int, tiles: int, tile: int, chunk: int | None) -> int:
    """How many spans of time to scan side by side: 1 if sequences and channels fill the chip."""
    if chunk is not None:
        wanted = common.cdiv(tiles * tile, chunk)
    else:
        # The second pass reads everything again: not worth it for less than four times the blocks.
        wanted = min(linear_scan_gpu.FILL // blocks, tiles * tile // linear_scan_gpu.MIN_SPAN)
        wanted = wanted if wanted >= 4 else 1
    return max(n for n in range(1, max(1, min(wanted, tiles)) + 1) if tiles % n == 0)


def forward(decay, bx, units, weights, mass, h0, keep, chunk, interpret):
    """ū·(Bx - h) (B, T, r), the residual (B,) and h (B, T, D) or None.

    Args:
      decay, bx: (B, T, D). units: (B, T, r, D). h0: float32 (B, D).
      weights: float32 (B, T, 2 r), of the iterate and of its change. mass: float32 (B, 2), same.
      keep, interpret: as for `fused_fixed_point`. chunk: cut time into spans of about this length;
        None cuts only where the chip is not full.
    """
    batch, time, dim = bx.shape
    rank = units.shape[2]
    quantities, tile, width = sizes = _sizes(rank, batch, dim)
    long, wide = common.round_up(time, tile), common.round_up(dim, width)
    spans = _spans(batch * wide // width, long // tile, tile, chunk)
    rows, span = batch * spans, long // spans

    # Steps added here leave the states as they are; channels added are zero in every input.
    grow = [(0, 0), (0, long - time), (0, wide - dim)]
    decay = jnp.pad(decay, grow, constant_values=1)
    bx = jnp.pad(bx, grow)
    units = jnp.pad(units.swapaxes(1, 2), [(0, 0), *grow])
    units = units.reshape(batch, rank, spans, span, wide).swapaxes(1, 2)
    # One copy brings a tile's weights, a byte or more for each of the 128 threads.
    count = common.round_up(2 * rank, LANES // (4 * tile))
    weights = jnp.pad(weights, [(0, 0), (0, long - time), (0, count - 2 * rank)])
    weights = weights.reshape(rows, span // tile, tile, count).swapaxes(2, 3)
    inputs = (
        *(v.reshape(rows, span, wide) for v in (decay, bx)),
        units.reshape(rows, rank, span, wide),
        weights,
        jnp.repeat(mass, spans, axis=0),
    )
    run = functools.partial(_call, inputs, sizes=sizes, interpret=interpret)
    first = [mass[:, k : k + 1] * jnp.pad(h0, [(0, 0), (0, wide - dim)]) for k in range(2)]
    if spans > 1:
        zero = jnp.zeros((rows, wide), jnp.float32)
        *lasts, prod = (
            v.reshape(batch, spans, wide) for v in run([zero, zero, zero + 1], mode="aggregate")
        )
        first = [
            linear_scan_gpu.chain(prod, last, start, False).reshape(rows, wide)
            for last, start in zip(lasts, first, strict=True)
        ]
    sums, largest, *h = run(first, mode="keep" if keep else "measure")
    shape = (-1, batch, long, quantities)
    along = sums.reshape(shape)[..., :rank].sum(0)[:, :time]
    change, size = jnp.moveaxis(largest.reshape(shape)[:, :, :time, rank : rank + 2].max(0), -1, 0)
    residual = jnp.max(change / (size + common.EPS), axis=1)
    h = h[0].reshape(batch, long, wide)[:, :time, :dim] if keep else None
    return along, residual, h
