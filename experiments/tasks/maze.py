"""Mazes: mark a shortest path from S to G. Made on the fly or read in the Maze-Hard CSV format.

A maze is a square of `#` walls, spaces, `S` and `G`; the answer marks a shortest path with `o`.
Token ids are the places in "# SGo" plus 1; 0 is padding. Labels are the whole answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments.tasks import puzzle_files, streams
from experiments.tasks.puzzle_files import Odd, Puzzles

SYMBOLS = "# SGo"
WALL, OPEN, START, GOAL, PATH = range(1, 6)  # token ids
MAX_TRIES = 2000


def distances(passable: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Steps from the start to every cell, by breadth-first search in all mazes at once.

    Args:
      passable: (N, H, W) bool.
      start: (N, H, W) bool, the cells to start from.

    Returns:
      (N, H, W) int32, -1 where a cell cannot be reached.
    """
    reached = start & passable
    found = np.where(reached, 0, -1).astype(np.int32)
    frontier, step = reached, 0
    while frontier.any():
        step += 1
        near = np.zeros_like(frontier)
        near[:, 1:] |= frontier[:, :-1]
        near[:, :-1] |= frontier[:, 1:]
        near[:, :, 1:] |= frontier[:, :, :-1]
        near[:, :, :-1] |= frontier[:, :, 1:]
        frontier = near & passable & (found < 0)
        found[frontier] = step
    return found


def path_lengths(tokens: np.ndarray) -> np.ndarray:
    """Steps of a shortest path from S to G, -1 where there is none.

    Args:
      tokens: (N, side²) mazes with one S and one G each.

    Returns:
      (N,) int32.
    """
    grids = _grids(tokens)
    found = distances(grids != WALL, grids == START)
    return found[grids == GOAL]


def valid(tokens: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Whether answers mark a shortest path and leave the rest of the maze as it was.

    A set of marked cells is a shortest path of d steps when it has d - 1 cells and joins S and G in
    d steps; no cell is then left for a detour.

    Args:
      tokens: (N, side²) mazes, token ids, one S and one G each.
      answers: (N, side²) token ids.

    Returns:
      (N,) bool.
    """
    marked = (tokens == OPEN) & (answers == PATH)
    kept = ((answers == tokens) | marked).all(axis=1)
    shortest = path_lengths(tokens)
    along = path_lengths(np.where(marked | (tokens == START) | (tokens == GOAL), tokens, WALL))
    return kept & (shortest > 0) & (along == shortest) & (marked.sum(axis=1) == shortest - 1)


def _grids(tokens: np.ndarray) -> np.ndarray:
    side = puzzle_files.square_side(tokens.shape[1])
    return tokens.reshape(-1, side, side)


def carve(side: int, braid: float, rng: np.random.Generator) -> np.ndarray:
    """A random maze: a spanning tree of corridors with some dead ends opened into loops.

    Rooms lie at every second cell; where the side is even, one row and one column of walls, at a
    random edge, are left over. The tree is carved by depth-first search.

    Args:
      side: cells on a side, at least 3.
      braid: share of the dead ends that get a second way out.
      rng: random numbers.

    Returns:
      (side, side) bool, True where one can walk.
    """
    rooms = (side + 1) // 2
    grid = np.zeros((2 * rooms + 1, 2 * rooms + 1), bool)  # walls all round
    moves = ((-1, 0), (0, -1), (0, 1), (1, 0))
    first = (int(rng.integers(rooms)), int(rng.integers(rooms)))
    grid[2 * first[0] + 1, 2 * first[1] + 1] = True
    stack = [first]
    orders = rng.permuted(np.tile(np.arange(4), (4 * rooms * rooms, 1)), axis=1).tolist()
    while stack:
        r, c = stack[-1]
        for m in orders.pop():
            dr, dc = moves[m]
            if 0 <= r + dr < rooms and 0 <= c + dc < rooms:
                y, x = 2 * (r + dr) + 1, 2 * (c + dc) + 1
                if not grid[y, x]:
                    grid[y, x] = grid[y - dr, x - dc] = True
                    stack.append((r + dr, c + dc))
                    break
        else:
            stack.pop()
    for r, c in rng.permutation(rooms * rooms)[:, None] // [rooms, 1] % rooms:
        y, x = 2 * r + 1, 2 * c + 1
        shut = [(dr, dc) for dr, dc in moves if not grid[y + dr, x + dc]]
        ways = [(dr, dc) for dr, dc in shut if 0 <= r + dr < rooms and 0 <= c + dc < rooms]
        if len(shut) == 3 and ways and rng.random() < braid:
            dr, dc = ways[rng.integers(len(ways))]
            grid[y + dr, x + dc] = True
    spare = 2 * rooms - 1 - side  # 0, or -1 where the side is even
    top, left = (1 + int(rng.integers(spare, 1)) for _ in range(2))
    return grid[top : top + side, left : left + side]


def shortest_path(distance: np.ndarray, goal: tuple[int, int]) -> tuple[list[tuple[int, int]], int]:
    """A shortest path back from the goal, and how many there are (2 stands for more than one).

    Of several, it is the one that prefers, seen from the goal, up, left, right, down.

    Args:
      distance: (H, W) steps from the start, -1 where walled off.
      goal: a cell that can be reached.

    Returns:
      Cells from goal to start, and 1 or 2.
    """
    height, width = distance.shape
    cells, count = [goal], 1
    layer = {goal}
    while (d := distance[cells[-1]]) > 0:
        before: set[tuple[int, int]] = set()
        chosen = None
        for y, x in layer:
            for ny, nx in ((y - 1, x), (y, x - 1), (y, x + 1), (y + 1, x)):
                if 0 <= ny < height and 0 <= nx < width and distance[ny, nx] == d - 1:
                    before.add((ny, nx))
                    if chosen is None and (y, x) == cells[-1]:
                        chosen = (ny, nx)
        assert chosen is not None  # a cell at distance d has a neighbour at d - 1
        count = max(count, min(len(before), 2))
        layer = before
        cells.append(chosen)
    return cells, count


@dataclasses.dataclass(frozen=True)
class Generator:
    """Mazes numbered 0, 1, … of a split; each is a pure function of (seed, split, number).

    The splits share no maze: each is dealt to training or evaluation by a hash of its content.

    Attributes:
      side: cells on a side.
      braid: share of the dead ends opened into loops.
      min_path: fewest steps of the shortest path from S to G.
      unique: whether mazes with several shortest paths are thrown away; if not, the label is the
        one that `shortest_path` prefers.
      seed: of the mazes.
    """

    side: int
    braid: float
    min_path: int
    unique: bool
    seed: int

    def maze(self, split: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a maze and of its answer, both (side²,) int32.

        Raises:
          ValueError: no maze of this side has so long a path, as far as many tries tell.
        """
        key = int(streams.stream_key("maze", *dataclasses.astuple(self), split))
        rng = np.random.Generator(np.random.Philox(key=[key, number]))
        for _ in range(MAX_TRIES):
            made = self._try(rng)
            if made is not None and _split_of(made[0]) == split:
                return made
        raise ValueError(
            f"{MAX_TRIES} mazes of task.side={self.side} had no path of task.min_path="
            f"{self.min_path} steps or more"
            + (" that is the only shortest one" if self.unique else "")
        )

    def _try(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray] | None:
        grid = carve(self.side, self.braid, rng)
        cells = np.argwhere(grid)
        start = tuple(cells[rng.integers(len(cells))])
        at = np.zeros_like(grid)
        at[start] = True
        distance = distances(grid[None], at[None])[0]
        far = np.argwhere(distance >= max(1, self.min_path))
        if not len(far):
            return None
        y, x = far[rng.integers(len(far))].tolist()
        path, count = shortest_path(distance, (y, x))
        if self.unique and count > 1:
            return None
        question = np.where(grid, OPEN, WALL).astype(np.int32)
        question[start], question[y, x] = START, GOAL
        answer = question.copy()
        for cell in path[1:-1]:
            answer[cell] = PATH
        return question.ravel(), answer.ravel()


def _split_of(tokens: np.ndarray) -> str:
    """The split that a maze belongs to: one in eight is for evaluation."""
    key = int(streams.stream_key(tokens.astype(np.uint8).tobytes().hex()))
    return "eval" if key % 8 == 0 else "train"


def text(tokens: np.ndarray) -> str:
    """Token ids (side²,) as the characters of the file format."""
    return "".join(SYMBOLS[t - 1] for t in tokens.tolist())


@dataclasses.dataclass(frozen=True)
class Maze:
    """Mazes, generated or from a folder.

    Attributes:
      path: "" generates; else a folder with train.csv and test.csv (the layout of Maze-Hard), whose
        mazes then decide on the side, and the next four options do not apply.
      side: cells on a side.
      braid: share of dead ends opened into loops; 0 leaves exactly one path between two cells.
      unique: throw away mazes with several shortest paths.
      train_puzzles: size of the training set; 0 means that every maze is new (files: all).
      eval_puzzles: size of the evaluation set (files: all).
      min_path: leaves out mazes whose shortest path has fewer steps.
      augment: eight-fold symmetry (rotations, reflections) of training mazes. Off by default: the
        paper finds that it harms.
      on_error: "stop" at bad rows of a file or "skip" them.
      seed: of the order and of the generated training mazes; evaluation mazes do not depend on it.
    """

    headline: ClassVar[tuple[str, ...]] = (
        "puzzle_accuracy",
        "cell_accuracy",
        "valid_solution",
    )

    path: str = ""
    side: int = 10
    braid: float = 0.3
    unique: bool = True
    train_puzzles: int = 0
    eval_puzzles: int = 1000
    min_path: int = 0
    augment: bool = False
    on_error: str = "stop"
    seed: int = 0

    def __post_init__(self) -> None:
        puzzle_files.check_on_error(self.on_error)
        for name, least in (
            ("side", 3), ("train_puzzles", 0), ("eval_puzzles", 1), ("min_path", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"task.{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.braid <= 1:
            raise ValueError(f"task.braid must be between 0 and 1, got {self.braid}")
        if not self.path:
            self._generator(0).maze("eval", 0)  # fails where min_path is out of reach
        elif self.train_puzzles > len(self._files["train"][0]):
            raise ValueError(
                f"task.train_puzzles={self.train_puzzles}, but only "
                f"{len(self._files['train'][0])} mazes are there for training"
            )

    @property
    def length(self) -> int:
        """Cells of a maze."""
        return self._files["train"][0].shape[1] if self.path else self.side**2

    @property
    def vocab_size(self) -> int:
        """Padding and the five characters."""
        return len(SYMBOLS) + 1

    @property
    def title(self) -> str:
        """For tables and figures."""
        side = puzzle_files.square_side(self.length)
        return f"mazes of {side}×{side}"

    @property
    def eval_size(self) -> int:
        """Number of evaluation mazes."""
        return len(self._files["eval"][0]) if self.path else self.eval_puzzles

    def identity(self, split: str) -> dict[str, object]:
        """What names the data of `split` exactly; written into result.json."""
        train = split == "train"
        identity: dict[str, object] = {"task": "maze", "split": split, "min_path": self.min_path}
        if self.path:
            name = "train" if train else "eval"
            size = self.train_puzzles if train and self.train_puzzles else len(self._files[name][0])
            identity |= {"size": size, **self._tables[name].identity()}
        else:
            size = self.train_puzzles if train else self.eval_puzzles
            generator = self._generator(self.seed if train else 0)
            identity |= {"size": size or "endless", "generator": dataclasses.asdict(generator)}
        if train:
            identity |= {"augmentation": "dihedral" if self.augment else "none", "seed": self.seed}
        return identity

    def train_batch(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The training batch of optimiser step `step` (0-based): `tokens`, `labels` (B, side²)."""
        position = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
        size = self.train_puzzles or (len(self._files["train"][0]) if self.path else 0)
        index = streams.epochs(self.seed, size, position)[1] if size else position
        if self.path:
            rows = self._train_rows[index]
            tokens, labels = (values[rows] for values in self._files["train"])
        else:
            # A finite set is made once; an endless one is not worth keeping.
            make = self._kept if size else self._generator(self.seed).maze
            tokens, labels = _stack([make("train", int(i)) for i in index])
        if self.augment:
            which = streams.draws(streams.stream_key(self.seed, "dihedral"), position, 1)[:, 0]
            pairs = np.stack([tokens, labels], axis=1)
            turned = [_turned(p, int(w % np.uint64(8))) for p, w in zip(pairs, which)]
            tokens, labels = np.stack(turned).swapaxes(0, 1)
        return {"tokens": tokens.astype(np.int32), "labels": labels.astype(np.int32)}

    def eval_batch(self, length: int, start: int, count: int) -> dict[str, np.ndarray]:
        """Evaluation mazes `start` .. `start + count - 1`; `length` must be that of the maze."""
        if length != self.length:
            raise ValueError(f"the mazes have {self.length} cells, not {length}")
        tokens, labels = (values[start : start + count] for values in self._eval_set)
        return {"tokens": tokens.astype(np.int32), "labels": labels.astype(np.int32)}

    def score(self, outcome: Mapping[str, np.ndarray]) -> dict[str, object]:
        """What the answers to the first N evaluation mazes are worth.

        Args:
          outcome: `predictions` (N, side²) token ids, `steps` (N,).

        Returns:
          `puzzle_accuracy` (share of mazes right in every cell), `cell_accuracy` (share of cells),
          `valid_solution` (share that mark a shortest path, whichever), and the shares
          `by_path_length`.
        """
        predictions, steps = outcome["predictions"], outcome["steps"]
        tokens, labels = (values[: len(predictions)] for values in self._eval_set)
        right = predictions == labels
        metrics = {
            "puzzle_accuracy": right.all(axis=1),
            "valid_solution": valid(tokens, predictions),
        }
        side = puzzle_files.square_side(self.length)
        edges = range(0, self.length, max(2, side // 2))
        lengths, effort = path_lengths(tokens), puzzle_files.effort(outcome)
        return {
            **{name: float(value.mean()) for name, value in metrics.items()},
            "cell_accuracy": float(right.mean()),
            "by_path_length": puzzle_files.buckets(lengths, edges, metrics, steps, effort),
        }

    def _generator(self, seed: int) -> Generator:
        return Generator(self.side, self.braid, self.min_path, self.unique, seed)

    # frozen=True forbids assignment, but not these: they write to the instance's dictionary.
    @functools.cached_property
    def _kept(self) -> functools._lru_cache_wrapper[tuple[np.ndarray, np.ndarray]]:
        return functools.lru_cache(maxsize=None)(self._generator(self.seed).maze)

    @functools.cached_property
    def _eval_set(self) -> tuple[np.ndarray, np.ndarray]:
        if self.path:
            return self._files["eval"]
        generator = self._generator(0)
        return _stack([generator.maze("eval", i) for i in range(self.eval_puzzles)])

    @functools.cached_property
    def _tables(self) -> dict[str, Puzzles]:
        folder = Path(self.path)
        files = {"train": folder / "train.csv", "eval": folder / "test.csv"}
        for file in files.values():
            if not file.is_file():
                raise ValueError(
                    f"{file} does not exist; task.path must be a folder with train.csv and "
                    "test.csv, or empty to generate mazes"
                )
        return {split: read(file, self.on_error) for split, file in files.items()}

    @functools.cached_property
    def _files(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Token ids of questions and answers that are long enough, by split."""
        found = {}
        for split, table in self._tables.items():
            tokens, labels = (_tokens(values) for values in (table.question, table.answer))
            long = path_lengths(tokens) >= self.min_path
            if not long.any():
                raise ValueError(
                    f"no maze in {table.name} has a path of task.min_path={self.min_path} steps"
                )
            found[split] = (tokens[long], labels[long])
        widths = [values[0].shape[1] for values in found.values()]
        if widths[0] != widths[1]:
            raise ValueError(f"train.csv and test.csv in {self.path} have mazes of {widths} cells")
        return found

    @functools.cached_property
    def _train_rows(self) -> np.ndarray:
        size = len(self._files["train"][0])
        key = streams.stream_key("maze", "train", self.seed)
        order = streams.permutations(streams.draws(key, np.arange(size), 1)[:, 0])
        return np.sort(order[: self.train_puzzles or size])


def _stack(mazes: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([m[0] for m in mazes]), np.stack([m[1] for m in mazes])


def _turned(values: np.ndarray, which: int) -> np.ndarray:
    """Mazes (K, side²) under one of the eight symmetries of the square."""
    grids = np.rot90(_grids(values), which % 4, axes=(1, 2))
    return (grids.swapaxes(1, 2) if which >= 4 else grids).reshape(values.shape)


def _tokens(characters: np.ndarray) -> np.ndarray:
    """Character codes to token ids; 0 for a character that mazes do not have."""
    table = np.zeros(256, np.int32)
    table[puzzle_files.codes(SYMBOLS)] = np.arange(1, len(SYMBOLS) + 1)
    return table[characters]


def read(path: Path, on_error: str) -> Puzzles:
    """Reads and checks a file of mazes.

    Raises:
      ValueError: see `puzzle_files.read`.
    """
    return puzzle_files.read(path, _check_length, _check, on_error)


def _check_length(length: int) -> str:
    if puzzle_files.square_side(length):
        return ""
    return f"grids have {length} characters, which is not a square of whole rows"


def _check(question: np.ndarray, answer: np.ndarray) -> dict[str, np.ndarray | Odd]:
    tokens, labels = _tokens(question), _tokens(answer)
    odd_question = Odd(question, (tokens == 0) | (tokens == PATH))
    odd_answer = Odd(answer, labels == 0)
    ends = ((tokens == START).sum(axis=1) == 1) & ((tokens == GOAL).sum(axis=1) == 1)
    sound = ends & ~(odd_question.bad | odd_answer.bad).any(axis=1)
    unreachable, wrong = np.zeros_like(ends), np.zeros_like(ends)
    unreachable[sound] = path_lengths(tokens[sound]) < 0
    wrong[sound] = ~valid(tokens[sound], labels[sound])
    return {
        "question has a character other than '#', space, S and G": odd_question,
        "answer has a character other than '#', space, S, G and o": odd_answer,
        "question does not have exactly one S and one G": ~ends,
        "answer contradicts question": ((labels != tokens) & (labels != PATH)).any(axis=1)
        | ((labels == PATH) & (tokens != OPEN)).any(axis=1),
        "G cannot be reached from S": unreachable,
        "answer is not a shortest path": wrong,
    }
