"""Which experts of a layer are hot for a sequence, and how many bits the others get (the near-data
paper, sections 4.1 and 4.2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.allocation.prefix_split import MAX_WIDTHS, prefix_split
from orchestrator.errors import PolicyError
from orchestrator.settings import Settings, setting

PLAIN, IMPORTANCE = "plain", "importance"

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class PlacementSettings(Settings):
    """How experts are placed. Without a prior and with plain weights it is the paper's form."""

    near_bits: float = setting(
        3.0,
        "Mean nominal bits of the experts of a layer that are not hot, as 3 or 2.5.",
        within=(1.0, 32.0),
    )
    near_weights: str = setting(
        IMPORTANCE,
        "What bits are given by: importance (losses weighted by how much each expert is used) or "
        "plain (losses alone, as in the paper).",
        choices=(IMPORTANCE, PLAIN),
    )
    importance_mix: float = setting(
        0.5,
        "The share of activation counts in an expert's importance, the rest is gate sums: alpha.",
        within=(0.0, 1.0),
        hidden=True,
    )
    prior_tokens: float = setting(
        64.0,
        "How many tokens of a prompt the profile of earlier runs counts as; 0 for none, as in the "
        "paper.",
        within=(0.0, 1e6),
    )


def nominal_bits(tier: str) -> int:
    """Bits a weight that a precision is named after: 4 of q4_k, 16 of bf16."""
    found = _DIGITS.search(tier)
    return int(found.group()) if found else 1


def best_of_each_width(tiers: Sequence[str]) -> list[str]:
    """Of precisions, best first: one of each width in nominal bits, the widest first."""
    by_bits = {nominal_bits(tier): tier for tier in reversed(tiers)}
    return [by_bits[bits] for bits in sorted(by_bits, reverse=True)]


def nominal_losses(bits: Sequence[int], n_layers: int, n_expert: int) -> np.ndarray:
    """What stands for a loss table where there is none, float64 [n_layers, n_expert, len(bits)]:
    each bit more divides the mean squared error by four, in all experts alike."""
    curve = 0.25 ** np.array(bits, np.float64)
    alike: np.ndarray = np.broadcast_to(curve, (n_layers, n_expert, len(bits))).copy()
    return alike


def shares(sums: np.ndarray, otherwise: np.ndarray | None = None) -> np.ndarray:
    """Each row divided by its sum, float64 [n_layers, n_expert]; where that is 0, the row of
    `otherwise`, or alike in all experts."""
    total = sums.sum(axis=1, keepdims=True, dtype=np.float64)
    fallback = np.full(sums.shape, 1 / sums.shape[1]) if otherwise is None else otherwise
    found: np.ndarray = np.where(total > 0, sums / np.where(total > 0, total, 1), fallback)
    return found


def importance(
    counts: np.ndarray,
    gates: np.ndarray,
    profile: np.ndarray,
    settings: PlacementSettings,
    n_expert_used: int,
) -> np.ndarray:
    """S = a P~ + (1 - a) W~ of section 4.1, float64 [n_layers, n_expert], each row of sum 1.

    counts P: how often each expert was used; gates W: the sums of its routing weights, as the model
    applies them; profile: how much it was used before, in any unit; all [n_layers, n_expert]. Norm
    of the paper is the division by the layer's sum. The profile counts as prior_tokens further
    tokens: P~ = (P + n0 k pi) / sum, pi the profile's shares, and W~ likewise.
    """
    pi = shares(profile)
    used = counts.sum(axis=1, keepdims=True, dtype=np.float64)
    prior = settings.prior_tokens * n_expert_used
    weight = np.where(used > 0, prior / np.where(used > 0, used + prior, 1), 1.0)
    mix = settings.importance_mix
    own = mix * shares(counts, pi) + (1 - mix) * shares(gates, pi)
    scores: np.ndarray = (1 - weight) * own + weight * pi
    return scores


def bit_budget(n_cold: int, settings: PlacementSettings) -> int:
    """What the experts of a layer that are not hot may take together, in nominal bits."""
    return int(n_cold * settings.near_bits + 1e-9)


def place(
    scores: np.ndarray,
    n_hot: int,
    losses: np.ndarray,
    bits: Sequence[int],
    settings: PlacementSettings,
    most: Sequence[int] | None = None,
) -> np.ndarray:
    """The tier of each expert, uint8 [n_layers, n_expert]: 0 for the n_hot most important ones of
    each layer, ties by index, and 1 + i for those with bits[i].

    scores: S [n_layers, n_expert]. losses: float64 [n_layers, n_expert, len(bits)]. The experts
    that are not hot take at most near_bits on average, floor(E_n * near_bits) together. most: the
    most experts of a layer in each of bits. Raises PolicyError where the bits do not suffice.
    """
    tiers = np.zeros(scores.shape, np.uint8)
    order = np.argsort(-scores, axis=1, kind="stable")
    budget = bit_budget(scores.shape[1] - n_hot, settings)
    weighted = settings.near_weights == IMPORTANCE
    names = np.arange(1, len(bits) + 1)
    for layer, ranked in enumerate(order):
        cold = ranked[n_hot:]
        weights = scores[layer, cold] if weighted else None
        counts = prefix_split(losses[layer, cold], bits, budget, weights, most)
        tiers[layer, cold] = np.repeat(names, counts)
    return tiers


def near_tiers(tiers: Sequence[str], asked: str | None) -> list[int]:
    """Tiers that experts may have which are not hot, best first, one of each width. tiers: all of
    them, best first; asked: names with commas between them, None for all below the best one. Raises
    PolicyError."""
    names = list(tiers[1:])
    chosen = names if asked is None else [each.strip().lower() for each in asked.split(",")]
    unknown = [each for each in chosen if each not in names]
    if unknown:
        raise PolicyError(
            f"--near-tiers: {unknown[0]} is not below {tiers[0]} in the file, which "
            f"holds {', '.join(names)} there"
        )
    found = best_of_each_width([each for each in names if each in chosen])
    if len(found) > MAX_WIDTHS:
        raise PolicyError(f"--near-tiers: at most {MAX_WIDTHS} widths, not {len(found)}")
    return [1 + names.index(each) for each in found]
