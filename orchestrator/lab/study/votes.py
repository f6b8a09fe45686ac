"""Figure 7 of FIRM-MoE: how well several ways predict a layer's experts from the layers before,
always with how many experts they name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads
from orchestrator.lab.eval import arithmetic
from orchestrator.lab.eval.arithmetic import pair
from orchestrator.lab.eval.report import share_with_error
from orchestrator.lab.study import plot
from orchestrator.lab.study.activations import (
    ROUTER_INPUT,
    ROUTER_LOGITS,
    ActivationRecorder,
    Activations,
)
from orchestrator.lab.study.similarity import dense, top
from orchestrator.lab.study.study import Study
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.table import Column, Row, Table, fixed
from orchestrator.policy.firm import MARGIN, MOL, RANK, agreed

TOP, UNION, WEIGHTED = "top-K", "union", "weighted"
LABELS = {RANK: TOP, UNION: UNION, WEIGHTED: WEIGHTED, MOL: "MoL", MARGIN: "margin"}
# Of the three nearest layers, the nearest first, and what their sum has to reach.
WEIGHTS, THRESHOLDS = (1.5, 1.0, 0.5), (1.5, 2.0, 2.5, 3.0)
DEEPEST = 4

# The votes on one token's experts of one layer, nearest layer first, and the nearest one's scores.
Votes = Sequence[Sequence[int]]
Predict = Callable[[Votes, Sequence[float]], Sequence[int]]


def union(votes: Votes, candidates: int, layers: int) -> list[int]:
    """What any of the nearest P layers has among its first K."""
    return list(dict.fromkeys(e for vote in votes[:layers] for e in vote[:candidates]))


def weighted(votes: Votes, candidates: int, threshold: float) -> list[int]:
    """What has the weight of `threshold`, or of all votes there are. The highest threshold takes
    all three, which is the intersection."""
    weight: dict[int, float] = defaultdict(float)
    for vote, worth in zip(votes, WEIGHTS, strict=False):
        for expert in vote[:candidates]:
            weight[expert] += worth
    least = min(threshold, sum(WEIGHTS[: len(votes)]))
    return [expert for expert, sum_ in weight.items() if sum_ >= least]


@dataclass(frozen=True)
class Strategy:
    """One way to predict, as the tables name it."""

    way: str
    label: str
    predict: Predict


@dataclass(frozen=True)
class _Agreed:
    way: str
    candidates: int
    layers: int

    def __call__(self, votes: Votes, scores: Sequence[float]) -> Sequence[int]:
        return agreed(self.way, votes, self.candidates, self.layers, scores)


@dataclass(frozen=True)
class _Union:
    candidates: int
    layers: int

    def __call__(self, votes: Votes, scores: Sequence[float]) -> Sequence[int]:
        return union(votes, self.candidates, self.layers)


@dataclass(frozen=True)
class _Weighted:
    candidates: int
    threshold: float

    def __call__(self, votes: Votes, scores: Sequence[float]) -> Sequence[int]:
        return weighted(votes, self.candidates, self.threshold)


def strategies(k: int) -> list[Strategy]:
    """What is compared, for a model with k experts a token."""

    def agreeing(way: str, label: str, candidates: int, layers: int) -> Strategy:
        return Strategy(way, label, _Agreed(way, candidates, layers))

    found = [agreeing(RANK, f"top {n}", n, 1) for n in range(1, k + 1)]
    found += [Strategy(UNION, f"union P={p}", _Union(k, p)) for p in (2, 3)]
    found += [Strategy(WEIGHTED, f"weighted >= {t}", _Weighted(k, t)) for t in THRESHOLDS]
    for n in dict.fromkeys((k, max(1, k - 1), max(1, k // 2))):
        found += [agreeing(MOL, f"MoL K={n} P={p}", n, p) for p in range(2, DEEPEST + 1)]
    found += [agreeing(MARGIN, f"margin, K={n}", n, 1) for n in range(1, k)]
    return found


@dataclass(slots=True)
class Counts:
    """Of one strategy in one layer, by token: experts named, and those of them in use."""

    named: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Voted:
    """counts[strategy][layer], layers of the model without its first; distance[layer][d-1]: the
    recall of the k experts that the layer d before predicts, where there is one."""

    subject: Subject
    k: int
    layer_ids: list[int]
    strategies: list[Strategy]
    counts: list[list[Counts]]
    distance: list[list[list[float]]]

    def row(self, index: int, layers: Sequence[int] | None = None) -> Row:
        """Utilisation (eq. 8), accuracy (eq. 7) and mean size over some layers, all by default."""
        chosen = range(len(self.layer_ids)) if layers is None else layers
        counts = [self.counts[index][layer] for layer in chosen]
        named = np.sum([each.named for each in counts], axis=0).astype(float)
        right = np.sum([each.right for each in counts], axis=0).astype(float)
        of_all = np.full(len(named), float(self.k * len(counts)))
        return {
            "strategy": self.strategies[index].label,
            "way": self.strategies[index].way,
            "size": float(named.mean()) / len(counts),
            "utilisation": pair(arithmetic.share(right, named)) if named.any() else None,
            "accuracy": pair(arithmetic.share(right, of_all)),
        }

    def rows(self) -> list[Row]:
        """All strategies; beside each, the nearest layer cut to as many experts."""
        rows = [self.row(index) for index in range(len(self.strategies))]
        known = [(0.0, 0.0)] + [
            (r["size"], r["size"] * r["utilisation"][0]) for r in rows if r["way"] == RANK
        ]
        sizes, right = zip(*known, strict=True)
        for row in rows:
            if row["way"] != RANK and 0 < row["size"] <= sizes[-1]:
                row["cut"] = float(np.interp(row["size"], sizes, right)) / row["size"]
        return rows


class VotesStudy(Study[Voted]):
    """How well several layers together say what a layer needs."""

    name = "votes"

    def measure(self, on: Subject) -> Voted:
        """Reads the text once with the best tier, and counts the tokens that are scored. Experts
        are ranked by the router's logits; a model's selection biases and groups are left out."""
        with ExpertModel.open(on.config.model) as model:
            routers = [dense(model, f"blk.{il}.ffn_gate_inp.weight") for il in model.layer_ids]
            k, layer_ids = model.n_expert_used, list(model.layer_ids)
        listed, later = strategies(k), range(len(layer_ids) - 1)
        found = Voted(
            on,
            k,
            layer_ids[1:],
            listed,
            [[Counts() for _ in later] for _ in listed],
            [[[] for _ in range(min(DEEPEST, layer + 1))] for layer in later],
        )
        longest = max(len(window.tokens) for window in on.windows)
        threads = on.config.threads or default_threads()
        with ActivationRecorder(on.config.model, longest, threads, on.config.ram) as recorder:
            for number, window in enumerate(on.windows, 1):
                _count(found, recorder.read(window.tokens), layer_ids, routers, window.first)
                on.report("Reading", number / len(on.windows))
        return found

    def tables(self, found: Voted) -> list[Table]:
        basis = found.subject.basis
        share = share_with_error
        columns = (
            Column("strategy", "strategy", left=True),
            Column("utilisation", "utilisation", share),
            Column("accuracy", "accuracy", share),
            Column("mean size", "size", fixed(2)),
        )
        cut = Column("nearest layer cut to this size", "cut", lambda v: f"{100 * v:.1f} %")
        note = (
            "Utilisation: of the experts named, those in use (eq. 8). Accuracy: of those in use, "
            "the ones named (eq. 7). Weighted: votes of the three nearest layers count 1.5, 1.0 "
            "and 0.5. A layer with fewer layers before it takes those there are."
        )
        by_layer = []
        chosen = [f"top {found.k}", f"MoL K={found.k} P=3", "union P=3"]
        for layer, il in enumerate(found.layer_ids):
            row: Row = {"layer": il}
            for index, strategy in enumerate(found.strategies):
                if strategy.label in chosen:
                    one = found.row(index, [layer])
                    row[strategy.label] = (one["utilisation"], one["accuracy"], one["size"])
            for d, recalls in enumerate(found.distance[layer], 1):
                row[f"distance {d}"] = float(np.mean(recalls))
            by_layer.append(row)
        distances = [
            Column(f"{d} before", f"distance {d}", lambda v: f"{100 * v:.1f} %")
            for d in range(1, DEEPEST + 1)
        ]
        mean = {
            f"distance {d}": float(
                np.mean([np.mean(each[d - 1]) for each in found.distance if len(each) >= d])
            )
            for d in range(1, DEEPEST + 1)
            if any(len(each) >= d for each in found.distance)
        }
        return [
            Table(
                f"Predicting a layer's experts (Figure 7 of FIRM-MoE): {basis}",
                (*columns, cut),
                found.rows(),
                [note],
            ),
            Table(
                f"By layer; utilisation, accuracy and size, and recall of the top {found.k} by "
                f"distance: {basis}",
                (
                    Column("layer", "layer"),
                    *(Column(label, label, _three) for label in chosen),
                    *distances,
                ),
                by_layer,
                [],
                [{"layer": "mean", **mean}],
            ),
        ]

    def draw(self, found: Voted, folder: Path) -> list[Path]:
        rows = [row for row in found.rows() if row["utilisation"] is not None]
        with plot.figure(folder, self.name, 2) as (left, right):
            for number, (way, label) in enumerate(LABELS.items()):
                mine = sorted(
                    (row["size"], row["utilisation"][0]) for row in rows if row["way"] == way
                )
                x, y = zip(*mine, strict=True)
                plot.line(left, x, [100 * each for each in y], label, number, dashed=way != RANK)
            for d in range(DEEPEST):
                there = [i for i, each in enumerate(found.distance) if len(each) > d]
                recalls = [100 * float(np.mean(found.distance[i][d])) for i in there]
                if there:
                    label = f"{d + 1} before"
                    plot.line(right, [found.layer_ids[i] for i in there], recalls, label, d)
            left.set_xlabel("mean number of experts named")
            left.set_ylabel("utilisation, % of them in use")
            right.set_xlabel("layer")
            right.set_ylabel(f"accuracy of the top {found.k}, %")
            right.set_ylim(0, 102)
            for axis in (left, right):
                axis.legend()
            left.set_title(found.subject.basis, fontsize=9)
        return plot.files(folder, self.name)


def _three(values: tuple[Sequence[float] | None, Sequence[float], float]) -> str:
    utilisation, accuracy, size = values
    first = "-" if utilisation is None else f"{100 * utilisation[0]:.0f}"
    return f"{first} / {100 * accuracy[0]:.0f} % ({size:.1f})"


def _count(
    found: Voted,
    read: Activations,
    layer_ids: list[int],
    routers: list[np.ndarray | None],
    first: int,
) -> None:
    """Adds what one read says, from its token number `first` on."""
    k = found.k
    for layer in range(1, len(layer_ids)):
        router = routers[layer]
        if router is None:
            continue
        logits = [
            read[ROUTER_INPUT, layer_ids[layer - d]][first:] @ router.T
            for d in range(1, min(DEEPEST, layer) + 1)
        ]
        votes = [top(each, k) for each in logits]
        nearest = np.take_along_axis(logits[0], votes[0], axis=1)
        scores = np.exp(nearest - nearest[:, :1]).tolist()
        actual = top(read[ROUTER_LOGITS, layer_ids[layer]][first:], k)
        for d, vote in enumerate(votes):
            same = (actual[:, :, None] == vote[:, None, :]).any(axis=2).mean(axis=1)
            found.distance[layer - 1][d] += same.tolist()
        by_token = list(zip(*(vote.tolist() for vote in votes), strict=True))
        used = [set(each) for each in actual.tolist()]
        for strategy, counts in zip(found.strategies, found.counts, strict=True):
            for token, mine in enumerate(by_token):
                named = strategy.predict(mine, scores[token])
                counts[layer - 1].named.append(len(named))
                counts[layer - 1].right.append(len(used[token].intersection(named)))
