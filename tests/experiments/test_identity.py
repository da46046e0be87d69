import pytest

from experiments.identity import data_line, data_name
from experiments.tasks import TASKS

FILE = {"file": "x.csv", "size": 471, "sha256": "ab" * 32, "split_rule": "random"}


@pytest.mark.parametrize(
    ("identity", "examples", "text"),
    [
        (FILE, (), "x.csv n=471 abababab"),
        (FILE, (64, 64), "x.csv n=64 of 471 abababab"),
        (FILE, (64, 471), "x.csv n=64/471 of 471 abababab"),
        (FILE, (471,), "x.csv n=471 abababab"),
        ({"name": "ARC", "size": 10, "votes": 4}, (40,), "ARC n=40"),
        ({"group": "S3", "task": "word_problem"}, (512,), "S3 n=512"),
        (
            {"task": "maze", "generator": {"side": 5}, "size": "endless"},
            (),
            "maze side=5 n=endless",
        ),
    ],
)
def test_data_in_a_few_words(identity, examples, text):
    assert data_name(identity, examples) == text


def test_the_line_about_a_run():
    trained = FILE | {"file": "y.csv", "augmentations": 9}
    assert data_line(trained, FILE, (64,)) == (
        "data: x.csv n=64 of 471 abababab, split random; trained on y.csv n=471 abababab, "
        "augmentations 9"
    )
    assert data_line(None, FILE, (471,)).endswith("; training data unknown (imported weights)")


@pytest.mark.parametrize("name", ["sudoku", "maze", "arc"])
def test_puzzles_name_the_scores_to_print(name):
    assert "puzzle_accuracy" in TASKS[name].headline
