import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import run
from experiments.result import override_name
from experiments.workdir import Workdir, read_metrics
from tests.experiments.conftest import TINY, tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny_config.py"
    path.write_text(f"def get_config():\n    return {TINY!r}\n")
    return path


@pytest.fixture
def command(config_file, tmp_path):
    """Runs the command line in this process: (exit code, what it printed to stderr)."""

    def main(*flags, workdir=tmp_path / "run", capsys=None):
        return run.main(["run", f"--config={config_file}", f"--workdir={workdir}", *flags])

    return main


def one_line(capsys):
    """The error line; there is nothing else on stderr."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_overrides_are_parsed_as_the_type_they_replace(config_file):
    config, workdir, mode = run.parse(
        [
            "run", f"--config={config_file}", "--workdir=w", "--mode=eval",
            "--config.train.steps", "9", "--config.optimizer.learning_rate=1",
            "--config.eval.lengths=(8,16)", "--config.task.group=A4",
            "--config.model.rope=true", "--config.model.solver.eval.max_steps=77",
        ]
    )  # fmt: skip
    assert (workdir, mode) == ("w", "eval")
    assert config["train"]["steps"] == 9
    assert config["optimizer"]["learning_rate"] == 1.0
    assert isinstance(config["optimizer"]["learning_rate"], float)
    assert tuple(config["eval"]["lengths"]) == (8, 16)
    assert config["task"]["group"] == "A4"
    assert config["model"]["rope"] is True
    assert config["model"]["solver"]["eval"]["max_steps"] == 77
    assert config["train"]["batch_size"] == TINY["train"]["batch_size"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.train.stpes=3"], "did you mean 'train.steps'"),
        (["--config.model.hidden=3"], "unknown config key 'model.hidden'"),
        (["--config.train.steps=many"], "train.steps"),
        (["--config.train.steps"], "needs a value"),
        (["--config.train={}"], "is a section"),
        (["--mode=evaluate"], "unknown --mode 'evaluate'; did you mean 'eval'"),
        (["--wrkdir=x"], "unknown flag '--wrkdir'; did you mean '--workdir'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config.model.num_heads=3"], "model.num_heads=3 does not divide"),
        (["--config.model.alpha_2=1.5"], "model.alpha_2=1.5"),
        (["--config.task.length=0"], "task.length must be at least 1, got 0"),
        (["--config.task.group=S9"], "more than 5040 elements"),
        (["--mode=eval"], "nothing to evaluate"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(command, capsys, tmp_path, flags, message):
    assert command(*flags) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_missing_flags_and_files(capsys):
    assert run.main(["run", "--workdir=x"]) == 2
    assert "--config is missing; usage:" in one_line(capsys)
    assert run.main(["run", "--config=experiments/configs/quickstart.py"]) == 2
    assert "--workdir is missing" in one_line(capsys)
    assert run.main(["run", "--config=experiments/configs/quick.py", "--workdir=x"]) == 2
    assert "did you mean 'experiments/configs/quickstart.py'" in one_line(capsys)
    assert run.main(["run", "--help"]) == 0
    assert "quickstart.py" in capsys.readouterr().out


def test_workdirs_that_cannot_be_used(command, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert command(workdir=tmp_path / "file" / "run") == 2
    assert "cannot write to workdir" in one_line(capsys)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"mine": true}')
    assert command(workdir=foreign) == 2
    assert "is not the config of a run" in one_line(capsys)
    assert json.loads((foreign / "config.json").read_text()) == {"mine": True}

    lost = tmp_path / "lost"
    (lost / "checkpoints").mkdir(parents=True)
    assert command(workdir=lost) == 2
    assert "holds checkpoints but no config.json" in one_line(capsys)
    assert os.listdir(lost / "checkpoints") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(command, capsys, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert command(workdir=closed) == 2
    assert "Permission denied" in one_line(capsys)


def test_a_workdir_belongs_to_its_config(command, capsys, tmp_path):
    path = tmp_path / "run"
    with Workdir(path, tiny(), "train"):
        assert command() == 2
        assert "is in use by another run" in one_line(capsys)
    before = (path / "config.json").read_text()
    assert command("--config.seed=1", "--config.model.hidden_size=16") == 2
    line = one_line(capsys)
    assert "model.hidden_size (there 8, here 16), seed (there 0, here 1)" in line
    assert (path / "config.json").read_text() == before


def test_train_then_evaluate_again(command, capsys, tmp_path):
    path = tmp_path / "run"
    assert command("--config.train.steps=2") == 0
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    assert "sequence" in printed
    assert str(path / "result.json") in printed.replace("\n", "")
    trained = json.loads((path / "result.json").read_text())
    assert command("--config.train.steps=2") == 0
    assert "continuing at step 2 of 2" in capsys.readouterr().out
    again = json.loads((path / "result.json").read_text())
    config = json.loads((path / "config.json").read_text())
    records = read_metrics(path / "metrics.jsonl")
    keys = [(r["split"], r["step"], r.get("length")) for r in records]
    assert sorted(keys, key=str) == [("eval", 2, 4), ("eval", 2, 6), ("train", 2, None)]

    # Without --mode=eval, other numbers would take the place of the run's.
    assert command("--config.train.steps=2", "--config.model.solver.eval.max_steps=3") == 2
    line = one_line(capsys)
    assert "is finished, and other values of model.solver.eval.max_steps would replace" in line
    assert "--mode=eval" in line
    assert json.loads((path / "result.json").read_text()) == again
    assert json.loads((path / "config.json").read_text()) == config

    flags = ("--config.train.steps=2", "--config.eval.lengths=(4,)", "--config.eval.max_examples=3")
    assert command(*flags, "--mode=eval") == 0
    assert "eval.max_examples is now 3, was 6" in capsys.readouterr().out
    assert json.loads((path / "result.json").read_text()) == again
    assert json.loads((path / "config.json").read_text())["eval"]["max_examples"] == 6
    folder = path / "evaluations" / "eval.lengths=4,eval.max_examples=3"
    evaluated = json.loads((folder / "result.json").read_text())
    assert evaluated["examples"] == {"4": 3}
    assert evaluated["step"] == trained["step"] == 2
    assert evaluated["overrides"]["eval.max_examples"] == {"trained": 6, "here": 3}
    assert trained["overrides"] == {}

    # Test-time scaling: other solver options, and other data than the run was trained on.
    flags = (
        "--config.train.steps=2", "--mode=eval", "--config.model.solver.eval.decay=0.5",
        "--config.model.solver.eval.max_steps=3", "--config.task.train_sequences=50",
    )  # fmt: skip
    assert command(*flags) == 0
    assert "data: S3 n=6; trained on S3 n=endless" in capsys.readouterr().out
    (folder,) = (path / "evaluations").glob("solver.eval.decay=0.5*")
    evaluated = json.loads((folder / "result.json").read_text())
    assert evaluated["solver"]["decay"] == 0.5
    # What it was trained on does not change with the data it is evaluated on.
    assert evaluated["task"]["train_sequences"] == 50
    assert evaluated["data"]["train"] == trained["data"]["train"]
    assert evaluated["imported"] is None
    assert max(evaluated["solver_steps_max"].values()) <= 3
    assert {p.name for p in folder.iterdir()} >= {"samples.npz", "budget.png", "halting.png"}
    assert json.loads((path / "result.json").read_text()) == again


def test_names_of_evaluations():
    overrides = {
        "model.solver.eval.decay": (0.9, 0.997), "eval.lengths": ((4,), (8, 16)),
        "task.path": ("", "/data/a b"),
    }  # fmt: skip
    name = override_name(overrides)
    whole = "eval.lengths=8+16,solver.eval.decay=0.997,task.path=_data_a_b"
    assert re.fullmatch(re.escape(whole) + "-[0-9a-f]{8}", name)
    paths = ("data/a/b", "data/a_b", "data_a_b", "x" * 300, "x" * 300 + "y")
    names = [override_name({"task.path": ("", path)}) for path in paths]
    assert names[2] == "task.path=data_a_b"
    assert len({*names}) == len(paths)
    assert max(map(len, names)) < 120


def test_sigterm_says_how_to_continue(config_file, tmp_path):
    """The real command, stopped from outside."""
    flags = [f"--config={config_file}", f"--workdir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "experiments.run", *flags]
    process = subprocess.Popen(
        [*command, "--config.train.steps=100000", "--config.train.log_every=1"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM
    lines = error.strip().splitlines()
    assert len(lines) == 1
    assert "SIGTERM: saved a checkpoint at step" in lines[0]
    assert f"to continue: python -m experiments.run --config={config_file}" in lines[0]
