"""The benchmark runs at a tiny size, checks its competitors and writes its figures."""

import json
import platform
import subprocess
import sys

import pytest

from experiments import bench


def test_scan_writes_figures(tmp_path, capsys):
    file = tmp_path / "scan.json"
    sizes = ["--linear", "2", "64", "16", "--selective", "2", "16", "16", "4", "--rounds", "1"]
    # The allocator of the test process stays as it is.
    arguments = ["scan", *sizes, "--allocator", "system", "--json", str(file)]
    assert bench.main(arguments) == 0
    races = json.loads(file.read_text())["races"]
    assert {r["scan"] for r in races} == {"linear", "selective"}
    for race in races:
        assert all(row["median_ms"] > 0 for row in race["rows"].values())
        assert all(ratio > 0 for ratio in race["ratios"].values())
    assert "fpr.linear_scan" in capsys.readouterr().out


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
