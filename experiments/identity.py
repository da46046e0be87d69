"""Names data in a few words, from what a task's `identity` says and how many examples were used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def data_name(identity: Mapping[str, Any], examples: Sequence[int] = ()) -> str:
    """File or name, number of examples and the first characters of the hash.

    Args:
      identity: of a split.
      examples: how many of its examples were evaluated, one number for each run. Without it, the
        size of the split.

    Returns:
      Such as "sudoku9.csv.gz n=64 of 600 1a2b3c4d".
    """
    names = [identity.get(key) for key in ("file", "name", "group", "language", "task")]
    parts = [str(next((n for n in names if n), ""))]
    if isinstance(identity.get("generator"), Mapping):
        parts.append(",".join(f"{k}={v}" for k, v in identity["generator"].items()))
    size = identity.get("size")
    if isinstance(size, int):
        size *= identity.get("votes", 1)  # of ARC: every vote is an example
    used = "/".join(map(str, sorted(set(examples))))
    if used and size and used != str(size):
        parts.append(f"n={used} of {size}")
    elif used or size:
        parts.append(f"n={used or size}")
    if identity.get("sha256"):
        parts.append(str(identity["sha256"])[:8])
    return " ".join(part for part in parts if part)


def data_line(
    train: Mapping[str, Any] | None,
    evaluated: Mapping[str, Any],
    examples: Sequence[int],
    step: int | None = 0,
) -> str:
    """What a run was evaluated on and what it was trained on, in one line.

    Args:
      train: identity of the training data, None for imported weights.
      evaluated: identity of the evaluation data.
      examples: how many were evaluated, by length.
      step: optimiser steps that had been made when `train` was recorded, None if it never was.
    """
    text = f"data: {data_name(evaluated, examples)}"
    if "split_rule" in evaluated:
        text += f", split {evaluated['split_rule']}"
    if train is None:
        return f"{text}; training data unknown (imported weights)"
    text += f"; trained on {data_name(train)}"
    for key in ("augmentations", "augmentation"):
        if key in train:
            text += f", {key} {train[key]}"
    if step is None:
        return f"{text} (as the data is now: the run did not record it)"
    return text + (f" (as recorded at step {step}, not before)" if step else "")
