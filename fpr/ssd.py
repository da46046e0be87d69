"""Mamba-2's scan: one scalar decay per head, computed in chunks as matrix products.

Source: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), section 6.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fpr._dispatch import carry_type, check_backend, recomputing, same_manual_axes

Array = jax.Array


def decays(log_decay: Array) -> tuple[Array, Array]:
    """Products of decays inside chunks, from their logarithms (..., L) ≤ 0.

    Every sum adds only the steps it spans. A difference of two cumulative sums would lose all
    digits of a weak decay behind a strong one, and would be NaN behind a decay of 0 (log -inf).

    Returns:
      between: (..., L, L), exp(Σ_{j<s≤i} log_decay_s) at [i, j] for j ≤ i, else 0.
      start: (..., L), exp(Σ_{s≤i} log_decay_s), the decay of what enters the chunk.
    """
    size = log_decay.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    spread = jnp.where(row > column, log_decay[..., :, None], 0.0)
    total = jnp.cumsum(spread, axis=-2)
    between = jnp.exp(jnp.where(row >= column, total, -jnp.inf))
    return between, jnp.exp(jnp.cumsum(log_decay, axis=-1))


def in_chunks(x: Array, size: int) -> Array:
    """(B, T, H, ...) as (B, H, chunks, size, ...), zeros after the end."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, -x.shape[1] % size)
    x = jnp.pad(x, pad)
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.moveaxis(x, 3, 1)


def from_chunks(x: Array, time: int) -> Array:
    """(B, H, chunks, size, ...) as (B, T, H, ...)."""
    x = jnp.moveaxis(x, 1, 3)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :time]


def check_chunk(chunk: Any) -> None:
    """Raises ValueError unless chunk is a positive whole number."""
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk={chunk!r}; it must be a whole number of steps ≥ 1")


def check_shapes(wanted: dict[str, tuple[Array | None, tuple[int, ...]]], base: str) -> None:
    """Raises ValueError naming the first array whose shape is not the wanted one."""
    for name, (value, shape) in wanted.items():
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}; {base} needs {shape}")


def _per_head(x: Array, heads: int) -> Array:
    """(B, T, G, N) with every group repeated for its heads, (B, T, H, N)."""
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def _chunked(chunk: int, x: Array, log_decay: Array, b_in: Array, c_out: Array, h0: Array):
    """All chunks at once as matrix products, then one step per chunk for the states."""
    wide = h0.dtype
    time, heads = x.shape[1:3]
    size = min(chunk, time)
    xs, decay = (in_chunks(v.astype(wide), size) for v in (x, log_decay))
    bs, cs = (in_chunks(_per_head(v.astype(wide), heads), size) for v in (b_in, c_out))
    between, start = decays(decay)
    inside = jnp.einsum("bhcin,bhcjn->bhcij", cs, bs) * between
    y = jnp.einsum("bhcij,bhcjp->bhcip", inside, xs)
    added = jnp.einsum("bhcj,bhcjp,bhcjn->bhcpn", between[..., -1, :], xs, bs)

    def step(h, chunk):
        decay, more = chunk
        return decay[..., None, None] * h + more, h

    along = (jnp.moveaxis(start[..., -1], 2, 0), jnp.moveaxis(added, 2, 0))
    last, before = lax.scan(step, h0, along)
    before = jnp.moveaxis(before, 0, 2)
    y = y + jnp.einsum("bhci,bhcin,bhcpn->bhcip", start, cs, before)
    return from_chunks(y, time).astype(x.dtype), last


def _stepwise(x: Array, log_decay: Array, b_in: Array, c_out: Array, h0: Array):
    """One step of time after the other."""
    wide = h0.dtype
    heads = x.shape[2]

    def step(h, row):
        x_t, decay, b_t, c_t = row
        h = jnp.exp(decay)[..., None, None] * h + x_t[..., None] * b_t[:, :, None, :]
        return h, jnp.einsum("bhpn,bhn->bhp", h, c_t)

    long = [v.astype(wide) for v in (x, log_decay)]
    long += [_per_head(v.astype(wide), heads) for v in (b_in, c_out)]
    last, y = lax.scan(step, h0, tuple(jnp.moveaxis(v, 1, 0) for v in long))
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), last


def _kernel(x, log_decay, b_in, c_out, h0, *, platform):
    import kernels_pallas

    if platform == "gpu" and not kernels_pallas.supports_wgmma():
        return _chunked(64, x, log_decay, b_in, c_out, h0)
    return kernels_pallas.ssd(x, log_decay, b_in, c_out, h0, platform=platform)


@functools.cache
def _op(chunk: int) -> Any:
    """The differentiable scan for one chunk length."""
    chunked = functools.partial(_chunked, chunk)
    return recomputing(_stepwise, chunked, _kernel, ("tpu", "cuda"), lambda x, *rest: (x, rest[-1]))


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    h0: Array | None = None,
    *,
    chunk: int = 64,
    backend: str = "auto",
) -> tuple[Array, Array]:
    """h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_tᵀ, y_t = (h_t C_t + D x_t) silu(z_t), per head.

    Differentiable in every array to any order; the gradient keeps the inputs alone and computes the
    rest again. States and products are computed in at least float32.

    Args:
      x: (B, T, H, P) input, P channels in each of H heads.
      dt: (B, T, H) step sizes Δ ≥ 0, after bias and softplus.
      A: (H,) decay rates ≤ 0, one per head.
      B, C: (B, T, G, N) input and output maps of G groups; head h uses group h // (H / G).
      D: (H,) skip weights, or None for none.
      z: (B, T, H, P) gate, or None for none.
      h0: (B, H, P, N) state before the first step, or None for zero.
      chunk: steps handled at once as matrix products; any T works with any chunk.
      backend: "auto": chunks, by a Pallas kernel where there is one; or one form for every
        platform: "xla" (chunks), "sequential" (step by step) or "pallas".

    Returns:
      y: (B, T, H, P) in x's type.
      h_last: (B, H, P, N) state after the last step, in at least float32.

    Raises:
      ValueError: T = 0, shapes that do not match, G not dividing H, chunk < 1, unknown backend.
    """
    check_backend(backend)
    check_chunk(chunk)
    x, dt, A, B, C = (jnp.asarray(v) for v in (x, dt, A, B, C))
    if x.ndim != 4 or B.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x {x.dtype}{x.shape} must be floating (B, T, H, P), B {B.shape} 4-d")
    batch, time, heads, width = x.shape
    groups, n = B.shape[2:]
    if time == 0:
        raise ValueError(f"x {x.shape} has T = 0 steps; the scan takes T ≥ 1")
    if groups < 1 or heads % groups:
        raise ValueError(f"B has {groups} groups; they must divide the {heads} heads of x")
    long = (batch, time)
    wanted = {
        "dt": (dt, (*long, heads)), "A": (A, (heads,)), "B": (B, (*long, groups, n)),
        "C": (C, (*long, groups, n)), "D": (D, (heads,)), "z": (z, x.shape),
        "h0": (h0, (batch, heads, width, n)),
    }  # fmt: skip
    check_shapes(wanted, f"x {x.shape} with N={n}")
    wide = carry_type(x.dtype)
    dt = dt.astype(wide)
    state = jnp.zeros((batch, heads, width, n), wide) if h0 is None else h0.astype(wide)
    scaled = (dt[..., None] * x.astype(wide)).astype(x.dtype)
    args = same_manual_axes(scaled, dt * A.astype(wide), B, C, state)
    y, last = _op(chunk)(backend, *args)
    if D is not None or z is not None:
        y = y.astype(wide)
    if D is not None:
        y = y + D.astype(wide)[:, None] * x.astype(wide)
    if z is not None:
        y = y * jax.nn.silu(z.astype(wide))
    return y.astype(x.dtype), last
