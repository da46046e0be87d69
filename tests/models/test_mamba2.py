"""Mamba-2: against NumPy, its initial values, and what every sequence model has to satisfy."""

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
from tests.reference import mamba2 as reference

SMALL = {
    "name": "mamba2", "vocab_size": 5, "seq_len": 6, "hidden_size": 8, "num_layers": 1,
    "state_size": 3, "head_dim": 4, "num_groups": 2, "chunk_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def params():
    return spread(fpr.init(SMALL, KEY))


@pytest.mark.parametrize("conv", [True, False])
def test_equals_reference(params, conv):
    config = SMALL if conv else SMALL | {"conv": False, "num_groups": 1}
    params = params if conv else spread(fpr.init(config, KEY))
    out = jitted(config)(params, {"tokens": TOKENS})
    blocks = [partial(reference.block, float64(params["layer_0"]), 4, config["num_groups"])]
    np.testing.assert_allclose(out.logits, stack_logits(params, blocks), atol=3e-5)


def test_is_a_sequence_model(params):
    check_sequence_model(SMALL, params)


def test_initial_values_and_parameter_count():
    layer = fpr.init(SMALL, KEY)["layer_0"]
    rate = np.exp(layer["A_log"])
    assert 1.0 <= rate.min() < rate.max() <= 16.0
    steps = np.log1p(np.exp(layer["dt_bias"]))
    assert 1e-3 <= steps.min() < steps.max() <= 0.1
    d, mixed, heads = 16, 16 + 2 * 6, 4
    block = 8 * (d + mixed + heads) + 5 * mixed + 3 * heads + d + d * 8
    assert count(SMALL) == 2 * 5 * 8 + block + 8 + 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 5}, "head_dim=5, allowed: a divisor of expand·hidden_size=16"),
        ({"num_groups": 3}, "num_groups=3, allowed: a divisor of the number of heads 4"),
        ({"state_size": 0}, "state_size=0, allowed: a whole number >= 1"),
        ({"chunk_size": 0}, "chunk_size=0, allowed: a whole number >= 1"),
        ({"states": 3}, "unknown key 'states'"),
    ],
)
def test_configs_that_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(SMALL | change)
