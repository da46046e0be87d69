"""`python -m experiments.bench reasoner`: FPRM's window of training and its inference, by default
at the paper's Sudoku size (D = 512, 81 + 16 tokens, batch 8, 6 differentiated iterations, float32).

Beside it, in the same rounds: plain JAX for the same network, written without `fpr`'s layers, and
one large matrix product, whose rate is what the matrix products inside the network could reach.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console

import fpr
from experiments.timing import Entry, begin, compiled, make_console, positive, race, table
from fpr.adjoints import Unrolled
from fpr.models.fprm import tied_scales
from fpr.solvers import Damped

PyTree = Any
TRAIN, INFER, PRODUCT = "train", "inference", "one matrix product"


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """The paper's Sudoku model, but for the sizes asked for."""
    return {
        "name": "fprm",
        "vocab_size": 11,
        "seq_len": args.side**2,
        "hidden_size": args.hidden_size,
        "num_heads": args.num_heads,
        "conv": "conv2d",
        "conv_kernel": 3,
        "num_registers": args.registers,
    }


def step_flops(config: Mapping[str, Any], params: PyTree, batch: int) -> int:
    """Multiplications and additions of one application of f: its matrix products, nothing else.

    The products with weights take 2 · tokens · size of the weights, attention's two
    2 · batch · tokens² · D each. Differentiating a product costs two more of the same size.
    """
    tokens = config["seq_len"] + config["num_registers"]
    weights = [a.size for a in jax.tree.leaves(params["layers_0"]) if a.ndim == 2]
    blocks = sum(name.startswith("mlps_") for name in params["layers_0"])
    attention = 4 * batch * tokens**2 * config["hidden_size"] * blocks
    return 2 * batch * tokens * sum(weights) + attention


def plain_step(
    config: Mapping[str, Any], primitive: bool, p: PyTree, x: jax.Array, z: jax.Array
) -> jax.Array:
    """f in plain JAX; `primitive`: the depthwise convolution by XLA's convolution."""
    registers, heads = config["num_registers"], config["num_heads"]
    (batch, time, dim), kernel = z.shape, p["conv"]["kernel"]
    side = round(config["seq_len"] ** 0.5)
    grid = z[:, registers:].reshape(batch, side, side, dim)
    if primitive:
        grid = lax.conv_general_dilated(
            grid, kernel[:, :, None], (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=dim,
        )  # fmt: skip
    else:
        padded = jnp.pad(grid, ((0, 0), (1, 1), (1, 1), (0, 0)))
        grid = sum(
            kernel[i, j] * padded[:, i : i + side, j : j + side] for i in range(3) for j in range(3)
        )
    z = jnp.concatenate([z[:, :registers], grid.reshape(batch, side * side, dim)], axis=1)
    a1, a2 = jax.nn.sigmoid(p["alpha_1"]), jax.nn.sigmoid(p["alpha_2"])
    blocks = sum(name.startswith("mlps_") for name in p)
    b1, b2 = tied_scales(a1, a2, 2 * blocks)
    z = a2 * z + b2 * x

    def norm(v: jax.Array) -> jax.Array:
        return v * lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + 1e-5)

    width = dim // heads
    angle = jnp.arange(time)[:, None] / 1e4 ** (jnp.arange(0, width, 2) / width)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]

    def rotate(v: jax.Array) -> jax.Array:
        first, second = jnp.split(v, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def attend(v: jax.Array, w: PyTree) -> jax.Array:
        q, k, v = jnp.split(v @ w["qkv_proj"]["kernel"], 3, axis=-1)
        q, k, v = (a.reshape(batch, time, heads, width) for a in (q, k, v))
        out = jax.nn.dot_product_attention(rotate(q), rotate(k), v)
        return out.reshape(batch, time, dim) @ w["o_proj"]["kernel"]

    def mlp(v: jax.Array, w: PyTree) -> jax.Array:
        gate, up = jnp.split(v @ w["gate_up_proj"]["kernel"], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ w["down_proj"]["kernel"]

    for i in range(blocks):
        z = a1 * z + b1 * attend(norm(z), p[f"token_mixers_{i}"])
        z = a1 * z + b1 * mlp(norm(z), p[f"mlps_{i}"])
    return z


def plain_logits(
    config: Mapping[str, Any], k: int, primitive: bool, params: PyTree, tokens: Any, z: Any
) -> jax.Array:
    """Logits after k applications of f from z, in a Python loop."""
    x = params["embedding"][tokens] * config["hidden_size"] ** 0.5
    x = jnp.pad(x, ((0, 0), (config["num_registers"], 0), (0, 0)))
    for _ in range(k):
        z = plain_step(config, primitive, params["layers_0"], x, z)
    return z[:, config["num_registers"] :] @ params["lm_head"]["kernel"]


def training(
    logits: Callable[[PyTree, jax.Array, Any], jax.Array],
) -> Callable[[PyTree, jax.Array, Any], Any]:
    """Cross entropy and its gradient: what an optimiser step computes before the update."""

    def loss(params: PyTree, tokens: jax.Array, state: Any) -> jax.Array:
        log_p = jax.nn.log_softmax(logits(params, tokens, state))
        return -jnp.mean(jnp.take_along_axis(log_p, tokens[..., None], axis=-1))

    return jax.value_and_grad(loss)


def entries(
    args: argparse.Namespace, config: Mapping[str, Any], params: PyTree, console: Console
) -> dict[str, Entry]:
    """The competitors, compiled and checked against each other."""
    k = args.iterations
    tokens = jax.random.randint(jax.random.key(1), (args.batch, args.side**2), 1, 11)
    start = jax.jit(lambda p, t, key: fpr.apply(config, p, {"tokens": t}, key=key, max_steps=0))
    state = start(params, tokens, jax.random.key(2)).state
    z = state[0].z

    def window(params: PyTree, tokens: jax.Array, state: Any) -> jax.Array:
        out = fpr.apply(
            config, params, {"tokens": tokens},
            train=True, state=state, adjoint=Unrolled(), max_steps=k,
        )  # fmt: skip
        return out.logits

    never = Damped(halting="never", max_steps=k, decay=1.0)

    def infer(params: PyTree, tokens: jax.Array, state: Any) -> jax.Array:
        return fpr.apply(config, params, {"tokens": tokens}, state=state, solver=never).logits

    plain = functools.partial(plain_logits, config, k, False)
    by_primitive = functools.partial(plain_logits, config, k, True)
    programs: dict[str, tuple[Callable[..., Any], Any]] = {
        f"fpr: {TRAIN}": (training(window), state),
        f"plain JAX: {TRAIN}": (training(plain), z),
        f"plain JAX, conv primitive: {TRAIN}": (training(by_primitive), z),
        f"fpr: {INFER}": (infer, state),
        f"plain JAX: {INFER}": (plain, z),
    }
    made, losses = {}, {}
    for name, (fn, at) in programs.items():
        console.print(f"compiling {name}", style="dim")
        made[name] = compiled(fn, params, tokens, at)
        out = made[name].run()
        losses[name] = float(out[0] if isinstance(out, tuple) else jnp.abs(out).mean())
    for kind in (TRAIN, INFER):
        values = [value for name, value in losses.items() if name.endswith(kind)]
        if not max(values) - min(values) < 1e-3 * abs(values[0]):
            raise RuntimeError(f"the programs differ: {losses}")
    a = jnp.ones((args.product, args.product))
    made[PRODUCT] = compiled(jnp.matmul, a, a)
    return made


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Times all competitors and prints seconds, rates and ratios."""
    console = make_console()
    result = begin(console, args.allocator)
    config = model_config(args)
    params = fpr.init(config, jax.random.key(0))
    forward = args.iterations * step_flops(config, params, args.batch)
    rows = race(entries(args, config, params, console), args.rounds)
    product_rate = 2 * args.product**3 / rows[PRODUCT]["median_ms"] / 1e6
    size = (
        f"FPRM D={args.hidden_size}, {args.side**2} + {args.registers} tokens, batch {args.batch}, "
        f"{args.iterations} iterations (differentiated in training), float32"
    )
    shown = table(size, ("", "median ms", "best ms", "temporaries MB", "GFLOP/s", "of product"))
    for name, row in rows.items():
        flops = 2 * args.product**3 if name == PRODUCT else forward
        flops *= 3 if name.endswith(TRAIN) else 1
        row["gflops_per_s"] = flops / row["median_ms"] / 1e6
        row["share_of_product"] = row["gflops_per_s"] / product_rate
        memory = row["temporaries_mb"]
        shown.add_row(
            name, f"{row['median_ms']:.0f}", f"{row['best_ms']:.0f}",
            "-" if memory is None else f"{memory:.0f}",
            f"{row['gflops_per_s']:.1f}", f"{row['share_of_product']:.2f}",
        )  # fmt: skip
    console.print(shown)
    ratios = {
        f"{kind}: fpr over {rival}": rows[f"{rival}: {kind}"]["median_ms"]
        / rows[f"fpr: {kind}"]["median_ms"]
        for kind in (TRAIN, INFER)
        for rival in ("plain JAX", "plain JAX, conv primitive")
        if f"{rival}: {kind}" in rows
    }
    for name, ratio in ratios.items():
        console.print(f"  {name}: {ratio:.2f} times the speed", highlight=False)
    console.print(
        "  GFLOP/s counts the matrix products; training counts each three times (forward, and two "
        "of its size backward).",
        highlight=False,
    )
    sizes = {name: value for name, value in vars(args).items() if isinstance(value, int)}
    return result | {"sizes": sizes, "forward_flops": forward, "rows": rows, "ratios": ratios}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    sizes = {
        "--hidden-size": 512,
        "--num-heads": 8,
        "--side": 9,
        "--registers": 16,
        "--batch": 8,
        "--iterations": 6,
        "--product": 2048,
        "--rounds": 7,
    }
    for option, default in sizes.items():
        kind = int if option == "--registers" else positive  # There may be none of them.
        parser.add_argument(option, type=kind, default=default, help=f"default {default}")
