"""Registry of tasks: a task makes batches as a pure function of the step and names its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from experiments.errors import UserError, unknown
from experiments.tasks.arc import Arc
from experiments.tasks.arithmetic import Arithmetic
from experiments.tasks.catbabi import CatBabi
from experiments.tasks.copy import Copy
from experiments.tasks.formal import Formal
from experiments.tasks.language import Language
from experiments.tasks.maze import Maze
from experiments.tasks.sudoku import Sudoku
from experiments.tasks.word_problem import WordProblem


class Task(Protocol):
    """What training and evaluation need from a task.

    A batch is {"tokens": (B, T) int32, "labels": (B, T) int32}; token 0 is padding and label -100
    does not count. The task's options are its dataclass fields; `seed` is set by the experiment.
    """

    length: int
    seed: int

    @property
    def vocab_size(self) -> int:
        """Number of token ids, padding included; the model must have as many."""

    @property
    def title(self) -> str:
        """The task in a few words, for tables and figures."""

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of a split exactly."""

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """Training batch of the 0-based step `step`."""

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation examples start..start+count-1 at the given length."""


@runtime_checkable
class Scored(Protocol):
    """A task with a finite evaluation set whose answers its own rules can judge.

    A class attribute `headline`, if there is one, names the scores that are printed after a run.
    """

    @property
    def eval_size(self) -> int:
        """Number of evaluation examples; more are never asked for."""

    def score(self, outcome: Mapping[str, np.ndarray]) -> dict[str, object]:
        """Metrics beyond those of `experiments.evaluate`.

        Args:
          outcome: of the first N evaluation examples: `predictions` (N, T) token ids, `steps` (N,)
            and what else `experiments.evaluate` collects.
        """


TASKS: dict[str, type] = {
    "arc": Arc,
    "arithmetic": Arithmetic,
    "catbabi": CatBabi,
    "copy": Copy,
    "formal": Formal,
    "language": Language,
    "maze": Maze,
    "sudoku": Sudoku,
    "word_problem": WordProblem,
}


def options(name: str) -> dict[str, Any]:
    """The task's options with their defaults.

    Raises:
      UserError: unknown task.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    fields = dataclasses.fields(TASKS[name])
    return {"name": name, **{f.name: f.default for f in fields if f.name != "seed"}}


def build(config: Mapping[str, Any], seed: int) -> Task:
    """Builds a task from the `task` section of a config.

    Raises:
      UserError: unknown task or option, or a value that the task does not accept.
    """
    valid = options(config["name"])
    for key in config:
        if key not in valid:
            raise unknown("config key", f"task.{key}", (f"task.{k}" for k in valid))
    kwargs = {key: value for key, value in config.items() if key != "name"}
    try:
        return TASKS[config["name"]](**kwargs, seed=seed)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
