"""Solves puzzles from a text file with a trained model, prints them, and draws the answer forming.

    python -m experiments.solve --workdir=DIR --input=puzzles.txt [--on_error=skip]
        [--max_steps=N] [--picture=FILE.png] [--animation=FILE.gif]

Prints each puzzle with its answer, the solver's steps, whether it converged and whether the answer
is valid by the puzzle's own rules. --picture draws the first puzzle and its residual over the
iterations; --animation its answer after each of them. `experiments.puzzles` says how puzzles are
written. Every solve starts from one and the same z0, while evaluation draws one for each example,
so that steps can differ from those of an evaluation. Exit codes: 0 every answer is valid, 1 some
are not, 2 a mistake in the command or input.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fpr
from experiments import budget, cli, grids, puzzles
from experiments.errors import UserError, unknown
from experiments.evaluate import pad_batch
from experiments.puzzles import Puzzle
from experiments.tasks import maze, puzzle_files, sudoku
from fpr.models import base
from fpr.solvers import Damped

PyTree = Any
BATCH = 64


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model made of one puzzle.

    Attributes:
      tokens: (T,) its answer as token ids.
      steps: applications of f.
      residual: when it halted.
      converged: the residual fell below the tolerance.
      valid: the answer solves the puzzle by its own rules.
    """

    tokens: np.ndarray
    steps: int
    residual: float
    converged: bool
    valid: bool


def kind_of(workdir: Path) -> tuple[str, int]:
    """(kind of puzzle, cells of a grid) of a run.

    Raises:
      UserError: the run is no run, or one of another task.
    """
    try:
        config = json.loads((workdir / "config.json").read_text())
        name, length = config["task"]["name"], int(config["model"]["seq_len"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{workdir} is not the workdir of a run ({error})") from error
    if name not in puzzles.KINDS:
        allowed = " and ".join(puzzles.KINDS)
        raise UserError(f"{workdir} was trained on {name!r}; solve reads {allowed}")
    return name, length


def solve(
    model: Mapping[str, Any], params: PyTree, kind: str, todo: Sequence[Puzzle], solver: Damped
) -> list[Answer]:
    """Solves puzzles of one size, in batches of at most `BATCH`."""
    size = min(BATCH, len(todo))
    apply = jax.jit(functools.partial(fpr.apply, model, solver=solver))
    found = []
    for start in range(0, len(todo), size):
        tokens = np.stack([p.tokens for p in todo[start : start + size]])
        count = len(tokens)
        out = jax.tree.map(np.asarray, apply(params, pad_batch({"tokens": tokens}, size)))
        answers = out.logits[:count].argmax(-1).astype(np.int32)
        right = valid(kind, tokens, answers)
        found += [
            Answer(
                answers[i], int(out.steps[i]), float(out.residual[i]), bool(out.converged[i]), ok
            )
            for i, ok in enumerate(right.tolist())
        ]
    return found


def valid(kind: str, tokens: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """(N,) bool: answers (N, T) solve the puzzles (N, T) by their own rules; token ids."""
    if kind == "maze":
        return maze.valid(tokens, answers)
    blank = tokens == 1
    return ((answers == tokens) | blank).all(axis=1) & sudoku.valid(answers.astype(np.int64) - 1)


def text(kind: str, tokens: np.ndarray) -> list[str]:
    """A grid as rows of characters; "?" for a token that has none."""
    symbols = "?" + maze.SYMBOLS if kind == "maze" else "?." + sudoku.DIGITS
    side = puzzle_files.square_side(len(tokens))
    cells = [symbols[t] if t < len(symbols) else "?" for t in tokens.tolist()]
    gap = "" if kind == "maze" else " "
    return [gap.join(cells[i : i + side]) for i in range(0, len(cells), side)]


def show(kind: str, number: int, puzzle: Puzzle, answer: Answer) -> str:
    """A puzzle beside its answer, and how the solve went."""
    pairs = zip(text(kind, puzzle.tokens), text(kind, answer.tokens))
    rows = [f"  {question}   {solved}" for question, solved in pairs]
    converged = "converged" if answer.converged else "did NOT converge"
    verdict = "valid" if answer.valid else "NOT a valid solution"
    head = (
        f"puzzle {number} (line {puzzle.line}): {answer.steps} steps, residual "
        f"{answer.residual:.2g}, {converged}, {verdict}"
    )
    return "\n".join([head, *rows])


def follow(
    model: Mapping[str, Any], params: PyTree, puzzle: Puzzle, steps: int, solver: Damped
) -> tuple[np.ndarray, np.ndarray]:
    """The answer (N, T) and the residual (N,) after each of N = `steps` iterations."""
    endless = dataclasses.replace(solver, halting="never")
    batch = {"tokens": puzzle.tokens[None], "labels": puzzle.tokens[None]}
    run = functools.partial(budget.follow, model, solver=endless, keep_predictions=True)
    at = np.arange(1, steps + 1, dtype=np.int32)
    course = jax.jit(run)(params, batch, None, at)
    assert course.predictions is not None  # keep_predictions asks for them
    return np.asarray(course.predictions)[:, 0], np.asarray(course.residual)[:, 0]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line without the program's name.

    Raises:
      UserError: a mistake in it.
    """
    parser = cli.Parser("solve", __doc__)
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--input", required=True, type=Path)
    parser.add_argument("--on_error", default="stop")
    parser.add_argument("--max_steps", type=int, default=0, help="cap on the solver's steps")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--animation", type=Path)
    flags = parser.parse(argv)
    if flags.on_error not in puzzle_files.ON_ERROR:
        raise unknown("--on_error", flags.on_error, puzzle_files.ON_ERROR)
    cli.check_least(flags, max_steps=0)
    if flags.max_steps >= 2**31:
        raise UserError(f"--max_steps must be below 2**31, got {flags.max_steps}")
    for name, suffix in (("picture", ".png"), ("animation", ".gif")):
        path = getattr(flags, name)
        if path and path.suffix.lower() != suffix:
            raise UserError(f"--{name} must end in {suffix}, got {path}")
    return flags


def run(flags: argparse.Namespace) -> bool:
    """Does what the flags say; returns whether every answer is valid.

    Raises:
      UserError: a workdir or an input that cannot be used, malformed puzzles among them.
    """
    kind, length = kind_of(flags.workdir)
    todo, bad = puzzles.read(flags.input, kind, length)
    for problem in bad:
        print(f"{'skipped' if flags.on_error == 'skip' else 'error'}: {problem}", file=sys.stderr)
    if bad and flags.on_error == "stop":
        total = len(bad) + len(todo)
        raise UserError(
            f"{len(bad)} of {total} puzzles are malformed; --on_error=skip leaves them out"
        )
    if not todo:
        raise UserError(f"{flags.input} holds no puzzle that can be used")
    try:
        model, params = fpr.load(flags.workdir)
        solver = base.make_solver(model["solver"], train=False)
    except ValueError as error:
        raise UserError(str(error)) from error
    if flags.max_steps:
        solver = dataclasses.replace(solver, max_steps=flags.max_steps)
    answers = solve(model, params, kind, todo, solver)
    for i, (puzzle, answer) in enumerate(zip(todo, answers), 1):
        print(show(kind, i, puzzle, answer) + "\n")
    solved = sum(answer.valid for answer in answers)
    settled = sum(answer.converged for answer in answers)
    print(f"{solved} of {len(todo)} answers are valid, {settled} solves converged")
    if flags.picture or flags.animation:
        steps = max(2, answers[0].steps)
        course, residual = follow(model, params, todo[0], steps, solver)
        question = text(kind, todo[0].tokens)
        if flags.picture:
            shown = text(kind, answers[0].tokens)
            grids.draw_solution(kind, question, shown, residual, solver.tolerance, flags.picture)
            print(f"picture of puzzle 1: {flags.picture}")
        if flags.animation:
            frames = [text(kind, tokens) for tokens in course]
            grids.animate(kind, question, frames, residual, solver.tolerance, flags.animation)
            print(f"animation of puzzle 1: {flags.animation}")
    return solved == len(todo)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    cli.enable_compilation_cache()
    return cli.exit_code(lambda: 0 if run(parse(sys.argv[1:] if argv is None else argv)) else 1)


if __name__ == "__main__":
    sys.exit(main())
