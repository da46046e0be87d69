"""The ahead-of-time check: its cases lower here; with libtpu it compiles, and can fail."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import check_tpu, linear_scan
from tests.kernels_pallas import checks

CASES = list(check_tpu.cases())


def test_names_are_unique_and_cover_every_kernel():
    names = [name for name, _, _ in CASES]
    assert len(set(names)) == len(names)
    kernels = {name.split()[0] for name in names}
    assert kernels == {"linear_scan", "selective_scan", "fused_fixed_point", "ssd", "delta_rule"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_lowers(case):
    _, f, args = case
    assert checks.kernel_calls(checks.lower(f, "tpu", *args)) >= 1


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_too_large_a_block_does_not_compile():
    wide = jax.ShapeDtypeStruct((8, 16384, 2048), jnp.float32)
    scan = functools.partial(linear_scan, platform="tpu")
    with pytest.raises(RuntimeError, match="vmem"):
        check_tpu.compile_for("v5e:2x2", functools.partial(scan, chunk=8192), (wide, wide))
    assert check_tpu.compile_for("v5e:2x2", scan, (wide, wide)) >= 0
