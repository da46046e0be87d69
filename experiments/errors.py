"""Errors that are the user's to fix: shown as one line, without a traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the config, the command line or the workdir."""


def unknown(kind: str, name: object, valid: Iterable[object]) -> UserError:
    """An error that names the nearest valid name, or lists all when none is near."""
    names = [str(v) for v in valid]
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if near:
        return UserError(f"unknown {kind} {str(name)!r}; did you mean {near[0]!r}?")
    return UserError(f"unknown {kind} {str(name)!r}; valid: {', '.join(names) or '(none)'}")
