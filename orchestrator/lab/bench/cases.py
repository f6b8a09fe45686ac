"""The cases that benchmarks compare: one system under one cap each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.lab.bench.models import LOW


@dataclass(frozen=True, slots=True)
class Case:
    """One system under one cap. settings: of PlainModel, or of Config for our engine.

    role says what a report does with it: "upstream" (the better ones of its cap are what speeds
    and bounds refer to), "reference" (everything in memory on the managed path), "low" and "fewer"
    (upstream with everything in memory, all experts in the low precision, or fewer experts a token:
    what a mix computes), "mmap" (what speed-ups refer to), "probe" (loaded to see what it takes),
    or "".
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


def chosen(cases: list[Case], words: Sequence[str]) -> list[Case]:
    """The cases whose names have one of these words, all without words. Raises ConfigError where
    none is left."""
    found = [case for case in cases if not words or any(word in case.name for word in words)]
    if words and not found:
        names = ", ".join(dict.fromkeys(case.name for case in cases))
        raise ConfigError(f"--rows {','.join(words)}: no row is left of {names}")
    return found


PLAIN, MANAGED = "our plain path", "our managed path"
REFERENCE = Case(MANAGED, "engine", None, "reference", {"policy": "lru", "force_managed": True})


def resident(name: str, role: str, tier: str | None = None) -> list[Case]:
    """Upstream with everything in memory, at either flags."""
    flags = {"mmap": False, "extra_bufts": True}
    repacked = Case(f"{name}, repack", "upstream", None, role, flags, tier=tier)
    other = replace(repacked, name=f"{name}, no repack", settings={"mmap": False})
    return [repacked, other]


UPSTREAM = resident("upstream", "upstream")
# Everything in memory. Low and fewer experts compute less than the high precision with all of them.
RESIDENT = (
    *UPSTREAM,
    *resident(f"all {LOW}", "low", LOW),
    *resident("fewer experts", "fewer"),
    Case(PLAIN, "engine", None, "", {"policy": "plain"}),
    REFERENCE,
)


def uniform(cap: float, tier: str) -> Case:
    """All experts in a smaller type that fits whole: nothing is missed, and all lose alike."""
    flags = {"mmap": False, "extra_bufts": True}
    return Case(f"all {tier}", "upstream", cap, "", flags, tier=tier)


def mapped(cap: float) -> Case:
    """Upstream as most use it: the file mapped, and paged in under the cap."""
    return Case("upstream mmap", "upstream", cap, "mmap", {"mmap": True})


def global_lru(cap: float) -> Case:
    """Our null baseline."""
    return Case("lru", "engine", cap, "", {"policy": "lru", "force_managed": True})


def policies(cap: float, retention: float) -> list[Case]:
    """Every policy of ours under one cap. The first dymoe is one precision with quotas by layer and
    look-ahead."""
    dymoe = {"policy": "dymoe", "retention": retention}
    return [
        global_lru(cap),
        Case("dymoe 4, r=1", "engine", cap, "", {"policy": "dymoe", "retention": 1.0}),
        Case("dymoe 4/2", "engine", cap, "", {**dymoe, "low_tier": LOW}),
        Case("dymoe 4/0", "engine", cap, "", {**dymoe, "low_tier": "skip"}),
        Case("dynaexq 4/2", "engine", cap, "", {"policy": "dynaexq", "low_tier": LOW}),
    ]


# Table 3 of the DyMoE paper.
ON_DEMAND = "1 load on demand"
CACHE, CACHE_AHEAD = "2 cache", "3 cache + prefetch"
MIXED, MIXED_AHEAD = "4 cache + 4/2", "5 cache + 4/2 + prefetch"
SKIP_AHEAD = "6 cache + 4/0 + prefetch"
PAPER = (ON_DEMAND, CACHE, CACHE_AHEAD, MIXED, MIXED_AHEAD, SKIP_AHEAD)


def paper_rows(cap: float, retention: float) -> list[Case]:
    """The six rows of that table under one cap.

    Row 1 has slots for one token of one layer: what was read is gone when it is needed again.
    Rows 2 and 3 use one precision; rows 4 to 6 give retention as the share of critical experts.
    Look-ahead is on: "auto" would mix in the steps of its trials without.
    """

    def dymoe(name: str, r: float, prefetch: str, **more: str) -> Case:
        settings = {"policy": "dymoe", "retention": r, "prefetch": prefetch, **more}
        return Case(name, "engine", cap, "", settings)

    lru = {"policy": "lru", "force_managed": True}
    return [
        Case(ON_DEMAND, "engine", cap, "", lru, one_token=True),
        dymoe(CACHE, 1.0, "off"),
        dymoe(CACHE_AHEAD, 1.0, "on"),
        dymoe(MIXED, retention, "off", low_tier=LOW),
        dymoe(MIXED_AHEAD, retention, "on", low_tier=LOW),
        dymoe(SKIP_AHEAD, retention, "on", low_tier="skip"),
    ]
