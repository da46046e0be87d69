"""Sudoku: fill the grid. Reads the Sudoku-Extreme CSV format for any square size (4×4, 9×9, 16×16).

A grid of side n² has n²×n² cells read row by row; token 0 is padding, 1 a blank, digit d is d + 1.
Labels are the whole solution, givens included. Digits above 9 are written A, B, ….
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments.tasks import puzzle_files, streams
from experiments.tasks.puzzle_files import Odd, Puzzles

DIGITS = "123456789ABCDEFGHIJKLMNOP"
BLANKS = ".0"
SPLITS = ("random", "easy_to_hard", "given")
RATING_EDGES = (0, 1, 2, 5, 10, 20, 50, 100, 200)


def units(box: int) -> list[np.ndarray]:
    """Cell numbers of every row, column and box of a grid with box×box boxes."""
    side = box * box
    cells = np.arange(side * side).reshape(side, side)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)
    return [*cells, *cells.T, *boxes]


def valid(grids: np.ndarray) -> np.ndarray:
    """Whether grids are solved: every unit holds every digit.

    Args:
      grids: (N, side²) digits; anything but 1..side makes a grid invalid.

    Returns:
      (N,) bool.
    """
    box = round(grids.shape[1] ** 0.25)
    side = box * box
    inside = ((grids >= 1) & (grids <= side)).all(axis=1)
    bits = np.uint32(1) << np.clip(grids, 0, side).astype(np.uint32)
    full = (2 << side) - 2
    right = [np.bitwise_or.reduce(bits[:, unit], axis=1) == full for unit in units(box)]
    return inside & np.logical_and.reduce(right)


def box_of(length: int) -> int:
    """Side of the boxes of a grid of `length` cells, or 0 if it is not a Sudoku's size."""
    box = round(length**0.25)
    return box if box**4 == length and 2 <= box <= 5 else 0


def symmetry(
    grids: np.ndarray, answers: np.ndarray, random: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Puzzles in disguise: other digits, bands, stacks, rows and columns permuted, transposed.

    Args:
      grids: (B, side²) digits, 0 where blank.
      answers: (B, side²) digits.
      random: (B, `symmetry_draws(box)`) random uint64 values that decide on the symmetry.

    Returns:
      Both with the same symmetry applied; solutions stay solutions.
    """
    batch, length = grids.shape
    box = round(length**0.25)
    side = box * box
    parts = np.split(random, np.cumsum([side, *2 * [box, side]]), axis=1)
    digits = streams.permutations(parts[0]) + 1
    digits = np.concatenate([np.zeros((batch, 1), digits.dtype), digits], axis=1)
    lines = []
    for bands, inner in (parts[1:3], parts[3:5]):
        order = streams.permutations(bands)
        inside = streams.permutations(inner.reshape(batch, box, box))
        lines.append((order[:, :, None] * box + inside).reshape(batch, side))
    cells = lines[0][:, :, None] * side + lines[1][:, None, :]
    flip = (parts[5][:, 0] & np.uint64(1)).astype(bool)
    cells = np.where(flip[:, None, None], cells.swapaxes(1, 2), cells).reshape(batch, length)

    def apply(values: np.ndarray) -> np.ndarray:
        moved = np.take_along_axis(values, cells, axis=1)
        return np.take_along_axis(digits, moved.astype(np.int64), axis=1)

    return apply(grids), apply(answers)


def symmetry_draws(box: int) -> int:
    """Random values that `symmetry` needs for each puzzle."""
    return box**2 + 2 * (box + box**2) + 1


@dataclasses.dataclass(frozen=True)
class Sudoku:
    """Sudokus from a file.

    To evaluate a trained run on every puzzle of a CSV file of your own, make a folder with the file
    as test.csv and, as nothing is trained, any CSV with grids of that size as train.csv:
    `--mode=eval --config.task.path=FOLDER --config.task.split=given`, with `eval.max_examples` as
    large as the file.

    Attributes:
      path: a shipped set ("sudoku4", "sudoku9"), a CSV file, or a folder with train.csv and
        test.csv (the layout of Sudoku-Extreme).
      split: how to tell training from evaluation. "random": `eval_share` of a file, the same
        puzzles whatever the experiment's seed. "easy_to_hard": training has a number of empty
        cells within `train_empties`, evaluation has more. "given": a folder's two files.
      eval_share: for "random".
      train_empties: (fewest, most), for "easy_to_hard".
      train_puzzles: if positive, training uses a random sample of so many puzzles.
      augmentations: disguises of each training puzzle, the original not counted; 0 is off.
      on_error: "stop" at bad rows or "skip" them.
      seed: of the order, the disguises and the sample of training puzzles.
    """

    headline: ClassVar[tuple[str, ...]] = (
        "puzzle_accuracy",
        "cell_accuracy",
        "valid_solution",
    )

    path: str = "sudoku9"
    split: str = "random"
    eval_share: float = 0.1
    train_empties: tuple[int, ...] = (39, 50)
    train_puzzles: int = 0
    augmentations: int = 1000
    on_error: str = "stop"
    seed: int = 0

    def __post_init__(self) -> None:
        puzzle_files.check_on_error(self.on_error)
        if self.split not in SPLITS:
            raise ValueError(f"task.split={self.split!r}, allowed: {', '.join(SPLITS)}")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"task.eval_share must be between 0 and 1, got {self.eval_share}")
        ends = tuple(self.train_empties)
        if len(ends) != 2 or not 0 <= ends[0] <= ends[1]:
            raise ValueError(f"task.train_empties must be (fewest, most), got {ends}")
        for name in ("train_puzzles", "augmentations"):
            if getattr(self, name) < 0:
                raise ValueError(f"task.{name} must not be negative, got {getattr(self, name)}")
        if self._train_rows.size == 0 or self._eval_rows.size == 0:
            raise ValueError(
                f"task.split={self.split!r} leaves {self._train_rows.size} puzzles for training "
                f"and {self._eval_rows.size} for evaluation of {self.path!r}"
            )
        if self.train_puzzles > self._train_rows.size:
            raise ValueError(
                f"task.train_puzzles={self.train_puzzles}, but only {self._train_rows.size} "
                "puzzles are there for training"
            )

    @property
    def length(self) -> int:
        """Cells of a grid."""
        return self._files["train"].question.shape[1]

    @property
    def box(self) -> int:
        """Side of a box; the grid's side is its square."""
        return box_of(self.length)

    @property
    def vocab_size(self) -> int:
        """Padding, blank and the digits."""
        return self.box**2 + 2

    @property
    def title(self) -> str:
        """For tables and figures."""
        return f"Sudoku {self.box**2}×{self.box**2}"

    @property
    def eval_size(self) -> int:
        """Number of evaluation puzzles."""
        return self._eval_rows.size

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of `split` exactly; written into result.json."""
        train = split == "train"
        rows = self._used_train_rows if train else self._eval_rows
        identity: dict[str, object] = {
            "task": "sudoku",
            "split": split,
            "split_rule": self.split,
            "size": int(rows.size),
            "empties": [int(e) for e in self._span("train" if train else "eval", rows)],
            **self._files["train" if train else "eval"].identity(),
        }
        if self.split == "random":
            identity["eval_share"] = self.eval_share
        if train:
            identity["augmentations"] = self.augmentations
            identity["seed"] = self.seed
        return identity

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The training batch of optimiser step `step` (0-based): `tokens`, `labels` (B, side²)."""
        position = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        _, index = streams.epochs(self.seed, self._used_train_rows.size, position)
        row = self._used_train_rows[index]
        question, answer = (values[row] for values in self._digits["train"])
        if self.augmentations:
            # Which disguise a puzzle wears this time; number 0 is none.
            pick = streams.draws(streams.stream_key(self.seed, "disguise"), position, 1)
            number = (pick[:, 0] % np.uint64(self.augmentations + 1)).astype(np.int64)
            stream = row * (self.augmentations + 1) + number
            key = streams.stream_key(self.seed, "symmetry")
            random = streams.draws(key, stream, symmetry_draws(self.box))
            disguised = symmetry(question, answer, random)
            plain = (number == 0)[:, None]
            question = np.where(plain, question, disguised[0])
            answer = np.where(plain, answer, disguised[1])
        return self._tokens(question, answer)

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation puzzles `start` .. `start + count - 1`; `length` must be that of the grid."""
        if length != self.length:
            raise ValueError(f"the puzzles in {self.path!r} have {self.length} cells, not {length}")
        rows = self._eval_rows[start : start + count]
        return self._tokens(*(values[rows] for values in self._digits["eval"]))

    def score(self, outcome: Mapping[str, np.ndarray]) -> dict[str, object]:
        """What the rules of the game say about the answers to the first N evaluation puzzles.

        Args:
          outcome: `predictions` (N, side²) token ids, `steps` (N,).

        Returns:
          `puzzle_accuracy` (share of grids right in every cell), `cell_accuracy` (share of cells),
          `blank_accuracy` (share of blank cells), `valid_solution` (share of grids that keep the
          givens and obey the rules), and the shares by `rating` and number of `empties`.
        """
        predictions = outcome["predictions"]
        rows = self._eval_rows[: len(predictions)]
        question, answer = (values[rows] for values in self._digits["eval"])
        digits = predictions.astype(np.int64) - 1
        right = digits == answer
        kept = ((question == 0) | (digits == question)).all(axis=1)
        metrics = {"puzzle_accuracy": right.all(axis=1), "valid_solution": kept & valid(digits)}
        empties = (question == 0).sum(axis=1)
        blank = (right & (question == 0)).sum() / max(1, empties.sum())
        ratings = self._files["eval"].rating[rows]
        width = max(1, self.box**2 // 3)
        edges = range(0, self.length, width)
        steps, effort = outcome["steps"], puzzle_files.effort(outcome)
        return {
            **{name: float(value.mean()) for name, value in metrics.items()},
            "cell_accuracy": float(right.mean()),
            "blank_accuracy": float(blank),
            "by_rating": puzzle_files.buckets(ratings, RATING_EDGES, metrics, steps, effort),
            "by_empties": puzzle_files.buckets(empties, edges, metrics, steps, effort),
        }

    def _tokens(self, question: np.ndarray, answer: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "tokens": (question + 1).astype(np.int32),
            "labels": (answer + 1).astype(np.int32),
        }

    def _span(self, split: str, rows: np.ndarray) -> tuple[int, int]:
        empties = self._empties(split)[rows]
        return empties.min(), empties.max()

    def _empties(self, split: str) -> np.ndarray:
        return (self._digits[split][0] == 0).sum(axis=1)

    # frozen=True forbids assignment, but not these: they write to the instance's dictionary.
    @functools.cached_property
    def _files(self) -> dict[str, Puzzles]:
        path = Path(self.path)
        if path.is_dir() and self.split == "random":
            raise ValueError(
                f"task.path={self.path!r} is a folder with its own train.csv and test.csv: "
                "task.split must be 'given' or 'easy_to_hard', not 'random'"
            )
        if not path.is_dir():
            if self.split == "given":
                raise ValueError(
                    f"task.split='given' needs a folder with train.csv and test.csv, got "
                    f"task.path={self.path!r}"
                )
            puzzles = read(puzzle_files.locate(self.path), self.on_error)
            return {"train": puzzles, "eval": puzzles}
        names = {"train": path / "train.csv", "eval": path / "test.csv"}
        for file in names.values():
            if not file.is_file():
                raise ValueError(f"{file} does not exist; a folder needs train.csv and test.csv")
        files = {split: read(file, self.on_error) for split, file in names.items()}
        lengths = [f.question.shape[1] for f in files.values()]
        if lengths[0] != lengths[1]:
            raise ValueError(f"train.csv and test.csv in {path} have grids of {lengths} cells")
        return files

    @functools.cached_property
    def _digits(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Questions and answers as digits, (N, side²) uint8, by split."""
        digit = np.zeros(256, np.uint8)
        digit[puzzle_files.codes(DIGITS)] = np.arange(1, len(DIGITS) + 1)
        return {s: (digit[f.question], digit[f.answer]) for s, f in self._files.items()}

    @functools.cached_property
    def _train_rows(self) -> np.ndarray:
        """Rows that may be used for training."""
        if self.split == "random":
            return np.sort(self._random_order[self._eval_count :])
        rows = np.arange(len(self._files["train"]))
        if self.split == "easy_to_hard":
            empties = self._empties("train")
            low, high = self.train_empties
            rows = rows[(empties >= low) & (empties <= high)]
        return rows

    @functools.cached_property
    def _eval_rows(self) -> np.ndarray:
        """Evaluation rows in random order, so that the first of them are a fair sample."""
        if self.split == "random":
            return self._random_order[: self._eval_count]
        rows = _order(len(self._files["eval"]), "eval")
        if self.split == "easy_to_hard":
            rows = rows[self._empties("eval")[rows] > self.train_empties[1]]
        return rows

    @functools.cached_property
    def _used_train_rows(self) -> np.ndarray:
        if not self.train_puzzles:
            return self._train_rows
        order = _order(self._train_rows.size, f"train/{self.seed}")
        return self._train_rows[np.sort(order[: self.train_puzzles])]

    @functools.cached_property
    def _random_order(self) -> np.ndarray:
        return _order(len(self._files["train"]), "split")

    @property
    def _eval_count(self) -> int:
        return round(self.eval_share * len(self._files["train"]))


def _order(size: int, name: str) -> np.ndarray:
    """A fixed random order of 0..size-1."""
    key = streams.stream_key("sudoku", name)
    return streams.permutations(streams.draws(key, np.arange(size), 1)[:, 0])


def read(path: Path, on_error: str) -> Puzzles:
    """Reads and checks a Sudoku file; that solutions are unique is not checked.

    Raises:
      ValueError: see `puzzle_files.read`.
    """
    return puzzle_files.read(path, _check_length, _check, on_error)


def _check_length(length: int) -> str:
    if box_of(length):
        return ""
    sizes = ", ".join(f"{b**4} ({b * b}×{b * b})" for b in range(2, 6))
    return f"grids have {length} characters; a Sudoku has {sizes}"


def _check(question: np.ndarray, answer: np.ndarray) -> dict[str, np.ndarray | Odd]:
    side = round(question.shape[1] ** 0.5)
    digit = np.zeros(256, np.uint8)
    digit[puzzle_files.codes(DIGITS[:side])] = np.arange(1, side + 1)
    blank = np.zeros(256, bool)
    blank[puzzle_files.codes(BLANKS)] = True
    asked, answered = digit[question], digit[answer]
    digits = f"{DIGITS[0]}-{DIGITS[side - 1]}"
    return {
        f"question has a character other than {digits}, '.' and 0": Odd(
            question, (asked == 0) & ~blank[question]
        ),
        f"answer has a character other than {digits}": Odd(answer, answered == 0),
        "answer contradicts question": ((asked > 0) & (asked != answered)).any(axis=1),
        "answer is not a solution": ~valid(answered),
    }
