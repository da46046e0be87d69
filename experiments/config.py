"""Experiment configs: defaults, completion, validation, and comparison with a workdir's config.

A config file sets what it needs; `complete` adds every other key with its default, so that each
key can be overridden on the command line and each unknown key is an error.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

import fpr
from experiments import carry, curriculum, losses, optim, perturb, tasks
from experiments.errors import UserError, unknown
from fpr import registry
from fpr.models import base

CONFIG_DIR = Path(__file__).parent / "configs"

DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "train": {
        "steps": 1000,
        "batch_size": 128,
        "regime": "solve",  # "solve": spec 1; "carry": deep supervision, spec 2 section 3
        "window": 4,  # carry: applications of f, all differentiated, in one optimiser step
        "max_windows": 128,  # carry: a slot is refilled after this many windows
        "halting": "fixed_point",  # carry: or earlier: "act" by the Q head; "fixed_iterations": not
        "exploration": 0.1,  # act: share of examples with a random least number of windows
        "accumulate": 1,  # parts into which a batch is cut, one after another, to save memory
        "prefetch": 2,  # batches made ahead by a thread; 0: none
        "log_every": 20,
        "curriculum": {
            "start": 0,  # length of the first training sequences; 0: off
            "threshold": 0.97,  # running sequence accuracy at which they grow
            "increment": 1,
            "decay": 0.9,  # of the running accuracy, per step
        },
        # Off by default (spec 2 section 2), as are model.dropout and model.solver.train.noise.
        "random_cap": {  # on iterations (solve) or windows (carry) of each example
            "distribution": "none",  # "gamma": Γ(mean, 1), "exponential"
            "mean": 4.0,
        },
        "weight_dropout": 0.0,  # share of the looped layers' matrix entries set to 0 in a step
        "jacobian": {
            "weight": 0.0,  # of the penalty ‖∂f/∂z‖²_F / size of z at the solution
            "step": 0.0,  # 0: by vector-Jacobian products; h > 0: by finite differences of size h
        },
    },
    "optimizer": {
        "learning_rate": 1e-3,
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "schedule": "constant",
        "final_fraction": 0.0,  # learning rate at the end of the schedule / its peak
        "clip_norm": 0.0,  # 0: off
        # Puzzle embeddings: sign-SGD on the batch's rows, same schedule; 0: AdamW as for the rest.
        "puzzle_learning_rate": 0.0,
        "puzzle_weight_decay": 0.0,
    },
    "ema": 0.0,  # decay of the averaged weights that evaluation uses; 0: off
    "loss": "softmax",
    "q_loss_weight": 0.0,
    "eval": {
        "every": 0,  # steps; 0: at the end only
        "lengths": (16,),
        "max_examples": 1000,  # per length
        "batch_size": 128,
        "budget_examples": 128,  # for the curve of accuracy over iterations; 0: none
        "budget_steps": 0,  # its largest number of iterations; 0: twice what halting took
        "sequential_difference": 0,  # examples read token by token as well, to compare; 0: none
    },
    "checkpoint": {"every": 500, "keep": 3},
}

REGIMES = ("solve", "carry")

# Which keys may differ from the config of the run in a workdir; all others are refused.
# When it is continued: those that do not change what a training step does, and `train.steps` where
# the learning rate does not depend on it. Once it is finished, only those that are NOT_MEASURED:
# another number would replace the run's own.
CONTINUE = ("eval.", "checkpoint.", "train.log_every", "train.prefetch", "model.solver.eval.")
# When it is evaluated: other data too, as the result names both ...
EVALUATE = (*CONTINUE, "task.")
# ... but on the very file that it was trained on not these, which decide what is held out of it,
SPLIT = (
    "task.split", "task.eval_share", "task.train_empties", "task.train_puzzles",  # Sudokus
    "task.eval_fraction", "task.eval_path",  # texts
)  # fmt: skip
# ... and where the model has an embedding for each puzzle, nothing that numbers the puzzles anew:
# these, of the `identity` of the data, must be as they were. `experiments.origin` checks both.
NUMBERING = ("task", "sha256", "augmentations", "seed")
# What is measured does not depend on these; nor on `eval.batch_size`, see `is_measured`.
NOT_MEASURED = ("eval.every", "checkpoint.", "train.")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists become tuples, so that JSON compares equal."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def load(spec: str, overrides: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Loads and completes a config.

    Args:
      spec: "FILE.py" or "FILE.py:VARIANT".
      overrides: raw overrides from the command line; only those that decide which other keys exist
        (`model.solver.preset`, `model.adjoint.name`) are applied here.

    Raises:
      UserError: no such file, unknown variant or key.
    """
    path_text, _, variant = spec.partition(":")
    path = Path(path_text)
    if not path.is_file():
        known = {p.name: p for p in CONFIG_DIR.glob("[a-z]*.py")}
        raise unknown("config file", path_text, [f"experiments/configs/{n}" for n in sorted(known)])
    module_spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"config file {path_text} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise UserError(f"config file {path_text} has no function get_config")
        if variant and not inspect.signature(module.get_config).parameters:
            raise UserError(f"config file {path_text} has no variants, so {variant!r} is none")
        raw = module.get_config(variant) if variant else module.get_config()
    except UserError:
        raise
    except Exception as error:  # The file is the user's program: anything can happen in it.
        name = type(error).__name__
        raise UserError(f"config file {path_text} cannot be loaded: {name}: {error}") from error
    config = raw.to_dict() if isinstance(raw, ml_collections.ConfigDict) else raw
    if not isinstance(config, Mapping):
        raise UserError(f"get_config of {path_text} returns {config!r}, not a ConfigDict or dict")
    return complete(config, overrides or {})


def complete(config: Mapping[str, Any], overrides: Mapping[str, str] | None = None) -> dict:
    """Adds the default of every key that `config` leaves out.

    Raises:
      UserError: unknown keys, or a missing `model` or `task`.
    """
    overrides = overrides or {}
    config = copy.deepcopy(dict(config))
    valid = [*DEFAULTS, "model", "task"]
    for key in config:
        if key not in valid:
            raise unknown("config key", key, valid)
    for key in ("model", "task"):
        section = config.get(key)
        if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
            raise UserError(f"the config needs a section {key!r} with a 'name'")
    given = {key: value for key, value in config.items() if key not in ("model", "task")}
    done = _merge(DEFAULTS, given)
    done["task"] = tasks.options(config["task"]["name"]) | config["task"]
    done["model"] = _complete_model(config["model"], overrides)
    return done


def _merge(defaults: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> dict:
    """`defaults` with the values of `given`, section by section."""
    done = copy.deepcopy(dict(defaults))
    for key, value in given.items():
        name = f"{prefix}{key}"
        if key not in defaults:
            raise unknown("config key", name, (f"{prefix}{k}" for k in defaults))
        if isinstance(defaults[key], dict):
            if not isinstance(value, Mapping):
                raise UserError(f"config key {name!r} is a section, not {value!r}")
            value = _merge(defaults[key], value, f"{name}.")
        done[key] = value
    return done


def _complete_model(model: dict[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """The model section with every option of the model, its solver and its adjoint."""
    try:
        full = _model_defaults(model["name"]) | model
        solver, adjoint = dict(full["solver"]), {"name": "one_step"} | full["adjoint"]
        solver["preset"] = overrides.get("model.solver.preset", solver.get("preset", "fprm"))
        name = overrides.get("model.adjoint.name", adjoint["name"])
        if name != adjoint["name"]:
            adjoint = {"name": name}  # the options of another rule do not carry over
        full["solver"] = {
            "preset": solver["preset"],
            "train": dataclasses.asdict(base.make_solver(solver, train=True)),
            "eval": dataclasses.asdict(base.make_solver(solver, train=False)),
        }
        rule: Any = base.make_adjoint(adjoint)
        full["adjoint"] = {"name": name, **dataclasses.asdict(rule)}
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return full


def _model_defaults(name: str) -> dict[str, Any]:
    """Options of a model that have a default."""
    if name not in registry.MODELS:
        raise unknown("model.name", name, registry.MODELS)
    defaults = {}
    for field in dataclasses.fields(registry.MODELS[name][1]):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    return defaults


def check_overrides(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises UserError for an override of a key that the config does not have."""
    flat = flatten(config)
    sections = {name.rsplit(".", i)[0] for name in flat for i in range(1, name.count(".") + 1)}
    for name in names:
        if name in sections:
            raise UserError(f"config key {name!r} is a section; set one of its keys")
        if name not in flat:
            raise unknown("config key", name, flat)


def validate(config: Mapping[str, Any]) -> tasks.Task:
    """Checks a complete config, the model's shapes included; returns the task.

    Raises:
      UserError: a value that cannot work.
    """
    _check_types(config, DEFAULTS)
    train, evaluation, checkpoint = config["train"], config["eval"], config["checkpoint"]
    positive = {
        "train.steps": train["steps"],
        "train.batch_size": train["batch_size"],
        "train.log_every": train["log_every"],
        "train.window": train["window"],
        "train.max_windows": train["max_windows"],
        "train.accumulate": train["accumulate"],
        "eval.max_examples": evaluation["max_examples"],
        "eval.batch_size": evaluation["batch_size"],
        "checkpoint.every": checkpoint["every"],
        "checkpoint.keep": checkpoint["keep"],
    }
    for name, value in positive.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    for name in ("every", "budget_examples", "budget_steps", "sequential_difference"):
        if evaluation[name] < 0:
            raise UserError(f"eval.{name} must not be negative, got {evaluation[name]}")
    lengths = evaluation["lengths"]
    if not lengths or not all(isinstance(n, int) and n >= 1 for n in lengths):
        raise UserError(f"eval.lengths must be whole numbers of at least 1, got {lengths}")
    if not 0 <= config["ema"] < 1:
        raise UserError(f"ema must be in [0, 1), got {config['ema']}")
    if config["q_loss_weight"] < 0:
        raise UserError(f"q_loss_weight must not be negative, got {config['q_loss_weight']}")
    if config["loss"] not in losses.TOKEN_LOSSES:
        raise unknown("loss", config["loss"], losses.TOKEN_LOSSES)
    if train["regime"] not in REGIMES:
        raise unknown("train.regime", train["regime"], REGIMES)
    if not 0 <= config["seed"] < 2**63:
        raise UserError(f"seed must be in [0, 2**63), got {config['seed']}")
    optim.validate(config["optimizer"])
    task = tasks.build(config["task"], config["seed"])
    curriculum.validate(train["curriculum"], task)
    perturb.validate(train, config["model"]["adjoint"]["name"])
    if train["batch_size"] % train["accumulate"]:
        raise UserError(
            f"train.accumulate={train['accumulate']} does not divide train.batch_size="
            f"{train['batch_size']}"
        )
    if train["prefetch"] < 0:
        raise UserError(f"train.prefetch must be 0 (off) or positive, got {train['prefetch']}")
    _check_model(config, task)
    return task


def _check_types(config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> None:
    for key, default in defaults.items():
        value, name = config[key], f"{prefix}{key}"
        if isinstance(default, dict):
            if not isinstance(value, Mapping):
                raise UserError(f"{name} must be a section, got {value!r}")
            _check_types(value, default, f"{name}.")
            continue
        kinds = {float: (float, int), tuple: (tuple, list)}.get(type(default), (type(default),))
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
            expected = type(default).__name__
            raise UserError(f"{name} must be of type {expected}, got {value!r}")


def _check_model(config: Mapping[str, Any], task: tasks.Task) -> None:
    """Builds the model and runs its shapes at every length, without computing anything."""
    model = config["model"]
    try:
        registry.build(model)
        vocab = model.get("vocab_size")
        if vocab != task.vocab_size:
            raise UserError(
                f"model.vocab_size is {vocab}, but the task {config['task']['name']!r} has "
                f"{task.vocab_size} token ids, padding included"
            )
        rows, ids = model.get("num_puzzles", 0), getattr(task, "num_puzzles", 0)
        if rows and rows < ids:  # JAX would silently read the last row instead.
            raise UserError(
                f"model.num_puzzles is {rows}, but the task {config['task']['name']!r} has {ids} "
                "puzzle ids"
            )
        batch_size = config["train"]["batch_size"]
        shapes = None
        for train, length in [
            *((True, n) for n in curriculum.buckets(config["train"], task.length)),
            *((False, n) for n in config["eval"]["lengths"]),
        ]:
            # A length that the task does not have is told now, not after the training.
            width = length if train else task.eval_batch(length, 0, 1)["tokens"].shape[1]
            tokens = jax.ShapeDtypeStruct((batch_size if train else 1, width), np.int32)
            batch = {"tokens": tokens, "labels": tokens}
            key = jax.eval_shape(lambda: jax.random.key(0))
            if shapes is None:
                shapes = jax.eval_shape(lambda b, k: registry.init(model, k, b), batch, key)

            def run(params: Any, batch: Any, key: Any, train: bool = train) -> Any:
                return registry.apply(model, params, batch, train=train, key=key)

            out = jax.eval_shape(run, shapes, batch, key)
            if not train and config["eval"]["sequential_difference"]:

                def apart(params: Any, batch: Any) -> Any:
                    return fpr.sequential_difference(model, params, batch)

                jax.eval_shape(apart, shapes, batch)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    if config["train"]["regime"] == "carry":
        carry.validate(config, out)
    elif config["train"]["halting"] != "fixed_point":
        raise UserError(f"train.halting {config['train']['halting']!r} needs train.regime 'carry'")
    if config["train"]["jacobian"]["weight"] and not out.state:
        raise UserError(f"train.jacobian needs a model with a loop, not {model['name']!r}")
    if config["optimizer"]["puzzle_learning_rate"] and not model.get("num_puzzles"):
        raise UserError("optimizer.puzzle_learning_rate needs model.num_puzzles > 0")
    if config["q_loss_weight"] and out.q_logits is None:
        raise UserError(f"q_loss_weight needs a model with a Q head; {model['name']!r} has none")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys in which two configs differ: {key: (old, new)}, None where a side lacks the key."""
    a, b = flatten(old), flatten(new)
    return {k: (a.get(k), b.get(k)) for k in sorted({*a, *b}) if a.get(k) != b.get(k)}


def is_free(key: str, new: Mapping[str, Any], mode: str = "train") -> bool:
    """Whether a run may be continued ("train") or evaluated ("eval") although this key differs."""
    if key == "train.steps":  # A longer run; the learning rate so far must not depend on it.
        return new["optimizer"]["schedule"] == "constant"
    return key.startswith(EVALUATE if mode == "eval" else CONTINUE)


def is_measured(key: str, new: Mapping[str, Any]) -> bool:
    """Whether an evaluation may come to other numbers because this key differs."""
    if key == "eval.batch_size":  # Where a batch halts as one, an example's steps depend on it.
        return new["model"]["solver"]["eval"]["halting"] == "batch"
    return not key.startswith(NOT_MEASURED)
