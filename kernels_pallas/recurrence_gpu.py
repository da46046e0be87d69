"""The recurrence of ssd and delta_rule on GPU, differentiable: padding, pieces, gradients.

The kernels are in chunked_gpu; this module brings arrays into their form and back.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import common
from kernels_pallas.chunked_gpu import Shape, backward, forward
from kernels_pallas.tiles_gpu import EXACT, LOG_FLOOR, TILE, padded, pieces

MOST_KEYS = {False: 256, True: 128}  # by whether products are exact: shared memory, registers


def _shape(q, u, w, exact: bool) -> Shape:
    batch, time, groups, keys = q.shape
    heads, values = u.shape[2:]
    up = functools.partial(common.cdiv, k=TILE)
    return Shape(
        batch, up(time) * TILE, heads, heads // groups, up(keys), up(values),
        EXACT if exact else 1, w is not None,
    )  # fmt: skip


def _stream(v, shape: Shape):
    """(B, T, H, w) as padded pieces (pieces B, T, H, w)."""
    v = padded(v, {1: shape.time, 3: common.round_up(v.shape[3], TILE)})
    return jnp.concatenate(pieces(v, shape.pieces))


def _log(log_decay, shape: Shape):
    """(B, T, H) as padded (B H, T), not below LOG_FLOOR."""
    rows = jnp.maximum(log_decay, LOG_FLOOR).swapaxes(1, 2).reshape(-1, log_decay.shape[1])
    return padded(rows, {1: shape.time})


def _state(v, shape: Shape):
    """(B, H, N, P) as padded (B H, N, P)."""
    v = v.reshape(-1, *v.shape[2:])
    return padded(v, {1: shape.keys * TILE, 2: shape.values * TILE})


def _run(log_decay, q, k, u, w, first, options, save):
    dtype, exact, name, interpret = options
    shape = _shape(q, u, w, exact)
    y, last, used, start = forward(
        shape, _log(log_decay, shape), _stream(q, shape), _stream(k, shape), _stream(u, shape),
        None if w is None else _stream(w, shape), _state(first, shape), dtype,
        save=save, name=name, interpret=interpret,
    )  # fmt: skip
    (_, time, _, width), keys = u.shape, q.shape[3]
    last = last[:, :keys, :width].reshape(first.shape)
    return (y[:, :time, :, :width], last), used, start


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _recurrence(log_decay, q, k, u, w, first, options):
    return _run(log_decay, q, k, u, w, first, options, save=False)[0]


def _recurrence_fwd(log_decay, q, k, u, w, first, options):
    outs, used, start = _run(log_decay, q, k, u, w, first, options, save=True)
    return outs, (log_decay, q, k, u, w, used if w is not None else None, start)


def _recurrence_bwd(options, saved, cotangents):
    log_decay, q, k, u, w, used, start = saved
    dy, dlast = cotangents
    _, exact, name, interpret = options
    shape = _shape(q, u, w, exact)
    dlog, dq, dk, du, dw, dfirst = backward(
        shape, _log(log_decay, shape), _stream(q, shape), _stream(k, shape),
        _stream(u, shape) if used is None else used, None if w is None else _stream(w, shape),
        start, _stream(dy, shape), _state(dlast, shape), u.dtype, name=name, interpret=interpret,
    )  # fmt: skip
    (batch, time, heads, width), (_, _, groups, keys) = u.shape, q.shape

    def of_group(v):
        v = v[:, :time, :, :keys].reshape(batch, time, groups, heads // groups, keys)
        return v.sum(3).astype(q.dtype)

    dlog = dlog[:, :time].reshape(batch, heads, time).swapaxes(1, 2)
    dlog = jnp.where(log_decay > LOG_FLOOR, dlog, 0.0)
    dfirst = dfirst[:, :keys, :width].reshape(dlast.shape)
    dw = None if w is None else dw[:, :time, :, :keys].astype(w.dtype)
    return dlog, of_group(dq), of_group(dk), du[:, :time, :, :width], dw, dfirst


_recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)


def recurrence(log_decay, q, k, u, w, first, *, dtype, exact, name, interpret):
    """S_i = γ_i S_0 + Σ_{j≤i} (γ_i/γ_j) k_j ũ_jᵀ, y_i = S_iᵀ q_i, with ũ = u - W S_0 per chunk.

    γ is the decay since the chunk's start. Differentiable in every array.

    Args:
      log_decay: float32 (B, T, H), ≤ 0; below LOG_FLOOR it is a decay of 0 without gradient.
      q, k: (B, T, G, N), G a divisor of H. u: (B, T, H, P).
      w: (B, T, H, N), or None for ũ = u.
      first: float32 (B, H, N, P).
      dtype: of y.
      exact: float32 products, from three bfloat16 pieces per number; else one, rounded.
      name: of the kernels. interpret: parameters of the Mosaic GPU interpreter, or False.

    Returns:
      y (B, T, H, P), the last state float32 (B, H, N, P).

    Raises:
      ValueError: more keys than shared memory holds.
    """
    most = MOST_KEYS[exact]
    if q.shape[-1] > most:
        kind = "float32 and float16" if exact else "bfloat16"
        raise ValueError(
            f"{name} has {q.shape[-1]} state channels per value; the GPU kernel takes at most "
            f"{most} for {kind}, use the XLA form (backend='xla')"
        )
    return _recurrence(log_decay, q, k, u, w, first, (dtype, exact, name, interpret))
