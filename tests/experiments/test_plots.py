import io

import numpy as np
import pytest
from rich.console import Console

from experiments import plots
from experiments.progress import Progress, duration, line

RESULTS = {
    n: {
        "sequence_accuracy": 0.9, "token_accuracy": 0.95, "prefix_accuracy": [1.0] * n,
        "solver_steps_median": 20.0, "solver_steps_max": 1000, "converged": 0.998,
        "residual_median": 0.0345, "residual_max": 0.0997, "examples": 1000,
    }
    for n in (16, 128)
}  # fmt: skip

CURVE = {
    "iterations": [1, 2],
    "residual": {"median": [1.0, 0.1], "lower_quartile": [0.9, 0.05], "upper_quartile": [1.1, 0.2]},
    "effective_layers": [2, 4], "sequence_accuracy": [0.1, 0.5],
    "halting": {"effective_layers_mean": [2.0, 3.0], "sequence_accuracy": [0.1, 0.4]},
    "act": {"effective_layers_mean": 3.0, "sequence_accuracy": 0.3},
    "halted_at": {"examples": [1, 2]}, "saturated_at": {"examples": [2, 2]},
}  # fmt: skip


def test_table_fits_80_columns_and_names_both_accuracies():
    out = io.StringIO()
    Console(file=out, width=80).print(plots.table(RESULTS, 16, "a model on a task"))
    text = out.getvalue()
    assert "0.9000" in text
    assert "0.9500" in text
    assert "20 / 1000" in text
    assert "99.8%" in text
    assert "1000 examples per length, trained at length 16" in text
    assert "…" not in text


def test_figures(tmp_path):
    train = {
        "split": "train", "step": 1, "loss": 1.0, "sequence_accuracy": 0.0, "token_accuracy": 0.2,
        "solver_steps_mean": 4.0,
    }  # fmt: skip
    no_finished = train | {"sequence_accuracy": None, "token_accuracy": None, "step": 2}
    evals = [{"split": "eval", "step": 2, "length": n, **r} for n, r in RESULTS.items()]
    paths = [
        plots.plot_accuracy(RESULTS, 16, tmp_path / "a.png", "title"),
        plots.plot_steps(RESULTS, 16, tmp_path / "b.png", "title"),
        plots.plot_residuals({16: CURVE}, 0.1, tmp_path / "c.png"),
        plots.plot_training([train, no_finished, *evals], tmp_path / "d.png"),
        plots.plot_budget({16: CURVE}, tmp_path / "e.png", "title"),
        plots.plot_scales({"alpha_1": (0.75, np.full(4, 0.7))}, tmp_path / "g.png", "title"),
        plots.plot_halting({16: CURVE}, tmp_path / "f.png", "title"),
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_median_of_the_layers_stands_out(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure) or path)
    buckets = [
        {
            "from": i, "to": i, "examples": 9, "puzzle_accuracy": 0.5,
            "effective_layers_median": 8.0 + i, "effective_layers_mean": 300.0,
        }
        for i in range(3)
    ]  # fmt: skip
    plots.plot_difficulty(buckets, "empties", tmp_path / "a.png", "title")
    lines = {line.get_label(): line for axes in drawn[0].axes for line in axes.get_lines()}
    median, mean = (lines[f"effective layers, {n}"] for n in ("median", "mean, cut off"))
    assert list(median.get_ydata()) == [8.0, 9.0, 10.0]
    assert list(mean.get_ydata()) == [300.0] * 3
    assert median.axes.get_ylim()[1] < 30
    assert mean.get_linewidth() < median.get_linewidth()
    plots.close(drawn[0])


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (187, "3m07s"), (7500, "2h05m"), (-1, "0s")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_progress_line():
    record = {
        "step": 20, "loss": 1.5, "sequence_accuracy": 0.25, "solver_steps_mean": 12.3,
        "converged": 0.5, "steps_per_second": 2.0, "data_wait": 0.03,
    }  # fmt: skip
    text = line(record, 100, 0.1, 40)
    for part in (
        "step 20/100", "loss 1.5000", "sequence accuracy 0.250", "solver steps 12.3",
        "converged 50%", "2.0 steps/s", "waiting for data 3%", "evaluation 10% of time", "left 40s",
    ):  # fmt: skip
        assert part in text
    assert "accuracy" not in line(record | {"sequence_accuracy": None}, 100, 0.1, 40)


def test_plain_output_is_sparse_but_shows_the_last_line():
    out = io.StringIO()
    with Progress(Console(file=out, width=200)) as progress:
        progress.update("first")
        progress.update("second")
        progress.say("[brackets] stay")
        progress.update("third", last=True)
    assert out.getvalue().splitlines() == ["first", "[brackets] stay", "third"]


def test_terminal_output_keeps_only_what_was_said():
    out = io.StringIO()
    with Progress(Console(file=out, width=100, force_terminal=True)) as progress:
        progress.update("working")
        progress.say("a result")
    assert "a result" in out.getvalue()
    assert "\x1b[2K" in out.getvalue(), "the live line is not removed"
