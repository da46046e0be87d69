"""FP-RNN: against the NumPy block, against the dense recurrence, and the theorems of spec 1."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fpr
from fpr.adjoints import Implicit, OneStep
from fpr.fixed_point import fixed_point
from fpr.models.fp_rnn import FPRNNConfig, FPRNNLayer
from fpr.scan import linear_scan
from fpr.solvers import Damped
from tests.reference import fp_rnn as reference
from tests.reference import mixers as mixer_reference
from tests.weights import RNN_NAMES, block_weights, mixer_weights

SEEDS = st.integers(0, 2**31 - 1)
B, T, D = 2, 6, 4
MODEL = {
    "name": "fp_rnn",
    "vocab_size": 5,
    "seq_len": T,
    "hidden_size": D,
    "mixer_scale": 1,
    "solver": {"preset": "fp_rnn", "train": {"max_steps": 8}, "eval": {"tolerance": 1e-4}},
}


def make_layer(**options) -> FPRNNLayer:
    config = FPRNNConfig(vocab_size=2, seq_len=1, hidden_size=D, weight_norm=False, **options)
    return FPRNNLayer(config)


def init_block(layer: FPRNNLayer, u: jax.Array) -> dict:
    """Parameters of everything behind the layer's norm, weights spread wide."""

    def block(layer, u):
        x = layer.prepare(u)
        return layer.output(x, layer.step(x, layer.init_state(x, None)))

    params = layer.init(jax.random.key(1), u, method=block)["params"]
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda w: jnp.asarray(w + 0.3 * rng.normal(size=w.shape), w.dtype), params)


def random_inputs(seed: int = 0, dim: int = D) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, T, dim)).astype(np.float32)


# --- the block ------------------------------------------------------------------------------------


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("arg", ["concat", "symmetric", "x"])
def test_block_equals_reference(arg: str, conv: bool) -> None:
    layer = make_layer(mixer_arg=arg, conv=conv, mixer="dplr", mixer_rank=2)
    u, y = random_inputs(), random_inputs(1, 2 * D)
    params = init_block(layer, u)
    weights = block_weights(params, RNN_NAMES)
    block = reference.FPRNN(weights, u, mixer="dplr", arg=arg)

    @jax.jit
    def run(params, u, y):
        x = layer.apply({"params": params}, u, method="prepare")
        step = layer.apply({"params": params}, x, y, method="step")
        return step, layer.apply({"params": params}, x, y, method="output")

    step, out = run(params, u, y)
    np.testing.assert_allclose(step, block.step(y.astype(np.float64)), atol=2e-5)
    np.testing.assert_allclose(out, block.out(y.astype(np.float64)), atol=2e-5)


@pytest.mark.parametrize(
    ("mixer", "arg"),
    [("householder", "x"), ("householder", "concat"), ("dplr", "symmetric"), ("orthogonal", "x")],
)
def test_solved_layer_is_the_dense_recurrence(mixer: str, arg: str) -> None:
    """float64: with Q taken at the solution, the fixed point is section 1's dense linear RNN."""
    layer = make_layer(mixer=mixer, mixer_arg=arg, mixer_scale=1, conv=False)
    layer = layer.clone(dtype=jnp.float64)
    u = random_inputs()
    params = init_block(layer.clone(dtype=jnp.float32), u)
    if mixer == "orthogonal":  # A rotation by less than 60° keeps ‖I - Q‖ below 1.
        rng = np.random.default_rng(5)
        skew = rng.normal(size=(2 * D, 2 * D)) * 0.1
        q = np.linalg.inv(np.eye(2 * D) + (skew - skew.T)) @ (np.eye(2 * D) - (skew - skew.T))
    solver = Damped(tolerance=1e-12, max_steps=2000)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda w: jnp.asarray(np.asarray(w), jnp.float64), params)
        if mixer == "orthogonal":
            params["mixer"]["q_proj"]["kernel"] = jnp.asarray(q)

        @jax.jit
        def run(params, u):
            x = layer.apply({"params": params}, u, method="prepare")
            f = lambda p, x, z: layer.apply({"params": p}, x, z, method="step")  # noqa: E731
            z0 = layer.apply({"params": params}, x, None, method="init_state")
            return x, fixed_point(f, params, x, z0, solver=solver)

        x, solution = jax.tree.map(np.asarray, run(params, jnp.asarray(u, jnp.float64)))
    assert solution.converged.all()
    weights = mixer_weights(params["mixer"])
    argument = reference.mixer_argument(arg, x["x"], solution.value)
    q = mixer_reference.matrices(mixer, weights, argument, 2 * D, scale=1.0)
    expected = reference.dense_recurrence(x["lambda"], q, x["bx"])
    np.testing.assert_allclose(solution.value, expected, atol=1e-9)


# --- theorems -------------------------------------------------------------------------------------


def random_problem(
    seed: int, radius: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """λ (B,T,d), Q (B,T,d,d), bx; with a radius, (I-Λ)(I-Q) is scaled to that spectral radius."""
    rng = np.random.default_rng(seed)
    lam = rng.uniform(0.2, 0.95, size=(B, T, D))
    mixing = rng.normal(size=(B, T, D, D))  # I - Q
    for b in range(B):
        for t in range(T):
            if radius is None:
                mixing[b, t] *= rng.uniform(0.2, 0.95) / np.linalg.norm(mixing[b, t], 2)
            else:
                product = (1 - lam[b, t])[:, None] * mixing[b, t]
                mixing[b, t] *= radius / np.abs(np.linalg.eigvals(product)).max()
    return lam, np.eye(D) - mixing, rng.normal(size=(B, T, D))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_fixed_point_is_the_dense_recurrence(seed: int) -> None:
    lam, q, bx = random_problem(seed)
    h = np.zeros_like(bx)
    for _ in range(600):
        h = reference.iterate(lam, q, bx, h)
    np.testing.assert_allclose(h, reference.dense_recurrence(lam, q, bx), atol=1e-9)


def test_scalar_fixed_point() -> None:
    """a = λ / (λ + (1-λ) q), input gain (1-λ) q / (λ + (1-λ) q)."""
    lam, q, x = 0.7, 1.4, np.random.default_rng(0).normal(size=T)
    a, gain = (v / (lam + (1 - lam) * q) for v in (lam, (1 - lam) * q))
    expected, h = [], 0.0
    for t in range(T):
        h = a * h + gain * x[t]
        expected.append(h)
    shape = (1, T, 1)
    out = reference.dense_recurrence(np.full(shape, lam), np.full((*shape, 1), q), x[None, :, None])
    np.testing.assert_allclose(out[0, :, 0], expected, atol=1e-12)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_contraction(seed: int) -> None:
    """Constant Λ, Q with ‖Λ‖ < 1 and ‖I-Q‖ < 1: distances shrink at least by ‖I-Q‖."""
    lam, q, bx = random_problem(seed)
    lam, q = np.broadcast_to(lam[:1, :1], lam.shape), np.broadcast_to(q[:1, :1], q.shape)
    rate = np.linalg.norm(np.eye(D) - q[0, 0], 2)
    rng = np.random.default_rng(seed)
    h, g = rng.normal(size=(2, B, T, D))
    for _ in range(5):
        before = np.linalg.norm(h - g)
        h, g = (reference.iterate(lam, q, bx, y) for y in (h, g))
        assert np.linalg.norm(h - g) <= rate * before * (1 + 1e-9)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_spectral_radius_criterion(seed: int) -> None:
    """Finite T: converges for max ρ((I-Λ)(I-Q)) < 1 whatever the norms, and not above 1."""
    for radius, converges in ((0.9, True), (1.1, False)):
        lam, q, bx = random_problem(seed, radius)
        h, g = np.zeros_like(bx), np.ones_like(bx)
        start = np.linalg.norm(h - g)
        for _ in range(800):
            h, g = (reference.iterate(lam, q, bx, y) for y in (h, g))
        assert (np.linalg.norm(h - g) < 1e-6 * start) == converges


@pytest.fixture(scope="module")
def gradients():
    """One-step and exact gradients to x of a contraction with ∂f/∂x = ∂f/∂h, jitted once."""

    def f(params, x, h):
        weight, lam = params
        lam = jnp.broadcast_to(lam, h.shape)
        return linear_scan(lam, (1.0 - lam) * jnp.tanh((x + h) @ weight))[0]

    def loss(x, params, target, adjoint):
        solver = Damped(tolerance=1e-6, max_steps=500)
        h = fixed_point(f, params, x, jnp.zeros_like(x), solver=solver, adjoint=adjoint).value
        return 0.5 * jnp.sum((h - target) ** 2)

    def make(adjoint):
        return jax.jit(jax.value_and_grad(functools.partial(loss, adjoint=adjoint)))

    return make(OneStep()), make(Implicit())


@pytest.mark.parametrize("seed", range(5))
def test_one_step_gradient_descends(gradients, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(D, D))
    weight = (0.9 * weight / np.linalg.norm(weight, 2)).astype(np.float32)
    params = (weight, rng.uniform(0.2, 0.9, size=D).astype(np.float32))
    x, target = rng.normal(size=(2, B, T, D)).astype(np.float32)
    one_step, exact = gradients
    value, direction = one_step(x, params, target)
    _, gradient = exact(x, params, target)
    assert float(jnp.sum(direction * gradient)) > 0.0
    lower, _ = one_step(x - 0.1 * direction, params, target)
    assert float(lower) < float(value)


# --- the model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    config = MODEL
    params = fpr.init(config, jax.random.key(0))
    return config, params, jax.jit(functools.partial(fpr.apply, config))


def test_apply(model) -> None:
    _, params, apply = model
    tokens = jax.random.randint(jax.random.key(1), (3, T), 1, 5)
    out = apply(params, {"tokens": tokens})
    assert out.logits.shape == (3, T, 5)
    assert out.converged.all()
    assert (out.residual < 1e-4).all()
    assert (out.steps > 1).all()
    changed = tokens.at[:, -1].set(1 + tokens[:, -1] % 4)
    other = apply(params, {"tokens": changed})
    np.testing.assert_allclose(other.logits[:, :-1], out.logits[:, :-1], atol=1e-3)
    assert not np.allclose(other.logits[:, -1], out.logits[:, -1])


def test_gradient_reaches_every_parameter(model) -> None:
    config, params, _ = model
    tokens = jax.random.randint(jax.random.key(1), (3, T), 1, 5)

    def loss(params):
        logits = fpr.apply(config, params, {"tokens": tokens}, train=True).logits
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 1])

    grads = jax.jit(jax.grad(loss))(params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert bool(jnp.any(grad != 0)), jax.tree_util.keystr(path)
        assert bool(jnp.all(jnp.isfinite(grad))), jax.tree_util.keystr(path)


def test_half_precision_is_near(model) -> None:
    config, params, apply = model
    tokens = jax.random.randint(jax.random.key(1), (3, T), 1, 5)
    half = fpr.apply(dict(config, dtype="bfloat16"), params, {"tokens": tokens}, max_steps=20)
    assert half.logits.dtype == jnp.float32
    error = jnp.abs(half.logits - apply(params, {"tokens": tokens}).logits)
    assert float(jnp.mean(error)) < 0.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "houshold"}, "did you mean 'householder'"),
        ({"mixer_arg": "sum"}, "concat, symmetric, x"),
        ({"mixer": "kronecker", "hidden_size": 7, "expand": 1}, "got 7; valid widths near it"),
        ({"mixer": "monarch", "mixer_rank": 3}, "powers of two"),
        ({"mixer_scale": 1.5}, "must be 2"),
        ({"act": "gelu"}, "identity, relu, silu"),
        ({"expand": 0}, "model.expand=0"),
        ({"conv_kernel": 0}, "model.conv_kernel=0"),
        ({"hidden_size": 0}, "model.hidden_size=0"),
        ({"dtype": "float16"}, "float32, bfloat16"),
        ({"mixer_ranks": 2}, "did you mean 'mixer_rank'"),
    ],
)
def test_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fpr.build(MODEL | options)
