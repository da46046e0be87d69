"""The difference of sequential decoding from the parallel solution, as a metric of evaluation."""

import pytest

from experiments import config as configs
from experiments import plots, train
from experiments.errors import UserError
from experiments.workdir import read_metrics
from tests.experiments.conftest import tiny

pytestmark = pytest.mark.usefixtures("fast_compile")
MODEL = {
    "name": "fp_rnn", "vocab_size": 7, "seq_len": 4, "hidden_size": 4, "mixer_scale": 1,
    "conv": False, "solver": {"preset": "fp_rnn", "train": {"max_steps": 4}},
}  # fmt: skip


def test_it_is_logged_and_drawn(make_run, monkeypatch):
    model = configs.complete({"model": MODEL, "task": tiny()["task"]})["model"]
    run = make_run(
        model=model, ema=0.0, train__steps=2, eval__every=1, eval__lengths=(4,),
        eval__sequential_difference=3,
    )  # fmt: skip
    monkeypatch.setattr(train, "finish", lambda *_: {})
    train.train(run)
    records = read_metrics(run.path / "metrics.jsonl")
    values = [r["sequential_difference"] for r in records if r["split"] == "eval"]
    assert len(values) == 2
    assert all(0 <= v < 1 for v in values)
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    plots.plot_training(records, run.path / "training.png")
    panel = drawn[0].axes[3]
    assert panel.lines[0].get_ydata().tolist() == values


def test_a_model_that_cannot_decode_is_refused():
    with pytest.raises(UserError, match="FPRM reads its whole input at once"):
        configs.validate(tiny(eval__sequential_difference=3))
    with pytest.raises(UserError, match="sequential_difference must not be negative, got -1"):
        configs.validate(tiny(eval__sequential_difference=-1))
