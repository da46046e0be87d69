"""Which form of a scan runs: by the caller's word, or by platform when a program is lowered.

Private to the scans. Nothing here looks at devices while tracing, so cross-lowering works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

BACKENDS = ("auto", "pallas", "xla", "sequential")
KERNEL_TYPES = ("float32", "bfloat16", "float16")


def check_backend(backend: str) -> None:
    """Raises ValueError unless backend names a form of the scans."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")


def carry_type(dtype: Any) -> Any:
    """The type in which a state is carried: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _manual_axes(x: Array) -> frozenset[str]:
    """The mesh axes of an enclosing shard_map over which x differs; JAX renamed the attribute."""
    aval = jax.typeof(x)
    axes = getattr(aval, "vma", None) or getattr(getattr(aval, "mat", None), "varying", None)
    return frozenset(axes or ())


def same_manual_axes(*args: Array) -> tuple[Array, ...]:
    """The arrays, all marked as different over the same shard_map axes: loops insist on it."""
    axes = frozenset[str]().union(*map(_manual_axes, args))
    missing = [tuple(sorted(axes - _manual_axes(x))) for x in args]
    return tuple(lax.pcast(x, m, to="varying") if m else x for x, m in zip(args, missing))


def dispatch(
    backend: str,
    sequential: Callable[..., Any],
    xla: Callable[..., Any],
    pallas: Callable[..., Any] | None,
    *args: Array,
) -> Any:
    """Runs the form that `backend` names; "auto" is decided by platform at lowering.

    Args:
      sequential, xla: the two forms that run anywhere.
      pallas: platform -> form, or None where no kernel takes these arguments.
    """
    if backend == "sequential":
        return sequential(*args)
    if backend == "xla":
        return xla(*args)
    if backend == "pallas":
        if pallas is None:
            raise ValueError(
                f"backend='pallas' takes {', '.join(KERNEL_TYPES)}, not {args[0].dtype}; "
                "use backend='auto', 'xla' or 'sequential'"
            )
        return lax.platform_dependent(
            *args,
            tpu=functools.partial(pallas, platform="tpu"),
            cuda=functools.partial(pallas, platform="gpu"),
        )
    kernels = {}
    # Inside shard_map a kernel would have to declare how its results differ over the mesh axes;
    # those of kernels_pallas do not.
    if pallas is not None and not any(map(_manual_axes, args)):
        from kernels_pallas import supports_mosaic_gpu

        kernels["tpu"] = functools.partial(pallas, platform="tpu")
        if supports_mosaic_gpu():
            kernels["cuda"] = functools.partial(pallas, platform="gpu")
    return lax.platform_dependent(*args, cpu=sequential, default=xla, **kernels)
