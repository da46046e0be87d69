"""Mamba-2's chunked scan against its recurrence in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fpr.ssd import ssd
from tests.reference import ssd as reference
from tests.test_scan import close, vjp

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "h0")


def inputs(time, seed=0, batch=2, heads=4, width=3, groups=2, n=5):
    r = np.random.default_rng(seed)

    def normal(*shape):
        return r.normal(size=shape).astype(np.float32)

    return {
        "x": normal(batch, time, heads, width), "dt": np.abs(normal(batch, time, heads)),
        "A": -np.exp(normal(heads)), "B": normal(batch, time, groups, n),
        "C": normal(batch, time, groups, n), "D": normal(heads),
        "z": normal(batch, time, heads, width), "h0": normal(batch, heads, width, n),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("time", "chunk", "backend"),
    [(1, 64, "auto"), (7, 1, "xla"), (37, 8, "auto"), (64, 16, "xla"), (37, 8, "sequential")],
)
def test_values(time, chunk, backend):
    v = inputs(time)
    run = functools.partial(ssd, chunk=chunk, backend=backend)
    for mine, theirs in zip(jax.jit(run)(**v), reference.ssd(**v)):
        close(mine, theirs, 1e-5)
    bare = {k: v[k] for k in ("x", "dt", "A", "B", "C")}
    close(jax.jit(run)(**bare)[0], reference.ssd(**bare)[0], 1e-5)


def test_near_zero_gates_over_long_chunks():
    """Decays down to exp(-8000) and exactly 0, with weak ones between them, in one chunk of 256.

    Differences of cumulative sums would reach 1e6 here and leave no digit of a weak decay.
    """
    v = inputs(256, batch=1) | {"A": np.float32([-0.01, -1, -30, -8000])}
    v["dt"] = np.random.default_rng(1).choice(np.float32([1e-3, 0.02, 1]), v["dt"].shape)
    y, last = jax.jit(functools.partial(ssd, chunk=256))(**v)
    expected = reference.ssd(**v)
    close(y, expected[0], 1e-5)
    close(last, expected[1], 1e-5)
    v["A"] = np.float32([-np.inf, -1, 0, -8000])
    run = jax.jit(jax.value_and_grad(lambda x, v: ssd(**v | {"x": x}, chunk=64)[0].sum()))
    value, grad = run(v["x"], v)
    np.testing.assert_allclose(value, reference.ssd(**v)[0].sum(), rtol=1e-4, atol=1e-2)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("backend", ["auto", "sequential"])
def test_gradients(backend):
    """Against central differences of the float64 reference, one random direction per input."""
    v = inputs(13, batch=1)
    r = np.random.default_rng(5)
    dy, dlast = r.normal(size=v["x"].shape), r.normal(size=v["h0"].shape)

    def run(*args):
        return ssd(**dict(zip(NAMES, args)), chunk=4, backend=backend)

    _, grads = vjp(run, [v[k] for k in NAMES], (np.float32(dy), np.float32(dlast)))
    for name, grad in zip(NAMES, grads):
        way, step = r.normal(size=v[name].shape), 1e-5

        def loss(sign, name=name, way=way, step=step):
            y, last = reference.ssd(**v | {name: np.float64(v[name]) + sign * step * way})
            return np.sum(y * dy) + np.sum(last * dlast)

        slope = (loss(1) - loss(-1)) / (2 * step)
        assert abs(np.sum(grad * way) - slope) < 2e-4 * (np.linalg.norm(grad) + 1), name


def test_splitting_bfloat16_and_second_derivatives():
    v = inputs(20)
    long = ("x", "dt", "B", "C", "z")
    run = jax.jit(functools.partial(ssd, chunk=8))
    whole, last = run(**v)
    first, middle = run(**v | {k: v[k][:, :7] for k in long})
    second, end = run(**v | {k: v[k][:, 7:] for k in long} | {"h0": middle})
    close(jnp.concatenate([first, second], 1), whole, 1e-5)
    close(end, last, 1e-5)
    half = {k: jnp.asarray(x, jnp.bfloat16) for k, x in v.items()}
    y, last = run(**half)
    assert (y.dtype, last.dtype) == (jnp.bfloat16, jnp.float32)
    exact = {k: np.asarray(x, np.float64) for k, x in half.items()}
    close(y, reference.ssd(**exact)[0], 2e-2)

    v = {n: x[:, :6] if n in long else x for n, x in v.items()}

    def norm(x, backend):
        grad = jax.grad(lambda x: jnp.sum(ssd(**v | {"x": x}, chunk=4, backend=backend)[0] ** 2))
        return jnp.sum(grad(x) ** 2)

    second = jax.jit(jax.grad(norm), static_argnums=1)
    close(second(v["x"], "auto"), second(v["x"], "sequential"), 1e-5)


def test_state_gradients_in_bfloat16():
    """The state and its gradient are float32 inside, whatever the inputs' type."""
    half = {k: jnp.asarray(x, jnp.bfloat16) for k, x in inputs(40).items()}
    exact = {k: np.asarray(x, np.float32) for k, x in half.items()}
    run = jax.jit(jax.grad(lambda v: sum(jnp.sum(out**2) for out in ssd(**v, chunk=16))))
    narrow, wide = run(half), run(exact)
    for name in NAMES:
        assert narrow[name].dtype == jnp.bfloat16
        close(narrow[name], wide[name], 2e-2)


def test_padding_does_not_leak():
    """Steps with Δ = 0 after the end of a sequence leave its outputs and last state alone."""
    v = inputs(24)
    cut = v | {"dt": np.where(np.arange(24)[:, None] < 11, v["dt"], 0)}
    short = v | {k: v[k][:, :11] for k in ("x", "dt", "B", "C", "z")}
    run = jax.jit(functools.partial(ssd, chunk=8))
    close(run(**cut)[0][:, :11], run(**short)[0], 1e-6)
    close(run(**cut)[1], run(**short)[1], 1e-6)


@pytest.mark.parametrize(
    ("platform", "backend", "kernel"),
    [("cuda", "auto", None), ("cuda", "pallas", "mosaic_gpu"), ("tpu", "auto", "tpu_custom_call")],
)
def test_lowers_for_accelerators(platform, backend, kernel):
    """Under "auto", CUDA is left to XLA until the kernels have run on a card."""
    shapes = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in inputs(32, n=8, width=8).items()
    }
    grad = jax.grad(lambda v: ssd(**v, chunk=16, backend=backend)[0].sum())
    program = jax.export.export(jax.jit(grad), platforms=[platform])(shapes)
    found = [k for k in ("mosaic_gpu", "tpu_custom_call") if k in program.mlir_module()]
    assert found == ([kernel] if kernel else [])


def test_bad_input():
    v = inputs(4)
    with pytest.raises(ValueError, match="T = 0"):
        ssd(**v | {k: v[k][:, :0] for k in ("x", "dt", "B", "C", "z")})
    with pytest.raises(ValueError, match="3 groups"):
        ssd(**v | {"B": np.zeros((2, 4, 3, 5), np.float32)})
    with pytest.raises(ValueError, match="chunk=0"):
        ssd(**v, chunk=0)
    with pytest.raises(ValueError, match="dt has shape"):
        ssd(**v | {"dt": v["dt"][:, :, :1]})
