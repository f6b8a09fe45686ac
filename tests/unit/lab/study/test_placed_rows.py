"""Rows of context beside dynaexq: in the same memory, where the text has prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli


def tables(study: str, model: Path, text: Path, folder: Path) -> list[list[dict]]:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    options = ["-m", str(model), "--threads", "1", "--ctx", "128", "--window", "24"]
    options += ["--prompt-tokens", "8", "--uniform", "q3_k", "--near-bits", "2"]
    options += ["--text", str(text), "--study", study, "--out", str(folder)]
    result = CliRunner().invoke(cli, ["eval", *options])
    assert result.exit_code == 0, result.output
    return [each["rows"] for each in json.loads((folder / f"{study}.json").read_text())["tables"]]


def test_equal_memory(model: Path, domains: Path, tmp_path: Path) -> None:
    """Where as many are high as dynaexq has, both ways fit and read nothing."""
    _, _, *memories = tables("equal", model, domains, tmp_path)
    for rows in memories:
        found = {row["configuration"].split(",")[0]: row for row in rows}
        mix, placed = found["dynaexq"], found["context"]
        assert placed["read"] is None
        low = placed["usage"]["computed_low"]
        assert 0 < low < 1 and placed["kl"] != mix["kl"]
        assert placed["above"][0] == pytest.approx(placed["kl"][0] - mix["kl"][0], abs=1e-9)


def test_hot_memory(model: Path, domains: Path, tmp_path: Path) -> None:
    for rows in tables("memory", model, domains, tmp_path):
        placed = [row for row in rows if row["configuration"].startswith("context")]
        assert [row["high"] for row in placed] == [0.25, 0.5, 0.75] * 2
        by_memory = {row["memory"] for row in rows if row["configuration"].startswith("dynaexq")}
        assert {row["memory"] for row in placed} == by_memory
        low = next(row for row in rows if row["high"] == 0)
        for row in placed:
            assert 0 < row["routed_high"] < 1 and row["kl"][0] < low["kl"][0]
            assert row["ratio_kl"] == pytest.approx(row["won_back_kl"][0] / row["high"])
        assert any(row["promoted"] > 0 for row in placed)
