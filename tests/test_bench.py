"""The benchmarks run at a tiny size, check their competitors and write their figures."""

import json
import platform
import subprocess
import sys

import pytest

import fpr
from experiments import bench, bench_models
from fpr.registry import MODELS


def test_scan_writes_figures(tmp_path, capsys):
    file = tmp_path / "scan.json"
    sizes = ["--linear", "2", "64", "16", "--selective", "2", "16", "16", "4", "--rounds", "1"]
    # The allocator of the test process stays as it is.
    arguments = ["scan", *sizes, "--allocator", "system", "--output", str(file)]
    assert bench.main(arguments) == 0
    races = json.loads(file.read_text())["races"]
    assert {r["scan"] for r in races} == {"linear", "selective"}
    for race in races:
        assert all(row["median_ms"] > 0 for row in race["rows"].values())
        assert all(ratio > 0 for ratio in race["ratios"].values())
    assert "fpr.linear_scan" in capsys.readouterr().out


@pytest.mark.slow
def test_reasoner_checks_and_rates_its_competitors(tmp_path, capsys, fast_compile):
    file = tmp_path / "reasoner.json"
    sizes = {"--hidden-size": 8, "--num-heads": 2, "--side": 2, "--registers": 1, "--batch": 2}
    sizes |= {"--iterations": 2, "--product": 16, "--rounds": 1}
    options = [str(part) for pair in sizes.items() for part in pair]
    assert bench.main(["reasoner", *options, "--allocator", "system", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    # Weights of two blocks: 4 D² of attention, 3 D · 256 of SwiGLU; attention 4 B T² D a block.
    step = 2 * 2 * 5 * 2 * (4 * 8**2 + 3 * 8 * 256) + 2 * 4 * 2 * 5**2 * 8
    assert result["forward_flops"] == 2 * step
    assert len(result["rows"]) == 6
    row = result["rows"]["fpr: train"]
    assert row["gflops_per_s"] == pytest.approx(3 * 2 * step / row["median_ms"] / 1e6)
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert "of product" in capsys.readouterr().out


@pytest.mark.slow
def test_models_writes_rates_and_the_cost_of_an_iteration(tmp_path, capsys, fast_compile):
    file = tmp_path / "models.json"
    options = ["--models=mamba,fp_mamba,trm", "--mixers=householder", "--shapes=2x4"]
    options += ["--width=16", "--iterations=2", "--rounds=1", "--allocator=system"]
    assert bench.main(["models", *options, f"--output={file}"]) == 0
    result = json.loads(file.read_text())
    assert [row["model"] for row in result["models"]] == ["mamba", "fp_mamba", "trm"]
    for row in result["models"]:
        assert row["train_tokens_per_s"] == pytest.approx(8e3 / row["train_ms"])
        assert row["train_peak_mb"] > 0
        assert ("decode_ms" in row) == (row["model"] != "trm")  # TRM reads its whole input.
    (cost,) = result["iteration_cost"]
    assert cost["forward_ratio"] == pytest.approx(cost["iteration_ms"] / cost["mamba_ms"])
    assert cost["train_ratio"] > 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("name", bench_models.MODELS)
def test_every_model_of_the_benchmark_can_be_built(name):
    assert fpr.build(bench_models.model_config(name, 8, 256, 4)).config.num_layers == 1


def test_all_models_of_the_zoo_are_in_the_benchmark():
    assert {options["name"] for options in bench_models.MODELS.values()} == set(MODELS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["models", "--models=mambo"], "unknown model 'mambo'; did you mean 'mamba'"),
        (["models", "--mixers=house"], "unknown mixer 'house'"),
        (["models", "--models=transformer", "--shapes=1x4", "--width=9"], "does not divide"),
    ],
)
def test_mistakes_give_one_line(options, message, capsys):
    assert bench.main([*options, "--allocator=system"]) == 2
    assert message in capsys.readouterr().err


def test_shapes_that_cannot_work(capsys):
    for text in ("8", "8x", "8x0", "8xlong"):
        with pytest.raises(SystemExit):
            bench.main(["models", f"--shapes={text}"])
        assert "batch x length" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["models", "--width=0"], ["models", "--iterations=0"], ["models", "--rounds=two"],
        ["reasoner", "--rounds=0"], ["reasoner", "--side=-8"], ["reasoner", "--iterations=0"],
        ["scan", "--rounds=0"], ["scan", "--linear", "2", "0", "16"],
    ],
)  # fmt: skip
def test_sizes_that_cannot_work(options, capsys):
    with pytest.raises(SystemExit):
        bench.main(options)
    assert "allowed: a whole number >= 1" in capsys.readouterr().err


def test_unknown_command(capsys):
    with pytest.raises(SystemExit):
        bench.main(["scam"])
    assert "scan" in capsys.readouterr().err


def test_keeping_freed_memory():
    """In a process of its own: the setting lasts until the end."""
    code = "from experiments.memory import keep_freed_memory as k; print(k())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    glibc = platform.libc_ver()[0] == "glibc"
    assert done.stdout.split() == [str(glibc)]
