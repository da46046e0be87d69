"""Tables and figures of a run: accuracy and solver effort by length, residuals, training curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # Figures go to files; a machine without a display must work.

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

ByLength = Mapping[int, Mapping[str, Any]]


def table(results: ByLength, train_length: int, title: str) -> Table:
    """The final table: one row per evaluated length."""
    examples = max(r["examples"] for r in results.values())
    caption = f"{examples} examples per length, trained at length {train_length}"
    out = Table(title=title, caption=caption, box=box.SIMPLE_HEAD)
    out.title_justify = out.caption_justify = "left"
    for name in (
        "length", "sequence\naccuracy", "token\naccuracy", "solver steps\nmedian / max",
        "converged", "residual\nmedian / max",
    ):  # fmt: skip
        out.add_column(name, justify="right", no_wrap=True)
    for length, r in results.items():
        out.add_row(
            str(length),
            f"{r['sequence_accuracy']:.4f}",
            f"{r['token_accuracy']:.4f}",
            f"{r['solver_steps_median']:.0f} / {r['solver_steps_max']}",
            f"{r['converged']:.1%}",
            f"{r['residual_median']:.2g} / {r['residual_max']:.2g}",
        )
    return out


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _mark_trained(axes: Axes, train_length: int) -> None:
    axes.axvline(train_length, color="0.5", linestyle=":", label="trained length")


def plot_accuracy(results: ByLength, train_length: int, path: Path, title: str) -> Path:
    """Sequence and token accuracy against length; prefix accuracy of the longest sequences."""
    figure, axes = _axes(title, "sequence length", "accuracy")
    lengths = sorted(results)
    for metric, marker in (("sequence_accuracy", "o"), ("token_accuracy", "s")):
        values = [results[n][metric] for n in lengths]
        axes.plot(lengths, values, marker=marker, label=metric.replace("_", " "))
    prefix = results[lengths[-1]]["prefix_accuracy"]
    label = f"prefix accuracy at length {lengths[-1]}"
    axes.plot(range(1, len(prefix) + 1), prefix, linewidth=1, alpha=0.7, label=label)
    _mark_trained(axes, train_length)
    axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize="small")
    return _save(figure, path)


def plot_steps(results: ByLength, train_length: int, path: Path, title: str) -> Path:
    """Median and largest number of solver steps against length."""
    figure, axes = _axes(title, "sequence length", "solver steps")
    lengths = sorted(results)
    for metric, marker in (("solver_steps_median", "o"), ("solver_steps_max", "^")):
        values = [results[n][metric] for n in lengths]
        axes.plot(lengths, values, marker=marker, label=metric.rsplit("_", 1)[1])
    _mark_trained(axes, train_length)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    return _save(figure, path)


def plot_difficulty(
    buckets: Sequence[Mapping[str, Any]], name: str, path: Path, title: str
) -> Path:
    """Accuracies and solver steps against a measure of difficulty.

    Args:
      buckets: from `puzzle_files.buckets`, at least one.
      name: the measure, such as "empties".
      path: file to write.
      title: of the figure.
    """
    figure, accuracy = _axes(title, name.replace("_", " "), "accuracy")
    # A bucket sits at the middle of the values in it; its number of examples is written above.
    at = [(b["from"] + b["to"]) / 2 for b in buckets]
    for metric, marker in (("puzzle_accuracy", "o"), ("valid_solution", "x")):
        if metric in buckets[0]:
            values = [b[metric] for b in buckets]
            accuracy.plot(at, values, marker=marker, label=metric.replace("_", " "))
    for x, b in zip(at, buckets):
        accuracy.annotate(str(b["examples"]), (x, 1.02), fontsize=6, ha="center")
    accuracy.set_ylim(-0.03, 1.08)
    steps = accuracy.twinx()
    values = [b["solver_steps_mean"] for b in buckets]
    steps.plot(at, values, color="tab:red", marker="s", label="solver steps, mean")
    steps.set(ylabel="solver steps", ylim=(0, None))
    steps.spines[["top"]].set_visible(False)
    handles = [*accuracy.get_legend_handles_labels()[0], *steps.get_legend_handles_labels()[0]]
    accuracy.legend(handles=handles, fontsize="small", loc="lower center")
    return _save(figure, path)


def plot_residuals(traces: Mapping[int, Mapping[str, Any]], tolerance: float, path: Path) -> Path:
    """Residual against iteration, median and quartiles over samples, one line per length."""
    figure, axes = _axes("Convergence of the solver", "iteration", "residual")
    for length, t in sorted(traces.items()):
        iterations = range(1, len(t["median"]) + 1)
        (drawn,) = axes.plot(iterations, t["median"], label=f"length {length}")
        axes.fill_between(
            iterations, t["lower_quartile"], t["upper_quartile"], alpha=0.2, color=drawn.get_color()
        )
    axes.axhline(tolerance, color="0.5", linestyle=":", label="tolerance")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    return _save(figure, path)


def plot_training(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Loss, accuracies and solver steps during training; evaluations as points."""
    train = [r for r in records if r["split"] == "train"]
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axes in panels:
        axes.set_xlabel("optimiser step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    steps = [r["step"] for r in train]
    panels[0].plot(steps, [r["loss"] for r in train])
    panels[0].set(title="Training loss", yscale="log")
    finished = [r for r in train if r["sequence_accuracy"] is not None]
    steps = [r["step"] for r in finished]
    for metric in ("sequence_accuracy", "token_accuracy"):
        label = f"train, {metric.replace('_', ' ')}"
        panels[1].plot(steps, [r[metric] for r in finished], label=label)
    panels[2].plot(steps, [r["solver_steps_mean"] for r in finished], label="train, mean")
    evals = [r for r in records if r["split"] == "eval"]
    for i, length in enumerate(sorted({r["length"] for r in evals})):
        mine = [r for r in evals if r["length"] == length]
        at = [r["step"] for r in mine]
        for axes, metric in ((panels[1], "sequence_accuracy"), (panels[2], "solver_steps_median")):
            label = f"length {length}, {metric.replace('_', ' ')}"
            axes.plot(at, [r[metric] for r in mine], "o", color=f"C{i + 2}", ms=4, label=label)
    panels[1].set(title="Accuracy", ylim=(-0.03, 1.03))
    panels[2].set(title="Solver steps", ylim=(0, None))
    for axes in panels[1:]:
        axes.legend(fontsize="x-small")
    return _save(figure, path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl; a half-written last line is left out."""
    records = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return records
