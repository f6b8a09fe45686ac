"""Several sequences in one context: each says what it would say alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.events import Phase, RouteEvent
from orchestrator.policy.dynaexq import DynaExq

pytestmark = pytest.mark.usefixtures("library_folder")

N_DECODE = 10
PROMPTS = [
    [int(t) for t in np.random.default_rng(seed).integers(0, 250, 6 + seed)] for seed in range(3)
]


def build(model: Path, policy: str, **more: object) -> Config:
    settings: dict[str, object] = {"ctx": 1024, "ubatch": 64, "threads": 1, "policy": policy}
    if policy == "dynaexq":
        # fixed, so that a run alone and one together compute with the same experts
        settings |= {"update_steps": 0, "hot_experts": 3, "expert_ram": 64 << 20}
    else:
        settings |= {"expert_ram": 1 << 20}
    if policy == "dymoe":
        settings |= {"retention": 1.0}
    return Config.build(model=model, use_extra_bufts=False, **settings | more)


def alone(engine: Engine, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """(greedy tokens, logits [1 + N_DECODE, n_vocab]) behind a prompt."""
    rows, tokens = [engine.eval(prompt, 0)[-1]], []
    for at in range(N_DECODE):
        tokens.append(int(rows[-1].argmax()))
        rows.append(engine.eval(tokens[-1:], len(prompt) + at)[-1])
    return tokens, np.stack(rows)


@pytest.mark.parametrize("policy", ["dynaexq", "lru"])
@pytest.mark.parametrize("n", [1, 4, 32])
def test_equal_prompts_together_say_what_one_says(both: Path, policy: str, n: int) -> None:
    with Engine.open(build(both, policy)) as engine:
        expected, rows = alone(engine, PROMPTS[0])
    with Engine.open(build(both, policy, sequences=n)) as engine:
        first = engine.eval(PROMPTS[0], 0)[-1]
        everyone = list(range(n))
        for sequence in everyone:
            engine.fork(sequence)
        found = [[int(first.argmax())] * n]
        for at in range(N_DECODE):
            logits = engine.decode_batch(found[-1], everyone)
            assert logits.shape == (n, len(first))
            np.testing.assert_array_equal(logits[1:], logits[:-1])
            # Flash attention adds the cells of a sequence up in another order where others lie
            # between them; logits spread by 2.
            np.testing.assert_allclose(logits[0], rows[at + 1], atol=0 if n == 1 else 0.2)
            found.append(logits.argmax(axis=1).tolist())
        assert [[row[s] for row in found[:-1]] for s in everyone] == [expected] * n
        if policy == "dynaexq":
            assert list(engine.store.stats().demand_bytes) == [0, 0]
        engine.store.check()


@pytest.mark.parametrize("policy", ["dynaexq", "lru", "dymoe"])
def test_different_sequences_keep_apart(both: Path, policy: str) -> None:
    """Prompts of several lengths, one of them in a sequence that starts later. Where each expert
    has one precision, each sequence says what it says alone, up to floating point: a batch adds
    up in another order, so that equally likely tokens may change places (not here)."""
    with Engine.open(build(both, policy)) as engine:
        expected = [alone(engine, prompt)[0] for prompt in PROMPTS]
    with Engine.open(build(both, policy, sequences=3)) as engine:
        last: dict[int, int] = {}
        found: list[list[int]] = [[], [], []]
        for number, prompt in enumerate(PROMPTS):
            last[number] = int(engine.eval(prompt, 0)[-1].argmax())
            engine.fork(number)
            rows = engine.decode_batch(list(last.values()), list(last))
            for sequence, row in zip(list(last), rows, strict=True):
                found[sequence].append(last[sequence])
                last[sequence] = int(row.argmax())
        order = [2, 0, 1]
        for _ in range(N_DECODE - 3):
            rows = engine.decode_batch([last[sequence] for sequence in order], order)
            for sequence, row in zip(order, rows, strict=True):
                found[sequence].append(last[sequence])
                last[sequence] = int(row.argmax())
        assert all(each == expected[i][: len(each)] for i, each in enumerate(found))
        assert [len(each) for each in found] == [10, 9, 8]
        # the engine's own sequence is where it was
        again, _ = alone(engine, PROMPTS[2])
        assert again == expected[2]


def decode_four(engine: Engine) -> None:
    """Four sequences behind one prompt, and four steps of different tokens."""
    engine.eval(PROMPTS[0], 0)
    for sequence in range(4):
        engine.fork(sequence)
    rng = np.random.default_rng(5)
    for _ in range(4):
        engine.decode_batch([int(t) for t in rng.integers(0, 250, 4)], range(4))


def test_every_sequence_looks_ahead(both: Path) -> None:
    """In a decode step the predictions of all tokens are asked for, and no token's importance is
    computed: not in the graph of a prompt with as many tokens, either."""
    two = {"retention": 0.5, "high_tier": "q4_k", "low_tier": "q2_k", "prefetch": "on"}
    config = build(both, "dymoe", sequences=4, expert_ram=64 << 20, ubatch=4, **two)
    with Engine.open(config) as engine:
        original = engine.driver.on_route
        seen: set[tuple[int, bool]] = set()
        n_apart = 0

        def decided(event: RouteEvent) -> None:
            nonlocal n_apart
            original(event)
            if event.n_tokens < 4:
                return
            seen.add((event.phase, bool(event.has_importance)))
            if event.phase == Phase.DECODE and event.n_ahead:
                wanted = set(event.ahead_ids_array[0].ravel().tolist())
                n_apart += len(wanted) > event.k
                out = engine.store.decision
                listed = list(out._prefetch[: out.n_prefetch])
                assert {key >> 16 & 0xFFFF for key in listed} == wanted
                assert {key & 0xFFFF for key in listed} == {event.layer + 1}

        engine.driver.set_route(decided)
        engine.eval(PROMPTS[2][:4], 0)
        decode_four(engine)
        engine.store.check()
    assert seen == {(Phase.PREFILL, True), (Phase.DECODE, False)}
    assert n_apart > 0


def test_an_expert_is_critical_if_it_is_for_any_token(both: Path) -> None:
    """DyMoE in a batch: the union of each token's most weighted experts is high, and nothing
    else; the store computes as decided."""
    two = {"retention": 0.5, "high_tier": "q4_k", "low_tier": "q2_k", "n_ahead": 0}
    config = build(both, "dymoe", sequences=4, expert_ram=64 << 20, exact_tiers=True, **two)
    with Engine.open(config) as engine:
        critical = engine.policy.critical  # type: ignore[attr-defined]
        original = engine.driver.on_route
        n_low = n_together = 0

        def decided(event: RouteEvent) -> None:
            nonlocal n_low, n_together
            original(event)
            if event.phase != Phase.DECODE or event.n_tokens == 1:
                return
            t = critical[event.layer]
            order = np.argsort(-event.weights_array, axis=1, kind="stable")
            rows = np.take_along_axis(event.ids_array, order, axis=1)
            high, low = set(rows[:, :t].ravel().tolist()), set(rows[:, t:].ravel().tolist())
            tiers = engine.store.decision.tier_array
            assert all(tiers[expert] == 0 for expert in high)
            assert all(tiers[expert] == 1 for expert in low - high)
            n_low += len(low - high)
            n_together += len(low & high)

        engine.store.set_route(decided)
        decode_four(engine)
        assert n_low > 0 and n_together > 0
        assert engine.store.stats().routed[Phase.DECODE][1] == n_low


def test_hotness_counts_every_token_of_a_batch(both: Path) -> None:
    """DynaExq decides by version, not by token: what any sequence uses is in memory, and each
    token counts once for each of its experts."""
    config = build(both, "dynaexq", sequences=4, update_steps=1, hotness_decay=0.0)
    with Engine.open(config) as engine:
        decode_four(engine)
        assert isinstance(engine.policy, DynaExq)
        # S of the last step alone: shares of its four tokens
        counts = 4 * engine.policy.hotness
        assert counts.sum(axis=1).tolist() == (
            [4 * engine.model.n_expert_used] * engine.model.n_layers
        )
        np.testing.assert_array_equal(counts, counts.round())
        assert (counts > 1).any()
        stats = engine.store.stats()
        assert list(stats.hits) == list(stats.requests)
        assert list(stats.wait_us) == [0, 0]
        distinct = sum(stats.routed[Phase.DECODE])
        assert distinct < 4 * 4 * engine.model.n_expert_used * engine.model.n_layers


def test_a_full_context_leaves_the_sequences_as_they_were(both: Path) -> None:
    with Engine.open(build(both, "dynaexq", ctx=256, sequences=2)) as engine:
        engine.eval(PROMPTS[0], 0)
        engine.fork(0)
        engine.fork(1)
        free = engine.n_ctx - len(PROMPTS[0])
        for _ in range(free // 2):
            engine.decode_batch([1, 2], [0, 1])
        with pytest.raises(ConfigError, match="the context of 256 tokens is full"):
            engine.decode_batch([1, 2], [0, 1])
        engine.fork(1)  # gives its own tokens back
        assert engine.decode_batch([1, 2], [0, 1]).shape[0] == 2
        engine.reset()
        assert engine.decode_batch([5], [1]).shape[0] == 1


@pytest.mark.parametrize(
    ("tokens", "sequences", "message"),
    [
        ([], [], "one token for each"),
        ([1], [0, 1], "one token for each"),
        ([1, 2], [0, 0], "named twice"),
        ([1], [2], "no sequence 2"),
        ([1], [-1], "no sequence -1"),
    ],
)
def test_what_is_no_step_is_refused(
    both: Path, tokens: list[int], sequences: list[int], message: str
) -> None:
    with (
        Engine.open(build(both, "lru", sequences=2)) as engine,
        pytest.raises(ConfigError, match=message),
    ):
        engine.decode_batch(tokens, sequences)
