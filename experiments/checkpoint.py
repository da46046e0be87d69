"""Checkpoints of a run with Orbax: asynchronous, the newest few kept, broken ones set aside."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from experiments.errors import UserError

PyTree = Any


class Checkpoints:
    """Checkpoints `workdir/checkpoints/<step>`, saved asynchronously, the newest `keep` kept.

    Use it as a context manager: leaving the block waits for the last save.
    """

    def __init__(self, workdir: Path, keep: int):
        self.directory = workdir.absolute() / "checkpoints"
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=True
        )
        # With the handler named, `item_metadata` works before anything was saved or restored.
        self._manager = ocp.CheckpointManager(
            self.directory, options=self._options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """Step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Returns when the last save is on disk."""
        self._manager.wait_until_finished()

    def save(self, step: int, state: PyTree) -> None:
        """Starts saving `state`; a step that is already there is left as it is."""
        if step not in self._manager.all_steps():
            # A copy: the next training step donates the state's buffers while this one writes.
            copy = jax.tree.map(jnp.copy, state)
            self._manager.save(step, args=ocp.args.StandardSave(copy))

    def restore(self, like: PyTree, say: Callable[[str], None]) -> tuple[int, PyTree] | None:
        """Restores the newest checkpoint that can be read.

        Newer ones that cannot be read are moved to `workdir/damaged`, and `say` is told. If none
        can be read, nothing is moved: training again from the start would lose the run's metrics.

        Args:
          like: pytree of `jax.ShapeDtypeStruct` with the structure of the state; it is placed on
            the first device, whatever machine wrote it.
          say: prints one line.

        Returns:
          (step, state), or None when there is no checkpoint.

        Raises:
          UserError: there are checkpoints, but none can be read.
        """
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), like)
        broken: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state = self._read(step, like)
            # A broken file can surface as almost any exception of Orbax, TensorStore or json.
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0][:200]
                broken[step] = f"{type(error).__name__}: {reason}"
                continue
            for bad, reason in broken.items():
                moved = self._set_aside(bad)
                say(f"checkpoint {bad} cannot be read ({reason}); moved it to {moved}")
            return step, state
        if broken:
            newest, reason = next(iter(broken.items()))
            raise UserError(
                f"none of the checkpoints in {self.directory} can be read (step {newest}: "
                f"{reason}); use another --workdir, or move that directory away to start over"
            )
        return None

    def _read(self, step: int, like: PyTree) -> PyTree:
        """The state of one checkpoint; arrays are matched by name.

        Orbax compares whole structures, in which a field that is None counts: a state type that
        gains an optional field could not read what was written before.
        """
        on_disk = self._manager.item_metadata(step).tree
        wanted = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(like)}
        found = {_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(on_disk)}
        if found != wanted.keys():
            differing = sorted(found ^ wanted.keys())
            raise ValueError(f"its arrays are not those of this run: {', '.join(differing)}")
        request = jax.tree_util.tree_map_with_path(lambda path, _: wanted[_name(path)], on_disk)
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(request))
        arrays = {_name(path): a for path, a in jax.tree_util.tree_leaves_with_path(restored)}
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

    def _set_aside(self, step: int) -> Path:
        target = self.directory.parent / "damaged"
        target.mkdir(exist_ok=True)
        moved = Path(tempfile.mkdtemp(prefix=f"{step}-", dir=target)) / str(step)
        shutil.move(self.directory / str(step), moved)
        self._manager.reload()
        return moved


def _name(path: tuple[Any, ...]) -> str:
    """ "carry/solver/0/z": the same for a NamedTuple's field and a dict's key."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
