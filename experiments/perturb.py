"""What training may do at random beyond its data: caps, weight dropout (spec 2 section 2).

All are off by default. Noise in the solver and variational dropout are options of the model
(`model.solver.train.noise`, `model.dropout`): they act within a solve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.errors import UserError, unknown
from experiments.optim import decay_mask

PyTree = Any
Options = Mapping[str, Any]

CAPS = ("none", "gamma", "exponential")


def random_caps(options: Options, keys: jax.Array, most: int) -> jax.Array | None:
    """(B,) int32 caps in 1..most, one for each sample; None where they are off.

    "gamma" draws from Γ(mean, 1), which for a mean of 4 is the Γ(4, 1) of the papers,
    "exponential" from the exponential distribution; both are rounded.

    Args:
      options: the `train.random_cap` section of a config.
      keys: (B,) PRNG keys.
      most: the cap that holds in any case.
    """
    name, mean = options["distribution"], options["mean"]
    if name == "none":
        return None

    def draw(key: jax.Array) -> jax.Array:
        if name == "gamma":
            return jax.random.gamma(key, mean)
        return mean * jax.random.exponential(key)

    return jnp.clip(jnp.round(jax.vmap(draw)(keys)), 1, most).astype(jnp.int32)


def drop_weights(params: PyTree, rate: float, key: jax.Array) -> PyTree:
    """DropConnect: sets a share `rate` of the layers' matrix entries to 0, scales the rest.

    One draw holds for all samples and iterations of a step, so that f stays one function. Dropped
    entries get no gradient. Biases, norms and what else weight decay spares are left alone.
    """
    if not rate:
        return params
    number = iter(range(2**20))

    def drop(path: tuple[Any, ...], value: jax.Array, matrix: bool) -> jax.Array:
        if not matrix or value.ndim < 2 or "layers_" not in jax.tree_util.keystr(path):
            return value
        keep = jax.random.bernoulli(jax.random.fold_in(key, next(number)), 1 - rate, value.shape)
        return jnp.where(keep, value / (1 - rate), 0.0)

    return jax.tree_util.tree_map_with_path(drop, params, decay_mask(params))


def validate(train: Options, adjoint: str) -> None:
    """Raises UserError for values in the `train` section that cannot work.

    Args:
      train: the section.
      adjoint: name of the model's gradient rule.
    """
    cap, jacobian = train["random_cap"], train["jacobian"]
    if cap["distribution"] not in CAPS:
        raise unknown("train.random_cap.distribution", cap["distribution"], CAPS)
    if not cap["mean"] > 0:
        raise UserError(f"train.random_cap.mean must be positive, got {cap['mean']}")
    if cap["distribution"] != "none" and train["regime"] == "solve" and adjoint == "unrolled":
        raise UserError(
            "train.random_cap gives each sample its own number of steps, which the adjoint "
            "'unrolled' cannot; use model.adjoint.name 'one_step', 'neumann' or 'implicit'"
        )
    if not 0 <= train["weight_dropout"] < 1:
        raise UserError(f"train.weight_dropout must be in [0, 1), got {train['weight_dropout']}")
    for key in ("weight", "step"):
        if jacobian[key] < 0:
            raise UserError(f"train.jacobian.{key} must not be negative, got {jacobian[key]}")
