"""Linear scan over a sequence cut across devices: shards exchange only (last h, product of a).

To be called inside `jax.shard_map`, time sharded over one mesh axis, with `check_vma=False`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import common, linear_scan_gpu, linear_scan_tpu

_FAMILY = {"tpu": linear_scan_tpu, "gpu": linear_scan_gpu}


def _exchange(last, prod, first, axis, backwards):
    """The state that enters this shard and the state that leaves the last one.

    Two all-gathers of (B, D), whatever the length of the sequence.

    Args:
      last, prod: float32 (B, D), this shard's last state from zero and product of decays.
      first: float32 (B, D), the state that enters the first shard (in scan order).
    """
    lasts, prods = lax.all_gather((last, prod), axis)
    here, shards = lax.axis_index(axis), lasts.shape[0]
    state, entering = first, first
    for k in reversed(range(shards)) if backwards else range(shards):
        entering = jnp.where(here == k, state, entering)
        state = prods[k] * state + lasts[k]
    return entering, state


def _run(a, x, h0, axis, reverse, platform, interpret):
    kernels = _FAMILY[platform]
    last, prod = kernels.aggregate(a, x, reverse=reverse, interpret=interpret)
    entering, final = _exchange(last, prod, h0, axis, reverse)
    h, _ = kernels.forward(a, x, entering, reverse=reverse, interpret=interpret)
    return h, final, entering


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _scan(a, x, h0, axis, reverse, platform, interpret):
    return _run(a, x, h0, axis, reverse, platform, interpret)[:2]


def _scan_fwd(a, x, h0, axis, reverse, platform, interpret):
    h, final, entering = _run(a, x, h0, axis, reverse, platform, interpret)
    return (h, final), (a, h, entering)


def _scan_bwd(axis, reverse, platform, interpret, saved, cotangents):
    a, h, entering = saved
    dh, dfinal = cotangents
    kernels = _FAMILY[platform]
    # c_{t-1} = a_t (dh_t + c_t) is what one step hands to the one before it.
    given = (a.astype(jnp.float32) * dh.astype(jnp.float32)).astype(dh.dtype)
    last, prod = kernels.aggregate(a, given, reverse=not reverse, interpret=interpret)
    # Every shard holds a copy of the final state: its cotangent is the sum over the copies.
    dlast, dh0 = _exchange(last, prod, lax.psum(dfinal, axis), axis, not reverse)
    da, dx, _ = kernels.backward(a, h, entering, dh, dlast, reverse=reverse, interpret=interpret)
    # h0 is one value for all shards, which add their cotangents up: only one of them has it.
    return da, dx, jnp.where(lax.axis_index(axis) == 0, dh0, 0.0)


_scan.defvjp(_scan_fwd, _scan_bwd)


def sharded_linear_scan(
    a, x, h0=None, *, axis: str, reverse=False, platform: str, interpret=False
):  # fmt: skip
    """h_t = a_t h_{t-1} + x_t where each device of mesh axis `axis` holds one stretch of time.

    Args:
      a, x: (B, T / shards, D), this device's stretch.
      h0: (B, D), the same on every device: state before the first step of the first shard (after
        the last step of the last one, if reverse); None for zero.
      axis: name of the mesh axis that shards time.
      reverse: h_t = a_t h_{t+1} + x_t instead.
      platform: "tpu" or "gpu". Never read from the devices at hand.
      interpret: True, or interpreter parameters of the platform, to run on CPU.

    Returns:
      h (B, T / shards, D) in x's type; h_last float32 (B, D), the same on every device.

    Raises:
      ValueError: shapes that do not match, types or platforms without a kernel.
    """
    common.check_platform(platform)
    for name, v in (("a", a), ("x", x)):
        common.check_float(name, v)
    if a.shape != x.shape or x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"a {a.shape} and x {x.shape} must have one shape (B, T, D), none 0")
    first = x.shape[0], x.shape[2]
    h0 = jnp.zeros(first, jnp.float32) if h0 is None else h0
    if h0.shape != first:
        raise ValueError(f"h0 has shape {h0.shape}, must be {first} for x {x.shape}")
    dtype = x.dtype
    a, x = common.storable(platform, a, x)
    h, last = _scan(a, x, h0.astype(jnp.float32), axis, reverse, platform, interpret)
    return h.astype(dtype), last
