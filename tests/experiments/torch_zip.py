"""Writes files as torch.save does, without PyTorch: a zip of a pickle and raw storages."""

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np

STORAGES = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage", "int64": "LongStorage", "bool": "BoolStorage",
}  # fmt: skip


def _fake_torch():
    """Modules that only have the names which a pickle of tensors mentions."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2(*args):
        raise AssertionError("the reader ran the file's function")

    def _rebuild_parameter(*args):
        raise AssertionError("the reader ran the file's function")

    for function in (_rebuild_tensor_v2, _rebuild_parameter):
        function.__module__, function.__qualname__ = "torch._utils", function.__name__
        setattr(utils, function.__name__, function)
    torch._utils = utils
    return {"torch": torch, "torch._utils": utils}


class Parameter:
    """An array that is saved as a parameter, not as a tensor."""

    def __init__(self, array):
        self.array = array


class _Storage:
    def __init__(self, array):
        self.array = array


def save(path, content, monkeypatch, *, folder="archive", data_of=None):
    """Saves dictionaries of arrays; a transposed array keeps its strides, as in PyTorch.

    `data_of(raw bytes)` may damage the storages.
    """
    fake = _fake_torch()
    for name, module in fake.items():
        monkeypatch.setitem(sys.modules, name, module)
    torch, utils = fake["torch"], fake["torch._utils"]
    storages = []

    class Pickler(pickle._Pickler):
        def persistent_id(self, obj):
            if not isinstance(obj, _Storage):
                return None
            storages.append(obj.array)
            cls = getattr(torch, STORAGES[obj.array.dtype.name])
            return ("storage", cls, str(len(storages) - 1), "cpu", obj.array.size)

        def reducer_override(self, obj):
            if isinstance(obj, Parameter):
                return utils._rebuild_parameter, (obj.array, True, OrderedDict())
            if not isinstance(obj, np.ndarray):
                return NotImplemented
            transposed = obj.ndim > 1 and obj.flags.f_contiguous
            stored = obj.T if transposed else np.asarray(obj, order="C")
            strides = [s // obj.itemsize for s in stored.strides]
            strides = tuple(reversed(strides) if transposed else strides)
            args = (_Storage(stored.ravel()), 0, obj.shape, strides, False, OrderedDict())
            return utils._rebuild_tensor_v2, args

    file = io.BytesIO()
    Pickler(file, protocol=2).dump(content)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{folder}/data.pkl", file.getvalue())
        archive.writestr(f"{folder}/byteorder", "little")
        for i, array in enumerate(storages):
            raw = array.tobytes()
            archive.writestr(f"{folder}/data/{i}", data_of(raw) if data_of else raw)
        archive.writestr(f"{folder}/version", "3\n")


def bfloat16(array):
    """The array in bfloat16."""
    return np.asarray(array).astype(ml_dtypes.bfloat16)
