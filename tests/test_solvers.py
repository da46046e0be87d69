"""The damped solver against plain NumPy float64, and each of its options alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpr import solvers
from fpr.fixed_point import trace
from fpr.solvers import Damped
from tests.reference import solvers as reference

B, T, D = 3, 2, 3


def step(w, x, z):
    """Contracts, cycles or wanders, by the gain of each sample."""
    return jnp.tanh(x["gain"] * (z @ w)) + 0.5 * x["c"] - 0.6 * x["gain"] * z


def problem(seed, top=3.0):
    rng = np.random.default_rng(seed)
    x = {"gain": rng.uniform(0.1, top, (B, 1, 1)), "c": rng.normal(size=(B, T, D))}
    return rng.normal(size=(D, D)) / np.sqrt(D), x, rng.normal(size=(B, T, D))


def step_np(w, x, z):
    return np.tanh(x["gain"] * (z @ w)) + 0.5 * x["c"] - 0.6 * x["gain"] * z


run_trace = jax.jit(partial(trace, step), static_argnames=("solver", "steps"))


@partial(jax.jit, static_argnames=("solver",))
def run(w, x, z0, max_steps=None, *, solver):
    return solver.run(lambda z: step(w, x, z), solver.init(z0), max_steps)


def clear_calls(residuals):
    """Rows before float32 rounding decides whether a residual is a new best one."""
    best = np.minimum.accumulate(residuals, axis=0)[:-1]
    tie = np.abs(residuals[1:] - best) <= 1e-5 * best
    tie = np.concatenate([np.zeros_like(tie[:1]), tie])
    return np.logical_and.accumulate(~tie, axis=0)


@given(st.integers(0, 10**6), st.sampled_from([(0.9, 1), (0.5, 3), (1.0, 2)]))
def test_patience_and_decay_match_the_reference(seed, rule):
    decay, patience = rule
    w, x, z0 = problem(seed)
    solver = Damped(step_size=1.0, decay=decay, patience=patience, tolerance=1e-3, halting="never")
    with jax.enable_x64(True):
        path = run_trace(w, x, z0, solver=solver, steps=25)
    zs, rs, etas, ps = reference.fprm_trajectory(
        lambda z: step_np(w, x, z), z0, 1e-3, decay, patience, 25
    )
    rows = clear_calls(rs)
    assert rows[0].all()
    np.testing.assert_allclose(np.asarray(path.residual)[rows], rs[rows], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(np.asarray(path.step_size)[rows], etas[rows], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(path.patience)[rows], ps[rows])
    np.testing.assert_allclose(np.asarray(path.value)[rows], zs[rows], rtol=1e-3, atol=1e-4)


@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.5]))
def test_batch_halting_matches_the_reference(seed, fraction):
    w, x, z0 = problem(seed, top=0.7)
    solver = Damped(
        step_size=0.99, patience=3, tolerance=1e-2, max_steps=60, halting="batch",
        stop_fraction=fraction, residual="best",
    )  # fmt: skip
    with jax.enable_x64(True):
        state = run(w, x, z0, solver=solver)
    y, best, sizes = reference.fp_rnn_solve(
        lambda z: step_np(w, x, z), z0, 1e-2, 0.99, 0.9, 3, 60, 1.0 - fraction
    )
    np.testing.assert_array_equal(state.steps, len(best))
    np.testing.assert_allclose(state.z, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.best_residual, best[-1], rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(state.step_size, sizes[-1], rtol=1e-5)


def test_stop_fraction_stops_earlier_and_infinite_residuals_do_not_break_the_quantile():
    w, x, z0 = problem(0, top=0.5)
    x["gain"][0] = 5.0  # Grows for ever, below overflow here.
    half = Damped(decay=1.0, tolerance=1e-3, max_steps=25, halting="batch", stop_fraction=0.5)
    every = Damped(decay=1.0, tolerance=1e-3, max_steps=25, halting="batch", stop_fraction=1.0)
    assert int(run(w, x, z0, solver=half).steps[0]) < 25
    np.testing.assert_array_equal(run(w, x, z0, solver=every).steps, 25)
    # A zero cap leaves the residual of one sample at inf, the median of the others is exact.
    capped = run(w, x, z0, np.array([0, 25, 25]), solver=half)
    np.testing.assert_array_equal(capped.steps[0], 0)
    assert int(capped.steps[1]) < 25


def test_residual_is_the_worst_token_and_leaf():
    new = {"a": jnp.array([[[2.0, 1.0], [4.0, 0.0]]]), "b": jnp.array([5.0])}
    old = {"a": jnp.array([[[1.0, 1.0], [4.0, 3.0]]]), "b": jnp.array([6.0])}
    # Tokens of a: 1/2 and 3/4; b is a scalar per sample: 1/5.
    np.testing.assert_allclose(solvers.residual(new, old), [0.75], rtol=1e-6)
    np.testing.assert_allclose(
        reference.residual(np.asarray(new["a"][0]), np.asarray(old["a"][0])), 0.75
    )
    zero = {"a": jnp.zeros((1, 2, 2)), "b": jnp.zeros((1,))}
    np.testing.assert_array_equal(solvers.residual(zero, zero), [0.0])


def test_residual_keeps_float64_and_never_is_nan():
    with jax.enable_x64(True):
        a = jnp.ones((1, 4))
        assert float(solvers.residual(a + 1e-12, a)[0]) == pytest.approx(1e-12, rel=1e-3)
    nan = jnp.array([[jnp.nan, 1.0], [1.0, 1.0]])
    np.testing.assert_array_equal(solvers.residual(jnp.ones((2, 2)), nan), [np.inf, 0.0])


def test_cap_and_smallest_step_size():
    def flip(z):
        return -z + 2.0

    z0 = jnp.array([[1.5], [1.0]])  # The second one is at the fixed point.
    solver = Damped(step_size=1.0, decay=1.0, tolerance=1e-3, max_steps=7)
    state = solver.run(flip, solver.init(z0))
    np.testing.assert_array_equal(state.steps, [7, 1])
    np.testing.assert_array_equal(solver.converged(state), [False, True])
    # η: 1, then 0.5 each iteration without a new best: below 0.2 after the fourth iteration.
    solver = Damped(decay=0.5, patience=1, tolerance=0.0, min_step_size=0.2, max_steps=50)
    always = jax.jit(lambda z: solver.run(lambda z: z * 2.0, solver.init(z)))
    state = always(z0)
    np.testing.assert_array_equal(state.steps, [4, 4])
    np.testing.assert_allclose(state.step_size, [0.125, 0.125])
    np.testing.assert_array_equal(solver.converged(state), [False, False])


def test_never_runs_to_the_cap_even_when_solved():
    w, x, z0 = problem(0, top=0.2)
    solver = Damped(halting="never", max_steps=33, tolerance=0.1)
    state = run(w, x, z0, solver=solver)
    np.testing.assert_array_equal(state.steps, 33)
    assert solver.converged(state).all()


def test_best_residual_halts_where_the_current_one_does_not():
    # Residuals 1e-4, then large: the best stays below the tolerance of the second run.
    def f(z):
        return jnp.where(z < 0.5, z + 1e-5, z * 1.5)

    z0 = jnp.array([[0.49999]])
    start: Any = {"tolerance": 1e-6, "max_steps": 4, "decay": 1.0}
    state = Damped(residual="best", **start)
    best = state.run(f, state.init(z0))
    current = Damped(**start)
    last = current.run(f, current.init(z0))
    assert float(state.tested_residual(best)[0]) < 1e-4
    assert float(current.tested_residual(last)[0]) > 0.3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_size", 0.0), ("step_size", 1.5), ("step_size", float("nan")), ("decay", 0.0),
        ("decay", 2.0), ("patience", 0), ("patience", 2.5), ("patience", True),
        ("tolerance", -1.0), ("tolerance", float("nan")), ("max_steps", 0), ("max_steps", 3.5),
        ("min_step_size", -1e-3), ("halting", "token"), ("stop_fraction", 0.0),
        ("stop_fraction", 1.1), ("residual", "mean"),
    ],
)  # fmt: skip
def test_bad_options_are_named_with_what_is_allowed(name, value):
    make: Any = Damped
    with pytest.raises(ValueError, match=rf"{name}=.*allowed: ") as error:
        make(**{name: value})
    assert repr(value) in str(error.value)


def test_presets():
    message = r"'fprn' \(did you mean 'fp_rnn'\?\), allowed: fp_mamba, fp_rnn, fprm"
    with pytest.raises(ValueError, match=message):
        solvers.preset("fprn", train=True)
    mamba = solvers.preset("fp_mamba", train=True)
    assert (mamba.step_size, mamba.decay, mamba.patience) == (0.99, 0.9, 15)
    assert (mamba.halting, mamba.stop_fraction, mamba.residual) == ("batch", 0.75, "best")
    rnn = solvers.preset("fp_rnn", train=True)
    assert (rnn.step_size, rnn.decay, rnn.stop_fraction) == (1.0, 1.0, 0.9)
    for name in ("fp_rnn", "fp_mamba"):
        evaluation = solvers.preset(name, train=False)
        assert (evaluation.stop_fraction, evaluation.max_steps) == (1.0, 1000)
    train, evaluation = solvers.preset("fprm", train=True), solvers.preset("fprm", train=False)
    assert (train.step_size, train.decay, train.patience, train.halting) == (1.0, 0.9, 5, "sample")
    assert (evaluation.decay, evaluation.max_steps, evaluation.tolerance) == (0.99, 1000, 0.1)
