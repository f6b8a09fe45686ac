"""Model shapes, route events, store views and decisions as numpy arrays, without the native
library."""

from dataclasses import replace

import numpy as np

from orchestrator.allocation.slots import ModelShape
from orchestrator.events import ABSENT, MAX_PREFETCH, DecisionBuffer, Phase, RouteEvent, StoreView
from orchestrator.policy.base import History, place

UP, GATE, DOWN = 0, 1, 3


def make_shape(n_layers=6, n_expert=16, k=4, tiers=("q4_k", "q2_k")):
    sizes = ({UP: 12288, GATE: 12288, DOWN: 16384}, {UP: 8192, GATE: 8192, DOWN: 8192})
    return ModelShape(n_expert, k, tiers, tuple(sizes[: len(tiers)] for _ in range(n_layers)))


FIVE = ("q8_0", "q4_k", "q3_k", "q2_k", "q1_0")
BITS = (8.5, 4.5, 3.44, 2.63, 1.13)
N_LAYERS, N_EXPERT = 4, 16


def five_tiers(odd=False):
    """Shape with five tiers. odd: the slots of the last layer have twice the size."""
    tiers = tuple({UP: 4096 * n, GATE: 4096 * n, DOWN: 4096 * n} for n in (5, 3, 2, 2, 1))
    last = tuple({kind: 2 * size for kind, size in each.items()} for each in tiers)
    layers = (tiers,) * (N_LAYERS - 1) + ((last,) if odd else (tiers,))
    return ModelShape(N_EXPERT, 4, FIVE, layers, BITS)


def assert_holds(plan, shape, tiers, budget):
    """Assert that the plan is within the budget and that each matrix fits the slots of its
    group."""
    assert plan.total_bytes <= budget
    wanted = {
        (layer, kind, tier): size
        for layer, slots in enumerate(shape.slots)
        for tier in tiers
        for kind, size in slots[tier].items()
    }
    assert set(plan.group_of) == set(wanted)
    for at, group in plan.group_of.items():
        assert plan.groups[group].slot_bytes >= wanted[at]


def make_event(shape, rng, n_tokens=1, layer=0, phase=Phase.DECODE, n_ahead=0, ties=False):
    n, k, e = max(4, n_tokens), shape.n_expert_used, shape.n_expert

    def rows(count):
        chosen = [rng.permutation(e)[:k] for _ in range(count)]
        return np.array(chosen, np.int32).reshape(count, k)

    weights = rng.random((n, k), np.float32)
    if ties:
        weights = np.round(weights, 1)
    ahead_ids = np.stack([rows(n) for _ in range(max(1, n_ahead))])
    scores = np.sort(rng.random((*ahead_ids.shape,), np.float32), axis=2)[:, :, ::-1].copy()
    received = rng.random(n, np.float32)
    tokens = np.arange(n, dtype=np.int32)
    phases, sequences = np.full(n, phase, np.uint8), np.zeros(n, np.int32)
    event = RouteEvent(rows(n), weights, tokens, ahead_ids, scores, received, phases, sequences)
    event.layer, event.phase, event.n_tokens, event.n_ahead = layer, int(phase), n_tokens, n_ahead
    return event


def in_one_step(event, of):
    """Turn an event into one of several sequences.

    of: (sequence, phase) of each token. Returns the event that each sequence alone would have had.
    """
    n = len(of)
    event._sequences, event._phases = (
        np.array([each for each, _ in of], np.int32),
        event._phases.copy(),
    )
    event._phases[:n] = [phase for _, phase in of]
    event.phase = int(min(phase for _, phase in of))
    alone = []
    for sequence in dict.fromkeys(each for each, _ in of):
        rows = np.flatnonzero(event._sequences == sequence)
        mine = RouteEvent(
            event._ids[rows],
            event._weights[rows],
            np.arange(len(rows), dtype=np.int32),
            event._ahead_ids[:, rows],
            event._ahead[:, rows],
            event._importance[rows],
            event._phases[rows],
            event._sequences[rows],
        )
        mine.layer, mine.n_ahead, mine.n_tokens = event.layer, event.n_ahead, len(rows)
        mine.phase, mine.has_importance = int(mine._phases.min()), event.has_importance
        alone.append(mine)
    return alone


def make_view(shape, resident=None):
    if resident is None:
        resident = np.full((shape.n_layers, shape.n_expert), ABSENT, np.uint8)
    kinds = sum(1 << kind for kind in shape.slots[0][0])
    return StoreView(resident, np.where(resident == ABSENT, kinds, 0).astype(np.uint8))


def make_decision(shape, capacity=MAX_PREFETCH):
    tier, passing = np.zeros((2, shape.n_expert), np.uint8)
    return DecisionBuffer(tier, passing, np.zeros(capacity, np.int64))


def prefetches(out):
    """Requested prefetches as (layer, expert, tier, bit mask of kinds)."""
    return [
        (key & 0xFFFF, key >> 16 & 0xFFFF, key >> 32 & 0xFF, key >> 40 & 0xFF)
        for key in out._prefetch[: out.n_prefetch]
    ]


class Known(History):
    """A history with fixed values: hotness, losses, estimate, tuned."""

    def __init__(self, **known):
        self.known = known

    def hotness(self):
        return self.known.get("hotness")

    def losses(self, tiers, per_use=False):
        return self.known.get("losses")

    def estimate(self, tiers):
        return self.known.get("estimate")

    def tuned(self, policy):
        return self.known.get("tuned")


def placed(kind, shape, settings=None, rules=None, budget=1 << 40, **known):
    """Placement of a policy class. Default budget: slots for every expert."""
    return place(kind, shape, settings, rules, budget, Known(**known))


def policy_of(kind, shape, settings=None, rules=None, budget=1 << 40, **known):
    """A policy with the placement that `placed` returns."""
    return placed(kind, shape, settings, rules, budget, **known).make(Known(**known))


def least_of(kind, shape, settings=None, rules=None):
    """Return the smallest budget, in bytes, with which a policy works.

    Asserts that the placement fits this budget, and that it needs more than a budget of one byte
    less.
    """
    least = placed(kind, shape, settings, rules, 0).slots.total_bytes
    assert placed(kind, shape, settings, rules, least).slots.total_bytes == least
    assert placed(kind, shape, settings, rules, least - 1).slots.total_bytes > least - 1
    return least


def change(policy, **values):
    """Change settings of a policy while it runs."""
    policy.update_settings(replace(policy.settings, **values))
