"""Evaluation: accuracy, solver steps, effective layers and FLOPs per length, in one batch shape.

`METRICS` says what each number is; a puzzle adds what its own rules say (`Scored` in
`experiments.tasks`). Every example's own steps and answer are in `samples.npz` of the run. A model
of fixed work with a trained Q head is also scored with "ACT at inference" (spec 2 section 4): each
example where its halting logit is positive for the first time, within the same number of segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fpr
from experiments import flops, losses
from experiments.context import Run
from experiments.tasks import Scored
from experiments.workdir import write_arrays
from fpr import registry
from fpr.models import base
from fpr.solvers import select

PyTree = Any
Batch = Mapping[str, Any]

SAMPLES = "samples.npz"
# What the numbers in result.json mean; the shares are between 0 and 1.
METRICS = {
    "sequence_accuracy": "share of examples (whole sequences or puzzles) right in every labelled "
    "token",
    "token_accuracy": "share of labelled tokens (cells of a puzzle) that are right",
    "prefix_accuracy": "entry t: share of examples right at every position up to t",
    "puzzle_accuracy": "share of whole puzzles right in every cell, compared with the label",
    "cell_accuracy": "share of cells that are right",
    "blank_accuracy": "share of the cells left blank in the question that are right",
    "valid_solution": "share of whole answers that solve the question by the puzzle's own rules, "
    "whatever the label",
    "string_accuracy": "share of strings copied right to the full stop",
    "character_accuracy": "share of a string's letters that are right",
    "answer_accuracy": "share of sequences whose one answer is right",
    "scaled_accuracy": "(accuracy - chance) / (1 - chance): 0 for a random answer",
    "majority_accuracy": "accuracy of always giving the most frequent answer",
    "qa_accuracy": "share of questions answered right",
    "task_accuracy": "share of questions answered right, by number of the bAbI task",
    "perplexity": "exponential of the mean of -log p over the tokens",
    "pass_at": "share of test pairs solved by one of the K answers with the most votes, averaged "
    "over tasks",
    "solver_steps": "applications of f, summed over the layers of the model",
    "effective_layers": "blocks that an example went through: steps times blocks in one step",
    "flops_per_example": flops.METHOD,
    "converged": "share of examples whose residual fell below the solver's tolerance",
    "residual": "what the solver compared with its tolerance when the example halted",
    "act": "the same numbers when the Q head ends each example (ACT at inference): at the first "
    "segment whose halting probability is above 1/2, at the last one if there is none; halted: "
    "share of examples that it ended",
    "sequential_difference": "distance of the solution found token by token from the one found for "
    "all tokens at once, over the norm of the latter; median over examples",
}


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
        act = _ends_by_q_head(config)
        self._outcome = jax.jit(functools.partial(_outcome, config["model"], act=act))
        self._sequential = jax.jit(functools.partial(fpr.sequential_difference, config["model"]))
        self._compiled: dict[int, Callable[..., Batch]] = {}
        self._flops: dict[int, flops.Flops] = {}

    def __call__(self, params: PyTree) -> dict[int, dict[str, Any]]:
        """Metrics by length; see `summarise`. Writes each example's own to samples.npz."""
        for length in self.lengths:
            if length not in self._compiled:
                with self._run.clock.measure("compile"):
                    batch = self.batch(length, 0, self._batch_size)
                    args = (params, batch, self.keys(length, 0, 1))
                    self._compiled[length] = self._outcome.lower(*args).compile()
                    self._flops[length] = flops.count(self._run.config["model"], params, batch)
        with self._run.clock.measure("evaluation"):
            outcomes = {length: self._one_length(params, length) for length in self.lengths}
            results = {n: self._summarise(outcome) for n, outcome in outcomes.items()}
            for length, result in results.items():
                result |= self._sequential_difference(params, length)
            samples = {f"{n}/{k}": v for n, o in outcomes.items() for k, v in _own(o).items()}
            write_arrays(self._run.path / SAMPLES, samples)
        return results

    def batch(self, length: int, start: int, count: int, size: int | None = None) -> Batch:
        """Examples start..start+count-1, filled up to `size` (the size of all batches if None)."""
        return pad_batch(self._run.task.eval_batch(length, start, count), size or self._batch_size)

    def keys(self, length: int, start: int, count: int, size: int | None = None) -> jax.Array:
        """One key per example, by its number: it starts alike in any batch. Copies share theirs."""
        number = np.arange(start, start + (size or self._batch_size))
        number[count:] = start
        key = jax.random.fold_in(self._key, length)
        return jax.vmap(lambda n: jax.random.fold_in(key, n))(number)

    def _one_length(self, params: PyTree, length: int) -> dict[str, Any]:
        """Outcome of every example, leaves (N, ...); see `_outcome`."""
        parts = []
        for start in range(0, self._max_examples, self._batch_size):
            count = min(self._batch_size, self._max_examples - start)
            batch = self.batch(length, start, count)
            outcome = self._compiled[length](params, batch, self.keys(length, start, count))
            parts.append(jax.tree.map(lambda a, n=count: np.asarray(a)[:n], outcome))
        whole: dict[str, Any] = jax.tree.map(lambda *a: np.concatenate(a), *parts)
        scale = layers_per_step(self._run.config["model"], whole["layer_steps"])
        for part in (whole, whole["act"]) if "act" in whole else (whole,):
            part["effective_layers"] = part["steps"] * scale
            part["flops"] = self._flops[length].of(part["layer_steps"])
        return whole

    def _sequential_difference(self, params: PyTree, length: int) -> dict[str, float]:
        count = min(self._run.config["eval"]["sequential_difference"], self._max_examples)
        if not count:
            return {}
        tokens = self._run.task.eval_batch(length, 0, count)["tokens"]
        apart = self._sequential(params, {"tokens": tokens})
        return {"sequential_difference": float(np.median(apart))}

    def _summarise(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        task, metrics = self._run.task, summarise(outcome)
        if isinstance(task, Scored):
            metrics |= task.score(outcome)
        if "act" in outcome:
            act = self._summarise(outcome["act"])
            act["halted"] = float(outcome["act"]["halted"].mean())
            metrics["act"] = {k: v for k, v in act.items() if k != "prefix_accuracy"}
        return metrics


def layers_per_step(model: Mapping[str, Any], layer_steps: np.ndarray) -> int:
    """Blocks that one counted step runs: those of one application of f, or of a loopless model.

    Args:
      model: model config.
      layer_steps: (N, L) steps of each looped layer.
    """
    options = registry.build(model).config
    if layer_steps.shape[1] == 0:
        return int(options.num_layers)
    return int(getattr(options, "layers_per_step", 1))


def _ends_by_q_head(config: Mapping[str, Any]) -> bool:
    """Whether a Q head may end the segments: it was trained, and nothing else ends them.

    The models that have one have one loop.
    """
    solver = base.make_solver(config["model"]["solver"], train=False)
    return bool(config["q_loss_weight"]) and solver.halting == "never"


def _own(outcome: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What is kept of each example: (N,) or (N, L) arrays, no answers; of ACT as `act_*`."""
    right = (outcome["correct"] | ~outcome["labelled"]).all(axis=1)
    kept = (
        "steps", "layer_steps", "effective_layers", "flops", "residual", "converged", "q_halt",
        "halted",
    )  # fmt: skip
    mine = {"correct": right} | {k: outcome[k] for k in kept if k in outcome}
    if "act" in outcome:
        mine |= {f"act_{k}": v for k, v in _own(outcome["act"]).items()}
    return mine


def read_samples(path: Path, length: int) -> dict[str, np.ndarray]:
    """Each example's own numbers at a length, from the samples.npz that `Evaluator` wrote."""
    with np.load(path / SAMPLES) as arrays:
        mine = f"{length}/"
        return {k.removeprefix(mine): arrays[k] for k in arrays.files if k.startswith(mine)}


def _outcome(
    model: Mapping[str, Any], params: PyTree, batch: Batch, key: jax.Array, *, act: bool = False
) -> dict[str, Any]:
    """Per-example outcome of one batch; leaves lead with B.

    With `act`, `outcome["act"]` is each example's outcome where the Q head ends it, and `halted`,
    whether it does so. The segments are the same ones: the answer is only read after each.
    """
    apply = functools.partial(fpr.apply, model, params, batch, train=False, key=key)
    if not act:
        return _judged(apply(), batch)
    start = apply(max_steps=0)

    def segment(carry: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
        state, _, ended = carry
        out = apply(state=state, max_steps=1)
        now = _judged(out, batch)
        ended = select(ended["halted"], ended, now | {"halted": now["q_halt"] > 0})
        return (out.state, now, ended), None

    nothing = _judged(start, batch)
    carry = (start.state, nothing, nothing | {"halted": jnp.zeros_like(nothing["converged"])})
    length = base.make_solver(model["solver"], train=False).max_steps
    (_, last, ended), _ = jax.lax.scan(segment, carry, length=length)
    return last | {"act": ended}


def _judged(out: fpr.Output, batch: Batch) -> dict[str, jax.Array]:
    """What an output says about each example."""
    outcome = {
        "predictions": jnp.argmax(out.logits, axis=-1).astype(jnp.int32),
        "correct": losses.token_correct(out.logits, batch["labels"]),
        "labelled": jnp.asarray(batch["labels"] != losses.IGNORED),
        "nll": losses.softmax_cross_entropy(out.logits, batch["labels"]).sum(axis=-1),
        "steps": out.steps,
        "layer_steps": out.layer_steps,
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
      outcome: `correct`, `labelled` (N, T) bool; `steps`, `effective_layers`, `flops`, `residual`,
        `converged` (N,).

    Returns:
      `examples`, `sequence_accuracy`, `token_accuracy`, `prefix_accuracy` (a list of T shares),
      `solver_steps_*` (median, mean, max), `effective_layers_*` and `flops_per_example_*` (median,
      mean), `converged` (share), `residual_median`, `residual_max`. `Evaluator` adds the task's
      scores and, where a Q head may end examples, `act`: the same for ACT at inference.
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
        "solver_steps_mean": float(steps.mean()),
        "solver_steps_max": int(steps.max()),
        "effective_layers_median": float(np.median(outcome["effective_layers"])),
        "effective_layers_mean": float(outcome["effective_layers"].mean()),
        "flops_per_example_median": float(np.median(outcome["flops"])),
        "flops_per_example_mean": float(outcome["flops"].mean()),
        "converged": float(outcome["converged"].mean()),
        "residual_median": float(np.median(residual)),
        "residual_max": float(residual.max()),
    }
