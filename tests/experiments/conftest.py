"""A tiny experiment that trains in seconds, and a display that remembers what it was told."""

import copy
import io

import pytest
from rich.console import Console

from experiments import config as configs
from experiments import train as training
from experiments.context import Run
from experiments.progress import Progress

TINY = {
    "model": {
        "name": "fprm",
        "vocab_size": 7,
        "seq_len": 4,
        "hidden_size": 8,
        "num_heads": 2,
        "num_layers": 1,
        "expansion": 1.0,
        "causal": True,
        "rope": False,
        "alpha_1": 0.5,
        "alpha_2": 0.5,
        "solver": {"preset": "fprm", "train": {"max_steps": 6}, "eval": {"max_steps": 8}},
    },
    "task": {"name": "word_problem", "group": "S3", "length": 4},
    "train": {"steps": 6, "batch_size": 6, "window": 2, "max_windows": 3, "log_every": 2},
    "ema": 0.5,
    "eval": {"lengths": (4, 6), "max_examples": 6, "batch_size": 4},
    "checkpoint": {"every": 3, "keep": 2},
}


def tiny(**changes):
    """The complete tiny config with changes such as `train__steps=3`."""
    config = configs.complete(copy.deepcopy(TINY))
    for name, value in changes.items():
        *path, last = name.split("__")
        node = config
        for key in path:
            node = node[key]
        node[last] = value
    return config


def new_run(path, **changes):
    """A Run of the tiny config in `path`; `run.printed()` is what it has said."""
    config = tiny(**changes)
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    path.mkdir(exist_ok=True)
    run = Run(config, configs.validate(config), path, progress)
    run.printed = out.getvalue
    return run


@pytest.fixture
def make_run(tmp_path):
    """`new_run` in the test's own directory."""
    return lambda **changes: new_run(tmp_path / "run", **changes)


@pytest.fixture
def only_training(monkeypatch):
    """Leaves out the final evaluation of `train` and its figures."""
    monkeypatch.setattr(training._Loop, "evaluate", lambda *_: {})
    monkeypatch.setattr(training, "finish", lambda *_: {})
