import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import config as configs
from experiments import optim, steps
from fpr.models import base
from tests.experiments.conftest import tiny

pytestmark = pytest.mark.usefixtures("fast_compile")
ALL_OPTIONS = {
    "train__jacobian__weight": 0.1,
    "train__weight_dropout": 0.2,
    "train__random_cap__distribution": "gamma",
    "model__dropout": 0.1,
    "model__solver__train__noise": 0.01,
}


def train(count, **changes):
    """`count` steps of the tiny config: (state, metrics of each step)."""
    config = tiny(**changes)
    task = configs.validate(config)
    optimizer = optim.make_optimizer(config["optimizer"], 6)
    step = jax.jit(steps.make_train_step(config, optimizer))
    state, metrics = steps.init_state(config, optimizer, task.train_batch(0, 6)), []
    for i in range(count):
        state, new = step(state, task.train_batch(i, 6))
        metrics.append({k: float(v) for k, v in new.items()})
    assert step._cache_size() == 1
    return state, metrics


@pytest.mark.parametrize("regime", ["solve", "carry"])
def test_accumulation_equals_the_large_batch(regime):
    (whole, expected), (parts, metrics) = (
        train(4, train__regime=regime, train__accumulate=n, q_loss_weight=0.5) for n in (1, 3)
    )
    for one, other in zip(expected, metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert sum(m["finished"] for m in metrics) >= 6, "the last step refills slots"
    for tree in ("params", "carry"):
        a, b = getattr(whole, tree), getattr(parts, tree)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.parametrize("regime", ["solve", "carry"])
def test_every_option_at_once_trains(regime):
    state, metrics = train(2, train__regime=regime, **ALL_OPTIONS)
    assert all(np.isfinite(list(m.values())).all() for m in metrics)
    assert all(m["jacobian_norm"] > 0 for m in metrics)
    assert state.carry is None or state.carry.most is not None


def test_the_jacobian_penalty_is_added_to_the_loss():
    config = tiny()
    task = configs.validate(config)
    params = jax.jit(lambda k, b: steps.fpr.init(config["model"], k, b))(
        jax.random.key(0), task.train_batch(0, 6)
    )
    keys = base.sample_keys(jax.random.key(1), 6)

    def loss(weight, step):
        train = config["train"] | {"jacobian": {"weight": weight, "step": step}}
        one = jax.jit(
            lambda p, b: steps._objective(config | {"train": train}, p, None, b, keys, None)
        )
        value, metrics, _ = one(params, task.train_batch(0, 6))
        return float(value), float(metrics.get("jacobian_norm", 0.0)) / 6

    without, _ = loss(0.0, 0.0)
    exact, norm = loss(0.5, 0.0)
    assert norm > 0
    assert exact - without == pytest.approx(0.5 * norm, rel=1e-3)
    finite, other = loss(0.5, 1e-2)
    assert finite - without == pytest.approx(0.5 * other, rel=1e-3)
    assert other != norm


def test_puzzle_rows_are_those_of_the_slots():
    changes = {
        "model__num_registers": 1, "model__num_puzzles": 9, "train__regime": "carry",
        "optimizer__puzzle_learning_rate": 0.25, "train__accumulate": 2,
    }  # fmt: skip
    config = tiny(**changes)
    task = configs.validate(config)
    optimizer = optim.make_optimizer(config["optimizer"], 6)
    state = steps.init_state(config, optimizer, task.train_batch(0, 6) | {"puzzle_ids": ids(0)})
    step = jax.jit(steps.make_train_step(config, optimizer))
    table = np.asarray(state.params["puzzle_embedding"])
    assert not table.any()
    held = None
    for i in range(3):
        done = np.asarray(state.carry.done)
        held = ids(i) if held is None else np.where(done, ids(i), held)
        state, _ = step(state, task.train_batch(i, 6) | {"puzzle_ids": ids(i)})
        new = np.asarray(state.params["puzzle_embedding"])
        moved = np.abs(new - table).max(axis=1)
        assert sorted(np.flatnonzero(moved)) == sorted(set(held.tolist()))
        np.testing.assert_allclose(moved[moved > 0], 0.25, rtol=1e-6)
        table = new


def ids(step):
    return jnp.asarray([2 * step, 2 * step, 2 * step + 1, 2 * step + 2, 0, 0], jnp.int32)
