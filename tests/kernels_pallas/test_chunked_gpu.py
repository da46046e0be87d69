"""ssd and delta_rule on GPU: against float64 loops in Mosaic's interpreter, lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import delta_rule, recurrence_gpu, ssd
from tests.kernels_pallas import checks, test_delta, test_ssd
from tests.reference import kernels as reference

REFERENCE = {"ssd": reference.ssd, "delta": reference.delta_rule}
KERNEL = {"ssd": ssd, "delta": delta_rule}
INPUTS = {"ssd": test_ssd.inputs, "delta": test_delta.inputs}
PLAIN = {"ssd": test_ssd.plain, "delta": test_delta.plain}


def run(name):
    """The kernel in the interpreter, not jitted: it keeps state outside of programs."""
    return functools.partial(KERNEL[name], platform="gpu", interpret=checks.gpu_interpreter())


def check_gradient(name, args, tolerance):
    """Outputs and cotangents of every array, against autodiff of the recurrence."""
    out, vjp = jax.vjp(run(name), *args)
    races = checks.gpu_races_found()
    wide = [v.astype(jnp.float32) for v in args]
    want, plain_vjp = jax.vjp(jax.jit(PLAIN[name]), *wide)
    checks.assert_close(out, want, tolerance)
    ct = tuple(checks.normal(8 + k, *v.shape, dtype=v.dtype) for k, v in enumerate(out))
    want = plain_vjp(tuple(v.astype(jnp.float32) for v in ct))
    checks.assert_close(vjp(ct), want, 2 * tolerance)
    assert not races
    assert not checks.gpu_races_found()


@pytest.mark.parametrize(
    ("name", "shape"), [("ssd", (1, 3, 2, 3, 1, 2)), ("delta", (1, 3, 1, 4, 3))]
)
def test_matches_float64(name, shape):
    args = INPUTS[name](shape)
    checks.assert_close(run(name)(*args), REFERENCE[name](*args), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("ssd", (1, 66, 2, 3, 1, 2)), ("delta", (1, 66, 1, 4, 3))]
)
def test_bfloat16_gradient(name, shape):
    """Two chunks; heads that share a group; the carry from one chunk to the next."""
    check_gradient(name, INPUTS[name](shape, jnp.bfloat16), 1.5e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ssd", (2, 1, 1, 1, 1, 1)), ("ssd", (1, 130, 4, 3, 2, 70)), ("ssd", (1, 64, 1, 66, 1, 2)),
        ("delta", (2, 1, 1, 1, 1)), ("delta", (1, 130, 2, 5, 2)), ("delta", (1, 64, 1, 70, 66)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("decay", [0.3, 60.0])
def test_gradient(name, shape, decay):
    """One step, whole chunks and ragged ones, two tiles of keys and of values, strong decay."""
    check_gradient(name, INPUTS[name](shape, decay=decay), 1e-5)


@pytest.mark.slow
def test_float16():
    args = test_ssd.inputs((1, 20, 1, 3, 1, 2), jnp.float16)
    y, _ = run("ssd")(*args)
    assert y.dtype == jnp.float16
    checks.assert_close(y, reference.ssd(*args)[0], checks.TOLERANCE["float16"])


@pytest.mark.slow
def test_decay_of_zero_and_equal_keys():
    """Forgetting everything is exact; β = 2 on one key all the time is solved in float32."""
    x, log_decay, b, c, h0 = test_ssd.inputs((1, 20, 1, 2, 1, 3))
    log_decay = log_decay.at[:, 7].set(-jnp.inf).at[:, 3].set(0.0)
    args = x, log_decay, b, c, h0
    checks.assert_close(run("ssd")(*args), reference.ssd(*args), 5e-6)
    q, k, v, beta, *_ = test_delta.inputs((1, 100, 1, 4, 3))
    args = q, jnp.broadcast_to(k[:, :1], k.shape), v, jnp.full_like(beta, 2.0)
    checks.assert_close(run("delta")(*args), reference.delta_rule(*args), 1e-4)


def test_one_piece_per_number_is_not_enough_for_float32(monkeypatch):
    """The tolerance of the float32 checks tells six products from one."""
    monkeypatch.setattr(recurrence_gpu, "EXACT", 1)
    args = test_ssd.inputs((1, 3, 2, 3, 1, 2))
    with pytest.raises(AssertionError, match="output 0: error"):
        checks.assert_close(run("ssd")(*args), reference.ssd(*args), 1e-5)


def test_missing_wait_is_reported(monkeypatch):
    """The same kernel that reads a chunk before its copies have arrived: a race."""
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    run("ssd")(*test_ssd.inputs((1, 3, 2, 3, 1, 2), jnp.bfloat16))
    assert checks.gpu_races_found()


SIZES = {"ssd": (8, 4096, 32, 64, 1, 128), "delta": (8, 4096, 16, 128, 128)}


def structs(name, shape, dtype):
    """Shapes of the arguments without h0."""
    return jax.eval_shape(lambda: INPUTS[name](shape, dtype)[:-1])


@pytest.mark.parametrize("name", ["ssd", "delta"])
def test_lowers_with_gradient(name):
    """At full size in bfloat16: also finds shared memory that would not fit."""
    checks_lower(name, SIZES[name], jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("ssd", (8, 4096, 32, 64, 1, 128), jnp.float32),
        ("ssd", (8, 4096, 32, 64, 8, 256), jnp.bfloat16),
        ("ssd", (70000, 2, 2, 1, 1, 1), jnp.bfloat16),
        ("delta", (8, 4096, 16, 128, 128), jnp.float32),
        ("delta", (8, 4096, 8, 256, 256), jnp.bfloat16),
    ],
)  # fmt: skip
def test_lowers_at_the_limits(name, shape, dtype):
    """Most keys of either precision; more blocks than a launch's y dimension takes."""
    checks_lower(name, shape, dtype)


def checks_lower(name, shape, dtype):
    def loss(*args):
        y, last = KERNEL[name](*args, platform="gpu")
        return (y.astype(jnp.float32) ** 2).sum() + (last**2).sum()

    args = structs(name, shape, dtype)
    text = checks.lower(jax.grad(loss, tuple(range(len(args)))), "cuda", *args)
    assert checks.kernel_calls(text) == {"ssd": 2, "delta": 4}[name]


def test_too_many_keys():
    args = INPUTS["ssd"]((1, 2, 1, 1, 1, 129))
    with pytest.raises(ValueError, match=r"129 state channels .* at most 128 for float32"):
        ssd(*args, platform="gpu")
