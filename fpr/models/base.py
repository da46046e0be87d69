"""The one road: embed tokens, solve each layer's fixed point, read out, head.

A model is an embedding, a list of `Layer`s and a head; this file turns them into logits and into an
honest account of how the solves went. A layer without a loop is a layer with `loop = False`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fpr import adjoints, solvers
from fpr.adjoints import Adjoint, OneStep
from fpr.fixed_point import Trace, fixed_point, trace
from fpr.solvers import Damped, SolverState

PyTree = Any
_SOLVE = 2**30  # Folded into the keys of what is random within a solve: dropout, noise.
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

    def differentiable_step(self, x: PyTree, z: PyTree) -> PyTree:
        """f with its whole derivative with respect to z, for a layer whose `step` cuts that short.

        What `step` does not differentiate with respect to parameters and x stays a constant.
        """
        return self.step(x, z)

    def readout(self, h: jax.Array, x: PyTree, z: PyTree) -> jax.Array:
        """The stream after the layer, its residual connection included."""
        raise TypeError(f"{type(self).__name__} does not define readout")

    @property
    def dropout(self) -> float:
        """Rate of the layer's variational dropout."""
        return 0.0

    def drop(self, x: PyTree, key: jax.Array) -> PyTree:
        """x with the dropout masks of one solve, for a layer that has dropout; key: (B,) keys."""
        raise TypeError(f"{type(self).__name__} does not define drop")


class SequentialLayer(Layer):
    """A layer that can go on where an earlier call stopped, so that it decodes token by token.

    Its cache is all it remembers of the tokens so far, a pytree whose leaves lead with B. The
    parallel form takes it as its start; decoding a token is that form with T = 1, and nothing else.
    """

    def check_sequential(self, length: int) -> None:
        """Raises ValueError where the options rule decoding out, or decoding `length` tokens."""

    def init_cache(self, batch_size: int) -> PyTree:
        """The cache before the first token."""
        raise TypeError(f"{type(self).__name__} does not define init_cache")

    def inject(self, h: jax.Array, cache: PyTree = None) -> PyTree:
        """x, with what the tokens before h left in `cache`; None: h is the beginning.

        With a cache, x also holds what `next_cache` needs.
        """
        raise TypeError(f"{type(self).__name__} does not define inject")

    def next_cache(self, x: PyTree, z: PyTree) -> PyTree:
        """The cache after h, from the x that a cache went into and the solution z."""
        raise TypeError(f"{type(self).__name__} does not define next_cache")


def as_function(
    layer: Layer, method: str = "step"
) -> tuple[Callable[[PyTree, PyTree, PyTree], PyTree], PyTree]:
    """A bound layer's `step` (or another method) as a pure f(params, x, z), and its parameters.

    The solver's loop must not see bound Flax variables: they would leak tracers.
    """
    module, variables = layer.unbind()

    def f(params: PyTree, x: PyTree, z: PyTree) -> PyTree:
        return module.apply({"params": params}, x, z, method=method)

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
        return self._run(batch, None, solver, adjoint, key, state, max_steps)[0]

    def init_cache(self, batch_size: int) -> tuple[PyTree, ...]:
        """Each layer's cache before the first token."""
        self.check_sequential(1)
        return tuple(layer.init_cache(batch_size) for layer in self.layers)

    def extend(
        self,
        batch: Mapping[str, jax.Array],
        cache: tuple[PyTree, ...] | None,
        *,
        solver: Damped,
        max_steps: jax.Array | int | None = None,
    ) -> tuple[Output, tuple[PyTree, ...]]:
        """The tokens of `batch` after those that `cache` remembers; None: from the beginning.

        Raises:
          ValueError: a bad batch, a cache of another model or batch size, or a model that cannot
            decode this many tokens.
        """
        check_batch(batch)
        batch_size, length = batch["tokens"].shape
        self.check_sequential(length)
        if cache is None:
            cache = self.init_cache(batch_size)
        else:
            self._check_cache(cache, batch_size)
        return self._run(batch, cache, solver, OneStep(), None, None, max_steps)

    def _check_cache(self, cache: PyTree, batch_size: int) -> None:
        """Raises ValueError unless `cache` has the structure and shapes of `init_cache`."""
        model, variables = self.unbind()

        def fresh(variables: PyTree) -> PyTree:
            return model.apply(variables, batch_size, method="init_cache")

        like, given = jax.eval_shape(fresh, variables), jax.tree.leaves(cache)
        structure: Any = jax.tree.structure(cache)
        whose = f"the cache of {type(self).__name__} for a batch of {batch_size}"
        if structure != jax.tree.structure(like):
            raise ValueError(f"cache has {len(given)} arrays in {structure}, allowed: {whose}")
        for (path, want), leaf in zip(jax.tree_util.tree_leaves_with_path(like), given):
            if jnp.shape(leaf) != want.shape:
                raise ValueError(
                    f"cache{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}, allowed: "
                    f"{want.shape}, as in {whose}"
                )

    def check_sequential(self, length: int) -> None:
        """Raises ValueError unless the model can decode `length` tokens one by one."""
        for layer in self.layers:
            if not isinstance(layer, SequentialLayer):
                raise ValueError(
                    f"{type(self).__name__} reads its whole input at once: it cannot decode token "
                    "by token; the recurrent models and the causal transformer can"
                )
            layer.check_sequential(length)

    def _run(
        self,
        batch: Mapping[str, jax.Array],
        cache: tuple[PyTree, ...] | None,
        solver: Damped,
        adjoint: Adjoint,
        key: jax.Array | None,
        state: tuple[SolverState, ...] | None,
        max_steps: jax.Array | int | None,
    ) -> tuple[Output, tuple[PyTree, ...]]:
        """The output and each layer's next cache (none without a cache)."""
        check_batch(batch)
        h = self.embed(batch)
        states: list[SolverState] = []
        loops = sum(layer.loop for layer in self.layers)
        if state is not None and len(state) != loops:
            raise ValueError(f"state holds {len(state)} solver states, the model has {loops} loops")
        steps, residuals, converged, caches = [], [], [], []
        for i, layer in enumerate(self.layers):
            x = layer.inject(h) if cache is None else layer.inject(h, cache[i])
            carried = state[len(states)] if state is not None and layer.loop else None
            if carried is not None:
                z0 = carried.z
            else:
                z0 = layer.init_state(x, None if key is None else fold_in(key, i))
            data = None  # of the keys of the solve's own randomness
            if carried is not None:
                data = carried.key
            elif key is not None and (layer.dropout or (layer.loop and solver.noise)):
                keys = fold_in(sample_keys(fold_in(key, i), h.shape[0]), _SOLVE)
                data = jax.random.key_data(keys)
            if layer.dropout and data is not None:
                x = layer.drop(x, jax.random.wrap_key_data(data))
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
                        key=data,
                    )  # fmt: skip
                    z = solution.value
                    states.append(solution.state)
                    steps.append(solution.steps)
                    residuals.append(solution.residual)
                    converged.append(solution.converged)
            if cache is not None:
                caches.append(layer.next_cache(x, z))
            h = layer.readout(h, x, z)
        logits, q_logits = self.head(h)
        b = h.shape[0]
        if not steps:
            output = Output(
                logits, jnp.ones((b,), jnp.int32), jnp.zeros((b,)), jnp.ones((b,), bool),
                jnp.zeros((b, 0), jnp.int32), q_logits, tuple(states),
            )  # fmt: skip
            return output, tuple(caches)
        layer_steps = jnp.stack(steps, axis=1)
        output = Output(
            logits,
            layer_steps.sum(axis=1),
            jnp.stack(residuals).max(axis=0),
            jnp.stack(converged).all(axis=0),
            layer_steps,
            q_logits,
            tuple(states),
        )
        return output, tuple(caches)

    def jacobian_norm(
        self,
        batch: Mapping[str, jax.Array],
        state: tuple[SolverState, ...],
        key: jax.Array,
        *,
        step: float = 0.0,
    ) -> jax.Array:
        """Estimate of ‖∂f/∂z‖²_F / n at each sample's iterate, averaged over the loops.

        n is the size of the sample's z. With ε ~ N(0, 1) both E‖Jᵀε‖² and E‖Jε‖² are ‖J‖²_F
        (Hutchinson); one ε is drawn for every sample and loop.

        Args:
          batch: as for a call.
          state: the looped layers' states, from an `Output`; their iterates count as constants.
          key: PRNG key, or (B,) of them.
          step: 0 takes Jᵀε by a vector-Jacobian product; h > 0 takes (f(z + hε) - f(z)) / h.

        Returns:
          (B,) float32, differentiable with respect to the parameters.
        """
        h, norms, rest = self.embed(batch), [], list(state)
        for i, layer in enumerate(self.layers):
            x = layer.inject(h)
            if not layer.loop:
                h = layer.readout(h, x, layer.step(x, layer.init_state(x, None)))
                continue
            carried = rest.pop(0)
            if layer.dropout and carried.key is not None:
                x = layer.drop(x, jax.random.wrap_key_data(carried.key))
            z = jax.lax.stop_gradient(carried.z)
            keys = sample_keys(fold_in(key, i), h.shape[0])
            f, params = as_function(layer, "differentiable_step")
            norms.append(_jacobian_norm(f, params, x, z, keys, step))
            h = layer.readout(h, x, z)
        if not norms:
            raise ValueError(f"{type(self).__name__} has no loop, so f has no Jacobian")
        return jnp.mean(jnp.stack(norms), axis=0)

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


def _jacobian_norm(
    f: Callable[[PyTree, PyTree, PyTree], PyTree],
    params: PyTree,
    x: PyTree,
    z: PyTree,
    keys: jax.Array,
    step: float,
) -> jax.Array:
    """One loop's part of `Model.jacobian_norm`, (B,)."""
    leaves, treedef = jax.tree.flatten(z)

    def draw(i: int, leaf: jax.Array) -> jax.Array:
        one = functools.partial(jax.random.normal, shape=leaf.shape[1:], dtype=leaf.dtype)
        return jax.vmap(one)(fold_in(keys, i))

    noise = jax.tree.unflatten(treedef, [draw(i, leaf) for i, leaf in enumerate(leaves)])

    def at(z: PyTree) -> PyTree:
        return jax.tree.map(lambda new, old: new.astype(old.dtype), f(params, x, z), z)

    if step:
        moved = at(jax.tree.map(lambda a, e: a + step * e, z, noise))
        product = jax.tree.map(lambda a, b: (a - b) / step, moved, at(z))
    else:
        (product,) = jax.vjp(at, z)[1](noise)
    total, size = jnp.zeros((keys.shape[0],)), 0
    for leaf in jax.tree.leaves(product):
        total += jnp.sum(jnp.square(leaf.reshape(leaf.shape[0], -1)), axis=1, dtype=jnp.float32)
        size += leaf.size // leaf.shape[0]
    return total / size


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


def fold_in(key: jax.Array, data: jax.Array | int) -> jax.Array:
    """`jax.random.fold_in` for one key or for (B,) keys."""
    if _per_sample(key):
        return jax.vmap(lambda k: jax.random.fold_in(k, data))(key)
    return jax.random.fold_in(key, data)


def sample_keys(key: jax.Array, batch: int) -> jax.Array:
    """(B,) keys: those given, or one per batch position, the same whatever the batch size."""
    if _per_sample(key):
        return key
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch))
