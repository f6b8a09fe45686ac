"""DynaExq: Dynamic Expert Quantization for Scalable Mixture-of-Experts Inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from orchestrator.errors import BudgetError
from orchestrator.events import Phase, percentile
from orchestrator.lab.bench.child import DECODE, PROMPTS, Part, prompt, settle
from orchestrator.lab.bench.rows import named
from orchestrator.lab.papers.measured import Measured
from orchestrator.lab.papers.paper import NOT_IN_TEXT, Compared, Figure, Made, Paper, Unavailable
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.study.dynaexq import (
    STARTED,
    Demotion,
    EqualMemory,
    HotMemory,
    Residency,
)
from orchestrator.lab.study.firm import NO_PREFETCH, Played, Variant, expert_bytes, on_link
from orchestrator.lab.study.routing import (
    active_in_decode,
    active_in_prefill,
    concentration,
    hot_overlap,
    sorted_shares,
    total_counts,
)
from orchestrator.lab.study.study import share, show_change
from orchestrator.lab.table import Column, Row, Table, fixed
from orchestrator.policy.firm import FIRM, RANK

BATCHES = (1, 2, 4, 8, 16, 32)
# Tokens of each sequence's prompt and decode steps of a batch; prompts of Figures 1 and 10, and how
# often each is read; rounds in which the systems take turns.
PROMPT, STEPS, ROUNDS = 32, 12, 2
LENGTHS, TIMES = (8, 16, 32, 64, 128, 256, 384), 4
# The share of each layer's experts that is high, and the share of a hot set in Figure 2.
HIGH, HOT_SHARE = 0.25, 0.1
# Figure 1: the share of the experts that have slots, and the links: reading all experts of a token
# takes this many times as long as computing it.
HELD, READS = 0.5, (4.0, 32.0)

OTHER = (
    "Our model has {} experts per layer, and a token uses {} of them. Qwen3-30B-A3B has 128, and "
    "a token uses 8"
)


def _other(on: Measured) -> str:
    subject = on.subject()
    return OTHER.format(subject.n_expert, subject.n_expert_used)


def _by_batch(values: dict[int, float], unit: str = " %") -> str:
    return ", ".join(f"{batch}: {100 * value:.1f}{unit}" for batch, value in values.items())


def _activated(on: Measured, rows: list[Row], said: str, phase: str) -> Made:
    """Make a table and a picture of the share of experts in use by batch size.

    said: the values in the paper's text. phase: "decode" or "prefill".
    """
    title = f"activated experts in {phase}"
    label = f"{title}, % of a layer's experts, by batch size"
    columns = (
        Column("batch", "batch"),
        Column("prompt", "length"),
        Column("activated", "active", share),
    )
    groups = dict.fromkeys(row["length"] for row in rows)
    drawn = [
        Line(
            "" if length is None else f"prompts of {length} tokens",
            range(len(BATCHES)),
            exact([row["active"] for row in rows if row["length"] == length]),
        )
        for length in groups
    ]
    compared = [
        Compared(
            label if length is None else f"{label} (prompts of {length} tokens)",
            said,
            _by_batch({row["batch"]: row["active"] for row in rows if row["length"] == length}),
            _other(on),
        )
        for length in groups
    ]
    panel = Panel(
        "sequences",
        "share of a layer's experts that a step uses, %",
        drawn,
        title,
        percent=True,
        ticks=BATCHES,
    )
    return Made(compared, [Table(title, columns, rows)], [panel])


def table_1(on: Measured) -> Made:
    """Reproduce Table 1 of the DynaExq paper: how many of a layer's experts a decode step uses.

    The result is a fraction of the layer's experts for each batch size.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    rows = [
        {"batch": batch, "length": None, "active": active_in_decode(on.routes, batch)}
        for batch in BATCHES
    ]
    said = (
        "Share of a layer's experts that Qwen3-30B-A3B uses, by batch size: 1: 6.3 %, 2: 11.6 %, "
        "4: 20.1 %, 8: 31.9 %, 16: 46.5 %, 32: 62.0 %"
    )
    return _activated(on, rows, said, "decode")


def table_2(on: Measured) -> Made:
    """Reproduce Table 2 of the DynaExq paper: how many of a layer's experts a prompt batch uses.

    The fraction of the layer's experts is measured for several batch sizes and prompt lengths.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    rows = [
        {"batch": batch, "length": n, "active": active_in_prefill(on.routes, batch, n)}
        for n in (4, 16, 64)
        for batch in BATCHES
    ]
    said = (
        "Share of a layer's experts that Qwen3-30B-A3B uses, by batch size: 1: 46.9 %, 2: 60.0 %, "
        "4: 73.4 %, 8: 84.4 %, 16: 92.8 %, 32: 96.6 %. The paper's text does not state the prompt "
        "length"
    )
    return _activated(on, rows, said, "prefill")


def table_4(on: Measured) -> Made:
    """Reproduce Table 4 of the DynaExq paper: the quality with a hot set in the high precision.

    The hot set is the most used experts of each layer. All other experts have the low precision.
    For comparison, models with all experts in one type are measured.

    `on` is the model and the text. Returns tables, plots, and the comparison with the paper.
    """
    subject = on.subject()
    found, equal = HotMemory().measure(subject), EqualMemory().measure(subject)
    rows = [row for row in found.tables[0].rows if row["configuration"] == STARTED]
    quarter = next(row for row in rows)
    compared = [
        Compared(
            "How much of the quality loss of low precision does a hot set recover? The hot set "
            "(the most used experts) has high precision",
            "Mean score of five tasks. Qwen3-30B: FP16 65.29, Int4 63.98, DynaExq 64.38. "
            "Phi-3.5-MoE: FP16 58.06, Int4 56.31, DynaExq 57.00. Qwen3-80B: Int4 78.11, Int2 "
            "73.09, DynaExq 77.57",
            "; ".join(
                f"with the most used {share(row['high'])} of the experts in high precision, "
                f"{share(row['won_back'][0])} of the quality loss (KL divergence) of low precision "
                f"disappears"
                for row in rows
                if row["won_back"]
            ),
            "Computed from the paper's scores, DynaExq recovers 31 % (Qwen3-30B), 39 % "
            "(Phi-3.5-MoE) and 89 % (Qwen3-80B) of the loss. We measure KL divergence, because the "
            "paper's models were not available",
        ),
        Compared(
            "ratio of two shares: the share of the quality loss that a hot set in high precision "
            "avoids, divided by the share of the experts in the hot set. Above 1, the hot set "
            "avoids more than its share of the loss",
            "The paper does not state the hot set's share of the experts",
            f"{quarter['ratio']:.2f}: the hot set has {share(quarter['high'])} of the experts, and "
            f"avoids {share(quarter['won_back'][0])} of the quality loss of low precision",
            "For comparison, we also measure randomly chosen experts in high precision, and models "
            "of the same size that have one precision for all experts",
        ),
    ]
    # The first panel is that of all domains. The best tier has no KL from itself but rounding.
    rival = [replace(panel, ends=(1e-4, None)) for panel in equal.panels]
    return Made(compared, [*found.tables, *equal.tables], [*found.panels[:1], *rival])


def figure_1(on: Measured) -> Made:
    """Reproduce Figure 1 of the DynaExq paper: how long prompts wait for experts, by prompt length.

    The times are simulated. `on` is the model and the text. Returns a table, plots, and the
    comparison with the paper.
    """
    prefetching = Variant("prefetch", FIRM.name, {"prefetch": "on", "agree": RANK})
    listed = [Variant(NO_PREFETCH, FIRM.name, {"prefetch": "off"}), prefetching]
    rows: list[Row] = []
    for n in LENGTHS[1:]:
        trace = on.trace(n, 32)
        room, prompts = int(HELD * expert_bytes(trace)), trace.arrays["step_phase"] == Phase.PREFILL
        for reads in READS:
            run = Played(on.library, trace, on_link(trace, reads))
            for part in listed:
                _, outcome = run.play(part.policy, part.settings, expert_ram=room)
                stall_ms = outcome.stats.wait_us[Phase.PREFILL] / 1000
                took_ms = float(outcome.step_us[prompts].sum()) / 1000
                key = {"name": part.name, "reads": reads, "n": n}
                rows.append({**key, "stall_ms": stall_ms, "of_it": stall_ms / took_ms})
    columns = (
        Column("read time / compute time", "reads", "{:g}".format),
        Column("", "name", left=True),
        Column("prompt", "n"),
        Column("wait", "stall_ms", fixed(1), "ms"),
        Column("share of the prompt's time", "of_it", share),
    )
    compared = [
        Compared(
            f"time that a prompt waits for experts (share of the prompt's time), by prompt length "
            f"in tokens. Reading a token's experts takes {reads:g} times as long as computing the "
            f"token",
            "With ExpertFlow, which offloads experts, longer prompts wait longer for experts. The "
            "paper's text does not give the times",
            ", ".join(
                f"{row['n']}: {row['stall_ms']:.0f} ms ({share(row['of_it'])})"
                for row in rows
                if row["name"] == prefetching.name and row["reads"] == reads
            ),
            f"Our times are simulated with --policy firm, because ExpertFlow is not available. "
            f"{HELD:.0%} of the experts have cache slots. On a CPU, a longer prompt takes longer "
            f"to compute, which hides more reads",
        )
        for reads in READS
    ]
    panels = [
        Panel(
            "prompt, tokens",
            "time waiting for experts, ms",
            [
                Line(
                    part.name,
                    LENGTHS[1:],
                    exact(
                        [
                            row["stall_ms"]
                            for row in rows
                            if row["name"] == part.name and row["reads"] == reads
                        ]
                    ),
                )
                for part in listed
            ],
            f"reading a token's experts takes {reads:g} times as long as computing the token",
        )
        for reads in READS
    ]
    return Made(compared, [Table("Time that a prompt waits for experts", columns, rows)], panels)


def figure_2(on: Measured) -> Made:
    """Reproduce Figure 2 of the DynaExq paper: how unevenly experts are used.

    Also measures how many hot experts, the most used experts of a layer, two texts have in common.

    `on` is the model and the text. Returns a plot and the comparison with the paper. If the text
    has several domains (kinds of text), also returns a table.
    """
    counts = {"all": total_counts(on.routes)} | {
        name: total_counts([each for each in on.routes if each.domain == name])
        for name in (on.domains if len(on.domains) > 1 else ())
        if any(each.domain == name for each in on.routes)
    }
    n_expert = counts["all"].shape[1]
    n_hot = max(1, round(HOT_SHARE * n_expert))
    overlaps: list[Row] = [
        {"one": a, "other": b, "same": float(np.mean(rows)), "disjoint": rows.count(0.0)}
        for a, b in combinations([name for name in counts if name != "all"], 2)
        if (rows := hot_overlap(counts[a], counts[b], n_hot))
    ]
    skew = {name: concentration(each, HOT_SHARE) for name, each in counts.items()}
    n_layers = counts["all"].shape[0]
    if overlaps:
        in_common = (
            f"for each pair of texts, the share of hot experts that both have in common (number "
            f"of layers, of {n_layers}, in which they have no hot expert in common): "
        ) + "; ".join(
            f"{row['one']} and {row['other']} {share(row['same'])} ({row['disjoint']})"
            for row in overlaps
        )
    else:
        in_common = (
            "not measured, because the text has only one domain (kind of text): give --data a "
            "folder with one file for each of several domains"
        )
    compared = [
        Compared(
            "share of all expert uses that go to the hot set (the most used experts)",
            "A small hot set gets a large share of the uses. The paper's text does not give the "
            "share",
            f"The {n_hot} most used of a layer's {n_expert} experts get {share(skew['all'])} of "
            f"the uses (uniform usage: {share(n_hot / n_expert)})",
            _other(on),
        ),
        Compared(
            "hot experts (the most used of each layer) that two workloads have in common",
            "In some layers, text, math and code have no hot expert in common. The hot experts "
            "are the ten most used of a layer",
            in_common,
            f"Our hot experts are the {n_hot} most used of each layer. {_other(on)}",
        ),
    ]
    drawn = [
        Line(name, range(1, n_expert + 1), exact(sorted_shares(each).tolist()))
        for name, each in counts.items()
    ]
    columns = (
        Column("first text", "one", left=True),
        Column("second text", "other", left=True),
        Column("hot experts in common", "same", share),
        Column("layers with no hot expert common to both texts", "disjoint"),
    )
    panel = Panel(
        "rank of the expert", "uses of the expert, % of all uses in its layer", drawn, percent=True
    )
    title = f"Hot experts (the {n_hot} most used of each layer) that two texts have in common"
    return Made(compared, [Table(title, columns, overlaps)] if overlaps else [], [panel])


def figure_3(on: Measured) -> Made:
    """Reproduce Figure 3 of the DynaExq paper: the quality loss if some of the experts are demoted.

    A demoted expert has the low precision instead of the high one.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    found = Demotion().measure(on.subject())
    rows = found.tables[0].rows
    half = on.subject().n_expert // 2
    mine = {row["order"]: row for row in rows if row["demoted"] == half}
    compared = [
        Compared(
            f"change of perplexity if {half} of {2 * half} experts per layer are demoted from "
            f"high to low precision",
            "The least used experts are demoted first. Perplexity then grows smoothly with the "
            "number of demoted experts. The paper's text does not give the values",
            "; ".join(f"{order} {show_change(row['change'])}" for order, row in mine.items()),
            f"We demote the least used experts first (cold first), experts in random order, or "
            f"the most used experts first (hot first). {_other(on)}",
        )
    ]
    return Made(compared, found.tables, found.panels)


@dataclass(frozen=True, slots=True)
class System:
    """A configuration of our engine whose speed is compared with that of others.

    - name: its name in tables.
    - settings: the options of our engine that it sets, by name.
    """

    name: str
    settings: dict[str, Any]


def systems(on: Measured) -> list[System]:
    """Return the three configurations of our engine whose speed is compared.

    - All experts have the low precision.
    - All experts have the high precision. Those that are not in memory are prefetched, or read when
      they are needed.
    - The policy DynaExq chooses a precision for each expert.

    The last two have the same memory for experts. `on` is the model and the text.
    """
    subject = on.subject()
    residency = Residency(subject)
    (n_high,) = residency.counts((HIGH,))
    dynaexq = residency.settings(n_high)
    room = dynaexq["expert_ram"]
    high = {"high_tier": subject.high, "expert_ram": room}
    low = {"policy": "lru", "high_tier": subject.low, "force_managed": True}
    offloading = {"policy": "dymoe", "retention": 1.0, "prefetch": "on", **high}
    return [
        System(f"all experts in low precision ({subject.low})", low),
        System("offloading, all experts in high precision (policy dymoe)", offloading),
        System(
            "DynaExq (policy dynaexq)",
            {name: each for name, each in dynaexq.items() if each is not None},
        ),
    ]


def _timed(on: Measured, parts: list[Part]) -> dict[str, list[list[Any]]]:
    """Return the timed parts of each round for each system. In a round, all systems take turns."""
    found: dict[str, list[list[Any]]] = {}
    for _ in range(ROUNDS):
        for system in systems(on):
            on.report(system.name, 0.0)
            run = on.timed(system.settings, parts)
            found.setdefault(system.name, []).append(run["parts"])
    return found


@cache
def timed_batches(on: Measured) -> list[Row]:
    """Measure on this machine how long prompts and decode steps take, by batch size.

    Three configurations of our engine are measured: all experts in low precision, all experts in
    high precision, and the policy DynaExq. `on` is the model and the text.

    Returns a table row for each configuration and batch size. A row has the time to the first token
    and the time of a decode step, in milliseconds, and the tokens per second. Raises Unavailable if
    the memory is too small for a configuration.
    """
    parts: list[Part] = [prompt(PROMPT, "first"), settle(16, 20.0)]
    for batch in BATCHES:
        parts.append(Part(f"{PROMPTS} {batch}", PROMPTS, PROMPT, sequences=batch))
        parts.append(Part(f"{DECODE} {batch}", DECODE, STEPS, 60.0, STEPS, batch))
    try:
        timed = _timed(on, parts)
    except BudgetError as reason:
        raise Unavailable(str(reason)) from reason
    rows = []
    for name, rounds in timed.items():
        for batch in BATCHES:
            runs = [{"parts": each} for each in rounds]
            prompts = [part["ms"] for run in runs for part in named(run, f"{PROMPTS} {batch}")]
            steps = [
                ms for run in runs for part in named(run, f"{DECODE} {batch}") for ms in part["ms"]
            ]
            # The prompts of a batch arrive together and are read one after another.
            first = [each for ms in prompts for each in np.cumsum(ms)]
            whole = [sum(ms) for ms in prompts]
            mean_step = float(np.mean(steps))
            rows.append(
                {
                    "name": name,
                    "batch": batch,
                    "ttft": float(np.mean(first)),
                    "ttft_p99": percentile(first, 99),
                    "tpot": mean_step,
                    "tpot_p99": percentile(steps, 99),
                    "total": float(np.mean(whole)) + STEPS * mean_step,
                    "speed": 1000 * batch * STEPS / (float(np.mean(whole)) + STEPS * mean_step),
                }
            )
    return rows


_LIVE = (
    "We measure on two CPU cores instead of an A6000 GPU, with --policy dymoe instead of "
    "ExpertFlow. We process the prompts of a batch one after another"
)
_COLUMNS = (
    Column("", "name", left=True),
    Column("batch", "batch"),
    Column("TTFT mean", "ttft", fixed(1), "ms"),
    Column("P99", "ttft_p99", fixed(1), "ms"),
    Column("TPOT mean", "tpot", fixed(2), "ms"),
    Column("P99", "tpot_p99", fixed(2), "ms"),
    Column("tok/s", "speed", fixed(1)),
)


def _batches(
    on: Measured,
    what: str,
    said: tuple[str, str, str],
    key: str,
    tail: str | None,
    show: Callable[[float], str],
) -> Made:
    """Make a table and a picture of one metric by batch size.

    what: the metric's title. said: the statement in the paper's text about each of `systems`. key,
    tail: the names of the metric and of its P99 in the rows. show: formats a value.
    """
    rows = timed_batches(on)
    names = list(dict.fromkeys(row["name"] for row in rows))
    at = {(row["name"], row["batch"]): row for row in rows}

    def cell(row: Row) -> str:
        return show(row[key]) + (f" ({show(row[tail])})" if tail else "")

    compared = [
        Compared(
            f"{what}, by batch size: {name}",
            f"{each}. The paper's text gives no values",
            ", ".join(f"{batch}: {cell(at[name, batch])}" for batch in BATCHES),
            _LIVE,
        )
        for name, each in zip(names, said, strict=True)
    ]
    drawn = [
        Line(
            f"{name}, P99" if each == tail else name,
            range(len(BATCHES)),
            exact(values),
            each == tail,
            style,
        )
        for style, name in enumerate(names)
        for each in (key, tail)
        if each is not None
        if (values := [at[name, batch][each] for batch in BATCHES])
    ]
    panel = Panel("sequences", what, drawn, on.config.model.name, scale="log", ticks=BATCHES)
    return Made(
        compared,
        [
            Table(
                "Latency and speed by batch size (each sequence has its own prompt)", _COLUMNS, rows
            )
        ],
        [panel],
    )


def figure_6(on: Measured) -> Made:
    """Reproduce Figure 6 of the DynaExq paper: the time to the first token by batch size.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    said = (
        "TTFT is lowest with all experts in low precision (static quantization)",
        "TTFT of ExpertFlow (offloading) increases sharply with the batch size",
        "TTFT of DynaExq is substantially below TTFT of ExpertFlow (offloading), and closer to "
        "TTFT with all experts in low precision",
    )
    return _batches(on, "TTFT, ms, mean (P99)", said, "ttft", "ttft_p99", "{:.1f}".format)


def figure_7(on: Measured) -> Made:
    """Reproduce Figure 7 of the DynaExq paper: the time of decode steps by batch size.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    said = (
        "TPOT (time per output token) with all experts in low precision is close to TPOT of "
        "DynaExq",
        "ExpertFlow (offloading) has a higher TPOT (time per output token) than DynaExq. Its 99th "
        "percentile moves away from the mean as the batch size grows",
        "TPOT (time per output token) of DynaExq is close to TPOT with all experts in low "
        "precision. Its mean and 99th percentile are closer together than with ExpertFlow",
    )
    return _batches(on, "TPOT, ms, mean (P99)", said, "tpot", "tpot_p99", "{:.2f}".format)


def figure_9(on: Measured) -> Made:
    """Reproduce Figure 9 of the DynaExq paper: the time of requests, and throughput, by batch size.

    A request is a prompt and its answer. Three systems are timed on this machine: all experts in
    low precision, loading experts with prefetching, and DynaExq.

    `on` is the model and the text. Returns a table, plots, and the comparison with the paper.
    """
    said = (
        "Requests take the least time with all experts in low precision",
        "Requests take the most time with ExpertFlow (offloading)",
        "Requests take less time with DynaExq than with ExpertFlow (offloading), and more than "
        "with all experts in low precision",
    )
    made = _batches(
        on, f"time of a prompt and {STEPS} decode steps, ms", said, "total", None, "{:.0f}".format
    )
    said = (
        "DynaExq stays near the throughput with all experts in low precision",
        "ExpertFlow (offloading) has a lower throughput than DynaExq. The difference grows with "
        "the batch size",
        "DynaExq has a higher throughput than ExpertFlow (offloading). The difference grows with "
        "the batch size",
    )
    speed = _batches(on, "throughput, tokens/s", said, "speed", None, "{:.0f}".format)
    return Made(made.compared + speed.compared, made.tables, made.panels + speed.panels)


def figure_10(on: Measured) -> Made:
    """Reproduce Figure 10 of the DynaExq paper: the time to the first token by prompt length.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    parts: list[Part] = [prompt(PROMPT, "first"), settle(16, 20.0)]
    for n in LENGTHS:
        parts += [prompt(n, f"prompt {n}")] * TIMES
    timed = _timed(on, parts)
    rows: list[Row] = []
    for name, rounds in timed.items():
        for n in LENGTHS:
            times = [
                ms
                for each in rounds
                for part in named({"parts": each}, f"prompt {n}")
                for ms in part["ms"]
            ]
            mean, tail = float(np.mean(times)), percentile(times, 99)
            rows.append({"name": name, "n": n, "ttft": mean, "ttft_p99": tail})
    columns = (
        Column("", "name", left=True),
        Column("prompt", "n"),
        Column("TTFT mean", "ttft", fixed(1), "ms"),
        Column("P99", "ttft_p99", fixed(1), "ms"),
    )
    names = list(timed)
    said = (
        "TTFT is lowest with all experts in low precision, and changes only mildly with the prompt "
        "length",
        "TTFT of ExpertFlow (offloading) has the steepest growth. With the longest prompts on "
        'Qwen3-30B, mean TTFT is "around 10 s" and P99 approaches "the high teens"',
        "TTFT increases quickly up to a few hundred prompt tokens, then approaches a plateau. On "
        'Qwen3-30B, TTFT of DynaExq stabilizes "near the mid-single digits" of seconds',
    )
    compared = [
        Compared(
            f"TTFT, ms, mean (P99), by prompt length in tokens: {name}",
            each,
            ", ".join(
                f"{row['n']}: {row['ttft']:.1f} ({row['ttft_p99']:.1f})"
                for row in rows
                if row["name"] == name
            ),
            f"On a CPU, every token of the prompt adds compute time, so TTFT also keeps growing "
            f"for long prompts. {_LIVE}",
        )
        for name, each in zip(names, said, strict=True)
    ]
    drawn = [
        Line(name, LENGTHS, exact([each["ttft"] for each in rows if each["name"] == name]))
        for name in names
    ]
    panel = Panel("prompt, tokens", "TTFT, ms", drawn, on.config.model.name, scale="log")
    return Made(compared, [Table("TTFT by prompt length", columns, rows)], [panel])


PAPER = Paper(
    "dynaexq",
    "DynaExq",
    (
        Figure(
            "Table 1",
            "share of a layer's experts that a decode step activates, by batch size",
            table_1,
        ),
        Figure(
            "Table 2", "share of a layer's experts that prompts activate, by batch size", table_2
        ),
        Figure(
            "Table 4",
            "quality with the most used experts (hot set) in high precision, compared with one "
            "precision for all experts",
            table_4,
        ),
        Figure("Figure 1", "time that a prompt waits for experts, by prompt length", figure_1),
        Figure(
            "Figure 2",
            "skew of expert usage, and overlap of the most used experts (hot sets) of different "
            "workloads",
            figure_2,
        ),
        Figure(
            "Figure 3",
            "perplexity by the number of experts that are demoted from high to low precision",
            figure_3,
        ),
        Figure("Figure 6", "time to first token by batch size", figure_6),
        Figure("Figure 7", "time per output token by batch size", figure_7),
        Figure(
            "Figure 8",
            "the subject of Figure 8 is not known, because the paper's text does not mention it",
            paper=NOT_IN_TEXT,
            why=(
                "The paper's text discusses throughput without naming a figure. Our comparison of "
                "throughput is listed with Figure 9"
            ),
        ),
        Figure("Figure 9", "end-to-end latency and throughput by batch size", figure_9),
        Figure("Figure 10", "time to first token by prompt length", figure_10),
    ),
)
