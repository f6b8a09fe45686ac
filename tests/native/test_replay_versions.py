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
from orchestrator.lab.replay import ReplayOptions, Trace, read_trace, render, replay, write_trace
from orchestrator.lab.replay.record import Disk, Recorder, record_text
from orchestrator.lab.replay.report import set_up_for
from orchestrator.lab.replay.simulate import Compute, Transport, simulate
from orchestrator.native import CStats
from orchestrator.native.llama import Bindings
from orchestrator.policy.dynaexq import DynaExq

from .transition_driver import HANG_S

pytestmark = pytest.mark.usefixtures("library_folder")

RNG = np.random.default_rng(11)
PROMPTS = [[int(t) for t in RNG.integers(0, 250, n)] for n in (23, 9)]
ANSWER = [int(t) for t in RNG.integers(0, 250, 80)]
SPEEDS = (Transport(50 * 10**6, 300, 2), Transport(0, 0, 1))


def build(model: Path, **options: object) -> Config:
    settings = {"policy": "dynaexq", "expert_ram": 2 << 20, "ctx": 256, "ubatch": 8} | options
    return Config.build(model=model, threads=1, **settings)


def evaluate(engine: Engine) -> None:
    """Two conversations: prompts in parts, and forced answers."""
    for prompt in PROMPTS:
        engine.eval(prompt, 0)
        for i, token in enumerate(ANSWER):
            engine.eval([token], len(prompt) + i)


def go_on(engine: Engine) -> None:
    """One token again and again: a slow disk outlasts an answer, and so does a hot set's time on a
    fast machine."""
    assert isinstance(engine.policy, DynaExq)
    end, at = monotonic() + HANG_S, len(engine._steps.cached)
    wanted_s, took_s = 3e-3 * (engine.policy.settings.update_ms or 0), 0.0
    caching = "caching" in engine.mode
    while took_s < wanted_s or not (caching or engine.store.stats().experts_promoted):
        start = monotonic()
        assert start < end, "no expert was promoted"
        engine.eval([ANSWER[0]], at)
        took_s += monotonic() - start


def recorded(config: Config) -> tuple[Trace, CStats, np.ndarray]:
    """The trace, the real store's counters, and what was learned."""
    with Engine.open(config) as engine:
        with Recorder(engine) as recorder:
            evaluate(engine)
            go_on(engine)
        assert isinstance(engine.policy, DynaExq)
        return recorder.trace(Disk(10**9, 50)), engine.store.stats(), engine.policy.hotness


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
        with Engine.open(build(both)) as engine:
            scores = RNG.random((engine.model.n_layers, engine.model.n_expert))
            scores *= 0.1  # what is learned are shares of tokens, and these are soon forgotten
            profile.save(path, engine.model, scores)
        options = options | {"profile": path}
    trace, stats, learned = recorded(build(both, **options))
    caching = "expert_ram" in options
    assert (stats.experts_promoted > 0) != caching
    assert trace.arrays["start_hotness"].any() == warm
    ticks, prompts = trace.arrays["step_tick"], trace.arrays["step_phase"] == Phase.PREFILL
    assert ticks.any() if "update_ms" in options else ticks[prompts].all()
    assert (trace.arrays["step_us"] > 0).all()
    write_trace(tmp_path / "t.npz", trace)
    trace = read_trace(tmp_path / "t.npz")
    for speed in SPEEDS:
        plan = set_up_for(trace, ReplayOptions(), DynaExq, speed)
        time = Compute(None, None, trace.header.dense_share)
        found = simulate(Bindings.load().library(), trace, plan, speed, time, True)
        if caching:  # it waits, and for how long the disk says
            found.stats.wait_us = stats.wait_us
            found.stats.waves = stats.waves
        same(found.stats, stats)
        assert isinstance(plan.policy, DynaExq)
        np.testing.assert_array_equal(plan.policy.hotness, learned)


def test_a_batch_agrees_exactly(both: Path) -> None:
    """Several sequences that decode together: a step has an event of several tokens."""
    with Engine.open(build(both, sequences=3, update_steps=4, hysteresis=0.0)) as engine:
        with Recorder(engine) as recorder:
            engine.eval(PROMPTS[0], 0)
            for sequence in range(3):
                engine.fork(sequence)
            for i in range(0, 60, 3):
                engine.decode_batch(ANSWER[i : i + 3], range(3))
        trace, stats = recorder.trace(Disk(10**9, 50)), engine.store.stats()
    assert trace.arrays["step_tokens"].tolist() == [8, 8, 7] + 20 * [3]
    assert trace.arrays["step_phase"].tolist() == 3 * [Phase.PREFILL] + 20 * [Phase.DECODE]
    plan = set_up_for(trace, ReplayOptions(), DynaExq, SPEEDS[0])
    time = Compute(None, None)
    found = simulate(Bindings.load().library(), trace, plan, SPEEDS[0], time, True)
    same(found.stats, stats)


def test_the_report_says_how_well_it_agrees(both: Path) -> None:
    trace, stats, learned = recorded(build(both, update_steps=8))
    library = Bindings.load().library()
    result = replay(library, trace, ReplayOptions())
    assert result["clock"] == "recorded"
    rows = {row["name"]: row for row in result["agreement"]}
    for name in (
        "hits",
        "of requests",
        "routed in q4_k",
        "computed in q2_k",
        "promoted",
        "demoted",
        "prompt: hits",
    ):
        assert rows[name]["error"] == 0, name
    assert rows["promoted"]["recorded"] == stats.experts_promoted
    assert abs(rows["TPOT mean"]["error"]) < 0.01  # nothing waits, and computing is as recorded
    assert "recorded" in render(result) and "where the run did" in render(result)

    header = trace.header
    unchanged = ReplayOptions(
        policy="dynaexq",
        expert_ram=header.expert_bytes,
        high_tier="q4_k",
        low_tier="q2_k",
        bandwidth=header.read_bytes_per_s,
        settings={"transition_rate": header.settings["transition_rate"]},
        clock="recorded",
    )
    assert replay(library, trace, unchanged) == result

    result = replay(library, trace, ReplayOptions(clock="simulated"))
    assert result["clock"] == "simulated"
    rows = {row["name"]: row for row in result["agreement"]}
    assert rows["hits"]["error"] == rows["of requests"]["error"] == 0
    assert result["runs"]["dynaexq"]["experts_promoted"] > 0
    speed = Transport(10**9, 50, 4)
    plan = set_up_for(trace, ReplayOptions(), DynaExq, speed)
    simulate(library, trace, plan, speed, Compute(None, None))
    assert isinstance(plan.policy, DynaExq)
    np.testing.assert_array_equal(plan.policy.hotness, learned)
    for options in ({"settings": {"transition_rate": 1}}, {"bandwidth": 10**6}):
        changed = replay(library, trace, ReplayOptions(**options))  # type: ignore[arg-type]
        assert changed["clock"] == "simulated" and changed["agreement"] is not None
    assert replay(library, trace, ReplayOptions(policy="lru"))["agreement"] is None


def test_measuring_the_dense_share_teaches_nothing(both: Path, tmp_path: Path) -> None:
    """The skipped steps behind a recording are in neither the trace nor the profile."""
    path = tmp_path / "hot.json"
    config = build(both, update_steps=1, profile=path)
    with Engine.open(config) as engine:
        trace = record_text(engine, "one two three four " * 20, 60, prefill=20)
        assert engine.policy.name == "dynaexq"
        model = engine.model
    assert trace.arrays["step_tokens"].tolist() == [8, 8, 4] + 40 * [1]
    assert all(0 < share <= 1 for share in trace.header.dense_share)
    plan = set_up_for(trace, ReplayOptions(), DynaExq, SPEEDS[0])
    time = Compute(None, None)
    simulate(Bindings.load().library(), trace, plan, SPEEDS[0], time, True)
    assert isinstance(plan.policy, DynaExq)
    learned = plan.policy.hotness
    np.testing.assert_allclose(profile.load(path, model), learned, rtol=1e-5)


def test_a_run_that_went_otherwise_is_refused(both: Path) -> None:
    trace, _, _ = recorded(build(both, update_steps=8))
    library = Bindings.load().library()
    step, layer, *_ = trace.arrays["published"][0].tolist()
    asked = {(each[1], each[2]) for each in trace.arrays["published"].tolist() if each[0] <= step}
    other = next(e for e in range(trace.n_expert) if (layer, e) not in asked)
    published = trace.arrays["published"].copy()
    published[0, 2] = other
    ticks = 1 - trace.arrays["step_tick"]
    start = trace.arrays["start_tier"].copy()
    start[0, [0, -1]] = start[0, [-1, 0]]
    for change, said in (
        ({"published": published}, f"asks for other versions than the recorded run (step {step})"),
        ({"step_tick": ticks}, "renews its hot sets after other steps"),
        ({"start_tier": start}, "starts with other experts in memory"),
    ):
        wrong = replace(trace, arrays=trace.arrays | change)
        with pytest.raises(TraceError) as caught:
            replay(library, wrong, ReplayOptions())
        assert said in str(caught.value)
        replay(library, wrong, ReplayOptions(clock="simulated"))


def test_a_policy_that_has_decided_is_not_recorded(both: Path) -> None:
    with Engine.open(build(both)) as engine:
        Recorder(engine)
        engine.eval(PROMPTS[0], 0)
        with pytest.raises(ConfigError, match="record with a new engine"):
            Recorder(engine)
