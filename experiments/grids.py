"""Drawings of puzzle grids: the question, the answer forming over the iterations, the residual."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import animation
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import close, new_figure, save

COLOURS = {"#": "0.15", " ": "white", "S": "tab:green", "G": "tab:red", "o": "tab:blue"}
MAX_FRAMES = 120  # of an animation; longer solves skip iterations


def _draw_grid(axes: Axes, kind: str, question: Sequence[str], answer: Sequence[str]) -> None:
    axes.clear()
    axes.set_aspect("equal")
    axes.set_axis_off()
    rows = [_cells(kind, row) for row in answer]
    side = len(rows)
    axes.set(xlim=(0, side), ylim=(side, 0))
    if kind == "maze":
        for y, row in enumerate(rows):
            for x, cell in enumerate(row):
                colour = COLOURS.get(cell, "tab:orange")
                axes.fill([x, x + 1, x + 1, x], [y, y, y + 1, y + 1], color=colour, linewidth=0)
        return
    box = round(side**0.5)
    for i in range(side + 1):
        width = 1.6 if i % box == 0 else 0.5
        axes.plot([0, side], [i, i], color="0.3", linewidth=width, clip_on=False)
        axes.plot([i, i], [0, side], color="0.3", linewidth=width, clip_on=False)
    given = [_cells(kind, row) for row in question]
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            asked = given[y][x]
            colour = "tab:blue" if asked == "." else "black" if asked == cell else "tab:red"
            axes.text(
                x + 0.5, y + 0.55, cell, ha="center", va="center", color=colour,
                fontsize=120 / side, fontweight="bold" if asked != "." else "normal",
            )  # fmt: skip


def _cells(kind: str, row: str) -> list[str]:
    return list(row) if kind == "maze" else row.split(" ")


def _draw_residual(axes: Axes, residual: np.ndarray, tolerance: float, now: int) -> None:
    axes.clear()
    axes.plot(np.arange(1, len(residual) + 1), residual, color="0.8")
    axes.plot(np.arange(1, now + 1), residual[:now], color="C0", marker=".", label="residual")
    axes.axhline(tolerance, color="0.5", linestyle=":", label="tolerance")
    axes.set(yscale="log", xlabel="iteration", title=f"iteration {now}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small")


def _panels() -> tuple[Figure, Any]:
    return new_figure(1, 2, figsize=(8.4, 4.0))


def draw_solution(
    kind: str,
    question: Sequence[str],
    answer: Sequence[str],
    residual: np.ndarray,
    tolerance: float,
    path: Path,
) -> Path:
    """The answered grid beside the residual over the iterations.

    Args:
      kind: "sudoku" or "maze".
      question: rows of characters.
      answer: rows of characters.
      residual: (N,) after each iteration.
      tolerance: the solver's.
      path: file to write.
    """
    figure, (grid, curve) = _panels()
    _draw_grid(grid, kind, question, answer)
    _draw_residual(curve, residual, tolerance, len(residual))
    return save(figure, path)


def animate(
    kind: str,
    question: Sequence[str],
    frames: Sequence[Sequence[str]],
    residual: np.ndarray,
    tolerance: float,
    path: Path,
) -> Path:
    """The answer after each iteration, as a GIF; arguments as `draw_solution`'s."""
    figure, (grid, curve) = _panels()
    total = len(frames)
    shown = np.unique(np.linspace(1, total, min(total, MAX_FRAMES)).round().astype(int))

    def draw(now: int) -> list[Any]:
        _draw_grid(grid, kind, question, frames[now - 1])
        _draw_residual(curve, residual, tolerance, now)
        return []

    made = animation.FuncAnimation(figure, draw, frames=shown.tolist(), blit=False)
    made.save(path, writer=animation.PillowWriter(fps=5), dpi=80)
    close(figure)
    return path
