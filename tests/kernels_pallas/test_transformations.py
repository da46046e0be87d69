"""Every kernel inside JAX's transformations; and programs that do not grow with time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import kernels_pallas as kp
from tests.kernels_pallas import checks


def _unit(v):
    return v / jnp.linalg.norm(v, axis=-1, keepdims=True)


def _fused(decay, bx, units, weights, **options):
    one = jnp.ones(bx.shape[0])
    iterates = kp.Iterate(one, weights), kp.Iterate(0 * one, 0 * weights)
    return kp.fused_fixed_point(decay, bx, units, *iterates, keep=True, **options)[2]


def arguments(name: str, batch: int = 2, time: int = 9) -> tuple:
    """(function of its streams alone, the streams); the second one is like the result."""
    bt = batch, time
    draw = checks.normal
    if name == "linear_scan":
        return lambda a, x, **o: kp.linear_scan(a, x, **o)[0], (
            checks.uniform(0, 0, 1, *bt, 4), draw(1, *bt, 4),
        )  # fmt: skip
    if name == "selective_scan":
        rates = -checks.uniform(1, 0.1, 3, 4, 2)
        return lambda dt, u, b, c, **o: kp.selective_scan(u, dt, rates, b, c, **o)[0], (
            checks.uniform(0, 0, 0.3, *bt, 4), draw(2, *bt, 4), draw(3, *bt, 2), draw(4, *bt, 2),
        )  # fmt: skip
    if name == "fused_fixed_point":
        return _fused, (
            checks.uniform(0, 0, 1, *bt, 4), draw(1, *bt, 4), _unit(draw(2, *bt, 1, 4)),
            draw(3, *bt, 1),
        )  # fmt: skip
    if name == "ssd":
        return lambda a, x, b, c, **o: kp.ssd(x, a, b, c, **o)[0], (
            -checks.uniform(0, 0, 1, *bt, 2), draw(1, *bt, 2, 3), draw(2, *bt, 1, 2),
            draw(3, *bt, 1, 2),
        )  # fmt: skip
    return lambda q, v, k, beta, **o: kp.delta_rule(q, k, v, beta, **o)[0], (
        draw(0, *bt, 2, 3), draw(1, *bt, 2, 3), _unit(draw(2, *bt, 2, 3)),
        checks.uniform(3, 0, 1, *bt, 2),
    )  # fmt: skip


KERNELS = ["linear_scan", "selective_scan", "fused_fixed_point", "ssd", "delta_rule"]


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("name", KERNELS)
def test_lowers_inside_shard_map_remat_while_loop_and_vmap(name, platform):
    f, args = arguments(name)
    run = functools.partial(f, platform=platform)
    spec = PartitionSpec("data")
    mesh = AbstractMesh((2,), ("data",))

    def everything(first, x, *rest):
        twice = jax.lax.fori_loop(0, 2, lambda _, x: run(first, x, *rest), x)
        loss = jax.checkpoint(lambda x: (run(first, x, *rest) ** 2).sum())
        over = jax.vmap(lambda x: run(first, x, *rest))(jnp.stack([x, 2 * x]))
        return twice, jax.grad(loss)(twice), over.swapaxes(0, 1)

    sharded = jax.shard_map(
        everything, mesh=mesh, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False
    )
    shapes = [checks.struct(*v.shape) for v in args]
    text = checks.lower(sharded, {"tpu": "tpu", "gpu": "cuda"}[platform], *shapes)
    assert checks.kernel_calls(text) >= 4  # in the loop, forward and backward, under vmap


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_same_numbers_under_vmap_remat_and_while_loop(name):
    """Also T = 1, an argument with its axes permuted in memory, and one given away."""
    f, args = arguments(name)
    run = functools.partial(f, platform="tpu", interpret=True)
    first, x, *rest = args
    once = jax.jit(run)(*args)
    over = jax.jit(jax.vmap(run, (None, 0, *(None for _ in rest))))(first, jnp.stack([x, x]), *rest)
    checks.assert_close(over[1], once, 1e-6)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: run(first, x, *rest), x))(x)
    checks.assert_close(loop, jax.jit(run)(first, once, *rest), 1e-6)
    loss = lambda x: (run(first, x, *rest) ** 2).sum()  # noqa: E731
    again = jax.jit(jax.grad(jax.checkpoint(loss)))(x)
    checks.assert_close(again, jax.jit(jax.grad(loss))(x), 1e-6)
    turned = jnp.asarray(np.asarray(x).swapaxes(0, 1)).swapaxes(0, 1)
    checks.assert_close(jax.jit(run, donate_argnums=1)(first, turned, *rest), once, 1e-6)
    short = [v[:, :1] for v in args]
    checks.assert_close(jax.jit(run)(*short), once[:, :1], 1e-6)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("name", KERNELS)
def test_programs_do_not_grow_with_time(name, platform):
    """A loop over time that was unrolled, or a pass per chunk, would show in the program's size."""
    f, args = arguments(name)
    lengths = []
    for time in (8192, 65536):
        shapes = [checks.struct(2, time, *v.shape[2:]) for v in args]
        run = functools.partial(f, platform=platform)
        text = checks.lower(run, {"tpu": "tpu", "gpu": "cuda"}[platform], *shapes)
        lengths.append(len(text))
    assert lengths[1] < 1.05 * lengths[0]
