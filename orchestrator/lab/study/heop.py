"""FIRM-MoE's Figure 6 and Algorithm 1, offline from a router's logits.

A run gives k candidates of each voting layer, so a replay can judge K <= k only. Here candidates
come from the logits, and K goes to 2 k. The cache is a plain LRU of each layer that loads on demand
(off-policy): what a pair (K, P) would prefetch does not change it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from orchestrator.lab.study.activations import ROUTER_INPUT, ROUTER_LOGITS, Activations, top
from orchestrator.policy.firm import (
    GROUPS,
    MOL,
    Climb,
    Votes,
    expected_sets,
    group_of,
    least,
    mask_of,
    unused_and_missed,
)

DEEPEST = 4
# The weights a and b of eq. 11, and tokens between two updates of Algorithm 1 (the paper samples
# every 10 tokens) and of ours.
WEIGHT = 0.5
PAPER_STEPS, OUR_STEPS = 10, 32
PATIENCE = 2
# The first steps of Algorithm 1, of which the paper draws one at random: the number that changes (0
# for K, 1 for P), and its change.
FIRST_STEPS = (*product(range(2), (1, -1)),)


class Losses:
    """Computes the prediction loss of FIRM-MoE (eq. 11) for each pair of the parameters K and P.

    P is the number of earlier layers that predict the experts of a layer. K is the number of
    experts taken from each prediction. An expert counts as predicted if all P predictions have it.
    The loss counts wrong and missing predictions. Experts in the simulated LRU cache of the layer
    do not count, because they need no prefetching. Losses are kept for each token and each group of
    layers: shallow, middle and deep.
    """

    def __init__(self, n_layers: int, n_expert: int, k: int, slots: int) -> None:
        """Start without tokens. k: experts per token. slots: experts that each layer caches."""
        self.n_layers, self.k = n_layers, k
        self.most = min(2 * k, n_expert)
        self._slots = slots
        self._groups = group_of(n_layers)
        self._cache: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(n_layers)]
        self._tokens: list[np.ndarray] = []

    def count(
        self, read: Activations, layer_ids: list[int], routers: list[np.ndarray | None]
    ) -> None:
        """Compute and store the prediction losses of each token of one text.

        To predict the experts of a layer, its router is applied to the activations of each of P
        earlier layers. Each of these P predictions has the K best experts. An expert counts as
        predicted if all P predictions have it. The loss counts wrong and missing predictions (eq.
        11 of FIRM-MoE). The method `of` returns each token's loss for each pair of K and P.

        - read: the activations of the text.
        - layer_ids: layer number of each MoE layer.
        - routers: router matrix of each MoE layer. The experts of a layer with None are not
          predicted.
        """
        votes, used = {}, {}
        for at, (il, router) in enumerate(zip(layer_ids, routers, strict=True)):
            used[at] = top(read[ROUTER_LOGITS, il], self.k).tolist()
            if at and router is not None:
                before = layer_ids[at - 1 :: -1][:DEEPEST]
                logits = [read[ROUTER_INPUT, other] @ router.T for other in before]
                votes[at] = [top(each, self.most).tolist() for each in logits]
        for token in range(len(used[0])):
            lost = np.zeros((len(GROUPS), DEEPEST, self.most))
            for layer in range(self.n_layers):
                experts = used[layer][token]
                if layer in votes:
                    mine = [vote[token] for vote in votes[layer]]
                    lost[self._groups[layer]] += self._losses(layer, mine, experts)
                self._use(layer, experts)
            self._tokens.append(lost)

    def _losses(self, layer: int, votes: list[list[int]], used: Sequence[int]) -> np.ndarray:
        """Return the losses of one layer and token for each P and K, float64 [DEEPEST, most]."""
        absent = [(~mask_of(self._cache[layer]), 1)]
        expert_bits = mask_of(used)
        return np.array(
            [
                [WEIGHT * sum(unused_and_missed(named, expert_bits, absent)) for named in row]
                for row in expected_sets(MOL, votes, DEEPEST)
            ]
        )

    def _use(self, layer: int, experts: Sequence[int]) -> None:
        cache = self._cache[layer]
        for expert in experts:
            cache[expert] = None
            cache.move_to_end(expert)
        while len(cache) > self._slots:
            cache.popitem(last=False)

    def of(self, group: int) -> np.ndarray:
        """Return the prediction losses of each token, as means over one group of layers.

        A loss counts wrong and missing predictions of experts (eq. 11 of FIRM-MoE). The result is
        float64 [T, P, K] for T tokens. Its axes P and K are:

        - P: number of earlier layers that predict the experts of a layer, from 1.
        - K: number of experts taken from each of these predictions, from 1.

        For example, element [0, 1, 4] is the loss of the first token with P = 2 and K = 5.

        `group` is 0 for shallow, 1 for middle and 2 for deep layers.
        """
        n = sum(each == group for each in self._groups[1:])
        found: np.ndarray = np.stack([token[group] for token in self._tokens]) / max(1, n)
        return found

    @property
    def groups(self) -> list[int]:
        """The groups of layers for which the method `of` can return prediction losses.

        A prediction loss counts wrong and missing predictions of experts. The result is a list in
        increasing order: 0 for shallow, 1 for middle and 2 for deep layers. A group is left out if
        the model has no such layers. The model's first layer does not count, because no earlier
        layer can predict its experts.
        """
        return sorted(set(self._groups[1:]))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The pair of numbers K and P that one search method chose.

    P is the number of earlier layers that predict the experts of a layer. K is the number of
    experts taken from each prediction. Wrong and missing predictions have a loss (eq. 11 of
    FIRM-MoE).

    - way: the name of the method.
    - votes: the chosen pair (K, P).
    - ratio: mean prediction loss of this pair, divided by the smallest mean loss of all pairs.
    """

    way: str
    votes: Votes
    ratio: float


def loss_ratio(means: np.ndarray, votes: Votes) -> float:
    """Return the mean prediction loss of one pair (k, p), divided by the smallest mean loss.

    The result is 1 if the smallest loss is 0. A prediction loss (eq. 11 of FIRM-MoE) counts wrong
    and missing predictions of experts.

    - means: means[p - 1, k - 1] is the mean prediction loss if p earlier layers predict the experts
      of a layer, and k experts are taken from each prediction.
    - votes: the pair (k, p).
    """
    smallest = float(means.min())
    return float(means[votes[1] - 1, votes[0] - 1]) / smallest if smallest else 1.0


def searches(losses: np.ndarray) -> list[SearchResult]:
    """Search the best values of two parameters of expert prediction, with several methods.

    The parameters are the axes P and K of `losses` [T, P, K], the prediction losses of T tokens:

    - P: number of earlier layers that predict the experts of a layer, from 1.
    - K: number of experts taken from each of these predictions, from 1.

    For example, losses[0, 1, 4] is the loss of the first token with P = 2 and K = 5.

    The methods are Algorithm 1 of the FIRM-MoE paper, our hill climbing, and a search of all pairs.
    Returns the pair (K, P) that each method chose.
    """
    means = losses.mean(axis=0)

    def found(way: str, votes: Votes) -> SearchResult:
        return SearchResult(way, votes, loss_ratio(means, votes))

    printed = [
        found(
            f"Algorithm 1, a search for K and P as printed in the FIRM-MoE paper; first step: "
            f"change {('K (experts per prediction)', 'P (predicting layers)')[axis]} by {delta:+d}",
            as_printed(losses, axis, delta),
        )
        for axis, delta in FIRST_STEPS
    ]
    pairs = [*product(range(1, means.shape[1] + 1), range(1, means.shape[0] + 1))]
    return [
        *printed,
        found("our climb", climbed(losses)),
        found(
            "all combinations of K (experts per prediction) and P (predicting layers)",
            least(means.tolist(), pairs),
        ),
    ]


def as_printed(losses: np.ndarray, axis: int, delta: int) -> Votes:
    """Choose two parameters of expert prediction with Algorithm 1, as the FIRM-MoE paper prints it.

    The parameters are the axes P and K of `losses` [T, P, K], the prediction losses of T tokens:

    - P: number of earlier layers that predict the experts of a layer, from 1.
    - K: number of experts taken from each of these predictions, from 1.

    The search begins at the largest P and K. After every 10 tokens, it adds `delta` to one of them,
    within its range. After two such steps without a smaller mean loss, it turns to the other
    parameter, and reverses the sign of `delta`. Returns the best pair (K, P) that it tried.

    - axis: the parameter to change first: 0 for K, 1 for P, as in the result.
    - delta: its first change, 1 or -1.
    """
    # The paper draws axis and delta at random. As printed there, the mean loss of a pair includes
    # all tokens since the start, even those with other pairs.
    n_p, n_k = losses.shape[1:]
    at = [n_k, n_p]
    visited: dict[Votes, float] = {}
    best, total, stale = np.inf, 0.0, 0
    for end in range(PAPER_STEPS, len(losses) + 1, PAPER_STEPS):
        total += float(losses[end - PAPER_STEPS : end, at[1] - 1, at[0] - 1].sum())
        mean = total / end
        visited[at[0], at[1]] = mean
        best, stale = (mean, 0) if mean < best else (best, stale + 1)
        if stale >= PATIENCE:
            # The text: the direction is reversed, and K and P change places.
            delta, axis, stale = -delta, 1 - axis, 0
        at[axis] = min(max(1, at[axis] + delta), (n_k, n_p)[axis])
    return min(visited, key=lambda pair: (visited[pair], pair)) if visited else (n_k, n_p)


def climbed(losses: np.ndarray) -> Votes:
    """Choose the numbers K and P with our hill climbing, and return the pair (K, P).

    P is the number of earlier layers that predict the experts of a layer. K is the number of
    experts taken from each prediction. The search minimizes the mean prediction loss.

    `losses[t, p - 1, k - 1]` is the prediction loss of token t with K = k and P = p.
    """
    n_p, n_k = losses.shape[1:]
    climb = Climb(n_k, n_p, PATIENCE)
    ends = range(OUR_STEPS, len(losses) + 1, OUR_STEPS)
    steps = losses[: len(ends) * OUR_STEPS].reshape(len(ends), OUR_STEPS, n_p, n_k)
    for end, total in zip(ends, steps.sum(axis=1).cumsum(axis=0), strict=True):
        climb.update((total / end).tolist())
    climb.end(losses.mean(axis=0).tolist())
    return climb.at
