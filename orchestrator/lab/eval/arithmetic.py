"""Quality metrics computed from logits with NumPy. All logarithms are natural."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error. The error of a single value is nan."""

    value: float
    error: float


def mean(values: np.ndarray) -> Estimate:
    """Return the mean of values [n] and its standard error, assuming independent values."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(float(np.mean(values)), error)


def perplexity(nll: np.ndarray) -> Estimate:
    """Return the perplexity exp(mean(nll)) and its standard error.

    `nll` are the negative log-likelihoods of n tokens, [n]. The standard error is perplexity *
    (standard error of mean(nll)), a first-order estimate.
    """
    average = mean(nll)
    value = math.exp(average.value)
    return Estimate(value, value * average.error)


def change(nll: np.ndarray, base: np.ndarray) -> Estimate:
    """Return the relative change of perplexity from a base: exp(mean(nll - base)) - 1.

    `nll` and `base` are negative log-likelihoods [n] of the same tokens in the same order. The
    comparison is paired: the variation between tokens cancels, so the standard error is small.
    Raises ValueError if the lengths differ.
    """
    if len(nll) != len(base):
        raise ValueError(
            f"the two runs scored {len(nll)} and {len(base)} tokens, so that they "
            "cannot be compared token by token"
        )
    ratio = perplexity(nll - base)
    return Estimate(ratio.value - 1.0, ratio.error)


def share(part: np.ndarray, whole: np.ndarray) -> Estimate:
    """Return the ratio mean(part) / mean(whole) of paired values [n], with its standard error.

    The error is s(part - ratio * whole) / (sqrt(n) * |mean(whole)|), where s is the standard
    deviation. Ratio and error are nan if mean(whole) is 0.
    """
    base = mean(whole).value
    if not abs(base) > 0.0:
        return Estimate(math.nan, math.nan)
    ratio = mean(part).value / base
    return Estimate(ratio, mean(part - ratio * whole).error / abs(base))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of two arrays along the last axis. Zero vectors give 0."""
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    products = (a.astype(np.float64) * b).sum(axis=-1)
    found: np.ndarray = products / np.where(lengths > 0, lengths, 1)
    return found


def pair(estimate: Estimate) -> list[float | None]:
    """Return the list [value, standard error] for JSON. A nan becomes None."""
    return [None if math.isnan(each) else each for each in (estimate.value, estimate.error)]


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """Return KL(reference || other) = sum of p * (log p - log q), in nats.

    Both arguments are log-probabilities [n_vocab]. Tokens to which the reference assigns
    probability 0 are skipped.
    """
    possible = reference > -np.inf
    p, q = reference[possible], other[possible]
    return float(np.dot(np.exp(p), p - q))


def median_interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float, float]:
    """Return (median, lower end, upper end) of values [n], n >= 1.

    The ends are those of the 95 % percentile bootstrap interval of the median. The random seed is
    fixed, so the same values always give the same interval.
    """
    drawn = np.random.default_rng(1).choice(np.asarray(values, float), (draws, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)
