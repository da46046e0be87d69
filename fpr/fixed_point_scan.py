"""The fixed point of "mix channels, scan over time", found without reading or writing iterates.

For a mixer of rank r whose Q does not depend on the iterate (householder, dplr), an iteration of
equation 7 of "Fixed-Point RNNs" (arXiv 2503.10799, spec 1 section 1) is

    h' = scan(λ, (1-λ) (Q (Bx - h) + h)) = scan(λ, (1-λ) (Bx - Σ_i w_i ū_i))

with w a function of the r products ū_iᵀ (Bx - h). So the solver carries r numbers per token instead
of h, and an iteration reads λ, Bx and ū once (`kernels_pallas.fused_fixed_point`). The gradient is
that of the ordinary iteration at h*.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from fpr import adjoints, solvers
from fpr._dispatch import carry_type, check_backend, dispatch, same_manual_axes
from fpr.fixed_point import Solution, fixed_point
from fpr.mixers import MIXERS, MixerOptions
from fpr.scan import linear_scan
from fpr.solvers import Damped

Array = jax.Array
LOW_RANK = ("householder", "dplr")
KERNEL_RANK = 14  # the largest that every kernel holds


def mixer_weights(along: Array, alpha: Array, overlap: Array | None, scale: float) -> Array:
    """w of Q v = v - Σ_i w_i ū_i, from the products with v alone.

    Args:
      along: (..., r), ū_iᵀ v.
      alpha: (..., r).
      overlap: (..., r, r), ū_iᵀ ū_j, for householder: factor i sees what those before it left,
        w_i = s α_i (ū_iᵀ v - Σ_{j<i} ū_iᵀ ū_j w_j). None for the sum of dplr.
      scale: s.
    """
    if overlap is None:
        return scale * alpha * along
    weights: list[Array] = []
    for i in range(alpha.shape[-1]):
        left = along[..., i] - sum(overlap[..., i, j] * w for j, w in enumerate(weights))
        weights.append(scale * alpha[..., i] * left)
    return jnp.stack(weights, axis=-1)


def _readout(backend, decay, bx, units, weights, mass, h0):
    """The iterate (B, T, D) that weights (B, T, r) and mass (B,) stand for."""
    mixed = jnp.einsum("btr,btrd->btd", weights, units.astype(weights.dtype))
    x = mass[:, None, None] * bx.astype(weights.dtype) - mixed
    decay = decay.astype(weights.dtype)
    return linear_scan(decay, (1 - decay) * x, mass[:, None] * h0, backend=backend)[0]


def _two_scans(backend, decay, bx, units, new, mass, old, old_mass, h0):
    """ū_iᵀ (Bx - h) of the iterate of `new` and its residual against that of `old`."""
    h = _readout(backend, decay, bx, units, new, mass, h0)
    g = _readout(backend, decay, bx, units, old, old_mass, h0)
    along = jnp.einsum("btrd,btd->btr", units.astype(h.dtype), bx.astype(h.dtype) - h)
    return along, solvers.residual(h, g)


def _measure(backend: str, *args: Array) -> tuple[Array, Array]:
    """`_two_scans` by the form that `backend` names."""

    def pallas(decay, bx, units, new, mass, old, old_mass, h0, *, platform):
        import kernels_pallas as kp

        iterates = kp.Iterate(mass, new), kp.Iterate(old_mass, old)
        return kp.fused_fixed_point(decay, bx, units, *iterates, h0, platform=platform)[:2]

    new, mass = args[3:5]
    return dispatch(
        backend,
        functools.partial(_two_scans, "sequential"),
        functools.partial(_two_scans, "xla"),
        pallas,
        (new, jax.ShapeDtypeStruct(mass.shape, jnp.float32)),
        *args,
        platforms=("tpu", "cuda") if new.shape[-1] <= KERNEL_RANK else (),
    )


def fixed_point_scan(
    decay: Array,
    bx: Array,
    units: Array,
    alpha: Array,
    h0: Array | None = None,
    *,
    mixer: str = "householder",
    scale: float = 2.0,
    solver: Damped = Damped(),
    adjoint: adjoints.Adjoint = adjoints.OneStep(),
    max_steps: Array | int | None = None,
    backend: str = "auto",
) -> Solution:
    """Solves h_t = λ_t h_{t-1} + (1-λ_t) (Q_t (Bx_t - h_t) + h_t) for all t, starting from zero.

    The iterates, steps and residuals are those of `fpr.fixed_point` with the ordinary iteration, up
    to rounding. Differentiable in the five arrays by the rule of `adjoint`. A long sequence may be
    solved in chunks, the last h of one the h0 of the next, down to token by token: the fixed point
    is the same.

    Args:
      decay: (B, T, D), λ in [0, 1].
      bx: (B, T, D), input.
      units: (B, T, r, D), unit vectors ū.
      alpha: (B, T, r).
      h0: (B, D) state before the first step, or None for zero.
      mixer: "householder" or "dplr", see `fpr.mixers`.
      scale: s of the mixers, 2 or 1.
      solver, max_steps: as for `fpr.fixed_point`.
      adjoint: gradient rule, any but `Unrolled`.
      backend: as for `fpr.linear_scan`; "pallas" is the fused kernel.

    Returns:
      A `Solution` with value (B, T, D) in at least float32; its state goes on in `fpr.fixed_point`.

    Raises:
      ValueError: shapes that do not match, an unknown mixer, solver options that need the iterates.
    """
    check_backend(backend)
    if mixer not in LOW_RANK:
        raise ValueError(f"mixer={mixer!r}, allowed here: {', '.join(LOW_RANK)} (rank r, no state)")
    if isinstance(adjoint, adjoints.Unrolled) or solver.noise:
        raise ValueError("fixed_point_scan has no iterates for adjoint=Unrolled() or solver.noise")
    decay, bx, units, alpha = (jnp.asarray(v) for v in (decay, bx, units, alpha))
    if bx.ndim != 3 or 0 in bx.shape or not jnp.issubdtype(bx.dtype, jnp.floating):
        raise ValueError(f"bx {bx.dtype}{bx.shape} must be floating (B, T, D), no axis empty")
    (batch, time, dim), rank = bx.shape, alpha.shape[-1]
    h0 = jnp.zeros((batch, dim)) if h0 is None else jnp.asarray(h0)
    wanted = {
        "decay": (decay, bx.shape), "units": (units, (batch, time, rank, dim)),
        "alpha": (alpha, (batch, time, rank)), "h0": (h0, (batch, dim)),
    }  # fmt: skip
    for name, (value, shape) in wanted.items():
        if value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}; bx {bx.shape} needs {shape}")
    if backend == "pallas" and rank > KERNEL_RANK:
        raise ValueError(f"backend='pallas' takes a rank of at most {KERNEL_RANK}, not {rank}")
    wide = carry_type(bx.dtype)
    args = same_manual_axes(decay, bx, units, alpha.astype(wide), h0.astype(wide))

    def iterate(_, x, h):
        """The ordinary iteration; its gradient is the one that counts."""
        decay, bx, units, alpha, h0 = x
        decay, bx, units = (v.astype(wide) for v in (decay, bx, units))
        q = MIXERS[mixer](dim, MixerOptions(mixer, rank, scale)).transform
        mixed = q((units, alpha), bx - h) + h
        return linear_scan(decay, (1 - decay) * mixed, h0, backend=backend)[0]

    state = _search(args, mixer, scale, solver, max_steps, backend)
    return fixed_point(iterate, (), args, state.z, solver=solver, adjoint=adjoint, state=state,
                       max_steps=0)  # fmt: skip


def _search(args, mixer, scale, solver, max_steps, backend) -> solvers.SolverState:
    """The solver's last state, its iterates written out; no gradient."""
    decay, bx, units, alpha, h0 = jax.lax.stop_gradient(args)
    wide = alpha.dtype
    overlap = None
    if mixer == "householder" and alpha.shape[-1] > 1:
        overlap = jnp.einsum("btid,btjd->btij", units.astype(wide), units.astype(wide))

    def step(z):
        """One iteration. Damping is affine, so it acts on what stands for h as it does on h."""
        weights, mass, along = z
        new = mixer_weights(along, alpha, overlap, scale)
        one = jnp.ones_like(mass)
        along, residual = _measure(backend, decay, bx, units, new, one, weights, mass, h0)
        return solvers.Measured((new, one, along), residual)

    # The zero iterate: ū_iᵀ (Bx - 0).
    along = jnp.einsum("btrd,btd->btr", units.astype(wide), bx.astype(wide))
    start = jnp.zeros_like(along), jnp.zeros_like(along[:, 0, 0]), along
    state = solver.run(step, solver.init(start), max_steps)

    def written_out(z):
        return None if z is None else _readout(backend, decay, bx, units, z[0], z[1], h0)

    return state._replace(z=written_out(state.z), best_z=written_out(state.best_z))
