"""Noise in the damped iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fpr import fixed_point
from fpr.solvers import Damped

SOLVER = Damped(noise=0.5, halting="never", max_steps=6, patience=100)


def half(params, x, z):
    return jax.tree.map(lambda z, x: 0.5 * z + x, z, x)


def solve(x, key, **more):
    data = None if key is None else jax.random.key_data(key)
    return fixed_point(half, (), x, jnp.zeros_like(x), solver=SOLVER, key=data, **more)


def test_noise_has_its_standard_deviation_and_is_new_in_every_iteration():
    x = jnp.zeros((4, 3000))
    keys = jax.random.split(jax.random.key(0), 4)
    one = solve(x, keys, max_steps=1)
    two = solve(x, keys, state=one.state, max_steps=1)
    first, second = np.asarray(one.value), np.asarray(two.value - 0.5 * one.value)
    for noise in (first, second):
        np.testing.assert_allclose(noise.std(axis=1), 0.5, rtol=0.06)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(first[0], first[1])[0, 1]) < 0.07


def test_noise_belongs_to_the_sample_and_goes_on_with_the_state():
    x = jnp.arange(12.0).reshape(3, 4)
    keys = jax.random.split(jax.random.key(1), 3)
    whole = solve(x, keys)
    alone = solve(x[1:2], keys[1:2])
    np.testing.assert_allclose(alone.value[0], whole.value[1], rtol=1e-6)
    part = solve(x, keys, max_steps=2)
    rest = solve(x, None, state=part.state, max_steps=4)
    np.testing.assert_allclose(rest.value, whole.value, rtol=1e-6)


def test_noise_without_keys_is_refused():
    with pytest.raises(ValueError, match=r"noise=0\.5 needs a key for every sample"):
        solve(jnp.zeros((2, 3)), None)
