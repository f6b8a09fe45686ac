"""Rows of `context` next to `dynaexq` with the same memory, for a text with prompts."""

import json

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli


def test_hot_memory(model, domains, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    options = ["-m", str(model), "--threads", "1", "--ctx", "128", "--window", "24"]
    options += ["--prompt-tokens", "8", "--uniform", "q3_k", "--near-bits", "2"]
    options += ["--text", str(domains), "--study", "memory", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, ["eval", *options])
    assert result.exit_code == 0, result.output
    for table in json.loads((tmp_path / "memory.json").read_text())["tables"]:
        _best, _high, low, *others = table["rows"]
        placed = [row for row in others if row["configuration"].startswith("context")]
        assert [row["high"] for row in placed] == [0.25, 0.5, 0.75] * 2
        by_memory = {row["memory"] for row in others if row["configuration"].startswith("dynaexq")}
        assert {row["memory"] for row in placed} == by_memory
        for row in placed:
            assert 0 < row["routed_high"] < 1 and row["kl"][0] < low["kl"][0]
            assert row["ratio"] == pytest.approx(row["won_back"][0] / row["high"])
        assert any(row["promoted"] > 0 for row in placed)
