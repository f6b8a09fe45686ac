"""DyMoE: Dynamic Expert Orchestration with Mixed-Precision Quantization for Edge Inference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from orchestrator.events import Phase
from orchestrator.lab.bench.benchmark import token_slot_bytes
from orchestrator.lab.bench.cases import ON_DEMAND, PAPER_RATIOS, Case, global_lru, paper_rows
from orchestrator.lab.bench.child import COLD, Part, decode, prompt, settle
from orchestrator.lab.bench.rows import times_ms
from orchestrator.lab.eval.arithmetic import cosine
from orchestrator.lab.papers.measured import Measured
from orchestrator.lab.papers.paper import NOT_IN_TEXT, Compared, Figure, Made, Paper, Unavailable
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.study.dymoe import Accuracy, Critical, Depth, Retention, Similarity
from orchestrator.lab.study.firm import Played, expert_bytes, on_link
from orchestrator.lab.study.routing import Load, hot_overlap, loads
from orchestrator.lab.study.study import Findings, share, show_change
from orchestrator.lab.table import Column, Row, Table, fixed
from orchestrator.plan.footprint import model_shape
from orchestrator.policy.dymoe import DyMoESettings

WEIGHTS = (
    "KL and perplexity of this model in place of accuracy: the weights of Mixtral-8x7B and "
    "Qwen3-30B-A3B were not available"
)
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
# Decode steps of a simulated answer, and the link: reading all experts of a token takes this many
# times as long as computing it.
ANSWER, READS = 128, 4.0
# Shares of the experts that have slots, prompt lengths, decode steps of a live answer, and rounds.
SHARES, LENGTHS, STEPS, ROUNDS = (0.25, 0.5, 0.75), (16, 64, 256), 24, 2
RETENTION = 0.75
# Tokens of Figure 3, which has more than a hundred passes over the text.
FEW = 512
# The length of the prompt whose attention is recorded, and the share of its tokens that are heavy
# hitters: the policy's default.
PROMPT, HEAVY = 256, DyMoESettings().heavy_hitters


@cache
def accuracy(on: Measured) -> Findings:
    """Measure the quality loss of each precision alone and of mixes of two precisions."""
    return Accuracy().measure(on.subject())


def table_1(on: Measured) -> Made:
    """Make Table 1: the quality loss of each precision alone."""
    subject, found = on.subject(), accuracy(on)
    rows = found.tables[0].rows
    here = ", ".join(f"{row['configuration']} {row['kl'][0]:.4f}" for row in rows)
    compared = [
        Compared(
            "Int2, Int4 and BF16",
            "MMLU of Mixtral 0.498, 0.680, 0.689; of Qwen3 0.495, 0.771, 0.780",
            f"KL from {subject.best}: {here}",
            WEIGHTS,
        ),
        Compared(
            "is 2 bits far worse than 4",
            "yes: 18 and 28 points of MMLU",
            _times(rows),
            "the best precision here is the file's, not BF16",
        ),
    ]
    return Made(compared, found.tables[:1], found.panels)


def _times(rows: Sequence[Row]) -> str:
    worst, better = rows[0], rows[min(1, len(rows) - 1)]
    if not better["kl"][0]:
        return "one lower precision only"
    ratio = worst["kl"][0] / better["kl"][0]
    return f"{worst['configuration']} loses {ratio:.0f} times as much as {better['configuration']}"


def table_2(on: Measured) -> Made:
    """Make Table 2: the quality loss if less important experts are lowered or skipped.

    A lowered expert is computed in the low precision.
    """
    subject, found = on.subject(), accuracy(on)
    rows = found.tables[1].rows
    paper = {0.75: "4/0 0.6714, 4/2 0.6782", 0.9: "4/0 0.6807, 4/2 0.6821", 1.0: "0.6795"}
    compared = [
        Compared(
            f"r = {r:g}",
            f"MMLU of Mixtral: {said}",
            "; ".join(
                f"{row['configuration']} KL {row['kl'][0]:.4f}, perplexity "
                f"{show_change(row['change'])}"
                for row in rows
                if row["retention"] == r
            ),
            f"{WEIGHTS}; {subject.high} and {subject.low} of the file in place of GPTQ",
        )
        for r, said in paper.items()
    ]
    return Made(compared, found.tables[1:])


def figure_3(on: Measured) -> Made:
    """Make Figure 3: the quality loss if important experts, or random ones, keep high precision."""
    found = Critical().measure(on.subject(FEW))
    compared = []
    for table in found.tables[2:]:  # prompts, of which the paper skips experts
        mine = [row for row in table.rows if row["retention"] == 0.75]
        here = "; ".join(f"{row['configuration']} {show_change(row['change'])}" for row in mine)
        compared.append(
            Compared(
                table.title.split(" (")[0],
                "choice by critical tokens keeps C-Eval at every ratio; no number in the text",
                f"perplexity at r = 0.75: {here}",
                WEIGHTS,
            )
        )
    return Made(compared, found.tables, found.panels, found.rows)


def figure_4(on: Measured) -> Made:
    """Make Figure 4: how often heavy hitters and all tokens use each expert.

    Heavy hitters are the tokens that receive the most attention.
    """
    found = loads(on.trace(PROMPT, 8, "dymoe"), HEAVY)
    if not found:
        raise Unavailable("the model's graph gives no attention scores")
    rows = [
        {
            "layer": each.layer,
            "cosine": float(cosine(each.total, each.heavy)),
            "correlation": _correlation(each.total, each.heavy),
            "random": float(np.mean([_correlation(each.total, one) for one in each.random])),
            "hot": hot_overlap(each.total[None], each.heavy[None], max(1, len(each.total) // 4))[0],
        }
        for each in found
    ]
    columns = (
        Column("layer", "layer"),
        Column("correlation", "correlation", fixed(2)),
        Column("of random tokens", "random", fixed(2)),
        Column("cosine", "cosine", fixed(3)),
        Column("same hot quarter", "hot", share),
    )
    keys = ("correlation", "random", "hot")
    mean = {key: float(np.mean([row[key] for row in rows])) for key in keys}
    compared = [
        Compared(
            "heavy-hitter load of an expert against its load by all tokens",
            "high statistical correlation; no number in the text",
            f"correlation {mean['correlation']:.2f}, of as many random tokens "
            f"{mean['random']:.2f}; {share(mean['hot'])} of the hot quarter is the same "
            f"(means over layers)",
            f"one prompt of {PROMPT} tokens; heavy hitters are {share(HEAVY)} of the tokens by the "
            f"attention of the last 32 queries, because the paper gives no share; the random "
            f"tokens are our baseline",
        ),
        Compared(
            "hot experts of different inputs",
            "they shift from input to input; no number in the text",
            _shift(on),
            "hot quarter of the experts, pairs of sequences",
        ),
    ]
    title = f"Loads in a prompt of {PROMPT} tokens"
    return Made(compared, [Table(title, columns, rows)], [_loads_panel(found[0])])


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of two loads, or 0.0 if one of them is uniform."""
    return float(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else 0.0


def _shift(on: Measured) -> str:
    counts = [each.counts() for each in on.routes[:16]]
    n_hot = max(1, counts[0].shape[1] // 4)
    same = [float(np.mean(hot_overlap(a, b, n_hot))) for a, b in pairwise(counts)]
    return f"{share(float(np.mean(same)))} of the hot experts are the same in two inputs"


def _loads_panel(load: Load) -> Panel:
    every = range(len(load.total))
    drawn = [
        Line("all tokens", every, exact((load.total / load.total.sum()).tolist())),
        Line("heavy hitters", every, exact((load.heavy / load.heavy.sum()).tolist())),
    ]
    return Panel("expert", "share of the load, %", drawn, f"layer {load.layer}", percent=True)


def figure_5(on: Measured) -> Made:
    """Make Figure 5: the quality loss with one layer at a time in the low tier."""
    found = Depth().measure(on.subject())
    kl = [row["kl"][0] for row in found.tables[0].rows]
    third = max(1, len(kl) // 3)
    shallow, deep = float(np.mean(kl[:third])), float(np.mean(kl[-third:]))
    first = sum(each > kl[0] for each in kl)
    compared = [
        Compared(
            "shallow layers are sensitive",
            "yes; no number in the text",
            f"layer 0 is number {first + 1} of {len(kl)} by KL ({kl[0]:.4f})",
            WEIGHTS,
        ),
        Compared(
            "deep layers are resilient",
            "yes; no number in the text",
            f"mean KL of the deepest third {deep:.4f}, of the first third {shallow:.4f}, least "
            f"in layer {int(np.argmin(kl))}",
            f"{len(kl)} layers, the paper's Mixtral has 32",
        ),
    ]
    subject = on.subject()
    panel = Panel(
        f"the layer in {subject.low}",
        f"KL from {subject.best}, nats",
        [Line("", range(len(kl)), [row["kl"] for row in found.tables[0].rows])],
        subject.basis,
        bars=True,
        ticks=subject.layer_ids,
    )
    return Made(compared, found.tables, [panel, *found.panels])


def figure_6(on: Measured) -> Made:
    """Make Figure 6: the similarity of the hidden states of neighbouring layers."""
    found = Similarity().measure(on.subject())
    cosines = [
        value[0]
        for row in found.tables[0].rows
        for value in row.values()
        if isinstance(value, list)
    ]
    ahead = found.tables[1].totals[0]
    recall = {key: value[0] for key, value in ahead.items() if isinstance(value, list)}
    named = ", ".join(f"{name} {share(value)}" for name, value in recall.items())
    compared = [
        Compared(
            "cosine of neighbouring layers",
            "consistently high; no number in the text",
            f"{min(cosines):.2f} to {max(cosines):.2f}",
            "another model and text",
        ),
        Compared(
            "prediction of the next layer's experts",
            NOT_IN_TEXT,
            f"recall by {named}; at random {share(ahead['random'])}",
        ),
    ]
    return Made(compared, found.tables, found.panels)


# Milliseconds by system, by share of the experts that have slots, and by timed part.
Times = dict[tuple[str, float, str], float]


def _cases(on: Measured) -> list[tuple[Case, dict[str, Any]]]:
    """Return the systems of Table 3 and global lru for each cache size, with their settings."""
    subject, found = on.subject(), []
    for cap in SHARES:
        for case in (global_lru(cap), *paper_rows(cap, RETENTION)):
            settings = {**case.settings, "high_tier": subject.high}
            if settings.get("low_tier") not in (None, "skip"):
                settings["low_tier"] = subject.low
            found.append((case, settings))
    return found


@cache
def simulated(on: Measured) -> Times:
    """Simulate the systems of Table 3 for each cache size and prompt length.

    Each prompt starts with an empty cache. The decode time is that of an answer to the prompt of
    middle length.
    """
    high, found = on.subject().high, Times()
    for n in LENGTHS:
        trace = on.trace(n, ANSWER)
        played = Played(on.library, trace, on_link(trace, READS, high))
        every, phases = expert_bytes(trace, high), trace.arrays["step_phase"]
        for case, settings in _cases(on):
            assert case.cap is not None
            tiers = {name: settings.pop(name, None) for name in ("high_tier", "low_tier")}
            settings.pop("force_managed", None)
            slots = int(case.cap * every)
            if case.one_token:
                slots = every * trace.n_expert_used // (trace.n_expert * len(trace.slices))
            _, outcome = played.play(settings.pop("policy"), settings, expert_ram=slots, **tiers)
            step_ms = outcome.step_us / 1000
            found[case.name, case.cap, f"prompt {n}"] = float(step_ms[phases == PREFILL].sum())
            if n == LENGTHS[1]:
                found[case.name, case.cap, "decode"] = float(step_ms[phases == DECODE].mean())
    return found


@cache
def live(on: Measured) -> Times:
    """Measure the real times of the systems of Table 3 for each cache size and prompt length.

    Each time is the median over several rounds. In each round, every system is measured once.
    """
    subject = on.subject()
    with subject.model() as model:
        high = subject.tiers.index(subject.high)
        every, shape = model.tier_bytes[high], model_shape(model, (high,))
    parts: list[Part] = [prompt(LENGTHS[0], COLD), settle(8, 20.0)]
    for n in LENGTHS:
        parts += [prompt(n, f"prompt {n}"), decode(STEPS, 30.0)]
    times: dict[tuple[str, float, str], list[float]] = {}
    for _ in range(ROUNDS):
        for case, settings in _cases(on):
            assert case.cap is not None
            slots = token_slot_bytes(shape) if case.one_token else int(case.cap * every)
            on.report(f"{case.key}", 0.0)
            run = on.timed({**settings, "expert_ram": slots}, parts)
            for part in run["parts"]:
                found = times.setdefault((case.name, case.cap, part["name"]), [])
                found += times_ms({"parts": [part]}, part["name"])
    return {key: float(np.median(each)) for key, each in times.items()}


_SIMULATED = (
    f"virtual time: a replay in which reading all experts of a token takes {READS:g} times its "
    f"computing, and every prompt starts with an empty cache; the paper has Mixtral-8x7B, PCIe 3.0 "
    f"and an RTX 3090"
)
_LIVE = (
    "live times of a small model whose file fits the page cache, on a busy machine: reads cost "
    "little, and the differences are noise"
)


def _names(times: Times) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in times))


def _ratios(times: Times, base: str, name: str, part: str) -> str:
    """Return how many times as fast as `base` a system is, for each cache size, as text."""
    return ", ".join(f"{times[base, cap, part] / times[name, cap, part]:.2f}" for cap in SHARES)


def _table(title: str, times: Times) -> Table:
    """Return a table of all times, with a row for each system and cache size."""
    parts = ("decode", *(f"prompt {n}" for n in LENGTHS))
    rows: list[Row] = [
        {"name": name, "cap": cap} | {part: times[name, cap, part] for part in parts}
        for cap in SHARES
        for name in _names(times)
    ]
    columns = (
        Column("slots", "cap", share),
        Column("", "name", left=True),
        Column("TPOT", "decode", fixed(2), "ms"),
        *(Column(f"TTFT {n}", f"prompt {n}", fixed(1), "ms") for n in LENGTHS),
    )
    return Table(title, columns, rows)


def table_3(on: Measured) -> Made:
    """Make Table 3: speed with each part of DyMoE added in turn."""
    times, timed = simulated(on), live(on)
    names, length = _names(times), f"prompt {LENGTHS[1]}"
    said: list[str] = []
    for (small, large), ttft in PAPER_RATIOS.values():
        units = ("", "") if said else (" (16 GB)", " (24 GB)")
        tpot = f"{small:.2f}{units[0]}, {large:.2f}{units[1]}"
        said.append(f"TPOT {tpot}; TTFT {ttft[0]:.2f}, {ttft[1]:.2f}")
    of = f"with {', '.join(share(cap) for cap in SHARES)} of the experts in slots"
    compared = [
        Compared(
            f"{name}, times as fast as {ON_DEMAND}",
            paper,
            f"TPOT {_ratios(times, ON_DEMAND, name, 'decode')}; "
            f"TTFT {_ratios(times, ON_DEMAND, name, length)} {of}",
            _SIMULATED,
        )
        for name, paper in zip(names[2:], said, strict=True)
    ]
    compared += [
        Compared(
            "row 6 over lru, the null baseline",
            "not compared",
            f"TPOT {_ratios(times, names[0], names[-1], 'decode')}; "
            f"TTFT {_ratios(times, names[0], names[-1], length)} {of}",
            "load on demand keeps nothing from token to token; an LRU cache is the fairer base",
        ),
        Compared(
            f"live, row 6: times as fast as {ON_DEMAND}",
            said[-1],
            f"TPOT {_ratios(timed, ON_DEMAND, names[-1], 'decode')}; "
            f"TTFT {_ratios(timed, ON_DEMAND, names[-1], length)} {of}",
            _LIVE,
        ),
    ]
    drawn = [
        Line(
            name,
            [100 * cap for cap in SHARES],
            exact([times[name, cap, "decode"] for cap in SHARES]),
        )
        for name in names
    ]
    title = f"Virtual time, 4/2 and 4/0 at r = {RETENTION}"
    panel = Panel("slots, % of the experts", "decode step, ms", drawn, title, scale="log")
    second = f"Live times, medians of {ROUNDS} rounds"
    return Made(compared, [_table(title, times), _table(second, timed)], [panel])


def figure_10(on: Measured) -> Made:
    """Make Figure 10: the speed of DyMoE over loading on demand and over an LRU cache."""
    times = simulated(on)
    names = _names(times)
    lru, best = names[0], names[-1]
    of = f"with {', '.join(share(cap) for cap in SHARES)} of the experts in slots"
    said = {
        "TTFT": "22.7 times Fiddler (24 GB), 7.2 to 8.3 Accelerate, 4.2 to 14.58 "
        "Mixtral-Offloading, Qwen3 3.44 Accelerate (12 GB)",
        "TPOT": "14.58 times Fiddler (16 GB), 8.31 Accelerate, up to 2.27 Mixtral-Offloading, "
        "Qwen3 2.86 Accelerate",
    }
    parts = {f"TTFT, prompt of {n}": f"prompt {n}" for n in LENGTHS} | {"TPOT": "decode"}
    compared = [
        Compared(
            f"{what}: speed of 4/0 over other systems",
            said[what[:4]],
            f"over load on demand {_ratios(times, ON_DEMAND, best, part)}, over lru "
            f"{_ratios(times, lru, best, part)} {of}",
            f"{_SIMULATED}; Accelerate, Mixtral-Offloading, MoE-Infinity and Fiddler are not run "
            f"here",
        )
        for what, part in parts.items()
    ]
    panels = [
        Panel(
            "prompt, tokens",
            "time to first token, ms",
            [
                Line(name, LENGTHS, exact([times[name, cap, f"prompt {n}"] for n in LENGTHS]))
                for name in (lru, ON_DEMAND, names[-2], best)
            ],
            f"{share(cap)} of the experts in slots",
        )
        for cap in SHARES
    ]
    return Made(compared, [], panels)


def figure_11(on: Measured) -> Made:
    """Make Figure 11: the quality loss by the fraction of experts that keep high precision."""
    found = Retention().measure(on.subject())
    rows = [row for row in found.tables[0].rows if row["retention"] is not None]
    labels = dict.fromkeys(row["configuration"] for row in rows)
    compared = [
        Compared(
            name,
            "smooth; GSM8K drops at r = 0.75 and recovers near 0.9",
            ", ".join(
                f"r = {row['retention']:g}: KL {row['kl'][0]:.4f}"
                for row in rows
                if row["configuration"] == name
            ),
            WEIGHTS,
        )
        for name in labels
    ]
    return Made(compared, found.tables, found.panels)


PAPER = Paper(
    "dymoe",
    "DyMoE",
    (
        Figure("Table 1", "accuracy of each precision alone", table_1),
        Figure("Table 2", "accuracy of mixes", table_2),
        Figure("Table 3", "speed with each part of DyMoE added in turn", table_3),
        Figure("Figure 3", "critical experts by importance and at random", figure_3),
        Figure("Figure 4", "load of heavy hitters and of all tokens", figure_4),
        Figure("Figure 5", "sensitivity of each layer", figure_5),
        Figure("Figure 6", "similarity of neighbouring layers", figure_6),
        Figure("Figure 10", "end-to-end latency", figure_10),
        Figure("Figure 11", "accuracy over the retention ratio", figure_11),
    ),
)
