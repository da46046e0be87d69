"""Length curriculum: short training sequences first, longer ones as they are solved.

For tasks whose prefixes are examples themselves: positions beyond the current length become padding
(token 0, label -100). The state is part of the checkpoint, so a continued run grows alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import losses
from experiments.errors import UserError

Batch = Mapping[str, Any]
Options = Mapping[str, Any]


class Curriculum(NamedTuple):
    """Where the curriculum is.

    Attributes:
      length: () int32, positions of the training sequences that are not padding.
      correct, counted: () float32, exponential sums of the sequences of this length that were
        solved and that were seen; their quotient is the running accuracy.
    """

    length: jax.Array
    correct: jax.Array
    counted: jax.Array

    @property
    def accuracy(self) -> jax.Array:
        """Running sequence accuracy at the current length; 0 before the first sequence."""
        return self.correct / jnp.maximum(self.counted, 1e-6)


def init(options: Options) -> Curriculum | None:
    """The state before the first step; None where the curriculum is off."""
    if not options["start"]:
        return None
    # Two buffers: the step donates its input, and one buffer must not be donated twice.
    zeros = (jnp.zeros((), jnp.float32) for _ in range(2))
    return Curriculum(jnp.asarray(options["start"], jnp.int32), *zeros)


def buckets(train: Options, full: int) -> list[int]:
    """The lengths that are compiled: start, 2·start, 4·start, …, and the task's own (`full`).

    Short sequences are what makes a curriculum cheap; one program for each length would cost more
    in compilation than it saves (S3 FP-Mamba config on a CPU, in CPU seconds: 14 for a program,
    0.007 for a step at length 2). The slots of the carry regime have one length, that of the task.

    Args:
      train: the `train` section of a config.
      full: length of the task's training sequences.
    """
    start = train["curriculum"]["start"]
    if not start or train["regime"] == "carry":
        return [full]
    lengths = [start]
    while lengths[-1] < full:
        lengths.append(min(full, 2 * lengths[-1]))
    return lengths


def crop(batch: Batch, length: int) -> dict[str, Any]:
    """The first `length` positions of every (B, T) array of a batch."""
    return {k: v[:, :length] if v.ndim == 2 else v for k, v in batch.items()}


def mask(batch: Batch, length: jax.Array) -> dict[str, Any]:
    """The batch with padding in place of all positions from `length` on."""
    beyond = jnp.arange(batch["tokens"].shape[1]) >= length
    return dict(batch) | {
        "tokens": jnp.where(beyond, 0, batch["tokens"]),
        "labels": jnp.where(beyond, losses.IGNORED, batch["labels"]),
    }


def reaches(labels: jax.Array, length: jax.Array) -> jax.Array:
    """(B,) bool: the example is labelled at the curriculum's last position.

    Shorter ones (slots from before the last growth, tasks of random lengths) say nothing about it.
    """
    return jnp.take(labels, length - 1, axis=1) != losses.IGNORED


def update(
    state: Curriculum, options: Options, full: int, correct: jax.Array, counted: jax.Array
) -> Curriculum:
    """The state after a step in which `correct` of `counted` sequences of this length were solved.

    Once the running accuracy reaches the threshold, the length grows by the increment, and the
    accuracy starts anew.
    """
    decay = options["decay"]
    new = Curriculum(state.length, decay * state.correct + correct, decay * state.counted + counted)
    grow = (new.counted > 0) & (new.accuracy >= options["threshold"]) & (state.length < full)
    zero = jnp.zeros((), jnp.float32)
    longer = Curriculum(jnp.minimum(state.length + options["increment"], full), zero, zero)
    return jax.tree.map(lambda a, b: jnp.where(grow, a, b), longer, new)


def validate(options: Options, task: Any) -> None:
    """Raises UserError for a `train.curriculum` section that cannot work with the task."""
    start = options["start"]
    if not start:
        return
    if not getattr(task, "prefixes_are_examples", False):
        raise UserError(
            "train.curriculum needs a task whose prefixes are examples themselves; "
            f"{type(task).__name__}'s are not"
        )
    if not 1 <= start <= task.length:
        raise UserError(
            f"train.curriculum.start must be between 0 (off) and the training length {task.length},"
            f" got {start}"
        )
    if options["increment"] < 1:
        raise UserError(
            f"train.curriculum.increment must be at least 1, got {options['increment']}"
        )
    if not 0 < options["threshold"] <= 1:
        raise UserError(f"train.curriculum.threshold must be in (0, 1], got {options['threshold']}")
    if not 0 <= options["decay"] < 1:
        raise UserError(f"train.curriculum.decay must be in [0, 1), got {options['decay']}")
