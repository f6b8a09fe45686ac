"""Four studies of precision: `python -m models.real.studies MODEL NAME --data DIR`.

`depth` puts one layer in the low precision and all others in the best one (DyMoE's Figure 5).
`hitters` compares the critical experts of heavy hitters with those of all tokens, and with random
ones (Figure 3). `mixes` combines the high precision with the low one and with skipping (part of
Tables 1 and 2).

`demotion` puts the least used experts in the low precision, the most used ones, or random ones
(DynaExq's Figure 3). The first half of the documents shows how often experts are used.

`moe-edge paper` runs the complete studies. These are shorter, because 30 layers take long.
Every context is the beginning of another document, and the 95 % intervals draw documents. All
studies but `mixes` read the text as prompts. In `depth` and `demotion` no choice depends on a
token, so decoding would give the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from models.real.bootstrap import Values, draws, ends, interval, shown
from models.real.command import reporting_errors
from models.real.make import report
from models.real.subject import add_text_options, make_subject
from orchestrator.config import Config
from orchestrator.lab.eval.judge import Reference
from orchestrator.lab.eval.run import best_config, read_reference
from orchestrator.lab.study.dymoe import LOW, SPREADS, Accuracy, Critical, Depth
from orchestrator.lab.study.dynaexq import COLD, HOT_FIRST, RANDOM, Demotion
from orchestrator.lab.study.study import Case, Findings, ScoredStudy, Scores, Study
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.table import Column, Row, Table
from orchestrator.runtime.runtime import Runtime

RETENTIONS = (0.75, 0.9)
HITTERS, LOAD, AT_RANDOM = (
    f"{kind}, {SPREADS['cosine']}" for kind in ("heavy hitters", "total load", "random")
)
# Between the first and the last layer, means of this many layers are shown.
GROUP = 4


def contexts_of(on: Subject) -> npt.NDArray[np.int64]:
    """Return the number of the context of each scored token."""
    return np.repeat(np.arange(len(on.windows)), [each.n_scored for each in on.windows])


def intervals(found: Scores) -> Table:
    """Return a table of the scored cases, with 95 % intervals over the contexts of the text.

    Perplexities are divided by that of the high tier, token by token. `r` is the retention ratio.
    """
    on = found.on
    contexts = contexts_of(on)
    base = next(
        (
            score
            for case, score in found.scored
            if on.high in (case.label, case.row.get("tier")) or case.row.get("demoted") == 0
        ),
        None,
    )
    rows: list[Row] = []
    keys = [(case.label, *case.row.values()) for case, _ in found.scored]
    n_same = Counter(keys)
    for key, (case, score) in zip(keys, found.scored, strict=True):
        row: Row = {"case": f"{case.label}, {case.group}" if n_same[key] > 1 else case.label}
        row["r"] = case.row.get("retention")
        row["demoted"] = case.row.get("demoted")
        row["kl"] = interval(score.text.kl, contexts)
        row["same"] = interval(score.text.agrees, contexts)
        if base is not None:
            change = interval(score.text.nll - base.text.nll, contexts)
            row["ratio"] = [float(np.exp(each)) for each in change]
        rows.append(row)

    columns = (
        Column("configuration", "case", left=True),
        Column("r", "r"),
        Column("demoted", "demoted"),
        Column(f"KL from {on.best} (95 %)", "kl", shown),
        Column(f"perplexity over {on.high} (95 %)", "ratio", shown),
        Column("same top token (95 %)", "same", shown),
    )
    return Table(f"Intervals over {len(on.windows)} contexts: {on.basis}", columns, rows)


def layer_groups(n_layers: int) -> list[range]:
    """Return the layers in groups: the first layer, GROUP layers each, and the last layer."""
    last = n_layers - 1
    inner = [range(at, min(at + GROUP, last)) for at in range(1, last, GROUP)]
    return [range(1), *inner, range(last, n_layers)]


def depth_figures(kl: Values, contexts: npt.NDArray[np.int64]) -> list[Row]:
    """Return rows with the KL divergence of groups of layers, and ratios of thirds of the layers.

    - kl: KL divergence of each token with each layer in the low tier, [n_layers, n_tokens].
    - contexts: number of the context of each token, [n_tokens].
    """
    n = len(kl)
    rows: list[Row] = [
        {
            "what": f"layers {each[0]} to {each[-1]}" if len(each) > 1 else f"layer {each[0]}",
            "found": interval(kl[each[0] : each[-1] + 1].mean(axis=0), contexts),
        }
        for each in layer_groups(n)
    ]
    # The contexts may have different numbers of tokens, so sums are drawn and not means.
    by_context = np.stack([np.bincount(contexts, layer) for layer in kl])
    drawn = by_context @ draws(by_context.shape[1]).T
    first, middle, deep = (part.mean(axis=0) for part in np.array_split(drawn, 3))
    for what, value in {
        "deepest third over middle third": deep / middle,
        "first third over middle third": first / middle,
        "deepest third over first third": deep / first,
        "first layer over the largest of the others": drawn[0] / drawn[1:].max(axis=0),
    }.items():
        rows.append({"what": what, "found": ends(value)})
    return rows


class Shown(ScoredStudy):
    """A study that adds tables of intervals.

    `one_random_choice` is True if the study has one random choice instead of several. The footnotes
    of its tables, which describe several, are then left out.
    """

    one_random_choice: ClassVar[bool] = False

    def show(self, found: Scores, on: Subject) -> Findings:
        """Return the tables of the study, and tables of intervals."""
        made = super().show(found, on)  # type: ignore[safe-super]
        if self.one_random_choice:
            for table in made.tables:
                table.footnotes.clear()
        rows = self.contrasts(found)
        columns = Column("", "what", left=True), Column("95 %", "found", partial(shown, digits=4))
        contrasts = [Table(f"Compared: {found.on.basis}", columns, rows)] if rows else []
        return replace(made, tables=[*made.tables, intervals(found), *contrasts])

    def contrasts(self, found: Scores) -> list[Row]:
        """Return rows that compare cases with each other, token by token."""
        return []


class Prompts(Subject):
    """The subject of a study in which all models read the text as prompts."""

    def reference(self) -> Reference:
        """Return the log-probabilities of the model in its best tier. The caller closes them."""
        config = best_config(self.config, self.best)
        with Runtime.open(config, self.report) as runtime, runtime.evaluator() as e:
            return read_reference(e, self.windows, True, partial(report, "Reference"))


class DepthOfPrompts(Shown, Depth):
    """The study Depth for prompts: the loss if one layer is in the low tier."""

    def cases(self, on: Subject) -> list[Case]:
        """Return the cases of the study Depth, changed to read the text as prompts."""
        return [replace(case, prefill=True) for case in super().cases(on)]

    def contrasts(self, found: Scores) -> list[Row]:
        """Return rows that compare groups of layers."""
        kl = np.stack([score.text.kl for _, score in found.of(LOW)])
        return depth_figures(kl, contexts_of(found.on))


class Hitters(Shown, Critical):
    """A part of the study Critical: Figure 3 of the DyMoE paper for prompts.

    It is measured only with the cosine schedule, with the retention ratios in RETENTIONS, and with
    one random choice.
    """

    one_random_choice = True

    def cases(self, on: Subject) -> list[Case]:
        """Return the cases of the study Critical that are measured for prompts.

        These are the references with all experts in the high tier, and one case for each ranking of
        the experts, low tier and retention ratio.
        """
        listed = [
            replace(case, prefill=True)
            for case in super().cases(on)
            if "retention" not in case.row
            or (
                case.prefill
                and case.label in (HITTERS, LOAD, AT_RANDOM)
                and case.row["retention"] in RETENTIONS
            )
        ]
        return [next(same) for _, same in groupby(listed, key=lambda case: case.row_key)]

    def contrasts(self, found: Scores) -> list[Row]:
        """Return by how much other rankings exceed the KL divergence of heavy hitters."""
        contexts, rows = contexts_of(found.on), []
        kl = {
            (case.group, case.row["retention"], case.label): score.text.kl
            for case, score in found.scored
            if "retention" in case.row
        }
        for (group, r, label), values in kl.items():
            if label != HITTERS:
                more = interval(values - kl[group, r, HITTERS], contexts)
                rows.append({"what": f"{group}, r = {r}: {label}, above hitters", "found": more})
        return rows


class Demoted(Shown, Demotion):
    """A part of the study Demotion for prompts: a quarter, half and three quarters are demoted."""

    one_random_choice = True

    def cases(self, on: Subject) -> list[Case]:
        """Return the cases of the study Demotion that are measured here, with one random order."""
        n = on.n_expert
        levels = {0, n // 4, n // 2, 3 * n // 4, n}
        listed = [
            replace(case, prefill=True)
            for case in super().cases(on)
            if case.row["demoted"] in levels
        ]
        return [next(same) for _, same in groupby(listed, key=lambda case: case.row_key)]

    def contrasts(self, found: Scores) -> list[Row]:
        """Return by how much other orders exceed the KL divergence of the least used first."""
        contexts, rows = contexts_of(found.on), []
        kl = {(case.row["demoted"], case.label): score.text.kl for case, score in found.scored}
        for (demoted, order), values in kl.items():
            if order in (RANDOM, HOT_FIRST):
                more = interval(values - kl[demoted, COLD], contexts)
                rows.append({"what": f"{demoted} demoted: {order}, above {COLD}", "found": more})
        return rows


class Mixes(Shown, Accuracy):
    """A part of the study Accuracy: the high tier, the low tier, and two mixtures of both."""

    def cases(self, on: Subject) -> list[Case]:
        """Return the cases of the study Accuracy that are measured here.

        These are the high tier alone, the low tier alone, and the mixtures whose retention ratio is
        in RETENTIONS.
        """
        return [
            case
            for case in super().cases(on)
            if case.row.get("tier") in (on.high, on.low) or case.row.get("retention") in RETENTIONS
        ]


STUDIES: dict[str, tuple[type[Study], type[Subject]]] = {
    "depth": (DepthOfPrompts, Prompts),
    "hitters": (Hitters, Prompts),
    "demotion": (Demoted, Prompts),
    "mixes": (Mixes, Subject),
}


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.real.studies", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--high", default="q4_1", help="high precision [default: q4_1]")
    parser.add_argument("--low", default="q2_0", help="low precision [default: q2_0]")
    add_text_options(parser, ["wikitext"], 32)
    args = parser.parse_args(argv)
    config = Config.build(
        model=args.model, high_tier=args.high, low_tier=args.low, threads=args.threads
    )
    study, kind = STUDIES[args.study]
    with tempfile.TemporaryDirectory() as folder:
        subject = make_subject(kind, config, Path(folder), args)
    for table in study().measure(subject).tables:
        if table.rows:
            print(table.text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
