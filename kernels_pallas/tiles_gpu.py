"""64 x 64 tiles on GPU (Mosaic GPU): products by wgmma, row sums, decays inside a chunk.

float32 operands are three bfloat16 pieces each, so that six products keep their digits: wgmma
rounds float32 to TF32. The Mosaic interpreter computes the same products with plain matrices.
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

TILE = 64  # rows of one wgmma, columns of one swizzled row of bfloat16, time steps per chunk
LOG_FLOOR = -80.0  # a log decay below this is a decay of 0 in float32; -inf would make NaN below
EXACT = 3  # bfloat16 pieces of a float32 number
_SWIZZLE = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
_TILED = plgpu.Layout.WGMMA
_ROWS, _COLUMNS = _TILED.reduce(1), _TILED.reduce(0)  # of one number per row, per column


def tiles(count: int):
    """Shared memory for `count` tiles that a wgmma can read."""
    return plgpu.SMEM((count, TILE, TILE), jnp.bfloat16, transforms=_SWIZZLE)


def part(k):
    """The k-th 64 elements of an axis."""
    return pl.ds(pl.multiple_of(k * TILE, TILE), TILE)


def padded(v, sizes: dict[int, int]):
    """v with some axes extended by zeros; outside of kernels."""
    pads = [(0, sizes.get(k, size) - size) for k, size in enumerate(v.shape)]
    return jnp.pad(v, pads) if any(p for _, p in pads) else v


def pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """`count` bfloat16 arrays whose sum is x, the largest first; outside of kernels."""
    parts = []
    x = x.astype(jnp.float32)
    for _ in range(count):
        # Not two conversions in a row: XLA may drop such a pair, and the rest would be zero.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


@dataclasses.dataclass(frozen=True)
class Tile:
    """An operand of a product: its pieces, refs to tiles in shared memory or arrays in registers.

    Attributes:
      parts: the pieces, the largest first.
      flipped: whether the operand is the transpose of what is stored.
    """

    parts: Sequence
    flipped: bool = False

    @property
    def T(self) -> Tile:
        """The transpose, of tiles in shared memory."""
        return Tile(self.parts, not self.flipped)


class Unit:
    """What kernels do with tiles. The interpreter knows neither layouts nor transposed refs."""

    def __init__(self, interpret):
        self.interpret = bool(interpret)

    def _load(self, ref, index, layout):
        if self.interpret:
            return ref[index]
        return plgpu.load(ref, index, layout=layout, optimized=False)

    def read(self, ref, *index):
        """A (64, 64) part of an array in device memory, float32."""
        return self._load(ref, index, _TILED).astype(jnp.float32)

    def across(self, ref, *index):
        """64 numbers in device memory, as the columns' of a tile: all rows alike, (64, 64)."""
        return lax.broadcast_in_dim(self._load(ref, index, _COLUMNS), (TILE, TILE), [1])

    def down(self, ref, *index):
        """64 numbers in device memory, one per row of a tile, (64,)."""
        return self._load(ref, index, _ROWS)

    def value(self, tile: Tile):
        """The float32 value of a tile in shared memory."""
        whole = (slice(None), slice(None))
        values = [self._load(part, whole, _TILED).astype(jnp.float32) for part in tile.parts]
        return functools.reduce(lambda a, b: a + b, reversed(values))

    def place(self):
        """Row and column numbers of a tile."""
        iota = lax.broadcasted_iota
        if not self.interpret:
            iota = functools.partial(plgpu.broadcasted_iota, layout=_TILED)
        return iota(jnp.int32, (TILE, TILE), 0), iota(jnp.int32, (TILE, TILE), 1)

    def split(self, x, count: int) -> Tile:
        """`count` pieces of a float32 tile in registers."""
        parts = []
        for k in range(count):
            part = lax.reduce_precision(x, 8, 7) if self.interpret else x
            parts.append(part.astype(jnp.bfloat16))
            if k < count - 1:
                x = x - parts[-1].astype(jnp.float32)
        return Tile(parts)

    def stage(self, refs, x) -> Tile:
        """Writes a float32 tile into shared memory, one piece per ref; products may read it."""
        for ref, part in zip(refs, self.split(x, len(refs)).parts, strict=True):
            ref[...] = part
        plgpu.commit_smem()
        return Tile(refs)

    def product(self, *pairs: tuple[Tile, Tile]):
        """The sum of a b over the pairs, float32 (64, 64). b lies in shared memory."""
        terms = []
        for a, b in pairs:
            most = max(len(a.parts), len(b.parts))
            # The products left out are below the last digit of those kept.
            terms += [
                (x, a.flipped, y, b.flipped)
                for i, x in enumerate(a.parts) for j, y in enumerate(b.parts) if i + j < most
            ]  # fmt: skip

        def in_registers(acc):
            for x, flip_x, y, flip_y in terms:
                x = plgpu.transpose_ref(x, (1, 0)) if flip_x else x
                y = plgpu.transpose_ref(y, (1, 0)) if flip_y else y
                plgpu.wgmma(acc, x, y)
            return acc[...]

        if self.interpret:
            total = jnp.zeros((TILE, TILE), jnp.float32)
            for x, flip_x, y, flip_y in terms:
                x, y = (v[...].astype(jnp.float32) for v in (x, y))
                dims = (((0 if flip_x else 1,), (1 if flip_y else 0,)), ((), ()))
                total = total + lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST)
            return total
        return pl.run_scoped(in_registers, plgpu.ACC((TILE, TILE), jnp.float32))


def scaled(rows, x):
    """x with every row multiplied by its number."""
    return lax.broadcast_in_dim(rows, x.shape, [0]) * x


def row_sums(x):
    """Sums over the columns of a tile, (64,)."""
    return jnp.sum(x, axis=1)


def decays(unit: Unit, log_decay, later: Tile):
    """Decays inside a chunk from the log decays of its steps.

    Args:
      unit: the tile operations.
      log_decay: (64, 64), all rows alike.
      later: what `after` wrote.

    Returns:
      from j to i: exp(sum of steps j+1..i) for i ≥ j, else 0; from the start to i; from i to the
      end, (64,) each. All at most 1. The sums are a product with ones, not differences of running
      sums, which cancel under strong decay.
    """
    row, column = unit.place()
    until = jnp.where(column <= row, log_decay, 0.0)
    rest = jnp.where(column > row, log_decay, 0.0)
    steps = unit.product((unit.split(until, EXACT), later))
    between = jnp.where(row >= column, jnp.exp(steps), 0.0)
    return between, jnp.exp(row_sums(until)), jnp.exp(row_sums(rest))


def after(unit: Unit, ref) -> Tile:
    """The tile with 1 where its row number exceeds its column number, written to ref."""
    row, column = unit.place()
    return unit.stage([ref.at[0]], jnp.where(row > column, 1.0, 0.0))
