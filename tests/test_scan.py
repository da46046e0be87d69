"""Scans: values and gradients against float64 loops, properties, transformations, bad input."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import kernels_pallas
from fpr import _scan_cpu, scan
from fpr.scan import linear_scan, selective_scan
from tests.kernels_pallas import checks
from tests.reference import scan as reference

FORMS = ("sequential", "xla")
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "h0")


def linear_inputs(time, seed=0, batch=2, dim=5):
    r = np.random.default_rng(seed)
    shape = (batch, time, dim)
    a = r.uniform(0, 1, shape).astype(np.float32)
    x, dh = (r.normal(size=shape).astype(np.float32) for _ in range(2))
    h0, dlast = (r.normal(size=(batch, dim)).astype(np.float32) for _ in range(2))
    return a, x, h0, dh, dlast


def selective_inputs(time, seed=0, batch=2, dim=5, n=3):
    r = np.random.default_rng(seed)

    def normal(*shape):
        return r.normal(size=shape).astype(np.float32)

    return {
        "u": normal(batch, time, dim), "delta": normal(batch, time, dim),
        "A": -np.exp(normal(dim, n)), "B": normal(batch, time, n), "C": normal(batch, time, n),
        "D": normal(dim), "z": normal(batch, time, dim), "h0": normal(batch, dim, n),
    }  # fmt: skip


def close(actual, expected, tolerance=2e-6):
    expected = np.asarray(expected, np.float64)
    scale = max(np.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, atol=tolerance * scale)


def vjp(fn, args, cotangents):
    """Outputs and gradients under one jit; arguments are traced, so nothing is a constant."""

    @jax.jit
    def run(args, cotangents):
        out, pull = jax.vjp(fn, *args)
        return out, pull(cotangents)

    return run(tuple(args), cotangents)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("time", [1, 2, 3, 37])
@pytest.mark.parametrize("backend", FORMS)
def test_linear_scan_and_gradients(backend, time, reverse):
    a, x, h0, dh, dlast = linear_inputs(time)
    fn = functools.partial(linear_scan, reverse=reverse, backend=backend)
    (h, last), grads = vjp(fn, (a, x, h0), (dh, dlast))
    for mine, theirs in zip((h, last), reference.linear_scan(a, x, h0, reverse)):
        close(mine, theirs)
    for mine, theirs in zip(grads, reference.linear_scan_grad(a, x, h0, dh, dlast, reverse)):
        close(mine, theirs)


def test_long_scan_over_many_blocks():
    """Blocks that do not divide T, rows wider than a block, both directions."""
    for time, dim, reverse in ((1000, 700, False), (333, 700, True), (5, 40_000, True)):
        a, x, h0, dh, dlast = linear_inputs(time, batch=1, dim=dim)
        fn = functools.partial(linear_scan, reverse=reverse, backend="sequential")
        (h, _), grads = vjp(fn, (a, x, h0), (dh, dlast))
        close(h, reference.linear_scan(a, x, h0, reverse)[0])
        for mine, theirs in zip(grads, reference.linear_scan_grad(a, x, h0, dh, dlast, reverse)):
            close(mine, theirs)


@pytest.mark.parametrize("backend", FORMS)
def test_decays_at_the_edge(backend):
    """Decays of exactly 0 and 1, products that underflow, and decays above 1 and below 0."""
    a, x, h0, dh, dlast = linear_inputs(40)
    choices = np.float32([0.0, 1.0, 1e-30, 1e-38, -1.0, 1.5])
    a = np.random.default_rng(1).choice(choices, a.shape)
    fn = functools.partial(linear_scan, backend=backend)
    (h, _), grads = vjp(fn, (a, x, h0), (dh, dlast))
    close(h, reference.linear_scan(a, x, h0)[0])
    for mine, theirs in zip(grads, reference.linear_scan_grad(a, x, h0, dh, dlast)):
        assert np.isfinite(mine).all()
        close(mine, theirs)


@pytest.mark.parametrize("backend", FORMS)
def test_bfloat16_has_a_float32_carry(backend):
    """4096 additions of 1/256: a bfloat16 sum would stop at 1 (1 + 1/256 rounds to 1)."""
    x = jnp.full((1, 4096, 1), 1 / 256, jnp.bfloat16)
    h, last = jax.jit(functools.partial(linear_scan, backend=backend))(jnp.ones_like(x), x)
    assert h.dtype == last.dtype == jnp.bfloat16
    assert float(last[0, 0]) == 16.0
    a, x, h0, dh, dlast = (jnp.asarray(v, jnp.bfloat16) for v in linear_inputs(20))
    out, grads = vjp(functools.partial(linear_scan, backend=backend), (a, x, h0), (dh, dlast))
    exact = [np.asarray(v, np.float64) for v in (a, x, h0, dh, dlast)]
    for mine, theirs in zip(out, reference.linear_scan(*exact[:3])):
        close(mine, theirs, 1e-2)
    for mine, theirs in zip(grads, reference.linear_scan_grad(*exact)):
        assert mine.dtype == jnp.bfloat16
        close(mine, theirs, 1e-2)


def second(fn, count):
    """The gradient of the squared norm of a gradient, in all arguments."""
    every = tuple(range(count))

    def loss(*args):
        y, last = fn(*args)
        return jnp.sum(jnp.sin(y)) + jnp.sum(last**3)

    def norm(*args):
        return sum(jnp.sum(g**2) for g in jax.grad(loss, every)(*args))

    return jax.jit(jax.grad(norm, every))


def test_second_derivatives():
    def plain(a, x, h0):
        h, out = h0, []
        for t in range(a.shape[1]):
            h = a[:, t] * h + x[:, t]
            out.append(h)
        return jnp.stack(out, 1), h

    args = linear_inputs(3)[:3]
    for mine, theirs in zip(second(linear_scan, 3)(*args), second(plain, 3)(*args)):
        close(mine, theirs, 1e-5)


def plain_selective(u, delta, A, B, C, D=0.0, z=None, h0=None):
    """The equations as a Python loop over time, for autodiff."""
    h, out = h0, []
    for t in range(u.shape[1]):
        h = jnp.exp(delta[:, t, :, None] * A) * h
        h = h + (delta[:, t] * u[:, t])[:, :, None] * B[:, t, None]
        out.append(jnp.einsum("bdn,bn->bd", h, C[:, t]) + D * u[:, t])
    y = jnp.stack(out, 1)
    return (y if z is None else y * jax.nn.silu(z)), h


@pytest.mark.slow
def test_selective_second_derivatives():
    v = selective_inputs(4)
    args = tuple(v[k] for k in NAMES)
    for mine, theirs in zip(second(selective_scan, 8)(*args), second(plain_selective, 8)(*args)):
        close(mine, theirs, 1e-4)


@pytest.fixture(scope="module")
def jitted():
    return {
        reverse: jax.jit(functools.partial(linear_scan, reverse=reverse))
        for reverse in (False, True)
    }


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31), cut=st.sampled_from([1, 4, 11]))
def test_splitting_and_reversing(jitted, seed, cut):
    """A sequence in two pieces joined by h_last and h0; reverse is flipping in and out."""
    a, x, h0, *_ = linear_inputs(12, seed)
    h, last = jitted[False](a, x, h0)
    first, middle = jitted[False](a[:, :cut], x[:, :cut], h0)
    second, end = jitted[False](a[:, cut:], x[:, cut:], middle)
    close(jnp.concatenate([first, second], 1), h)
    close(end, last)
    backward, start = jitted[True](a[:, ::-1], x[:, ::-1], h0)
    close(backward[:, ::-1], h)
    close(start, last)


def test_broadcast_decay_and_trailing_axes():
    r = np.random.default_rng(0)
    x = r.normal(size=(2, 6, 3, 4)).astype(np.float32)
    a = r.uniform(size=(2, 6, 1, 4)).astype(np.float32)
    h, last = linear_scan(a, x)
    close(h, reference.linear_scan(np.broadcast_to(a, x.shape), x)[0])
    assert last.shape == (2, 3, 4)
    da = jax.grad(lambda a: linear_scan(a, x)[0].sum())(a)
    assert da.shape == a.shape


def test_constants_and_donated_inputs():
    """Constant operands of a native kernel abort XLA: the kernels must never see one."""
    a, x, h0, dh, dlast = linear_inputs(7, dim=8)
    close(jax.jit(lambda: linear_scan(a, x, h0))()[0], reference.linear_scan(a, x, h0)[0])
    loss = jax.jit(jax.grad(lambda x: jnp.vdot(linear_scan(a, x, h0)[0], dh)))
    close(loss(x), reference.linear_scan_grad(a, x, h0, dh, np.zeros_like(dlast))[1])
    v = selective_inputs(7, dim=8)
    close(jax.jit(lambda: selective_scan(**v))()[0], reference.selective_scan(**v)[0])
    grads = jax.jit(lambda: jax.grad(lambda v: selective_scan(**v)[0].sum())(v))()
    assert all(np.isfinite(g).all() for g in grads.values())
    donating = jax.jit(linear_scan, donate_argnums=(1,))
    close(donating(a, jnp.array(x), h0)[0], reference.linear_scan(a, x, h0)[0])


@pytest.mark.parametrize("block", [16, 64, 1 << 15])
def test_constants_on_every_grid_of_blocks(monkeypatch, block):
    """Grids of one block in time, one across samples, or many of both."""
    monkeypatch.setattr(_scan_cpu, "_BLOCK", block)
    for batch, time, dim in ((4, 2, 8), (1, 9, 8), (6, 11, 3)):
        a, x, h0, dh, dlast = linear_inputs(time, batch=batch, dim=dim)
        for reverse in (False, True):
            fn = functools.partial(linear_scan, reverse=reverse)
            pull = jax.jit(lambda args=(a, x, h0), ct=(dh, dlast), fn=fn: jax.vjp(fn, *args)[1](ct))
            expected = reference.linear_scan_grad(a, x, h0, dh, dlast, reverse)
            for mine, theirs in zip(pull(), expected):
                close(mine, theirs)
        v = selective_inputs(time, batch=batch, dim=dim)
        close(jax.jit(lambda v=v: selective_scan(**v))()[0], reference.selective_scan(**v)[0], 1e-5)


def test_no_temporaries_but_a_block():
    shape = jax.ShapeDtypeStruct((2, 1024, 64), jnp.float32)
    memory = jax.jit(lambda a, x: linear_scan(a, x)[0]).lower(shape, shape).compile()
    assert memory.memory_analysis().temp_size_in_bytes < 300_000
    wide = jax.ShapeDtypeStruct((2, 256, 64), jnp.float32)
    n = jax.ShapeDtypeStruct((2, 256, 16), jnp.float32)
    a = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    compiled = jax.jit(lambda *v: selective_scan(*v)[0]).lower(wide, wide, a, n, n).compile()
    states = 2 * 256 * 64 * 16 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < states / 4


def test_selective_scan_keeps_no_states():
    """States of (8, 256, 256) at N = 16 take 34 MB; 0.7 MB was measured."""
    wide, n = checks.struct(8, 256, 256), checks.struct(8, 256, 16)
    shapes = (wide, wide, checks.struct(256, 16), n, n)
    memory = jax.jit(lambda *v: selective_scan(*v)[0]).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 15e6


@pytest.mark.slow
def test_the_selective_gradient_keeps_no_states():
    """With skip and gate; 6.2 MB was measured."""
    wide, n = checks.struct(8, 256, 256), checks.struct(8, 256, 16)
    shapes = (wide, wide, checks.struct(256, 16), n, n, checks.struct(256), wide)
    grad = jax.jit(jax.grad(lambda *v: selective_scan(*v)[0].sum(), tuple(range(7))))
    assert grad.lower(*shapes).compile().memory_analysis().temp_size_in_bytes <= 15e6


def test_transformations():
    a, x, h0, *_ = linear_inputs(6)
    expected = reference.linear_scan(a, x, h0)[0]
    stacked = jax.jit(jax.vmap(linear_scan))(np.stack([a, a]), np.stack([x, 2 * x]))[0]
    close(stacked[1], reference.linear_scan(a, 2 * x)[0])
    over_x = jax.vmap(lambda x: linear_scan(a, x)[0])(np.stack([x, 2 * x]))
    close(over_x[1], reference.linear_scan(a, 2 * x)[0])

    def loss(x):
        return jnp.sum(jax.checkpoint(lambda x: linear_scan(a, x, h0)[0] ** 2)(x))

    dx = reference.linear_scan_grad(a, x, h0, 2 * expected, np.zeros_like(h0))[1]
    close(jax.jit(jax.grad(loss))(x), dx)
    close(jax.vmap(jax.grad(loss))(np.stack([x, x]))[1], dx)

    @jax.jit
    def repeat(x):
        def step(carry):
            i, x = carry
            return i + 1, linear_scan(a, x)[0]

        return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]

    twice = reference.linear_scan(a, reference.linear_scan(a, x)[0])[0]
    close(repeat(x), reference.linear_scan(a, twice)[0], 1e-5)

    def over_layers(x):
        return lax.scan(lambda x, _: (linear_scan(a, x)[0], None), x, None, length=2)[0]

    close(jax.jit(over_layers)(x), twice, 1e-5)
    assert np.isfinite(jax.jit(jax.grad(lambda x: over_layers(x).sum()))(x)).all()


def test_inside_shard_map():
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("batch")
    a, x, h0, dh, dlast = linear_inputs(6)
    v = selective_inputs(6)
    args = tuple(v[k] for k in ("u", "delta", "B", "C"))

    def linear(a, x):
        return jax.shard_map(
            lambda a, x: linear_scan(a, x)[0], mesh=mesh, in_specs=spec, out_specs=spec
        )(a, x)

    def selective(u, delta, B, C):
        def run(u, delta, B, C):
            return selective_scan(u, delta, v["A"], B, C)[0]

        return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)(u, delta, B, C)

    h, grads = vjp(linear, (a, x), dh)
    close(h, reference.linear_scan(a, x)[0])
    expected = reference.linear_scan_grad(a, x, 0 * h0, dh, 0 * dlast)
    close(grads[0], expected[0])
    y, _ = vjp(selective, args, dh)
    close(y, reference.selective_scan(args[0], args[1], v["A"], *args[2:])[0], 1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_accelerators(platform):
    """The choice is made at lowering, so a CPU can lower for others."""
    shape = jax.ShapeDtypeStruct((2, 64, 128), jnp.float32)
    auto = jax.jit(jax.grad(lambda a, x: linear_scan(a, x)[0].sum(), (0, 1)))
    text = jax.export.export(auto, platforms=[platform])(shape, shape).mlir_module()
    # GPU kernels are not chosen by themselves before they have run on a card.
    assert ("tpu_custom_call" in text, "mosaic_gpu" in text) == (platform == "tpu", False)
    grad = jax.grad(lambda a, x: linear_scan(a, x, backend="pallas")[0].sum(), (0, 1))
    program = jax.export.export(jax.jit(grad), platforms=[platform])(shape, shape)
    kernel = "tpu_custom_call" if platform == "tpu" else "mosaic_gpu"
    assert kernel in program.mlir_module()
    stacked = jax.ShapeDtypeStruct((3, 2, 64, 128), jnp.float32)
    over = jax.jit(jax.vmap(grad, (0, None)))
    assert kernel in jax.export.export(over, platforms=[platform])(stacked, shape).mlir_module()
    n = jax.ShapeDtypeStruct((2, 64, 16), jnp.float32)
    a = jax.ShapeDtypeStruct((128, 16), jnp.float32)
    grad = jax.grad(lambda *v: selective_scan(*v)[0].sum(), (0, 1, 2, 3, 4))
    jax.export.export(jax.jit(grad), platforms=[platform])(shape, shape, a, n, n)


@pytest.mark.parametrize("time", [1, 2, 37, 70])
@pytest.mark.parametrize("backend", FORMS)
def test_selective_scan(backend, time):
    v = selective_inputs(time) | {"delta_bias": np.float32([0.1, -3, 0, 2, 1])}
    expected = reference.selective_scan(**v, delta_softplus=True)
    run = functools.partial(selective_scan, delta_softplus=True, backend=backend)
    for mine, theirs in zip(jax.jit(run)(**v), expected):
        close(mine, theirs, 1e-5)


@pytest.fixture
def kernel(monkeypatch):
    """backend="pallas" runs the TPU kernel in Pallas' interpreter; the arguments it was given."""
    given = []
    run = functools.partial(kernels_pallas.selective_scan, interpret=True)

    def recording(*args, **kwargs):
        given.append(kwargs)
        return run(*args, **kwargs)

    def dispatch(backend, sequential, xla, pallas, outs, *args):
        results = pallas(*args, platform="tpu")
        assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in outs]
        return results

    monkeypatch.setattr(kernels_pallas, "selective_scan", recording)
    monkeypatch.setattr(scan, "dispatch", dispatch)
    return given


@pytest.mark.parametrize(
    "ends",
    [("D", "z"), *(pytest.param(e, marks=pytest.mark.slow) for e in [("D",), ("z",), ()])],
)
def test_the_kernel_does_skip_and_gate(kernel, ends):
    """Values are those of the float64 reference, gradients those of a plain loop by autodiff."""
    v = selective_inputs(4)
    v["delta"] = np.abs(v["delta"])
    names = [k for k in NAMES if k not in ("D", "z") or k in ends]
    r = np.random.default_rng(6)
    cotangents = (np.float32(r.normal(size=(2, 4, 5))), np.float32(r.normal(size=(2, 5, 3))))

    def run(*args):
        return selective_scan(**dict(zip(names, args)), backend="pallas")

    args = [v[k] for k in names]
    values, grads = vjp(run, args, cotangents)
    assert kernel
    assert all({"D", "z"} & set(k) == set(ends) for k in kernel)
    expected = reference.selective_scan(**dict(zip(names, args)))
    for mine, theirs in zip(values, expected):
        close(mine, theirs, 1e-5)
    _, expected = vjp(lambda *a: plain_selective(**dict(zip(names, a))), args, cotangents)
    for mine, theirs in zip(grads, expected):
        close(mine, theirs, 1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_gate_is_an_operand_of_the_lowered_kernel(platform):
    """The kernel reads a further (B, T, D), and no gate is left outside it."""
    wide, n = checks.struct(2, 32, 128), checks.struct(2, 32, 16)
    shapes = (wide, wide, checks.struct(128, 16), n, n)

    def forward(*args):
        return selective_scan(*args, backend="pallas")[0]

    bare = checks.lower(forward, platform, *shapes)
    full = checks.lower(forward, platform, *shapes, checks.struct(128), wide)
    assert checks.kernel_bytes(full) - checks.kernel_bytes(bare) == 4 * 2 * 32 * 128
    assert "logistic" not in full


@pytest.mark.parametrize("backend", FORMS)
def test_selective_scan_gradients(backend):
    """Against central differences of the float64 reference, one random direction per input."""
    v = selective_inputs(37, batch=1)
    r = np.random.default_rng(5)
    dy, dlast = r.normal(size=(1, 37, 5)), r.normal(size=(1, 5, 3))

    def run(*args):
        return selective_scan(**dict(zip(NAMES, args)), delta_softplus=True, backend=backend)

    cotangents = (np.float32(dy), np.float32(dlast))
    _, grads = vjp(run, [v[k] for k in NAMES], cotangents)
    for name, grad in zip(NAMES, grads):
        way, step = r.normal(size=v[name].shape), 1e-5

        def loss(sign, name=name, way=way, step=step):
            moved = v | {name: np.float64(v[name]) + sign * step * way}
            y, last = reference.selective_scan(**moved, delta_softplus=True)
            return np.sum(y * dy) + np.sum(last * dlast)

        slope = (loss(1) - loss(-1)) / (2 * step)
        assert abs(np.sum(grad * way) - slope) < 2e-4 * (np.linalg.norm(grad) + 1), name


def test_selective_scan_bfloat16_and_plain():
    v = selective_inputs(40)
    bare = {k: v[k] for k in ("u", "delta", "A", "B", "C")} | {"delta": np.abs(v["delta"])}
    close(selective_scan(**bare)[0], reference.selective_scan(**bare)[0], 1e-5)
    half = {k: jnp.asarray(x, jnp.bfloat16) for k, x in bare.items()}
    y, last = selective_scan(**half)
    assert y.dtype == jnp.bfloat16
    assert last.dtype == jnp.float32
    exact = {k: np.asarray(x, np.float64) for k, x in half.items()}
    close(y, reference.selective_scan(**exact)[0], 1e-2)
    grads = jax.grad(lambda v: selective_scan(**v)[0].astype(jnp.float32).sum())(half)
    assert all(g.dtype == jnp.bfloat16 for g in grads.values())


def test_selective_scan_under_strong_decay():
    """exp(Δ A) underflows to 0 or is exactly 1: no NaN in values or gradients."""
    v = selective_inputs(40)
    v["delta"] = np.random.default_rng(2).choice(np.float32([0, 1e-4, 50, 3000]), v["delta"].shape)
    y, _ = jax.jit(selective_scan)(**v)
    close(y, reference.selective_scan(**v)[0], 1e-5)
    grads = jax.jit(jax.grad(lambda v: selective_scan(**v)[0].sum()))(v)
    assert all(np.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"x": np.zeros((2, 0, 3), np.float32), "a": np.zeros((2, 0, 3), np.float32)}, "T = 0"),
        ({"a": np.zeros((2, 4, 2), np.float32)}, "must broadcast"),
        ({"h0": np.zeros((2, 4), np.float32)}, "h0 has shape"),
        ({"backend": "cuda"}, "auto, pallas, xla, sequential"),
        ({"a": np.ones((2, 4, 3), int), "x": np.ones((2, 4, 3), int)}, "floating"),
    ],
)
def test_bad_input(kwargs, message):
    good = {"a": np.zeros((2, 4, 3), np.float32), "x": np.zeros((2, 4, 3), np.float32)}
    with pytest.raises(ValueError, match=message):
        linear_scan(**good | kwargs)


def test_bad_selective_input():
    v = selective_inputs(4)
    with pytest.raises(ValueError, match="T = 0"):
        selective_scan(
            **{k: x[:, :0] if k in ("u", "delta", "B", "C") else x for k, x in v.items()}
        )
    with pytest.raises(ValueError, match="delta_bias has shape"):
        selective_scan(**v, delta_bias=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="B has shape"):
        selective_scan(**v | {"B": v["B"][:, :2]})


def test_pallas_where_there_is_none():
    a, x, *_ = linear_inputs(4)
    with pytest.raises(NotImplementedError, match=r"[Pp]latform"):
        jax.jit(functools.partial(linear_scan, backend="pallas"))(a, x)
    with jax.enable_x64(True), pytest.raises(ValueError, match="takes float32"):
        linear_scan(a.astype(np.float64), x.astype(np.float64), backend="pallas")
