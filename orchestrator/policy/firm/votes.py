"""Meeting of Layers: several layers vote on what a layer will need (FIRM-MoE, eq. 4 to 6).

A vote is what one earlier layer m predicts of layer l: TopKIndices(x_m W_g of l, k), eq. 4 and 5,
which the model's graph computes and a route event carries, best first. The votes on a layer stand
nearest layer first. They are complete at layer l-1 and never before, so that more votes choose
better but earn no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOL, RANK, MARGIN = WAYS = ("mol", "rank", "margin")


def mask_of(experts: Iterable[int]) -> int:
    """The bits of these experts."""
    mask = 0
    for expert in experts:
        mask |= 1 << expert
    return mask


def depth_of(way: str, n_ahead: int) -> int:
    """How many layers a way to agree can use of those that look ahead."""
    return n_ahead if way == MOL else min(1, n_ahead)


def least_score(scores: Sequence[float], candidates: int) -> float:
    """What the nearest layer's score has to reach, of its scores [k], best first.

    With K = k candidates it is the score of the last one, so that all of them count. Each
    candidate less asks for half an octave more, so that a layer that is sure of more experts
    takes more of them.
    """
    return scores[-1] * float(2.0 ** ((len(scores) - candidates) / 2))


def agreed(
    way: str,
    votes: Sequence[Sequence[int]],
    candidates: int,
    layers: int,
    scores: Sequence[float] = (),
) -> list[int]:
    """The experts S_l that are expected in a layer, in the order of the nearest layer.

    mol, eq. 6: those among the first K candidates of each of the nearest P layers, or of as many
    as there are. rank: the first K of the nearest layer. margin: those of the nearest layer whose
    score is least_score or more; scores [k] are its own.
    """
    if not votes:
        return []
    nearest = votes[0]
    if way == MARGIN:
        least = least_score(scores, candidates)
        return [expert for expert, score in zip(nearest, scores, strict=True) if score >= least]
    first = list(nearest[:candidates])
    if way == RANK:
        return first
    for vote in votes[1:layers]:
        among = vote[:candidates]
        first = [expert for expert in first if expert in among]
    return first


def every_set(
    way: str, votes: Sequence[Sequence[int]], depth: int, scores: Sequence[float] = ()
) -> list[list[int]]:
    """agreed() for every (K, P) at once, as bits: [P - 1][K - 1], P up to depth. Where fewer
    layers voted, the last row stands for the rest."""
    k = len(votes[0])
    if way == MARGIN:
        return [[mask_of(agreed(way, votes, n, 1, scores)) for n in range(1, k + 1)]] * depth
    rows: list[list[int]] = []
    for vote in votes[:depth]:
        row, mask = [], 0
        for expert in vote:
            mask |= 1 << expert
            row.append(mask)
        if rows:
            row = [mine & theirs for mine, theirs in zip(row, rows[-1], strict=True)]
        rows.append(row)
        if way == RANK:
            break
    return rows + [rows[-1]] * (depth - len(rows))
