"""Figures that follow from the routing alone: how many experts are active, and which ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.allocation.prompts import heavy_hitters
from orchestrator.lab.replay.trace import Trace
from orchestrator.lab.study.activations import CHOSEN, read_windows
from orchestrator.lab.study.subject import Subject


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts that the tokens of one sequence use.

    ids: int64 [T, n_layers, k]. n_expert: number of experts of each layer.
    """

    domain: str
    ids: np.ndarray
    n_expert: int

    def counts(self) -> np.ndarray:
        """Return the number of uses of each expert, float64 [n_layers, n_expert]."""
        layers = range(self.ids.shape[1])
        return np.stack(
            [
                np.bincount(self.ids[:, layer].ravel(), minlength=self.n_expert).astype(float)
                for layer in layers
            ]
        )


def read_routes(on: Subject) -> list[Routes]:
    """Let a model read a text, and return the experts that each token uses in each layer.

    `on` has the model and the text. The model's experts have its best precision. The text is
    divided into sequences, which are evaluated independently. The result has one Routes object for
    each sequence.
    """
    return [
        Routes(
            window.domain,
            np.stack([found[CHOSEN, il] for il in on.layer_ids], axis=1).astype(np.int64),
            on.n_expert,
        )
        for window, found in read_windows(on, on.windows)
    ]


def total_counts(routes: Sequence[Routes]) -> np.ndarray:
    """Return how often all sequences together use each expert, float64 [n_layers, n_expert]."""
    found: np.ndarray = np.sum([each.counts() for each in routes], axis=0)
    return found


def _distinct(ids: np.ndarray) -> int:
    """Return the number of distinct experts in each layer, summed over the layers.

    ids: [..., n_layers, k].
    """
    layers = ids.shape[-2]
    return sum(len(np.unique(ids[..., layer, :])) for layer in range(layers))


def active_in_decode(routes: Sequence[Routes], batch: int, draws: int = 64) -> float:
    """Estimate the fraction of a layer's experts that at least one token of a decode step uses.

    The result is a mean over all layers and over `draws` random batches. A batch has one random
    token of each of `batch` random sequences.
    """
    random, found = np.random.default_rng(0), 0
    for _ in range(draws):
        chosen = random.choice(len(routes), batch, replace=batch > len(routes))
        tokens = [routes[at].ids[random.integers(len(routes[at].ids))] for at in chosen]
        found += _distinct(np.stack(tokens))
    return float(found / (draws * routes[0].ids.shape[1] * routes[0].n_expert))


def active_in_prefill(routes: Sequence[Routes], batch: int, length: int, draws: int = 64) -> float:
    """Estimate the fraction of a layer's experts that at least one prompt of a batch uses.

    The result is a mean over all layers and over `draws` random batches. A batch has the first
    `length` tokens of each of `batch` random sequences.
    """
    random, found = np.random.default_rng(0), 0
    for _ in range(draws):
        chosen = random.choice(len(routes), batch, replace=batch > len(routes))
        found += _distinct(np.concatenate([routes[at].ids[:length] for at in chosen]))
    return float(found / (draws * routes[0].ids.shape[1] * routes[0].n_expert))


@dataclass(frozen=True, slots=True)
class Overlap:
    """The fraction of a token's experts that a later token of the sequence also uses.

    - lag: distance of the two tokens.
    - kept: the measured fraction.

    The other two fields are fractions to expect by chance, if tokens chose experts independently:

    - by_use: if tokens chose popular experts more often, as often as the sequence uses them.
    - uniform: if tokens chose all experts equally often.
    """

    lag: int
    kept: float
    by_use: float
    uniform: float


def changes(routes: Sequence[Routes], lags: Sequence[int]) -> list[Overlap]:
    """Measure how much the used experts change between two tokens of the same sequence.

    Returns an Overlap for each distance between two tokens. It has the fraction of the first
    token's experts that the second token also uses: the mean over all layers and all pairs of a
    sequence with this distance, averaged over the sequences.

    - routes: the experts that the tokens of each sequence use.
    - lags: the distances, in tokens. A distance that is too long for all sequences is left out.
    """
    n_layers, k = routes[0].ids.shape[1:]
    n_expert = routes[0].n_expert
    by_use = []
    for each in routes:
        share = each.counts() / len(each.ids)
        by_use.append(float((share**2).sum() / (k * n_layers)))
    found = []
    for lag in lags:
        kept = [
            (each.ids[:-lag, :, :, None] == each.ids[lag:, :, None, :]).any(axis=3).mean()
            for each in routes
            if len(each.ids) > lag
        ]
        if kept:
            means = float(np.mean(kept)), float(np.mean(by_use))
            found.append(Overlap(lag, *means, k / n_expert))
    return found


def concentration(counts: np.ndarray, share: float) -> float:
    """Return the fraction of all expert uses that belong to the most used experts of each layer.

    - counts: number of uses of each expert, [n_layers, n_expert].
    - share: fraction of a layer's experts that count as most used. At least one expert per layer
      counts.
    """
    n = max(1, round(share * counts.shape[1]))
    best = np.sort(counts, axis=1)[:, ::-1][:, :n]
    return float(best.sum() / max(1.0, counts.sum()))


def sorted_shares(counts: np.ndarray) -> np.ndarray:
    """Return the mean usage of the most used expert of a layer, of the second, and so on.

    Usage is the fraction of all uses in the layer. The result is float64 [n_expert], a mean over
    the layers. `counts` is the number of uses of each expert, [n_layers, n_expert].
    """
    shares = counts / np.maximum(1.0, counts.sum(axis=1, keepdims=True))
    found: np.ndarray = np.sort(shares, axis=1)[:, ::-1].mean(axis=0)
    return found


def hot_overlap(one: np.ndarray, other: np.ndarray, n_hot: int) -> list[float]:
    """For each layer, return the fraction of the most used experts that two texts have in common.

    - one, other: number of uses of each expert in each of the texts, [n_layers, n_expert].
    - n_hot: number of experts per layer that count as most used.
    """
    best = (np.argsort(-each, axis=1, kind="stable")[:, :n_hot] for each in (one, other))
    return [len(np.intersect1d(*rows)) / n_hot for rows in zip(*best, strict=True)]


@dataclass(frozen=True, slots=True)
class Load:
    """How often the tokens of one prompt use each expert of one layer.

    Heavy hitters are the tokens with the highest importance scores.

    - total: number of uses by all tokens, [n_expert].
    - heavy: number of uses by heavy hitters, [n_expert].
    - random: number of uses by random tokens, in each of several draws, float64 [n_draws,
      n_expert]. A draw has the same number of tokens as there are heavy hitters.
    """

    layer: int
    total: np.ndarray
    heavy: np.ndarray
    random: np.ndarray


def loads(trace: Trace, share: float, draws: int = 16) -> list[Load]:
    """Count expert uses by all tokens of a prompt, by its heavy hitters, and by random tokens.

    Heavy hitters are the tokens of a prompt with the highest importance scores. The random tokens
    are a comparison with the same number of tokens.

    Returns a Load for each layer of each prompt: the counts for all tokens, for heavy hitters, and
    for each draw of random tokens. Prompts without scores are left out.

    - trace: the recorded prompts.
    - share: fraction of a prompt's tokens that are heavy hitters.
    - draws: how often random tokens are drawn.
    """
    found, random = [], np.random.default_rng(0)
    for step in trace.steps():
        for event in step.events:
            if event.importance is None or len(event.ids) < 2:
                continue
            best = heavy_hitters(event.importance, share)
            tokens = len(event.ids)
            drawn = [random.choice(tokens, len(best), replace=False) for _ in range(draws)]
            total, heavy, *others = (
                np.bincount(event.ids[rows].ravel(), minlength=trace.n_expert).astype(float)
                for rows in (np.arange(tokens), best, *drawn)
            )
            found.append(Load(event.layer, total, heavy, np.stack(others)))
    return found
