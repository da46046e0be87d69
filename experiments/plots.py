"""Figures of a run, and the table that it prints: accuracy and effort by length, budget and so on.

Every function draws one figure, saves it and returns its path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # Figures go to files; a machine without a display must work.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich import box
from rich.table import Table

ByLength = Mapping[int, Mapping[str, Any]]

# What a budget is measured in: its name in `budget.summarise`, scale and label.
EFFORT = (
    ("effective_layers", 1.0, "effective layers (iterations × blocks)"),
    ("flops", 1e-6, "MFLOP of an example"),
)
MEAN = {"effective_layers": "effective_layers_mean", "flops": "flops_mean"}


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


def new_axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """A figure with one panel."""
    figure, axes = new_figure(figsize=(5.6, 3.6))
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    plain_frame(axes)
    return figure, axes


def new_figure(*shape: int, figsize: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure and its axes, as `plt.subplots` returns them."""
    return plt.subplots(*shape, figsize=figsize, layout="constrained")


def effort_panels(
    title: str, ylabel: str, measures: Sequence[tuple[str, float, str]]
) -> tuple[Figure, list[Axes]]:
    """A figure with one panel for each of some measures of effort (as `EFFORT`) along x."""
    figure, panels = new_figure(1, len(measures), figsize=(1.2 + 4 * len(measures), 3.9))
    panels = list(np.atleast_1d(panels))
    for axes, (_, _, label) in zip(panels, measures):
        axes.set(xlabel=label, ylabel=ylabel if axes is panels[0] else "")
        plain_frame(axes)
    figure.suptitle(title)
    return figure, panels


def plain_frame(axes: Axes) -> None:
    """A light grid, and no lines above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def log_scale(axis: Axis) -> None:
    """Logarithmic, with plain numbers that do not run into each other; call it after drawing."""
    set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    set_scale("log")
    low, high = axis.get_view_interval()
    within = high / low
    subs = (1, 2, 3, 5, 7) if within < 10 else (1, 2, 5) if within < 200 else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, of the lines in `axes`, below them."""
    handles = axes.get_legend_handles_labels()[0]
    figure.legend(handles=handles, fontsize="x-small", loc="outside lower center", ncols=2)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure to a file and frees it."""
    figure.savefig(path, dpi=150)
    close(figure)
    return path


def close(figure: Figure) -> None:
    """Frees a figure."""
    plt.close(figure)


def _mark_trained(axes: Axes, train_length: int) -> None:
    axes.axvline(train_length, color="0.5", linestyle=":", label="trained length")


def plot_accuracy(results: ByLength, train_length: int, path: Path, title: str) -> Path:
    """Sequence and token accuracy against length; prefix accuracy of the longest sequences."""
    figure, axes = new_axes(title, "sequence length", "accuracy")
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
    return save(figure, path)


def plot_steps(results: ByLength, train_length: int, path: Path, title: str) -> Path:
    """Median and largest number of solver steps against length."""
    figure, axes = new_axes(title, "sequence length", "solver steps")
    lengths = sorted(results)
    for metric, marker in (("solver_steps_median", "o"), ("solver_steps_max", "^")):
        values = [results[n][metric] for n in lengths]
        axes.plot(lengths, values, marker=marker, label=metric.rsplit("_", 1)[1])
    _mark_trained(axes, train_length)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    return save(figure, path)


def plot_difficulty(
    buckets: Sequence[Mapping[str, Any]],
    name: str,
    path: Path,
    title: str,
    act: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Accuracies and effective layers against a measure of difficulty.

    The median of the layers is what most examples need; a few solves that ran into the cap decide
    on the mean, the thin line.

    Args:
      buckets: from `puzzle_files.buckets`, at least one, with `effective_layers_median` and
        `effective_layers_mean`.
      name: the measure, such as "empties".
      path: file to write.
      title: of the figure.
      act: the buckets of the same examples with ACT at inference, if there are.
    """
    figure, accuracy = new_axes(title, name.replace("_", " "), "accuracy")
    # A bucket sits at the middle of the values in it; its number of examples is written above.
    at = [(b["from"] + b["to"]) / 2 for b in buckets]
    for metric, marker in (("puzzle_accuracy", "o"), ("valid_solution", "x")):
        if metric in buckets[0]:
            values = [b[metric] for b in buckets]
            accuracy.plot(at, values, marker=marker, label=metric.replace("_", " "))
    for x, b in zip(at, buckets):
        accuracy.annotate(str(b["examples"]), (x, 1.02), fontsize=6, ha="center")
    accuracy.set_ylim(-0.03, 1.08)
    layers = accuracy.twinx()
    median, mean = (
        np.array([b[f"effective_layers_{statistic}"] for b in buckets])
        for statistic in ("median", "mean")
    )
    # The axis is for the medians: with means of thousands they would all look alike.
    top = min(2 * median.max(), max(median.max(), mean.max()))
    cut = ", cut off" if mean.max() > top else ""
    layers.plot(at, median, color="tab:red", marker="s", label="effective layers, median")
    layers.plot(at, mean, color="tab:red", linewidth=0.6, label=f"effective layers, mean{cut}")
    if act:
        ended = [(b["from"] + b["to"]) / 2 for b in act]
        values = [b["puzzle_accuracy"] for b in act]
        accuracy.plot(ended, values, "C0^--", markersize=4, label="puzzle accuracy, ACT")
        values = [b["effective_layers_median"] for b in act]
        label = "effective layers, median, ACT"
        layers.plot(ended, values, color="tab:red", marker="^", linestyle="--", label=label)
    layers.set(ylabel="effective layers", ylim=(0, 1.08 * top))
    layers.spines[["top"]].set_visible(False)
    handles = [*accuracy.get_legend_handles_labels()[0], *layers.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, fontsize="small", loc="outside lower center", ncols=2)
    return save(figure, path)


def plot_budget(curves: ByLength, path: Path, title: str) -> Path:
    """Accuracy against effective layers, and against FLOPs; one colour per length.

    Args:
      curves: `budget.curves`.
      path: file to write.
      title: of the figure.
    """
    figure, panels = effort_panels(title, "sequence accuracy", EFFORT)
    for axes, (name, scale, _) in zip(panels, EFFORT):
        for i, (length, c) in enumerate(sorted(curves.items())):
            halting, color = c["halting"], f"C{i}"
            whole, spent = scale * np.asarray(c[name]), scale * np.asarray(halting[MEAN[name]])
            axes.plot(
                whole, c["sequence_accuracy"], color=color, label=f"length {length}, whole budget"
            )
            axes.plot(
                spent, halting["sequence_accuracy"], color=color, linestyle="--",
                label=f"length {length}, halting (mean spent)",
            )  # fmt: skip
            if "act" in c:
                act = c["act"]
                axes.plot(
                    scale * act[MEAN[name]], act["sequence_accuracy"], "^", color=color,
                    label=f"length {length}, ended by the Q head (ACT)",
                )  # fmt: skip
        axes.set_ylim(-0.03, 1.03)
        log_scale(axes.xaxis)
    legend_below(figure, panels[0])
    return save(figure, path)


def plot_halting(curves: ByLength, path: Path, title: str) -> Path:
    """The iteration where each example halts against the one where its answer last changed."""
    figure, axes = new_axes(title, "saturated at iteration", "halted at iteration")
    most = 1
    for length, c in sorted(curves.items()):
        saturated, halted = c["saturated_at"]["examples"], c["halted_at"]["examples"]
        most = max(most, *saturated, *halted)
        axes.plot(saturated, halted, ".", alpha=0.4, label=f"length {length}")
    axes.plot([1, most], [1, most], color="0.5", linestyle=":", label="halts as it saturates")
    axes.legend(fontsize="small")
    return save(figure, path)


def plot_residuals(curves: ByLength, tolerance: float, path: Path) -> Path:
    """Residual against iteration, median and quartiles over samples, one line per length.

    Args:
      curves: `budget.curves`.
      tolerance: the solver's.
      path: file to write.
    """
    figure, axes = new_axes("Convergence of the solver", "iteration", "residual")
    for length, c in sorted(curves.items()):
        iterations, r = c["iterations"], c["residual"]
        (drawn,) = axes.plot(iterations, r["median"], label=f"length {length}")
        low, high = r["lower_quartile"], r["upper_quartile"]
        axes.fill_between(iterations, low, high, alpha=0.2, color=drawn.get_color())
    axes.axhline(tolerance, color="0.5", linestyle=":", label="tolerance")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    return save(figure, path)


def plot_scales(scales: Mapping[str, tuple[float, np.ndarray]], path: Path, title: str) -> Path:
    """Where the residual scales of the channels ended, and where they started.

    Args:
      scales: {name: (start, (D,) values in (0, 1))}.
      path: file to write.
      title: of the figure.
    """
    figure, axes = new_axes(title, "residual scale", "channels")
    for i, (name, (start, values)) in enumerate(sorted(scales.items())):
        color = f"C{i}"
        axes.hist(values, bins=np.linspace(0, 1, 41).tolist(), color=color, alpha=0.5, label=name)
        axes.axvline(start, color=color, linestyle=":", label=f"{name} at the start")
    axes.set_xlim(0, 1)
    axes.legend(fontsize="small")
    return save(figure, path)


def plot_training(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Loss, accuracies and solver steps during training; evaluations as points."""
    train = [r for r in records if r["split"] == "train"]
    evals = [r for r in records if r["split"] == "eval"]
    sequential = [r for r in evals if "sequential_difference" in r]
    count = 4 if sequential else 3
    figure, panels = new_figure(1, count, figsize=(4 * count, 3.4))
    for axes in panels:
        axes.set_xlabel("optimiser step")
        plain_frame(axes)
    steps = [r["step"] for r in train]
    panels[0].plot(steps, [r["loss"] for r in train])
    panels[0].set(title="Training loss", yscale="log")
    finished = [r for r in train if r["sequence_accuracy"] is not None]
    steps = [r["step"] for r in finished]
    for metric in ("sequence_accuracy", "token_accuracy"):
        label = f"train, {metric.replace('_', ' ')}"
        panels[1].plot(steps, [r[metric] for r in finished], label=label)
    panels[2].plot(steps, [r["solver_steps_mean"] for r in finished], label="train, mean")
    for i, length in enumerate(sorted({r["length"] for r in evals})):
        mine = [r for r in evals if r["length"] == length]
        at = [r["step"] for r in mine]
        for axes, metric in ((panels[1], "sequence_accuracy"), (panels[2], "solver_steps_median")):
            label = f"length {length}, {metric.replace('_', ' ')}"
            axes.plot(at, [r[metric] for r in mine], "o", color=f"C{i + 2}", ms=4, label=label)
    for i, length in enumerate(sorted({r["length"] for r in sequential})):
        mine = [r for r in sequential if r["length"] == length]
        values = [r["sequential_difference"] for r in mine]
        at = [r["step"] for r in mine]
        panels[3].plot(at, values, "o-", color=f"C{i + 2}", ms=4, label=f"length {length}")
        panels[3].set(title="Token by token against at once", yscale="log")
    panels[1].set(title="Accuracy", ylim=(-0.03, 1.03))
    panels[2].set(title="Solver steps", ylim=(0, None))
    for axes in panels[1:]:
        axes.legend(fontsize="x-small")
    return save(figure, path)
