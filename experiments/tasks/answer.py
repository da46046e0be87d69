"""Tasks with one answer at the end: symbols, then `=`, where the model names the answer.

Shared by modular arithmetic and the formal languages (spec 1 section 6). A length counts the `=`.
Token ids: 0 padding, then the answers, then what other symbols a task has, `=` last. Training
sequences have random lengths and are padded at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.losses import IGNORED
from experiments.tasks import streams


@dataclasses.dataclass(frozen=True)
class AnswerTask:
    """What such tasks share; a subclass says what it is about and makes `questions`.

    Attributes:
      length: longest training sequence.
      min_length: shortest training sequence.
      seed: seed of the data, part of its identity.
    """

    headline: ClassVar[tuple[str, ...]] = (
        "answer_accuracy",
        "scaled_accuracy",
        "majority_accuracy",
    )

    length: int = 40
    min_length: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.min_length <= self.length:
            raise ValueError(
                f"task.min_length must be between 2 and task.length={self.length}, "
                f"got {self.min_length}"
            )
        if not self.train_lengths:
            raise ValueError(
                f"no length between task.min_length={self.min_length} and task.length="
                f"{self.length} is a multiple of {self.stride}"
            )

    @property
    def answers(self) -> int:
        """Number of possible answers: token ids 1..answers."""
        raise TypeError(f"{type(self).__name__} does not define answers")

    @property
    def symbols(self) -> str:
        """The character of every token id but padding, answers first, `=` last."""
        raise TypeError(f"{type(self).__name__} does not define symbols")

    @property
    def stride(self) -> int:
        """Lengths are multiples of this."""
        return 1

    @property
    def name(self) -> str:
        """What the data is called, in `identity` and in the names of its streams."""
        raise TypeError(f"{type(self).__name__} does not define name")

    @property
    def title(self) -> str:
        """For tables and figures."""
        return self.name

    def questions(
        self, key: np.uint64, index: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The sequences numbered `index` of the stream `key`.

        Args:
          key: the stream.
          index: (B,) numbers of the sequences.
          lengths: (B,) their lengths, `=` included.

        Returns:
          Token ids (B, max(lengths)), of which the first lengths-1 of each row count, and answers
          (B,) in 0..answers-1.
        """
        raise TypeError(f"{type(self).__name__} does not define questions")

    @property
    def train_lengths(self) -> range:
        """Lengths of training sequences."""
        first = -(-self.min_length // self.stride) * self.stride
        return range(first, self.length + 1, self.stride)

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the symbols and padding."""
        return len(self.symbols) + 1

    @property
    def eval_size(self) -> int:
        """Evaluation sequences are made when asked for; this many are plenty."""
        return 10**6

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of `split` exactly; written into result.json."""
        identity: dict[str, object] = {"task": self.name, "seed": self.seed, "split": split}
        lengths = [self.train_lengths[0], self.train_lengths[-1]]
        return identity | ({"lengths": lengths} if split == "train" else {})

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The training batch of optimiser step `step` (0-based): `tokens`, `labels` (B, T)."""
        index = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        draw = streams.draws(streams.stream_key(self.seed, self.name, "lengths"), index, 1)[:, 0]
        allowed = np.array(self.train_lengths)
        lengths = allowed[(draw % np.uint64(len(allowed))).astype(np.int64)]
        return self._batch("train", index, lengths, self.length)

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation sequences `start` .. `start + count - 1` of the given length."""
        if length < 2 or length % self.stride:
            what = f"a multiple of {self.stride}" if self.stride > 1 else "2 or more"
            raise ValueError(
                f"{self.title}: a sequence, its '=' included, has a length of {what}, not {length}"
            )
        index = np.arange(start, start + count, dtype=np.int64)
        return self._batch(f"eval/{length}", index, np.full(count, length), length)

    def _batch(
        self, split: str, index: np.ndarray, lengths: np.ndarray, width: int
    ) -> dict[str, np.ndarray]:
        key = streams.stream_key(self.seed, self.name, split)
        questions, answers = self.questions(key, index, lengths)
        tokens = np.zeros((len(index), width), np.int32)
        tokens[:, : questions.shape[1]] = questions
        at, end = np.arange(width), lengths[:, None] - 1
        tokens[at >= end] = 0
        tokens[at == end] = len(self.symbols)
        labels = np.where(at == end, answers[:, None] + 1, IGNORED).astype(np.int32)
        return {"tokens": tokens, "labels": labels}

    def text(self, tokens: np.ndarray) -> str:
        """Token ids (T,) as characters, padding left out."""
        return "".join(self.symbols[t - 1] for t in tokens.tolist() if t)

    def score(self, outcome: Mapping[str, np.ndarray]) -> dict[str, object]:
        """What the answers to the first N evaluation sequences of length T are worth.

        Args:
          outcome: `correct`, `labelled` (N, T) bool.

        Returns:
          `answer_accuracy`; `chance`, that of a random answer; `scaled_accuracy`, which is
          (accuracy - chance) / (1 - chance); and `majority_accuracy`, that of always giving the
          most frequent answer.
        """
        correct, labelled = outcome["correct"], outcome["labelled"]
        accuracy, chance = float(correct[labelled].mean()), 1 / self.answers
        count, length = correct.shape
        given = self.eval_batch(length, 0, count)["labels"][:, -1]
        return {
            "answer_accuracy": accuracy,
            "scaled_accuracy": (accuracy - chance) / (1 - chance),
            "chance": chance,
            "majority_accuracy": float(np.bincount(given).max() / count),
        }
