"""A run's directory: config.json, metrics.jsonl, weights.npz, result.json, and who may use it.

`experiments.origin` keeps data.json there, `experiments.checkpoint` the checkpoints.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from experiments import config as configs
from experiments.errors import UserError
from fpr.registry import flatten

IMPORTED = "imported.json"  # where weights came from that `experiments.import_torch` has written
OUR_FILES = ("data.json", "metrics.jsonl", "checkpoints", "weights.npz", "result.json")


class Workdir:
    """Opens (and makes) the directory of a run; only one process can have it open.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any], mode: str):
        """Checks that `config` may use the directory, and writes config.json in "train" mode.

        Args:
          path: the directory.
          config: a complete, valid experiment config.
          mode: "train" or "eval".

        Raises:
          UserError: it cannot be written, is in use, holds a run of another config, a finished run
            whose numbers `config` would replace, imported weights that training would replace, or
            files that are not a run's, or has nothing to evaluate.
        """
        self.path = Path(path)
        self.changed: dict[str, tuple[Any, Any]] = {}
        config_file = self.path / "config.json"
        if mode == "eval" and not config_file.exists():
            raise UserError(f"nothing to evaluate: {self.path} holds no run (no config.json)")
        self._lock = self._open()
        try:
            if config_file.exists():
                self.changed = _compare(config_file, config, mode)
            else:
                _refuse_foreign(self.path)
            if mode == "train":
                if (self.path / IMPORTED).exists():
                    raise UserError(
                        f"workdir {self.path} holds imported weights, which training "
                        "would replace; use another --workdir, or --mode=eval"
                    )
                write_json(config_file, config)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets another process use the directory."""
        self._lock.close()

    def _open(self) -> IO[str]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held until close
        except OSError as error:
            raise UserError(f"cannot write to workdir {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise UserError(f"workdir {self.path} is in use by another run") from error
        except OSError:
            pass  # A file system without locks: go on without.
        return lock


def _compare(file: Path, config: Mapping[str, Any], mode: str) -> dict[str, tuple[Any, Any]]:
    """Differences that are allowed; raises UserError for the others."""
    try:
        old = json.loads(file.read_text())
        if not isinstance(old, dict) or "model" not in old:
            raise ValueError("no model section")
        old = configs.complete(old)  # Keys that are newer than the run have their defaults.
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} is not the config of a run ({error}); use another workdir"
        ) from error
    changed = configs.differences(old, config)
    refused = {k: v for k, v in changed.items() if not configs.is_free(k, config, mode)}
    if refused:
        shown = ", ".join(f"{k} (there {old!r}, here {new!r})" for k, (old, new) in refused.items())
        verb = "continue" if mode == "train" else "evaluate"
        raise UserError(
            f"cannot {verb} the run in {file.parent}: its config differs in {shown}; "
            "use another --workdir or the same values"
        )
    measured = [key for key in changed if configs.is_measured(key, config)]
    if mode == "train" and measured and _finished(file.parent, config["train"]["steps"]):
        raise UserError(
            f"the run in {file.parent} is finished, and other values of {', '.join(measured)} "
            "would replace its result; evaluate it with them by --mode=eval"
        )
    return changed


def _finished(path: Path, steps: int) -> bool:
    """Whether result.json has the numbers of a run that has made so many steps."""
    try:
        return json.loads((path / "result.json").read_text())["step"] >= steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _refuse_foreign(path: Path) -> None:
    found = [name for name in OUR_FILES if (path / name).exists()]
    if found:
        raise UserError(
            f"workdir {path} holds {', '.join(found)} but no config.json, so it is not a run that "
            "can be continued; use another workdir"
        )


def plain(value: Any) -> Any:
    """JSON-ready copy: arrays become lists; NaN and inf, which JSON lacks, become None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path beside `path`, then renames it into place."""
    temporary = path.with_name(f".tmp-{path.name}")
    write(temporary)
    os.replace(temporary, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON file, atomically."""
    text = json.dumps(plain(content), indent=2) + "\n"
    write_atomically(path, lambda p: p.write_text(text))


def write_weights(path: Path, params: Mapping[str, Any]) -> None:
    """Writes the .npz that `fpr.load` reads: params with their names joined by "/"."""
    write_arrays(path, flatten(params))


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes an .npz file, atomically."""
    plain_arrays: dict[str, Any] = {n: np.asarray(value) for n, value in arrays.items()}
    write_atomically(path, lambda p: np.savez(p, **plain_arrays))


class MetricsLog:
    """Appends records to metrics.jsonl and TensorBoard; drops what is later than the start."""

    def __init__(self, workdir: Path, start: int):
        """`start`: optimiser steps already done; records of later steps are removed."""
        from tensorboardX import SummaryWriter  # slow to import; evaluation does not need it

        self.path = workdir / "metrics.jsonl"
        self.records = [r for r in read_metrics(self.path) if r["step"] <= start]
        text = "".join(json.dumps(r) + "\n" for r in self.records)
        write_atomically(self.path, lambda p: p.write_text(text))
        self._file = open(self.path, "a")  # noqa: SIM115 - open for the whole run
        self._events = SummaryWriter(
            str(workdir / "tensorboard"), purge_step=start + 1, filename_suffix=f".from{start}"
        )

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._events.close()

    def add(self, record: dict[str, Any]) -> None:
        """Adds one record; it has `step`, `split` and, for evaluations, `length`."""
        record = plain(record)
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        prefix = "/".join(str(record[k]) for k in ("split", "length") if k in record)
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "length"):
                self._events.add_scalar(f"{prefix}/{name}", value, record["step"])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl; a half-written last line is left out."""
    records = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return records
