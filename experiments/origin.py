"""Where a run's weights come from: data.json holds what they were trained on, from the first step.

A config only names data, and files change. What is recorded is compared with what is there when the
run is continued, and decides what it may be evaluated on; `experiments.config` has the rules.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import config as configs
from experiments import tasks
from experiments.context import Run
from experiments.errors import UserError
from experiments.tasks import Task
from experiments.workdir import plain, write_json

DATA = "data.json"
NAMES = ("file", "name")  # of an identity: what is only called otherwise is the same data
HASHES = ("sha256", "sha256_of_both_ends")

Changed = Mapping[str, tuple[Any, Any]]  # {key: (value of the trained run, value now)}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where weights come from.

    Attributes:
      data: identity of the data that they were trained on, None where that is not known.
      step: optimiser steps that had been made when it was recorded; None where it was not, so that
        `data` is only what the run's config names today.
      imported: content of imported.json, which `experiments.import_torch` writes; None for a run
        trained here.
    """

    data: Mapping[str, Any] | None
    step: int | None = None
    imported: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """The content of data.json.

    Attributes:
      step: optimiser steps that had been made; None for what was not recorded.
      train: identity of the training data.
      eval: identity of the run's own evaluation data.
      batch: {name: (shape, dtype)} of a training batch.
    """

    step: int | None
    train: Mapping[str, Any]
    eval: Mapping[str, Any]
    batch: Mapping[str, tuple[list[int], str]]

    @property
    def origin(self) -> Origin:
        """Of weights trained on it."""
        return Origin(self.train, self.step)

    def example(self) -> dict[str, np.ndarray]:
        """A training batch of zeros: the checkpoints' arrays have its shapes."""
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.batch.items()}


def _seen(task: Task, batch: Mapping[str, np.ndarray], step: int | None) -> Record:
    """What a task's data is now, as JSON would give it back."""
    shapes = {name: (list(a.shape), str(a.dtype)) for name, a in batch.items()}
    train, held_out = (plain(task.identity(split)) for split in ("train", "eval"))
    return Record(step, train, held_out, shapes)


def _recorded(path: Path) -> Record | None:
    """What stands in data.json; None where there is none, as in runs from before it."""
    file = path / DATA
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text())
        return Record(**{field.name: content[field.name] for field in dataclasses.fields(Record)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not the record of a run's data ({error!r})") from error


def record(path: Path, task: Task, batch: Mapping[str, np.ndarray], step: int) -> Origin:
    """Writes down what a run is trained on; of a run that goes on, checks that it is still that.

    Args:
      path: the workdir.
      task: its task.
      batch: a training batch.
      step: optimiser steps made so far.

    Raises:
      UserError: its steps so far were made with other data, or data.json cannot be read.
    """
    seen = _seen(task, batch, step)
    found = _recorded(path) if step else None  # Without a step made, nothing is mixed.
    if found is None:
        write_json(path / DATA, dataclasses.asdict(seen))
        return seen.origin
    shared = [k for k in seen.train if k in found.train and k not in NAMES]
    if shown := _differences(found.train, seen.train, shared):
        raise UserError(
            f"cannot continue the run in {path}: its {step} steps were made with other training "
            f"data: {shown}; use another --workdir or the same data"
        )
    return found.origin


def of_evaluation(run: Run, changed: Changed) -> Record:
    """What the run in a workdir was trained on, having checked that it may be evaluated with this.

    Args:
      run: with the config and task to evaluate with.
      changed: how its config differs from that of the trained run.

    Raises:
      UserError: what was trained on could be scored as held out, or puzzles would get the
        embeddings of others.
    """
    found = _recorded(run.path)
    if found is None:
        # A key that the run's task does not have is None there.
        task = {k: v[0] for k, v in changed.items() if k.startswith("task.") and v[0] is not None}
        old = {**run.config["task"], **{k.removeprefix("task."): v for k, v in task.items()}}
        named = tasks.build(old, run.config["seed"]) if task else run.task
        found = _seen(named, named.train_batch(0, run.config["train"]["batch_size"]), None)
    evaluated = plain(run.task.identity("eval"))
    if numbered(run):
        if shown := _differences(found.train, evaluated, configs.NUMBERING):
            raise UserError(
                f"cannot evaluate the run in {run.path}: each row of its puzzle embedding belongs "
                f"to a puzzle of the training data by its number, and here puzzles are numbered "
                f"otherwise: {shown}"
            )
    elif digest(evaluated) and digest(evaluated) == digest(found.train):
        keys = [k for k in configs.SPLIT if k in changed]
        shown = ", ".join(f"{k} (there {changed[k][0]!r}, here {changed[k][1]!r})" for k in keys)
        if digest(evaluated) != digest(found.eval):
            shown = shown or f"task.path={run.config['task'].get('path')!r}"
        if shown:
            raise UserError(
                f"cannot evaluate the run in {run.path} with {shown}: it was trained on that very "
                "file, of which only what the split of its training held out is new to it; keep "
                "that split, or use another file"
            )
    return found


def numbered(run: Run) -> bool:
    """Whether the model knows the puzzles of the task by their numbers."""
    return bool(run.config["model"].get("num_puzzles") and getattr(run.task, "num_puzzles", 0))


def digest(identity: Mapping[str, Any]) -> str:
    """Hash of the data, "" where it lies in no file."""
    return next((str(identity[name]) for name in HASHES if name in identity), "")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], keys: Collection[str]) -> str:
    """Which of the keys differ, with both values, "" if none does."""

    def text(key: str, value: Any) -> str:
        return str(value)[:8] if key in HASHES else repr(value)

    return ", ".join(
        f"{key} (there {text(key, old.get(key))}, here {text(key, new.get(key))})"
        for key in keys
        if old.get(key) != new.get(key)
    )
