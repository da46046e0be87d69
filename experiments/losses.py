"""Token losses: softmax and stablemax cross entropy, and the halting head's loss.

All are computed in float32 whatever the type of the logits; label -100 is ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fpr.models.base import IGNORE_LABEL as IGNORED

TokenLoss = Callable[[jax.Array, jax.Array], jax.Array]


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label] per token.

    Args:
      logits: (..., V).
      labels: (...) integers in 0..V-1, or -100.

    Returns:
      (...) float32, 0 where the label is -100.
    """
    logits = logits.astype(jnp.float32)
    return _at_labels(-jax.nn.log_softmax(logits), labels)


def stablemax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log of the stablemax probability of the label, per token (spec 2 section 3).

    Probabilities are s(x) / Σ s with s(x) = x+1 for x ≥ 0 and 1/(1-x) below. Written with
    max(x, 0) and max(-x, 0), both branches are finite for every x, and so are their gradients.

    Args:
      logits: (..., V).
      labels: (...) integers in 0..V-1, or -100.

    Returns:
      (...) float32, 0 where the label is -100.
    """
    logits = logits.astype(jnp.float32)
    above, below = jnp.maximum(logits, 0.0), jnp.maximum(-logits, 0.0)
    total = jnp.sum(above + 1.0 / (1.0 + below), axis=-1, keepdims=True)
    log_s = jnp.log1p(above) - jnp.log1p(below)
    return _at_labels(jnp.log(total) - log_s, labels)


def _at_labels(values: jax.Array, labels: jax.Array) -> jax.Array:
    """values (..., V) at labels (...), 0 where ignored."""
    keep = labels != IGNORED
    index = jnp.where(keep, labels, 0)[..., None]
    return jnp.where(keep, jnp.take_along_axis(values, index, axis=-1)[..., 0], 0.0)


TOKEN_LOSSES: dict[str, TokenLoss] = {
    "softmax": softmax_cross_entropy,
    "stablemax": stablemax_cross_entropy,
}


def per_example(token_values: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over each example's labelled tokens: (B, T) -> (B,); 0 for one without labels."""
    count = jnp.sum(labels != IGNORED, axis=-1)
    return jnp.sum(token_values, axis=-1) / jnp.maximum(count, 1)


def token_correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """(B, T) bool: the arg-max is the label; False where the label is -100."""
    return jnp.argmax(logits, axis=-1) == labels


def sequence_correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """(B,) bool: every labelled token of the example is right."""
    return jnp.all(token_correct(logits, labels) | (labels == IGNORED), axis=-1)


def halting_loss(q_logits: jax.Array, correct: jax.Array) -> jax.Array:
    """Binary cross entropy of the Q logit at position 0 against "whole answer right", (B,).

    Args:
      q_logits: (B, 2), of which entry 0 says "halt".
      correct: (B,) bool.
    """
    logit = q_logits[:, 0].astype(jnp.float32)
    return optax.sigmoid_binary_cross_entropy(logit, correct.astype(jnp.float32))
