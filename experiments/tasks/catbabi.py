"""catbAbI: the 20 bAbI tasks as one long stream of stories, with questions to answer on the way.

Stories of all tasks follow each other in a random order; the stream is cut into windows. The answer
comes right after its `?`, as one token, and loss and accuracy count there only (spec 1 section 6;
Schlag et al., arXiv 2011.07831). The files are the user's own copy of bAbI v1.2, `en-valid-10k`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments.losses import IGNORED
from experiments.tasks import streams

NUM_TASKS = 20
SPLITS = ("train", "valid", "test")
HELP = (
    "expected the folder en-valid-10k of bAbI v1.2, with qa1_train.txt, qa1_valid.txt, "
    "qa1_test.txt and so on to qa20_test.txt: unpack tasks_1-20_v1-2.tar.gz from "
    "https://research.facebook.com/downloads/babi/ and set task.path"
)


@dataclasses.dataclass(frozen=True)
class Story:
    """One story: its words in order, each with the answer that belongs there.

    Attributes:
      words: lower-cased; full stops and question marks are words, an answer is one word.
      asks: places in `words` of the question marks, where the next word is the answer.
    """

    words: tuple[str, ...]
    asks: tuple[int, ...]


def read(path: Path) -> list[Story]:
    """Reads a bAbI file.

    Its lines are `NUMBER SENTENCE` or `NUMBER QUESTION<tab>ANSWER<tab>SUPPORT`; a story begins
    where the number is 1 and ends with a question.

    Raises:
      ValueError: the file cannot be read, a line is of another form, or the file ends too early.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {HELP}") from error
    stories: list[Story] = []
    words: list[str] = []
    asks: list[int] = []
    before = 0

    def finish(line: int) -> None:
        if not asks or asks[-1] != len(words) - 2:
            raise ValueError(f"{path}:{line}: the story does not end with a question: cut short?")
        stories.append(Story(tuple(words), tuple(asks)))

    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        match = re.fullmatch(r"(\d+) (.*\S)\s*", text)
        number = int(match[1]) if match else 0
        if not match or number not in (1, before + 1):
            expected = "1" if before == 0 else f"{before + 1} or 1"
            raise ValueError(
                f"{path}:{line}: expected a line that begins with the number {expected}, "
                f"got {text[:40]!r}"
            )
        if number == 1 and before:
            finish(line - 1)
            words, asks = [], []
        before = number
        sentence, *rest = (part.strip() for part in match[2].lower().split("\t"))
        words += re.findall(r"[^\s.?!,]+|[.?!,]", sentence)
        if sentence.endswith("?") and rest and rest[0]:
            asks.append(len(words) - 1)
            words.append(rest[0])
        elif rest or not sentence.endswith("."):
            raise ValueError(
                f"{path}:{line}: expected a sentence ending in '.', or a question ending in '?', "
                f"a tab and its answer, got {text[:60]!r}"
            )
    if not lines or not before:
        raise ValueError(f"{path} has no stories; {HELP}")
    finish(len(lines))
    return stories


@dataclasses.dataclass(frozen=True)
class Stream:
    """Stories of one split, end to end.

    Attributes:
      tokens: (M,) int32.
      labels: (M,) int32, the answer where one is asked for, else -100.
      kinds: (M,) int32, number of the task that the story belongs to.
      starts: (S + 1,) where each story begins; the last entry is M.
    """

    tokens: np.ndarray
    labels: np.ndarray
    kinds: np.ndarray
    starts: np.ndarray

    def shuffled(self, key: np.uint64) -> Stream:
        """The same stories in another order, given by `key`."""
        lengths = np.diff(self.starts)
        numbers = np.arange(len(lengths), dtype=np.uint64)
        order = streams.permutations(streams.hash64(key ^ streams.hash64(numbers)))
        starts = np.concatenate([[0], np.cumsum(lengths[order])])
        shift = np.repeat(self.starts[:-1][order] - starts[:-1], lengths[order])
        at = np.arange(len(self.tokens)) + shift
        return Stream(self.tokens[at], self.labels[at], self.kinds[at], starts)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The files of a folder.

    Attributes:
      words: the vocabulary in alphabetical order; token id = place + 1.
      streams: by split.
      sha256: by split, of the files' contents in the order of the tasks.
    """

    words: tuple[str, ...]
    streams: Mapping[str, Stream]
    sha256: Mapping[str, str]


def find(folder: Path, number: int, split: str) -> Path:
    """The file of a task and a split: qa1_train.txt, or with the task's name in the middle.

    Raises:
      ValueError: no such folder, no such file, or several.
    """
    if not folder.is_dir():
        raise ValueError(f"task.path={str(folder)!r} is not a folder; {HELP}")
    found = sorted(
        p for p in folder.iterdir() if re.fullmatch(rf"qa{number}_(?:.*_)?{split}\.txt", p.name)
    )
    if len(found) != 1:
        what = "has no file" if not found else f"has {len(found)} files"
        raise ValueError(f"{folder} {what} qa{number}_{split}.txt; {HELP}")
    return found[0]


@functools.lru_cache(maxsize=2)
def load(folder: str, tasks: tuple[int, ...]) -> Corpus:
    """Reads the three splits of the given tasks; the vocabulary is that of all three.

    Raises:
      ValueError: see `find` and `read`.
    """
    files = {split: [find(Path(folder), n, split) for n in tasks] for split in SPLITS}
    stories = {
        split: [(n, story) for n, file in zip(tasks, paths) for story in read(file)]
        for split, paths in files.items()
    }
    words = tuple(sorted({w for part in stories.values() for _, s in part for w in s.words}))
    ids = {word: i for i, word in enumerate(words, 1)}
    found = {}
    for split, part in stories.items():
        lengths = np.array([len(story.words) for _, story in part])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.array([ids[w] for _, story in part for w in story.words], np.int32)
        labels = np.full(len(tokens), IGNORED, np.int32)
        asks = np.array([s + ask for s, (_, story) in zip(starts, part) for ask in story.asks])
        labels[asks] = tokens[asks + 1]
        kinds = np.repeat(np.array([n for n, _ in part], np.int32), lengths)
        found[split] = Stream(tokens, labels, kinds, starts)
    sha256 = {
        split: hashlib.sha256(b"".join(p.read_bytes() for p in paths)).hexdigest()
        for split, paths in files.items()
    }
    return Corpus(words, found, sha256)


@functools.lru_cache(maxsize=2)
def _epoch(task: CatBabi, epoch: int) -> Stream:
    """The training stream of an epoch."""
    key = streams.stream_key(task.seed, "catbabi", epoch)
    return task.corpus.streams["train"].shuffled(key)


@dataclasses.dataclass(frozen=True)
class CatBabi:
    """catbAbI.

    Attributes:
      path: folder of the bAbI files.
      tasks: numbers of the tasks to take.
      length: tokens of a window.
      vocab_size: number of token ids, padding included; the files may use fewer.
      eval_split: "valid" or "test".
      seed: of the order of the stories in training; evaluation does not depend on it.
    """

    headline: ClassVar[tuple[str, ...]] = ("qa_accuracy", "chance", "majority_accuracy")

    path: str = ""
    tasks: tuple[int, ...] = tuple(range(1, NUM_TASKS + 1))
    length: int = 200
    vocab_size: int = 256
    eval_split: str = "valid"
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = tuple(self.tasks)
        object.__setattr__(self, "tasks", numbers)
        if not numbers or sorted(set(numbers) & set(range(1, NUM_TASKS + 1))) != sorted(numbers):
            raise ValueError(f"task.tasks must be different numbers from 1 to 20, got {numbers}")
        if self.eval_split not in SPLITS[1:]:
            raise ValueError(f"task.eval_split must be valid or test, got {self.eval_split!r}")
        if self.length < 1:
            raise ValueError(f"task.length must be at least 1, got {self.length}")
        if not self.path:
            raise ValueError(f"task.path is empty; {HELP}")
        needed = len(self.corpus.words) + 1
        if self.vocab_size < needed:
            raise ValueError(
                f"task.vocab_size and model.vocab_size must be at least {needed} for the words of "
                f"{self.path}, got {self.vocab_size}"
            )
        for split in ("train", self.eval_split):
            tokens = len(self.corpus.streams[split].tokens)
            if tokens < self.length:
                raise ValueError(
                    f"{self.path} has {tokens} tokens in its {split} files, less than one window "
                    f"of task.length={self.length}"
                )

    @property
    def corpus(self) -> Corpus:
        """The files' content."""
        return load(self.path, self.tasks)

    @functools.cached_property
    def _eval_stream(self) -> Stream:
        key = streams.stream_key("catbabi", self.eval_split)
        return self.corpus.streams[self.eval_split].shuffled(key)

    @property
    def title(self) -> str:
        """For tables and figures."""
        return "catbAbI" if len(self.tasks) == NUM_TASKS else f"{len(self.tasks)} bAbI tasks"

    @property
    def eval_size(self) -> int:
        """Number of evaluation windows."""
        return len(self._eval_stream.tokens) // self.length

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of `split` exactly; written into result.json."""
        name = "train" if split == "train" else self.eval_split
        stream = self.corpus.streams[name]
        identity: dict[str, object] = {
            "task": "catbabi",
            "split": name,
            "tasks": list(self.tasks),
            "sha256": self.corpus.sha256[name],
            "stories": len(stream.starts) - 1,
            "questions": int((stream.labels != IGNORED).sum()),
            "window": self.length,
        }
        return identity | ({"seed": self.seed} if split == "train" else {})

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The training batch of optimiser step `step` (0-based): `tokens`, `labels` (B, T).

        A window may begin in the middle of a story. What is left of an epoch's stream after its
        last whole window is not used in that epoch.
        """
        size = len(self.corpus.streams["train"].tokens) // self.length
        position = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        epoch, index = np.divmod(position, size)
        parts = [_windows(_epoch(self, int(e)), self.length, index[epoch == e])
                 for e in np.unique(epoch)]  # fmt: skip
        return {name: np.concatenate([p[name] for p in parts]) for name in ("tokens", "labels")}

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation windows `start` .. `start + count - 1`; `length` must be `task.length`."""
        if length != self.length:
            raise ValueError(f"the windows have task.length={self.length} tokens, not {length}")
        index = np.arange(start, min(start + count, self.eval_size))
        batch = _windows(self._eval_stream, self.length, index)
        return {name: batch[name] for name in ("tokens", "labels")}

    def score(self, outcome: Mapping[str, np.ndarray]) -> dict[str, object]:
        """Accuracy on the questions of the first N evaluation windows.

        Args:
          outcome: `correct` (N, T) bool.

        Returns:
          `qa_accuracy`; `task_accuracy` by number of the task; `chance`, that of one of the
          training set's answers at random; `majority_accuracy`, that of its most frequent answer.
        """
        correct = outcome["correct"]
        batch = _windows(self._eval_stream, self.length, np.arange(len(correct)))
        asked = batch["labels"] != IGNORED
        labels = self.corpus.streams["train"].labels
        counts = np.bincount(labels[labels != IGNORED])
        return {
            "qa_accuracy": float(correct[asked].mean()),
            "task_accuracy": {
                str(n): float(correct[asked & (batch["kinds"] == n)].mean())
                for n in np.unique(batch["kinds"][asked]).tolist()
            },
            "chance": 1 / int((counts > 0).sum()),
            "majority_accuracy": float((batch["labels"][asked] == counts.argmax()).mean()),
        }


def _windows(stream: Stream, length: int, index: np.ndarray) -> dict[str, np.ndarray]:
    """Windows number `index` (B,) of a stream: `tokens`, `labels`, `kinds` (B, length)."""
    at = index[:, None] * length + np.arange(length)
    return {name: getattr(stream, name)[at] for name in ("tokens", "labels", "kinds")}
