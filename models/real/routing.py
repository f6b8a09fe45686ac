"""Intervals of routing figures: `python -m models.real.routing MODEL --data DIR`.

The figures are those of `moe-edge paper` that follow from the router: skew, hot sets, reuse,
similarity and votes of neighbouring layers, and how well a prompt predicts its answer. Every
context is the beginning of another document. Each 95 % interval is a bootstrap over the documents,
within each kind of text and each half of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from gguf_tools.columns import aligned
from models.real.bootstrap import Values, draws, of_figure
from models.real.command import reporting_errors
from models.real.figures import (
    Figure,
    HotSets,
    active,
    mean_of,
    prompt_and_answer,
    search_losses,
    skew,
    two_inputs,
    vote_losses,
    votes,
)
from models.real.subject import add_text_options, make_subject
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.arithmetic import cosine
from orchestrator.lab.papers.firm import CACHED
from orchestrator.lab.study.activations import (
    CHOSEN,
    OUTPUT,
    ROUTER_INPUT,
    ROUTER_LOGITS,
    Activations,
    read_windows,
    recall,
    routers_of,
    top,
)
from orchestrator.lab.study.heop import Losses
from orchestrator.lab.study.near_data import (
    COUNTS,
    EQUAL_USAGE,
    OWN,
    RIGHT,
    Usage,
    captured,
    choices,
    usage_of,
)
from orchestrator.lab.study.routing import Routes, changes
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.study.votes import Voted
from orchestrator.policy.firm import GROUPS

TEXTS = ("wikitext", "textbooks", "messages", "mathematics", "code")
GATES = "own prompt, W"
# Documents of a kind of text: two in each half, between which a draw can choose.
LEAST = 4


@dataclass(slots=True)
class Contexts:
    """Figures of the routing in the contexts of a text, one entry for each context.

    - kept: share of a token's experts that the next token uses too.
    - similar: cosine of each pair of neighbouring layers, [pairs].
    - ahead: recall of the next layer's router.
    - totals: what the strategies of FIRM's Figure 7 name.
    """

    routes: list[Routes] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    similar: list[Values] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    totals: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)


def _similar(read: Activations, pairs: list[tuple[int, int]]) -> Values:
    """Return the cosine of the outputs of each pair of layers whose outputs are known."""
    known = [
        (read[OUTPUT, a], read[OUTPUT, b])
        for a, b in pairs
        if (OUTPUT, a) in read and (OUTPUT, b) in read
    ]
    return np.array([cosine(a, b).mean() for a, b in known if a.shape == b.shape])


def measure(on: Subject) -> dict[str, tuple[float, float, float]]:
    """Return figures by name, each as the value and the ends of its 95 % interval."""
    if min(Counter(window.domain for window in on.windows).values()) < LEAST:
        raise ConfigError(f"each kind of text needs {LEAST} documents of --window tokens")
    ids, k, n_expert = on.layer_ids, on.n_expert_used, on.n_expert
    routers, pairs = routers_of(on), list(pairwise(ids))
    with on.model() as model:
        gating = model.hparams.gating
    losses = Losses(on.n_layers, n_expert, k, max(k, round(CACHED * n_expert)))
    found = Contexts()
    for window, read in read_windows(on, on.windows):
        chosen = np.stack([read[CHOSEN, il] for il in ids], axis=1).astype(np.int64)
        routes = Routes(window.domain, chosen, n_expert)
        found.routes.append(routes)
        found.kept.append(changes([routes], [1])[0].kept)
        found.similar.append(_similar(read, pairs))
        recalls = [
            recall(top(read[ROUTER_INPUT, a] @ router.T, k), top(read[ROUTER_LOGITS, b], k))
            for (a, b), router in zip(pairs, routers[1:], strict=True)
            if router is not None
        ]
        found.ahead.append(float(np.mean(recalls)))
        voted = Voted(on.n_layers, k, n_expert)
        voted.count(read, ids, routers, window.first)
        found.totals.append(voted.totals())
        losses.count(read, ids, routers)
        found.usages.append(usage_of(read, window, ids, routers[-1], n_expert, gating))
    hot = HotSets(
        np.array([each.counts() for each in found.routes]), [each.domain for each in found.routes]
    )
    drawn = draws(len(found.routes), hot.strata)
    figures = figures_of(found, hot, losses)
    return {name: of_figure(figure, drawn) for name, figure in figures.items()}


def figures_of(found: Contexts, hot: HotSets, losses: Losses) -> dict[str, Figure]:
    """Return all figures by name. The losses have the tokens of all contexts in order."""
    similar, k = np.array(found.similar), losses.k
    starts = np.cumsum([0, *(len(each.ids) for each in found.routes)])[:-1]
    figures: dict[str, Figure] = {
        **skew(hot.used, hot.kinds),
        **hot.figures(),
        **active([each.ids for each in found.routes], hot.used),
        "hot quarter that two inputs share": two_inputs(hot.used, max(1, hot.used.shape[2] // 4)),
        "used by the next step too": mean_of(np.array(found.kept)),
        "recall of the next layer's router": mean_of(np.array(found.ahead)),
        "cosine of neighbouring layers, mean": lambda draw: (
            float((draw @ similar).mean()) / float(draw.sum())
        ),
        "cosine of neighbouring layers, least": lambda draw: (
            float((draw @ similar).min()) / float(draw.sum())
        ),
        **votes(found.totals, k),
    }
    for group in losses.groups:
        of_tokens = losses.of(group)
        each = vote_losses(np.add.reduceat(of_tokens, starts), k)
        each |= search_losses(np.split(of_tokens, starts[1:]))
        figures |= {f"{GROUPS[group]} layers: {name}": figure for name, figure in each.items()}
    return figures | _context(found.usages, k)


def _context(usages: list[Usage], k: int) -> dict[str, Figure]:
    """Return the context paper's figures."""
    n_hot = max(1, usages[0].counts.shape[1] // 4)
    cosines: dict[str, list[float]] = {}
    covered: dict[str, list[float]] = {}
    for at, usage in enumerate(usages):
        every = choices(usages, at, k)
        scores = {
            COUNTS: every[COUNTS],
            GATES: usage.gates,
            OWN: every[OWN],
            RIGHT: every[RIGHT],
            EQUAL_USAGE: every[EQUAL_USAGE],
        }
        for name, score in scores.items():
            if score is not None:
                cosines.setdefault(name, []).append(float(cosine(score, usage.answer).mean()))
                if name != EQUAL_USAGE:  # it has no hot experts
                    uses = captured(score, usage.answer, n_hot)
                    covered.setdefault(name, []).append(uses)
    return prompt_and_answer(
        {name: np.array(each) for name, each in cosines.items()},
        {name: np.array(each) for name, each in covered.items()},
        np.array([usage.answer.sum() for usage in usages]),
    )


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.real.routing", description=__doc__)
    parser.add_argument("model", type=Path)
    add_text_options(parser, TEXTS, 128)
    args = parser.parse_args(argv)
    config = Config.build(model=args.model, threads=args.threads)
    with tempfile.TemporaryDirectory() as folder:
        subject = make_subject(Subject, config, Path(folder), args)
    rows = [["figure", "value", "95 %"]]
    for name, each in measure(subject).items():
        value, low, high = (f"{one:.3f}" for one in each)
        rows.append([name, value, f"{low} to {high}"])
    print("\n".join([f"{len(subject.windows)} contexts", *aligned(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
