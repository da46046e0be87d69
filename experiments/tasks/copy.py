"""Copying: after `$s|` the model writes the string s again, then `.` (spec 1 section 6).

Training rows hold several examples one after the other; the loss counts the answer only, that is
the second s and its full stop. Evaluation rows hold one example, so that length n means a string of
n letters. The answer is teacher-forced: each letter is predicted from the true ones before it.

Token ids: 0 padding, then `$`, `|`, `.`, then the letters. A label is the token that comes next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.losses import IGNORED
from experiments.tasks import streams

START, COPY, STOP = 1, 2, 3
SYMBOLS = 4  # padding and the three above
FRAME = 3  # tokens of an example that are not letters: `$`, `|`, `.`


@dataclasses.dataclass(frozen=True)
class Copy:
    """The copy task.

    Attributes:
      letters: size of the alphabet.
      length: longest training string.
      min_length: shortest training string.
      row: tokens of a training row; examples follow each other while the next one fits, the rest is
        padding.
      seed: seed of the data, part of its identity.
    """

    headline: ClassVar[tuple[str, ...]] = (
        "string_accuracy",
        "character_accuracy",
        "character_chance",
    )

    letters: int = 26
    length: int = 50
    min_length: int = 5
    row: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.letters < 2:
            raise ValueError(f"task.letters must be at least 2, got {self.letters}")
        if not 1 <= self.min_length <= self.length:
            raise ValueError(
                f"task.min_length must be between 1 and task.length={self.length}, "
                f"got {self.min_length}"
            )
        if self.row < 2 * self.length + FRAME:
            raise ValueError(
                f"task.row must hold the longest example, 2·task.length+{FRAME} = "
                f"{2 * self.length + FRAME} tokens, got {self.row}"
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids: letters, `$`, `|`, `.` and padding."""
        return self.letters + SYMBOLS

    @property
    def title(self) -> str:
        """For tables and figures."""
        return f"copying strings of {self.letters} letters"

    @property
    def eval_size(self) -> int:
        """Evaluation strings are made when asked for; this many are plenty."""
        return 10**6

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of `split` exactly; written into result.json."""
        identity: dict[str, object] = {"task": "copy", "letters": self.letters, "split": split}
        if split == "train":
            identity |= {"lengths": [self.min_length, self.length], "row": self.row}
        return identity | {"seed": self.seed}

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The training batch of optimiser step `step` (0-based): `tokens`, `labels` (B, row)."""
        index = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        most = self.row // (2 * self.min_length + FRAME)  # examples that can fit
        draw = streams.draws(streams.stream_key(self.seed, "copy", "lengths"), index, most)
        choices = np.uint64(self.length - self.min_length + 1)
        lengths = self.min_length + (draw % choices).astype(np.int64)
        lengths[np.cumsum(2 * lengths + FRAME, axis=1) > self.row] = 0
        return self._rows("train", index, lengths, self.row)

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation strings `start` .. `start + count - 1` of `length` letters, one a row.

        Returns:
          `tokens` and `labels`, both (count, 2·length + 3) int32.
        """
        if length < 1:
            raise ValueError(f"strings must have at least 1 letter, got {length}")
        index = np.arange(start, start + count, dtype=np.int64)
        lengths = np.full((count, 1), length)
        return self._rows(f"eval/{length}", index, lengths, 2 * length + FRAME)

    def _rows(
        self, split: str, index: np.ndarray, lengths: np.ndarray, row: int
    ) -> dict[str, np.ndarray]:
        """Rows with examples of the given lengths (B, K), 0 for none, one after the other."""
        ends = np.cumsum(np.where(lengths > 0, 2 * lengths + FRAME, 0), axis=1)
        at = np.arange(row)
        # (B, row): the example that a position belongs to; K where the padding begins.
        which = (at[None, :, None] >= ends[:, None, :]).sum(axis=2)
        padding = at >= ends[:, -1:]
        which = np.minimum(which, lengths.shape[1] - 1)
        n = np.take_along_axis(lengths, which, axis=1)
        offset = at - np.take_along_axis(ends, which, axis=1) + 2 * n + FRAME

        key = streams.stream_key(self.seed, "copy", self.letters, split)
        rows = streams.hash64(key ^ streams.hash64(index.astype(np.uint64)))[:, None]

        def letter(place: np.ndarray) -> np.ndarray:
            """Token of the letter at `place` of the position's own string."""
            counter = (which * self.row + place + 1).astype(np.uint64)
            drawn = streams.hash64(rows + counter) % np.uint64(self.letters)
            return drawn.astype(np.int64) + SYMBOLS

        first = (offset >= 1) & (offset <= n)
        tokens = np.select(
            [padding, offset == 0, offset == n + 1, offset == 2 * n + 2],
            [0, START, COPY, STOP],
            letter(np.where(first, offset - 1, offset - n - 2)),
        )
        labels = np.select(
            [padding, (offset > n) & (offset <= 2 * n), offset == 2 * n + 1],
            [IGNORED, letter(offset - n - 1), STOP],
            IGNORED,
        )
        return {"tokens": tokens.astype(np.int32), "labels": labels.astype(np.int32)}

    def score(self, outcome: Mapping[str, np.ndarray]) -> dict[str, object]:
        """Accuracy on the first N evaluation strings of one length n.

        Args:
          outcome: `correct`, `labelled` (N, 2n+3) bool.

        Returns:
          `string_accuracy` (every letter and the full stop right), `character_accuracy` (letters
          only), and what guessing letters reaches: `string_chance`, `character_chance`.
        """
        correct, labelled = outcome["correct"], outcome["labelled"]
        n = (correct.shape[1] - FRAME) // 2
        return {
            "string_accuracy": float((correct | ~labelled).all(axis=1).mean()),
            "character_accuracy": float(correct[:, n + 1 : 2 * n + 1].mean()),
            "string_chance": float(self.letters) ** -n,
            "character_chance": 1 / self.letters,
        }
