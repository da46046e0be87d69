"""What a run prints: a live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_INTERVAL = 10.0  # seconds between lines where there is no terminal


def duration(seconds: float) -> str:
    """Seconds as "42s", "3m07s" or "2h05m"."""
    s = round(max(0.0, seconds))
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


def line(record: Mapping[str, Any], total: int, eval_share: float, time_left: float) -> str:
    """The progress line of one metrics record."""
    parts = [
        f"step {record['step']}/{total}",
        f"left {duration(time_left)}",
        f"loss {record['loss']:.4f}",
    ]
    if record.get("sequence_accuracy") is not None:
        parts += [
            f"sequence accuracy {record['sequence_accuracy']:.3f}",
            f"solver steps {record['solver_steps_mean']:.1f}",
        ]
    if record.get("converged") is not None:
        parts.append(f"converged {record['converged']:.0%}")
    if "curriculum_length" in record:
        parts.append(f"length {record['curriculum_length']:.0f}")
    parts += [
        f"{record['steps_per_second']:.1f} steps/s",
        f"waiting for data {record['data_wait']:.0%}",
        f"evaluation {eval_share:.0%} of time",
    ]
    return " · ".join(parts)


class Progress:
    """Shows the newest progress line; `say` prints a line that stays."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._last = 0.0

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exc)
            self._live = None

    def say(self, text: Any) -> None:
        """Prints a line (or a rich table) above the progress line."""
        self.console.print(text, markup=False)

    def update(self, text: str, last: bool = False) -> None:
        """Shows the progress line; without a terminal, at most one every few seconds."""
        if self._live is not None:
            self._live.update(Text(text))
            return
        now = time.monotonic()
        if last or now - self._last >= PLAIN_INTERVAL:
            self._last = now
            self.console.print(text, markup=False)
