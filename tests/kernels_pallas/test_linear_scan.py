"""linear_scan on TPU and GPU: against float64, simulated, lowered, inside transformations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas import common, linear_scan, linear_scan_bwd, linear_scan_gpu
from tests.kernels_pallas import checks
from tests.reference import kernels as reference

slow = pytest.mark.slow


def inputs(shape, dtype=jnp.float32, decay=(0.0, 1.0)):
    batch, _, dim = shape
    a = checks.uniform(0, *decay, *shape, dtype=dtype)
    return a, checks.normal(1, *shape, dtype=dtype), checks.normal(2, batch, dim)


def run_and_check(shape, dtype, reverse, platform, interpret, chunk=None, decay=(0.0, 1.0)):
    """Output, last state and all three gradients against the float64 loop."""
    a, x, h0 = inputs(shape, dtype, decay)
    dh, dlast = checks.normal(3, *shape, dtype=dtype), checks.normal(4, shape[0], shape[2])
    run = functools.partial(
        linear_scan, reverse=reverse, platform=platform, interpret=interpret, chunk=chunk
    )
    (h, last), vjp = jax.vjp(run, a, x, h0)
    assert h.dtype == dtype
    assert last.dtype == jnp.float32
    tolerance = checks.TOLERANCE[jnp.dtype(dtype).name]
    want_h, want_last = reference.linear_scan(a, x, h0, reverse)
    checks.assert_close(h, want_h, tolerance)
    checks.assert_close(last, want_last, checks.TOLERANCE["float32"])
    da, dx, dh0 = vjp((dh, dlast))
    want = reference.linear_scan_vjp(a, x, h0, dh, dlast, reverse)
    checks.assert_close((da, dx, dh0), want, 2 * tolerance)


@pytest.mark.parametrize(
    ("shape", "chunk", "reverse", "dtype"),
    [
        ((2, 1, 1), None, False, jnp.float32),
        ((3, 21, 5), 16, False, jnp.float32),  # ragged
        ((3, 21, 5), 16, True, jnp.bfloat16),
        ((2, 20, 600), 16, True, jnp.float32),  # more than a block of channels
        ((2, 32, 128), 16, False, jnp.bfloat16),  # whole blocks
        ((1, 9, 3), None, False, jnp.float16),
    ],
)
def test_tpu_matches_float64(shape, chunk, reverse, dtype):
    run_and_check(shape, dtype, reverse, "tpu", True, chunk)


def test_reference_gradient_is_the_gradient():
    """The float64 adjoint loop against autodiff of the plain recurrence."""
    a, x, h0 = inputs((2, 5, 3))
    dh, dlast = checks.normal(3, 2, 5, 3), checks.normal(4, 2, 3)

    def plain(a, x, h0):
        h, out = h0, []
        for t in range(5):
            h = a[:, t] * h + x[:, t]
            out.append(h)
        return jnp.stack(out, 1), h

    got = jax.vjp(plain, a, x, h0)[1]((dh, dlast))
    checks.assert_close(got, reference.linear_scan_vjp(a, x, h0, dh, dlast), 1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, -1.0])
def test_tpu_extreme_decays(value):
    """Decays at exactly 0 and 1, products that underflow, and a sign that alternates."""
    shape = (1, 40, 8)
    x, h0 = checks.normal(1, *shape), checks.normal(2, 1, 8)
    a = jnp.full(shape, value)
    run = functools.partial(linear_scan, platform="tpu", interpret=True, chunk=16)
    out, vjp = jax.vjp(run, a, x, h0)
    checks.assert_close(out, reference.linear_scan(a, x, h0), 1e-5)
    ct = checks.normal(3, *shape), checks.normal(4, 1, 8)
    checks.assert_close(vjp(ct), reference.linear_scan_vjp(a, x, h0, *ct), 1e-5)


def test_tpu_long_with_weak_decay():
    run_and_check((1, 700, 4), jnp.float32, False, "tpu", True, decay=(0.999, 1.0))


@slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("decay", [(0.0, 1e-3), (0.0, 1.0), (0.99, 1.0)])
@pytest.mark.parametrize(
    "shape", [(1, 7, 1), (5, 100, 130), (9, 17, 64), (1, 1, 1030), (2, 300, 3)]
)
def test_tpu_grid_of_shapes(shape, decay, reverse, dtype):
    run_and_check(shape, dtype, reverse, "tpu", True, 32, decay)


# --- simulated TPU memory -------------------------------------------------------------------------


def simulated(cores=1):
    return pltpu.InterpretParams(detect_races=True, random_seed=7, num_cores_or_threads=cores)


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=slow)])
def test_tpu_order_and_races(reverse):
    """Simulated memory, parallel axes in random order on two cores: same numbers, no race."""
    run_and_check((2, 21, 600), jnp.float32, reverse, "tpu", simulated(2), 16)
    assert not checks.races_found()


def test_wrong_order_is_caught(monkeypatch):
    """With time marked parallel: right under interpret=True, wrong in the simulator."""
    a, x, h0 = inputs((1, 64, 8))
    run = functools.partial(linear_scan, a, x, h0, platform="tpu", chunk=8)
    monkeypatch.setattr(
        common,
        "time_semantics",
        lambda parallel, **_: pltpu.CompilerParams(
            dimension_semantics=[pltpu.GridDimensionSemantics.PARALLEL] * (parallel + 1)
        ),
    )
    want, _ = reference.linear_scan(a, x, h0)
    assert checks.error(run(interpret=True)[0], want) < 1e-6
    assert checks.error(run(interpret=simulated())[0], want) > 1e-2
    run(interpret=simulated(2))
    assert checks.races_found()


# --- GPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "chunk", "reverse"),
    [((1, 40, 130), None, False), ((1, 64, 8), 32, True)],
)
def test_gpu_matches_float64(shape, chunk, reverse):
    """Ragged sizes and two columns of channels; time cut into spans."""
    run_and_check(shape, jnp.float32, reverse, "gpu", checks.gpu_interpreter(), chunk)
    assert not checks.gpu_races_found()


@slow
@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30])
def test_gpu_extreme_decays(value):
    """Two spans of time, so that products of decays over a span count too."""
    shape = (1, 64, 8)
    a, x, h0 = jnp.full(shape, value), checks.normal(1, *shape), checks.normal(2, 1, 8)
    run = functools.partial(
        linear_scan, platform="gpu", interpret=checks.gpu_interpreter(), chunk=32
    )
    out, vjp = jax.vjp(run, a, x, h0)
    checks.assert_close(out, reference.linear_scan(a, x, h0), 1e-5)
    ct = checks.normal(3, *shape), checks.normal(4, 1, 8)
    checks.assert_close(vjp(ct), reference.linear_scan_vjp(a, x, h0, *ct), 1e-5)


def test_gpu_reading_before_the_copy_arrives_is_caught(monkeypatch):
    """Without its waits: right numbers in the interpreter, which copies at once, and a race."""
    a, x, h0 = inputs((1, 60, 5))
    run = functools.partial(linear_scan, a, x, h0, platform="gpu")
    interpret = checks.gpu_interpreter()
    run(interpret=interpret)
    assert not checks.gpu_races_found()
    monkeypatch.setattr(linear_scan_gpu.plgpu, "barrier_wait", lambda *_: None)
    run(interpret=interpret)
    assert checks.gpu_races_found()


@slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "chunk"), [((1, 33, 3), None), ((2, 200, 8), None), ((1, 256, 130), 64)]
)
def test_gpu_grid_of_shapes(shape, chunk, reverse, dtype):
    run_and_check(shape, dtype, reverse, "gpu", checks.gpu_interpreter(), chunk)
    assert not checks.gpu_races_found()


def test_gpu_spans_only_where_the_chip_is_not_full():
    assert linear_scan_gpu._spans(8, 4096, 2048, None) == 1
    assert linear_scan_gpu._spans(8, 4096, 256, None) == 8
    assert linear_scan_gpu._spans(1, 64, 128, None) == 1
    assert 4096 // 32 % linear_scan_gpu._spans(3, 4096, 128, None) == 0


# --- lowering -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("shape", [(2, 1, 1), (8, 4096, 2048), (8, 4096, 256), (70000, 4, 64)])
def test_lowers_with_gradient(shape, platform, reverse, dtype):
    """Also a batch past 65,535 and the sizes of the speed targets."""

    def loss(a, x, h0):
        h, last = linear_scan(a, x, h0, reverse=reverse, platform=platform)
        return (h.astype(jnp.float32) ** 2).sum() + (last**2).sum()

    ax, h0 = checks.struct(*shape, dtype=dtype), checks.struct(shape[0], shape[2])
    target = {"tpu": "tpu", "gpu": "cuda"}[platform]
    text = checks.lower(jax.grad(loss, (0, 1, 2)), target, ax, ax, h0)
    assert checks.kernel_calls(text) >= 2


# --- inside JAX's transformations -----------------------------------------------------------------


@pytest.fixture(scope="module")
def scan():
    return functools.partial(linear_scan, platform="tpu", interpret=True, chunk=16)


def test_vmap(scan):
    a, x, h0 = checks.uniform(0, 0, 1, 3, 2, 20, 5), checks.normal(1, 3, 2, 20, 5), None
    h, last = jax.vmap(lambda a, x: scan(a, x, h0))(a, x)
    flat = [v.reshape(6, 20, 5) for v in (a, x)]
    want_h, want_last = reference.linear_scan(*flat)
    checks.assert_close((h, last), (want_h.reshape(h.shape), want_last.reshape(last.shape)), 1e-6)
    g = jax.vmap(jax.grad(lambda a, x: scan(a, x)[0].sum()))(a, x)
    zero, one = np.zeros((6, 5)), np.ones((6, 20, 5))
    want = reference.linear_scan_vjp(flat[0], flat[1], zero, one, zero)
    checks.assert_close(g, want[0].reshape(g.shape), 1e-6)


@slow
def test_vmap_on_gpu():
    a, x = checks.uniform(0, 0, 1, 2, 1, 8, 5), checks.normal(1, 2, 1, 8, 5)
    run = functools.partial(linear_scan, platform="gpu", interpret=checks.gpu_interpreter())
    h, _ = jax.vmap(run)(a, x)
    want, _ = reference.linear_scan(a[:, 0], x[:, 0])
    checks.assert_close(h[:, 0], want, 1e-6)


def test_vmap_lowers_for_gpu():
    one = checks.struct(3, 2, 64, 128)
    text = checks.lower(jax.vmap(lambda a, x: linear_scan(a, x, platform="gpu")), "cuda", one, one)
    assert checks.kernel_calls(text) >= 1


def test_shard_map_remat_while_loop_donation(scan):
    """One device is enough to see whether the call traces and stays right inside each of them."""
    a, x, h0 = inputs((2, 20, 5))
    want, _ = reference.linear_scan(a, x, h0)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(
        lambda a, x, h0: scan(a, x, h0)[0], mesh=mesh, in_specs=(spec,) * 3, out_specs=spec,
        check_vma=False,
    )  # fmt: skip
    checks.assert_close(jax.jit(sharded)(a, x, h0), want, 1e-6)

    loss = lambda a, x, h0: (scan(a, x, h0)[0] ** 2).sum()  # noqa: E731
    plain, again = jax.grad(loss)(a, x, h0), jax.grad(jax.checkpoint(loss))(a, x, h0)
    checks.assert_close(again, plain, 1e-7)

    twice = jax.lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, scan(a, s[1], h0)[0]), (0, x)
    )[1]
    checks.assert_close(twice, reference.linear_scan(a, want, h0)[0], 1e-6)

    permuted = jnp.asarray(np.asarray(x).transpose(2, 0, 1)).transpose(1, 2, 0)
    donated = jax.jit(lambda a, x, h0: scan(a, x, h0)[0], donate_argnums=1)
    checks.assert_close(donated(a, permuted, h0), want, 1e-6)


@slow
def test_batch_past_65535(scan):
    a, x, h0 = inputs((66000, 2, 2))
    checks.assert_close(scan(a, x, h0)[0], reference.linear_scan(a, x, h0)[0], 1e-6)


def test_trailing_axes_and_no_initial_state(scan):
    a, x = checks.uniform(0, 0, 1, 2, 9, 3, 2), checks.normal(1, 2, 9, 3, 2)
    h, last = scan(a, x)
    checks.assert_close((h, last), reference.linear_scan(a, x), 1e-6)
    assert scan(a[:, :0], x[:, :0])[0].shape == (2, 0, 3, 2)


def test_errors_name_the_value(scan):
    x = jnp.zeros((2, 4, 3))
    with pytest.raises(ValueError, match=r"\(2, 5, 3\).*\(2, 4, 3\)"):
        scan(jnp.zeros((2, 5, 3)), x)
    with pytest.raises(ValueError, match="h0 has shape"):
        scan(x, x, jnp.zeros((3,)))
    with pytest.raises(ValueError, match="int32"):
        scan(x.astype(jnp.int32), x)
    with pytest.raises(ValueError, match="'cpu'"):
        linear_scan(x, x, platform="cpu")


def test_gradient_kernel_alone(scan):
    a, x, h0 = inputs((1, 12, 4))
    dh, dlast = checks.normal(3, 1, 12, 4), checks.normal(4, 1, 4)
    h, _ = scan(a, x, h0)
    got = linear_scan_bwd(a, h, h0, dh, dlast, platform="tpu", interpret=True)
    checks.assert_close(got, reference.linear_scan_vjp(a, x, h0, dh, dlast), 2e-6)
