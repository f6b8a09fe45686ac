"""`moe-edge bench topics`: dynaexq while the topic changes. How even its steps stay, how soon the
hot set has followed, and what the exchange of experts costs on a steady text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.bench.job import Part, decode, prompt, settle
from orchestrator.bench.loop import Loop
from orchestrator.bench.models import LOW, Note
from orchestrator.bench.plan import MANAGED, NO_REPACK, REPACK, RESIDENT, BenchOptions, Case, mapped
from orchestrator.bench.topics_report import STEADY, WINDOW, goals, topic_rows, window_name
from orchestrator.errors import ConfigError
from orchestrator.policy.dynaexq import DynaExq

ALL_LOW, FIXED, RESTLESS = "all low", "fixed hot set", "no hysteresis"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TopicOptions(BenchOptions):
    """Conversations of `tokens` decode steps, in turn about one topic and another, `switches`
    changes in all; then one of `steady` steps that stays with its topic. The topics of a trained
    model are kinds of its conversations; a random one gets tokens of one half of its vocabulary or
    the other, which with the routing "topics" use different experts most.

    updates: intervals of dynaexq in decode steps, a case each. rates: what its transitions may
    read, in MiB a second, 0 for no limit, a case each at the usual interval. Raises ConfigError.
    """

    routing: str = "topics"
    caps: tuple[float, ...] = (0.8,)
    tokens: int = 256
    prompt_tokens: int = 32
    switches: int = 4
    steady: int = 512
    updates: tuple[int, ...] = (8, 16, 32, 64, 128)
    rates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        BenchOptions.__post_init__(self)
        for name in ("switches", "steady"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.tokens < 2 * WINDOW:
            raise ConfigError(f"tokens must be at least {2 * WINDOW}, two windows")
        if not self.updates or min(self.updates) < 1 or len(set(self.updates)) < len(self.updates):
            raise ConfigError("updates are different intervals of at least one step, as 8,16,32")
        if len(set(self.rates)) < len(self.rates) or min(self.rates, default=0) < 0:
            raise ConfigError("rates are different numbers of MiB a second, as 16,64,0")

    @property
    def marks(self) -> bool:
        return True

    @property
    def usual(self) -> int:
        """The interval of all cases but those that are about intervals: the usual one, or the
        first."""
        usual = DynaExq.Settings().update_steps
        return usual if usual in self.updates else self.updates[0]

    def parts(self) -> list[Part]:
        seconds = self.max_seconds / (self.switches + 2)
        parts = [prompt(self.prompt_tokens), settle(self.warmup, seconds)]
        for at in range(self.switches + 1):
            parts.append(prompt(self.prompt_tokens)._replace(topic=at % 2))
            windows = self.tokens // WINDOW
            parts += [
                decode(WINDOW, seconds / windows, window_name(at))._replace(topic=at % 2)
            ] * windows
        last = self.switches % 2
        parts.append(prompt(self.prompt_tokens)._replace(topic=last))
        parts.append(decode(self.steady, seconds, STEADY)._replace(topic=last))
        return parts


def topic_cases(options: TopicOptions) -> list[Case]:
    """Everything in memory in high, and upstream so; under each cap, upstream mmap, all low, a
    hot set that never changes, and dynaexq by interval, without hysteresis, and by rate."""
    listed = [case for case in RESIDENT if case.name in (REPACK, NO_REPACK, MANAGED)]
    for cap in options.caps:
        base = {"policy": "dynaexq", "low_tier": LOW}
        usual = {**base, "update_steps": options.usual}

        def case(name: str, settings: dict[str, Any], cap: float = cap, **more: Any) -> Case:
            return Case(name, "engine", cap, "", {**settings, **more})

        listed += [
            mapped(cap),
            case(ALL_LOW, base, hot_experts=0),
            case(FIXED, base, update_steps=0),
            *(case(f"every {n} steps", base, update_steps=n) for n in options.updates),
            case(RESTLESS, usual, hysteresis=0.0),
            *(case(rate_name(n), usual, transition_rate=n * MIB) for n in options.rates),
        ]
    return listed


def rate_name(mib_per_s: int) -> str:
    return f"{mib_per_s} MiB/s" if mib_per_s else "no rate limit"


def run_topics(options: TopicOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measures all cases and returns one JSON-ready object, as bench.run does."""
    loop = Loop.prepare(options, note)
    listed = topic_cases(options)
    measured = loop.run(listed)
    rows = topic_rows(options.switches, listed, measured.results, loop.limit_bytes)
    report = loop.describe(measured)
    report["options"] |= {
        "switches": options.switches,
        "steady": options.steady,
        "update_steps": options.usual,
    }
    return report | {"cases": rows, "goals": goals(rows, f"every {options.usual} steps", RESTLESS)}
