"""Matrix-state recurrences on GPU (Mosaic GPU) in chunks of 64 steps, as products of tiles.

A block owns 64 value channels of one head and carries its state in registers; the gradient carries
the state's cotangent, from the saved states that entered the chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.tiles_gpu import (
    TILE,
    Tile,
    Unit,
    after,
    decays,
    part,
    row_sums,
    scaled,
    tiles,
)

MOST_TILES = 28  # in the shared memory of a block: 8 KiB each of 227


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call, padded: whole chunks, whole tiles of key and value channels.

    Attributes:
      batch, time, heads: of the values. shared: heads that read the same queries and keys.
      keys, values: tiles of key and value channels.
      pieces: bfloat16 pieces per number: 1, or 3 for float32.
      corrected: whether values lose what the state already holds (delta rule).
    """

    batch: int
    time: int
    heads: int
    shared: int
    keys: int
    values: int
    pieces: int
    corrected: bool

    @property
    def chunks(self) -> int:
        """How many chunks the time has."""
        return self.time // TILE

    def here(self):
        """This block's sequence, head, and tile of value channels."""
        block = lax.axis_index("block")
        value = lax.rem(block, self.values)
        block = lax.div(block, self.values)
        return lax.div(block, self.heads), lax.rem(block, self.heads), value

    def saved(self, head, chunk, piece):
        """Where the state that enters a chunk lies in the array of all of them."""
        return (piece * self.batch * self.heads + head) * self.chunks + chunk

    def slots(self, streams: int, fixed: int) -> int:
        """Chunks in flight: two if shared memory holds them beside `fixed` tiles."""
        return min(self.chunks, 2 if 2 * streams + fixed <= MOST_TILES else 1)


@dataclasses.dataclass(frozen=True)
class Stream:
    """An array (pieces B, T, heads, channels) that arrives in shared memory chunk by chunk.

    Attributes:
      source: the array. target: `tiles` for all slots.
      shared: value heads per head of the array.
      columns: the tiles of channels to fetch.
    """

    source: jax.Ref
    target: jax.Ref
    shared: int
    columns: Sequence


class Loader:
    """Copies the tiles of whole chunks to shared memory, several chunks ahead."""

    def __init__(self, shape: Shape, at, barrier, streams: Sequence[Stream]):
        self.shape, self.barrier, self.streams = shape, barrier, streams
        self.batch, self.head = at

    def fetch(self, chunk, slot):
        """Starts the copies of one chunk."""
        for stream in self.streams:
            for k, column in enumerate(stream.columns):
                for i, target in enumerate(self.get(stream, k, slot).parts):
                    source = stream.source.at[
                        i * self.shape.batch + self.batch, part(chunk),
                        lax.div(self.head, stream.shared), part(column),
                    ]  # fmt: skip
                    plgpu.copy_gmem_to_smem(source, target, self.barrier.at[slot])

    def get(self, stream: Stream, k: int, slot) -> Tile:
        """The k-th tile of a stream's chunk."""
        p = self.shape.pieces
        base = (slot * len(stream.columns) + k) * p
        return Tile([stream.target.at[base + i] for i in range(p)])

    def ready(self, slot) -> list[list[Tile]]:
        """The tiles of all streams, once they have arrived."""
        plgpu.barrier_wait(self.barrier.at[slot])
        return [[self.get(s, k, slot) for k in range(len(s.columns))] for s in self.streams]


def _forward_kernel(*refs, shape: Shape, slots: int, save: bool, interpret):
    """log decays, whole decays, q, k, u, [w], first -> y, last, [u as used, entering states]."""
    unit, p, n, corrected = Unit(interpret), shape.pieces, shape.keys, shape.corrected
    decay_ref, whole_ref, *rest = refs
    sources, (first_ref, y_ref, last_ref, *rest) = rest[: 3 + corrected], rest[3 + corrected :]
    new_ref = [rest.pop(0)] if corrected and save else []
    start_ref = [rest.pop(0)] if save else []
    targets, (state_tiles, after_tile, barrier) = rest[: 3 + corrected], rest[3 + corrected :]
    b, h, v = shape.here()
    head = b * shape.heads + h
    kinds = [(shape.shared, range(n)), (shape.shared, range(n)), (1, [v]), (1, range(n))]
    streams = [Stream(s, t, *kind) for s, t, kind in zip(sources, targets, kinds)]
    loader = Loader(shape, (b, h), barrier, streams)
    later = after(unit, after_tile)
    for i in range(slots):
        loader.fetch(jnp.int32(i), jnp.int32(i))
    held = [Tile([state_tiles.at[k * p + i] for i in range(p)]) for k in range(n)]
    state = [unit.read(first_ref, head, part(k), part(v)) for k in range(n)]
    for k in range(n):
        unit.stage(held[k].parts, state[k])

    def one_chunk(c, state):
        slot = lax.rem(c, slots)
        q, keys, (u,), *w = loader.ready(slot)
        for ref in start_ref:
            for k in range(n):
                for i, tile in enumerate(held[k].parts):
                    to = ref.at[shape.saved(head, c, i), part(k), part(v)]
                    plgpu.copy_smem_to_gmem(tile, to)
        between, start, end = decays(unit, unit.across(decay_ref, head, part(c)), later)
        if corrected:
            unit.stage(u.parts, unit.value(u) - unit.product(*zip(w[0], held)))
            for ref in new_ref:
                for i, tile in enumerate(u.parts):
                    to = ref.at[i * shape.batch + b, part(c), h, part(v)]
                    plgpu.copy_smem_to_gmem(tile, to)
        scores = unit.product(*((x, y.T) for x, y in zip(q, keys))) * between
        y = unit.product((unit.split(scores, p), u)) + scaled(start, unit.product(*zip(q, held)))
        y_ref[b, part(c), h, part(v)] = y.astype(y_ref.dtype)
        if save:  # the copies have read what the next lines overwrite
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        leaving = unit.stage(u.parts, scaled(end, unit.value(u)))
        whole = whole_ref[head, c]
        state = [whole * s + unit.product((x.T, leaving)) for s, x in zip(state, keys)]
        for k in range(n):
            unit.stage(held[k].parts, state[k])

        @pl.when(c + slots < shape.chunks)
        def _():
            loader.fetch(c + slots, slot)

        return state

    state = lax.fori_loop(0, shape.chunks, one_chunk, state)
    for k in range(n):
        last_ref[head, part(k), part(v)] = state[k]
    if save:
        plgpu.wait_smem_to_gmem(0)


def _backward_kernel(*refs, shape: Shape, slots: int, interpret):
    """Chunks in reverse; the cotangents of the state stay in registers.

    log decays, whole decays, q, k, u as used, dy, [w], entering states, dlast
    -> parts of dq and dk (values, ...), du, [dw], what the log decays collect: from step i to the
    outputs, from the keys of step i to the end, from the start to the end; and dfirst
    """
    unit, p, n, corrected = Unit(interpret), shape.pieces, shape.keys, shape.corrected
    decay_ref, whole_ref, *rest = refs
    sources, rest = rest[:4], rest[4:]
    w_ref = [rest.pop(0)] if corrected else []
    start_ref, dlast_ref, dq_ref, dk_ref, du_ref, *rest = rest
    dw_ref = [rest.pop(0)] if corrected else []
    pull_ref, push_ref, hold_ref, dfirst_ref, *rest = rest
    targets, (near, weights, cotangent, after_tile, barrier, side) = rest[:4], rest[4:]
    b, h, v = shape.here()
    head = b * shape.heads + h
    block = head * shape.values + v
    kinds = [(shape.shared, range(n)), (shape.shared, range(n)), (1, [v]), (1, [v])]
    streams = [Stream(s, t, *kind) for s, t, kind in zip(sources, targets, kinds)]
    loader = Loader(shape, (b, h), barrier, streams)
    near, weights, cotangent = ([r.at[i] for i in range(p)] for r in (near, weights, cotangent))
    later = after(unit, after_tile)
    last = shape.chunks - 1
    for i in range(slots):
        loader.fetch(jnp.int32(last - i), jnp.int32(i))

    def bring(target, ref, place) -> Tile:
        """One tile, at once; place maps a piece to its index in ref."""
        for i, tile in enumerate(target):
            plgpu.copy_gmem_to_smem(ref.at[place(i)], tile, side)
        plgpu.barrier_wait(side)
        return Tile(target)

    def one_chunk(step, dstate):
        c, slot = last - step, lax.rem(step, slots)
        q, keys, (u,), (dy,) = loader.ready(slot)
        between, start, end = decays(unit, unit.across(decay_ref, head, part(c)), later)
        whole = whole_ref[head, c]

        def entering(k):
            return bring(near, start_ref, lambda i: (shape.saved(head, c, i), part(k), part(v)))

        scores = unit.product(*((x, y.T) for x, y in zip(q, keys))) * between
        m = unit.stage(weights, scores)
        dm = unit.product((dy, u.T))
        du = unit.product((m.T, dy))
        # Both use the rounded weights, so that their sums over steps cancel where they must.
        pull = row_sums(dm * unit.value(m)) - row_sums(unit.value(u) * du)
        dm = unit.stage(weights, dm * between)
        dy = unit.stage(dy.parts, scaled(start, unit.value(dy)))
        push, hold, new = jnp.zeros_like(pull), jnp.zeros_like(pull), []
        for k in range(n):
            at = b, part(c), h, part(k)
            held, ds = entering(k), unit.stage(cotangent, dstate[k])
            from_end = scaled(end, unit.product((keys[k], ds)))
            push = push + row_sums(unit.value(u) * from_end)
            du = du + from_end
            dkeys = unit.product((dm.T, q[k])) + scaled(end, unit.product((u, ds.T)))
            dk_ref[(v, *at)] = dkeys
            back = unit.product((dy, held.T))
            pull = pull + row_sums(unit.value(q[k]) * back)
            dq_ref[(v, *at)] = back + unit.product((dm, keys[k]))
            hold = hold + row_sums(dstate[k] * unit.value(held))
            new.append(whole * dstate[k] + unit.product((q[k].T, dy)))
        du_ref[b, part(c), h, part(v)] = du.astype(du_ref.dtype)
        pull_ref[block, part(c)] = pull
        push_ref[block, part(c)] = push
        hold_ref[block, part(c)] = whole * hold
        if corrected:
            g = unit.stage(weights, du)
            for k in range(n):
                at = b, part(c), h, part(k)
                dw_ref[0][(v, *at)] = -unit.product((g, entering(k).T))
                w = bring(cotangent, w_ref[0], lambda i, at=at: (i * shape.batch + at[0], *at[1:]))
                new[k] = new[k] - unit.product((w.T, g))

        @pl.when(step + slots < shape.chunks)
        def _():
            loader.fetch(c - slots, slot)

        return new

    dstate = [unit.read(dlast_ref, head, part(k), part(v)) for k in range(n)]
    dstate = lax.fori_loop(0, shape.chunks, one_chunk, dstate)
    for k in range(n):
        dfirst_ref[head, part(k), part(v)] = dstate[k]


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(body, shape: Shape, outs, scratch, name, interpret):
    return plgpu.kernel(
        body,
        out_type=tuple(outs),
        scratch_types=tuple(scratch),
        # One flat axis: it becomes the launch's x dimension, the only one allowed past 65,535.
        grid=(shape.batch * shape.heads * shape.values,),
        grid_names=("block",),
        interpret=interpret or None,
        kernel_name=name,
    )


def _whole(shape: Shape, log_decay):
    """The decays over whole chunks, (B H, chunks)."""
    return jnp.exp(log_decay.reshape(-1, shape.chunks, TILE).sum(-1))


def forward(shape: Shape, log_decay, q, k, u, w, first, dtype, *, save, name, interpret):
    """Runs the recurrence chunk by chunk.

    Args:
      shape: the padded sizes.
      log_decay: float32 (B H, T), at least LOG_FLOOR.
      q, k: (pieces B, T, H / shared, keys). u: (pieces B, T, H, values).
      w: (pieces B, T, H, keys), or None.
      first: float32 (B H, keys, values).
      dtype: of y. save: whether to return what `backward` needs. name: of the kernel.
      interpret: parameters of the Mosaic GPU interpreter, or False.

    Returns:
      y (B, T, H, values); the last state; if save, u as used and the pieces of the states that
      enter each chunk, (pieces B H chunks, keys, values).
    """
    p, n, heads = shape.pieces, shape.keys, shape.batch * shape.heads
    wide, broad = n * TILE, shape.values * TILE
    outs = [
        jax.ShapeDtypeStruct((shape.batch, shape.time, shape.heads, broad), dtype),
        _f32(heads, wide, broad),
    ]
    if save and shape.corrected:
        outs.append(jax.ShapeDtypeStruct(u.shape, jnp.bfloat16))
    if save:
        saved = (p * heads * shape.chunks, wide, broad)
        outs.append(jax.ShapeDtypeStruct(saved, jnp.bfloat16))
    streams = [n * p, n * p, p, *([n * p] if shape.corrected else [])]
    slots = shape.slots(sum(streams), n * p + 1)
    scratch = [tiles(slots * count) for count in streams]
    scratch += [tiles(n * p), tiles(1)]
    scratch.append(plgpu.Barrier(num_arrivals=sum(streams), num_barriers=slots))
    body = functools.partial(
        _forward_kernel, shape=shape, slots=slots, save=save, interpret=interpret
    )
    arrays = [q, k, u, *([w] if shape.corrected else [])]
    y, last, *rest = _call(body, shape, outs, scratch, name, interpret)(
        log_decay, _whole(shape, log_decay), *arrays, first
    )
    if not save:
        return y, last, None, None
    return y, last, (rest[0] if shape.corrected else u), rest[-1]


def backward(shape: Shape, log_decay, q, k, u, w, start, dy, dlast, dtype, *, name, interpret):
    """Cotangents of log_decay, q, k (per head), u (in dtype), w and first, padded.

    u and start are as saved by `forward`, dy (pieces B, T, H, values), dlast as first.
    """
    p, n, heads = shape.pieces, shape.keys, shape.batch * shape.heads
    bth = shape.batch, shape.time, shape.heads
    wide, broad = n * TILE, shape.values * TILE
    steps = _f32(heads * shape.values, shape.time)
    parts = _f32(shape.values, *bth, wide)
    outs = [parts, parts, jax.ShapeDtypeStruct((*bth, broad), dtype)]
    outs += [*([parts] if shape.corrected else []), steps, steps, steps]
    outs.append(_f32(heads, wide, broad))
    streams = [n * p, n * p, p, p]
    slots = shape.slots(sum(streams), 3 * p + 1)
    scratch = [tiles(slots * count) for count in streams]
    scratch += [tiles(p), tiles(p), tiles(p), tiles(1)]
    scratch.append(plgpu.Barrier(num_arrivals=sum(streams), num_barriers=slots))
    scratch.append(plgpu.Barrier(num_arrivals=p))
    body = functools.partial(_backward_kernel, shape=shape, slots=slots, interpret=interpret)
    arrays = [q, k, u, dy, *([w] if shape.corrected else []), start, dlast]
    dq, dk, du, *dw, pull, push, hold, dfirst = _call(
        body, shape, outs, scratch, f"{name}_bwd", interpret
    )(log_decay, _whole(shape, log_decay), *arrays)

    def summed(v):  # over value tiles, as (B H, chunks, 64)
        return v.reshape(heads, shape.values, shape.chunks, TILE).sum(1)

    pull, push, hold = summed(pull), summed(push), summed(hold)
    since = lax.cumsum(pull, axis=2, reverse=True)  # what steps i ≥ s collect from before s
    until = jnp.pad(lax.cumsum(push, axis=2), ((0, 0), (0, 0), (1, 0)))[..., :-1]
    dlog = since + until + hold.sum(-1, keepdims=True)
    return (
        dlog.reshape(heads, shape.time), dq.sum(0), dk.sum(0), du, dw[0].sum(0) if dw else None,
        dfirst,
    )  # fmt: skip
