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
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("source", "question", "answer", "rating")
ON_ERROR = ("stop", "skip")
DATA_DIR = Path(__file__).parent.parent / "data"

# (questions, answers), both (N, L) character codes -> {reason: (N,) bool, True where it is broken};
# the first reason that holds is the one reported.
Check = Callable[[np.ndarray, np.ndarray], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A row that was not used: where it stands and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Puzzles:
    """N puzzles of one file.

    Attributes:
      name: file name.
      sha256: of the file's bytes as they lie on disk.
      question: (N, L) uint8 character codes.
      answer: (N, L) uint8 character codes.
      rating: (N,) float64.
      source: N names.
      problems: the rows left out.
    """

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
        """Name, number of puzzles used and left out, and hash."""
        return {
            "file": self.name,
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
    content = _content(path)
    table, problems = _rows(path, content)
    lengths = Counter(len(question) for _, question, _, _, _ in table)
    # The length most rows agree on; a broken first row must not make all others look wrong.
    length = lengths.most_common(1)[0][0] if lengths else 0
    if lengths and (wrong := check_length(length)):
        raise ValueError(f"{path}:{table[0][0]}: {wrong}")
    rows = []
    for row in table:
        line, question, answer = row[:3]
        for name, text in (("question", question), ("answer", answer)):
            if len(text) != length:
                reason = f"{name} has {len(text)} characters, expected {length}"
                problems.append(Problem(str(path), line, reason))
                break
            if not text.isascii():
                reason = f"{name} has the bad character {_first_odd(text)!r}"
                problems.append(Problem(str(path), line, reason))
                break
        else:
            rows.append(row)
    grids = [
        _matrix((row[1] for row in rows), length),
        _matrix((row[2] for row in rows), length),
    ]
    good = np.ones(len(rows), bool)
    for reason, broken in check(*grids).items():
        for i in np.flatnonzero(broken & good):
            problems.append(Problem(str(path), rows[i][0], reason))
        good &= ~broken
    _report(path, problems, len(problems) + int(good.sum()), on_error)
    kept = np.flatnonzero(good)
    return Puzzles(
        name=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        question=grids[0][kept],
        answer=grids[1][kept],
        rating=np.array([rows[i][3] for i in kept], np.float64),
        source=[rows[i][4] for i in kept],
        problems=problems,
    )


def _content(path: Path) -> str:
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        return raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _rows(path: Path, content: str) -> tuple[list[tuple[int, str, str, float, str]], list[Problem]]:
    """(line, question, answer, rating, source) of the rows with four columns; the other rows."""
    reader = csv.reader(io.StringIO(content, newline=""))
    rows, problems = [], []
    try:
        header = tuple(name.strip() for name in next(reader, ()))
        if header != COLUMNS:
            raise ValueError(
                f"{path}:1: the header must be {','.join(COLUMNS)}, got "
                f"{','.join(header)[:80] or 'an empty file'}"
            )
        for row in reader:
            line = reader.line_num
            if not row:
                continue
            if len(row) != len(COLUMNS):
                reason = f"{len(row)} columns, expected {len(COLUMNS)}"
                problems.append(Problem(str(path), line, reason))
                continue
            source, question, answer, rating = row
            try:
                value = float(rating)
            except ValueError:
                value = float("nan")
            if not np.isfinite(value):
                reason = f"rating {rating[:20]!r} is not a number"
                problems.append(Problem(str(path), line, reason))
                continue
            rows.append((line, question, answer, value, source))
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: {error}") from error
    return rows, problems


def _first_odd(text: str) -> str:
    return next(c for c in text if not c.isascii())


def _matrix(texts: Iterable[str], length: int) -> np.ndarray:
    """(N, length) character codes."""
    return codes("".join(texts)).reshape(-1, max(length, 1))


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


def buckets(
    values: np.ndarray, edges: Sequence[float], metrics: Mapping[str, np.ndarray], steps: np.ndarray
) -> list[dict[str, float]]:
    """Means of metrics by difficulty.

    Args:
      values: (N,) difficulty.
      edges: ascending; bucket i holds edges[i] <= value < edges[i+1], the last has no upper end and
        the first no lower.
      metrics: {name: (N,) values to average}.
      steps: (N,) solver steps.

    Returns:
      For each bucket that is not empty `from`, `to` (smallest and largest value in it),
      `examples`, the metrics, `solver_steps_mean` and `solver_steps_median`.
    """
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
                "solver_steps_mean": float(steps[mine].mean()),
                "solver_steps_median": float(np.median(steps[mine])),
            }
        )
    return found
