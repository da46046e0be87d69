"""One fixed-point iteration in one pass over memory that never touches the previous iterate.

Equation 7 of "Fixed-Point RNNs" (arXiv 2503.10799) is h' = scan(λ, (1-λ) (Q (Bx - h) + h)). With a
mixer of rank r (householder, dplr) Q v = v - Σ_i w_i ū_i, where w depends on v through the ū_iᵀ v
alone: h' = scan(λ, (1-λ) (Bx - Σ_i w_i ū_i)). So an iterate is known by r numbers per token, and
an iteration reads λ, Bx and ū, and writes r numbers per token.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import common, fused_fixed_point_gpu, fused_fixed_point_tpu
from kernels_pallas.linear_scan import linear_scan

_FAMILY = {"tpu": fused_fixed_point_tpu, "gpu": fused_fixed_point_gpu}


class Iterate(NamedTuple):
    """The iterate h = scan(λ, (1-λ) (mass Bx - Σ_i weights_i ū_i)) from the state mass · h0.

    Zero has this form, the iteration keeps it, and so does damping, which is an affine combination:
    of masses and of weights just as of the iterates themselves.

    Attributes:
      mass: (B,), 0 for the zero iterate and 1 for every value of the undamped iteration.
      weights: (B, T, r).
    """

    mass: jax.Array
    weights: jax.Array


def _plain(decay, bx, units, new, h0, keep, platform, interpret):
    """The same from the linear scan kernel and jax.numpy; its gradient serves the fused one."""
    decay, bx, units = (v.astype(jnp.float32) for v in (decay, bx, units))
    mixed = jnp.einsum("btr,btrd->btd", new.weights, units)
    x = (1 - decay) * (new.mass[:, None, None] * bx - mixed)
    h, _ = linear_scan(decay, x, new.mass[:, None] * h0, platform=platform, interpret=interpret)
    return jnp.einsum("btrd,btd->btr", units, bx - h), h if keep else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _fused(decay, bx, units, new, old, h0, keep, platform, chunk, interpret):
    weights = jnp.concatenate([new.weights, new.weights - old.weights], axis=-1)
    mass = jnp.stack([new.mass, new.mass - old.mass], axis=-1)
    return _FAMILY[platform].forward(decay, bx, units, weights, mass, h0, keep, chunk, interpret)


def _fused_fwd(decay, bx, units, new, old, h0, keep, platform, chunk, interpret):
    outs = _fused(decay, bx, units, new, old, h0, keep, platform, chunk, interpret)
    return outs, (decay, bx, units, new, old, h0)


def _fused_bwd(keep, platform, chunk, interpret, saved, cotangents):
    del chunk
    decay, bx, units, new, old, h0 = saved
    plain = functools.partial(_plain, keep=keep, platform=platform, interpret=interpret)
    pull = jax.vjp(plain, decay, bx, units, new, h0)[1]
    dh = cotangents[2]
    *grads, dh0 = pull((cotangents[0], dh if dh is None else dh.astype(jnp.float32)))
    return *grads, jax.tree.map(jnp.zeros_like, old), dh0


_fused.defvjp(_fused_fwd, _fused_bwd)


def fused_fixed_point(
    decay, bx, units, new, old, h0=None, *, keep=False, platform, chunk=None, interpret=False
):
    """What an iteration needs to know about the iterate `new`, which follows `old`.

    One pass over λ, Bx and ū. The next weights follow from the first result: w_i = s α_i along_i
    for dplr and for r = 1; householder factors each see what those before them left (see
    `fpr.fixed_point_scan`). The gradient of `along` and h is that of the linear scan kernel; the
    residual is a measurement and has none.

    Args:
      decay: (B, T, D), λ in [0, 1]. bx: (B, T, D), the input. units: (B, T, r, D), unit vectors ū.
      new, old: two `Iterate`s, mass (B,) and weights (B, T, r) each.
      h0: (B, D), state before the first step, or None for zero.
      keep: also write the iterate.
      platform: "tpu" or "gpu". Never read from the devices at hand.
      chunk: time steps per block, or None to let the kernel choose.
      interpret: True, or interpreter parameters of the platform, to run on CPU.

    Returns:
      along: (B, T, r) float32, ū_iᵀ (Bx - h) of the iterate h that `new` stands for.
      residual: (B,) float32, max_t ‖h_t - g_t‖_∞ / (‖h_t‖_∞ + 1e-8), g the iterate of `old`.
      h: (B, T, D) in bx's type, or None unless `keep`.

    Raises:
      ValueError: shapes that do not match, types or platforms without a kernel, a rank too large.
    """
    common.check_platform(platform)
    if bx.ndim != 3 or units.ndim != 4:
        raise ValueError(f"bx {bx.shape} must be (B, T, D) and units {units.shape} (B, T, r, D)")
    (batch, time, dim), rank = bx.shape, units.shape[2]
    h0 = jnp.zeros((batch, dim), jnp.float32) if h0 is None else h0
    wanted = {
        "decay": (decay, bx.shape), "units": (units, (batch, time, rank, dim)),
        "new.weights": (new.weights, (batch, time, rank)), "new.mass": (new.mass, (batch,)),
        "old.weights": (old.weights, (batch, time, rank)), "old.mass": (old.mass, (batch,)),
        "h0": (h0, (batch, dim)),
    }  # fmt: skip
    for name, (v, want) in wanted.items():
        if v.shape != want:
            raise ValueError(f"{name} has shape {v.shape}, must be {want} for bx {bx.shape}")
    for name, v in (("decay", decay), ("bx", bx), ("units", units)):
        common.check_float(name, v)
    most = _FAMILY[platform].MAX_RANK
    if not 1 <= rank <= most or 0 in bx.shape:
        raise ValueError(f"rank {rank} must be 1 to {most}, and no axis of bx {bx.shape} empty")
    new, old, h0 = jax.tree.map(lambda v: v.astype(jnp.float32), (new, old, h0))
    arrays = common.storable(platform, decay, bx, units)
    along, residual, h = _fused(*arrays, new, old, h0, keep, platform, chunk, interpret)
    return along, residual, h.astype(bx.dtype) if keep else None
