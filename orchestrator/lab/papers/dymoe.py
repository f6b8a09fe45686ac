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
    "We measure KL divergence and perplexity of another model instead of accuracy, because the "
    "weights of Mixtral-8x7B and Qwen3-30B-A3B were not available"
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
    """Measure how much quality a model loses if its experts have fewer bits per weight.

    First, all experts have the same precision. Then the important experts have the high precision,
    and the others have the low precision or are skipped.

    `on` is the model, and the text on which quality is measured. Returns two tables and a plot.
    """
    return Accuracy().measure(on.subject())


def table_1(on: Measured) -> Made:
    """Reproduce Table 1 of the DyMoE paper: the quality loss of each precision alone.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    subject, found = on.subject(), accuracy(on)
    rows = found.tables[0].rows
    here = "; ".join(f"{row['configuration']} {row['kl'][0]:.4f}" for row in rows)
    compared = [
        Compared(
            "quality in Int2, Int4 and BF16",
            "MMLU accuracy in Int2, Int4 and BF16: Mixtral-8x7B has 0.498, 0.680 and 0.689; "
            "Qwen3-30B-A3B has 0.495, 0.771 and 0.780",
            f"KL divergence from {subject.best}, nats per token: {here}",
            WEIGHTS,
        ),
        Compared(
            "quality with 2 bits per weight compared with 4 bits",
            "MMLU accuracy with 2 bits per weight is 18 points (Mixtral) and 28 points (Qwen3) "
            "lower than with 4 bits",
            _times(rows),
            "Our KL divergence is from the best precision of our model file. The paper compares "
            "with BF16",
        ),
    ]
    return Made(compared, found.tables[:1], found.panels)


def _times(rows: Sequence[Row]) -> str:
    worst, better = rows[0], rows[min(1, len(rows) - 1)]
    if not better["kl"][0]:
        return "not measured: the model file needs two precisions below its best precision"
    ratio = worst["kl"][0] / better["kl"][0]
    return (
        f"KL divergence is {ratio:.0f} times as large with '{worst['configuration']}' as with "
        f"'{better['configuration']}'"
    )


def table_2(on: Measured) -> Made:
    """Reproduce Table 2 of the DyMoE paper: the quality loss if experts have two precisions.

    For each token, the experts with the largest gate scores have the high precision. The others are
    computed in the low precision, or skipped. Three fractions of experts in the high precision are
    measured.

    `on` is the model and the text. Returns a table, and the comparison with the paper's numbers.
    """
    subject, found = on.subject(), accuracy(on)
    rows = found.tables[1].rows
    accuracies = (
        "MMLU accuracy of Mixtral-8x7B: {} if the less important experts are skipped, and {} if "
        "they have 2 bits per weight"
    )
    paper = {
        0.75: accuracies.format(0.6714, 0.6782),
        0.9: accuracies.format(0.6807, 0.6821),
        1.0: "MMLU accuracy of Mixtral-8x7B: 0.6795",
    }
    compared = [
        Compared(
            f"quality with a share of r = {r:g} of the experts in high precision",
            said,
            "; ".join(
                f"{row['configuration']} KL {row['kl'][0]:.4f}, perplexity "
                f"{show_change(row['change'])}"
                for row in rows
                if row["retention"] == r
            ),
            f"{WEIGHTS}. The paper quantizes with GPTQ. Our precisions are those of the model "
            f"file, {subject.high} and {subject.low}",
        )
        for r, said in paper.items()
    ]
    return Made(compared, found.tables[1:])


def figure_3(on: Measured) -> Made:
    """Reproduce Figure 3 of the DyMoE paper: the quality if only some experts have high precision.

    These experts are chosen by several measures of importance, or at random. All other experts
    have the low precision, or are skipped.

    `on` is the model and the text. Returns tables, plots, and the comparison with the paper.
    """
    found = Critical().measure(on.subject(FEW))
    compared = []
    for table in found.tables[2:]:  # prompts, of which the paper skips experts
        mine = [row for row in table.rows if row["retention"] == 0.75]
        here = "; ".join(f"{row['configuration']} {show_change(row['change'])}" for row in mine)
        compared.append(
            Compared(
                table.title.split(" (")[0],
                "Performance on C-Eval is maintained if the experts that process more critical "
                "tokens (heavy hitters) are kept. The paper's text gives no values",
                f"With 75 % instead of all experts in high precision, perplexity changes as "
                f"follows, for each way to choose these experts: {here}",
                WEIGHTS,
            )
        )
    return Made(compared, found.tables, found.panels, found.rows)


def figure_4(on: Measured) -> Made:
    """Reproduce Figure 4 of the DyMoE paper: how often heavy hitters use each expert.

    Heavy hitters are the tokens that receive the most attention. Their expert usage is compared
    with that of all tokens.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    Raises Unavailable if the model does not expose attention scores.
    """
    found = loads(on.trace(PROMPT, 8, "dymoe"), HEAVY)
    if not found:
        raise Unavailable(
            "llama.cpp's graph of this model has no attention scores. Without these scores, the "
            "tokens that receive the most attention (heavy hitters) cannot be found"
        )
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
        Column("correlation, random tokens", "random", fixed(2)),
        Column("cosine", "cosine", fixed(3)),
        Column("same hot quarter", "hot", share),
    )
    keys = ("correlation", "random", "hot")
    mean = {key: float(np.mean([row[key] for row in rows])) for key in keys}
    compared = [
        Compared(
            "correlation of the expert usage by heavy hitters (the tokens that receive the most "
            "attention) with the expert usage by all tokens",
            "An expert's total number of tokens and its number of heavy hitters (the tokens that "
            "receive the most attention) have a high correlation. The paper's text gives no value",
            f"Correlation with the expert usage by all tokens, mean over layers: usage by heavy "
            f"hitters (tokens with the most attention) {mean['correlation']:.2f}, usage by random "
            f"tokens {mean['random']:.2f}. Of the most used quarter of the experts, "
            f"{share(mean['hot'])} are the same for heavy hitters and all tokens",
            f"Our heavy hitters are the {share(HEAVY)} of {PROMPT} prompt tokens that receive the "
            f"most attention from the last 32 tokens. The paper states no number of heavy hitters",
        ),
        Compared(
            "whether different texts have the same most used experts",
            "The most used experts differ from text to text. The paper's text does not state how "
            "many of them differ",
            _shift(on),
            "Our most used experts are the quarter of a layer's experts that a passage uses most. "
            "We compare each passage of our text with the next passage",
        ),
    ]
    title = (
        f"Expert usage in a prompt of {PROMPT} tokens, by heavy hitters (tokens that receive the "
        f"most attention) and by all tokens"
    )
    return Made(compared, [Table(title, columns, rows)], [_loads_panel(found[0])])


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of two loads, or 0.0 if one of them is uniform."""
    return float(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else 0.0


def _shift(on: Measured) -> str:
    counts = [each.counts() for each in on.routes[:16]]
    n_hot = max(1, counts[0].shape[1] // 4)
    same = [float(np.mean(hot_overlap(a, b, n_hot))) for a, b in pairwise(counts)]
    common = share(float(np.mean(same)))
    return f"On average, two passages have {common} of their most used experts in common"


def _loads_panel(load: Load) -> Panel:
    every = range(len(load.total))
    drawn = [
        Line("all tokens", every, exact((load.total / load.total.sum()).tolist())),
        Line("heavy hitters", every, exact((load.heavy / load.heavy.sum()).tolist())),
    ]
    label = "expert's share of all expert uses in its layer, %"
    return Panel("expert", label, drawn, f"layer {load.layer}", percent=True)


def figure_5(on: Measured) -> Made:
    """Reproduce Figure 5 of the DyMoE paper: the quality loss with one layer in low precision.

    For each layer, a measurement is made in which only this layer has the low precision. All other
    layers have the best precision.

    `on` is the model and the text. Returns a table, plots, and the comparison with the paper.
    """
    found = Depth().measure(on.subject())
    kl = [row["kl"][0] for row in found.tables[0].rows]
    third = max(1, len(kl) // 3)
    shallow, deep = float(np.mean(kl[:third])), float(np.mean(kl[-third:]))
    first = sum(each > kl[0] for each in kl)
    compared = [
        Compared(
            "Are shallow layers sensitive to low precision?",
            "Shallow layers are sensitive to low precision. The paper's text does not state the "
            "quality loss",
            f"KL divergence with only layer 0 in low precision: {kl[0]:.4f} nats per token, rank "
            f"{first + 1} of {len(kl)} layers (rank 1 has the largest KL divergence)",
            WEIGHTS,
        ),
        Compared(
            "Are deep layers resilient to low precision?",
            "Deep layers are resilient to low precision. The paper's text does not state the "
            "quality loss",
            f"Mean KL divergence from {on.subject().best} with one layer in low precision: "
            f"{deep:.4f} for layers of the deepest third, {shallow:.4f} for layers of the first "
            f"third. Smallest KL divergence: layer {int(np.argmin(kl))}",
            f"Our model has {len(kl)} layers, and the paper's Mixtral-8x7B has 32",
        ),
    ]
    subject = on.subject()
    panel = Panel(
        f"layer in low precision ({subject.low})",
        f"KL divergence from {subject.best}, nats per token",
        [Line("", range(len(kl)), [row["kl"] for row in found.tables[0].rows])],
        subject.basis,
        bars=True,
        ticks=subject.layer_ids,
    )
    return Made(compared, found.tables, [panel, *found.panels])


def figure_6(on: Measured) -> Made:
    """Reproduce Figure 6 of the DyMoE paper: how similar the hidden states of layers are.

    Each layer is compared with the layer before. Also measures how well a layer's experts are
    predicted from the layer before.

    `on` is the model and the text. Returns tables, plots, and the comparison with the paper.
    """
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
            "cosine similarity of the hidden states of neighbouring layers",
            "All neighbouring layers have similar hidden states. The paper's text gives no value "
            "for the similarity",
            f"{min(cosines):.2f} to {max(cosines):.2f}",
            "Our model and text differ from the paper's",
        ),
        Compared(
            "share of the next layer's experts that are predicted (recall)",
            NOT_IN_TEXT,
            f"Correctly predicted experts, by the method of prediction: {named}, random guesses "
            f"{share(ahead['random'])}",
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
    """Simulate the speed of the systems in Table 3 of the DyMoE paper, and of an LRU cache.

    Each system is a way to load experts, such as a cache with prefetching. `on` is the model and
    the text.

    Returns a dict of times in milliseconds. A key is a tuple: the system's name, its cache size
    (fraction of all experts), and the timed work. "prompt 64" is to read a prompt of 64 tokens,
    starting with an empty cache. "decode" is the mean decode step after this prompt.
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
    """Measure the speed of the systems in Table 3 of the DyMoE paper, and of an LRU cache.

    Each system is a way to load experts, such as a cache with prefetching. `on` is the model and
    the text.

    Returns a dict of times in milliseconds, as medians over several rounds. A key is a tuple: the
    system's name, its cache size (fraction of all experts), and the timed work. "prompt 64" is to
    read a prompt of 64 tokens, and "decode" is one decode step.
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
    f"Our times are simulated: reading a token's experts takes {READS:g} times as long as "
    f"computing the token. Each prompt starts with an empty cache. The paper measures "
    f"Mixtral-8x7B on an RTX 3090 (PCIe 3.0)"
)
_LIVE = (
    "We measure a small model on a busy machine. The whole file is in the page cache, so reads "
    "cost little and the differences are noise"
)


def _names(times: Times) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in times))


def _ratios(times: Times, base: str, name: str, part: str) -> str:
    """Return how many times as fast as `base` a system is, for each cache size, as text."""
    ratios = {cap: times[base, cap, part] / times[name, cap, part] for cap in SHARES}
    return ", ".join(f"{ratio:.2f} ({share(cap)})" for cap, ratio in ratios.items())


def _speedups(times: Times, base: str, name: str) -> str:
    """Return how many times as fast as `base` a system decodes and reads a prompt, as text."""
    tpot = _ratios(times, base, name, "decode")
    ttft = _ratios(times, base, name, f"prompt {LENGTHS[1]}")
    return (
        f"speed relative to '{base}' by share of cached experts: decoding {tpot}; first token "
        f"{ttft}"
    )


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
    """Reproduce Table 3 of the DyMoE paper: the speed as techniques are added to loading on demand.

    The techniques are a cache of experts, prefetching, and low precision for less important
    experts, or skipping them. Speeds are simulated and also measured.

    `on` is the model and the text. Returns tables, a plot, and the comparison with the paper's
    numbers.
    """
    times, timed = simulated(on), live(on)
    names = _names(times)
    said = [
        f"speed relative to '{ON_DEMAND}' by GPU memory: decoding {tpot[0]:.2f} (16 GB), "
        f"{tpot[1]:.2f} (24 GB); first token {ttft[0]:.2f} (16 GB), {ttft[1]:.2f} (24 GB)"
        for tpot, ttft in PAPER_RATIOS.values()
    ]
    compared = [
        Compared(
            f"speed of '{name}' relative to '{ON_DEMAND}'",
            paper,
            _speedups(times, ON_DEMAND, name),
            _SIMULATED,
        )
        for name, paper in zip(names[2:], said, strict=True)
    ]
    compared += [
        Compared(
            f"speed of '{names[-1]}' relative to a plain LRU cache (policy lru)",
            "The paper does not make this comparison",
            _speedups(times, names[0], names[-1]),
            "Loading on demand keeps no expert from one token to the next, so an LRU cache is the "
            "fairer baseline",
        ),
        Compared(
            f"measured (not simulated) speed of '{names[-1]}' relative to '{ON_DEMAND}'",
            said[-1],
            _speedups(timed, ON_DEMAND, names[-1]),
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
    subject = on.subject()
    title = (
        f"Simulated times. In rows 4 to 6, {share(RETENTION)} of the experts are in "
        f"{subject.high}. All other experts are in {subject.low} in rows 4 and 5, and are skipped "
        f"in row 6"
    )
    panel = Panel("cache size, % of the experts", "decode step, ms", drawn, title, scale="log")
    second = f"Times measured on this machine, medians of {ROUNDS} rounds"
    return Made(compared, [_table(title, times), _table(second, timed)], [panel])


def figure_10(on: Measured) -> Made:
    """Reproduce Figure 10 of the DyMoE paper: how many times as fast as simpler methods DyMoE is.

    DyMoE caches and prefetches experts, and skips the less important experts. The simpler methods
    are loading every expert on demand, and an LRU cache. All times are simulated.

    `on` is the model and the text. Returns plots, and the comparison with the paper's numbers.
    """
    times = simulated(on)
    names = _names(times)
    lru, best = names[0], names[-1]
    said = {
        "TTFT": (
            "Speedup of the first token with DyMoE. Mixtral-8x7B: 7.2 to 8.3 over Accelerate, 4.2 "
            "to 14.58 over Mixtral-Offloading, 22.7 over Fiddler (24 GB). Qwen3: 3.44 over "
            "Accelerate (12 GB)"
        ),
        "TPOT": (
            "Speedup of decoding with DyMoE. Mixtral-8x7B: 8.31 over Accelerate, up to 2.27 over "
            "Mixtral-Offloading, 14.58 over Fiddler (16 GB). Qwen3: 2.86 (12 GB, baseline not "
            "named)"
        ),
    }
    parts = {f"TTFT, prompt of {n} tokens": f"prompt {n}" for n in LENGTHS} | {"TPOT": "decode"}
    compared = []
    for what, part in parts.items():
        over_loading, over_lru = (_ratios(times, base, best, part) for base in (ON_DEMAND, lru))
        compared.append(
            Compared(
                f"{what}: speed of DyMoE relative to other systems",
                said[what[:4]],
                f"DyMoE skips less important experts. Its speed by share of cached experts, "
                f"relative to loading on demand: {over_loading}; relative to an LRU cache (policy "
                f"lru): {over_lru}",
                f"{_SIMULATED}. We did not run Accelerate, Mixtral-Offloading, MoE-Infinity and "
                f"Fiddler",
            )
        )
    panels = [
        Panel(
            "prompt, tokens",
            "time to first token, ms",
            [
                Line(name, LENGTHS, exact([times[name, cap, f"prompt {n}"] for n in LENGTHS]))
                for name in (lru, ON_DEMAND, names[-2], best)
            ],
            f"cache for {share(cap)} of the experts",
        )
        for cap in SHARES
    ]
    return Made(compared, [], panels)


def figure_11(on: Measured) -> Made:
    """Reproduce Figure 11 of the DyMoE paper: the quality loss by the retention ratio.

    The retention ratio is the fraction of experts that keep the high precision. The others have the
    low precision, or are skipped.

    `on` is the model and the text. Returns a table, plots, and the comparison with the paper.
    """
    found = Retention().measure(on.subject())
    rows = [row for row in found.tables[0].rows if row["retention"] is not None]
    labels = dict.fromkeys(row["configuration"] for row in rows)
    compared = [
        Compared(
            f"quality by the share r of the experts in high precision, {name}",
            "A higher share r of the experts in high precision yields better accuracy. Accuracy on "
            'GSM8K is "more sensitive" to r at 0.75 and "recovers rapidly" towards 0.9',
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
        Figure("Table 2", "accuracy if experts have different precisions", table_2),
        Figure(
            "Table 3",
            "speed with each technique of DyMoE added in turn. With 4/2, less important experts "
            "have 2 bits per weight. With 4/0, these experts are skipped",
            table_3,
        ),
        Figure(
            "Figure 3",
            "quality with the experts in high precision chosen by importance or at random",
            figure_3,
        ),
        Figure(
            "Figure 4",
            "expert usage by heavy hitters (the tokens that receive the most attention) and by all "
            "tokens",
            figure_4,
        ),
        Figure("Figure 5", "sensitivity of each layer to low precision", figure_5),
        Figure("Figure 6", "similarity of the hidden states of neighbouring layers", figure_6),
        Figure("Figure 10", "end-to-end latency", figure_10),
        Figure(
            "Figure 11",
            "accuracy by the share of experts in high precision (retention ratio)",
            figure_11,
        ),
    ),
)
