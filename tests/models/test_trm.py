"""TRM: the recursion and its variants against NumPy, its gradient, its carry, its sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from fpr.registry import flatten
from tests.models.checks import (
    KEY,
    TOKENS,
    check_causal,
    check_trains,
    count,
    jitted,
    reasoner_weights,
)
from tests.reference import trm as reference
from tests.reference.transformer import net

SMALL = {
    "name": "trm", "vocab_size": 5, "seq_len": 6, "hidden_size": 8, "num_heads": 2,
    "num_layers": 1, "expansion": 0.5, "h_cycles": 2, "l_cycles": 2,
}  # fmt: skip
CAUSAL = SMALL | {"causal": True, "rope": False, "conv": "conv1d"}
BATCH = {"tokens": TOKENS}
ATOL = 3e-5


def reference_net(config, params, name="net"):
    weights = reasoner_weights(params["layers_0"][name])
    taps = 4 if config.get("conv") == "conv1d" else 0
    causal, rope = config.get("causal", False), config.get("rope", True)
    return lambda x, z: net(weights, x, z, config["num_layers"], 2, causal, rope, taps)


def reference_inputs(params):
    """Embedded tokens, one (T, D) a sample, and the starts, one (T, D) a state."""
    x = np.asarray(params["embedding"], np.float64)[np.asarray(TOKENS)] * 8**0.5
    starts = [np.tile(s, (6, 1)) for s in np.asarray(params["layers_0"]["start"], np.float64)]
    return x, starts


@pytest.fixture(scope="module")
def small():
    return fpr.init(SMALL, KEY), jitted(SMALL)


@pytest.mark.parametrize("config", [SMALL, CAUSAL], ids=["plain", "conv"])
def test_segments_equal_reference(config):
    params = fpr.init(config, KEY)
    out = jitted(config, max_steps=2)(params, BATCH)
    run = reference_net(config, params)
    xs, (start_h, start_l) = reference_inputs(params)
    for i, x in enumerate(xs):
        z_h, z_l = start_h, start_l
        for _ in range(2):
            z_h, z_l = reference.segment(run, x, z_h, z_l, 2, 2)
        np.testing.assert_allclose(out.state[0].z["H"][i], z_h, atol=ATOL)
        np.testing.assert_allclose(out.state[0].z["L"][0][i], z_l, atol=ATOL)
        logits = z_h @ np.asarray(params["lm_head"]["kernel"])
        np.testing.assert_allclose(out.logits[i], logits, atol=ATOL)
    np.testing.assert_array_equal(out.steps, 2)
    np.testing.assert_array_equal(out.q_logits, -5.0)


def test_single_state_and_hierarchy_equal_reference():
    single, three = SMALL | {"num_levels": 0}, SMALL | {"num_levels": 3, "l_cycles": 1}
    params = fpr.init(single, KEY)
    z = jitted(single, max_steps=1)(params, BATCH).state[0].z
    assert z["L"] == ()
    xs, (start,) = reference_inputs(params)
    run = reference_net(single, params)
    for i, x in enumerate(xs):
        expected = reference.single_state(run, x, start, 2, 2)
        np.testing.assert_allclose(z["H"][i], expected, atol=ATOL)

    params = fpr.init(three, KEY)
    z = jitted(three, max_steps=1)(params, BATCH).state[0].z
    xs, (start_h, *start_l) = reference_inputs(params)
    run = reference_net(three, params)
    for i, x in enumerate(xs):
        z_h, z_l = reference.levels(run, x, start_h, start_l, 2, 1)
        np.testing.assert_allclose(z["H"][i], z_h, atol=ATOL)
        for got, expected in zip(z["L"], z_l, strict=True):
            np.testing.assert_allclose(got[i], expected, atol=ATOL)


def test_carry_over_segments_equals_one_run(small):
    params, apply = small
    state = None
    for _ in range(3):
        out = apply(params, BATCH, state=state, max_steps=1)
        state = out.state
    whole = apply(params, BATCH, max_steps=3)
    np.testing.assert_allclose(out.logits, whole.logits, atol=1e-6)
    np.testing.assert_array_equal(out.steps, 3)
    np.testing.assert_array_equal(fpr.apply(SMALL, params, BATCH, train=True).steps, 1)
    np.testing.assert_array_equal(apply(params, BATCH).steps, 16)


def gradient(config, params, state=None):
    def loss(p):
        out = fpr.apply(config, p, BATCH, train=True, state=state)
        return jnp.sum(out.logits**2)

    return flatten(jax.jit(jax.grad(loss))(params))


def assert_same_gradient(a, b):
    for name, value in a.items():
        scale = max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(b[name] / scale, value / scale, atol=1e-4, err_msg=name)


def test_gradient_is_that_of_the_last_cycle(small):
    """Gradient of a segment of 2 cycles = full gradient of 1 from the constant end of the first."""
    params, apply = small
    start = apply(params, BATCH, max_steps=0).state[0]
    run = reference_net(SMALL, params)
    xs, (start_h, start_l) = reference_inputs(params)

    def after(h_cycles, l_cycles, extra=0):
        """The state after some cycles and `extra` further updates of z_L."""
        rows = []
        for x in xs:
            z_h, z_l = reference.segment(run, x, start_h, start_l, h_cycles, l_cycles)
            for _ in range(extra):
                z_l = run(z_h + x, z_l)
            rows.append((z_h, z_l))
        high, low = (jnp.asarray(np.stack(part), jnp.float32) for part in zip(*rows))
        return (start._replace(z={"H": high, "L": (low,)}),)

    one = SMALL | {"h_cycles": 1, "gradient": "all"}
    cycle = gradient(SMALL, params)
    assert_same_gradient(gradient(one, params, after(1, 2)), cycle)
    step = gradient(SMALL | {"gradient": "step"}, params)
    assert_same_gradient(gradient(one | {"l_cycles": 1}, params, after(1, 2, 1)), step)
    for name, value in cycle.items():
        assert np.isfinite(value).all(), name
        assert np.isfinite(step[name]).all(), name
        constant = "q_head" in name or "start" in name
        assert np.any(value) != constant, name
    name = "layers_0/net/mlps_0/down_proj/kernel"
    assert np.abs(cycle[name] - step[name]).max() > 1e-3


def test_single_state_trains():
    single = SMALL | {"num_levels": 0, "gradient": "step"}
    check_trains(single, fpr.init(single, KEY), without=("q_head", "start"))


def test_causal_variant_is_causal():
    check_causal(CAUSAL, fpr.init(CAUSAL, KEY), jitted(CAUSAL, max_steps=2))


def test_starts(small):
    """Fixed: one vector for all tokens and samples, whatever the key; random: by sample."""
    params, apply = small
    high = apply(params, BATCH, key=KEY, max_steps=0).state[0].z["H"]
    np.testing.assert_array_equal(high, np.broadcast_to(high[0, 0], high.shape))
    wide = {"name": "trm", "vocab_size": 5, "seq_len": 1, "hidden_size": 1024}
    shapes = jax.eval_shape(lambda k: fpr.init(wide | {"expansion": 0.25}, k), KEY)
    assert shapes["layers_0"]["start"].shape == (2, 1024)
    random = fpr.apply(SMALL | {"z0": "random"}, params, BATCH, key=KEY, max_steps=0).state[0].z
    assert np.abs(random["H"][0] - random["H"][1]).max() > 0.1
    assert np.abs(random["H"] - random["L"][0]).max() > 0.1


@pytest.mark.parametrize("name", ["trm", "hrm"])
def test_random_starts_belong_to_their_keys(name):
    config = SMALL | {"name": name, "z0": "random"}
    params = fpr.init(config, KEY)
    keys = jax.random.split(jax.random.key(3), len(BATCH["tokens"]))

    def start(batch, key):
        state = fpr.apply(config, params, batch, key=key, max_steps=0).state[0].z
        return jax.tree.leaves(state)

    every = start(BATCH, keys)
    alone = start({k: v[1:2] for k, v in BATCH.items()}, keys[1:2])
    for a, b in zip(every, alone, strict=True):
        np.testing.assert_array_equal(a[1:2], b)
        assert not np.allclose(a[0], a[1])
    assert not np.allclose(every[0], every[1])


def test_sizes_of_the_paper():
    """7M; state tracking: 10 network calls with 2 cycles of 4; 6 levels as deep as TRM."""
    sudoku = {
        "name": "trm", "vocab_size": 11, "seq_len": 81, "num_registers": 16, "num_puzzles": 1
    }  # fmt: skip
    blocks = 2 * (4 * 512**2 + 3 * 512 * 1536)
    assert count(sudoku) == blocks + 2 * 11 * 512 + 512 + 2 * 513 + 2 * 512 == 6_829_570
    assert count(sudoku | {"mlp_t": True}) / 1e6 == pytest.approx(5.0, abs=0.05)  # TRM-MLP: 5M
    trm = fpr.build(sudoku).config
    assert trm.layers_per_step == 3 * 7 * 2
    levels = fpr.build(sudoku | {"num_levels": 6, "l_cycles": 1}).config
    assert levels.layers_per_step == trm.layers_per_step
    tracking = fpr.build(sudoku | {"h_cycles": 2, "l_cycles": 4}).config
    assert tracking.h_cycles * tracking.calls_per_cycle == 10
    assert fpr.build(sudoku | {"num_levels": 0}).config.layers_per_step == trm.layers_per_step


def test_bfloat16_carries_float32(small):
    params, apply = small
    low = fpr.apply(SMALL | {"dtype": "bfloat16"}, params, BATCH, max_steps=1)
    assert {leaf.dtype for leaf in jax.tree.leaves(low.state[0].z)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(low.logits, apply(params, BATCH, max_steps=1).logits, atol=0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h_cycles": 0}, "h_cycles=0, allowed: >= 1"),
        ({"l_cycles": 0}, "l_cycles=0, allowed: >= 1"),
        ({"num_levels": -1}, "num_levels=-1, allowed: >= 0"),
        ({"gradient": "last"}, "gradient='last'.*all, cycle, step"),
        ({"gradient": "steps"}, "did you mean 'step'"),
        ({"cycles": 3}, "unknown key 'cycles'"),
        ({"hidden_size": 9}, "num_heads=2 does not divide"),
    ],
)
def test_configs_that_cannot_work(change, message):
    with pytest.raises(ValueError, match=message):
        fpr.build(SMALL | change)


def test_an_empty_sequence_is_refused(small):
    with pytest.raises(ValueError, match=r"shape \(2, 0\)"):
        fpr.apply(SMALL, small[0], {"tokens": jnp.zeros((2, 0), jnp.int32)})
