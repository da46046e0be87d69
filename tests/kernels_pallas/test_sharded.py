"""sharded_linear_scan on four CPU devices, each direction in a process of its own; and lowered."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from kernels_pallas import linear_scan_tpu, sharded_linear_scan
from tests.kernels_pallas import checks
from tests.reference import kernels as reference


@pytest.mark.parametrize("direction", [pytest.param("forward", marks=pytest.mark.slow), "reverse"])
def test_four_shards_match_one_sequence(direction):
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(p for p in (os.getcwd(), os.getenv("PYTHONPATH", "")) if p),
    }
    command = [sys.executable, "-m", "tests.kernels_pallas.sharded_program", direction]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("reverse", [False, True])
def test_aggregate_matches_float64(reverse):
    a, x = checks.uniform(0, 0.5, 1, 2, 37, 5), checks.normal(1, 2, 37, 5)
    last, prod = linear_scan_tpu.aggregate(a, x, reverse=reverse, chunk=16, interpret=True)
    checks.assert_close(last, reference.linear_scan(a, x, reverse=reverse)[1], 3e-6)
    checks.assert_close(prod, reference.f64(a)[0].prod(1), 3e-6)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_lowers_with_gradient(platform):
    mesh = AbstractMesh((4,), ("time",))
    split, whole = PartitionSpec(None, "time"), PartitionSpec()
    scan = jax.shard_map(
        functools.partial(sharded_linear_scan, axis="time", platform=platform),
        mesh=mesh, in_specs=(split, split, whole), out_specs=(split, whole), check_vma=False,
    )  # fmt: skip

    def loss(a, x, h0):
        h, last = scan(a, x, h0)
        return (h**2).sum() + (last**2).sum()

    wide = checks.struct(2, 1024, 256)
    text = checks.lower(
        jax.grad(loss, (0, 1, 2)), {"tpu": "tpu", "gpu": "cuda"}[platform],
        wide, wide, checks.struct(2, 256),
    )  # fmt: skip
    assert checks.kernel_calls(text) >= 4


def test_errors_name_the_value():
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        sharded_linear_scan(jnp.zeros((2, 4)), jnp.zeros((2, 4)), axis="time", platform="tpu")
