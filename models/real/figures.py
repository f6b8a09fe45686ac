"""Figures of the papers as functions of a bootstrap draw.

A draw has the weight of each context, [n]. Each function returns figures by name, and a figure
computes its value from a draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np
import numpy.typing as npt

from models.real.bootstrap import Draw, Values
from orchestrator.lab.study.heop import FIRST_STEPS, as_printed, climbed, loss_ratio
from orchestrator.lab.study.routing import sorted_shares
from orchestrator.policy.firm import Votes

Figure = Callable[[Draw], float]

# Fractions of a layer's experts that count as hot. DynaExq's Figure 2 takes a tenth.
HOT = {"a tenth": 0.1, "a quarter": 0.25}
# DynaExq compares text, mathematics and code.
TRIPLE = ("wikitext", "mathematics", "code")


def hot_experts(counts: Values, n_hot: int) -> npt.NDArray[np.bool_]:
    """Return which experts are among the n_hot most used of their layer.

    The result has the shape of `counts`, [.., n_expert].
    """
    found = np.zeros(counts.shape, bool)
    order = np.argsort(-counts, axis=-1, kind="stable")[..., :n_hot]
    np.put_along_axis(found, order, True, axis=-1)
    return found


def mean_of(values: Values) -> Figure:
    """Return the figure "mean of the contexts' values", where values are [n]."""
    return lambda draw: float(draw @ values / draw.sum())


def ratio_of(part: Values, whole: Values) -> Figure:
    """Return the figure "sum of part over sum of whole", where both are [n]."""
    return lambda draw: float((draw @ part) / (draw @ whole))


@dataclass(frozen=True, slots=True)
class HotSets:
    """The hot experts of kinds of text: the most used ones of each layer.

    The contexts of each kind are divided into two halves. The hot experts of the first half are
    compared with those of the second half of the same kind and of other kinds. The same kind shows
    how much of a difference is chance.

    - used: uses of each expert, [n, n_layers, n_expert].
    - kinds: kind of text of each context. Each kind needs at least two contexts.
    """

    used: Values
    kinds: Sequence[str]

    @property
    def strata(self) -> list[tuple[str, int]]:
        """The kind and the half (0 or 1) of each context."""
        seen: dict[str, int] = {}
        found = []
        for kind in self.kinds:
            seen[kind] = seen.get(kind, 0) + 1
            found.append((kind, seen[kind] % 2))
        return found

    def _counts(self, draw: Draw) -> Values:
        """Return the uses of each expert, [2, n_kinds, n_layers, n_expert], by half and kind."""
        strata = self.strata
        found = [
            [
                np.tensordot(draw * [each == (kind, half) for each in strata], self.used, 1)
                for kind in dict.fromkeys(self.kinds)
            ]
            for half in (1, 0)
        ]
        return np.array(found)

    def same_and_other(self, compared: Values) -> tuple[float, float]:
        """Return the means of [n_kinds, n_kinds, ..] on and off the diagonal."""
        n = len(compared)
        inside = np.eye(n, dtype=bool)
        return float(compared[inside].mean()), float(compared[~inside].mean())

    def figures(self) -> dict[str, Figure]:
        """Return the figures of each size of a hot set, none if there is one kind of text."""
        if len(set(self.kinds)) < 2:
            return {}
        n_expert = self.used.shape[2]
        found: dict[str, Figure] = {}
        for name, part in HOT.items():
            n_hot = max(1, round(part * n_expert))

            def shared(draw: Draw, n_hot: int = n_hot) -> Values:
                first, second = hot_experts(self._counts(draw), n_hot)
                both: Values = (first[:, None] & second[None]).sum(axis=-1) / n_hot
                return both

            def covered(draw: Draw, n_hot: int = n_hot) -> Values:
                first, second = self._counts(draw)
                mine = (hot_experts(first, n_hot)[:, None] * second[None]).sum(axis=(2, 3))
                share: Values = mine / second.sum(axis=(1, 2))
                return share

            def apart(draw: Draw, n_hot: int = n_hot) -> Values:
                layers: Values = (shared(draw, n_hot) == 0).sum(axis=-1)
                return layers

            def of(compare: Callable[[Draw], Values], at: int) -> Figure:
                return lambda draw: self.same_and_other(compare(draw))[at]

            def other_minus_same(compare: Callable[[Draw], Values]) -> Figure:
                def difference(draw: Draw) -> float:
                    same, other = self.same_and_other(compare(draw))
                    return other - same

                return difference

            head = f"hot set of {name} ({n_hot})"
            for what, compare in {
                "shared": shared,
                "layers without a shared one": apart,
                "share of the uses": covered,
            }.items():
                found[f"{head}: {what}, same kind"] = of(compare, 0)
                found[f"{head}: {what}, other kinds"] = of(compare, 1)
                found[f"{head}: {what}, other minus same"] = other_minus_same(compare)
            if set(TRIPLE) <= set(self.kinds):
                found[f"{head}: layers in which {', '.join(TRIPLE)} are disjoint"] = self._disjoint(
                    n_hot
                )
        return found

    def _disjoint(self, n_hot: int) -> Figure:
        at = [list(dict.fromkeys(self.kinds)).index(kind) for kind in TRIPLE]

        def layers(draw: Draw) -> float:
            hot = hot_experts(self._counts(draw).sum(axis=0)[at], n_hot)
            return float((hot.sum(axis=0) <= 1).all(axis=-1).sum())

        return layers


def skew(used: Values, kinds: Sequence[str]) -> dict[str, Figure]:
    """Return the usage of the most and the least used expert of a layer, and by kind of text.

    used: uses of each expert, [n, n_layers, n_expert].
    """
    names = list(dict.fromkeys(kinds))
    masks = [np.array([each == name for each in kinds]) for name in names]

    def total(draw: Draw) -> Values:
        return sorted_shares(np.tensordot(draw, used, 1))

    return {
        "most used expert": lambda draw: float(total(draw)[0]),
        "least used expert": lambda draw: float(total(draw)[-1]),
        "most used expert of one kind of text": lambda draw: float(
            np.mean([total(draw * mask)[0] for mask in masks])
        ),
    }


def active(ids: Sequence[npt.NDArray[np.int64]], used: Values) -> dict[str, Figure]:
    """Return the share of a layer's experts that steps use (DynaExq's Tables 1 and 2).

    A decode step has one random token of each of several random contexts.

    - ids: the experts of each token of a context, [T, n_layers, k] each.
    - used: uses of each expert, [n, n_layers, n_expert].
    """
    n_tokens = np.array([len(each) for each in ids])
    n_layers, n_expert = used.shape[1:]

    def decode(batch: int) -> Figure:
        def share(draw: Draw) -> float:
            chance = np.tensordot(draw / n_tokens / draw.sum(), used, 1)
            return float((1 - (1 - chance) ** batch).mean())

        return share

    def distinct(each: npt.NDArray[np.int64]) -> float:
        layers = range(n_layers)
        n_used = sum(len(np.unique(each[:4, layer])) for layer in layers)
        return float(n_used / (n_layers * n_expert))

    found = {f"experts in a decode step of {batch}": decode(batch) for batch in (1, 2, 4, 8)}
    return found | {"experts in a prompt of 4": mean_of(np.array([distinct(each) for each in ids]))}


def two_inputs(used: Values, n_hot: int) -> Figure:
    """Return the figure "hot experts that two different contexts share" (DyMoE's Figure 4).

    used: uses of each expert, [n, n_layers, n_expert]. n_hot: number of a layer's hot experts.
    """
    hot = hot_experts(used, n_hot).reshape(len(used), -1).astype(np.float64)
    shared = hot @ hot.T / (used.shape[1] * n_hot)
    np.fill_diagonal(shared, 0)  # a context that is drawn twice is no pair

    def mean(draw: Draw) -> float:
        pairs = draw.sum() ** 2 - (draw**2).sum()
        found: float = draw @ shared @ draw / pairs
        return found

    return mean


def votes(totals: Sequence[Mapping[str, tuple[int, int]]], k: int) -> dict[str, Figure]:
    """Return FIRM's Figure 7: how many of the experts that several layers name are used.

    Each strategy is compared with the nearest layer alone, if that names as many experts.

    - totals: for each context, the result of `Voted.totals`.
    - k: number of experts per token.
    """
    named, right = (
        {label: np.array([each[label][at] for each in totals], float) for label in totals[0]}
        for at in (0, 1)
    )
    ranked = [label for label in named if label.startswith("top ")]

    def utilisation(label: str) -> Figure:
        return ratio_of(right[label], named[label])

    def over_nearest(label: str) -> Figure:
        def difference(draw: Draw) -> float:
            size = float(draw @ named[label])
            sizes = [0.0, *(float(draw @ named[each]) for each in ranked)]
            rights = [0.0, *(float(draw @ right[each]) for each in ranked)]
            return float((draw @ right[label] - np.interp(size, sizes, rights)) / size)

        return difference

    found = {"nearest layer alone, K = k: utilisation": utilisation(f"top {k}")}
    for label in named:
        if label.startswith("MoL"):
            if label.startswith(f"MoL K={k} "):
                found[f"{label}: utilisation"] = utilisation(label)
            found[f"{label}: over the nearest layer"] = over_nearest(label)
    return found


def vote_losses(losses: Values, k: int) -> dict[str, Figure]:
    """Return FIRM's Figure 6 for a group of layers: how losses depend on K and P.

    - losses: sum of the loss (eq. 11) over a context's tokens, [n, P, K].
    - k: number of experts per token.
    """

    def grid(draw: Draw) -> Values:
        found: Values = np.tensordot(draw, losses, 1)
        return found

    def best(draw: Draw) -> tuple[int, int]:
        p, n = np.unravel_index(int(grid(draw).argmin()), losses.shape[1:])
        return int(n) + 1, int(p) + 1

    return {
        "best K": lambda draw: float(best(draw)[0]),
        "best P": lambda draw: float(best(draw)[1]),
        "smallest loss with P > 1 over that with P = 1": lambda draw: float(
            grid(draw)[1:].min() / grid(draw)[0].min()
        ),
        "smallest loss with K > k over that with K <= k": lambda draw: float(
            grid(draw)[:, k:].min() / grid(draw)[:, :k].min()
        ),
        "loss of K = k, P = 3 over the smallest": lambda draw: float(
            grid(draw)[2, k - 1] / grid(draw).min()
        ),
    }


def search_losses(contexts: Sequence[Values]) -> dict[str, Figure]:
    """Return how close two searches for K and P come to the smallest loss of a group of layers.

    Each figure is the loss with the K and P that a search finds, divided by the smallest loss. The
    searches are FIRM's Algorithm 1, as the mean over its four possible first steps, and our climb.

    contexts: the loss (eq. 11) of each token of each context, [tokens, P, K].
    """

    def figure(search: Callable[[Values], list[Votes]], draw: Draw) -> float:
        losses = np.concatenate(
            [each for each, n in zip(contexts, draw, strict=True) for _ in range(n)]
        )
        means = losses.mean(axis=0)
        return float(np.mean([loss_ratio(means, votes) for votes in search(losses)]))

    def printed(losses: Values) -> list[Votes]:
        return [as_printed(losses, axis, delta) for axis, delta in FIRST_STEPS]

    return {
        "loss of Algorithm 1 over the smallest": partial(figure, printed),
        "loss of our climb over the smallest": partial(figure, lambda losses: [climbed(losses)]),
    }


def prompt_and_answer(
    cosines: Mapping[str, Values], covered: Mapping[str, Values], asked: Values
) -> dict[str, Figure]:
    """Return the context paper's Figure 4: how well scores predict an answer's experts.

    - cosines: for each kind of score, the cosine with the answer's usage, [n].
    - covered: for each kind of score, the uses in the answer of the experts with the highest
      scores, [n].
    - asked: all uses in the answer, [n].
    """
    found = {f"cosine with the answer, {name}": mean_of(each) for name, each in cosines.items()}
    shares = {name: ratio_of(each, asked) for name, each in covered.items()}
    found |= {f"answer's uses in the hot quarter, {name}": each for name, each in shares.items()}
    for one, other in combinations(covered, 2):
        found[f"answer's uses, {one} minus {other}"] = ratio_of(
            covered[one] - covered[other], asked
        )
    return found
