"""fixed_point_scan: the exact fixed point, the solver's path, its gradient, its kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fpr import adjoints, fixed_point, fixed_point_scan, linear_scan
from fpr.mixers import MIXERS, MixerOptions
from fpr.solvers import Damped
from tests.kernels_pallas import checks
from tests.reference import kernels as reference

BATCH, TIME, DIM, RANK = 2, 12, 6, 2

pytestmark = pytest.mark.usefixtures("fast_compile")


@pytest.fixture(scope="module")
def problem():
    """decay, bx, units, alpha in float64; contractive with scale 1."""
    rng = np.random.default_rng(0)
    units = rng.normal(size=(BATCH, TIME, RANK, DIM))
    units /= np.linalg.norm(units, axis=-1, keepdims=True)
    wide = BATCH, TIME, DIM
    decay, bx = 0.2 + 0.6 * rng.uniform(size=wide), rng.normal(size=wide)
    return decay, bx, units, 0.5 * rng.uniform(size=(BATCH, TIME, RANK))


def f32(arrays):
    return tuple(jnp.asarray(v, jnp.float32) for v in arrays)


def plain(args, solver, mixer="householder", **options):
    """The ordinary road: fixed_point over h itself."""

    def f(_, x, h):
        decay, bx, units, alpha = x
        q = MIXERS[mixer](DIM, MixerOptions(mixer, RANK, 1.0)).transform
        return linear_scan(decay, (1 - decay) * (q((units, alpha), bx - h) + h))[0]

    return fixed_point(f, (), args, jnp.zeros_like(args[1]), solver=solver, **options)


@pytest.mark.parametrize(("backend", "mixer"), [("sequential", "householder"), ("xla", "dplr")])
def test_parallel_chunked_and_sequential_reach_the_exact_fixed_point(problem, backend, mixer):
    """Float64: all of time at once, in chunks of 4, and token by token."""
    decay, bx, units, alpha = problem
    want = reference.fixed_point_dense(bx, decay, units, alpha, 1.0, mixer)
    exact = Damped(tolerance=1e-13, decay=1.0, max_steps=500)
    with jax.enable_x64(True):
        solve = jax.jit(functools.partial(
            fixed_point_scan, mixer=mixer, scale=1.0, solver=exact, backend=backend
        ))  # fmt: skip
        for size in (TIME, 4, 1):
            h0, parts = jnp.zeros((BATCH, DIM)), []
            for at in range(0, TIME, size):
                part = [v[:, at : at + size] for v in problem]
                solution = solve(*part, h0)
                assert solution.converged.all()
                parts.append(solution.value)
                h0 = solution.value[:, -1]
            np.testing.assert_allclose(np.concatenate(parts, 1), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "solver",
    [
        Damped(tolerance=1e-4, max_steps=200),
        Damped(step_size=0.8, tolerance=1e-4, patience=2, residual="best", return_best=True),
        Damped(tolerance=1e-4, halting="batch", stop_fraction=0.5, max_steps=7),
    ],
)
def test_the_path_is_that_of_the_ordinary_iteration(problem, solver):
    """The same steps, residuals and iterates, damping, halting and caps included."""
    args = f32(problem)
    got = jax.jit(functools.partial(fixed_point_scan, scale=1.0, solver=solver))(*args)
    want = jax.jit(functools.partial(plain, solver=solver))(args)
    assert got.steps.tolist() == want.steps.tolist()
    assert got.converged.tolist() == want.converged.tolist()
    np.testing.assert_allclose(got.residual, want.residual, rtol=1e-2)
    np.testing.assert_allclose(got.value, want.value, atol=2e-5)
    np.testing.assert_allclose(got.state.step_size, want.state.step_size, rtol=1e-6)


@pytest.mark.parametrize("adjoint", [adjoints.OneStep(1, refine=True), adjoints.Implicit()])
def test_gradient_is_that_of_the_ordinary_iteration(problem, adjoint):
    args, ct = f32(problem), checks.normal(3, BATCH, TIME, DIM)
    solver = Damped(tolerance=1e-6, decay=1.0, max_steps=200)

    def loss(*args):
        out = fixed_point_scan(*args, scale=1.0, solver=solver, adjoint=adjoint)
        return (out.value * ct).sum()

    def ordinary(*args):
        return (plain(args, solver, adjoint=adjoint).value * ct).sum()

    every = tuple(range(4))
    got = jax.jit(jax.grad(loss, every))(*args)
    checks.assert_close(got, jax.jit(jax.grad(ordinary, every))(*args), 1e-4)


def test_bfloat16_inputs_and_a_failed_sample(problem):
    args = [jnp.asarray(v, jnp.bfloat16) for v in problem]
    args[1] = args[1].at[1, 3, 2].set(jnp.inf)
    out = jax.jit(functools.partial(fixed_point_scan, scale=1.0))(*args)
    assert out.value.dtype == jnp.float32
    assert out.converged.tolist() == [True, False]
    assert np.isfinite(out.value[0]).all()


@pytest.mark.parametrize(("platform", "backend"), [("tpu", "auto"), ("cuda", "pallas")])
def test_the_loop_runs_the_fused_kernel(platform, backend):
    """The iteration is one kernel (two passes at most) and reads nothing else of (B, T, D)."""
    wide, alpha = checks.struct(16, 64, 256, dtype=jnp.bfloat16), checks.struct(16, 64, 1)
    units = checks.struct(16, 64, 1, 256, dtype=jnp.bfloat16)
    run = functools.partial(fixed_point_scan, backend=backend)
    text = checks.lower(lambda *a: run(*a).value, platform, wide, wide, units, alpha)
    assert "fused_fixed_point" in text
    many = checks.struct(2, 8, 20, 16), checks.struct(2, 8, 20)
    small = checks.struct(2, 8, 16)
    # A rank that the kernels do not hold.
    if backend == "auto":
        text = checks.lower(lambda *a: run(*a).value, platform, small, small, *many)
        assert "fused_fixed_point" not in text
    else:
        with pytest.raises(ValueError, match="at most 14, not 20"):
            jax.eval_shape(run, small, small, *many)


def test_errors_name_the_value(problem):
    args = f32(problem)
    with pytest.raises(ValueError, match="'kronecker'"):
        fixed_point_scan(*args, mixer="kronecker")
    with pytest.raises(ValueError, match="Unrolled"):
        fixed_point_scan(*args, adjoint=adjoints.Unrolled())
    with pytest.raises(ValueError, match="units has shape"):
        fixed_point_scan(*args[:3], args[3][..., :1])
    with pytest.raises(ValueError, match="'cuda'"):
        fixed_point_scan(*args, backend="cuda")
