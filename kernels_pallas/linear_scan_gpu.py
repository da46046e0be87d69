"""Diagonal linear recurrence on GPU (Mosaic GPU, Hopper or newer): one body for all passes.

A block owns 128 channels of one sequence, one channel a thread, and streams time through shared
memory with the bulk copy engine, several tiles ahead. Where batch and channels alone leave
multiprocessors idle, time is cut into spans that are scanned side by side.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import common

LANES = 128  # threads of one warpgroup; one channel each
TILE = 32  # time steps per copy
STAGES = 4  # tiles in flight per input, at most; two at least
SHARED = 112 * 1024  # bytes of shared memory a block aims at, so that two fit a multiprocessor
ROWS = 8  # time steps held in registers: their loads are issued before the first multiply
FILL = 132  # blocks that keep every multiprocessor of an H100 or H200 busy
MIN_SPAN = 256  # shorter spans of time are not worth a second pass


def _scan_kernel(*refs, mode: str, reverse: bool, dims: tuple[int, int], tile: int, stages: int):
    """Scans one (sequence, 128 channels) column of the grid, all of its time.

    mode "forward":   a, x, h0 -> h, h_last
    mode "aggregate": a, x, 0, 1 -> h_last, product of a     (nothing per time step is written)
    mode "adjoint":   a, dh, h, dlast, h0 -> dx, da, dh0     (against the forward's direction)
    mode "adjoint_aggregate": a, dh, 0, 1 -> the carry that leaves, product of a
    """
    adjoint = mode.startswith("adjoint")
    writes = mode in ("forward", "adjoint")
    n_in = 3 if mode == "adjoint" else 2
    n_out = {"forward": 1, "adjoint": 2}.get(mode, 0)
    n_state = 1 if mode == "forward" else 2
    cut = [n_in, n_state, n_out, 1, 0 if writes else 1, n_in, n_out]
    gmem_in, states, gmem_out, (last_ref,), prod_ref, smem_in, smem_out, rest = _split(refs, cut)
    (barrier,) = rest
    time, dim = dims
    tiles = time // tile
    backwards = reverse != adjoint
    block = lax.axis_index("block")
    columns = dim // LANES
    b = lax.div(block, columns)
    at_d = pl.ds(pl.multiple_of(lax.rem(block, columns) * LANES, LANES), LANES)

    def start(i):
        """First time step of the i-th tile in scan order."""
        return ((tiles - 1 - i) if backwards else i) * tile

    def neighbours(t0):
        """First row of the tile of h that holds h_{t-1} (h_{t+1}) for the tile at t0."""
        return jnp.minimum(t0 + 1, time - tile) if reverse else jnp.maximum(t0 - 1, 0)

    def fetch(i):
        slot = lax.rem(i, stages)
        for k, (src, dst) in enumerate(zip(gmem_in, smem_in, strict=True)):
            t0 = neighbours(start(i)) if k == 2 else start(i)
            plgpu.copy_gmem_to_smem(
                src.at[b, pl.ds(t0, tile), at_d], dst.at[slot], barrier.at[slot]
            )

    for i in range(min(stages, tiles)):
        fetch(jnp.int32(i))

    order = range(tile - 1, -1, -1) if backwards else range(tile)
    h0 = states[-1][b, at_d]  # read by mode "adjoint" only

    def one_tile(i, carry):
        state, prod = carry
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(barrier.at[slot])
        out_slot = lax.rem(i, 2)
        if writes:  # the copy that last used this output slot has been read out
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        t0 = start(i)
        for first in range(0, tile, ROWS):
            rows = [order[k] for k in range(first, min(first + ROWS, tile))]
            loaded = [[ref[slot, t].astype(jnp.float32) for ref in smem_in[:2]] for t in rows]
            near = []
            if mode == "adjoint":
                offset = t0 + (1 if reverse else -1) - neighbours(t0)
                for t in rows:
                    edge = t == (tile - 1 if reverse else 0)
                    if edge:
                        h = smem_in[2][slot, jnp.clip(t + offset, 0, tile - 1)].astype(jnp.float32)
                        h = jnp.where(t0 + t == (time - 1 if reverse else 0), h0, h)
                    else:
                        h = smem_in[2][slot, t + offset].astype(jnp.float32)
                    near.append(h)
            results: list[tuple[jax.Array, ...]] = []
            for k, (a, x) in enumerate(loaded):
                if adjoint:
                    g = state + x
                    state = a * g
                    results.append((g, g * near[k]) if near else ())
                else:
                    state = a * state + x
                    results.append((state,))
                if not writes:
                    prod = prod * a
            for t, values in zip(rows, results, strict=True):
                for ref, value in zip(smem_out, values, strict=False):
                    ref[out_slot, t] = value.astype(ref.dtype)
        # Every thread is done with this input slot, and its results are visible to the copy engine.
        plgpu.commit_smem()
        if writes:
            for src, dst in zip(smem_out, gmem_out, strict=True):
                plgpu.copy_smem_to_gmem(
                    src.at[out_slot], dst.at[b, pl.ds(t0, tile), at_d], commit_group=False
                )
            plgpu.commit_smem_to_gmem_group()

        @pl.when(i + stages < tiles)
        def _():
            fetch(i + stages)

        return state, prod

    state = states[0][b, at_d]
    prod = jnp.float32(1) if writes else states[1][b, at_d]
    state, prod = lax.fori_loop(0, tiles, one_tile, (state, prod))
    last_ref[b, at_d] = state
    if not writes:
        prod_ref[0][b, at_d] = prod
    if writes:
        plgpu.wait_smem_to_gmem(0)


def _split(refs, counts):
    """Cuts a flat list of refs into groups of the given sizes, and the rest."""
    groups, at = [], 0
    for n in counts:
        groups.append(refs[at : at + n])
        at += n
    return [*groups, refs[at:]]


def _call(mode, inputs, states, out_dtypes, *, reverse, interpret):
    """Runs the kernel: inputs (B, T, D), T a multiple of TILE and D of LANES; states (B, D)."""
    batch, time, dim = inputs[0].shape
    bytes_in, bytes_out = (
        sum(TILE * LANES * jnp.dtype(d).itemsize for d in dtypes)
        for dtypes in ([v.dtype for v in inputs], out_dtypes)
    )
    stages = min(max(2, min(STAGES, (SHARED - 2 * bytes_out) // bytes_in)), time // TILE)
    outs = [jax.ShapeDtypeStruct((batch, time, dim), d) for d in out_dtypes]
    per_channel = jax.ShapeDtypeStruct((batch, dim), jnp.float32)
    smem = [plgpu.SMEM((stages, TILE, LANES), v.dtype) for v in inputs]
    smem += [plgpu.SMEM((2, TILE, LANES), d) for d in out_dtypes]
    return plgpu.kernel(
        functools.partial(
            _scan_kernel,
            mode=mode,
            reverse=reverse,
            dims=(time, dim),
            tile=TILE,
            stages=stages,
        ),
        out_type=(*outs, per_channel, *([] if out_dtypes else [per_channel])),
        scratch_types=(*smem, plgpu.Barrier(num_arrivals=len(inputs), num_barriers=stages)),
        # One flat axis: it becomes the launch's x dimension, the only one allowed past 65,535.
        grid=(batch * (dim // LANES),),
        grid_names=("block",),
        # Inputs in shared memory are only read and outputs only written by threads.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret or None,
        kernel_name=f"linear_scan_{mode}",
    )(*inputs, *states)


def _spans(batch: int, time: int, dim: int, chunk: int | None) -> int:
    """How many spans of time to scan side by side: 1 if batch and channels fill the chip."""
    tiles = time // TILE
    if chunk is not None:
        wanted = common.cdiv(time, chunk)
    else:
        wanted = min(FILL // (batch * (dim // LANES)), time // MIN_SPAN)
    return max(n for n in range(1, max(1, min(wanted, tiles)) + 1) if tiles % n == 0)


def _padded(v, time: int, dim: int, fill: float):
    """v (B, T, D) extended with `fill` to (B, time, dim); v itself where nothing is missing."""
    _, t, d = v.shape
    if (t, d) == (time, dim):
        return v
    return jnp.pad(v, ((0, 0), (0, time - t), (0, dim - d)), constant_values=fill)


def chain(prod, last, first, backwards: bool):
    """States entering each span, from the spans' (product, last state from 0) and the first state.

    Args:
      prod, last: float32 (B, n, D).
      first: float32 (B, D).

    Returns:
      float32 (B, n, D).
    """

    def step(h, span):
        p, l = span
        return p * h + l, h

    spans = (prod.swapaxes(0, 1), last.swapaxes(0, 1))
    return lax.scan(step, first, spans, reverse=backwards)[1].swapaxes(0, 1)


def _entering(mode, inputs, first, spans, *, reverse, backwards, interpret):
    """The state that enters each of `spans` spans, float32 (B * spans, D)."""
    batch, time, dim = inputs[0].shape
    if spans == 1:
        return first
    cut = [v.reshape(batch * spans, time // spans, dim) for v in inputs]
    zero = jnp.zeros((batch * spans, dim), jnp.float32)
    last, prod = _call(mode, cut, [zero, zero + 1], (), reverse=reverse, interpret=interpret)
    shape = (batch, spans, dim)
    return chain(prod.reshape(shape), last.reshape(shape), first, backwards).reshape(-1, dim)


def aggregate(a, x, *, reverse=False, chunk=None, interpret=False):
    """The last state from a zero start and the product of a, float32 (B, D); reads a, x once."""
    batch, time, dim = x.shape
    full = common.round_up(time, TILE), common.round_up(dim, LANES)
    spans = _spans(batch, *full, chunk)
    cut = [
        _padded(v, *full, fill).reshape(batch * spans, full[0] // spans, full[1])
        for v, fill in ((a, 1.0), (x, 0.0))
    ]
    zero = jnp.zeros((batch * spans, full[1]), jnp.float32)
    last, prod = _call("aggregate", cut, [zero, zero + 1], (), reverse=reverse, interpret=interpret)
    last, prod = (v.reshape(batch, spans, full[1])[..., :dim] for v in (last, prod))
    total = zero[:batch, :dim]
    for span in reversed(range(spans)) if reverse else range(spans):
        total = prod[:, span] * total + last[:, span]
    return total, jnp.prod(prod, axis=1)


def forward(a, x, h0, *, reverse=False, chunk=None, interpret=False):
    """The scan itself.

    Args:
      a, x: (B, T, D), any of the supported float types.
      h0: float32 (B, D).
      reverse: from t = T-1 down to 0.
      chunk: cut time into spans of about this length; None cuts only where the chip is not full.
      interpret: parameters of the Mosaic GPU interpreter, or False.

    Returns:
      h (B, T, D) in x's type, h_last float32 (B, D).
    """
    (batch, time, dim), first = x.shape, h0
    full = common.round_up(time, TILE), common.round_up(dim, LANES)
    a, x = _padded(a, *full, 1.0), _padded(x, *full, 0.0)
    first = _padded(first[:, None], 1, full[1], 0.0)[:, 0]
    spans = _spans(batch, *full, chunk)
    states = _entering(
        "aggregate", (a, x), first, spans, reverse=reverse, backwards=reverse, interpret=interpret
    )
    cut = [v.reshape(batch * spans, full[0] // spans, full[1]) for v in (a, x)]
    h, last = _call("forward", cut, [states], (x.dtype,), reverse=reverse, interpret=interpret)
    last = last.reshape(batch, spans, full[1])[:, 0 if reverse else -1]
    return h.reshape(batch, *full)[:, :time, :dim], last[:, :dim]


def backward(a, h, h0, dh, dlast, *, reverse=False, chunk=None, interpret=False):
    """Cotangents of a, x and h0 for cotangents dh (B, T, D) and dlast float32 (B, D).

    `h` is the forward's output. Five streams over memory: reads a, dh, h; writes dx, da.
    """
    batch, time, dim = h.shape
    full = common.round_up(time, TILE), common.round_up(dim, LANES)
    if reverse and full[0] != time:  # the row after the last is h0, also where rows were added
        tail = jnp.broadcast_to(h0[:, None], (batch, full[0] - time, dim)).astype(h.dtype)
        h = jnp.concatenate([h, tail], axis=1)
    a, h, dh = _padded(a, *full, 1.0), _padded(h, *full, 0.0), _padded(dh, *full, 0.0)
    h0, dlast = (_padded(v[:, None], 1, full[1], 0.0)[:, 0] for v in (h0, dlast))
    spans = _spans(batch, *full, chunk)
    span = full[0] // spans
    states = _entering(
        "adjoint_aggregate", (a, dh), dlast, spans, reverse=reverse, backwards=not reverse,
        interpret=interpret,
    )  # fmt: skip
    if spans > 1:  # every span's own initial state is its neighbour's last row
        rows = h[:, span::span] if reverse else h[:, span - 1 : -1 : span]
        rows = rows.astype(jnp.float32)
        both = [rows, h0[:, None]] if reverse else [h0[:, None], rows]
        h0 = jnp.concatenate(both, axis=1).reshape(batch * spans, full[1])
    cut = [v.reshape(batch * spans, span, full[1]) for v in (a, dh, h)]
    dx, da, dh0 = _call(
        "adjoint", cut, [states, h0], (dh.dtype, a.dtype), reverse=reverse, interpret=interpret
    )
    dh0 = dh0.reshape(batch, spans, full[1])[:, -1 if reverse else 0]
    back = (batch, *full)
    return da.reshape(back)[:, :time, :dim], dx.reshape(back)[:, :time, :dim], dh0[:, :dim]
