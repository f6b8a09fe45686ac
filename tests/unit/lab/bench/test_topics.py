"""The benchmark of changing topics: its parts and texts, and what its figures follow from."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.child import play, topic_streams
from orchestrator.lab.bench.job import DECODE, Job, longest_context
from orchestrator.lab.bench.models import DEMO_TEXT
from orchestrator.lab.bench.topics import (
    ALL_LOW,
    CONTEXT,
    FIXED,
    RESTLESS,
    WINDOW,
    TopicOptions,
    Topics,
    placement_goals,
    topic_cases,
    topic_goals,
    topic_row,
    topic_rows,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"switches": 0}, "switches"),
        ({"steady": 0}, "steady"),
        ({"tokens": WINDOW}, "two windows"),
        ({"updates": ()}, "updates"),
        ({"updates": (0, 8)}, "updates"),
        ({"updates": (8, 8)}, "updates"),
        ({"rates": (8, 8)}, "rates"),
        ({"rates": (-1,)}, "rates"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        TopicOptions(**options)


def test_topics_take_turns_and_the_last_one_stays():
    options = TopicOptions(tokens=64, switches=2, steady=40)
    parts = options.parts()
    decoding = [(part.name, part.topic) for part in parts[2:] if part.kind == DECODE]
    assert decoding == [
        *[("topic 0", 0)] * 4,
        *[("topic 1", 1)] * 4,
        *[("topic 2", 0)] * 4,
        ("steady", 0),
    ]
    assert longest_context(parts) == 256
    names = [case.name for case in topic_cases(options) if case.cap == 0.8]
    assert names[1:3] == [ALL_LOW, FIXED]
    assert names[-1] == RESTLESS


def test_rates_are_cases_at_the_usual_interval():
    options = TopicOptions(updates=(8, 16), rates=(64, 0))
    *_, restless, slow, unlimited = topic_cases(options)
    assert [case.name for case in (restless, slow, unlimited)] == [
        RESTLESS,
        "64 MiB/s",
        "no rate limit",
    ]
    assert slow.settings["transition_rate"] == 64 << 20
    assert unlimited.settings["transition_rate"] == 0
    assert {case.settings["update_steps"] for case in (restless, slow, unlimited)} == {8}
    assert TopicOptions().usual == 32


def job(text: Path | None) -> Job:
    return Job("engine", "m", None, {}, 256, 32, 1, [], 7, None if text is None else str(text))


def test_random_topics_are_halves_of_the_vocabulary():
    low, high = topic_streams(job(None), 101, lambda text: [])
    first, second = set(low(5000)), set(high(5000))
    assert not first & second
    assert max(first) < 50 <= min(second)
    assert max(second) < 98  # the last tokens are special
    assert len(first) > 35
    assert len(second) > 35


def test_text_topics_are_conversations_of_two_kinds():
    stories, others = (
        "".join(map(chr, draw(20000)))
        for draw in topic_streams(job(DEMO_TEXT), 256, lambda text: list(map(ord, text)))
    )
    assert "story" in stories.split("assistant")[0].lower()
    shared = set(stories.splitlines()) & set(others.splitlines())
    long = [line for line in shared if len(line) > 60]
    assert len(long) < 20  # a later turn may ask for a story too


def test_parts_draw_from_their_topic():
    parts = TopicOptions(tokens=32, switches=1, steady=8, warmup=2).parts()
    seen = []

    def draws(name):
        return lambda n: seen.append((name, n)) or [0] * n

    done = play(
        parts,
        lambda tokens, pos: None,
        draws("any"),
        lambda result: nullcontext(),
        [draws("one"), draws("other")],
    )
    assert len(done) == len(parts)
    assert [name for name, _ in seen] == [
        ("one", "other", "any")[part.topic] if part.topic >= 0 else "any" for part in parts
    ]


def window(name, high, ms=2.0, promoted=3):
    store = {
        "requests": 10,
        "hits": 10,
        "bytes": 5,
        "needed_bytes": 0,
        "demand_bytes": 0,
        "transition_bytes": 5,
        "wait_ms": 0.0,
        "routed": {"high": high, "low": 10 - high, "skip": 0},
        "promoted": promoted,
    }
    return {"name": name, "tokens": WINDOW, "ms": [ms] * WINDOW, "store": store}


def measured_run():
    """Topic 1 finds 4 of 10 high, and all in its third window; topic 2 at once."""
    shares = {"topic 0": [8, 8, 8, 8], "topic 1": [4, 6, 10, 10], "topic 2": [10, 10, 10, 10]}
    parts = [window(name, high) for name, highs in shares.items() for high in highs]
    parts[0]["ms"][:4] = [4.0] * 4  # 2 % of the steps
    return {"mode": "managed: dynaexq", "parts": [*parts, window("steady", 8, promoted=1)]}


def dynaexq_case():
    options = TopicOptions(tokens=64, switches=2, steady=16)
    return next(case for case in topic_cases(options) if case.name == "every 32 steps")


def test_figures_follow_from_what_was_measured():
    case = dynaexq_case()
    row = topic_row(2, case, [measured_run()], 1 << 30)
    assert row["tpot_ms_p50"] == 2.0
    assert row["placed_ms_p50_runs"] == [2.0]
    assert row["placed_high_runs"] == [pytest.approx((0.8 + 1.0 + 1.0) / 3)]
    assert row["adapted"] == (2 * WINDOW + 0) / 2
    assert row["steady_high"] == pytest.approx((0.8 + 1.0 + 1.0) / 3)
    assert row["high"] == pytest.approx((0.8 + 0.75 + 1.0) / 3)
    minutes = (12 * WINDOW * 2.0 + 4 * 2.0) / 60e3
    assert row["promotions_per_minute"] == pytest.approx(12 * 3 / minutes)
    assert row["steady_promotions_per_minute"] == pytest.approx(60e3 / (WINDOW * 2.0))
    assert (row["waited_ms"], row["demand_bytes"], row["transition_bytes"]) == (0.0, 0, 65)
    assert row["p99_of_p50"] >= 1.0
    assert "moved" not in row
    said = [{"changed_bytes": 100, "most_steps": 7}, {"changed_bytes": 60, "most_steps": 9}]
    found = topic_row(2, case, [{**measured_run(), "policy": each} for each in said], None)
    assert (found["most_steps"], found["moved"]) == (9, 130 / 160)
    failed = topic_row(2, case, [{"error": "does not fit"}], None)
    assert failed["error"] == "does not fit"


def test_placed_steps_are_those_of_the_second_halves():
    windows = ((2, 9.0), (2, 9.0), (4, 3.0), (8, 5.0))
    parts = [window(name, *each) for name in ("topic 0", "topic 1") for each in windows]
    run = {"parts": [*parts, window("steady", 8)]}
    row = topic_row(1, dynaexq_case(), [run], None)
    assert row["placed_ms_p50_runs"] == [4.0]
    assert row["placed_high_runs"] == [pytest.approx(0.6)]


def test_rows_are_compared_within_a_run():
    """Resident: 1 and 4 ms; dynaexq 2 ms in both runs; mmap 30 and 60 ms. The goals follow."""

    def run(ms, **more):
        parts = [window(f"topic {at}", 5, ms) for at in range(3) for _ in range(4)]
        return {"parts": [*parts, window("steady", 5, ms, **more)]}

    options = TopicOptions(tokens=64, switches=2, steady=16, updates=(32,))
    listed = topic_cases(options)
    times = {"our managed path": (1.0, 4.0), "upstream mmap": (30.0, 60.0)}
    results = {
        case.key: [run(ms, promoted=0 if case.name != RESTLESS else 4) for ms in pair]
        for case in listed
        for pair in [times.get(case.name, (2.0, 2.0))]
    }
    rows = topic_rows(2, listed, results, lambda case: None)
    row = next(row for row in rows if row["name"] == "every 32 steps")
    assert row["of_speed"] == (0.5 + 2.0) / 2
    assert row["of_mmap"] == (15 + 30) / 2
    assert row["of_spread"] == 1.0
    assert "of_speed" not in next(row for row in rows if row["role"] == "reference")
    found = {
        goal["name"]: (goal["value"], goal["met"])
        for goal in topic_goals(rows, row["name"], RESTLESS)
    }
    assert found == {
        "speed, of upstream mmap": (22.5, True),
        "speed, of everything resident": (1.25, True),
        "p99 / p50": (1.0, True),
        "waited, ms": (0.0, True),
        "promotions on a steady text, of those without": (0.0, True),
    }
    slow = {**row, "p99_of_p50": 1.6, "of_speed": 0.9, "of_mmap": 3.0, "waited_ms": 0.5}
    assert [goal["met"] for goal in topic_goals([slow], row["name"], RESTLESS)] == [False] * 4
    assert topic_goals([{**row, "error": "no"}], row["name"], RESTLESS) == []


def test_placement_is_judged_behind_the_last_move():
    """Half high between 4 ms (all high) and 2 ms (all low) is 3 ms; the second halves take 3.1."""

    def row(name, role, ms, cap=0.8, **more):
        given = {"name": name, "role": role, "cap": cap, "waited_ms": 0.0, "demand_bytes": 0}
        return given | {"placed_ms_p50_runs": ms, "placed_high_runs": [0.5, 0.5]} | more

    resident = row("our managed path", "reference", [4.0, 8.0], None)
    low = row(ALL_LOW, "", [2.0, 4.0])
    mine = row(CONTEXT, "", [3.1, 6.2], most_steps=12, moved=1.05)
    good = placement_goals([resident, low, mine], CONTEXT, ALL_LOW)
    assert [goal["value"] for goal in good] == [pytest.approx(3 / 3.1), 12, 0.0, 0, 1.05]
    assert all(goal["met"] for goal in good)
    slow = {"most_steps": 65, "moved": 1.11, "demand_bytes": 1}
    slow |= {"placed_ms_p50_runs": [3.2, 6.4], "waited_ms": 0.5}
    missed = placement_goals([resident, low, mine | slow], CONTEXT, ALL_LOW)
    assert [goal["met"] for goal in missed] == [False] * 5
    without = placement_goals([resident | {"error": "no"}, low, mine], CONTEXT, ALL_LOW)
    assert [goal["value"] for goal in without] == [12, 0.0, 0, 1.05]


def test_quick_topics_end_to_end(real_engine):
    options = TopicOptions(
        quick=True, runs=1, tokens=32, steady=32, switches=1, updates=(8,), threads=1, caps=(0.99,)
    )
    report = Topics().run(options)
    rows = {row["name"]: row for row in report["cases"]}
    assert not any("error" in row for row in rows.values())
    for name in (ALL_LOW, FIXED, CONTEXT, "every 8 steps", RESTLESS):
        assert rows[name]["waited_ms"] == rows[name]["demand_bytes"] == 0, rows[name]["mode"]
    assert rows[ALL_LOW]["high"] == 0.0
    assert rows[FIXED]["transition_bytes"] == 0
    assert 0 < rows[CONTEXT]["moved"] <= 1.1 and rows[CONTEXT]["policy"]["placements"] == 4
    assert 0 < rows["every 8 steps"]["high"] < 1
    text = Topics().text(report)
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("note"))
    for name in rows:
        assert name in text
    json.dumps(report)


def test_the_command_has_no_option_of_another_policy() -> None:
    result = CliRunner().invoke(cli, ["bench", "topics", "--retention", "0.5"])
    assert result.exit_code == 2 and "No such option" in result.stderr
