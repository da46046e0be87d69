"""Parity with the papers' released code: every array file in $FPR_GOLDEN or ../shared/golden.

The checks live in tests/golden_checks_*.py, one dictionary `CHECKS` each: file name -> function of
the file's arrays. A file without a check fails: nothing is passed over in silence.
"""

import importlib
import os
import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = pathlib.Path(os.environ.get("FPR_GOLDEN", ROOT.parent / "shared" / "golden"))
FILES = sorted(FOLDER.glob("*.npz"))


def load_checks():
    checks = {}
    for file in sorted(pathlib.Path(__file__).parent.glob("golden_checks_*.py")):
        checks |= importlib.import_module(f"tests.{file.stem}").CHECKS
    return checks


CHECKS = load_checks()


@pytest.mark.skipif(
    not FILES, reason=f"waits for reference arrays: none in {FOLDER}; set FPR_GOLDEN"
)
def test_folder_covers_all_checks():
    missing = sorted(set(CHECKS) - {file.stem for file in FILES})
    assert not missing, f"{FOLDER} lacks {missing}"


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_golden(file):
    assert file.stem in CHECKS, f"no check for {file.stem}: add it to a tests/golden_checks_*.py"
    with np.load(file) as arrays:
        CHECKS[file.stem](dict(arrays))
