"""data.json: a run goes on with the data it began with, and is not scored on what it has seen."""

import json
import shutil

import numpy as np
import pytest

from experiments import config as configs
from experiments import origin
from experiments.errors import UserError
from experiments.result import evaluate_checkpoint
from experiments.tasks import options, puzzle_files, sudoku
from experiments.train import train
from experiments.workdir import Workdir, write_json, write_weights
from tests.experiments.conftest import new_run
from tests.experiments.test_arc import GOOD, write

pytestmark = pytest.mark.usefixtures("fast_compile")


def puzzle_file(path, start=0, count=40):
    """Some of the shipped puzzles as a file of its own."""
    shipped = sudoku.read(puzzle_files.locate("sudoku4"), "stop")
    rows = [
        (shipped.source[i], bytes(shipped.question[i]).decode(),
         bytes(shipped.answer[i]).decode(), shipped.rating[i])
        for i in range(start, start + count)
    ]  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    puzzle_files.write(path, rows)
    return path


def sudoku_run(path, file, task=None, **changes):
    options_ = options("sudoku") | {"path": str(file)} | (task or {})
    return new_run(
        path, task=options_, model__vocab_size=6, model__seq_len=16, model__causal=False,
        **{"train__steps": 1, "eval__lengths": (16,), "eval__budget_examples": 0} | changes,
    )  # fmt: skip


def evaluate(run):
    with Workdir(run.path, run.config, "eval") as opened:
        return evaluate_checkpoint(run, opened.changed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of one step and the file that it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    run = sudoku_run(folder / "run", puzzle_file(folder / "data" / "a.csv"))
    with Workdir(run.path, run.config, "train"):
        train(run)
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    """(workdir, file): the run again, moved so that its config names the same file."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copytree(trained / "data", tmp_path / "data")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["task"]["path"] = str(tmp_path / "data" / "a.csv")
    write_json(tmp_path / "run" / "config.json", config)
    return tmp_path / "run", tmp_path / "data" / "a.csv"


def data_of(path):
    return json.loads((path / "result.json").read_text())["data"]


def test_a_run_goes_on_with_the_data_it_began_with(copy):
    path, file = copy
    recorded = json.loads((path / "data.json").read_text())
    assert recorded["step"] == 0
    assert recorded["train"] == data_of(path)["train"]
    assert recorded["train"]["file"] == "data/a.csv"
    assert data_of(path)["train_recorded_at_step"] == 0
    puzzle_file(file, start=7)
    changed = sudoku_run(path, file, train__steps=2)
    there, here = (d["sha256"][:8] for d in (recorded["train"], changed.task.identity("train")))
    with pytest.raises(UserError) as error:
        train(changed)
    assert "its 1 steps were made with other training data" in str(error.value)
    assert f"sha256 (there {there}, here {here})" in str(error.value)
    # The same puzzles by another name are the same data.
    origin.record(path, sudoku_run(path, puzzle_file(file.parent / "b.csv")).task, {}, step=1)
    # Nothing is mixed where no step was made.
    assert origin.record(path, changed.task, {}, step=0).data["sha256"][:8] == here


def test_an_evaluation_says_what_was_trained_on_not_what_lies_there_now(copy):
    path, file = copy
    before = data_of(path)
    puzzle_file(file, start=7)
    found = evaluate(sudoku_run(path, file))
    assert found["data"]["train"]["sha256"] == before["train"]["sha256"]
    here = found["data"]["eval"]["sha256"]
    assert here != before["eval"]["sha256"]
    # Other data, so that it does not take the place of the run's own result.
    assert data_of(path) == before
    assert data_of(path / "evaluations" / f"task.sha256={here[:8]}")["eval"]["sha256"] == here


def test_an_evaluation_does_not_need_the_training_file(copy):
    path, file = copy
    other = puzzle_file(file.parent / "other.csv", start=50)
    file.unlink()
    run = sudoku_run(path, other, {"eval_share": 0.9})  # of another file, any share is new
    assert evaluate(run)["examples"] == {16: 6}
    assert "data: data/other.csv n=6 of 36" in run.printed()
    assert "trained on data/a.csv n=36" in run.printed()


def test_a_run_from_before_the_record(copy):
    path, file = copy
    (path / "data.json").unlink()
    run = sudoku_run(path, file)
    found = evaluate(run)
    assert found["data"]["train"]["file"] == "data/a.csv"
    assert found["data"]["train_recorded_at_step"] is None
    assert "(as the data is now: the run did not record it)" in run.printed()
    assert not (path / "data.json").exists()
    longer = sudoku_run(path, file, train__steps=2)
    train(longer)
    assert json.loads((path / "data.json").read_text())["step"] == 1
    assert data_of(path)["train_recorded_at_step"] == 1
    assert "(as recorded at step 1, not before)" in longer.printed()


def test_a_record_that_cannot_be_read(copy):
    path, file = copy
    for text in ("{", "[]", '{"step": 0}'):
        (path / "data.json").write_text(text)
        with pytest.raises(UserError, match=r"data\.json is not the record of a run's data"):
            evaluate(sudoku_run(path, file))


def checked(path, old, new):
    """The record of a run that was trained as `old`, if it may be evaluated as `new`."""
    path.mkdir(exist_ok=True)
    origin.record(path, old.task, old.task.train_batch(0, 2), 0)
    return origin.of_evaluation(new, configs.differences(old.config, new.config))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("task", "shown"),
    [
        ({"eval_share": 0.5}, r"task\.eval_share \(there 0\.1, here 0\.5\)"),
        ({"split": "easy_to_hard", "train_empties": (1, 8)}, r"task\.split .* task\.train_empties"),
        ({"train_puzzles": 5}, r"task\.train_puzzles \(there 0, here 5\)"),
    ],
)
def test_what_was_trained_on_is_not_held_out(copy, task, shown, recorded):
    path, file = copy
    if not recorded:
        (path / "data.json").unlink()
    for same in (file, shutil.copy(file, file.parent / "same.csv")):
        with pytest.raises(UserError, match=rf"{shown}.*: it was trained on that very file"):
            evaluate(sudoku_run(path, same, task))


def test_the_training_file_as_another_folders_test_file(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        puzzle_file(folder / "train.csv", start=40 * number)
        puzzle_file(folder / "test.csv", start=80)
    runs = [sudoku_run(tmp_path / "run", f, {"split": "given"}) for f in folders]
    assert checked(tmp_path / "run", *runs)
    shutil.copy(folders[0] / "train.csv", folders[1] / "test.csv")
    runs[1] = sudoku_run(tmp_path / "run", folders[1], {"split": "given"})
    with pytest.raises(UserError, match=r"with task\.path='.*/b': it was trained on that very"):
        checked(tmp_path / "run", *runs)


def text_run(path, file, length=4, **task):
    made = options("language") | {"path": str(file), "length": length} | task
    return new_run(path, task=made, model__vocab_size=257, eval__lengths=(length,))


def test_a_text_too_is_held_out_as_in_training(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(32, 127)) * 4)
    old = text_run(tmp_path / "run", file)
    for task in ({"eval_fraction": 0.5}, {"eval_path": str(file)}):
        with pytest.raises(UserError, match="it was trained on that very file"):
            checked(tmp_path / "run", old, text_run(tmp_path / "run", file, **task))
    assert checked(tmp_path / "run", old, text_run(tmp_path / "run", file, length=3))


def arc_run(path, folder, num_puzzles=64, **task):
    made = options("arc") | {"path": str(folder), "augmentations": 2, "votes": 2} | task
    return new_run(
        path, task=made, model__vocab_size=12, model__seq_len=900, model__causal=False,
        model__num_registers=1, model__num_puzzles=num_puzzles, eval__lengths=(900,),
    )  # fmt: skip


@pytest.fixture
def arc_folders(tmp_path):
    """Two folders with the same tasks."""
    for folder in ("one", "two"):
        write(tmp_path / folder / "training", "a", GOOD)
        write(tmp_path / folder / "evaluation", "b", GOOD)
    return tmp_path / "one", tmp_path / "two"


def test_puzzle_embeddings_keep_their_puzzles(tmp_path, arc_folders):
    one, two = arc_folders
    path = tmp_path / "run"
    old = arc_run(path, one)
    # The same tasks in another folder, other votes: the numbers stay.
    assert checked(path, old, arc_run(path, two, votes=3, translate=False))
    with pytest.raises(UserError, match=r"numbered otherwise: augmentations \(there 2, here 5\)"):
        checked(path, old, arc_run(path, one, augmentations=5))
    write(two / "training", "0", "no task")  # left out, it changes nothing
    with pytest.warns(UserWarning, match="left out 1"):
        skipping = arc_run(path, two, on_error="skip")
    assert checked(path, old, skipping)
    write(two / "training", "0", GOOD)  # the first by its name: all others move on
    with pytest.raises(UserError, match=r"numbered otherwise: sha256 \(there \w{8}, here \w{8}\)"):
        checked(path, old, arc_run(path, two))
    assert checked(path, arc_run(path, one, 0), arc_run(path, two, 0, augmentations=5))


def test_imported_puzzle_embeddings_have_numbers_that_are_not_known(tmp_path, arc_folders):
    run = arc_run(tmp_path / "run", arc_folders[0])
    write_weights(run.path / "weights.npz", {"embedding": np.zeros(1)})
    write_json(run.path / "config.json", run.config)
    write_json(run.path / "imported.json", {"file": "x.pt", "weights": "ema"})
    with pytest.raises(UserError, match=r"the authors' numbering, which is not that of .*'arc'"):
        evaluate(run)
