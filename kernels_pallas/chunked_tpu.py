"""Matrix-state recurrences on TPU in chunks of time: one pair of kernels for any chunk function.

A chunk function maps (streams of one chunk, state) to (output, next state) by matrix products.
The forward kernel carries the state in VMEM; the backward kernel differentiates the chunk function
in place, from the saved state that entered the chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import common

CHUNK = common.LANES  # time steps per chunk: rows arrive with time in the lanes
LOG_FLOOR = -80.0  # a log decay below this is a decay of 0 in float32; -inf would make NaN below


@dataclasses.dataclass(frozen=True)
class Stream:
    """One input: (R, T, width), or (R, 1, T) for a row of scalars; R divides the number of states.

    Attributes:
      row: whether time lies in the last axis.
      shared: how many consecutive states read the same entry of the first axis.
    """

    row: bool = False
    shared: int = 1


def column(row: jax.Array) -> jax.Array:
    """(1, Q) as (Q, 1)."""
    q = row.shape[1]
    eye = lax.broadcasted_iota(jnp.int32, (q, q), 0) == lax.broadcasted_iota(jnp.int32, (q, q), 1)
    return jnp.sum(jnp.where(eye, row, 0.0), axis=1, keepdims=True)


def decays(log_decay: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decays inside a chunk from the log decays (1, Q) of its steps.

    Returns:
      from j to i: exp(sum of steps j+1..i) for i ≥ j, else 0, (Q, Q);
      from the chunk's start to i, (Q, 1); from i to the chunk's end, (Q, 1). All of them at most 1
      for log decays at most 0, so nothing overflows.
    """
    q = log_decay.shape[1]
    i = lax.broadcasted_iota(jnp.int32, (q, q), 0)
    j = lax.broadcasted_iota(jnp.int32, (q, q), 1)
    log_decay = jnp.maximum(log_decay, LOG_FLOOR)
    until = jnp.where(j <= i, log_decay, 0.0)
    after = jnp.sum(jnp.where(j > i, log_decay, 0.0), axis=1, keepdims=True)
    # A product with ones instead of a difference of running sums, which cancels under strong decay.
    steps = dot(until, jnp.where(i > j, 1.0, 0.0), exact=True)
    between = jnp.where(i >= j, jnp.exp(steps), 0.0)
    return between, jnp.exp(jnp.sum(until, axis=1, keepdims=True)), jnp.exp(after)


def dot(a, b, dims=((1,), (0,)), *, exact: bool):
    """Matrix product with float32 accumulation; `exact` keeps float32 operands whole."""
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _read(refs, streams, time, chunk):
    """Float32 blocks without their leading axis, zero past the end of time."""
    values = []
    for ref, stream in zip(refs, streams, strict=True):
        x = ref[0].astype(jnp.float32)
        axis = 1 if stream.row else 0
        size = x.shape[axis]
        if time % size:
            t = chunk * size + lax.broadcasted_iota(jnp.int32, x.shape, axis)
            x = jnp.where(t < time, x, 0.0)
        values.append(x)
    return values


def _forward_kernel(*refs, chunk_function, streams, time):
    n = len(streams)
    first_ref, y_ref, start_ref, last_ref, state_ref = refs[n:]
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _reset():
        state_ref[...] = first_ref[0]

    start_ref[0, 0] = state_ref[...]
    y, state = chunk_function(*_read(refs[:n], streams, time, step), state_ref[...])
    y_ref[0] = y.astype(y_ref.dtype)
    state_ref[...] = state

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        last_ref[0] = state


def _backward_kernel(*refs, chunk_function, streams, time):
    n = len(streams)
    start_ref, dy_ref, dlast_ref = refs[n : n + 3]
    grads, (dfirst_ref, carry_ref) = refs[n + 3 : -2], refs[-2:]
    step, steps = pl.program_id(1), pl.num_programs(1)

    @pl.when(step == 0)
    def _reset():
        carry_ref[...] = dlast_ref[0]

    inputs = _read(refs[:n], streams, time, steps - 1 - step)
    (dy,) = _read([dy_ref], [Stream()], time, steps - 1 - step)
    _, vjp = jax.vjp(chunk_function, *inputs, start_ref[0, 0])
    *cotangents, dstate = vjp((dy, carry_ref[...]))
    for ref, value in zip(grads, cotangents, strict=True):
        ref[0] = value.astype(ref.dtype)
    carry_ref[...] = dstate

    @pl.when(step == steps - 1)
    def _finish():
        dfirst_ref[0] = dstate


class _Layout:
    """Grid and block specs over (states, chunks of time)."""

    def __init__(self, time: int, rows: int, states: int, backwards: bool):
        self.block_t = min(CHUNK, common.round_up(time, rows))
        self.chunks = common.cdiv(time, self.block_t)
        self.long = self.chunks * self.block_t
        self.grid = (states, self.chunks)
        self.order = (lambda i: self.chunks - 1 - i) if backwards else (lambda i: i)

    def stream(self, v, stream: Stream, shared: int | None = None):
        """Block spec of an array; `shared` overrides the stream's own."""
        # lax.div: `//` on traced values asks for the device at hand, which breaks cross-lowering.
        k, c = np.int32(stream.shared if shared is None else shared), self.order
        if stream.row:
            return pl.BlockSpec((1, 1, self.block_t), lambda s, i: (lax.div(s, k), 0, c(i)))
        return pl.BlockSpec((1, self.block_t, v.shape[-1]), lambda s, i: (lax.div(s, k), c(i), 0))

    def state(self, shape):
        return pl.BlockSpec((1, *shape), lambda s, i: (s, 0, 0))

    def start(self, shape):
        return pl.BlockSpec((1, 1, *shape), lambda s, i: (s, self.order(i), 0, 0))

    def padded(self, v, stream: Stream):
        """Rows need whole chunks of lanes; columns are read past their end and masked."""
        if not stream.row:
            return v
        return jnp.pad(v, ((0, 0), (0, 0), (0, self.long - v.shape[-1])))


def _setup(arrays, streams, states, backwards):
    time = next(v.shape[1] for v, s in zip(arrays, streams) if not s.row)
    rows = common.row_tile(*(v.dtype for v in arrays))
    at = _Layout(time, rows, states, backwards)
    padded = [at.padded(v, s) for v, s in zip(arrays, streams)]
    return time, at, padded, [at.stream(v, s) for v, s in zip(arrays, streams)]


def forward(
    chunk_function: Callable, streams: Sequence[Stream], arrays: Sequence[jax.Array],
    first: jax.Array, width: int, dtype, *, name: str, interpret,
):  # fmt: skip
    """Runs the recurrence.

    Args:
      chunk_function: (blocks..., state) -> (output (Q, width), state), all float32.
      streams, arrays: the inputs, zero beyond T being harmless for the chunk function.
      first: (S, ., .) float32 initial states.
      width, dtype: of the output.
      name: of the kernel.
      interpret: as for pallas_call.

    Returns:
      output (S, T, width), the states that enter each chunk (S, chunks, ., .), the last states.
    """
    states, *shape = first.shape
    time, at, padded, specs = _setup(arrays, streams, states, False)
    out = jax.ShapeDtypeStruct((states, time, width), dtype)
    return pl.pallas_call(
        functools.partial(
            _forward_kernel, chunk_function=chunk_function, streams=streams, time=time
        ),
        grid=at.grid,
        in_specs=[*specs, at.state(shape)],
        out_specs=[at.stream(out, Stream()), at.start(shape), at.state(shape)],
        out_shape=[
            out,
            jax.ShapeDtypeStruct((states, at.chunks, *shape), jnp.float32),
            jax.ShapeDtypeStruct(first.shape, jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM(tuple(shape), jnp.float32)],
        compiler_params=common.time_semantics(1),
        interpret=interpret,
        name=name,
    )(*padded, first)


def backward(chunk_function, streams, arrays, start, dy, dlast, *, name, interpret):
    """Cotangents of all arrays and of the initial states, from `forward`'s saved states."""
    states, _, *shape = start.shape
    time, at, padded, specs = _setup(arrays, streams, states, True)
    # A shared input gets one cotangent per state here; they are added up below.
    outs = [
        jax.ShapeDtypeStruct((states, *v.shape[1:]), v.dtype if s.shared == 1 else jnp.float32)
        for v, s in zip(padded, streams)
    ]
    *grads, dfirst = pl.pallas_call(
        functools.partial(
            _backward_kernel, chunk_function=chunk_function, streams=streams, time=time
        ),
        grid=at.grid,
        in_specs=[*specs, at.start(shape), at.stream(dy, Stream()), at.state(shape)],
        out_specs=[
            *(at.stream(v, s, 1) for v, s in zip(arrays, streams)),
            at.state(shape),
        ],
        out_shape=[*outs, jax.ShapeDtypeStruct((states, *shape), jnp.float32)],
        scratch_shapes=[pltpu.VMEM(tuple(shape), jnp.float32)],
        compiler_params=common.time_semantics(1),
        interpret=interpret,
        name=name,
    )(*padded, start, dy, dlast)
    summed = []
    for g, v, s in zip(grads, arrays, streams):
        g = g[..., :time] if s.row else g
        if s.shared > 1:
            g = g.reshape(-1, s.shared, *g.shape[1:]).sum(1)
        summed.append(g.astype(v.dtype))
    return summed, dfirst
