"""`moe-edge bench topics`: dynaexq while the topic changes. How even its steps stay, how soon the
hot set has followed, and what the exchange of experts costs on a steady text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.bench.job import Part, decode, prompt, settle
from orchestrator.bench.loop import Loop
from orchestrator.bench.models import LOW, Note
from orchestrator.bench.plan import REFERENCE, BenchOptions, Case, mapped
from orchestrator.bench.report import WIDTH, heading, percent, title, tokens_of
from orchestrator.bench.rows import Result, named, store_figures
from orchestrator.errors import ConfigError

WINDOW = 16  # decode steps; the share of high experts is judged by windows
ADAPTED = 0.95
STEADY = "steady"
ALL_LOW, FIXED, RESTLESS = "all low", "fixed hot set", "no hysteresis"


@dataclass(frozen=True, slots=True)
class TopicOptions(BenchOptions):
    """Conversations of `tokens` decode steps, in turn about one topic and another, `switches`
    changes in all; then one of `steady` steps that stays with its topic. The topics of a trained
    model are kinds of its conversations; a random one gets tokens of one half of its vocabulary or
    the other.

    updates: intervals of dynaexq in decode steps, a case each. Raises ConfigError.
    """

    routing: str = "zipf"
    caps: tuple[float, ...] = (0.8,)
    tokens: int = 256
    prompt_tokens: int = 32
    switches: int = 4
    steady: int = 512
    updates: tuple[int, ...] = (8, 16, 32, 64, 128)

    def __post_init__(self) -> None:
        BenchOptions.__post_init__(self)
        for name in ("switches", "steady"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1")
        if self.tokens < 2 * WINDOW:
            raise ConfigError(f"tokens must be at least {2 * WINDOW}, two windows")
        if not self.updates or min(self.updates) < 1 or len(set(self.updates)) < len(self.updates):
            raise ConfigError("updates are different intervals of at least one step, as 8,16,32")

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


def window_name(conversation: int) -> str:
    """The name of the windows of one conversation, counted from 0."""
    return f"topic {conversation}"


def parse_updates(text: str) -> tuple[int, ...]:
    """Intervals from "8,16,32". Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"'{text}' is no list of intervals such as 8,16,32") from None


def topic_cases(options: TopicOptions) -> list[Case]:
    """Everything in memory in high; under each cap, upstream, all low, a hot set that never
    changes, and dynaexq by interval, at the usual one also without hysteresis."""
    listed = [REFERENCE]
    for cap in options.caps:
        base = {"policy": "dynaexq", "low_tier": LOW}

        def case(name: str, cap: float = cap, base: dict[str, str] = base, **more: Any) -> Case:
            return Case(name, "engine", cap, "", {**base, **more})

        listed += [
            mapped(cap),
            case(ALL_LOW, hot_experts=0),
            case(FIXED, update_steps=0),
            *(case(f"every {n} steps", update_steps=n) for n in options.updates),
            case(RESTLESS, hysteresis=0.0),
        ]
    return listed


def run_topics(options: TopicOptions, note: Note = lambda text: None) -> dict[str, Any]:
    """Measures all cases and returns one JSON-ready object, as bench.run does."""
    loop = Loop.prepare(options, note)
    listed = topic_cases(options)
    measured = loop.run(listed)
    rows = [
        topic_row(options, case, measured.results[case.key], loop.limit_bytes(case))
        for case in listed
    ]
    report = loop.describe(measured)
    report["options"] |= {"switches": options.switches, "steady": options.steady}
    return report | {"cases": rows}


def topic_row(
    options: TopicOptions, case: Case, runs: Sequence[Result], limit_bytes: int | None
) -> Result:
    """The figures of one case.

    p99_of_p50: of all decode steps of the changing conversations. high: share of the routed
    experts that were high, in the second halves of the conversations. adapted: decode steps after a
    change of topic until a window has ADAPTED of that, the mean over the changes; None where the
    store has no part in it. promotions: per minute, while the topic changes and on the steady
    text; waited_ms and demand_bytes: over all parts.
    """
    row: Result = {"name": case.name, "cap": case.cap, "limit_bytes": limit_bytes}
    failed = [each["error"] for each in runs if "error" in each]
    if failed:
        return row | {"error": failed[0]}
    names = [window_name(at) for at in range(options.switches + 1)]
    changing = [part for run in runs for name in names for part in named(run, name)]
    steps = [each for part in changing for each in part["ms"]]
    p50, p99 = (float(np.percentile(steps, q)) for q in (50, 99))
    row |= {
        "tpot_ms_p50": p50,
        "tpot_ms_p99": p99,
        "p99_of_p50": p99 / p50,
        "p99_of_p50_runs": [_spread(run, names) for run in runs],
        "mode": runs[0].get("mode", "upstream"),
    }
    if not store_figures(changing):
        return row
    stores = [part["store"] for run in runs for part in run["parts"]]
    shares = [[_high(named(run, name)) for name in names] for run in runs]
    late = [share for run in shares for windows in run for share in windows[len(windows) // 2 :]]
    followed = [_adapted(windows) for run in shares for windows in run[1:]]
    steady = [part for run in runs for part in named(run, STEADY)]
    return row | {
        "high": statistics.mean(late),
        "adapted": statistics.mean(followed),
        "promotions_per_minute": _per_minute(changing),
        "steady_promotions_per_minute": _per_minute(steady),
        "waited_ms": sum(each["wait_ms"] for each in stores),
        "demand_bytes": sum(each["demand_bytes"] for each in stores),
        "transition_bytes": sum(each["transition_bytes"] for each in stores),
        "policy": runs[-1].get("policy", {}),
    }


def _spread(run: Result, names: Sequence[str]) -> float:
    steps = [each for name in names for part in named(run, name) for each in part["ms"]]
    return float(np.percentile(steps, 99) / np.percentile(steps, 50))


def _high(windows: Sequence[Result]) -> list[float]:
    """The share of routed experts that were high, by window."""
    return [float(store_figures([window])["mix"]["high"]) for window in windows]


def _adapted(shares: Sequence[float]) -> int:
    """Decode steps until the first window that has ADAPTED of the second half's mean share."""
    goal = ADAPTED * statistics.mean(shares[len(shares) // 2 :])
    return WINDOW * next(at for at, share in enumerate(shares) if share >= goal)


def _per_minute(parts: Sequence[Result]) -> float:
    minutes = sum(sum(part["ms"]) for part in parts) / 60e3
    return float(sum(part["store"]["promoted"] for part in parts) / minutes)


_HEAD = (
    f"{'':18}{'TPOT ms':>9}{'p99':>8}{'p99/p50':>9}{'high %':>8}{'adapted':>9}"
    f"{'promoted/min':>14}{'steady':>8}{'waited ms':>11}"
)


def render_topics(report: dict[str, Any]) -> str:
    """The report of run_topics as text."""
    options = report["options"]
    lines = [
        *heading(report),
        f"{options['switches']} changes between two topics, {options['tokens']} decode steps of "
        f"{tokens_of(report)} tokens each; then",
        f"{options['steady']} steps on one; {options['runs']} runs in turn; adapted: decode steps "
        f"until the share of high is",
        f"within {100 - 100 * ADAPTED:.0f} % of what it comes to",
    ]
    for cap in dict.fromkeys(row["cap"] for row in report["cases"]):
        rows = [row for row in report["cases"] if row["cap"] == cap]
        lines += ["", title(cap, rows), _HEAD, *(_line(row) for row in rows)]
    lines += ["", *(f"note: {reason}" for reason in report["skipped"])]
    return "\n".join(lines).rstrip()


def _line(row: Result) -> str:
    if "error" in row:
        return f"{row['name']:18} {row['error']}"[:WIDTH]
    line = f"{row['name']:18}{row['tpot_ms_p50']:9.2f}{row['tpot_ms_p99']:8.2f}"
    line += f"{row['p99_of_p50']:9.2f}"
    if "high" not in row:
        return line
    return line + (
        f"{percent(row['high'], 1):>8}{row['adapted']:9.0f}{row['promotions_per_minute']:14.0f}"
        f"{row['steady_promotions_per_minute']:8.0f}{row['waited_ms']:11.1f}"
    )
