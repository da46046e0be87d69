"""Compiles every TPU kernel ahead of time with libtpu, without a TPU.

`python -m kernels_pallas.check_tpu` catches what lowering alone does not: VMEM overflow, layouts
that Mosaic cannot use. It needs the libtpu wheel: `pip install "jax[tpu]"` in an environment of
its own, or the unpacked wheel on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import kernels_pallas as kp

TOPOLOGIES = ("v5e:2x2", "v6e:2x2")

Case = tuple[str, Callable, tuple]


def _loss(f: Callable) -> Callable:
    """A scalar of all outputs, so that its gradient runs the backward kernels too."""

    def loss(*args):
        leaves = jax.tree.leaves(f(*args))
        return sum(jnp.sum(v.astype(jnp.float32) ** 2) for v in leaves)

    return loss


def _shapes(*shapes, dtype):
    return tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes)


def _fused(decay, bx, units, mass, weights, old_mass, old_weights, h0, *, keep):
    iterates = kp.Iterate(mass, weights), kp.Iterate(old_mass, old_weights)
    out = kp.fused_fixed_point(decay, bx, units, *iterates, h0, keep=keep, platform="tpu")
    return out if keep else out[:2]


def cases() -> Iterator[Case]:
    """(name, function, argument shapes) for every kernel at small ragged and at working sizes."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        kind = jnp.dtype(dtype).name
        for b, t, d in ((2, 1, 1), (9, 33, 600), (64, 128, 64), (8, 4096, 2048)):
            args = _shapes((b, t, d), (b, t, d), (b, d), dtype=dtype)
            for reverse in (False, True):
                f = functools.partial(kp.linear_scan, reverse=reverse, platform="tpu")
                label = f"linear_scan {b}x{t}x{d} {kind}{' reverse' if reverse else ''}"
                yield label, jax.grad(_loss(f), (0, 1, 2)), args
        for b, t, d, n in ((2, 1, 1, 1), (2, 300, 200, 4), (8, 4096, 2048, 16), (1, 512, 512, 64)):
            btd, btn = (b, t, d), (b, t, n)
            args = _shapes(btd, btd, (d, n), btn, btn, (d,), btd, (b, d, n), dtype=dtype)
            f = functools.partial(kp.selective_scan, platform="tpu")
            yield f"selective_scan {b}x{t}x{d}x{n} {kind}", f, args
            label = f"selective_scan gradient {b}x{t}x{d}x{n} {kind}"
            yield label, jax.grad(_loss(f), tuple(range(8))), args
        ranked = ((2, 1, 1, 1), (2, 300, 200, 3), (8, 4096, 512, 2), (8, 4096, 2048, 1))
        for b, t, d, r in (*ranked, (1, 512, 8192, 1)):
            wide, units, tokens = (b, t, d), (b, t, r, d), (b, t, r)
            args = _shapes(wide, wide, units, (b,), tokens, (b,), tokens, (b, d), dtype=dtype)
            for keep in (False, True):
                label = f"fused_fixed_point {b}x{t}x{d}x{r} {kind}{' with h' if keep else ''}"
                yield label, functools.partial(_fused, keep=keep), args
        for b, t, h, p, g, n in (
            (2, 1, 1, 1, 1, 1),
            (1, 300, 4, 24, 2, 5),
            (8, 4096, 32, 64, 1, 128),
        ):
            args = _shapes((b, t, h, p), (b, t, h), (b, t, g, n), (b, t, g, n), dtype=dtype)
            f = functools.partial(kp.ssd, platform="tpu")
            yield f"ssd {b}x{t}x{h}x{p}x{g}x{n} {kind}", jax.grad(_loss(f), (0, 1, 2, 3)), args
        for b, t, h, k, v in ((2, 1, 1, 1, 1), (1, 300, 2, 5, 24), (8, 4096, 16, 128, 128)):
            heads = (b, t, h)
            args = _shapes((*heads, k), (*heads, k), (*heads, v), heads, heads, dtype=dtype)
            f = functools.partial(kp.delta_rule, platform="tpu")
            yield (
                f"delta_rule {b}x{t}x{h}x{k}x{v} {kind}",
                jax.grad(_loss(f), tuple(range(5))),
                args,
            )


def compile_for(topology: str, f: Callable, args: tuple) -> int:
    """Compiles jit(f) for one device of the topology; returns the bytes of temporaries."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = SingleDeviceSharding(devices[0])
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), args)
    memory = jax.jit(f).lower(*placed).compile().memory_analysis()
    return memory.temp_size_in_bytes if memory is not None else 0


def main(argv: list[str] | None = None) -> int:
    """Compiles all cases for all topologies; returns the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", action="append", help=f"default: {', '.join(TOPOLOGIES)}")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    flags = parser.parse_args(argv)
    failed = 0
    for topology in flags.topology or TOPOLOGIES:
        for name, f, args in cases():
            if flags.only not in name:
                continue
            start = time.perf_counter()
            try:
                note = f"{compile_for(topology, f, args) / 2**20:.0f} MiB of temporaries"
            except (RuntimeError, NotImplementedError, ValueError) as e:
                failed += 1
                note = f"FAILED: {str(e)[:800]}"
            print(f"{topology} {name}: {note} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    # libtpu would otherwise look for a TPU of this host.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    sys.exit(bool(main()))
