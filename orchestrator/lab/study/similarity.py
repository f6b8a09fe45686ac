"""Figure 6, and what follows from it: how alike neighbouring layers' hidden states are, and how
well the next layer's experts are predicted from the layer before (DyMoE eq. 6)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate, cosine, pair
from orchestrator.lab.eval.report import share_with_error, with_error
from orchestrator.lab.study.activations import (
    FFN_INPUT,
    OUTPUT,
    ROUTER_INPUT,
    ROUTER_LOGITS,
    read_windows,
    recall,
    routers_of,
    top,
)
from orchestrator.lab.study.plot import Line, Panel
from orchestrator.lab.study.study import Findings, Study
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.table import Column, Row, Table

AHEAD, OFTEN = "next layer's router", "most used"
# What is known of each layer but the first, the cosines first.
WAYS = {
    OUTPUT: "behind the layer",
    FFN_INPUT: "before the experts",
    AHEAD: "x as it is",
    OFTEN: "most used experts",
}


class Similarity(Study):
    """How well a layer says what the next one needs."""

    name = "similarity"

    def measure(self, on: Subject) -> Findings:
        """Reads the text once with the best tier. Experts are ranked by the router's logits; a
        model's selection biases and groups are left out."""
        found, chance = _measured(on), on.n_expert_used / on.n_expert
        pairs = list(zip(on.layer_ids, on.layer_ids[1:], strict=False))
        rows: dict[str, list[Row]] = {
            "alike": [{"layers": f"{before}-{il}"} for before, il in pairs],
            "ahead": [{"layer": il, "random": chance} for _, il in pairs],
        }
        for name, by_layer in found.items():
            for row, each in zip(
                rows["ahead" if name in (AHEAD, OFTEN) else "alike"], by_layer, strict=True
            ):
                row[name] = pair(each)
        overall = {
            name: [float(np.mean([each.value for each in found[name]])), None]
            for name in (AHEAD, OFTEN)
            if name in found
        }
        tables = [
            Table(
                f"Hidden state of neighbouring layers (Figure 6): {on.basis}",
                (
                    Column("layers", "layers"),
                    Column("cosine behind the layer (l_out)", OUTPUT, with_error),
                    Column("cosine before the experts (ffn_inp)", FFN_INPUT, with_error),
                ),
                rows["alike"],
            ),
            Table(
                f"Experts of a layer predicted from the one before (eq. 6): {on.basis}",
                (
                    Column("layer", "layer"),
                    Column("recall, x as it is", AHEAD, share_with_error),
                    Column("recall, most used", OFTEN, share_with_error),
                    Column("recall, random", lambda row: [row["random"], None], share_with_error),
                ),
                rows["ahead"],
                [
                    "x: the router's input of the layer before, under the next layer's router. "
                    "Most used: always the experts that this text uses most in that layer."
                ],
                [{"layer": "mean", "random": chance, **overall}],
            ),
        ]
        left, right = (
            [Line(WAYS[name], on.layer_ids[1:], found[name]) for name in names if name in found]
            for names in ((OUTPUT, FFN_INPUT), (AHEAD, OFTEN))
        )
        return Findings(
            tables,
            [
                Panel(
                    "layer",
                    "cosine similarity with the layer before",
                    left,
                    on.basis,
                    ends=(0, 1.02),
                ),
                Panel(
                    "layer",
                    "recall of the layer's experts, %",
                    right,
                    levels={"random": chance},
                    percent=True,
                    ends=(0, 102),
                ),
            ],
        )


def _measured(on: Subject) -> dict[str, list[Estimate]]:
    """The mean of each figure in each layer but the first, of those that the model gives."""
    layer_ids, k = on.layer_ids, on.n_expert_used
    routers = routers_of(on)
    values: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
    actual: dict[int, list[np.ndarray]] = defaultdict(list)
    for _, found in read_windows(on, on.windows):
        for layer, il in enumerate(layer_ids[1:], 1):
            before, router = layer_ids[layer - 1], routers[layer]
            actual[layer].append(top(found[ROUTER_LOGITS, il], k))
            for name in (OUTPUT, FFN_INPUT):
                if (name, before) in found and (name, il) in found:
                    values[name, layer].append(cosine(found[name, before], found[name, il]))
            if router is not None:
                predicted = top(found[ROUTER_INPUT, before] @ router.T, k)
                values[AHEAD, layer].append(recall(predicted, actual[layer][-1]))
    for layer, used in actual.items():
        every = np.concatenate(used)
        often = top(np.bincount(every.ravel(), minlength=on.n_expert)[None].astype(float), k)
        values[OFTEN, layer].append(recall(np.repeat(often, len(every), 0), every))
    return {
        name: [arithmetic.mean(np.concatenate(values[name, layer])) for layer in sorted(actual)]
        for name in WAYS
        if all((name, layer) in values for layer in actual)
    }
