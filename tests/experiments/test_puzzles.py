import re

import numpy as np
import pytest

from experiments import puzzles
from experiments.errors import UserError
from experiments.tasks import maze, sudoku

SUDOKU = "1234\n3412\n21..\n4..1\n"
MAZE = "S #\n# #\n# G\n"


def read(tmp_path, text, kind="sudoku", length=16):
    path = tmp_path / "puzzles.txt"
    path.write_text(text)
    return puzzles.read(path, kind, length)


@pytest.mark.parametrize(
    "text",
    [
        SUDOKU,
        SUDOKU.replace(".", "0"),
        "1234341221..4..1\n",
        "# a comment\n12|34\n34|12\n--+--\n21|..\n4.|.1\n",
        "1 2 | 3 4\n3 4 | 1 2\n----+----\n2 1 | . .\n4 . | . 1",
    ],
)
def test_ways_to_write_a_sudoku(tmp_path, text):
    (good,), bad = read(tmp_path, text)
    assert not bad
    assert good.tokens.tolist() == [2, 3, 4, 5, 4, 5, 2, 3, 3, 2, 1, 1, 5, 1, 1, 2]


def test_several_puzzles_and_their_lines(tmp_path):
    good, bad = read(tmp_path, f"\n{SUDOKU}\n\n{SUDOKU}1234341221..4..1\n1234341221..4..1\n")
    assert not bad
    assert [p.line for p in good] == [2, 8, 12, 13]


def test_nine_by_nine_as_the_task_reads_it(tmp_path):
    task = sudoku.Sudoku(path="sudoku9")
    tokens = task.eval_batch(81, 0, 2)["tokens"]
    lines = ["".join("." if t == 1 else str(t - 1) for t in row) for row in tokens]
    good, bad = read(tmp_path, "\n".join(lines), length=81)
    assert not bad
    assert np.array_equal(np.stack([p.tokens for p in good]), tokens)


def test_mazes(tmp_path):
    (good,), bad = read(tmp_path, MAZE, "maze", 9)
    assert not bad
    assert maze.text(good.tokens) == "S ## ## G"
    # A row without walls, and what is left of the blocks around it.
    good, bad = read(tmp_path, "S##\n   \n##G\n\n\nS##\n   \n##G", "maze", 9)
    assert not bad
    assert [(p.line, maze.text(p.tokens)) for p in good] == [(1, "S##   ##G"), (6, "S##   ##G")]
    # A line with all cells, in which the walls are no comment; one that begins with a space.
    good, bad = read(tmp_path, "#S#  #  G\n S ##  G \n", "maze", 9)
    assert not bad
    assert [maze.text(p.tokens) for p in good] == ["#S#  #  G", " S ##  G "]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("1234\n3412\n21..\n", 1, "3 rows with 12 cells; a grid is 4×4, 16 cells"),
        ("1234\n3412\n21...\n4..1\n", 3, "5 cells in a row of 4"),
        ("1234\n3412\n21..\n4..5\n", 4, "bad character '5' at column 4"),
        ("\n1234341221..4..x\n", 2, "bad character 'x' at column 16"),
        ("123434122134..1\n", 1, "1 rows with 15 cells"),
        ("1134\n3412\n2...\n4..1\n", 1, r"1 stands twice .*\(row 1 column 1 and row 1 column 2\)"),
    ],
)
def test_malformed_sudokus(tmp_path, text, line, reason):
    good, (bad,) = read(tmp_path, text)
    assert not good
    assert bad.line == line
    assert str(bad).startswith(f"{tmp_path / 'puzzles.txt'}:{line}: ")
    assert re.search(reason, bad.reason)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("S #\n# #\n#  \n", 1, "one S and one G, this has 1 S and 0 G"),
        ("S#G\n# #\n#  \n", 1, "G cannot be reached"),
        ("S #\n# #\n#oG\n", 3, "bad character 'o' at column 2"),
        ("S #\n# #\n#G\n", 3, "2 cells in a row of 3"),
    ],
)
def test_malformed_mazes(tmp_path, text, line, reason):
    good, (bad,) = read(tmp_path, text, "maze", 9)
    assert not good
    assert bad.line == line
    assert reason in bad.reason


def test_good_ones_are_kept_beside_bad_ones(tmp_path):
    good, bad = read(tmp_path, f"12\n\n{SUDOKU}")
    assert [p.line for p in good] == [3]
    assert [p.line for p in bad] == [1]


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        puzzles.read(tmp_path / "absent", "sudoku", 16)
    with pytest.raises(UserError, match="holds no puzzle"):
        read(tmp_path, "\n\n")
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        puzzles.read(tmp_path / "x", "sudoku", 16)
