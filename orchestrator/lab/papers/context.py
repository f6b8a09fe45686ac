"""Context-Aware Mixture-of-Experts Inference on CXL-Enabled GPU-NDP Systems."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from orchestrator.errors import ConfigError
from orchestrator.lab.eval.arithmetic import cosine
from orchestrator.lab.papers.measured import Measured
from orchestrator.lab.papers.paper import NOT_IN_TEXT, Compared, Figure, Made, Paper
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.replay.near_data import (
    CONTEXT,
    HOBBIT,
    LENGTHS,
    MONDE,
    NEAR_ONLY,
    SHAPES,
    NearData,
    near_tables,
    replay_near_data,
)
from orchestrator.lab.study.near_data import (
    COUNTS,
    EQUAL_USAGE,
    OURS,
    OWN,
    RANDOM,
    UNIFORM,
    NearBits,
    PromptContext,
)
from orchestrator.lab.study.near_data import PAPER as PAPERS_FORM
from orchestrator.lab.study.routing import changes, sorted_shares, total_counts
from orchestrator.lab.study.study import share
from orchestrator.lab.table import Column, Row, Table, fixed

LAGS = (1, 2, 4, 8, 16, 32, 64)
# The trace whose routing stands in for Mixtral's: tokens of its prompt and of its answer.
PROMPT, ANSWER = 64, 384
BITS = (3.0, 2.0)


def table_3(on: Measured) -> Made:
    """Reproduce Table 3 of the paper "Context-Aware MoE Inference on GPU-NDP Systems".

    The table shows the quality loss if experts that a prompt rarely uses have 2 or 3 bits per
    weight. Measures our model on our text (`on`), and returns the results next to the paper's.
    """
    found = NearBits().measure(on.subject())
    rows = [row for row in found.tables[0].rows if row["hot"]]
    half = max((row["hot"] for row in rows), default=0)
    averages = {3.0: ("69.71", "69.90"), 2.0: ("63.48", "66.68")}
    why = (
        "We use another model and measure KL divergence instead of accuracy, because the weights "
        "of Mixtral-8x7B were not available. Our method also considers how often an expert is "
        "used, and the paper's method considers only the expert's quality loss"
    )
    names = {
        UNIFORM: "equal bits",
        PAPERS_FORM: "the paper's method",
        OURS: "our method",
        RANDOM: "a random choice",
    }
    compared, panels = [], []
    for bits, (without, chosen) in averages.items():
        kl = {
            name: float(np.mean(found_kl))
            for way, name in names.items()
            if (found_kl := [row["kl"][0] for row in rows if _is(row, way, bits, half)])
        }
        values = ", ".join(f"{name} {value:.4f}" for name, value in kl.items())
        here = (
            f"KL divergence (nats per token) by the method that chooses the bits per weight of "
            f"each expert: {values}"
        )
        if names[UNIFORM] not in kl:
            missing = (
                f"The method '{names[UNIFORM]}' is not measured, because the model file has no "
                f"precision with {bits:g} bits per weight"
            )
            here = f"{here}. {missing}"
        title = f"quality if the less used half of the experts has {bits:g} bits per weight"
        compared.append(
            Compared(
                title,
                f"Mean accuracy of Mixtral-8x7B on eight tasks: {chosen} % with the paper's choice "
                f"of bits for each expert, {without} % without this choice (the paper does not say "
                f"how the bits are chosen then), and 70.03 % with 16 bits per weight",
                here
                if kl
                else f"not measured, because the model file has no precision with at most "
                f"{bits:g} bits per weight",
                why,
            )
        )
        bars = [Line("", range(len(kl)), exact(list(kl.values())))]
        label = f"KL divergence from {on.subject().best}, nats per token"
        panels.append(Panel("", label, bars, title, bars=True, ticks=[*kl]))
    return Made(compared, found.tables, panels)


def _is(row: Row, way: str, bits: float, hot: int) -> bool:
    return bool(row["configuration"] == way and row["bits"] == bits and row["hot"] == hot)


def figure_2(on: Measured) -> Made:
    """Reproduce Figure 2 of the paper "Context-Aware MoE Inference on GPU-NDP Systems".

    The figure shows how often each expert of a layer is used. Measures our model on our text
    (`on`), and returns the results next to the paper's.
    """
    routes = on.routes
    counts = total_counts(routes)
    by_rank = sorted_shares(counts)
    shares = counts / counts.sum(axis=1, keepdims=True)
    layer_ids = on.subject().layer_ids
    rows = [
        {
            "layer": il,
            "most": float(each.max()),
            "least": float(each.min()),
            "shares": each.tolist(),
        }
        for il, each in zip(layer_ids, shares, strict=True)
    ]
    drawn = [
        Line(f"layer {il}", range(1, len(each) + 1), exact(sorted(each.tolist(), reverse=True)))
        for il, each in zip(layer_ids, shares, strict=True)
    ]
    n = counts.shape[1]
    n_tokens = sum(len(each.ids) for each in routes)
    title = f"How often {n_tokens} tokens use each expert"
    columns = (
        Column("layer", "layer"),
        Column("most used", "most", share),
        Column("least used", "least", share),
    )
    compared = [
        Compared(
            "how evenly a layer's experts are used",
            "Usage is far from uniform: a few experts are used often and some rarely. The paper's "
            "text does not state how often",
            f"Share of a layer's expert uses, mean over layers: {share(by_rank[0])} for the most "
            f"used expert, and {share(by_rank[-1])} for the least used expert. Uniform usage would "
            f"be {share(1 / n)} for each expert",
            "Our model and text differ from the paper's, which are Mixtral-8x7B and WikiText-2",
        )
    ]
    panel = Panel(
        "rank of the expert",
        "expert's share of all expert uses in its layer, %",
        drawn,
        title,
        percent=True,
    )
    return Made(compared, [Table(title, columns, rows)], [panel])


def figure_3(on: Measured) -> Made:
    """Reproduce Figure 3 of the paper "Context-Aware MoE Inference on GPU-NDP Systems".

    The figure shows which fraction of a token's experts is used again by later tokens, 1 to 64
    positions later. It also compares how often two sequences use each expert. Measures our model on
    our text (`on`), and returns the results next to the paper's.
    """
    routes = on.routes
    rows: list[Row] = []
    groups = {"all": routes} | {
        name: [each for each in routes if each.domain == name]
        for name in (on.domains if len(on.domains) > 1 else ())
    }
    for name, mine in groups.items():
        if mine:
            rows += [
                {
                    "text": name,
                    "lag": c.lag,
                    "kept": c.kept,
                    "by_use": c.by_use,
                    "uniform": c.uniform,
                }
                for c in changes(mine, LAGS)
            ]
    counts = [each.counts() for each in routes[:32]]
    similarities = [float(cosine(a, b).mean()) for a, b in combinations(counts, 2)]
    columns = (
        Column("text", "text", left=True),
        Column("steps later", "lag"),
        Column("used again", "kept", share),
        Column("if independent", "by_use", share),
        Column("if uniform", "uniform", share),
    )
    first = rows[0]
    kept, by_use, by_chance = (share(first[key]) for key in ("kept", "by_use", "uniform"))
    drawn = [
        Line(
            name, [r["lag"] for r in rows if r["text"] == name], exact(values), dashed=name != "all"
        )
        for name in groups
        if (values := [r["kept"] for r in rows if r["text"] == name])
    ]
    compared = [
        Compared(
            "share of a decode step's experts that the next step also uses",
            "The paper states no number. It shows two measured texts. In the first, adjacent "
            "decode steps do not use similar experts. In the second, expert usage is more regular",
            f"The next step also uses {kept} of a decode step's experts. It would use {by_chance} "
            f"of them again if each step drew random experts with equal probability, and {by_use} "
            f"if it drew each expert with its measured usage as probability",
            "Our model differs from the paper's. The paper shows two texts, and we average over "
            "all passages of our text",
        ),
        Compared(
            "cosine similarity of the expert usage of different texts",
            "Expert usage differs between the paper's two texts. The paper does not state a cosine "
            "similarity",
            f"Between two passages of our text, the cosine similarity of the expert usage is "
            f"{np.mean(similarities):.2f} on average and {min(similarities):.2f} at least"
            if similarities
            else "not measured, because our text is too short to compare two passages",
            "the same",
        ),
    ]
    panel = Panel("steps later", "experts used again, %", drawn, "", percent=True)
    return Made(compared, [Table("Experts that are used again", columns, rows)], [panel])


def figure_4(on: Measured) -> Made:
    """Reproduce Figure 4 of the paper "Context-Aware MoE Inference on GPU-NDP Systems".

    The figure shows how similar the experts that a prompt uses are to those that its answer uses.
    Measures our model on our text (`on`), and returns the results next to the paper's.
    """
    found = PromptContext().measure(on.subject())
    rows = found.tables[0].rows

    def mean(by: str, key: str) -> float:
        return float(np.mean([row[key] for row in rows if row["by"] == by]))

    counted, guessed = mean(COUNTS, "cosine"), mean(EQUAL_USAGE, "cosine")
    mass, at_random = share(mean(OWN, "mass")), share(mean(EQUAL_USAGE, "mass"))
    compared = [
        Compared(
            "cosine similarity of the expert usage of a prompt and of its answer",
            "0.89 (Mixtral-8x7B on TruthfulQA)",
            f"The answer's expert usage has a cosine similarity of {counted:.2f} with the prompt's "
            f"expert usage, and of {guessed:.2f} with equal usage of all experts",
            "Our model and text differ from the paper's. Equal usage of all experts is "
            "our baseline, which the paper does not have",
        ),
        Compared(
            "whether an answer uses the experts that its prompt uses most",
            NOT_IN_TEXT,
            f"The quarter of the experts that the prompt uses most gets {mass} of the answer's "
            f"expert uses. A random quarter of the experts would get {at_random}",
        ),
    ]
    return Made(compared, found.tables, found.panels)


@cache
def near_data(on: Measured) -> list[dict[str, Any]]:
    """Simulate the methods of the paper "Context-Aware MoE Inference on GPU-NDP Systems".

    The simulated machine is the paper's: a GPU with a near-data memory, which computes experts in
    the memory that holds them. Each of the paper's models and bit widths is simulated twice: with
    random routing, and with the routing of our model, which is recorded on our text (`on`).

    Returns a dict for each simulation, with the simulated times of each method.
    """
    found = []
    for shape in SHAPES:
        for bits in BITS:
            # The paper's form: bits by losses alone, and no profile.
            asked = NearData(shape=shape, near_bits=bits, near_weights="plain", prior_tokens=0.0)
            found.append({"bits": bits, **replay_near_data(asked, None)})
            try:
                trace = on.trace(PROMPT, ANSWER)
                found.append({"bits": bits, **replay_near_data(asked, trace)})
            except ConfigError as reason:
                on.note(
                    f"Figures 5 and 6 are simulated with random routing only, not with this "
                    f"model's routing: {reason}"
                )
    return found


GENERATED = "random routing"
# The compared systems of Figures 5 and 6.
_NEAR = "a system whose near-data memory holds all experts, with 16 bits per weight"
_MONDE = "MoNDE, which copies some experts to the GPU"
# The reasons why a speed-up over _NEAR, or over MoNDE, differs from the paper's.
_FREE = (
    "No constant is fitted to the paper's speed-ups. We chose the bandwidths of the GPU's memory "
    "and of the link, and assume that near-data memory multiplies 8 times as fast with 2 bits per "
    "weight as with 16"
)


def _method(bits: float) -> str:
    return (
        f"the paper's method (most used experts on the GPU, others in near-data memory with "
        f"{bits:g} bits per weight)"
    )


def _fitted(results: Sequence[dict[str, Any]]) -> str:
    return (
        f"In our simulation, MoNDE copies {results[0]['fitted_migrations']:g} experts per token to "
        f"the GPU. This number is fitted to the paper's speed-ups, so our speed-ups over MoNDE do "
        f"not confirm the paper's"
    )


def figure_5(on: Measured) -> Made:
    """Reproduce Figure 5 of the paper "Context-Aware MoE Inference on GPU-NDP Systems".

    The figure shows the simulated time of a prompt and its answer. The paper's method keeps the
    experts that a prompt uses most on the GPU. The other experts are in a near-data memory, which
    computes them itself. The method is compared with other placements, such as all experts in the
    near-data memory.

    Each case is simulated with random routing and, if possible, with the routing of our model
    (`on`). Returns the results next to the paper's.
    """
    results = near_data(on)
    compared = [
        Compared(
            "speed of near-data memory (memory that also computes experts) with 3 and with 2 bits "
            "per weight, relative to 16 bits per weight",
            "about 5 and about 8",
            _near_times(results),
            f"{_FREE}. Without this assumption (if fewer bits made only reading faster), the speed "
            f"with 3 bits and the speed with 2 bits would both be 4.0 times that with 16 bits",
        )
    ]
    paper = {
        ("mixtral-8x7b", 3.0): "6.6 to 8.3",
        ("mixtral-8x7b", 2.0): "7.9 to 10.6",
        ("mixtral-8x22b", 3.0): "7.6 to 8.7",
        ("mixtral-8x22b", 2.0): "9.5 to 11.2",
    }
    lengths = ", ".join(f"{prompt} + {answer}" for prompt, answer in LENGTHS)
    for (shape, bits), said in paper.items():
        mine = [each for each in results if each["shape"] == shape and each["bits"] == bits]
        for what, key, stated, why in (
            (_NEAR, "over_near_only", NOT_IN_TEXT, _FREE),
            (_MONDE, "over_monde", said, _fitted(mine)),
        ):
            here = "; ".join(
                f"{_routing(each)}: "
                + ", ".join(f"{row[key]:.1f}" for row in each["runs"][CONTEXT]["lengths"])
                for each in mine
            )
            compared.append(
                Compared(
                    f"{shape}, {lengths} tokens (prompt + answer): end-to-end speed of "
                    f"{_method(bits)} relative to {what}",
                    stated,
                    here,
                    why,
                )
            )
    tables = [table for each in results for table in near_tables(each)[1:]]
    shown = [each for each in results if _routing(each) == GENERATED]
    ratios = [each["runs"][CONTEXT]["lengths"][1]["over_near_only"] for each in shown]
    ticks = [f"{each['shape']}, {each['bits']:g} bits per weight" for each in shown]
    prompt, answer = LENGTHS[1]
    panel = Panel(
        "",
        "speed relative to keeping all experts in near-data memory",
        [Line("", range(len(ratios)), exact(ratios))],
        f"random routing, {prompt} prompt tokens and {answer} answer tokens",
        bars=True,
        ticks=ticks,
    )
    return Made(compared, tables, [panel])


def _routing(result: dict[str, Any]) -> str:
    return GENERATED if "generated" in result["routing"] else "this model's routing"


def _near_times(results: Sequence[dict[str, Any]]) -> str:
    ratios = []
    for bits in BITS:
        shape = SHAPES[results[0]["shape"]]
        ratios.append(f"{shape.near_ms(16) / shape.near_ms(bits):.2f}")
    return " and ".join(ratios)


def figure_6(on: Measured) -> Made:
    """Reproduce Figure 6 of the paper "Context-Aware MoE Inference on GPU-NDP Systems".

    The figure shows the simulated decode speed. The paper's method keeps the experts that a prompt
    uses most on the GPU. The other experts are in a near-data memory, which computes them itself.
    The method is compared with other placements.

    Each case is simulated with random routing and, if possible, with the routing of our model
    (`on`). Returns the results next to the paper's.
    """
    results = near_data(on)
    paper = {
        ("mixtral-8x7b", 3.0): "8.7",
        ("mixtral-8x7b", 2.0): "11.2",
        ("mixtral-8x22b", 3.0): "8.9",
        ("mixtral-8x22b", 2.0): "11.5",
    }
    hobbit = {"mixtral-8x7b": "up to 18", "mixtral-8x22b": "up to 19"}
    compared = []
    for (shape, bits), said in paper.items():
        mine = [each for each in results if each["shape"] == shape and each["bits"] == bits]

        def of(base: str, mine: Sequence[dict[str, Any]] = mine) -> str:
            return "; ".join(
                f"{_routing(each)}: "
                f"{each['runs'][base]['step_ms'] / each['runs'][CONTEXT]['step_ms']:.1f}"
                for each in mine
            )

        speed = f"{shape}: decode speed of {_method(bits)}"
        compared += [
            Compared(f"{speed} relative to {_NEAR}", NOT_IN_TEXT, of(NEAR_ONLY), _FREE),
            Compared(f"{speed} relative to {_MONDE}", said, of(MONDE), _fitted(mine)),
        ]
        if bits == 2.0:
            compared.append(
                Compared(
                    f"{speed} relative to HOBBIT, which copies missing experts to the GPU",
                    f"The paper's method is {hobbit[shape]} times as fast as HOBBIT. The paper "
                    f"does not say whether this is decode speed or end-to-end speed",
                    of(HOBBIT),
                    "We simulate HOBBIT without prefetching. HOBBIT loads the most important "
                    "expert of a token with 16 bits per weight and the others with 4",
                )
            )
    steps = [
        {
            "shape": each["shape"],
            "bits": each["bits"],
            "routing": _routing(each),
            "name": name,
            "tokens_per_s": 1000 / run["step_ms"],
            "hot": run["hot_mass"],
        }
        for each in results
        for name, run in each["runs"].items()
    ]
    columns = (
        Column("shape", "shape", left=True),
        Column("bits", "bits", "{:g}".format),
        Column("routing", "routing", left=True),
        Column("", "name", left=True),
        Column("tok/s", "tokens_per_s", fixed(1)),
        Column("on the GPU", "hot", share),
    )
    names = list(dict.fromkeys(row["name"] for row in steps))
    panels = []
    for shape, bits in paper:
        mine = [row for row in steps if row["shape"] == shape and row["bits"] == bits]
        first = [row["tokens_per_s"] for row in mine if row["routing"] == GENERATED]
        drawn = [Line("", range(len(names)), exact(first))]
        title = (
            f"simulated {shape}, random routing; near-data memory of static and context: at most "
            f"{bits:g} bits per weight on average"
        )
        panels.append(Panel("", "decoded tokens/s", drawn, title, bars=True, ticks=names))
    table = Table("Decoding on the paper's machine", columns, steps)
    return Made(compared, [table], panels, len(SHAPES))


PAPER = Paper(
    "context",
    "Context-Aware MoE Inference on GPU-NDP Systems",
    (
        Figure(
            "Table 3", "quality with few bits per weight for all but the most used experts", table_3
        ),
        Figure("Figure 2", "how often each expert is used", figure_2),
        Figure("Figure 3", "how many experts of a decode step the next steps use again", figure_3),
        Figure("Figure 4", "similarity of the expert usage of prompt and answer", figure_4),
        Figure(
            "Figure 5",
            "end-to-end speed with near-data memory (memory modules that also compute experts)",
            figure_5,
        ),
        Figure("Figure 6", "decode speed with near-data memory", figure_6),
    ),
)
