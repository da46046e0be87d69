"""The one road: embed tokens, solve each layer's fixed point, read out, head.

A model is an embedding, a list of `Layer`s and a head; this file turns them into logits and into an
honest account of how the solves went. A layer without a loop is a layer with `loop = False`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import adjoints, solvers
from fpr.adjoints import Adjoint
from fpr.fixed_point import Trace, fixed_point, trace
from fpr.solvers import Damped, SolverState

PyTree = Any
IGNORE_LABEL = -100  # Positions with this label count in no loss and no metric.


class Output(NamedTuple):
    """What a model returns for a batch of B sequences of length T, V classes, L looped layers.

    Attributes:
      logits: (B, T, V).
      steps: (B,) int32, applications of f summed over the layers (1 for a model without a loop).
      residual: (B,) float32, the largest over the layers (0 without a loop).
      converged: (B,) bool, every layer converged.
      layer_steps: (B, L) int32, applications of f of each looped layer.
      q_logits: (B, 2) halting logits, or None for models without a Q head.
      state: tuple of each looped layer's detached `SolverState`; pass it to `fpr.apply` to go on.
    """

    logits: jax.Array
    steps: jax.Array
    residual: jax.Array
    converged: jax.Array
    layer_steps: jax.Array
    q_logits: jax.Array | None
    state: tuple[SolverState, ...]


class Layer(nn.Module):
    """One layer: a map f of an iterate z, given an input x, between two readings of the stream h.

    Subclasses are `setup`-style modules with these methods; h is (B, T, D), x and z are pytrees
    whose leaves lead with B.
    """

    loop: ClassVar[bool] = True  # False: `step` is applied once, from init_state, without a solver.

    def inject(self, h: jax.Array) -> PyTree:
        """x: all that does not depend on the iterate, computed once."""
        raise TypeError(f"{type(self).__name__} does not define inject")

    def init_state(self, x: PyTree, key: jax.Array | None) -> PyTree:
        """z0, the iterate before the first application of f."""
        raise TypeError(f"{type(self).__name__} does not define init_state")

    def step(self, x: PyTree, z: PyTree) -> PyTree:
        """f: one application."""
        raise TypeError(f"{type(self).__name__} does not define step")

    def readout(self, h: jax.Array, x: PyTree, z: PyTree) -> jax.Array:
        """The stream after the layer, its residual connection included."""
        raise TypeError(f"{type(self).__name__} does not define readout")


def as_function(layer: Layer) -> tuple[Callable[[PyTree, PyTree, PyTree], PyTree], PyTree]:
    """A bound layer's `step` as a pure f(params, x, z), and its parameters.

    The solver's loop must not see bound Flax variables: they would leak tracers.
    """
    module, variables = layer.unbind()

    def f(params: PyTree, x: PyTree, z: PyTree) -> PyTree:
        return module.apply({"params": params}, x, z, method="step")

    return f, variables.get("params", {})


class Model(nn.Module):
    """Embedding, layers, head. Subclasses set `layers` (a list) in `setup` and define the ends.

    Attributes:
      config: the model's frozen options (a `ModelConfig`).
    """

    config: Any

    def embed(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """(B, T) tokens (and what else the batch holds) -> stream h (B, T', D)."""
        raise TypeError(f"{type(self).__name__} does not define embed")

    def head(self, h: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """h (B, T', D) -> logits (B, T, V) and Q logits (B, 2) or None."""
        raise TypeError(f"{type(self).__name__} does not define head")

    def __call__(
        self,
        batch: Mapping[str, jax.Array],
        *,
        solver: Damped,
        adjoint: Adjoint,
        key: jax.Array | None = None,
        state: tuple[SolverState, ...] | None = None,
        max_steps: jax.Array | int | None = None,
    ) -> Output:
        check_batch(batch)
        h = self.embed(batch)
        states: list[SolverState] = []
        loops = sum(layer.loop for layer in self.layers)
        if state is not None and len(state) != loops:
            raise ValueError(f"state holds {len(state)} solver states, the model has {loops} loops")
        steps, residuals, converged = [], [], []
        for i, layer in enumerate(self.layers):
            x = layer.inject(h)
            carried = state[len(states)] if state is not None and layer.loop else None
            if carried is not None:
                z0 = carried.z
            else:
                z0 = layer.init_state(x, None if key is None else fold_in(key, i))
            if self.is_initializing() or not layer.loop:
                z = layer.step(x, z0)  # Also creates the parameters of f.
            if layer.loop:
                if self.is_initializing():
                    info = solver.init(z0)
                    states.append(info)
                else:
                    f, params = as_function(layer)
                    solution = fixed_point(
                        f, params, x, z0,
                        solver=solver, adjoint=adjoint, state=carried, max_steps=max_steps,
                    )  # fmt: skip
                    z = solution.value
                    states.append(solution.state)
                    steps.append(solution.steps)
                    residuals.append(solution.residual)
                    converged.append(solution.converged)
            h = layer.readout(h, x, z)
        logits, q_logits = self.head(h)
        b = h.shape[0]
        if not steps:
            return Output(
                logits, jnp.ones((b,), jnp.int32), jnp.zeros((b,)), jnp.ones((b,), bool),
                jnp.zeros((b, 0), jnp.int32), q_logits, tuple(states),
            )  # fmt: skip
        layer_steps = jnp.stack(steps, axis=1)
        return Output(
            logits,
            layer_steps.sum(axis=1),
            jnp.stack(residuals).max(axis=0),
            jnp.stack(converged).all(axis=0),
            layer_steps,
            q_logits,
            tuple(states),
        )

    def trace_layer(
        self,
        batch: Mapping[str, jax.Array],
        *,
        solver: Damped,
        steps: int,
        key: jax.Array | None = None,
    ) -> Trace:
        """Every iterate of the first looped layer's solve (N = steps)."""
        check_batch(batch)
        h = self.embed(batch)
        for i, layer in enumerate(self.layers):
            x = layer.inject(h)
            z0 = layer.init_state(x, None if key is None else fold_in(key, i))
            if layer.loop:
                f, params = as_function(layer)
                return trace(f, params, x, z0, solver=solver, steps=steps)
            h = layer.readout(h, x, layer.step(x, z0))
        raise ValueError(f"{type(self).__name__} has no loop to trace")


def check_batch(batch: Mapping[str, jax.Array]) -> None:
    """Checks what all models read from a batch.

    Raises:
      ValueError: no tokens, tokens that are not (B, T) whole numbers with B, T >= 1, or puzzle_ids
        that are not (B,) whole numbers.
    """
    if "tokens" not in batch:
        raise ValueError(f"batch has the keys {sorted(batch)}, but needs 'tokens'")
    shape = jnp.shape(batch["tokens"])
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"batch['tokens'] has shape {shape}, allowed: (B, T) with B, T >= 1")
    for name, want in (("tokens", shape), ("puzzle_ids", shape[:1])):
        if name in batch:
            got, dtype = jnp.shape(batch[name]), jnp.result_type(batch[name])
            if got != want or not jnp.issubdtype(dtype, jnp.integer):
                raise ValueError(
                    f"batch[{name!r}] has shape {got} and type {dtype}, allowed: whole numbers of "
                    f"shape {want}"
                )


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Text for an error: the closest allowed name, if any, and all of them."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} Allowed: {', '.join(names)}" if hint else f"; allowed: {', '.join(names)}"


def parse_options(cls: Any, options: Mapping[str, Any], what: str) -> Any:
    """Builds the frozen dataclass `cls` from a mapping.

    Raises:
      ValueError: an unknown key (with the nearest valid one), a missing one, or a value of another
        type.
    """
    _check_mapping(options, what)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for name, value in options.items():
        if name not in fields:
            raise ValueError(f"unknown key {name!r} in {what}{nearest(name, fields)}")
        values[name] = _typed(value, fields[name], what)
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    return cls(**values)


def _check_mapping(options: Any, what: str) -> None:
    if not hasattr(options, "items"):  # An ml_collections ConfigDict is not a Mapping.
        raise ValueError(f"{what}={options!r}, allowed: a mapping of option names to values")


def _typed(value: Any, field: dataclasses.Field[Any], what: str) -> Any:
    kind = str(field.type).split(" | ")[0]
    allowed: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}
    if kind in allowed and not (value is None and "None" in str(field.type)):
        if not isinstance(value, allowed[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ValueError(f"{what}.{field.name}={value!r}, allowed: a value of type {kind}")
        return float(value) if kind == "float" else value
    return tuple(value) if isinstance(value, list) else value


def make_solver(options: Mapping[str, Any], train: bool) -> Damped:
    """`Damped` from a config: {"preset": name, "train": {field: value}, "eval": {field: value}}."""
    _check_mapping(options, "model.solver")
    for name in options:
        if name not in ("preset", "train", "eval"):
            raise ValueError(
                f"unknown key {name!r} in model.solver{nearest(name, ('preset', 'train', 'eval'))}"
            )
    which = "train" if train else "eval"
    base = solvers.preset(options.get("preset", "fprm"), train)
    changes = options.get(which, {})
    _check_mapping(changes, f"model.solver.{which}")
    return parse_options(Damped, dataclasses.asdict(base) | dict(changes), f"model.solver.{which}")


_ADJOINTS: dict[str, Callable[..., Adjoint]] = {
    "one_step": adjoints.OneStep,
    "unrolled": adjoints.Unrolled,
    "neumann": adjoints.Neumann,
    "implicit": adjoints.Implicit,
}


def make_adjoint(options: Mapping[str, Any]) -> Adjoint:
    """Gradient rule from a config: {"name": "one_step", "k": 4, ...}."""
    _check_mapping(options, "model.adjoint")
    rest = dict(options)
    name = rest.pop("name", "one_step")
    if name not in _ADJOINTS:
        raise ValueError(f"unknown model.adjoint.name {name!r}{nearest(name, _ADJOINTS)}")
    return parse_options(_ADJOINTS[name], rest, "model.adjoint")


def dtype_of(name: str) -> Any:
    """Compute type from its config name.

    Raises:
      ValueError: neither "float32" nor "bfloat16".
    """
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"model.dtype={name!r}, allowed: float32, bfloat16")
    return jnp.dtype(name)


def _per_sample(key: jax.Array) -> bool:
    """Whether `key` is (B,) keys, new style or raw, and not one key."""
    return key.ndim == (1 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 2)


def fold_in(key: jax.Array, data: int) -> jax.Array:
    """`jax.random.fold_in` for one key or for (B,) keys."""
    if _per_sample(key):
        return jax.vmap(lambda k: jax.random.fold_in(k, data))(key)
    return jax.random.fold_in(key, data)


def sample_keys(key: jax.Array, batch: int) -> jax.Array:
    """(B,) keys: those given, or one per batch position, the same whatever the batch size."""
    if _per_sample(key):
        return key
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch))
