"""The benchmark runs at a tiny size, checks its competitors and writes its figures."""

import json

import pytest

from experiments import bench


def test_scan_writes_figures(tmp_path, capsys):
    file = tmp_path / "scan.json"
    sizes = ["--linear", "2", "64", "16", "--selective", "2", "16", "16", "4", "--rounds", "1"]
    assert bench.main(["scan", *sizes, "--json", str(file)]) == 0
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
