"""What the studies of DynaExq share: every expert in memory in one of two tiers, the hot ones
high, whatever --ram says."""

from __future__ import annotations

from typing import Any

from orchestrator.allocation.pools import nominal_bits
from orchestrator.errors import ConfigError
from orchestrator.lab.study.subject import Settings, Subject
from orchestrator.memory.footprint import model_shape
from orchestrator.policy.dynaexq import HIGH, LOW, resident_plan

# Of hot sets that are chosen at random.
SEEDS = (1, 2, 3)
NEVER = {"update_steps": 0}


class Residency:
    """The high and the low tier of a subject, and what memory they take."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        with subject.model() as model:
            names = [tier.name for tier in model.tiers]
            tiers = (names.index(subject.high), names.index(subject.low))
            self.shape = model_shape(model, tiers)

    def uniform_bytes(self, tier: int) -> int:
        """Slot bytes of every expert in one of the two tiers."""
        return self.shape.all_slot_bytes(tier)

    def budget_bytes(self, n_high: int) -> int:
        """The least budget that holds n_high experts of each layer high, and what swaps need."""
        plenty = 2 * (self.uniform_bytes(HIGH) + self.uniform_bytes(LOW))
        found = resident_plan(self.shape, plenty, n_high)
        if found is None:
            raise ConfigError("the model has no experts to hold in two precisions")
        return found[0].plan().total_bytes

    def counts(self, shares: tuple[float, ...]) -> list[int]:
        """So many experts of a layer as these shares are, one at least."""
        return sorted({max(1, round(share * self.shape.n_expert)) for share in shares})

    def settings(self, n_high: int, **more: Any) -> Settings:
        """Settings: the n_high hottest experts of each layer high, the first ones where nothing is
        known of their use."""
        return {
            "policy": "dynaexq",
            "high_tier": self.subject.high,
            "low_tier": self.subject.low,
            "ram": None,
            "expert_ram": self.budget_bytes(n_high),
            "hot_experts": n_high,
            **more,
        }

    def placed(self, n_high: int) -> Settings:
        """Settings: in the same bytes, with the policy that places experts by each prompt: as many
        of them high as fit, n_high at most."""
        bits = float(nominal_bits(self.subject.low))
        return self.settings(n_high, policy="context", hot_experts=None, near_bits=bits)
