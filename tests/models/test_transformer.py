"""Deep and looped Transformer: against NumPy, causality, gradients and options that cannot work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.models.base import make_solver
from fpr.models.transformer import fixed_loops
from fpr.registry import flatten
from tests.models.checks import (
    KEY,
    TOKENS,
    check_causal,
    check_trains,
    count,
    jitted,
    reasoner_weights,
)
from tests.reference import transformer as reference
from tests.reference.fprm import rms_norm

SMALL = {
    "name": "transformer", "vocab_size": 5, "seq_len": 6, "hidden_size": 8, "num_heads": 2,
    "num_layers": 2, "expansion": 0.5,
}  # fmt: skip
LOOPED = SMALL | {
    "name": "looped_transformer", "num_layers": 1,
    "solver": {
        "train": {"halting": "never", "max_steps": 2}, "eval": {"halting": "never", "max_steps": 3}
    },
}  # fmt: skip


def embedded(params):
    return np.asarray(params["embedding"], np.float64)[np.asarray(TOKENS)] * 8**0.5


def head(params, h):
    return h @ np.asarray(params["lm_head"]["kernel"], np.float64)


@pytest.mark.parametrize(
    ("norm_type", "rope", "causal"), [("pre", True, True), ("post", False, False)]
)
def test_deep_equals_reference(norm_type, rope, causal):
    placement = "output" if norm_type == "pre" else "none"
    config = SMALL | {
        "norm_type": norm_type, "norm_placement": placement, "rope": rope, "causal": causal
    }  # fmt: skip
    params = fpr.init(config, KEY)
    out = jitted(config)(params, {"tokens": TOKENS})
    weights = reasoner_weights(params["layers_0"])
    h = np.stack(
        [reference.blocks(weights, x, 2, 2, causal, rope, norm_type) for x in embedded(params)]
    )
    expected = head(params, rms_norm(h, 1e-5) if norm_type == "pre" else h)
    np.testing.assert_allclose(out.logits, expected, atol=2e-5)
    np.testing.assert_array_equal(out.steps, 1)
    assert out.converged.all()
    assert out.layer_steps.shape == (2, 0)
    assert out.q_logits is None
    assert out.state == ()


def test_looped_equals_reference_and_can_go_on():
    params = fpr.init(LOOPED, KEY)
    batch = {"tokens": TOKENS}
    apply = jitted(LOOPED)
    out = apply(params, batch)
    weights = reasoner_weights(params["layers_0"])
    z = np.stack([reference.looped(weights, x, 3, 1, 2, False, True) for x in embedded(params)])
    np.testing.assert_allclose(out.state[0].z, z, atol=2e-5)
    np.testing.assert_allclose(out.logits, head(params, z), atol=2e-5)
    np.testing.assert_array_equal(out.steps, 3)
    np.testing.assert_array_equal(fpr.apply(LOOPED, params, batch, train=True).steps, 2)
    more = apply(params, batch, state=out.state, max_steps=1)
    whole = apply(params, batch, max_steps=4)
    np.testing.assert_allclose(more.logits, whole.logits, atol=1e-6)
    assert fpr.build(LOOPED).config.layers_per_step == 1


def test_deep_is_causal_and_trains():
    params = fpr.init(SMALL, KEY)
    check_causal(SMALL, params)
    grads = check_trains(SMALL, params)
    assert not any(name.startswith(("q_head", "layers_0/alpha")) for name in grads)


def test_looped_is_causal_without_positions_or_with_them():
    for rope in (True, False):
        config = LOOPED | {"causal": True, "rope": rope}
        check_causal(config, fpr.init(config, KEY))


def test_looped_gradient_unrolled_and_truncated():
    """One-step with k = loops is the unrolled gradient; fewer loops give another one."""
    batch = {"tokens": TOKENS}
    params = fpr.init(LOOPED, KEY)
    check_trains(LOOPED, params, without=("q_head",))

    def gradient(adjoint, loops):
        config = LOOPED | {"adjoint": adjoint}

        def loss(p):
            return jnp.sum(fpr.apply(config, p, batch, train=True, max_steps=loops).logits ** 2)

        return flatten(jax.jit(jax.grad(loss))(params))

    unrolled = gradient({"name": "unrolled"}, 2)
    full = gradient({"name": "one_step", "k": 2, "refine": True}, 0)
    truncated = gradient({"name": "one_step", "k": 1, "refine": True}, 1)
    for name, value in unrolled.items():
        np.testing.assert_allclose(full[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    name = "layers_0/mlps_0/down_proj/kernel"
    assert np.abs(truncated[name] - unrolled[name]).max() > 1e-3


def test_parameter_counts():
    """FPRM's blocks and ends; the deep Transformer has no Q head, neither has residual scales."""
    block = 4 * 512**2 + 3 * 512 * 1536
    sizes = {"vocab_size": 11, "seq_len": 81}
    assert count({"name": "transformer", "num_layers": 4, **sizes}) == 4 * block + 2 * 11 * 512
    looped = {"name": "looped_transformer", "num_registers": 16, "num_puzzles": 1, **sizes}
    assert count(looped) == 2 * block + 2 * 11 * 512 + 512 + 2 * 513


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv": "conv1d"}, "conv='conv1d' acts on an iterate.*allowed: none"),
        ({"norm_placement": "input"}, "norm_placement='input' acts on.*allowed: none, output"),
        ({"z0": "random"}, "z0='random' acts on.*allowed: fixed"),
        ({"z0_std": 1.0}, "z0_std=1.0 acts on.*allowed: 0.0"),
        ({"num_layers": 0}, "num_layers=0, allowed: > 0"),
        ({"num_heads": 3}, "num_heads=3 does not divide"),
        ({"depth": 3}, "unknown key 'depth'"),
    ],
)
def test_configs_that_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(SMALL | change)


@pytest.mark.parametrize("config", [SMALL, LOOPED], ids=["deep", "looped"])
def test_an_empty_sequence_is_refused(config):
    with pytest.raises(ValueError, match=r"shape \(2, 0\)"):
        fpr.apply(config, fpr.init(config, KEY), {"tokens": jnp.zeros((2, 0), jnp.int32)})


@pytest.mark.parametrize("train", [True, False])
def test_fixed_loops_are_not_damped(train):
    """f(z) = 1 - z never comes nearer to its fixed point: patience would damp it."""
    solver = make_solver(fixed_loops(30, 31), train)
    zeros = jnp.zeros((2, 3))
    solution = fpr.fixed_point(lambda _, x, z: x - z, (), zeros + 1, zeros, solver=solver)
    assert solution.steps.tolist() == [30 if train else 31] * 2
    np.testing.assert_array_equal(solution.value, zeros + (0 if train else 1))
