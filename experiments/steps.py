"""One optimiser step, compiled: the plain regime and deep supervision with a carry.

"solve" (spec 1 section 4): solve, differentiate by the model's adjoint, update.
"carry" (spec 2 section 3): one window of every slot, see `experiments.carry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fpr
from experiments import carry as slots
from experiments import curriculum, losses, perturb
from experiments.carry import Carry
from experiments.curriculum import Curriculum
from fpr.models import base

PyTree = Any
Batch = Mapping[str, Any]
Config = Mapping[str, Any]

# Folded into a step's key (weights) or a sample's keys of a step: what each draw is for.
_CAP, _JACOBIAN, _WEIGHTS = 2**28, 2**28 + 1, 2**28 + 2


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
    curriculum: Curriculum | None = None


def averaged(state: TrainState) -> PyTree:
    """The parameters to evaluate with: the averaged ones where the run keeps them."""
    return state.params if state.ema is None else state.ema


def init_state(config: Config, optimizer: optax.GradientTransformation, batch: Batch) -> TrainState:
    """The state before the first step; `batch` gives shapes and fills the carry's first slots."""
    key = jax.random.fold_in(jax.random.key(config["seed"]), 0)
    params = fpr.init(config["model"], key, batch)
    carry = None
    if config["train"]["regime"] == "carry":
        carry = slots.init(config, params, batch, key)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        # A copy: the step donates its input, and one buffer must not be donated twice.
        ema=jax.tree.map(jnp.copy, params) if config["ema"] else None,
        carry=carry,
        curriculum=curriculum.init(config["train"]["curriculum"]),
    )


def make_train_step(
    config: Config, optimizer: optax.GradientTransformation, length: int = 0
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be jitted.

    `length` is that of the task's training sequences, at which a curriculum ends; the batches of a
    curriculum may be cropped to any length that it has not passed.

    Metrics: `loss`, `grad_norm`, and sums over the examples whose solve ended in this step (all of
    them in the solve regime): `finished` (their number), `sequences_correct`, `tokens_correct`,
    `tokens`, `solver_steps`, `converged`; with a curriculum also its `curriculum_length` and
    `curriculum_accuracy` after the step, with a Jacobian penalty also `jacobian_norm`.
    """
    train, decay = config["train"], config["ema"]
    root = jax.random.fold_in(jax.random.key(config["seed"]), 1)
    tx = optax.with_extra_args_support(optimizer)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(root, state.step)
        course = state.curriculum
        if course is not None:
            batch = curriculum.mask(batch, course.length)

        def loss_fn(params: PyTree, carry: Carry | None, batch: Batch, keys: jax.Array) -> Any:
            params = perturb.drop_weights(
                params, train["weight_dropout"], jax.random.fold_in(key, _WEIGHTS)
            )
            loss, metrics, carry = _objective(config, params, carry, batch, keys, course)
            return loss, (metrics, carry)

        parts = (state.carry, dict(batch), base.sample_keys(key, batch["tokens"].shape[0]))
        (loss, metrics, grads), carry = _accumulated(
            loss_fn, state.params, parts, train["accumulate"]
        )
        seen = batch if carry is None else carry.batch
        rows = seen.get("puzzle_ids", jnp.zeros((1,), jnp.int32))  # Without ids all is puzzle 0.
        updates, opt_state = tx.update(grads, state.opt_state, state.params, rows=rows)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        metrics |= {"loss": loss, "grad_norm": optax.global_norm(grads)}
        if course is not None:
            counts = metrics.pop("length_correct"), metrics.pop("length_finished")
            course = curriculum.update(course, train["curriculum"], length, *counts)
            metrics |= {
                "curriculum_length": course.length, "curriculum_accuracy": course.accuracy,
            }  # fmt: skip
        return TrainState(state.step + 1, params, opt_state, ema, carry, course), metrics

    return step


def _accumulated(
    loss_fn: Callable[..., Any], params: PyTree, parts: PyTree, count: int
) -> tuple[tuple[jax.Array, dict[str, jax.Array], PyTree], Carry | None]:
    """((loss, metrics, gradients), carry) of a batch, in `count` equal parts one after another.

    The loss is a mean over examples, so the mean over parts is that of the whole batch; metrics
    are sums. Memory is that of one part, and the carry of all.

    Args:
      loss_fn: (params, *parts) -> (loss, (metrics, carry)).
      params: what is differentiated.
      parts: (carry, batch, keys), leaves (B, ...) with B a multiple of `count`.
      count: number of parts.
    """
    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def one(part: PyTree) -> tuple[tuple[jax.Array, dict[str, jax.Array], PyTree], Carry | None]:
        (loss, (metrics, carry)), grads = gradient(params, *part)
        # Means are divided before they are added up; sums are not.
        means = jax.tree.map(lambda a: a / count, (loss, grads)) if count > 1 else (loss, grads)
        return (means[0], metrics, means[1]), carry

    if count == 1:
        return one(parts)

    def body(total: PyTree, part: PyTree) -> tuple[PyTree, Carry | None]:
        sums, carry = one(part)
        return jax.tree.map(jnp.add, total, sums), carry

    split = jax.tree.map(lambda a: a.reshape(count, a.shape[0] // count, *a.shape[1:]), parts)
    shapes = jax.eval_shape(one, jax.tree.map(lambda a: a[0], split))[0]
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    total, carries = jax.lax.scan(body, zeros, split)
    return total, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), carries)


def _objective(
    config: Config,
    params: PyTree,
    carry: Carry | None,
    batch: Batch,
    keys: jax.Array,
    course: Curriculum | None,
) -> tuple[jax.Array, dict[str, jax.Array], Carry | None]:
    """Loss, metrics (see `make_train_step`) and the carry after the step."""
    train, model = config["train"], config["model"]
    if carry is None:
        most = model["solver"]["train"]["max_steps"]
        caps = perturb.random_caps(train["random_cap"], base.fold_in(keys, _CAP), most)
        out = fpr.apply(model, params, batch, train=True, key=keys, max_steps=caps)
        finished = jnp.ones(out.steps.shape, bool)
    else:
        out, carry = slots.window(config, params, carry, batch, keys)
        batch, finished = carry.batch, carry.done
    loss, metrics = _loss(config, out, batch), _metrics(out, batch, finished, course)
    jacobian = train["jacobian"]
    if jacobian["weight"]:
        norms: Any = fpr.build(model).apply(
            {"params": params}, batch, out.state, base.fold_in(keys, _JACOBIAN),
            step=jacobian["step"], method="jacobian_norm",
        )  # fmt: skip
        loss += jacobian["weight"] * jnp.mean(norms)
        metrics["jacobian_norm"] = jnp.sum(norms)
    return loss, metrics, carry


def _loss(config: Config, out: fpr.Output, batch: Batch) -> jax.Array:
    """Mean over each example's labelled tokens, then over the batch; plus the Q head's loss."""
    token_loss = losses.TOKEN_LOSSES[config["loss"]](out.logits, batch["labels"])
    loss = jnp.mean(losses.per_example(token_loss, batch["labels"]))
    if config["q_loss_weight"] and out.q_logits is not None:
        correct = losses.sequence_correct(out.logits, batch["labels"])
        loss += config["q_loss_weight"] * jnp.mean(losses.halting_loss(out.q_logits, correct))
    return loss


def _metrics(
    out: fpr.Output, batch: Batch, finished: jax.Array, course: Curriculum | None
) -> dict[str, jax.Array]:
    """Sums over the finished examples; see `make_train_step`."""
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
