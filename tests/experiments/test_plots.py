import io

import numpy as np
import pytest
from rich.console import Console

from experiments import plots, table_plots
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
    "effective_layers": [2, 4], "flops": [2e6, 3e6], "sequence_accuracy": [0.1, 0.5],
    "halting": {
        "effective_layers_mean": [2.0, 3.0], "flops_mean": [2e6, 2.5e6],
        "sequence_accuracy": [0.1, 0.4],
    },
    "act": {
        "effective_layers_mean": 3.0, "flops_mean": 2.5e6, "sequence_accuracy": 0.3,
        "max_iterations": 2,
    },
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


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been saved."""
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure) or path)
    yield figures
    for figure in figures:
        plots.close(figure)


def test_a_budget_is_in_layers_and_in_flops(drawn, tmp_path):
    plots.plot_budget({16: CURVE}, tmp_path / "a.png", "title")
    ends = []
    for axes in drawn[0].axes:
        lines = [line.get_xydata().tolist() for line in axes.get_lines()]
        ends.append(lines)
    assert ends == [
        [[[2, 0.1], [4, 0.5]], [[2, 0.1], [3, 0.4]], [[3, 0.3]]],
        [[[2, 0.1], [3, 0.5]], [[2, 0.1], [2.5, 0.4]], [[2.5, 0.3]]],  # MFLOP
    ]


def test_a_table_has_the_budgets_of_its_rows_in_layers_and_in_flops(drawn, tmp_path):
    old = {k: v for k, v in CURVE.items() if k != "flops"} | {
        "act": {"effective_layers_mean": 9.0, "sequence_accuracy": 0.9}  # not held to any cap
    }
    groups = {"a": [CURVE, CURVE], "no loop": [], "b": [old]}
    table_plots.plot_budgets(groups, tmp_path / "a.png", "title")
    texts = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert texts[:2] == ["a", "b"]
    layers, operations = (
        [line.get_xydata().tolist() for line in axes.get_lines() if len(line.get_xdata())]
        for axes in drawn[0].axes
    )
    whole, halting, act = [[2, 0.1], [4, 0.5]], [[3, 0.4]], [[3, 0.3]]
    assert layers == 2 * [whole, halting, act] + [whole, halting]
    assert operations == 2 * [[[2, 0.1], [3, 0.5]], [[2.5, 0.4]], [[2.5, 0.3]]]


def test_difficulties_of_several_runs_share_a_figure(drawn, tmp_path):
    def buckets(layers, **more):
        return [
            {
                "from": i, "to": i, "puzzle_accuracy": 0.5, "effective_layers_median": layers + i,
                "effective_layers_mean": 300.0, **more,
            }
            for i in range(3)
        ]  # fmt: skip

    operations = {"flops_per_example_median": 1e6, "flops_per_example_mean": 2e6}
    groups = {"FPRM": [buckets(8, **operations)], "TRM, ACT": [buckets(20), buckets(30)]}
    table_plots.plot_difficulties(groups, "empties", tmp_path / "a.png", "title")
    accuracy, layers, flops = (
        [line.get_ydata().tolist() for line in axes.get_lines() if len(line.get_xdata())]
        for axes in drawn[0].axes
    )
    assert accuracy == 3 * [[0.5] * 3]
    assert layers == [y for n in (8, 20, 30) for y in ([n, n + 1, n + 2], [300.0] * 3)]
    assert flops == [[1.0] * 3, [2.0] * 3]  # those of older runs are not known
    texts = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert texts[:2] == ["FPRM", "TRM, ACT"]


def test_the_median_of_the_layers_stands_out(drawn, tmp_path):
    buckets = [
        {
            "from": i, "to": i, "examples": 9, "puzzle_accuracy": 0.5,
            "effective_layers_median": 8.0 + i, "effective_layers_mean": 300.0,
        }
        for i in range(3)
    ]  # fmt: skip
    act = [bucket | {"effective_layers_median": 4.0} for bucket in buckets]
    plots.plot_difficulty(buckets, "empties", tmp_path / "a.png", "title", act)
    lines = {line.get_label(): line for axes in drawn[0].axes for line in axes.get_lines()}
    median, mean = (lines[f"effective layers, {n}"] for n in ("median", "mean, cut off"))
    assert list(median.get_ydata()) == [8.0, 9.0, 10.0]
    assert list(mean.get_ydata()) == [300.0] * 3
    assert median.axes.get_ylim()[1] < 30
    assert mean.get_linewidth() < median.get_linewidth()
    assert list(lines["effective layers, median, ACT"].get_ydata()) == [4.0] * 3
    assert list(lines["puzzle accuracy, ACT"].get_ydata()) == [0.5] * 3


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
