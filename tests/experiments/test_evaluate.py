import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from experiments import evaluate, tasks
from experiments.steps import init_state
from experiments.train import optim
from fpr.models.transformer import fixed_loops

pytestmark = pytest.mark.usefixtures("fast_compile")


def outcome(correct, labelled=None):
    correct = np.array(correct, bool)
    n = len(correct)
    labelled = np.ones_like(correct) if labelled is None else np.array(labelled, bool)
    return {
        "correct": correct & labelled,
        "labelled": labelled,
        "steps": np.arange(1, n + 1),
        "effective_layers": 2 * np.arange(1, n + 1),
        "flops": np.full(n, 10.0),
        "residual": np.linspace(0.0, 0.3, n),
        "converged": np.arange(n) % 2 == 0,
    }


def test_sequence_token_and_prefix_accuracy_differ():
    # 4 sequences of 4 tokens; one wrong token each in two of them.
    r = evaluate.summarise(outcome([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]))
    assert r["sequence_accuracy"] == 0.5
    assert r["token_accuracy"] == 14 / 16
    assert r["prefix_accuracy"] == [0.75, 0.75, 0.75, 0.5]
    assert r["solver_steps_median"] == 2.5
    assert r["solver_steps_max"] == 4
    assert r["solver_steps_mean"] == 2.5
    assert r["effective_layers_mean"] == r["effective_layers_median"] == 5.0
    assert r["flops_per_example_mean"] == r["flops_per_example_median"] == 10.0
    assert r["converged"] == 0.5
    assert r["residual_max"] == 0.3
    assert r["examples"] == 4


def test_unlabelled_tokens_count_neither_way():
    r = evaluate.summarise(outcome([[1, 0, 1], [1, 0, 0]], [[1, 0, 1], [1, 0, 1]]))
    assert r["sequence_accuracy"] == 0.5
    assert r["token_accuracy"] == 0.75
    assert r["prefix_accuracy"] == [1.0, 1.0, 0.5]


def test_padding_repeats_the_first_example():
    batch = {"tokens": np.arange(6).reshape(3, 2), "labels": np.arange(6).reshape(3, 2)}
    padded = evaluate.pad_batch(batch, 5)
    assert padded["tokens"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]
    assert evaluate.pad_batch(batch, 3)["tokens"].tolist() == batch["tokens"].tolist()


@pytest.fixture
def params(make_run):
    run = make_run()
    optimizer = optim.make_optimizer(run.config["optimizer"], 1)
    return init_state(run.config, optimizer, run.task.train_batch(0, 6)).params


def test_budget_and_padding_of_the_last_batch(make_run, params):
    run = make_run(eval__max_examples=6, eval__batch_size=4)  # the last batch holds 2 examples
    evaluator = evaluate.Evaluator(run)
    results = evaluator(params)
    assert list(results) == [4, 6]
    assert all(r["examples"] == 6 for r in results.values())
    assert run.clock.seconds["evaluation"] > 0
    assert run.clock.seconds["compile"] > 0
    layers = run.config["model"]["num_layers"]
    samples = {n: evaluate.read_samples(run.path, n) for n in results}
    for length, r in results.items():
        mine = samples[length]
        assert mine["steps"].shape == (6,)
        assert mine["correct"].mean() == r["sequence_accuracy"]
        assert mine["steps"].max() == r["solver_steps_max"]
        assert np.array_equal(mine["effective_layers"], layers * mine["steps"])
        assert mine["flops"].min() > 0
    compiled = run.clock.seconds["compile"]
    assert evaluator(params) == results
    assert run.clock.seconds["compile"] == compiled, "the second evaluation compiled again"


def test_an_example_counts_the_same_in_any_batch(make_run, params):
    """Random starts go by the example's number, not by its place in a batch."""
    results = [evaluate.Evaluator(make_run(eval__batch_size=size))(params) for size in (6, 3)]
    for a, b in zip(*(r.values() for r in results)):
        for name in ("sequence_accuracy", "token_accuracy", "solver_steps_max", "converged"):
            assert a[name] == b[name]


TRM = {
    "model__name": "trm", "model__l_cycles": 1, "model__h_cycles": 1, "model__z0_std": 3.0,
    "model__z0": "fixed", "model__causal": False, "model__solver": fixed_loops(1, 5),
    "q_loss_weight": 0.5,
}  # fmt: skip


def test_act_at_inference_reads_each_example_where_its_q_head_fires_first(make_run):
    run = make_run(**TRM, eval__lengths=(4,))
    params = fpr.init(run.config["model"], jax.random.key(0))
    head = params["q_head"]  # one that fires at segment 4, at the last one, or never
    head["kernel"] = 3 * jax.random.normal(jax.random.key(3), head["kernel"].shape)
    head["bias"] = jnp.full_like(head["bias"], 4.0)
    evaluator = evaluate.Evaluator(run)
    result = evaluator(params)[4]
    mine = evaluate.read_samples(run.path, 4)
    batch, key = evaluator.batch(4, 0, 6, 6), evaluator.keys(4, 0, 6, 6)
    solves = [fpr.apply(run.config["model"], params, batch, key=key, max_steps=n) for n in range(6)]
    fires = np.stack([out.q_logits[:, 0] > 0 for out in solves[1:]])
    first = np.where(fires.any(0), fires.argmax(0) + 1, 5)
    assert set(zip(first, fires.any(0))) == {(4, True), (5, True), (5, False)}
    assert np.array_equal(mine["act_steps"], first)
    assert np.array_equal(mine["act_halted"], fires.any(0))
    right = np.stack([(out.logits.argmax(-1) == batch["labels"]).all(1) for out in solves])
    assert np.array_equal(mine["act_correct"], right[first, np.arange(6)])
    assert result["act"]["sequence_accuracy"] == mine["act_correct"].mean()
    assert result["act"]["halted"] == fires.any(0).mean()
    assert result["act"]["effective_layers_mean"] == 2 * first.mean()
    assert result["act"]["flops_per_example_mean"] == mine["act_flops"].mean()
    assert np.array_equal(mine["act_flops"] < mine["flops"], first < 5)
    # All the segments, as before.
    assert result["solver_steps_max"] == mine["steps"].min() == 5
    assert np.array_equal(mine["correct"], right[5])
    np.testing.assert_allclose(mine["residual"], solves[5].residual, rtol=1e-5)


def test_act_is_scored_by_difficulty(make_run):
    task = tasks.options("sudoku") | {"path": "sudoku4"}
    run = make_run(
        **TRM, task=task, model__vocab_size=6, model__seq_len=16,
        eval__lengths=(16,), eval__max_examples=20, eval__batch_size=20,
    )  # fmt: skip
    params = fpr.init(run.config["model"], jax.random.key(0))
    params["q_head"]["bias"] = jnp.ones_like(params["q_head"]["bias"])  # all end at once
    result = evaluate.Evaluator(run)(params)[16]
    assert sum(b["examples"] for b in result["act"]["by_empties"]) == 20
    for whole, act in zip(result["by_empties"], result["act"]["by_empties"], strict=True):
        assert (act["solver_steps_mean"], whole["solver_steps_mean"]) == (1, 5)
        assert act["effective_layers_median"] == whole["effective_layers_median"] / 5
        assert act["flops_per_example_median"] < whole["flops_per_example_median"]


@pytest.mark.parametrize(
    "changes", [{"q_loss_weight": 0.0}, {"model__solver": {"eval": {"max_steps": 5}}}]
)
def test_act_needs_a_trained_q_head_and_fixed_work(make_run, changes):
    run = make_run(**{**TRM, **changes}, eval__lengths=(4,))
    params = fpr.init(run.config["model"], jax.random.key(0))
    assert "act" not in evaluate.Evaluator(run)(params)[4]


@pytest.mark.parametrize(
    ("name", "options", "layer_steps", "layers"),
    [
        ("fprm", {"num_layers": 3}, np.ones((2, 1)), 3),
        ("trm", {}, np.ones((2, 1)), 42),  # 3 cycles of 7 networks of 2 blocks
        ("transformer", {"num_layers": 5}, np.ones((2, 0)), 5),
        ("fp_rnn", {"num_layers": 2}, np.ones((2, 2)), 1),
    ],
)
def test_effective_layers_of_a_step(name, options, layer_steps, layers):
    model = {"name": name, "vocab_size": 3, "seq_len": 4, "hidden_size": 16, **options}
    assert evaluate.layers_per_step(model, layer_steps) == layers
