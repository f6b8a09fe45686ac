"""DyMoE's decisions, compared with a simple implementation of the paper's equations."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shapes import (
    change,
    in_one_step,
    make_decision,
    make_event,
    make_shape,
    make_view,
    policy_of,
    prefetches,
)

from orchestrator.allocation.slots import Rules
from orchestrator.errors import PolicyError
from orchestrator.events import ABSENT, SKIP, Phase
from orchestrator.policy.dymoe import DyMoE, counts_for_retention

SEEDS = st.integers(0, 2**32 - 1)


def reference_tiers(ids, weights, t, low):
    """Tier of each expert: 0 if it is among the t heaviest experts of any token, else low."""
    tiers: dict[int, int] = {}
    for row, gates in zip(ids, weights, strict=True):
        ranked = sorted(zip(-gates, range(len(row)), row, strict=True))
        for rank, (_, _, expert) in enumerate(ranked):
            tier = 0 if rank < t else low
            tiers[int(expert)] = min(tiers.get(int(expert), tier), tier)
    return tiers


@settings(deadline=None)
@given(SEEDS, st.integers(1, 9), st.integers(0, 5), st.booleans(), st.booleans())
@example(4, 1, 5, False, False)
def test_decode_tiers(seed, n_tokens, layer, skip, ties):
    rng = np.random.default_rng(seed)
    shape = make_shape(tiers=("q4_k",) if skip else ("q4_k", "q2_k"))
    policy = policy_of(DyMoE, shape, DyMoE.Settings(retention=0.6), Rules(skip=skip))
    # the last token of a prompt
    phase = Phase.PREFILL if layer == 5 and n_tokens == 1 else Phase.DECODE
    event = make_event(shape, rng, n_tokens, layer, phase, ties=ties)
    event.has_importance = int(phase == Phase.PREFILL)
    out = make_decision(shape)
    policy.decide(event, make_view(shape), out)
    expected = reference_tiers(
        event.ids_array, event.weights_array, policy.critical[layer], SKIP if skip else 1
    )
    assert {expert: out.tier[expert] for expert in expected} == expected


def reference_order(ids, scores, share, resident):
    """Experts in the order of eq. 1 and 2.

    First by the load of heavy-hitter tokens, then by the load of all tokens, then experts that are
    resident in tier 0, then by index. The last two rules for ties are ours.
    """
    n = len(resident)
    heavy = set(range(len(ids)))
    if scores is not None:
        ranked = sorted(range(len(ids)), key=lambda t: -scores[t])
        heavy = set(ranked[: max(1, math.ceil(share * len(ids)))])
    load, heavy_load = [0] * n, [0] * n
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            load[expert] += 1
            heavy_load[expert] += token in heavy
    return sorted(range(n), key=lambda e: (-heavy_load[e], -load[e], resident[e] != 0, e))


@settings(deadline=None)
@given(SEEDS, st.integers(2, 40), st.integers(0, 4), st.booleans(), st.booleans(), st.floats(0, 1))
def test_prefill_follows_the_heavy_hitters(seed, n_tokens, layer, skip, scored, share):
    shape = make_shape(tiers=("q4_k",) if skip else ("q4_k", "q2_k"))
    low = SKIP if skip else 1
    asked = DyMoE.Settings(retention=0.6, heavy_hitters=share)
    policy = policy_of(DyMoE, shape, asked, Rules(skip=skip), 10**6)
    slots = policy.placement.slots
    event_rng = np.random.default_rng(seed)
    event = make_event(shape, event_rng, n_tokens, layer, phase=Phase.PREFILL, n_ahead=1)
    event.has_importance = int(scored)
    scores = event.importance_array
    resident = event_rng.choice([0, 1, ABSENT], (shape.n_layers, shape.n_expert)).astype(np.uint8)
    out = make_decision(shape)
    policy.decide(event, make_view(shape, resident), out)

    order = reference_order(event.ids_array, scores, share, resident[layer])
    used = len(set(event.ids_array.ravel().tolist()))
    t = counts_for_retention(0.6, 6, used)[layer]
    tiers = {e: 0 if i < t else low for i, e in enumerate(order[:used])}
    assert {e: out.tier[e] for e in order[:used]} == tiers
    stays = int(0.75 * slots.groups[slots.group_of[layer, 0, 0]].n_slots)
    assert [e for e in order if not out.passing_array[e]] == order[:stays]

    # The prefetch for the next layer uses the same order over the predicted experts. The rank
    # decides the tier.
    predicted = event.ahead_ids_array[0]
    order = reference_order(predicted, scores, share, resident[layer + 1])
    # the last layer computes only the prompt's last token, in the order of its gate weights
    if layer == 4:
        predicted = predicted[-1:]
        order = predicted[0].tolist()
    ahead = set(predicted.ravel().tolist())
    t = counts_for_retention(0.6, 6, len(ahead))[layer + 1]
    free = [slots.groups[slots.group_of[layer + 1, 0, tier]].n_slots for tier in range(2 - skip)]
    wanted = []
    for rank, expert in enumerate(order[: t if skip else len(ahead)]):
        tier = 0 if rank < t else 1
        absent = resident[layer + 1, expert] > tier
        free[tier] -= absent
        if not absent or free[tier] >= 0:
            wanted.append((layer + 1, expert, tier, 0))
    assert prefetches(out) == wanted


@settings(deadline=None)
@given(
    SEEDS, st.integers(0, 3), st.integers(1, 2), st.sampled_from(["all", "critical", "skip", "off"])
)
def test_decode_prefetch(seed, layer, n_ahead, how):
    """Eq. 8: the t_l best predicted experts are prefetched in the high tier. The others are
    prefetched in the low tier, except with prefetch_low=False, as in the paper."""
    rng = np.random.default_rng(seed)
    shape = make_shape(tiers=("q4_k",) if how == "skip" else ("q4_k", "q2_k"))
    prefetch = "off" if how == "off" else "auto"
    asked = DyMoE.Settings(retention=0.6, prefetch_low=how != "critical", prefetch=prefetch)
    policy = policy_of(DyMoE, shape, asked, Rules(skip=how == "skip"))
    event = make_event(shape, rng, layer=layer, n_ahead=n_ahead)
    out = make_decision(shape)
    policy.decide(event, make_view(shape), out)
    expected = []
    for ahead in range(n_ahead):
        t = policy.critical[layer + 1 + ahead]
        experts = event.ahead_ids_array[ahead, 0].tolist()
        expected += [(layer + 1 + ahead, expert, 0, 0) for expert in experts[:t]]
        if how == "all":
            expected += [(layer + 1 + ahead, expert, 1, 0) for expert in experts[t:]]
    assert prefetches(out) == ([] if how == "off" else expected)


# Two decode tokens and three prompts. One prompt has a single token, and the tokens of the other
# two are mixed.
TOGETHER = [
    (4, Phase.DECODE),
    *[(0, Phase.PREFILL)] * 5,
    *[(7, Phase.PREFILL), (0, Phase.PREFILL)] * 3,
    (1, Phase.PREFILL),
    *[(7, Phase.PREFILL)] * 9,
    (2, Phase.DECODE),
]


def prefetch_tiers(out):
    """The best tier in which each expert is prefetched."""
    best: dict[int, int] = {}
    for _, expert, tier, _ in prefetches(out):
        best[expert] = min(best.get(expert, SKIP), tier)
    return best


@settings(deadline=None)
@given(
    SEEDS,
    st.sampled_from([1, 4, 5]),
    st.sampled_from(["low", "skip", "missing"]),
    st.booleans(),
    st.booleans(),
)
def test_sequences_in_one_step_are_decided_like_each_alone(seed, layer, how, scored, exact):
    """A step with several sequences gives each expert the best tier of those that the sequences
    request alone, both now and by prefetch. Experts of decode tokens and of a prompt's last token
    are not streamed."""
    rng = np.random.default_rng(seed)
    shape = make_shape(tiers=("q4_k", "q2_k") if how == "low" else ("q4_k",))
    which = "missing" if how == "missing" else "gates"
    asked = DyMoE.Settings(retention=0.6, prefetch="on", n_ahead=1, lower_which=which)
    policy = policy_of(DyMoE, shape, asked, Rules(skip=how != "low", exact=exact))
    policy._prompts.room = [(shape.n_expert, shape.n_expert)] * shape.n_layers
    event = make_event(shape, rng, len(TOGETHER), layer, n_ahead=int(layer < 5))
    event.has_importance = int(scored)
    resident = rng.choice([0, 1, ABSENT], (shape.n_layers, shape.n_expert)).astype(np.uint8)
    view, out = make_view(shape, resident), make_decision(shape)
    tiers: dict[int, int] = {}
    ahead: dict[int, int] = {}
    for mine in in_one_step(event, TOGETHER):
        alone = make_decision(shape)
        policy.decide(mine, view, alone)
        for expert in set(mine.ids_array.ravel().tolist()):
            tiers[expert] = min(tiers.get(expert, SKIP), alone.tier[expert])
        for expert, tier in prefetch_tiers(alone).items():
            ahead[expert] = min(ahead.get(expert, SKIP), tier)
    policy.decide(event, view, out)
    assert {expert: out.tier[expert] for expert in tiers} == tiers
    assert prefetch_tiers(out) == ahead
    assert len(prefetches(out)) == len(ahead)
    gated = [row for row, (sequence, _) in enumerate(TOGETHER) if sequence in (1, 2, 4)]
    assert not out.passing_array[event.ids_array[gated]].any()


def test_a_second_tier_is_needed():
    shape = make_shape(tiers=("q4_k",))
    with pytest.raises(PolicyError, match="--low"):
        policy_of(DyMoE, shape, DyMoE.Settings(retention=0.75))
    out = make_decision(shape)
    policy = policy_of(DyMoE, shape)
    assert policy.placement.depth.retention == 1.0  # with one tier no other retention is possible
    policy.decide(make_event(shape, np.random.default_rng(0)), make_view(shape), out)
    assert not any(out.tier)
    with pytest.raises(PolicyError, match="--low"):
        change(policy, retention=0.5)
    depth = policy.placement.depth
    assert (policy.settings.retention, depth.retention) == (None, 1.0)


def test_a_retention_that_the_schedule_cannot_reach_is_described():
    """With 6 layers and 4 experts per token, the cosine schedule keeps at least 15 of 24
    experts."""
    shape = make_shape(n_layers=6, k=4)
    least = policy_of(DyMoE, shape, DyMoE.Settings(retention=0.0)).placement.depth.realised
    assert 0.5 < least < 0.75
    for retention, schedule, said in (
        (
            least - 0.05,
            "cosine",
            ": the smallest retention that --schedule cosine allows; --schedule flat allows a "
            "smaller one)",
        ),
        (least, "cosine", f"(realised {least:.3f})"),
        (0.75, "cosine", "(realised 0.750)"),
        (least - 0.05, "flat", "(realised 0.500)"),
        (
            0.1,
            "flat",
            "(realised 0.250: the smallest retention that --schedule flat allows)",
        ),
    ):
        policy = policy_of(DyMoE, shape, DyMoE.Settings(retention=retention, schedule=schedule))
        assert policy.describe().endswith(said), (retention, schedule, policy.describe())
        # The line below an answer shows the text before the first comma, so the description has no
        # comma.
        assert "," not in policy.describe()
    # The same holds after a setting changes between two tokens.
    change(policy, retention=0.5)
    assert policy.critical == [2] * 6
    assert "realised 0.500" in policy.describe()
    assert "no less" not in policy.describe()


def test_lower_which_missing_lowers_missing_experts():
    """With lower_which="missing", the policy lowers the missing expert with the lowest gate weight.

    Top 4 with retention 0.75: t = 3, and one expert may be lowered. In a step of several tokens, an
    expert is not lowered if another token needs it in the high tier.
    """

    def skipped(rows, here, retention=0.75):
        k = len(rows[0])
        shape = make_shape(n_layers=2, n_expert=2 * k, k=k, tiers=("q4_k",))
        asked = {"schedule": "flat", "lower_which": "missing", "prefetch": "off"}
        settings = DyMoE.Settings(retention=retention, **asked)
        policy = policy_of(DyMoE, shape, settings, Rules(skip=True))
        assert policy.wants.by_residency and policy.critical == [int(retention * k)] * 2
        event = make_event(shape, np.random.default_rng(0), n_tokens=len(rows))
        event._ids.flags.writeable = event._weights.flags.writeable = True
        event._ids[: len(rows)] = rows
        event._weights[: len(rows)] = np.arange(k, 0, -1) / 10
        resident = np.full((2, 2 * k), ABSENT, np.uint8)
        resident[:, here] = 0
        out = make_decision(shape)
        policy.decide(event, make_view(shape, resident), out)
        return set(np.flatnonzero(out.tier_array == SKIP).tolist())

    assert skipped([[5, 2, 7, 0]], []) == {0}
    assert skipped([[5, 2, 7, 0]], [0, 7]) == {2}
    assert skipped([[5, 2, 7, 0]], [0, 7, 2]) == set()
    assert skipped([[5, 2, 7, 0], [1, 0, 3, 4]], []) == {4}
    assert skipped([[5, 2, 7, 0], [1, 6, 3, 0]], [2]) == {0}
    # the top quarter of the experts is never lowered, even if all of it is missing
    assert skipped([list(range(8))], [4, 5, 6, 7], retention=0.25) == {2, 3}
    missing = DyMoE.Settings(lower_which="missing")
    assert not policy_of(DyMoE, make_shape(tiers=("q4_k",)), missing).wants.by_residency
