"""What the kernel tests share: random inputs, error measures, cross-lowering, race detection."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

# Rounding of the output type; the carry is float32 whatever the type.
TOLERANCE = {"float32": 3e-6, "bfloat16": 8e-3, "float16": 1e-3}


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    """Standard normal values, different for every seed."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def uniform(seed: int, low: float, high: float, *shape: int, dtype=jnp.float32) -> jax.Array:
    """Uniform values in [low, high)."""
    return jnp.asarray(np.random.default_rng(seed).uniform(low, high, size=shape), dtype)


def error(got, want) -> float:
    """Largest absolute error over the largest wanted magnitude (at least 1); inf for NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max(initial=0) / max(1.0, np.abs(want).max(initial=0)))


def assert_close(got, want, tolerance: float) -> None:
    """Asserts `error` below the tolerance for every pair of leaves."""
    for k, (g, w) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        e = error(g, w)
        assert e < tolerance, f"output {k}: error {e:.3g}, allowed {tolerance:.3g}"


def lower(f, platform: str, *shapes) -> str:
    """StableHLO of jit(f) for "tpu" or "cuda"; fails where a kernel does not lower."""
    return export.export(jax.jit(f), platforms=[platform])(*shapes).mlir_module()


def struct(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """A shape to lower with."""
    return jax.ShapeDtypeStruct(shape, dtype)


def kernel_calls(text: str) -> int:
    """How many Pallas kernels a lowered module launches."""
    return text.count("@tpu_custom_call") + text.count("@mosaic_gpu_v2")


def kernel_bytes(text: str) -> int:
    """Bytes of all arguments and results of the Pallas kernels in a lowered module."""
    total = 0
    for line in text.splitlines():
        if "@tpu_custom_call" in line or "@mosaic_gpu_v2" in line:
            types = line[line.rindex("} : (") :]
            for dims, kind in re.findall(r"tensor<((?:\d+x)+)([a-z]+\d+)>", types):
                size = {"f32": 4, "bf16": 2, "f16": 2}[kind]
                total += size * math.prod(int(n) for n in dims.split("x")[:-1])
    return total


def races_found() -> bool:
    """Whether the last run under pltpu.InterpretParams(detect_races=True) saw a race."""
    # The flag has no public name in JAX 0.10 or 0.11.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    state = interpret_pallas_call.races
    assert state is not None, "no kernel has run under race detection"
    return state.races_found


def gpu_interpreter():
    """The Mosaic GPU interpreter with race detection (private in JAX 0.10, public in 0.11)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(detect_races=True)
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    return params.InterpretGPUParams(detect_races=True)


def gpu_races_found() -> bool:
    """Whether the last run in the Mosaic GPU interpreter saw a copy race with a thread."""
    # No public name in JAX 0.10 or 0.11.
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call.get_races().races_found
