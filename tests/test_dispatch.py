"""Which form runs: the choice for GPUs is made at lowering and said once."""

from __future__ import annotations

import functools
import logging
import types

import jax
import jax.numpy as jnp
import pytest

from fpr import _dispatch, delta_rule, linear_scan, ssd
from kernels_pallas import common
from tests.kernels_pallas import checks

WIDE = jax.ShapeDtypeStruct((2, 64, 128), jnp.float32)


@pytest.fixture
def fresh():
    """No answer remembered, before and after."""
    answers = _dispatch._say_xla_on_gpu, common.supports_mosaic_gpu, common.supports_wgmma
    for answer in answers:
        answer.cache_clear()
    yield
    for answer in answers:
        answer.cache_clear()


def lower(**options):
    return checks.lower(functools.partial(linear_scan, **options), "cuda", WIDE, WIDE)


@pytest.mark.parametrize(("capability", "kernels"), [("8.0", 0), ("9.0", 1), ("10.0", 1)])
def test_gpus_without_mosaic_take_the_xla_form(monkeypatch, caplog, fresh, capability, kernels):
    card = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(common.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(common.jax, "local_devices", lambda: [card])
    with caplog.at_level(logging.WARNING):
        for reverse in (False, True):
            text = lower(backend="pallas", reverse=reverse)
            assert (checks.kernel_calls(text) > 0) == kernels
    said = [r.message for r in caplog.records if "compute capability" in r.message]
    assert len(said) == 1 - kernels
    assert all(capability in message for message in said)


@pytest.mark.parametrize("name", ["ssd", "delta"])
@pytest.mark.parametrize(("capability", "kernels"), [("9.0", True), ("10.0", False)])
def test_only_hopper_has_the_matrix_unit_of_ssd_and_delta(
    monkeypatch, caplog, fresh, name, capability, kernels
):
    card = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(common.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(common.jax, "local_devices", lambda: [card])
    head, step = checks.struct(1, 4, 1, 2), checks.struct(1, 4, 1)
    f = {
        "ssd": lambda x, dt: ssd(x, dt, -jnp.ones(1), x, x, backend="pallas"),
        "delta": lambda x, beta: delta_rule(x, x, x, beta, backend="pallas"),
    }[name]
    with caplog.at_level(logging.WARNING):
        for scale in (1, 2):
            text = checks.lower(lambda x, y, scale=scale: f(scale * x, y), "cuda", head, step)
            assert (checks.kernel_calls(text) > 0) == kernels
    assert sum("wgmma" in r.message for r in caplog.records) == 1 - kernels


def test_by_default_gpus_take_the_xla_form_and_the_log_says_so_once(caplog, fresh):
    with caplog.at_level(logging.WARNING, logger=_dispatch.__name__):
        for reverse in (False, True):
            assert checks.kernel_calls(lower(reverse=reverse)) == 0
    assert sum("XLA forms on GPU" in r.message for r in caplog.records) == 1
    assert checks.kernel_calls(lower(backend="pallas")) > 0


def test_an_environment_variable_chooses_the_gpu_kernels(monkeypatch, fresh):
    """Read when a program is lowered, so a change counts; "xla" stays "xla"."""
    monkeypatch.setenv("FPR_GPU_KERNELS", "1")
    assert checks.kernel_calls(lower()) > 0
    assert checks.kernel_calls(lower(backend="xla")) == 0
    monkeypatch.setenv("FPR_GPU_KERNELS", "0")
    assert checks.kernel_calls(lower()) == 0
    monkeypatch.setenv("FPR_GPU_KERNELS", "yes")
    with pytest.raises(ValueError, match="FPR_GPU_KERNELS='yes' is not 0 or 1"):
        lower()


@pytest.mark.parametrize(("platform", "backend"), [("tpu", "auto"), ("cuda", "pallas")])
def test_kernels_lower_under_x64(platform, backend):
    """With gradient; float64 arrays keep to the XLA form."""
    loss = lambda a, x: (linear_scan(a, x, backend=backend)[0] ** 2).sum()  # noqa: E731
    with jax.enable_x64(True):
        text = checks.lower(jax.grad(loss, (0, 1)), platform, WIDE, WIDE)
        assert checks.kernel_calls(text) >= 2
        wide = jax.ShapeDtypeStruct(WIDE.shape, jnp.float64)
        text = checks.lower(lambda a, x: linear_scan(a, x)[0], platform, wide, wide)
        assert checks.kernel_calls(text) == 0


@pytest.mark.parametrize(
    ("platform", "backend", "check_vma"),
    [("tpu", "auto", False), ("cuda", "pallas", False), ("tpu", "auto", True)],
)
def test_inside_shard_map(platform, backend, check_vma):
    """Kernels, with gradient, but for `check_vma`, which they cannot answer: then the XLA form."""
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def loss(a, x):
        run = jax.shard_map(
            lambda a, x: linear_scan(a, x, backend=backend)[0], mesh=mesh,
            in_specs=(whole, split), out_specs=split, check_vma=check_vma,
        )  # fmt: skip
        return (run(a, x) ** 2).sum()

    half = jax.ShapeDtypeStruct((1, *WIDE.shape[1:]), WIDE.dtype)
    text = checks.lower(jax.grad(loss, (0, 1)), platform, half, WIDE)
    assert (checks.kernel_calls(text) >= 2) != check_vma
