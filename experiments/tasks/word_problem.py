"""Word problems of finite groups: from group elements x_1..x_T predict every running product.

Sequences are computed from (seed, split, index) when they are needed and never stored, so a run
can be continued at any step and two machines see the same data.

Composition order: the label at position t is s_t = x_1·x_2·…·x_t with s_t = s_{t-1}·x_t, and for
permutations p·q means "first p, then q". Token id = element + 1; 0 is padding, which the task
itself never produces. Labels are token ids too, and -100 marks positions that do not count.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from experiments.losses import IGNORED
from experiments.tasks import groups, streams


@dataclasses.dataclass(frozen=True)
class WordProblem:
    """The word problem of one group.

    Attributes:
      group: group name, see `experiments.tasks.groups`.
      length: number of elements in a training sequence.
      min_length: if positive, training sequences have a random length between `min_length` and
        `length`; the rest of the sequence is padding (token 0, label -100).
      train_sequences: size of the training set; 0 means that every sequence is new.
      seed: seed of the data, part of its identity.
    """

    group: str = "S3"
    length: int = 16
    min_length: int = 0
    train_sequences: int = 0
    seed: int = 0

    prefixes_are_examples: ClassVar[bool] = True  # see experiments.curriculum

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", groups.canonical_name(self.group))
        if self.length < 1:
            raise ValueError(f"task.length must be at least 1, got {self.length}")
        if not 0 <= self.min_length <= self.length:
            raise ValueError(
                f"task.min_length must be between 0 (off) and task.length={self.length}, "
                f"got {self.min_length}"
            )
        if self.train_sequences < 0:
            raise ValueError(
                f"task.train_sequences must be 0 (endless) or positive, got {self.train_sequences}"
            )

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the group's elements and padding."""
        return groups.group(self.group).order + 1

    @property
    def title(self) -> str:
        """For tables and figures."""
        return f"the word problem of {self.group}"

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of `split` exactly; written into result.json."""
        identity: dict[str, object] = {"task": "word_problem", "group": self.group}
        if split == "train":
            lengths = [self.min_length or self.length, self.length]
            identity |= {"size": self.train_sequences or "endless", "lengths": lengths}
        return identity | {"seed": self.seed, "split": split}

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The training batch of optimiser step `step` (0-based): `tokens`, `labels` (B, T)."""
        index = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        if self.train_sequences:
            _, index = streams.epochs(self.seed, self.train_sequences, index)
        batch = self.sequences("train", self.length, index)
        if self.min_length:
            low, high = self.min_length, self.length
            draw = streams.hash64(
                streams.stream_key(self.seed, "lengths") + index.astype(np.uint64)
            )
            lengths = low + (draw % np.uint64(high - low + 1)).astype(np.int64)
            beyond = np.arange(self.length) >= lengths[:, None]
            batch["tokens"][beyond] = 0
            batch["labels"][beyond] = IGNORED
        return batch

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation sequences `start` .. `start + count - 1` of the given length."""
        return self.sequences("eval", length, np.arange(start, start + count, dtype=np.int64))

    def sequences(self, split: str, length: int, index: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences numbered `index` of a split.

        Args:
          split: name of the stream, "train" or "eval"; streams are unrelated to each other.
          length: elements per sequence T, at least 1.
          index: (B,) integers.

        Returns:
          `tokens` and `labels`, both (B, T) int32.
        """
        if length < 1:
            raise ValueError(f"sequence length must be at least 1, got {length}")
        group = groups.group(self.group)
        key = streams.stream_key(self.seed, self.group, split, length)
        rows = streams.hash64(key ^ streams.hash64(index.astype(np.uint64)))
        draws = streams.hash64(rows[:, None] + np.arange(1, length + 1, dtype=np.uint64))
        elements = (draws % np.uint64(group.order)).astype(np.int64)
        products = np.empty_like(elements)
        products[:, 0] = elements[:, 0]
        for t in range(1, length):
            products[:, t] = group.table[products[:, t - 1], elements[:, t]]
        return {
            "tokens": (elements + 1).astype(np.int32),
            "labels": (products + 1).astype(np.int32),
        }
