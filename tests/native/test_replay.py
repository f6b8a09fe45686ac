"""A replay compared with the run that it was recorded from, with the same slots."""

import numpy as np
import pytest
from answering import answered

from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.replay.record import Recorder, record_answer, record_text
from orchestrator.lab.replay.trace import PROMPT_ENDS, STARTS
from orchestrator.policy.dymoe import DyMoE
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn, opened
from .decoder import Decoder, Token
from .decoder import prompt as prompt_of
from .replayed import DISK, SPEEDS, recorded, replayed, reported

PROMPT, ANSWER = drawn(12, 3), drawn(60, 4)
TWO = {"policy": "dymoe", "high_tier": "q4_k", "low_tier": "q2_k", "n_ahead": 0}


def evaluate(e, prompt=PROMPT):
    """Logits of an optional prompt and a forced answer."""
    rows = [e.eval(prompt, 0)] if prompt else []
    rows += [e.eval([token], len(prompt) + i) for i, token in enumerate(ANSWER)]
    return np.concatenate(rows)


def counters(stats):
    """The counters that depend on the policy and the cache, and not on time."""
    names = ("requests", "hits", "demand_bytes", "prefetch_bytes", "routed", "computed")
    found = {name: np.ctypeslib.as_array(getattr(stats, name)).tolist() for name in names}
    for name in ("promotions", "evictions", "slot_bytes_in_use", "slot_bytes_peak"):
        found[name] = getattr(stats, name)
    return found


@pytest.mark.parametrize(
    ("shape", "share", "options"),
    [
        ("qwen3moe", 0.6, {"policy": "lru"}),
        ("qwen3moe", 0.9, {"policy": "lru"}),
        ("deepseek2-fused", 0.7, {"policy": "lru"}),
        ("qwen3moe", 0.8, {"policy": "dymoe", "retention": 1.0, "n_ahead": 0}),
        ("olmoe", 0.8, {**TWO, "retention": 0.75}),
        ("qwen3moe", 0.7, {**TWO, "retention": 0.6, "importance": "load"}),
        ("qwen3moe", 0.7, {**TWO, "retention": 0.7, "low_tier": "skip"}),
        ("qwen3moe", 0.8, {**TWO, "retention": 0.5, "exact_tiers": True}),
    ],
)
def test_a_replay_on_demand_agrees_exactly(shape, share, options, tiny_model, tmp_path):
    """A replay on demand agrees exactly in hits, bytes, tiers, promotions and evictions.

    This holds for every simulated disk. The recorder changes no logit and no counter.

    If a layer's experts do not fit its slots at once, the first eviction depends on the first read
    that arrives, in a real run too. Therefore dymoe reads its prompt in parts of two tokens here.
    """
    model = tiny_model(shape, "q4_k", "q2_k")
    with opened(model, policy="lru") as runtime, runtime.evaluator() as e:
        budget = int(share * e.plan.slots.total_bytes)
    config = build(
        model, expert_ram=budget, ubatch=4 if options["policy"] == "lru" else 2, **options
    )
    run = recorded(config, tmp_path, evaluate)
    assert run.stats.hits[Phase.DECODE] < run.stats.requests[Phase.DECODE]
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        np.testing.assert_array_equal(evaluate(e), run.said)
        assert counters(e.inside.store.stats()) == counters(run.stats)
    for speed in SPEEDS:
        assert counters(replayed(run.trace, speed)[0].stats) == counters(run.stats)


def test_with_prefetch_requests_and_tiers_agree(both, tmp_path):
    """With prefetch and few slots, requests and tiers equal those of the run.

    This holds for every simulated disk. Hits differ, because they depend on the time of arrival.
    """
    options = {"high_tier": "q4_k", "low_tier": "q2_k", "retention": 0.75, "prefetch": "on"}
    config = build(both, policy="dymoe", expert_ram=2 << 20, **options)
    run = recorded(config, tmp_path, evaluate)
    for speed in SPEEDS:
        found = replayed(run.trace, speed)[0].stats
        assert list(found.requests) == list(run.stats.requests)
        assert counters(found)["routed"] == counters(run.stats)["routed"]
        assert found.prefetch_used > 0
    # only the prompt has an importance
    prefill, *decode = run.trace.steps()
    scores = prefill.events[0].importance
    assert scores.shape == (len(PROMPT),) and scores.max() > scores.min()
    assert all(event.importance is None for step in decode for event in step.events)


@pytest.mark.parametrize("low", ["q2_k", "skip"])
def test_prompts_and_an_answer_in_one_step(low, both, tmp_path, monkeypatch):
    """A replay decides for each token by its sequence and its phase."""

    def together(e):
        decoder = Decoder(e.inside.loaded.model, n_ubatch=64)
        assert decoder.decode(prompt_of(PROMPT, sequence=2)) == 0
        answer = [Token(ANSWER[0], len(PROMPT), 2, wanted=True)]
        mixed = [*prompt_of(ANSWER[:20]), *answer, *prompt_of(ANSWER[20:], sequence=1)]
        assert decoder.decode(mixed) == 0
        decoder.close()

    options = {**TWO, "low_tier": low, "retention": 0.5, "exact_tiers": True}
    run = recorded(build(both, expert_ram=64 << 20, **options), tmp_path, together)
    first, mixed_step = run.trace.steps()
    assert {int(each) for event in first.events for each in event.phases} == {Phase.PREFILL}
    event = mixed_step.events[0]
    assert event.sequences[event.phases == Phase.DECODE].tolist() == [2]
    seen = []
    decide = DyMoE.decide

    def watched(self, event, *more):
        seen.append(event.phases_array.tolist())
        decide(self, event, *more)

    monkeypatch.setattr(DyMoE, "decide", watched)
    found = counters(replayed(run.trace, SPEEDS[0])[0].stats)
    for name in ("routed", "computed"):
        assert found[name] == counters(run.stats)[name]
    assert seen == [each.phases.tolist() for step in run.trace.steps() for each in step.events]


@pytest.mark.parametrize("policy", ["lru", "dymoe"])
def test_a_text_is_recorded(policy, one):
    """A recorded text has its steps, phases, marks and times.

    After the recording, the evaluator works as before.
    """
    with (
        opened(one, policy=policy, expert_ram=2 << 20, ctx=64, ubatch=8) as runtime,
        runtime.evaluator() as e,
    ):
        text = record_text(e, "one two three four " * 20, 40, prefill=20)
        assert text.arrays["step_phase"].tolist() == 3 * [Phase.PREFILL] + 20 * [Phase.DECODE]
        assert text.arrays["step_tokens"].tolist() == [8, 8, 4] + 20 * [1]
        assert (text.step_ms > 0).all()
        assert (text.wait_ms <= text.step_ms).all()
        assert text.wait_ms.sum() > 0
        assert (text.compute_ms + text.wait_ms).sum() == pytest.approx(text.step_ms.sum())
        assert text.header.settings.get("n_ahead", 0) == (policy == "dymoe")
        parts = [[part, PROMPT_ENDS, 0] for part in range(3)]  # logits are requested for each part
        assert text.arrays["marks"].tolist() == [[0, STARTS, 0], *parts]
        assert text.header.read_bytes_per_s > 0
        assert all(0 < share <= 1 for share in text.header.dense_share)
        calls = e.inside.store.calls
        e.eval([5], 0)
        assert (e.inside.store.calls > calls) == (policy == "dymoe")
        assert reported(text)["runs"][policy]["decode"]["requests"] > 0


@pytest.mark.parametrize("policy", ["lru", "dymoe", "context"])
def test_an_answer_is_recorded(policy, both):
    """An answer is recorded from the decode thread, as in a chat.

    The first steps of the server core, with which it tests the context's memory, are not recorded.
    """
    config = build(both, policy=policy, ubatch=8, temp=0.0)
    with Runtime.open(config, answering=Answering(reads_ahead=False)) as runtime:
        trace = record_answer(runtime, "Hello", 6)
        phases = trace.arrays["step_phase"].tolist()
        assert phases.count(Phase.DECODE) == 5 and phases[0] == Phase.PREFILL
        assert all(0 < share <= 1 for share in trace.header.dense_share)
        if policy == "context":
            with pytest.raises(ConfigError, match="has already learned from earlier steps"):
                record_answer(runtime, "Hello", 6)


def test_recorded_turns_reuse_their_prefix(both):
    """Later turns of a recorded conversation read only their new tokens.

    A prompt of one token counts as a prompt, and the end of each prompt is marked.
    """
    config = build(both, policy="context", ubatch=8)
    with Runtime.open(config, answering=Answering(reads_ahead=False)) as runtime:
        driver = runtime.inside.driver
        with Recorder(runtime.inside) as recorder:
            first = answered(runtime, PROMPT, 5, ignore_eos=True)
            said = PROMPT + first["tokens"]
            second = answered(runtime, said + ANSWER[:3], 4, ignore_eos=True)
            third = answered(runtime, said + ANSWER[:3], 4, ignore_eos=True)
            with runtime.evaluator():
                pass
        trace = recorder.trace(DISK)
        assert driver.prefetched == 0
    read = [each["timings"]["prompt_n"] for each in (first, second, third)]
    assert read == [len(PROMPT), 1 + 3, 1]
    steps = zip(
        trace.arrays["step_phase"].tolist(), trace.arrays["step_tokens"].tolist(), strict=True
    )
    decoded = [(Phase.DECODE, 1)]
    assert list(steps) == [
        *[(Phase.PREFILL, 8), (Phase.PREFILL, 4), *4 * decoded],
        *[(Phase.PREFILL, 4), *3 * decoded],
        *[(Phase.PREFILL, 1), *3 * decoded],
    ]
    ends = [step for step, what, _ in trace.arrays["marks"].tolist() if what == PROMPT_ENDS]
    assert ends == [1, 6, 10]
