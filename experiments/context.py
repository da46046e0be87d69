"""What every part of a run shares: its config, task, directory, progress display and clock."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.progress import Progress
from experiments.tasks import Task


class Clock:
    """Seconds spent on each activity, summed over the restarts of a run."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("train", "compile", "evaluation", "checkpoint"), 0.0)

    def continue_from(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Starts from the seconds that the newest training record of the run holds."""
        for record in reversed(records):
            if record["split"] == "train":
                self.seconds = {n: record[f"seconds_{n}"] for n in self.seconds}
                return

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - start

    @property
    def total(self) -> float:
        """All seconds so far."""
        return sum(self.seconds.values())

    @property
    def eval_share(self) -> float:
        """Share of the time that evaluation took, without its compilation."""
        return self.seconds["evaluation"] / max(self.total, 1e-9)

    def record(self) -> dict[str, float]:
        """`seconds_<activity>`: what `continue_from` reads back."""
        return {f"seconds_{name}": round(value, 3) for name, value in self.seconds.items()}


@dataclasses.dataclass
class Run:
    """One experiment in one directory.

    Attributes:
      config: complete, valid config as a plain dict.
      task: the task built from it.
      path: the workdir.
      progress: where to print.
      clock: time by activity.
    """

    config: Mapping[str, Any]
    task: Task
    path: Path
    progress: Progress
    clock: Clock = dataclasses.field(default_factory=Clock)
