"""Builds, checks and times the kernels on the device at hand, and writes JSON.

    python -m kernels_pallas.bench --device=gpu --out=bench_gpu.json
    python -m kernels_pallas.bench --device=tpu --out=bench_tpu.json
    python -m kernels_pallas.bench --device=cpu --interpret    # tiny sizes, times mean nothing

Every kernel is first compared with a float64 loop, then timed beside `lax.associative_scan` and a
plain copy, whose bandwidth is the ceiling. Times are medians over repeats of calls in a row.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels_pallas as kp

# Largest ‖got - want‖ / ‖want‖ that passes, by input type.
ALLOWED = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size.

    Attributes:
      name, shape, dtype: for the report.
      run: the kernel, jitted by the caller. baseline: the same with associative_scan, or None.
      make: seed -> arguments.
      bytes: the fewest bytes that must move through memory: inputs once, outputs once.
      check: (arguments, outputs) -> relative error against float64.
      flops: operations of the matrix products, in chunks of 64 steps; 0 where there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    run: Callable
    baseline: Callable | None
    make: Callable[[int], tuple]
    bytes: int
    check: Callable[[tuple, Any], float]
    flops: int = 0


def relative_error(got, want) -> float:
    """‖got - want‖ / ‖want‖ in float64; infinite for NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = float(np.linalg.norm(got - want)) / max(float(np.linalg.norm(want)), 1e-30)
    return error if np.isfinite(error) else float("inf")


# --- float64 loops, on a slice of batch and channels where these are independent -----------------


def _linear_float64(a, x, dh=None):
    """h, or the cotangents (da, dx) for dh when given; zero initial state."""
    a, x = np.asarray(a, np.float64), np.asarray(x, np.float64)
    h, state = np.zeros_like(x), np.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = a[:, t] * state + x[:, t]
        h[:, t] = state
    if dh is None:
        return h
    dh, da, dx = np.asarray(dh, np.float64), np.zeros_like(a), np.zeros_like(x)
    carry = np.zeros_like(state)
    for t in reversed(range(x.shape[1])):
        dx[:, t] = dh[:, t] + carry
        if t:
            da[:, t] = dx[:, t] * h[:, t - 1]
        carry = a[:, t] * dx[:, t]
    return da, dx


def _selective_float64(u, delta, a, b, c, d, z):
    u, delta, a, b, c, d, z = (np.asarray(v, np.float64) for v in (u, delta, a, b, c, d, z))
    state, y = np.zeros((u.shape[0], *a.shape)), np.zeros_like(u)
    for t in range(u.shape[1]):
        dt = delta[:, t][..., None]
        state = np.exp(dt * a) * state + dt * u[:, t][..., None] * b[:, t][:, None]
        y[:, t] = (state * c[:, t][:, None]).sum(-1) + d * u[:, t]
    return y * z / (1 + np.exp(-z))


def _fused_float64(decay, bx, units, mass, weights):
    """ū·(Bx - h) of the iterate h = scan(λ, (1-λ) (mass Bx - Σ_i weights_i ū_i)) from zero."""
    decay, bx, units, mass, weights = (
        np.asarray(v, np.float64) for v in (decay, bx, units, mass, weights)
    )
    x = mass[:, None, None] * bx - np.einsum("btr,btrd->btd", weights, units)
    h = _linear_float64(decay, (1 - decay) * x)
    return np.einsum("btrd,btd->btr", units, bx - h)


def _ssd_float64(x, log_decay, b, c):
    """One head: x (1, T, P), log_decay (1, T), b and c (1, T, N)."""
    x, log_decay, b, c = (np.asarray(v, np.float64)[0] for v in (x, log_decay, b, c))
    state, y = np.zeros((x.shape[1], b.shape[1])), np.zeros_like(x)
    for t in range(len(x)):
        state = np.exp(log_decay[t]) * state + np.outer(x[t], b[t])
        y[t] = state @ c[t]
    return y[None]


def _delta_float64(q, k, v, beta):
    """One head: q and k (1, T, K), v (1, T, V), beta (1, T)."""
    q, k, v, beta = (np.asarray(x, np.float64)[0] for x in (q, k, v, beta))
    state, y = np.zeros((k.shape[1], v.shape[1])), np.zeros_like(v)
    for t in range(len(v)):
        state = state + beta[t] * np.outer(k[t], v[t] - k[t] @ state)
        y[t] = q[t] @ state
    return y[None]


# --- the cases ------------------------------------------------------------------------------------


def _associative(a, x):
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    a, x32 = a.astype(jnp.float32), x.astype(jnp.float32)
    return lax.associative_scan(combine, (a, x32), axis=1)[1].astype(x.dtype)


def _random(seed: int, dtype):
    """A source of normal and uniform arrays of one type."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    normal = lambda *s: jax.random.normal(next(keys), s, jnp.float32).astype(dtype)  # noqa: E731
    uniform = lambda *s: jax.random.uniform(next(keys), s).astype(dtype)  # noqa: E731
    return normal, uniform


def _linear_cases(shape, dtype, options) -> list[Case]:
    batch, time_, dim = shape
    stream = batch * time_ * dim * jnp.dtype(dtype).itemsize
    part = (slice(0, 1), slice(None), slice(0, 128))

    def make(seed):
        normal, uniform = _random(seed, dtype)
        return 1 - 0.5 * uniform(*shape) ** 2, normal(*shape), normal(*shape)

    def forward(a, x, dh):
        del dh
        return kp.linear_scan(a, x, **options)[0]

    def with_gradient(f):
        def run(a, x, dh):
            h, vjp = jax.vjp(f, a, x)
            return h, *vjp(dh)

        return run

    def check_forward(args, h):
        a, x, _ = (np.asarray(v.astype(jnp.float32)[part]) for v in args)
        return relative_error(h.astype(jnp.float32)[part], _linear_float64(a, x))

    def check_gradient(args, out):
        a, x, dh = (np.asarray(v.astype(jnp.float32)[part]) for v in args)
        want = _linear_float64(a, x, dh)
        return max(relative_error(g.astype(jnp.float32)[part], w) for g, w in zip(out[1:], want))

    kind = jnp.dtype(dtype).name
    kernel = with_gradient(lambda a, x: kp.linear_scan(a, x, **options)[0])
    return [
        Case(
            "linear_scan", shape, kind, forward, lambda a, x, dh: _associative(a, x), make,
            3 * stream, check_forward,
        ),
        Case(  # reads a, x, writes h; reads a, h, dh, writes da, dx
            "linear_scan with gradient", shape, kind, kernel, with_gradient(_associative), make,
            8 * stream, check_gradient,
        ),
    ]  # fmt: skip


def _selective_case(shape, dtype, options) -> Case:
    batch, time_, dim, n = shape
    size = jnp.dtype(dtype).itemsize
    moved = 4 * batch * time_ * dim * size + 2 * batch * time_ * n * size

    def make(seed):
        normal, uniform = _random(seed, dtype)
        btd, btn = (batch, time_, dim), (batch, time_, n)
        rates = -jnp.arange(1, n + 1, dtype=jnp.float32) * jnp.ones((dim, 1))
        return (
            normal(*btd), 0.1 * uniform(*btd), rates, normal(*btn), normal(*btn),
            jnp.ones((dim,)), normal(*btd),
        )  # fmt: skip

    def check(args, y):
        u, delta, a, b, c, d, z = (np.asarray(v.astype(jnp.float32)) for v in args)
        want = _selective_float64(
            u[:1, :, :128], delta[:1, :, :128], a[:128], b[:1], c[:1], d[:128], z[:1, :, :128]
        )
        return relative_error(y.astype(jnp.float32)[:1, :, :128], want)

    def run(*args):
        return kp.selective_scan(*args, **options)[0]

    return Case("selective_scan", shape, jnp.dtype(dtype).name, run, None, make, moved, check)


def _fused_case(shape, rank, dtype, options) -> Case:
    batch, time_, dim = shape
    stream = batch * time_ * dim * jnp.dtype(dtype).itemsize

    def make(seed):
        normal, uniform = _random(seed, dtype)
        units = normal(batch, time_, rank, dim).astype(jnp.float32)
        units = (units / jnp.linalg.norm(units, axis=-1, keepdims=True)).astype(dtype)
        new, old = (
            kp.Iterate(jnp.ones((batch,)), normal(batch, time_, rank).astype(jnp.float32))
            for _ in range(2)
        )
        return uniform(*shape), normal(*shape), units, new, old

    def check(args, out):
        first = jax.tree.map(lambda v: np.asarray(v.astype(jnp.float32)[:1]), args)
        decay, bx, units, new, _ = first
        return relative_error(out[0][:1], _fused_float64(decay, bx, units, *new))

    def run(*args):
        along, residual, _ = kp.fused_fixed_point(*args, **options)
        return along, residual

    name = f"fused_fixed_point r={rank}"
    # Reads λ, Bx, ū and two weights a token and rank, writes one number.
    moved = (2 + rank) * stream + 3 * 4 * batch * time_ * rank
    return Case(name, shape, jnp.dtype(dtype).name, run, None, make, moved, check)


def _ssd_case(shape, dtype, options) -> Case:
    batch, time_, heads, p, n = shape
    size = jnp.dtype(dtype).itemsize
    moved = 2 * batch * time_ * (heads * p + n) * size + 4 * batch * time_ * heads

    def make(seed):
        normal, uniform = _random(seed, dtype)
        btn = (batch, time_, 1, n)
        decay = -0.1 * uniform(batch, time_, heads).astype(jnp.float32)
        return normal(batch, time_, heads, p), decay, normal(*btn) / n**0.5, normal(*btn)

    def check(args, y):
        x, decay, b, c = (np.asarray(v.astype(jnp.float32)[:1]) for v in args)
        want = _ssd_float64(x[:, :, 0], decay[:, :, 0], b[:, :, 0], c[:, :, 0])
        return relative_error(y.astype(jnp.float32)[:1, :, 0], want)

    def run(*args):
        return kp.ssd(*args, **options)[0]

    flops = 2 * batch * time_ * heads * (64 * (n + p) + 2 * n * p)
    return Case("ssd", shape, jnp.dtype(dtype).name, run, None, make, moved, check, flops)


def _delta_case(shape, dtype, options) -> Case:
    batch, time_, heads, size = shape
    moved = 4 * batch * time_ * heads * size * jnp.dtype(dtype).itemsize

    def make(seed):
        normal, uniform = _random(seed, dtype)
        wide = (*shape[:3], size)
        k = normal(*wide).astype(jnp.float32)
        k = (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype)
        return normal(*wide), k, normal(*wide), uniform(*shape[:3])

    def check(args, y):
        q, k, v, beta = (np.asarray(x.astype(jnp.float32)[:1, :, 0]) for x in args)
        return relative_error(y.astype(jnp.float32)[:1, :, 0], _delta_float64(q, k, v, beta))

    def run(*args):
        return kp.delta_rule(*args, **options)[0]

    # Scores and their use; keys with keys, the two solutions; the state read twice and written.
    flops = 2 * batch * time_ * heads * (64 * 5 * size + 3 * size**2)
    return Case("delta_rule", shape, jnp.dtype(dtype).name, run, None, make, moved, check, flops)


def cases(device: str, interpret: bool) -> list[Case]:
    """All kernels that the device has, at the sizes of the speed targets (tiny if interpreted)."""
    if interpret:
        options: dict[str, Any] = {"platform": "tpu", "interpret": True}
        return [
            *_linear_cases((1, 20, 5), jnp.float32, options),
            _selective_case((1, 9, 4, 2), jnp.float32, options),
            _fused_case((1, 20, 6), 1, jnp.float32, options),
            _ssd_case((1, 20, 1, 3, 2), jnp.float32, options),
            _delta_case((1, 20, 1, 3), jnp.float32, options),
        ]
    options = {"platform": device}
    found = []
    for shape in ((8, 4096, 2048), (8, 4096, 256)):
        for dtype in (jnp.bfloat16, jnp.float32):
            found += _linear_cases(shape, dtype, options)
    found.append(_selective_case((8, 4096, 2048, 16), jnp.bfloat16, options))
    found += [_fused_case((8, 4096, d), 1, jnp.bfloat16, options) for d in (1024, 2048)]
    found.append(_ssd_case((8, 4096, 32, 64, 128), jnp.bfloat16, options))
    found.append(_delta_case((8, 4096, 16, 128), jnp.bfloat16, options))
    return found


# --- measuring ------------------------------------------------------------------------------------


def seconds_per_call(f: Callable, inputs: list[tuple], calls: int, repeats: int) -> float:
    """Median over repeats of the time of `calls` calls in a row, which rotate among the inputs."""
    for args in inputs:
        jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        outs = [f(*inputs[k % len(inputs)]) for k in range(calls)]
        jax.block_until_ready(outs[-1])
        times.append((time.perf_counter() - start) / calls)
        del outs
    return statistics.median(times)


def copy_bandwidth(megabytes: int, calls: int, repeats: int) -> float:
    """Bytes per second, read plus written, of an elementwise pass over one large array."""
    add = jax.jit(lambda x: x + 1)
    arrays = [(jnp.full((megabytes * 2**18,), float(k), jnp.float32),) for k in range(2)]
    return 2 * megabytes * 2**20 / seconds_per_call(add, arrays, calls, repeats)


def matmul_rate(size: int, calls: int, repeats: int) -> float:
    """Operations per second of a square bfloat16 product."""
    make = lambda seed: jax.random.normal(jax.random.key(seed), (size, size)).astype(jnp.bfloat16)  # noqa: E731
    inputs = [(make(2 * k), make(2 * k + 1)) for k in range(2)]
    return 2 * size**3 / seconds_per_call(jax.jit(jnp.matmul), inputs, calls, repeats)


def measure(case: Case, ceiling: float, matmul: float, calls: int, repeats: int) -> dict[str, Any]:
    """Checks and times one case; a failed check has no times."""
    run = jax.jit(case.run)
    inputs = [case.make(seed) for seed in range(2)]
    row: dict[str, Any] = {"name": case.name, "shape": case.shape, "dtype": case.dtype}
    row["error"] = case.check(inputs[0], run(*inputs[0]))
    row["correct"] = row["error"] < ALLOWED[case.dtype]
    if not row["correct"]:
        return row
    seconds = seconds_per_call(run, inputs, calls, repeats)
    row["ms"] = 1e3 * seconds
    row["GB/s"] = case.bytes / seconds / 1e9
    row["share_of_copy"] = case.bytes / seconds / ceiling
    if case.flops:
        row["TFLOP/s"] = case.flops / seconds / 1e12
        row["share_of_matmul"] = case.flops / seconds / matmul
    if case.baseline is not None:
        slow = seconds_per_call(jax.jit(case.baseline), inputs, calls, repeats)
        row["associative_scan_ms"] = 1e3 * slow
        row["times_faster_than_associative_scan"] = slow / seconds
    return row


def main(argv: list[str] | None = None) -> int:
    """Runs all cases; returns the number that are wrong or did not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("gpu", "tpu", "cpu"), required=True)
    parser.add_argument("--interpret", action="store_true", help="tiny sizes, interpreted, on CPU")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--calls", type=int, default=10, help="calls in a row per repeat")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="where to write the JSON")
    flags = parser.parse_args(argv)
    if (flags.device == "cpu") != flags.interpret:
        parser.error("--device=cpu needs --interpret, the other devices must not have it")
    if jax.default_backend() != flags.device:
        parser.error(f"--device={flags.device}, but JAX runs on {jax.default_backend()}")
    calls, repeats = (1, 2) if flags.interpret else (flags.calls, flags.repeats)
    ceiling = copy_bandwidth(4 if flags.interpret else 512, calls, repeats)
    matmul = matmul_rate(128 if flags.interpret else 8192, calls, repeats)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "interpret": flags.interpret,
        "copy_GB/s": ceiling / 1e9,
        "matmul_TFLOP/s": matmul / 1e12,
        "results": [],
    }
    print(f"{report['device']}, jax {jax.__version__}, copy {ceiling / 1e9:.0f} GB/s")
    failed = 0
    for case in cases(flags.device, flags.interpret):
        if flags.only not in case.name:
            continue
        measured = functools.partial(measure, case, ceiling, matmul, calls, repeats)
        try:
            row = measured()
        except (RuntimeError, ValueError, NotImplementedError) as e:
            # One kernel that does not build must not cost the numbers of the others.
            row = {"name": case.name, "shape": case.shape, "dtype": case.dtype}
            row |= {"correct": False, "exception": f"{type(e).__name__}: {e}"[:2000]}
        failed += not row["correct"]
        report["results"].append(row)
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        print("  ".join(f"{k}={v}" for k, v in zip(row, cells)), flush=True)
    if flags.out:
        with open(flags.out, "w") as f:
            json.dump(report, f, indent=1)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
