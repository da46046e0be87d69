import itertools

import jax
import numpy as np
import pytest

import fpr
from experiments import config as configs
from experiments.data import make_sudoku4, make_sudoku9
from experiments.errors import UserError
from experiments.evaluate import Evaluator
from experiments.tasks import build, options, puzzle_files, streams, sudoku
from experiments.tasks.sudoku import Sudoku


def solved(grid, box):
    """Valid, the slow way."""
    side = box * box
    g = grid.reshape(side, side)
    for i in range(side):
        r, c = box * (i // box), box * (i % box)
        for unit in (g[i], g[:, i], g[r : r + box, c : c + box]):
            if sorted(unit.ravel()) != list(range(1, side + 1)):
                return False
    return True


def solutions(question, box):
    """Number of solutions by backtracking, at most 2."""
    grid = question.reshape(-1).copy()
    peers = [set() for _ in grid]
    for unit in sudoku.units(box):
        for cell in unit:
            peers[cell] |= set(unit.tolist())

    def options(cell):
        return set(range(1, box * box + 1)) - {grid[p] for p in peers[cell]}

    def count():
        blanks = np.flatnonzero(grid == 0)
        if not len(blanks):
            return 1
        cell = min(blanks, key=lambda c: len(options(c)))
        found = 0
        for digit in options(cell):
            grid[cell] = digit
            found += count()
            grid[cell] = 0
            if found > 1:
                break
        return found

    return count()


@pytest.fixture(scope="module", params=["sudoku4", "sudoku9"])
def task(request):
    return Sudoku(path=request.param, augmentations=5)


def digits(batch):
    return batch["tokens"] - 1, batch["labels"] - 1


def test_shipped_puzzles_have_one_solution(task):
    question, answer = task._digits["train"]
    assert len({q.tobytes() for q in question}) == len(question)
    assert all(solved(a, task.box) for a in answer[:200])
    for q in question[: 200 if task.box == 2 else 20]:
        assert solutions(q.astype(int), task.box) == 1


def test_sudoku4_is_complete_and_free_of_disguises():
    grids = make_sudoku4.solutions()
    assert len(grids) == 288
    assert len({g.tobytes() for g in grids}) == 288
    rows = make_sudoku4.puzzles(0)
    shipped = Sudoku(path="sudoku4")._files["train"]
    assert [bytes(q).decode() for q in shipped.question] == [row[1] for row in rows]
    # Canonical form: the smallest of all disguises, digits renamed by first appearance.
    question = np.array([[".1234".index(c) for c in row[1]] for row in rows[:300]])
    forms = set()
    for q in question:
        moved = q[make_sudoku4.cell_symmetries()]
        forms.add(min(renamed(m) for m in moved))
    assert len(forms) == 300


def renamed(grid):
    names = {0: 0}
    return tuple(names.setdefault(d, len(names)) for d in grid.tolist())


@pytest.mark.parametrize(
    ("program", "flags", "message"),
    [
        (make_sudoku4, ["--seed=-1"], "--seed=-1, allowed: at least 0"),
        (make_sudoku4, ["--oat=x"], "did you mean '--out'"),
        (make_sudoku9, ["--per_difficulty=0"], "--per_difficulty=0, allowed: at least 1"),
        (make_sudoku9, [], "qqwing is not installed; it is Debian's package qqwing"),
    ],
)
def test_shipped_data_cannot_be_made(program, flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    if not flags:
        flags = [f"--out={tmp_path / 'x.csv.gz'}"]
    assert program.main(flags) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_sudoku4_counts_by_brute_force():
    """The share of givens that pin down a solution, against backtracking on random ones."""
    grids = make_sudoku4.solutions()
    rng = np.random.default_rng(0)
    found = {c.tobytes(): set() for c in make_sudoku4.classes(grids)}
    for grid in make_sudoku4.classes(grids):
        found[grid.tobytes()] = set(make_sudoku4.unique_puzzles(grid, grids).tolist())
        symmetries = [
            cells
            for cells in make_sudoku4.cell_symmetries()
            if renamed(grid[cells]) == renamed(grid)
        ]
        for givens in rng.integers(1 << 16, size=40).tolist():
            question = np.where(givens >> np.arange(16) & 1, grid, 0)
            orbit = {
                sum(1 << to for to, cell in enumerate(cells) if givens >> cell & 1)
                for cells in symmetries
            }
            assert (solutions(question, 2) == 1) == bool(orbit & found[grid.tobytes()])


def test_augmentation_keeps_solutions_and_givens(task):
    for step in (0, 3):
        question, answer = digits(task.train_batch(step, 64))
        assert all(solved(a, task.box) for a in answer)
        assert ((question == 0) | (question == answer)).all()
    question, answer = digits(task.train_batch(0, 8))
    if task.box == 2:
        assert all(solutions(q, 2) == 1 for q in question)


def test_symmetry_reaches_every_disguise():
    """On 4×4 there are 2·8·8·24 of them, fewer for a grid that some leave as it is."""
    grid = np.array([[1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]])
    many = np.repeat(grid, 20000, axis=0)
    random = streams.draws(streams.stream_key("test"), np.arange(20000), sudoku.symmetry_draws(2))
    first, second = sudoku.symmetry(many, many, random)
    np.testing.assert_array_equal(first, second)
    reached = {g.tobytes() for g in first.astype(np.int64)}
    expected = set()
    for cells in make_sudoku4.cell_symmetries():
        for names in itertools.permutations(range(1, 5)):
            expected.add(np.array(names)[grid[0][cells] - 1].astype(np.int64).tobytes())
    assert reached == expected


def test_batches_depend_only_on_seed_and_step(task):
    again = Sudoku(path=task.path, augmentations=5)
    a, b = task.train_batch(7, 16), again.train_batch(7, 16)
    for name in ("tokens", "labels"):
        np.testing.assert_array_equal(a[name], b[name])
        assert a[name].dtype == np.int32
        assert a[name].shape == (16, task.length)
    halves = [again.train_batch(step, 8)["tokens"] for step in (14, 15)]
    np.testing.assert_array_equal(a["tokens"], np.concatenate(halves))
    other = Sudoku(path=task.path, augmentations=5, seed=1)
    assert (a["tokens"] != other.train_batch(7, 16)["tokens"]).any()
    # The evaluation puzzles do not depend on the seed.
    ours, theirs = (t.eval_batch(t.length, 3, 5) for t in (task, other))
    np.testing.assert_array_equal(ours["tokens"], theirs["tokens"])


def test_augmentations_are_limited_and_can_be_off():
    plain = Sudoku(path="sudoku4", augmentations=0, train_puzzles=3)
    originals = {row.tobytes() for row in plain.train_batch(0, 30)["tokens"]}
    assert len(originals) == 3
    few = Sudoku(path="sudoku4", augmentations=4, train_puzzles=3)
    seen = {row.tobytes() for row in few.train_batch(0, 600)["tokens"]}
    assert originals < seen
    assert len(seen) <= 15


def test_random_split_is_disjoint(task):
    train, held_out = task._train_rows, task._eval_rows
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == len(task._files["train"])
    assert len(held_out) == task.eval_size == round(0.1 * len(task._files["train"]))
    sample = Sudoku(path=task.path, train_puzzles=100)
    assert set(sample._used_train_rows) < set(train)
    assert sample.identity("train")["size"] == 100


def test_easy_to_hard_split():
    task = Sudoku(split="easy_to_hard", augmentations=3)
    question, _ = digits(task.train_batch(0, 500))
    empties = (question == 0).sum(axis=1)
    assert (empties.min(), empties.max()) == (39, 50)
    question, _ = digits(task.eval_batch(81, 0, task.eval_size))
    assert (question == 0).sum(axis=1).min() == 51
    assert task.identity("eval")["empties"] == [51, 60]


def test_a_folder_of_two_files(tmp_path):
    rows = [("x", "1234341221434.21", "1234341221434321", 1)]
    other = [("y", "12343412214343..", "1234341221434321", 2), *rows]
    puzzle_files.write(tmp_path / "train.csv", rows)
    with pytest.raises(ValueError, match=r"test.csv does not exist"):
        Sudoku(path=str(tmp_path), split="given")
    puzzle_files.write(tmp_path / "test.csv", other)
    task = Sudoku(path=str(tmp_path), split="given")
    assert (task.eval_size, task.vocab_size, task.length) == (2, 6, 16)
    # Sudoku-Extreme and Maze-Hard both have a train.csv: the folder tells them apart.
    assert task.identity("train")["file"] == f"{tmp_path.name}/train.csv"
    hard = Sudoku(path=str(tmp_path), split="easy_to_hard", train_empties=(1, 1))
    assert hard.eval_size == 1


def test_score():
    task = Sudoku(path="sudoku4")
    labels = task.eval_batch(16, 0, 4)["labels"]
    question = task.eval_batch(16, 0, 4)["tokens"]
    predictions = labels.copy()
    blank = np.flatnonzero(question[1] == 1)[0]
    predictions[1, blank] = 5 if labels[1, blank] == 2 else 2  # one wrong cell
    # Rule-abiding but not keeping the givens: the digits 1 and 2 exchanged.
    predictions[2] = np.array([0, 1, 3, 2, 4, 5])[labels[2]]
    predictions[3, 0] = 0
    found = task.score({"predictions": predictions, "steps": np.array([3, 5, 7, 9])})
    assert found["puzzle_accuracy"] == found["valid_solution"] == 0.25
    assert found["cell_accuracy"] == (64 - 1 - 8 - 1) / 64
    assert sum(b["examples"] for b in found["by_empties"]) == 4
    assert sum(b["examples"] for b in found["by_rating"]) == 4
    assert {"from", "to", "puzzle_accuracy", "solver_steps_median"} <= found["by_rating"][0].keys()


def test_valid_agrees_with_loops():
    rng = np.random.default_rng(0)
    for box in (2, 3):
        task = Sudoku(path=f"sudoku{box * box}")
        grids = task._digits["eval"][1][:40].astype(np.int64)
        for grid in grids[20:]:
            grid[rng.integers(len(grid))] = rng.integers(0, box * box + 2)
        np.testing.assert_array_equal(sudoku.valid(grids), [solved(g, box) for g in grids])


def test_sixteen_by_sixteen(tmp_path):
    n = np.arange(16)
    grid = (4 * (n[:, None] % 4) + n[:, None] // 4 + n) % 16
    answer = "".join(sudoku.DIGITS[d] for d in grid.ravel())
    puzzle_files.write(tmp_path / "a.csv", [("x", "." * 5 + answer[5:], answer, i) for i in "12"])
    task = Sudoku(path=str(tmp_path / "a.csv"), eval_share=0.5)
    assert (task.box, task.vocab_size, task.title) == (4, 18, "Sudoku 16×16")
    assert sudoku.valid(task.train_batch(2, 9)["labels"] - 1).all()


def test_identity_names_the_data(task):
    identity = task.identity("eval")
    assert identity["task"] == "sudoku"
    assert identity["file"] == f"{task.path}.csv.gz"
    assert len(identity["sha256"]) == 64
    assert identity["split_rule"] == "random"
    assert identity["rejected"] == 0
    assert task.identity("train")["augmentations"] == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "sudoku5"}, "does not exist; shipped data"),
        ({"split": "hard"}, "task.split='hard', allowed: random, easy_to_hard, given"),
        ({"split": "given"}, "needs a folder"),
        ({"path": ".", "split": "random"}, "is a folder"),
        ({"eval_share": 1.0}, "task.eval_share must be between 0 and 1"),
        ({"train_empties": (5,)}, "must be \\(fewest, most\\)"),
        ({"split": "easy_to_hard", "train_empties": (39, 80)}, "leaves .* and 0 for evaluation"),
        ({"train_puzzles": 6001}, "only 5400 puzzles"),
        ({"augmentations": -1}, "task.augmentations must not be negative"),
        ({"on_error": "ask"}, "allowed: stop, skip"),
        ({"pathh": "x"}, "did you mean 'task.path'"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(UserError, match=message):
        build({"name": "sudoku"} | change, seed=0)


def test_other_lengths_are_refused():
    with pytest.raises(ValueError, match="have 81 cells, not 16"):
        Sudoku().eval_batch(16, 0, 1)


def test_configs_have_the_papers_size_and_work():
    path = "experiments/configs/sudoku.py"
    model = configs.load(f"{path}:fprm")["model"]
    shapes = jax.eval_shape(lambda: fpr.init(model, jax.random.key(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 6_833_666
    for variant in ("cpu4", "cpu9", "cpu9_attention"):
        assert isinstance(configs.validate(configs.load(f"{path}:{variant}")), Sudoku)
    with pytest.raises(UserError, match="unknown variant 'cpu16'"):
        configs.load(f"{path}:cpu16")


def test_evaluation_adds_the_rules_verdict(make_run):
    task = options("sudoku") | {"path": "sudoku4"}
    run = make_run(
        task=task, model__vocab_size=6, model__seq_len=16, model__causal=False, train__steps=1,
        eval__lengths=(16,), eval__max_examples=10_000, eval__batch_size=250,
    )  # fmt: skip
    result = Evaluator(run)(fpr.init(run.config["model"], jax.random.key(0)))[16]
    assert result["examples"] == 471
    assert result["puzzle_accuracy"] == result["sequence_accuracy"]
    assert result["cell_accuracy"] == pytest.approx(result["token_accuracy"])
    assert 0 <= result["valid_solution"] <= 1
    assert sum(b["examples"] for b in result["by_empties"]) == 471
    per_step = result["effective_layers_median"] / result["solver_steps_median"]
    for bucket in result["by_empties"]:
        for statistic in ("median", "mean"):
            steps = bucket[f"solver_steps_{statistic}"]
            assert bucket[f"effective_layers_{statistic}"] == pytest.approx(per_step * steps)
    spent = sum(b["examples"] * b["flops_per_example_mean"] for b in result["by_empties"])
    assert spent / 471 == pytest.approx(result["flops_per_example_mean"])
    assert run.task.identity("eval")["file"] == "sudoku4.csv.gz"
