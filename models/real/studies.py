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
from dataclasses import replace
from functools import partial
from pathlib import Path

from gguf_tools.errors import GGUFError
from models.real.make import report
from orchestrator.config import Config
from orchestrator.errors import MoeEdgeError
from orchestrator.lab.eval.judge import Reference
from orchestrator.lab.eval.run import EvalOptions, best_config, read_reference
from orchestrator.lab.study.dymoe import SPREADS, Accuracy, Critical, Depth
from orchestrator.lab.study.study import Case, Study
from orchestrator.lab.study.subject import Subject
from orchestrator.runtime.runtime import Runtime

RETENTIONS = (0.75, 0.9)
_LABELS = [f"{kind}, {SPREADS['cosine']}" for kind in ("heavy hitters", "total load")]


class Prompts(Subject):
    """The subject of a study in which all models read the text as prompts."""

    def reference(self) -> Reference:
        """Return the log-probabilities of the model in its best tier. The caller closes them."""
        config = best_config(self.config, self.best)
        with Runtime.open(config, self.report) as runtime, runtime.evaluator() as e:
            return read_reference(e, self.windows, True, partial(report, "Reference"))


class DepthOfPrompts(Depth):
    """The study Depth for prompts: the loss if one layer is in the low tier."""

    def cases(self, on: Subject) -> list[Case]:
        """Return the cases of the study Depth, changed to read the text as prompts."""
        return [replace(case, prefill=True) for case in super().cases(on)]


class Hitters(Critical):
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


class Mixes(Accuracy):
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
    try:
        config = Config.build(
            model=args.model, high_tier=args.high, low_tier=args.low, threads=args.threads
        )
        options = EvalOptions(text=args.text, tokens=args.tokens, window=args.window)
        study, subject = STUDIES[args.study]
        for table in study().measure(subject(config, options, report)).tables:
            if table.rows:
                print(table.text(), flush=True)
    except (GGUFError, MoeEdgeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
