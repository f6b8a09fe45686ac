"""The context policy on a model.

Tests of the placement of resident experts, of transitions that no token waits for, and of shared
slots, loss tables and kept prefixes.
"""

import numpy as np
import pytest

from orchestrator.cost import losses
from orchestrator.errors import ConfigError
from orchestrator.lab.replay.simulate import Compute
from orchestrator.plan.records import Needs, PlanRequest
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn, save_losses, until
from .replayed import SPEEDS, recorded, replayed, reported

FIVE = ("q8_0", "q4_k", "q3_k", "q2_k", "q1_0")
RNG = np.random.default_rng(17)
TOKENS = drawn(125, 17)
PROMPTS, ANSWER = (TOKENS[:40], TOKENS[40:65]), TOKENS[65:]


@pytest.fixture
def five(packed):
    return packed(*FIVE)


def save_table(path, of, n_tiers=5):
    """Write a loss table of random numbers that grow in lower tiers. Return the losses."""
    found = np.sort(RNG.random((3, 8, n_tiers)) ** 4, axis=2).round(6)
    save_losses(path, of, found)
    return found


def context(model, **options):
    return build(
        model, **({"policy": "context", "hot_experts": 2, "near_slots": "shared"} | options)
    )


def converse(e, number, n_answer=None):
    prompt = PROMPTS[number]
    e.eval(prompt, 0)
    for at, token in enumerate(ANSWER[:n_answer]):
        e.eval([token], len(prompt) + at)


def until_placed(e):
    """Decode until all transitions of the placement are complete.

    Few tokens are used, because their routing would change the placement. A slow disk only takes
    longer.
    """
    at, store = e.n_cached, e.inside.store

    def one_more():
        until(lambda: not (np.not_equal(*store.states()) & ~store.landed()).any())
        e.eval([1], at)

    until(lambda: e.inside.policy._wanted is None, one_more)


def test_a_loss_table_is_found_and_used(five, tmp_path):
    def used(**options):
        """Return the losses in use, the note for the user, and the initial resident tiers."""
        with Runtime.open(context(five, **options)) as runtime, runtime.evaluator() as e:
            return e.inside.policy.placement.losses, str(runtime.note), e.inside.store.resident()

    beside, named = losses.default_path(five), tmp_path / "losses.json"
    found, note, nominal = used()
    assert found is None and "has no loss table" in note and "calibrate" in note
    _, note, in_own_slots = used(near_slots="own")
    assert note == "None"  # no loss table could change the placement
    try:
        expected = save_table(beside, five)
        found, note, resident = used()
        assert np.array_equal(found, expected) and note == "None"
        assert not np.array_equal(resident, nominal)
        found, note, resident = used(near_slots="own")
        assert found is None and note == "None" and np.array_equal(resident, in_own_slots)
        save_table(beside, five, 3)
        found, note, _ = used()
        assert found is None and "lacks one of" in note
        beside.write_text("{}")
        found, note, _ = used()
        assert found is None and "only estimated from the bits per weight" in note
    finally:
        beside.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        used(losses=named)
    save_table(named, five, 3)
    with pytest.raises(ConfigError, match=r"--losses .* lacks one of"):
        used(losses=named)
    expected = save_table(named, five)
    assert np.array_equal(used(losses=named, near_tiers="q3_k,q1_0", near_bits=2.0)[0], expected)


@pytest.mark.parametrize(
    "options",
    [
        {"placement": "async"},
        {"placement": "wait"},
        # studies request decisions that do not depend on resident tiers
        {"placement": "async", "near_slots": "own", "exact_tiers": True},
    ],
)
def test_placements_read_only_changed_experts(five, options):
    """A new placement reads at most 10 % more than the changed experts need, and no token waits.

    With placement "wait", all transitions are complete before the first token of an answer.
    """
    with Runtime.open(context(five, **options)) as runtime, runtime.evaluator() as e:
        policy, store = e.inside.policy, e.inside.store
        model, is_async = e.inside.model, options["placement"] == "async"
        converse(e, 0)
        until_placed(e)
        for number in (1, 0):
            before, read = store.resident(), store.stats().transition_bytes
            converse(e, number, 1)
            at_once = store.stats().transition_bytes - read
            for token in ANSWER[1:]:
                e.eval([token], e.n_cached)
            until_placed(e)
            after, stats = store.resident(), store.stats()
            changed = np.argwhere(before != after).tolist()
            changed_bytes = sum(
                kind[after[layer, expert]].expert_bytes
                for layer, expert in changed
                for kind in model.slices[layer]
                if kind[0] is not None
            )
            moved = stats.transition_bytes - read
            assert changed and 0 < moved <= 1.1 * changed_bytes
            assert is_async or at_once == moved
            assert np.equal(*store.states()).all() and ((after == 0).sum(axis=1) == 2).all()
            store.check()
        assert policy.updates == 3
        assert options != {"placement": "async"} or policy.report()["steps"] > 0
        assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
        assert list(stats.hits) == list(stats.requests)
        assert stats.transitions_rejected == stats.transitions_failed == 0
        assert stats.evictions == 0
        # after the placement is complete, nothing more is read
        for token in ANSWER[:6]:
            e.eval([token], e.n_cached)
        assert store.stats().transition_bytes == stats.transition_bytes


@pytest.mark.parametrize("placement", ["async", "wait"])
def test_a_replay_knows_sequences_and_restored_tokens(five, tmp_path, placement):
    """A replay knows sequences and restored prefixes.

    Its usage sums equal those of the run within 1e-6. Two forks of a conversation decode together,
    one of them is dropped, and the first prompt is restored from a copy and continued.
    """

    def talk(e):
        converse(e, 0, 3)
        kept = e.inside.driver.save_sequence(0)
        e.eval(PROMPTS[1], e.n_cached)
        e.fork(0)
        e.fork(1)
        for token in ANSWER[:20]:
            e.decode_batch([token, token + 1], [0, 1])
        converse(e, 1, 5)
        e.fork(1)  # this ends the sequence's earlier content
        e.decode_batch([9], [1])
        e.reset()  # this ends all three sequences
        converse(e, 0, 2)
        e.inside.driver.restore_sequence(0, kept)
        e.eval(PROMPTS[0][:9], e.n_cached)
        for token in ANSWER[:30]:
            e.eval([token], e.n_cached)
        until_placed(e)
        use = e.inside.policy.use
        return [*use.sums, use.past]

    request = PlanRequest(context(five, placement=placement), Needs(sequences=2))
    run = recorded(request, tmp_path, talk)
    trace = run.trace
    assert run.stats.experts_promoted + run.stats.experts_demoted > 0
    assert set(trace.arrays["sequences"].tolist()) == {0, 1, 2}
    assert len(trace.restored()) == 3  # the first two forks together, the third fork, the copy
    _, policy = replayed(trace, SPEEDS[1], Compute(1000.0, 1000.0))
    for mine, its in zip((*policy.use.sums, policy.use.past), run.said, strict=True):
        assert mine == pytest.approx(its, rel=1e-6)
    # A policy without knowledge of sequences can replay the trace too.
    reported(trace, policy="lru", expert_ram=1 << 22)
