"""The end of a run: evaluation of a checkpoint, result.json, the table and the figures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import optim, report
from experiments.checkpoint import Checkpoints
from experiments.context import Run
from experiments.errors import UserError
from experiments.evaluate import Evaluator, pad_batch
from experiments.progress import duration
from experiments.steps import TrainState, averaged, init_state
from experiments.workdir import write_json
from fpr import registry
from fpr.models import base

TRACED_EXAMPLES = 8
MAX_TRACED_STEPS = 200

Results = Mapping[int, Mapping[str, Any]]


def evaluate_checkpoint(run: Run) -> dict[str, Any]:
    """Evaluates the newest checkpoint in the workdir and writes result.json and figures again.

    Raises:
      UserError: there is no checkpoint that can be read.
    """
    config = run.config
    optimizer = optim.make_optimizer(config["optimizer"], config["train"]["steps"])
    example = run.task.train_batch(0, config["train"]["batch_size"])
    like = jax.eval_shape(functools.partial(init_state, config, optimizer, example))
    with Checkpoints(run.path, config["checkpoint"]["keep"]) as checkpoints:
        restored = checkpoints.restore(like, run.progress.say)
    if restored is None:
        raise UserError(f"nothing to evaluate: {run.path} holds no checkpoint that can be read")
    step, state = restored
    run.progress.say(f"evaluating the checkpoint of step {step}")
    records = report.read_metrics(run.path / "metrics.jsonl")
    run.clock.continue_from(records)
    return finish(run, state, Evaluator(run)(averaged(state)), records)


def finish(
    run: Run, state: TrainState, results: Results, records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Writes result.json and the figures, prints the table; returns result.json's content.

    Args:
      run: the run.
      state: its last state.
      results: metrics by length, from `Evaluator`.
      records: the content of metrics.jsonl.
    """
    config, clock, params = run.config, run.clock, averaged(state)
    traces = residual_traces(run, params, results)
    device = jax.devices()[0]
    names = next(iter(results.values()))
    content: dict[str, Any] = {
        "model": config["model"]["name"],
        "parameters": sum(a.size for a in jax.tree.leaves(params)),
        "step": int(state.step),
        "weights": "averaged (EMA)" if config["ema"] else "last",
        "seed": config["seed"],
        "task": config["task"],
        "data": {split: run.task.identity(split) for split in ("train", "eval")},
        **{name: {n: r[name] for n, r in results.items()} for name in names},
        "residual_by_iteration": traces,
        "seconds": {"total": clock.total, **clock.seconds},
        "eval_share": clock.eval_share,
        "jax_version": jax.__version__,
        "device": f"{device.platform} ({device.device_kind})",
    }
    write_json(run.path / "result.json", content)
    title = f"{content['model']} on {run.task.title}"
    figures = _draw(run, results, traces, records, title)
    say = run.progress.say
    say(report.table(results, run.task.length, f"{title}, step {content['step']}"))
    for length, r in results.items():
        if r["converged"] < 1:
            say(
                f"length {length}: {1 - r['converged']:.1%} of the solves did not converge; their "
                "answers are read from an unfinished iterate (model.solver.eval.max_steps is "
                f"{config['model']['solver']['eval']['max_steps']})"
            )
    parts = ", ".join(f"{name} {duration(value)}" for name, value in clock.seconds.items())
    say(f"{content['parameters']:,} parameters · {duration(clock.total)} in all ({parts})")
    say("numbers: " + str(run.path / "result.json"))
    say("figures: " + " ".join(str(path) for path in figures))
    return content


def residual_traces(run: Run, params: Any, results: Results) -> dict[int, dict[str, list[float]]]:
    """Residual by iteration on a few evaluation examples of each length.

    Returns:
      {length: {"median": [...], "lower_quartile": [...], "upper_quartile": [...]}}; empty for a
      model without a loop.
    """
    model = run.config["model"]
    key = jax.random.key(run.config["seed"])
    # Watches past convergence: the solver itself would stop at its tolerance.
    solver = dataclasses.replace(base.make_solver(model["solver"], train=False), halting="never")
    trace = jax.jit(
        lambda params, batch, steps: (
            registry.trace(model, params, batch, steps=steps, key=key, solver=solver).residual
        ),
        static_argnums=2,
    )
    count = min(TRACED_EXAMPLES, run.config["eval"]["max_examples"])
    traces: dict[int, dict[str, list[float]]] = {}
    example = pad_batch(run.task.eval_batch(next(iter(results)), 0, 1), 1)
    if not jax.eval_shape(functools.partial(registry.apply, model), params, example).state:
        return traces
    for length, result in results.items():
        batch = pad_batch(run.task.eval_batch(length, 0, count), TRACED_EXAMPLES)
        steps = min(MAX_TRACED_STEPS, 20 * (2 + int(result["solver_steps_max"]) // 20))
        with run.clock.measure("compile"):
            compiled = trace.lower(params, batch, steps).compile()
        with run.clock.measure("evaluation"):
            values = np.asarray(compiled(params, batch), np.float64)
        low, mid, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1).tolist()
        traces[length] = {"median": mid, "lower_quartile": low, "upper_quartile": high}
    return traces


def _draw(
    run: Run, results: Results, traces: Results, records: Sequence[Mapping[str, Any]], title: str
) -> list[Path]:
    """Draws the figures; returns their paths."""
    length, path = run.task.length, run.path
    figures = [
        report.plot_accuracy(results, length, path / "accuracy.png", title),
        report.plot_steps(results, length, path / "solver_steps.png", title),
    ]
    for result in results.values():
        for name, buckets in result.items():
            if name.startswith("by_"):  # from the task's `score`
                measure = name.removeprefix("by_")
                figures.append(
                    report.plot_difficulty(buckets, measure, path / f"{name}.png", title)
                )
    if traces:
        tolerance = run.config["model"]["solver"]["eval"]["tolerance"]
        figures.append(report.plot_residuals(traces, tolerance, path / "residual.png"))
    if any(r["split"] == "train" for r in records):
        figures.append(report.plot_training(records, path / "training.png"))
    return figures
