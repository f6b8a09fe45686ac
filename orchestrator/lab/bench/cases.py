"""Benchmark cases: each is one system under one cap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from orchestrator.errors import ConfigError
from orchestrator.lab.bench.models import LOW
from orchestrator.policy import POLICIES


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a benchmark: one system under one memory cap. It becomes a row of a table.

    - system: "upstream" (upstream llama.cpp, with settings of PlainModel) or "engine" (ours, with
      settings of Config).
    - cap: the memory cap as a fraction; None for no cap. A benchmark that limits the whole process
      takes this fraction of the model file's size. A benchmark that limits the memory for experts,
      or GPU memory, takes this fraction of the experts' size.
    - one_token: the memory for experts has about the size of the experts of one token in one layer.
      The cap does not change this size. Each expert is then read again for each token.
    - tier: type of all experts. None keeps the types of the model file.
    - role: how a report uses the case.

    The roles are:

    - "upstream": baseline of speeds and bounds. The fastest case of each cap counts.
    - "reference": our engine with a store that holds all experts.
    - "low", "fewer": llama.cpp with everything in memory, and with low-precision or fewer experts.
      They show how much compute time a mix of precisions saves.
    - "mmap": llama.cpp with a memory-mapped file, another baseline.
    - "probe": loaded only to measure its memory.
    - "": none of these.
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
    """Return the benchmark cases whose names contain at least one of the given words.

    If no words are given, return all cases. Raises ConfigError if words are given, but match no
    case.
    """
    found = [case for case in cases if not words or any(word in case.name for word in words)]
    if words and not found:
        names = ", ".join(dict.fromkeys(case.name for case in cases))
        raise ConfigError(f"--rows {','.join(words)} matches no row. The rows are: {names}")
    return found


PLAIN, MANAGED = "our plain path", "our managed path"
REFERENCE = Case(MANAGED, "engine", None, "reference", {"policy": "lru", "force_managed": True})


def resident_pair(name: str, role: str, tier: str | None = None) -> list[Case]:
    """Return two benchmark cases: llama.cpp with everything in memory, with and without repacking.

    Repacking changes the layout of weights for faster products. name: the beginning of the names of
    both cases. role: how a report uses the cases (see Case). tier: type of all experts; None is the
    high precision.
    """
    flags = {"mmap": False, "extra_bufts": True}
    repacked = Case(f"{name}, repack", "upstream", None, role, flags, tier=tier)
    other = replace(repacked, name=f"{name}, no repack", settings={"mmap": False})
    return [repacked, other]


UPSTREAM = resident_pair("upstream", "upstream")
# Cases with everything in memory. Those with low-precision or fewer experts show how much compute
# time a mix of precisions saves.
RESIDENT = (
    *UPSTREAM,
    *resident_pair(f"all {LOW}", "low", LOW),
    *resident_pair("fewer experts", "fewer"),
    Case(PLAIN, "engine", None, "", {"policy": "plain"}),
    REFERENCE,
)


def uniform(cap: float, tier: str) -> Case:
    """Return a benchmark case: llama.cpp with all experts in the type `tier`, under a memory cap.

    cap: the memory cap, as a fraction of the high-precision model (see Case). The caller must
    choose a type that is so small that a model with all experts in this type fits under the cap.
    Decoding then reads nothing from the disk.
    """
    flags = {"mmap": False, "extra_bufts": True}
    return Case(f"all {tier}", "upstream", cap, "", flags, tier=tier)


def mapped(cap: float) -> Case:
    """Return a benchmark case: llama.cpp with a memory-mapped model file, under a memory cap.

    Mapping the file is llama.cpp's default. The operating system then reads missing pages when they
    are used. cap: the fraction of the model that fits in memory (see Case).
    """
    return Case("upstream mmap", "upstream", cap, "mmap", {"mmap": True})


def global_lru(cap: float) -> Case:
    """Return a benchmark case: our engine with the baseline policy `lru`, under a memory cap.

    This policy has one LRU cache for the experts of all layers. cap: the fraction of the model that
    fits in memory (see Case).
    """
    return Case("lru", "engine", cap, "", {"policy": "lru", "force_managed": True})


def policies(cap: float, retention: float) -> list[Case]:
    """Return benchmark cases of our engine: one for each policy and mix of precisions.

    - cap: the memory cap of all cases, as the fraction of the model that fits in memory (see Case).
    - retention: the fraction of the experts that the policy dymoe keeps in the high precision.
    """
    dymoe = {"policy": "dymoe", "retention": retention}
    return [
        global_lru(cap),
        Case("dymoe 4, r=1", "engine", cap, "", {"policy": "dymoe", "retention": 1.0}),
        Case("dymoe 4/2", "engine", cap, "", {**dymoe, "low_tier": LOW}),
        Case("dymoe 4/0", "engine", cap, "", {**dymoe, "low_tier": "skip"}),
        Case("dynaexq 4/2", "engine", cap, "", {"policy": "dynaexq", "low_tier": LOW}),
    ]


def foreign_policies(cap: float, more: str | None) -> list[Case]:
    """Return one benchmark case for each policy that other installed packages provide.

    A case is a system that is measured under a memory cap, here our engine with a policy in its
    default settings.

    - cap: the memory cap, as the fraction of the model that fits in memory (see Case).
    - more: the name of a further policy, or None.

    Raises ConfigError if the processes that measure the cases cannot import a policy.
    """
    names = [*POLICIES.installed, *([] if more is None else [more])]
    return [
        Case(
            name,
            "engine",
            cap,
            "",
            {"policy": POLICIES.for_processes(name), "force_managed": True},
        )
        for name in dict.fromkeys(names)
    ]


# Names of the rows of Table 3 of the DyMoE paper.
ON_DEMAND = "row 1: load on demand"
CACHE, CACHE_AHEAD = "row 2: cache", "row 3: cache + prefetch"
MIXED, MIXED_AHEAD = "row 4: cache + 4/2", "row 5: 4/2 + prefetch"
SKIP_AHEAD = "row 6: 4/0 + prefetch"


class PaperRatios(NamedTuple):
    """The two speed-ups that the DyMoE paper prints for one row of its Table 3.

    Each row is DyMoE with some of its techniques. The speed-ups are relative to row 1, which loads
    each expert on demand. Each field is a pair: on a GPU with 16 GB, and on a GPU with 24 GB.

    - tpot: speed-up of the time per output token (decoding).
    - ttft: speed-up of the time to the first token.
    """

    tpot: tuple[float, float]
    ttft: tuple[float, float]


PAPER_RATIOS = {
    CACHE: PaperRatios((1.88, 2.20), (1.72, 2.08)),
    CACHE_AHEAD: PaperRatios((2.13, 2.52), (1.98, 2.58)),
    MIXED: PaperRatios((2.14, 3.51), (1.88, 4.21)),
    MIXED_AHEAD: PaperRatios((2.43, 3.71), (2.39, 4.81)),
    SKIP_AHEAD: PaperRatios((2.67, 4.26), (2.60, 5.43)),
}
PAPER = (ON_DEMAND, CACHE, CACHE_AHEAD, MIXED, MIXED_AHEAD, SKIP_AHEAD)


def paper_rows(cap: float, retention: float) -> list[Case]:
    """Return six benchmark cases, which reproduce rows 1 to 6 of Table 3 of the DyMoE paper.

    1. Each expert is loaded when a token needs it. There are no cache hits.
    2. All experts have high precision, and a cache keeps some experts in memory.
    3. Row 2 with prefetching.
    4. Row 2, but only the fraction `retention` of the experts has high precision. The other experts
       have low precision.
    5. Row 4 with prefetching.
    6. Row 5, but experts are skipped instead of computed in low precision.

    All cases have the memory cap `cap`, a fraction of the size of all experts.
    """

    # Prefetching is "on" instead of "auto", because "auto" also tries steps without prefetching.
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
