"""Mamba: against NumPy, its initial values, and what every sequence model has to satisfy."""

from functools import partial

import numpy as np
import pytest

import fpr
from tests.models.checks import (
    KEY,
    TOKENS,
    check_sequence_model,
    count,
    float64,
    jitted,
    spread,
    stack_logits,
)
from tests.reference import mamba as reference

SMALL = {
    "name": "mamba", "vocab_size": 5, "seq_len": 6, "hidden_size": 8, "num_layers": 1,
    "state_size": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def params():
    return spread(fpr.init(SMALL, KEY))


@pytest.mark.parametrize("conv", [True, False])
def test_equals_reference(params, conv):
    config = SMALL if conv else SMALL | {"conv": False}
    params = params if conv else spread(fpr.init(config, KEY))
    out = jitted(config)(params, {"tokens": TOKENS})
    blocks = [partial(reference.block, float64(params[f"layer_{i}"])) for i in range(1)]
    np.testing.assert_allclose(out.logits, stack_logits(params, blocks), atol=3e-5)


def test_is_a_sequence_model(params):
    check_sequence_model(SMALL, params)


def test_initial_values_and_parameter_count():
    layer = fpr.init(SMALL, KEY)["layer_0"]
    np.testing.assert_allclose(np.exp(layer["A_log"]), np.tile([1.0, 2.0, 3.0], (16, 1)), rtol=1e-6)
    np.testing.assert_array_equal(layer["D"], 1.0)
    steps = np.log1p(np.exp(layer["dt_bias"]))
    assert 1e-3 <= steps.min() < steps.max() <= 0.1
    d, n, rank = 16, 3, 1
    block = 8 * 2 * d + d * 5 + d * (rank + 2 * n) + rank * d + d + d * n + d + d * 8
    assert count(SMALL) == 2 * 5 * 8 + (block + 8) + 8
    assert fpr.build(SMALL | {"hidden_size": 40}).config.step_rank == 3
    assert fpr.build(SMALL | {"dt_rank": 5}).config.step_rank == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expand": 0}, "expand=0, allowed: a whole number >= 1"),
        ({"state_size": 0}, "state_size=0, allowed: a whole number >= 1"),
        ({"conv_kernel": 0}, "conv_kernel=0, allowed: a whole number >= 1"),
        ({"dt_rank": -1}, "dt_rank=-1, allowed: a whole number >= 0"),
        ({"states": 3}, "unknown key 'states'"),
    ],
)
def test_configs_that_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(SMALL | change)
