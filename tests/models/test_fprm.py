"""FPRM: exact sizes, initial values, causality, every option, and fpr.apply as users call it."""

import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.models.fprm import FPRMConfig, tied_scales
from fpr.registry import flatten, unflatten
from fpr.solvers import Damped

pytestmark = pytest.mark.usefixtures("fast_compile")
SMALL = {
    "name": "fprm", "vocab_size": 5, "seq_len": 4, "hidden_size": 8, "num_heads": 2,
    "num_layers": 1, "expansion": 0.5, "solver": {"preset": "fprm", "eval": {"max_steps": 40}},
}  # fmt: skip
CAUSAL = SMALL | {"causal": True, "rope": False, "conv": "conv1d", "alpha_1": 0.5, "alpha_2": 0.5}
KEY = jax.random.key(0)
TOKENS = jnp.array([[1, 2, 3, 4], [4, 4, 1, 2], [2, 1, 3, 3]])
BATCH = {"tokens": TOKENS}
FIVE = Damped(max_steps=5, halting="never")


def shapes(config):
    return jax.eval_shape(lambda key: fpr.init(config, key), KEY)


def fill(config):
    """Parameters at random without compiling `init`: the same numbers under the same name."""
    flat = {}
    for name, leaf in flatten(shapes(config)).items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith(("alpha_1", "alpha_2", "alpha_1/bias", "alpha_2/bias")):
            value = np.full(leaf.shape, np.log(3.0) if "alpha_1" in name else -np.log(3.0))
        elif name.endswith(("alpha_1/kernel", "alpha_2/kernel")) or name.startswith("q_head"):
            value = np.zeros(leaf.shape)
        else:
            value = rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[0])
        flat[name] = jnp.asarray(value, jnp.float32)
    return unflatten(flat)


def count(config):
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes(config)))


SUDOKU = {
    "name": "fprm", "vocab_size": 11, "seq_len": 81, "conv": "conv2d", "conv_kernel": 3,
    "num_registers": 16,
}  # fmt: skip
MAZE = {
    "name": "fprm", "vocab_size": 6, "seq_len": 900, "conv": "conv1d", "norm_placement": "output",
    "num_registers": 16,
}  # fmt: skip
GROUP = {
    "name": "fprm", "seq_len": 32, "conv": "conv1d", "causal": True, "rope": False,
    "alpha_1": 0.5, "alpha_2": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (SUDOKU, 6_833_666),
        (MAZE, 6_825_986),
        (GROUP | {"vocab_size": 61}, 6_882_306),
        (GROUP | {"vocab_size": 121}, 6_943_746),
    ],
    ids=["sudoku", "maze", "A5", "S5"],
)
def test_parameter_counts_of_the_paper(config, parameters):
    assert count(config) == parameters  # The puzzle embedding is not counted there.
    if config.get("num_registers"):
        assert count(config | {"num_puzzles": 3}) == parameters + 3 * 512


def test_tied_scales_check_values():
    b1, b2 = tied_scales(0.75, 0.25, 4)
    assert b2 == pytest.approx(0.92090, abs=5e-6)
    assert b1 == pytest.approx(0.33679, abs=1e-5)


def test_initial_values():
    config = SMALL | {
        "hidden_size": 64, "vocab_size": 400, "num_registers": 2, "num_puzzles": 3,
        "expansion": 4.0, "conv": "conv1d",
    }  # fmt: skip
    flat = flatten(fpr.init(config, KEY))
    sigmoid = lambda v: 1 / (1 + np.exp(-np.asarray(v)))  # noqa: E731
    np.testing.assert_allclose(sigmoid(flat["layers_0/alpha_1"]), 0.75, rtol=1e-5)
    np.testing.assert_allclose(sigmoid(flat["layers_0/alpha_2"]), 0.25, rtol=1e-5)
    np.testing.assert_array_equal(flat["q_head/kernel"], 0.0)
    np.testing.assert_array_equal(flat["q_head/bias"], -5.0)
    np.testing.assert_array_equal(flat["puzzle_embedding"], 0.0)
    assert np.std(flat["embedding"]) == pytest.approx(64**-0.5, rel=0.03)
    for name, value in flat.items():
        if name.endswith("proj/kernel") or name == "lm_head/kernel":
            std = value.shape[0] ** -0.5
            assert np.std(value) == pytest.approx(std, rel=0.05), name
            # ±2σ of the normal before truncation, whose σ is corrected by 0.87962...
            assert np.abs(value).max() <= 2 * std / 0.8796256 * 1.0001, name
    assert {leaf.dtype for leaf in flat.values()} == {np.dtype("float32")}


def test_init_needs_no_batch_and_gives_the_same_parameters_with_one():
    a, b = fpr.init(SMALL, KEY), fpr.init(SMALL, KEY, BATCH)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    other = fpr.init(SMALL, jax.random.key(1))
    assert not np.allclose(a["embedding"], other["embedding"])


@pytest.fixture(scope="module")
def causal():
    return fill(CAUSAL), jax.jit(
        partial(fpr.apply, CAUSAL), static_argnames=("train", "solver", "adjoint")
    )


def test_a_sample_is_the_same_in_any_batch(causal):
    params, apply = causal
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(1, 5, (6, 4)))
    solver = Damped(tolerance=1e-3, max_steps=60)
    whole = apply(params, {"tokens": tokens}, solver=solver)
    assert whole.converged.all()
    for index in ([2], [5, 0], [3, 3, 1]):
        part = apply(params, {"tokens": tokens[np.array(index)]}, solver=solver)
        np.testing.assert_array_equal(part.steps, whole.steps[np.array(index)])
        np.testing.assert_allclose(part.residual, whole.residual[np.array(index)], rtol=1e-2)
        np.testing.assert_allclose(part.logits, whole.logits[np.array(index)], atol=1e-4)
    # With a key, the start depends on the place in the batch and not on the batch's size.
    whole = apply(params, {"tokens": tokens}, key=KEY, solver=solver)
    part = apply(params, {"tokens": tokens[:3]}, key=KEY, solver=solver)
    np.testing.assert_array_equal(part.steps, whole.steps[:3])
    np.testing.assert_allclose(part.logits, whole.logits[:3], atol=1e-4)
    # Neighbours change nothing at all.
    other = apply(params, {"tokens": tokens.at[3:].set(1)}, key=KEY, solver=solver)
    np.testing.assert_array_equal(other.logits[:3], whole.logits[:3])
    np.testing.assert_array_equal(other.steps[:3], whole.steps[:3])


def test_starts_are_random_by_sample_and_of_the_right_size():
    config = SMALL | {"hidden_size": 64, "seq_len": 16}
    params = fill(config)
    batch = {"tokens": jnp.ones((4, 16), jnp.int32)}

    def start(config, key):
        return np.asarray(fpr.apply(config, params, batch, key=key, max_steps=0).state[0].z)

    random, shared = start(config, KEY), start(config, None)
    assert np.std(random) == pytest.approx(6.0, rel=0.05)
    assert not np.allclose(random[0], random[1])
    assert not np.allclose(random, start(config, jax.random.key(7)))
    np.testing.assert_array_equal(shared[0], shared[1])


def test_a_fixed_start_is_one_vector_held_but_not_trained():
    config = SMALL | {"hidden_size": 512, "num_registers": 1, "z0": "fixed"}
    params = fpr.init(config, KEY)
    held = params["layers_0"]["start"]
    assert held.shape == (512,)
    assert np.std(held) == pytest.approx(6.0, rel=0.1)
    assert count(config) == count(config | {"z0": "random"}) + 512
    assert count(config | {"z0_std": 0.0}) == count(config | {"z0": "random"})

    for key in (None, KEY):
        z = fpr.apply(config, params, BATCH, key=key, max_steps=0).state[0].z
        np.testing.assert_array_equal(z, np.broadcast_to(held, (3, 5, 512)))
    zeros = fpr.apply(config | {"z0_std": 0.0}, params, BATCH, max_steps=0).state[0].z
    assert not zeros.any()

    small = SMALL | {"z0": "fixed"}
    params = fill(small)
    unrolled = {"adjoint": {"name": "unrolled"}}
    _, grads = loss_and_grads(small | unrolled, params, BATCH)
    assert not grads["layers_0"]["start"].any()
    assert grads["layers_0"]["alpha_1"].any()
    # It is used: other values, another answer.
    moved = jax.tree.map(lambda a: a, params)
    moved["layers_0"]["start"] = params["layers_0"]["start"] + 3.0
    a, b = (fpr.apply(small, p, BATCH, max_steps=1).logits for p in (params, moved))
    assert np.abs(a - b).max() > 1e-3


def test_causality(causal):
    params, apply = causal
    later = TOKENS.at[:, 2].set(TOKENS[:, 2] % 4 + 1)
    a = apply(params, BATCH, solver=FIVE).logits
    b = apply(params, {"tokens": later}, solver=FIVE).logits
    np.testing.assert_allclose(a[:, :2], b[:, :2], atol=1e-5)
    assert np.abs(a[:, 2:] - b[:, 2:]).max(axis=(0, 2)).min() > 1e-3
    full = CAUSAL | {"causal": False}
    c, d = (fpr.apply(full, params, {"tokens": t}, solver=FIVE).logits for t in (TOKENS, later))
    assert np.abs(c[:, 0] - d[:, 0]).max() > 1e-4


def test_a_causal_model_without_positions_runs_at_any_length(causal):
    params, apply = causal
    long = jnp.concatenate([TOKENS, TOKENS[:, ::-1], TOKENS], axis=1)
    a = apply(params, {"tokens": long}, solver=FIVE)
    assert a.logits.shape == (3, 12, 5)
    assert np.isfinite(a.logits).all()
    # z0 differs between lengths, so compare fixed points, which do not depend on it.
    exact = Damped(tolerance=1e-6, max_steps=300)
    b = apply(params, {"tokens": long}, solver=exact)
    c = apply(params, BATCH, solver=exact)
    np.testing.assert_allclose(b.logits[:, :4], c.logits, atol=1e-3)


OPTIONS = [
    {"norm_type": "post"}, {"norm_type": "peri"}, {"norm_placement": "input"},
    {"norm_placement": "output"}, {"conv": "conv1d"}, {"conv": "conv1d", "conv_bias": True},
    {"conv": "conv2d", "conv_kernel": 3}, {"residual_scale": "none", "norm_placement": "output"},
    {"residual_scale": "fixed"}, {"residual_scale": "input_dependent"}, {"outer_only": True},
    {"mlp_t": True}, {"causal": True}, {"rope": False}, {"softmax_temp": 0.25},
    {"normalize_input": True}, {"num_registers": 2}, {"num_registers": 2, "num_puzzles": 3},
]  # fmt: skip


def loss_and_grads(config, params, batch):
    def loss(params):
        out = fpr.apply(config, params, batch, train=True, solver=FIVE)
        logits = jax.nn.log_softmax(out.logits)
        return -jnp.mean(jnp.take_along_axis(logits, batch["tokens"][..., None], -1)), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.fixture(scope="module")
def plain():
    params = fill(SMALL)
    return loss_and_grads(SMALL, params, BATCH)[0][1].logits


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_option_changes_the_result_and_trains(option, plain):
    config = SMALL | option
    params = fill(config)
    batch = BATCH | {"puzzle_ids": jnp.array([0, 1, 2])}
    if option.get("conv_bias"):
        params["layers_0"]["conv"]["bias"] = jnp.full(8, 0.5)
    (_, out), grads = loss_and_grads(config, params, batch)
    assert out.logits.shape == plain.shape
    assert out.q_logits.shape == (3, 2)
    # "fixed" starts where the default starts: the same values, but nothing to learn.
    if option == {"residual_scale": "fixed"} or option == {"residual_scale": "input_dependent"}:
        np.testing.assert_allclose(out.logits, plain, atol=1e-5)
    else:
        assert np.abs(out.logits - plain).max() > 1e-3
    flat = flatten(grads)
    assert ("layers_0/alpha_1" in flat) == (
        config.get("residual_scale", "input_independent") == "input_independent"
        and not config.get("outer_only", False)
    )
    for name, value in flat.items():
        assert np.isfinite(value).all(), name
        if not name.startswith("q_head"):
            assert np.abs(value).max() > 0, name


def test_input_dependent_scales_depend_on_the_iterate():
    config = SMALL | {"residual_scale": "input_dependent"}
    params = fill(config)
    kernel = params["layers_0"]["alpha_2"]["kernel"]
    changed = jax.tree.map(lambda a: a, params)
    changed["layers_0"]["alpha_2"]["kernel"] = kernel + 0.3 * jax.random.normal(KEY, kernel.shape)
    a, b = (fpr.apply(config, p, BATCH, solver=FIVE).logits for p in (params, changed))
    assert np.abs(a - b).max() > 1e-3


def test_puzzle_embeddings_reach_the_answer_of_their_puzzle_only():
    config = SMALL | {"num_registers": 2, "num_puzzles": 3}
    params = fill(config)
    params["puzzle_embedding"] = jnp.eye(3, 8)
    apply = jax.jit(partial(fpr.apply, config, solver=FIVE))
    a = apply(params, BATCH | {"puzzle_ids": jnp.array([0, 1, 2])})
    b = apply(params, BATCH | {"puzzle_ids": jnp.array([0, 2, 2])})
    assert np.abs(a.logits[1] - b.logits[1]).max() > 1e-3
    np.testing.assert_array_equal(a.logits[0], b.logits[0])
    assert a.state[0].z.shape == (3, 6, 8)
    # Without positions the order of puzzle ids does not matter to other samples.
    np.testing.assert_array_equal(a.logits[2], b.logits[2])


def test_bfloat16_is_close_to_float32(causal):
    params, apply = causal
    low = fpr.apply(CAUSAL | {"dtype": "bfloat16"}, params, BATCH, solver=FIVE)
    full = apply(params, BATCH, solver=FIVE)
    assert low.logits.dtype == jnp.float32
    assert low.state[0].z.dtype == jnp.float32
    np.testing.assert_allclose(low.logits, full.logits, atol=0.1)
    assert np.abs(low.logits - full.logits).max() > 1e-6


def test_going_on_from_a_state_equals_one_run(causal):
    params, apply = causal
    first = apply(params, BATCH, key=KEY, max_steps=2)
    rest = apply(params, BATCH, state=first.state, max_steps=3)
    whole = apply(params, BATCH, key=KEY, max_steps=5)
    np.testing.assert_array_equal(rest.logits, whole.logits)
    np.testing.assert_array_equal(rest.steps, whole.steps)


def test_a_nan_parameter_reports_failure_and_ends():
    params = fill(SMALL)
    params["layers_0"]["alpha_1"] = jnp.full(8, jnp.nan)
    out = fpr.apply(SMALL, params, BATCH)
    np.testing.assert_array_equal(out.steps, 1)
    assert not out.converged.any()
    np.testing.assert_array_equal(out.residual, np.inf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 does not divide model.hidden_size=8"),
        ({"num_heads": 8}, "even head width, got 1"),
        ({"conv": "conv2d", "seq_len": 8}, "square grid, got model.seq_len=8.*4, 9"),
        ({"alpha_1": 0.0}, "alpha_1=0.0, allowed: 0 < alpha < 1"),
        ({"alpha_2": 1.0}, "alpha_2=1.0, allowed: 0 < alpha < 1"),
        ({"alpha_2": -3}, "alpha_2=-3"),
        ({"norm_type": "prenorm"}, "norm_type='prenorm'; did you mean 'pre'.*peri, post"),
        ({"norm_placement": "outer"}, "norm_placement='outer'.*input, none, output"),
        ({"conv": "conv3d"}, "conv='conv3d'; did you mean 'conv"),
        ({"residual_scale": "input-dependent"}, "did you mean 'input_dependent'"),
        ({"z0": "zeros"}, "z0='zeros'.*fixed, random"),
        ({"z0_std": -1.0}, "z0_std=-1.0, allowed: >= 0"),
        ({"seq_len": 0}, "seq_len=0, allowed: > 0"),
        ({"vocab_size": -2}, "vocab_size=-2, allowed: > 0"),
        ({"conv_kernel": 0}, "conv_kernel=0, allowed: > 0"),
        ({"softmax_temp": 0.0}, "softmax_temp=0.0, allowed: > 0"),
        ({"mlp_t": True, "causal": True}, "cannot be causal"),
        ({"num_puzzles": 3}, "num_puzzles=3 needs model.num_registers >= 1"),
        ({"dtype": "float16"}, "dtype='float16', allowed: float32, bfloat16"),
        ({"hidden_size": 8.0}, "hidden_size=8.0, allowed: a value of type int"),
        ({"causal": 1}, "causal=1, allowed: a value of type bool"),
    ],
)
def test_configs_that_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(SMALL | change)


@pytest.mark.parametrize(
    ("config", "batch", "message"),
    [
        (SMALL, {"tokens": jnp.zeros((2, 0), jnp.int32)}, r"shape \(2, 0\), allowed: \(B, T\)"),
        (SMALL, {"tokens": jnp.zeros((0, 4), jnp.int32)}, r"shape \(0, 4\), allowed: \(B, T\)"),
        (SMALL, {"tokens": jnp.zeros((4,), jnp.int32)}, r"shape \(4,\), allowed: \(B, T\)"),
        (SMALL, {"tokens": jnp.zeros((2, 4, 1), jnp.int32)}, r"shape \(2, 4, 1\), allowed"),
        (SMALL, {"tokens": jnp.zeros((2, 4))}, "type float32, allowed: whole numbers"),
        (SMALL, {"inputs": TOKENS}, r"keys \['inputs'\], but needs 'tokens'"),
        (SMALL, BATCH | {"puzzle_ids": jnp.zeros((2,), jnp.int32)}, r"puzzle_ids.*\(2,\)"),
        (SMALL | {"mlp_t": True}, {"tokens": TOKENS[:, :3]}, "length 3, but mlp_t fixes it to"),
        (SMALL | {"conv": "conv2d"}, {"tokens": TOKENS[:, :3]}, "length 3, but conv2d fixes it"),
    ],
)
def test_batches_that_cannot_work(config, batch, message):
    params = shapes(config)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: fpr.apply(config, p, batch), params)


def test_defaults_are_valid():
    assert FPRMConfig(vocab_size=5, seq_len=4).hidden_size == 512
