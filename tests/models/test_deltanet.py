"""DeltaNet and its variants: against NumPy, and what every sequence model has to satisfy."""

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
from tests.reference import deltanet as reference

SMALL = {
    "name": "deltanet", "vocab_size": 5, "seq_len": 6, "hidden_size": 8, "num_layers": 1,
    "num_heads": 2, "chunk_size": 4,
}  # fmt: skip
GATED = SMALL | {"decay": True, "output_gate": True, "expand_v": 2}
PRODUCT = SMALL | {"num_householder": 3, "negative_eigenvalues": True}
GATED_PRODUCT = GATED | {"num_householder": 2, "negative_eigenvalues": True}


@pytest.mark.parametrize(
    "config",
    [SMALL, PRODUCT, GATED_PRODUCT | {"conv": False, "head_dim": 3}],
    ids=["deltanet", "product", "gated-product"],
)
def test_equals_reference(config):
    params = spread(fpr.init(config, KEY))
    out = jitted(config)(params, {"tokens": TOKENS})
    steps, negative = config.get("num_householder", 1), config.get("negative_eigenvalues", False)
    blocks = [
        partial(reference.block, float64(params[f"layer_{i}"]), 2, steps, negative)
        for i in range(1)
    ]
    np.testing.assert_allclose(out.logits, stack_logits(params, blocks), atol=5e-5)


def test_is_a_sequence_model():
    check_sequence_model(GATED_PRODUCT, spread(fpr.init(GATED_PRODUCT, KEY), 0.2))


def test_parameter_counts():
    ends = 2 * 5 * 8 + 8
    assert count(SMALL) == ends + (4 * 8 * 8 + 8 * 2 + 3 * 4 * 8 + 4 + 8)
    gated = 2 * 8 * 8 + 3 * 8 * 16 + 8 * 2 + 4 * (8 + 8 + 16) + 8 * 2 + 2 + 2 + 8 + 8
    assert count(GATED) == ends + gated
    product = 8 * 8 * (1 + 3 + 3 + 1) + 8 * 6 + 4 * 8 * (1 + 3 + 3) + 4 + 8
    assert count(PRODUCT) == ends + product


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3, allowed: a divisor of hidden_size=8"),
        ({"num_householder": 0}, "num_householder=0, allowed: a whole number >= 1"),
        ({"expand_v": 0}, "expand_v=0, allowed: a whole number >= 1"),
        ({"head_dim": -1}, "head_dim=-1, allowed: a whole number >= 0"),
        ({"chunk_size": 0}, "chunk_size=0, allowed: a whole number >= 1"),
        ({"conv_kernel": 0}, "conv_kernel=0, allowed: a whole number >= 1"),
        (
            {"negative": True},
            "unknown key 'negative' in model; did you mean 'negative_eigenvalues'",
        ),
    ],
)
def test_configs_that_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(SMALL | change)
