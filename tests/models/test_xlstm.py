"""mLSTM and sLSTM: chunks against the recurrence, corners of the gates, blocks, sequence models."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.models.xlstm import mlstm, segment_sums, slstm
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
from tests.reference import xlstm as reference

SIZES = {"vocab_size": 5, "seq_len": 6, "hidden_size": 8, "num_heads": 2}
MLSTM = {"name": "mlstm", "num_layers": 1, "chunk_size": 4, **SIZES}
SLSTM = {"name": "slstm", "num_layers": 1, **SIZES}
T, K, V = 9, 4, 3


def inputs(seed=0, i=0.0, f=0.0, t=T):
    """Random q, k, v, i, f of one sample with two heads; i and f shift the gates."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(1, t, 2, w)) for w in (K, K, V))
    return q, k, v, i + rng.normal(size=(1, t, 2)), f + 3 * rng.normal(size=(1, t, 2))


def recurrence(arrays):
    heads = [reference.mlstm(*(a[0, :, j] for a in arrays)) for j in range(2)]
    return np.stack([h[0] for h in heads], axis=1), heads


run = jax.jit(mlstm, static_argnames="chunk_size")
squares_gradient = jax.jit(jax.grad(lambda arrays: jnp.sum(mlstm(*arrays)[0] ** 2)))


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_chunks_equal_recurrence(chunk_size):
    arrays = inputs()
    expected, heads = recurrence(arrays)
    h, state = run(*map(jnp.asarray, arrays), chunk_size=chunk_size)
    np.testing.assert_allclose(h[0], expected, atol=1e-5)
    scale = np.exp(np.asarray(state.m[0]))
    for j, (_, c, n) in enumerate(heads):
        np.testing.assert_allclose(state.c[0, j] * scale[j], c, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state.n[0, j] * scale[j], n, rtol=1e-4, atol=1e-5)


def test_state_continues_the_sequence():
    arrays = [jnp.asarray(a, jnp.float32) for a in inputs(1)]
    whole, last = run(*arrays, chunk_size=4)
    first, state = run(*(a[:, :5] for a in arrays), chunk_size=4)
    second, end = run(*(a[:, 5:] for a in arrays), state, chunk_size=4)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, atol=1e-5)
    np.testing.assert_allclose(end.m, last.m, rtol=1e-5)
    np.testing.assert_allclose(end.c, last.c, atol=1e-5)


@pytest.mark.parametrize(
    ("i", "f"),
    [(0, -60), (0, 60), (40, 0), (-40, 0), (-300, 0), (60, -60)],
    ids=lambda v: str(v),
)
def test_corners_of_the_gates(i, f):
    """Shut and open gates over a long chunk: right values, finite gradients."""
    arrays = inputs(2, float(i), float(f), t=70)
    expected, _ = recurrence(arrays)
    arrays = [jnp.asarray(a, jnp.float32) for a in arrays]
    h = run(*arrays)[0][0]
    # A denominator |n·q| near 0 amplifies rounding wherever exp(-m) is too small to bound it.
    np.testing.assert_allclose(h, expected, rtol=2e-3, atol=2e-4 * max(1.0, np.abs(expected).max()))
    for value in squares_gradient(arrays):
        assert np.isfinite(value).all()


def test_gradient_of_the_gates_against_finite_differences():
    """m counts as a constant: the derivative is still that of the unscaled recurrence."""
    arrays = inputs(3)
    grads = jax.jit(jax.grad(lambda a: jnp.sum(mlstm(*a, chunk_size=4)[0] ** 2)))(
        [jnp.asarray(a, jnp.float32) for a in arrays]
    )
    loss = lambda a: np.sum(recurrence(a)[0] ** 2)  # noqa: E731
    rng = np.random.default_rng(4)
    for which in range(5):
        direction = rng.normal(size=arrays[which].shape)
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[which] = arrays[which] + sign * 1e-5 * direction
            ends.append(loss(moved))
        expected = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(np.sum(grads[which] * direction), expected, rtol=2e-3, atol=2e-3)


def test_state_gradients_in_bfloat16():
    """The memory and its gradient are float32 whatever the inputs' type."""
    half = [jnp.asarray(a, jnp.bfloat16) for a in inputs(6)]
    _, state = run(*half, chunk_size=4)

    @jax.jit
    def grad(arrays):
        return jax.grad(lambda s: jnp.sum(mlstm(*arrays, s, chunk_size=4)[0] ** 2))(state)

    narrow, wide = grad(half), grad([a.astype(jnp.float32) for a in half])
    for name in ("c", "n"):
        a, b = getattr(narrow, name), getattr(wide, name)
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.abs(b).max() > 1e-3


def test_segment_sums_do_not_cancel():
    """A shut gate at the start leaves the sums after it exact."""
    x = jnp.array([-3e4, 1e-3, 2e-3, 3e-3])
    sums = segment_sums(x)
    np.testing.assert_allclose(sums[3, 1], 5e-3, rtol=1e-6)
    np.testing.assert_array_equal(sums[0, 1:], np.float32(-1e30))
    np.testing.assert_array_equal(jnp.diagonal(sums), 0.0)


def test_slstm_equals_recurrence():
    rng = np.random.default_rng(5)
    gates, recurrent = rng.normal(size=(2, 7, 4, 2, 3)), rng.normal(size=(4, 2, 3, 3))
    h, _ = jax.jit(slstm)(jnp.asarray(gates), jnp.asarray(recurrent))
    for sample in range(2):
        expected = reference.slstm(gates[sample], recurrent)
        np.testing.assert_allclose(h[sample], expected, atol=1e-5)
    squares = jax.jit(jax.value_and_grad(lambda g: jnp.sum(slstm(g, recurrent)[0] ** 2)))
    value, grad = squares(jnp.asarray(100.0 * gates))
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


@pytest.fixture(scope="module")
def params():
    return {c["name"]: spread(fpr.init(c, KEY)) for c in (MLSTM, SLSTM)}


def test_models_equal_reference(params):
    for config, block, whole in (
        (MLSTM, reference.mlstm_block, False),
        (SLSTM, reference.slstm_block, True),
    ):
        p = params[config["name"]]
        out = jitted(config)(p, {"tokens": TOKENS})
        blocks = [partial(block, float64(p[f"layer_{i}"]), 2) for i in range(1)]
        np.testing.assert_allclose(out.logits, stack_logits(p, blocks, whole=whole), atol=5e-5)


@pytest.mark.parametrize("config", [MLSTM, SLSTM], ids=["mlstm", "slstm"])
def test_are_sequence_models(params, config):
    check_sequence_model(config, params[config["name"]])


def test_parameter_counts_and_forget_bias():
    d = 16
    block = 8 * 2 * d + d * 5 + 3 * d * 4 + 2 * (3 * d * 2 + 2) + 2 * d + d * 8
    assert count(MLSTM) == 2 * 5 * 8 + (block + 8) + 8
    block = 8 * 5 + 4 * 8 * 4 + 4 * 8 + 4 * 8 * 4 + 8 + 8 + 3 * 8 * 16
    assert count(SLSTM) == 2 * 5 * 8 + (block + 8) + 8
    assert fpr.build(SLSTM).config.ff_width == 16
    bias = fpr.init(MLSTM, KEY)["layer_0"]["f_gate"]["bias"]
    np.testing.assert_allclose(bias, [3.0, 6.0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MLSTM | {"num_heads": 3}, "num_heads=3, allowed: a divisor of the width 16"),
        (MLSTM | {"qkv_block": 5}, "qkv_block=5, allowed: a divisor of the width 16"),
        (MLSTM | {"chunk_size": 0}, "chunk_size=0, allowed: a whole number >= 1"),
        (MLSTM | {"expand": 0}, "expand=0, allowed: a whole number >= 1"),
        (SLSTM | {"num_heads": 3}, "num_heads=3, allowed: a divisor of hidden_size=8"),
        (SLSTM | {"ff_expansion": 0.0}, "ff_expansion=0.0, allowed: > 0"),
        (SLSTM | {"expand": 2}, "unknown key 'expand'"),
    ],
)
def test_configs_that_cannot_work(config, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(config)
