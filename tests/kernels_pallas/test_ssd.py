"""ssd: against the float64 loop, gradients against autodiff, simulated, lowered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import ssd
from tests.kernels_pallas import checks
from tests.reference import kernels as reference

run = functools.partial(ssd, platform="tpu", interpret=True)


def inputs(shape, dtype=jnp.float32, decay=0.5):
    """x, log_decay, B, C, h0 for (B, T, H, P, G, N)."""
    batch, time, heads, p, groups, n = shape
    return (
        checks.normal(0, batch, time, heads, p, dtype=dtype),
        -checks.uniform(1, 0, decay, batch, time, heads),
        checks.normal(2, batch, time, groups, n, dtype=dtype),
        checks.normal(3, batch, time, groups, n, dtype=dtype),
        checks.normal(4, batch, heads, p, n),
    )


def plain(x, log_decay, b, c, h0):
    """The recurrence in jax.numpy, for autodiff."""
    b, c = (jnp.repeat(v, x.shape[2] // v.shape[2], axis=2) for v in (b, c))

    def step(h, s):
        x, a, b, c = s
        h = jnp.exp(a)[..., None, None] * h + x[..., None] * b[..., None, :]
        return h, (h * c[..., None, :]).sum(-1)

    last, y = jax.lax.scan(step, h0, tuple(v.swapaxes(0, 1) for v in (x, log_decay, b, c)))
    return y.swapaxes(0, 1), last


@pytest.mark.parametrize("shape", [(2, 1, 1, 1, 1, 1), (1, 21, 4, 3, 2, 5), (1, 150, 2, 3, 1, 2)])
@pytest.mark.parametrize("decay", [0.5, 60.0])
def test_matches_float64(shape, decay):
    args = inputs(shape, decay=decay)
    checks.assert_close(run(*args), reference.ssd(*args), 5e-6)


def test_decay_of_zero_forgets():
    x, log_decay, b, c, h0 = inputs((1, 20, 1, 2, 1, 3))
    log_decay = log_decay.at[:, 7].set(-jnp.inf).at[:, 3].set(0.0)
    checks.assert_close(run(x, log_decay, b, c, h0), reference.ssd(x, log_decay, b, c, h0), 5e-6)


def test_bfloat16():
    args = inputs((1, 40, 2, 4, 1, 8), jnp.bfloat16)
    y, last = run(*args)
    want_y, want_last = reference.ssd(*args)
    assert y.dtype == jnp.bfloat16
    checks.assert_close(y, want_y, checks.TOLERANCE["bfloat16"])
    checks.assert_close(last, want_last, checks.TOLERANCE["bfloat16"])


def test_gradient_matches_autodiff():
    """Two chunks, two heads that share a group, and the last state's cotangent."""
    args = inputs((1, 140, 2, 3, 1, 2))
    out, vjp = jax.vjp(jax.jit(run), *args)
    ct = tuple(checks.normal(8 + k, *v.shape) for k, v in enumerate(out))
    checks.assert_close(vjp(ct), jax.vjp(jax.jit(plain), *args)[1](ct), 1e-5)


@pytest.mark.slow
def test_order_and_races():
    simulated = pltpu.InterpretParams(detect_races=True, random_seed=3, num_cores_or_threads=2)
    args = inputs((2, 140, 2, 3, 1, 2))
    checks.assert_close(run(*args, interpret=simulated), reference.ssd(*args), 5e-6)
    assert not checks.races_found()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1, 1, 1), (8, 4096, 32, 64, 1, 128)])
def test_lowers_with_gradient(shape, dtype):
    batch, time, heads, p, groups, n = shape
    bth = (batch, time, heads)
    args = [
        checks.struct(*s, dtype=dtype) for s in ((*bth, p), bth, *[(batch, time, groups, n)] * 2)
    ]

    def loss(*args):
        y, last = ssd(*args, platform="tpu")
        return (y.astype(jnp.float32) ** 2).sum() + (last**2).sum()

    assert checks.kernel_calls(checks.lower(jax.grad(loss, (0, 1, 2, 3)), "tpu", *args)) == 2


def test_errors_name_the_value():
    x, log_decay, b, c, _ = inputs((1, 4, 3, 2, 1, 2))
    with pytest.raises(ValueError, match="2 groups"):
        run(x, log_decay, *(jnp.zeros((1, 4, 2, 2)),) * 2)
    with pytest.raises(ValueError, match=r"C has shape \(1, 4, 1, 5\)"):
        run(x, log_decay, b, jnp.zeros((1, 4, 1, 5)))
    with pytest.raises(ValueError, match="'cpu'"):
        ssd(x, log_decay, b, c, platform="cpu")
