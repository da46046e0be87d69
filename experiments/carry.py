"""Deep supervision with a carry (spec 2 section 3): slots that keep an example between steps.

Each optimiser step runs `train.window` more applications of f, all differentiated. A slot whose
example has ended takes the example of the same slot from the step's new batch, with a fresh start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fpr
from experiments import perturb
from experiments.errors import UserError, unknown
from fpr.adjoints import Unrolled
from fpr.models import base
from fpr.solvers import select

PyTree = Any
Batch = Mapping[str, Any]
Config = Mapping[str, Any]

HALTING = ("fixed_point", "act", "fixed_iterations")

# Folded into a slot's key: what each draw is for.
_EXPLORE, _CAP = 2**29, 2**29 + 1


class Carry(NamedTuple):
    """What B slots keep between optimiser steps.

    Attributes:
      batch: the slots' examples, leaves (B, ...).
      solver: the solver states of the model's looped layers.
      windows: (B,) int32, windows that the slot's example has had.
      done: (B,) bool, the slot takes a new example in the next step.
      least: (B,) int32, windows before the Q head may end the example; None unless `act`.
      most: (B,) int32, the example's random cap on windows, or None.
    """

    batch: Batch
    solver: PyTree
    windows: jax.Array
    done: jax.Array
    least: jax.Array | None = None
    most: jax.Array | None = None


def init(config: Config, params: PyTree, batch: Batch, key: jax.Array) -> Carry:
    """Slots that take a new example in the first step; `batch` gives the shapes."""
    size = batch["tokens"].shape[0]
    keys = base.sample_keys(key, size)
    return Carry(
        jax.tree.map(jnp.asarray, dict(batch)),
        _fresh(config, params, batch, keys),
        jnp.zeros((size,), jnp.int32),
        jnp.ones((size,), bool),
        *_bounds(config["train"], keys),
    )


def _fresh(config: Config, params: PyTree, batch: Batch, keys: jax.Array) -> PyTree:
    """Solver states at z0: a solve of no steps; the rest of the model is dead code to XLA."""
    state = fpr.apply(config["model"], params, batch, train=True, key=keys, max_steps=0).state
    return jax.lax.stop_gradient(state)


def _bounds(train: Config, keys: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """`Carry.least` and `Carry.most` of new examples."""
    least, longest = None, train["max_windows"]
    if train["halting"] == "act":

        def draw(key: jax.Array) -> jax.Array:
            explore, number = jax.random.split(key)
            windows = jax.random.randint(number, (), min(2, longest), longest + 1)
            return jnp.where(jax.random.bernoulli(explore, train["exploration"]), windows, 1)

        least = jax.vmap(draw)(base.fold_in(keys, _EXPLORE))
    return least, perturb.random_caps(train["random_cap"], base.fold_in(keys, _CAP), longest)


def window(
    config: Config, params: PyTree, carry: Carry, batch: Batch, keys: jax.Array
) -> tuple[fpr.Output, Carry]:
    """One window for every slot: the model's output on the slots' examples, and the new carry.

    Args:
      config: complete config.
      params: parameters; the output is differentiable with respect to them.
      carry: as the last step left it.
      batch: new examples, of which the slots that are done take theirs.
      keys: (B,) PRNG keys of this step.
    """
    train = config["train"]
    fresh = _fresh(config, jax.lax.stop_gradient(params), batch, keys)
    new = Carry(
        dict(batch), fresh, jnp.zeros_like(carry.windows), carry.done, *_bounds(train, keys)
    )
    now: Any = select(carry.done, new, carry._replace(batch=dict(carry.batch)))
    out = fpr.apply(
        config["model"], params, now.batch,
        train=True, key=keys, state=now.solver, adjoint=Unrolled(), max_steps=train["window"],
    )  # fmt: skip
    windows = now.windows + 1
    done = windows >= (train["max_windows"] if now.most is None else now.most)
    done |= jnp.stack([s.failed for s in out.state]).any(axis=0)  # NaN: nothing to go on from
    if train["halting"] == "fixed_point":
        done |= jnp.stack([s.halted for s in out.state]).all(axis=0)
    elif train["halting"] == "act" and out.q_logits is not None:  # `validate` asks for them.
        done |= (out.q_logits[:, 0] > 0) & (windows >= now.least)
    return out, now._replace(solver=out.state, windows=windows, done=done)


def validate(config: Config, out: fpr.Output) -> None:
    """Raises UserError where the regime does not suit the model.

    Args:
      config: complete config with `train.regime` "carry".
      out: shapes of the model's output.
    """
    train, model = config["train"], config["model"]
    if train["halting"] not in HALTING:
        raise unknown("train.halting", train["halting"], HALTING)
    if not 0 <= train["exploration"] <= 1:
        raise UserError(f"train.exploration must be in [0, 1], got {train['exploration']}")
    if not out.state:
        raise UserError(f"train.regime 'carry' needs a model with a loop, not {model['name']!r}")
    solver = model["solver"]["train"]["halting"]
    if train["halting"] == "fixed_point":
        if solver == "batch":  # "never" ends at `max_windows`, like "fixed_iterations".
            raise UserError(
                "train.regime 'carry' refills slots one by one: model.solver.train.halting must be "
                f"'sample' or 'never', got {solver!r}"
            )
    elif solver != "never":
        raise UserError(
            f"train.halting {train['halting']!r} goes on after the solver has converged: "
            f"model.solver.train.halting must be 'never', got {solver!r}"
        )
    if train["halting"] == "act":
        if out.q_logits is None or not config["q_loss_weight"]:
            raise UserError("train.halting 'act' needs a model with a Q head and q_loss_weight > 0")
        if train["random_cap"]["distribution"] != "none":
            raise UserError("train.halting 'act' has its own random bound; leave out random_cap")
