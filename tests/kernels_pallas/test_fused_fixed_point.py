"""The fused fixed-point iteration: one step, its gradient, and the fixed point that it reaches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import fused_fixed_point
from tests.kernels_pallas import checks
from tests.reference import kernels as reference


def inputs(shape, rank=2, dtype=jnp.float32):
    """h, bx, decay, units, alpha for (B, T, D)."""
    units = np.random.default_rng(3).normal(size=(*shape[:2], rank, shape[2]))
    units /= np.maximum(np.linalg.norm(units, axis=-1, keepdims=True), 1e-5)
    return (
        checks.normal(0, *shape, dtype=dtype),
        checks.normal(1, *shape, dtype=dtype),
        checks.uniform(2, 0, 1, *shape, dtype=dtype),
        jnp.asarray(units, dtype),
        checks.uniform(4, 0, 1, *shape[:2], rank, dtype=dtype),
    )


def fused(*args, **options):
    return fused_fixed_point(*args, platform="tpu", **{"interpret": True, **options})


@pytest.mark.parametrize(
    ("shape", "rank", "mixer", "scale"),
    [
        ((1, 1, 1), 1, "householder", 2.0),
        ((2, 21, 12), 2, "householder", 2.0),
        ((2, 21, 12), 3, "dplr", 1.0),
    ],
)
def test_one_iteration_matches_float64(shape, rank, mixer, scale):
    args = inputs(shape, rank)
    got = fused(*args, mixer=mixer, scale=scale, chunk=16)
    h, bx, decay, units, alpha = args
    want = reference.fixed_point_iteration(h, bx, decay, units, alpha, mixer, scale)
    checks.assert_close(got, want, 1e-5)


def test_bfloat16():
    args = inputs((2, 20, 8), dtype=jnp.bfloat16)
    new, residual = fused(*args, chunk=16)
    want, want_residual = reference.fixed_point_iteration(*args)
    assert new.dtype == jnp.bfloat16
    checks.assert_close(new, want, checks.TOLERANCE["bfloat16"])
    checks.assert_close(residual, want_residual, 1e-4)


@pytest.mark.parametrize("chunk", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_reaches_the_fixed_point_of_the_dense_recurrence(chunk):
    """Contractive mixer (scale 1): iterating, whatever the chunk, ends at the exact solution."""
    _, bx, decay, units, alpha = inputs((2, 21, 6), 2)
    decay = 0.2 + 0.6 * decay

    def body(s):
        new, residual = fused(s[1], bx, decay, units, alpha, scale=1.0, chunk=chunk)
        return s[0] + 1, new, residual

    keep = lambda s: (s[0] < 400) & (s[2].max() > 3e-7)  # noqa: E731
    steps, h, _ = jax.lax.while_loop(keep, body, (0, jnp.zeros_like(bx), jnp.full(2, jnp.inf)))
    assert steps < 400
    checks.assert_close(h, reference.fixed_point_dense(bx, decay, units, alpha), 2e-5)


def test_gradient_is_that_of_the_plain_form():
    args = inputs((1, 6, 5), 2)
    ct = checks.normal(9, 1, 6, 5)

    def plain(h, bx, decay, units, alpha):
        v = bx - h
        for i in range(2):
            u = units[:, :, i]
            v = v - 2.0 * alpha[:, :, i : i + 1] * (u * v).sum(-1, keepdims=True) * u
        x, state, out = (1 - decay) * (v + h), jnp.zeros((1, 5)), []
        for t in range(6):
            state = decay[:, t] * state + x[:, t]
            out.append(state)
        return (jnp.stack(out, 1) * ct).sum()

    every = tuple(range(5))
    got = jax.jit(jax.grad(lambda *a: (fused(*a)[0] * ct).sum(), every))(*args)
    checks.assert_close(got, jax.jit(jax.grad(plain, every))(*args), 1e-5)


def test_order_and_races():
    simulated = pltpu.InterpretParams(detect_races=True, random_seed=11, num_cores_or_threads=2)
    args = inputs((3, 21, 6), 1)
    got = fused(*args, chunk=8, interpret=simulated)
    checks.assert_close(got, reference.fixed_point_iteration(*args), 1e-5)
    assert not checks.races_found()


@pytest.mark.parametrize(
    ("shape", "chunk", "mixer"), [((1, 4, 5), 2, "householder"), ((2, 2, 300), None, "dplr")]
)
def test_gpu_matches_float64(shape, chunk, mixer):
    """Time in two spans; more than one register piece of channels."""
    args = inputs(shape)
    interpret = checks.gpu_interpreter()
    got = fused_fixed_point(
        *args, mixer=mixer, platform="gpu", chunk=chunk, interpret=interpret
    )  # fmt: skip
    h, bx, decay, units, alpha = args
    want = reference.fixed_point_iteration(h, bx, decay, units, alpha, mixer)
    checks.assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rank", [1, 3])
def test_gpu_grid(rank, dtype):
    args = inputs((2, 8, 520), rank, dtype)
    interpret = checks.gpu_interpreter()
    new, residual = fused_fixed_point(*args, platform="gpu", chunk=2, interpret=interpret)
    want, want_residual = reference.fixed_point_iteration(*args)
    checks.assert_close(new, want, checks.TOLERANCE[jnp.dtype(dtype).name])
    checks.assert_close(residual, want_residual, 1e-4)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(2, 1, 1), (8, 4096, 2048), (70000, 4, 64)])
def test_lowers_with_gradient(shape, dtype, platform):
    wide = checks.struct(*shape, dtype=dtype)
    units = checks.struct(*shape[:2], 2, shape[2], dtype=dtype)
    alpha = checks.struct(*shape[:2], 2, dtype=dtype)
    run = functools.partial(fused_fixed_point, platform=platform)
    target = {"tpu": "tpu", "gpu": "cuda"}[platform]
    calls = checks.kernel_calls(checks.lower(run, target, wide, wide, wide, units, alpha))
    spans = platform == "gpu" and shape[0] < 66 and shape[1] > 64
    assert calls == (2 if spans else 1)
    loss = lambda *a: (run(*a)[0].astype(jnp.float32) ** 2).sum()  # noqa: E731
    grad = jax.grad(loss, tuple(range(5)))
    assert checks.kernel_calls(checks.lower(grad, target, wide, wide, wide, units, alpha)) >= 2


def test_errors_name_the_value():
    args = inputs((1, 4, 3), 1)
    with pytest.raises(ValueError, match="'kronecker'"):
        fused(*args, mixer="kronecker")
    with pytest.raises(ValueError, match=r"alpha has shape|units has shape"):
        fused(*args[:4], jnp.zeros((1, 4, 2)))
    with pytest.raises(ValueError, match="'cpu'"):
        fused_fixed_point(*args, platform="cpu")
