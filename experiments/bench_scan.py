"""`python -m experiments.bench scan`: linear and selective scans against what they replace.

The floor is one pass in C over the same arrays; the rivals are `lax.associative_scan` and a scan
that forms the state of every step.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console

import fpr.scan
from experiments.timing import Entry, begin, compiled, make_console, positive, race, table

C_FLOOR = r"""
void linear_scan(const float *restrict a, const float *restrict x, float *restrict h,
                 long batch, long time, long dim) {
  for (long b = 0; b < batch; b++, a += time * dim, x += time * dim, h += time * dim) {
    for (long d = 0; d < dim; d++) h[d] = x[d];
    for (long i = dim; i < time * dim; i++) h[i] = a[i] * h[i - dim] + x[i];
  }
}
"""


def c_floor(a: np.ndarray, x: np.ndarray) -> Entry | None:
    """One pass in C over the same arrays into warm memory, or None without a compiler."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "floor.c", Path(folder) / "floor.so"
        source.write_text(C_FLOOR)
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        built = subprocess.run(
            [compiler, *flags, "-o", str(library), str(source)], capture_output=True, check=False
        )
        if built.returncode:
            return None
        function = ctypes.CDLL(str(library)).linear_scan
    out = np.zeros_like(x)
    pointers = [v.ctypes.data_as(ctypes.c_void_p) for v in (a, x, out)]
    sizes = [ctypes.c_long(n) for n in x.shape]
    return Entry(lambda: (function(*pointers, *sizes), a, x, out))


def associative(a: jax.Array, x: jax.Array) -> jax.Array:
    """`jax.lax.associative_scan` used plainly: the form to beat."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(combine, (a, x), axis=1)[1]


def materialised(u, delta, A, B, C):
    """A selective scan that forms (B, T, D, N), as a plain program would."""
    decay = jnp.exp(delta[..., None] * A)
    x = (delta * u)[..., None] * B[:, :, None, :]
    return jnp.einsum("btdn,btn->btd", associative(decay, x), C)


def with_gradient(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    """fn and the gradients of all its arguments, for a cotangent given last."""

    def run(*args):
        out, pull = jax.vjp(fn, *args[:-1])
        return out, pull(args[-1])

    return run


def linear_entries(shape: Sequence[int]) -> dict[str, Entry]:
    """Linear scans of one shape (B, T, D), float32."""
    r = np.random.default_rng(0)
    a = r.uniform(0.5, 1.0, shape).astype(np.float32)
    x, cotangent = (r.normal(size=shape).astype(np.float32) for _ in range(2))
    floor = c_floor(a, x)

    def ours(a, x):
        return fpr.scan.linear_scan(a, x)[0]

    args, ct = (jnp.asarray(a), jnp.asarray(x)), jnp.asarray(cotangent)
    difference = jnp.abs(jax.jit(ours)(*args) - jax.jit(associative)(*args)).max()
    if not difference < 1e-3:
        raise RuntimeError(f"the linear scans differ by {difference}")
    # Donated: the result overwrites x, as it does inside a larger program.
    step = jax.jit(ours, donate_argnums=1).lower(*args).compile()
    state = [jnp.array(x)]

    def donated() -> None:
        state.append(step(args[0], state.pop()).block_until_ready())

    entries = {
        "fpr.linear_scan": compiled(ours, *args),
        "fpr.linear_scan, x donated": Entry(donated),
        "lax.associative_scan": compiled(associative, *args),
        "fpr.linear_scan + gradient": compiled(with_gradient(ours), *args, ct),
        "lax.associative_scan + gradient": compiled(with_gradient(associative), *args, ct),
    }
    return ({"one pass in C, warm output": floor} if floor else {}) | entries


def selective_entries(shape: Sequence[int]) -> dict[str, Entry]:
    """Selective scans of one shape (B, T, D, N), float32."""
    batch, steps, dim, n = shape
    r = np.random.default_rng(0)

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(r.normal(size=size), jnp.float32)

    long = (batch, steps, dim)
    delta = jax.nn.softplus(normal(*long) - 2)
    small = (normal(batch, steps, n), normal(batch, steps, n))
    args = (normal(*long), delta, -jnp.exp(normal(dim, n)), *small)
    ct = normal(*long)

    def ours(*args):
        return fpr.scan.selective_scan(*args)[0]

    difference = jnp.abs(jax.jit(ours)(*args) - jax.jit(materialised)(*args)).max()
    if not difference < 1e-3:
        raise RuntimeError(f"the selective scans differ by {difference}")
    return {
        "fpr.selective_scan": compiled(ours, *args),
        "materialised": compiled(materialised, *args),
        "fpr.selective_scan + gradient": compiled(with_gradient(ours), *args, ct),
        "materialised + gradient": compiled(with_gradient(materialised), *args, ct),
    }


# What each row is measured against: (row, reference row).
RATIOS = (
    ("fpr.linear_scan", "lax.associative_scan"),
    ("fpr.linear_scan + gradient", "lax.associative_scan + gradient"),
    ("fpr.selective_scan", "materialised"),
    ("fpr.selective_scan + gradient", "materialised + gradient"),
    ("one pass in C, warm output", "fpr.linear_scan"),
    ("one pass in C, warm output", "fpr.linear_scan, x donated"),
)


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """How many times faster the first of each pair in `RATIOS` is, by medians."""
    return {
        f"{fast} over {slow}": rows[slow]["median_ms"] / rows[fast]["median_ms"]
        for fast, slow in RATIOS
        if fast in rows and slow in rows
    }


def show(console: Console, title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """One table of a race and its ratios."""
    shown_table = table(title, ("", "median ms", "best ms", "temporaries MB"))
    for name, row in rows.items():
        memory = row["temporaries_mb"]
        shown = "-" if memory is None else f"{memory:.2f}"
        shown_table.add_row(name, f"{row['median_ms']:.2f}", f"{row['best_ms']:.2f}", shown)
    console.print(shown_table)
    for name, ratio in ratios(rows).items():
        console.print(f"  {name}: {ratio:.2f}x", highlight=False)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Linear and selective scans, on CPU with freed memory kept unless told otherwise."""
    console = make_console()
    result = begin(console, args.allocator) | {"races": []}
    for name, shape, entries in (
        ("linear", args.linear, linear_entries(args.linear)),
        ("selective", args.selective, selective_entries(args.selective)),
    ):
        rows = race(entries, args.rounds)
        show(console, f"{name} {tuple(shape)}, float32", rows)
        result["races"].append({"scan": name, "shape": shape, "rows": rows, "ratios": ratios(rows)})
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--rounds", type=positive, default=9, help="timed rounds per competitor")
    shapes = {"--linear": ("B T D", [8, 4096, 256]), "--selective": ("B T D N", [8, 256, 256, 16])}
    for option, (axes, default) in shapes.items():
        names = tuple(axes.split())
        parser.add_argument(option, nargs=len(names), type=positive, metavar=names, default=default)
