import numpy as np
import pytest

from experiments.errors import UserError
from experiments.tasks import build, groups, options
from experiments.tasks.word_problem import WordProblem


def test_labels_are_running_products():
    task = WordProblem(group="A4", length=9)
    batch = task.train_batch(0, 5)
    table = groups.group("A4").table
    for tokens, labels in zip(batch["tokens"], batch["labels"]):
        product = 0
        for token, label in zip(tokens, labels):
            product = table[product, token - 1]
            assert label == product + 1


def test_shapes_types_and_range():
    task = WordProblem(group="S5", length=7)
    for batch in (task.train_batch(3, 4), task.eval_batch(7, 0, 4)):
        for name in ("tokens", "labels"):
            assert batch[name].shape == (4, 7)
            assert batch[name].dtype == np.int32
            assert batch[name].min() >= 1
            assert batch[name].max() <= 120
    assert task.vocab_size == 121


def test_elements_are_uniform():
    tokens = WordProblem(group="S3", length=32).train_batch(0, 2000)["tokens"]
    shares = np.bincount(tokens.ravel(), minlength=7)[1:] / tokens.size
    assert np.abs(shares - 1 / 6).max() < 0.005
    pairs = np.bincount((tokens[:, 0] - 1) * 6 + tokens[:, 1] - 1, minlength=36) / 2000
    assert np.abs(pairs - 1 / 36).max() < 0.02


def test_batches_depend_only_on_seed_and_step():
    a, b = WordProblem(length=8), WordProblem(length=8)
    b.train_batch(0, 16)
    np.testing.assert_array_equal(a.train_batch(5, 16)["tokens"], b.train_batch(5, 16)["tokens"])
    # The stream of examples is the same however it is cut into batches.
    np.testing.assert_array_equal(a.train_batch(1, 16)["tokens"][:8], a.train_batch(2, 8)["tokens"])
    other = WordProblem(length=8, seed=1)
    assert (a.train_batch(0, 16)["tokens"] != other.train_batch(0, 16)["tokens"]).any()


def test_streams_of_training_and_evaluation_are_disjoint():
    task = WordProblem(group="A5", length=12)
    train = {tuple(row) for step in range(4) for row in task.train_batch(step, 500)["tokens"]}
    evaluation = {tuple(row) for row in task.eval_batch(12, 0, 2000)["tokens"]}
    assert len(train) == len(evaluation) == 2000
    assert not train & evaluation


def test_eval_examples_do_not_depend_on_the_batch():
    task = WordProblem()
    whole = task.eval_batch(10, 0, 8)["tokens"]
    np.testing.assert_array_equal(whole[5:], task.eval_batch(10, 5, 3)["tokens"])


def test_finite_training_set_is_shuffled_each_epoch():
    task = WordProblem(group="A5", length=10, train_sequences=12)
    epochs = [[tuple(r) for r in task.train_batch(e, 12)["tokens"]] for e in range(3)]
    assert len(set(epochs[0])) == 12
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1]
    across = task.train_batch(1, 8)["tokens"]  # examples 8..15 span two epochs
    assert [tuple(r) for r in across] == epochs[0][8:] + epochs[1][:4]


def test_random_lengths_are_padded():
    batch = WordProblem(length=8, min_length=3).train_batch(0, 400)
    lengths = (batch["tokens"] > 0).sum(axis=1)
    assert set(lengths) == set(range(3, 9))
    np.testing.assert_array_equal(batch["tokens"] == 0, batch["labels"] == -100)
    for row, n in zip(batch["tokens"], lengths):
        assert (row[:n] > 0).all()
        assert (row[n:] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "task.length must be at least 1, got 0"),
        ({"min_length": 9, "length": 8}, "task.min_length"),
        ({"min_length": -1}, "task.min_length"),
        ({"train_sequences": -1}, "task.train_sequences"),
        ({"group": "Q8"}, "unknown group 'Q8'"),
        ({"lenght": 8}, "did you mean 'task.length'"),
        ({"name": "word_problm"}, "did you mean 'word_problem'"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(UserError, match=message):
        build({"name": "word_problem"} | change, seed=0)


def test_empty_evaluation_sequences_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        WordProblem().eval_batch(0, 0, 4)


def test_registry_lists_options_and_identity():
    assert options("word_problem")["group"] == "S3"
    task = build({"name": "word_problem", "group": "a5"}, seed=3)
    expected = {"task": "word_problem", "group": "A5", "seed": 3, "split": "eval"}
    assert task.identity("eval") == expected
    few = build({"name": "word_problem", "length": 9, "train_sequences": 50}, seed=3)
    assert few.identity("train") == {
        "task": "word_problem", "group": "S3", "seed": 3, "split": "train", "size": 50,
        "lengths": [9, 9],
    }  # fmt: skip
    assert task.identity("train")["size"] == "endless"
