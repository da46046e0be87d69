"""Selective scan (Mamba): u, delta, A, B, C -> y in one fused kernel, differentiable throughout.

(B, T, D, N) never exists in device memory: the forward saves one state per chunk of time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import common, selective_scan_gpu, selective_scan_tpu

_FAMILY = {"tpu": selective_scan_tpu, "gpu": selective_scan_gpu}


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def _scan(u, delta, a, b, c, d, z, h0, platform, interpret):
    y, last, _ = _FAMILY[platform].forward(u, delta, a, b, c, d, z, h0, interpret=interpret)
    return y, last


def _scan_fwd(u, delta, a, b, c, d, z, h0, platform, interpret):
    y, last, start = _FAMILY[platform].forward(u, delta, a, b, c, d, z, h0, interpret=interpret)
    return (y, last), (u, delta, a, b, c, d, z, start)


def _scan_bwd(platform, interpret, saved, cotangents):
    return _FAMILY[platform].backward(*saved, *cotangents, interpret=interpret)


_scan.defvjp(_scan_fwd, _scan_bwd)


def selective_scan(u, delta, A, B, C, D=None, z=None, h0=None, *, platform, interpret=False):
    """y_t = (C_t h_t + D u_t) silu(z_t), h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t.

    Args:
      u, delta: (B, T, D) input and step sizes (after softplus), float32, bfloat16 or float16.
      A: (D, N) decay rates, negative for a stable state.
      B, C: (B, T, N).
      D: (D,) skip weights, or None for none.
      z: (B, T, D) gate, or None for none.
      h0: (B, D, N) state before the first step, or None for zero.
      platform: "tpu" or "gpu". Never read from the devices at hand.
      interpret: True, or interpreter parameters of the platform, to run on CPU.

    Returns:
      y (B, T, D) in u's type; h_last (B, D, N) float32.

    Raises:
      ValueError: shapes that do not match, types or platforms without a kernel.
    """
    common.check_platform(platform)
    for name, v in (("u", u), ("delta", delta), ("B", B), ("C", C)):
        common.check_float(name, v)
    batch, time, dim = u.shape
    n = A.shape[-1]
    wanted = {
        "delta": (delta, u.shape), "A": (A, (dim, n)), "B": (B, (batch, time, n)),
        "C": (C, (batch, time, n)), "D": (D, (dim,)), "z": (z, u.shape),
        "h0": (h0, (batch, dim, n)),
    }  # fmt: skip
    for name, (v, shape) in wanted.items():
        if v is not None and v.shape != shape:
            raise ValueError(f"{name} has shape {v.shape}, must be {shape} for u {u.shape}")
    f32 = jnp.float32
    d = jnp.zeros((dim,), f32) if D is None else D.astype(f32)
    h0 = jnp.zeros((batch, dim, n), f32) if h0 is None else h0.astype(f32)
    if 0 in u.shape:
        return jnp.zeros_like(u), h0
    rates, h0, dtype = A.astype(f32).T, h0.swapaxes(1, 2), u.dtype
    u, delta, B, C, z = common.storable(platform, u, delta, B, C, z)
    most = _FAMILY[platform].MAX_N
    if n <= most:
        y, last = _scan(u, delta, rates, B, C, d, z, h0, platform, interpret)
        return y.astype(dtype), last.swapaxes(1, 2)
    # States do not meet before the sum over them: a group at a time, skip and gate at the end.
    total, none = d * u.astype(f32), jnp.zeros_like(d)
    lasts: list[jax.Array] = []
    for k in range(0, n, most):
        at = slice(k, k + most)
        y, last = _scan(
            u.astype(f32), delta, rates[at], B[..., at], C[..., at], none, None, h0[:, at],
            platform, interpret,
        )  # fmt: skip
        total = total + y
        lasts.append(last)
    y = total if z is None else total * jax.nn.silu(z.astype(f32))
    return y.astype(dtype), jnp.concatenate(lasts, axis=1).swapaxes(1, 2)
