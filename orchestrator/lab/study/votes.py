"""FIRM-MoE's Figure 7: how well strategies predict a layer's experts from earlier layers.

A prediction is judged together with the number of experts that it names. Candidates come from the
router's logits, so a layer may vote for K = 1 to 2 k experts, where a run gives k at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.run import share_with_error
from orchestrator.lab.plotting import Line, Panel, exact
from orchestrator.lab.study.activations import (
    ROUTER_INPUT,
    ROUTER_LOGITS,
    Activations,
    read_windows,
    recall,
    routers_of,
    top,
)
from orchestrator.lab.study.study import Findings, Study, share
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.table import Column, Row, Table, fixed
from orchestrator.policy.firm import MARGIN, MOL, RANK, agreed

UNION, WEIGHTED = "union", "weighted"
LABELS = {RANK: "top-K", UNION: UNION, WEIGHTED: WEIGHTED, MOL: "MoL", MARGIN: "margin"}
# Weights of the votes of the three nearest layers, the nearest first, and thresholds for their sum.
WEIGHTS, THRESHOLDS = (1.5, 1.0, 0.5), (1.5, 2.0, 2.5, 3.0)
DEEPEST = 4

# The votes for one token's experts in one layer, nearest layer first. A Predict function also gets
# the scores of the nearest layer's votes.
Votes = Sequence[Sequence[int]]
Predict = Callable[[Votes, Sequence[float]], Sequence[int]]


def union(votes: Votes, candidates: int, layers: int) -> list[int]:
    """Return all experts that are in at least one of several predictions for the same layer.

    - votes: the predictions, one list of experts for each earlier layer, best expert first. The
      list of the nearest layer comes first.
    - candidates: how many experts of each list are used.
    - layers: how many lists are used.
    """
    return list(dict.fromkeys(e for vote in votes[:layers] for e in vote[:candidates]))


def weighted(votes: Votes, candidates: int, threshold: float) -> list[int]:
    """Return the experts of a layer that win a weighted vote of the layers before it.

    An expert wins if the weights of the layers that predict it sum to at least `threshold`. WEIGHTS
    has these weights, the nearest layer first.

    - votes: the experts that each earlier layer predicts, best first. The nearest layer comes
      first.
    - candidates: how many of the best experts of each prediction are used.
    """
    # The first layers of a model have fewer voters. An expert must then get all votes.
    weight: dict[int, float] = defaultdict(float)
    for vote, worth in zip(votes, WEIGHTS, strict=False):
        for expert in vote[:candidates]:
            weight[expert] += worth
    least = min(threshold, sum(WEIGHTS[: len(votes)]))
    return [expert for expert, sum_ in weight.items() if sum_ >= least]


def strategies(k: int, most: int) -> dict[str, tuple[str, Predict]]:
    """Return all strategies that predict the experts of a layer from the layers before it.

    Several earlier layers predict experts, and a strategy combines their predictions. For example,
    "union P=2" returns the experts that at least one of the two nearest layers predicts.

    - k: number of experts per token.
    - most: number of experts that each earlier layer predicts, at least k.

    The result maps a strategy's label to a pair: its kind, such as UNION, and its function. The
    function returns the combined prediction for one token. It takes two arguments:

    - a list of experts from each earlier layer, nearest layer first.
    - the scores of the experts in the first list.
    """

    def agreeing(way: str, candidates: int, layers: int) -> tuple[str, Predict]:
        return way, lambda votes, scores: agreed(way, votes, candidates, layers, scores)

    def margin(candidates: int) -> tuple[str, Predict]:
        return MARGIN, lambda votes, scores: agreed(
            MARGIN, [votes[0][:k]], candidates, 1, scores[:k]
        )

    def counting(way: str, ask: Callable[..., list[int]], least: float) -> tuple[str, Predict]:
        return way, lambda votes, _: ask(votes, k, least)

    found = {f"top {n}": agreeing(RANK, n, 1) for n in range(1, most + 1)}
    found |= {f"union P={p}": counting(UNION, union, p) for p in (2, 3)}
    found |= {f"weighted >= {t}": counting(WEIGHTED, weighted, t) for t in THRESHOLDS}
    for n in dict.fromkeys((most, min(most, k + k // 2), k, max(1, k - 1), max(1, k // 2))):
        found |= {f"MoL K={n} P={p}": agreeing(MOL, n, p) for p in range(2, DEEPEST + 1)}
    return found | {f"margin, K={n}": margin(n) for n in range(1, k)}


class Voted:
    """Counts how well several strategies predict the experts that a layer uses.

    Each earlier layer predicts (votes for) experts, and a strategy combines these predictions.
    `count` adds the results of a text. `totals` returns the sums, and `rows` the metrics.

    - strategies: maps each strategy's label to a pair: its kind, such as UNION, and the function
      that predicts.
    - distance: how well a single earlier layer predicts. distance[1] is for the nearest earlier
      layer, distance[2] for the layer before it. Each lists the recall (fraction of the used
      experts that are predicted) for each token and predicted layer.
    """

    def __init__(self, n_layers: int, k: int, n_expert: int) -> None:
        self.k, self._n = k, n_layers - 1
        self.most = min(2 * k, n_expert)
        self.strategies = strategies(k, self.most)
        self._named: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._right: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.distance: dict[int, list[float]] = defaultdict(list)

    def count(
        self, read: Activations, layer_ids: list[int], routers: list[np.ndarray | None], first: int
    ) -> None:
        """Predict the experts of each token of a text with all strategies, and count the results.

        A strategy predicts which experts a token uses in a layer, from the predictions of earlier
        layers. The numbers of predicted and of correctly predicted experts are added to those of
        earlier texts. `totals` and `rows` return them.

        - read: the activations of the model for this text.
        - layer_ids: layer number of each MoE layer.
        - routers: router matrix of each MoE layer. A layer with None is left out.
        - first: tokens before this index are left out.
        """
        k = self.k
        for at, (il, router) in enumerate(zip(layer_ids[1:], routers[1:], strict=True)):
            if router is None:
                continue
            logits = [
                read[ROUTER_INPUT, before][first:] @ router.T
                for before in layer_ids[at::-1][:DEEPEST]
            ]
            votes = [top(each, self.most) for each in logits]
            nearest = np.take_along_axis(logits[0], votes[0], axis=1)
            scores = np.exp(nearest - nearest[:, :1]).tolist()
            # A model's selection biases and expert groups are ignored.
            actual = top(read[ROUTER_LOGITS, il][first:], k)
            for d, vote in enumerate(votes, 1):
                self.distance[d] += recall(vote[:, :k], actual).tolist()
            used = [set(each) for each in actual.tolist()]
            by_token = list(zip(*(vote.tolist() for vote in votes), strict=True))
            for label, (_, predict) in self.strategies.items():
                for mine, own, right in zip(by_token, scores, used, strict=True):
                    named = predict(mine, own)
                    self._named[label, at].append(len(named))
                    self._right[label, at].append(len(right.intersection(named)))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return (number of predicted experts, number of these that are used) for each strategy.

        The keys of the result are the labels of the prediction strategies. Both numbers are sums
        over all tokens and layers that were counted.
        """
        return {
            label: (
                sum(sum(self._named[label, at]) for at in range(self._n)),
                sum(sum(self._right[label, at]) for at in range(self._n)),
            )
            for label in self.strategies
        }

    def row(self, label: str, layers: Sequence[int] | None = None) -> Row:
        """Return a table row with the metrics of one prediction strategy, given by its label.

        - utilisation: fraction of the predicted experts that are used (eq. 8 of FIRM-MoE).
        - accuracy: fraction of the used experts that are predicted (eq. 7 of FIRM-MoE).
        - size: mean number of predicted experts per token and layer.

        `layers` are the predicted layers to include; None includes all. Layer 0 is the first
        predicted layer, which is the model's second MoE layer.
        """
        chosen = range(self._n) if layers is None else layers
        named, right = (
            np.sum([counts[label, layer] for layer in chosen], axis=0).astype(float)
            for counts in (self._named, self._right)
        )
        of_all = np.full(len(named), float(self.k * len(chosen)))
        return {
            "strategy": label,
            "way": self.strategies[label][0],
            "size": float(named.mean()) / len(chosen),
            "utilisation": pair(arithmetic.share(right, named)) if named.any() else None,
            "accuracy": pair(arithmetic.share(right, of_all)),
        }

    def rows(self) -> list[Row]:
        """Return a table row for each strategy: its metrics from `row`, and the comparison "cut".

        A strategy is compared with a baseline. The baseline is a prediction by only the nearest
        earlier layer, with the same mean number of experts as the strategy. The value "cut" is the
        baseline's utilisation: the fraction of the baseline's experts that are used. The strategies
        "top n" have no "cut", because they are the baseline. A strategy has none either if it
        predicts no experts, or more than the largest "top n".
        """
        # The mean number may be fractional, so the baseline is interpolated. The strategies of the
        # kind RANK have no baseline, because they are this prediction.
        rows = [self.row(label) for label in self.strategies]
        ranked = [row for row in rows if row["way"] == RANK]
        sizes = [0.0, *(row["size"] for row in ranked)]
        right = [0.0, *(row["size"] * row["utilisation"][0] for row in ranked)]
        for row in rows:
            if row["way"] != RANK and 0 < row["size"] <= sizes[-1]:
                row["cut"] = float(np.interp(row["size"], sizes, right)) / row["size"]
        return rows


class VotesStudy(Study):
    """Study of how well several earlier layers together predict the experts of a layer."""

    def measure(self, on: Subject) -> Findings:
        """Return tables and a plot of how well a layer's experts are predicted from earlier layers.

        A prediction is made from one earlier layer: the router of the later layer is applied to the
        activations of the earlier layer. Several strategies, such as the union, combine the
        predictions from several earlier layers. The text of `on` is read once, in the best
        precision.
        """
        found = Voted(on.n_layers, on.n_expert_used, on.n_expert)
        routers = routers_of(on)
        for window, read in read_windows(on, on.windows):
            found.count(read, on.layer_ids, routers, window.first)
        rows = found.rows()
        recalls = [
            {"before": d, "recall": pair(arithmetic.mean(np.array(each)))}
            for d, each in found.distance.items()
        ]
        tables = [
            Table(
                f"How well earlier layers predict a layer's experts (Figure 7 of FIRM-MoE): "
                f"{on.basis}",
                (
                    Column("strategy", "strategy", left=True),
                    Column("utilisation", "utilisation", share_with_error),
                    Column("accuracy", "accuracy", share_with_error),
                    Column("mean size", "size", fixed(2)),
                    Column("utilisation, nearest layer alone", "cut", share),
                ),
                rows,
                [
                    "Utilisation: share of the predicted experts that are used (eq. 8 of "
                    "FIRM-MoE).",
                    "Accuracy: share of the used experts that are predicted (eq. 7 of FIRM-MoE).",
                    "Mean size: mean number of predicted experts per token and layer.",
                    "Utilisation, nearest layer alone: share of the predicted experts that are "
                    "used, if the nearest earlier layer alone predicts as many experts on average "
                    "as the strategy.",
                    "Top n: the n experts that the nearest earlier layer ranks highest.",
                    f"Union P=n: all experts that at least one of the n nearest earlier layers "
                    f"predicts. Each layer predicts {found.k} experts, as many as a token uses.",
                    "MoL K=m P=n: only the experts that all of the n nearest earlier layers "
                    "predict. Each layer predicts m experts.",
                    "Weighted >= n: the three nearest earlier layers vote with the weights 1.5, "
                    "1.0 and 0.5. An expert is predicted if the weights of its votes sum to at "
                    "least n.",
                    f"Margin, K=n: the nearest earlier layer predicts those of its {found.k} best "
                    f"experts whose score is at least a minimum. The minimum is the lowest of "
                    f"these {found.k} scores, multiplied by 2^(({found.k} - n)/2). With a larger "
                    f"n, it is lower, so more experts are predicted.",
                ],
            ),
            Table(
                f"Recall if one earlier layer predicts {found.k} experts: {on.basis}",
                (Column("distance", "before"), Column("recall", "recall", share_with_error)),
                recalls,
                [
                    "Recall: share of the used experts that are predicted. Distance 1: the nearest "
                    "earlier layer predicts.",
                ],
            ),
        ]
        drawn = []
        for way, label in LABELS.items():
            mine = sorted(
                (row["size"], row["utilisation"][0])
                for row in rows
                if row["way"] == way and row["utilisation"]
            )
            x, y = zip(*mine, strict=True) if mine else ((), ())
            drawn.append(Line(label, x, exact(y), dashed=way != RANK))
        title = "share of the predicted experts that are used, %"
        panel = Panel("mean number of predicted experts", title, drawn, on.basis, percent=True)
        return Findings(tables, [panel])
