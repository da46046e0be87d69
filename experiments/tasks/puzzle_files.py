"""Puzzle files: CSV with the columns source, question, answer, rating, checked row by row.

The public Sudoku-Extreme and Maze-Hard sets come in this form: a header, then one puzzle a line,
grids as strings of one character per cell, row by row. Plain or gzip-compressed.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import io
import itertools
import math
import os
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

COLUMNS = ("source", "question", "answer", "rating")
ON_ERROR = ("stop", "skip")
CHUNK = 50_000
DATA_DIR = Path(__file__).parent.parent / "data"


class Odd(NamedTuple):
    """Characters (N, L) of grids, and which of them must not be there, (N, L) bool."""

    characters: np.ndarray
    bad: np.ndarray

    def where(self, row: int) -> str:
        """The first bad character of a row, and its place in the grid's string, from 1."""
        at = int(self.bad[row].argmax())
        return f": {chr(self.characters[row, at])!r} at position {at + 1}"


# (questions, answers), both (N, L) character codes -> {reason: (N,) bool, True where it is broken,
# or the odd characters that break it}; the first reason that holds is the one reported.
Check = Callable[[np.ndarray, np.ndarray], Mapping[str, np.ndarray | Odd]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A row that was not used: where it stands and why."""

    file: str
    line: int
    reason: str
    early: bool = False  # before its grids were looked at

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Puzzles:
    """N puzzles of one file.

    Attributes:
      folder: name of the folder that the file lies in; "" for a shipped file.
      name: file name.
      sha256: of the file's bytes as they lie on disk.
      question: (N, L) uint8 character codes.
      answer: (N, L) uint8 character codes.
      rating: (N,) float64.
      source: N names.
      problems: the rows left out.
    """

    folder: str
    name: str
    sha256: str
    question: np.ndarray
    answer: np.ndarray
    rating: np.ndarray
    source: Sequence[str]
    problems: Sequence[Problem]

    def __len__(self) -> int:
        return len(self.question)

    def identity(self) -> dict[str, object]:
        """Folder and name, number of puzzles used and left out, and hash."""
        return {
            "file": f"{self.folder}/{self.name}" if self.folder else self.name,
            "puzzles": len(self),
            "rejected": len(self.problems),
            "sha256": self.sha256,
        }


def codes(text: str) -> np.ndarray:
    """Character codes of an ASCII string, (len,) uint8."""
    return np.frombuffer(text.encode("ascii"), np.uint8)


def square_side(length: int) -> int:
    """Side of a square grid of `length` cells, or 0 if there is none."""
    side = round(length**0.5)
    return side if side * side == length else 0


def locate(path: str) -> Path:
    """A user's file, or a shipped one by its bare name ("sudoku9").

    Raises:
      ValueError: there is no such file.
    """
    shipped = {p.name.removesuffix(".csv.gz"): p for p in sorted(DATA_DIR.glob("*.csv.gz"))}
    if path in shipped:
        return shipped[path]
    if os.path.exists(path):
        return Path(path)
    raise ValueError(f"task.path={path!r} does not exist; shipped data: {', '.join(shipped)}")


def check_on_error(on_error: str) -> None:
    """Raises ValueError unless `on_error` is one of `ON_ERROR`."""
    if on_error not in ON_ERROR:
        raise ValueError(f"task.on_error={on_error!r}, allowed: {', '.join(ON_ERROR)}")


def read(path: Path, check_length: Callable[[int], str], check: Check, on_error: str) -> Puzzles:
    """Reads and checks a file.

    Args:
      path: the file; a name that ends in .gz is decompressed.
      check_length: says what is wrong with a grid of so many characters, "" if nothing is.
      check: finds the broken ones among rows of the right length.
      on_error: "stop" raises when there are bad rows, "skip" leaves them out with a warning.

    Returns:
      The good rows in the order of the file.

    Raises:
      ValueError: the file cannot be read, has no such header or no good row, or has bad rows and
        `on_error` is "stop"; the message has file, line and reason of the first and the count.
    """
    check_on_error(on_error)
    problems: list[Problem] = []
    parts: list[tuple[np.ndarray, np.ndarray, list[tuple[float, str]]]] = []
    length, total = 0, 0
    rows = _rows(path, problems)
    # In chunks: millions of rows as Python objects would not fit into memory.
    while chunk := list(itertools.islice(rows, CHUNK)):
        total += len(chunk)
        if not length:
            # What most rows agree on; a broken first row must not make all others look wrong.
            length = Counter(len(row.question) for row in chunk).most_common(1)[0][0]
            if wrong := check_length(length):
                raise ValueError(f"{path}:{chunk[0].line}: {wrong}")
        parts.append(_good(path, chunk, length, check, problems))
    _report(path, problems, total + sum(p.early for p in problems), on_error)
    kept = [row for part in parts for row in part[2]]
    return Puzzles(
        folder="" if path.parent == DATA_DIR else Path(os.path.abspath(path)).parent.name,
        name=path.name,
        sha256=_sha256(path),
        question=np.concatenate([part[0] for part in parts]),
        answer=np.concatenate([part[1] for part in parts]),
        rating=np.array([rating for rating, _ in kept], np.float64),
        source=[source for _, source in kept],
        problems=problems,
    )


class _Row(NamedTuple):
    line: int
    question: str
    answer: str
    rating: float
    source: str


def _rows(path: Path, problems: list[Problem]) -> Iterator[_Row]:
    """The rows with four columns and a number at the end; the others become problems."""
    reader = None
    try:
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = tuple(name.strip() for name in next(reader, ()))
            if header != COLUMNS:
                raise ValueError(
                    f"{path}:1: the header must be {','.join(COLUMNS)}, got "
                    f"{','.join(header)[:80] or 'an empty file'}"
                )
            for row in reader:
                reason = _wrong_row(row)
                if reason:
                    problems.append(Problem(str(path), reader.line_num, reason, early=True))
                elif row:
                    source, question, answer, rating = row
                    yield _Row(reader.line_num, question, answer, float(rating), sys.intern(source))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num if reader else 1}: {error}") from error


def _wrong_row(row: list[str]) -> str:
    """What is wrong with the columns, "" if nothing is; an empty line is no row at all."""
    if not row:
        return ""
    if len(row) != len(COLUMNS):
        return f"{len(row)} columns, expected {len(COLUMNS)}"
    try:
        finite = math.isfinite(float(row[3]))
    except ValueError:
        finite = False
    return "" if finite else f"rating {row[3][:20]!r} is not a number"


def _good(
    path: Path, chunk: list[_Row], length: int, check: Check, problems: list[Problem]
) -> tuple[np.ndarray, np.ndarray, list[tuple[float, str]]]:
    """Questions and answers (N, length), ratings and sources of the good rows."""
    whole = []
    for row in chunk:
        for name, text in (("question", row.question), ("answer", row.answer)):
            if len(text) != length:
                reason = f"{name} has {len(text)} characters, expected {length}"
            elif not text.isascii():
                at, odd = next((i, c) for i, c in enumerate(text, 1) if not c.isascii())
                reason = f"{name} has the bad character {odd!r} at position {at}"
            else:
                continue
            problems.append(Problem(str(path), row.line, reason))
            break
        else:
            whole.append(row)
    question = codes("".join(row.question for row in whole)).reshape(-1, length)
    answer = codes("".join(row.answer for row in whole)).reshape(-1, length)
    good = np.ones(len(whole), bool)
    for reason, found in check(question, answer).items():
        broken = found.bad.any(axis=1) if isinstance(found, Odd) else found
        for i in np.flatnonzero(broken & good).tolist():
            where = found.where(i) if isinstance(found, Odd) else ""
            problems.append(Problem(str(path), whole[i].line, reason + where))
        good &= ~broken
    kept = [(whole[i].rating, whole[i].source) for i in np.flatnonzero(good)]
    return question[good], answer[good], kept


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _report(path: Path, problems: list[Problem], rows: int, on_error: str) -> None:
    problems.sort(key=lambda p: p.line)
    if problems and on_error == "stop":
        raise ValueError(
            f"{problems[0]} ({len(problems)} of {rows} rows are bad; "
            "task.on_error=skip leaves them out)"
        )
    if rows == len(problems):
        raise ValueError(f"{path} has no usable rows" + (f"; {problems[0]}" if problems else ""))
    if problems:
        warnings.warn(
            f"left out {len(problems)} of {rows} rows, the first: {problems[0]}", stacklevel=4
        )


def write(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes rows of (source, question, answer, rating); .gz compresses, the same bytes each time.

    Args:
      path: file to write.
      rows: the puzzles.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    raw = text.getvalue().encode("ascii")
    path.write_bytes(gzip.compress(raw, 9, mtime=0) if path.suffix == ".gz" else raw)


def effort(outcome: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `buckets` averages beside the solver steps, of an outcome that knows it: (N,) each."""
    names = {"effective_layers": "effective_layers", "flops_per_example": "flops"}
    return {name: outcome[key] for name, key in names.items() if key in outcome}


def buckets(
    values: np.ndarray,
    edges: Sequence[float],
    metrics: Mapping[str, np.ndarray],
    steps: np.ndarray,
    effort: Mapping[str, np.ndarray] | None = None,
) -> list[dict[str, float]]:
    """Means of metrics by difficulty.

    Args:
      values: (N,) difficulty.
      edges: ascending; bucket i holds edges[i] <= value < edges[i+1], the last has no upper end and
        the first no lower.
      metrics: {name: (N,) values to average}.
      steps: (N,) solver steps.
      effort: {name: (N,)} what else an example took, from `effort`.

    Returns:
      For each bucket that is not empty `from`, `to` (smallest and largest value in it),
      `examples`, the metrics, `solver_steps_mean` and `solver_steps_median`, and both of `effort`.
    """
    spent = {"solver_steps": steps, **(effort or {})}
    statistics: dict[str, Callable[[np.ndarray], Any]] = {"mean": np.mean, "median": np.median}
    which = np.searchsorted(np.asarray(edges[1:]), values, side="right")
    found = []
    for i in np.unique(which):
        mine = which == i
        found.append(
            {
                "from": float(values[mine].min()),
                "to": float(values[mine].max()),
                "examples": int(mine.sum()),
                **{name: float(value[mine].mean()) for name, value in metrics.items()},
                **{
                    f"{name}_{statistic}": float(of(value[mine]))
                    for name, value in spent.items()
                    for statistic, of in statistics.items()
                },
            }
        )
    return found
