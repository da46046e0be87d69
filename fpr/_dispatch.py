"""Which form of a scan runs: by the caller's word, or by platform when a program is lowered.

Private to the scans. Nothing here looks at devices while tracing, so cross-lowering works.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

Array = jax.Array

BACKENDS = ("auto", "pallas", "xla", "sequential")
KERNEL_TYPES = ("float32", "bfloat16", "float16")
GPU_SWITCH = "FPR_GPU_KERNELS"  # environment variable: 1 lets "auto" take the GPU kernels

log = logging.getLogger(__name__)


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


# A kernel as one opaque operation that is traced when a program is lowered for its platform. A
# branch of platform_dependent is traced whatever the platform, and tracing a kernel takes seconds.
_kernel_p = Primitive("fpr_kernel")
_kernel_p.multiple_results = True


@_kernel_p.def_abstract_eval
def _kernel_shapes(*_args, outs, **_):
    return [jax.core.ShapedArray(o.shape, o.dtype) for o in outs]


def _kernel_batched(args, dims, *, fn, fallback, outs, asked):
    size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
    outs = tuple(jax.ShapeDtypeStruct((size, *o.shape), o.dtype) for o in outs)
    fn, fallback = (jax.vmap(f, tuple(dims)) for f in (fn, fallback))
    results = _kernel_p.bind(*args, fn=fn, fallback=fallback, outs=outs, asked=asked)
    return results, [0] * len(outs)


batching.primitive_batchers[_kernel_p] = _kernel_batched


@functools.cache
def _say_xla_on_gpu() -> None:
    """Says once that the kernels are not used, and how to use them."""
    log.warning(
        "scans use their XLA forms on GPU: the Pallas kernels have not run on a card yet; "
        "%s=1 or backend='pallas' chooses them",
        GPU_SWITCH,
    )


def _gpu_kernels(asked: bool) -> bool:
    """Whether the kernels run on a GPU: by the caller's word or the user's, read at lowering.

    Raises:
      ValueError: the environment variable is neither 0 nor 1.
    """
    switch = os.environ.get(GPU_SWITCH, "0")
    if switch not in ("0", "1"):
        raise ValueError(f"{GPU_SWITCH}={switch!r} is not 0 or 1")
    if asked or switch == "1":
        import kernels_pallas

        return kernels_pallas.supports_mosaic_gpu()
    # The GPU kernels agree with float64 in Mosaic's interpreter but have not run on a card yet.
    # Until kernels_pallas.bench has checked them there, only a user's word chooses them.
    _say_xla_on_gpu()
    return False


def _on_tpu(*args, fn, **_):
    with jax.enable_x64(False):  # the indices inside a kernel are 32 bits wide
        return fn(*args)


def _on_gpu(*args, fn, fallback, asked, **_):
    return _on_tpu(*args, fn=fn) if _gpu_kernels(asked) else tuple(fallback(*args))


for _platform, _chosen in (("tpu", _on_tpu), ("cuda", _on_gpu)):
    _rule = mlir.lower_fun(_chosen, multiple_results=True)
    mlir.register_lowering(_kernel_p, _rule, platform=_platform)


def _kernel(
    fn: Callable[..., Any],
    fallback: Callable[..., Any],
    outs: Sequence[Any],
    platform: str,
    asked: bool,
) -> Callable[..., Any]:
    """fn for a platform, to be traced at lowering; its results look like `outs`.

    Args:
      fallback: the form for a GPU that cannot run the kernels.
      asked: the caller named the kernels, rather than leaving the choice to this module.
    """
    shapes = tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outs)
    fn = functools.partial(fn, platform=platform)
    options = {"fn": fn, "fallback": fallback, "outs": shapes, "asked": asked}
    return lambda *args: tuple(_kernel_p.bind(*args, **options))


def dispatch(
    backend: str,
    sequential: Callable[..., Any],
    xla: Callable[..., Any],
    pallas: Callable[..., Any],
    outs: Sequence[Any],
    *args: Array,
    platforms: Sequence[str] = ("tpu", "cuda"),
) -> Any:
    """Runs the form that `backend` names; "auto" is decided by platform at lowering.

    Args:
      sequential, xla: the two forms that run anywhere.
      pallas: the form that takes platform="tpu" or "gpu".
      outs: what every form returns, as arrays of the same shapes and types.
      platforms: where there is a kernel.
    """
    if backend == "sequential":
        return sequential(*args)
    if backend == "xla":
        return xla(*args)
    named, asked = {"tpu": "tpu", "cuda": "gpu"}, backend == "pallas"
    kernels = {name: _kernel(pallas, xla, outs, named[name], asked) for name in platforms}
    others = [x.dtype.name for x in args if x.dtype.name not in KERNEL_TYPES]
    if backend == "pallas":
        if others:
            raise ValueError(
                f"backend='pallas' takes {', '.join(KERNEL_TYPES)}, not {others[0]}; "
                "use backend='auto', 'xla' or 'sequential'"
            )
        return lax.platform_dependent(*args, **kernels)
    # Inside shard_map a kernel would have to declare how its results differ over the mesh axes;
    # those of kernels_pallas do not.
    if others or any(map(_manual_axes, args)):
        kernels = {}
    return lax.platform_dependent(*args, cpu=sequential, default=xla, **kernels)


def recomputing(
    sequential: Callable[..., Any],
    xla: Callable[..., Any],
    pallas: Callable[..., Any],
    platforms: Sequence[str],
    outs: Callable[..., Sequence[Any]],
) -> Callable[..., Any]:
    """op(backend, *args), jitted: `dispatch` over the forms of one function; "auto" on CPU is xla.

    Differentiable to any order. The gradient keeps the arguments alone and runs the form again
    before its own gradient; higher derivatives go through `xla`.

    Args:
      sequential, xla, pallas, platforms: as in `dispatch`; every form returns the same tuple.
      outs: what the forms return, as arrays of the same shapes and types, from the arguments.
    """

    def pull(form, args, cotangents):
        return jax.vjp(form, *args)[1](cotangents)

    def forms(backend, like, wrap, *args):
        def kernel(*args, platform):
            return wrap(functools.partial(pallas, platform=platform))(*args)

        batched = wrap(xla)
        loop = wrap(sequential) if backend == "sequential" else batched
        return dispatch(backend, loop, batched, kernel, like, *args, platforms=platforms)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def op(backend, *args):
        return forms(backend, outs(*args), lambda form: form, *args)

    def op_fwd(backend, *args):
        return op(backend, *args), args

    def op_bwd(backend, args, cotangents):
        return grad(backend, args, cotangents)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def grad(backend, args, cotangents):
        count = len(args)

        def wrap(form):
            return lambda *both: pull(form, both[:count], both[count:])

        return forms(backend, args, wrap, *args, *cotangents)

    def grad_fwd(backend, args, cotangents):
        return grad(backend, args, cotangents), (args, cotangents)

    def grad_bwd(backend, saved, cotangents):
        return jax.vjp(functools.partial(pull, xla), *saved)[1](cotangents)

    op.defvjp(op_fwd, op_bwd)
    grad.defvjp(grad_fwd, grad_bwd)
    return jax.jit(op, static_argnums=0)
