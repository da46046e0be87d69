import threading
import time

import pytest

from experiments.errors import UserError
from experiments.prefetch import Prefetch
from experiments.train import train
from experiments.workdir import read_metrics
from tests.experiments.conftest import new_run


def threads():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_come_in_order(depth):
    with Prefetch(lambda step: {"step": step}, range(5, 12), depth) as batches:
        assert [batches.get()["step"] for _ in range(7)] == list(range(5, 12))
    assert not threads()


def test_at_most_depth_batches_wait_and_one_is_being_made():
    made = []
    with Prefetch(lambda step: made.append(step) or {}, range(100), 2) as batches:
        batches.get()
        deadline = time.monotonic() + 20
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert made == [0, 1, 2, 3]  # one taken, two waiting, one that finds no room
        assert batches.ready


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exception_reaches_the_reader_as_one_line_with_the_step(depth):
    def make(step):
        if step == 2:
            raise OSError("disk\n gone")
        return {}

    with Prefetch(make, range(5), depth) as batches:
        batches.get()
        batches.get()
        with pytest.raises(UserError) as caught:
            batches.get()
    assert str(caught.value) == "the batch of step 3 cannot be made: OSError: disk gone"
    assert not threads()


def test_a_user_error_is_passed_on_as_it_is():
    def make(step):
        raise UserError("line 7: 80 characters, not 81")

    with (
        Prefetch(make, range(5), 1) as batches,
        pytest.raises(UserError, match="line 7: 80 characters"),
    ):
        batches.get()


def test_leaving_early_ends_the_thread():
    with Prefetch(lambda step: {}, range(10**9), 2) as batches:
        batches.get()
        assert len(threads()) == 1
    assert not threads()


class Slow:
    """A task whose training batches take a while, or break."""

    def __init__(self, task, break_at=None):
        self._task, self._break_at = task, break_at

    def __getattr__(self, name):
        return getattr(self._task, name)

    def train_batch(self, step, batch_size):
        if step == self._break_at:
            raise OSError("the disk is gone")
        time.sleep(0.1 * (step > 0))
        return self._task.train_batch(step, batch_size)


def test_training_reports_the_share_of_time_it_waits_for_data(
    tmp_path, only_training, fast_compile
):
    changes = {"train__log_every": 1, "checkpoint__every": 100}
    waits = {}
    for depth in (0, 2):
        run = new_run(tmp_path / str(depth), train__prefetch=depth, **changes)
        run.task = Slow(run.task)
        train(run)
        records = read_metrics(run.path / "metrics.jsonl")
        waits[depth] = [r["data_wait"] for r in records]
        assert all(0 <= wait <= 1 for wait in waits[depth])
        assert records[-1]["seconds_data"] > (0.0 if depth else 0.4)
        assert "· waiting for data " in run.printed()
    assert max(waits[0]) > 0.2
    run = new_run(tmp_path / "broken", **changes)
    run.task = Slow(run.task, break_at=2)
    with pytest.raises(UserError, match="the batch of step 3 cannot be made: OSError: the disk"):
        train(run)
    assert not threads()
