"""LSTM: against NumPy, and what every sequence model has to satisfy."""

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
from tests.reference import lstm as reference

SMALL = {
    "name": "lstm", "vocab_size": 5, "seq_len": 6, "hidden_size": 8, "num_layers": 2, "expand": 2
}  # fmt: skip


@pytest.fixture(scope="module")
def params():
    return spread(fpr.init(SMALL, KEY))


def test_equals_reference(params):
    out = jitted(SMALL)(params, {"tokens": TOKENS})
    blocks = [partial(reference.block, float64(params[f"layer_{i}"])) for i in range(2)]
    np.testing.assert_allclose(out.logits, stack_logits(params, blocks), atol=2e-5)


def test_is_a_sequence_model(params):
    check_sequence_model(SMALL, params)


def test_parameter_count():
    lstm, out = 4 * (8 * 16 + 16 * 16 + 16), 16 * 8
    assert count(SMALL) == 2 * 5 * 8 + 2 * (lstm + out + 8) + 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expand": 0}, "expand=0, allowed: a whole number >= 1"),
        ({"num_layers": 0}, "num_layers=0, allowed: > 0"),
        ({"width": 3}, "unknown key 'width'"),
    ],
)
def test_configs_that_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(SMALL | change)
