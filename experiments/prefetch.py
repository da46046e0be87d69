"""Makes training batches ahead of the steps, in one background thread and in their order.

Batches are functions of the step, so a run that is continued starts the thread at its own step and
sees what it would have seen.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from experiments.errors import UserError

Batch = Mapping[str, Any]


class Prefetch:
    """Gives `make(step)` for each of `steps` in turn; at most `depth` wait in memory.

    Use it as a context manager: leaving the block ends the thread, after the batch that it is at.
    `depth` 0 makes each batch when it is asked for, without a thread.
    """

    def __init__(self, make: Callable[[int], Batch], steps: range, depth: int):
        self._make, self._steps, self._depth = make, steps, depth
        self._next = steps.start
        self._queue: queue.Queue[Any] = queue.Queue(max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetch:
        if self._depth:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._depth:
            self._thread.join()

    @property
    def ready(self) -> bool:
        """Whether `get` returns at once."""
        return not self._queue.empty()

    def get(self) -> Batch:
        """The next batch; waits for it.

        Raises:
          UserError: it cannot be made; the message names the step.
        """
        if not self._depth:
            self._next += 1
            return self._made(self._next - 1)
        item = self._queue.get()
        if isinstance(item, UserError):
            raise item
        return item

    def _made(self, step: int) -> Batch:
        try:
            return self._make(step)
        except UserError:
            raise
        except Exception as error:  # A task reads the user's files: anything can happen in it.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"the batch of step {step + 1} cannot be made: {reason}") from error

    def _run(self) -> None:
        try:
            for step in self._steps:
                if self._stop.is_set() or not self._put(self._made(step)):
                    return
        except UserError as error:
            self._put(error)

    def _put(self, item: Batch | UserError) -> bool:
        """Waits for room; False when the reader has left."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False
