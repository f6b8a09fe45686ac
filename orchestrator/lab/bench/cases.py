"""The cases that benchmarks compare: one system under one cap each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One system under one cap. settings: of PlainModel, or of Config for our engine.

    role says what a report does with it: "resident" (everything in memory, on our plain path, or
    by upstream on a GPU), "upstream" (by upstream at some flags: the better ones bound the rows),
    "reference" (the same on the managed path), "low" and "fewer" (upstream with everything in
    memory, all experts in the low precision, or fewer experts a token: what a mix computes),
    "mmap" (what speed-ups refer to; "upstream" in `bench gpu`), "probe" (loaded to see what it
    takes), or "".
    one_token: expert slots for one token of one layer, so that nothing that was read is there
    when it is needed again. tier: all experts are of this type, in the place of the high one.
    """

    name: str
    system: str
    cap: float | None = None
    role: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    one_token: bool = False
    tier: str | None = None

    @property
    def key(self) -> str:
        return self.name if self.cap is None else f"{self.name} @{self.cap:.0%}"


REPACK, NO_REPACK = "upstream, repack", "upstream, no repack"
PLAIN, MANAGED = "our plain path", "our managed path"
SKIPPING = "dymoe 4/0"
ONE_TIER = "dymoe 4, r=1"  # one precision with per-layer quotas and look-ahead

REFERENCE = Case(MANAGED, "engine", None, "reference", {"policy": "lru", "force_managed": True})
RESIDENT = (
    Case(REPACK, "upstream", None, "upstream", {"mmap": False, "extra_bufts": True}),
    Case(NO_REPACK, "upstream", None, "upstream", {"mmap": False}),
    Case(PLAIN, "engine", None, "resident", {"policy": "plain"}),
    REFERENCE,
)

# What computes less than the high precision with all its experts, at either flags.
LESS = tuple(
    Case(
        f"{name}{flags}", "upstream", None, role, {"mmap": False, "extra_bufts": repack}, tier=tier
    )
    for name, role, tier in (("all q2_k", "low", "q2_k"), ("fewer experts", "fewer", None))
    for flags, repack in ((", repack", True), (", no repack", False))
)


def uniform(cap: float, tier: str) -> list[Case]:
    """All experts in a smaller type that fits whole: nothing is missed, and all lose alike."""
    flags = {"mmap": False, "extra_bufts": True}
    return [
        Case(f"all {tier}, upstream", "upstream", cap, "", flags, tier=tier),
        Case(f"all {tier}, our plain path", "engine", cap, "", {"policy": "plain"}, tier=tier),
    ]


def mapped(cap: float) -> Case:
    """Upstream as most use it: the file mapped, and paged in under the cap."""
    return Case("upstream mmap", "upstream", cap, "mmap", {"mmap": True})


def global_lru(cap: float) -> Case:
    """Our null baseline."""
    return Case("lru", "engine", cap, "", {"policy": "lru", "force_managed": True})


def policies(cap: float, retention: float) -> list[Case]:
    """Every policy of ours under one cap."""
    dymoe = {"policy": "dymoe", "retention": retention}
    return [
        global_lru(cap),
        Case(ONE_TIER, "engine", cap, "", {"policy": "dymoe", "retention": 1.0}),
        Case("dymoe 4/2", "engine", cap, "", {**dymoe, "low_tier": "q2_k"}),
        Case(SKIPPING, "engine", cap, "", {**dymoe, "low_tier": "skip"}),
        Case("dynaexq 4/2", "engine", cap, "", {"policy": "dynaexq", "low_tier": "q2_k"}),
    ]
