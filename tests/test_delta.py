"""The chunked delta rule against its recurrence in float64, corners included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fpr.delta import delta_rule
from tests.reference import delta as reference
from tests.test_scan import close, vjp

NAMES = ("q", "k", "v", "beta", "log_decay", "h0")


def inputs(time, seed=0, batch=2, heads=2, size=4, width=3, factors=None):
    r = np.random.default_rng(seed)

    def normal(*shape):
        return r.normal(size=shape).astype(np.float32)

    long = (batch, time, heads) if factors is None else (batch, time, factors, heads)
    k = normal(*long, size)
    return {
        "q": normal(batch, time, heads, size), "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": normal(*long, width), "beta": r.uniform(0, 2, long).astype(np.float32),
        "log_decay": -np.abs(normal(batch, time, heads)), "h0": normal(batch, heads, size, width),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("time", "chunk", "backend", "factors"),
    [
        (1, 64, "auto", None), (7, 1, "xla", None), (37, 8, "auto", None), (37, 8, "auto", 3),
        (37, 8, "sequential", 2), (16, 16, "xla", 1),
    ],
)  # fmt: skip
def test_values(time, chunk, backend, factors):
    v = inputs(time, factors=factors)
    run = jax.jit(functools.partial(delta_rule, chunk=chunk, backend=backend))
    for mine, theirs in zip(run(**v), reference.delta_rule(**v)):
        close(mine, theirs, 1e-5)
    bare = {k: v[k] for k in ("q", "k", "v", "beta")}
    for mine, theirs in zip(run(**bare), reference.delta_rule(**bare)):
        close(mine, theirs, 1e-5)


@pytest.fixture(scope="module")
def long_chunk():
    """Values and gradients of chunks of 128 over 256 steps, compiled once for all corners."""

    @jax.jit
    def run(v):
        def out(v):
            y, last = delta_rule(**v, chunk=128)
            return jnp.sum(y**2) + jnp.sum(last**2), (y, last)

        (_, values), grads = jax.value_and_grad(out, has_aux=True)(v)
        return values, grads

    return run


@pytest.mark.parametrize("beta", [0.0, 1e-4, 1.0, 1.9999, 2.0])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0])
def test_corners(long_chunk, beta, spread):
    """Nearly parallel and parallel keys with β near 0, 1 and 2, no decay: the state never fades."""
    v = inputs(256, batch=1, size=8)
    base = v["k"][:, :1]
    k = base + spread * np.random.default_rng(1).normal(size=v["k"].shape)
    v["k"] = (k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(np.float32)
    v["beta"] = np.full_like(v["beta"], beta)
    v["log_decay"] = np.zeros_like(v["log_decay"])
    (y, last), grads = long_chunk(v)
    expected = reference.delta_rule(**v)
    close(y, expected[0], 5e-5)
    close(last, expected[1], 5e-5)
    assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_corners_in_half_precision(dtype):
    """The same corners with half-precision inputs, whose keys are not quite of length 1."""
    run = jax.jit(functools.partial(delta_rule, chunk=128))
    for beta in (0.0, 1.0, 2.0):
        for spread in (0.0, 0.02):
            v = inputs(128, batch=1, size=8)
            k = v["k"][:, :1] + spread * np.random.default_rng(1).normal(size=v["k"].shape)
            v["k"] = k / np.linalg.norm(k, axis=-1, keepdims=True)
            v["beta"] = np.full_like(v["beta"], beta)
            v["log_decay"] = np.zeros_like(v["log_decay"])
            half = {name: jnp.asarray(x, dtype) for name, x in v.items()}
            expected = reference.delta_rule(**{n: np.float64(x) for n, x in half.items()})
            for mine, theirs, tolerance in zip(run(**half), expected, (1e-2, 5e-5)):
                close(mine, theirs, tolerance)


def test_gates_near_zero(long_chunk):
    """Decays of exp(-8000) and exactly 0 beside weak ones, over a long chunk."""
    v = inputs(256, batch=1, size=8)
    choices = np.float32([-1e-4, -0.01, -30, -8000, -np.inf])
    weights = [0.45, 0.45, 0.04, 0.03, 0.03]
    v["log_decay"] = np.random.default_rng(1).choice(choices, v["log_decay"].shape, p=weights)
    (y, last), grads = long_chunk(v)
    expected = reference.delta_rule(**v)
    close(y, expected[0], 2e-5)
    close(last, expected[1], 2e-5)
    assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("backend", ["auto", "sequential"])
def test_gradients(backend):
    """Against central differences of the float64 reference, one random direction per input."""
    v = inputs(9, batch=1, factors=2)
    r = np.random.default_rng(5)
    dy, dlast = r.normal(size=(1, 9, 2, 3)), r.normal(size=v["h0"].shape)

    def run(*args):
        return delta_rule(**dict(zip(NAMES, args)), chunk=4, backend=backend)

    _, grads = vjp(run, [v[k] for k in NAMES], (np.float32(dy), np.float32(dlast)))
    for name, grad in zip(NAMES, grads):
        way, step = r.normal(size=v[name].shape), 1e-5

        def loss(sign, name=name, way=way, step=step):
            moved = v | {name: np.float64(v[name]) + sign * step * way}
            y, last = reference.delta_rule(**moved)
            return np.sum(y * dy) + np.sum(last * dlast)

        slope = (loss(1) - loss(-1)) / (2 * step)
        assert abs(np.sum(grad * way) - slope) < 2e-4 * (np.linalg.norm(grad) + 1), name


def test_bfloat16_values_and_state_gradients():
    """Half precision in and out; states and their gradients are float32 inside."""
    v = inputs(40, factors=None)
    half = {k: jnp.asarray(x, jnp.bfloat16) for k, x in v.items()}
    exact = {k: np.asarray(x, np.float32) for k, x in half.items()}
    y, last = delta_rule(**half, chunk=16)
    assert (y.dtype, last.dtype) == (jnp.bfloat16, jnp.float32)
    close(y, reference.delta_rule(**exact)[0], 1e-2)
    grad = jax.jit(jax.grad(lambda v: jnp.sum(delta_rule(**v, chunk=16)[1] ** 2)))
    narrow, wide = grad(half), grad(exact)
    for name in NAMES:
        assert narrow[name].dtype == jnp.bfloat16
        close(narrow[name], wide[name], 1e-2)


def test_splitting_padding_and_second_derivatives():
    v = inputs(20)
    run = jax.jit(functools.partial(delta_rule, chunk=8))
    whole, last = run(**v)
    long = ("q", "k", "v", "beta", "log_decay")
    first, middle = run(**v | {k: v[k][:, :7] for k in long})
    rest = {k: v[k][:, 7:] for k in long}
    second, end = run(**v | rest | {"h0": middle})
    close(jnp.concatenate([first, second], 1), whole, 1e-5)
    close(end, last, 1e-5)
    keep = np.arange(20)[:, None] < 7
    padded = v | {k: np.where(keep, v[k], 0) for k in ("beta", "log_decay")}
    close(run(**padded)[0][:, :7], first, 1e-5)
    close(run(**padded)[1], middle, 1e-5)

    v = {n: x[:, :6] if n in long else x for n, x in v.items()}

    def norm(k, backend):
        def loss(k):
            return jnp.sum(delta_rule(**v | {"k": k}, chunk=4, backend=backend)[0] ** 2)

        return jnp.sum(jax.grad(loss)(k) ** 2)

    second = jax.jit(jax.grad(norm), static_argnums=1)
    close(second(v["k"], "auto"), second(v["k"], "sequential"), 1e-4)


@pytest.mark.parametrize(
    ("platform", "backend", "kernel"),
    [("cuda", "auto", None), ("cuda", "pallas", "mosaic_gpu"), ("tpu", "auto", "tpu_custom_call")],
)
def test_lowers_for_accelerators(platform, backend, kernel):
    """Under "auto", CUDA is left to XLA until the kernels have run on a card."""
    v = inputs(32, size=8, width=8)
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in v.items()}
    grad = jax.grad(lambda v: delta_rule(**v, chunk=16, backend=backend)[0].sum())
    program = jax.export.export(jax.jit(grad), platforms=[platform])(shapes)
    found = [k for k in ("mosaic_gpu", "tpu_custom_call") if k in program.mlir_module()]
    assert found == ([kernel] if kernel else [])


def test_bad_input():
    v = inputs(4)
    with pytest.raises(ValueError, match="T = 0"):
        delta_rule(**{k: x[:, :0] if k != "h0" else x for k, x in v.items()})
    with pytest.raises(ValueError, match="beta has shape"):
        delta_rule(**v | {"beta": v["beta"][:, :2]})
    with pytest.raises(ValueError, match="chunk=-1"):
        delta_rule(**v, chunk=-1)
    with pytest.raises(ValueError, match="backend='gpu'"):
        delta_rule(**v, backend="gpu")
