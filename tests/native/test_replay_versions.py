"""Replays of dynaexq: versions change where they changed in the recorded run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from orchestrator.cache import profile
from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError, TraceError
from orchestrator.events import Phase
from orchestrator.lab.replay import render
from orchestrator.lab.replay.record import Recorder, record_text
from orchestrator.lab.replay.simulate import Compute
from orchestrator.native import CStats

from .conftest import build, drawn, until
from .replayed import SPEEDS, recorded, replayed, replayed_exactly, reported

PROMPTS, ANSWER = (drawn(23, 11), drawn(9, 12)), drawn(80, 13)


def dynaexq(model: Path, **options: object) -> Config:
    return build(model, **({"policy": "dynaexq", "expert_ram": 2 << 20, "ubatch": 8} | options))


def evaluate(engine: Engine) -> None:
    """Two conversations: prompts in parts, and forced answers. Then one token again and again: a
    slow disk outlasts an answer, and so does a hot set's time on a fast machine."""
    for prompt in PROMPTS:
        engine.eval(prompt, 0)
        for i, token in enumerate(ANSWER):
            engine.eval([token], len(prompt) + i)
    at, took_s = engine.n_cached, 0.0
    wanted_s = 3e-3 * (engine.policy.settings.update_ms or 0)
    caching = "caching" in engine.mode

    def further() -> None:
        nonlocal took_s
        start = monotonic()
        engine.eval([ANSWER[0]], at)
        took_s += monotonic() - start

    until(
        lambda: took_s >= wanted_s and (caching or engine.store.stats().experts_promoted), further
    )


def same(ours: CStats, theirs: CStats) -> None:
    for name in ("requests", "hits", "demand_bytes", "prefetch_bytes", "wait_us"):
        assert list(getattr(ours, name)) == list(getattr(theirs, name)), name
    for name in ("routed", "computed"):
        for phase in Phase:
            assert list(getattr(ours, name)[phase]) == list(getattr(theirs, name)[phase]), name
    for name in ("experts_promoted", "experts_demoted", "promotions", "evictions", "waves"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transition_rate": 0, "update_steps": 8, "hysteresis": 0.0},
        {"transition_rate": 16 << 20, "update_steps": 8, "hysteresis": 0.0, "rank_slack": 1},
        {"hot_experts": 2, "hotness_decay": 0.5},
        {"update_ms": 20, "hysteresis": 0.0},
        {"expert_ram": 700 << 10, "ubatch": 1},  # low copies do not fit: they are cached
        {"expert_ram": 900 << 10, "ubatch": 1, "update_ms": 5},
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_it_agrees_exactly(
    both: Path, tmp_path: Path, options: dict[str, object], warm: bool
) -> None:
    """In hits, tiers, promotions and demotions, whatever the simulated disk does; from a cold
    start, and from the profile of an earlier run."""
    if warm:
        path = tmp_path / "hot.json"
        with Engine.open(dynaexq(both)) as engine:
            # what is learned are shares of tokens, and these are soon forgotten
            size = engine.model.n_layers, engine.model.n_expert
            profile.save(path, engine.model, np.random.default_rng(11).random(size) * 0.1)
        options = options | {"profile": path}
    run = recorded(dynaexq(both, **options), tmp_path, evaluate)
    trace, stats = run.trace, run.stats
    caching = "expert_ram" in options
    assert (stats.experts_promoted > 0) != caching
    assert trace.arrays["start_hotness"].any() == warm
    ticks, prompts = trace.arrays["step_tick"], trace.arrays["step_phase"] == Phase.PREFILL
    assert ticks.any() if "update_ms" in options else ticks[prompts].all()
    assert (trace.arrays["step_us"] > 0).all()
    for speed in SPEEDS[::2]:
        found, policy = replayed(trace, speed, Compute(None, None, trace.header.dense_share))
        if caching:  # it waits, and for how long the disk says
            found.stats.wait_us = stats.wait_us
            found.stats.waves = stats.waves
        same(found.stats, stats)
        np.testing.assert_array_equal(policy.hotness, run.policy.hotness)


def test_a_batch_agrees_exactly(both: Path, tmp_path: Path) -> None:
    """Several sequences that decode together: a step has an event of several tokens."""

    def together(engine: Engine) -> None:
        engine.eval(PROMPTS[0], 0)
        for sequence in range(3):
            engine.fork(sequence)
        for token in ANSWER[:20]:
            engine.decode_batch([token, token + 1, token + 2], [0, 1, 2])

    run = recorded(dynaexq(both, sequences=3, update_steps=4, hysteresis=0.0), tmp_path, together)
    assert run.trace.arrays["step_tokens"].tolist() == [8, 8, 7] + 20 * [3]
    assert run.trace.arrays["step_phase"].tolist() == 3 * [Phase.PREFILL] + 20 * [Phase.DECODE]
    same(replayed(run.trace, SPEEDS[0], Compute(None, None))[0].stats, run.stats)


def test_the_report_says_how_well_it_agrees(both: Path, tmp_path: Path) -> None:
    run = recorded(dynaexq(both, update_steps=8), tmp_path, evaluate)
    trace, result = run.trace, reported(run.trace)
    rows = replayed_exactly(trace)
    assert rows["promoted"]["recorded"] == run.stats.experts_promoted
    assert abs(rows["TPOT mean"]["error"]) < 0.01  # nothing waits, and computing is as recorded
    assert "recorded" in render(result) and "where the run did" in render(result)
    header = trace.header
    rate = {"transition_rate": header.settings["transition_rate"]}
    unchanged = {"policy": "dynaexq", "high_tier": "q4_k", "low_tier": "q2_k", "settings": rate}
    unchanged |= {"expert_ram": header.expert_bytes, "bandwidth": header.read_bytes_per_s}
    assert reported(trace, clock="recorded", **unchanged) == result

    result = reported(trace, clock="simulated")
    assert result["clock"] == "simulated"
    rows = {row["name"]: row for row in result["agreement"]}
    assert rows["hits"]["error"] == rows["of requests"]["error"] == 0
    assert result["runs"]["dynaexq"]["experts_promoted"] > 0
    _, policy = replayed(trace, SPEEDS[1], Compute(None, None), as_recorded=False)
    np.testing.assert_array_equal(policy.hotness, run.policy.hotness)
    for options in ({"settings": {"transition_rate": 1}}, {"bandwidth": 10**6}):
        changed = reported(trace, **options)
        assert changed["clock"] == "simulated" and changed["agreement"] is not None
    assert reported(trace, policy="lru")["agreement"] is None


def test_measuring_the_dense_share_teaches_nothing(both: Path, tmp_path: Path) -> None:
    """The skipped steps behind a recording are in neither the trace nor the profile."""
    path = tmp_path / "hot.json"
    with Engine.open(dynaexq(both, update_steps=1, profile=path)) as engine:
        trace = record_text(engine, "one two three four " * 20, 60, prefill=20)
        model = engine.model
    assert trace.arrays["step_tokens"].tolist() == [8, 8, 4] + 40 * [1]
    assert all(0 < share <= 1 for share in trace.header.dense_share)
    _, policy = replayed(trace, SPEEDS[0], Compute(None, None))
    np.testing.assert_allclose(profile.load(path, model), policy.hotness, rtol=1e-5)


def test_a_run_that_went_otherwise_is_refused(both: Path, tmp_path: Path) -> None:
    trace = recorded(dynaexq(both, update_steps=8), tmp_path, evaluate).trace
    step, layer, *_ = trace.arrays["published"][0].tolist()
    asked = {(each[1], each[2]) for each in trace.arrays["published"].tolist() if each[0] <= step}
    published, start = trace.arrays["published"].copy(), trace.arrays["start_tier"].copy()
    published[0, 2] = next(e for e in range(trace.n_expert) if (layer, e) not in asked)
    start[0, [0, -1]] = start[0, [-1, 0]]
    for change, said in (
        ({"published": published}, rf"asks for other versions .* \(step {step}\)"),
        ({"step_tick": 1 - trace.arrays["step_tick"]}, "renews its hot sets after other steps"),
        ({"start_tier": start}, "starts with other experts in memory"),
    ):
        wrong = replace(trace, arrays=trace.arrays | change)
        with pytest.raises(TraceError, match=said):
            reported(wrong)
        reported(wrong, clock="simulated")


def test_a_policy_that_has_decided_is_not_recorded(both: Path) -> None:
    with Engine.open(dynaexq(both)) as engine:
        Recorder(engine)
        engine.eval(PROMPTS[0], 0)
        with pytest.raises(ConfigError, match="record with a new engine"):
            Recorder(engine)
