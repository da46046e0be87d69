"""The delta rule and its gated and product forms, computed in chunks.

Sources: DeltaNet (Yang et al., arXiv 2406.06484), its gate (arXiv 2412.06464), negative eigenvalues
(arXiv 2411.12537) and products of Householder factors (arXiv 2502.10297).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fpr._dispatch import carry_type, check_backend, recomputing, same_manual_axes
from fpr.ssd import check_chunk, check_shapes, decays, from_chunks, in_chunks

Array = jax.Array

# The recurrence feeds errors back: products in TF32 or bfloat16 passes would ruin it.
_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _substitute(system: Array, right: Array) -> Array:
    """u with (I + system) u = right, row by row; system (..., L, L) strictly lower."""

    def row(i, u):
        weights = lax.dynamic_index_in_dim(system, i, -2, keepdims=False)
        start = lax.dynamic_index_in_dim(right, i, -2, keepdims=False)
        new = start - _product("...j,...jw->...w", weights, u)
        return lax.dynamic_update_index_in_dim(u, new, i, right.ndim - 2)

    return lax.fori_loop(0, right.shape[-2], row, right)


def _solve_unit_lower(system: Array, right: Array) -> Array:
    """As `_substitute`, differentiable to any order.

    Not `triangular_solve` on CPU: jaxlib's batched strsm waits in the thread pool for tasks of the
    same pool, so two at a time, as in a gradient, hang on two cores (seen with jaxlib 0.10.2).
    """

    def library(system, right):
        return lax.linalg.triangular_solve(
            system, right, left_side=True, lower=True, unit_diagonal=True
        )

    def solve(system, right):
        return lax.platform_dependent(system, right, cpu=_substitute, default=library)

    def transposed(_, right):  # (I + system)ᵀ is lower again with rows and columns reversed.
        mirrored = jnp.flip(system.swapaxes(-1, -2), (-2, -1))
        return jnp.flip(solve(mirrored, jnp.flip(right, -2)), -2)

    return lax.custom_linear_solve(
        lambda u: u + _product("...ij,...jw->...iw", system, u),
        right,
        lambda _, right: solve(system, right),
        transposed,
    )


def _chunked(chunk: int, q: Array, k: Array, v: Array, beta: Array, log_decay: Array, h0: Array):
    """Chunks in WY form: one triangular system per chunk, one step per chunk for the states.

    Inside a chunk S_i = γ_i S_0 + Σ_{j≤i} Γ_ij k_j u_jᵀ with the corrected values
    u_i = β_i (v_i - γ_i S_0ᵀ k_i - Σ_{j<i} Γ_ij (k_i·k_j) u_j): a unit triangular system in u. Its
    inverse has entries of at most β², so u = U - W S_0 may be split and solved for all chunks at
    once. Forward substitution is the recurrence itself and as stable as it.
    """
    wide = h0.dtype
    time = q.shape[1]
    size = min(chunk, time)
    qs, ks, vs, bs, gs = (in_chunks(x.astype(wide), size) for x in (q, k, v, beta, log_decay))
    between, start = decays(gs)
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    keys = _product("bhcik,bhcjk->bhcij", ks, ks) * between * bs[..., None]
    system = jnp.where(row > column, keys, 0.0)
    width = v.shape[-1]
    right = jnp.concatenate([bs[..., None] * vs, (bs * start)[..., None] * ks], -1)
    solved = _solve_unit_lower(system, right)
    values, keyed = solved[..., :width], solved[..., width:]
    attention = _product("bhcik,bhcjk->bhcij", qs, ks) * between
    entering = start[..., None] * qs
    leaving = between[..., -1, :, None] * ks

    def step(h, chunk):
        values, keyed, attention, entering, leaving, decay = chunk
        u = values - _product("bhik,bhkv->bhiv", keyed, h)
        y = _product("bhik,bhkv->bhiv", entering, h) + _product("bhij,bhjv->bhiv", attention, u)
        h = decay[..., None, None] * h + _product("bhik,bhiv->bhkv", leaving, u)
        return h, y

    along = (values, keyed, attention, entering, leaving, start[..., -1])
    last, y = lax.scan(step, h0, tuple(jnp.moveaxis(x, 2, 0) for x in along))
    return from_chunks(jnp.moveaxis(y, 0, 2), time).astype(v.dtype), last


def _stepwise(q: Array, k: Array, v: Array, beta: Array, log_decay: Array, h0: Array):
    """One step of time after the other."""
    wide = h0.dtype

    def step(h, row):
        q_t, k_t, v_t, beta_t, decay = row
        h = jnp.exp(decay)[..., None, None] * h
        error = v_t - _product("bhkv,bhk->bhv", h, k_t)
        h = h + beta_t[..., None, None] * k_t[..., None] * error[:, :, None, :]
        return h, _product("bhkv,bhk->bhv", h, q_t)

    long = (jnp.moveaxis(x.astype(wide), 1, 0) for x in (q, k, v, beta, log_decay))
    last, y = lax.scan(step, h0, tuple(long))
    return jnp.moveaxis(y, 0, 1).astype(v.dtype), last


def _kernel(q, k, v, beta, log_decay, h0, *, platform):
    import kernels_pallas

    if platform == "gpu" and not kernels_pallas.supports_wgmma():
        return _chunked(64, q, k, v, beta, log_decay, h0)
    return kernels_pallas.delta_rule(q, k, v, beta, log_decay, h0, platform=platform)


@functools.cache
def _op(chunk: int) -> Any:
    """The differentiable rule for one chunk length."""
    chunked = functools.partial(_chunked, chunk)
    return recomputing(
        _stepwise, chunked, _kernel, ("tpu", "cuda"), lambda q, k, v, *rest: (v, rest[-1])
    )


def _micro_steps(q: Array, k: Array, v: Array, beta: Array, log_decay: Array | None):
    """R factors per step as R steps in a row: decayed before the first, read after the last."""
    batch, time, factors, heads = beta.shape

    def placed(x: Array, at: int) -> Array:
        full = jnp.zeros((batch, time, factors, *x.shape[2:]), x.dtype).at[:, :, at].set(x)
        return full.reshape(batch, time * factors, *x.shape[2:])

    k, v, beta = (x.reshape(batch, time * factors, heads, *x.shape[4:]) for x in (k, v, beta))
    return placed(q, -1), k, v, beta, None if log_decay is None else placed(log_decay, 0)


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    log_decay: Array | None = None,
    h0: Array | None = None,
    *,
    chunk: int = 64,
    backend: str = "auto",
) -> tuple[Array, Array]:
    """S_t = (I - β_t k_t k_tᵀ) α_t S_{t-1} + β_t k_t v_tᵀ, y_t = S_tᵀ q_t, per head.

    With R factors per step (DeltaProduct) the rule is applied R times before y_t is read; the decay
    α_t acts once, before the first factor. β in (0, 1) gives eigenvalues in (0, 1) along k, β up to
    2 allows negative ones. Differentiable in every array to any order; the gradient keeps the
    inputs alone. States and products are computed in at least float32.

    Args:
      q: (B, T, H, K) queries.
      k: (B, T, H, K) keys of unit length, or (B, T, R, H, K) for R factors per step.
      v: (B, T, H, V) or (B, T, R, H, V) values.
      beta: (B, T, H) or (B, T, R, H) write strengths in [0, 2].
      log_decay: (B, T, H), log α ≤ 0 (-inf forgets everything), or None for α = 1.
      h0: (B, H, K, V) state before the first step, or None for zero.
      chunk: steps (factors counted) handled at once; any T works with any chunk.
      backend: "auto": chunks, by a Pallas kernel where there is one; or one form for every
        platform: "xla" (chunks), "sequential" (step by step) or "pallas".

    Returns:
      y: (B, T, H, V) in v's type.
      h_last: (B, H, K, V) state after the last step, in at least float32.

    Raises:
      ValueError: T = 0, shapes that do not match, chunk < 1, unknown backend.
    """
    check_backend(backend)
    check_chunk(chunk)
    q, k, v, beta = (jnp.asarray(x) for x in (q, k, v, beta))
    if q.ndim != 4 or k.ndim not in (4, 5) or not jnp.issubdtype(v.dtype, jnp.floating):
        raise ValueError(f"q {q.shape} must be (B, T, H, K), k {k.shape} that or (B, T, R, H, K)")
    batch, time, heads, size = q.shape
    if time == 0:
        raise ValueError(f"q {q.shape} has T = 0 steps; the rule takes T ≥ 1")
    factors = k.shape[2:3] if k.ndim == 5 else ()
    width = v.shape[-1]
    long = (batch, time, *factors, heads)
    wanted = {
        "k": (k, (*long, size)), "v": (v, (*long, width)), "beta": (beta, long),
        "log_decay": (log_decay, (batch, time, heads)), "h0": (h0, (batch, heads, size, width)),
    }  # fmt: skip
    check_shapes(wanted, f"q {q.shape}")
    wide = carry_type(v.dtype)
    if factors:
        q, k, v, beta, log_decay = _micro_steps(q, k, v, beta, log_decay)
    if log_decay is None:
        log_decay = jnp.zeros(beta.shape, wide)
    state = jnp.zeros((batch, heads, size, width), wide) if h0 is None else h0.astype(wide)
    y, last = _op(chunk)(backend, *same_manual_axes(q, k, v, beta, log_decay, state))
    return (y[:, factors[0] - 1 :: factors[0]] if factors else y), last
