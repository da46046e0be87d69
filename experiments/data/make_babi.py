"""Writes stories in bAbI's format, made up here: a stand-in where the real files are not at hand.

    python -m experiments.data.make_babi --out=FOLDER [--train=2000] [--test=200] [--seed=0]

Three of the twenty kinds: 1 where a person is, 2 where a thing is that people carry about, 6 the
first with answers yes and no. Train with `--config.task.path=FOLDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments import cli
from experiments.errors import UserError

PEOPLE = ("Ada", "Bo", "Cy", "Dee")
PLACES = ("harbour", "island", "lagoon", "lighthouse", "mill", "quarry")
THINGS = ("lamp", "rope", "kettle")
KINDS = (1, 2, 6)


class World:
    """Where everybody and everything is, and the lines told so far."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.lines: list[str] = []
        self.told: dict[str, tuple[str, int]] = {}  # person -> place, line that says so
        self.holder: dict[str, tuple[str, int]] = {}  # thing -> who took it, line
        self.dropped: dict[str, tuple[str, int, int]] = {}  # thing -> place, lines

    def choose(self, options: list[str] | tuple[str, ...]) -> str:
        """One of the options."""
        return options[int(self.rng.integers(len(options)))]

    def add(self, text: str) -> int:
        """Tells a line; returns its number."""
        self.lines.append(f"{len(self.lines) + 1} {text}")
        return len(self.lines)

    def ask(self, text: str, answer: str, *support: int) -> None:
        """Asks a question; `support` are the lines that it follows from."""
        self.add(f"{text}? \t{answer}\t{' '.join(map(str, support))}")

    def move(self) -> None:
        """Somebody goes somewhere."""
        person = self.choose(PEOPLE)
        place = self.choose([p for p in PLACES if p != self.told.get(person, ("", 0))[0]])
        how = self.choose(("walked", "sailed", "hurried"))
        self.told[person] = place, self.add(f"{person} {how} to the {place}.")

    def handle(self) -> None:
        """Somebody whose place is known takes a free thing or puts down what they hold."""
        if not self.told:
            self.move()
        person, thing = self.choose(list(self.told)), self.choose(THINGS)
        holder = self.holder.get(thing, ("", 0))[0]
        place, line = self.told[person]
        if holder == person:
            at = self.add(f"{person} put down the {thing}.")
            del self.holder[thing]
            self.dropped[thing] = place, at, line
        elif not holder and self.dropped.get(thing, (place, 0, 0))[0] == place:
            self.holder[thing] = person, self.add(f"{person} took the {thing}.")
            self.dropped.pop(thing, None)
        else:
            self.move()


def story(kind: int, rng: np.random.Generator) -> list[str]:
    """The lines of a story with five questions, the last line one of them.

    Args:
      kind: one of `KINDS`.
      rng: random numbers.
    """
    world = World(rng)
    while kind == 2 and not world.holder:
        world.handle()
    for _ in range(5):
        for _ in range(2):
            if kind == 2 and rng.random() < 0.5:
                world.handle()
            else:
                world.move()
        if kind == 2:
            thing = world.choose([*world.holder, *world.dropped])
            if thing in world.holder:
                person, taken = world.holder[thing]
                place, line = world.told[person]
                world.ask(f"Where is the {thing}", place, taken, line)
            else:
                place, *lines = world.dropped[thing]
                world.ask(f"Where is the {thing}", place, *lines)
            continue
        person = world.choose(list(world.told))
        place, line = world.told[person]
        if kind == 1:
            world.ask(f"Where is {person}", place, line)
            continue
        asked = place if rng.random() < 0.5 else world.choose(PLACES)
        world.ask(f"Is {person} in the {asked}", "yes" if asked == place else "no", line)
    return world.lines


def run(argv: Sequence[str]) -> int:
    """Writes qa1, qa2 and qa6 of every split.

    Raises:
      UserError: a mistake in the command line, or a folder that cannot be written.
    """
    parser = cli.Parser("data.make_babi", __doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=2000, help="stories of each kind")
    parser.add_argument("--test", type=int, default=200, help="also for validation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse(argv)
    cli.check_least(args, train=1, test=1, seed=0)
    try:
        write(args.out, args.train, args.test, args.seed)
    except OSError as error:
        raise UserError(f"--out={args.out} cannot be written: {error.strerror}") from error
    print(f"{args.train} + {args.test} + {args.test} stories of kinds 1, 2 and 6 in {args.out}")
    return 0


def write(out: Path, train: int, test: int, seed: int) -> None:
    """Writes the files of all splits into a folder, which is made where it is missing.

    Args:
      out: the folder.
      train: stories of each kind for training.
      test: for testing, and as many for validation.
      seed: of the stories.

    Raises:
      OSError: the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    for i, (split, count) in enumerate((("train", train), ("valid", test), ("test", test))):
        for kind in KINDS:
            rng = np.random.default_rng([seed, i, kind])
            lines = [line for _ in range(count) for line in story(kind, rng)]
            (out / f"qa{kind}_{split}.txt").write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return cli.exit_code(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
