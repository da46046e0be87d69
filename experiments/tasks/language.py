"""Language modelling on the user's own data: a file of token ids, or the bytes of a text file.

Files of tokens are memory-mapped, so that they may be larger than memory (spec 1 section 6):
  .bin        raw little-endian numbers of `dtype`, uint16 or uint32, and nothing else
  .npy        a one-dimensional NumPy array of uint16 or uint32
  any other   text, read as bytes (256 ids)

Token id = id in the file + 1; 0 is padding, which the task itself never produces. The label of a
position is the token after it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments.errors import UserError
from experiments.tasks import streams

DTYPES = ("uint16", "uint32")
HELP = (
    "expected a text file (read as bytes), or token ids as raw uint16 or uint32 numbers (.bin) or "
    "a one-dimensional NumPy array of these (.npy); none comes along: for the paper's setting "
    "tokenise FineWeb with GPT-2's BPE and write the ids as little-endian uint16, documents joined "
    "by id 50256, one .bin file for training and one for validation"
)


def open_tokens(path: Path, dtype: str) -> np.ndarray:
    """Token ids of a file as a read-only memory map (M,).

    Args:
      path: the file.
      dtype: type of the numbers in a .bin file.

    Raises:
      ValueError: the file is missing, empty, cut short or of another format.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file; {HELP}")
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(tokens, np.ndarray):
                raise ValueError("an archive of several arrays")
        else:
            size, number = path.stat().st_size, np.dtype(dtype if path.suffix == ".bin" else "u1")
            if size == 0:
                raise ValueError("it is empty")
            if size % number.itemsize:
                raise ValueError(
                    f"its {size} bytes are not a whole number of {number.name} values: cut short, "
                    "or another task.dtype?"
                )
            tokens = np.memmap(path, number.newbyteorder("<"), mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {HELP}") from error
    if tokens.ndim != 1 or tokens.dtype.name not in ("uint8", *DTYPES):
        raise ValueError(
            f"{path} holds an array of shape {tokens.shape} and type {tokens.dtype}; {HELP}"
        )
    return tokens


@dataclasses.dataclass(frozen=True)
class Language:
    """Prediction of the next token.

    Attributes:
      path: the training file.
      eval_path: the validation file, of the same kind; "" keeps the end of the training file for
        validation.
      eval_fraction: share of the training file that is kept.
      dtype: type of the numbers in a .bin file.
      length: tokens of a window, the context.
      vocab_size: number of token ids, padding included: 257 for bytes, 50258 for GPT-2's.
      seed: of the order of the training windows.
    """

    headline: ClassVar[tuple[str, ...]] = ("perplexity", "perplexity_chance")

    path: str = ""
    eval_path: str = ""
    eval_fraction: float = 0.1
    dtype: str = "uint16"
    length: int = 2048
    vocab_size: int = 257
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"task.dtype must be uint16 or uint32, got {self.dtype!r}")
        if self.length < 1:
            raise ValueError(f"task.length must be at least 1, got {self.length}")
        if self.vocab_size < 2:
            raise ValueError(f"task.vocab_size must be at least 2, got {self.vocab_size}")
        if not 0 < self.eval_fraction < 1:
            raise ValueError(
                f"task.eval_fraction must be between 0 and 1, got {self.eval_fraction}"
            )
        if not self.path:
            raise ValueError(f"task.path is empty; {HELP}")
        for split in ("train", "eval"):
            part = self._parts[split]
            if len(part) <= self.length:
                raise ValueError(
                    f"the {split} part of {self._path(split)} has {len(part)} tokens, but a window "
                    f"with the label of its last token takes task.length+1 = {self.length + 1}"
                )
            # Windows are checked when they are read; the first one tells of a wrong type at once.
            self._windows(split, np.arange(1))

    def _path(self, split: str) -> Path:
        return Path(self.eval_path if split == "eval" and self.eval_path else self.path)

    @functools.cached_property
    def _parts(self) -> dict[str, np.ndarray]:
        """The two splits, memory-mapped: (M,) each."""
        train = open_tokens(self._path("train"), self.dtype)
        if self.eval_path:
            return {"train": train, "eval": open_tokens(self._path("eval"), self.dtype)}
        cut = len(train) - math.ceil(self.eval_fraction * len(train))
        return {"train": train[:cut], "eval": train[cut:]}

    @property
    def title(self) -> str:
        """For tables and figures."""
        return f"the text of {self._path('eval').name}"

    @property
    def eval_size(self) -> int:
        """Number of evaluation windows."""
        return self._count("eval")

    def _count(self, split: str) -> int:
        """Whole windows in a split; each needs one token more for its last label."""
        return (len(self._parts[split]) - 1) // self.length

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of `split` exactly; written into result.json.

        Of a large file the hash covers the first and the last MiB.
        """
        path = self._path(split)
        size, edge = path.stat().st_size, 2**20
        digest = hashlib.sha256()
        with path.open("rb") as file:
            digest.update(file.read(edge))
            file.seek(max(edge, size - edge))
            digest.update(file.read(edge))
        identity: dict[str, object] = {
            "task": "language",
            "split": split,
            "file": path.name,
            "bytes": size,
            "sha256_of_both_ends": digest.hexdigest(),
            "tokens": len(self._parts[split]),
            "window": self.length,
        }
        return identity | ({"seed": self.seed} if split == "train" else {})

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The training batch of optimiser step `step` (0-based): `tokens`, `labels` (B, T)."""
        position = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        return self._windows("train", streams.epochs(self.seed, self._count("train"), position)[1])

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation windows `start` .. `start + count - 1`; `length` must be `task.length`."""
        if length != self.length:
            raise ValueError(f"the windows have task.length={self.length} tokens, not {length}")
        return self._windows("eval", np.arange(start, min(start + count, self.eval_size)))

    def _windows(self, split: str, index: np.ndarray) -> dict[str, np.ndarray]:
        """Windows number `index` (B,) of a split.

        Raises:
          UserError: a token id that the vocabulary does not have. A large file is not read through
            before training, so that this may come late.
        """
        part = self._parts[split]
        rows = np.stack([part[i * self.length :][: self.length + 1] for i in index.tolist()])
        largest = int(rows.max())
        if largest > self.vocab_size - 2:
            raise UserError(
                f"{self._path(split)} has the token id {largest}, but task.vocab_size="
                f"{self.vocab_size} allows ids up to {self.vocab_size - 2} (and padding); raise "
                "it, or is the file of another task.dtype?"
            )
        rows = rows.astype(np.int32) + 1
        return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}

    def score(self, outcome: Mapping[str, np.ndarray]) -> dict[str, object]:
        """What the predictions in the first N evaluation windows are worth.

        Args:
          outcome: `nll` (N,), the sum of -log p over a window's tokens; `layer_steps` (N, L).

        Returns:
          `nats_per_token`; `perplexity`, its exponential; `perplexity_chance`, that of a uniform
          guess; `solver_steps_by_layer`, the mean number of iterations of each looped layer.
        """
        nats = float(outcome["nll"].astype(np.float64).mean()) / self.length
        return {
            "nats_per_token": nats,
            "perplexity": math.exp(nats),
            "perplexity_chance": float(self.vocab_size - 1),
            "solver_steps_by_layer": outcome["layer_steps"].mean(axis=0).tolist(),
        }
