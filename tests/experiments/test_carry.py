import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from experiments import carry, optim, steps
from experiments import config as configs
from experiments.errors import UserError
from fpr.solvers import Damped
from tests.experiments.conftest import TINY, tiny

TRM = {
    "name": "trm", "vocab_size": 7, "seq_len": 4, "hidden_size": 8, "num_heads": 2,
    "num_layers": 1, "expansion": 1.0, "causal": True, "rope": False, "h_cycles": 1, "l_cycles": 1,
}  # fmt: skip
ACT = {"regime": "carry", "window": 1, "max_windows": 3, "halting": "act"}


def run_slots(monkeypatch, train, windows, q=None, halted=None):
    """Runs `windows` windows of two slots of a fake model; returns (done, windows, tokens) of each.

    Example n has all tokens n; q and halted: (example, window) -> Q logit, whether it converged.
    """
    config = {"model": {}, "train": tiny()["train"] | train}
    seen = {}

    def apply(model, params, batch, *, state=None, max_steps, **_):
        example = np.asarray(batch["tokens"])[:, 0]
        fresh = Damped().init(jnp.zeros((2, 1)))
        q_logits = np.full((2, 2), -5.0)
        if state is not None:
            stops = np.zeros(2, bool)
            for i, n in enumerate(example.tolist()):
                seen[n] = seen.get(n, 0) + 1
                q_logits[i, 0] = q(n, seen[n]) if q else -5.0
                stops[i] = halted(n, seen[n]) if halted else False
            fresh = fresh._replace(halted=jnp.asarray(stops))
        zeros = jnp.zeros(2)
        return fpr.Output(zeros, zeros, zeros, zeros, zeros, jnp.asarray(q_logits), (fresh,))

    monkeypatch.setattr(carry.fpr, "apply", apply)

    def batch(step):
        tokens = np.array([[10 * step + 1], [10 * step + 2]], np.int32)
        return {"tokens": tokens, "labels": tokens}

    slots, rows = carry.init(config, {}, batch(0), jax.random.key(0)), []
    for step in range(windows):
        keys = jax.random.split(jax.random.key(step), 2)
        _, slots = carry.window(config, {}, slots, batch(step), keys)
        values = slots.done, slots.windows, slots.batch["tokens"][:, 0]
        rows.append(tuple(np.asarray(v).tolist() for v in values))
    return rows


def test_fixed_point_refills_what_has_converged(monkeypatch):
    rows = run_slots(
        monkeypatch, {"halting": "fixed_point", "max_windows": 3}, 4,
        q=lambda *_: 9.0, halted=lambda example, window: example == 2 and window == 2,
    )  # fmt: skip
    assert rows == [
        ([False, False], [1, 1], [1, 2]),
        ([False, True], [2, 2], [1, 2]),
        ([True, False], [3, 1], [1, 22]),
        ([False, False], [1, 2], [31, 22]),
    ]


def test_act_refills_where_the_q_logit_is_positive(monkeypatch):
    rows = run_slots(
        monkeypatch, {"halting": "act", "max_windows": 3, "exploration": 0.0}, 3,
        q=lambda example, window: 1.0 if (example, window) == (1, 1) else -1.0,
        halted=lambda *_: True,
    )  # fmt: skip
    assert rows == [
        ([True, False], [1, 1], [1, 2]),
        ([False, False], [1, 2], [11, 2]),
        ([False, True], [2, 3], [11, 2]),
    ]


def test_exploring_examples_wait_for_their_least_number_of_windows(monkeypatch):
    train = {"halting": "act", "max_windows": 2, "exploration": 1.0}  # the least number is 2
    rows = run_slots(monkeypatch, train, 3, q=lambda *_: 9.0)
    assert [done for done, _, _ in rows] == [[False] * 2, [True] * 2, [False] * 2]


def test_fixed_iterations_ignore_both(monkeypatch):
    train = {"halting": "fixed_iterations", "max_windows": 2}
    rows = run_slots(monkeypatch, train, 4, q=lambda *_: 9.0, halted=lambda *_: True)
    assert [done for done, _, _ in rows] == [[False] * 2, [True] * 2] * 2


def test_a_random_cap_ends_examples_earlier(monkeypatch):
    cap = {"distribution": "gamma", "mean": 2.0}
    train = {"halting": "fixed_iterations", "max_windows": 50, "random_cap": cap}
    rows = run_slots(monkeypatch, train, 60)
    lengths = [n for done, windows, _ in rows for d, n in zip(done, windows) if d]
    assert len(set(lengths)) > 2
    assert 1.5 < np.mean(lengths) < 3.0


def test_exploration_is_a_tenth_and_uniform_from_two_to_the_most():
    train = tiny()["train"] | {"halting": "act", "max_windows": 5}
    least, most = carry._bounds(train, jax.random.split(jax.random.key(0), 8000))
    counts = np.bincount(np.asarray(least), minlength=6)
    assert most is None
    assert counts[0] == 0
    assert counts[1] / 8000 == pytest.approx(0.9, abs=0.02)
    np.testing.assert_allclose(counts[2:] / 8000, 0.025, atol=0.008)


def test_trm_trains_with_act_in_one_compiled_step(fast_compile):
    config = configs.complete(TINY | {"model": TRM, "train": ACT | {"batch_size": 6}})
    config["q_loss_weight"] = 0.5
    task = configs.validate(config)
    optimizer = optim.make_optimizer(config["optimizer"], 6)
    step = jax.jit(steps.make_train_step(config, optimizer))
    state = steps.init_state(config, optimizer, task.train_batch(0, 6))
    # A Q head that halts about half of the examples.
    q_head = state.params["q_head"]
    q_head["kernel"], q_head["bias"] = jnp.ones_like(q_head["kernel"]), jnp.zeros(2)
    refilled = []
    for i in range(5):
        state, metrics = step(state, task.train_batch(i, 6))
        refilled.append(int(metrics["finished"]))
        assert float(metrics["solver_steps"]) >= refilled[-1]
    assert len(set(refilled)) > 1, refilled
    assert step._cache_size() == 1


def test_a_fixed_start_fills_the_slots_and_is_not_trained(fast_compile):
    changes = {
        "model": TINY["model"] | {"z0": "fixed"},
        "train": TINY["train"] | {"regime": "carry"},
    }
    changes["optimizer"] = {"weight_decay": 0.5}
    config = configs.complete(TINY | changes)
    task = configs.validate(config)
    optimizer = optim.make_optimizer(config["optimizer"], 6)
    state = steps.init_state(config, optimizer, task.train_batch(0, 6))
    start = np.asarray(state.params["layers_0"]["start"])
    alpha = np.asarray(state.params["layers_0"]["alpha_1"])
    z = state.carry.solver[0].z
    np.testing.assert_array_equal(z, np.broadcast_to(start, z.shape))
    state, _ = jax.jit(steps.make_train_step(config, optimizer))(state, task.train_batch(0, 6))
    np.testing.assert_array_equal(state.params["layers_0"]["start"], start)
    assert np.abs(state.params["layers_0"]["alpha_1"] - alpha).max() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"halting": "actt"}, "unknown train.halting 'actt'; did you mean 'act'"),
        ({"exploration": 1.5}, r"train.exploration must be in \[0, 1\], got 1.5"),
        ({"regime": "solve"}, "train.halting 'act' needs train.regime 'carry'"),
        ({"q_loss_weight": 0.0}, "'act' needs a model with a Q head and q_loss_weight > 0"),
        (
            {"random_cap": {"distribution": "gamma", "mean": 4.0}},
            "'act' has its own random bound; leave out random_cap",
        ),
        ({"solver": "sample"}, "solver.train.halting must be 'never', got 'sample'"),
    ],
)
def test_combinations_that_cannot_work(change, message):
    change = dict(change)
    q_loss_weight, halting = change.pop("q_loss_weight", 0.5), change.pop("solver", "never")
    config = tiny(q_loss_weight=q_loss_weight, model__solver__train__halting=halting)
    config["train"] |= ACT | change
    with pytest.raises(UserError, match=message):
        configs.validate(config)
