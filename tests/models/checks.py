"""What every model has to satisfy, and Flax parameters as the NumPy references take them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.registry import flatten

KEY = jax.random.key(0)
TOKENS = jnp.array([[1, 2, 3, 4, 2, 1], [4, 4, 1, 2, 3, 3]])


def jitted(config: Mapping[str, Any], **options: Any) -> Any:
    """fpr.apply of a config, compiled."""
    return jax.jit(partial(fpr.apply, config, **options))


def spread(params: Any, scale: float = 0.3, seed: int = 2) -> Any:
    """Parameters with noise on all of them, zeros and ones at the start included."""
    rng = np.random.default_rng(seed)
    noisy = lambda w: jnp.asarray(w + scale * rng.normal(size=w.shape), w.dtype)  # noqa: E731
    return jax.tree.map(noisy, params)


def count(config: Mapping[str, Any]) -> int:
    """Number of parameters."""
    shapes = jax.eval_shape(lambda key: fpr.init(config, key), KEY)
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def check_causal(config: Mapping[str, Any], params: Any, apply: Any = None) -> None:
    """A later token changes nothing before it, and everything from it on; one token alone works."""
    apply = apply or jitted(config)
    later = TOKENS.at[:, 3].set(TOKENS[:, 3] % 4 + 1)
    a, b = (np.asarray(apply(params, {"tokens": t}).logits) for t in (TOKENS, later))
    np.testing.assert_allclose(a[:, :3], b[:, :3], atol=1e-5)
    assert np.abs(a[:, 3:] - b[:, 3:]).max(axis=(0, 2)).min() > 1e-5
    one = apply(params, {"tokens": TOKENS[:, :1]})
    assert one.logits.shape == (2, 1, a.shape[-1])
    np.testing.assert_allclose(one.logits, a[:, :1], atol=1e-5)


def check_trains(config: Mapping[str, Any], params: Any, without: tuple[str, ...] = ()) -> Any:
    """Every parameter's gradient is finite and, but for names in `without`, not zero.

    Returns the flat gradients.
    """

    def loss(params: Any) -> jax.Array:
        out = fpr.apply(config, params, {"tokens": TOKENS}, train=True)
        logits = jax.nn.log_softmax(out.logits)
        return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(TOKENS, 1, 1)[..., None], -1))

    grads = flatten(jax.jit(jax.grad(loss))(params))
    for name, value in grads.items():
        assert np.isfinite(value).all(), name
        if any(part in name for part in without):
            assert not np.any(value), name
        else:
            assert np.any(value), name
    return grads


def check_sequence_model(config: Mapping[str, Any], params: Any) -> None:
    """What holds for each causal model without a loop: causality, gradients, its report, bf16."""
    apply = jitted(config)
    check_causal(config, params, apply)
    check_trains(config, params)
    out = apply(params, {"tokens": TOKENS})
    np.testing.assert_array_equal(out.steps, 1)
    assert out.converged.all()
    assert out.state == ()
    low = jitted(dict(config) | {"dtype": "bfloat16"})(params, {"tokens": TOKENS})
    assert low.logits.dtype == jnp.float32
    error = np.abs(np.asarray(low.logits) - np.asarray(out.logits)).max()
    assert 1e-7 < error < 0.05 * (1 + np.abs(np.asarray(out.logits)).max())
    with pytest.raises(ValueError, match=r"shape \(2, 0\), allowed: \(B, T\) with B, T >= 1"):
        fpr.apply(config, params, {"tokens": jnp.zeros((2, 0), jnp.int32)})


def stack_logits(
    params: Mapping[str, Any], blocks: Any, eps: float = 1e-5, *, whole: bool = False
) -> np.ndarray:
    """Logits of a `Stack` for TOKENS in float64.

    blocks[i] maps the normed stream (T, D) to what it adds; with `whole`, the normed stream and the
    stream to the next stream.
    """

    def norm(v: np.ndarray, scale: Any) -> np.ndarray:
        return v / np.sqrt(np.mean(v * v, -1, keepdims=True) + eps) * np.asarray(scale, np.float64)

    rows = []
    for tokens in np.asarray(TOKENS):
        h = np.asarray(params["embedding"]["embedding"], np.float64)[tokens]
        for i, block in enumerate(blocks):
            normed = norm(h, params[f"layer_{i}"]["norm"]["scale"])
            h = block(normed, h) if whole else h + block(normed)
        h = norm(h, params["final_norm"]["scale"])
        rows.append(h @ np.asarray(params["lm_head"]["kernel"], np.float64))
    return np.stack(rows)


def float64(params: Any) -> Any:
    """Parameters as NumPy float64."""
    return jax.tree.map(lambda w: np.asarray(w, np.float64), params)


def reasoner_weights(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """An `FPRMLayer`'s parameters as tests/reference/fprm.py takes them: torch names, (out, in)."""
    weights = {}
    for name, value in flatten(params).items():
        array = np.asarray(value, np.float64)
        path = name.split("/")
        module = path[0].rpartition("_")
        if module[0] == "token_mixers":
            weights[f"layers.{module[2]}.self_attn.{path[1]}.weight"] = array.T
        elif module[0] == "mlps":
            weights[f"layers.{module[2]}.mlp.{path[1]}.weight"] = array.T
        elif path == ["conv", "kernel"]:
            weights["conv.weight"] = array.T[:, None]
        else:
            weights[".".join(path)] = array
    return weights
