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

# "data": the device had nothing to do because the next batch was not ready.
ACTIVITIES = ("train", "data", "compile", "evaluation", "checkpoint")


class Clock:
    """Wall-clock seconds of a run by activity, summed over its restarts."""

    def __init__(self, started: float | None = None):
        """`started`: `time.monotonic()` when the program began; None is now."""
        self._started = time.monotonic() if started is None else started
        self._before = 0.0
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)

    def continue_from(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds the seconds that the newest training record of an interrupted run holds."""
        for record in reversed(records):
            if record["split"] == "train":
                self._before = record.get("seconds_total", 0.0)
                for name in self.seconds:
                    self.seconds[name] += record.get(f"seconds_{name}", 0.0)
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
        """All seconds so far, those of no named activity (imports, figures) included."""
        return self._before + time.monotonic() - self._started

    @property
    def eval_share(self) -> float:
        """Share of the time that evaluation took, without its compilation."""
        return self.seconds["evaluation"] / max(self.total, 1e-9)

    def record(self) -> dict[str, float]:
        """`seconds_total` and `seconds_<activity>`: what `continue_from` reads back."""
        named = {"total": self.total, **self.seconds}
        return {f"seconds_{name}": round(value, 3) for name, value in named.items()}


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
