"""How well a model predicts a text, and how far from the best tier it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.engine.texts import log_softmax
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.eval.compare import Reference, ReferencePart
from orchestrator.lab.eval.judge import Judge
from orchestrator.lab.eval.text import Window

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class TextScores:
    """One pass over a text of n scored tokens, in the text's order.

    nll float64 [n]: negative log-likelihoods in nats. kl float64 [n] and agrees bool [n]:
    KL divergence from the reference, and whether the likeliest token is its one; None without
    a reference. domains: each token's domain, an index into names.
    """

    nll: np.ndarray
    kl: np.ndarray | None
    agrees: np.ndarray | None
    domains: np.ndarray
    names: tuple[str, ...]

    @property
    def perplexity(self) -> Estimate:
        return arithmetic.perplexity(self.nll)

    def by_domain(self) -> dict[str, Estimate]:
        """The perplexity of each domain, where the text has several."""
        if len(self.names) < 2:
            return {}
        return {
            name: arithmetic.perplexity(self.nll[self.domains == index])
            for index, name in enumerate(self.names)
        }

    def part(self, places: np.ndarray) -> TextScores:
        """The scores of some of the tokens. places int [m]."""
        return replace(
            self,
            nll=self.nll[places],
            kl=None if self.kl is None else self.kl[places],
            agrees=None if self.agrees is None else self.agrees[places],
            domains=self.domains[places],
        )


def score_text(
    judge: Judge,
    windows: Sequence[Window],
    *,
    keep: Reference | None = None,
    against: Reference | ReferencePart | None = None,
    progress: Progress | None = None,
) -> TextScores:
    """Scores the windows' tokens from each one's first scored token on.

    keep: filled with this model's own log-probabilities; against: what to compare with.
    """
    total = sum(window.n_scored for window in windows)
    nll = np.empty(total)
    kl = np.empty(total) if against is not None else None
    agrees = np.empty(total, bool) if against is not None else None
    domains = np.empty(total, np.int32)
    names = tuple(dict.fromkeys(window.domain for window in windows))
    at = 0
    for window in windows:
        rows = judge.rows(window.tokens, window.first, window.prompt)
        for target, logits in zip(window.tokens[window.first :], rows, strict=True):
            logp = log_softmax(logits)
            nll[at] = -logp[target]
            domains[at] = names.index(window.domain)
            if keep is not None:
                keep.rows[at] = logp
            if against is not None and kl is not None and agrees is not None:
                row = against.row(at).astype(np.float64)
                kl[at] = arithmetic.kl_divergence(row, logp)
                agrees[at] = row.argmax() == logp.argmax()
            at += 1
        if progress is not None:
            progress(at / total)
    return TextScores(nll, kl, agrees, domains, names)
