"""What a benchmark measures: its options, and the list of cases they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gguf_tools import synthetic
from orchestrator.bench.job import Part, context_tokens, decode, prompt, settle
from orchestrator.errors import ConfigError

# A quick pass: tiny model, caps that leave a few experts of room, seconds in all.
QUICK_SHAPE = "tiny-olmoe"
DEMO = "demo"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """shape: experts of a random-weight model, or "demo" for the trained one, whose tokens
    come from text. caps: shares of the single-precision file that a process may take.

    tokens: measured decode steps after `warmup` unmeasured ones; max_seconds ends the
    decode steps of one process early (at least 8 are measured). quick: a tiny model. It and
    the demo are smaller than the process around them: the expert slots are capped instead of
    the whole process. Every system evaluates n_ubatch tokens at once. layers: of a
    random-weight model, in the place of the shape's few. Raises ConfigError.
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
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.shape not in synthetic.PRESETS and self.shape != DEMO:
            known = ", ".join((*synthetic.PRESETS, DEMO))
            raise ConfigError(f"unknown shape '{self.shape}': known are {known}")
        if self.routing not in synthetic.ROUTINGS:
            known = ", ".join(synthetic.ROUTINGS)
            raise ConfigError(f"unknown routing '{self.routing}': known are {known}")
        if not self.caps or not all(0 < cap < 1 for cap in self.caps):
            raise ConfigError("caps are percentages of the file between 0 and 100")
        if len({f"{cap:.0%}" for cap in self.caps}) < len(self.caps):
            raise ConfigError("caps must differ by whole percentages")
        for name in ("tokens", "prompt_tokens", "runs", "io_threads", "threads", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1")
        for name in ("warmup", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0")
        if self.layers is not None and self.trained:
            raise ConfigError("layers are for a random-weight model: the demo has its own")
        if not 0 <= self.retention <= 1:
            raise ConfigError("retention must be from 0 to 1")
        if not 0 <= self.max_seconds < math.inf:
            raise ConfigError("max_seconds must be at least 0")

    @property
    def trained(self) -> bool:
        """Whether the model is the demo, not one of random weights."""
        return self.shape == DEMO

    @property
    def model_name(self) -> str:
        """The shape that really runs."""
        return QUICK_SHAPE if self.quick and not self.trained else self.shape

    @property
    def caps_process(self) -> bool:
        """Whether a cap holds for the whole process, not for the expert slots alone."""
        return not (self.quick or self.trained)

    @property
    def marks(self) -> bool:
        """Whether decode steps are marked with what else happened in them."""
        return False

    @property
    def n_ubatch(self) -> int:
        """Tokens that are evaluated at once."""
        return self.prompt_tokens

    @property
    def sequences(self) -> int:
        """How many sequences may decode together."""
        return max((part.sequences for part in self.parts()), default=0)

    @property
    def n_ctx(self) -> int:
        """Context that holds what is measured."""
        return context_tokens(self.parts())

    def parts(self) -> list[Part]:
        """What every process does: a prompt, unmeasured decode steps, measured ones."""
        return [
            prompt(self.prompt_tokens),
            settle(self.warmup, self.max_seconds / 3),
            decode(self.tokens, self.max_seconds),
        ]


def parse_caps(text: str) -> tuple[float, ...]:
    """Shares from percentages, "60,80" -> (0.6, 0.8). Raises ConfigError."""
    try:
        return tuple(float(part.strip().rstrip("%")) / 100 for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of percentages such as 60,80") from None


def parse_numbers(text: str, what: str = "numbers") -> tuple[int, ...]:
    """Numbers from "8,16,32"; what they are, for the error. Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of {what} such as 8,16,32") from None


@dataclass(frozen=True, slots=True)
class Case:
    """One system under one cap. settings: of PlainModel, or of Config for our engine.

    role says what a report does with it: "resident" (everything in memory, on the plain path),
    "reference" (the same on the managed path, which limits the others), "mmap" (what speed-ups
    refer to; "upstream" in `bench gpu`), "probe" (loaded to see what it takes), or "".
    one_token: expert slots for one token of one layer, so that nothing that was read is there
    when it is needed again.
    """

    name: str
    system: str
    cap: float | None = None
    role: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    one_token: bool = False

    @property
    def key(self) -> str:
        return self.name if self.cap is None else f"{self.name} @{self.cap:.0%}"


REPACK, NO_REPACK = "upstream, repack", "upstream, no repack"
PLAIN, MANAGED = "our plain path", "our managed path"
SKIPPING = "dymoe 4/0"
ONE_TIER = "dymoe 4, r=1"  # one precision with per-layer quotas and look-ahead

REFERENCE = Case(MANAGED, "engine", None, "reference", {"policy": "lru", "force_managed": True})
RESIDENT = (
    Case(REPACK, "upstream", None, "resident", {"mmap": False, "extra_bufts": True}),
    Case(NO_REPACK, "upstream", None, "resident", {"mmap": False}),
    Case(PLAIN, "engine", None, "resident", {"policy": "plain"}),
    REFERENCE,
)


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


def cases(options: BenchOptions) -> list[Case]:
    """Every case, in the order of the table."""
    listed = list(RESIDENT)
    for cap in options.caps:
        listed += [
            mapped(cap),
            Case("upstream mmap, repack", "upstream", cap, "", {"mmap": True, "extra_bufts": True}),
            *policies(cap, options.retention),
        ]
    return listed
