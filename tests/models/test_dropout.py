"""Variational dropout of FPRM: one mask for each sample and solve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.adjoints import Unrolled
from fpr.models.fprm import FPRMConfig, FPRMLayer

CONFIG = {
    "name": "fprm", "vocab_size": 5, "seq_len": 3, "hidden_size": 8, "num_heads": 2,
    "num_layers": 1, "expansion": 1.0, "rope": False, "z0_std": 1.0, "dropout": 0.5,
    "solver": {"train": {"halting": "never", "max_steps": 4}},
}  # fmt: skip
BATCH = {"tokens": jnp.array([[1, 2, 3], [3, 4, 1], [3, 4, 1]])}
KEY = jax.random.key(1)

pytestmark = pytest.mark.usefixtures("fast_compile")


@pytest.fixture(scope="module")
def params():
    return fpr.init(CONFIG, jax.random.key(0), BATCH)


@functools.partial(jax.jit, static_argnames=("steps", "train", "dropout"))
def run(params, key, state=None, steps=4, train=True, dropout=0.5):
    config = CONFIG | {"dropout": dropout}
    adjoint = Unrolled() if train else None
    return fpr.apply(
        config, params, BATCH, train=train, key=key, state=state, adjoint=adjoint, max_steps=steps
    )


def test_masks_last_for_the_solve_and_differ_between_samples(params):
    whole = run(params, KEY)
    first = run(params, KEY, steps=2)
    # The second half gets another key: the masks are those of the state.
    second = run(params, jax.random.key(9), first.state, steps=2)
    np.testing.assert_allclose(second.logits, whole.logits, atol=1e-6)
    assert np.abs(whole.logits[1] - whole.logits[2]).max() > 1e-3
    assert np.abs(run(params, jax.random.key(2)).logits - whole.logits).max() > 1e-3


def test_evaluation_does_not_drop(params):
    dropping = run(params, KEY, train=False)
    np.testing.assert_array_equal(
        dropping.logits, run(params, KEY, train=False, dropout=0.0).logits
    )
    assert np.abs(run(params, KEY).logits - run(params, KEY, dropout=0.0).logits).max() > 1e-3


def test_masks_keep_the_mean(params):
    options = {k: v for k, v in CONFIG.items() if k != "name"} | {"hidden_size": 64}
    layer = FPRMLayer(FPRMConfig(**options))
    x, masks = layer.drop(None, jax.random.split(KEY, 200))
    assert x is None
    assert masks.shape == (200, 2, 64)
    np.testing.assert_array_equal(np.unique(masks), [0.0, 2.0])
    assert np.asarray(masks).mean() == pytest.approx(1.0, abs=0.03)


def test_the_recursion_refuses_it():
    with pytest.raises(ValueError, match=r"model\.dropout=0\.5, allowed: 0"):
        fpr.build(CONFIG | {"name": "trm"})
