"""Runs the code of every notebook, from the repository's root, with a short training."""

import json
import pathlib

import matplotlib
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_there_is_one():
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_python(notebook):
    for number, source in enumerate(code(notebook)):
        compile(source, f"{notebook.name}, cell {number}", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("STEPS", "20")
    monkeypatch.setenv("WORKDIR", str(tmp_path))
    matplotlib.use("Agg")
    names = {"__name__": "notebook"}
    for number, source in enumerate(code(notebook)):
        exec(compile(source, f"{notebook.name}, cell {number}", "exec"), names)
    assert "of held-out puzzles solved" in capsys.readouterr().out
