"""FIRM-MoE: prefetches the experts that earlier layers predict, and tunes how many.

Meeting of Layers (eq. 4 to 6): several layers vote on the experts that a layer will need. The vote
of an earlier layer m on layer l is TopKIndices(x_m W_g of l, k), eq. 4 and 5. The model's graph
computes it, and a route event carries it, best first. The votes on a layer are ordered nearest
layer first. They are complete only at layer l-1, so more votes choose better but gain no time.

Hierarchical Expert Optimization and Pre-fetching (eq. 9 to 11, Algorithm 1) chooses K, the number
of candidates, and P, the number of voting layers, for each group of layers. The latency T of eq. 9
is not measured; the loss of eq. 11 replaces it:

    L = waste_weight * n_unused + miss_weight * (n_miss - n_hit)

n_unused: prefetched experts that are not used. n_miss: used experts that were not expected. n_hit:
those of n_miss that are resident, so that the difference is read on demand. Only the first
n matrices of an expert are prefetched. Each of them counts as 1/n, separately. The other matrices
are read on demand whatever K and P are, and do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.file.layout import COMPUTE_ORDER
from orchestrator.allocation.look_ahead import OFF, LookAhead, Prefetching
from orchestrator.allocation.prompts import Prompts
from orchestrator.allocation.slots import ModelShape, Rules, even_slots, layer_groups
from orchestrator.errors import ConfigError, PolicyError, SettingError
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.policy.base import (
    EVERY_STEP,
    About,
    History,
    Learned,
    Placement,
    Policy,
    PolicyRequirements,
    Precisions,
)
from orchestrator.settings import setting

# Methods that combine the votes of layers, and methods that find K and P.
AGREE_WAYS = MOL, RANK, MARGIN = ("mol", "rank", "margin")
CLIMB, ALL = "climb", "all"
TUNE_WAYS = (CLIMB, ALL, OFF)
GROUPS = ("shallow", "middle", "deep")

Votes = tuple[int, int]  # K, P
# (bit mask of experts, n): exactly these experts lack n of the prefetched matrices.
Absent = Sequence[tuple[int, int]]


def mask_of(experts: Iterable[int]) -> int:
    """Return a bit mask with bit i set for each expert i."""
    mask = 0
    for expert in experts:
        mask |= 1 << expert
    return mask


def depth_of(way: str, n_ahead: int) -> int:
    """Return how many earlier layers may predict the experts of a layer, at most n_ahead.

    `way` is the voting method, which combines these predictions. The method "mol" uses the
    predictions of the n_ahead nearest layers. The other methods use only those of the nearest
    layer.
    """
    return n_ahead if way == MOL else min(1, n_ahead)


def agreed(
    way: str,
    votes: Sequence[Sequence[int]],
    candidates: int,
    layers: int,
    scores: Sequence[float] = (),
) -> list[int]:
    """Return the experts that a layer is expected to use, as predicted by earlier layers.

    votes: the predictions, nearest layer first. Each is a list of experts, best first. The result
    keeps the order of votes[0]. The experts depend on the method, `way`:

    - "rank": the first `candidates` experts of votes[0].
    - "mol": the experts that are among the first `candidates` in each of votes[:layers] (eq. 6 of
      the FIRM-MoE paper).
    - "margin": the experts of votes[0] whose router score is at least the minimum below. `scores`
      has their router scores. A smaller `candidates` gives a higher minimum.

        min(scores) * 2 ** ((len(scores) - candidates) / 2)
    """
    if not votes:
        return []
    nearest = votes[0]
    if way == MARGIN:
        # The threshold is sqrt(2) times higher for each expert by which candidates is smaller.
        least = scores[-1] * float(2.0 ** ((len(scores) - candidates) / 2))
        return [expert for expert, score in zip(nearest, scores, strict=True) if score >= least]
    first = list(nearest[:candidates])
    if way == RANK:
        return first
    for vote in votes[1:layers]:
        among = vote[:candidates]
        first = [expert for expert in first if expert in among]
    return first


def expected_sets(
    way: str, votes: Sequence[Sequence[int]], depth: int, scores: Sequence[float] = ()
) -> list[list[int]]:
    """Return the experts that a layer is expected to use, for each pair of numbers (K, P).

    `agreed` chooses them from the K best experts of each of the P nearest predictions. With the way
    "margin", K sets a minimum score instead. The result has a bit mask for each pair, at index
    [P - 1][K - 1]. The mask 0b101 means the experts 0 and 2.

    - way: "rank", "mol" or "margin".
    - votes: the predictions of earlier layers, nearest first. Each lists experts, best first.
    - depth: the largest P. The largest K is the length of a prediction.
    - scores: the router scores of the experts in votes[0], for "margin".
    """
    numbers = range(1, len(votes[0]) + 1)
    return [
        [mask_of(agreed(way, votes, k, p, scores)) for k in numbers] for p in range(1, depth + 1)
    ]


def group_of(n_layers: int) -> list[int]:
    """Return the group of each MoE layer: 0 for shallow, 1 for middle and 2 for deep layers.

    Of sixteen layers, the first five are shallow and the last four are deep, as in Figure 6 of the
    FIRM-MoE paper. Other numbers of layers are divided in proportion. The experts of the very first
    layer cannot be predicted. The shallow group has at least two layers, so that it never consists
    of this layer alone.
    """
    shallow = max(2, int(5 * n_layers / 16 + 0.5))
    deep = max(1, int(4 * n_layers / 16 + 0.5))
    first_deep = max(shallow, n_layers - deep)
    return [0 if i < shallow else 2 if i >= first_deep else 1 for i in range(n_layers)]


def absent_of(missing: Mapping[int, int], kinds: Sequence[int]) -> Absent:
    """Return which matrices of experts are not in memory, as pairs (mask, n).

    Each expert has several kinds of matrix, such as gate, up and down. `mask` is a set of experts
    whose matrices of one kind are absent: bit i stands for expert i. n is the number of kinds with
    exactly this set.

    For example, {0: 0b011, 2: 0b111} gives ((0b101, 2), (0b100, 1)). Two kinds are absent for the
    experts 0 and 2. One kind is absent only for expert 2.

    - missing: the absent kinds of each expert, as {expert: bit mask of kinds}.
    - kinds: the kinds to examine, one bit each. In the example, they are 1, 2 and 4.
    """
    sets = (mask_of(e for e, bits in missing.items() if bits & kind) for kind in kinds)
    return tuple(Counter(sets).items())


def unused_and_missed(expected: int, used: int, absent: Absent) -> tuple[int, int]:
    """Return (unused, missed), the numbers of expert matrices for which a prediction was wrong.

    - unused: the matrices of experts that were expected, but not used. They were prefetched in vain
      (n_unused in eq. 11 of the FIRM-MoE paper).
    - missed: the matrices of experts that were used, but not expected. They were read on demand
      (n_miss - n_hit in eq. 11).
    - expected, used: the experts of a layer, as bit masks. The mask 0b101 means the experts 0 and
      2.
    - absent: the matrices that were not in memory, from `absent_of`. Only these count.
    """
    unused = missed = 0
    for gone, n in absent:
        unused += n * (expected & gone & ~used).bit_count()
        missed += n * (used & gone & ~expected).bit_count()
    return unused, missed


def least(means: Sequence[Sequence[float]], pairs: Iterable[Votes]) -> Votes:
    """Return the pair (K, P) with the smallest mean prediction loss.

    P is the number of earlier layers that predict the experts of a layer. K is the number of
    experts taken from each prediction. The loss grows with each matrix of an expert that is
    prefetched in vain or read on demand (eq. 11 of the FIRM-MoE paper).

    - means: the mean loss of each pair, indexed [P - 1][K - 1].
    - pairs: the pairs to compare. Among equal losses, the smaller P wins, then the smaller K.
    """
    return min(pairs, key=lambda pair: (means[pair[1] - 1][pair[0] - 1], pair[1], pair[0]))


class Weights(NamedTuple):
    """The constants in the prediction loss of a layer (eq. 11 of the FIRM-MoE paper).

    The loss is waste * (experts prefetched in vain) + miss * (experts read on demand).

    - waste: alpha, the weight of an expert that is prefetched but not used.
    - miss: beta, the weight of an expert that is read on demand.
    - matrices: how many matrices of each expert are prefetched. One matrix counts as the fraction
      1 / matrices of an expert.
    """

    waste: float
    miss: float
    matrices: int

    def mean(self, counts: np.ndarray, n: int) -> Any:
        """Return the mean loss that wrong predictions cause, per token and layer.

        The loss is a weighted number of experts (eq. 11 of the FIRM-MoE paper). Each matrix counts
        as 1 / `matrices` of an expert. The fields `waste` and `miss` are the weights:

            (waste * unused + miss * missed) / (matrices * n)

        - counts: two totals [unused, missed]: the matrices that were prefetched in vain, and the
          matrices that were read on demand.
        - n: the number of pairs (token, layer) in the totals.

        The result is a float. If `counts` is an array of several such totals, [..., 2], the result
        is nested lists.
        """
        lost = self.waste * counts[..., 0] + self.miss * counts[..., 1]
        return (lost / self.matrices / max(1, n)).tolist()


@dataclass
class Climb:
    """Searches for the best pair of numbers (K, P) by hill climbing (FIRM-MoE, Algorithm 1).

    K is the number of experts taken from each prediction. P is the number of earlier layers that
    predict. The best pair has the smallest mean loss from wrong predictions.

    The search starts at the largest pair, (k, depth). Each update compares the current pair with a
    neighbour (K or P larger or smaller by 1), and moves there if the loss is smaller.

    - patience: the number of updates without a move after which another neighbour is tried.
    - at: the current pair.
    - seen: all pairs that were tried.
    """

    # The search first decreases P. After `patience` updates without success, or at a limit, it
    # tries the opposite direction, and then changes the other number.
    #
    # This differs from the paper in two ways. The mean losses of both pairs are counted on the same
    # tokens, all since the start. The paper compares successive intervals, whose noise is larger
    # than the difference between neighbours. In the paper, one number only grows while the other
    # falls.
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
        """Compare the current pair (K, P) with a neighbour, and move there if its loss is smaller.

        K is the number of experts taken from each prediction. P is the number of earlier layers
        that predict. The field `at` has the current pair. In a neighbour, K or P is larger or
        smaller by 1. After `patience` calls without a move, another neighbour is tried.

        means: the mean loss from wrong predictions, for each pair (eq. 11 of the FIRM-MoE paper).
        The loss of the pair (8, 2) is means[1][7].
        """
        ahead = self._ahead()
        for _ in range(3):  # try the other three directions at a border
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
        """End the search: set `at` to the best pair (K, P) of all pairs that were tried.

        K is the number of experts taken from each prediction. P is the number of earlier layers
        that predict. The best pair has the smallest mean loss. Algorithm 1 of the FIRM-MoE paper
        ends in this way.

        means: the mean loss from wrong predictions, for each pair. The loss of the pair (8, 2) is
        means[1][7].
        """
        self.at = least(means, self.seen)

    def _ahead(self) -> Votes | None:
        """Return the next pair (K, P) in the current direction, or None at the border.

        P is the number of earlier layers that predict the experts of a layer. K is the number of
        experts taken from each prediction.
        """
        at = [*self.at]
        at[self.axis] += self.delta
        k, p = at
        return (k, p) if 1 <= k <= self.k and 1 <= p <= self.depth else None

    def _turn(self) -> None:
        self._stale = 0
        self.delta = -self.delta
        self._turns += 1
        if self._turns == 2:
            self._turns = 0
            self.axis = 1 - self.axis


class Tuner:
    """Chooses, for each group of layers, how many predicted experts are prefetched.

    The choice is a pair (K, P): the first K experts in the predictions of P earlier layers. The
    tuner compares predictions with the experts that tokens then use. It chooses the pair with the
    smallest loss, which grows with each expert that is prefetched in vain or read on demand.

    - tuned: whether the choice is final.
    - every: how often predictions are compared; 4 means for every fourth token.
    - until: the number of tokens after which the choice is final.
    """

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
        """Start a tuner at the pair `start` = (K, P), which is the maximum of both numbers.

        P is the number of earlier layers that predict the experts of a layer. K is the number of
        experts taken from each prediction.

        - way: how the pair is tuned. "climb" is hill climbing. "all" compares all pairs on the same
          tokens. "off" keeps the pair.
        - groups: the group of each layer, from `group_of`.
        - weights: the weights of the loss.
        - steps: the number of tokens between two updates.
        - patience: the number of updates without gain after which hill climbing reverses its
          direction.
        - tokens: the number of tokens until the choice is final.
        """
        self.way = way
        self.groups = groups
        self.chosen = [start] * len(GROUPS)
        self.tuned = way == OFF or start == (1, 1) or start[1] == 0
        self.tokens = 0
        self._steps, self.until = steps, tokens
        k, depth = start
        self._weights = weights
        self._pairs = [*product(range(1, k + 1), range(1, depth + 1))]
        # For each group, sums of unused_and_missed for the current (K, P), and for every (K, P).
        self._ran = np.zeros((len(GROUPS), 2), np.int64)
        self._sums = np.zeros((len(GROUPS), depth, k, 2), np.int64)
        self._n_ran, self._n = Counter[int](), Counter[int]()
        self._climbs = [
            # The last layer of a group has the most voters.
            Climb(k, min(depth, self._last(group)), patience)
            for group in range(len(GROUPS))
        ]

    def of(self, layer: int) -> Votes:
        """Return the pair (K, P) that is now used for a layer.

        Earlier layers predict the experts that this layer will use. P is the number of earlier
        layers whose predictions are used. K is the number of experts taken from each prediction.
        """
        return self.chosen[self.groups[layer]]

    @property
    def counts(self) -> bool:
        """Whether the current token is used for tuning, which is the case for every fourth token.

        For such a token, the experts that layers predict are compared with the experts that the
        token then uses. The token waits for this comparison, so other tokens are left out.
        """
        return self.tokens % self.every == 0

    def count(
        self, layer: int, sets: Sequence[Sequence[int]], used: Sequence[int], absent: Absent
    ) -> None:
        """Add the prefetching errors of one token in a layer to the totals of each pair (K, P).

        K is the number of experts taken from each prediction. P is the number of earlier layers
        that predict. An error is a matrix of an expert that the pair would prefetch in vain, or
        that it would not prefetch although the token uses the expert.

        - sets: the experts that each pair would prefetch, as bit masks. The mask of the pair (8, 2)
          is sets[1][7].
        - used: the experts that the token uses in the layer.
        - absent: the layer's matrices that are not in memory, from `absent_of`. Only these count.
        """
        group, bits = self.groups[layer], mask_of(used)
        self._sums[group] += [[unused_and_missed(one, bits, absent) for one in row] for row in sets]
        self._n[group] += 1

    def means(self, group: int) -> list[list[float]]:
        """Return the mean loss that each pair of numbers (K, P) would have in a group of layers.

        K is the number of experts taken from each prediction. P is the number of earlier layers
        that predict. The loss is a weighted number of experts that are prefetched in vain or read
        on demand (eq. 11 of the FIRM-MoE paper). The mean is over the tokens passed to `count`.

        The loss of the pair (8, 2) is at index [1][7] of the result.

        group: 0 for shallow, 1 for middle and 2 for deep layers.
        """
        found: list[list[float]] = self._weights.mean(self._sums[group], self._n[group])
        return found

    def observe(self, layer: int, unused: int, missed: int) -> None:
        """Count the prefetching errors that were made for one token in one layer.

        The method `losses` returns a weighted sum of these errors per token and layer.

        - unused: how many matrices of experts were prefetched in vain.
        - missed: how many matrices had to be read on demand.
        """
        group = self.groups[layer]
        self._ran[group] += unused, missed
        self._n_ran[group] += 1

    def token(self) -> None:
        """Count a finished token. At intervals, choose how many predicted experts are prefetched.

        The choice is a pair (K, P) for each of three groups of layers: shallow, middle and deep. An
        expert is prefetched if all of the P nearest earlier layers have it among their K best
        predictions. With the method "margin", K sets a minimum score instead (see `agreed`).

        The setting tune_steps is the interval, in tokens. The setting tune_tokens is the number of
        tokens after which the choice is final.
        """
        self.tokens += 1
        if self.tuned or (self.tokens % self._steps and self.tokens < self.until):
            return
        self.tuned = self.tokens >= self.until
        for group in self._n:
            means, climb = self.means(group), self._climbs[group]
            if self.way == ALL:
                self.chosen[group] = least(means, self._pairs)
            else:
                (climb.end if self.tuned else climb.update)(means)
                self.chosen[group] = climb.at

    def by_group(self) -> dict[str, Votes]:
        """Return the pair (K, P) that is now used, by the name of the group of layers.

        K is the number of experts taken from each earlier layer's prediction. P is the number of
        earlier layers whose predictions are used. Groups without a layer that can be predicted are
        left out.
        """
        return {GROUPS[group]: self.chosen[group] for group in self._used()}

    def losses(self) -> dict[str, float | None]:
        """Return the mean loss from wrong predictions, for each group of layers.

        The groups are "shallow", "middle" and "deep". The loss of a token in a layer is a weighted
        sum of two numbers: experts that were prefetched in vain, and experts that had to be read on
        demand (eq. 11 of the FIRM-MoE paper). The value is None for a group without data.
        """
        ran = {group: self._weights.mean(self._ran[group], n) for group, n in self._n_ran.items()}
        return {GROUPS[group]: ran.get(group) for group in self._used()}

    def _last(self, group: int) -> int:
        """Return the index of the last layer of a group, at least 1."""
        return max((i for i, each in enumerate(self.groups) if each == group), default=1) or 1

    def _used(self) -> list[int]:
        return sorted(set(self.groups[1:]))


# Settings of the voting. If a change of a recorded run touches any of them, the last three are
# dropped, because they were made for the recorded voting.
_VOTING = ("prefetch", "agree", "votes", "tune", "n_ahead")


def read_votes(text: str) -> list[Votes]:
    """Parse the setting `votes`, and return a pair (K, P) for each group of layers.

    K is the number of experts taken from each earlier layer's prediction. P is the number of
    earlier layers whose predictions are used. The text is "4,1" for all groups, or "4,1/8,3/8,3"
    for shallow, middle and deep layers. Raises ValueError for other text.
    """
    pairs = [tuple(int(part) for part in pair.split(",")) for pair in text.split("/")]
    if len(pairs) not in (1, len(GROUPS)) or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise ValueError(text)
    return [(k, p) for k, p in pairs] * (len(GROUPS) // len(pairs))


@dataclass(frozen=True)
class FIRMSettings(LookAhead):
    """Settings of the policy `firm`, which prefetches the experts that earlier layers predict.

    Raises SettingError for settings that contradict each other.
    """

    prefetch_kinds: int = setting(
        3,
        "How many matrices of an expert are prefetched: 1 (gate), 2 (gate and up) or 3 (all).",
        within=(1, 3),
    )
    agree: str = setting(
        RANK,
        "How the experts to prefetch are chosen. rank: the K best predictions of the previous "
        "layer. mol (FIRM-MoE paper): experts that all of P earlier layers predict. margin: "
        "predictions with a score above a threshold. --votes sets K and P.",
        metavar="HOW",
        choices=AGREE_WAYS,
    )
    votes: str | None = setting(
        None,
        "For each layer, P earlier layers predict K experts each. P above 1 needs --agree mol. "
        "Three pairs K,P, such as 4,1/8,3/8,3, are for shallow, middle and deep layers.",
        metavar="K,P",
        shown="tuned",
    )
    tune: str | None = setting(
        None,
        "How K and P of --votes are tuned at run time. climb: by hill climbing (FIRM-MoE paper). "
        "all: by comparing all values on the same tokens. off: not tuned.",
        metavar="HOW",
        choices=TUNE_WAYS,
        shown=f"{OFF} with --votes, otherwise {ALL}",
    )
    tune_steps: int = setting(
        32,
        "Number of decode steps after which --tune chooses --votes again.",
        within=(1, 2**24),
    )
    tune_patience: int = setting(
        2,
        "With --tune climb: after this number of tries without improvement, the search for --votes "
        "changes its direction, for example from fewer to more experts.",
        within=(1, 2**16),
    )
    tune_tokens: int = setting(
        512,
        "Number of decode steps after which --tune stops.",
        within=(1, 2**24),
    )
    waste_weight: float = setting(
        0.5,
        "Penalty for an expert that is prefetched but not used. --tune chooses the --votes with "
        "the smallest sum of penalties.",
        within=(0.0, 1e6),
    )
    miss_weight: float = setting(
        0.5,
        "Penalty for an expert that must be read on demand because it was not predicted. --tune "
        "chooses the --votes with the smallest sum of penalties.",
        within=(0.0, 1e6),
    )

    def __post_init__(self) -> None:
        """Raise SettingError for a setting that would have no effect with the other settings."""
        super().__post_init__()

        def refuse(wrong: bool, name: str, complaint: str) -> None:
            if wrong:
                raise SettingError(name, complaint)

        votes, n_ahead, most = self.votes, self.n_ahead, self.declared()["n_ahead"].within
        try:
            deepest = self.deepest or 0
        except ValueError:
            deepest = -1
        complaint = (
            f"cannot be '{votes}': give a pair K,P such as 4,1 (4 experts predicted by 1 earlier "
            "layer), or three pairs for shallow, middle and deep layers, such as 4,1/8,3/8,3"
        )
        refuse(deepest < 0, "votes", complaint)
        cause, off = ("prefetch", OFF) if self.prefetch == OFF else ("n_ahead", 0)
        for name, value in (("votes", votes), ("tune", self.tune)):
            useless = (self.prefetch == OFF or n_ahead == 0) and value not in (None, OFF)
            complaint = (
                f"has no effect without prefetching ({cause} is {off}): leave {name} or {cause} out"
            )
            refuse(useless, name, complaint)
        if self.agree != MOL:
            refuse(
                deepest > 1,
                "votes",
                f"cannot be '{votes}': P, the second number of a pair K,P, must be 1, not "
                f"{deepest}, unless the setting 'agree' is {MOL}",
            )
            refuse(
                (n_ahead or 0) > 1,
                "n_ahead",
                f"must be at most 1, not {n_ahead}, unless the setting 'agree' is {MOL}",
            )
        if votes is not None and most is not None:
            complaint = (
                f"cannot be '{votes}': P, the second number of a pair K,P, must be at most "
                f"{most[1]:g}, not {deepest}"
            )
            refuse(deepest > most[1], "votes", complaint)
            complaint = (
                f"must be {deepest}, not {n_ahead}, to fit the setting 'votes' ({votes}): leave "
                "n_ahead out"
            )
            refuse(n_ahead not in (None, deepest), "n_ahead", complaint)
            complaint = (
                "has no effect, because the setting 'votes' fixes the numbers K and P, which would "
                "otherwise be tuned: leave tune or votes out"
            )
            refuse(self.tune not in (None, OFF), "tune", complaint)

    @property
    def deepest(self) -> int | None:
        """The largest number of earlier layers that predict for one layer, by the setting `votes`.

        The setting has one pair K,P for all layers, or one for each of three groups of layers. P is
        the number of earlier layers that predict. K is the number of experts taken from each
        prediction. This value is the largest P, for example 3 for "4,1/8,3/8,3". It is None if
        `votes` was not set. Raises ValueError if `votes` cannot be parsed.
        """
        return None if self.votes is None else max(p for _, p in read_votes(self.votes))

    @property
    def way(self) -> str:
        """The method that tunes how many experts the policy prefetches: "climb", "all" or "off".

        - climb: hill climbing.
        - all: all possible numbers are compared on the same tokens.
        - off: the number stays fixed.

        The value is the setting `tune` if the user set it. If not, the value is "off" if the user
        fixed the number with the setting `votes`, and "all" without `votes`.
        """
        return self.tune or (ALL if self.votes is None else OFF)

    def with_usual(self) -> FIRMSettings:
        """Return these settings, with the usual value of n_ahead if the user set none.

        n_ahead is for how many layers ahead experts are predicted. If P earlier layers predict the
        experts of a layer, the first of them must predict P layers ahead. So the usual value is P:

        - With the setting `votes`, which has one or three pairs K,P: the largest P. For example, 3
          for "4,1/8,3/8,3".
        - Without `votes`, if the setting `agree` is "mol", the method of the FIRM-MoE paper: 3.
        - Without `votes`, with another value of `agree`: 1.
        """
        if self.n_ahead is not None:
            return self
        return replace(self, n_ahead=self.deepest or depth_of(self.agree, 3))

    def limited(self, depth: int, asked: Collection[str]) -> FIRMSettings:
        """Return these settings, limited to the predictions that a recorded trace contains.

        The trace predicts experts for `depth` layers ahead. Settings that need more predictions are
        changed:

        - n_ahead, for how many layers ahead experts are predicted, becomes `depth`.
        - votes, which sets how many earlier layers must predict an expert, becomes None. The policy
          then chooses this number itself.

        asked: the names of the settings that the user set. They are never changed: ConfigError is
        raised if one of them needs more predictions.
        """
        if self.deepest is None or self.deepest <= depth:
            return super().limited(depth, asked)
        if "votes" in asked:
            raise ConfigError(
                f"--votes {self.votes} needs predictions for {self.deepest} layers ahead, but the "
                f"trace was recorded for {depth}: record it again with --agree {MOL} --n-ahead "
                f"{self.deepest}"
            )
        return replace(self, votes=None, n_ahead=None).limited(depth, asked)

    @classmethod
    def changed(cls, recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> FIRMSettings:
        """Return the settings of a recorded run, with some of them changed.

        - recorded: the recorded values, by name.
        - changes: the new values, by name.

        Settings that are not in `changes` keep the recorded values, with one exception. The values
        of votes, tune and n_ahead fit only the recorded way of prefetching. If `changes` has a new
        value for any of prefetch, agree, votes, tune and n_ahead, then those of votes, tune and
        n_ahead that are not in `changes` get their defaults.
        """
        if any(changes.get(name, recorded.get(name)) != recorded.get(name) for name in _VOTING):
            recorded = {k: v for k, v in recorded.items() if k not in _VOTING[2:]}
        return cls.of({**recorded, **changes})


_DECODE = int(Phase.DECODE)

# With more tokens in a step, nearly all experts of a layer are predicted, and prefetching is off.
_MOST_TOKENS = 8
# Tuned votes of an earlier run are used if the number of slots differs by at most this share and
# these settings have the same values.
_SAME_SLOTS = 0.1
_TUNED_FOR = ("agree", "prefetch_kinds", "n_ahead", "waste_weight", "miss_weight")


@dataclass(frozen=True)
class FIRMPlacement(Placement):
    """The memory slots for experts under the policy `firm`.

    This policy computes all experts in one precision, and prefetches those that earlier layers
    predict.

    room: for each layer, a list with one number: how many slots the layer has. A slot holds one
    expert.
    """

    room: Sequence[Sequence[int]]

    @property
    def n_slots(self) -> int:
        """The total number of expert slots in all layers. Each slot holds one expert."""
        return sum(sum(each) for each in self.room)

    @property
    def text(self) -> str:
        """The policy's part of the status line, such as "firm q4_k, one precision, n=3, rank 8,1".

        - firm: the name of the policy.
        - q4_k, one precision: all experts have the precision q4_k.
        - n=3: three matrices of each predicted expert are prefetched.
        - rank: the method that selects experts from predictions (setting `agree`).
        - 8,1: the 8 best predictions of 1 earlier layer are considered. Tuning may change both
          numbers later.

        Without prefetching, the text ends after "one precision".
        """
        n_ahead = self.wants.n_ahead
        if not n_ahead:
            return f"firm {self.shape.tiers[0]}, one precision"
        asked = self.settings
        begins = [(self.shape.n_expert_used, depth_of(asked.agree, n_ahead))] * len(GROUPS)
        chosen = begins if asked.votes is None else read_votes(asked.votes)
        groups = sorted(set(group_of(self.shape.n_layers)[1:]))
        return self.status_text(chosen[group] for group in groups)

    def status_text(self, votes: Iterable[Votes]) -> str:
        """Return the policy's part of the status line.

        It shows the numbers K and P: each of P earlier layers predicts K experts. For example, the
        text is "firm q4_k, one precision, n=3, rank 8,1" if K is 8 and P is 1:

        - q4_k: the precision of all experts.
        - n=3: three matrices of each predicted expert are prefetched.
        - rank 8,1: the method "rank" chooses the experts to prefetch. It considers the 8 best
          predictions of 1 earlier layer.

        votes: the pairs (K, P) to show, one for each group of layers, as in the setting `votes`.
        Equal pairs are shown once.
        """
        pairs = " ".join(f"{k},{p}" for k, p in dict.fromkeys(votes))
        asked = self.settings
        text = f"firm {self.shape.tiers[0]}, one precision, n={asked.prefetch_kinds}"
        return f"{text}, {asked.agree} {pairs}"


class FIRM(Policy):
    """Computes every expert in one precision, and prefetches experts that earlier layers predict.

    In decode, the setting `agree` selects which experts are prefetched:

    - "rank", the default: the first K experts that the previous layer predicts.
    - "mol" (FIRM-MoE paper, eq. 4 to 6): the experts that all P earlier layers have among their
      first K predictions.
    - "margin": experts that the previous layer predicts with a high score. A smaller K requires a
      higher score.

    The policy tunes K and P while running (eq. 9 to 11, Algorithm 1).

    In prefill, all predicted experts are prefetched, if they fit.
    """

    about = About(
        name="firm",
        summary=(
            "Lossless: all experts have one precision. Prefetches the experts that each layer "
            "predicts for the next layer, and tunes their number at run time. For the method of "
            "the FIRM-MoE paper, add --agree mol --prefetch-kinds 1 --tune climb."
        ),
        Settings=FIRMSettings,
        reason="runs one precision",
        precisions=Precisions(most=1),
        wants=PolicyRequirements(EVERY_STEP),
    )
    settings: FIRMSettings
    placement: FIRMPlacement

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> FIRMPlacement:
        """Divide a memory budget into expert slots, with about the same number for each layer.

        Return a placement: the slots and the settings to use. An earlier run under about the same
        conditions may have tuned how many predicted experts to prefetch. The settings then have the
        tuned numbers.

        The setting `votes` fixes how many experts are taken from each prediction. Raises
        PolicyError if this number is larger than the number of experts that a token uses per layer.
        """
        settings = settings.with_usual()
        most = max(k for k, _ in read_votes(settings.votes or "1,1"))
        if most > shape.n_expert_used:
            raise PolicyError(
                f"--votes {settings.votes}: K, the first number of a pair, must be at most "
                f"{shape.n_expert_used} (the number of experts per token), not {most}"
            )
        counts = even_slots(shape, budget_bytes)
        tuned = history.tuned(cls.name)
        if tuned is not None:
            settings = recalled(settings, tuned, sum(counts), shape, rules)
        wants = replace(cls.about.wants, n_ahead=look_ahead(settings, rules), learns=True)
        room = [[n] for n in counts]
        slots = layer_groups(shape, room)
        return FIRMPlacement(cls, shape, settings, rules, slots, wants, room)

    def _set_up(self) -> None:
        shape, asked = self.shape, self.settings
        # The prefetched matrices of each layer, as bits, in order.
        self._kinds = [
            [1 << kind for kind in COMPUTE_ORDER if kind in slots][: asked.prefetch_kinds]
            for slots, *_ in shape.slots
        ]
        self._prompts = Prompts(self.rules, room=self.placement.room)
        self._step = -1
        self._counts = True  # whether this token is counted
        self._ballots: list[list[list[list[int]]]] = []  # [layer][nearest first][token][k]
        # The next layer, its expected experts, and the missing matrices of each predicted expert.
        self._expected: tuple[int, list[int], dict[int, int]] = (-1, [], {})
        self._every: list[list[int]] = []
        n_ahead, n_layers = self.wants.n_ahead, shape.n_layers
        self._ahead = Prefetching(asked.prefetch if n_ahead else OFF, n_layers)
        self.tuner = Tuner(
            asked.way,
            group_of(n_layers),
            (shape.n_expert_used, depth_of(asked.agree, n_ahead)),
            Weights(asked.waste_weight, asked.miss_weight, max(map(len, self._kinds))),
            asked.tune_steps,
            asked.tune_patience,
            asked.tune_tokens,
        )
        if asked.votes is not None:
            self.tuner.chosen, self.tuner.tuned = read_votes(asked.votes), True

    def learned(self) -> Learned:
        """Return the numbers K and P that this run tuned, so that the next run can start with them.

        The policy prefetches experts that are among the K best predictions of each of P earlier
        layers.

        The result is a Learned object. Its field `tuned` is None until tuning is finished, and then
        a dict:

        - votes: K and P for shallow, middle and deep layers. For example, "8,1/6,1/4,1".
        - slots: the number of expert slots in this run.
        - agree, tune and others: the settings that affect tuning.
        """
        asked, tuner = self.settings, self.tuner
        if not (tuner.tuned and tuner.tokens and self.wants.n_ahead) or asked.way == OFF:
            return Learned()
        votes = "/".join(f"{k},{p}" for k, p in tuner.chosen)
        return Learned(tuned={"votes": votes, "slots": self.placement.n_slots} | tuned_for(asked))

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.phase != _DECODE and event.n_tokens > 1:
            self._prompts.decide(event, view, out, self._ahead.asked != OFF)
            return
        if event.step != self._step:
            self._step = event.step
            self._ballots = [[] for _ in range(self.shape.n_layers)]
            self._expected = (-1, [], {})
            self._counts = self.tuner.counts
        one = event.n_tokens == 1
        if one and self._counts:
            self._observe(event.layer, event.ids.tolist(), view)
        if event.n_ahead and event.n_tokens <= _MOST_TOKENS and self._ahead.on:
            layer = event.layer + 1
            if one and not self._counts and self.settings.agree == RANK:
                # The same result as _agree, but faster: most tokens take this branch.
                expected = event.ahead_ids[0].tolist()[: self.tuner.of(layer)[0]]
            else:
                for ahead, votes in enumerate(event.ahead_ids_array.tolist()):
                    self._ballots[layer + ahead].insert(0, votes)
                expected = self._agree(event, one)
            self._ask(event, expected, view, out)

    def _agree(self, event: RouteEvent, one: bool) -> list[int]:
        """Return the experts that are expected in the next layer by the voting method (eq. 6).

        The votes of each token are combined, and the results of all tokens are merged. one: whether
        the step has a single token.
        """
        layer, way, tuner = event.layer + 1, self.settings.agree, self.tuner
        candidates, layers = tuner.of(layer)
        # The last layer computes fewer tokens; votes with another number of tokens do not match.
        ballots = [each for each in self._ballots[layer] if len(each) == event.n_tokens]
        expected: list[int] = []
        for token in range(event.n_tokens):
            votes = [ballot[token] for ballot in ballots]
            scores = event.ahead_array[0, token].tolist() if way == MARGIN else ()
            found = agreed(way, votes, candidates, layers, scores)
            expected += found if one else [each for each in found if each not in expected]
            if one and self._counts and not tuner.tuned:
                self._every = expected_sets(way, votes, depth_of(way, self.wants.n_ahead), scores)
        return expected

    def _ask(
        self, event: RouteEvent, expected: list[int], view: StoreView, out: DecisionBuffer
    ) -> None:
        """Prefetch the expected experts of the next layer, matrix by matrix.

        The first matrix of every expert is requested first, then the second matrix of every expert.
        If all matrices are prefetched, each expert is requested as a whole.
        """
        layer = event.layer + 1
        kinds = self._kinds[layer]
        whole = len(kinds) == len(self.shape.slots[layer][0])
        for part in (0,) if whole else kinds:
            out.prefetch_all(layer, expected, 0, part)
        if not self._counts:
            return
        self._ahead.score.expect(layer, expected)
        if event.n_tokens == 1:
            # Every voting method chooses among the predicted experts.
            missing, predicted = view.missing[layer], event.ahead_ids[0].tolist()
            self._expected = (layer, expected, {each: missing[each] for each in predicted})

    def _observe(self, layer: int, used: list[int], view: StoreView) -> None:
        """Compare the experts that were expected in a layer with those that one token uses.

        A matrix of a predicted expert counts as missing if it was missing at the time of the
        prediction, because it may have been prefetched since. A matrix of another expert counts as
        missing if it is missing now.
        """
        self._ahead.score.observe(layer, used)
        (expected_layer, expected, missing), every = self._expected, self._every
        self._every = []
        if layer != expected_layer:
            return
        now = view.missing[layer]
        absent = absent_of({each: now[each] for each in used} | missing, self._kinds[layer])
        found = unused_and_missed(mask_of(expected), mask_of(used), absent)
        self.tuner.observe(layer, *found)
        if every:
            self.tuner.count(layer, every, used, absent)

    def on_step(self, report: StepReport) -> tuple[()]:
        """Count a decoded token, and record the time of its step. Always returns ().

        Prefills, and steps that decode several tokens, are ignored.

        - The count: after a certain number of tokens, the policy tunes how many predicted experts
          it prefetches.
        - The time: it shows whether decoding is faster with or without prefetching.

        The result is empty, because this policy never changes the precision of an expert.
        """
        if report.phase == _DECODE and report.n_tokens == 1 and self._ahead.on:
            self.tuner.token()
        self._ahead.step_done(report)
        return ()

    def report(self) -> Mapping[str, Any]:
        """Return figures about prefetching since the runtime started, by name.

        - prefetch: "on", "off", or "paused" while decoding is faster without prefetching.
        - recall, precision: for each layer, the fraction of used experts that were prefetched, and
          of prefetched experts that were used (eq. 7 and 8 of the FIRM-MoE paper).
        - size: the mean number of experts prefetched for a token, for each layer.
        - votes: the current choice for each group of layers. [8, 1] means the 8 best predictions of
          1 earlier layer.
        - loss: the mean loss from wrong predictions, for each group (eq. 11).
        - tuned: whether the choice is final.
        """
        return {
            **self._ahead.report(),
            "size": self._ahead.score.size(),
            "votes": {name: list(votes) for name, votes in self.tuner.by_group().items()},
            "loss": self.tuner.losses(),
            "tuned": self.tuner.tuned,
        }

    def describe(self) -> str:
        if not self.wants.n_ahead:
            return self.placement.text
        return self.placement.status_text(self.tuner.by_group().values()) + self._ahead.note


def look_ahead(settings: FIRMSettings, rules: Rules) -> int:
    """Return how many layers ahead experts are predicted. 0 means no prediction.

    The result is 0 if the setting prefetch is off. It is also 0 if the model's output must not
    depend on which experts are in memory (`rules.exact`).
    """
    return (settings.n_ahead or 0) if settings.prefetch != OFF and not rules.exact else 0


def tuned_for(settings: FIRMSettings) -> dict[str, Any]:
    """Return the settings that affect how the tuner chooses the number of prefetched experts."""
    return {name: getattr(settings, name) for name in _TUNED_FOR} | {"tune": settings.way}


def recalled(
    settings: FIRMSettings,
    tuned: Mapping[str, Any],
    n_slots: int,
    shape: ModelShape,
    rules: Rules,
) -> FIRMSettings:
    """Return the settings of this run, with the setting `votes` as an earlier run tuned it.

    The setting decides how many experts are prefetched: "8,1" means the 8 best predictions of 1
    earlier layer. The tuned value is used if prefetching is on, and the model and the user's rules
    allow the value. Also, the settings that affect tuning must be equal in both runs, and the
    numbers of slots about equal. Otherwise, `settings` is returned unchanged.

    - tuned: the dict `FIRM.learned().tuned` of the earlier run.
    - n_slots: the number of expert slots in this run.
    - shape, rules: the model and the rules.
    """
    votes, slots = tuned.get("votes"), tuned.get("slots")
    n_ahead = look_ahead(settings, rules)
    if not n_ahead or settings.way == OFF or not isinstance(votes, str):
        return settings
    if not isinstance(slots, int) or abs(slots - n_slots) > _SAME_SLOTS * n_slots:
        return settings
    if any(tuned.get(name) != value for name, value in tuned_for(settings).items()):
        return settings
    try:
        found = replace(settings, votes=votes, n_ahead=None, tune=None).with_usual()
    except SettingError:
        return settings
    candidates = max(k for k, _ in read_votes(votes))
    too_deep = (found.n_ahead or 0) > n_ahead
    return settings if candidates > shape.n_expert_used or too_deep else found
