"""Three studies of precision: `python -m models.real.studies MODEL NAME --text FILE`.

`depth` puts one layer in the low precision and all others in the best one (DyMoE's Figure 5).
`hitters` compares the critical experts of heavy hitters with those of all tokens (Figure 3).
`mixes` combines the high precision with the low one and with skipping (part of Tables 1 and 2).

`moe-edge paper dymoe` runs the complete studies. These are shorter, because 30 layers take long.
`depth` and `hitters` read the text as prompts. In `depth`, no choice depends on a token, so
decoding would give the same. `mixes` decodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from models.real.command import reporting_errors
from models.real.judge import interval
from models.real.make import report
from orchestrator.config import Config
from orchestrator.lab.eval.judge import Reference
from orchestrator.lab.eval.run import EvalOptions, best_config, read_reference
from orchestrator.lab.study.dymoe import SPREADS, Accuracy, Critical, Depth
from orchestrator.lab.study.study import Case, Findings, ScoredStudy, Scores, Study
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.table import Column, Row, Table
from orchestrator.runtime.runtime import Runtime

RETENTIONS = (0.75, 0.9)
_LABELS = [f"{kind}, {SPREADS['cosine']}" for kind in ("heavy hitters", "total load")]


def intervals(found: Scores) -> Table:
    """Return a table of the scored cases, with 95 % intervals over the contexts of the text.

    Perplexities are divided by that of the high tier, token by token.
    """
    on = found.on
    contexts = np.repeat(np.arange(len(on.windows)), [each.n_scored for each in on.windows])
    base = next((score for case, score in found.scored if case.row.get("tier") == on.high), None)
    rows: list[Row] = []
    for case, score in found.scored:
        row: Row = {"case": case.label, "r": case.row.get("retention")}
        row["kl"] = interval(score.text.kl, contexts)
        if base is not None:
            change = interval(score.text.nll - base.text.nll, contexts)
            row["ratio"] = [float(np.exp(each)) for each in change]
        rows.append(row)

    def shown(values: Sequence[float]) -> str:
        return "{:.3f} ({:.3f} to {:.3f})".format(*values)

    columns = (
        Column("configuration", "case", left=True),
        Column("r", "r"),
        Column(f"KL from {on.best} (95 %)", "kl", shown),
        Column(f"perplexity over {on.high} (95 %)", "ratio", shown),
    )
    return Table(f"Intervals over {len(on.windows)} contexts: {on.basis}", columns, rows)


class Shown(ScoredStudy):
    """A study that adds a table of intervals."""

    def show(self, found: Scores, on: Subject) -> Findings:
        """Return the tables of the study, and the table of intervals."""
        shown = super().show(found, on)  # type: ignore[safe-super]
        return replace(shown, tables=[*shown.tables, intervals(found)])


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


class Hitters(Shown, Critical):
    """A part of the study Critical: Figure 3 of the DyMoE paper for prompts.

    It is measured only with the cosine schedule, and with the retention ratios in RETENTIONS.
    """

    def cases(self, on: Subject) -> list[Case]:
        """Return the cases of the study Critical that are measured for prompts.

        These are the references with all experts in the high tier, and one case for each ranking of
        the experts, low tier and retention ratio.
        """
        return [
            replace(case, prefill=True)
            for case in super().cases(on)
            if "retention" not in case.row
            or (case.prefill and case.label in _LABELS and case.row["retention"] in RETENTIONS)
        ]


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
    "mixes": (Mixes, Subject),
}


@reporting_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.real.studies", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--high", default="q4_1", help="high precision [default: q4_1]")
    parser.add_argument("--low", default="q2_0", help="low precision [default: q2_0]")
    parser.add_argument("--threads", type=int, help="compute threads [default: free cores]")
    args = parser.parse_args(argv)
    config = Config.build(
        model=args.model, high_tier=args.high, low_tier=args.low, threads=args.threads
    )
    options = EvalOptions(text=args.text, tokens=args.tokens, window=args.window)
    study, subject = STUDIES[args.study]
    for table in study().measure(subject(config, options, report)).tables:
        if table.rows:
            print(table.text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
