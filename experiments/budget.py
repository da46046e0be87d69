"""Accuracy against a budget of layers, and where halting falls relative to saturation.

One pass over the iterations of the solver, halting switched off, decodes the answer at every budget
on the way. What a halting solver would have answered within a budget follows from it: its own
answer so far, or the one that it halted with.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fpr
from experiments import flops, losses
from experiments.context import Run
from experiments.evaluate import Evaluator, layers_per_step, read_samples
from experiments.flops import Flops
from fpr.models import base
from fpr.solvers import Damped

PyTree = Any
EVERY = 100  # budgets up to here are all recorded; from here on they grow by 1/50
QUARTILES = ("lower_quartile", "median", "upper_quartile")


class Course(NamedTuple):
    """What R budgets of B examples looked like on the way.

    Attributes:
      right: (R, B) bool, every labelled token right.
      tokens: (R, B) int32, labelled tokens that are right.
      changed: (R, B) bool, the answer differs from that of the budget before; True for the first.
      residual: (R, B) float32.
      q_halt: (R, B) logit of the Q head, or None.
      predictions: (R, B, T) int32, or None unless asked for.
    """

    right: jax.Array
    tokens: jax.Array
    changed: jax.Array
    residual: jax.Array
    q_halt: jax.Array | None
    predictions: jax.Array | None


def budgets(most: int) -> np.ndarray:
    """Budgets 1 .. `most` in iterations: every one at first, then ever fewer (R ascending)."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 51 // 50)))
    return np.array(found, np.int32)


def follow(
    model: Mapping[str, Any],
    params: PyTree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None,
    at: jax.Array,
    *,
    solver: Damped,
    keep_predictions: bool = False,
) -> Course:
    """Decodes the answer after each of the numbers of iterations `at`, (R,) ascending.

    A model with one loop goes on from budget to budget. One with several is solved anew at each,
    since what a layer reads depends on how far the layer below came; `at` then caps every layer.
    """
    apply = functools.partial(fpr.apply, model, params, batch, key=key, solver=solver)
    start = apply(max_steps=0)
    goes_on = len(start.state) == 1
    labels = batch["labels"]

    def body(carry: tuple[Any, ...], budget: jax.Array) -> tuple[tuple[Any, ...], Course]:
        state, before, last = carry
        if goes_on:
            out = apply(state=state, max_steps=budget - before)
        else:
            out = apply(max_steps=budget)
        answer = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
        right = losses.token_correct(out.logits, labels)
        row = Course(
            right=jnp.all(right | (labels == losses.IGNORED), axis=-1),
            tokens=right.sum(axis=-1),
            changed=jnp.any(answer != last, axis=-1),
            residual=out.residual,
            q_halt=None if out.q_logits is None else out.q_logits[:, 0],
            predictions=answer if keep_predictions else None,
        )
        return (out.state, budget, answer), row

    nothing = jnp.full(labels.shape, -1, jnp.int32)
    return jax.lax.scan(body, (start.state, jnp.zeros((), jnp.int32), nothing), at)[1]


def curves(run: Run, params: PyTree, evaluator: Evaluator) -> dict[int, dict[str, Any]]:
    """Accuracy by budget on the first `eval.budget_examples` examples of each length.

    Reads the steps at which each example halts from the samples.npz of the same evaluation.

    Returns:
      {length: see `summarise`}; empty for a model without a loop.
    """
    config = run.config
    options = config["eval"]
    solver = base.make_solver(config["model"]["solver"], train=False)
    # The same path, without its end: what decides on halting does not move the iterate.
    endless = dataclasses.replace(solver, halting="never")
    pass_ = jax.jit(functools.partial(follow, config["model"], solver=endless))
    found: dict[int, dict[str, Any]] = {}
    for length in evaluator.lengths:
        samples = read_samples(run.path, length)
        count = min(options["budget_examples"], len(samples["steps"]))
        layer_steps = samples["layer_steps"][:count]
        if count == 0 or layer_steps.shape[1] == 0:
            continue
        at = budgets(options["budget_steps"] or _enough(solver, int(layer_steps.max())))
        size = min(options["batch_size"], count)
        with run.clock.measure("compile"):
            operations = flops.count(config["model"], params, evaluator.batch(length, 0, 1, 1))
        labelled, parts, compiled = [], [], None
        for start in range(0, count, size):
            n = min(size, count - start)
            batch = evaluator.batch(length, start, n, size)
            keys = evaluator.keys(length, start, n, size)
            if compiled is None:
                with run.clock.measure("compile"):
                    compiled = pass_.lower(params, batch, keys, at).compile()
            with run.clock.measure("evaluation"):
                course = jax.tree.map(np.asarray, compiled(params, batch, keys, at))
            if not config["q_loss_weight"]:  # A Q head that was not trained says nothing.
                course = course._replace(q_halt=None)
            parts.append(jax.tree.map(lambda a, n=n: a[:, :n], course))
            labelled.append((batch["labels"][:n] != losses.IGNORED).sum(axis=1))
        course = jax.tree.map(lambda *a: np.concatenate(a, axis=1), *parts)
        found[length] = summarise(
            course,
            at,
            labelled=np.concatenate(labelled),
            layer_steps=layer_steps,
            answer=samples["correct"][:count],
            scale=layers_per_step(config["model"], layer_steps),
            operations=operations,
            most=solver.max_steps,
        )
    return found


def _enough(solver: Damped, slowest: int) -> int:
    """Twice what the slowest example took; within the solver's cap, where that is no fixed work."""
    return 2 * slowest if solver.halting == "never" else min(2 * slowest, solver.max_steps)


def summarise(
    course: Course,
    at: np.ndarray,
    *,
    labelled: np.ndarray,
    layer_steps: np.ndarray,
    answer: np.ndarray,
    scale: int,
    operations: Flops,
    most: int,
) -> dict[str, Any]:
    """Curves and the comparison of halting with saturation.

    Args:
      course: what `follow` returned, R budgets of N examples.
      at: (R,) iterations of every loop.
      labelled: (N,) labelled tokens.
      layer_steps: (N, L) iterations after which the solver halted each example in each loop.
      answer: (N,) bool, the example was right where it halted.
      scale: blocks that one iteration of one loop runs in sequence.
      operations: of an example.
      most: the solver's own cap on iterations; ACT goes no further.

    Returns:
      `iterations`, `effective_layers`, `flops` (R budgets); `sequence_accuracy`, `token_accuracy`
      (R) and the quartiles of `residual` (R) of solves that spend the whole budget; `halting`: the
      same examples frozen where they halt, with the `effective_layers_mean` and `flops_mean` that
      they spend (R each); `halted_at` and `saturated_at` (quartiles in iterations, and by example),
      where an example saturates at the first budget from which its answer no longer changes;
      `halted_before_saturation` and `unsettled` (shares: halted too early; still changing at the
      last budget); with a Q head `act`: what halting at the first budget with a positive halting
      logit gives, at the last one within `max_iterations` where there is none; `halted`: share of
      examples with one.
    """
    loops, halted = layer_steps.shape[1], layer_steps.max(axis=1)
    right, changed = np.asarray(course.right), np.asarray(course.changed)
    number = np.arange(len(at))[:, None]
    last_change = np.where(changed, number, 0).max(axis=0)
    saturated = at[last_change]
    unsettled = (last_change == len(at) - 1) & (len(at) > 1)
    within = at[:, None] < halted
    frozen = np.where(within, right, answer)
    whole = np.repeat(at[:, None], loops, axis=1)
    spent = np.minimum(at[:, None, None], layer_steps)  # (R, N, L)
    quartiles = np.quantile(np.asarray(course.residual, np.float64), (0.25, 0.5, 0.75), axis=1)
    found: dict[str, Any] = {
        "examples": len(halted),
        "iterations": at,
        "effective_layers": whole.sum(axis=1) * scale,
        "flops": operations.of(whole),
        "sequence_accuracy": right.mean(axis=1),
        "token_accuracy": course.tokens.sum(axis=1) / max(1, labelled.sum()),
        "residual": dict(zip(QUARTILES, quartiles)),
        "halting": {
            "sequence_accuracy": frozen.mean(axis=1),
            "effective_layers_mean": spent.sum(axis=2).mean(axis=1) * scale,
            "flops_mean": operations.of(spent).mean(axis=1),
        },
        "halted_at": _spread(halted),
        "saturated_at": _spread(saturated),
        "halted_before_saturation": float((halted < saturated).mean()),
        "unsettled": float(unsettled.mean()),
    }
    if course.q_halt is not None:
        ready = np.asarray(course.q_halt)[at <= most] > 0  # sigmoid(Q) > 1/2
        first = np.where(ready.any(axis=0), ready.argmax(axis=0), len(ready) - 1)
        found["act"] = {
            "sequence_accuracy": float(right[first, np.arange(len(halted))].mean()),
            "effective_layers_mean": float(found["effective_layers"][first].mean()),
            "flops_mean": float(found["flops"][first].mean()),
            "halted": float(ready.any(axis=0).mean()),
            "max_iterations": int(at[len(ready) - 1]),
        }
    return found


def _spread(values: np.ndarray) -> dict[str, Any]:
    quartiles = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {**dict(zip(QUARTILES, quartiles)), "examples": values}
