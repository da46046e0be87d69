import json
import os
import shutil
import signal
import threading

import jax
import numpy as np
import pytest

import fpr
from experiments import checkpoint, steps
from experiments import config as configs
from experiments import train as training
from experiments.errors import UserError
from experiments.result import evaluate_checkpoint
from experiments.train import Diverged, Interrupted, train
from experiments.workdir import read_metrics
from tests.experiments.conftest import TINY, new_run


def weights(path):
    with np.load(path / "weights.npz") as arrays:
        return dict(arrays)


REGIMES = {
    "solve": {},
    "carry": {
        "train__regime": "carry",
        "ema": 0.0,
        "loss": "stablemax",
        "q_loss_weight": 0.5,
        "optimizer__warmup_steps": 2,
        "optimizer__schedule": "cosine",
        "train__random_cap__distribution": "gamma",
        "model__solver__train__noise": 0.01,
    },
}


def assert_same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def logged_steps(path):
    return [r["step"] for r in read_metrics(path / "metrics.jsonl") if r["split"] == "train"]


@pytest.fixture(scope="module", params=REGIMES)
def regime(request):
    return request.param


@pytest.fixture(scope="module")
def straight(regime, tmp_path_factory):
    """Six steps without interruption: (run, result.json's content)."""
    run = new_run(tmp_path_factory.mktemp("straight") / "run", **REGIMES[regime])
    return run, train(run)


def test_interrupted_run_continues_bit_for_bit(regime, straight, make_run, monkeypatch):
    run, result = straight
    log = training._Loop._log

    def terminate_after_2(self, step):
        log(self, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    changes = REGIMES[regime] | {"checkpoint__every": 100}
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as stop:
        patch.setattr(training._Loop, "_log", terminate_after_2)
        train(make_run(**changes))
    assert str(stop.value) == "SIGTERM: saved a checkpoint at step 3 of 6 and stopped"
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]
    resumed = make_run(**changes)
    assert not (resumed.path / "result.json").exists()
    again = train(resumed)
    assert "continuing at step 3 of 6" in resumed.printed()
    assert_same_weights(run.path, resumed.path)
    assert again["sequence_accuracy"] == result["sequence_accuracy"]
    assert logged_steps(resumed.path) == [2, 3, 4, 6]
    rates = [
        {r["step"]: r["learning_rate"] for r in read_metrics(path / "metrics.jsonl")
         if r["split"] == "train"}
        for path in (run.path, resumed.path)
    ]  # fmt: skip
    assert rates[0] == rates[1]


def test_a_broken_newest_checkpoint_falls_back(regime, straight, tmp_path):
    run, _ = straight
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    for file in (copy / "checkpoints" / "6").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    repaired = new_run(copy, **REGIMES[regime])
    train(repaired)
    assert "checkpoint 6 cannot be read" in repaired.printed()
    assert "continuing at step 3 of 6" in repaired.printed()
    assert_same_weights(run.path, copy)
    assert logged_steps(copy) == logged_steps(run.path) == [2, 3, 4, 6]
    assert list((copy / "damaged").iterdir())


def test_what_a_run_leaves(straight, regime):
    run, _ = straight
    written = json.loads((run.path / "result.json").read_text())
    assert written["sequence_accuracy"].keys() == {"4", "6"}
    for name in (
        "token_accuracy", "solver_steps_median", "solver_steps_max", "converged",
        "residual_median", "residual_max", "examples", "prefix_accuracy",
    ):  # fmt: skip
        assert written[name].keys() == {"4", "6"}, name
    assert written["data"]["eval"] == {
        "task": "word_problem", "group": "S3", "seed": 0, "split": "eval",
    }  # fmt: skip
    assert written["weights"] == ("averaged (EMA)" if regime == "solve" else "last")
    assert written["seconds"]["compile"] > 0
    assert 0 < written["eval_share"] < 1
    for name in ("accuracy", "solver_steps", "residual", "training"):
        assert (run.path / f"{name}.png").stat().st_size > 1000
    assert list((run.path / "tensorboard").iterdir())
    printed = run.printed()
    assert "sequence accuracy" in printed
    assert str(run.path / "accuracy.png") in printed
    assert written["parameters"] == sum(w.size for w in weights(run.path).values())
    assert sorted(os.listdir(run.path / "checkpoints")) == ["3", "6"]
    record = read_metrics(run.path / "metrics.jsonl")[0]
    assert {"loss", "sequence_accuracy", "steps_per_second", "converged"} <= record.keys()


def test_load_and_evaluate_give_the_same_weights(straight, regime):
    run, result = straight
    (run.path / "config.json").write_text(json.dumps(run.config))
    config, params = fpr.load(run.path)
    batch = run.task.eval_batch(4, 0, 2)
    out = fpr.apply(config, params, batch)
    assert out.logits.shape == (2, 4, 7)
    evaluated = evaluate_checkpoint(new_run(run.path, **REGIMES[regime]))
    assert evaluated["sequence_accuracy"] == result["sequence_accuracy"]
    assert evaluated["step"] == 6


def test_carry_refills_only_finished_slots(make_run):
    run = make_run(train__regime="carry")
    config = dict(run.config)
    optimizer = training.optim.make_optimizer(config["optimizer"], 6)
    step = jax.jit(steps.make_train_step(config, optimizer))
    state = steps.init_state(config, optimizer, run.task.train_batch(0, 6))
    assert state.carry.done.all()
    refilled = 0
    for i in range(6):
        old, batch = state.carry, run.task.train_batch(i, 6)
        state, metrics = step(state, batch)
        done = np.asarray(old.done)
        tokens = np.asarray(state.carry.batch["tokens"])
        np.testing.assert_array_equal(tokens[done], batch["tokens"][done])
        np.testing.assert_array_equal(tokens[~done], np.asarray(old.batch["tokens"])[~done])
        windows = np.where(done, 1, np.asarray(old.windows) + 1)
        np.testing.assert_array_equal(state.carry.windows, windows)
        halted = np.asarray(state.carry.solver[0].halted)
        np.testing.assert_array_equal(state.carry.done, halted | (windows == 3))
        live = np.asarray(state.carry.solver[0].steps)
        assert (live[~halted] == 2 * windows[~halted]).all()
        assert float(metrics["finished"]) == np.asarray(state.carry.done).sum()
        refilled += done.sum()
    assert refilled > 6
    assert step._cache_size() == 1


def test_carry_gradient_flows_through_the_window_only(make_run):
    """The carried iterate is a constant: the loss depends on params through `window` steps."""
    run = make_run(train__regime="carry", train__window=1)
    config, keys = run.config, jax.random.split(jax.random.key(0), 6)
    optimizer = training.optim.make_optimizer(config["optimizer"], 6)
    batch = run.task.train_batch(0, 6)
    state = steps.init_state(config, optimizer, batch)
    carry = state.carry._replace(done=np.zeros(6, bool))

    def window(params):
        return steps._objective(config, params, carry, batch, keys, None)[0]

    def by_hand(params):
        out = fpr.apply(
            config["model"], params, dict(batch), train=True, state=carry.solver,
            adjoint=fpr.adjoints.Unrolled(), max_steps=1,
        )  # fmt: skip
        return steps._loss(config, out, dict(batch))

    ours, expected = (
        jax.jit(jax.grad(window))(state.params),
        jax.jit(jax.grad(by_hand))(state.params),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, expected)


def test_nan_stops_and_keeps_the_last_checkpoint(make_run):
    run = make_run(optimizer__learning_rate=1e38, train__log_every=1, checkpoint__every=1)
    with pytest.raises(Diverged, match=r"(loss|grad_norm) is (nan|inf) at step \d"):
        train(run)
    assert all(np.isfinite(value).all() for value in weights(run.path).values())
    assert not (run.path / "result.json").exists()


def test_a_longer_run_goes_on_and_a_shorter_one_is_refused(straight, regime, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(straight[0].path, copy)
    longer = new_run(copy, train__steps=8, **REGIMES[regime])
    assert train(longer)["step"] == 8
    assert "continuing at step 6 of 8" in longer.printed()
    with pytest.raises(UserError, match=r"is at step 8 already, past train\.steps=6"):
        train(new_run(copy, **REGIMES[regime]))


def test_evaluation_without_a_checkpoint(make_run):
    with pytest.raises(UserError, match="holds no checkpoint"):
        evaluate_checkpoint(make_run())


# TensorStore's tasks are dropped while they fail.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_truncated_file_of_a_checkpoint_is_noticed(tmp_path):
    state = {"a": np.arange(5000, dtype=np.float32), "b": {"c": np.ones(3, np.int32)}}
    like = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, state))
    with checkpoint.Checkpoints(tmp_path, keep=1) as saved:
        saved.save(1, state)
    files = [f for f in (tmp_path / "checkpoints" / "1").rglob("*") if f.is_file()]
    for number, file in enumerate(files):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path / "checkpoints", copy / "checkpoints")
        broken = copy / file.relative_to(tmp_path)
        os.truncate(broken, broken.stat().st_size // 2)
        with checkpoint.Checkpoints(copy, keep=1) as damaged:
            caught = None
            try:
                _, restored = damaged.restore(like, print)
            except UserError as error:
                caught = error
        if caught is None:  # The file was not needed.
            np.testing.assert_array_equal(restored["a"], state["a"])
        else:
            assert "none of the checkpoints" in str(caught)
            assert broken.exists(), "nothing is moved while no checkpoint can be read"


def test_a_model_without_a_loop_trains_too(make_run):
    run = make_run(train__steps=2)
    model = {"name": "lstm", "vocab_size": 7, "seq_len": 4, "hidden_size": 8}
    run.config = configs.complete(TINY | {"model": model, "train": {"steps": 2}})
    configs.validate(run.config)
    result = train(run)
    assert result["solver_steps_max"] == {4: 1, 6: 1}
    assert result["budget"] == {}
    with pytest.raises(UserError, match="'carry' needs a model with a loop"):
        configs.validate(configs.complete(run.config | {"train": {"regime": "carry"}}))
