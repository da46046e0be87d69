"""The optimiser of a config: AdamW with warm-up, a schedule, clipping and a weight-decay mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
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


def make_optimizer(config: Mapping[str, Any], steps: int) -> optax.GradientTransformation:
    """Builds the optimiser of a config's `optimizer` section for a run of `steps` steps."""
    adamw = optax.adamw(
        schedule(config, steps),
        b1=config["b1"],
        b2=config["b2"],
        eps=config["eps"],
        weight_decay=config["weight_decay"],
        mask=decay_mask,
    )
    if not config["clip_norm"]:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config["clip_norm"]), adamw)


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
    for key in ("weight_decay", "warmup_steps", "final_fraction", "clip_norm"):
        if not config[key] >= 0:
            raise UserError(f"optimizer.{key} must not be negative, got {config[key]}")
