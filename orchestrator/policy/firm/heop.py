"""Hierarchical Expert Optimization and Pre-fetching: how many candidates K and layers P vote in
each group of layers (FIRM-MoE, eq. 9 to 11, Algorithm 1).

Latency T of eq. 9 is never measured; the loss of eq. 11 stands for it:

    L = waste_weight * n_unused + miss_weight * (n_miss - n_hit)

n_unused: experts that were read ahead and are not used. n_miss: experts in use that were not
expected, n_hit those of them that are in memory, so that the difference is what is read on demand.

What is loaded ahead are the first n matrices of an expert, each of them is in memory or not, and
each counts as 1/n. The others are read on demand whatever K and P are, and do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.policy.firm.votes import mask_of

CLIMB, ALL, OFF = WAYS = ("climb", "all", "off")
GROUPS = ("shallow", "middle", "deep")

Votes = tuple[int, int]  # K, P
# (experts as bits, n): n of the matrices that are loaded ahead are absent of just these.
Absent = Sequence[tuple[int, int]]


def group_of(n_layers: int) -> list[int]:
    """The index in GROUPS of each layer. Of sixteen layers five are shallow and four deep, as in
    Figure 6, of others as large a part; at least one each of those that can be predicted, which
    is all but the first."""
    shallow = max(2, int(5 * n_layers / 16 + 0.5))
    deep = max(1, int(4 * n_layers / 16 + 0.5))
    first_deep = max(shallow, n_layers - deep)
    return [0 if i < shallow else 2 if i >= first_deep else 1 for i in range(n_layers)]


def absent_of(missing: Mapping[int, int], kinds: Sequence[int]) -> Absent:
    """missing: of each expert, the bits of its matrices that are not in memory; kinds: the bits of
    those that are loaded ahead. Matrices that are absent of the same experts are one entry."""
    sets = (mask_of(e for e, bits in missing.items() if bits & kind) for kind in kinds)
    return tuple(Counter(sets).items())


def unused_and_missed(expected: int, used: int, absent: Absent) -> tuple[int, int]:
    """(n_unused, n_miss - n_hit) of eq. 11 in matrices, of sets as bits. Only what is absent is
    read ahead, or on demand."""
    unused = missed = 0
    for gone, n in absent:
        unused += n * (expected & gone & ~used).bit_count()
        missed += n * (used & gone & ~expected).bit_count()
    return unused, missed


def least(means: Sequence[Sequence[float]], pairs: Iterable[Votes]) -> Votes:
    """The (K, P) of the least loss among some; of equals that with the fewest layers, then
    candidates. means: [P - 1][K - 1]."""
    return min(pairs, key=lambda pair: (means[pair[1] - 1][pair[0] - 1], pair[1], pair[0]))


@dataclass(frozen=True)
class Weights:
    """alpha and beta of eq. 11. matrices: how many of an expert are loaded ahead."""

    waste: float = 0.5
    miss: float = 0.5
    matrices: int = 1

    def loss(self, unused: float, missed: float) -> float:
        """Eq. 11, of numbers of matrices."""
        return (self.waste * unused + self.miss * missed) / self.matrices


@dataclass
class Mean:
    """The mean loss of what was counted."""

    weights: Weights
    unused: int = 0
    missed: int = 0
    n: int = 0

    def add(self, unused: int, missed: int) -> None:
        self.unused += unused
        self.missed += missed
        self.n += 1

    @property
    def value(self) -> float | None:
        """None of nothing."""
        return self.weights.loss(self.unused, self.missed) / self.n if self.n else None


class Grid:
    """Counts every (K, P) on the same tokens: predictions are ranked, so that each one's set is
    known without running it. So the search is exhaustive, and noise is the same for all."""

    def __init__(self, k: int, depth: int, weights: Weights) -> None:
        self.weights = weights
        self.n = 0
        self._unused = [[0] * k for _ in range(depth)]
        self._missed = [[0] * k for _ in range(depth)]

    def count(self, sets: Sequence[Sequence[int]], used: int, absent: Absent) -> None:
        """One layer of one token; sets of votes.every_set, the others as in
        unused_and_missed."""
        self.n += 1
        for row, unused, missed in zip(sets, self._unused, self._missed, strict=True):
            for i, each in enumerate(row):
                n_unused, n_missed = unused_and_missed(each, used, absent)
                unused[i] += n_unused
                missed[i] += n_missed

    def means(self) -> list[list[float]]:
        """Mean loss a layer and token, [P - 1][K - 1]."""
        n = max(1, self.n)
        return [
            [self.weights.loss(u, m) / n for u, m in zip(*rows, strict=True)]
            for rows in zip(self._unused, self._missed, strict=True)
        ]

    def best(self) -> Votes:
        """The (K, P) of the least loss."""
        means = self.means()
        every = [(k, p) for p, row in enumerate(means, 1) for k in range(1, len(row) + 1)]
        return least(means, every)


@dataclass
class Climb:
    """Algorithm 1 for one group, with what it leaves open or gets wrong put right.

    It starts with all of k candidates and the deepest vote, on the axis of P downwards, where the
    loss is smooth. At each update it goes one step on if the mean loss is lower there, and stays
    otherwise. Both are counted on the same tokens, all since the start: as printed, intervals that
    follow each other are compared, and their noise is larger than the difference of neighbours.
    After `patience` updates without a step it turns round; after two turns it changes the axis, so
    that the plane is explored in both directions (as printed, K or P only ever grow while the other
    one falls). A step beyond 1 .. k or 1 .. depth is a turn.

    seen: the pairs that it stood on or compared its own with, among which the last step chooses.
    """

    k: int
    depth: int
    patience: int
    at: Votes = (0, 0)
    axis: int = 1
    delta: int = -1
    seen: set[Votes] = field(default_factory=set)
    _stale: int = 0
    _turns: int = 0

    def __post_init__(self) -> None:
        self.at = (self.k, self.depth)
        self.seen.add(self.at)

    def update(self, means: Sequence[Sequence[float]]) -> None:
        """An interval has passed. means [P - 1][K - 1]: of the loss, since the start."""
        ahead = self._ahead()
        for _ in range(3):  # both directions of both axes may be at their ends
            if ahead is None:
                self._turn()
                ahead = self._ahead()
        if ahead is None:
            return
        self.seen.add(ahead)
        if means[ahead[1] - 1][ahead[0] - 1] < means[self.at[1] - 1][self.at[0] - 1]:
            self.at, self._stale, self._turns = ahead, 0, 0
            return
        self._stale += 1
        if self._stale >= self.patience:
            self._turn()

    def end(self, means: Sequence[Sequence[float]]) -> None:
        """The last step of Algorithm 1: of the pairs that were seen, that of the least loss."""
        self.at = least(means, self.seen)

    def _ahead(self) -> Votes | None:
        """The next step, where there is one."""
        k, p = self.at
        if self.axis == 0:
            k += self.delta
        else:
            p += self.delta
        return (k, p) if 1 <= k <= self.k and 1 <= p <= self.depth else None

    def _turn(self) -> None:
        self._stale = 0
        self.delta = -self.delta
        self._turns += 1
        if self._turns == 2:
            self._turns = 0
            self.axis = 1 - self.axis


class Tuner:
    """(K, P) of each group, and how they come about. tuned: they change no more. every: of so
    many tokens one is counted. until: the token after which they stay."""

    every = 4

    def __init__(
        self,
        way: str,
        groups: Sequence[int],
        start: Votes,
        weights: Weights,
        steps: int,
        patience: int,
        tokens: int,
    ) -> None:
        """groups: of group_of. steps: tokens between two updates; tokens: until the best is
        chosen and fixed. start: the most candidates and layers, and what runs at first."""
        self.way = way
        self.groups = groups
        self.chosen = [start] * len(GROUPS)
        self.tuned = way == OFF or start == (1, 1) or start[1] == 0
        self.tokens = 0
        self._steps, self.until = steps, tokens
        self._running = [Mean(weights) for _ in GROUPS]
        self.grids = [Grid(*start, weights) for _ in GROUPS]
        k, depth = start
        self._climbs = [
            # more layers than a group's last one has before it are no other vote
            Climb(k, min(depth, self._last(group)), patience)
            for group in range(len(GROUPS))
        ]

    def fix(self, chosen: Sequence[Votes]) -> None:
        """Runs with these and changes nothing."""
        self.chosen, self.tuned = list(chosen), True

    def of(self, layer: int) -> Votes:
        """(K, P) of a layer."""
        return self.chosen[self.groups[layer]]

    @property
    def counts(self) -> bool:
        """Whether what this token expected is compared with what it used: of one in `every`, so
        that a decision stays short."""
        return self.tokens % self.every == 0

    @property
    def counts_all(self) -> bool:
        """Whether every (K, P) is counted on this token, too."""
        return self.counts and not self.tuned

    def count(
        self, layer: int, sets: Sequence[Sequence[int]], used: Sequence[int], absent: Absent
    ) -> None:
        """A layer whose experts are known by now; see Grid.count."""
        self.grids[self.groups[layer]].count(sets, mask_of(used), absent)

    def observe(self, layer: int, unused: int, missed: int) -> None:
        """What the running (K, P) came to in a layer, as in unused_and_missed."""
        self._running[self.groups[layer]].add(unused, missed)

    def token(self) -> None:
        """A token has passed through all layers."""
        self.tokens += 1
        if self.tuned or (self.tokens % self._steps and self.tokens < self.until):
            return
        self.tuned = self.tokens >= self.until
        for group, grid in enumerate(self.grids):
            if not grid.n:
                continue
            if self.way == ALL:
                self.chosen[group] = grid.best()
            else:
                climb = self._climbs[group]
                (climb.end if self.tuned else climb.update)(grid.means())
                self.chosen[group] = climb.at

    def by_group(self) -> dict[str, Votes]:
        """(K, P) of the groups that have a layer which can be predicted."""
        return {GROUPS[group]: self.chosen[group] for group in self._used()}

    def losses(self) -> dict[str, float | None]:
        """Mean loss a layer and token of what ran, by group."""
        return {GROUPS[group]: self._running[group].value for group in self._used()}

    def _last(self, group: int) -> int:
        """The deepest layer of a group, 1 at least."""
        return max((i for i, each in enumerate(self.groups) if each == group), default=1) or 1

    def _used(self) -> list[int]:
        return sorted(set(self.groups[1:]))
