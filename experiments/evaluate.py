"""Evaluation: accuracy and solver effort per length, within a budget, in batches of one shape.

Three accuracies that must not be confused: `sequence_accuracy` is the share of sequences with
every labelled token right, `token_accuracy` the share of labelled tokens that are right, and
`prefix_accuracy[t]` the share of sequences that are right at every position up to t. A puzzle adds
what its own rules say (`Scored` in `experiments.tasks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fpr
from experiments import losses
from experiments.context import Run
from experiments.tasks import Scored

PyTree = Any
Batch = Mapping[str, Any]


class Evaluator:
    """Evaluates parameters on the evaluation split of a run's task.

    Every length compiles once: the last batch is filled up with copies of its first example, which
    are not counted.
    """

    def __init__(self, run: Run):
        config = run.config
        self.lengths = tuple(config["eval"]["lengths"])
        self._run = run
        self._max_examples = config["eval"]["max_examples"]
        if isinstance(run.task, Scored):
            self._max_examples = min(self._max_examples, run.task.eval_size)
        self._batch_size = min(config["eval"]["batch_size"], self._max_examples)
        # Far from the keys of training, which folds in 0 and 1.
        self._key = jax.random.fold_in(jax.random.key(config["seed"]), 2**31 - 1)
        self._outcome = jax.jit(functools.partial(_outcome, config["model"]))
        self._compiled: dict[int, Callable[..., Batch]] = {}

    def __call__(self, params: PyTree) -> dict[int, dict[str, Any]]:
        """Metrics by length; see `summarise` for what they are."""
        for length in self.lengths:
            if length not in self._compiled:
                with self._run.clock.measure("compile"):
                    args = (
                        params,
                        self._batch(length, 0, self._batch_size),
                        self._keys(length, 0, 1),
                    )
                    self._compiled[length] = self._outcome.lower(*args).compile()
        with self._run.clock.measure("evaluation"):
            return {length: self._one_length(params, length) for length in self.lengths}

    def _batch(self, length: int, start: int, count: int) -> Batch:
        return pad_batch(self._run.task.eval_batch(length, start, count), self._batch_size)

    def _keys(self, length: int, start: int, count: int) -> jax.Array:
        """One key per example, by its number: it starts alike in any batch. Copies share theirs."""
        number = np.arange(start, start + self._batch_size)
        number[count:] = start
        key = jax.random.fold_in(self._key, length)
        return jax.vmap(lambda n: jax.random.fold_in(key, n))(number)

    def _one_length(self, params: PyTree, length: int) -> dict[str, Any]:
        parts = []
        for start in range(0, self._max_examples, self._batch_size):
            count = min(self._batch_size, self._max_examples - start)
            batch = self._batch(length, start, count)
            outcome = self._compiled[length](params, batch, self._keys(length, start, count))
            parts.append({k: np.asarray(v)[:count] for k, v in outcome.items()})
        whole = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        task = self._run.task
        extra = task.score(whole) if isinstance(task, Scored) else {}
        return summarise(whole) | extra


def _outcome(model: Mapping[str, Any], params: PyTree, batch: Batch, key: jax.Array) -> Batch:
    """Per-example outcome of one batch; leaves lead with B."""
    out = fpr.apply(model, params, batch, train=False, key=key)
    outcome = {
        "predictions": jnp.argmax(out.logits, axis=-1).astype(jnp.int32),
        "correct": losses.token_correct(out.logits, batch["labels"]),
        "labelled": jnp.asarray(batch["labels"] != losses.IGNORED),
        "steps": out.steps,
        "residual": out.residual,
        "converged": out.converged,
    }
    return outcome if out.q_logits is None else outcome | {"q_halt": out.q_logits[:, 0]}


def pad_batch(batch: Batch, size: int) -> dict[str, np.ndarray]:
    """Fills a batch up to `size` examples with copies of its first one.

    A copy halts with its original, so it costs no extra iterations; an empty example might.
    """
    missing = size - len(batch["tokens"])
    return {k: np.concatenate([v, np.repeat(v[:1], missing, axis=0)]) for k, v in batch.items()}


def summarise(outcome: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Metrics of N examples.

    Args:
      outcome: `correct`, `labelled` (N, T) bool; `steps`, `residual`, `converged` (N,).

    Returns:
      `examples`, `sequence_accuracy`, `token_accuracy`, `prefix_accuracy` (a list of T shares),
      `solver_steps_median`, `solver_steps_max`, `converged` (share), `residual_median`,
      `residual_max`.
    """
    correct, labelled = outcome["correct"], outcome["labelled"]
    right = correct | ~labelled
    steps, residual = outcome["steps"], outcome["residual"].astype(np.float64)
    return {
        "examples": len(steps),
        "sequence_accuracy": float(right.all(axis=1).mean()),
        "token_accuracy": float(correct[labelled].mean()) if labelled.any() else float("nan"),
        "prefix_accuracy": np.logical_and.accumulate(right, axis=1).mean(axis=0).tolist(),
        "solver_steps_median": float(np.median(steps)),
        "solver_steps_max": int(steps.max()),
        "converged": float(outcome["converged"].mean()),
        "residual_median": float(np.median(residual)),
        "residual_max": float(residual.max()),
    }
