"""A replay against the run that it was recorded from, with the same slots."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.config import Config, Sampling
from orchestrator.engine.engine import Engine
from orchestrator.events import ABSENT, DecisionBuffer, Phase, RouteEvent, StoreView, distinct
from orchestrator.lab.replay import ReplayOptions, Trace, read_trace, replay, write_trace
from orchestrator.lab.replay.record import Disk, Recorder, record_answer, record_text
from orchestrator.lab.replay.report import set_up_for
from orchestrator.lab.replay.simulate import Compute, Outcome, Transport, simulate
from orchestrator.lab.replay.trace import PROMPT_ENDS, STARTS
from orchestrator.native import CStats
from orchestrator.native.llama import Bindings
from orchestrator.policy import Policy, policy_class
from orchestrator.policy.dymoe import DyMoE
from orchestrator.policy.firm import FIRM

from .decoder import Decoder, Token
from .decoder import prompt as prompt_of

pytestmark = pytest.mark.usefixtures("library_folder")

RNG = np.random.default_rng(3)
PROMPT = [int(t) for t in RNG.integers(0, 250, 12)]
ANSWER = [int(t) for t in RNG.integers(0, 250, 60)]

# Slow, fast, and instant: without prefetch they change nothing but the time.
SPEEDS = (Transport(50 * 10**6, 300, 2), Transport(4 * 10**9, 20, 8), Transport(0, 0, 1))


def evaluate(engine: Engine, prompt: bool) -> np.ndarray:
    """Logits of a prompt, or none, and a forced answer."""
    rows = [engine.eval(PROMPT, 0)] if prompt else []
    start = len(PROMPT) if prompt else 0
    rows += [engine.eval([token], start + i) for i, token in enumerate(ANSWER)]
    return np.concatenate(rows)


def recorded(config: Config, prompt: bool) -> tuple[Trace, CStats, np.ndarray]:
    """The trace, the real store's counters, and the logits."""
    with Engine.open(config) as engine:
        with Recorder(engine) as recorder:
            logits = evaluate(engine, prompt)
        return recorder.trace(Disk(10**9, 50)), engine.store.stats(), logits


def replayed(trace: Trace, speed: Transport) -> Outcome:
    """With the recorded policy, settings and slots."""
    setup = set_up_for(trace, ReplayOptions(), policy_class(trace.header.policy), speed)
    return simulate(Bindings.load().library(), trace, setup, speed, Compute(20.0, 20.0), True)


def counters(stats: CStats) -> dict[str, object]:
    """All that a policy and a cache decide, and none of what time does."""
    names = ("requests", "hits", "demand_bytes", "prefetch_bytes", "routed", "computed")
    found: dict[str, object] = {
        name: np.ctypeslib.as_array(getattr(stats, name)).tolist() for name in names
    }
    for name in ("promotions", "evictions", "slot_bytes_in_use", "slot_bytes_peak"):
        found[name] = getattr(stats, name)
    return found


TWO = {"high_tier": "q4_k", "low_tier": "q2_k", "n_ahead": 0}
CASES = [
    ("qwen3moe", 0.6, {"policy": "lru"}),
    ("qwen3moe", 0.9, {"policy": "lru"}),
    ("deepseek2-fused", 0.7, {"policy": "lru"}),
    ("qwen3moe", 0.8, {"policy": "dymoe", "retention": 1.0, "n_ahead": 0}),
    ("olmoe", 0.8, {"policy": "dymoe", "retention": 0.75, **TWO}),
    ("qwen3moe", 0.7, {"policy": "dymoe", "retention": 0.6, **TWO, "importance": "load"}),
    ("qwen3moe", 0.7, {"policy": "dymoe", "retention": 0.7, **TWO, "low_tier": "skip"}),
    ("qwen3moe", 0.8, {"policy": "dymoe", "retention": 0.5, **TWO, "exact_tiers": True}),
]


@pytest.mark.parametrize(("shape", "share", "options"), CASES)
def test_on_demand_it_agrees_exactly(
    shape: str,
    share: float,
    options: dict[str, object],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """In hits, bytes, tiers, promotions and evictions, whatever the simulated disk does; the
    recorder changes no logit and no counter.

    Where the experts of a layer do not fit into its slots at once, as where dymoe passes a long
    prompt through a few of them, what goes first depends on what arrives first, in a real run
    as well: dymoe reads its prompt in parts of two tokens."""
    n_ubatch = 4 if options["policy"] == "lru" else 2
    model = tiny_model(shape, "q4_k", "q2_k")
    with Engine.open(Config.build(model=model, policy="lru", ctx=256, threads=1)) as engine:
        budget = int(share * engine.plan.slots.total_bytes)
    shared = {"ctx": 256, "threads": 1, "ubatch": n_ubatch, "expert_ram": budget}
    config = Config.build(model=model, **shared, **options)
    trace, stats, logits = recorded(config, prompt=True)
    assert stats.hits[Phase.DECODE] < stats.requests[Phase.DECODE]

    with Engine.open(config) as engine:
        np.testing.assert_array_equal(evaluate(engine, prompt=True), logits)
        assert counters(engine.store.stats()) == counters(stats)

    write_trace(tmp_path / "t.npz", trace)
    trace = read_trace(tmp_path / "t.npz")
    for speed in SPEEDS:
        assert counters(replayed(trace, speed).stats) == counters(stats)


def test_with_prefetch_it_agrees_where_every_read_arrives_in_time(
    tiny_model: Callable[..., Path],
) -> None:
    """A real run that waits for its reads before it goes on has the hits of a replay whose
    reads take no time. Slots for all, so that every prefetch is read to its end."""
    model = tiny_model("qwen3moe", "q4_k")
    config = Config.build(
        model=model,
        policy="dymoe",
        force_managed=True,
        expert_ram=64 << 20,
        prefetch="on",
        ctx=256,
        threads=1,
    )
    wanted: set[tuple[int, int]] = set()
    with Engine.open(config) as engine:
        store, decide = engine.store, engine.policy.decide

        def after_all_reads(event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
            deadline = time.monotonic() + 600
            while wanted:
                assert time.monotonic() < deadline, f"never read: {wanted}"
                there = store.resident()
                wanted.difference_update({each for each in wanted if there[each] != ABSENT})
            decide(event, view, out)
            for expert in set(event.ids_array.ravel().tolist()):
                wanted.add((event.layer, expert))
            for key in out._prefetch[: out.n_prefetch]:
                wanted.add((key & 0xFFFF, key >> 16 & 0xFFFF))

        engine.policy.decide = after_all_reads  # type: ignore[method-assign]
        with Recorder(engine) as recorder:
            evaluate(engine, prompt=False)
        stats, trace = store.stats(), recorder.trace(Disk(10**9, 50))
    found = replayed(trace, Transport(0, 0, 1)).stats
    assert stats.prefetch_used > 10
    assert found.prefetch_used == stats.prefetch_used
    assert counters(found) == counters(stats)


def test_with_prefetch_it_asks_the_same(tiny_model: Callable[..., Path]) -> None:
    """Under memory pressure and at any speed: requests and tiers are those of the run. Hits
    are not: they depend on what arrives in time."""
    model = tiny_model("qwen3moe", "q4_k", "q2_k")
    config = Config.build(
        model=model,
        policy="dymoe",
        high_tier="q4_k",
        low_tier="q2_k",
        retention=0.75,
        prefetch="on",
        expert_ram=2 << 20,
        ctx=256,
        threads=1,
    )
    trace, stats, _ = recorded(config, prompt=True)
    for speed in SPEEDS:
        found = replayed(trace, speed).stats
        assert list(found.requests) == list(stats.requests)
        assert counters(found)["routed"] == counters(stats)["routed"]
        assert found.prefetch_used > 0


Decision = tuple[int, int, list[int], list[int], list[int]]


def noting_decisions(policy: Policy) -> list[Decision]:
    """Gets what the policy decides from here on: layer and tokens, tiers and passing of the routed
    experts, and what it asks for ahead."""
    decide, found = policy.decide, list[Decision]()

    def decide_and_note(event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        decide(event, view, out)
        routed = distinct(event.ids_array)
        tiers, passing = out.tier_array[routed].tolist(), out.passing_array[routed].tolist()
        ahead = list(out._prefetch[: out.n_prefetch])
        found.append((event.layer, event.n_tokens, tiers, passing, ahead))

    policy.decide = decide_and_note  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen3moe", {"prefetch": "on"}),
        ("qwen3moe", {"agree": "mol", "prefetch_kinds": 1, "tune": "climb", "prefetch": "on"}),
        ("olmoe", {"agree": "margin", "prefetch_kinds": 2}),
        ("deepseek2-fused", {"agree": "mol", "prefetch_kinds": 1, "waste_weight": 1.0}),
        ("qwen3moe", {"agree": "mol", "votes": "2,2/1,1/2,1", "prefetch": "on"}),
    ],
)
def test_firm_decides_as_it_did(
    shape: str,
    options: dict[str, object],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """What firm tunes depends on what the disk had read by then, and whether it looks ahead on what
    steps took. Both are in the trace: whatever the simulated disk does, every decision is that of
    the run, and so are the pairs that were tuned and their losses."""
    config = Config.build(
        model=tiny_model(shape, "q4_k"),
        policy="firm",
        expert_ram=1 << 20,
        ctx=256,
        ubatch=4,
        threads=1,
        **({} if "votes" in options else {"tune_steps": 4, "tune_tokens": 40}),
        **options,
    )
    with Engine.open(config) as engine:
        assert isinstance(engine.policy, FIRM)
        live = noting_decisions(engine.policy)
        with Recorder(engine) as recorder:
            evaluate(engine, prompt=True)
        stats, trace = engine.store.stats(), recorder.trace(Disk(10**9, 50))
        report, tuned = engine.policy.report(), engine.policy.tuned
    assert stats.hits[Phase.DECODE] < stats.requests[Phase.DECODE]
    assert report["tuned"] and (tuned is None) == ("votes" in options)
    assert any(ahead for *_, ahead in live)

    write_trace(tmp_path / "t.npz", trace)
    trace = read_trace(tmp_path / "t.npz")
    library = Bindings.load().library()
    for speed in SPEEDS:
        setup = set_up_for(trace, ReplayOptions(), FIRM, speed)
        assert isinstance(setup.policy, FIRM)
        again = noting_decisions(setup.policy)
        simulate(library, trace, setup, speed, Compute(20.0, 20.0), recorded_us=True)
        assert again == live
        assert (setup.policy.report(), setup.policy.tuned) == (report, tuned)


def test_a_prompt_has_its_importance(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("qwen3moe", "q4_k", "q2_k")
    options = {"high_tier": "q4_k", "low_tier": "q2_k", "retention": 0.75}
    config = Config.build(
        model=model, policy="dymoe", expert_ram=2 << 20, ctx=256, threads=1, **options
    )
    trace, _, _ = recorded(config, prompt=True)
    prefill, *decode = trace.steps()
    assert [event.importance is not None for event in prefill.events].count(True) >= 1
    scores = prefill.events[0].importance
    assert scores is not None and scores.shape == (len(PROMPT),) and scores.max() > scores.min()
    assert all(event.importance is None for step in decode for event in step.events)


@pytest.mark.parametrize("low", ["q2_k", "skip"])
def test_prompts_and_an_answer_in_one_step(
    low: str, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay decides each token by its own sequence, and knows which of them are an answer's."""
    options = {**TWO, "low_tier": low, "retention": 0.5, "exact_tiers": True}
    config = Config.build(
        model=tiny_model("qwen3moe", "q4_k", "q2_k"), policy="dymoe",
        expert_ram=64 << 20, ctx=256, threads=1, **options,
    )  # fmt: skip
    with Engine.open(config) as engine:
        decoder = Decoder(engine._loaded.model, n_ubatch=64)
        with Recorder(engine) as recorder:
            assert decoder.decode(prompt_of(PROMPT, sequence=2)) == 0
            answer = [Token(ANSWER[0], len(PROMPT), 2, wanted=True)]
            mixed = [*prompt_of(ANSWER[:20]), *answer, *prompt_of(ANSWER[20:], sequence=1)]
            assert decoder.decode(mixed) == 0
        trace, stats = recorder.trace(Disk(10**9, 50)), engine.store.stats()
        decoder.close()
    first, mixed_step = trace.steps()
    assert {int(each) for event in first.events for each in event.phases} == {Phase.PREFILL}
    event = mixed_step.events[0]
    assert event.sequences[event.phases == Phase.DECODE].tolist() == [2]
    seen: list[list[int]] = []
    decide = DyMoE.decide

    def watched(self: DyMoE, event: RouteEvent, *more: Any) -> None:
        seen.append(event.phases_array.tolist())
        decide(self, event, *more)

    monkeypatch.setattr(DyMoE, "decide", watched)
    found = counters(replayed(trace, SPEEDS[0]).stats)
    assert found["routed"] == counters(stats)["routed"]
    assert found["computed"] == counters(stats)["computed"]
    assert seen == [each.phases.tolist() for step in trace.steps() for each in step.events]


@pytest.mark.parametrize("policy", ["lru", "dymoe"])
def test_texts_and_answers(policy: str, tiny_model: Callable[..., Path]) -> None:
    """What a step, its phase, its events and its times are; nothing lasts in the engine."""
    model = tiny_model("qwen3moe", "q4_k")
    config = Config.build(
        model=model, policy=policy, expert_ram=2 << 20, ctx=64, ubatch=8, threads=1
    )
    with Engine.open(config) as engine:
        text = record_text(engine, "one two three four " * 20, 40, prefill=20)
        assert text.arrays["step_phase"].tolist() == 3 * [Phase.PREFILL] + 20 * [Phase.DECODE]
        assert text.arrays["step_tokens"].tolist() == [8, 8, 4] + 20 * [1]
        assert (text.step_ms > 0).all()
        assert (text.wait_ms <= text.step_ms).all()
        assert text.wait_ms.sum() > 0
        assert (text.compute_ms + text.wait_ms).sum() == pytest.approx(text.step_ms.sum())
        assert text.header.settings.get("n_ahead", 0) == (policy == "dymoe")
        parts = [[part, PROMPT_ENDS, 0] for part in range(3)]  # logits of each are asked for
        assert text.arrays["marks"].tolist() == [[0, STARTS, 0], *parts]
        assert text.header.read_bytes_per_s > 0
        assert all(0 < share <= 1 for share in text.header.dense_share)
        answer = record_answer(engine, "Hello", Sampling(temp=0), 6)
        phases = answer.arrays["step_phase"].tolist()
        assert phases.count(Phase.DECODE) == 5 and phases[0] == Phase.PREFILL
        calls = engine.store.calls
        engine.eval([5], 0)
        assert (engine.store.calls > calls) == (policy == "dymoe")
        result = replay(Bindings.load().library(), text, ReplayOptions())
        assert result["runs"][policy]["decode"]["requests"] > 0
