"""What a benchmark measures: its options, and the list of cases they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gguf_tools import synthetic
from orchestrator.errors import ConfigError

# A quick pass: tiny model, caps that leave a few experts of room, seconds in all.
QUICK_SHAPE = "tiny-olmoe"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """caps: shares of the single-precision file that a process may take in memory.

    tokens: measured decode steps after `warmup` unmeasured ones; max_seconds ends the
    decode steps of one process early (at least 8 are measured). quick: a tiny model and
    the expert slots capped instead of the whole process. prompt_tokens is also the
    micro-batch of every system. Raises ConfigError.
    """

    shape: str = "olmoe"
    routing: str = "uniform"
    caps: tuple[float, ...] = (0.6, 0.8)
    tokens: int = 128
    warmup: int = 16
    prompt_tokens: int = 128
    runs: int = 2
    retention: float = 0.75
    threads: int | None = None
    io_threads: int = 4
    max_seconds: float = 45.0
    seed: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
        if self.shape not in synthetic.PRESETS:
            known = ", ".join(synthetic.PRESETS)
            raise ConfigError(f"unknown shape '{self.shape}': known are {known}")
        if self.routing not in synthetic.ROUTINGS:
            known = ", ".join(synthetic.ROUTINGS)
            raise ConfigError(f"unknown routing '{self.routing}': known are {known}")
        if not self.caps or not all(0 < cap < 1 for cap in self.caps):
            raise ConfigError("caps are percentages of the file between 0 and 100")
        if len({f"{cap:.0%}" for cap in self.caps}) < len(self.caps):
            raise ConfigError("caps must differ by whole percentages")
        for name in ("tokens", "prompt_tokens", "runs", "io_threads", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1")
        for name in ("warmup", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0")
        if not 0 <= self.retention <= 1:
            raise ConfigError("retention must be from 0 to 1")
        if not 0 <= self.max_seconds < math.inf:
            raise ConfigError("max_seconds must be at least 0")

    @property
    def n_ctx(self) -> int:
        """Context that holds prompt and decode steps, in the units of the KV cache."""
        return -(-(self.prompt_tokens + self.warmup + self.tokens) // 256) * 256


def parse_caps(text: str) -> tuple[float, ...]:
    """Shares from percentages, "60,80" -> (0.6, 0.8). Raises ConfigError."""
    try:
        return tuple(float(part.strip().rstrip("%")) / 100 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of percentages such as 60,80") from None


@dataclass(frozen=True, slots=True)
class Case:
    """One system under one cap. settings: of PlainModel, or of Config for our engine.

    role says what the report does with it: "resident", "reference" (what the managed path
    is limited by), "mmap" (what speed-ups refer to), or "" .
    """

    name: str
    system: str
    cap: float | None = None
    role: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.name if self.cap is None else f"{self.name} @{self.cap:.0%}"


REPACK, NO_REPACK = "upstream, repack", "upstream, no repack"
PLAIN, MANAGED = "our plain path", "our managed path"
ONE_TIER = "dymoe 4, r=1"  # one precision with per-layer quotas and look-ahead

RESIDENT = (
    Case(REPACK, "upstream", None, "resident", {"mmap": False, "extra_bufts": True}),
    Case(NO_REPACK, "upstream", None, "resident", {"mmap": False}),
    Case(PLAIN, "engine", None, "resident", {"policy": "plain"}),
    Case(MANAGED, "engine", None, "reference", {"policy": "lru", "force_managed": True}),
)


def cases(options: BenchOptions) -> list[Case]:
    """Every case, in the order of the table."""
    dymoe = {"policy": "dymoe", "retention": options.retention}
    listed = list(RESIDENT)
    for cap in options.caps:
        listed += [
            Case("upstream mmap", "upstream", cap, "mmap", {"mmap": True}),
            Case("upstream mmap, repack", "upstream", cap, "", {"mmap": True, "extra_bufts": True}),
            Case("lru", "engine", cap, "", {"policy": "lru", "force_managed": True}),
            Case(ONE_TIER, "engine", cap, "", {"policy": "dymoe", "retention": 1.0}),
            Case("dymoe 4/2", "engine", cap, "", {**dymoe, "low_tier": "q2_k"}),
            Case("dymoe 4/0", "engine", cap, "", {**dymoe, "low_tier": "skip"}),
        ]
    return listed
