"""The end of a run: evaluation of a checkpoint, result.json, the table and the figures.

An evaluation with other options than the trained run's (`--mode=eval` and overrides) goes to a
directory of its own under `evaluations/`, named by what differs; nothing is written over.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fpr
from experiments import budget, optim, plots
from experiments import config as configs
from experiments.checkpoint import Checkpoints
from experiments.context import Run
from experiments.errors import UserError
from experiments.evaluate import METRICS, Evaluator
from experiments.identity import data_line
from experiments.origin import Changed, Origin, digest, numbered, of_evaluation
from experiments.progress import duration
from experiments.steps import TrainState, averaged, init_state
from experiments.workdir import IMPORTED, read_metrics, write_json
from fpr import registry

Results = Mapping[int, Mapping[str, Any]]
Scales = Mapping[str, tuple[float, np.ndarray]]

# What `weights` of result.json says: of a run trained here, and of imported weights by their kind.
AVERAGED, LAST = "averaged (EMA)", "last"
WEIGHTS = {"ema": AVERAGED, "model": LAST, "unnamed": "the only ones in the imported file"}


def evaluate_checkpoint(run: Run, changed: Changed | None = None) -> dict[str, Any]:
    """Evaluates the newest checkpoint in the workdir and writes result.json and figures again.

    Args:
      run: the run, with the config to evaluate with.
      changed: {key: (value of the trained run, value now)}. Where it changes what is measured, the
        results go to a directory of their own.

    Raises:
      UserError: there is no checkpoint that can be read, and no imported weights, or the data is
        not such that the run may be evaluated on it.
    """
    changed = changed or {}
    state, origin, other_data = _restore(run, changed)
    records = read_metrics(run.path / "metrics.jsonl")
    run.clock.continue_from(records)
    overrides = {k: v for k, v in changed.items() if configs.is_measured(k, run.config)}
    overrides |= other_data
    if overrides:
        path = run.path / "evaluations" / override_name(overrides)
        path.mkdir(parents=True, exist_ok=True)
        run = dataclasses.replace(run, path=path)
        records = []  # The training curves are the run's, not this evaluation's.
    return finish(run, state, Evaluator(run)(averaged(state)), records, origin, overrides)


def _restore(run: Run, changed: Changed) -> tuple[TrainState, Origin, Changed]:
    """The newest checkpoint or the imported weights, and where they come from.

    Also returns {"task.sha256": (there, here)} where the data has another content than when the run
    was trained, although the config names the same.
    """
    config = run.config
    if not (run.path / "checkpoints").is_dir() and (run.path / "weights.npz").is_file():
        if numbered(run):
            raise UserError(
                f"cannot evaluate the imported weights in {run.path}: each row of their puzzle "
                "embedding belongs to a puzzle by the authors' numbering, which is not that of "
                f"task.name={config['task']['name']!r}; only their own list of puzzles tells it"
            )
        try:
            params = fpr.load(run.path)[1]
        except ValueError as error:
            raise UserError(str(error)) from error
        run.progress.say("evaluating weights.npz, which was not trained here")
        file = run.path / IMPORTED
        imported = json.loads(file.read_text()) if file.is_file() else {}
        state = TrainState(jnp.zeros((), jnp.int32), params, None, None, None)
        return state, Origin(None, imported=imported), {}
    record = of_evaluation(run, changed)
    optimizer = optim.make_optimizer(config["optimizer"], config["train"]["steps"])
    # The checkpoint has the shapes of the trained run, whatever data it is evaluated on.
    like = jax.eval_shape(functools.partial(init_state, config, optimizer, record.example()))
    with Checkpoints(run.path, config["checkpoint"]["keep"]) as checkpoints:
        restored = checkpoints.restore(like, run.progress.say)
    if restored is None:
        raise UserError(f"nothing to evaluate: {run.path} holds no checkpoint that can be read")
    step, state = restored
    run.progress.say(f"evaluating the checkpoint of step {step}")
    there, here = (digest(i)[:8] for i in (record.eval, run.task.identity("eval")))
    same = there == here or any(key.startswith("task.") for key in changed)
    return state, record.origin, {} if same else {"task.sha256": (there, here)}


def override_name(overrides: Changed) -> str:
    """A directory name for overrides: "solver.eval.decay=0.997,solver.eval.patience=10".

    A text that cannot stand in a name, or is long, is told from others like it by its hash.
    """

    def text(value: Any) -> str:
        return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)

    parts = (f"{k.removeprefix('model.')}={text(v[1])}" for k, v in sorted(overrides.items()))
    whole = ",".join(parts)
    name = re.sub(r"[^\w.=,+-]+", "_", whole)
    if name == whole and len(name) <= 120:
        return name
    return f"{name[:100]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def finish(
    run: Run,
    state: TrainState,
    results: Results,
    records: Sequence[Mapping[str, Any]],
    origin: Origin,
    overrides: Changed | None = None,
) -> dict[str, Any]:
    """Writes result.json and the figures, prints the table; returns result.json's content.

    Args:
      run: the run.
      state: its last state.
      results: metrics by length, from `Evaluator`, which has left samples.npz in `run.path`.
      records: the content of metrics.jsonl.
      origin: where its weights come from.
      overrides: {key: (value of the trained run, value here)} of an evaluation.
    """
    config, clock, params = run.config, run.clock, averaged(state)
    curves = budget.curves(run, params, Evaluator(run))
    scales = residual_scales(config["model"], params)
    device = jax.devices()[0]
    names = next(iter(results.values()))
    imported, trained = origin.imported or {}, AVERAGED if config["ema"] else LAST
    content: dict[str, Any] = {
        "model": config["model"]["name"],
        "parameters": sum(a.size for a in jax.tree.leaves(params)),
        "step": int(state.step),
        "weights": WEIGHTS.get(imported.get("weights", ""), trained),
        "imported": imported or None,
        "seed": config["seed"],
        "overrides": {k: {"trained": a, "here": b} for k, (a, b) in (overrides or {}).items()},
        "task": config["task"],
        "solver": config["model"]["solver"]["eval"],
        "data": {
            "train": origin.data,
            "train_recorded_at_step": origin.step,  # None: what the config names today
            "eval": run.task.identity("eval"),
        },
        **{name: {n: r[name] for n, r in results.items()} for name in names},
        "metrics": {k: v for k, v in METRICS.items() if any(n.startswith(k) for n in names)},
        "budget": curves,
        "residual_scales": {
            name: {"start": start, "trained": np.quantile(values, (0, 0.25, 0.5, 0.75, 1))}
            for name, (start, values) in scales.items()
        },
        "seconds": {"total": clock.total, **clock.seconds},
        "eval_share": clock.eval_share,
        "jax_version": jax.__version__,
        "device": f"{device.platform} ({device.device_kind})",
    }
    write_json(run.path / "result.json", content)
    title = f"{content['model']} on {run.task.title}"
    figures = _draw(run, results, curves, scales, records, title)
    say = run.progress.say
    say(plots.table(results, run.task.length, f"{title}, step {content['step']}"))
    for length, r in results.items():
        say(f"length {length}: an example takes {_effort(r)} (mean)")
        if act := r.get("act"):
            say(
                f"length {length}: ended by the Q head (ACT at inference), an example takes "
                f"{_effort(act)} (mean), sequence accuracy {act['sequence_accuracy']:.4f}, "
                f"{act['halted']:.1%} ended"
            )
    for length, r in results.items():
        if headline := getattr(run.task, "headline", ()):  # what the task's own score comes to
            said = ", ".join(f"{name.replace('_', ' ')} {r[name]:.4g}" for name in headline)
            say(f"length {length}: {said}")
    examples = [r["examples"] for r in results.values()]
    say(data_line(origin.data, content["data"]["eval"], examples, origin.step))
    # A fixed number of loops is not a solve that could fail.
    fixed_loops = config["model"]["solver"]["eval"]["halting"] == "never"
    for length, r in results.items():
        if r["converged"] < 1 and not fixed_loops:
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


def _effort(metrics: Mapping[str, Any]) -> str:
    operations = metrics["flops_per_example_mean"] / 1e6
    return f"{metrics['effective_layers_mean']:.1f} effective layers and {operations:.3g} MFLOP"


def residual_scales(model: Mapping[str, Any], params: Any) -> Scales:
    """FPRM's residual scales: {"alpha_1": (its start, (D,) trained)}; none for other models.

    Spec 2 section 6: trained medians stay near the start, the spread widens.
    """
    if model.get("residual_scale") != "input_independent":
        return {}
    found = {}
    for name, value in registry.flatten(params).items():
        last = name.rsplit("/", 1)[-1]
        if last in ("alpha_1", "alpha_2"):
            found[last] = (float(model[last]), np.asarray(jax.nn.sigmoid(value)))
    return found


def _draw(
    run: Run,
    results: Results,
    curves: Results,
    scales: Scales,
    records: Sequence[Mapping[str, Any]],
    title: str,
) -> list[Path]:
    """Draws the figures; returns their paths."""
    length, path = run.task.length, run.path
    figures = [
        plots.plot_accuracy(results, length, path / "accuracy.png", title),
        plots.plot_steps(results, length, path / "solver_steps.png", title),
    ]
    for result in results.values():
        for name, buckets in result.items():
            if name.startswith("by_"):  # from the task's `score`
                measure, act = name.removeprefix("by_"), result.get("act", {}).get(name, ())
                file = path / f"{name}.png"
                figures.append(plots.plot_difficulty(buckets, measure, file, title, act))
    if curves:
        tolerance = run.config["model"]["solver"]["eval"]["tolerance"]
        figures.append(plots.plot_residuals(curves, tolerance, path / "residual.png"))
        figures.append(plots.plot_budget(curves, path / "budget.png", title))
        figures.append(plots.plot_halting(curves, path / "halting.png", title))
    if scales:
        figures.append(plots.plot_scales(scales, path / "residual_scales.png", title))
    if any(r["split"] == "train" for r in records):
        figures.append(plots.plot_training(records, path / "training.png"))
    return figures
