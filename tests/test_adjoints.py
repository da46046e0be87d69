"""Gradient rules against dense solves in float64, their memory, and JAX's transformations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fpr import fixed_point
from fpr.adjoints import Implicit, Neumann, OneStep, Unrolled
from fpr.solvers import Damped

pytestmark = pytest.mark.usefixtures("fast_compile")
B, D = 2, 4
WRONG: Any = 1.5  # A value of a type that the signature does not allow.
rng = np.random.default_rng(1)
RULES = {
    "one_step": OneStep(),
    "refine": OneStep(refine=True),
    "neumann": Neumann(4),
    "implicit": Implicit(max_steps=80),
    "unrolled": Unrolled(),
}


def f(w, x, z):
    return jnp.tanh(z @ w + x)


def contraction(seed=0, sigma=0.5):
    r = np.random.default_rng(seed)
    u, _, vt = np.linalg.svd(r.normal(size=(D, D)))
    s = np.array([sigma, 0.7 * sigma, 0.3 * sigma, 0.1 * sigma])
    return u @ np.diag(s) @ vt, r.normal(size=(B, D)), r.normal(size=(B, D))


def dense(w, x, z, ct):
    """Gradients of w and x from (I - J)^-1 in float64, sample by sample."""
    dw, dx = np.zeros_like(w), np.zeros_like(x)
    for i in range(len(z)):
        slope = 1.0 - np.tanh(z[i] @ w + x[i]) ** 2
        jac = slope[:, None] * w.T  # ∂f_k/∂z_l
        u = np.linalg.solve((np.eye(D) - jac).T, ct[i])
        dx[i] = slope * u
        dw += np.outer(z[i], slope * u)
    return dw, dx


@partial(jax.jit, static_argnames=("adjoint", "solver"))
def grads(w, x, z0, ct, *, adjoint, solver=Damped(tolerance=1e-12, max_steps=400)):
    def loss(w, x):
        s = fixed_point(f, w, x, z0, solver=solver, adjoint=adjoint)
        return jnp.sum(s.value * ct), s

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(w, x)


@pytest.mark.parametrize("adjoint", [Implicit(1e-10), Neumann(60), Unrolled(), OneStep(60)])
def test_contraction_against_a_dense_solve(adjoint):
    with jax.enable_x64(True):
        for seed in range(3):
            w, x, ct = contraction(seed)
            solver = Damped(tolerance=1e-12, max_steps=60)
            (dw, dx), s = grads(w, x, np.zeros_like(x), ct, adjoint=adjoint, solver=solver)
            expected = dense(w, x, np.asarray(s.value), ct)
            assert s.converged.all()
            np.testing.assert_allclose(dw, expected[0], rtol=1e-7, atol=1e-9)
            np.testing.assert_allclose(dx, expected[1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "eigenvalues",
    [(-1.5, 0.3, 0.2, -0.1), (-3.0, 0.5, 0.1, -2.0), (-10.0, 0.5, 0.0, 0.9), (0.99, 0.5, -0.2, 0.0),
     (0.3 + 1.4j, 0.3 - 1.4j, -2.0, 0.5)],
)  # fmt: skip
def test_implicit_where_the_spectral_radius_is_above_one(eigenvalues):
    r = np.random.default_rng(3)
    basis = r.normal(size=(D, D))
    core = np.diag(np.real(eigenvalues))
    if np.iscomplex(eigenvalues).any():
        core[0, 1], core[1, 0] = np.imag(eigenvalues)[:2]
    w = basis @ core @ np.linalg.inv(basis)
    x, ct = r.normal(size=(B, D)), r.normal(size=(B, D))
    z = x @ np.linalg.inv(np.eye(D) - w)
    expected = ct @ np.linalg.inv(np.eye(D) - w).T

    def loss(x, z, ct, rule):
        linear = lambda w, x, z: z @ w + x  # noqa: E731
        w_ = jnp.asarray(w, x.dtype)
        solver = Damped(tolerance=1e-3, max_steps=1)
        return jnp.sum(ct * fixed_point(linear, w_, x, z, solver=solver, adjoint=rule).value)

    with jax.enable_x64(True):
        dx = jax.jit(jax.grad(loss), static_argnums=3)(x, z, ct, Implicit(1e-10))
    np.testing.assert_allclose(dx, expected, atol=1e-6 * np.abs(expected).max())
    single = (jnp.asarray(a, jnp.float32) for a in (x, z, ct))
    dx = jax.jit(jax.grad(loss), static_argnums=3)(*single, Implicit())
    np.testing.assert_allclose(dx, expected, atol=2e-3 * np.abs(expected).max())


def test_implicit_scales_with_the_cotangent_and_skips_zero_ones():
    w, x, ct = contraction()
    z0 = np.zeros_like(x)
    (_, dx), _ = grads(w, x, z0, ct, adjoint=Implicit())
    (_, tiny), _ = grads(w, x, z0, 1e-12 * ct, adjoint=Implicit())
    np.testing.assert_allclose(1e12 * tiny, dx, rtol=1e-4)
    half = ct.copy()
    half[0] = 0.0
    (_, dx0), _ = grads(w, x, z0, half, adjoint=Implicit())
    np.testing.assert_array_equal(dx0[0], 0.0)
    np.testing.assert_allclose(dx0[1], dx[1], rtol=1e-5)


def test_neumann_of_one_term_is_one_step():
    w, x, ct = contraction()
    z0 = np.zeros_like(x)
    (dw, dx), _ = grads(w, x, z0, ct, adjoint=Neumann(1))
    (dw1, dx1), _ = grads(w, x, z0, ct, adjoint=OneStep(1))
    np.testing.assert_allclose(dw, dw1, rtol=1e-6)
    np.testing.assert_allclose(dx, dx1, rtol=1e-6)


def test_refine_returns_the_value_after_the_differentiated_applications():
    w, x, _ = contraction()
    solver = Damped(tolerance=0.3, step_size=0.7)
    z0 = np.zeros_like(x)
    plain = fixed_point(f, w, x, z0, solver=solver)
    refined = fixed_point(f, w, x, z0, solver=solver, adjoint=OneStep(2, refine=True))
    np.testing.assert_allclose(refined.value, f(w, x, f(w, x, plain.value)), rtol=1e-6)
    np.testing.assert_array_equal(refined.steps, plain.steps)
    np.testing.assert_array_equal(refined.residual, plain.residual)


def test_unrolled_is_the_gradient_of_the_loop_with_its_damping():
    w, x, ct = contraction(sigma=0.9)
    solver = Damped(step_size=0.8, tolerance=1e-9, max_steps=5)
    z0 = rng.normal(size=(B, D))

    def loop(w, x, z0):
        z = z0
        for _ in range(5):
            z = 0.8 * f(w, x, z) + 0.2 * z
        return jnp.sum(ct * z)

    def ours(w, x, z0):
        s = fixed_point(f, w, x, z0, solver=solver, adjoint=Unrolled())
        return jnp.sum(ct * s.value)

    a = jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(w, x, z0)
    b = jax.jit(jax.grad(loop, argnums=(0, 1, 2)))(w, x, z0)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), a, b)
    assert np.abs(a[2]).max() > 1e-3


@pytest.mark.parametrize("name", ["one_step", "refine", "neumann", "implicit"])
def test_z0_and_the_state_get_no_gradient(name):
    w, x, _ = contraction()
    z0 = np.ones_like(x)
    start = fixed_point(f, w, x, z0, max_steps=2).state

    def loss(z0, bias):
        state = start._replace(z=start.z + bias)
        s = fixed_point(f, w, x, z0, adjoint=RULES[name], state=state)
        return jnp.sum(s.value) + jnp.sum(s.state.z) + jnp.sum(s.residual)

    for g in jax.grad(loss, argnums=(0, 1))(z0, 0.0):
        np.testing.assert_array_equal(g, 0.0)


@pytest.mark.parametrize("name", RULES)
def test_a_passed_state_keeps_the_gradient_of_parameters(name):
    w, x, ct = contraction()
    z0 = np.zeros_like(x)
    solver = Damped(tolerance=1e-6, max_steps=60)
    start = fixed_point(f, w, x, z0, solver=solver, max_steps=3).state

    def loss(w, state):
        s = fixed_point(f, w, x, z0, solver=solver, adjoint=RULES[name], state=state)
        return jnp.sum(s.value * ct)

    grad = jax.jit(jax.grad(loss))
    # The gradient at z*: only Unrolled still feels where it began.
    expected = grad(jnp.asarray(w), None)
    atol = 0.1 if name == "unrolled" else 1e-4
    np.testing.assert_allclose(grad(jnp.asarray(w), start), expected, atol=atol)


def temp_bytes(adjoint, max_steps):
    def loss(w, x):
        s = fixed_point(f, w, x, x, solver=Damped(max_steps=max_steps), adjoint=adjoint)
        return jnp.sum(s.value)

    w, x = jnp.zeros((32, 32)), jnp.zeros((8, 32))
    compiled = jax.jit(jax.grad(loss)).lower(w, x).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("name", RULES)
def test_memory_grows_with_the_steps_for_unrolled_only(name):
    few, many = (temp_bytes(RULES[name], n) for n in (10, 1000))
    if name == "unrolled":
        assert many > 10 * few
    else:
        assert many == few


@pytest.mark.parametrize("name", RULES)
def test_transformations_agree(name):
    w, x, ct = (jnp.asarray(a, jnp.float32) for a in contraction())
    rule, solver = RULES[name], Damped(tolerance=1e-6, max_steps=40)

    def layer(w, x):
        return fixed_point(f, w, x, jnp.zeros_like(x), solver=solver, adjoint=rule).value

    def loss(w, x):
        return jnp.sum(layer(w, x) * ct)

    grad = jax.grad(loss, argnums=(0, 1))
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    expected = jax.jit(grad)(w, x)
    jax.tree.map(close, jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(w, x), expected)
    many = jax.jit(jax.vmap(grad, in_axes=(0, None)))(jnp.stack([w, 0.5 * w]), x)
    jax.tree.map(lambda a, b: close(a[0], b), many, expected)

    def scanned(w, x):
        return jnp.sum(jax.lax.scan(lambda h, _: (layer(w, h), None), x, None, length=2)[0] * ct)

    def looped(w, x):
        return jnp.sum(layer(w, layer(w, x)) * ct)

    a, b = (jax.jit(jax.grad(g, argnums=(0, 1)))(w, x) for g in (scanned, looped))
    jax.tree.map(close, a, b)


def test_second_derivatives_of_implicit():
    with jax.enable_x64(True):
        w, x, ct = contraction(sigma=0.4)
        solver = Damped(tolerance=1e-13, max_steps=50)

        def hessian(rule):
            def loss(w, x):
                s = fixed_point(f, w, x, jnp.zeros_like(x), solver=solver, adjoint=rule)
                return jnp.sum(ct * s.value**2)

            return jax.jit(jax.jacrev(jax.grad(loss, argnums=(0, 1)), argnums=(0, 1)))(w, x)

        a, b = hessian(Implicit(1e-12)), hessian(Unrolled())
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8), a, b)


@pytest.mark.parametrize("name", RULES)
def test_integer_leaves_and_gradients_of_x(name):
    w, x, ct = (jnp.asarray(a, jnp.float32) for a in contraction())
    index = jnp.array([1, 0])
    keys = jax.random.split(jax.random.key(0), B)
    noise = jax.vmap(lambda k: jax.random.normal(k, (D,)))(keys)

    def mixed(w, x, z):
        draw = jax.vmap(lambda k: jax.random.normal(k, (D,)))(x["key"])
        return jnp.tanh(z @ w["w"] + x["x"] + x["i"][:, None] * w["n"] + draw)

    def plain(w, x, z):
        return jnp.tanh(z @ w + x["x"] + x["i"] + noise)

    def run(g, w, x):
        solver = Damped(tolerance=1e-6, max_steps=40)
        z0 = jnp.zeros((B, D))
        return jnp.sum(ct * fixed_point(g, w, x, z0, solver=solver, adjoint=RULES[name]).value)

    def with_ints(w, x):
        return run(mixed, {"w": w, "n": 2}, {"x": x, "i": index, "key": keys})

    dw, dx = jax.jit(jax.grad(with_ints, argnums=(0, 1)))(w, x)
    shift = 2.0 * jnp.tile(index[:, None], (1, D))
    dw1, dx1 = jax.jit(jax.grad(partial(run, plain), argnums=(0, 1)))(w, {"x": x, "i": shift})
    np.testing.assert_allclose(dw, dw1, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, dx1["x"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx1["i"], dx1["x"], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneStep(0), "OneStep: k=0, allowed: a whole number >= 1"),
        (lambda: OneStep(True), "OneStep: k=True, allowed"),
        (lambda: Neumann(WRONG), "Neumann: k=1.5, allowed"),
        (lambda: Implicit(tolerance=0.0), "Implicit: tolerance=0.0, allowed: tolerance > 0"),
        (lambda: Implicit(restart=0), "Implicit: restart=0, allowed"),
        (lambda: Implicit(max_steps=-1), "Implicit: max_steps=-1, allowed"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
