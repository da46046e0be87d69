"""Command line of the experiments: parses flags, starts a run, turns mistakes into one line.

    python -m experiments.run --config=FILE[:VARIANT] --workdir=DIR [--config.a.b=VALUE]
        [--mode=train|eval]

--mode=eval evaluates the newest checkpoint again. Overrides of model.solver.eval (more compute at
test time: max_steps, decay, patience), of eval and of task (other data) leave the run as it is:
their results go to a directory of their own in WORKDIR/evaluations. What may differ from the run,
and what may not, stands in experiments/config.py.

Exit codes: 0 done, 1 the training diverged, 2 a mistake in the command, config or workdir,
128 + n stopped by signal n with a checkpoint saved.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from experiments import cli
from experiments import config as configs
from experiments.errors import UserError, unknown
from experiments.memory import keep_freed_memory

USAGE = (
    "usage: python -m experiments.run --config=FILE[:VARIANT] --workdir=DIR "
    "[--config.a.b=VALUE ...] [--mode=train|eval]"
)
MODES = ("train", "eval")


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], str, str]:
    """Flags to (complete config, workdir, mode).

    Args:
      argv: the command line, program name first.

    Raises:
      UserError: unknown flags, config keys or variants; values of the wrong type.
    """
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "FILE.py[:VARIANT]", flag_values=values)
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    flags.DEFINE_string("mode", "train", "train or eval", flag_values=values)
    values.set_gnu_getopt(True)
    try:
        rest = values(list(argv), known_only=True)[1:]
        spec, directory, mode = (str(values[n].value or "") for n in ("config", "workdir", "mode"))
        for name, value in (("config", spec), ("workdir", directory)):
            if not value:
                raise UserError(f"--{name} is missing; {USAGE}")
        if mode not in MODES:
            raise unknown("--mode", mode, MODES)
        overrides = read_overrides(rest)
        config = configs.load(spec, overrides)
        configs.check_overrides(config, overrides)
        return apply_overrides(config, rest), directory, mode
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from error


def read_overrides(rest: Sequence[str]) -> dict[str, str]:
    """["--config.a.b=1", "--config.c", "2"] -> {"a.b": "1", "c": "2"}."""
    found: dict[str, str] = {}
    words = iter(rest)
    for word in words:
        flag, has_value, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            raise UserError(f"unexpected argument {word!r}; {USAGE}")
        if not flag.startswith("config."):
            raise unknown("flag", f"--{flag}", ("--config", "--workdir", "--mode"))
        if not has_value:
            value = next(words, "")
            if not value or value.startswith("--"):
                raise UserError(f"{word} needs a value, as in {word}=VALUE")
        found[flag.removeprefix("config.")] = value
    return found


def apply_overrides(config: dict[str, Any], rest: Sequence[str]) -> dict[str, Any]:
    """Applies the overrides, each parsed as the type of the value it replaces.

    Raises:
      UserError: a value that is not of that type.
    """
    argv = ["run", *rest]
    values = flags.FlagValues()
    try:
        holder = config_flags.DEFINE_config_dict(
            "config", ConfigDict(config), flag_values=values, sys_argv=argv
        )
        values(argv)
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from error
    return holder.value.to_dict()


def start(argv: Sequence[str], started: float) -> dict[str, Any]:
    """Parses, checks everything, runs; returns the content of result.json.

    Args:
      argv: the command line, program name first.
      started: `time.monotonic()` when the program began.

    Raises:
      UserError: a mistake that the user can fix; nothing has been written over.
    """
    config, directory, mode = parse(argv)
    task = configs.validate(config)

    # Imported late: a mistake in the flags is told without waiting for these.
    from experiments.context import Clock, Run
    from experiments.progress import Progress
    from experiments.result import evaluate_checkpoint
    from experiments.train import train
    from experiments.workdir import Workdir

    with Workdir(directory, config, mode) as workdir, Progress() as progress:
        for key, (old, new) in workdir.changed.items():
            progress.say(f"{key} is now {new}, was {old}")
        run = Run(config, task, Path(directory), progress, Clock(started))
        return train(run) if mode == "train" else evaluate_checkpoint(run, workdir.changed)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    started = time.monotonic()
    from experiments.train import Diverged, Interrupted

    argv = list(sys.argv if argv is None else argv)
    logging.set_verbosity(logging.FATAL)  # Orbax reports what we handle and report ourselves.
    if any(word in ("--help", "-h", "-help") for word in argv):
        print(f"{__doc__}\n{_known_configs()}")
        return 0
    cli.enable_compilation_cache()
    keep_freed_memory()  # XLA:CPU would fault in every large result anew.
    try:
        start(argv, started)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # A full disk, a file that may not be written.
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Diverged as error:
        print(
            f"error: {error}; stopped, the last good checkpoint is kept. Try a smaller "
            "optimizer.learning_rate or optimizer.clip_norm=1",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Interrupted as error:
        command = shlex.join(["python", "-m", "experiments.run", *argv[1:]])
        print(f"{error}; to continue: {command}", file=sys.stderr)
        return 128 + error.signum
    return 0


def _known_configs() -> str:
    names = sorted(p.name for p in configs.CONFIG_DIR.glob("[a-z]*.py"))
    return "configs: " + ", ".join(f"experiments/configs/{name}" for name in names)


if __name__ == "__main__":
    sys.exit(main())
