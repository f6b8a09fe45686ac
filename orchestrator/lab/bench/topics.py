"""`moe-edge bench topics`: dynaexq while the topic changes, and context beside it. How even its
steps stay, how soon the hot set has followed, and what the exchange of experts costs on a steady
text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from orchestrator.allocation.pools import nominal_bits
from orchestrator.errors import ConfigError
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import MANAGED, NO_REPACK, REPACK, RESIDENT, Case, mapped
from orchestrator.lab.bench.job import Part, decode, prompt, settle
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import LOW
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import MIB, NAME, at_cap, by_cap, goal_table, tokens_of
from orchestrator.lab.bench.rows import (
    Result,
    failure,
    median_ratio,
    named,
    store_figures,
    times_ms,
)
from orchestrator.lab.lists import numbers
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.policy.dynaexq import DynaExq
from orchestrator.settings import FROM_1, again, setting

Window = TypeVar("Window")
WINDOW = 16  # decode steps; the share of high experts is judged by windows
ADAPTED = 0.95
STEADY = "steady"


def window_name(conversation: int) -> str:
    """The name of the windows of one conversation, counted from 0."""
    return f"topic {conversation}"


def topic_rows(
    switches: int,
    listed: Sequence[Case],
    results: Mapping[str, Sequence[Result]],
    limit_bytes: Callable[[Case], int | None],
) -> list[Result]:
    """The figures of all cases, and each against everything resident and upstream mmap: of_speed,
    of_spread and of_mmap, medians over the runs of ratios within a run."""
    rows = [topic_row(switches, case, results[case.key], limit_bytes(case)) for case in listed]
    good = [row for row in rows if "error" not in row]
    resident = next((row for row in good if row["role"] == "reference"), None)
    for row in good:
        steps = row["tpot_ms_p50_runs"]
        if resident is not None and row is not resident:
            row["of_speed"] = median_ratio(resident["tpot_ms_p50_runs"], steps)
            row["of_spread"] = median_ratio(row["p99_of_p50_runs"], resident["p99_of_p50_runs"])
        for each in good:
            if each["role"] == "mmap" and each["cap"] == row["cap"] and each is not row:
                row["of_mmap"] = median_ratio(each["tpot_ms_p50_runs"], steps)
    return rows


def topic_row(switches: int, case: Case, runs: Sequence[Result], limit_bytes: int | None) -> Result:
    """The figures of one case, medians over its runs.

    tpot_ms and p99_of_p50: of the decode steps of the changing conversations. high: share of
    the routed experts that were high in them, steady_high in their second halves. adapted: decode
    steps after a change of topic until a window has ADAPTED of that, the mean over the changes.
    placed_ms_p50: of the second halves of the conversations, where all that a prompt wanted has
    moved. placed_high: share of the routed experts that were high there, by run.
    promotions: per minute, while the topic changes and on the steady text; waited_ms and
    demand_bytes: over all parts of all runs; most_steps: of the slowest placement of all runs, and
    moved: bytes of transitions by those of the experts that placements changed, both of policies
    that place behind a prompt alone.
    """
    row: Result = {
        "name": case.name,
        "cap": case.cap,
        "role": case.role,
        "limit_bytes": limit_bytes,
    }
    if failed := failure(runs):
        return row | failed
    names = [window_name(at) for at in range(switches + 1)]
    p50 = [_percentile(run, names, 50) for run in runs]
    p99 = [_percentile(run, names, 99) for run in runs]
    row |= {
        "tpot_ms_p50": statistics.median(p50),
        "tpot_ms_p50_runs": p50,
        "tpot_ms_p99": statistics.median(p99),
        "placed_ms_p50_runs": [_placed_ms(run, names) for run in runs],
        "p99_of_p50": median_ratio(p99, p50),
        "p99_of_p50_runs": [high / middle for high, middle in zip(p99, p50, strict=True)],
        "mode": runs[0].get("mode", "upstream"),
    }
    changing = [[part for name in names for part in named(run, name)] for run in runs]
    flat = [part for parts in changing for part in parts]
    if not store_figures(flat):
        return row
    stores = [part["store"] for run in runs for part in run["parts"]]
    shares = [[_high(named(run, name)) for name in names] for run in runs]
    late = [[each for windows in run for each in _second_half(windows)] for run in shares]
    return row | {
        "high": statistics.median(store_figures(parts)["mix"]["high"] for parts in changing),
        "steady_high": statistics.median(map(statistics.mean, late)),
        "placed_high_runs": list(map(statistics.mean, late)),
        "adapted": statistics.median(
            statistics.mean(_adapted(windows) for windows in run[1:]) for run in shares
        ),
        "promotions_per_minute": statistics.median(map(_per_minute, changing)),
        "steady_promotions_per_minute": statistics.median(
            _per_minute(named(run, STEADY)) for run in runs
        ),
        "waited_ms": sum(each["wait_ms"] for each in stores),
        "demand_bytes": sum(each["demand_bytes"] for each in stores),
        "transition_bytes": sum(each["transition_bytes"] for each in stores),
        "policy": runs[-1].get("policy", {}),
        **_placing(runs, stores),
    }


def _placing(runs: Sequence[Result], stores: Sequence[Result]) -> Result:
    """What placements came to, {} of policies without them."""
    said = [run["policy"] for run in runs if "changed_bytes" in run.get("policy", {})]
    if not said:
        return {}
    changed = sum(each["changed_bytes"] for each in said)
    moved = sum(each["transition_bytes"] for each in stores)
    return {
        "most_steps": max(each["most_steps"] for each in said),
        "moved": moved / changed if changed else None,
    }


def _percentile(run: Result, names: Sequence[str], q: float) -> float:
    steps = [each for name in names for each in times_ms(run, name)]
    return float(np.percentile(steps, q))


def _placed_ms(run: Result, names: Sequence[str]) -> float:
    """Median of the steps in the second halves of the conversations."""
    late = [part for name in names for part in _second_half(named(run, name))]
    return float(np.median([each for part in late for each in part["ms"]]))


def _high(windows: Sequence[Result]) -> list[float]:
    """The share of routed experts that were high, by window."""
    return [float(store_figures([window])["mix"]["high"]) for window in windows]


def _second_half(windows: Sequence[Window]) -> Sequence[Window]:
    return windows[len(windows) // 2 :]


def _adapted(shares: Sequence[float]) -> int:
    """Decode steps until the first window that has ADAPTED of the second half's mean share."""
    goal = ADAPTED * statistics.mean(_second_half(shares))
    return WINDOW * next(at for at, share in enumerate(shares) if share >= goal)


def _per_minute(parts: Sequence[Result]) -> float:
    minutes = sum(sum(part["ms"]) for part in parts) / 60e3
    return float(sum(part["store"]["promoted"] for part in parts) / minutes)


def topic_goals(rows: Sequence[Result], usual: str, restless: str) -> list[Result]:
    """What dynaexq is to reach, in each cap: name, value, goal and whether it is met. usual and
    restless name its rows with and without hysteresis."""
    found: list[Result] = []
    for cap in dict.fromkeys(row["cap"] for row in rows if row["cap"] is not None):
        good = {row["name"]: row for row in rows if row["cap"] == cap and "error" not in row}
        row, other = good.get(usual), good.get(restless)
        if row is None:
            continue
        add = partial(_add, found, cap)
        speedup, speed, spread = row.get("of_mmap"), row.get("of_speed"), row["p99_of_p50"]
        add("speed, of upstream mmap", speedup, ">= 15", (speedup or 0) >= 15)
        add("speed, of everything resident", speed, ">= 0.95", (speed or 0) >= 0.95)
        add("p99 / p50", spread, "<= 1.5", spread <= 1.5)
        add("waited, ms", row["waited_ms"], "0", row["waited_ms"] == 0)
        if other is not None and other["steady_promotions_per_minute"]:
            less = row["steady_promotions_per_minute"] / other["steady_promotions_per_minute"]
            add(
                "promotions on a steady text, of those without",
                less,
                "< 0.5",
                less < 0.5,
            )
    return found


def placement_goals(rows: Sequence[Result], placed: str, low: str) -> list[Result]:
    """What the near-data paper's placement is to reach, in each cap, as topic_goals. placed and
    low name its row and that of every expert low."""
    found: list[Result] = []
    resident = next((each for each in rows if each["role"] == "reference"), None)
    if resident is not None and "error" in resident:
        resident = None
    for cap in dict.fromkeys(row["cap"] for row in rows if row["cap"] is not None):
        good = {row["name"]: row for row in rows if row["cap"] == cap and "error" not in row}
        row, all_low = good.get(placed), good.get(low)
        if row is None:
            continue
        add = partial(_add, found, cap)
        if resident is not None and all_low is not None:
            equal = _same_bits_ms(row, resident, all_low)
            speed = median_ratio(equal, row["placed_ms_p50_runs"])
            name = "context: speed once placed, of everything resident at the same bits"
            add(name, speed, ">= 0.95", speed >= 0.95)
        steps, moved, needed = row.get("most_steps", 0), row.get("moved"), row["demand_bytes"]
        add("context: steps until all moved, at most", steps, "<= 64", steps <= 64)
        add("context: waited, ms", row["waited_ms"], "0", row["waited_ms"] == 0)
        add("context: bytes that tokens waited for", needed, "0", needed == 0)
        add("context: moved, of what changed", moved, "<= 1.1", (moved or 0) <= 1.1)
    return found


def _same_bits_ms(row: Result, resident: Result, low: Result) -> list[float]:
    """For each run, what a step takes with everything resident at the bits of a row: that of
    everything high and that of everything low, by the share of high in the row."""
    return [
        share * high_ms + (1.0 - share) * low_ms
        for share, high_ms, low_ms in zip(
            row["placed_high_runs"],
            resident["placed_ms_p50_runs"],
            low["placed_ms_p50_runs"],
            strict=True,
        )
    ]


def _add(
    found: list[Result], cap: float, name: str, value: float | None, goal: str, met: bool
) -> None:
    if value is not None:
        found.append({"cap": cap, "name": name, "value": value, "goal": goal, "met": met})


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
