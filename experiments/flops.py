"""Floating-point operations of a model: those of its ends and of one application of each loop.

Numbers are XLA's cost analysis of the lowered programs, which counts the body of a loop once; loops
of known length (`lax.scan`) are therefore counted again, with their length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fpr import registry

PyTree = Any
METHOD = (
    "XLA's cost analysis of the lowered programs for one example: the model without its loops, and "
    "one application of each loop times its steps; scans are counted with their length"
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations for one example.

    Attributes:
      ends: all that runs once: embedding, injection, readout, head, layers without a loop.
      application: one application of f of each looped layer.
    """

    ends: float
    application: tuple[float, ...]

    def of(self, layer_steps: np.ndarray) -> np.ndarray:
        """Operations of N examples, (N,), from the steps of each looped layer (N, L)."""
        return self.ends + layer_steps @ np.asarray(self.application, np.float64)


def count(model: Mapping[str, Any], params: PyTree, batch: Mapping[str, Any]) -> Flops:
    """Counts a model's operations for one example of the length in `batch`.

    Nothing is compiled or computed.

    Args:
      model: model config.
      params: its parameters, or their shapes.
      batch: an example batch, or its shapes; only the first example counts.
    """
    module = registry.build(model)
    one = {k: jax.ShapeDtypeStruct((1, *v.shape[1:]), v.dtype) for k, v in batch.items()}
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)

    def ends(m: Any, batch: Mapping[str, jax.Array]) -> Any:
        h, loops = m.embed(batch), []
        for layer in m.layers:
            x = layer.inject(h)
            z = layer.init_state(x, None)
            if layer.loop:
                loops.append((x, z))
            else:
                z = layer.step(x, z)
            h = layer.readout(h, x, z)
        return m.head(h), loops

    def run(params: PyTree, batch: Mapping[str, jax.Array]) -> Any:
        return module.apply({"params": params}, batch, method=ends)

    (_, loops) = jax.eval_shape(run, shapes, one)
    looped = module.bind({"params": shapes}).layers if loops else []
    numbers = [i for i, layer in enumerate(looped) if layer.loop]

    def step(i: int) -> Callable[..., Any]:
        def one_step(m: Any, x: PyTree, z: PyTree) -> PyTree:
            return m.layers[i].step(x, z)

        return lambda params, x, z: module.apply({"params": params}, x, z, method=one_step)

    return Flops(
        ends=_flops(lambda p, b: run(p, b)[0], shapes, one),
        application=tuple(_flops(step(i), shapes, *xz) for i, xz in zip(numbers, loops)),
    )


def _flops(f: Callable[..., Any], *args: PyTree) -> float:
    """Operations of a function of arrays (or shapes)."""
    total = _cost(f, *args)
    for body, length in _scans(jax.make_jaxpr(f)(*args).jaxpr):
        if length == 0:  # Lowered to nothing: its body was not counted.
            continue
        inside = jax.extend.core.jaxpr_as_fun(body)
        total += length * _flops(inside, *body.in_avals) - _cost(inside, *body.in_avals)
    return total


def _cost(f: Callable[..., Any], *args: PyTree) -> float:
    cost = jax.jit(f).lower(*args).cost_analysis() or {}
    return float(cost.get("flops", 0.0))


def _scans(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """(body, length) of the scans in a jaxpr, those in other scans' bodies left out."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["jaxpr"], eqn.params["length"]
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _scans(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")
