"""The (gated) delta rule in chunks, as matrix products in WY form, differentiable.

S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, y_t = S_tᵀ q_t; α = 1 is DeltaNet.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import chunked_tpu, common, recurrence_gpu, wy_gpu


def _inverse(m):
    """(I + M)^-1 for strictly lower triangular M (Q, Q), by doubling the size of inverted blocks.

    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]: every intermediate is a block of the
    result, so correlated keys do not blow it up the way a power series in M does.
    """
    q = m.shape[0]
    i = lax.broadcasted_iota(jnp.int32, (q, q), 0)
    j = lax.broadcasted_iota(jnp.int32, (q, q), 1)
    inverse = jnp.where(i == j, 1.0, 0.0)
    size = 1
    while size < q:
        # lax.div: `//` on traced values asks for the device at hand, which breaks cross-lowering.
        below = (lax.div(i, size) == lax.div(j, size) + 1) & (
            lax.div(i, 2 * size) == lax.div(j, 2 * size)
        )
        coupling = jnp.where(below, m, 0.0)
        dot = functools.partial(chunked_tpu.dot, exact=True)
        inverse = inverse - dot(dot(inverse, coupling), inverse)
        size *= 2
    return inverse


@jax.custom_vjp
def _solve(m, right):
    """(I + M)^-1 right."""
    return chunked_tpu.dot(_inverse(m), right, exact=True)


def _solve_fwd(m, right):
    inverse = _inverse(m)
    solution = chunked_tpu.dot(inverse, right, exact=True)
    return solution, (inverse, solution)


def _solve_bwd(saved, ct):
    inverse, solution = saved
    dright = chunked_tpu.dot(inverse, ct, ((0,), (0,)), exact=True)
    return -chunked_tpu.dot(dright, solution, ((1,), (1,)), exact=True), dright


_solve.defvjp(_solve_fwd, _solve_bwd)


def _chunk(log_decay, beta, q, k, v, state, *, exact):
    """One chunk: log_decay and beta (1, Q), q and k (Q, K), v (Q, V), state (K, V).

    With γ the decay from the chunk's start, S_i = γ_i S_0 + Σ_{j≤i} (γ_i/γ_j) k_j u_jᵀ, where
    u_i = β_i (v_i - γ_i S_0ᵀ k_i - Σ_{j<i} (γ_i/γ_j) (k_i·k_j) u_j).
    """
    dot = functools.partial(chunked_tpu.dot, exact=exact)
    between, from_start, to_end = chunked_tpu.decays(log_decay)
    beta = chunked_tpu.column(beta)
    size = q.shape[0]
    i = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    j = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    m = jnp.where(i > j, beta * dot(k, k, ((1,), (1,))) * between, 0.0)
    u = _solve(m, beta * (v - from_start * dot(k, state)))
    scores = dot(q, k, ((1,), (1,))) * between
    y = from_start * dot(q, state) + dot(scores, u)
    return y, from_start[-1:] * state + dot(k * to_end, u, ((0,), (0,)))


_STREAMS = (
    chunked_tpu.Stream(row=True), chunked_tpu.Stream(row=True),
    chunked_tpu.Stream(), chunked_tpu.Stream(), chunked_tpu.Stream(),
)  # fmt: skip


def _forward(log_decay, beta, q, k, v, first, interpret):
    return chunked_tpu.forward(
        functools.partial(_chunk, exact=v.dtype == jnp.float32), _STREAMS,
        (log_decay, beta, q, k, v), first, v.shape[-1], v.dtype, name="delta", interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _delta(log_decay, beta, q, k, v, first, interpret):
    y, _, last = _forward(log_decay, beta, q, k, v, first, interpret)
    return y, last


def _delta_fwd(log_decay, beta, q, k, v, first, interpret):
    y, start, last = _forward(log_decay, beta, q, k, v, first, interpret)
    return (y, last), (log_decay, beta, q, k, v, start)


def _delta_bwd(interpret, saved, cotangents):
    *arrays, start = saved
    dy, dlast = cotangents
    chunk = functools.partial(_chunk, exact=arrays[-1].dtype == jnp.float32)
    grads, dfirst = chunked_tpu.backward(
        chunk, _STREAMS, arrays, start, dy, dlast, name="delta_bwd", interpret=interpret
    )
    return *grads, dfirst


_delta.defvjp(_delta_fwd, _delta_bwd)


def delta_rule(q, k, v, beta, log_decay=None, h0=None, *, platform, interpret=False):
    """S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, y_t = S_tᵀ q_t per head.

    Args:
      q, k: (B, T, H, K), keys of unit length (or zero). v: (B, T, H, V).
      beta: (B, T, H), in [0, 1], or [0, 2] for negative eigenvalues.
      log_decay: (B, T, H), log α ≤ 0 (gated delta rule), or None for α = 1.
      h0: (B, H, K, V) state before the first step, or None for zero.
      platform: "tpu" or "gpu". Never read from the devices at hand.
      interpret: True, or interpreter parameters of the platform, to run on CPU.

    Returns:
      y (B, T, H, V) in v's type; h_last (B, H, K, V) float32.

    Raises:
      ValueError: shapes that do not match, types or platforms without a kernel, more key channels
        K than the GPU kernel takes (256 for bfloat16, 128 otherwise).
    """
    common.check_platform(platform)
    for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta)):
        common.check_float(name, x)
    batch, time, heads, size = q.shape
    width = v.shape[-1]
    bth = (batch, time, heads)
    wanted = {
        "k": (k, q.shape), "v": (v, (*bth, width)), "beta": (beta, bth),
        "log_decay": (log_decay, bth), "h0": (h0, (batch, heads, size, width)),
    }  # fmt: skip
    for name, (x, shape) in wanted.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, must be {shape} for q {q.shape}")
    f32 = jnp.float32
    first = jnp.zeros((batch, heads, size, width), f32) if h0 is None else h0.astype(f32)
    if 0 in v.shape:
        return jnp.zeros_like(v), first
    log_decay = jnp.zeros(bth, f32) if log_decay is None else log_decay

    dtype = v.dtype
    if platform == "gpu":
        exact = any(x.dtype != jnp.bfloat16 for x in (q, k, v))
        log_decay = log_decay.astype(f32)
        u, w = wy_gpu.corrections(log_decay, beta.astype(f32), k, v, exact, interpret)
        return recurrence_gpu.recurrence(
            log_decay, q, k, u, w, first, dtype=dtype, exact=exact, name="delta",
            interpret=interpret,
        )  # fmt: skip
    q, k, v = common.storable(platform, q, k, v)

    def row(x):
        return x.astype(f32).swapaxes(1, 2).reshape(-1, 1, time)

    def flat(x):  # (B, T, H, w) -> (B H, T, w)
        return x.swapaxes(1, 2).reshape(-1, time, x.shape[-1])

    y, last = _delta(
        row(log_decay), row(beta), flat(q), flat(k), flat(v), first.reshape(-1, size, width),
        interpret,
    )  # fmt: skip
    y = y.reshape(batch, heads, time, width).swapaxes(1, 2)
    return y.astype(dtype), last.reshape(first.shape)
