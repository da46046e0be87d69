"""Run by test_sharded in a process of its own, with four CPU devices: one scan over four shards."""

from __future__ import annotations

import functools
import sys

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas.sharded import sharded_linear_scan
from tests.kernels_pallas import checks
from tests.reference import kernels as reference


def main(reverse: bool) -> None:
    """Checks values and gradients against the float64 loop over the whole sequence."""
    assert len(jax.devices()) == 4
    mesh = Mesh(np.array(jax.devices()), ("time",))
    split, whole = PartitionSpec(None, "time"), PartitionSpec()
    scan = jax.jit(
        jax.shard_map(
            functools.partial(
                sharded_linear_scan, axis="time", reverse=reverse, platform="tpu", interpret=True
            ),
            mesh=mesh,
            in_specs=(split, split, whole),
            out_specs=(split, whole),
            check_vma=False,
        )
    )
    a, x, h0 = checks.uniform(0, 0, 1, 2, 36, 5), checks.normal(1, 2, 36, 5), checks.normal(2, 2, 5)
    out, vjp = jax.vjp(scan, a, x, h0)
    checks.assert_close(out, reference.linear_scan(a, x, h0, reverse), 3e-6)
    dh, dlast = checks.normal(3, 2, 36, 5), checks.normal(4, 2, 5)
    want = reference.linear_scan_vjp(a, x, h0, dh, dlast, reverse)
    checks.assert_close(vjp((dh, dlast)), want, 5e-6)
    text = scan.lower(a, x, h0).compile().as_text() or ""
    gathered = [line.split("=")[1].split("all-gather(")[0] for line in text.splitlines()
                if "all-gather(" in line and "=" in line]  # fmt: skip
    # Only states cross the wire: 2 x (4 shards, 2, 5), nothing with a time axis.
    assert gathered, "no exchange found"
    assert not any("36" in g or "[2,9," in g for g in gathered), gathered
    assert "all-to-all" not in text
    assert "collective-permute" not in text
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1] == "reverse")
