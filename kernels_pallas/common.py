"""What every kernel here needs: block sizes, argument checks, the scan of one register tile.

Nothing in this file looks at a device; kernels are chosen by the caller or at lowering.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

FLOATS = ("float32", "bfloat16", "float16")
SUBLANES = 8
LANES = 128
PLATFORMS = ("tpu", "gpu")
EPS = 1e-8  # keeps the residual of a zero state finite (spec 1, section 4)

log = logging.getLogger(__name__)


def cdiv(n: int, k: int) -> int:
    """Ceiling of n / k."""
    return -(-n // k)


def round_up(n: int, k: int) -> int:
    """The smallest multiple of k that is at least n."""
    return cdiv(n, k) * k


def check_float(name: str, x) -> None:
    """Raises ValueError unless x holds a floating type that the kernels read and write."""
    if jnp.dtype(x.dtype).name not in FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}; the kernels take {', '.join(FLOATS)}")


def check_platform(platform: str) -> None:
    """Raises ValueError unless there is a kernel family for the platform."""
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r}; kernels exist for {PLATFORMS}")


def storable(platform: str, *arrays):
    """The arrays, float16 widened to float32 for TPU: Mosaic has no loads of that type there."""
    if platform != "tpu":
        return arrays
    return tuple(
        v.astype(jnp.float32) if v is not None and v.dtype == jnp.float16 else v for v in arrays
    )


def row_tile(*dtypes) -> int:
    """Rows of time read at once: one full register tile of the narrowest type (8 f32, 16 bf16)."""
    return max(SUBLANES * 4 // jnp.dtype(d).itemsize for d in dtypes)


@functools.cache
def supports_mosaic_gpu() -> bool:
    """Whether the GPU kernels can run in this process; says so once in the log when they cannot.

    Mosaic GPU needs compute capability 9.0 (Hopper) or newer. In a process without a GPU this is
    True, so that programs exported here for a GPU carry the kernels.
    """
    if jax.default_backend() != "gpu":
        return True
    capability = [str(getattr(d, "compute_capability", "0.0")) for d in jax.local_devices()]
    usable = all(float(c) >= 9.0 for c in capability)
    if not usable:
        log.warning(
            "Pallas GPU kernels need compute capability 9.0 (Hopper) or newer, found %s: "
            "using the XLA forms",
            ", ".join(sorted(set(capability))),
        )
    return usable


@functools.cache
def supports_wgmma() -> bool:
    """Whether kernels made of wgmma can run in this process: on Hopper (9.x) and nothing newer.

    Says so once in the log when they cannot. Without a GPU this is True, as `supports_mosaic_gpu`.
    """
    if jax.default_backend() != "gpu":
        return True
    capability = {str(getattr(d, "compute_capability", "0.0")) for d in jax.local_devices()}
    usable = all(c.startswith("9.") for c in capability)
    if not usable:
        log.warning(
            "the Pallas GPU kernels of ssd and delta_rule need compute capability 9.x (wgmma), "
            "found %s: using the XLA forms",
            ", ".join(sorted(capability)),
        )
    return usable


def tile_compose(a: jax.Array, x: Any, reverse: bool) -> tuple[jax.Array, Any]:
    """Composed steps over the 8 rows of one register tile, in three doublings.

    Doubling only multiplies and adds, so decays of exactly 0 or 1 and products that underflow are
    harmless (a log-space form would not survive them).

    Args:
      a: float32 (b, 8, d). x: the same, the steps h -> a_t h + x_t; or several x in a list.
      reverse: run from row 7 to row 0.

    Returns:
      (p, y) with h_t = p_t h + y_t for the state h that enters the tile; y like x.
    """
    rows = a.shape[1]
    row = lax.broadcasted_iota(jnp.int32, a.shape, 1)
    xs, tree = jax.tree.flatten(x)
    step = 1
    while step < rows:
        shift = rows - step if reverse else step
        inside = row < rows - step if reverse else row >= step
        xs = [jnp.where(inside, a * pltpu.roll(v, shift, 1) + v, v) for v in xs]
        a = jnp.where(inside, a * pltpu.roll(a, shift, 1), a)
        step *= 2
    return a, jax.tree.unflatten(tree, xs)


def tile_scan(a: jax.Array, x: jax.Array, carry: jax.Array, reverse: bool) -> jax.Array:
    """h_t = a_t h_{t-1} + x_t over one register tile (b, 8, d), entered by `carry` (b, 1, d)."""
    a, x = tile_compose(a, x, reverse)
    return a * carry + x


def shift_rows(x: jax.Array, edge: jax.Array, reverse: bool) -> jax.Array:
    """Row t of the result is x[t-1] (x[t+1] if reverse); `edge` (b, 1, d) fills the free row."""
    rows = x.shape[1]
    row = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    free = row == (rows - 1 if reverse else 0)
    return jnp.where(free, edge, pltpu.roll(x, rows - 1 if reverse else 1, 1))


def last_row(x: jax.Array, reverse: bool) -> jax.Array:
    """The row of (b, rows, d) that a scan reaches last, as (b, 1, d)."""
    return x[:, :1] if reverse else x[:, -1:]


def time_semantics(parallel: int, vmem_bytes: int | None = None) -> pltpu.CompilerParams:
    """`parallel` independent grid axes, then the time axis, which must run in order."""
    axes = pltpu.GridDimensionSemantics
    return pltpu.CompilerParams(
        dimension_semantics=[axes.PARALLEL] * parallel + [axes.ARBITRARY],
        vmem_limit_bytes=vmem_bytes,
    )


def time_spec(block: tuple[int, int, int], chunks: int, reverse: bool) -> pl.BlockSpec:
    """Block of a (B, T, D) array on the grid (B, D, T); a reversed scan reverses the index map."""
    if reverse:
        return pl.BlockSpec(block, lambda b, d, c: (b, chunks - 1 - c, d))
    return pl.BlockSpec(block, lambda b, d, c: (b, c, d))
