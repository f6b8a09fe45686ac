"""How well a model predicts a text, and how far from the best tier it is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.units import format_size
from orchestrator.engine.texts import log_softmax
from orchestrator.errors import ConfigError
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import Estimate
from orchestrator.lab.eval.judge import Judge
from orchestrator.lab.eval.text import Window


class Reference(Closing):
    """Log-probabilities float32 [n_tokens, n_vocab] in a file; free it with close or `with`."""

    def __init__(self, n_tokens: int, n_vocab: int, path: Path | None = None) -> None:
        """path: an empty file, or one that has them already; None for a temporary one. Raises
        ConfigError where the folder has no room for it."""
        needed = 4 * n_tokens * n_vocab
        folder = tempfile.gettempdir() if path is None else str(path.parent)
        free = shutil.disk_usage(folder).free
        known = 0 if path is None else path.stat().st_size
        if needed > free + known:
            raise ConfigError(
                f"comparing {n_tokens} tokens with the best tier takes {format_size(needed)} in "
                f"{folder}, where {format_size(free)} are free: lower --max-tokens"
            )
        self._file = tempfile.TemporaryFile() if path is None else path.open("r+b")  # noqa: SIM115
        self._file.truncate(needed)
        shape = (n_tokens, n_vocab)
        self.rows: np.ndarray = np.memmap(self._file, np.float32, "r+", shape=shape)
        self._places: np.ndarray | None = None

    def part(self, places: np.ndarray) -> Reference:
        """Some of the tokens, as if they were all: places int [n], where each stands. Lives as long
        as the whole."""
        other = copy(self)
        other._places = places
        return other

    def row(self, at: int) -> np.ndarray:
        """float32 [n_vocab], a view: the log-probabilities of one token's prediction."""
        return np.asarray(self.rows[at if self._places is None else self._places[at]])

    def close(self) -> None:
        """Frees the file; safe to call twice."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class TextScores:
    """One pass over a text of n scored tokens, in the text's order.

    nll float64 [n]: negative log-likelihoods in nats. kl, agrees float64 [n]: KL divergence from
    the reference, and 1 where the likeliest token is its one, else 0; [0] without a reference.
    domains: each token's domain, an index into names.
    """

    nll: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray
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
            kl=self.kl[places],
            agrees=self.agrees[places],
            domains=self.domains[places],
        )


def score_text(
    judge: Judge,
    windows: Sequence[Window],
    *,
    keep: Reference | None = None,
    against: Reference | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> TextScores:
    """Scores the windows' tokens from each one's first scored token on.

    keep: filled with this model's own log-probabilities; against: what to compare with.
    """
    total = sum(window.n_scored for window in windows)
    nll = np.empty(total)
    kl, agrees = np.empty((2, total if against is not None else 0))
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
            if against is not None:
                row = against.row(at).astype(np.float64)
                kl[at] = arithmetic.kl_divergence(row, logp)
                agrees[at] = row.argmax() == logp.argmax()
            at += 1
        progress(at / total)
    return TextScores(nll, kl, agrees, domains, names)
