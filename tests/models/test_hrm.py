"""HRM: two networks against NumPy, the one-step gradient, the paper's size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.registry import flatten
from tests.models.checks import KEY, count, jitted
from tests.models.test_trm import ATOL, BATCH, reference_inputs, reference_net
from tests.reference import trm as reference

SMALL = {
    "name": "hrm", "vocab_size": 5, "seq_len": 6, "hidden_size": 8, "num_heads": 2,
    "num_layers": 1, "expansion": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return fpr.init(SMALL, KEY)


def test_segment_equals_reference_and_gradient_is_that_of_the_last_updates(small):
    out = jitted(SMALL, max_steps=1)(small, BATCH)
    low, high = (reference_net(SMALL, small, name) for name in ("low_net", "high_net"))
    xs, (start_h, start_l) = reference_inputs(small)
    before = []
    for i, x in enumerate(xs):
        z_h, z_l = reference.two_networks(low, high, x, start_h, start_l, 2, 2)
        np.testing.assert_allclose(out.state[0].z["H"][i], z_h, atol=ATOL)
        np.testing.assert_allclose(out.state[0].z["L"][0][i], z_l, atol=ATOL)
        z_h, z_l = reference.two_networks(low, high, x, start_h, start_l, 1, 2)
        before.append((z_h, low(z_h + x, z_l)))
    z_h, z_l = (jnp.asarray(np.stack(part), jnp.float32) for part in zip(*before))
    state = (out.state[0]._replace(z={"H": z_h, "L": (z_l,)}),)

    def gradient(config, state=None):
        def loss(p):
            out = fpr.apply(config, p, BATCH, train=True, state=state, max_steps=1)
            return jnp.sum(out.logits**2)

        return flatten(jax.jit(jax.grad(loss))(small))

    expected = gradient(SMALL | {"h_cycles": 1, "l_cycles": 1, "gradient": "all"}, state)
    for name, value in gradient(SMALL).items():
        scale = max(np.abs(expected[name]).max(), 1e-3)
        np.testing.assert_allclose(value / scale, expected[name] / scale, atol=1e-4, err_msg=name)
        assert np.any(value) != ("q_head" in name or "start" in name), name


def test_size_of_the_paper():
    """27M; 2 × (2 + 1) calls of 4 layers a segment."""
    sudoku = {
        "name": "hrm", "vocab_size": 11, "seq_len": 81, "num_registers": 1, "num_puzzles": 1
    }  # fmt: skip
    assert count(sudoku) / 1e6 == pytest.approx(27.3, abs=0.05)
    assert fpr.build(sudoku).config.layers_per_step == 24


def test_a_single_state_is_refused():
    with pytest.raises(ValueError, match="num_levels=0, allowed: >= 1"):
        fpr.build(SMALL | {"num_levels": 0})
