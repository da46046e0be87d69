"""What the commands beside `run` share: a parser whose mistakes are one line, and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from experiments.errors import UserError, unknown


class Parser(argparse.ArgumentParser):
    """Parser of `python -m experiments.NAME`, whose help is the module's docstring."""

    def __init__(self, name: str, doc: str | None):
        super().__init__(
            prog=f"python -m experiments.{name}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags of a command line without the program's name.

        Raises:
          UserError: a mistake in it; an unknown flag is answered with the nearest one.
        """
        flags, rest = self.parse_known_args(list(argv))
        if rest:
            raise unknown("flag", rest[0].split("=")[0], (f"--{name}" for name in vars(flags)))
        return flags


def check_least(flags: argparse.Namespace, **least: int) -> None:
    """Raises UserError for a flag below the least value that is allowed."""
    for name, allowed in least.items():
        if getattr(flags, name) < allowed:
            raise UserError(f"--{name}={getattr(flags, name)}, allowed: at least {allowed}")


def exit_code(command: Callable[[], int]) -> int:
    """What `command` returns, or 2 and one line where it meets a user's mistake."""
    try:
        return command()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, outside of every workdir."""
    import jax

    # $JAX_COMPILATION_CACHE_DIR has set it already, where it is given.
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fpr" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(cache))
