"""FP-Mamba-2: against the NumPy block, its options, and the model through the public functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.models.fp_mamba2 import RATE_RANGE, FPMamba2Config, FPMamba2Layer, init_rate
from tests.reference.fp_mamba2 import FPMamba2
from tests.weights import block_weights

B, T, D, N = 2, 6, 4, 3
MODEL = {
    "name": "fp_mamba2",
    "vocab_size": 5,
    "seq_len": T,
    "hidden_size": D,
    "state_size": N,
    "head_dim": 2,
    "mixer_scale": 1,
    "mixer_arg": "symmetric",
    "solver": {"preset": "fp_mamba", "train": {"stop_fraction": 1.0, "max_steps": 400}},
}


def make_layer(**options) -> FPMamba2Layer:
    fields = {"vocab_size": 2, "seq_len": 1, "hidden_size": D, "state_size": N, "head_dim": 2}
    return FPMamba2Layer(FPMamba2Config(weight_norm=False, **(fields | options)))


@pytest.mark.parametrize(
    "options",
    [
        {"num_groups": 2},
        {"hidden_dependence": ("b",), "conv": False, "chunk_size": 2},
        {"hidden_dependence": ("lambda", "Q", "b", "c"), "mixer_arg": "symmetric"},
        {"hidden_dependence": (), "bc_norm": False, "glu_in_loop": True, "head_dim": 8},
    ],
    ids=str,
)
def test_block_equals_reference(options: dict) -> None:
    layer = make_layer(**options)
    rng = np.random.default_rng(0)
    u = rng.normal(size=(B, T, D)).astype(np.float32)
    y = rng.normal(size=(B, T, 2 * D)).astype(np.float32)

    def block(layer, u):
        x = layer.prepare(u)
        return layer.output(x, layer.step(x, layer.init_state(x, None)))

    params = layer.init(jax.random.key(1), u, method=block)["params"]
    params = jax.tree.map(lambda w: jnp.float32(w + 0.3 * rng.normal(size=w.shape)), params)

    @jax.jit
    def run(params, u, y):
        x = layer.apply({"params": params}, u, method="prepare")
        step = layer.apply({"params": params}, x, y, method="step")
        return step, layer.apply({"params": params}, x, y, method="output")

    step, out = run(params, u, y)
    c = layer.config
    reference = FPMamba2(
        block_weights(params), u, state_size=N, groups=c.num_groups, mixer=c.mixer,
        arg=c.mixer_form, depends=c.hidden_dependence, glu_in_loop=c.glu_in_loop,
        bc_norm=c.bc_norm,
    )  # fmt: skip
    np.testing.assert_allclose(step, reference.step(y.astype(np.float64)), atol=5e-5)
    np.testing.assert_allclose(out, reference.out(y.astype(np.float64)), atol=5e-5)


def test_initial_rates() -> None:
    rate = jnp.exp(init_rate(jax.random.key(0), (1000,)))
    low, high = RATE_RANGE
    assert low * 0.999 <= float(rate.min()) < float(rate.max()) <= high * 1.001


def test_apply_and_gradient() -> None:
    params = fpr.init(MODEL, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, T), 1, 5)

    def loss(params):
        out = fpr.apply(MODEL, params, {"tokens": tokens}, train=True)
        return -jnp.mean(jax.nn.log_softmax(out.logits)[..., 1]), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert out.logits.shape == (3, T, 5)
    assert bool(out.converged.all())
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert bool(jnp.any(grad != 0)), jax.tree_util.keystr(path)
        assert bool(jnp.all(jnp.isfinite(grad))), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 3}, "head_dim=3, allowed: a divisor of expand·hidden_size=8"),
        ({"num_groups": 3}, "num_groups=3, allowed: a divisor of the number of heads 4"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"dt_rank": 2}, "unknown key 'dt_rank'"),
    ],
)
def test_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fpr.build(MODEL | options)
