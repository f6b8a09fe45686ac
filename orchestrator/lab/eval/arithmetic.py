"""The figures of quality as plain arithmetic on logits; natural logarithms throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the standard error of it; nan where one value says nothing about the spread."""

    value: float
    error: float


def mean(values: np.ndarray) -> Estimate:
    """Mean of values [n] with its standard error; the values are taken as independent."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(float(np.mean(values)), error)


def perplexity(nll: np.ndarray) -> Estimate:
    """exp of the mean of nll [n], the tokens' negative log-likelihoods; its error by the
    first derivative: perplexity * standard error of the mean."""
    average = mean(nll)
    value = math.exp(average.value)
    return Estimate(value, value * average.error)


def change(nll: np.ndarray, base: np.ndarray) -> Estimate:
    """Relative change of the perplexity from base [n] to nll [n], exp(mean difference) - 1.

    Paired: both hold the same tokens in the same order, so most of the spread, that of the
    text, falls out of the standard error.
    """
    if len(nll) != len(base):
        raise ValueError(f"{len(nll)} tokens cannot be paired with {len(base)}")
    ratio = perplexity(nll - base)
    return Estimate(ratio.value - 1.0, ratio.error)


def share(part: np.ndarray, whole: np.ndarray) -> Estimate:
    """mean(part) / mean(whole) of paired values [n]. Its error by the first derivative,
    s(part - ratio * whole) / (sqrt(n) * |mean(whole)|); nan where whole adds up to nothing.
    """
    base = mean(whole).value
    if not abs(base) > 0.0:
        return Estimate(math.nan, math.nan)
    ratio = mean(part).value / base
    return Estimate(ratio, mean(part - ratio * whole).error / abs(base))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine similarity along the last axis; 0 of zeros."""
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    products = (a.astype(np.float64) * b).sum(axis=-1)
    found: np.ndarray = products / np.where(lengths > 0, lengths, 1)
    return found


def pair(estimate: Estimate) -> list[float | None]:
    """[value, standard error], nan as None: fit for JSON."""
    return [None if math.isnan(each) else each for each in (estimate.value, estimate.error)]


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """KL(reference || other) = sum of p * (log p - log q) in nats, of log-probabilities
    [n_vocab]; a token that the reference rules out adds nothing."""
    possible = reference > -np.inf
    p, q = reference[possible], other[possible]
    return float(np.dot(np.exp(p), p - q))


def median_interval(values: Sequence[float], draws: int = 10_000) -> tuple[float, float, float]:
    """(median, lower end, upper end) of values [n], n >= 1; the ends are those of the 95 % interval
    of the median by the percentile bootstrap. Equal values give an equal interval: the draws have
    a seed of their own."""
    drawn = np.random.default_rng(1).choice(np.asarray(values, float), (draws, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)
