"""The settings of one engine: frozen, built once, checked where they come in."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError, SettingError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
SCHEDULES = ("cosine", "linear", "flat")
PREFETCHES = ("auto", "on", "off")
MISSES = ("auto", "copy", "read", "compute")
# Bytes per second that an exchange of versions may read beside decoding.
TRANSITION_RATE = 128 << 20
# llama.cpp takes 256 sequences, one of them the conversation.
MOST_SEQUENCES = 255
_TOO_LARGE = 1 << 60
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes from "6GiB", "1.5 GiB", "500MB" or "4096".

    Raises ConfigError for anything else, zero and what no machine could have included.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"'{text}' is not a size: write it as 6GiB, 500MB or a number of bytes")
    size_bytes = int(min(float(match.group(1)) * factor, float(_TOO_LARGE)))
    if size_bytes <= 0:
        raise ConfigError(f"the size '{text}' must be more than zero bytes")
    if size_bytes >= _TOO_LARGE:
        raise ConfigError(f"the size '{text}' is more than any machine has")
    return size_bytes


def native_log_enabled() -> bool:
    """Whether llama.cpp's own log goes to stderr (MOE_EDGE_LOG set and not 0)."""
    return os.environ.get("MOE_EDGE_LOG", "") not in ("", "0")


@dataclass(frozen=True, slots=True)
class Config:
    """One engine's settings; sizes in bytes. Make it with Config.build.

    ram caps everything the model takes of the host's memory, vram of the GPU's; expert_ram the
    expert slots alone. device: "auto" is the first GPU that the library was built for, or the
    host where there is none; "cpu", or a device's name, as "cuda0". misses: how a GPU gets the
    experts that it lacks: it copies them ("copy"), reads them where they are in the host's memory
    ("read"), the host computes them there ("compute"), or each the way that is quickest by what
    is measured at the start ("auto", which None is). policy
    None lets the planner choose; "plain" is the upstream path without a store. retention
    None is 1 where one precision is used and nothing skipped, else 0.75.
    low_tier "skip" drops the experts that are not critical. schedule: how the share of
    critical experts falls with depth. n_ahead is the look-ahead depth, 0 for none; prefetch
    "auto" stops it while it does not pay. importance: where a prompt's token scores come from,
    the attention of the last importance_window queries ("window"), that of all of them
    ("exact", without flash attention), or every token alike ("load"); heavy_hitters is the
    share of tokens that count. prompts_pass lets the experts that a prompt uses less pass
    through a part of the slots instead of taking them all. exact_tiers computes a low request
    in low even where the high copy is in memory, to measure quality. logits_all keeps room for
    the logits of every token of a batch, which evaluation needs and chatting does not.
    sequences: how many may decode together (Engine.decode_batch) beside the conversation; all
    of them share the context's ctx tokens. max_tokens None: an answer may be as long as the
    context has room.

    Of dynaexq: update_steps, decode steps between two updates of the hot sets (a prompt's part
    ends an interval too), 0 for none; hotness_decay, the alpha of its moving average; hysteresis,
    in mean scores of a layer, and rank_slack, in ranks; hot_experts, the most of a layer that may
    be high; transition_rate, bytes per second that changes may read, 0 for no limit; profile, a
    file that hotness is read from and written to; remember keeps it in the user cache instead.
    """

    model: Path
    low: Path | None = None
    ram: int | None = None
    expert_ram: int | None = None
    vram: int | None = None
    device: str = "auto"
    misses: str | None = None
    policy: str | None = None
    retention: float | None = None
    high_tier: str | None = None
    low_tier: str | None = None
    ctx: int = 4096
    max_tokens: int | None = None
    temp: float = 0.7
    top_p: float = 0.95
    seed: int | None = None
    threads: int | None = None
    system: str | None = None
    n_ubatch: int = 512
    schedule: str = "cosine"
    importance: str = "window"
    importance_window: int = 32
    heavy_hitters: float = 0.4
    update_steps: int = 32
    hotness_decay: float = 0.8
    hysteresis: float = 0.25
    rank_slack: int = 0
    hot_experts: int | None = None
    transition_rate: int | None = None
    profile: Path | None = None
    remember: bool = False
    prompts_pass: bool = True
    prefetch: str = "auto"
    exact_tiers: bool = False
    n_ahead: int = 1
    io_threads: int = 4
    use_extra_bufts: bool | None = None
    force_managed: bool = False
    renormalize: bool = False
    direct_io: bool = True
    logits_all: bool = False
    sequences: int = 0

    @classmethod
    def build(cls, **settings: Any) -> Config:
        """The checked configuration. Raises ConfigError for an unknown key (with the
        nearest known name), a value of the wrong type, or one out of range."""
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown setting '{key}'{hint}")
        if settings.get("model") is None:
            raise ConfigError("the setting 'model' is missing")
        for key in ("model", "low", "profile"):
            if isinstance(settings.get(key), str):
                settings[key] = Path(settings[key])
        config = cls(**settings)
        config._check()
        return config

    def with_changes(self, **settings: Any) -> Config:
        """A checked copy with some settings replaced."""
        unchanged = {field.name: getattr(self, field.name) for field in fields(self)}
        return Config.build(**(unchanged | settings))

    @property
    def transition_bytes_per_s(self) -> int:
        """transition_rate, or what it is where nothing is said."""
        return TRANSITION_RATE if self.transition_rate is None else self.transition_rate

    def _check(self) -> None:
        for name, kinds, optional in _TYPES:
            value = getattr(self, name)
            if value is None and optional:
                continue
            wrong_bool = isinstance(value, bool) and bool not in kinds
            if not isinstance(value, kinds) or wrong_bool:
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise SettingError(name, f"must be {wanted}, not {value!r}")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                upper = f" to {high}" if high != math.inf else " or more"
                raise SettingError(name, f"must be {low}{upper}, not {value}")
        for name, known in _CHOICES:
            value = getattr(self, name)
            if value is not None and value not in known:
                raise SettingError(name, f"must be {_listed(known)}, not '{value}'")


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1]


_CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("schedule", SCHEDULES),
    ("importance", ("window", "exact", "load")),
    ("prefetch", PREFETCHES),
    ("misses", MISSES),
)

_TYPES: tuple[tuple[str, tuple[type, ...], bool], ...] = (
    ("model", (Path,), False),
    ("low", (Path,), True),
    ("ram", (int,), True),
    ("expert_ram", (int,), True),
    ("vram", (int,), True),
    ("device", (str,), False),
    ("misses", (str,), True),
    ("policy", (str,), True),
    ("retention", (float, int), True),
    ("high_tier", (str,), True),
    ("low_tier", (str,), True),
    ("ctx", (int,), False),
    ("max_tokens", (int,), True),
    ("temp", (float, int), False),
    ("top_p", (float, int), False),
    ("seed", (int,), True),
    ("threads", (int,), True),
    ("system", (str,), True),
    ("n_ubatch", (int,), False),
    ("n_ahead", (int,), False),
    ("schedule", (str,), False),
    ("importance", (str,), False),
    ("importance_window", (int,), False),
    ("heavy_hitters", (float, int), False),
    ("update_steps", (int,), False),
    ("hotness_decay", (float, int), False),
    ("hysteresis", (float, int), False),
    ("rank_slack", (int,), False),
    ("hot_experts", (int,), True),
    ("transition_rate", (int,), True),
    ("profile", (Path,), True),
    ("remember", (bool,), False),
    ("prompts_pass", (bool,), False),
    ("prefetch", (str,), False),
    ("exact_tiers", (bool,), False),
    ("io_threads", (int,), False),
    ("use_extra_bufts", (bool,), True),
    ("force_managed", (bool,), False),
    ("renormalize", (bool,), False),
    ("direct_io", (bool,), False),
    ("logits_all", (bool,), False),
    ("sequences", (int,), False),
)

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("ram", 1, math.inf),
    ("expert_ram", 1, math.inf),
    ("vram", 1, math.inf),
    ("retention", 0.0, 1.0),
    ("ctx", 8, 2**24),
    ("max_tokens", 1, 2**24),
    ("temp", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("seed", 0, 2**32 - 1),
    ("threads", 1, 1024),
    ("n_ubatch", 1, 65536),
    ("n_ahead", 0, 4),
    ("importance_window", 1, 65536),
    ("heavy_hitters", 0.0, 1.0),
    ("update_steps", 0, 2**24),
    ("hotness_decay", 0.0, 1.0),
    ("hysteresis", 0.0, 1e6),
    ("rank_slack", 0, 65535),
    ("hot_experts", 0, 65535),
    ("transition_rate", 0, 2**48),
    ("io_threads", 1, 64),
    ("sequences", 0, MOST_SEQUENCES),
)
