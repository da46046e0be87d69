"""The fused fixed-point iteration: one pass, its gradient, its bytes, and the point it reaches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from fpr.fixed_point_scan import mixer_weights
from kernels_pallas import Iterate, common, fused_fixed_point, fused_fixed_point_gpu
from tests.kernels_pallas import checks
from tests.reference import kernels as reference


def inputs(shape, rank=2, dtype=jnp.float32):
    """decay, bx, units, the two iterates and h0 for (B, T, D)."""
    batch, time, dim = shape
    units = np.random.default_rng(3).normal(size=(batch, time, rank, dim))
    units /= np.maximum(np.linalg.norm(units, axis=-1, keepdims=True), 1e-5)
    return (
        checks.uniform(2, 0, 1, *shape, dtype=dtype),
        checks.normal(1, *shape, dtype=dtype),
        jnp.asarray(units, dtype),
        Iterate(checks.uniform(4, 0, 1, batch), checks.normal(5, batch, time, rank)),
        Iterate(checks.uniform(6, 0, 1, batch), checks.normal(7, batch, time, rank)),
        checks.normal(8, batch, dim),
    )


def fused(*args, **options):
    return fused_fixed_point(*args, **{"platform": "tpu", "interpret": True, **options})


def check(args, got, tolerance=1e-5):
    """along, residual, h against float64; h within the rounding of its type."""
    along, residual, h = got
    want_along, want_residual, want_h = reference.fixed_point_measure(*args)
    checks.assert_close((along, residual), (want_along, want_residual), tolerance)
    assert h.dtype == args[1].dtype
    checks.assert_close(h, want_h, checks.TOLERANCE[h.dtype.name])


@pytest.mark.parametrize(
    ("shape", "rank", "dtype"),
    [((1, 1, 1), 1, jnp.float32), ((2, 21, 12), 2, jnp.float32), ((2, 20, 300), 1, jnp.bfloat16)],
)
def test_tpu_matches_float64(shape, rank, dtype):
    args = inputs(shape, rank, dtype)
    check(args, fused(*args, keep=True, chunk=16))


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30])
def test_decays_at_the_edge(value):
    decay, *rest = inputs((1, 21, 6), 1)
    args = (jnp.full_like(decay, value), *rest)
    check(args, fused(*args, keep=True, chunk=8))


@pytest.mark.parametrize("mixer", ["householder", "dplr"])
def test_iterating_reaches_the_fixed_point_of_the_dense_recurrence(mixer):
    """Contractive mixers (scale 1), undamped and damped, inside a while_loop."""
    decay, bx, units, *_ = inputs((2, 21, 6), 2)
    decay = 0.2 + 0.6 * decay
    # Two unit vectors: half of each keeps their sum contractive too.
    alpha = checks.uniform(9, 0, 0.5, 2, 21, 2)
    overlap = jnp.einsum("btid,btjd->btij", units, units) if mixer == "householder" else None

    def body(s, eta):
        step, y, along, _, _ = s
        new = Iterate(jnp.ones(2), mixer_weights(along, alpha, overlap, 1.0))
        fresh, residual, h = fused(decay, bx, units, new, y, keep=True, chunk=8)
        move = lambda new, old: eta * new + (1 - eta) * old  # noqa: E731
        return step + 1, jax.tree.map(move, new, y), move(fresh, along), residual, h

    start = jnp.einsum("btrd,btd->btr", units, bx)
    first = 0, Iterate(jnp.zeros(2), jnp.zeros_like(start)), start, jnp.full(2, jnp.inf)
    keep = lambda s: (s[0] < 400) & (s[3].max() > 3e-7)  # noqa: E731
    solve = jax.jit(lambda eta: jax.lax.while_loop(
        keep, functools.partial(body, eta=eta), (*first, jnp.zeros_like(bx))
    ))  # fmt: skip
    want = reference.fixed_point_dense(bx, decay, units, alpha, 1.0, mixer)
    for eta in (1.0, 0.7):
        steps, *_, h = solve(eta)
        assert steps < 400
        checks.assert_close(h, want, 2e-5)


def test_gradient_is_that_of_the_plain_form():
    args = inputs((1, 6, 5), 2)
    cts = checks.normal(9, 1, 6, 2), checks.normal(10, 1, 6, 5)

    def plain(decay, bx, units, new, old, h0):
        mixed = jnp.einsum("btr,btrd->btd", new.weights, units)
        x, state, out = (1 - decay) * (new.mass * bx - mixed), new.mass[:, None] * h0, []
        for t in range(6):
            state = decay[:, t] * state + x[:, t]
            out.append(state)
        h = jnp.stack(out, 1)
        along = jnp.einsum("btrd,btd->btr", units, bx - h)
        return (along * cts[0]).sum() + (h * cts[1]).sum()

    def loss(*args):
        along, _, h = fused(*args, keep=True)
        return (along * cts[0]).sum() + (h * cts[1]).sum()

    every = tuple(range(6))
    got = jax.jit(jax.grad(loss, every))(*args)
    checks.assert_close(got, jax.jit(jax.grad(plain, every))(*args), 1e-5)


SIMULATED = pltpu.InterpretParams(detect_races=True, random_seed=11, num_cores_or_threads=2)


def test_order_and_races():
    args = inputs((3, 21, 6), 1)
    check(args, fused(*args, keep=True, chunk=8, interpret=SIMULATED))
    assert not checks.races_found()


@pytest.mark.slow
def test_wrong_order_is_caught(monkeypatch):
    """With time marked parallel: right under interpret=True, a race in the simulator."""
    axes = pltpu.GridDimensionSemantics.PARALLEL
    wrong = pltpu.CompilerParams(dimension_semantics=[axes] * 2)
    monkeypatch.setattr(common, "time_semantics", lambda *_, **__: wrong)
    args = inputs((1, 30, 6), 1)
    check(args, fused(*args, keep=True, chunk=8))
    fused(*args, chunk=8, interpret=SIMULATED)
    assert checks.races_found()


@pytest.mark.slow
def test_vmap_remat_donation():
    args = inputs((2, 9, 5), 1)
    stacked = jax.tree.map(lambda v: jnp.stack([v, 0.5 * v]), args)
    got = jax.vmap(functools.partial(fused, keep=True))(*stacked)
    for k in range(2):
        check(*(jax.tree.map(lambda v, k=k: v[k], tree) for tree in (stacked, got)))
    loss = lambda decay: (fused(decay, *args[1:])[0] ** 2).sum()  # noqa: E731
    checks.assert_close(jax.grad(jax.checkpoint(loss))(args[0]), jax.grad(loss)(args[0]), 1e-6)
    # Not contiguous in memory, and given away.
    turned = jnp.asarray(np.asarray(args[1]).transpose(2, 0, 1)).transpose(1, 2, 0)
    run = jax.jit(functools.partial(fused, keep=True), donate_argnums=1)
    check(args, run(args[0], turned, *args[2:]))


@pytest.mark.parametrize(
    ("shape", "chunk", "rank"),
    [((1, 20, 5), 16, 1), pytest.param((1, 9, 130), None, 3, marks=pytest.mark.slow)],
)
def test_gpu_matches_float64(shape, chunk, rank):
    """Time in two spans; two blocks of channels."""
    args = inputs(shape, rank)
    interpret = checks.gpu_interpreter()
    got = fused(*args, keep=True, platform="gpu", chunk=chunk, interpret=interpret)
    check(args, got)
    assert not checks.gpu_races_found()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 8])
def test_gpu_two_channels_a_thread(rank, monkeypatch):
    monkeypatch.setattr(fused_fixed_point_gpu.linear_scan_gpu, "FILL", 1)
    args = inputs((1, 20, 300), rank, jnp.bfloat16)
    got = fused(*args, keep=True, platform="gpu", interpret=checks.gpu_interpreter())
    check(args, got)


TARGETS = {"tpu": "tpu", "gpu": "cuda"}


def shapes(batch, time, dim, rank, dtype):
    """What `inputs` makes, as shapes."""
    wide = checks.struct(batch, time, dim, dtype=dtype)
    iterate = Iterate(checks.struct(batch), checks.struct(batch, time, rank))
    units = checks.struct(batch, time, rank, dim, dtype=dtype)
    return wide, wide, units, iterate, iterate, checks.struct(batch, dim)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        (8, 4096, 2048, 2),
        pytest.param((2, 1, 1, 1), marks=pytest.mark.slow),
        pytest.param((1, 4096, 2048, 14), marks=pytest.mark.slow),
        pytest.param((70000, 4, 64, 3), marks=pytest.mark.slow),
    ],
)
def test_lowers_with_gradient(shape, dtype, platform):
    """Also a batch past 65,535, and the rank that takes the most shared memory."""
    run = functools.partial(fused_fixed_point, keep=True, platform=platform)
    args = shapes(*shape, dtype)
    calls = checks.kernel_calls(checks.lower(run, TARGETS[platform], *args))
    assert calls == (2 if platform == "gpu" and shape[0] == 1 else 1)  # spans: two passes
    loss = lambda *a: (run(*a)[2].astype(jnp.float32) ** 2).sum()  # noqa: E731
    grad = jax.grad(loss, tuple(range(6)))
    assert checks.kernel_calls(checks.lower(grad, TARGETS[platform], *args)) >= 2


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(("rank", "most"), [(1, 1.1), (2, 1.45)])
@pytest.mark.parametrize("dim", [1024, 2048])
def test_bytes_are_at_most_one_and_a_half_scans(dim, rank, most, platform):
    """Counted from the kernels' arguments and results in the lowered program."""
    size = 8, 4096, dim
    args = shapes(*size, rank, jnp.bfloat16)[:-1]
    one = functools.partial(fused_fixed_point, platform=platform)
    text = checks.lower(lambda *a: one(*a)[:2], TARGETS[platform], *args)
    assert 0 < checks.kernel_bytes(text) < most * 3 * 2 * np.prod(size)


def test_errors_name_the_value():
    args = inputs((1, 4, 3), 1)
    with pytest.raises(ValueError, match=r"new.weights has shape \(1, 4, 2\)"):
        fused(*args[:3], Iterate(jnp.ones(1), jnp.zeros((1, 4, 2))), *args[4:])
    with pytest.raises(ValueError, match="rank 15 must be 1 to 14"):
        fused(*inputs((1, 4, 3), 15), platform="gpu")
    with pytest.raises(ValueError, match="'cpu'"):
        fused(*args, platform="cpu")
