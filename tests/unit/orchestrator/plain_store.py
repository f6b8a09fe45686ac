"""A store of expert versions in Python, to check what a policy asks of the native one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.allocation.slots import ModelShape, SlotPlan, Transition
from orchestrator.events import ABSENT, Phase, StepReport
from orchestrator.policy.dynaexq import HIGH, LOW, DynaExq, ExpertState

HI, LO = ExpertState.HI, ExpertState.LO


def expert_bytes(shape: ModelShape, tier: int) -> int:
    """All experts of the model in one tier."""
    per_layer = (shape.expert_slot_bytes(layer, tier) for layer in range(shape.n_layers))
    return shape.n_expert * sum(per_layer)


def make(
    shape: ModelShape, budget_bytes: int | None = None, **options: object
) -> tuple[DynaExq, SlotPlan]:
    """By default with room for about half of the experts in high, and some in reserve."""
    if budget_bytes is None:
        both = expert_bytes(shape, HIGH) + expert_bytes(shape, LOW)
        budget_bytes = both // 2 + 4 * shape.expert_slot_bytes(0, HIGH)
    policy = DynaExq(shape, DynaExq.Settings(**options))  # type: ignore[arg-type]
    return policy, policy.plan(budget_bytes)


class PlainStore:
    """What the native store does with transitions, in Python: a read takes `delay` steps."""

    def __init__(self, shape: ModelShape, plan: SlotPlan, start: Sequence[Transition]) -> None:
        self.shape, self.plan = shape, plan
        self.states = np.zeros((shape.n_layers, shape.n_expert), np.uint8)
        self.under_way: list[tuple[int, Transition, bool]] = []
        for layer, expert, tier in start:
            assert self.states[layer, expert] == ExpertState.ABSENT
            self.states[layer, expert] = (HI, LO)[tier]
        self.promoted = self.refused = 0
        self.check()

    def check(self) -> None:
        """No group holds more than its slots: the budget holds."""
        used = [0] * len(self.plan.groups)
        for (layer, _, tier), group in self.plan.group_of.items():
            without = (ExpertState.ABSENT, (LO, HI)[tier])
            used[group] += int((~np.isin(self.states[layer], without)).sum())
        for group, n in zip(self.plan.groups, used, strict=True):
            assert n <= group.n_slots

    def transition(self, moves: Sequence[Transition], delay: int = 1, fails: bool = False) -> None:
        for layer, expert, tier in moves:
            before = self.states[layer, expert]
            assert before == (LO, HI)[tier], "only experts at rest, and to the other tier"
            self.states[layer, expert] = (ExpertState.PROMOTING, ExpertState.DEMOTING)[tier]
            self.under_way.append((delay, (layer, expert, tier), fails))
        self.check()

    def begin_step(self) -> None:
        still = []
        for delay, move, fails in self.under_way:
            layer, expert, tier = move
            if delay > 1:
                still.append((delay - 1, move, fails))
            elif fails:
                self.states[layer, expert] = (LO, HI)[tier]
            else:
                self.states[layer, expert] = (HI, LO)[tier]
                self.promoted += tier == HIGH
        self.under_way = still

    def high(self) -> np.ndarray:
        return np.isin(self.states, (HI, ExpertState.DEMOTING))


def report(
    counts: np.ndarray,
    states: np.ndarray,
    phase: Phase = Phase.DECODE,
    n_tokens: int = 1,
    us: float = 1.0,
) -> StepReport:
    """states: ExpertState [L, E]; the store tells tiers."""
    resident = np.where(np.isin(states, (HI, ExpertState.DEMOTING)), HIGH, LOW)
    target = np.where(np.isin(states, (HI, ExpertState.PROMOTING)), HIGH, LOW)
    absent = states == ExpertState.ABSENT
    tiers = (np.where(absent, ABSENT, each).astype(np.uint8) for each in (resident, target))
    return StepReport(phase, n_tokens, us, counts.astype(np.uint32), *tiers)
