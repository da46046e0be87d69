"""delta_rule: against the float64 loop, gradients against autodiff, correlated keys, lowered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import delta_rule
from tests.kernels_pallas import checks
from tests.reference import kernels as reference

run = functools.partial(delta_rule, platform="tpu", interpret=True)


def inputs(shape, dtype=jnp.float32, beta=1.0, decay=0.3):
    """q, k, v, beta, log_decay, h0 for (B, T, H, K, V); keys of unit length."""
    batch, time, heads, size, width = shape
    bth = (batch, time, heads)
    k = checks.normal(1, *bth, size)
    return (
        checks.normal(0, *bth, size, dtype=dtype),
        (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype),
        checks.normal(2, *bth, width, dtype=dtype),
        checks.uniform(3, 0, beta, *bth),
        -checks.uniform(4, 0, decay, *bth),
        checks.normal(5, batch, heads, size, width),
    )


def plain(q, k, v, beta, log_decay, h0):
    """The recurrence in jax.numpy, for autodiff."""

    def step(s, inputs):
        q, k, v, beta, a = inputs
        s = jnp.exp(a)[..., None, None] * s
        kept = v - jnp.einsum("bhk,bhkv->bhv", k, s)
        s = s + (beta[..., None] * k)[..., None] * kept[..., None, :]
        return s, jnp.einsum("bhk,bhkv->bhv", q, s)

    moved = tuple(x.swapaxes(0, 1) for x in (q, k, v, beta, log_decay))
    last, y = jax.lax.scan(step, h0, moved)
    return y.swapaxes(0, 1), last


@pytest.mark.parametrize("shape", [(2, 1, 1, 1, 1), (1, 21, 2, 4, 3), (1, 150, 1, 5, 2)])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_matches_float64(shape, beta):
    args = inputs(shape, beta=beta)
    checks.assert_close(run(*args), reference.delta_rule(*args), 1e-5)


def test_without_decay_and_with_equal_keys():
    """β = 2 on one key all the time: a power series of the WY matrix would lose every digit."""
    q, k, v, beta, *_ = inputs((1, 100, 1, 4, 3))
    k = jnp.broadcast_to(k[:, :1], k.shape)
    beta = jnp.full_like(beta, 2.0)
    checks.assert_close(run(q, k, v, beta), reference.delta_rule(q, k, v, beta), 1e-4)


def test_bfloat16():
    args = inputs((1, 40, 2, 4, 8), jnp.bfloat16)
    y, _ = run(*args)
    assert y.dtype == jnp.bfloat16
    checks.assert_close(y, reference.delta_rule(*args)[0], checks.TOLERANCE["bfloat16"])


def test_gradient_matches_autodiff():
    args = inputs((1, 140, 1, 4, 3))
    out, vjp = jax.vjp(jax.jit(run), *args)
    ct = tuple(checks.normal(8 + k, *v.shape) for k, v in enumerate(out))
    checks.assert_close(vjp(ct), jax.vjp(jax.jit(plain), *args)[1](ct), 2e-5)


@pytest.mark.slow
def test_order_and_races():
    simulated = pltpu.InterpretParams(detect_races=True, random_seed=3, num_cores_or_threads=2)
    args = inputs((2, 140, 1, 4, 3))
    checks.assert_close(run(*args, interpret=simulated), reference.delta_rule(*args), 1e-5)
    assert not checks.races_found()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1, 1), (8, 4096, 16, 128, 128)])
def test_lowers_with_gradient(shape, dtype):
    *bth, size, width = shape
    args = [checks.struct(*bth, w, dtype=dtype) for w in (size, size, width)]
    scalars = [checks.struct(*bth, dtype=dtype)] * 2

    def loss(*args):
        y, last = delta_rule(*args, platform="tpu")
        return (y.astype(jnp.float32) ** 2).sum() + (last**2).sum()

    text = checks.lower(jax.grad(loss, tuple(range(5))), "tpu", *args, *scalars)
    assert checks.kernel_calls(text) == 2


def test_errors_name_the_value():
    q, k, v, beta, *_ = inputs((1, 4, 1, 3, 2))
    with pytest.raises(ValueError, match=r"beta has shape \(1, 4\)"):
        run(q, k, v, beta[..., 0])
    with pytest.raises(ValueError, match="'cpu'"):
        delta_rule(q, k, v, beta, platform="cpu")
