"""Writes generated mazes as train.csv and test.csv in the Maze-Hard format.

    python -m experiments.data.make_maze --out=FOLDER [--side=30] [--train=1000] [--test=1000]
        [--min_path=111] [--braid=0.3] [--several_paths] [--seed=0]

rating = steps of the shortest path. Train with `--config.task.path=FOLDER`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.tasks import maze, puzzle_files


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (("side", 30), ("train", 1000), ("test", 1000), ("min_path", 111)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--braid", type=float, default=0.3)
    parser.add_argument("--several_paths", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator = maze.Generator(
        args.side, args.braid, args.min_path, not args.several_paths, args.seed
    )
    args.out.mkdir(parents=True, exist_ok=True)
    for file, split, count in (("train.csv", "train", args.train), ("test.csv", "eval", args.test)):
        rows = []
        for number in range(count):
            question, answer = generator.maze(split, number)
            steps = int((answer == maze.PATH).sum()) + 1
            rows.append(("make_maze", maze.text(question), maze.text(answer), steps))
        puzzle_files.write(args.out / file, rows)
        print(f"{count} mazes in {args.out / file}")


if __name__ == "__main__":
    main()
