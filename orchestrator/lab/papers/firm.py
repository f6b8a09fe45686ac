"""FIRM-MoE: Fine-Grained Expert Decomposition for Resource-Adaptive MoE Inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchestrator.errors import BudgetError
from orchestrator.lab.papers.measured import Measured
from orchestrator.lab.papers.paper import Compared, Figure, Made, Paper, Unavailable
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.replay.report import RIGID
from orchestrator.lab.study import heop
from orchestrator.lab.study.activations import read_windows, routers_of
from orchestrator.lab.study.firm import (
    BASE,
    NO_PREFETCH,
    Played,
    Variant,
    compared_variants,
    expert_bytes,
    measure_votes,
    on_link,
)
from orchestrator.lab.study.study import lines
from orchestrator.lab.study.votes import VotesStudy
from orchestrator.lab.table import Column, Row, Table, fixed, percent
from orchestrator.policy.firm import FIRM, GROUPS, MOL, RANK

# The recorded run of most figures: tokens of its prompt and of its answer.
PROMPT, ANSWER = 64, 384
# Shares of the experts that have slots. Qwen1.5-MoE's 128 to 768 of 1,440 experts are 9 to 53 %.
SHARES = (0.36, 0.53, 0.75, 0.9)
# Links: reading all experts of a token takes this many times as long as computing it.
SLOW, FAST = 4.0, 0.5
# The 15 pairs of Figure 5, and the share of the experts that have slots there.
PROMPTS, ANSWERS, HELD = (16, 32, 64, 128, 256), (32, 64, 128), 0.53
# Text whose logits are read for Figure 6, and the share of the experts that its cache holds.
LOGITS, CACHED = 768, 0.5

slots = percent(0, " %")
_MACHINE = (
    f"Our times are simulated: reading a token's experts takes {SLOW:g} times as long as "
    f"computing the token. Our cache has the same number of slots for each layer. The paper has "
    f"one LRU cache for all layers, on an RTX 3090 (PCIe 4.0)"
)


def recording(
    on: Measured, prompt: int | None = None, answer: int | None = None, reads: float = SLOW
) -> Played:
    """Return a recording of the model's routing, and the options with which it is replayed.

    The recording has the experts that each token uses, and those that each layer predicts for later
    layers. A replay simulates how long the recorded tokens would take with another policy and disk.

    - on: the model and the text.
    - prompt, answer: number of tokens in the recorded prompt and in its answer. None uses PROMPT
      and ANSWER.
    - reads: simulated time to read all experts of a token, divided by the time to compute a token.
    """
    trace = on.trace(prompt or PROMPT, answer or ANSWER)
    return Played(on.library, trace, on_link(trace, reads))


def table_1(on: Measured) -> Made:
    """Reproduce Table 1 of the FIRM-MoE paper: how much each technique speeds up decoding.

    Decoding is simulated. As in the paper, all reads of experts wait in one queue.

    `on` is the model and the text. Returns two tables, a plot, and the comparison with the paper.
    """
    (table, panel), (other, _) = (
        compared_variants(recording(on, reads=reads), BASE, SHARES) for reads in (SLOW, FAST)
    )
    fg = "prefetch of only the gate matrix of each expert (FG)"
    mol = (
        "prefetch of only the experts that several earlier layers predict (Meeting of Layers, MoL)"
    )
    both = (
        "prefetch of only the gate matrix (FG) of the experts that several earlier layers predict "
        "(Meeting of Layers, MoL)"
    )
    tuned = (
        "all techniques: prefetch of only gate matrices (FG), several predicting layers (MoL), and "
        "tuned numbers of predicting layers and predicted experts"
    )
    # Each row of the study, with a description and the paper's ratios by number of cached experts.
    paper = {
        "+ FG: gates alone": (fg, (1.32, 1.31, 1.24, 1.41)),
        "+ MoL": (mol, (1.21, 1.22, 1.21, 1.27)),
        "+ FG + MoL": (both, (1.43, 1.43, 1.19, 1.43)),
        "all: tuned": (tuned, (1.65, 1.62, 1.29, 1.54)),
    }
    compared = []
    for name, (technique, ratios) in paper.items():
        slow_disk, fast_disk = (_by_share(each.rows, name, "speedup") for each in (table, other))
        by_cached = ", ".join(
            f"{n}: {ratio:.2f}" for n, ratio in zip((128, 256, 512, 768), ratios, strict=True)
        )
        compared.append(
            Compared(
                f"speed relative to the paper's baseline, with {technique}",
                f"speed relative to the baseline, by number of cached experts: {by_cached}",
                f"speed relative to the baseline, by share of cached experts: {slow_disk}. Speed "
                f"relative to the baseline, if both have a simulated disk that is "
                f"{SLOW / FAST:g} times as fast: {fast_disk}",
                _MACHINE,
            )
        )
    return Made(compared, [table, other], [panel])


def _by_share(rows: Sequence[Row], name: str, key: str, digits: int = 2) -> str:
    """Return one system's relative speed, for each share of experts with slots."""
    mine = [row for row in rows if row["name"] == name]
    return ", ".join(f"{slots(row['held'])}: {row[key]:.{digits}f}" for row in mine)


def table_2(on: Measured) -> Made:
    """Reproduce Table 2 of the FIRM-MoE paper: the speed by the number of prefetched matrices.

    An expert has three matrices, of which one, two or all are prefetched. The speed is simulated,
    in tokens per second.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    run, rows = recording(on), []
    every = expert_bytes(run.trace)
    shared, rigid = "demand reads come first", "one queue for all reads"
    worlds: dict[str, dict[str, Any]] = {shared: {}, rigid: {"link": RIGID}}
    for world, changes in worlds.items():
        for n in (1, 2, 3):
            settings = {"prefetch": "on", "agree": MOL, "prefetch_kinds": n}
            for held in SHARES:
                part = Variant(f"n = {n}", FIRM.name, settings, changes)
                try:
                    took_ms = run.answer(part, int(held * every))
                except BudgetError:
                    continue
                speed = 1000 * len(took_ms) / took_ms[-1]
                rows.append({"name": part.name, "world": world, "held": held, "speed": speed})
    columns = (
        Column("order of reads", "world", left=True),
        Column("", "name", left=True),
        Column("slots", "held", slots),
        Column("tok/s including prompt time", "speed", fixed(1)),
    )
    compared = []
    for order in worlds:
        mine = [row for row in rows if row["world"] == order]
        best = {
            held: max((row for row in mine if row["held"] == held), key=lambda row: row["speed"])
            for held in dict.fromkeys(row["held"] for row in mine)
        }
        here = ", ".join(f"{slots(held)}: {row['name']}" for held, row in best.items())
        compared.append(
            Compared(
                f"number n of prefetched matrices per expert that gives the most tokens/s. Order "
                f"of the disk reads: {order}",
                "OLMoE with 256 cached experts: 5.31 tokens/s with one prefetched matrix per "
                "expert, 4.76 with two. Qwen1.5 with 128 cached experts: 3.51 tokens/s with one "
                "prefetched matrix, 3.75 with two",
                f"number n of prefetched matrices per expert that gives the most tokens/s, for "
                f"caches with slots for the following shares of all experts: {here}",
                f"We also measure n = 3, the prefetch of all three matrices of an expert. "
                f"{_MACHINE}",
            )
        )
    drawn = lines(
        [row for row in rows if row["world"] == shared],
        lambda row: 100 * row["held"],
        lambda row: [row["speed"], None],
        "name",
    )
    panel = Panel(
        "slots, % of the experts", "tokens/s including prompt time", drawn, run.trace.header.model
    )
    title = "Speed by the number n of prefetched matrices per expert"
    return Made(compared, [Table(title, columns, rows)], [panel])


def figure_4(on: Measured) -> Made:
    """Reproduce Figure 4 of the FIRM-MoE paper: decode time by the size of the expert cache.

    The time of a decode step is simulated for several methods of loading experts.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    table, _ = compared_variants(recording(on), NO_PREFETCH, SHARES)
    # Two rows that are hardly told apart from n = 3 are in the table only.
    shown = [row for row in table.rows if row["name"] not in ("firm, rank, n=1", "firm, rank, n=2")]
    drawn = lines(
        shown, lambda row: 100 * row["held"], lambda row: [row["tpot_ms_mean"], None], "name"
    )
    panel = Panel("slots, % of the experts", "mean decode step, ms", drawn, on.config.model.name)
    speedups = _by_share(table.rows, "firm, mol, n=1", "speedup")
    compared = [
        Compared(
            "speed with Meeting of Layers (MoL), divided by the speed of a baseline. MoL "
            "prefetches the experts that several earlier layers predict",
            "Speed of FIRM-MoE relative to the paper's baseline on Qwen1.5-MoE: up to 1.8 with 128 "
            "cached experts, 1.6 with 768",
            f"speed with Meeting of Layers (MoL) relative to the speed without prefetch, for each "
            f"share of cached experts: {speedups}",
            f"Our baseline for this figure has no prefetch. The paper's baseline prefetches whole "
            f"experts, as does our baseline for Table 1. With Meeting of Layers (MoL), we prefetch "
            f"one matrix per expert. {_MACHINE}",
        ),
        Compared(
            "slowdown of decoding with a small expert cache",
            "Decoding is less than 30 % slower with 128 cached experts than with 768. With 768 "
            "experts, the paper's system needs 2.85 times the memory",
            _slowdown(table.rows),
            "In our simulation, computing takes little time. So decode time depends mostly on how "
            "many bytes are read into the cache",
        ),
    ]
    return Made(compared, [table], [panel])


def _slowdown(rows: Sequence[Row]) -> str:
    mine = [row for row in rows if row["name"] == "firm, mol, n=1"]
    first, last = mine[0], mine[-1]
    ratio = first["tpot_ms_mean"] / last["tpot_ms_mean"]
    return (
        f"with {slots(first['held'])} of the experts cached, decoding takes {ratio:.2f} times as "
        f"long as with {slots(last['held'])} cached"
    )


def figure_5(on: Measured) -> Made:
    """Reproduce Figure 5 of the FIRM-MoE paper: simulated speed for prompts and answers by length.

    The speed is in tokens per second. Fifteen pairs of prompt and answer length are simulated.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    listed = [
        Variant("lru", "lru", {}),
        Variant("firm without prefetch", FIRM.name, {"prefetch": "off"}),
        Variant("firm with default settings", FIRM.name, {"prefetch": "on", "agree": RANK}),
        Variant(
            "firm with the paper's settings",
            FIRM.name,
            {"prefetch": "on", "agree": MOL, "prefetch_kinds": 1},
        ),
    ]
    rows: list[Row] = []
    for prompt in PROMPTS:
        run = recording(on, prompt, max(ANSWERS))
        room = int(HELD * expert_bytes(run.trace))
        for part in listed:
            took_ms = run.answer(part, room)
            rows += [
                {
                    "name": part.name,
                    "prompt": prompt,
                    "answer": n,
                    "speed": 1000 * n / took_ms[n - 1],
                }
                for n in ANSWERS
            ]
    base = {(row["prompt"], row["answer"]): row["speed"] for row in rows if row["name"] == "lru"}
    for row in rows:
        row["over"] = row["speed"] / base[row["prompt"], row["answer"]]
    columns = (
        Column("", "name", left=True),
        Column("prompt", "prompt"),
        Column("answer", "answer"),
        Column("tok/s", "speed", fixed(1)),
        Column("x lru", "over", fixed(3)),
    )
    means = {
        part.name: float(np.mean([row["over"] for row in rows if row["name"] == part.name]))
        for part in listed[1:]
    }
    drawn = [
        Line(
            part.name,
            range(len(base)),
            exact([row["over"] for row in rows if row["name"] == part.name]),
        )
        for part in listed[1:]
    ]
    compared = [
        Compared(
            f"speed of FIRM-MoE, divided by the speed of other systems. Mean of {len(base)} pairs "
            f"of prompt length and answer length",
            "FIRM-MoE is 1.31 times as fast as Fiddler and llama.cpp",
            "speed divided by the speed of the policy lru: "
            + ", ".join(f"{name} {ratio:.2f}" for name, ratio in means.items()),
            f"We did not run Fiddler, so we compare with the policy lru. The paper's text does not "
            f"state the prompt and answer lengths. {_MACHINE}",
        )
    ]
    title = f"Speed including prompt time, with cache slots for {HELD:.0%} of the experts"
    ticks = [f"{prompt} + {answer}" for prompt, answer in base]
    panel = Panel(
        "tokens of the prompt + tokens of the answer",
        "speed relative to lru",
        drawn,
        title,
        ticks=ticks,
    )
    return Made(compared, [Table(title, columns, rows)], [panel])


def figure_6(on: Measured) -> Made:
    """Reproduce Figure 6 of the FIRM-MoE paper: the prediction loss (eq. 11) for each pair (K, P).

    To predict the experts of a layer, each of the P layers before it names K experts. K is at most
    twice the number of experts per token. Also shows the pairs that the paper's Algorithm 1 and our
    search methods choose.

    `on` is the model and the text. Returns tables, plots, and the comparison with the paper. Raises
    Unavailable if the model's file has no router matrices.
    """
    subject = on.subject(LOGITS)
    k, n_expert = subject.n_expert_used, subject.n_expert
    routers = routers_of(subject)
    if all(router is None for router in routers[1:]):
        raise Unavailable(
            "the model's file has no router matrices (blk.N.ffn_gate_inp.weight). Figure 6 needs "
            "them to predict the experts of later layers: use a model file that has them"
        )
    losses = heop.Losses(subject.n_layers, n_expert, k, max(k, round(CACHED * n_expert)))
    for _, read in read_windows(subject, subject.windows):
        losses.count(read, subject.layer_ids, routers)
    rows: list[Row] = []
    panels, best = [], {}
    for group in losses.groups:
        grid = losses.of(group)
        means, name = grid.mean(axis=0), GROUPS[group]
        at_k = float(means[:, :k].min())
        p, n = np.unravel_index(int(means.argmin()), means.shape)
        best[name] = (int(n) + 1, int(p) + 1, at_k / float(means.min()))
        rows += [
            {"group": name, "way": each.way, "votes": each.votes, "ratio": each.ratio}
            for each in heop.searches(grid)
        ]
        drawn = [
            Line(f"P = {at}", range(1, len(row) + 1), exact(row.tolist()))
            for at, row in enumerate(means, 1)
        ]
        panels.append(
            Panel(
                "experts per prediction, K",
                "prediction loss (wrong and missing experts) per layer and token",
                drawn,
                f"{name} layers",
            )
        )
    columns = (
        Column("layers", "group", left=True),
        Column("search", "way", left=True),
        Column("K, P", "votes", lambda votes: f"{votes[0]}, {votes[1]}"),
        Column("x smallest loss", "ratio", fixed(3)),
    )
    title = (
        f"Search methods for the smallest prediction loss, with their choice of P (number of "
        f"predicting layers) and K (number of experts that each predicts). {CACHED:.0%} of the "
        f"experts are cached. Model: {subject.basis}"
    )
    tables = [Table(title, columns, rows)]
    run = recording(on)
    cached = replace(run.options, expert_ram=int(CACHED * expert_bytes(run.trace)))
    tables += measure_votes(run._replace(options=cached)).tables
    printed = [row["ratio"] for row in rows if "printed" in row["way"]]
    ours = [row["ratio"] for row in rows if row["way"] == "our climb"]
    compared = [
        Compared(
            "number of earlier layers that predict a layer's experts (P), and number of experts "
            "that each predicts (K), with the smallest prediction loss",
            "P = 3 earlier layers predict the experts of a layer. Each predicts K = 4 experts if "
            "the predicted layer is a shallow layer, and K = 8 if it is a middle or deep layer "
            "(OLMoE with 256 cached experts)",
            "; ".join(
                f"{name} layers: P = {p} (predicting layers), K = {n} (experts that each predicts)"
                for name, (n, p, _) in best.items()
            ),
            "Our model is not the paper's. Each of P earlier layers predicts the experts of a "
            "later layer. Only experts that all P layers predict are prefetched, so a larger P "
            "prefetches fewer experts",
        ),
        Compared(
            "Do predictions improve if each layer predicts more experts than a token uses?",
            "The paper does not test more predicted experts than a token uses: a layer predicts "
            "at most 8 experts, and a token uses 8",
            f"Smallest prediction loss if each layer predicts at most {k} experts, divided by the "
            f"smallest loss with at most {losses.most} experts (1.000: more than {k} predicted "
            f"experts do not reduce the loss): "
            + ", ".join(f"{name} layers {ratio:.3f}" for name, (_, _, ratio) in best.items()),
            f"A token of our model uses {k} experts. During a run, a layer predicts at most {k}. "
            f"Here we compute further predictions from the router's logits",
        ),
        Compared(
            "prediction loss of the choice that Algorithm 1 makes, divided by the smallest loss of "
            "all choices. A choice is a number of predicting layers (P) and a number of experts "
            "that each predicts (K)",
            "The paper does not state how close Algorithm 1 comes to the smallest possible loss",
            f"prediction loss relative to the smallest loss of all choices: {min(printed):.2f} to "
            f"{max(printed):.2f} with Algorithm 1, {min(ours):.2f} to {max(ours):.2f} with our "
            f"hill climbing. We ran Algorithm 1 with each of its four possible first steps: change "
            f"P or K by +1 or -1",
            "Algorithm 1 as printed never clears its list of losses. So the mean loss of one "
            "choice of P and K includes the losses of earlier choices",
        ),
    ]
    return Made(compared, tables, panels)


def figure_7(on: Measured) -> Made:
    """Reproduce Figure 7 of the FIRM-MoE paper: how well strategies predict a layer's experts.

    `on` is the model and the text. Returns tables, plots, and the comparison with the paper.
    """
    found = VotesStudy().measure(on.subject())
    k = on.subject().n_expert_used
    rows = {row["strategy"]: row for row in found.tables[0].rows}
    paper = {
        f"MoL K={k} P=3": (
            f"Meeting of Layers (MoL): experts that all of the 3 nearest earlier layers predict. "
            f"Each layer predicts {k} experts",
            "90.5 % of the predicted experts are used (utilisation). 59.8 % of the used experts "
            "are predicted (accuracy)",
        ),
        f"top {k}": (
            f"prediction by only the nearest earlier layer: each layer predicts {k} experts of the "
            f"next layer",
            "78.8 % of the predicted experts are used (utilisation)",
        ),
        "weighted >= 3.0": (
            "weighted voting: an expert is predicted if the votes of the 3 nearest earlier layers, "
            "which have the weights 1.5, 1.0 and 0.5, sum to at least 3.0",
            'Weighted voting "can match" Meeting of Layers (MoL) in utilisation (share of '
            'predicted experts that are used) "only at the strictest threshold": votes that sum '
            "to 3.0",
        ),
    }
    compared = [
        Compared(what, said, _of_strategy(rows[name]), "Our model and text are not the paper's")
        for name, (what, said) in paper.items()
        if name in rows and rows[name]["utilisation"]
    ]
    above = [
        row["utilisation"][0] - row["cut"]
        for name, row in rows.items()
        if name.startswith("MoL") and row.get("cut") and row["utilisation"]
    ]
    more = [
        row["utilisation"][0] - row["cut"]
        for name, row in rows.items()
        if name.startswith("MoL") and int(name.split("=")[1].split()[0]) > k and row.get("cut")
    ]
    if above:
        here = (
            f"with Meeting of Layers, the share of the predicted experts that are used is "
            f"{100 * min(above):+.1f} to {100 * max(above):+.1f} percentage points different from "
            f"that with the nearest earlier layer alone"
        )
        if more:
            here = (
                f"{here} ({100 * min(more):+.1f} to {100 * max(more):+.1f} points if each layer "
                f"predicts more experts than a token uses)"
            )
        compared.append(
            Compared(
                "utilisation (share of the predicted experts that are used) of two methods: "
                "several earlier layers predict (Meeting of Layers, MoL), or only the nearest "
                "earlier layer. In our result, both predict equally many experts on average",
                "90.5 % with several predicting layers (MoL), 78.8 % with four predicted experts "
                "per layer (Top4)",
                here,
                "In the paper, MoL predicts fewer experts per layer than Top4: 2.64 (calculated "
                "from its percentages) instead of 4, which raises its utilisation. Also, the "
                "nearest earlier layer predicts more accurately than layers further away",
            )
        )
    return Made(compared, found.tables, found.panels)


def _of_strategy(row: Row) -> str:
    used, named = 100 * row["utilisation"][0], 100 * row["accuracy"][0]
    text = (
        f"{used:.1f} % of the predicted experts are used (utilisation). {named:.1f} % of the used "
        f"experts are predicted (accuracy). On average, {row['size']:.2f} experts are predicted "
        f"per layer"
    )
    if row.get("cut"):
        text = (
            f"{text}. If the nearest earlier layer alone predicts {row['size']:.2f} experts per "
            f"layer, {100 * row['cut']:.1f} % of them are used"
        )
    return text


PAPER = Paper(
    "firm",
    "FIRM-MoE",
    (
        Figure("Table 1", "speed with each technique of FIRM-MoE", table_1),
        Figure("Table 2", "speed by the number of prefetched matrices per expert", table_2),
        Figure("Figure 4", "latency by the size of the expert cache", figure_4),
        Figure("Figure 5", "tokens per second by prompt and answer length", figure_5),
        Figure(
            "Figure 6",
            "prediction loss (weighted count of wrong and missing predictions) by the number of "
            "predicting layers (P) and of experts that each predicts (K)",
            figure_6,
        ),
        Figure(
            "Figure 7",
            "utilisation (share of predicted experts that are used) and accuracy (share of used "
            "experts that are predicted) of prediction strategies",
            figure_7,
        ),
    ),
    least_tiers=1,
)
