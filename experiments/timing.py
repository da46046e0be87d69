"""What the benchmarks share: competitors timed in alternating rounds, their memory, their table."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.memory import keep_freed_memory


@dataclasses.dataclass(frozen=True)
class Entry:
    """One competitor.

    Attributes:
      run: a call that returns when its result is there.
      temporaries: bytes of temporary memory, where the compiler says.
      outputs: bytes of the results, likewise.
    """

    run: Callable[[], Any]
    temporaries: int | None = None
    outputs: int | None = None


def compiled(fn: Callable[..., Any], *args: Any) -> Entry:
    """fn under jit at these arguments."""
    program = jax.jit(fn).lower(*args).compile()
    analysis = program.memory_analysis()

    def run() -> Any:
        return jax.block_until_ready(program(*args))

    if analysis is None:
        return Entry(run)
    return Entry(run, int(analysis.temp_size_in_bytes), int(analysis.output_size_in_bytes))


def positive(text: str) -> int:
    """Type of the options that are sizes and counts, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: a whole number >= 1")
    return int(text)


def race(entries: Mapping[str, Entry], rounds: int) -> dict[str, dict[str, Any]]:
    """Median and best milliseconds of each competitor over alternating rounds."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name, entry in entries.items():
            start = time.perf_counter()
            entry.run()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    rows: dict[str, dict[str, Any]] = {}
    for name, taken in times.items():
        rows[name] = {
            "median_ms": statistics.median(taken),
            "best_ms": min(taken),
            "temporaries_mb": megabytes(entries[name].temporaries),
        }
    return rows


def megabytes(size: int | None) -> float | None:
    """Bytes as 10^6 bytes."""
    return None if size is None else size / 1e6


def make_console() -> Console:
    """A console wide enough for the tables, whatever the terminal or file behind it."""
    return Console(width=max(Console().width, 130))


def begin(console: Console, allocator: str) -> dict[str, Any]:
    """Sets the allocator ("keep" or "system"), prints the machine and returns both for the file."""
    kept = allocator == "keep" and keep_freed_memory()
    device = jax.devices()[0]
    memory = "freed memory kept" if kept else "allocator as it comes"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    shown = "" if load is None else f", load {load:.1f}"
    console.print(
        f"{device.platform} {device.device_kind}, jax {jax.__version__}, {memory}{shown}",
        highlight=False,
    )
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "jax": jax.__version__,
        "memory_kept": kept,
        "load_at_start": load,
    }


def table(title: str, columns: tuple[str, ...]) -> Table:
    """An empty table whose first column is text and whose other columns are figures."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in columns:
        made.add_column(name, justify="right" if name else "left", no_wrap=True)
    return made
