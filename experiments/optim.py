"""The optimiser of a config: AdamW with warm-up, a schedule, clipping and a weight-decay mask.

Per-puzzle embeddings can have an optimiser of their own, which touches the batch's rows only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.errors import UserError, unknown

SCHEDULES = ("constant", "cosine", "linear")

# Residual-scale logits must not be pulled towards sigmoid(0) = 0.5 (spec 2 section 1); biases, norm
# gains and the state-space rates and skips (A_log, omega, D, skip) are left alone by convention;
# TRM's starts are constants without a gradient, which decay would shrink to nothing.
NOT_DECAYED = ("alpha", "bias", "norm", "a_log", "omega", "'d'", "skip", "start")


def schedule(config: Mapping[str, Any], steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up from 0, then constant, cosine or linear decay.

    Args:
      config: the `optimizer` section of an experiment's config.
      steps: length of the training run, warm-up included.
    """
    peak, warmup = config["learning_rate"], config["warmup_steps"]
    end = peak * config["final_fraction"]
    after = max(1, steps - warmup)
    main = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, after, config["final_fraction"]),
        "linear": lambda: optax.linear_schedule(peak, end, after),
    }[config["schedule"]]()
    if not warmup:
        return main
    # Step 0 already learns: the ramp has its first value at peak/warmup, not at 0.
    ramp = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([ramp, main], [warmup])


def decay_mask(params: Any) -> Any:
    """True for the arrays that weight decay applies to, by the names on their path."""

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        name = jax.tree_util.keystr(path).lower()
        return not any(word in name for word in NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(decays, params)


class SignSGDState(NamedTuple):
    """State of `sign_sgd_rows`: the number of updates made, () int32."""

    updates: jax.Array


def sign_sgd_rows(
    learning_rate: optax.Schedule, weight_decay: float
) -> optax.GradientTransformationExtraArgs:
    """Sign-SGD with decoupled weight decay on some rows of embedding tables (spec 2 section 3).

    Each row in the batch, however often, moves once: w ← w - lr (sign(g) + weight_decay · w), with
    g its summed gradient; a row whose gradient is zero decays all the same. All other rows keep
    their bits: there is no state per row, and a row costs nothing in steps that do not hold it.

    `update` needs the extra argument `rows`: integers of any shape, the rows in the batch.
    """

    def init(params: Any) -> SignSGDState:
        del params
        return SignSGDState(jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: SignSGDState, params: Any = None, *, rows: jax.Array, **_: Any
    ) -> tuple[Any, SignSGDState]:
        rate, at = learning_rate(state.updates), rows.reshape(-1)

        def table(grad: jax.Array, value: jax.Array) -> jax.Array:
            change = -rate * (jnp.sign(grad[at]) + weight_decay * value[at])
            # -0.0 is the one number that changes no other, +0.0 included. Copies of a row set the
            # same value, so their order does not matter.
            return jnp.full_like(value, -0.0).at[at].set(change.astype(value.dtype))

        return jax.tree.map(table, updates, params), SignSGDState(state.updates + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def is_puzzle_embedding(path: tuple[Any, ...]) -> bool:
    """Whether a parameter's path is that of the per-puzzle embeddings."""
    return "puzzle_embedding" in jax.tree_util.keystr(path)


def make_optimizer(config: Mapping[str, Any], steps: int) -> optax.GradientTransformationExtraArgs:
    """Builds the optimiser of a config's `optimizer` section for a run of `steps` steps.

    Its `update` takes the extra argument `rows`, the puzzle ids in the batch.
    """
    adamw = optax.adamw(
        schedule(config, steps),
        b1=config["b1"],
        b2=config["b2"],
        eps=config["eps"],
        weight_decay=config["weight_decay"],
        mask=decay_mask,
    )
    dense: optax.GradientTransformation = adamw
    if config["clip_norm"]:
        dense = optax.chain(optax.clip_by_global_norm(config["clip_norm"]), adamw)
    if not config["puzzle_learning_rate"]:
        return optax.with_extra_args_support(dense)
    scaled = schedule(dict(config) | {"learning_rate": config["puzzle_learning_rate"]}, steps)
    sparse = sign_sgd_rows(scaled, config["puzzle_weight_decay"])

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "rows" if is_puzzle_embedding(path) else "dense", params
        )

    return optax.partition({"rows": sparse, "dense": dense}, labels)


def validate(config: Mapping[str, Any]) -> None:
    """Raises UserError for an `optimizer` section that cannot work."""
    if config["schedule"] not in SCHEDULES:
        raise unknown("optimizer.schedule", config["schedule"], SCHEDULES)
    for key in ("b1", "b2"):
        if not 0 <= config[key] < 1:
            raise UserError(f"optimizer.{key} must be in [0, 1), got {config[key]}")
    for key in ("learning_rate", "eps"):
        if not config[key] > 0:
            raise UserError(f"optimizer.{key} must be positive, got {config[key]}")
    positive_or_0 = ("puzzle_learning_rate", "puzzle_weight_decay")
    for key in (*positive_or_0, "weight_decay", "warmup_steps", "final_fraction", "clip_norm"):
        if not config[key] >= 0:
            raise UserError(f"optimizer.{key} must not be negative, got {config[key]}")
