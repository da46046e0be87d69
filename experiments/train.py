"""Trains an experiment: steps from the newest readable checkpoint on, logs, evaluations, saves.

Read it from top to bottom: `train` sets up and finishes, `_Loop.run` is the loop, the rest is what
the loop does every so many steps.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from experiments import curriculum, optim, origin
from experiments.checkpoint import Checkpoints
from experiments.context import Run
from experiments.errors import UserError
from experiments.evaluate import Evaluator
from experiments.prefetch import Prefetch
from experiments.progress import line
from experiments.result import finish
from experiments.steps import TrainState, averaged, init_state, make_train_step
from experiments.workdir import MetricsLog, write_weights


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM or SIGINT) and has saved a checkpoint."""

    def __init__(self, signum: int, step: int, steps: int):
        name = signal.Signals(signum).name
        super().__init__(f"{name}: saved a checkpoint at step {step} of {steps} and stopped")
        self.signum = signum


class Diverged(Exception):
    """The loss or the gradient became NaN or infinite; nothing was saved after that."""


def train(run: Run) -> dict[str, Any]:
    """Trains to `train.steps`, going on where the workdir stopped; returns result.json's content.

    Raises:
      Interrupted: on SIGTERM or SIGINT, after saving.
      Diverged: the loss or the gradient is NaN or infinite.
      UserError: the workdir's run is already past `train.steps`, or was trained on other data.
    """
    config, steps = run.config, run.config["train"]["steps"]
    optimizer = optim.make_optimizer(config["optimizer"], steps)
    example = run.task.train_batch(0, config["train"]["batch_size"])
    init = functools.partial(init_state, config, optimizer, example)
    with Checkpoints(run.path, config["checkpoint"]["keep"]) as checkpoints:
        restored = checkpoints.restore(jax.eval_shape(init), run.progress.say)
        start, state = restored or (0, init())
        if start > steps:
            raise UserError(f"{run.path} is at step {start} already, past train.steps={steps}")
        source = origin.record(run.path, run.task, example, start)
        if restored:
            run.progress.say(f"continuing at step {start} of {steps}")
        with MetricsLog(run.path, start) as log:
            run.clock.continue_from(log.records)
            loop = _Loop(run, checkpoints, log)
            with catch_signals() as caught:
                state = loop.run(state, start, optimizer, caught)
                checkpoints.wait()
            # From here on a signal may end the program: rerunning it comes back to this line.
            results = loop.results or loop.evaluate(steps, state)
            return finish(run, state, results, log.records, source)


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in a list; a second one acts as usual."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # Only the main thread may set handlers.
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def handle(signum: int, _: Any) -> None:
        caught.append(signum)
        restore()

    for signum in before:
        signal.signal(signum, handle)
    try:
        yield caught
    finally:
        restore()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Loop:
    """The training loop. `results` holds the evaluation of the newest step, if there was one."""

    def __init__(self, run: Run, checkpoints: Checkpoints, log: MetricsLog):
        self.config, self.clock, self.progress, self.task = (
            run.config, run.clock, run.progress, run.task,
        )  # fmt: skip
        self.path, self.checkpoints, self.log = run.path, checkpoints, log
        self.results: dict[int, dict[str, Any]] = {}
        self._evaluator = Evaluator(run)
        self._pending: list[dict[str, jax.Array]] = []
        self._logged: dict[str, float] = {}
        self._eval_seconds = self._rate = 0.0
        self._fixed_loops = self.config["model"]["solver"]["train"]["halting"] == "never"

    def run(
        self,
        state: TrainState,
        start: int,
        optimizer: optax.GradientTransformation,
        caught: list[int],
    ) -> TrainState:
        """Makes the steps start+1..train.steps; returns the last state."""
        options = self.config["train"]
        steps, batch_size = options["steps"], options["batch_size"]
        if start == steps:
            return state
        # Batches are numbered from 0: step n is made with batch n - 1.
        batches = Prefetch(
            lambda number: self.task.train_batch(number, batch_size),
            range(start, steps), options["prefetch"],
        )  # fmt: skip
        with batches:
            return self._steps(state, start, optimizer, caught, batches)

    def _steps(
        self,
        state: TrainState,
        start: int,
        optimizer: optax.GradientTransformation,
        caught: list[int],
        batches: Prefetch,
    ) -> TrainState:
        """`run` with the batches of its steps."""
        options, every = self.config["train"], self.config["eval"]["every"]
        steps, length = options["steps"], self.task.length
        step_fn = jax.jit(make_train_step(self.config, optimizer, length), donate_argnums=0)
        compiled: dict[int, Callable[..., Any]] = {}
        buckets = curriculum.buckets(options, length)
        self._logged = dict(self.clock.seconds)
        for step in range(start + 1, steps + 1):
            with self.clock.measure("train"):
                if len(buckets) > 1 and state.curriculum is not None:
                    buckets = [n for n in buckets if n >= int(state.curriculum.length)]
                if not batches.ready:
                    jax.block_until_ready(state)  # Until here the device was busy, not waiting.
            with self.clock.measure("data"):
                batch = batches.get()
            if len(buckets) > 1:
                batch = curriculum.crop(batch, buckets[0])
            if buckets[0] not in compiled:
                with self.clock.measure("compile"):
                    compiled[buckets[0]] = step_fn.lower(state, batch).compile()
            with self.clock.measure("train"):
                state, metrics = compiled[buckets[0]](state, batch)
                self._pending.append(metrics)
                stop, evaluate = bool(caught), _due(step, every)
                save = stop or step == steps or _due(step, self.config["checkpoint"]["every"])
                log = save or evaluate or _due(step, options["log_every"])
                if log:
                    jax.block_until_ready(state)
            self.results = {}
            if log:
                self._log(step)
            if save:
                self._save(step, state)
            if stop:
                raise Interrupted(caught[0], step, steps)
            if evaluate:
                self.results = self.evaluate(step, state)
        return state

    def _log(self, step: int) -> None:
        """Turns the metrics since the last call into one record and the progress line."""
        values = [{k: float(v) for k, v in m.items()} for m in self._pending]
        self._pending = []
        for at, v in enumerate(values, step - len(values) + 1):
            for name in ("loss", "grad_norm"):
                if not math.isfinite(v[name]):
                    raise Diverged(f"{name} is {v[name]} at step {at}")
        total = {k: sum(v[k] for v in values) for k in values[0]}
        spent = {k: v - self._logged[k] for k, v in self.clock.seconds.items()}
        self._logged = dict(self.clock.seconds)
        seconds = max(spent["train"] + spent["data"], 1e-9)
        self._rate = len(values) / seconds
        steps = self.config["train"]["steps"]
        schedule = optim.schedule(self.config["optimizer"], steps)

        def share(name: str, of: str = "finished") -> float | None:
            return total[name] / total[of] if total[of] else None

        record = {
            "split": "train",
            "step": step,
            "loss": total["loss"] / len(values),
            "grad_norm": total["grad_norm"] / len(values),
            "learning_rate": float(schedule(step - 1)),
            "examples_finished": int(total["finished"]),
            "sequence_accuracy": share("sequences_correct"),
            "token_accuracy": share("tokens_correct", "tokens"),
            "solver_steps_mean": share("solver_steps"),
            # A fixed number of loops is not a solve that could fail.
            "converged": None if self._fixed_loops else share("converged"),
            **{k: v for k, v in values[-1].items() if k.startswith("curriculum_")},
            "steps_per_second": self._rate,
            "data_wait": spent["data"] / seconds,
            **self.clock.record(),
        }
        if "jacobian_norm" in total:
            examples = len(values) * self.config["train"]["batch_size"]
            record["jacobian_norm"] = total["jacobian_norm"] / examples
        self.log.add(record)
        text = line(record, steps, self.clock.eval_share, self._time_left(step))
        self.progress.update(text, last=step == steps)

    def _time_left(self, step: int) -> float:
        """Seconds until the end at the present rate, evaluations included."""
        every, left = self.config["eval"]["every"], self.config["train"]["steps"] - step
        return left / self._rate + self._eval_seconds * (left // every if every else 0)

    def _save(self, step: int, state: TrainState) -> None:
        with self.clock.measure("checkpoint"):
            self.checkpoints.save(step, state)
            write_weights(self.path / "weights.npz", averaged(state))

    def evaluate(self, step: int, state: TrainState) -> dict[int, dict[str, Any]]:
        """Evaluates and logs; returns the metrics by length."""
        before = self.clock.seconds["evaluation"]
        results = self._evaluator(averaged(state))
        self._eval_seconds = self.clock.seconds["evaluation"] - before
        logged = {(r["step"], r["length"]) for r in self.log.records if r["split"] == "eval"}
        for length, result in results.items():
            if (step, length) in logged:
                continue  # A finished run that was started again.
            kept = {k: v for k, v in result.items() if k != "prefix_accuracy"}
            self.log.add({"split": "eval", "step": step, "length": length, **kept})
        shown = ", ".join(f"{r['sequence_accuracy']:.3f} at {n}" for n, r in results.items())
        self.progress.say(f"step {step}: sequence accuracy by length: {shown}")
        return results
