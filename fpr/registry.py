"""From a config to a model: build, init, apply, trace and load.

A config is the `model` section of an experiment, any mapping; `name` chooses the model and the rest
are the fields of its options class. All functions are pure; `apply` may be jitted with the config
bound: `jax.jit(functools.partial(fpr.apply, config))`.
"""

from __future__ import annotations

import json
import pathlib
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fpr.adjoints import Adjoint, OneStep
from fpr.fixed_point import Trace
from fpr.models import (
    base,
    deltanet,
    fp_mamba,
    fp_mamba2,
    fp_rnn,
    fprm,
    hrm,
    lstm,
    mamba,
    mamba2,
    transformer,
    trm,
    xlstm,
)
from fpr.models.base import Model, Output
from fpr.solvers import Damped, SolverState

PyTree = Any
Config = Mapping[str, Any]

# One line per model: name -> (module, options).
MODELS: dict[str, tuple[type[Model], Any]] = {
    "deltanet": (deltanet.DeltaNet, deltanet.DeltaNetConfig),
    "fprm": (fprm.FPRM, fprm.FPRMConfig),
    "fp_mamba": (fp_mamba.FPMamba, fp_mamba.FPMambaConfig),
    "fp_mamba2": (fp_mamba2.FPMamba2, fp_mamba2.FPMamba2Config),
    "fp_rnn": (fp_rnn.FPRNN, fp_rnn.FPRNNConfig),
    "hrm": (hrm.HRM, hrm.HRMConfig),
    "looped_transformer": (fprm.FPRM, transformer.LoopedTransformerConfig),
    "lstm": (lstm.LSTM, lstm.LSTMConfig),
    "mamba": (mamba.Mamba, mamba.MambaConfig),
    "mamba2": (mamba2.Mamba2, mamba2.Mamba2Config),
    "mlstm": (xlstm.MLSTM, xlstm.MLSTMConfig),
    "slstm": (xlstm.SLSTM, xlstm.SLSTMConfig),
    "transformer": (transformer.Transformer, transformer.TransformerConfig),
    "trm": (trm.TRM, trm.TRMConfig),
}


def to_dict(config: Any) -> dict[str, Any]:
    """A plain nested dict of any mapping (an ml_collections ConfigDict among them)."""
    return {
        key: to_dict(value) if hasattr(value, "items") else value for key, value in config.items()
    }


def build(config: Config) -> Model:
    """The Flax module of a model config.

    Raises:
      ValueError: unknown model or key (with the nearest valid name), or options that cannot work.
    """
    if not hasattr(config, "items"):
        raise ValueError(f"model={config!r}, allowed: a mapping with the key 'name'")
    options = to_dict(config)
    name = options.pop("name", None)
    if name not in MODELS:
        raise ValueError(f"unknown model.name {name!r}{base.nearest(str(name), MODELS)}")
    module, cls = MODELS[name]
    parsed = base.parse_options(cls, options, "model")
    base.make_solver(parsed.solver, True)
    base.make_solver(parsed.solver, False)
    base.make_adjoint(parsed.adjoint)
    return module(parsed)


def init(
    config: Config, key: jax.Array, batch: Mapping[str, jax.Array] | None = None
) -> dict[str, Any]:
    """Fresh parameters (the Flax "params" dict).

    Args:
      config: model config.
      key: PRNG key.
      batch: an example batch for shapes; None uses zeros of length `seq_len`.
    """
    model = build(config)
    if batch is None:
        batch = {"tokens": jnp.zeros((1, model.config.seq_len), jnp.int32)}
    solver = base.make_solver(model.config.solver, False)
    variables = jax.jit(lambda k, b: model.init(k, b, solver=solver, adjoint=OneStep()))(
        key, dict(batch)
    )
    return variables["params"]


def apply(
    config: Config,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    *,
    train: bool = False,
    key: jax.Array | None = None,
    state: tuple[SolverState, ...] | None = None,
    solver: Damped | None = None,
    adjoint: Adjoint | None = None,
    max_steps: jax.Array | int | None = None,
) -> Output:
    """Runs a model on a batch.

    Args:
      config: model config.
      params: parameters from `init` or `load`.
      batch: {"tokens": (B, T) int32, ...}.
      train: which of the config's solver settings to use, and its gradient rule; in evaluation the
        value is that of the solver and the rule is `OneStep()`.
      key: PRNG key for random starts, or (B,) keys, one per sample, with which
        a sample starts alike in any batch; None starts every sample at the same point.
      state: solver states of an earlier Output, to go on from there.
      solver: replaces the config's solver.
      adjoint: replaces the config's gradient rule.
      max_steps: replaces the solver's cap; whole number or (B,), may be traced.

    Returns:
      An `Output`.
    """
    if not train and config.get("dropout"):
        config = to_dict(config) | {"dropout": 0.0}
    model = build(config)
    if solver is None:
        solver = base.make_solver(model.config.solver, train)
    if adjoint is None:
        adjoint = base.make_adjoint(model.config.adjoint) if train else OneStep()
    output: Any = model.apply(
        {"params": params}, batch,
        solver=solver, adjoint=adjoint, key=key, state=state, max_steps=max_steps,
    )  # fmt: skip
    return output


def trace(
    config: Config,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    *,
    steps: int,
    key: jax.Array | None = None,
    solver: Damped | None = None,
) -> Trace:
    """Residuals (N, B) and iterates of the first looped layer, N = `steps` iterations.

    `solver` defaults to the config's evaluation solver.
    """
    model = build(config)
    if solver is None:
        solver = base.make_solver(model.config.solver, False)
    path: Any = model.apply(
        {"params": params}, batch, solver=solver, steps=steps, key=key, method="trace_layer"
    )
    return path


def load(workdir: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model config and parameters of a run, finished or running (EMA weights where it keeps them).

    Reads `config.json` and `weights.npz`, which `experiments` writes whole at every checkpoint.

    Raises:
      ValueError: a file is missing or unreadable, naming it.
    """
    folder = pathlib.Path(workdir)
    config_file, weights_file = folder / "config.json", folder / "weights.npz"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise ValueError(f"{file} does not exist; expected the workdir of experiments.run")
    try:
        config = json.loads(config_file.read_text())["model"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config_file} is not a run's config: {error!r}") from error
    try:
        arrays = np.load(weights_file)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("not an .npz archive")
        with arrays:
            flat = {name: jnp.asarray(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{weights_file} cannot be read: {error}") from error
    return config, unflatten(flat)


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict -> {"a/b/c": array}; the inverse of `unflatten`."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        if hasattr(value, "items"):
            flat |= flatten(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b/c": array} -> nested dict."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split("/")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return nested
