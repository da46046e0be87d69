"""Channel mixers against explicit float64 matrices, and their properties over random parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpr.mixers import ACTIVATIONS, MIXERS, ChannelMixer, Mixer, MixerOptions, l2_normalize
from tests.reference import mixers as reference
from tests.weights import mixer_weights

DIM, ARG = 8, 6
SEEDS = st.integers(0, 2**31 - 1)
NAMES = tuple(MIXERS)


def random_matrices(seed: int, name: str, rank: int = 1, dim: int = DIM, **options) -> np.ndarray:
    """Reference Q (5, dim, dim) for random arguments and random parameters, spread wide."""
    rng = np.random.default_rng(seed)
    mixer = ChannelMixer(MixerOptions(name, rank=rank, weight_norm=False), ARG, dim)
    params = mixer.init(jax.random.key(0))
    weights = {k: 2 * rng.normal(size=w.shape) for k, w in mixer_weights(params).items()}
    arg = rng.normal(size=(5, ARG))
    return reference.matrices(name, weights, arg, dim, **options)


@pytest.mark.parametrize("proj_rank", [None, 3])
@pytest.mark.parametrize("name", NAMES)
def test_equals_reference_in_float64(name: str, proj_rank: int | None) -> None:
    rank = 3 if name == "mixture" else 2
    options = MixerOptions(name, rank=rank, scale=1, proj_rank=proj_rank, weight_norm=False)
    mixer = ChannelMixer(options, ARG, DIM)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), mixer.init(jax.random.key(2)))
        arg, v = rng.normal(size=(2, 3, ARG)), rng.normal(size=(2, 3, DIM))
        out = np.asarray(jax.jit(mixer.mix)(params, jnp.asarray(arg), jnp.asarray(v)))
    expected = reference.mix(name, mixer_weights(params), arg, v, scale=1.0)
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("act", list(ACTIVATIONS))
def test_activation(act: str) -> None:
    options = MixerOptions("dplr", rank=2, act=act, weight_norm=False)
    mixer = ChannelMixer(options, ARG, DIM)
    params = mixer.init(jax.random.key(2))
    rng = np.random.default_rng(3)
    arg, v = rng.normal(size=(4, ARG)), rng.normal(size=(4, DIM))
    expected = reference.mix("dplr", mixer_weights(params), arg, v, act=act)
    out = mixer.mix(params, jnp.float32(arg), jnp.float32(v))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_spectral_normalisation() -> None:
    mixer = ChannelMixer(MixerOptions("kronecker", spectral=True, weight_norm=False), ARG, 12)
    params = mixer.init(jax.random.key(2))
    rng = np.random.default_rng(3)
    arg, v = rng.normal(size=(4, ARG)), rng.normal(size=(4, 12))
    weights = mixer_weights(params)
    expected = reference.mix("kronecker", weights, arg, v, spectral=True)
    out = mixer.mix(params, jnp.float32(arg), jnp.float32(v))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_kronecker_equals_explicit_kron() -> None:
    mixer = ChannelMixer(MixerOptions("kronecker"), ARG, 12)
    params = mixer.init(jax.random.key(2))
    rng = np.random.default_rng(3)
    arg, v = rng.normal(size=ARG), rng.normal(size=12)
    k1, k2 = mixer.factors(params, mixer.project(params, jnp.float32(arg)))
    assert (k1.shape, k2.shape) == ((3, 3), (4, 4))
    expected = v - 2.0 * np.kron(np.asarray(k1).T, np.asarray(k2)) @ v
    np.testing.assert_allclose(mixer.transform((k1, k2), v), expected, atol=1e-5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=SEEDS, scale=st.sampled_from([1.0, 2.0]))
def test_eigenvalues_of_one_factor(seed: int, scale: float) -> None:
    """r = 1: eigenvalues 1 (d - 1 times) and 1 - s α, in (-1, 1] for s = 2 and (0, 1] for s = 1."""
    for name in ("dplr", "householder"):
        for q in random_matrices(seed, name, scale=scale):
            values = np.sort(np.linalg.eigvalsh(q))
            np.testing.assert_allclose(values[1:], 1.0, atol=1e-9)
            assert 1.0 - scale < values[0] < 1.0
            assert np.linalg.norm(np.eye(DIM) - q, 2) <= scale


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=SEEDS, rank=st.integers(1, 4))
def test_rank(seed: int, rank: int) -> None:
    """I - Q has rank r for dplr and householder; lowrank itself has rank r (rank collapse)."""
    for name in ("dplr", "householder", "lowrank"):
        for q in random_matrices(seed, name, rank=rank):
            low = q if name == "lowrank" else np.eye(DIM) - q
            assert np.linalg.matrix_rank(low, tol=1e-9) <= rank
            if name == "householder":
                assert np.linalg.matrix_rank(q, tol=1e-12) == DIM


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=SEEDS, rank=st.integers(1, 4))
def test_contraction_for_scale_one(seed: int, rank: int) -> None:
    """‖I - Q‖ ≤ 1 for one factor; products and sums of r factors keep the bounds below."""
    identity = np.eye(DIM)
    for q in random_matrices(seed, "householder", rank=rank, scale=1.0):
        assert np.linalg.norm(q, 2) <= 1.0 + 1e-12
        assert np.linalg.norm(identity - q, 2) <= 2.0 * rank / (rank + 1) + 1e-12
    for q in random_matrices(seed, "dplr", rank=rank, scale=1.0):
        values = np.linalg.eigvalsh(identity - q)
        assert values[0] >= -1e-12
        assert values[-1] <= rank
    for q in random_matrices(seed, "lowrank", rank=rank):
        values = np.linalg.eigvalsh(q)
        assert values[0] >= -1e-12
        assert values[-1] <= 1.0
    for q in random_matrices(seed, "dense"):
        values = np.linalg.eigvalsh(q)
        assert values[0] >= -1e-9
        assert values[-1] <= 1.05
    for q in random_matrices(seed, "kronecker", scale=1.0, spectral=True):
        values = np.linalg.eigvals(identity - q)
        assert np.max(np.abs(values.imag)) < 1e-6
        assert values.real.min() > -1e-9
        assert values.real.max() <= 1.1
    for q in random_matrices(seed, "monarch", rank=4):
        values = np.linalg.eigvalsh(identity - q)
        assert values[0] >= -1e-9
        assert values[-1] <= 2.0


def test_householder_applies_factor_zero_first() -> None:
    mixer = ChannelMixer(MixerOptions("householder", rank=2), 2, 2)
    u = jnp.array([[1.0, 0.0], [0.6, 0.8]])
    alpha = jnp.array([0.5, 0.25])
    v = jnp.array([1.0, 1.0])
    after_first = v - 2 * 0.5 * u[0] * (u[0] @ v)
    expected = after_first - 2 * 0.25 * u[1] * (u[1] @ after_first)
    np.testing.assert_allclose(mixer.transform((u, alpha), v), expected, atol=1e-6)


def test_orthogonal_keeps_the_norm() -> None:
    for weight_norm in (True, False):
        mixer = ChannelMixer(MixerOptions("orthogonal", weight_norm=weight_norm), ARG, DIM)
        q = mixer.factors(mixer.init(jax.random.key(0)), {})
        np.testing.assert_allclose(q.T @ q, np.eye(DIM), atol=1e-5)
        assert not mixer.selective


@pytest.mark.parametrize("name", NAMES)
def test_zero_argument_has_finite_gradients(name: str) -> None:
    mixer = ChannelMixer(MixerOptions(name, rank=2, act="relu"), ARG, DIM)
    params = mixer.init(jax.random.key(1))

    def loss(params, arg, v):
        return jnp.sum(mixer.mix(params, arg, v) ** 2)

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(params, jnp.zeros(ARG), jnp.ones(DIM))
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("proj_rank", [None, 3])
def test_projection_adds_up_over_slices(proj_rank: int | None) -> None:
    mixer = ChannelMixer(MixerOptions("kronecker", proj_rank=proj_rank), 2 * ARG, DIM)
    params = mixer.init(jax.random.key(1))
    a, b = jax.random.normal(jax.random.key(2), (2, 4, ARG))
    whole = mixer.project(params, jnp.concatenate([a, b], -1))
    parts = jax.tree.map(jnp.add, mixer.project(params, a), mixer.project(params, b, ARG))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), whole, parts)


def test_weight_normalisation_starts_as_identity_and_keeps_gain() -> None:
    mixer = ChannelMixer(MixerOptions("householder"), ARG, DIM)
    params = mixer.init(jax.random.key(1))
    group = params["u_proj"]
    np.testing.assert_allclose(group["gain"], jnp.linalg.norm(group["kernel"], axis=0), rtol=1e-6)
    arg, v = jax.random.normal(jax.random.key(2), (ARG,)), jnp.ones(DIM)
    scaled = dict(params, u_proj=dict(group, kernel=3.0 * group["kernel"]))
    np.testing.assert_allclose(mixer.mix(scaled, arg, v), mixer.mix(params, arg, v), atol=1e-6)


def test_half_precision_stays_near_float32() -> None:
    mixer = ChannelMixer(MixerOptions("householder", rank=2), ARG, DIM)
    params = mixer.init(jax.random.key(1))
    arg, v = jax.random.normal(jax.random.key(2), (ARG,)), jnp.ones(DIM)
    half = mixer.mix(params, arg.astype(jnp.bfloat16), v.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), mixer.mix(params, arg, v), atol=0.05)


def test_linen_module_holds_the_same_parameters() -> None:
    channel = ChannelMixer(MixerOptions("mixture", rank=2), ARG, DIM)
    module = Mixer(channel)
    arg, v = jnp.ones((2, 3, ARG)), jnp.ones((2, 3, DIM))
    params = module.init(jax.random.key(0), arg, v)["params"]
    assert params["mixers_0_u_proj"]["kernel"].shape == (ARG, DIM)
    out = module.apply({"params": params}, arg, v)
    np.testing.assert_allclose(out, channel.mix(params, arg, v), atol=1e-6)
    expected = jax.tree.map(jnp.shape, channel.init(jax.random.key(0)))
    assert jax.tree.map(jnp.shape, params) == expected


def test_l2_normalize_of_zero() -> None:
    assert jnp.all(l2_normalize(jnp.zeros(3)) == 0)
    assert jnp.all(jnp.isfinite(jax.grad(lambda x: l2_normalize(x).sum())(jnp.zeros(3))))


@pytest.mark.parametrize(
    ("options", "width", "message"),
    [
        ({"name": "househoulder"}, 8, "did you mean 'householder'"),
        ({"act": "gelu"}, 8, "identity, silu, relu"),
        ({"rank": 0}, 8, "at least 1, got 0"),
        ({"scale": 3}, 8, "must be 2"),
        ({"proj_rank": 0}, 8, "at least 1, got 0"),
        ({"name": "kronecker"}, 13, "got 13; valid widths near it: 10, 12, 14, 15, 16"),
        ({"name": "mixture", "rank": 2}, 7, "got 7"),
        ({"name": "monarch", "rank": 3}, 16, r"use a rank from \[1, 2, 4, 8, 16\]"),
        ({"name": "monarch", "rank": 4}, 12, "a width such as 8 or 16"),
        ({"name": "monarch", "rank": 32}, 16, "width 16 and rank 32"),
        ({}, 0, "must be positive"),
    ],
)
def test_refuses(options: dict, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChannelMixer(MixerOptions(**options), ARG, width)
