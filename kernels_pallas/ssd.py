"""State space duality scan (Mamba-2) in chunks, as matrix products, differentiable.

One scalar decay per head and step: H_t = exp(a_t) H_{t-1} + B_t x_tᵀ, y_t = H_tᵀ C_t.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import chunked_tpu, common, recurrence_gpu


def _chunk(log_decay, x, b, c, state, *, exact):
    """One chunk: log_decay (1, Q), x (Q, P), b and c (Q, N), state (N, P)."""
    dot = functools.partial(chunked_tpu.dot, exact=exact)
    between, from_start, to_end = chunked_tpu.decays(log_decay)
    scores = dot(c, b, ((1,), (1,))) * between
    y = dot(scores, x) + from_start * dot(c, state)
    whole = from_start[-1:]
    return y, whole * state + dot(b * to_end, x, ((0,), (0,)))


def _streams(shared):
    return (
        chunked_tpu.Stream(row=True), chunked_tpu.Stream(),
        chunked_tpu.Stream(shared=shared), chunked_tpu.Stream(shared=shared),
    )  # fmt: skip


def _forward(log_decay, x, b, c, first, shared, interpret):
    return chunked_tpu.forward(
        functools.partial(_chunk, exact=x.dtype == jnp.float32), _streams(shared),
        (log_decay, x, b, c), first, x.shape[-1], x.dtype, name="ssd", interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _ssd(log_decay, x, b, c, first, shared, interpret):
    y, _, last = _forward(log_decay, x, b, c, first, shared, interpret)
    return y, last


def _ssd_fwd(log_decay, x, b, c, first, shared, interpret):
    y, start, last = _forward(log_decay, x, b, c, first, shared, interpret)
    return (y, last), (log_decay, x, b, c, start)


def _ssd_bwd(shared, interpret, saved, cotangents):
    *arrays, start = saved
    dy, dlast = cotangents
    chunk = functools.partial(_chunk, exact=arrays[1].dtype == jnp.float32)
    grads, dfirst = chunked_tpu.backward(
        chunk, _streams(shared), arrays, start, dy, dlast, name="ssd_bwd", interpret=interpret
    )
    return *grads, dfirst


_ssd.defvjp(_ssd_fwd, _ssd_bwd)


def ssd(x, log_decay, B, C, h0=None, *, platform, interpret=False):
    """H_t = exp(a_t) H_{t-1} + B_t x_tᵀ, y_t = H_tᵀ C_t per head; the caller multiplies x by Δ.

    Args:
      x: (B, T, H, P), float32, bfloat16 or float16.
      log_decay: (B, T, H), a_t = Δ_t A ≤ 0; -inf is a decay of 0 (its gradient is 0).
      B, C: (B, T, G, N), G a divisor of H: head h uses group h // (H / G).
      h0: (B, H, P, N) state before the first step, or None for zero.
      platform: "tpu" or "gpu". Never read from the devices at hand.
      interpret: True, or interpreter parameters of the platform, to run on CPU.

    Returns:
      y (B, T, H, P) in x's type; h_last (B, H, P, N) float32.

    Raises:
      ValueError: shapes that do not match, types or platforms without a kernel, more state
        channels N than the GPU kernel takes (256 for bfloat16, 128 otherwise).
    """
    common.check_platform(platform)
    for name, v in (("x", x), ("log_decay", log_decay), ("B", B), ("C", C)):
        common.check_float(name, v)
    batch, time, heads, p = x.shape
    groups, n = B.shape[-2:]
    if groups < 1 or heads % groups:
        raise ValueError(f"B has {groups} groups, must divide the {heads} heads of x {x.shape}")
    wanted = {
        "log_decay": (log_decay, (batch, time, heads)), "B": (B, (batch, time, groups, n)),
        "C": (C, (batch, time, groups, n)), "h0": (h0, (batch, heads, p, n)),
    }  # fmt: skip
    for name, (v, shape) in wanted.items():
        if v is not None and v.shape != shape:
            raise ValueError(f"{name} has shape {v.shape}, must be {shape} for x {x.shape}")
    first = jnp.zeros((batch, heads, p, n), jnp.float32) if h0 is None else h0
    if 0 in x.shape:
        return jnp.zeros_like(x), first.astype(jnp.float32)

    dtype = x.dtype
    if platform == "gpu":
        y, last = recurrence_gpu.recurrence(
            log_decay.astype(jnp.float32), C, B, x, None,
            first.astype(jnp.float32).swapaxes(2, 3), dtype=dtype,
            exact=any(v.dtype != jnp.bfloat16 for v in (x, B, C)), name="ssd", interpret=interpret,
        )  # fmt: skip
        return y, last.swapaxes(2, 3)
    x, B, C = common.storable(platform, x, B, C)

    def flat(v):  # (B, T, H, w) -> (B H, T, w)
        return v.swapaxes(1, 2).reshape(-1, time, v.shape[-1])

    y, last = _ssd(
        log_decay.astype(jnp.float32).swapaxes(1, 2).reshape(-1, 1, time), flat(x), flat(B),
        flat(C), first.astype(jnp.float32).swapaxes(2, 3).reshape(-1, n, p), heads // groups,
        interpret,
    )  # fmt: skip
    y = y.reshape(batch, heads, time, p).swapaxes(1, 2)
    return y.astype(dtype), last.reshape(batch, heads, n, p).swapaxes(2, 3)
