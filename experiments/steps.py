"""One optimiser step, compiled: the plain regime and deep supervision with a carry.

"solve" (spec 1 section 4): solve, differentiate by the model's adjoint, update.
"carry" (spec 2 section 3): a slot keeps its example and solver state between steps; each step runs
`train.window` more applications of f, all differentiated, and updates. A slot whose solve has ended
takes the example of the same slot from the step's new batch, with a fresh start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fpr
from experiments import curriculum, losses
from experiments.curriculum import Curriculum
from fpr.adjoints import Unrolled
from fpr.solvers import select

PyTree = Any
Batch = Mapping[str, Any]
Config = Mapping[str, Any]


class Carry(NamedTuple):
    """What B slots keep between optimiser steps of the carry regime.

    Attributes:
      batch: the slots' examples, leaves (B, ...).
      solver: the solver states of the model's looped layers.
      windows: (B,) int32, windows that the slot's example has had.
      done: (B,) bool, the slot takes a new example in the next step.
    """

    batch: Batch
    solver: PyTree
    windows: jax.Array
    done: jax.Array


class TrainState(NamedTuple):
    """All that a training run needs to go on; a checkpoint is exactly this.

    Attributes:
      step: () int32, optimiser steps done.
      params: model parameters.
      opt_state: Optax state.
      ema: averaged parameters, or None where `ema` is 0.
      carry: `Carry`, or None in the solve regime.
      curriculum: `Curriculum`, or None without one.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    ema: PyTree
    carry: Carry | None
    curriculum: Curriculum | None


def averaged(state: TrainState) -> PyTree:
    """The parameters to evaluate with: the averaged ones where the run keeps them."""
    return state.params if state.ema is None else state.ema


def init_state(config: Config, optimizer: optax.GradientTransformation, batch: Batch) -> TrainState:
    """The state before the first step; `batch` gives shapes and fills the carry's first slots."""
    key = jax.random.fold_in(jax.random.key(config["seed"]), 0)
    params = fpr.init(config["model"], key, batch)
    carry = None
    if config["train"]["regime"] == "carry":
        size = batch["tokens"].shape[0]
        carry = Carry(
            batch=jax.tree.map(jnp.asarray, dict(batch)),
            solver=_fresh(config, params, batch, key),
            windows=jnp.zeros((size,), jnp.int32),
            done=jnp.ones((size,), bool),
        )
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        # A copy: the step donates its input, and one buffer must not be donated twice.
        ema=jax.tree.map(jnp.copy, params) if config["ema"] else None,
        carry=carry,
        curriculum=curriculum.init(config["train"]["curriculum"]),
    )


def _fresh(config: Config, params: PyTree, batch: Batch, key: jax.Array) -> PyTree:
    """Solver states at z0: a solve of no steps; the rest of the model is dead code to XLA."""
    state = fpr.apply(config["model"], params, batch, train=True, key=key, max_steps=0).state
    return jax.lax.stop_gradient(state)


def make_train_step(
    config: Config, optimizer: optax.GradientTransformation, length: int = 0
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be jitted.

    `length` is that of the task's training sequences, at which a curriculum ends; the batches of a
    curriculum may be cropped to any length that it has not passed.

    Metrics: `loss`, `grad_norm`, and sums over the examples whose solve ended in this step (all of
    them in the solve regime): `finished` (their number), `sequences_correct`, `tokens_correct`,
    `tokens`, `solver_steps`, `converged`; with a curriculum also its `curriculum_length` and
    `curriculum_accuracy` after the step.
    """
    objective: Callable[..., Any] = _REGIMES[config["train"]["regime"]]
    root = jax.random.fold_in(jax.random.key(config["seed"]), 1)
    decay = config["ema"]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(root, state.step)
        course = state.curriculum
        if course is not None:
            batch = curriculum.mask(batch, course.length)

        def loss_fn(params: PyTree) -> tuple[jax.Array, tuple[Carry | None, dict]]:
            loss, (carry, outcome) = objective(config, params, state.carry, batch, key)
            return loss, (carry, _metrics(outcome, course))

        (loss, (carry, metrics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        metrics |= {"loss": loss, "grad_norm": optax.global_norm(grads)}
        if course is not None:
            counts = metrics.pop("length_correct"), metrics.pop("length_finished")
            course = curriculum.update(course, config["train"]["curriculum"], length, *counts)
            metrics |= {
                "curriculum_length": course.length, "curriculum_accuracy": course.accuracy,
            }  # fmt: skip
        return TrainState(state.step + 1, params, opt_state, ema, carry, course), metrics

    return step


class Outcome(NamedTuple):
    """What a step's forward pass gave, for its metrics.

    Attributes:
      out: the model's output.
      batch: the examples it was given (of the slots, in the carry regime).
      finished: (B,) bool, the examples whose solve has ended.
    """

    out: fpr.Output
    batch: Batch
    finished: jax.Array


def _solve(
    config: Config, params: PyTree, carry: None, batch: Batch, key: jax.Array
) -> tuple[jax.Array, tuple[None, Outcome]]:
    """Loss of the plain regime."""
    out = fpr.apply(config["model"], params, batch, train=True, key=key)
    everyone = jnp.ones(out.steps.shape, bool)
    return _loss(config, out, batch), (None, Outcome(out, batch, everyone))


def _window(
    config: Config, params: PyTree, carry: Carry, batch: Batch, key: jax.Array
) -> tuple[jax.Array, tuple[Carry, Outcome]]:
    """Loss of one window of deep supervision, and the carry after it."""
    fresh = _fresh(config, jax.lax.stop_gradient(params), batch, key)
    batch = select(carry.done, dict(batch), dict(carry.batch))
    solver = select(carry.done, fresh, carry.solver)
    windows = jnp.where(carry.done, 0, carry.windows) + 1
    train = config["train"]
    out = fpr.apply(
        config["model"], params, batch,
        train=True, key=key, state=solver, adjoint=Unrolled(), max_steps=train["window"],
    )  # fmt: skip
    halted = jnp.stack([s.halted for s in out.state]).all(axis=0)
    done = halted | (windows >= train["max_windows"])
    new = Carry(batch=batch, solver=out.state, windows=windows, done=done)
    return _loss(config, out, batch), (new, Outcome(out, batch, done))


_REGIMES: dict[str, Callable[..., Any]] = {"solve": _solve, "carry": _window}


def _loss(config: Config, out: fpr.Output, batch: Batch) -> jax.Array:
    """Mean over each example's labelled tokens, then over the batch; plus the Q head's loss."""
    token_loss = losses.TOKEN_LOSSES[config["loss"]](out.logits, batch["labels"])
    loss = jnp.mean(losses.per_example(token_loss, batch["labels"]))
    if config["q_loss_weight"] and out.q_logits is not None:
        correct = losses.sequence_correct(out.logits, batch["labels"])
        loss += config["q_loss_weight"] * jnp.mean(losses.halting_loss(out.q_logits, correct))
    return loss


def _metrics(outcome: Outcome, course: Curriculum | None) -> dict[str, jax.Array]:
    """Sums over the finished examples; see `make_train_step`."""
    out, batch, finished = outcome
    labels = batch["labels"]
    mask = finished[:, None]
    sums = {
        "finished": finished,
        "sequences_correct": losses.sequence_correct(out.logits, labels) & finished,
        "tokens_correct": losses.token_correct(out.logits, labels) & mask,
        "tokens": (labels != losses.IGNORED) & mask,
        "solver_steps": jnp.where(finished, out.steps, 0),
        "converged": out.converged & finished,
    }
    if course is not None:
        counted = finished & curriculum.reaches(labels, course.length)
        sums |= {
            "length_finished": counted,
            "length_correct": sums["sequences_correct"] & counted,
        }
    return {name: jnp.sum(value).astype(jnp.float32) for name, value in sums.items()}
