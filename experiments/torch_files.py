"""Reads tensors from PyTorch and safetensors files as NumPy arrays; runs no code from the file.

A `.pt` file is a zip archive with a pickle that calls functions by name. The unpickler here knows
the few names that rebuild tensors and dictionaries, by versions of its own, and refuses all others.
PyTorch itself is not needed; safetensors files need the package safetensors. `state_dict` finds the
weights, averaged ones among them, in what a training program saved.
"""

from __future__ import annotations

import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from experiments.errors import UserError

Tensors = dict[str, np.ndarray]

# Where a checkpoint keeps its state dict, and its averaged weights.
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
EMA_KEYS = ("ema", "ema_helper", "ema_state_dict", "model_ema", "shadow")
AVERAGED = "n_averaged"  # torch.optim.swa_utils.AveragedModel counts in it
WRAPPERS = ("_orig_mod.", "module.", "model.", "inner.")
# Names of torch.save's storage classes, and those of safetensors' types.
_STORAGES: dict[str, Any] = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_SAFETENSORS: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


def read(path: Path) -> Any:
    """The content of a file: a dictionary of arrays, or of more dictionaries, numbers and texts.

    Raises:
      UserError: the file cannot be read, is of another kind, or would run code.
    """
    try:
        with path.open("rb") as file:
            start = file.read(16)
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        if start[:4] == b"PK\x03\x04":
            return _read_zip(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if start[:1] == b"\x80":
        raise UserError(
            f"{path} is in the format of PyTorch before 1.6, which is not read here; save it again "
            "with torch.save"
        )
    raise UserError(f"{path} is neither a .safetensors file nor a zip archive of torch.save")


def state_dict(content: Any, weights: str, path: Path) -> tuple[Tensors, str]:
    """The arrays of a checkpoint, averaged ones over the others if `weights` is "ema".

    Returns:
      The arrays and what they are: "ema", "model", or "unnamed" where the file has one set of
      weights and does not say whether it is an average.

    Raises:
      UserError: it holds no state dict, or an average that cannot be read and is asked for.
    """
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds {type(content).__name__}, not a state dict")
    plain = _tensors(content, MODEL_KEYS)
    averaged: Tensors = {}
    for key in EMA_KEYS:
        held = content.get(key)
        averaged = averaged or _tensors(held, ("shadow", *MODEL_KEYS))
        # A number or a flag under such a name is an option of the training, no weights.
        if isinstance(held, Mapping | list | tuple) and held and not averaged and weights == "ema":
            raise UserError(
                f"{path} keeps averaged weights under {key!r} in a form that is not read here; "
                "--weights=model takes the others"
            )
    if AVERAGED in plain and not averaged:
        plain, averaged = {}, plain
    if not plain and not averaged:
        held = ", ".join(map(str, list(content)[:8])) or "nothing"
        raise UserError(f"{path} has no state dict; it holds {held}")
    plain, averaged = _unwrap(plain), _unwrap(averaged)
    # An average holds parameters only: buffers are those of the model.
    if averaged and (weights == "ema" or not plain):
        return plain | averaged, "ema"
    return plain, "model" if averaged else "unnamed"


def _tensors(value: Any, keys: Sequence[str]) -> Tensors:
    """`value` if it is a dictionary of arrays, else the first such in it under one of `keys`."""
    if not isinstance(value, Mapping):
        return {}
    if value and all(isinstance(a, np.ndarray) for a in value.values()):
        return {str(name): a for name, a in value.items()}
    return next((found for key in keys if (found := _tensors(value.get(key), keys))), {})


def _unwrap(tensors: Tensors) -> Tensors:
    """Names without what compilation, parallelism and the loss head put in front.

    Raises:
      UserError: two arrays have the same name then.
    """
    found: Tensors = {}
    full: dict[str, str] = {}
    for name, value in tensors.items():
        short = name
        while wrapper := next((w for w in WRAPPERS if short.startswith(w)), ""):
            short = short.removeprefix(wrapper)
        if short in found:
            both = " and ".join(sorted((full[short], name)))
            raise UserError(
                f"unknown checkpoint layout: {both} are both {short}, once the wrappers are taken "
                "off"
            )
        full[short] = name
        if short != AVERAGED:
            found[short] = value
    return found


def _read_safetensors(path: Path) -> Tensors:
    try:
        import safetensors  # the optional extra [import]
    except ImportError as error:
        raise UserError(
            f"{path} needs the package safetensors: pip install 'fpr[import]'"
        ) from error
    try:
        entries = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    found = {}
    for name, entry in entries:
        if entry["dtype"] not in _SAFETENSORS:
            raise UserError(f"{path}: {name} is of type {entry['dtype']}, which is not read here")
        flat = np.frombuffer(entry["data"], np.dtype(_SAFETENSORS[entry["dtype"]]))
        found[name] = flat.reshape(entry["shape"])
    return found


def _read_zip(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [n for n in archive.namelist() if n.rsplit("/", 1)[-1] == "data.pkl"]
            if len(pickles) != 1:
                raise UserError(f"{path} is a zip archive, but not one of torch.save (no data.pkl)")
            folder = pickles[0].removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in archive.namelist() and archive.read(order).strip() != b"little":
                raise UserError(f"{path} was written on a big-endian machine")
            with archive.open(pickles[0]) as file:
                return _Unpickler(file, archive, f"{folder}data/", path).load()
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read: its pickle is broken ({error})") from error


class _Storage:
    """Stands for a storage class of PyTorch: only its element type matters."""

    def __init__(self, dtype: Any):
        self.dtype = np.dtype(dtype)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, archive: zipfile.ZipFile, folder: str, path: Path):
        super().__init__(file, encoding="utf-8")
        self._archive, self._folder, self._path = archive, folder, path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name in _STORAGES:
            return _Storage(_STORAGES[name])
        raise UserError(
            f"{self._path} asks for {module}.{name}, which is not a tensor; nothing was run. Save "
            "the state dict alone: torch.save(model.state_dict(), FILE)"
        )

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _Storage):
            raise UserError(f"{self._path} holds a {kind!r} of a kind that is not read here")
        data = self._archive.read(f"{self._folder}{key}")
        if len(data) != count * storage.dtype.itemsize:
            raise UserError(f"{self._path}: storage {key} has {len(data)} bytes for {count} values")
        return np.frombuffer(data, storage.dtype)


def _rebuild_tensor(
    storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> np.ndarray:
    """A tensor from its storage, offset, shape and strides (in elements)."""
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(f"shape {shape} with strides {strides}")
    if math.prod(shape) == 0:
        return np.zeros(shape, storage.dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides))
    # More elements than the storage has would be copies of them: a small file, a large array.
    if last >= storage.size or math.prod(shape) > storage.size:
        raise ValueError(f"shape {shape} with strides {strides} leaves a storage of {storage.size}")
    in_bytes = tuple(s * storage.itemsize for s in strides)
    view = np.lib.stride_tricks.as_strided(storage[offset:], shape, in_bytes, writeable=False)
    return np.array(view)


def _rebuild_parameter(data: np.ndarray, *_: Any) -> np.ndarray:
    return data


_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
}
