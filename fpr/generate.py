"""Sequential decoding: a cache, one token at a time, whole continuations.

Decoding is the parallel form of a model with a cache as its start (`fpr.models.base`), so a prompt
may be read at once, in pieces or token by token. A fixed-point layer solves for the new tokens
alone, from the cached state and last output of those before them (spec 1, sequential mode).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fpr.models import base
from fpr.models.base import Output
from fpr.registry import build
from fpr.solvers import Damped

PyTree = Any
Config = Mapping[str, Any]
PADDING = 0


class Generation(NamedTuple):
    """What `generate` returns for B prompts of up to T tokens and N new ones.

    Attributes:
      tokens: (B, T + N) int32, each row its prompt, its N new tokens, then padding (0).
      steps: (B, N) int32, applications of f before each new token, summed over layers and, for the
        first one, over the solves that read the prompt.
      residual: (B, N) float32, the largest residual of those solves.
      converged: (B, N) bool, all of those solves converged.
    """

    tokens: jax.Array
    steps: jax.Array
    residual: jax.Array
    converged: jax.Array


def init_cache(config: Config, params: PyTree, batch_size: int) -> PyTree:
    """The cache of `batch_size` sequences before their first token.

    Raises:
      ValueError: a batch size below 1, or a model that cannot decode token by token.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}, allowed: a whole number >= 1")
    return build(config).apply({"params": params}, batch_size, method="init_cache")


def prefill(
    config: Config,
    params: PyTree,
    tokens: jax.Array,
    cache: PyTree = None,
    *,
    solver: Damped | None = None,
    max_steps: jax.Array | int | None = None,
) -> tuple[Output, PyTree]:
    """Reads T tokens at once and remembers them.

    Args:
      config: model config.
      params: parameters from `fpr.init` or `fpr.load`.
      tokens: (B, T) whole numbers, none of them padding.
      cache: of the tokens before these, from any of the functions here; None: there are none.
      solver: replaces the config's evaluation solver.
      max_steps: replaces the solver's cap.

    Returns:
      The `Output` for these tokens, as `fpr.apply` of all tokens so far would give it (up to the
      solver's tolerance), and the cache after them.

    Raises:
      ValueError: a model that cannot decode token by token, bad tokens (their values are checked
        where they are not traced), a cache of another model or batch size, or more tokens than the
        model has positions for.
    """
    model = build(config)
    _check_values(tokens, model.config.vocab_size)
    if solver is None:
        solver = base.make_solver(model.config.solver, False)
    result: Any = model.apply(
        {"params": params}, {"tokens": jnp.asarray(tokens)}, cache,
        solver=solver, max_steps=max_steps, method="extend",
    )  # fmt: skip
    return result


def decode(
    config: Config,
    params: PyTree,
    tokens: jax.Array,
    cache: PyTree,
    *,
    solver: Damped | None = None,
    max_steps: jax.Array | int | None = None,
) -> tuple[Output, PyTree]:
    """Reads one token per sequence: `prefill` of tokens (B,).

    Returns:
      The `Output` with logits (B, V) for the next token, the steps, residual and convergence (B,)
      of this token's solve, and the cache after it.

    Raises:
      ValueError: as `prefill`.
    """
    tokens = _as_array(tokens)
    if tokens.ndim != 1:
        raise ValueError(f"tokens has shape {tokens.shape}, allowed: (B,), one per sequence")
    out, cache = prefill(config, params, tokens[:, None], cache, solver=solver, max_steps=max_steps)
    return out._replace(logits=out.logits[:, 0]), cache


def generate(
    config: Config,
    params: PyTree,
    prompt: jax.Array,
    num_tokens: int,
    *,
    prompt_lengths: jax.Array | None = None,
    key: jax.Array | None = None,
    temperature: float = 0.0,
    solver: Damped | None = None,
) -> Generation:
    """Continues prompts, greedily or by sampling. Compile it with the options bound:

        >>> run = jax.jit(functools.partial(fpr.generate, config, num_tokens=100))
        >>> run(params, prompt).tokens

    Args:
      config: model config.
      params: parameters from `fpr.init` or `fpr.load`.
      prompt: (B, T) whole numbers, T >= 1.
      num_tokens: N, new tokens per prompt; 0 returns the prompt.
      prompt_lengths: (B,) whole numbers in 1..T where prompts are shorter than T; what stands after
        them is ignored. The prompts are then read token by token, which is slower than at once.
      key: PRNG key, or (B,) keys, for sampling; row i draws the same in any batch.
      temperature: divides the logits before sampling; 0 takes the most likely token.
      solver: replaces the config's evaluation solver.

    Returns:
      A `Generation`.

    Raises:
      ValueError: options out of range, sampling without a key, or as `prefill`.
    """
    prompt = _as_array(prompt)
    base.check_batch({"tokens": prompt})
    batch, time = prompt.shape
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens!r}, allowed: a whole number >= 0")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature!r}, allowed: >= 0")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature={temperature!r} samples: give a PRNG key")
    lengths = _check_lengths(prompt_lengths, batch, time)
    model = build(config)
    _check_values(prompt, model.config.vocab_size, prompt_lengths)
    prompt = jnp.asarray(prompt, jnp.int32)
    longest = max(time + num_tokens - 1, 1)  # The last new token is never read.
    model.apply({"params": params}, longest, method="check_sequential")
    if num_tokens == 0:
        empty = jnp.zeros((batch, 0))
        tokens = jnp.where(jnp.arange(time) < lengths[:, None], prompt, PADDING)
        return Generation(tokens, empty.astype(jnp.int32), empty, empty.astype(bool))
    keys = None if temperature == 0 or key is None else base.sample_keys(key, batch)

    def choose(logits: jax.Array, at: jax.Array | int) -> jax.Array:
        if keys is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        here = base.fold_in(keys, at)
        return jax.vmap(jax.random.categorical)(here, logits / temperature).astype(jnp.int32)

    # Token `at` is the prompt's where the row has one, else the choice from the logits before it.
    first = time if prompt_lengths is None else 1
    out, cache = prefill(config, params, prompt[:, :first], solver=solver)
    padded = jnp.pad(prompt, ((0, 0), (0, num_tokens)))

    def step(carry: Any, at: jax.Array) -> tuple[Any, Any]:
        logits, cache = carry
        token = jnp.where(at < lengths, padded[:, at], choose(logits, at))
        out, cache = decode(config, params, token, cache, solver=solver)
        return (out.logits, cache), (token, out.steps, out.residual, out.converged)

    (logits, _), rows = jax.lax.scan(
        step, (out.logits[:, -1], cache), jnp.arange(first, time + num_tokens - 1)
    )
    last = choose(logits, time + num_tokens - 1)
    new, *solves = (jnp.moveaxis(row, 0, 1) for row in rows)
    tokens = jnp.concatenate([prompt[:, :first], new, last[:, None]], axis=1)
    ends = lengths[:, None] + num_tokens
    tokens = jnp.where(jnp.arange(time + num_tokens) < ends, tokens, PADDING)
    steps, residual, converged = (
        jnp.concatenate([a[:, None], b], axis=1)
        for a, b in zip((out.steps, out.residual, out.converged), solves)
    )
    read = lengths - first + 1
    return Generation(tokens, *_per_new_token(steps, residual, converged, read, num_tokens))


def _check_lengths(lengths: Any, batch: int, time: int) -> jax.Array:
    """(B,) prompt lengths; values are checked unless they are traced."""
    if lengths is None:
        return jnp.full((batch,), time, jnp.int32)
    shape, dtype = jnp.shape(lengths), jnp.result_type(lengths)
    if shape != (batch,) or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"prompt_lengths has shape {shape} and type {dtype}, allowed: whole numbers of shape "
            f"({batch},)"
        )
    if not isinstance(lengths, jax.core.Tracer):
        values = np.asarray(lengths)
        if values.min() < 1 or values.max() > time:
            raise ValueError(f"prompt_lengths={values.tolist()}, allowed: 1 to {time}")
    return jnp.asarray(lengths, jnp.int32)


def _as_array(tokens: Any) -> Any:
    """An array that still has the values given: JAX would wrap those beyond 32 bits around."""
    return tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)


def _check_values(tokens: Any, vocab_size: int, lengths: Any = None) -> None:
    """Checks that tokens (B, T), in each row the first `lengths`, have ids, unless traced.

    An embedding would read another row for them, so that the answer would be wrong without a word.
    """
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    values = np.asarray(tokens)
    if values.size == 0:
        return  # Refused for its shape, by the model.
    if lengths is not None:
        read = np.arange(values.shape[1]) < np.asarray(lengths)[:, None]
        values = np.where(read, values, PADDING)
    for worst in (int(values.min()), int(values.max())):
        if not 0 <= worst < vocab_size:
            raise ValueError(f"tokens hold the id {worst}, allowed: 0 to {vocab_size - 1}")


def _per_new_token(
    steps: jax.Array, residual: jax.Array, converged: jax.Array, read: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accounts of all solves (B, S) as accounts of new tokens (B, count).

    `read` (B,) >= 1 is the number of solves that read a row's prompt: they all count for its first
    new token, each later solve for the token after it.
    """
    prompt = jnp.arange(steps.shape[1]) < read[:, None]
    later = read[:, None] + jnp.arange(count - 1)

    def joined(first: jax.Array, values: jax.Array) -> jax.Array:
        rest = jnp.take_along_axis(values, later, axis=1)
        return jnp.concatenate([first[:, None], rest], axis=1)

    return (
        joined(jnp.where(prompt, steps, 0).sum(axis=1), steps),
        joined(jnp.where(prompt, residual, 0).max(axis=1), residual),
        joined((converged | ~prompt).all(axis=1), converged),
    )


def sequential_difference(
    config: Config,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    *,
    solver: Damped | None = None,
    max_steps: jax.Array | int | None = None,
) -> jax.Array:
    """How far token by token is from all tokens at once: ‖y_seq - y_par‖ / ‖y_par‖, (B,) float32.

    y holds the solutions of all looped layers, or the logits of a model without a loop. Both ways
    reach the same fixed point where they converge and it is unique; in training the difference
    shows how far that is true (v1 of arXiv 2503.10799, figure 5).

    Args:
      config: model config.
      params: parameters.
      batch: {"tokens": (B, T), ...}; only the tokens are read.
      solver: replaces the config's evaluation solver, for both.
      max_steps: replaces its cap, for both.

    Raises:
      ValueError: as `prefill`.
    """
    base.check_batch(batch)
    tokens = jnp.asarray(batch["tokens"])
    parallel, _ = prefill(config, params, tokens, solver=solver, max_steps=max_steps)

    def solutions(out: Output) -> list[jax.Array]:
        return [s.z for s in out.state] if out.state else [out.logits]

    def step(cache: PyTree, token: jax.Array) -> tuple[PyTree, list[jax.Array]]:
        out, cache = prefill(
            config, params, token[:, None], cache, solver=solver, max_steps=max_steps
        )
        return cache, [y[:, 0] for y in solutions(out)]

    start = init_cache(config, params, tokens.shape[0])
    _, one_by_one = jax.lax.scan(step, start, tokens.T)
    difference = norm = jnp.zeros((tokens.shape[0],), jnp.float32)
    for y, rows in zip(solutions(parallel), one_by_one):
        axes = tuple(range(1, y.ndim))
        change = (jnp.moveaxis(rows, 0, 1) - y).astype(jnp.float32)
        difference += jnp.sum(change**2, axis=axes)
        norm += jnp.sum(y.astype(jnp.float32) ** 2, axis=axes)
    return jnp.sqrt(difference / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
