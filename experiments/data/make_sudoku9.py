"""Makes sudoku9.csv.gz with Debian's `qqwing` (apt-get install qqwing): 9×9, one solution each.

    python -m experiments.data.make_sudoku9 [--out=FILE] [--per_difficulty=1500] [--seed=0]

It runs, for each difficulty D of simple, easy, intermediate, expert,

    qqwing --generate 1500 --difficulty D --csv --solution --stats

and then gives every second puzzle some cells of its solution for free, so that the number of empty
cells goes from about 25 to 59 (a qqwing puzzle itself has 50 or more), and rates these again with
`qqwing --solve --csv --stats`. rating = qqwing's number of guesses; where several cells are equally
good to guess, qqwing picks at random, so the rating of a hard puzzle may differ between runs.
qqwing takes no seed (it uses the time): the shipped file is the record; --seed is for the rest.
source = qqwing-D, with "+N" for N free cells.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments import cli
from experiments.errors import UserError
from experiments.tasks import puzzle_files

DIFFICULTIES = ("simple", "easy", "intermediate", "expert")
FEWEST_EMPTIES = 25


def qqwing(*options: str, puzzles: str = "") -> list[dict[str, str]]:
    """Rows of qqwing's CSV output.

    Raises:
      UserError: it is not installed, or fails.
    """
    command = ["qqwing", *options, "--csv", "--stats"]
    try:
        done = subprocess.run(command, input=puzzles, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise UserError(
            "the program qqwing is not installed; it is Debian's package qqwing: apt-get install "
            "qqwing"
        ) from error
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())
        raise UserError(f"{' '.join(command)} failed: {said}") from error
    return list(csv.DictReader(io.StringIO(done.stdout)))


def thinned(question: str, answer: str, rng: np.random.Generator) -> str:
    """The puzzle with a random number of its blanks filled in, `FEWEST_EMPTIES` left at least."""
    blanks = [i for i, c in enumerate(question) if c == "."]
    left = int(rng.integers(FEWEST_EMPTIES, len(blanks)))
    free = set(rng.permutation(blanks)[left:].tolist())
    return "".join(answer[i] if i in free else c for i, c in enumerate(question))


def puzzles(per_difficulty: int, seed: int) -> list[tuple[str, str, str, int]]:
    """All rows of the file, shuffled."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 9]))
    rows = []
    for difficulty in DIFFICULTIES:
        made = qqwing(
            "--generate", str(per_difficulty), "--difficulty", difficulty, "--solution"
        )  # fmt: skip
        questions = [
            thinned(row["Puzzle"], row["Solution"], rng) if i % 2 else row["Puzzle"]
            for i, row in enumerate(made)
        ]
        rated = qqwing("--solve", "--nosolution", puzzles="\n".join(questions))
        for question, row, stats in zip(questions, made, rated, strict=True):
            free = row["Puzzle"].count(".") - question.count(".")
            source = f"qqwing-{difficulty}" + (f"+{free}" if free else "")
            guesses = stats["Guesses"] if free else row["Guesses"]
            rows.append((source, question, row["Solution"], int(guesses)))
    return [rows[i] for i in rng.permutation(len(rows))]


def run(argv: Sequence[str]) -> int:
    """Writes the file.

    Raises:
      UserError: a mistake in the command line, or no qqwing.
    """
    parser = cli.Parser("data.make_sudoku9", __doc__)
    parser.add_argument("--out", type=Path, default=puzzle_files.DATA_DIR / "sudoku9.csv.gz")
    parser.add_argument("--per_difficulty", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse(argv)
    cli.check_least(args, per_difficulty=1, seed=0)
    rows = puzzles(args.per_difficulty, args.seed)
    puzzle_files.write(args.out, rows)
    print(f"{len(rows)} puzzles in {args.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return cli.exit_code(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
