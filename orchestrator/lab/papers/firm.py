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
    expert_bytes,
    measure_votes,
    on_link,
    played_parts,
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
    f"Our times are simulated: reading all experts of a token takes {SLOW:g} times as long as "
    f"computing the token. Every layer has the same number of cache slots. The paper measures on "
    f"an RTX 3090 with PCIe 4.0 and has one LRU cache for all layers"
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
        played_parts(recording(on, reads=reads), BASE, SHARES) for reads in (SLOW, FAST)
    )
    paper = {
        "+ FG: gates alone": "1.32, 1.31, 1.24, 1.41",
        "+ MoL": "1.21, 1.22, 1.21, 1.27",
        "+ FG + MoL": "1.43, 1.43, 1.19, 1.43",
        "all: tuned": "1.65, 1.62, 1.29, 1.54",
    }
    compared = []
    for name, ratios in paper.items():
        base = "the paper's baseline"
        slow, fast = (_by_share(each.rows, name, "speedup", base) for each in (table, other))
        compared.append(
            Compared(
                f"speed of '{name}' relative to the paper's baseline",
                f"'{name}' is {ratios} times as fast as the paper's baseline, with 128, 256, 512 "
                f"and 768 cached experts",
                f"'{name}' is {slow}. With a simulated disk that is {SLOW / FAST:g} times as "
                f"fast, '{name}' is {fast}",
                _MACHINE,
            )
        )
    return Made(compared, [table, other], [panel])


def _by_share(rows: Sequence[Row], name: str, key: str, base: str, digits: int = 2) -> str:
    """Return one system's speed relative to `base`, for each share of experts with slots."""
    mine = [row for row in rows if row["name"] == name]
    values = ", ".join(f"{row[key]:.{digits}f}" for row in mine)
    shares = ", ".join(slots(row["held"]) for row in mine)
    return f"{values} times as fast as {base}, with cache slots for {shares} of the experts"


def table_2(on: Measured) -> Made:
    """Reproduce Table 2 of the FIRM-MoE paper: the speed by the number of prefetched matrices.

    An expert has three matrices, of which one, two or all are prefetched. The speed is simulated,
    in tokens per second.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    run, rows = recording(on), []
    every = expert_bytes(run.trace)
    worlds: dict[str, dict[str, Any]] = {"as the store reads": {}, "rigid link": {"link": RIGID}}
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
        Column("link", "world", left=True),
        Column("", "name", left=True),
        Column("slots", "held", slots),
        Column("tok/s with the prompt", "speed", fixed(1)),
    )
    compared = []
    for world in worlds:
        mine = [row for row in rows if row["world"] == world]
        best = {
            held: max((row for row in mine if row["held"] == held), key=lambda row: row["speed"])
            for held in dict.fromkeys(row["held"] for row in mine)
        }
        here = ", ".join(f"{slots(held)}: {row['name']}" for held, row in best.items())
        compared.append(
            Compared(
                f"fastest number n of prefetched matrices per expert, {world}",
                "OLMoE with 256 cached experts: n = 1 (5.31 tokens/s, and 4.76 with n = 2). "
                "Qwen1.5 with 128 cached experts: n = 2 (3.75 tokens/s, and 3.51 with n = 1). The "
                "paper does not measure n = 3",
                here,
                f"{_MACHINE}. We also measure n = 3, which prefetches all matrices of an expert",
            )
        )
    drawn = lines(
        [row for row in rows if row["world"] == "as the store reads"],
        lambda row: 100 * row["held"],
        lambda row: [row["speed"], None],
        "name",
    )
    panel = Panel(
        "slots, % of the experts", "tokens/s with the prompt", drawn, run.trace.header.model
    )
    return Made(compared, [Table("Prefetched matrices of an expert", columns, rows)], [panel])


def figure_4(on: Measured) -> Made:
    """Reproduce Figure 4 of the FIRM-MoE paper: decode time by the size of the expert cache.

    The time of a decode step is simulated for several methods of loading experts.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    table, _ = played_parts(recording(on), NO_PREFETCH, SHARES)
    # Two rows that are hardly told apart from n = 3 are in the table only.
    shown = [row for row in table.rows if row["name"] not in ("firm, rank, n=1", "firm, rank, n=2")]
    drawn = lines(
        shown, lambda row: 100 * row["held"], lambda row: [row["tpot_ms_mean"], None], "name"
    )
    panel = Panel("slots, % of the experts", "mean decode step, ms", drawn, on.config.model.name)
    mol = _by_share(table.rows, "firm, mol, n=1", "speedup", "without prefetch")
    compared = [
        Compared(
            "speed of Meeting of Layers (MoL) if one matrix per expert is prefetched (n = 1)",
            "On Qwen1.5-MoE, FIRM-MoE is up to 1.8 times as fast as the paper's baseline with 128 "
            "cached experts, and 1.6 times as fast with 768",
            f"MoL is {mol}",
            f"{_MACHINE}. Our comparison with the paper's baseline is in Table 1",
        ),
        Compared(
            "slowdown with a small cache",
            "With 128 instead of 768 cached experts (2.85 times less memory), decoding is less "
            "than 30 % slower",
            _slowdown(table.rows),
            "Time depends on the share of bytes that are missed, because computing takes little "
            "time here",
        ),
    ]
    return Made(compared, [table], [panel])


def _slowdown(rows: Sequence[Row]) -> str:
    mine = [row for row in rows if row["name"] == "firm, mol, n=1"]
    first, last = mine[0], mine[-1]
    ratio = first["tpot_ms_mean"] / last["tpot_ms_mean"]
    return (
        f"decoding takes {ratio:.2f} times as long with cache slots for {slots(first['held'])} of "
        f"the experts as with slots for {slots(last['held'])}"
    )


def figure_5(on: Measured) -> Made:
    """Reproduce Figure 5 of the FIRM-MoE paper: simulated speed for prompts and answers by length.

    The speed is in tokens per second. Fifteen pairs of prompt and answer length are simulated.

    `on` is the model and the text. Returns a table, a plot, and the comparison with the paper.
    """
    listed = [
        Variant("lru", "lru", {}),
        Variant(NO_PREFETCH, FIRM.name, {"prefetch": "off"}),
        Variant("firm, default", FIRM.name, {"prefetch": "on", "agree": RANK}),
        Variant(
            "firm, the paper's", FIRM.name, {"prefetch": "on", "agree": MOL, "prefetch_kinds": 1}
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
            f"mean of {len(base)} pairs",
            "1.31 times Fiddler and llama.cpp",
            "over lru: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in means.items()),
            f"{_MACHINE}. Our baseline is lru, because we did not run Fiddler. The paper's text "
            f"does not state its prompt and answer lengths. Other load on the machine during the "
            f"recorded runs changes our tokens/s, but not the ratios to lru",
        )
    ]
    title = f"Speed including the prompt, with cache slots for {HELD:.0%} of the experts"
    ticks = [f"{prompt} + {answer}" for prompt, answer in base]
    panel = Panel(
        "tokens of the prompt + tokens of the answer", "speed over lru", drawn, title, ticks=ticks
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
            "the model's file has no router matrices (blk.N.ffn_gate_inp.weight), which predict "
            "the experts of the next layers"
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
        panels.append(Panel("candidates K", "loss per layer and token", drawn, f"{name} layers"))
    columns = (
        Column("layers", "group", left=True),
        Column("search", "way", left=True),
        Column("K, P", "votes", lambda votes: f"{votes[0]}, {votes[1]}"),
        Column("x smallest loss", "ratio", fixed(3)),
    )
    title = (
        f"K (experts that a layer votes for) and P (layers that vote) found by each search, with "
        f"a cache for {CACHED:.0%} of the experts: {subject.basis}"
    )
    tables = [Table(title, columns, rows)]
    run = recording(on)
    cached = replace(run.options, expert_ram=int(CACHED * expert_bytes(run.trace)))
    tables += measure_votes(run._replace(options=cached)).tables
    printed = [row["ratio"] for row in rows if "printed" in row["way"]]
    ours = [row["ratio"] for row in rows if row["way"] == "our climb"]
    compared = [
        Compared(
            "best K (experts that a layer votes for) and P (layers that vote) by group of layers",
            "On OLMoE (8 experts per token, 256 cached): K = 4 and P = 3 for shallow layers, K = "
            "8 and P = 3 for middle and deep layers",
            "; ".join(f"{name} K = {n}, P = {p}" for name, (n, p, _) in best.items()),
            "We use another model. The more layers vote, the fewer experts get the votes of all "
            "of them",
        ),
        Compared(
            "Is it better if a layer votes for more experts than a token uses (K > k)?",
            "The paper has K <= k = 8",
            "; ".join(
                f"{name} layers: the smallest prediction loss with K <= k is {ratio:.3f} times "
                f"the smallest with any K"
                for name, (_, _, ratio) in best.items()
            ),
            "In a run, a layer votes for at most k experts. For this comparison, votes for up to "
            "2 k experts are computed from the router's logits",
        ),
        Compared(
            "prediction loss of the pair (K, P) that Algorithm 1 finds",
            "The paper does not compare the loss of this pair with the smallest loss of all pairs",
            f"Algorithm 1 as printed, with four different first steps, finds pairs with "
            f"{min(printed):.2f} to {max(printed):.2f} times the smallest loss. Our hill climbing "
            f"finds pairs with {min(ours):.2f} to {max(ours):.2f} times the smallest loss",
            "Algorithm 1 as printed never clears its list of losses, so the mean loss of a pair "
            "(K, P) includes the losses of all pairs before it",
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
            "90.5 % utilisation and 59.8 % accuracy. The paper does not state for how many "
            "experts (K) each layer votes in this figure"
        ),
        f"top {k}": "78.8 % utilisation",
        "weighted >= 3.0": (
            "The same values as Meeting of Layers (MoL), because an expert gets the score 3.0 "
            "(1.5 + 1.0 + 0.5) only if all three layers vote for it"
        ),
    }
    compared = [
        Compared(name, said, _of_strategy(rows[name]), "another model and text")
        for name, said in paper.items()
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
            f"At an equal number of predicted experts, the utilisation of MoL minus that of the "
            f"nearest layer alone is {100 * min(above):+.1f} to {100 * max(above):+.1f} percentage "
            f"points"
        )
        here += (
            (
                f". If layers vote for more experts than a token uses (K > k), the difference is "
                f"{100 * min(more):+.1f} to {100 * max(more):+.1f} points"
            )
            if more
            else ""
        )
        compared.append(
            Compared(
                "Meeting of Layers (MoL) compared with as many experts predicted by the nearest "
                "layer alone",
                "The paper compares sets of different sizes: 2.64 experts of MoL with 4 experts "
                "of the nearest layer",
                here,
                "A layer's routing depends mostly on the layer directly before it",
            )
        )
    return Made(compared, found.tables, found.panels)


def _of_strategy(row: Row) -> str:
    used, named = 100 * row["utilisation"][0], 100 * row["accuracy"][0]
    cut = (
        (
            f". If the nearest layer alone predicts as many experts, utilisation is "
            f"{100 * row['cut']:.1f} %"
        )
        if row.get("cut")
        else ""
    )
    return (
        f"{used:.1f} % utilisation and {named:.1f} % accuracy with {row['size']:.2f} predicted "
        f"experts per layer{cut}"
    )


PAPER = Paper(
    "firm",
    "FIRM-MoE",
    (
        Figure("Table 1", "speed with each part of FIRM-MoE", table_1),
        Figure("Table 2", "speed by the number of prefetched matrices per expert", table_2),
        Figure("Figure 4", "latency by the size of the expert cache", figure_4),
        Figure("Figure 5", "tokens per second by prompt and answer length", figure_5),
        Figure(
            "Figure 6",
            "loss from wrong and missing predictions of experts, by K (experts that a layer votes "
            "for) and P (layers that vote)",
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
