"""`python -m experiments.bench models`: tokens per second and memory of every model of the zoo.

One layer of each model at one width, in one run: a train step (loss, gradient, AdamW) and one
decoded token. Ends with what one iteration of FP-Mamba costs beside one layer of Mamba.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import fpr
from experiments.errors import unknown
from experiments.timing import Entry, begin, compiled, make_console, positive, race, table
from fpr.fixed_point import fixed_point
from fpr.generate import decode, init_cache
from fpr.models.base import as_function
from fpr.solvers import Damped

PyTree = Any
VOCAB = 64
# Name -> the model's own options; sizes and the solver are set by `model_config`.
MODELS: dict[str, dict[str, Any]] = {
    "fp_rnn": {"name": "fp_rnn"},
    "fp_mamba": {"name": "fp_mamba"},
    "fp_mamba2": {"name": "fp_mamba2"},
    "mamba": {"name": "mamba"},
    "mamba2": {"name": "mamba2"},
    "lstm": {"name": "lstm"},
    "mlstm": {"name": "mlstm"},
    "slstm": {"name": "slstm"},
    "deltanet": {"name": "deltanet"},
    "gated_deltanet": {"name": "deltanet", "decay": True, "output_gate": True},
    "deltaproduct": {"name": "deltanet", "num_householder": 2, "negative_eigenvalues": True},
    "gated_deltaproduct": {
        "name": "deltanet", "num_householder": 2, "negative_eigenvalues": True, "decay": True,
        "output_gate": True,
    },
    "transformer": {"name": "transformer"},
    "looped_transformer": {"name": "looped_transformer", "causal": True},
    "fprm": {"name": "fprm", "causal": True},
    "trm": {"name": "trm", "causal": True},
    "hrm": {"name": "hrm", "causal": True},
}  # fmt: skip
LOOPED = ("fp_rnn", "fp_mamba", "fp_mamba2", "looped_transformer", "fprm")
SEGMENTS = ("trm", "hrm")  # One application of f is a whole segment.
MIXERS = ("householder", "dplr", "kronecker")
TARGET = 1.3  # FP-Mamba's iteration over Mamba's layer.


def model_config(name: str, length: int, width: int, iterations: int) -> dict[str, Any]:
    """One layer of the named model; loops run a fixed number of iterations, segments once."""
    loops = {"halting": "never", "max_steps": 1 if name in SEGMENTS else iterations}
    sizes = {"vocab_size": VOCAB, "seq_len": length, "hidden_size": width, "num_layers": 1}
    return MODELS[name] | sizes | {"solver": {"train": loops, "eval": loops}}


def train_step(config: Mapping[str, Any], batch: int, length: int) -> Entry:
    """Loss over all tokens, gradient and AdamW."""
    params = fpr.init(config, jax.random.key(0))
    optimizer = optax.adamw(1e-3)
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 1, VOCAB)

    def step(params: PyTree, opt_state: PyTree, tokens: jax.Array) -> PyTree:
        def loss(params: PyTree) -> jax.Array:
            out = fpr.apply(config, params, {"tokens": tokens}, train=True)
            log_p = jax.nn.log_softmax(out.logits)
            return -jnp.mean(jnp.take_along_axis(log_p, tokens[..., None], axis=-1))

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    return compiled(step, params, optimizer.init(params), tokens)


def decode_step(config: Mapping[str, Any], batch: int) -> Entry | None:
    """One token for each sequence, or None for a model that reads its whole input at once."""
    params = fpr.init(config, jax.random.key(0))
    try:
        cache = init_cache(config, params, batch)
    except ValueError:
        return None
    return compiled(functools.partial(decode, config), params, jnp.ones((batch,), jnp.int32), cache)


def peak(entry: Entry) -> float | None:
    """Temporaries and results of the compiled program in 10^6 bytes, arguments not counted."""
    if entry.temporaries is None or entry.outputs is None:
        return None
    return (entry.temporaries + entry.outputs) / 1e6


def bench_shape(
    console: Console, names: list[str], shape: tuple[int, int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """All models at one (batch, length)."""
    batch, length = shape
    entries: dict[str, Entry] = {}
    for i, name in enumerate(names, 1):
        console.print(f"  {i}/{len(names)} compiling {name} at {batch}x{length}", style="dim")
        config = model_config(name, length, args.width, args.iterations)
        entries[f"{name} train"] = train_step(config, batch, length)
        decoder = decode_step(config, batch)
        if decoder is not None:
            entries[f"{name} decode"] = decoder
    rows = race(entries, args.rounds)
    title = f"batch {batch}, length {length}, width {args.width}, one layer, float32"
    columns = (
        "", "iterations", "train ms", "train tokens/s", "train MB", "decode ms", "decode tokens/s",
        "decode MB",
    )  # fmt: skip
    shown, result = table(title, columns), []
    for name in names:
        loops = args.iterations if name in LOOPED else 1
        row: dict[str, Any] = {"model": name, "batch": batch, "length": length, "iterations": loops}
        cells = [name, str(loops)]
        for kind, tokens in (("train", batch * length), ("decode", batch)):
            key = f"{name} {kind}"
            if key not in entries:
                cells += ["-"] * 3
                continue
            median, memory = rows[key]["median_ms"], peak(entries[key])
            row |= {
                f"{kind}_ms": median,
                f"{kind}_tokens_per_s": 1e3 * tokens / median,
                f"{kind}_peak_mb": memory,
            }
            cells += [
                f"{median:.1f}", f"{1e3 * tokens / median:.0f}",
                "-" if memory is None else f"{memory:.1f}",
            ]  # fmt: skip
        shown.add_row(*cells)
        result.append(row)
    console.print(shown)
    return result


def iteration_entries(
    console: Console, shape: tuple[int, int], args: argparse.Namespace
) -> dict[str, Entry]:
    """Programs whose times give the cost of an iteration.

    "mamba forward" is one layer without embedding and head; "few" and "many" are one FP-Mamba layer
    with 2 and 10 iterations of its solver: their difference is 8 iterations, solver included.
    """
    batch, length = shape
    h = jax.random.normal(jax.random.key(2), (batch, length, args.width))
    made = {}
    for mixer in (None, *args.mixers):
        name = "mamba" if mixer is None else "fp_mamba"
        console.print(f"  compiling {mixer or name}", style="dim")
        config = model_config(name, length, args.width, args.iterations)
        config |= {} if mixer is None else {"mixer": mixer}
        model, params = fpr.build(config), fpr.init(config, jax.random.key(0))

        def layer(params: PyTree, h: jax.Array, steps: int, model: Any = model) -> Any:
            method = functools.partial(_one_layer, h=h, steps=steps)
            return model.apply({"params": params}, method=method)

        parts = {"forward": 0} if mixer is None else {"few": 2, "many": 10}
        for part, steps in parts.items():
            run_layer = functools.partial(layer, steps=steps)
            made[f"{mixer or name} {part}"] = compiled(run_layer, params, h)
        made[f"{mixer or name} train"] = train_step(config, batch, length)
    return made


def _one_layer(model: Any, h: jax.Array, steps: int) -> jax.Array:
    """The first layer of a model on a stream h; `steps` iterations where it has a loop."""
    layer = model.layers[0]
    x = layer.inject(h)
    z = layer.init_state(x, None)
    if not layer.loop:
        return layer.readout(h, x, layer.step(x, z))
    f, params = as_function(layer)
    solver = Damped(halting="never", max_steps=steps)
    return layer.readout(h, x, fixed_point(f, params, x, z, solver=solver).value)


def bench_iteration(
    console: Console, shape: tuple[int, int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """FP-Mamba's iteration against Mamba's layer, for several mixers."""
    rows = race(iteration_entries(console, shape, args), args.rounds)
    ms = {name: row["median_ms"] for name, row in rows.items()}
    shown = table(
        f"one FP-Mamba iteration over one Mamba layer, {shape[0]}x{shape[1]}, width {args.width}",
        ("", "mamba ms", "iteration ms", "forward ratio", "train ratio"),
    )
    result, mamba = [], ms["mamba forward"]
    for mixer in args.mixers:
        iteration = (ms[f"{mixer} many"] - ms[f"{mixer} few"]) / 8
        train = ms[f"{mixer} train"] / ms["mamba train"] / args.iterations
        result.append(
            {
                "mixer": mixer, "batch": shape[0], "length": shape[1], "mamba_ms": mamba,
                "iteration_ms": iteration, "forward_ratio": iteration / mamba,
                "train_ratio": train,
            }
        )  # fmt: skip
        shown.add_row(
            mixer, f"{mamba:.2f}", f"{iteration:.2f}", f"{iteration / mamba:.2f}", f"{train:.2f}"
        )
    console.print(shown)
    console.print(
        f"  forward: one more solver iteration / one Mamba layer forward (target: {TARGET} or "
        f"less);\n  train: a train step with {args.iterations} iterations / as many train steps of "
        "Mamba.",
        highlight=False,
    )
    return result


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All tables."""
    console = make_console()
    names = args.models
    for kind, chosen, known in (("model", names, MODELS), ("mixer", args.mixers, MIXERS)):
        for name in chosen:
            if name not in known:
                raise unknown(kind, name, known)
    result = begin(console, args.allocator)
    console.print(
        "MB: temporaries and results of the compiled program, its arguments not counted.\n"
        f"Loops run {args.iterations} iterations; the segment of trm and hrm counts as one.",
        highlight=False,
    )
    sizes = {"width": args.width, "iterations": args.iterations, "rounds": args.rounds}
    result |= {"sizes": sizes, "models": [], "iteration_cost": []}
    for shape in args.shapes:
        result["models"] += bench_shape(console, names, shape, args)
    if {"mamba", "fp_mamba"} <= set(names):
        for shape in args.shapes:
            result["iteration_cost"] += bench_iteration(console, shape, args)
    return result


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """ "8x256,8x1024" -> [(8, 256), (8, 1024)]."""
    try:
        pairs = [tuple(int(n) for n in part.split("x")) for part in text.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r}, allowed: batch x length with commas, such as 8x256,8x1024"
        )
    return [(batch, length) for batch, length in pairs]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    for option, names in (("--models", MODELS), ("--mixers", MIXERS)):
        everything = ",".join(names)
        parser.add_argument(
            option, type=lambda text: text.split(","), default=list(names),
            help=f"some of {everything}; default: all",
        )  # fmt: skip
    parser.add_argument(
        "--shapes", type=parse_shapes, default=parse_shapes("8x256,8x1024"),
        help="batch x length, default 8x256,8x1024",
    )  # fmt: skip
    for option, default in {"--width": 256, "--iterations": 8, "--rounds": 5}.items():
        parser.add_argument(option, type=positive, default=default, help=f"default {default}")
