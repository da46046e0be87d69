import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import losses
from tests.reference import losses as reference


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (3, 5, 6)).astype(np.float32)
    labels = rng.integers(0, 6, (3, 5))
    labels[0, 2], labels[1] = losses.IGNORED, losses.IGNORED
    return logits, labels


@pytest.mark.parametrize("name", ["softmax", "stablemax"])
def test_matches_reference(case, name):
    logits, labels = case
    ours = losses.TOKEN_LOSSES[name](logits, labels)
    expected = reference.cross_entropy(getattr(reference, name), logits, labels)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert (np.asarray(ours)[labels == losses.IGNORED] == 0).all()


def test_stablemax_gradient_matches_reference(case):
    logits, labels = case
    grad = jax.grad(lambda x: losses.stablemax_cross_entropy(x, labels).sum())(logits)
    np.testing.assert_allclose(
        grad, reference.stablemax_gradient(logits, labels), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", ["softmax", "stablemax"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_extreme_logits_stay_finite(name, dtype):
    logits = jnp.array([[1e30, -1e30, 0.0], [-1.0, 1.0, -0.0]], dtype)
    labels = jnp.array([1, 0])
    value, grad = jax.value_and_grad(lambda x: losses.TOKEN_LOSSES[name](x, labels).sum())(logits)
    assert value.dtype == jnp.float32
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad.astype(jnp.float32)).all()


def test_per_example_is_the_mean_over_labelled_tokens():
    labels = jnp.array([[1, -100, 2], [-100, -100, -100]])
    values = jnp.array([[3.0, 0.0, 5.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(losses.per_example(values, labels), [4.0, 0.0])


def test_correctness_ignores_unlabelled_tokens():
    logits = jax.nn.one_hot(jnp.array([[1, 0, 2], [1, 1, 1]]), 3)
    labels = jnp.array([[1, -100, 2], [1, 1, 0]])
    assert losses.token_correct(logits, labels).tolist() == [[1, 0, 1], [1, 1, 0]]
    assert losses.sequence_correct(logits, labels).tolist() == [True, False]


def test_halting_loss_is_binary_cross_entropy_of_the_first_logit():
    q = jnp.array([[2.0, 9.0], [2.0, -9.0]])
    p = 1 / (1 + np.exp(-2.0))
    ours = losses.halting_loss(q, jnp.array([True, False]))
    np.testing.assert_allclose(ours, [-np.log(p), -np.log(1 - p)], rtol=1e-6)
