"""Diagonal linear recurrence h_t = a_t h_{t-1} + x_t as a differentiable kernel call.

The public function checks and flattens its arguments; the kernels are in linear_scan_tpu and
linear_scan_gpu. Saved for the gradient: a, h and h0 only.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import common, linear_scan_gpu, linear_scan_tpu

_FAMILY = {"tpu": linear_scan_tpu, "gpu": linear_scan_gpu}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _scan(a, x, h0, reverse, platform, chunk, interpret):
    return _FAMILY[platform].forward(a, x, h0, reverse=reverse, chunk=chunk, interpret=interpret)


def _scan_fwd(a, x, h0, reverse, platform, chunk, interpret):
    h, last = _scan(a, x, h0, reverse, platform, chunk, interpret)
    return (h, last), (a, h, h0)


def _scan_bwd(reverse, platform, chunk, interpret, saved, cotangents):
    a, h, h0 = saved
    dh, dlast = cotangents
    return linear_scan_bwd(
        a, h, h0, dh, dlast, reverse=reverse, platform=platform, chunk=chunk, interpret=interpret
    )


_scan.defvjp(_scan_fwd, _scan_bwd)


def linear_scan(a, x, h0=None, *, reverse=False, platform, chunk=None, interpret=False):
    """h_t = a_t h_{t-1} + x_t along axis 1, with a float32 carry; differentiable in a, x and h0.

    Args:
      a, x: (B, T, ...) of one shape; float32, bfloat16 or float16 (the two may differ).
      h0: (B, ...) state before the first step (after the last one, if reverse), or None for zero.
      reverse: h_t = a_t h_{t+1} + x_t instead.
      platform: "tpu" or "gpu": which kernel to emit. Never read from the devices at hand.
      chunk: time steps per block, or None to let the kernel choose.
      interpret: True, or interpreter parameters of the platform, to run on CPU.

    Returns:
      h (B, T, ...) in x's type; h_last (B, ...) float32, the state after the last step.

    Raises:
      ValueError: shapes that do not match, types or platforms without a kernel.
    """
    common.check_platform(platform)
    for name, v in (("a", a), ("x", x)):
        common.check_float(name, v)
    if a.shape != x.shape or x.ndim < 2:
        raise ValueError(f"a {a.shape} and x {x.shape} must have one shape (B, T, ...)")
    batch, time, *rest = x.shape
    if h0 is None:
        h0 = jnp.zeros((batch, *rest), jnp.float32)
    if h0.shape != (batch, *rest):
        raise ValueError(f"h0 has shape {h0.shape}, must be {(batch, *rest)} for x {x.shape}")
    if 0 in x.shape:
        return jnp.zeros_like(x), h0.astype(jnp.float32)
    flat, dtype = (batch, time, -1), x.dtype
    a, x = common.storable(platform, a, x)
    h, last = _scan(
        a.reshape(flat), x.reshape(flat), h0.reshape(batch, -1).astype(jnp.float32),
        reverse, platform, chunk, interpret,
    )  # fmt: skip
    return h.reshape(x.shape).astype(dtype), last.reshape(h0.shape)


def linear_scan_bwd(a, h, h0, dh, dlast, *, reverse=False, platform, chunk=None, interpret=False):
    """The gradient kernel alone: cotangents (da, dx, dh0) of `linear_scan`.

    Args:
      a, h, dh: (B, T, D): decays, the forward's output and its cotangent.
      h0, dlast: (B, D): the initial state and the last state's cotangent.
      reverse, platform, chunk, interpret: as given to `linear_scan`.

    Returns:
      da in a's type, dx in dh's type, dh0 in float32.
    """
    common.check_platform(platform)
    types = a.dtype, dh.dtype
    a, h, dh = common.storable(platform, a, h, dh)
    da, dx, dh0 = _FAMILY[platform].backward(
        a, h, h0.astype(jnp.float32), dh, dlast.astype(jnp.float32),
        reverse=reverse, chunk=chunk, interpret=interpret,
    )  # fmt: skip
    return da.astype(types[0]), dx.astype(types[1]), dh0
