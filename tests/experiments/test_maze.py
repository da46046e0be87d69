import collections
import sys

import jax
import numpy as np
import pytest

import fpr
from experiments import config as configs
from experiments import plots
from experiments.data import make_maze
from experiments.errors import UserError
from experiments.tasks import build, maze, puzzle_files
from experiments.tasks.maze import GOAL, OPEN, PATH, START, WALL, Generator, Maze


def search(tokens, side):
    """Shortest distance from S to G and the number of shortest paths, by a queue."""
    start, goal = (tokens.tolist().index(t) for t in (START, GOAL))
    distance, ways = {start: 0}, {start: 1}
    queue = collections.deque([start])
    while queue:
        cell = queue.popleft()
        y, x = divmod(cell, side)
        for ny, nx in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
            near = ny * side + nx
            if not (0 <= ny < side and 0 <= nx < side) or tokens[near] == WALL:
                continue
            if near not in distance:
                distance[near], ways[near] = distance[cell] + 1, 0
                queue.append(near)
            if distance[near] == distance[cell] + 1:
                ways[near] += ways[cell]
    return distance.get(goal, -1), ways.get(goal, 0)


CASES = [
    (3, 0.0, 0, True), (4, 1.0, 0, False), (7, 0.5, 0, True), (10, 0.3, 15, True),
    (10, 1.0, 8, False), (30, 0.3, 111, True),
]  # fmt: skip


@pytest.mark.parametrize(("side", "braid", "min_path", "unique"), CASES)
def test_generated_mazes_are_right(side, braid, min_path, unique):
    generator = Generator(side, braid, min_path, unique, seed=0)
    counts = set()
    for number in range(5 if side > 10 else 30):
        tokens, labels = generator.maze("train", number)
        steps, count = search(tokens, side)
        assert steps >= max(1, min_path)
        counts.add(min(count, 2))
        marked = labels == PATH
        np.testing.assert_array_equal(np.where(marked, OPEN, labels), tokens)
        assert marked.sum() == steps - 1
        # Only the marked cells left open: still the same distance.
        narrow = np.where(marked | (tokens == START) | (tokens == GOAL), tokens, WALL)
        assert search(narrow, side) == (steps, 1)
        assert maze.path_lengths(tokens[None]) == steps
        assert maze.valid(tokens[None], labels[None]).all()
        # All that can be walked hangs together.
        grid = (tokens != WALL).reshape(1, side, side)
        reached = maze.distances(grid, (tokens == START).reshape(grid.shape)) >= 0
        np.testing.assert_array_equal(reached, grid)
    assert counts == ({1} if unique else {1, 2})


@pytest.mark.parametrize("side", [3, 8, 11])
def test_perfect_and_braided(side):
    rng = np.random.default_rng(0)

    def loops_and_dead_ends(braid):
        grid = np.pad(maze.carve(side, braid, rng), 1)
        edges = (grid[1:] & grid[:-1]).sum() + (grid[:, 1:] & grid[:, :-1]).sum()
        near = sum(np.roll(grid, s, a).astype(int) for s in (-1, 1) for a in (0, 1))
        rooms = ((side + 1) // 2) ** 2
        assert grid.sum() >= 2 * rooms - 1
        return edges - grid.sum() + 1, (grid & (near == 1)).sum()

    perfect = [loops_and_dead_ends(0.0) for _ in range(20)]
    assert all(loops == 0 and ends >= 2 for loops, ends in perfect)
    braided = [loops_and_dead_ends(1.0) for _ in range(20)]
    assert all(loops > 0 and ends == 0 for loops, ends in braided)


def test_mazes_depend_only_on_seed_and_number():
    a, b = Maze(side=7), Maze(side=7)
    b.train_batch(0, 8)
    one, two = a.train_batch(3, 8), b.train_batch(3, 8)
    for name in ("tokens", "labels"):
        np.testing.assert_array_equal(one[name], two[name])
        assert one[name].dtype == np.int32
        assert one[name].shape == (8, 49)
    np.testing.assert_array_equal(one["tokens"][4:], a.train_batch(7, 4)["tokens"])
    other = Maze(side=7, seed=1, eval_puzzles=9)
    assert (one["tokens"] != other.train_batch(3, 8)["tokens"]).any()
    np.testing.assert_array_equal(
        other.eval_batch(49, 5, 4)["tokens"],
        Maze(side=7, eval_puzzles=20).eval_batch(49, 5, 4)["tokens"],
    )


def test_splits_share_no_maze_even_where_there_are_few():
    task = Maze(side=3, eval_puzzles=60)
    train = {row.tobytes() for row in task.train_batch(0, 300)["tokens"]}
    held_out = {row.tobytes() for row in task.eval_batch(9, 0, 60)["tokens"]}
    assert train
    assert held_out
    assert not train & held_out


def test_a_finite_set_is_repeated_in_another_order():
    task = Maze(side=5, train_puzzles=6)
    first, second = ([r.tobytes() for r in task.train_batch(e, 6)["tokens"]] for e in (0, 1))
    assert sorted(first) == sorted(second)
    assert task.identity("train")["size"] == 6
    assert Maze(side=5).identity("train")["size"] == "endless"


def test_augmentation_keeps_answers_and_is_off_by_default():
    assert not Maze().augment
    task, plain = (Maze(side=6, train_puzzles=4, augment=a) for a in (True, False))
    batch = task.train_batch(0, 64)
    assert maze.valid(batch["tokens"], batch["labels"]).all()
    originals = {r.tobytes() for r in plain.train_batch(0, 64)["tokens"]}
    seen = {r.tobytes() for r in batch["tokens"]}
    assert len(originals) == 4
    assert 20 < len(seen) <= 32


OPEN_ROOM = "S  " + "   " + "  G"


def tokens_of(text):
    return np.array([[maze.SYMBOLS.index(c) + 1 for c in text]])


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Soo  o  G", True),
        ("So  oo  G", True),  # another shortest path
        ("So     oG", False),  # a gap
        ("S  ooo  G", True),
        ("Soo oo  G", False),  # one cell too many
        ("Soo  oo G", False),
        ("Soo  o# G", False),  # a wall that was not there
        ("Soo  o  o", False),  # the goal painted over
        ("S       G", False),
    ],
)
def test_valid(answer, right):
    assert maze.valid(tokens_of(OPEN_ROOM), tokens_of(answer)) == [right]


def test_ties_are_broken_in_a_fixed_order():
    grid = np.ones((3, 3), bool)
    at = np.zeros_like(grid)
    at[0, 0] = True
    distance = maze.distances(grid[None], at[None])[0]
    path, count = maze.shortest_path(distance, (2, 2))
    assert path == [(2, 2), (1, 2), (0, 2), (0, 1), (0, 0)]
    assert count == 2
    assert maze.shortest_path(distance, (0, 2)) == ([(0, 2), (0, 1), (0, 0)], 1)


def test_score(tmp_path):
    task = Maze(side=3, eval_puzzles=4)
    batch = task.eval_batch(9, 0, 4)
    predictions = batch["labels"].copy()
    predictions[1, 0] = 0
    found = task.score({"predictions": predictions, "steps": np.arange(4)})
    assert found["puzzle_accuracy"] == found["valid_solution"] == 0.75
    assert found["cell_accuracy"] == 35 / 36
    buckets = found["by_path_length"]
    assert sum(b["examples"] for b in buckets) == 4
    for bucket in buckets:  # as experiments.evaluate does, which knows the model
        bucket["effective_layers_mean"] = 2 * bucket["solver_steps_mean"]
        bucket["effective_layers_median"] = 2 * bucket["solver_steps_median"]
    figure = plots.plot_difficulty(buckets, "path_length", tmp_path / "a.png", "title")
    assert figure.stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--side=6"], "--side=6 had no path of --min_path=111 steps or more"),
        (["--side=2"], "--side=2, allowed: at least 3"),
        (["--train=0"], "--train=0, allowed: at least 1"),
        (["--test=-1"], "--test=-1, allowed: at least 1"),
        (["--braid=1.5"], "--braid=1.5, allowed: between 0 and 1"),
        (["--braid=nan"], "--braid=nan, allowed: between 0 and 1"),
        (["--seed=-1"], "--seed=-1, allowed: at least 0"),
        (["--sides=6"], "did you mean '--side'"),
    ],
)
def test_files_that_cannot_be_made(flags, message, tmp_path, capsys):
    assert make_maze.main([f"--out={tmp_path / 'mazes'}", *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "mazes").exists()


def test_files_made_and_read(tmp_path, monkeypatch, capsys):
    options = ["--side=6", "--train=5", "--test=3", "--min_path=4"]
    monkeypatch.setattr(sys, "argv", ["make_maze", f"--out={tmp_path}", *options])
    assert make_maze.main() == 0
    assert "5 mazes in" in capsys.readouterr().out
    task = Maze(path=str(tmp_path))
    assert (task.length, task.eval_size, task.title) == (36, 3, "mazes of 6×6")
    generator = Generator(6, 0.3, 4, True, 0)
    made = {generator.maze("train", i)[0].tobytes() for i in range(5)}
    assert {row.tobytes() for row in task.train_batch(0, 5)["tokens"]} == made
    assert task.identity("eval")["file"] == f"{tmp_path.name}/test.csv"
    assert task.identity("train")["size"] == 5
    assert Maze(path=str(tmp_path), train_puzzles=2).identity("train")["size"] == 2
    longest = int(maze.path_lengths(task.eval_batch(36, 0, 3)["tokens"]).max())
    filtered = Maze(path=str(tmp_path), min_path=4)
    assert filtered.eval_size == 3
    with pytest.raises(ValueError, match=r"no maze in (train|test).csv has a path of"):
        Maze(path=str(tmp_path), min_path=longest + 40)
    with pytest.raises(ValueError, match="only 5 mazes"):
        Maze(path=str(tmp_path), train_puzzles=6)


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [
        ("S  x    G", "Soo  o  G", "question has a character other than .*: 'x' at position 4"),
        ("S  o    G", "Soo  o  G", "question has a character other than .*: 'o' at position 4"),
        ("S       G", "Soo. o  G", "answer has a character other than .*: '.' at position 4"),
        ("S   S   G", "Soo S   G", "question does not have exactly one S and one G"),
        ("S       G", "#oo  o  G", "answer contradicts question"),
        ("S       G", "Soo  o  o", "answer contradicts question"),
        ("S #####  G"[:9], "S #####  G"[:9], "question does not have exactly one"),
        ("S ###   G", "S ###   G", "G cannot be reached from S"),
        ("S       G", "Soo     G", "answer is not a shortest path"),
    ],
)
def test_bad_rows(tmp_path, question, answer, reason):
    good = ("x", "S       G", "Soo  o  G", 4)
    puzzle_files.write(tmp_path / "a.csv", [good, good, ("x", question, answer, 4)])
    with pytest.raises(ValueError, match=rf"a\.csv:4: {reason}"):
        maze.read(tmp_path / "a.csv", "stop")
    with pytest.warns(UserWarning, match="left out 1 of 3 rows"):
        assert len(maze.read(tmp_path / "a.csv", "skip")) == 2


def test_grids_must_be_square(tmp_path):
    puzzle_files.write(tmp_path / "a.csv", [("x", "S    G", "SooooG", 5)])
    with pytest.raises(ValueError, match="grids have 6 characters, which is not a square"):
        maze.read(tmp_path / "a.csv", "stop")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"side": 2}, "task.side must be at least 3, got 2"),
        ({"braid": 1.5}, "task.braid must be between 0 and 1"),
        ({"side": 3, "min_path": 9}, "had no path of task.min_path=9"),
        ({"eval_puzzles": 0}, "task.eval_puzzles must be at least 1"),
        ({"path": "/nowhere"}, "train.csv does not exist; task.path must be a folder"),
        ({"on_error": "ask"}, "allowed: stop, skip"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(UserError, match=message):
        build({"name": "maze"} | change, seed=0)


def test_paper_config_and_cpu_config():
    path = "experiments/configs/maze.py"
    model = configs.load(f"{path}:fprm")["model"]
    shapes = jax.eval_shape(lambda: fpr.init(model, jax.random.key(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 6_825_986
    assert isinstance(configs.validate(configs.load(f"{path}:cpu")), Maze)
    with pytest.raises(UserError, match="unknown variant 'cpus'; did you mean 'cpu'"):
        configs.load(f"{path}:cpus")
