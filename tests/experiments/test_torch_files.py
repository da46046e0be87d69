import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from experiments import torch_files
from experiments.errors import UserError
from tests.experiments import torch_zip

safetensors = pytest.importorskip("safetensors.numpy")
ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2.0], np.float64),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "half": torch_zip.bfloat16([0.5, 3.0]),
    "count": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float16),
}


def test_torch_zip(tmp_path, monkeypatch):
    state = OrderedDict(ARRAYS)
    state._metadata = OrderedDict(version=1)
    state["p"] = torch_zip.Parameter(ARRAYS["b"])
    content = {"model": state, "step": 3, "lr": [0.1, None, True]}
    torch_zip.save(tmp_path / "x.pt", content, monkeypatch)
    found = torch_files.read(tmp_path / "x.pt")
    assert found["step"] == 3
    assert found["lr"] == [0.1, None, True]
    for name, array in [*ARRAYS.items(), ("p", ARRAYS["b"])]:
        assert found["model"][name].dtype == array.dtype
        assert np.array_equal(found["model"][name], array), name


def test_safetensors(tmp_path):
    arrays = {k: v.copy() for k, v in ARRAYS.items()}  # its writer does not see strides
    safetensors.save_file(arrays, tmp_path / "x.safetensors")
    found = torch_files.read(tmp_path / "x.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array), name


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def zipped(path, raw):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", raw)


def test_code_in_a_file_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zipped(tmp_path / "evil.pt", pickle.dumps({"model": Evil()}))
    with pytest.raises(UserError, match=r"evil.pt asks for posix.system, .* nothing was run"):
        torch_files.read(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    # Reaching a harmless name through an allowed one does not help either.
    zipped(tmp_path / "dots.pt", b"\x80\x04\x8c\x0bcollections\x8c\x15OrderedDict.__class__\x93.")
    with pytest.raises(UserError, match="nothing was run"):
        torch_files.read(tmp_path / "dots.pt")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x80\x02}q\x00.", "format of PyTorch before 1.6"),
        (b"hello", "neither a .safetensors file nor a zip archive"),
        (b"", "neither a .safetensors file"),
        (b"PK\x03\x04 and no more", "cannot be read"),
    ],
)
def test_other_files(tmp_path, raw, message):
    (tmp_path / "x.pt").write_bytes(raw)
    with pytest.raises(UserError, match=message):
        torch_files.read(tmp_path / "x.pt")


def test_damaged_files(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"cannot read .*absent.pt"):
        torch_files.read(tmp_path / "absent.pt")
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match=r"x.safetensors cannot be read"):
        torch_files.read(tmp_path / "x.safetensors")
    path = tmp_path / "x.pt"
    zipped(path, pickle.dumps({"a": 1})[:-3])
    with pytest.raises(UserError, match="cannot be read"):
        torch_files.read(path)
    torch_zip.save(path, ARRAYS, monkeypatch, data_of=lambda raw: raw[:-1])
    with pytest.raises(UserError, match=r"storage 0 has 23 bytes for 6 values"):
        torch_files.read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no tensors")
    with pytest.raises(UserError, match=r"not one of torch.save"):
        torch_files.read(path)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (3, 3), (3, 1)),
        (6, (1,), (1,)),
        (-1, (2,), (1,)),
        (0, (2,), (-1,)),
        (0, (2, 2), (1,)),
        (0, (9,), (0,)),
    ],
)
def test_a_tensor_stays_in_its_storage(offset, shape, strides):
    with pytest.raises(ValueError, match="shape"):
        torch_files._rebuild_tensor(np.zeros(6), offset, shape, strides)
