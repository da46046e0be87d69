import json

import pytest

from experiments import config as configs
from experiments import report, table_plots, tables
from experiments.tasks.arc_files import PUBLIC
from tests.experiments.conftest import tiny

CURVE = {
    "effective_layers": [1, 2], "sequence_accuracy": [0.1, 0.5],
    "halting": {"effective_layers_mean": [1.0, 1.5], "sequence_accuracy": [0.1, 0.4]},
}  # fmt: skip


def write_run(path, config, lengths=(4,), **metrics):
    """A finished run's config.json and result.json; metrics are {name: value at every length}."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    result = {
        "seed": config["seed"], "parameters": 1234, "examples": {str(n): 5 for n in lengths},
        "data": {"eval": {"file": "x.csv", "size": 5, "sha256": "ab" * 32}},
        "overrides": {}, "budget": {str(n): CURVE for n in lengths},
        "effective_layers_mean": {str(n): 7.5 for n in lengths},
        "flops_per_example_mean": {str(n): 2e6 for n in lengths},
        **{name: {str(n): v for n in lengths} for name, v in metrics.items()},
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    return path


def sudoku(seed=0, **model):
    config = tiny(seed=seed)
    config["task"] = {"name": "sudoku", "path": "sudoku4"}
    config["model"] |= {"alpha_1": 0.75, "alpha_2": 0.25, **model}
    return config


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    for seed, accuracy in enumerate((0.5, 0.9, 0.7)):
        write_run(folder / f"f{seed}", sudoku(seed), puzzle_accuracy=accuracy)
    write_run(folder / "wide", sudoku(0, hidden_size=16), puzzle_accuracy=1.0)
    write_run(folder / "other", tiny(), sequence_accuracy=0.3)
    (folder / "started").mkdir()
    (folder / "started" / "config.json").write_text(json.dumps(sudoku(9)))
    return folder


def test_seeds_share_a_line_and_missing_rows_say_so(runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert report.main(["comparison", f"--runs={runs}", f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "no result.json yet" in printed
    assert f"in no row of comparison: {runs / 'other'}" in printed
    page = (out / "comparison.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [r[0].strip("| ") for r in rows] == [
        "model", "FPRM", "FPRM", "FPRM with another base", "TRM", "HRM",
        "looped Transformer, post-norm", "deep Transformer",
    ]  # fmt: skip
    assert rows[1][1:6] == ["4", "94.2", "70.0 [50.0, 90.0]", "3", "7.5"]
    assert rows[2][1:6] == ["4", "94.2", "100.0", "1", "7.5"]
    assert rows[1][8] == "hidden_size=8"
    assert rows[2][8] == "hidden_size=16"
    assert rows[1][9].strip(" |") == "x.csv n=5 abababab"
    assert rows[3][3] == "not run"
    assert "MFLOPs" in printed
    assert "x.csv n=5 abababab" in printed
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")


def bucket(at, accuracy, layers):
    return {
        "from": at, "to": at, "examples": 5, "puzzle_accuracy": accuracy,
        "effective_layers_median": layers, "effective_layers_mean": layers,
        "flops_per_example_median": 1e6 * layers, "flops_per_example_mean": 1e6 * layers,
    }  # fmt: skip


def test_act_at_inference_is_a_second_line_and_a_curve_by_difficulty(tmp_path, monkeypatch, capsys):
    whole, early = [bucket(3, 0.5, 9.0)], [bucket(3, 0.4, 2.0)]
    act = {
        "puzzle_accuracy": 0.4, "effective_layers_mean": 2.5, "flops_per_example_mean": 1e6,
        "by_empties": early, "halted": 0.75,
    }  # fmt: skip
    config = sudoku()
    config["model"] = {"name": "trm", "solver": {"eval": {"max_steps": 16}}}
    more = {"puzzle_accuracy": 0.5, "by_empties": whole, "act": act}
    mine = {"puzzle_accuracy": 0.9, "by_empties": [bucket(3, 0.9, 5.0)]}
    runs = [
        write_run(tmp_path / "fprm", sudoku(), **mine),
        write_run(tmp_path / "trm", config, **more),
        write_run(tmp_path / "old", config | {"seed": 1}, puzzle_accuracy=0.7),  # before ACT
    ]
    groups = {}
    monkeypatch.setattr(
        table_plots, "plot_difficulties", lambda g, name, path, _: groups.update({name: g}) or path
    )
    assert report.main(["comparison", *map(str, runs), f"--out={tmp_path}"]) == 0
    assert "ACT at inference" in capsys.readouterr().out
    rows = [r.split(" | ") for r in (tmp_path / "comparison.md").read_text().splitlines()]
    trm = [[*r[1:7], r[8]] for r in rows if r[0] == "| TRM"]
    assert trm == [
        ["4", "74.7", "60.0 [50.0, 70.0]", "2", "7.5", "2", ""],
        ["4", "", "40.0", "1", "2.5", "1", "ACT at inference"],
    ]
    assert groups == {
        "empties": {
            "FPRM": [[bucket(3, 0.9, 5.0)]], "TRM": [whole], "TRM, ACT at inference": [early],
        },
    }  # fmt: skip


def test_lengths_are_a_measure_of_difficulty(tmp_path):
    run = write_run(
        tmp_path / "r", tiny() | {"task": {"name": "word_problem", "group": "A5"}}, lengths=(4, 6),
        sequence_accuracy=0.25, effective_layers_median=6.0,
    )  # fmt: skip
    found, _ = report.find([str(run)])
    buckets = report._by_difficulty(found[0], 6)["length"]
    assert [(b["from"], b["to"], b["sequence_accuracy"]) for b in buckets] == [
        (4, 4, 0.25), (6, 6, 0.25),
    ]  # fmt: skip
    assert buckets[0]["effective_layers_median"] == 6.0
    lines = report.lines(tables.STATE_TRACKING, found)
    (figure,) = report.draw_difficulty(tables.STATE_TRACKING, lines, tmp_path / "s")
    assert figure == tmp_path / "s_by_length.png"
    assert figure.exists()
    assert report.draw_difficulty(tables.WORD_PROBLEM, lines, tmp_path / "w") == []


def test_an_evaluation_with_overrides_is_a_line_of_its_own(tmp_path):
    run = write_run(tmp_path / "r", sudoku(), puzzle_accuracy=0.5)
    folder = run / "evaluations" / "x"
    folder.mkdir(parents=True)
    result = json.loads((run / "result.json").read_text())
    result["puzzle_accuracy"] = {"4": 0.8}
    result["overrides"] = {"model.solver.eval.max_steps": {"trained": 8, "here": 99}}
    (folder / "result.json").write_text(json.dumps(result))
    found, notes = report.find([str(run), str(folder)])
    assert not notes
    lines = [line for line in report.lines(tables.COMPARISON, found) if line.runs]
    assert [(line.values, line.apart) for line in lines] == [
        ((50.0,), "solver.eval.max_steps=8"),
        ((80.0,), "solver.eval.max_steps=99"),
    ]


def test_an_evaluation_of_more_examples_is_a_line_of_its_own(tmp_path):
    for seed, accuracy in ((0, 0.5), (1, 0.6)):
        run = write_run(tmp_path / f"r{seed}", sudoku(seed), puzzle_accuracy=accuracy)
        folder = run / "evaluations" / "x"
        folder.mkdir(parents=True)
        result = json.loads((run / "result.json").read_text())
        result["puzzle_accuracy"] = {"4": accuracy + 0.1}
        result["examples"], result["data"]["eval"]["size"] = {"4": 9}, 40
        result["overrides"] = {"eval.max_examples": {"trained": 6, "here": 9}}
        (folder / "result.json").write_text(json.dumps(result))
    # The folder of a run's evaluations is a --runs too, and no run counts twice.
    paths = [tmp_path, *(tmp_path / f"r{seed}" / "evaluations" for seed in (0, 1)), run]
    found, notes = report.find(map(str, paths))
    assert not notes
    lines = [line for line in report.lines(tables.COMPARISON, found) if line.runs]
    assert [(line.values, line.apart) for line in lines] == [
        ((50.0, 60.0), "max_examples=6"),
        (pytest.approx((60.0, 70.0)), "max_examples=9"),
    ]
    assert [report.cells(line)[-1] for line in lines] == [
        "x.csv n=5 abababab",
        "x.csv n=9 of 40 abababab",
    ]


def test_runs_on_other_data_are_lines_of_their_own(tmp_path):
    small, large = (write_run(tmp_path / n, sudoku(), puzzle_accuracy=0.5) for n in ("a", "b"))
    result = json.loads((large / "result.json").read_text())
    result["data"]["eval"]["sha256"] = "cd" * 32  # another file of the same name
    (large / "result.json").write_text(json.dumps(result))
    found, _ = report.find([str(small), str(large)])
    lines = [line for line in report.lines(tables.COMPARISON, found) if line.runs]
    assert [line.apart for line in lines] == ["sha256=abababab", "sha256=cdcdcdcd"]


def test_a_folder_with_the_tasks_of_a_public_set_is_that_set(tmp_path):
    config = tiny()
    config["task"] = {"name": "arc", "path": "ARC-AGI/data"}
    run = write_run(tmp_path / "r", config, pass_at_2=0.5)
    assert not [line for line in report.lines(tables.REASONERS, report.find([str(run)])[0])
                if line.runs]  # fmt: skip
    result = json.loads((run / "result.json").read_text())
    result["data"]["eval"]["sha256"] = next(k for k, v in PUBLIC.items() if v == "arc-agi-2")
    (run / "result.json").write_text(json.dumps(result))
    found, _ = report.find([str(run)])
    (line,) = [line for line in report.lines(tables.REASONERS, found) if line.runs]
    assert line.row.label == "ARC-2: FPRM"


def test_a_config_from_before_a_key_has_its_default(tmp_path):
    config = sudoku()
    del config["model"]["base"]
    write_run(tmp_path / "old", config, puzzle_accuracy=0.5)
    found, _ = report.find([str(tmp_path / "old")])
    (line,) = [line for line in report.lines(tables.COMPARISON, found) if line.runs]
    assert line.row.label == "FPRM"


def test_every_length_has_a_line_where_lengths_matter(tmp_path):
    run = write_run(tmp_path / "r", tiny(), lengths=(4, 6), sequence_accuracy=0.25)
    found, _ = report.find([str(run)])
    lines = [line for line in report.lines(tables.WORD_PROBLEM, found) if line.runs]
    assert [(line.row.label, line.length, line.values) for line in lines] == [
        ("FPRM", 4, (0.25,)),
        ("FPRM", 6, (0.25,)),
    ]
    assert report.draw(tables.WORD_PROBLEM, lines, tmp_path / "a.png") is not None


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_print_without_runs(name, tmp_path, capsys):
    assert report.main([name, f"--out={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("not run") == len(tables.TABLES[name].rows)
    assert not (tmp_path / f"{name}.png").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["comparisn", "--runs=x"], "unknown table 'comparisn'; did you mean 'comparison'?"),
        (["comparison", "--runs=absent"], "--runs: absent is not a directory"),
        (["comparison", "--run=x"], "did you mean '--runs'"),
        ([], "see python -m experiments.report --help"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report.main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


# The configs that are there for a table, and the row of it that each belongs to.
FEEDS = {
    "sudoku.py:cpu4": [("comparison", "FPRM"), ("alphas", "(0.75, 0.25)")],
    "sudoku.py:cpu4_trm": [("comparison", "TRM"), ("reasoners", "Sudoku: TRM")],
    "sudoku.py:cpu4_looped": [("comparison", "looped Transformer, post-norm")],
    "sudoku.py:cpu4_deep": [("comparison", "deep Transformer")],
    "sudoku.py:cpu4_alpha_25_75": [("alphas", "(0.25, 0.75)")],
    "maze.py:cpu": [("reasoners", "mazes: FPRM")],
    "arc.py:fprm_arc2": [("reasoners", "ARC-2: FPRM")],
    "state_tracking.py:fprm_a5_paper": [("state_tracking", "FPRM, A5")],
    "word_problem.py:fp_mamba_small_s3_cap4": [("caps", "cap 4")],
    "word_problem.py:fp_mamba_small_s3_gamma": [("caps", "a random cap for each sequence, gamma")],
    "bases.py:sudoku4_cnn": [("comparison", "FPRM with another base")],
    "bases.py:sudoku4_transformer": [("comparison", "FPRM"), ("reasoners", "Sudoku: FPRM")],
    "word_problem.py:fp_rnn_kronecker_a5": [("word_problem", "FP-RNN, Kronecker")],
    "copy.py:small_bc_lambda": [("copy", "b, c, λ")],
    "copy.py:small_gated_deltanet": [("copy", "Gated DeltaNet")],
    "arithmetic.py:small_brackets_gated_deltaproduct": [("arithmetic", "Gated DeltaProduct")],
    "arithmetic.py:small_brackets_fp_mamba": [("arithmetic", "FP-Mamba, Householder r=4")],
    "arithmetic.py:small_plain_deltanet": [("arithmetic_plain", "DeltaNet")],
    "catbabi.py:small_fp_h2_1": [("catbabi", "FP-H r=2, 1 layer")],
}


@pytest.mark.parametrize("spec", FEEDS)
def test_configs_feed_the_rows_they_are_for(spec):
    raw = configs.load(str(configs.CONFIG_DIR / spec))
    config = configs.flatten(json.loads(json.dumps(raw)))
    for name, label in FEEDS[spec]:
        assert [r.label for r in tables.TABLES[name].rows if r.matches(config)] == [label]


def test_a_model_without_a_loop_is_one_point_among_the_budgets(tmp_path, monkeypatch):
    fprm = write_run(tmp_path / "f", sudoku(), puzzle_accuracy=0.9)
    more = {"puzzle_accuracy": 0.6, "sequence_accuracy": 0.5}
    deep = write_run(tmp_path / "d", sudoku(name="transformer"), **more)
    result = json.loads((deep / "result.json").read_text())
    (deep / "result.json").write_text(json.dumps(result | {"budget": {}}))
    drawn = {}
    monkeypatch.setattr(table_plots, "plot_budgets", lambda g, path, _: drawn.update(g) or path)
    assert report.main(["comparison", f"--runs={fprm}", str(deep), f"--out={tmp_path}"]) == 0
    spent = {"sequence_accuracy": [0.5], "effective_layers_mean": [7.5], "flops_mean": [2e6]}
    point = {"sequence_accuracy": [0.5], "effective_layers": [7.5], "flops": [2e6]}
    assert drawn == {"FPRM": [CURVE], "deep Transformer": [point | {"halting": spent}]}
