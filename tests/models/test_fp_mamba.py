"""FP-Mamba-1: against the NumPy block, its options, and the model through the public functions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.models import fp_mamba
from fpr.models.fp_mamba import FPMambaConfig, FPMambaLayer
from tests.reference import fp_mamba as reference
from tests.weights import block_weights

B, T, D, N = 2, 6, 4, 3
MODEL = {
    "name": "fp_mamba",
    "vocab_size": 5,
    "seq_len": T,
    "hidden_size": D,
    "state_size": N,
    "mixer_scale": 1,
    "mixer_arg": "symmetric",
    "solver": {"preset": "fp_mamba", "train": {"max_steps": 8}},
}


def make_layer(**options) -> FPMambaLayer:
    config = FPMambaConfig(
        vocab_size=2, seq_len=1, hidden_size=D, state_size=N, weight_norm=False, **options
    )
    return FPMambaLayer(config)


def init_block(layer: FPMambaLayer, u: jax.Array) -> dict:
    """Parameters of everything behind the layer's norm."""

    def block(layer, u):
        x = layer.prepare(u)
        return layer.output(x, layer.step(x, layer.init_state(x, None)))

    params = layer.init(jax.random.key(1), u, method=block)["params"]
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda w: jnp.asarray(w + 0.3 * rng.normal(size=w.shape), w.dtype), params)


def run_block(layer: FPMambaLayer, params: dict, u: np.ndarray, y: np.ndarray):
    """One step and the output for the iterate y."""

    @jax.jit
    def run(params, u, y):
        x = layer.apply({"params": params}, u, method="prepare")
        step = layer.apply({"params": params}, x, y, method="step")
        return step, layer.apply({"params": params}, x, y, method="output")

    return run(params, u, y)


def random_inputs(seed: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, T, dim)).astype(np.float32)


DEPENDENCE = [(), ("b",), ("c",), ("b", "c"), ("Q", "b", "c"), ("lambda", "Q"), ("lambda", "c")]


@pytest.mark.parametrize(
    "options",
    [
        *({"hidden_dependence": d} for d in DEPENDENCE),
        {"hidden_dependence": ("lambda", "Q", "b", "c"), "decay": "v1", "mixer_arg": "symmetric"},
        {"decay": "v1", "conv": False, "bc_norm": False},
        {"glu_in_loop": True, "bc_norm": False, "mixer": "dplr", "mixer_rank": 2, "proj_rank": 2},
    ],
    ids=str,
)
def test_block_equals_reference(options: dict) -> None:
    layer = make_layer(**options)
    u, y = random_inputs(0, D), random_inputs(1, 2 * D)
    params = init_block(layer, u)
    depends = layer.config.hidden_dependence
    block = reference.FPMamba(
        block_weights(params),
        u,
        mixer=layer.config.mixer,
        arg=layer.config.mixer_arg if "Q" in depends else "x",
        depends=depends,
        decay=layer.config.decay,
        glu_in_loop=layer.config.glu_in_loop,
        bc_norm=layer.config.bc_norm,
    )
    step, out = run_block(layer, params, u, y)
    np.testing.assert_allclose(step, block.step(y.astype(np.float64)), atol=5e-5)
    np.testing.assert_allclose(out, block.out(y.astype(np.float64)), atol=5e-5)
    # What the options say depends on y does, and nothing else.
    assert ("bc_y_proj" in params) == bool({"b", "c"} & set(depends))
    assert ("dt_y_proj" in params) == ("lambda" in depends)
    argument = 4 * D if "Q" in depends and layer.config.mixer_arg == "concat" else 2 * D
    kernel = params["mixer"]["u_proj"].get("down", params["mixer"]["u_proj"])["kernel"]
    assert kernel.shape[0] == argument


def test_initial_step_sizes_and_decays() -> None:
    """softplus(b_Δ) in [1e-3, 0.1], A = -(1..N); v1: λ in [0.9, 0.999] and no selectivity."""
    u = random_inputs(0, D)

    def init(layer):
        return layer.init(jax.random.key(0), u, method="prepare")["params"]

    params = init(make_layer())
    delta = jax.nn.softplus(params["dt_proj"]["bias"])
    low, high = fp_mamba.DT_RANGE
    assert low * 0.99 <= float(delta.min()) <= float(delta.max()) <= high * 1.01
    layer = make_layer(decay="v1")
    params = init(layer)
    assert bool(jnp.all(params["dt_proj"]["kernel"] == 0))
    omega = fp_mamba.init_omega(jax.random.key(1), (1000,))
    decay = jnp.exp(-fp_mamba.LAMBDA_RATE * jax.nn.softplus(omega) * 0.5)
    low, high = fp_mamba.LAMBDA_RANGE
    assert low - 1e-4 <= float(decay.min()) < float(decay.max()) <= high + 1e-4
    a_log = fp_mamba.init_a_log(jax.random.key(0), (D, N))
    np.testing.assert_allclose(jnp.exp(a_log), np.tile([1.0, 2.0, 3.0], (D, 1)), rtol=1e-6)


@pytest.fixture(scope="module")
def model():
    params = fpr.init(MODEL, jax.random.key(0))
    return params, jax.jit(functools.partial(fpr.apply, MODEL))


def test_apply(model) -> None:
    params, apply = model
    tokens = jax.random.randint(jax.random.key(1), (3, T), 1, 5)
    out = apply(params, {"tokens": tokens})
    assert out.logits.shape == (3, T, 5)
    assert bool(out.converged.all())
    changed = tokens.at[:, -1].set(1 + tokens[:, -1] % 4)
    other = apply(params, {"tokens": changed}, max_steps=int(out.steps[0]))
    np.testing.assert_allclose(other.logits[:, :-1], out.logits[:, :-1], atol=0.2)
    assert not np.allclose(other.logits[:, -1], out.logits[:, -1], atol=0.2)


def test_gradient_reaches_every_parameter(model) -> None:
    params, _ = model
    tokens = jax.random.randint(jax.random.key(1), (3, T), 1, 5)

    def loss(params):
        logits = fpr.apply(MODEL, params, {"tokens": tokens}, train=True).logits
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 1])

    grads = jax.jit(jax.grad(loss))(params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert bool(jnp.any(grad != 0)), jax.tree_util.keystr(path)
        assert bool(jnp.all(jnp.isfinite(grad))), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_dependence": ("A",)}, "any of lambda, Q, b, c"),
        ({"hidden_dependence": "Q"}, "any of lambda, Q, b, c"),
        ({"mixer_arg": "x"}, "take 'Q' out of"),
        ({"decay": "mamba1"}, "did you mean 'mamba'"),
        ({"state_size": 0}, "model.state_size=0"),
        ({"dt_rank": -1}, "model.dt_rank=-1"),
        ({"conv_kernel": 0}, "model.conv_kernel=0"),
        ({"proj_rank": -1}, "at least 1, got -1"),
        ({"state_sizes": 4}, "did you mean 'state_size'"),
    ],
)
def test_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fpr.build(MODEL | options)
