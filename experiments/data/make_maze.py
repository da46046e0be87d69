"""Writes generated mazes as train.csv and test.csv in the Maze-Hard format.

    python -m experiments.data.make_maze --out=FOLDER [--side=30] [--train=1000] [--test=1000]
        [--min_path=111] [--braid=0.3] [--several_paths] [--seed=0]

rating = steps of the shortest path. Train with `--config.task.path=FOLDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments import cli
from experiments.errors import UserError
from experiments.tasks import maze, puzzle_files


def run(argv: Sequence[str]) -> int:
    """Writes both files.

    Raises:
      UserError: a mistake in the command line, or no maze with so long a path.
    """
    parser = cli.Parser("data.make_maze", __doc__)
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (("side", 30), ("train", 1000), ("test", 1000), ("min_path", 111)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--braid", type=float, default=0.3)
    parser.add_argument("--several_paths", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse(argv)
    cli.check_least(args, side=3, train=1, test=1, min_path=0, seed=0)
    if not 0 <= args.braid <= 1:
        raise UserError(f"--braid={args.braid}, allowed: between 0 and 1")
    generator = maze.Generator(
        args.side, args.braid, args.min_path, not args.several_paths, args.seed
    )
    _made(generator, "eval", 0)  # A path that is out of reach is told before anything is written.
    args.out.mkdir(parents=True, exist_ok=True)
    for file, split, count in (("train.csv", "train", args.train), ("test.csv", "eval", args.test)):
        rows = []
        for number in range(count):
            question, answer = _made(generator, split, number)
            steps = int((answer == maze.PATH).sum()) + 1
            rows.append(("make_maze", maze.text(question), maze.text(answer), steps))
        puzzle_files.write(args.out / file, rows)
        print(f"{count} mazes in {args.out / file}")
    return 0


def _made(generator: maze.Generator, split: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """A maze and its answer, or a UserError in terms of this program's flags."""
    try:
        return generator.maze(split, number)
    except ValueError as error:
        raise UserError(
            f"{str(error).replace('task.', '--')}; try a smaller --min_path or a larger --side"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return cli.exit_code(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
