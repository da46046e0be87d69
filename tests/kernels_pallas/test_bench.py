"""The benchmark script in its interpreted form: it checks, times, writes JSON, and can fail."""

from __future__ import annotations

import json

import pytest

from kernels_pallas import bench


def test_interpreted_run_writes_json(tmp_path):
    out = tmp_path / "bench.json"
    assert bench.main(["--device=cpu", "--interpret", f"--out={out}"]) == 0
    report = json.loads(out.read_text())
    assert report["copy_GB/s"] > 0
    rows = {r["name"]: r for r in report["results"]}
    assert set(rows) == {
        "linear_scan", "linear_scan with gradient", "selective_scan",
        "fused_fixed_point r=1", "ssd", "delta_rule",
    }  # fmt: skip
    assert all(r["correct"] and r["ms"] > 0 for r in rows.values())
    assert rows["linear_scan"]["times_faster_than_associative_scan"] > 0


def test_wrong_results_are_reported_and_not_timed(monkeypatch):
    right = bench.kp.linear_scan
    monkeypatch.setattr(
        bench.kp, "linear_scan", lambda a, x, **k: tuple(1.01 * v for v in right(a, x, **k))
    )
    assert bench.main(["--device=cpu", "--interpret", "--only=linear_scan"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_every_case_builds_for_its_device(device):
    """Traces and lowers what will run there, at full size."""
    import jax

    from tests.kernels_pallas import checks

    for case in bench.cases(device, interpret=False):
        shapes = jax.eval_shape(lambda case=case: case.make(0))
        text = checks.lower(case.run, {"gpu": "cuda", "tpu": "tpu"}[device], *shapes)
        assert checks.kernel_calls(text) >= 1, case.name


def test_refuses_a_device_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device=gpu"])
    assert "JAX runs on cpu" in capsys.readouterr().err
