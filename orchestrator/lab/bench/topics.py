"""`moe-edge bench topics`: dynaexq while the topic changes, and context beside it. How even its
steps stay, and how fast it is once its experts have moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.allocation.pools import nominal_bits
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import REFERENCE, UPSTREAM, Case, mapped
from orchestrator.lab.bench.job import COLD, Part, decode, prompt, settle
from orchestrator.lab.bench.loop import Loop
from orchestrator.lab.bench.models import LOW
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import NAME
from orchestrator.lab.bench.rows import (
    Result,
    add_ratio,
    caps_of,
    case_row,
    good,
    managed,
    median_ms,
    median_ratio,
    named,
    store_figures,
)
from orchestrator.lab.table import Column, fixed, percent
from orchestrator.settings import FROM_1, again, setting

# The two halves of a conversation: experts move, and have moved.
MOVING, PLACED = "moving", "placed"
ALL_LOW = "all low"


@dataclass(frozen=True)
class TopicOptions(BenchOptions):
    """Conversations of `tokens` decode steps, in turn about one topic and another, `switches`
    changes in all. The topics of a trained model are kinds of its conversations; a random one gets
    tokens of one half of its vocabulary or the other, which with the routing "topics" use different
    experts most. Raises ConfigError."""

    routing: str = again(BenchOptions, "routing", "topics")
    caps: tuple[float, ...] = again(BenchOptions, "caps", (0.8,))
    tokens: int = again(BenchOptions, "tokens", 256, within=(2, math.inf))
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 32)
    retention: float = again(BenchOptions, "retention", option=False)
    switches: int = setting(4, "Changes of the topic.", within=FROM_1)

    def parts(self) -> list[Part]:
        seconds = self.max_seconds / (2 * self.switches + 3)
        parts = [prompt(self.prompt_tokens, COLD), settle(self.warmup, seconds)]
        for at in range(self.switches + 1):
            half = self.tokens // 2
            conversation = (
                prompt(self.prompt_tokens),
                decode(self.tokens - half, seconds, MOVING),
                decode(half, seconds, PLACED),
            )
            parts += [part._replace(topic=1 + at % 2) for part in conversation]
        return parts


def topic_row(case: Case, runs: Sequence[Result], limit_bytes: int | None) -> Result:
    """The figures of one case, medians over its runs.

    high: share of the routed experts that were high. placed_ms_p50 and placed_high: of the second
    halves of the conversations, where all that a prompt wanted has moved. waited_ms and
    demand_bytes: over all parts of all runs; most_steps: of the slowest placement of all runs, and
    moved: bytes of transitions by those of the experts that placements changed, both of policies
    that place behind a prompt alone.
    """
    row = case_row(case, runs, limit_bytes, (MOVING, PLACED))
    if "error" in row:
        return row
    row["p99_of_p50"] = row["tpot_ms_p99"] / row["tpot_ms_p50"]
    row["placed_ms_p50_runs"] = median_ms(runs, PLACED)
    if "mix" not in row:
        return row
    stores = [part["store"] for run in runs for part in run["parts"]]
    moved = sum(each["transition_bytes"] for each in stores)
    row |= {
        "placed_high_runs": [store_figures(named(run, PLACED))["mix"]["high"] for run in runs],
        "waited_ms": sum(each["wait_ms"] for each in stores),
        "demand_bytes": sum(each["demand_bytes"] for each in stores),
        "transition_bytes": moved,
    }
    said = [run["policy"] for run in runs if "changed_bytes" in run["policy"]]
    if said:
        changed = sum(each["changed_bytes"] for each in said)
        row["most_steps"] = max(each["most_steps"] for each in said)
        row["moved"] = moved / changed if changed else None
    return row


def add_speeds(rows: Sequence[Result]) -> None:
    """Adds the speed of each row against everything resident and upstream mmap, and once placed
    against everything resident at the same bits: between everything high and everything low, by
    the share of high in the row."""
    resident = [row for row in good(rows) if row["role"] == "reference"]
    add_ratio(rows, "of_resident", resident)
    for same in caps_of(rows):
        add_ratio(same, "of_mmap", [row for row in same if row["role"] == "mmap"])
        low = [row for row in good(same) if row["name"] == ALL_LOW]
        for row in managed(same) if resident and low else ():
            ms = (each["placed_ms_p50_runs"] for each in (*resident, *low))
            equal = [
                share * high_ms + (1.0 - share) * low_ms
                for share, high_ms, low_ms in zip(row["placed_high_runs"], *ms, strict=True)
            ]
            row["of_same_bits"] = median_ratio(equal, row["placed_ms_p50_runs"])


class Topics(Benchmark[Loop[TopicOptions]]):
    """Conversations about one topic and another."""

    options = TopicOptions
    columns = (
        NAME,
        Column("TPOT", "tpot_ms_p50", fixed(2), "ms"),
        Column("p99", "tpot_ms_p99", fixed(2)),
        Column("p99/p50", "p99_of_p50", fixed(2)),
        Column("x mmap", "of_mmap", fixed(1)),
        Column("speed", "of_resident", fixed(2)),
        Column("placed", "of_same_bits", fixed(2)),
        Column("high", lambda row: row.get("mix", {}).get("high"), percent(1), "%"),
        Column("waited", "waited_ms", fixed(1), "ms"),
    )

    def cases(self, loop: Loop[TopicOptions]) -> list[Case]:
        """Everything in memory in high, and upstream so; under each cap, upstream mmap, all low, a
        hot set that never changes, context, and dynaexq."""
        listed = [*UPSTREAM, REFERENCE]
        for cap in loop.options.caps:
            base = Case("dynaexq", "engine", cap, "", {"policy": "dynaexq", "low_tier": LOW})
            placed = {"policy": "context", "near_bits": float(nominal_bits(LOW))}
            listed.append(mapped(cap))
            for name, settings in (
                (ALL_LOW, {"hot_experts": 0}),
                ("fixed hot set", {"update_steps": 0}),
                ("context", placed),
                ("dynaexq", {}),
            ):
                listed.append(replace(base, name=name, settings=base.settings | settings))
        return listed

    def row(self, loop: Loop[TopicOptions], case: Case, runs: Sequence[Result]) -> Result:
        return topic_row(case, runs, loop.limit_bytes(case))

    def compare(
        self, loop: Loop[TopicOptions], rows: Sequence[Result], runs: Sequence[Sequence[Result]]
    ) -> None:
        add_speeds(rows)

    def intro(self, loop: Loop[TopicOptions]) -> list[str]:
        options = loop.options
        return [
            f"{options.switches} changes between two topics, {options.tokens} decode steps of "
            f"{options.words} tokens each; medians of {options.runs} runs in turn",
            "speed: of our managed path with everything resident; placed: of its speed at the same "
            "bits, in the second halves of the conversations; high: routed experts that were high",
        ]

    def notes(self, rows: Sequence[Result]) -> list[str]:
        return super().notes(rows) + [
            f"{row['name']}: all moved after {row['most_steps']} steps at most, "
            f"{row['moved']:.2f} of what changed was moved, and tokens waited for "
            f"{row['demand_bytes']} bytes"
            for row in rows
            if row.get("moved") is not None
        ]
