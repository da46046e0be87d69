import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fpr
from experiments import budget, evaluate
from experiments.flops import Flops
from experiments.steps import init_state
from experiments.train import optim
from fpr.models import base

pytestmark = pytest.mark.usefixtures("fast_compile")


@pytest.mark.parametrize("most", [1, 2, 100, 101, 35_000])
def test_budgets_are_dense_at_first_and_end_where_asked(most):
    at = budget.budgets(most)
    assert at[-1] == most
    assert at[: min(most, 100)].tolist() == list(range(1, min(most, 100) + 1))
    assert (np.diff(at) > 0).all()
    assert len(at) < 500


@pytest.mark.parametrize(
    "options",
    [
        {"name": "fprm", "num_heads": 2, "num_layers": 1, "expansion": 1.0, "causal": True},
        {"name": "fp_rnn", "num_layers": 2},  # two loops: solved anew at each budget
    ],
    ids=lambda o: o["name"],
)
def test_follow_decodes_what_a_solve_of_that_many_steps_answers(options):
    model = {"vocab_size": 5, "seq_len": 6, "hidden_size": 8, **options}
    params = fpr.init(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 6), 1, 5)
    batch = {"tokens": tokens, "labels": jnp.roll(tokens, 1, axis=1).at[0, 0].set(-100)}
    keys = jax.random.split(jax.random.key(2), 3)
    solver = dataclasses.replace(base.make_solver({}, False), halting="never")
    at = np.array([1, 2, 5], np.int32)
    run = functools.partial(budget.follow, model, solver=solver, keep_predictions=True)
    course = jax.jit(run)(params, batch, keys, at)
    solve = jax.jit(functools.partial(fpr.apply, model, solver=solver))
    before = None
    for i, steps in enumerate(at):
        out = solve(params, batch, key=keys, max_steps=steps)
        answer = np.asarray(out.logits.argmax(-1))
        right = answer == batch["labels"]
        assert np.array_equal(course.predictions[i], answer)
        assert np.array_equal(course.tokens[i], right.sum(1))
        assert np.array_equal(course.right[i], (right | (batch["labels"] == -100)).all(1))
        np.testing.assert_allclose(course.residual[i], out.residual, rtol=1e-4)
        changed = [True] * 3 if before is None else (answer != before).any(1)
        assert np.array_equal(course.changed[i], changed)
        before = answer
    assert course.changed[1:].any(), "nothing moves: the test says little"


def test_summary_of_three_examples():
    # Example 0 is right from iteration 2 on and halts at 3; 1 halts at 1 with a wrong answer that
    # would have become right at 4; 2 is right at first, changes until the end and halts at 4.
    course = budget.Course(
        right=np.array([[0, 0, 1], [1, 0, 1], [1, 0, 0], [1, 1, 0]], bool),
        tokens=np.array([[1, 1, 2], [2, 1, 2], [2, 1, 1], [2, 2, 0]]),
        changed=np.array([[1, 1, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]], bool),
        residual=np.array([[4.0, 1.0, 2.0], [1.0] * 3, [1.0] * 3, [0.0, 0.5, 1.0]]),
        q_halt=np.array([[-1, -1, 1], [-1, 2, 1], [3, 2, 1], [3, 2, 1]]),
        predictions=None,
    )
    found = budget.summarise(
        course,
        np.array([1, 2, 3, 4]),
        labelled=np.array([2, 2, 2]),
        layer_steps=np.array([[3], [1], [4]]),
        answer=np.array([True, False, False]),
        scale=2,
        operations=Flops(ends=10.0, application=(3.0,)),
        most=4,
    )
    assert found["effective_layers"].tolist() == [2, 4, 6, 8]
    assert found["flops"].tolist() == [13, 16, 19, 22]
    assert found["residual"]["median"].tolist() == [2.0, 1.0, 1.0, 0.5]
    assert found["residual"]["upper_quartile"].tolist() == [3.0, 1.0, 1.0, 0.75]
    np.testing.assert_allclose(found["sequence_accuracy"], [1 / 3, 2 / 3, 1 / 3, 2 / 3])
    np.testing.assert_allclose(found["token_accuracy"], [4 / 6, 5 / 6, 4 / 6, 4 / 6])
    np.testing.assert_allclose(found["halting"]["sequence_accuracy"], [1 / 3, 2 / 3, 1 / 3, 1 / 3])
    layers = [2, 2 * 5 / 3, 2 * 7 / 3, 2 * 8 / 3]
    np.testing.assert_allclose(found["halting"]["effective_layers_mean"], layers)
    np.testing.assert_allclose(found["halting"]["flops_mean"], 10 + 1.5 * np.array(layers))
    assert found["saturated_at"]["examples"].tolist() == [2, 4, 4]
    assert found["saturated_at"]["median"] == 4
    assert found["halted_at"]["examples"].tolist() == [3, 1, 4]
    assert found["halted_before_saturation"] == pytest.approx(1 / 3)
    assert found["unsettled"] == pytest.approx(2 / 3)
    # The Q head halts them at 3, 2 and 1: right, wrong, right.
    assert found["act"] == {
        "sequence_accuracy": pytest.approx(2 / 3), "effective_layers_mean": 4.0,
        "flops_mean": 16.0, "halted": 1.0, "max_iterations": 4,
    }  # fmt: skip


def test_act_goes_no_further_than_the_solvers_own_cap():
    # Fixed work of 2 iterations, of which 4 are watched. Example 0 fires at 2; 1 only at 3, when it
    # is right; 2 never fires and is right at 4.
    course = budget.Course(
        right=np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]], bool),
        tokens=np.ones((4, 3)), changed=np.ones((4, 3), bool), residual=np.ones((4, 3)),
        q_halt=np.array([[-1, -1, -1], [2, -1, -1], [3, 2, -1], [3, 2, -1]]),
        predictions=None,
    )  # fmt: skip
    found = budget.summarise(
        course,
        np.array([1, 2, 3, 4]),
        labelled=np.ones(3),
        layer_steps=np.full((3, 1), 2),
        answer=np.array([True, False, False]),
        scale=2,
        operations=Flops(ends=10.0, application=(3.0,)),
        most=2,
    )
    assert found["act"] == {
        "sequence_accuracy": pytest.approx(1 / 3), "effective_layers_mean": 4.0,
        "flops_mean": 16.0, "halted": pytest.approx(1 / 3), "max_iterations": 2,
    }  # fmt: skip


def test_what_halting_spends_counts_every_loop_with_its_own_steps():
    blank = np.ones((3, 1), bool)
    found = budget.summarise(
        budget.Course(blank, blank, blank, np.ones((3, 1)), None, None),
        np.array([1, 2, 9]),
        labelled=np.ones(1),
        layer_steps=np.array([[1, 4]]),
        answer=np.array([True]),
        scale=1,
        operations=Flops(ends=10.0, application=(3.0, 5.0)),
        most=9,
    )
    assert found["effective_layers"].tolist() == [2, 4, 18]
    assert found["flops"].tolist() == [18, 26, 82]
    assert found["halting"]["effective_layers_mean"].tolist() == [2, 3, 5]
    assert found["halting"]["flops_mean"].tolist() == [18, 23, 33]


def test_the_halting_curve_ends_at_the_accuracy_of_the_evaluation(make_run):
    run = make_run(eval__budget_steps=9, eval__budget_examples=5, eval__max_examples=5)
    optimizer = optim.make_optimizer(run.config["optimizer"], 1)
    params = init_state(run.config, optimizer, run.task.train_batch(0, 6)).params
    evaluator = evaluate.Evaluator(run)
    results = evaluator(params)
    curves = budget.curves(run, params, evaluator)
    assert list(curves) == [4, 6]
    for length, curve in curves.items():
        assert curve["iterations"].tolist() == list(range(1, 10))
        assert curve["examples"] == 5
        halting = curve["halting"]
        assert halting["sequence_accuracy"][-1] == results[length]["sequence_accuracy"]
        spent = halting["effective_layers_mean"][-1]
        assert spent == pytest.approx(results[length]["effective_layers_mean"])
        operations = halting["flops_mean"][-1]
        assert operations == pytest.approx(results[length]["flops_per_example_mean"])
        assert curve["halted_at"]["examples"].max() == results[length]["solver_steps_max"]
    # The tiny config does not train its Q head.
    assert "act" not in curve
    assert budget.curves(make_run(eval__budget_examples=0), params, evaluator) == {}


def test_how_many_iterations_are_watched():
    solver = base.make_solver({"eval": {"max_steps": 50}}, False)
    assert budget._enough(solver, 20) == 40
    assert budget._enough(solver, 50) == 50
    fixed = dataclasses.replace(solver, halting="never")
    assert budget._enough(fixed, 50) == 100, "models of fixed work may spend more at evaluation"
