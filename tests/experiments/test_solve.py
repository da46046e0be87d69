import json

import jax
import numpy as np
import pytest

import fpr
from experiments import grids, puzzles, solve
from experiments.tasks import maze, sudoku
from experiments.workdir import write_weights

pytestmark = pytest.mark.usefixtures("fast_compile")

PUZZLES = "1234\n3412\n21..\n4..1\n\n...4\n..1.\n.2..\n3...\n"
MODEL = {
    "name": "fprm", "hidden_size": 8, "num_heads": 2, "num_layers": 1, "expansion": 1.0,
    "solver": {"preset": "fprm", "eval": {"max_steps": 6}},
}  # fmt: skip


def workdir(path, task, vocab, length):
    path.mkdir()
    model = {**MODEL, "vocab_size": vocab, "seq_len": length}
    config = {"model": model, "task": {"name": task}}
    (path / "config.json").write_text(json.dumps(config))
    write_weights(path / "weights.npz", fpr.init(model, jax.random.key(0)))
    return path


@pytest.fixture(scope="module")
def sudokus(tmp_path_factory):
    return workdir(tmp_path_factory.mktemp("solve") / "run", "sudoku", 6, 16)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "puzzles.txt"
    path.write_text(PUZZLES)
    return path


def test_prints_grids_steps_and_verdicts_and_draws(sudokus, file, tmp_path, capsys):
    flags = [f"--workdir={sudokus}", f"--input={file}"]
    drawn = [f"--picture={tmp_path / 'a.png'}", f"--animation={tmp_path / 'b.gif'}"]
    assert solve.main([*flags, *drawn]) == 1, "an untrained model solves nothing"
    out = capsys.readouterr().out
    assert "puzzle 1 (line 1): " in out
    assert "puzzle 2 (line 6): " in out
    assert "  2 1 . .   " in out
    assert "NOT a valid solution" in out
    assert "0 of 2 answers are valid" in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "b.gif").read_bytes().startswith(b"GIF89a")

    # The printed answers and steps are those of the model; alone or together makes no difference.
    model, params = fpr.load(sudokus)
    good, _ = puzzles.read(file, "sudoku", 16)
    solver = solve.base.make_solver(model["solver"], train=False)
    together = solve.solve(model, params, "sudoku", good, solver)
    alone = solve.solve(model, params, "sudoku", good[1:], solver)
    assert together[1].steps == alone[0].steps
    assert np.array_equal(together[1].tokens, alone[0].tokens)
    # The picture shows the same path: the answer after the last step is the answer.
    course, residual = solve.follow(model, params, good[0], together[0].steps, solver)
    assert np.array_equal(course[-1], together[0].tokens)
    assert residual[-1] == pytest.approx(together[0].residual, rel=1e-4)


def test_exit_code_0_and_a_larger_cap(sudokus, file, capsys, monkeypatch):
    caps = []

    def perfect(model, params, kind, todo, solver):
        caps.append(solver.max_steps)
        return [solve.Answer(p.tokens, 3, 0.01, True, True) for p in todo]

    monkeypatch.setattr(solve, "solve", perfect)
    assert solve.main([f"--workdir={sudokus}", f"--input={file}", "--max_steps=99"]) == 0
    assert "2 of 2 answers are valid, 2 solves converged" in capsys.readouterr().out
    assert caps == [99]


def test_malformed_puzzles_are_named(sudokus, file, capsys, monkeypatch):
    file.write_text(f"12\n\n{PUZZLES}\n1134341221..4..1\n")
    flags = [f"--workdir={sudokus}", f"--input={file}"]
    assert solve.main(flags) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith(f"error: {file}:1: 1 rows with 2 cells")
    assert lines[1].startswith(f"error: {file}:13: no solution: 1 stands twice")
    assert lines[2].startswith("error: 2 of 4 puzzles are malformed; --on_error=skip")
    monkeypatch.setattr(
        solve, "solve", lambda *a: [solve.Answer(p.tokens, 1, 1.0, False, True) for p in a[3]]
    )
    assert solve.main([*flags, "--on_error=skip"]) == 0
    captured = capsys.readouterr()
    assert f"skipped: {file}:1:" in captured.err
    assert "did NOT converge" in captured.out
    assert "2 of 2 answers" in captured.out


def test_valid_follows_the_rules():
    tokens = np.array([[2, 3, 4, 5, 4, 5, 2, 3, 3, 2, 1, 1, 5, 1, 1, 2]])
    right = np.array([[2, 3, 4, 5, 4, 5, 2, 3, 3, 2, 5, 4, 5, 4, 3, 2]])
    given_changed = np.where(np.arange(16) == 0, 3, right)
    wrong = np.where(np.arange(16) == 10, 4, right)
    for answer, ok in ((right, True), (given_changed, False), (wrong, False)):
        assert solve.valid("sudoku", tokens, answer).tolist() == [ok]
    # Digits permuted: a valid grid, but not of this puzzle.
    assert sudoku.valid(right.astype(np.int64) % 4 + 1).tolist() == [True]
    assert solve.valid("sudoku", tokens, right % 4 + 2).tolist() == [False]


def test_mazes(tmp_path, capsys):
    run = workdir(tmp_path / "run", "maze", 6, 9)
    file = tmp_path / "maze.txt"
    file.write_text("S #\n# #\n# G\n")
    picture = tmp_path / "a.png"
    assert solve.main([f"--workdir={run}", f"--input={file}", f"--picture={picture}"]) == 1
    assert "  S #   " in capsys.readouterr().out
    assert picture.stat().st_size > 1000
    tokens = np.array([[maze.SYMBOLS.index(c) + 1 for c in "S ## ## G"]])
    answer = np.array([[maze.SYMBOLS.index(c) + 1 for c in "So##o##oG"]])
    assert solve.valid("maze", tokens, answer).tolist() == [True]
    assert solve.text("maze", answer[0]) == ["So#", "#o#", "#oG"]


def test_long_animations_skip_iterations(tmp_path, monkeypatch):
    monkeypatch.setattr(grids, "MAX_FRAMES", 2)
    frames = [["1 2", "2 1"]] * 9
    path = grids.animate("maze", frames[0], frames, np.ones(9), 0.1, tmp_path / "a.gif")
    from PIL import Image

    with Image.open(path) as image:
        assert image.n_frames <= 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input=x"], "--workdir"),
        (["--workdir=absent", "--input=x"], "absent is not the workdir of a run"),
        (["--workdir=w", "--input=x", "--pictur=a.png"], "did you mean '--picture'"),
        (["--workdir=w", "--input=x", "--picture=a.jpg"], "--picture must end in .png"),
        (["--workdir=w", "--input=x", "--on_error=ask"], "valid: stop, skip"),
        (["--workdir=w", "--input=x", "--max_steps=-1"], "max_steps=-1, allowed: at least 0"),
        (
            ["--workdir=w", "--input=x", "--max_steps=3000000000"],
            "--max_steps must be below 2**31, got 3000000000",
        ),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert solve.main(flags) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


def test_other_tasks_are_refused(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(
        json.dumps({"model": {"seq_len": 4}, "task": {"name": "word_problem"}})
    )
    assert solve.main([f"--workdir={run}", "--input=x"]) == 2
    assert "was trained on 'word_problem'" in capsys.readouterr().err
