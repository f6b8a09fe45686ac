"""`moe-edge bench topics`: what its figures follow from, and a small run."""

import pytest
from made_runs import part, run

from orchestrator.lab.bench.cases import REFERENCE, Case, mapped
from orchestrator.lab.bench.topics import (
    ALL_LOW,
    MOVING,
    PLACED,
    TopicOptions,
    Topics,
    add_speeds,
    topic_row,
)

CASE = Case("dynaexq", "engine", 0.8)


def half(name, ms, high):
    mix = {"high": high, "low": 10 - high, "skip": 0}
    return part(name, ms, routed=mix, transition_bytes=5, demand_bytes=1, wait_ms=0.5)


def measured(**more):
    """Two conversations, of which the halves are high by 4 and 8, then by 6 and 10 of 10."""
    prompt = part("prompt", [9.0], 32, hits=10)
    halves = [(2.0, 4, 8), (2.0, 6, 10)]
    parts = [
        each
        for ms, early, late in halves
        for each in (prompt, half(MOVING, [ms, 10.0], early), half(PLACED, [ms, ms], late))
    ]
    return run(*parts, **more)


def test_figures_follow_from_what_was_measured():
    row = topic_row(CASE, [measured()], 1 << 30)
    assert row["tpot_ms_p50"] == 2.0
    assert row["p99_of_p50"] == row["tpot_ms_p99"] / 2.0 > 4
    assert row["placed_ms_p50_runs"] == [2.0]
    assert row["placed_high_runs"] == [pytest.approx(0.9)]
    assert row["mix"]["high"] == pytest.approx(0.7)
    assert (row["waited_ms"], row["demand_bytes"], row["transition_bytes"]) == (2.0, 4, 20)
    assert "moved" not in row
    said = [{"changed_bytes": 25, "most_steps": 7}, {"changed_bytes": 15, "most_steps": 9}]
    found = topic_row(CASE, [measured(policy=each) for each in said], None)
    assert (found["most_steps"], found["moved"]) == (9, 40 / 40)
    assert topic_row(CASE, [{"error": "does not fit"}], None)["error"] == "does not fit"


def test_rows_are_compared_within_a_run():
    """Resident 1 and 4 ms, mmap 30 and 60, low 0.5 and 2, dynaexq 2 in both runs and half high."""

    def row(case, times):
        parts = [[half(name, [ms] * 4, 5) for name in (MOVING, PLACED)] for ms in times]
        prompt = part("prompt", [9.0], 32, hits=10)
        return topic_row(case, [run(prompt, *each) for each in parts], None)

    low = Case(ALL_LOW, "engine", 0.8)
    rows = [
        row(REFERENCE, (1.0, 4.0)),
        row(mapped(0.8), (30.0, 60.0)),
        row(low, (0.5, 2.0)),
        row(CASE, (2.0, 2.0)),
    ]
    add_speeds(rows)
    assert rows[3]["of_resident"] == (0.5 + 2.0) / 2
    assert rows[3]["of_mmap"] == (15 + 30) / 2
    # At the same bits, half way between 1 and 0.5, and between 4 and 2.
    assert rows[3]["of_same_bits"] == pytest.approx((0.75 / 2 + 3.0 / 2) / 2)
    failed = [rows[0] | {"error": "no"}, {k: v for k, v in rows[3].items() if k[:3] != "of_"}]
    add_speeds(failed)
    assert not {"of_resident", "of_same_bits"} & failed[1].keys()


def test_quick_topics_end_to_end(real_engine):
    options = TopicOptions(quick=True, runs=1, tokens=32, switches=1, threads=1, caps=(0.99,))
    report = Topics().run(options)
    rows = {row["name"]: row for row in report.rows}
    assert not any("error" in row for row in rows.values())
    for name in (ALL_LOW, "fixed hot set", "context", "dynaexq"):
        assert rows[name]["waited_ms"] == rows[name]["demand_bytes"] == 0, name
    assert rows[ALL_LOW]["mix"]["high"] == 0.0
    assert rows["fixed hot set"]["transition_bytes"] == 0
    assert 0 < rows["context"]["moved"] <= 1.1 and rows["context"]["policy"]["placements"] == 3
    assert 0 < rows["dynaexq"]["mix"]["high"] < 1
    text = report.text()
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("note"))
    assert all(name in text for name in rows)
    assert "context: all moved after" in text
