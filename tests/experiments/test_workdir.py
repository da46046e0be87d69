import json

import numpy as np
import pytest

import fpr
from experiments import workdir
from experiments.context import Clock
from experiments.errors import UserError
from experiments.workdir import MetricsLog, Workdir, plain, write_json, write_weights
from tests.experiments.conftest import tiny


def record(step, **more):
    return {"split": "train", "step": step, "loss": float(step)} | more


def lines(path):
    return [json.loads(text) for text in (path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_appended_and_cut_when_continuing(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        for step in (1, 2, 3, 4):
            log.add(record(step))
        log.add({"split": "eval", "step": 4, "length": 16, "token_accuracy": 0.5})
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3, 4, 4]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"split": "train", "st')  # the process died while writing
    with MetricsLog(tmp_path, 2) as log:
        assert [r["step"] for r in log.records] == [1, 2]
        log.add(record(3, loss=float("nan")))
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3]
    assert lines(tmp_path)[-1]["loss"] is None
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_plain_makes_strict_json():
    content = {1: np.float32(0.5), "a": np.arange(2), "b": (float("inf"), np.nan), "c": np.int64(3)}
    assert plain(content) == {"1": 0.5, "a": [0, 1], "b": [None, None], "c": 3}
    json.dumps(plain(content), allow_nan=False)


def test_weights_are_what_load_reads(tmp_path):
    params = {"layer": {"kernel": np.eye(2, dtype=np.float32)}, "scale": np.ones(3, np.float32)}
    write_json(tmp_path / "config.json", tiny())
    write_weights(tmp_path / "weights.npz", params)
    config, loaded = fpr.load(tmp_path)
    assert config["name"] == "fprm"
    np.testing.assert_array_equal(loaded["layer"]["kernel"], params["layer"]["kernel"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "weights.npz"]


def test_imported_weights_are_not_trained_over(tmp_path):
    for name, content in (("config.json", tiny()), ("imported.json", {"file": "x.pt"})):
        write_json(tmp_path / name, content)
    Workdir(tmp_path, tiny(), "eval").close()
    with pytest.raises(UserError, match=r"imported weights.*or --mode=eval"):
        Workdir(tmp_path, tiny(), "train")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        workdir.write_atomically(path, fail)
    assert path.read_text() == "old"


def test_changes_that_are_allowed_are_reported(tmp_path):
    with Workdir(tmp_path, tiny(), "train"):
        pass
    with Workdir(tmp_path, tiny(eval__max_examples=9), "train") as again:
        assert again.changed == {"eval.max_examples": (6, 9)}
    assert json.loads((tmp_path / "config.json").read_text())["eval"]["max_examples"] == 9
    with pytest.raises(
        UserError, match=r"cannot evaluate .* optimizer\.b1 \(there 0.9, here 0.5\)"
    ):
        Workdir(tmp_path, tiny(optimizer__b1=0.5), "eval")


def test_a_finished_run_keeps_its_numbers(tmp_path):
    def claim(mode="train", **changes):
        with Workdir(tmp_path, tiny(**changes), mode) as opened:
            return opened.changed

    claim()
    write_json(tmp_path / "result.json", {"step": 3})  # evaluated in between
    steps = {"model__solver__eval__max_steps": 9}
    assert claim(**steps)  # the run itself goes on, with these from now on
    write_json(tmp_path / "result.json", {"step": 6})
    before = (tmp_path / "config.json").read_text()
    for change in ({"model__solver__eval__max_steps": 10}, steps | {"eval__max_examples": 9}):
        with pytest.raises(
            UserError, match=r"is finished, and other values of .*(max_steps|examples) would"
        ):
            claim(**change)
        assert claim("eval", **change)
    assert (tmp_path / "config.json").read_text() == before
    # These change no number, and more steps replace the result anyway.
    assert claim(**steps, eval__batch_size=3, eval__every=2, checkpoint__keep=1)
    assert claim(**steps, train__steps=8, eval__max_examples=9)


def test_clock_goes_on_after_a_restart():
    clock = Clock()
    with clock.measure("evaluation"):
        pass
    clock.continue_from(
        [record(1, **{**Clock().record(), "seconds_total": 50.0}), {"split": "eval"}]
    )
    assert 50.0 < clock.total < 60.0
    clock.continue_from([])
    assert 0 <= clock.eval_share < 1
    assert clock.record().keys() == {
        "seconds_total", "seconds_train", "seconds_compile", "seconds_evaluation",
        "seconds_checkpoint", "seconds_data",
    }  # fmt: skip
