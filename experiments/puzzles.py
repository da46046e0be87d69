"""Puzzles that a user wrote down: Sudokus and mazes as text, read with file, line and reason.

A puzzle is a block of lines, one row of the grid each, or one line with all its cells; blocks are
separated by empty lines. Sudoku: digits, `.` or 0 for a blank; spaces and `|`, `-`, `+` drawn
between boxes are skipped, and so are lines that begin with `#`. Mazes: `#` walls, spaces, S and G;
a line of spaces is a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from experiments.errors import UserError
from experiments.tasks import maze, puzzle_files, sudoku
from experiments.tasks.puzzle_files import Problem

KINDS = ("sudoku", "maze")


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """One puzzle.

    Attributes:
      line: where it begins in the file.
      tokens: (T,) int32 token ids, as the task of its kind makes them.
    """

    line: int
    tokens: np.ndarray


def read(path: Path, kind: str, length: int) -> tuple[list[Puzzle], list[Problem]]:
    """Reads a file.

    Args:
      path: the file.
      kind: one of `KINDS`.
      length: cells of a grid, those that the model was trained on.

    Returns:
      The good puzzles, and what is wrong with the others.

    Raises:
      UserError: the file cannot be read or holds no puzzle.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    good: list[Puzzle] = []
    bad: list[Problem] = []
    for first, rows in _blocks(text, kind, length):
        tokens, line, reason = _parse(first, rows, kind, length)
        if reason:
            bad.append(Problem(str(path), line, reason))
        else:
            good.append(Puzzle(first, tokens))
    if not good and not bad:
        raise UserError(f"{path} holds no puzzle")
    return good, bad


def _blocks(text: str, kind: str, length: int) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    """(first line, [(line, row), ...]) of each block; a line with all cells is a block of its own.

    Drawn lines of a Sudoku and its comments are left out.
    """
    rows: list[tuple[int, str]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        row = raw
        if kind == "sudoku":
            row = "" if raw.startswith("#") else "".join(c for c in raw if c not in " \t|")
            if raw.strip() and not row.strip("-+="):
                continue  # a comment, or a line drawn between boxes
        whole = len(row) == length
        if not row or whole:
            if rows:
                yield rows[0][0], rows
            rows = []
        if whole:
            yield number, [(number, row)]
        elif row:  # spaces alone are a row of a maze
            rows.append((number, row))
    if rows:
        yield rows[0][0], rows


def _parse(
    first: int, rows: list[tuple[int, str]], kind: str, length: int
) -> tuple[np.ndarray, int, str]:
    """(tokens, line of the trouble, reason); the reason is "" where all is well."""
    side = puzzle_files.square_side(length)
    nothing = np.zeros(0, np.int32)
    if len(rows) > 1 or len(rows[0][1]) != length:
        if len(rows) != side:
            cells = sum(len(row) for _, row in rows)
            reason = f"{len(rows)} rows with {cells} cells; a grid is {side}×{side}, {length} cells"
            return nothing, first, reason
        for line, row in rows:
            if len(row) != side:
                return nothing, line, f"{len(row)} cells in a row of {side}"
    for line, row in rows:
        for column, character in enumerate(row, 1):
            if not _allowed(character, kind, side):
                return nothing, line, f"bad character {character!r} at column {column}"
    text = "".join(row for _, row in rows)
    if kind == "maze":
        return _maze(text, first)
    return _sudoku(text, first, side)


def _allowed(character: str, kind: str, side: int) -> bool:
    if kind == "maze":
        return character in maze.SYMBOLS[:-1]
    return character in sudoku.DIGITS[:side] + sudoku.BLANKS


def _maze(text: str, first: int) -> tuple[np.ndarray, int, str]:
    tokens = np.array([maze.SYMBOLS.index(c) + 1 for c in text], np.int32)
    reason = ""
    if text.count("S") != 1 or text.count("G") != 1:
        found = f"{text.count('S')} S and {text.count('G')} G"
        reason = f"a maze has one S and one G, this has {found}"
    elif maze.path_lengths(tokens[None])[0] < 0:
        reason = "G cannot be reached from S"
    return tokens, first, reason


def _sudoku(text: str, first: int, side: int) -> tuple[np.ndarray, int, str]:
    digits = np.array([sudoku.DIGITS.find(c) + 1 for c in text], np.int32)
    reason = ""
    for cells in sudoku.units(round(side**0.5)):
        given = digits[cells][digits[cells] > 0]
        values, counts = np.unique(given, return_counts=True)
        if counts.size and counts.max() > 1:
            twice = sudoku.DIGITS[values[counts.argmax()] - 1]
            at = [(c // side + 1, c % side + 1) for c in cells if text[c] == twice]
            places = " and ".join(f"row {r} column {c}" for r, c in at[:2])
            reason = f"no solution: {twice} stands twice in a row, column or box ({places})"
            break
    return digits + 1, first, reason
