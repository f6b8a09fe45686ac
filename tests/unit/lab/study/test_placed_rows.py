"""Rows of `context` next to `dynaexq` with the same memory, for a text with prompts."""

import pytest

from orchestrator.config import Config
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.study.dynaexq import HotMemory
from orchestrator.lab.study.subject import Subject


def test_hot_memory(model, domains, monkeypatch):
    monkeypatch.setattr("orchestrator.lab.study.uniform.USUAL", ("q3_k",))
    config = Config.build(model=model, threads=1, ctx=128, near_bits=2.0)
    options = EvalOptions(text=domains, window=24, prompt_tokens=8)
    on = Subject(config, options, lambda what, done: None)
    for table in HotMemory().measure(on).tables:
        _best, _high, low, *others = table.rows
        placed = [row for row in others if row["configuration"].startswith("--policy context")]
        assert [row["high"] for row in placed] == [0.25, 0.5, 0.75] * 2
        by_memory = {
            row["memory"] for row in others if row["configuration"].startswith("--policy dynaexq")
        }
        assert {row["memory"] for row in placed} == by_memory
        for row in placed:
            assert 0 < row["routed_high"] < 1 and row["kl"][0] < low["kl"][0]
            assert row["ratio"] == pytest.approx(row["won_back"][0] / row["high"])
        assert any(row["promoted"] > 0 for row in placed)
