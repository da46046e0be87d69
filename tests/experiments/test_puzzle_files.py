import gzip

import numpy as np
import pytest

from experiments.tasks import puzzle_files, streams, sudoku

HEADER = "source,question,answer,rating"
GOOD = "x,1234341221434.21,1234341221434321,1"
PAIRS = [
    ("x,1234341221434.21,1234341221434321", "3 columns, expected 4"),
    ("x,1234341221434.21,1234341221434321,1,2", "5 columns, expected 4"),
    ("x,1234341221434.21,1234341221434321,hard", "rating 'hard' is not a number"),
    ("x,1234341221434.21,1234341221434321,nan", "rating 'nan' is not a number"),
    ("x,1234341221434.2,1234341221434321,1", "question has 15 characters, expected 16"),
    ("x,1234341221434.21,12343412214343211,1", "answer has 17 characters, expected 16"),
    ("x,123434122143é.21,1234341221434321,1", "question has the bad character 'é' at position 13"),
    (
        "x,1234341221435.21,1234341221434321,1",
        "question has a character other than 1-4, '.' and 0: '5' at position 13",
    ),
    (
        "x,1234341221434.21,123434122143432.,1",
        "answer has a character other than 1-4: '.' at position 16",
    ),
    ("x,4234341221434.21,1234341221434321,1", "answer contradicts question"),
    ("x,123434122143....,1234341221431234,1", "answer is not a solution"),
]


def csv_file(path, *rows, header=HEADER):
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("row", "reason"), PAIRS)
def test_bad_rows_are_named_and_stop(tmp_path, row, reason):
    file = csv_file(tmp_path / "bad.csv", GOOD, row, GOOD, GOOD)
    with pytest.raises(ValueError) as error:
        sudoku.read(file, "stop")
    assert str(error.value).startswith(f"{file}:3: {reason}")
    assert "(1 of 4 rows are bad; task.on_error=skip leaves them out)" in str(error.value)


def test_bad_rows_are_skipped_and_counted(tmp_path):
    file = csv_file(tmp_path / "bad.csv", PAIRS[0][0], GOOD, *(row for row, _ in PAIRS[1:]), GOOD)
    with pytest.warns(UserWarning, match=r"left out 11 of 13 rows, the first: .*bad.csv:2: 3 col"):
        puzzles = sudoku.read(file, "skip")
    assert len(puzzles) == 2
    assert [p.line for p in puzzles.problems] == [2, *range(4, 14)]
    assert all(p.reason.startswith(r) for p, (_, r) in zip(puzzles.problems, PAIRS, strict=True))
    assert puzzles.identity()["rejected"] == 11


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1: the header must be source,question,answer,rating, got an empty file"),
        (b"question,answer\n", ":1: the header must be source"),
        (b"source,question,answer,rating\n", "has no usable rows"),
        (b"source,question,answer,rating\nx,12,12,1\n", ":2: grids have 2 characters; a Sudoku"),
        (b"source,question,answer,rating\nx,\xff\xff,12,1\n", "cannot be read"),
        (b'source,question,answer,rating\nx,"12', ":2: 2 columns, expected 4"),
    ],
)
def test_broken_files(tmp_path, content, message):
    file = tmp_path / "broken.csv"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        sudoku.read(file, "stop")


def test_truncated_gzip_and_missing_files(tmp_path):
    whole = gzip.compress(f"{HEADER}\n{GOOD}\n".encode())
    for content in (whole[:-20], b"no gzip"):
        (tmp_path / "a.csv.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.csv\.gz cannot be read"):
            sudoku.read(tmp_path / "a.csv.gz", "stop")
    with pytest.raises(
        ValueError, match=r"'sudok9' does not exist; shipped data: sudoku4, sudoku9"
    ):
        puzzle_files.locate("sudok9")
    with pytest.raises(ValueError, match="'ask', allowed: stop, skip"):
        sudoku.read(tmp_path / "a.csv.gz", "ask")


def test_line_endings_byte_order_mark_and_blank_lines(tmp_path):
    file = tmp_path / "windows.csv"
    file.write_bytes(f"\ufeff{HEADER}\r\n{GOOD}\r\n\r\n{GOOD}\r\n".encode())
    assert len(sudoku.read(file, "stop")) == 2


def test_write_and_read(tmp_path):
    rows = [("a", "1234341221434.21", "1234341221434321", 3)]
    for name in ("x.csv", "x.csv.gz"):
        puzzle_files.write(tmp_path / name, rows)
        first = (tmp_path / name).read_bytes()
        puzzle_files.write(tmp_path / name, rows)
        assert (tmp_path / name).read_bytes() == first
        puzzles = sudoku.read(tmp_path / name, "stop")
        assert bytes(puzzles.question[0]).decode() == rows[0][1]
        assert (puzzles.rating, puzzles.source) == ([3.0], ["a"])


def test_buckets():
    values, steps = np.array([0, 0, 3, 9]), np.array([1, 3, 5, 7])
    found = puzzle_files.buckets(values, (0, 1, 5, 8), {"a": np.array([1, 0, 1, 1])}, steps)
    assert [(b["from"], b["to"], b["examples"], b["a"]) for b in found] == [
        (0, 0, 2, 0.5), (3, 3, 1, 1), (9, 9, 1, 1),
    ]  # fmt: skip
    assert found[0]["solver_steps_mean"] == found[0]["solver_steps_median"] == 2
    outcome = {"steps": steps, "effective_layers": 2 * steps, "flops": np.array([1, 2, 3, 9])}
    values = np.array([0, 0, 0, 9])
    effort = puzzle_files.effort(outcome)
    (easy, _) = puzzle_files.buckets(values, (0, 5), {}, steps, effort)
    assert (easy["effective_layers_mean"], easy["effective_layers_median"]) == (6, 6)
    assert (easy["flops_per_example_mean"], easy["flops_per_example_median"]) == (2, 2)
    (_, hard) = puzzle_files.buckets(values, (0, 5), {}, steps, effort)
    assert hard["flops_per_example_mean"] == 9


def test_epochs_visit_everything_in_changing_order():
    epoch, index = streams.epochs(0, 10, np.arange(30))
    orders = [tuple(index[epoch == e]) for e in range(3)]
    assert all(set(order) == set(range(10)) for order in orders)
    assert len(set(orders)) > 1
    np.testing.assert_array_equal(streams.epochs(0, 10, np.arange(17, 19))[1], index[17:19])
