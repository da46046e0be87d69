"""fixed_point and trace: halting per sample, failures, resuming, closures, errors."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fpr import Solution, fixed_point, trace
from fpr.adjoints import Implicit, Neumann, OneStep, Unrolled
from fpr.solvers import Damped

pytestmark = pytest.mark.usefixtures("fast_compile")
B, T, D = 5, 3, 4
WRONG: Any = 2.5  # A value of a type that the signature does not allow.
CAPS: Any = np.arange(2)
SOLVER = Damped(tolerance=1e-4, max_steps=60, decay=1.0)
RULES = [OneStep(), OneStep(2, refine=True), Neumann(3), Implicit(max_steps=60), Unrolled()]
IDS = ["one_step", "refine", "neumann", "implicit", "unrolled"]
rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(D, D)) / np.sqrt(D), jnp.float32)
C = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
# Fast, slow, a two-cycle that never converges, very fast, medium.
GAIN = jnp.array([0.3, 0.8, -40.0, 0.01, 0.5])
X = {"gain": GAIN, "c": C}
Z0 = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)


def f(w, x, z):
    eye = jnp.eye(D)
    mix = jnp.where(x["gain"][:, None, None] < 0, eye, w)
    return jnp.tanh(x["gain"][:, None, None] * (z @ mix)) + 0.5 * x["c"]


@partial(jax.jit, static_argnames=("solver", "adjoint"))
def solve(w, x, z0, state=None, max_steps=None, *, solver=SOLVER, adjoint=OneStep()):
    return fixed_point(
        f, w, x, z0, solver=solver, adjoint=adjoint, state=state, max_steps=max_steps
    )


def take(tree, index):
    return jax.tree.map(lambda a: a[np.asarray(index)], tree)


def pick(solution, index):
    """The solution of some samples, without the state."""
    names = ("value", "steps", "residual", "converged")
    return solution._replace(**{name: take(getattr(solution, name), index) for name in names})


def assert_same(a, b, *, exact):
    """Two solutions of the same samples."""
    np.testing.assert_array_equal(a.steps, b.steps)
    np.testing.assert_array_equal(a.converged, b.converged)
    check = np.testing.assert_array_equal if exact else partial(
        np.testing.assert_allclose, rtol=2e-5, atol=2e-6
    )  # fmt: skip
    check(a.residual, b.residual)
    jax.tree.map(check, a.value, b.value)


def bad_map(w, x, z):
    """Like f, but sample i turns to x["bad"] in the iteration after |z| has grown past a bound."""
    z, count = z["z"], z["count"]
    out = f(w, x, z)
    hit = (count >= x["when"]) & (x["when"] > 0)
    out = jnp.where(hit[:, None, None], x["bad"][:, None, None], out)
    return {"z": out, "count": count + 1.0}


@pytest.fixture(scope="module")
def whole():
    return solve(W, X, Z0)


def test_samples_take_their_own_number_of_steps(whole):
    assert isinstance(whole, Solution)
    assert len(set(whole.steps.tolist())) >= 4
    np.testing.assert_array_equal(whole.converged, [True, True, False, True, True])
    assert int(whole.steps[2]) == 60
    again = f(W, X, whole.value)
    good = np.array([0, 1, 3, 4])
    np.testing.assert_allclose(again[good], whole.value[good], atol=1e-3)
    assert (whole.residual[good] < 1e-4).all()


@pytest.mark.parametrize("index", [[0], [1], [2], [4, 2], [3, 3], [4, 3, 2, 1, 0]])
def test_a_sample_is_the_same_alone_and_in_any_batch(whole, index):
    part = solve(W, take(X, index), Z0[np.asarray(index)])
    chaotic = [i for i, j in enumerate(index) if j != 2]
    expected = pick(whole, index)
    np.testing.assert_array_equal(part.steps, expected.steps)
    if chaotic:
        assert_same(
            pick(part, chaotic),
            pick(expected, chaotic),
            exact=False,
        )


def test_a_sample_that_never_converges_changes_nobody(whole):
    calm = solve(W, X | {"gain": GAIN.at[2].set(0.1)}, Z0)
    rest = [0, 1, 3, 4]
    assert bool(calm.converged[2])
    assert_same(
        pick(calm, rest),
        pick(whole, rest),
        exact=True,
    )


def test_resuming_equals_one_long_run():
    long = solve(W, X, Z0, max_steps=20)
    half = solve(W, X, Z0, max_steps=7)
    rest = solve(W, X, jnp.zeros_like(Z0), half.state, max_steps=13)
    assert_same(rest, long, exact=True)
    jax.tree.map(np.testing.assert_array_equal, rest.state, long.state)


def test_caps_may_be_traced_and_differ_by_sample(whole):
    caps = jnp.array([3, 60, 5, 0, 2])
    capped = solve(W, X, Z0, max_steps=caps)
    np.testing.assert_array_equal(capped.steps, jnp.minimum(caps, whole.steps))
    np.testing.assert_array_equal(capped.converged, [False, True, False, False, False])
    np.testing.assert_array_equal(capped.value[3], Z0[3])
    assert np.isinf(capped.residual[3])
    for i in (0, 2, 4):
        alone = solve(W, X, Z0, max_steps=caps[i])
        np.testing.assert_array_equal(alone.value[i], capped.value[i])
        np.testing.assert_array_equal(alone.residual[i], capped.residual[i])
    np.testing.assert_array_equal(capped.value[1], whole.value[1])
    draw = jax.jit(
        lambda key: solve(W, X, Z0, max_steps=jax.random.randint(key, (B,), 1, 9)).steps
    )(jax.random.key(3))
    assert (draw <= 8).all()


def test_bfloat16_f_with_a_float32_iterate():
    def half(w, x, z):
        return f(w.astype(jnp.bfloat16), jax.tree.map(lambda a: a.astype(jnp.bfloat16), x), z
                 .astype(jnp.bfloat16)).astype(jnp.bfloat16)  # fmt: skip

    x = X | {"gain": jnp.clip(GAIN, 0.0)}

    @partial(jax.jit, static_argnames=("g", "adjoint"))
    def run(w, g, adjoint):
        def loss(w):
            s = fixed_point(
                g, w, x, Z0, solver=Damped(tolerance=0.02, max_steps=30), adjoint=adjoint
            )
            return jnp.sum(s.value**2), s

        return jax.value_and_grad(loss, has_aux=True)(w)

    for adjoint in (OneStep(refine=True), Implicit(1e-2, 20)):
        (_, low), dw = run(W, half, adjoint)
        (_, full), dw32 = run(W, f, adjoint)
        assert low.value.dtype == jnp.float32
        assert low.residual.dtype == jnp.float32
        assert dw.dtype == W.dtype
        np.testing.assert_allclose(low.value, full.value, atol=0.1)
        np.testing.assert_allclose(dw, dw32, atol=0.15 * float(jnp.abs(dw32).max()))


def test_pytrees_and_scalars_per_sample():
    def g(params, x, z):
        y, (s,) = z["y"], z["s"]
        new = jnp.tanh(0.5 * y @ params["w"] + s[:, None, None] + x[0]["c"])
        return {"y": new, "s": (0.3 * s + 0.1 * new.mean((1, 2)) + x[1],)}

    x = ({"c": C}, jnp.linspace(-1, 1, B))
    z0 = {"y": jnp.zeros((B, T, D)), "s": (jnp.zeros((B,)),)}
    s = fixed_point(g, {"w": W}, x, z0, solver=Damped(tolerance=1e-5, max_steps=100))
    assert s.converged.all()
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), g({"w": W}, x, s.value), s.value)
    assert s.value["s"][0].shape == (B,)
    root = fixed_point(lambda p, x, z: 0.5 * (z + x / z), (), jnp.array([4.0, 9.0]), jnp.ones(2))
    np.testing.assert_allclose(root.value, [2.0, 3.0], rtol=0.05)


# NaN and inf.


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_nan_and_inf_end_one_sample_only(bad):
    when = jnp.array([0.0, 3.0, 0.0, 1.0, 6.0])
    x = X | {"when": when, "bad": jnp.full((B,), bad)}
    z0 = {"z": Z0, "count": jnp.zeros((B,))}
    calm = x | {"when": jnp.zeros((B,))}
    run = jax.jit(lambda x: fixed_point(bad_map, W, x, z0, solver=SOLVER))
    # The counter keeps growing, so its residual is 1/count: no sample converges in 60 steps.
    s, reference = run(x), run(calm)
    np.testing.assert_array_equal(s.converged, False)
    np.testing.assert_array_equal(s.steps, [60, 4, 60, 2, 7])
    for i in (1, 3, 4):
        assert np.isinf(s.residual[i])
        assert int(s.value["count"][i]) == int(when[i])  # The last finite iterate.
        path = fixed_point(bad_map, W, calm, z0, solver=SOLVER, max_steps=int(when[i]))
        np.testing.assert_allclose(s.value["z"][i], path.value["z"][i], rtol=1e-5, atol=1e-6)
    for i in (0, 2):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b[i]), s, reference)


@pytest.mark.parametrize("halting", ["sample", "batch", "never"])
def test_all_samples_failing_ends_at_once(halting):
    solver = Damped(max_steps=10**9, halting=halting)
    s = fixed_point(lambda p, x, z: z * jnp.nan, (), (), Z0, solver=solver)
    np.testing.assert_array_equal(s.steps, 1)
    np.testing.assert_array_equal(s.value, Z0)
    np.testing.assert_array_equal(s.residual, np.inf)
    assert not s.converged.any()


def test_a_failure_does_not_hold_a_batch_back():
    x = X | {"gain": jnp.abs(GAIN).at[2].set(0.5)}
    x |= {"c": C.at[1].set(jnp.nan)}
    s = solve(W, x, Z0, solver=Damped(tolerance=1e-3, halting="batch", max_steps=500))
    assert int(s.steps[1]) == 1
    assert int(s.steps[0]) < 100
    np.testing.assert_array_equal(s.converged, [True, False, True, True, True])


def sound_only(w, x, z):
    """NaN and an infinite derivative where x["a"] < 0; square roots elsewhere."""
    return jnp.sqrt(x["a"][:, None] + jnp.square(0.3 * jnp.tanh(z @ w)) + x["b"][:, None] * 0)


@pytest.mark.parametrize("adjoint", RULES, ids=IDS)
def test_gradient_equals_that_of_the_batch_without_the_bad_sample(adjoint):
    a = jnp.array([1.0, 0.5, -2.0, 2.0])
    z0 = jnp.ones((4, D))
    keep = np.array([0, 1, 3])

    def grads(a, z0):
        def loss(w, a):
            s = fixed_point(
                sound_only, w, {"a": a, "b": a}, z0,
                solver=Damped(tolerance=1e-5, max_steps=40), adjoint=adjoint,
            )  # fmt: skip
            return jnp.sum(jnp.sin(s.value)), s.converged

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(W, a)

    (dw, da), ok = grads(a, z0)
    (dw_kept, da_kept), _ = grads(a[keep], z0[keep])
    np.testing.assert_array_equal(ok, [True, True, False, True])
    np.testing.assert_allclose(dw, dw_kept, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(da[keep], da_kept, rtol=1e-5)
    assert float(da[2]) == 0.0
    (dw, da), _ = grads(-a.at[2].set(2.0), z0)  # Nobody is left.
    np.testing.assert_array_equal(dw, 0.0)
    np.testing.assert_array_equal(da, 0.0)


@pytest.mark.parametrize("adjoint", RULES, ids=IDS)
def test_gradient_where_the_derivative_itself_is_infinite(adjoint):
    # d sqrt(z)/dz = inf at z = 0 and sqrt(0)/0 = NaN: 0 · inf must not reach the shared parameter.
    def g(w, x, z):
        root = jnp.sqrt(z * x[:, None])
        return w * root + 0.1 * root / root

    x, z0 = jnp.array([1.0, 0.0, 0.5]), jnp.ones((3, 2))

    def loss(w, x, z0):
        s = fixed_point(g, w, x, z0, solver=Damped(max_steps=8), adjoint=adjoint)
        return s.value.sum()

    grad = jax.jit(jax.grad(loss))
    keep = np.array([0, 2])
    expected = grad(0.5, x[keep], z0[keep])
    assert np.isfinite(expected)
    np.testing.assert_allclose(grad(0.5, x, z0), expected, rtol=1e-5)


# return_best


def test_return_best_returns_the_iterate_of_its_residual():
    x = X | {"gain": jnp.array([0.3, 2.0, -40.0, 5.0, 3.0])}
    for tolerance in (1e-3, 0.0):
        s = solve(W, x, Z0, solver=Damped(tolerance=tolerance, max_steps=15, return_best=True))
        new = f(W, x, s.value)
        change = jnp.abs(new - s.value).max(-1) / (jnp.abs(new).max(-1) + 1e-8)
        np.testing.assert_allclose(change.max(-1), s.residual, rtol=1e-3, atol=1e-5)
        np.testing.assert_array_equal(s.residual, s.state.best_residual)
        path = trace(f, W, x, Z0, solver=Damped(tolerance=tolerance), steps=15)
        np.testing.assert_allclose(s.residual, path.residual.min(0), rtol=1e-3, atol=1e-5)


def test_return_best_is_defined_when_nothing_improves():
    solver = Damped(max_steps=9, return_best=True, decay=1.0)
    s = fixed_point(lambda p, x, z: z * jnp.nan, (), (), Z0, solver=solver)
    np.testing.assert_array_equal(s.value, Z0)
    np.testing.assert_array_equal(s.residual, np.inf)
    s = fixed_point(lambda p, x, z: 2 * z, (), (), jnp.ones((2, 3)), solver=solver)
    np.testing.assert_array_equal(s.value, 1.0)  # The residual is 1/2 for ever: z0 stays the best.
    np.testing.assert_array_equal(s.residual, 0.5)
    np.testing.assert_array_equal(s.steps, 9)
    worse = fixed_point(lambda p, x, z: z + z**3, (), (), jnp.ones((2, 3)), solver=solver)
    np.testing.assert_array_equal(worse.value, 1.0)
    assert not worse.converged.any()


# trace


def test_trace_is_the_path_of_fixed_point(whole):
    path = jax.jit(lambda: trace(f, W, X, Z0, solver=SOLVER, steps=60))()
    assert path.value.shape == (60, B, T, D)
    assert path.residual.shape == path.step_size.shape == path.active.shape == (60, B)
    np.testing.assert_array_equal(path.active.sum(0), whole.steps)
    np.testing.assert_allclose(path.residual[-1], whole.residual, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(path.value[-1], whole.value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(path.value[0], f(W, X, Z0), rtol=1e-5, atol=1e-6)
    for i in (0, 1, 3, 4):  # The last one is the unstable two-cycle.
        n = int(whole.steps[i])
        part = solve(W, X, Z0, max_steps=n - 1)
        np.testing.assert_allclose(path.value[n - 2, i], part.value[i], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(path.value[n - 1 :, i], path.value[-1:, i].repeat(61 - n, 0))
    np.testing.assert_array_equal(path.best_residual, np.minimum.accumulate(path.residual, 0))


# Closures


@pytest.mark.parametrize("adjoint", RULES[1:4:2] + RULES[4:], ids=IDS[1:4:2] + IDS[4:])
def test_closures_get_the_gradient_of_explicit_parameters(adjoint):
    solver = Damped(tolerance=1e-5, max_steps=25)
    c, key = C[..., 0], jax.random.key(0)

    def explicit(w, s, n, key):
        def g(p, x, z):
            w, s = p
            return jnp.tanh(0.5 * z @ w + s * x + 0.1 * n) + 0.1 * jax.random.normal(key, (T,))

        return fixed_point(g, (w, s), c, jnp.zeros_like(c), solver=solver, adjoint=adjoint)

    def closed(w, s, n, key):
        def g(p, x, z):
            return jnp.tanh(0.5 * z @ w + s * c + 0.1 * n) + 0.1 * jax.random.normal(key, (T,))

        return fixed_point(g, (), (), jnp.zeros_like(c), solver=solver, adjoint=adjoint)

    def grad(solve):
        loss = lambda w, s, n, key: jnp.sum(solve(w, s, n, key).value ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    # Implicit solves both to its own tolerance.
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    w = W[:T, :T]
    expected = grad(explicit)(w, 0.7, 2, key)
    jax.tree.map(close, grad(closed)(w, 0.7, 2, key), expected)
    # vmapped parameters, an integer tracer and a batch of keys.
    many = jax.vmap(grad(closed), in_axes=(None, 0, 0, 0))
    keys = jnp.stack([key, key])
    dw, ds = many(w, jnp.array([0.7, 0.2]), jnp.array([2, 1]), keys)
    jax.tree.map(close, (dw[0], ds[0]), expected)
    old = jax.grad(lambda s: jnp.sum(closed(w, s, 2, jax.random.PRNGKey(0)).value ** 2))(0.7)
    assert np.isfinite(old)


class Bound(nn.Module):
    """Calls its own submodule inside f; `ready` makes its parameters before."""

    ready: bool

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(D)
        if self.ready:
            dense(x)
        return fixed_point(
            lambda p, x, z: jnp.tanh(0.3 * dense(z) + x), (), x, jnp.zeros_like(x),
            solver=Damped(tolerance=1e-5), adjoint=Implicit(),
        ).value  # fmt: skip


def test_a_bound_flax_submodule_inside_f():
    x = C[:, 0]
    params = jax.jit(Bound(True).init)(jax.random.key(0), x)

    def explicit(params):
        p = params["params"]["Dense_0"]
        g = lambda p, x, z: jnp.tanh(0.3 * (z @ p["kernel"] + p["bias"]) + x)  # noqa: E731
        s = fixed_point(
            g, p, x, jnp.zeros_like(x), solver=Damped(tolerance=1e-5), adjoint=Implicit()
        )
        return jnp.sum(s.value**2)

    ours = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(jnp.asarray(Bound(True).apply(p, x))))))(
        params
    )
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, ours, jax.jit(jax.grad(explicit))(params))
    # Parameters made inside the loop cannot leave it: JAX says so, naming the function.
    with pytest.raises(jax.errors.UnexpectedTracerError, match="lambda"):
        jax.jit(Bound(False).init)(jax.random.key(0), x)


# Errors


def identity(p, x, z):
    return z


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fixed_point(identity, (), (), ()), "z0 has no arrays"),
        (lambda: fixed_point(identity, (), (), jnp.ones(())), r"leading batch axis, got \[\(\)\]"),
        (lambda: fixed_point(identity, (), (), (jnp.ones(2), jnp.ones(3))),
         r"disagree on the batch size, got \[\(2,\), \(3,\)\]"),
        (lambda: fixed_point(identity, (), (), jnp.ones((2, 0))), r"\(2, 0\) has no elements"),
        (lambda: fixed_point(identity, (), (), jnp.ones((0, 2))), r"\(0, 2\) has no elements"),
        (lambda: fixed_point(identity, (), (), jnp.arange(3)), "float type, got int32"),
        (lambda: fixed_point(identity, (), jnp.ones((3, 1)), jnp.ones((2, 1))),
         r"x has a leaf of shape \(3, 1\), z0 has batch size 2"),
        (lambda: fixed_point(identity, (), 1.0, jnp.ones((2, 1))), r"leaf of shape \(\)"),
        (lambda: fixed_point(lambda p, x, z: (z,), (), (), jnp.ones(2)), "f returns the structure"),
        (lambda: fixed_point(lambda p, x, z: z[:1], (), (), jnp.ones(2)),
         r"shape \(2,\) to \(1,\)"),
        (lambda: fixed_point(identity, (), (), jnp.ones(2), max_steps=WRONG), "whole number"),
        (lambda: fixed_point(identity, (), (), jnp.ones(2), max_steps=jnp.arange(3)),
         r"max_steps of shape \(3,\).*shape \(2,\)"),
        (lambda: fixed_point(identity, (), (), jnp.ones(2), max_steps=CAPS,
                             adjoint=Unrolled()), "Unrolled: max_steps=.*allowed"),
        (lambda: fixed_point(identity, (), (), jnp.ones(2), max_steps=jnp.asarray(2),
                             adjoint=Unrolled()), "Unrolled: max_steps=.*allowed"),
        (lambda: trace(identity, (), (), jnp.ones(2), steps=0), "steps=0, allowed"),
        (lambda: trace(identity, (), (), jnp.ones(2), steps=WRONG), "steps=2.5, allowed"),
        (lambda: trace(identity, (), (), jnp.arange(2)), "float type, got int32"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_state_of_another_problem_is_refused():
    state = fixed_point(identity, (), (), jnp.ones((2, 3))).state
    with pytest.raises(ValueError, match=r"state\.z is .*\(2, 3\).*need.*\(4, 3\)"):
        fixed_point(identity, (), (), jnp.ones((4, 3)), state=state)
    with pytest.raises(ValueError, match=r"state\.best_z is None.*return_best"):
        fixed_point(
            identity, (), (), jnp.ones((2, 3)), state=state, solver=Damped(return_best=True)
        )
