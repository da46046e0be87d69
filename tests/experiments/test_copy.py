import numpy as np
import pytest

from experiments.errors import UserError
from experiments.tasks import Scored, build
from experiments.tasks.copy import COPY, START, STOP, SYMBOLS, Copy


def text(tokens):
    """Token ids as characters; padding is `_`."""
    return "".join("_$|."[t] if t < SYMBOLS else chr(ord("a") + t - SYMBOLS) for t in tokens)


def parse(row):
    """Strings of a packed row, checking that every example is `$s|s.` and the rest padding."""
    strings, rest = [], text(row).rstrip("_")
    while rest:
        example, _, rest = rest.partition(".")
        first, _, second = example.removeprefix("$").partition("|")
        assert example == f"${first}|{second}"
        assert first == second
        strings.append(first)
    return strings


def test_rows_are_packed_examples():
    task = Copy(letters=5, length=9, min_length=2, row=64)
    batch = task.train_batch(3, 50)
    assert batch["tokens"].shape == batch["labels"].shape == (50, 64)
    assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
    lengths = []
    for row in batch["tokens"]:
        strings = parse(row)
        used = sum(2 * len(s) + 3 for s in strings)
        assert used == (row != 0).sum()
        assert used > 64 - 21  # else one more would have fitted
        lengths += [len(s) for s in strings]
        assert len(set(strings)) > 1  # examples of a row are drawn apart
    assert set(lengths) == set(range(2, 10))


def test_labels_are_the_answers_and_nothing_else():
    task = Copy(letters=5, length=9, min_length=2, row=64)
    for batch in (task.train_batch(0, 50), task.eval_batch(7, 0, 50)):
        for tokens, labels in zip(batch["tokens"], batch["labels"]):
            inside = False
            for t, token in enumerate(tokens):
                inside = inside or token == COPY
                inside = inside and token != STOP
                assert labels[t] == (tokens[t + 1] if inside else -100)
                assert token != START or not inside


def test_letters_are_uniform():
    task = Copy(letters=3, length=8, min_length=8, row=19)
    tokens = task.train_batch(0, 4000)["tokens"][:, 1:9] - SYMBOLS
    assert np.abs(np.bincount(tokens.ravel(), minlength=3) / tokens.size - 1 / 3).max() < 0.01
    pairs = np.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9) / 4000
    assert np.abs(pairs - 1 / 9).max() < 0.02


def test_batches_are_functions_of_seed_and_step():
    task, same = Copy(), Copy()
    same.train_batch(0, 8)
    whole = task.train_batch(1, 8)["tokens"]
    np.testing.assert_array_equal(whole, same.train_batch(1, 8)["tokens"])
    np.testing.assert_array_equal(whole[:4], task.train_batch(2, 4)["tokens"])
    assert (whole != Copy(seed=1).train_batch(1, 8)["tokens"]).any()
    evaluation = task.eval_batch(60, 0, 6)["tokens"]
    np.testing.assert_array_equal(evaluation[4:], task.eval_batch(60, 4, 2)["tokens"])
    assert evaluation.shape == (6, 123)
    assert len({text(row) for row in evaluation}) == 6
    seen = {s for row in task.train_batch(0, 200)["tokens"] for s in parse(row) if len(s) > 7}
    assert not seen & {s for row in task.eval_batch(8, 0, 200)["tokens"] for s in parse(row)}


def test_score():
    task = Copy(letters=4)
    assert isinstance(task, Scored)
    labelled = task.eval_batch(3, 0, 4)["labels"] != -100
    correct = labelled.copy()
    correct[1, 4] = False  # one letter
    correct[2, 7] = False  # the full stop
    score = task.score({"correct": correct, "labelled": labelled})
    assert score == {
        "string_accuracy": 0.5, "character_accuracy": 11 / 12,
        "string_chance": 1 / 64, "character_chance": 0.25,
    }  # fmt: skip


def test_vocabulary_and_identity():
    task = build({"name": "copy"}, seed=2)
    assert task.vocab_size == 30
    assert task.identity("eval") == {"task": "copy", "letters": 26, "split": "eval", "seed": 2}
    assert task.identity("train")["lengths"] == [5, 50]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"letters": 1}, "task.letters must be at least 2, got 1"),
        ({"min_length": 0}, "task.min_length must be between 1 and task.length=50, got 0"),
        ({"min_length": 51}, "got 51"),
        ({"row": 102}, r"2·task.length\+3 = 103 tokens, got 102"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(UserError, match=message):
        build({"name": "copy"} | change, seed=0)
    with pytest.raises(ValueError, match="at least 1 letter, got 0"):
        Copy().eval_batch(0, 0, 1)
