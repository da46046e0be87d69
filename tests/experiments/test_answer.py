"""Modular arithmetic and the formal languages: values by brute force, lengths, labels, scores."""

import re

import numpy as np
import pytest

from experiments.errors import UserError
from experiments.tasks import Scored, arithmetic, build
from experiments.tasks.arithmetic import Arithmetic
from experiments.tasks.formal import LANGUAGES, Formal

TASKS = [Arithmetic(), Arithmetic(brackets=False), *(Formal(language=name) for name in LANGUAGES)]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def brute_force(task, question):
    """The answer to a question, `=` left out, in plain Python."""
    if isinstance(task, Arithmetic):
        return eval(question) % 5  # the characters are checked in `examples`
    if task.language == "parity":
        return question.count("1") % 2
    if task.language == "even_pairs":
        return int(question[0] != question[-1])  # both ends differ after an odd number of changes
    place = 0
    for move in question:
        place = {"+": place + 1, "-": place - 1, ".": place}[move] % 5
    return place


def examples(task, batch):
    """(question, answer) of each row, checking the layout."""
    for tokens, labels in zip(batch["tokens"], batch["labels"]):
        text = task.text(tokens)
        n = len(text)
        assert re.fullmatch(r"[0-4+\-*()]+=|[01]+=|[.+-]+=", text)
        assert (tokens[:n] > 0).all()
        assert (tokens[n:] == 0).all()
        assert np.flatnonzero(labels != -100).tolist() == [n - 1]
        assert 1 <= labels[n - 1] <= task.answers
        yield text[:-1], labels[n - 1] - 1


@each_task
def test_answers_are_right(task):
    for batch in (task.train_batch(2, 300), task.eval_batch(64, 0, 100)):
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
        answers = [answer for _, answer in examples(task, batch)]
        questions = [question for question, _ in examples(task, batch)]
        assert answers == [brute_force(task, q) for q in questions]
        assert set(answers) == set(range(task.answers))
        assert len(set(questions)) > 0.7 * len(questions)


@each_task
def test_lengths(task):
    lengths = {len(q) + 1 for q, _ in examples(task, task.train_batch(0, 2000))}
    assert lengths == set(range(4 if task.stride == 2 else 3, 41, task.stride))
    assert task.train_batch(0, 5)["tokens"].shape == (5, 40)
    assert {len(q) for q, _ in examples(task, task.eval_batch(256, 0, 20))} == {255}


@each_task
def test_batches_are_functions_of_seed_and_step(task):
    whole = task.train_batch(1, 8)["tokens"]
    np.testing.assert_array_equal(whole[:4], task.train_batch(2, 4)["tokens"])
    evaluation = task.eval_batch(32, 0, 8)
    np.testing.assert_array_equal(evaluation["tokens"][5:], task.eval_batch(32, 5, 3)["tokens"])
    questions = {q for q, _ in examples(task, task.train_batch(0, 2000)) if len(q) == 31}
    assert len(questions) > 20
    assert not questions & {q for q, _ in examples(task, evaluation)}


@each_task
def test_score(task):
    assert isinstance(task, Scored)
    batch = task.eval_batch(12, 0, 400)
    labelled = batch["labels"] != -100
    correct = labelled.copy()
    correct[:100] = False
    score = task.score({"correct": correct, "labelled": labelled})
    assert score["answer_accuracy"] == 0.75
    assert score["chance"] == 1 / (5 if task.answers == 5 else 2)
    assert score["scaled_accuracy"] == pytest.approx(
        (0.75 - score["chance"]) / (1 - score["chance"])
    )
    labels = batch["labels"][:, -1]
    shares = [np.mean(labels == answer) for answer in range(1, task.answers + 1)]
    assert score["majority_accuracy"] == max(shares)


def test_expressions_use_all_that_they_may():
    rng = np.random.default_rng(0)
    texts = [arithmetic.expression(15, True, rng) for _ in range(2000)]
    assert {len(text) for text in texts} == {15}
    joined = " ".join(texts)
    assert set(joined) == set("01234+-*() ")
    assert "((" in joined
    assert re.search(r"[+*-]\(", joined)  # a bracket in the middle or at the end
    assert any(text.endswith(")") for text in texts)
    assert not re.search(r"\(\d\)", joined)  # a bracket holds an operator
    for text in texts:
        pairs, open_ = [], []
        for i, c in enumerate(text):
            if c == "(":
                open_.append(i)
            elif c == ")":
                pairs.append((open_.pop(), i))
        assert not {(a + 1, b - 1) for a, b in pairs} & set(pairs)  # no ((..))
        assert (0, 14) not in pairs
    plain = "".join(arithmetic.expression(15, False, rng) for _ in range(50))
    assert set(plain) == set("01234+-*")


def test_long_expressions_are_made_without_recursion():
    text = arithmetic.expression(20_001, True, np.random.default_rng(1))
    assert len(text) == 20_001
    assert arithmetic.value(text) in range(5)


def test_vocabulary_and_identity():
    sizes = [task.vocab_size for task in TASKS]
    assert sizes == [12, 12, 4, 4, 10]
    assert len({task.identity("eval")["task"] for task in TASKS}) == 5
    assert Arithmetic(seed=3).identity("train") == {
        "task": "arithmetic mod 5 with brackets", "seed": 3, "split": "train", "lengths": [4, 40],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "arithmetic", "min_length": 1}, "task.min_length must be between 2 and"),
        ({"name": "formal", "length": 2}, "task.min_length must be between 2 and task.length=2"),
        ({"name": "arithmetic", "min_length": 7, "length": 7}, "is a multiple of 2"),
        ({"name": "formal", "language": "partiy"}, "'partiy'; valid: parity, even_pairs"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(UserError, match=message):
        build(change, seed=0)


def test_lengths_that_cannot_be():
    with pytest.raises(ValueError, match="has a length of a multiple of 2, not 41"):
        Arithmetic().eval_batch(41, 0, 1)
    with pytest.raises(ValueError, match="has a length of 2 or more, not 1"):
        Formal().eval_batch(1, 0, 1)
