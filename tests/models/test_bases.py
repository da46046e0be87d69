"""Other token mixers in FPRM's loop: what each reads, that it learns, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr import layers
from fpr.fixed_point import fixed_point
from fpr.models import bases
from fpr.models.fp_rnn import FPRNNLayer
from fpr.models.fprm import FPRMConfig
from fpr.solvers import Damped
from tests.models.checks import KEY, check_causal, check_trains, jitted

pytestmark = pytest.mark.usefixtures("fast_compile")
SMALL = {
    "name": "fprm", "vocab_size": 5, "seq_len": 4, "hidden_size": 8, "num_heads": 2,
    "num_layers": 1, "expansion": 0.5,
    "solver": {"preset": "fprm", "eval": {"max_steps": 300, "tolerance": 1e-5}},
}  # fmt: skip
OPTIONS = {"mamba": {"state_size": 2}, "fp_rnn": {"conv": False}}
CAUSAL = ("cnn", "fp_rnn", "mamba")
GRID = jnp.array([[1, 2, 3, 4], [4, 4, 1, 2]])


def config_of(name, **changes):
    return SMALL | {"base": name, "base_options": OPTIONS.get(name, {})} | changes


@pytest.fixture(scope="module")
def solved():
    """name -> parameters, apply and output of that base on the grids, solved."""

    @functools.cache
    def run(name):
        config = config_of(name)
        params, apply = fpr.init(config, KEY), jitted(config)
        return params, apply, apply(params, {"tokens": GRID})

    return run


@pytest.mark.parametrize("name", sorted(set(bases.BASES) - {"transformer"}))
def test_every_token_reaches_every_answer(name, solved):
    params, apply, out = solved(name)
    assert out.logits.shape == (2, 4, 5)
    assert out.q_logits.shape == (2, 2)
    assert out.converged.all()
    for place in (0, 3):
        other = apply(params, {"tokens": GRID.at[:, place].set(GRID[:, place] % 4 + 1)})
        assert np.abs(other.logits - out.logits).max(axis=(0, 2)).min() > 1e-5


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_bases_read_the_past_only_and_train(name):
    config = config_of(name, causal=True, seq_len=6)
    params = fpr.init(config, KEY)
    loops = {"halting": "never", "max_steps": 5}
    five = {"solver": {"preset": "fprm", "eval": loops, "train": loops}}
    # The start is drawn for the whole shape: fix it at 0, so that lengths can be compared.
    config |= five | {"z0": "fixed", "z0_std": 0.0}
    check_causal(config, params)
    check_trains(config, params, without=("q_head",))


def test_a_mixer_over_positions_trains():
    config = config_of("mlp_mixer", seq_len=6)
    check_trains(config, fpr.init(config, KEY), without=("q_head",))


def test_the_mixer_mlp_is_a_swiglu_over_positions():
    module = bases.TokenMLP(0.5)
    x = jax.random.normal(KEY, (2, 4, 3))
    params = module.init(KEY, x)
    gate_up, down = (
        np.asarray(params["params"]["mlp"][name]["kernel"])
        for name in ("gate_up_proj", "down_proj")
    )
    inner = down.shape[0]
    wide = np.einsum("btd,tu->bud", x, gate_up)
    gate, up = wide[:, :inner], wide[:, inner:]
    expected = np.einsum("bud,ut->btd", gate / (1 + np.exp(-gate)) * up, down)
    np.testing.assert_allclose(module.apply(params, x), expected, atol=1e-5)


def test_the_gated_convolution_gates_what_it_convolves():
    module = bases.GatedConv(3, causal=True)
    x = jax.random.normal(KEY, (1, 5, 3))
    params = module.init(KEY, x)["params"]
    gate, value = np.split(np.asarray(x @ params["in_proj"]["kernel"]), 2, axis=-1)
    taps = np.asarray(params["conv"]["kernel"])
    past = np.pad(value, ((0, 0), (2, 0), (0, 0)))
    convolved = sum(taps[j] * past[:, j : j + 5] for j in range(3)) + params["conv"]["bias"]
    expected = (gate / (1 + np.exp(-gate)) * convolved) @ params["out_proj"]["kernel"]
    np.testing.assert_allclose(module.apply({"params": params}, x), expected, atol=1e-5)


def test_the_backward_reader_is_a_forward_reader_of_the_reversed_input():
    """Swapping the two readers and reversing time reverses the result."""
    mixer = bases.BASES["mamba"][1](FPRMConfig(**_options("mamba")))
    x = jax.random.normal(KEY, (2, 4, 8))
    params = mixer.init(KEY, x)["params"]
    apply = jax.jit(lambda p, x: mixer.apply({"params": p}, x))
    swapped = {"forwards": params["backwards"], "backwards": params["forwards"]}
    out, other = apply(params, x), apply(swapped, x[:, ::-1])
    np.testing.assert_allclose(other[:, ::-1], out, atol=1e-5)
    assert np.abs(apply(params, x[:, ::-1])[:, ::-1] - out).max() > 1e-3


def test_the_outer_fixed_point_solves_the_inner_one(solved):
    """Where the loop stands still, the carried iterate is the FP-RNN's own solution."""
    params, _, out = solved("fp_rnn")
    iterate = out.state[0].z
    weights = params["layers_0"]
    c = FPRMConfig(**_options("fp_rnn"))
    a2 = jax.nn.sigmoid(weights["alpha_2"])
    power = jax.nn.sigmoid(weights["alpha_1"]) ** 2
    x = params["embedding"][GRID] * 8**0.5
    u = layers.rms_norm(a2 * iterate["z"] + (1 - a2 * power) * x)  # What the mixer is given.
    layer = FPRNNLayer(bases._recurrent_options(c, bases.FPRNNConfig))
    for i, (name, given) in enumerate((("forwards", u), ("backwards", u[:, ::-1]))):
        bound = layer.bind({"params": weights["token_mixers_0"][name]})
        prepared = bound.prepare(given)
        start = jnp.zeros_like(iterate["inner"][0][i])
        solution = fixed_point(
            lambda p, x, y: layer.apply({"params": p}, x, y, method="step"),
            weights["token_mixers_0"][name], prepared, start,
            solver=Damped(tolerance=1e-6, max_steps=300),
        )  # fmt: skip
        assert solution.converged.all()
        np.testing.assert_allclose(iterate["inner"][0][i], solution.value, atol=2e-3)
        assert np.abs(solution.value).max() > 0.05


def _options(name):
    return {key: value for key, value in config_of(name).items() if key != "name"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": "mama"}, "model.base='mama'; did you mean 'mamba'"),
        ({"base": "cnn", "base_options": {"kernle": 3}}, "'kernle' in model.base_options.*kernel"),
        ({"base": "cnn", "base_options": {"kernel": 1}}, "kernel=1, allowed: >= 2"),
        ({"base": "cnn", "seq_len": 6}, "needs a square grid or model.causal=True.*seq_len=6"),
        ({"base": "cnn", "num_registers": 2}, "num_registers=2: a convolution.*allowed.*: 0"),
        ({"base": "mlp_mixer", "causal": True}, "cannot be causal"),
        ({"base": "mamba", "mlp_t": True}, "mlp_t replaces attention"),
        ({"base": "mamba", "base_options": {"num_layers": 2}}, "'num_layers'.*allowed: .*expand"),
        ({"base": "mamba", "base_options": {"state_size": 0}}, "state_size=0, allowed"),
        ({"base": "fp_rnn", "base_options": {"mixer": "house"}}, "did you mean 'householder'"),
        ({"base": "transformer", "base_options": {"kernel": 3}}, "allowed with.*: none"),
        ({"name": "trm", "base": "fp_rnn"}, "base='fp_rnn' carries iterates of its own"),
        ({"name": "transformer", "base": "cnn"}, "base='cnn': a Transformer without a loop"),
    ],
)
def test_bases_that_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(SMALL | change)


def test_a_grid_of_another_size_is_refused():
    config = config_of("mlp_mixer")
    params = jax.eval_shape(lambda: fpr.init(config, KEY))
    with pytest.raises(ValueError, match=r"length 3, but base mlp_mixer fixes it to.*4"):
        jax.eval_shape(lambda p: fpr.apply(config, p, {"tokens": GRID[:, :3]}), params)


def test_another_base_in_the_looped_transformer_and_trm():
    for name in ("looped_transformer", "trm"):
        config = config_of("cnn") | {"name": name}
        del config["solver"]
        params = fpr.init(config, KEY)
        assert fpr.apply(config, params, {"tokens": GRID}, max_steps=1).logits.shape == (2, 4, 5)
