"""What a plan is foreseen to lose: KL from the file's best precision, by the model's loss table."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from orchestrator.events import SKIP
from orchestrator.memory.plan import MemoryPlan
from orchestrator.policy import ALLOWED_LOSS, Policy
from orchestrator.policy.base import SpendsLoss


class Loses(Protocol):
    """What tiers cost, as orchestrator.allocation.estimate says it."""

    def of_uses(self, uses: np.ndarray, tiers: np.ndarray) -> float: ...


@dataclass(frozen=True, slots=True)
class Foreseen:
    """kl: mean KL from the tier `base`, the best of the file, in nats a token; an upper estimate
    where at_most; None where no table knows it."""

    kl: float | None
    at_most: bool
    base: str

    @property
    def text(self) -> str:
        """For the line that says what runs; empty where nothing is lost."""
        if self.kl is None:
            return f", what it loses from {self.base} no table knows (`moe-edge calibrate`)"
        if not self.kl:
            return ""
        most = "at most " * self.at_most
        return f", foreseen to lose {most}{self.kl:.2g} nats a token from {self.base}"


def foreseen(plan: MemoryPlan, uses: np.ndarray, estimate: Loses | None, base: str) -> Foreseen:
    """What a plan loses, where tokens use each expert so often, [n_layers, n_expert]. estimate:
    what all tiers of the file cost, best first; None where nobody knows.

    Which experts are lowered is decided by gates where the policy is asked while it decodes: those
    with the least, so that the mean gate of their share says too much. A policy that is told what
    it may lose spends all of it.
    """
    tiers, policy = plan.tiers, plan.policy
    if policy is None:
        return _of_shares([(tiers[0], 1.0)], 0.0, uses, estimate, base)
    if policy.wants.all_resident:
        started = _started(policy, uses.shape, tiers)
        if not started.any():
            return Foreseen(0.0, False, base)
        kl = None if estimate is None else estimate.of_uses(uses, started)
        return Foreseen(kl, False, base)
    alike = policy.asked_mix(np.ones(uses.shape)).mean(axis=(0, 1)).tolist()
    shares = [*zip(tiers, alike, strict=True)]
    skipped = max(0.0, 1.0 - sum(share for _, share in shares))
    spends = getattr(policy.settings, ALLOWED_LOSS) if isinstance(policy, SpendsLoss) else 0.0
    return _of_shares([*shares, (SKIP, skipped)], spends, uses, estimate, base)


def _of_shares(
    shares: Sequence[tuple[int, float]],
    spends: float,
    uses: np.ndarray,
    estimate: Loses | None,
    base: str,
) -> Foreseen:
    """Of the shares of the uses that are computed in each tier of the file, and what is spent
    besides."""
    lost = [(tier, share) for tier, share in shares if tier and share > 1e-9]
    if not lost:
        return Foreseen(spends, False, base)
    if estimate is None:
        return Foreseen(None, False, base)
    kl = spends
    for tier, share in lost:
        kl += share * estimate.of_uses(uses, np.full(uses.shape, tier, np.uint8))
    return Foreseen(kl, lost[0][1] < 1.0 - 1e-9, base)


def _started(policy: Policy, size: tuple[int, ...], tiers: tuple[int, ...]) -> np.ndarray:
    """The tier of the file in which a policy starts each expert, uint8 [n_layers, n_expert]. The
    policy stays as it is."""
    found = np.full(size, tiers[-1], np.uint8)
    for layer, expert, tier in deepcopy(policy).start():
        found[layer, expert] = tiers[tier]
    return found
