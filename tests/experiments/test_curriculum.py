import json

import numpy as np
import pytest

from experiments import config as configs
from experiments import curriculum
from experiments import train as training
from experiments.curriculum import Curriculum
from experiments.errors import UserError
from experiments.tasks.sudoku import Sudoku
from experiments.train import Interrupted, train
from experiments.workdir import Workdir, read_metrics, write_json
from tests.experiments.conftest import new_run, tiny
from tests.experiments.test_train import assert_same_weights

OPTIONS = {"start": 2, "threshold": 0.75, "increment": 3, "decay": 0.5}
# A threshold below 1/6 grows the length whenever one of six sequences is right.
ON = {"start": 1, "threshold": 0.1, "increment": 1, "decay": 0.9}


def test_mask_pads_what_is_beyond_the_length():
    batch = {
        "tokens": np.arange(1, 9).reshape(2, 4), "labels": np.arange(11, 19).reshape(2, 4),
        "puzzle_ids": np.array([3, 4]),
    }  # fmt: skip
    cropped = curriculum.crop(batch, 3)
    masked = curriculum.mask(cropped, 2)
    np.testing.assert_array_equal(masked["tokens"], [[1, 2, 0], [5, 6, 0]])
    np.testing.assert_array_equal(masked["labels"], [[11, 12, -100], [15, 16, -100]])
    np.testing.assert_array_equal(masked["puzzle_ids"], [3, 4])
    labels = np.array([[1, 2, 3, -100], [1, -100, -100, -100]])
    assert curriculum.reaches(labels, np.int32(3)).tolist() == [True, False]
    assert curriculum.reaches(labels, np.int32(1)).tolist() == [True, True]


def test_update_against_a_loop():
    rng = np.random.default_rng(0)
    state = curriculum.init(OPTIONS)
    length, correct, counted, grown = 2, 0.0, 0.0, 0
    for _ in range(40):
        seen = int(rng.integers(0, 5))
        right = int(rng.integers(max(0, seen - 2), seen + 1))
        state = curriculum.update(state, OPTIONS, 9, np.float32(right), np.float32(seen))
        correct, counted = 0.5 * correct + right, 0.5 * counted + seen
        if counted and correct / counted >= 0.75 and length < 9:
            length, correct, counted, grown = min(9, length + 3), 0.0, 0.0, grown + 1
        assert int(state.length) == length
        np.testing.assert_allclose(state.counted, counted, rtol=1e-6)
        np.testing.assert_allclose(state.accuracy, correct / max(counted, 1e-6), rtol=1e-6)
    assert (grown, length) == (3, 9)


def test_nothing_seen_does_not_grow():
    state = Curriculum(np.int32(2), np.float32(0), np.float32(0))
    state = curriculum.update(state, OPTIONS | {"threshold": 1e-9}, 9, np.float32(0), np.float32(0))
    assert int(state.length) == 2


def test_buckets_double():
    train = tiny()["train"]
    assert curriculum.buckets(train, 20) == [20]
    train["curriculum"]["start"] = 3
    assert curriculum.buckets(train, 20) == [3, 6, 12, 20]
    assert curriculum.buckets(train, 3) == [3]
    assert curriculum.buckets(train | {"regime": "carry"}, 20) == [20]


@pytest.mark.parametrize("regime", ["solve", "carry"])
def test_grows_and_continues_bit_for_bit(
    regime, tmp_path, monkeypatch, fast_compile, only_training
):
    changes = {
        "train__regime": regime, "train__curriculum": ON, "train__steps": 8, "train__log_every": 1,
        "train__batch_size": 24, "checkpoint__every": 4,
    }  # fmt: skip
    run = new_run(tmp_path / "straight", **changes)
    train(run)
    records = read_metrics(run.path / "metrics.jsonl")
    lengths = [r["curriculum_length"] for r in records]
    assert lengths == sorted(lengths), lengths
    assert lengths[0] < lengths[-1], lengths
    assert "· length" in run.printed()

    log = training._Loop._log

    def stop_at_6(self, step):
        log(self, step)
        if step == 6:
            raise Interrupted(15, step, 8)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(training._Loop, "_log", stop_at_6)
        train(new_run(tmp_path / "resumed", **changes))
    resumed = new_run(tmp_path / "resumed", **changes)
    train(resumed)
    assert "continuing at step 4 of 8" in resumed.printed()
    assert_same_weights(run.path, resumed.path)
    again = read_metrics(resumed.path / "metrics.jsonl")
    assert [r["curriculum_length"] for r in again] == lengths


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 5}, r"start must be between 0 \(off\) and the training length 4, got 5"),
        ({"start": -1}, "start must be between 0"),
        ({"threshold": 0.0}, r"threshold must be in \(0, 1\], got 0.0"),
        ({"increment": 0}, "increment must be at least 1, got 0"),
        ({"decay": 1.0}, r"decay must be in \[0, 1\), got 1.0"),
        ({"decay": True}, "train.curriculum.decay must be of type float, got True"),
    ],
)
def test_bad_values(change, message):
    with pytest.raises(UserError, match=message):
        configs.validate(tiny(train__curriculum=ON | change))
    with pytest.raises(UserError, match=r"unknown config key 'train\.curriculum\.strat'; did you"):
        configs.complete(tiny(train__curriculum={"strat": 1}))


def test_a_puzzle_cannot_be_cut():
    with pytest.raises(UserError, match="whose prefixes are examples themselves; Sudoku's are not"):
        curriculum.validate(ON, Sudoku(path="sudoku4"))


def test_a_run_from_before_a_key_existed_can_be_continued(tmp_path):
    config = tiny()
    old = tiny()
    del old["train"]["curriculum"]
    write_json(tmp_path / "config.json", old)
    with Workdir(tmp_path, config, "train") as workdir:
        assert workdir.changed == {}
    assert json.loads((tmp_path / "config.json").read_text())["train"]["curriculum"]["start"] == 0
