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
    """Return a bit mask with one bit for each expert."""
    mask = 0
    for expert in experts:
        mask |= 1 << expert
    return mask


def depth_of(way: str, n_ahead: int) -> int:
    """Return how many of n_ahead look-ahead layers a voting method can use."""
    return n_ahead if way == MOL else min(1, n_ahead)


def agreed(
    way: str,
    votes: Sequence[Sequence[int]],
    candidates: int,
    layers: int,
    scores: Sequence[float] = (),
) -> list[int]:
    """Return the experts S_l that are expected in a layer, in the order of the nearest vote.

    mol (eq. 6): experts among the first K candidates of each of the nearest P layers, or of fewer
    if fewer voted. rank: the first K of the nearest layer. margin: experts of the nearest layer
    whose score is high enough; scores [k] are its scores, best first. With K = k the threshold is
    the last score, so all count. Each candidate less raises the threshold by half an octave, so a
    layer that is sure of more experts gets more of them.
    """
    if not votes:
        return []
    nearest = votes[0]
    if way == MARGIN:
        least = scores[-1] * float(2.0 ** ((len(scores) - candidates) / 2))
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
    """Return agreed() for every (K, P) as bit masks, [P - 1][K - 1], with P up to depth."""
    numbers = range(1, len(votes[0]) + 1)
    return [
        [mask_of(agreed(way, votes, k, p, scores)) for k in numbers] for p in range(1, depth + 1)
    ]


def group_of(n_layers: int) -> list[int]:
    """Return the index in GROUPS of each layer.

    Of sixteen layers five are shallow and four deep, as in Figure 6; other models are divided in
    proportion. Each group has at least one layer of those that can be predicted, which are all but
    the first.
    """
    shallow = max(2, int(5 * n_layers / 16 + 0.5))
    deep = max(1, int(4 * n_layers / 16 + 0.5))
    first_deep = max(shallow, n_layers - deep)
    return [0 if i < shallow else 2 if i >= first_deep else 1 for i in range(n_layers)]


def absent_of(missing: Mapping[int, int], kinds: Sequence[int]) -> Absent:
    """Return the absent matrices as (bit mask of experts, number of matrices) pairs.

    Matrices with the same absent experts share a pair. missing: bits of absent matrices by expert.
    kinds: the bits of the prefetched matrices.
    """
    sets = (mask_of(e for e, bits in missing.items() if bits & kind) for kind in kinds)
    return tuple(Counter(sets).items())


def unused_and_missed(expected: int, used: int, absent: Absent) -> tuple[int, int]:
    """Return (n_unused, n_miss - n_hit) of eq. 11 in matrices.

    expected, used: bit masks of experts. Resident matrices count in neither, because they are not
    read.
    """
    unused = missed = 0
    for gone, n in absent:
        unused += n * (expected & gone & ~used).bit_count()
        missed += n * (used & gone & ~expected).bit_count()
    return unused, missed


def least(means: Sequence[Sequence[float]], pairs: Iterable[Votes]) -> Votes:
    """Return the (K, P) with the least loss among pairs.

    Ties go to fewer layers, then fewer candidates. means: [P - 1][K - 1].
    """
    return min(pairs, key=lambda pair: (means[pair[1] - 1][pair[0] - 1], pair[1], pair[0]))


class Weights(NamedTuple):
    """alpha and beta of eq. 11. matrices: how many matrices of an expert are prefetched."""

    waste: float
    miss: float
    matrices: int

    def mean(self, counts: np.ndarray, n: int) -> Any:
        """Return the mean loss of eq. 11 for sums [..., 2] over n results of unused_and_missed.

        Return 0 if n is 0.
        """
        lost = self.waste * counts[..., 0] + self.miss * counts[..., 1]
        return (lost / self.matrices / max(1, n)).tolist()


@dataclass
class Climb:
    """Hill climbing by Algorithm 1 for one group, with its gaps filled and its errors corrected.

    It starts with all k candidates and the deepest vote, and decreases P first, because the loss is
    smooth in P. At each update it moves one step if the mean loss there is lower, and stays
    otherwise. Both losses are counted on the same tokens, all since the start. The paper compares
    successive intervals, whose noise is larger than the difference between neighbours. After
    `patience` updates without a step the search reverses its direction, and after two reversals it
    changes the axis, so it explores the plane in both directions. In the paper's form, K or P only
    grows while the other falls. A step outside 1 .. k or 1 .. depth is a reversal.

    seen: the pairs that the search visited or compared; the final step chooses among them.
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
        """End an interval and move if the neighbour is better.

        means: mean losses since the start, [P - 1][K - 1].
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
        """Choose the pair with the least loss among those seen: the last step of Algorithm 1."""
        self.at = least(means, self.seen)

    def _ahead(self) -> Votes | None:
        """Return the next pair in the current direction, or None at the border."""
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
    """Chooses (K, P) for each group of layers.

    tuned: the choice is final. every: one token in this many is counted. until: the number of
    tokens after which the choice is final.
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
        """groups: result of group_of.

        start: the maximum of candidates and layers, used at first. steps: tokens between two
        updates. tokens: tokens until the best pair is fixed.
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
        # Sums of unused_and_missed by group: of the active pair, and of every (K, P).
        self._ran = np.zeros((len(GROUPS), 2), np.int64)
        self._sums = np.zeros((len(GROUPS), depth, k, 2), np.int64)
        self._n_ran, self._n = Counter[int](), Counter[int]()
        self._climbs = [
            # The last layer of a group has the most voters.
            Climb(k, min(depth, self._last(group)), patience)
            for group in range(len(GROUPS))
        ]

    def of(self, layer: int) -> Votes:
        """Return (K, P) of a layer."""
        return self.chosen[self.groups[layer]]

    @property
    def counts(self) -> bool:
        """Whether predictions of this token are compared with its use.

        Only one token in `every` is counted, to keep decisions short.
        """
        return self.tokens % self.every == 0

    def count(
        self, layer: int, sets: Sequence[Sequence[int]], used: Sequence[int], absent: Absent
    ) -> None:
        """Count every (K, P) on one layer of one token.

        Predictions are ranked, so the set of each pair is known without running it. The search is
        therefore exhaustive, with the same noise for all pairs. sets: result of every_set; the
        other arguments are those of unused_and_missed.
        """
        group, bits = self.groups[layer], mask_of(used)
        self._sums[group] += [[unused_and_missed(one, bits, absent) for one in row] for row in sets]
        self._n[group] += 1

    def means(self, group: int) -> list[list[float]]:
        """Return the mean loss per layer and token of every (K, P), [P - 1][K - 1]."""
        found: list[list[float]] = self._weights.mean(self._sums[group], self._n[group])
        return found

    def observe(self, layer: int, unused: int, missed: int) -> None:
        """Add the result of unused_and_missed of the active (K, P) in a layer."""
        group = self.groups[layer]
        self._ran[group] += unused, missed
        self._n_ran[group] += 1

    def token(self) -> None:
        """End a token after its last layer, and update the choice if an interval ended."""
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
        """Return (K, P) of each group that has a predictable layer."""
        return {GROUPS[group]: self.chosen[group] for group in self._used()}

    def losses(self) -> dict[str, float | None]:
        """Return the mean loss per layer and token of the active pairs, by group."""
        ran = {group: self._weights.mean(self._ran[group], n) for group, n in self._n_ran.items()}
        return {GROUPS[group]: ran.get(group) for group in self._used()}

    def _last(self, group: int) -> int:
        """Return the deepest layer of a group, at least 1."""
        return max((i for i, each in enumerate(self.groups) if each == group), default=1) or 1

    def _used(self) -> list[int]:
        return sorted(set(self.groups[1:]))


# Settings of the voting. If a change of a recorded run touches any of them, the last three are
# dropped, because they were made for the recorded voting.
_VOTING = ("prefetch", "agree", "votes", "tune", "n_ahead")


def read_votes(text: str) -> list[Votes]:
    """Return (K, P) of each group from text such as "4,1", for all groups, or "4,1/8,3/8,3".

    Raises ValueError.
    """
    pairs = [tuple(int(part) for part in pair.split(",")) for pair in text.split("/")]
    if len(pairs) not in (1, len(GROUPS)) or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise ValueError(text)
    return [(k, p) for k, p in pairs] * (len(GROUPS) // len(pairs))


@dataclass(frozen=True)
class FIRMSettings(LookAhead):
    """Settings of the policy firm. Raises SettingError for inconsistent settings."""

    prefetch_kinds: int = setting(
        3,
        "How many matrices of an expert are prefetched, in the order of computing: gate; gate and "
        "up; all.",
        within=(1, 3),
    )
    agree: str = setting(
        RANK,
        "Which experts are expected: rank, the first K that the previous layer predicts; mol, as "
        "in the paper, those among the first K of each of P layers; margin, those that the "
        "previous layer scores far enough above its last candidate.",
        metavar="HOW",
        choices=AGREE_WAYS,
    )
    votes: str | None = setting(
        None,
        "K,P: candidates of a vote, and layers that vote (more than one only with mol); "
        "K,P/K,P/K,P for shallow, middle and deep layers.",
        metavar="K,P",
        shown="tuned",
    )
    tune: str | None = setting(
        None,
        "How K and P are found: climb, the paper's hill climbing; all, counting every pair on the "
        "same tokens; off.",
        metavar="HOW",
        choices=TUNE_WAYS,
        shown=f"{ALL}, off with votes",
    )
    tune_steps: int = setting(32, "Decode steps between two changes of K and P.", within=(1, 2**24))
    tune_patience: int = setting(
        2, "Updates without gain after which climb reverses its direction.", within=(1, 2**16)
    )
    tune_tokens: int = setting(
        512, "Decode steps after which K and P are fixed.", within=(1, 2**24)
    )
    waste_weight: float = setting(
        0.5, "Loss of an expert that is prefetched but not used.", within=(0.0, 1e6)
    )
    miss_weight: float = setting(
        0.5, "Loss of an expert that is loaded on demand.", within=(0.0, 1e6)
    )

    def __post_init__(self) -> None:
        """Refuse settings that would have no effect."""
        super().__post_init__()

        def refuse(wrong: bool, name: str, complaint: str) -> None:
            if wrong:
                raise SettingError(name, complaint)

        votes, n_ahead, most = self.votes, self.n_ahead, self.declared()["n_ahead"].within
        try:
            deepest = self.deepest or 0
        except ValueError:
            deepest = -1
        complaint = f"must be K,P such as 4,1, or three of them as 4,1/8,3/8,3, not '{votes}'"
        refuse(deepest < 0, "votes", complaint)
        off = "prefetch off" if self.prefetch == OFF else "n_ahead 0"
        for name, value in (("votes", votes), ("tune", self.tune)):
            useless = (self.prefetch == OFF or n_ahead == 0) and value not in (None, OFF)
            complaint = f"is {value}, and nothing is loaded ahead with {off}: leave one out"
            refuse(useless, name, complaint)
        if self.agree != MOL:
            refuse(
                deepest > 1,
                "votes",
                f"asks {deepest} layers in '{votes}', and with {self.agree} one votes: write K,1, "
                f"or choose {MOL} for agree",
            )
            refuse(
                (n_ahead or 0) > 1,
                "n_ahead",
                f"is {n_ahead}, and with {self.agree} only the layer before votes: leave it out, "
                f"or choose {MOL} for agree",
            )
        if votes is not None and most is not None:
            complaint = f"asks {deepest} layers in '{votes}', and {most[1]:g} can vote"
            refuse(deepest > most[1], "votes", complaint)
            complaint = f"is {n_ahead}, and the votes '{votes}' are of {deepest} layers"
            refuse(n_ahead not in (None, deepest), "n_ahead", f"{complaint}: leave it out")
            complaint = f"is {self.tune}, and votes sets the tuned values: leave one out"
            refuse(self.tune not in (None, OFF), "tune", complaint)

    @property
    def deepest(self) -> int | None:
        """The maximum number of voting layers; None if it is tuned.

        Raises ValueError for votes that cannot be parsed.
        """
        return None if self.votes is None else max(p for _, p in read_votes(self.votes))

    @property
    def way(self) -> str:
        """The method that finds K and P."""
        return self.tune or (ALL if self.votes is None else OFF)

    def with_usual(self) -> FIRMSettings:
        """Return the settings with n_ahead set, if it was None, to the number of voting layers, or
        to the paper's number if it is tuned.
        """
        if self.n_ahead is not None:
            return self
        return replace(self, n_ahead=self.deepest or depth_of(self.agree, 3))

    def limited(self, depth: int, asked: Collection[str]) -> FIRMSettings:
        """Limit the look-ahead to `depth` layers.

        Raises ConfigError if votes in `asked` need more layers; recorded votes that need more are
        dropped, because they had no effect.
        """
        if self.deepest is None or self.deepest <= depth:
            return super().limited(depth, asked)
        if "votes" in asked:
            raise ConfigError(
                f"the trace looks {depth} layers ahead, and the votes '{self.votes}' are of "
                f"{self.deepest}: record it with --agree {MOL} --n-ahead {self.deepest}"
            )
        return replace(self, votes=None, n_ahead=None).limited(depth, asked)

    @classmethod
    def changed(cls, recorded: Mapping[str, Any], changes: Mapping[str, Any]) -> FIRMSettings:
        """Apply changes to recorded settings.

        If a change concerns the voting, only the voting method is kept from the recorded voting
        settings.
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
    """A placement in one tier. room: the number of slots of each layer in each tier."""

    room: Sequence[Sequence[int]]

    @property
    def n_slots(self) -> int:
        """Slots for whole experts, in all layers."""
        return sum(sum(each) for each in self.room)

    @property
    def text(self) -> str:
        """A phrase for the status line with the initial votes."""
        n_ahead = self.wants.n_ahead
        if not n_ahead:
            return f"firm {self.shape.tiers[0]}, one precision"
        asked = self.settings
        begins = [(self.shape.n_expert_used, depth_of(asked.agree, n_ahead))] * len(GROUPS)
        chosen = begins if asked.votes is None else read_votes(asked.votes)
        groups = sorted(set(group_of(self.shape.n_layers)[1:]))
        return self.voting(chosen[group] for group in groups)

    def voting(self, votes: Iterable[Votes]) -> str:
        """Return the phrase for the status line with these votes of the layer groups."""
        pairs = " ".join(f"{k},{p}" for k, p in dict.fromkeys(votes))
        asked = self.settings
        text = f"firm {self.shape.tiers[0]}, one precision, n={asked.prefetch_kinds}"
        return f"{text}, {asked.agree} {pairs}"


class FIRM(Policy):
    """One precision, with slots per layer and prefetching by votes.

    In decode, the predictions of earlier layers decide which experts are expected in the next layer
    (eq. 4 to 6). Their first matrices are prefetched: all gates, then all ups. The numbers of
    candidates and voting layers are tuned for shallow, middle and deep layers (eq. 9 to 11,
    Algorithm 1). With several sequences, the experts expected by any token are prefetched. Prompts
    are handled as in DyMoE with one precision.

    The defaults differ from the paper and were measured to be as fast or faster: only the previous
    layer predicts (rank), whole experts are prefetched, and every (K, P) is counted. The paper's
    forms are options: votes of several layers (mol), only the gate or gate and up, and hill
    climbing.

    tuner: chooses K and P.
    """

    about = About(
        name="firm",
        summary=(
            "One precision, lossless. Prefetches the experts that a layer predicts for the next "
            "one, and tunes how many at run time. The paper's form, with gates alone and votes of "
            "several layers, is an option."
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
        """Give each layer the same number of slots, in one slot group per (layer, kind).

        Raises PolicyError if votes have more candidates than the model's routers choose.
        """
        settings = settings.with_usual()
        most = max(k for k, _ in read_votes(settings.votes or "1,1"))
        if most > shape.n_expert_used:
            raise PolicyError(
                f"the votes '{settings.votes}' have {most} candidates, and this model's "
                f"routers choose {shape.n_expert_used} experts: K is 1 to {shape.n_expert_used}"
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
        """Return the tuned votes and the settings that they were tuned for, once they are fixed."""
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
        """Return S of the next layer: eq. 6 for each token, and the union over tokens."""
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
                self._every = every_set(way, votes, depth_of(way, self.wants.n_ahead), scores)
        return expected

    def _ask(
        self, event: RouteEvent, expected: list[int], view: StoreView, out: DecisionBuffer
    ) -> None:
        """Prefetch the first matrix of every expected expert, then the second ones, and so on."""
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
        """Compare the expected experts of a layer with those that one token uses.

        Predicted experts count as they were when predicted, because they may have been prefetched
        since; other experts count as they are now.
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
        """Tune and score from decode steps with one token."""
        if report.phase == _DECODE and report.n_tokens == 1 and self._ahead.on:
            self.tuner.token()
        self._ahead.step_done(report)
        return ()

    def report(self) -> Mapping[str, Any]:
        """Return the report of Prefetching for counted tokens, and further figures.

        The report has recall (eq. 7) and precision (eq. 8).

        size: the mean of |S| by layer, without which recall and precision mean little. By group of
        layers: votes, [K, P]; loss, the mean of eq. 11. tuned: whether the votes are fixed.
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
        return self.placement.voting(self.tuner.by_group().values()) + self._ahead.note


def look_ahead(settings: FIRMSettings, rules: Rules) -> int:
    """Return how many layers ahead experts are predicted.

    Return 0 with exact rules, because results must not depend on residency.
    """
    return (settings.n_ahead or 0) if settings.prefetch != OFF and not rules.exact else 0


def tuned_for(settings: FIRMSettings) -> dict[str, Any]:
    """Return the settings that the votes are tuned for."""
    return {name: getattr(settings, name) for name in _TUNED_FOR} | {"tune": settings.way}


def recalled(
    settings: FIRMSettings,
    tuned: Mapping[str, Any],
    n_slots: int,
    shape: ModelShape,
    rules: Rules,
) -> FIRMSettings:
    """Return the settings with the votes that an earlier run tuned.

    They have no more look-ahead than the votes need.

    Only if this run would tune for the same conditions: the same settings of _TUNED_FOR and about
    as many slots. Otherwise the settings are returned unchanged.
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
