"""A quick pass says first that its figures mean nothing, and compares them with no goal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from orchestrator.lab.bench import benchmark
from orchestrator.lab.bench.benchmark import QUICK_NOTE, Benchmark
from orchestrator.lab.bench.options import BenchOptions


class Toy(Benchmark):
    """A benchmark that measures nothing."""

    options = BenchOptions
    listed = staticmethod(lambda options: [])

    def prepare(self, options, note):
        note("making the model")
        described = {"options": {"quick": options.quick}, "skipped": []}
        return SimpleNamespace(
            options=options, run=lambda cases, watch: None, describe=lambda measured: described
        )

    def figures(self, loop, measured):
        return {"cases": []}

    def goals(self, loop, rows):
        return [{"name": "speed", "met": False}]

    def intro(self, report):
        return ["what was measured"]

    def tables(self, report):
        return []


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_pass_has_no_goals(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "heading", lambda report: ["the machine"])
    notes: list[str] = []
    report = Toy().run(BenchOptions(quick=quick), notes.append)
    assert bool(report["goals"]) != quick
    assert notes == ([QUICK_NOTE] if quick else []) + ["making the model"]
    text = Toy().text(report)
    assert text.startswith(QUICK_NOTE if quick else "the machine")
