"""Activation and gradient norm against depth, for pre-, post- and peri-norm, scaled and unscaled.

    python -m experiments.depth --config=FILE[:VARIANT] --out=DIR [--workdir=DIR]
        [--iterations=64]

Applies f of the config's FPRM N times, undamped and without halting, on a batch of the config's
task: once for each `norm_type` with `residual_scale` none and input_independent, all six at the
same initial weights, and with --workdir once more with the weights of that run. Writes depth.json
and depth.png to DIR and prints a short table. Exit codes: 0 done, 2 a mistake in the command, the
config or the workdir.

Measured with experiments/configs/sudoku.py:cpu4 (alphas .75 and .25, 2-D convolution), N = 64,
seed 0, at the initial weights:

               RMS of z_1   z_8     z_64      gradient at z_64 / at z_1
  pre, none        5.07     149     4.1e17    1.0e-17 (it explodes backwards)
  pre, scaled      0.55     0.402   0.402     inf (below float32 before z_11: it vanishes)
  post, none       1        1       1         1.13
  post, scaled     1        1       1         3.8e18
  peri, none       5.35     156     4.4e17    9.4e-18
  peri, scaled     0.689    0.566   0.566     7.5e30

Scaled pre-norm at weights trained for 800 steps (99.6% of held-out puzzles): 4.05, 4.69, 4.69 and
4.9e5. Without scales it is the convolution of z that makes growth exponential: with
model.conv="none" pre-norm has 6.14, 12.4, 97.5 and 0.11, peri-norm 6.38, 17.2, 135 and 0.046.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fpr
from experiments import cli, losses, plots
from experiments import config as configs
from experiments.errors import UserError
from experiments.workdir import write_json
from fpr.models import base

PyTree = Any
NORM_TYPES = ("pre", "post", "peri")
RESIDUAL_SCALES = ("none", "input_independent")
EXAMPLES = 64  # of the batch, or train.batch_size where that is smaller


class Course(NamedTuple):
    """What N applications of f looked like.

    Attributes:
      activation: (N,) RMS of the iterate z_i over the batch, after each application.
      gradient: (N,) 2-norm of d(loss of the answer from z_N) / d z_i over the batch.
    """

    activation: jax.Array
    gradient: jax.Array


def follow(
    model: Mapping[str, Any],
    params: PyTree,
    batch: Mapping[str, jax.Array],
    key: jax.Array,
    *,
    steps: int,
    token_loss: losses.TokenLoss,
) -> Course:
    """Applies f `steps` times from z0 and goes back once through all of them.

    Adding d_i = 0 to z_i makes d(loss)/d(d_i) the gradient at z_i, so that a single reverse pass
    gives all of them. Each application is computed again on the way back: memory is that of N
    iterates, not of their blocks.

    Args:
      model: config of an `fprm` model.
      params: its parameters.
      batch: tokens and labels, (B, T) each.
      key: of the start z0.
      steps: N.
      token_loss: of logits and labels.
    """
    module = fpr.build(model)

    def call(method: Any, *args: Any) -> Any:
        return module.apply({"params": params}, *args, method=method)

    def begin(m: Any, batch: Mapping[str, jax.Array]) -> tuple[PyTree, PyTree]:
        x = m.layers[0].inject(m.embed(batch))
        return x, m.layers[0].init_state(x, base.fold_in(key, 0))

    x, z0 = call(begin, batch)

    def f(z: PyTree) -> PyTree:
        new = call(lambda m, x, z: m.layers[0].step(x, z), x, z)
        return jax.tree.map(lambda a, b: a.astype(b.dtype), new, z)  # as the solver does

    def loss(nudges: PyTree) -> tuple[jax.Array, jax.Array]:
        @jax.checkpoint
        def body(z: PyTree, nudge: PyTree) -> tuple[PyTree, jax.Array]:
            z = jax.tree.map(jnp.add, f(z), nudge)
            size = sum(leaf.size for leaf in jax.tree.leaves(z))
            return z, _norm(z) / size**0.5

        z, activation = jax.lax.scan(body, z0, nudges)
        logits, _ = call(lambda m, x, z: m.head(m.layers[0].readout(x, x, z)), x, z)
        each = losses.per_example(token_loss(logits, batch["labels"]), batch["labels"])
        return jnp.mean(each), activation

    nudges = jax.tree.map(lambda a: jnp.zeros((steps, *a.shape), a.dtype), z0)
    gradients, activation = jax.grad(loss, has_aux=True)(nudges)
    return Course(activation, jax.vmap(_norm)(gradients))


def _norm(tree: PyTree) -> jax.Array:
    """2-norm of all entries; their squares neither overflow nor vanish."""
    tree = jax.lax.stop_gradient(tree)
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    largest = jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in leaves]).max()
    scale = jnp.where(largest > 0, largest, 1.0)
    return scale * jnp.sqrt(sum(jnp.sum(jnp.square(leaf / scale)) for leaf in leaves))


def measure(
    config: Mapping[str, Any], steps: int, trained: PyTree | None = None
) -> list[dict[str, Any]]:
    """One row per combination, the trained weights last.

    Args:
      config: complete experiment config of an `fprm` model.
      steps: applications of f.
      trained: parameters of a run of this config, or None.

    Returns:
      Rows of `norm_type`, `residual_scale`, `trained`, `activation` (N) and `gradient` (N).

    Raises:
      UserError: a model without FPRM's norms and scales, or a config that cannot work.
    """
    model = config["model"]
    if model["name"] != "fprm":
        raise UserError(f"model.name is {model['name']!r}; depth compares the norms of 'fprm' only")
    task = configs.validate(config)
    count = min(EXAMPLES, config["train"]["batch_size"])
    batch = jax.tree.map(jnp.asarray, dict(task.train_batch(0, count)))
    root = jax.random.key(config["seed"])
    # RMSNorm has no parameters and unscaled residuals leave the scales unread: one start for all.
    scaled = model | {"residual_scale": RESIDUAL_SCALES[1]}
    start = fpr.init(scaled, jax.random.fold_in(root, 0), batch)
    cases = [
        (model | {"norm_type": norm, "residual_scale": scale}, start, False)
        for norm in NORM_TYPES
        for scale in RESIDUAL_SCALES
    ]
    if trained is not None:
        cases.append((model, trained, True))
    rows = []
    for case, params, is_trained in cases:

        def run(params: PyTree, batch: PyTree, key: jax.Array, case: Any = case) -> Course:
            token_loss = losses.TOKEN_LOSSES[config["loss"]]
            return follow(case, params, batch, key, steps=steps, token_loss=token_loss)

        course = jax.jit(run)(params, batch, jax.random.fold_in(root, 1))
        rows.append(
            {
                "norm_type": case["norm_type"],
                "residual_scale": case["residual_scale"],
                "trained": is_trained,
                "activation": np.asarray(course.activation).tolist(),
                "gradient": np.asarray(course.gradient).tolist(),
            }
        )
    return rows


def load_trained(workdir: Path, config: Mapping[str, Any]) -> PyTree:
    """The weights of a run, which must be one of the config's model.

    Raises:
      UserError: no run, or one of another model.
    """
    try:
        stored, params = fpr.load(workdir)
    except ValueError as error:
        raise UserError(str(error)) from error
    old = configs.complete({"model": stored, "task": config["task"]})["model"]
    # How f is solved and differentiated leaves f as it is.
    other = {
        key: pair
        for key, pair in configs.differences(old, config["model"]).items()
        if not key.startswith(("solver.", "adjoint."))
    }
    if other:
        shown = ", ".join(f"model.{k} (there {a!r}, here {b!r})" for k, (a, b) in other.items())
        raise UserError(f"{workdir} holds another model than the config: {shown}")
    return params


def _label(row: Mapping[str, Any]) -> str:
    scaled = {"none": "unscaled", "input_independent": "scaled"}
    name = f"{row['norm_type']}-norm, {scaled.get(row['residual_scale'], row['residual_scale'])}"
    return f"{name}, trained" if row["trained"] else name


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Activations at the first, eighth and last iteration; gradient at the last over the first."""
    steps = len(rows[0]["activation"])
    at = sorted({1, min(8, steps), steps})
    out = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    out.caption, out.caption_justify = "inf: the gradient at z_1 is below float32", "left"
    out.add_column("model", no_wrap=True)
    for i in at:
        out.add_column(f"RMS of\nz_{i}", justify="right")
    out.add_column(f"gradient at\nz_{steps} / z_1", justify="right")
    for row in rows:
        first, last = row["gradient"][0], row["gradient"][-1]
        ratio = np.divide(last, first) if first else np.inf  # 0: it vanished in float32
        values = [*(row["activation"][i - 1] for i in at), ratio]
        out.add_row(_label(row), *(f"{v:.3g}" for v in values))
    return out


def draw(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path:
    """Both norms against iterations: a colour per norm type, dashes without scaling."""
    figure, panels = plots.new_figure(1, 2, figsize=(9.6, 3.6))
    for row in rows:
        number = NORM_TYPES.index(row["norm_type"])
        look: dict[str, Any] = {
            "color": "black" if row["trained"] else f"C{number}",
            "linestyle": "--" if row["residual_scale"] == "none" else "-",
            "linewidth": 3.0 - number,  # lines that coincide are all seen
        }
        for axes, name in zip(panels, ("activation", "gradient")):
            # A norm of 0 has no place on a logarithmic axis, nor has one that overflowed.
            values = [v if 0 < v < np.inf else np.nan for v in row[name]]
            axes.plot(range(1, len(values) + 1), values, label=_label(row), **look)
    panels[0].set(title=f"{title}: RMS of z")
    panels[1].set(title="norm of d loss / d z")
    for axes in panels:
        axes.set(xlabel="depth (iterations of f)", yscale="log")
        plots.plain_frame(axes)
    panels[0].legend(fontsize="x-small")
    return plots.save(figure, path)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line without the program's name.

    Raises:
      UserError: a mistake in it.
    """
    parser = cli.Parser("depth", __doc__)
    parser.add_argument("--config", required=True, metavar="FILE[:VARIANT]")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="run of the same model")
    parser.add_argument("--iterations", type=int, default=64, help="applications of f")
    flags = parser.parse(argv)
    cli.check_least(flags, iterations=1)
    return flags


def run(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Does what the flags say; returns the rows of `measure`.

    Raises:
      UserError: a config or workdir that cannot be used.
    """
    config = configs.load(flags.config)
    trained = None if flags.workdir is None else load_trained(flags.workdir, config)
    flags.out.mkdir(parents=True, exist_ok=True)
    rows = measure(config, flags.iterations, trained)
    model = config["model"]
    header = {
        "config": flags.config,
        "workdir": flags.workdir and str(flags.workdir),
        "iterations": flags.iterations,
        "layers_per_iteration": fpr.build(model).config.layers_per_step,
        "alpha_1": model["alpha_1"],
        "alpha_2": model["alpha_2"],
    }
    write_json(flags.out / "depth.json", header | {"rows": rows})
    title = f"{config['task']['name']}, {flags.iterations} iterations"
    draw(rows, flags.out / "depth.png", title)
    Console().print(table(rows, title))
    print(f"written: {flags.out / 'depth.json'}, {flags.out / 'depth.png'}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    cli.enable_compilation_cache()

    def command() -> int:
        run(parse(sys.argv[1:] if argv is None else argv))
        return 0

    return cli.exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
