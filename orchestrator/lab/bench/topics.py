"""`moe-edge bench topics`: dynaexq while the topic changes, and context beside it. How even its
steps stay, how soon the hot set has followed, and what the exchange of experts costs on a steady
text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.allocation.pools import nominal_bits
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import MANAGED, NO_REPACK, REPACK, RESIDENT, Case, mapped
from orchestrator.lab.bench.job import Part, decode, prompt, settle
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import LOW
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import MIB, NAME, at_cap, by_cap, goal_table, tokens_of
from orchestrator.lab.bench.rows import Result
from orchestrator.lab.bench.topics_figures import (
    ADAPTED,
    STEADY,
    WINDOW,
    placement_goals,
    topic_goals,
    topic_rows,
    window_name,
)
from orchestrator.lab.lists import numbers
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.policy.dynaexq import DynaExq
from orchestrator.settings import FROM_1, again, setting

ALL_LOW, FIXED, RESTLESS = "all low", "fixed hot set", "no hysteresis"
CONTEXT = "context"
COLUMNS = (
    NAME,
    Column("TPOT", "tpot_ms_p50", fixed(2), "ms"),
    Column("p99", "tpot_ms_p99", fixed(2)),
    Column("p99/p50", "p99_of_p50", fixed(2)),
    Column("of res.", "of_spread", fixed(2)),
    Column("speed", "of_speed", fixed(2)),
    Column("high", "high", percent(1), "%"),
    Column("adapted", "adapted", fixed(0)),
    Column("promoted/min", lambda row: _promoted(row)),
    Column("waited", "waited_ms", fixed(1), "ms"),
)


@dataclass(frozen=True)
class TopicOptions(BenchOptions):
    """Conversations of `tokens` decode steps, in turn about one topic and another, `switches`
    changes in all; then one of `steady` steps that stays with its topic. The topics of a trained
    model are kinds of its conversations; a random one gets tokens of one half of its vocabulary or
    the other, which with the routing "topics" use different experts most.

    updates: intervals of dynaexq in decode steps, a case each. rates: what its transitions may
    read, in MiB a second, 0 for no limit, a case each at the usual interval. Raises ConfigError.
    """

    routing: str = again(BenchOptions, "routing", "topics")
    caps: tuple[float, ...] = again(BenchOptions, "caps", (0.8,))
    tokens: int = again(BenchOptions, "tokens", 256)
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 32)
    retention: float = again(BenchOptions, "retention", option=False)
    switches: int = setting(4, "Changes of the topic.", within=FROM_1)
    steady: int = setting(512, "Decode steps at the end that stay with one topic.", within=FROM_1)
    updates: tuple[int, ...] = setting(
        (8, 16, 32, 64, 128),
        "Intervals of dynaexq in decode steps.",
        notation=numbers(),
    )
    rates: tuple[int, ...] = setting(
        (),
        "What its exchange of experts may read, in MiB a second, 0 for no limit, as 16,64,256,0: "
        "a row each.",
        notation=numbers(),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 2 * WINDOW:
            raise ConfigError(f"tokens must be at least {2 * WINDOW}, two windows")
        if not self.updates or min(self.updates) < 1 or len(set(self.updates)) < len(self.updates):
            raise ConfigError("updates are different intervals of at least one step, as 8,16,32")
        if len(set(self.rates)) < len(self.rates) or min(self.rates, default=0) < 0:
            raise ConfigError("rates are different numbers of MiB a second, as 16,64,0")

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

    def described(self, *more: str) -> dict[str, Any]:
        found = super().described("switches", "steady", *more)
        return found | {"update_steps": self.usual}


def topic_cases(options: TopicOptions) -> list[Case]:
    """Everything in memory in high, and upstream so; under each cap, upstream mmap, all low, a
    hot set that never changes, context, and dynaexq by interval, without hysteresis, and by
    rate."""
    listed = [case for case in RESIDENT if case.name in (REPACK, NO_REPACK, MANAGED)]
    for cap in options.caps:
        base = {"policy": "dynaexq", "low_tier": LOW}
        usual = {**base, "update_steps": options.usual}
        placed = {**base, "policy": "context", "near_bits": float(nominal_bits(LOW))}

        def case(name: str, settings: dict[str, Any], cap: float = cap, **more: Any) -> Case:
            return Case(name, "engine", cap, "", {**settings, **more})

        listed += [
            mapped(cap),
            case(ALL_LOW, base, hot_experts=0),
            case(FIXED, base, update_steps=0),
            case(CONTEXT, placed),
            *(case(f"every {n} steps", base, update_steps=n) for n in options.updates),
            case(RESTLESS, usual, hysteresis=0.0),
            *(case(rate_name(n), usual, transition_rate=n * MIB) for n in options.rates),
        ]
    return listed


def rate_name(mib_per_s: int) -> str:
    return f"{mib_per_s} MiB/s" if mib_per_s else "no rate limit"


class Topics(Benchmark[Loop[TopicOptions]]):
    """Conversations about one topic and another."""

    options = TopicOptions
    listed = staticmethod(topic_cases)

    def figures(self, loop: Loop[TopicOptions], measured: Measured) -> Result:
        switches = loop.options.switches
        return {"cases": topic_rows(switches, measured.listed, measured.results, loop.limit_bytes)}

    def goals(self, loop: Loop[TopicOptions], rows: Sequence[Result]) -> list[Result]:
        usual = topic_goals(rows, f"every {loop.options.usual} steps", RESTLESS)
        return usual + placement_goals(rows, CONTEXT, ALL_LOW)

    def intro(self, report: Result) -> list[str]:
        options = report["options"]
        return [
            f"{options['switches']} changes between two topics, {options['tokens']} decode steps "
            f"of {tokens_of(report)} tokens each; then {options['steady']} steps on one; medians "
            f"of {options['runs']} runs in turn",
            "of res.: p99/p50 of that of our managed path with everything resident; speed: of its "
            "speed; high: routed experts that were high, over all steps; adapted: decode steps "
            f"until that share is within {100 - 100 * ADAPTED:.0f} % of what it comes to; "
            "promoted a minute while topics change, and on the steady text",
        ]

    def tables(self, report: Result) -> list[Table]:
        found = [
            Table(title, COLUMNS, rows, _best_interval(rows)) for title, rows in by_cap(report)
        ]
        if report["goals"]:
            found.append(
                goal_table(
                    f"dynaexq, an update every {report['options']['update_steps']} steps, and "
                    "context, against their goals",
                    report["goals"],
                    Column("", at_cap("name"), left=True),
                    Column("measured", "value", fixed(2)),
                    Column("goal", "goal"),
                )
            )
        return found


def _promoted(row: Row) -> str | None:
    """Experts promoted a minute, while the topic changes and on the steady text."""
    if "high" not in row:
        return None
    return f"{row['promotions_per_minute']:.0f}, {row['steady_promotions_per_minute']:.0f}"


def _best_interval(rows: Sequence[Result]) -> list[str]:
    """Says which interval kept most routed experts high, where there are several."""
    timed = [row for row in rows if row["name"].startswith("every ") and "high" in row]
    if len(timed) < 2:
        return []
    return [f"highest share of high: {max(timed, key=lambda row: row['high'])['name']}"]
