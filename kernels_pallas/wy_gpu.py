"""The WY form of the delta rule's chunks on GPU (Mosaic GPU): one block per chunk of 64 steps.

With M_ij = β_i γ_i/γ_j k_i·k_j for j < i and T = (I + M)^-1, the values of a chunk are U - W S_0,
U = T (β v), W = T (β γ k); γ is the decay since the chunk's start, S_0 the state that enters it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import common
from kernels_pallas.tiles_gpu import (
    EXACT,
    LOG_FLOOR,
    TILE,
    Tile,
    Unit,
    after,
    decays,
    padded,
    part,
    pieces,
    row_sums,
    scaled,
    tiles,
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call, padded. keys, values: tiles of channels. pieces: per number of k and v."""

    batch: int
    time: int
    heads: int
    keys: int
    values: int
    pieces: int

    @property
    def chunks(self) -> int:
        """How many chunks the time has."""
        return self.time // TILE


class _Block:
    """What both passes know of a block's chunk."""

    def __init__(self, unit: Unit, shape: Shape, decay_ref, beta_ref, k_ref, k_tiles, rest):
        spare, self.inverse_tiles, after_tile, self.barrier = rest
        self.unit, self.shape = unit, shape
        self.spare = [spare.at[i] for i in range(EXACT)]
        block = lax.axis_index("block")
        self.chunk = lax.rem(block, shape.chunks)
        self.head = lax.div(block, shape.chunks)
        self.b, self.h = lax.div(self.head, shape.heads), lax.rem(self.head, shape.heads)
        at = self.head, part(self.chunk)
        p = shape.pieces
        self.keys = [
            self.bring(k_ref, n, [k_tiles.at[n * p + i] for i in range(p)])
            for n in range(shape.keys)
        ]
        later = after(unit, after_tile)
        log_decay = unit.across(decay_ref, *at)
        self.between, self.start, _ = decays(unit, log_decay, later)
        self.beta = unit.down(beta_ref, *at)
        # By columns: β, and β times the decay since the chunk's start.
        self.beta_across = unit.across(beta_ref, *at)
        before = unit.product((unit.split(log_decay, EXACT), later.T))
        self.reached_across = self.beta_across * jnp.exp(before + log_decay)

    def bring(self, ref, column, target) -> Tile:
        """A tile of (pieces B, T, H, channels), at once."""
        for i, tile in enumerate(target):
            source = ref.at[i * self.shape.batch + self.b, part(self.chunk), self.h, part(column)]
            plgpu.copy_gmem_to_smem(source, tile, self.barrier)
        plgpu.barrier_wait(self.barrier)
        return Tile(target)

    def at(self, column):
        """Where a tile of this chunk lies in (B, T, H, channels)."""
        return self.b, part(self.chunk), self.h, part(column)

    def similar(self):
        """k_i·k_j times the decay from j to i, for j ≤ i."""
        return self.unit.product(*((k, k.T) for k in self.keys)) * self.between

    def below(self, x):
        """x below the diagonal, else 0."""
        row, column = self.unit.place()
        return jnp.where(row > column, x, 0.0)

    def inverse(self, similar) -> Tile:
        """T, in shared memory, by doubling the size of inverted blocks.

        [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]: every intermediate is a block of
        the result, so correlated keys do not blow it up the way a power series in M does.
        """
        unit, m = self.unit, self.below(scaled(self.beta, similar))
        row, column = unit.place()
        refs = [self.inverse_tiles.at[i] for i in range(EXACT)]
        inverse, size = jnp.where(row == column, 1.0, 0.0), 1
        while size < TILE:
            # lax.div: `//` on traced values asks for the device at hand: no cross-lowering.
            (i, j), (outer_i, outer_j) = (
                [lax.div(x, np.int32(n)) for x in (row, column)] for n in (size, 2 * size)
            )
            coupling = jnp.where((outer_i == outer_j) & (i != j), m, 0.0)
            if size == 1:  # the inverted blocks are ones
                inverse = inverse - coupling
            else:
                tile = unit.stage(refs, inverse)
                corner = unit.stage(self.spare, coupling)
                left = unit.split(unit.product((tile, corner)), EXACT)
                inverse = inverse - unit.product((left, tile))
            size *= 2
        return unit.stage(refs, inverse)


def _forward_kernel(*refs, shape: Shape, interpret):
    """log decays, β, k, v -> U, W."""
    decay_ref, beta_ref, k_ref, v_ref, u_ref, w_ref, k_tiles, v_tiles, *rest = refs
    unit, p = Unit(interpret), shape.pieces
    here = _Block(unit, shape, decay_ref, beta_ref, k_ref, k_tiles, rest)
    inverse = unit.value(here.inverse(here.similar()))
    by_value = unit.split(inverse * here.beta_across, EXACT)
    for n in range(shape.values):
        v = here.bring(v_ref, n, [v_tiles.at[i] for i in range(p)])
        u_ref[here.at(n)] = unit.product((by_value, v))
    by_key = unit.split(inverse * here.reached_across, EXACT)
    for n, k in enumerate(here.keys):
        w_ref[here.at(n)] = unit.product((by_key, k))


def _backward_kernel(*refs, shape: Shape, interpret):
    """log decays, β, k, v, dU, dW -> dk, dv, dβ, what the log decays collect up to each step."""
    decay_ref, beta_ref, k_ref, v_ref, du_ref, dw_ref, *rest = refs
    dk_ref, dv_ref, dbeta_ref, pull_ref, k_tiles, v_tiles, d_tiles, *rest = rest
    unit, p = Unit(interpret), shape.pieces
    here = _Block(unit, shape, decay_ref, beta_ref, k_ref, k_tiles, rest)
    similar = here.similar()
    inverse = here.inverse(similar)
    d_tiles = [d_tiles.at[i] for i in range(p)]
    dbeta = jnp.zeros_like(here.beta)
    right = jnp.zeros_like(similar)  # the cotangent of T
    for n in range(shape.values):
        v = here.bring(v_ref, n, [v_tiles.at[i] for i in range(p)])
        du = unit.stage(d_tiles, unit.read(du_ref, *here.at(n)))
        right = right + unit.product((du, v.T)) * here.beta_across
        g = unit.product((inverse.T, du))
        dbeta = dbeta + row_sums(g * unit.value(v))
        dv_ref[here.at(n)] = scaled(here.beta, g)
    collected, from_w = jnp.zeros_like(dbeta), []
    for n, k in enumerate(here.keys):
        dw = unit.stage(d_tiles, unit.read(dw_ref, *here.at(n)))
        right = right + unit.product((dw, k.T)) * here.reached_across
        g = scaled(here.start, unit.product((inverse.T, dw)))
        collected = collected + row_sums(g * unit.value(k))
        from_w.append(scaled(here.beta, g))
    dbeta = dbeta + collected
    # The cotangent of M is -Tᵀ (that of T) Tᵀ.
    right = unit.product((inverse.T, unit.stage(here.spare, right)))
    dm = here.below(-unit.product((unit.split(right, EXACT), inverse.T)))
    dbeta_ref[here.head, part(here.chunk)] = dbeta + row_sums(dm * similar)
    d = unit.stage(here.spare, scaled(here.beta, dm * here.between))
    pull = here.beta * collected
    for n, k in enumerate(here.keys):
        right, left = unit.product((d, k)), unit.product((d.T, k))
        dk_ref[here.at(n)] = from_w[n] + right + left
        pull = pull + row_sums(unit.value(k) * (right - left))
    pull_ref[here.head, part(here.chunk)] = pull


def _call(body, shape: Shape, outs, buffers, name, interpret):
    p = shape.pieces
    scratch = [tiles(shape.keys * p), *[tiles(p)] * buffers, tiles(EXACT), tiles(EXACT), tiles(1)]
    return plgpu.kernel(
        functools.partial(body, shape=shape, interpret=interpret),
        out_type=tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in outs),
        scratch_types=(*scratch, plgpu.Barrier(num_arrivals=p)),
        grid=(shape.batch * shape.heads * shape.chunks,),
        grid_names=("block",),
        interpret=interpret or None,
        kernel_name=name,
    )


def _prepared(log_decay, beta, k, v, exact):
    """The sizes and the padded inputs of both kernels."""
    batch, time, heads, size = k.shape
    up = functools.partial(common.cdiv, k=TILE)
    shape = Shape(batch, up(time) * TILE, heads, up(size), up(v.shape[-1]), EXACT if exact else 1)

    def row(x):
        return padded(x.swapaxes(1, 2).reshape(-1, time), {1: shape.time})

    k = padded(k, {1: shape.time, 3: shape.keys * TILE})
    v = padded(v, {1: shape.time, 3: shape.values * TILE})
    stream = [jnp.concatenate(pieces(x, shape.pieces)) for x in (k, v)]
    return shape, row(jnp.maximum(log_decay, LOG_FLOOR)), row(beta), *stream


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def corrections(log_decay, beta, k, v, exact, interpret):
    """U (B, T, H, V) and W (B, T, H, K), float32, for chunks of 64 steps.

    Args:
      log_decay: float32 (B, T, H), ≤ 0; below LOG_FLOOR it is a decay of 0 without gradient.
      beta: float32 (B, T, H). k: (B, T, H, K). v: (B, T, H, V).
      exact: whether k and v need three bfloat16 pieces. The inverse is float32 in any case.
      interpret: parameters of the Mosaic GPU interpreter, or False.
    """
    shape, *arrays = _prepared(log_decay, beta, k, v, exact)
    bth = shape.batch, shape.time, shape.heads
    outs = [(*bth, shape.values * TILE), (*bth, shape.keys * TILE)]
    u, w = _call(_forward_kernel, shape, outs, 1, "delta_wy", interpret)(*arrays)
    time = k.shape[1]
    return u[:, :time, :, : v.shape[-1]], w[:, :time, :, : k.shape[-1]]


def _corrections_fwd(log_decay, beta, k, v, exact, interpret):
    return corrections(log_decay, beta, k, v, exact, interpret), (log_decay, beta, k, v)


def _corrections_bwd(exact, interpret, saved, cotangents):
    log_decay, beta, k, v = saved
    shape, *arrays = _prepared(log_decay, beta, k, v, exact)
    bth, heads = (shape.batch, shape.time, shape.heads), shape.batch * shape.heads
    wide, broad = shape.keys * TILE, shape.values * TILE
    du, dw = (padded(x, {1: shape.time, 3: size}) for x, size in zip(cotangents, (broad, wide)))
    outs = [(*bth, wide), (*bth, broad), (heads, shape.time), (heads, shape.time)]
    dk, dv, dbeta, pull = _call(_backward_kernel, shape, outs, 2, "delta_wy_bwd", interpret)(
        *arrays, du, dw
    )
    dlog = lax.cumsum(pull.reshape(heads, shape.chunks, TILE), axis=2, reverse=True)
    time = k.shape[1]

    def row(x):
        return x.reshape(shape.batch, shape.heads, shape.time)[..., :time].swapaxes(1, 2)

    return (
        jnp.where(log_decay > LOG_FLOOR, row(dlog), 0.0), row(dbeta),
        dk[:, :time, :, : k.shape[-1]].astype(k.dtype),
        dv[:, :time, :, : v.shape[-1]].astype(v.dtype),
    )  # fmt: skip


corrections.defvjp(_corrections_fwd, _corrections_bwd)
