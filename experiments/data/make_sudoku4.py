"""Makes sudoku4.csv.gz: every 4×4 Sudoku with one solution, once up to symmetry, shuffled.

    python -m experiments.data.make_sudoku4 [--out=FILE] [--seed=0]

The symmetries are relabelling the digits, permuting bands, stacks, rows and columns within them,
and transposing. No two puzzles in the file are the same puzzle in disguise, so a random split of it
holds puzzles out in earnest, augmentation or not. Each is shown in a random disguise.

rating = rounds of a solver that fills, in one round, every cell that only one digit fits and every
digit that fits only one cell of a row, column or box; 100 is added where that gets stuck.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments import cli
from experiments.tasks import puzzle_files, sudoku

STUCK = 100


def solutions() -> np.ndarray:
    """All 288 solved 4×4 grids, (288, 16), digits 1..4."""
    rows = np.array(list(itertools.permutations(range(1, 5))))
    pairs = rows[np.array(list(itertools.product(range(24), repeat=2)))]
    boxes = pairs.reshape(-1, 2, 2, 2).swapaxes(1, 2).reshape(-1, 2, 4)
    bands = pairs[(np.sort(boxes) == np.arange(1, 5)).all(axis=(1, 2))]
    both = np.array(list(itertools.product(range(len(bands)), repeat=2)))
    grids = bands[both].reshape(-1, 16)
    return grids[sudoku.valid(grids)]


def cell_symmetries() -> np.ndarray:
    """The 128 permutations of cells that keep rows, columns and boxes, (128, 16)."""
    swaps = np.array(list(itertools.permutations(range(2))))
    lines = []
    for bands, first, second in itertools.product(swaps, repeat=3):
        inner = (first, second)
        lines.append([2 * b + inner[b][i] for b in bands for i in range(2)])
    found = []
    for rows, columns in itertools.product(np.array(lines), repeat=2):
        cells = 4 * rows[:, None] + columns
        found += [cells.ravel(), cells.T.ravel()]
    return np.array(found)


def unique_puzzles(grid: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """Sets of givens (bit masks) that leave `grid` as the only solution, one of each orbit.

    A set of givens pins down the solution when it meets the cells in which any other solution
    differs. Two sets are the same puzzle when a symmetry of the solution maps one to the other.
    """
    bits = 1 << np.arange(16)
    differing = (grids != grid) @ bits
    givens = np.arange(1 << 16)
    unique = np.ones(1 << 16, bool)
    for other in differing[differing > 0]:
        unique &= (givens & other) > 0
    smallest = givens.copy()
    for cells in cell_symmetries():
        if (canonical_digits(grid[cells]) == canonical_digits(grid)).all():
            moved = np.zeros_like(givens)
            for to, origin in enumerate(cells):
                moved |= ((givens >> origin) & 1) << to
            smallest = np.minimum(smallest, moved)
    return givens[unique & (smallest == givens)]


def canonical_digits(grid: np.ndarray) -> np.ndarray:
    """The grid with digits renamed 1, 2, … in the order in which they appear."""
    _, first, inverse = np.unique(grid, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse] + 1


def rating(question: np.ndarray) -> int:
    """Rounds of filling all singles; see the module's text.

    Args:
      question: (16,) digits, 0 where blank.
    """
    grid = question.copy()
    units = sudoku.units(2)
    rounds = 0
    while (grid == 0).any():
        candidates = np.ones((16, 4), bool)
        candidates[grid > 0] = False
        for unit in units:
            used = grid[unit][grid[unit] > 0]
            candidates[np.ix_(unit, used - 1)] = False
        singles = candidates & (candidates.sum(axis=1, keepdims=True) == 1)
        for unit in units:
            singles[unit] |= candidates[unit] & (candidates[unit].sum(axis=0) == 1)
        if not singles.any():
            return STUCK + rounds
        cells, digits = np.nonzero(singles)
        grid[cells] = digits + 1
        rounds += 1
    return rounds


def classes(grids: np.ndarray) -> list[np.ndarray]:
    """One solved grid of each class under all symmetries (there are two)."""
    found: list[np.ndarray] = []
    seen: set[bytes] = set()
    for grid in grids:
        if canonical_digits(grid).tobytes() in seen:
            continue
        found.append(grid)
        seen |= {canonical_digits(grid[cells]).tobytes() for cells in cell_symmetries()}
    return found


def puzzles(seed: int) -> list[tuple[str, str, str, int]]:
    """All rows of the file, in the order of the file."""
    grids = solutions()
    rng = np.random.Generator(np.random.Philox(key=[seed, 4]))
    symmetries = cell_symmetries()
    rows = []
    for grid in classes(grids):
        for givens in unique_puzzles(grid, grids):
            question = np.where(givens >> np.arange(16) & 1, grid, 0)
            cells = symmetries[rng.integers(len(symmetries))]
            digits = np.concatenate([[0], rng.permutation(4) + 1])
            if (question == 0).any():
                shown, answer = digits[question[cells]], digits[grid[cells]]
                text = "".join(".1234"[d] for d in shown), "".join(map(str, answer))
                rows.append(("make_sudoku4", *text, rating(shown)))
    return [rows[i] for i in rng.permutation(len(rows))]


def run(argv: Sequence[str]) -> int:
    """Writes the file.

    Raises:
      UserError: a mistake in the command line.
    """
    parser = cli.Parser("data.make_sudoku4", __doc__)
    parser.add_argument("--out", type=Path, default=puzzle_files.DATA_DIR / "sudoku4.csv.gz")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse(argv)
    cli.check_least(args, seed=0)
    rows = puzzles(args.seed)
    puzzle_files.write(args.out, rows)
    print(f"{len(rows)} puzzles in {args.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return cli.exit_code(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
