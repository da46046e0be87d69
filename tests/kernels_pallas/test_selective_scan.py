"""selective_scan: against the float64 loop, gradients against autodiff, simulated, lowered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import selective_scan, selective_scan_gpu
from tests.kernels_pallas import checks
from tests.reference import kernels as reference

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "h0")


def inputs(shape, dtype=jnp.float32, scale=0.3):
    """All eight arguments for (B, T, D, N); the stream types follow dtype."""
    batch, time, dim, n = shape
    bt = (batch, time)
    return {
        "u": checks.normal(0, *bt, dim, dtype=dtype),
        "delta": checks.uniform(1, 0, scale, *bt, dim, dtype=dtype),
        "A": -checks.uniform(2, 0.1, 3, dim, n),
        "B": checks.normal(3, *bt, n, dtype=dtype),
        "C": checks.normal(4, *bt, n, dtype=dtype),
        "D": checks.normal(5, dim),
        "z": checks.normal(6, *bt, dim, dtype=dtype),
        "h0": checks.normal(7, batch, dim, n),
    }


def plain(u, delta, A, B, C, D=None, z=None, h0=None):
    """The same in jax.numpy, for autodiff; validated against the float64 loop below."""
    f32 = functools.partial(jax.tree.map, lambda v: v.astype(jnp.float32).swapaxes(0, 1))
    h0 = jnp.zeros((u.shape[0], *A.shape)) if h0 is None else h0

    def step(h, s):
        u, dt, b, c = s
        h = jnp.exp(dt[..., None] * A) * h + (dt * u)[..., None] * b[:, None]
        return h, (h * c[:, None]).sum(-1)

    last, y = jax.lax.scan(step, h0, f32((u, delta, B, C)))
    y = y.swapaxes(0, 1)
    y = y if D is None else y + D * u.astype(jnp.float32)
    return (y if z is None else y * jax.nn.silu(z.astype(jnp.float32))), last


def check(args, interpret, tolerance, platform="tpu"):
    run = functools.partial(selective_scan, platform=platform, interpret=interpret)
    out, vjp = jax.vjp(jax.jit(lambda a: run(**a)), args)
    want = reference.selective_scan(*(args.get(k) for k in NAMES))
    checks.assert_close(out, want, tolerance)
    ct = tuple(checks.normal(8 + k, *v.shape, dtype=v.dtype) for k, v in enumerate(out))
    want_out, want_vjp = jax.vjp(jax.jit(lambda a: plain(**a)), args)
    checks.assert_close(want_out, want, 1e-5)
    got, grads = vjp(ct)[0], want_vjp(tuple(c.astype(jnp.float32) for c in ct))[0]
    for name in args:
        e = checks.error(got[name], grads[name])
        assert e < 2 * tolerance, f"gradient of {name}: error {e:.3g}"


@pytest.mark.parametrize(
    "shape", [pytest.param((1, 1, 1, 1), marks=pytest.mark.slow), (2, 10, 5, 4)]
)
def test_tpu_matches_float64(shape):
    check(inputs(shape), True, 3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_steps_of_zero_and_steps_that_underflow(platform):
    """Decays of exactly 1 and of exactly 0 in one sequence, with gradient."""
    args = inputs((1, 9, 2, 2))
    size = jnp.where(jnp.arange(9) % 3 == 0, 0.0, jnp.where(jnp.arange(9) % 3 == 1, 1.0, 4e3))
    args["delta"] = args["delta"] * size[None, :, None]
    interpret = True if platform == "tpu" else checks.gpu_interpreter()
    check(args, interpret, 1e-5, platform=platform)


def test_tpu_two_chunks_of_time():
    args = inputs((1, 140, 4, 3))
    got = selective_scan(**args, platform="tpu", interpret=True)
    checks.assert_close(got, reference.selective_scan(*(args[k] for k in NAMES)), 5e-6)


@pytest.mark.slow
def test_tpu_two_chunks_of_time_and_two_blocks_of_channels_with_gradient():
    args = inputs((1, 140, 130, 3))
    check({k: v for k, v in args.items() if k not in ("z", "h0", "D")}, True, 5e-6)


@pytest.mark.slow
def test_tpu_bfloat16():
    check(inputs((1, 20, 5, 4), dtype=jnp.bfloat16), True, checks.TOLERANCE["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 60.0])
@pytest.mark.parametrize("shape", [(3, 9, 140, 16), (1, 300, 3, 8), (2, 128, 128, 5)])
def test_tpu_grid_of_shapes(shape, scale, dtype):
    """From steps that keep everything to steps whose decay underflows to zero."""
    args = inputs(shape, dtype=dtype, scale=scale)
    check(args, True, {jnp.float32: 2e-5, jnp.bfloat16: 1.5e-2}[dtype])


SIMULATED = pltpu.InterpretParams(detect_races=True, random_seed=5, num_cores_or_threads=2)


@pytest.mark.slow
def test_tpu_order_and_races_forward():
    args = inputs((2, 130, 3, 2))
    got = selective_scan(**args, platform="tpu", interpret=SIMULATED)
    checks.assert_close(got, reference.selective_scan(*(args[k] for k in NAMES)), 5e-6)
    assert not checks.races_found()


@pytest.mark.slow
def test_tpu_order_and_races_with_gradient():
    check(inputs((2, 130, 3, 2)), SIMULATED, 5e-6)
    assert not checks.races_found()


def test_more_states_than_one_kernel_call_takes():
    args = inputs((1, 5, 2, 66))
    got = selective_scan(**args, platform="tpu", interpret=True)
    checks.assert_close(got, reference.selective_scan(*(args[k] for k in NAMES)), 5e-6)


def test_gpu_matches_float64():
    args = inputs((1, 3, 2, 2))
    got = selective_scan(**args, platform="gpu", interpret=checks.gpu_interpreter())
    checks.assert_close(got, reference.selective_scan(*(args[k] for k in NAMES)), 3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 3, 2, 2), (1, 34, 2, 12), (1, 18, 130, 20)])
def test_gpu_gradient(shape):
    """One tile and two, one column of channels and two, every padded number of states."""
    check(inputs(shape), checks.gpu_interpreter(), 1e-5, platform="gpu")


@pytest.mark.slow
def test_gpu_spans_of_time(monkeypatch):
    """A ragged length in two spans, with gate, initial state and gradient."""
    monkeypatch.setattr(selective_scan_gpu, "_spans", lambda *_: 2)
    check(inputs((1, 40, 2, 2)), checks.gpu_interpreter(), 1e-5, platform="gpu")


def test_gpu_spans_only_where_the_chip_is_not_full():
    assert selective_scan_gpu._spans((8, 4096, 2048), 16) == 1
    assert selective_scan_gpu._spans((1, 4096, 2048), 16) == 8
    assert selective_scan_gpu._spans((1, 64, 128), 16) == 1


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("batch", [8, 1])
def test_lowers_for_gpu(batch, gradient):
    """Also finds shared memory that would not fit; one sequence is cut into spans of time."""
    wide, maps = (batch, 4096, 2048), (batch, 4096, 32)
    btd, btn = checks.struct(*wide, dtype=jnp.bfloat16), checks.struct(*maps)
    shapes = (btd, btd, checks.struct(2048, 32), btn, btn)
    run = functools.partial(selective_scan, platform="gpu")
    loss = lambda *a: run(*a)[0].astype(jnp.float32).sum()  # noqa: E731
    text = checks.lower(jax.grad(loss, tuple(range(5))) if gradient else run, "cuda", *shapes)
    assert checks.kernel_calls(text) == (1 + gradient) * (2 if batch == 1 else 1)
    assert f"tensor<{batch}x4096x2048x32x" not in text


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (8, 4096, 2048, 16), (70000, 4, 16, 8)])
def test_lowers_with_gradient(shape, dtype):
    batch, time, dim, n = shape
    btd, btn = checks.struct(batch, time, dim, dtype=dtype), checks.struct(batch, time, n)

    def loss(*args):
        y, last = selective_scan(*args, platform="tpu")
        return (y.astype(jnp.float32) ** 2).sum() + (last**2).sum()

    shapes = (btd, btd, checks.struct(dim, n), btn, btn, checks.struct(dim), btd,
              checks.struct(batch, dim, n))  # fmt: skip
    text = checks.lower(jax.grad(loss, tuple(range(8))), "tpu", *shapes)
    assert checks.kernel_calls(text) == 2
    # Nothing of (B, T, D, N), in either order, anywhere in the program.
    assert f"tensor<{batch}x{time}x{dim}x{n}x" not in text or n == 1
    assert f"tensor<{batch}x{time}x{n}x{dim}x" not in text or n == 1


@pytest.mark.slow
def test_vmap_and_remat():
    args = inputs((2, 9, 3, 2))
    run = functools.partial(selective_scan, platform="tpu", interpret=True)
    args = {k: args[k] for k in ("u", "delta", "A", "B", "C")}
    stacked = {k: jnp.stack([v, v]) for k, v in args.items()}
    y, last = jax.vmap(lambda a: run(**a))(stacked)
    checks.assert_close((y[1], last[1]), run(**args), 1e-6)
    loss = lambda a: (run(**a)[0] ** 2).sum()  # noqa: E731
    checks.assert_close(jax.grad(jax.checkpoint(loss))(args), jax.grad(loss)(args), 1e-6)


def test_errors_name_the_value():
    args = inputs((2, 4, 3, 2))
    with pytest.raises(ValueError, match=r"B has shape \(2, 4, 5\)"):
        selective_scan(**{**args, "B": jnp.zeros((2, 4, 5))}, platform="tpu")
    with pytest.raises(ValueError, match="'cpu'"):
        selective_scan(**args, platform="cpu")
