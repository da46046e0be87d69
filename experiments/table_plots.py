"""Figures of a table of runs (`experiments.report`): one line, bar or colour per row.

Every function draws one figure, saves it and returns its path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import plots

# An ACT without this, from before it was held to the model's own segments, is not drawn.
CAPPED = "max_iterations"
HOLLOW: dict[str, Any] = {"markersize": 10, "markerfacecolor": "none"}


def plot_by_length(
    groups: Mapping[str, Mapping[int, Sequence[float]]], metric: str, path: Path, title: str
) -> Path:
    """A metric against length: median over seeds and their range, one line per group.

    Args:
      groups: {label: {length: value of each seed}}.
      metric: its name.
      path: file to write.
      title: of the figure.
    """
    figure, axes = plots.new_axes(title, "sequence length", metric.replace("_", " "))
    for label, by_length in groups.items():
        lengths = sorted(by_length)
        values = [np.array(by_length[n]) for n in lengths]
        (drawn,) = axes.plot(lengths, [np.median(v) for v in values], marker="o", label=label)
        low, high = [v.min() for v in values], [v.max() for v in values]
        axes.fill_between(lengths, low, high, alpha=0.15, color=drawn.get_color())
    axes.legend(fontsize="x-small")
    return plots.save(figure, path)


def plot_budgets(groups: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str) -> Path:
    """Accuracy against effective layers and FLOPs, one line per run and one colour per group.

    A star is where halting leads: the mean effort that an example spends, and its accuracy; a
    triangle, where the Q head ends the examples instead.

    Args:
      groups: {label: one of `budget.summarise` for each seed}. Those of before FLOPs were counted
        are missing in that panel.
      path: file to write.
      title: of the figure.
    """
    groups = {label: curves for label, curves in groups.items() if curves}  # no loop, no curve
    every = [c for curves in groups.values() for c in curves]
    measures = [m for m in plots.EFFORT if any(m[0] in c for c in every)]
    figure, panels = plots.effort_panels(title, "sequence accuracy", measures)
    for axes, (name, scale, _) in zip(panels, measures):
        for i, (label, curves) in enumerate(groups.items()):
            color, mean = f"C{i % 10}", plots.MEAN[name]
            axes.plot([], [], color=color, label=label)
            for c in curves:
                if name not in c:
                    continue
                whole = scale * np.asarray(c[name])
                axes.plot(whole, c["sequence_accuracy"], color=color, alpha=0.7)
                halting, act = c["halting"], c.get("act", {})
                end = scale * halting[mean][-1], halting["sequence_accuracy"][-1]
                axes.plot(*end, "*", color=color)
                if CAPPED in act:
                    end = scale * act[mean], act["sequence_accuracy"]
                    axes.plot(*end, "^", color=color, **HOLLOW)
        axes.plot([], [], "*", color="0.4", label="where halting leads (mean spent)")
        if any(CAPPED in c.get("act", {}) for c in every):
            axes.plot([], [], "^", color="0.4", label="ended by the Q head (ACT)", **HOLLOW)
        axes.set_ylim(-0.03, 1.03)
        plots.log_scale(axes.xaxis)
    plots.legend_below(figure, panels[0])
    return plots.save(figure, path)


def plot_difficulties(
    groups: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], name: str, path: Path, title: str
) -> Path:
    """Accuracy, effective layers and FLOPs against a measure of difficulty, one colour per group.

    Of the effort the median of a bucket is drawn, and its mean as a thin line: few solves that run
    into the cap decide on the mean.

    Args:
      groups: {label: the buckets of each seed}, as of `puzzle_files.buckets`.
      name: the measure, such as "empties".
      path: file to write.
      title: of the figure.
    """
    panels = (
        ("accuracy", ("puzzle_accuracy", "sequence_accuracy"), 1.0),
        ("effective layers", ("effective_layers_median",), 1.0),
        ("MFLOP of an example", ("flops_per_example_median",), 1e-6),
    )
    every = [b for seeds in groups.values() for buckets in seeds for b in buckets]
    drawn = [p for p in panels if any(metric in b for b in every for metric in p[1])]
    figure, axes = plots.new_figure(1, len(drawn), figsize=(1.2 + 3.6 * len(drawn), 3.9))
    axes = list(np.atleast_1d(axes))
    for panel, (ylabel, metrics, scale) in zip(axes, drawn):
        for i, (label, seeds) in enumerate(groups.items()):
            # Groups that lie on top of each other are told apart by their dashes.
            color, dashes = f"C{i % 10}", ("-", "--", ":", "-.")[i % 4]
            look: dict[str, Any] = {
                "color": color, "marker": "osD^v"[i % 5], "linestyle": dashes, "markersize": 4,
                "markerfacecolor": "none",
            }  # fmt: skip
            panel.plot([], [], label=label, **look)
            for buckets in seeds:
                metric = next((m for m in metrics if m in buckets[0]), "")
                if not metric:
                    continue
                at = [(b["from"] + b["to"]) / 2 for b in buckets]
                values = [scale * b[metric] for b in buckets]
                panel.plot(at, values, **look)
                if metric.endswith("_median"):
                    values = [scale * b[metric.replace("_median", "_mean")] for b in buckets]
                    panel.plot(at, values, color=color, linewidth=0.6)
        panel.set(xlabel=name.replace("_", " "), ylabel=ylabel)
        plots.plain_frame(panel)
        if ylabel == "accuracy":
            panel.set_ylim(-0.03, 1.03)
        else:
            panel.plot([], [], color="0.4", linewidth=0.6, label="mean (the others: median)")
            plots.log_scale(panel.yaxis)
    figure.suptitle(title)
    plots.legend_below(figure, axes[-1])
    return plots.save(figure, path)


def plot_rows(
    rows: Sequence[tuple[str, str, Sequence[float]]], metric: str, path: Path, title: str
) -> Path:
    """One bar per row: our median, the range over seeds, and the paper's number where it has one.

    Args:
      rows: (label, the paper's number as text, value of each seed).
      metric: its name.
      path: file to write.
      title: of the figure.
    """
    figure, axes = plots.new_figure(figsize=(6.4, 1.2 + 0.35 * len(rows)))
    for i, (_, paper, values) in enumerate(rows):
        middle = float(np.median(values))
        spread = [[middle - min(values)], [max(values) - middle]]
        axes.barh(i, middle, xerr=spread, color="C0", alpha=0.6, label=None if i else "ours")
        number = re.match(r"\.?\d[\d.]*", paper)
        if number:
            axes.plot(float(number[0]), i, "k|", markersize=12)
    axes.plot([], [], "k|", markersize=12, label="paper")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set(title=title, xlabel=metric.replace("_", " "))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small")
    return plots.save(figure, path)
