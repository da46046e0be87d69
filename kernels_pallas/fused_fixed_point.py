"""One fixed-point iteration in one pass over memory: mix channels, scan, measure the change.

Computes equation 7 of "Fixed-Point RNNs" (arXiv 2503.10799) for householder and dplr mixers. Reads
h, Bx, λ and the mixer's vectors once, writes the new h once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import common
from kernels_pallas.linear_scan import linear_scan

MIXERS = ("householder", "dplr")
PLATFORMS = ("tpu",)
BLOCK_BYTES = 8 * 2**20  # of VMEM for all blocks, double buffers included
EPS = 1e-8


def _mix(v, units, alpha, *, mixer: str, scale: float):
    """Q v on (..., D): `units` r arrays of v's shape, alpha (..., r); unit 0 acts first."""
    result = v
    for i, unit in enumerate(units):
        along = jnp.sum(unit * (result if mixer == "householder" else v), axis=-1, keepdims=True)
        result = result - scale * alpha[..., i : i + 1] * along * unit
    return result


def _kernel(
    h_ref, bx_ref, decay_ref, unit_ref, alpha_ref, new_ref, residual_ref, state_ref,
    *, time, rows, rank, mixer, scale,
):  # fmt: skip
    """All channels of one sequence, chunk after chunk of time."""
    step = pl.program_id(1)
    _, block_t, dim = h_ref.shape

    @pl.when(step == 0)
    def _reset():
        state_ref[...] = jnp.zeros_like(state_ref)
        residual_ref[...] = jnp.zeros_like(residual_ref)

    def tile(i, carry):
        state, worst = carry
        at = pl.ds(pl.multiple_of(i * rows, rows), rows)
        h = h_ref[:, at, :].astype(jnp.float32)
        decay = decay_ref[:, at, :].astype(jnp.float32)
        alpha = alpha_ref[:, at, :].astype(jnp.float32)
        units = [unit_ref[:, at, pl.ds(k * dim, dim)].astype(jnp.float32) for k in range(rank)]
        v = bx_ref[:, at, :].astype(jnp.float32) - h
        x = (1 - decay) * (_mix(v, units, alpha, mixer=mixer, scale=scale) + h)
        if time % block_t:
            t = step * block_t + i * rows + lax.broadcasted_iota(jnp.int32, h.shape, 1)
            inside = t < time
            # Past the end the state stays as it is and nothing changes.
            h, decay, x = (
                jnp.where(inside, h, 0),
                jnp.where(inside, decay, 1),
                jnp.where(inside, x, 0),
            )
        out = []
        for r in range(0, rows, common.SUBLANES):
            part = slice(r, r + common.SUBLANES)
            new = common.tile_scan(decay[:, part], x[:, part], state, False)
            state = common.last_row(new, False)
            out.append(new)
        new = out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)
        new_ref[:, at, :] = new.astype(new_ref.dtype)
        change = jnp.max(jnp.abs(new - h), axis=-1, keepdims=True)
        size = jnp.max(jnp.abs(new), axis=-1, keepdims=True)
        ratio = change / (size + EPS)
        if time % block_t:
            ratio = jnp.where(inside[..., :1], ratio, 0)
        return state, jnp.maximum(worst, jnp.max(ratio, axis=1, keepdims=True))

    state, worst = lax.fori_loop(0, block_t // rows, tile, (state_ref[...], residual_ref[...]))
    state_ref[...] = state
    residual_ref[...] = worst


def _fused_tpu(h, bx, decay, units, alpha, mixer, scale, chunk, interpret):
    batch, time, dim = h.shape
    rank = alpha.shape[-1]
    rows = common.row_tile(h.dtype, bx.dtype, decay.dtype, units.dtype, alpha.dtype)
    itemsize = max(jnp.dtype(v.dtype).itemsize for v in (h, bx, decay, units))
    fits = BLOCK_BYTES // (2 * (4 + rank) * dim * itemsize)
    block_t = min(chunk or 256, max(rows, fits), common.round_up(time, rows))
    block_t = max(rows, block_t // rows * rows)

    def per_time(width):
        return pl.BlockSpec((1, block_t, width), lambda b, c: (b, c, 0))

    new, residual = pl.pallas_call(
        functools.partial(_kernel, time=time, rows=rows, rank=rank, mixer=mixer, scale=scale),
        grid=(batch, common.cdiv(time, block_t)),
        in_specs=[*[per_time(dim)] * 3, per_time(rank * dim), per_time(rank)],
        out_specs=[per_time(dim), pl.BlockSpec((1, 1, 1), lambda b, c: (b, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(h.shape, h.dtype),
            jax.ShapeDtypeStruct((batch, 1, 1), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((1, 1, dim), jnp.float32)],
        compiler_params=common.time_semantics(1),
        interpret=interpret,
        name="fused_fixed_point",
    )(h, bx, decay, units.reshape(batch, time, rank * dim), alpha)
    return new, residual[:, 0, 0]


def _plain(h, bx, decay, units, alpha, mixer, scale, interpret):
    """The same map from the linear scan kernel and jax.numpy; its gradient serves the fused one."""
    f32 = functools.partial(jax.tree.map, lambda v: v.astype(jnp.float32))
    h32, bx, decay32, units, alpha = f32((h, bx, decay, units, alpha))
    parts = [units[..., i, :] for i in range(alpha.shape[-1])]
    x = (1 - decay32) * (_mix(bx - h32, parts, alpha, mixer=mixer, scale=scale) + h32)
    return linear_scan(decay, x, platform="tpu", interpret=interpret)[0].astype(h.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _fused(h, bx, decay, units, alpha, mixer, scale, chunk, interpret):
    return _fused_tpu(h, bx, decay, units, alpha, mixer, scale, chunk, interpret)


def _fused_fwd(h, bx, decay, units, alpha, mixer, scale, chunk, interpret):
    args = (h, bx, decay, units, alpha)
    return _fused_tpu(*args, mixer, scale, chunk, interpret), args


def _fused_bwd(mixer, scale, chunk, interpret, args, cotangents):
    del chunk
    plain = functools.partial(_plain, mixer=mixer, scale=scale, interpret=interpret)
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
      platform: "tpu". Never read from the devices at hand.
      chunk: time steps per block, or None to let the kernel choose.
      interpret: True, or pltpu.InterpretParams, to run on CPU.

    Returns:
      The new iterate (B, T, D) in h's type and the residual (B,) float32,
      max_t ‖h'_t - h_t‖_∞ / (‖h'_t‖_∞ + 1e-8).

    Raises:
      ValueError: shapes that do not match, an unknown mixer, types or platforms without a kernel.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r}; fused_fixed_point has kernels for {PLATFORMS}")
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
    return _fused(h, bx, decay, units, alpha, mixer, float(scale), chunk, interpret)
