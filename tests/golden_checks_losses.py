"""Parity of the token losses: losses.npz."""

import jax
import numpy as np

from experiments import losses
from tests.reference import losses as reference


def check_losses(arrays):
    logits, labels = arrays["logits"], arrays["labels"]
    for name in ("softmax", "stablemax"):
        ours = losses.TOKEN_LOSSES[name](logits, labels)
        np.testing.assert_allclose(ours, arrays[name], rtol=1e-5, atol=1e-6)
        plain = reference.cross_entropy(getattr(reference, name), logits, labels)
        np.testing.assert_allclose(plain, arrays[name], rtol=1e-5, atol=1e-6)
    expected = arrays["d_logits_of_sum_stablemax"]
    grad = jax.grad(lambda x: losses.stablemax_cross_entropy(x, labels).sum())(logits)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)
    plain = reference.stablemax_gradient(logits, labels)
    np.testing.assert_allclose(plain, expected, rtol=1e-4, atol=1e-6)


CHECKS = {"losses": check_losses}
