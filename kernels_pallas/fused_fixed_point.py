"""One fixed-point iteration in one pass over memory: mix channels, scan, measure the change.

Computes equation 7 of "Fixed-Point RNNs" (arXiv 2503.10799) for householder and dplr mixers. Reads
h, Bx, λ and the mixer's vectors once, writes the new h once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import common, fused_fixed_point_gpu, fused_fixed_point_tpu
from kernels_pallas.linear_scan import linear_scan

MIXERS = ("householder", "dplr")
_FAMILY = {"tpu": fused_fixed_point_tpu, "gpu": fused_fixed_point_gpu}


def _plain(h, bx, decay, units, alpha, mixer, scale, platform, interpret):
    """The same map from the linear scan kernel and jax.numpy; its gradient serves the fused one."""
    f32 = functools.partial(jax.tree.map, lambda v: v.astype(jnp.float32))
    h32, bx, decay32, units, alpha = f32((h, bx, decay, units, alpha))
    parts = [units[..., i, :] for i in range(alpha.shape[-1])]
    x = (1 - decay32) * (
        fused_fixed_point_tpu.mix(bx - h32, parts, alpha, mixer=mixer, scale=scale) + h32
    )
    return linear_scan(decay, x, platform=platform, interpret=interpret)[0].astype(h.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8, 9))
def _fused(h, bx, decay, units, alpha, mixer, scale, platform, chunk, interpret):
    return _FAMILY[platform].forward(h, bx, decay, units, alpha, mixer, scale, chunk, interpret)


def _fused_fwd(h, bx, decay, units, alpha, mixer, scale, platform, chunk, interpret):
    args = (h, bx, decay, units, alpha)
    return _fused(*args, mixer, scale, platform, chunk, interpret), args


def _fused_bwd(mixer, scale, platform, chunk, interpret, args, cotangents):
    del chunk
    plain = functools.partial(
        _plain, mixer=mixer, scale=scale, platform=platform, interpret=interpret
    )
    return jax.vjp(plain, *args)[1](cotangents[0])


_fused.defvjp(_fused_fwd, _fused_bwd)


def fused_fixed_point(
    h, bx, decay, units, alpha, *, mixer="householder", scale=2.0, platform, chunk=None,
    interpret=False,
):  # fmt: skip
    """One iteration h -> scan(λ, (1-λ) (Q(Bx - h) + h)) from a zero state, with its residual.

    The gradient is that of the iteration composed of mixer and linear scan kernel; the residual is
    a measurement and has none.

    Args:
      h: (B, T, D) previous iterate. bx: (B, T, D) input. decay: (B, T, D), λ in [0, 1].
      units: (B, T, r, D) unit vectors ū. alpha: (B, T, r).
      mixer: "householder": Q v = Π_i (I - scale α_i ū_i ū_iᵀ) v, i = 0 first; "dplr": the sum form
        v - scale Σ_i α_i ū_i (ū_iᵀ v).
      scale: s of the specification, 2 or 1.
      platform: "tpu" or "gpu". Never read from the devices at hand.
      chunk: time steps per block, or None to let the kernel choose.
      interpret: True, or interpreter parameters of the platform, to run on CPU.

    Returns:
      The new iterate (B, T, D) in h's type and the residual (B,) float32,
      max_t ‖h'_t - h_t‖_∞ / (‖h'_t‖_∞ + 1e-8).

    Raises:
      ValueError: shapes that do not match, an unknown mixer, types or platforms without a kernel.
    """
    common.check_platform(platform)
    if mixer not in MIXERS:
        raise ValueError(f"mixer={mixer!r}; the fused iteration takes {MIXERS}")
    shape, rank = h.shape, alpha.shape[-1]
    wanted = {
        "bx": (bx, shape), "decay": (decay, shape), "units": (units, (*shape[:2], rank, shape[2])),
        "alpha": (alpha, (*shape[:2], rank)),
    }  # fmt: skip
    common.check_float("h", h)
    for name, (v, want) in wanted.items():
        common.check_float(name, v)
        if v.shape != want:
            raise ValueError(f"{name} has shape {v.shape}, must be {want} for h {shape}")
    arrays = common.storable(platform, h, bx, decay, units, alpha)
    new, residual = _fused(*arrays, mixer, float(scale), platform, chunk, interpret)
    return new.astype(h.dtype), residual
