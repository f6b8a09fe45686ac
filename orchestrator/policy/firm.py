"""FIRM-MoE: what earlier layers predict is loaded ahead, and how much of it is tuned.

Meeting of Layers (eq. 4 to 6): several layers vote on what a layer will need. A vote is what one
earlier layer m predicts of layer l: TopKIndices(x_m W_g of l, k), eq. 4 and 5, which the model's
graph computes and a route event carries, best first. The votes on a layer stand nearest layer
first. They are complete at layer l-1 and never before, so that more votes choose better but earn no
time.

Hierarchical Expert Optimization and Pre-fetching (eq. 9 to 11, Algorithm 1): how many candidates K
and layers P vote in each group of layers. Latency T of eq. 9 is never measured; the loss of eq. 11
stands for it:

    L = waste_weight * n_unused + miss_weight * (n_miss - n_hit)

n_unused: experts that were read ahead and are not used. n_miss: experts in use that were not
expected, n_hit those of them that are in memory, so that the difference is what is read on demand.
What is loaded ahead are the first n matrices of an expert, each of them is in memory or not, and
each counts as 1/n. The others are read on demand whatever K and P are, and do not count.
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
from orchestrator.allocation.prompts import Prompts, even_slots, layer_groups
from orchestrator.allocation.slots import ModelShape, Rules
from orchestrator.errors import ConfigError, PolicyError, SettingError
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.policy.base import (
    EVERY_STEP,
    About,
    History,
    Learned,
    Placement,
    Policy,
    Precisions,
    Wants,
)
from orchestrator.settings import setting

# How the votes of layers come to one set, and how K and P are found.
AGREE_WAYS = MOL, RANK, MARGIN = ("mol", "rank", "margin")
CLIMB, ALL = "climb", "all"
TUNE_WAYS = (CLIMB, ALL, OFF)
GROUPS = ("shallow", "middle", "deep")

Votes = tuple[int, int]  # K, P
# (experts as bits, n): n of the matrices that are loaded ahead are absent of just these.
Absent = Sequence[tuple[int, int]]


def mask_of(experts: Iterable[int]) -> int:
    """The bits of these experts."""
    mask = 0
    for expert in experts:
        mask |= 1 << expert
    return mask


def depth_of(way: str, n_ahead: int) -> int:
    """How many layers a way to agree can use of those that look ahead."""
    return n_ahead if way == MOL else min(1, n_ahead)


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
    score is high enough; scores [k] are its own, best first. With K = k that is the score of the
    last one, so that all of them count. Each candidate less asks for half an octave more, so that a
    layer that is sure of more experts takes more of them.
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
    """agreed() for every (K, P), as bits: [P - 1][K - 1], P up to depth."""
    numbers = range(1, len(votes[0]) + 1)
    return [
        [mask_of(agreed(way, votes, k, p, scores)) for k in numbers] for p in range(1, depth + 1)
    ]


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


class Weights(NamedTuple):
    """alpha and beta of eq. 11. matrices: how many of an expert are loaded ahead."""

    waste: float
    miss: float
    matrices: int

    def mean(self, counts: np.ndarray, n: int) -> Any:
        """The mean loss of eq. 11, of sums [..., 2] of n pairs as of unused_and_missed; 0 of
        nothing."""
        lost = self.waste * counts[..., 0] + self.miss * counts[..., 1]
        return (lost / self.matrices / max(1, n)).tolist()


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
        for _ in range(3):  # the other three directions, where this one is at its end
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
        k, depth = start
        self._weights = weights
        self._pairs = [*product(range(1, k + 1), range(1, depth + 1))]
        # Sums of unused_and_missed: what ran, and of every (K, P), by group.
        self._ran = np.zeros((len(GROUPS), 2), np.int64)
        self._sums = np.zeros((len(GROUPS), depth, k, 2), np.int64)
        self._n_ran, self._n = Counter[int](), Counter[int]()
        self._climbs = [
            # No layer of a group has more voters than its last one.
            Climb(k, min(depth, self._last(group)), patience)
            for group in range(len(GROUPS))
        ]

    def of(self, layer: int) -> Votes:
        """(K, P) of a layer."""
        return self.chosen[self.groups[layer]]

    @property
    def counts(self) -> bool:
        """Whether what this token expected is compared with what it used: of one in `every`, so
        that a decision stays short."""
        return self.tokens % self.every == 0

    def count(
        self, layer: int, sets: Sequence[Sequence[int]], used: Sequence[int], absent: Absent
    ) -> None:
        """Counts every (K, P) on one layer of one token: predictions are ranked, so that each one's
        set is known without running it. So the search is exhaustive, and noise is the same for all.
        sets of every_set, the others as in unused_and_missed."""
        group, bits = self.groups[layer], mask_of(used)
        self._sums[group] += [[unused_and_missed(one, bits, absent) for one in row] for row in sets]
        self._n[group] += 1

    def means(self, group: int) -> list[list[float]]:
        """Mean loss a layer and token of every (K, P), [P - 1][K - 1]."""
        found: list[list[float]] = self._weights.mean(self._sums[group], self._n[group])
        return found

    def observe(self, layer: int, unused: int, missed: int) -> None:
        """What the running (K, P) came to in a layer, as in unused_and_missed."""
        group = self.groups[layer]
        self._ran[group] += unused, missed
        self._n_ran[group] += 1

    def token(self) -> None:
        """A token has passed through all layers."""
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
        """(K, P) of the groups that have a layer which can be predicted."""
        return {GROUPS[group]: self.chosen[group] for group in self._used()}

    def losses(self) -> dict[str, float | None]:
        """Mean loss a layer and token of what ran, by group."""
        ran = {group: self._weights.mean(self._ran[group], n) for group, n in self._n_ran.items()}
        return {GROUPS[group]: ran.get(group) for group in self._used()}

    def _last(self, group: int) -> int:
        """The deepest layer of a group, 1 at least."""
        return max((i for i, each in enumerate(self.groups) if each == group), default=1) or 1

    def _used(self) -> list[int]:
        return sorted(set(self.groups[1:]))


# Settings that say which votes count. The last three are dropped of a recorded run where a change
# touches any of these: they were made for its own votes.
_VOTING = ("prefetch", "agree", "votes", "tune", "n_ahead")


def read_votes(text: str) -> list[Votes]:
    """(K, P) of each group of layers from "4,1", for all of them, or "4,1/8,3/8,3". Raises
    ValueError."""
    pairs = [tuple(int(part) for part in pair.split(",")) for pair in text.split("/")]
    if len(pairs) not in (1, len(GROUPS)) or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise ValueError(text)
    return [(k, p) for k, p in pairs] * (len(GROUPS) // len(pairs))


@dataclass(frozen=True)
class FIRMSettings(LookAhead):
    """What a user can tune. Raises SettingError."""

    prefetch_kinds: int = setting(
        3,
        "How many matrices of an expert are loaded ahead, in the order of computing: its gate; "
        "its gate and up; all of it.",
        within=(1, 3),
    )
    agree: str = setting(
        RANK,
        "Which experts are expected: rank, the first K that the layer before predicts; mol, the "
        "paper's, those among the first K of each of P layers; margin, those that the layer before "
        "ranks far enough above its last one.",
        metavar="HOW",
        choices=AGREE_WAYS,
    )
    votes: str | None = setting(
        None,
        "K,P: the candidates of a vote and the layers that vote, of which only mol has several; "
        "K,P/K,P/K,P for shallow, middle and deep layers.",
        metavar="K,P",
        shown="tuned",
    )
    tune: str | None = setting(
        None,
        "How K and P are found: climb, the paper's hill climbing; all, every pair counted on the "
        "same tokens; off.",
        metavar="HOW",
        choices=TUNE_WAYS,
        shown=f"{ALL}, off with votes",
    )
    tune_steps: int = setting(32, "Decode steps between two changes of K and P.", within=(1, 2**24))
    tune_patience: int = setting(
        2, "Changes without gain, after which climb turns round.", within=(1, 2**16)
    )
    tune_tokens: int = setting(512, "Decode steps after which K and P stay.", within=(1, 2**24))
    waste_weight: float = setting(
        0.5, "Loss of an expert that is loaded ahead for nothing.", within=(0.0, 1e6)
    )
    miss_weight: float = setting(
        0.5, "Loss of an expert that is loaded on demand.", within=(0.0, 1e6)
    )

    def __post_init__(self) -> None:
        """Refuses what would have no effect."""
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
            complaint = f"is {self.tune}, and votes says what would be tuned: leave one out"
            refuse(self.tune not in (None, OFF), "tune", complaint)

    @property
    def deepest(self) -> int | None:
        """How many layers vote at most; None where that is tuned. Raises ValueError for votes that
        cannot be read."""
        return None if self.votes is None else max(p for _, p in read_votes(self.votes))

    @property
    def way(self) -> str:
        """How K and P are found."""
        return self.tune or (ALL if self.votes is None else OFF)

    @property
    def usual_ahead(self) -> int:
        """As many as vote, or as the paper's, where they all may."""
        return self.deepest or depth_of(self.agree, 3)

    def limited(self, depth: int, asked: Collection[str]) -> FIRMSettings:
        """Votes that were asked for need their layers; those of a recorded run that did not look
        ahead decided nothing."""
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
        """What says which votes count belongs together: where a change concerns it, only the way to
        agree stays as recorded."""
        if any(changes.get(name, recorded.get(name)) != recorded.get(name) for name in _VOTING):
            recorded = {k: v for k, v in recorded.items() if k not in _VOTING[2:]}
        return cls.of({**recorded, **changes})


_DECODE = int(Phase.DECODE)

# With more tokens in a step, together they are predicted to need nearly all experts of a layer.
_MOST_TOKENS = 8
# What an earlier run tuned is used where the number of slots differs by at most this share, and
# these settings have the same values.
_SAME_SLOTS = 0.1
_TUNED_FOR = ("agree", "prefetch_kinds", "n_ahead", "waste_weight", "miss_weight")


@dataclass(frozen=True)
class FIRMPlacement(Placement):
    """room: of each layer, its slots in each tier."""

    room: Sequence[Sequence[int]]

    @property
    def n_slots(self) -> int:
        """Slots for whole experts, in all layers."""
        return sum(sum(each) for each in self.room)

    @property
    def text(self) -> str:
        """With the votes that it begins with."""
        n_ahead = self.wants.n_ahead
        if not n_ahead:
            return f"firm {self.shape.tiers[0]}, one precision"
        asked = self.settings
        begins = [(self.shape.n_expert_used, depth_of(asked.agree, n_ahead))] * len(GROUPS)
        chosen = begins if asked.votes is None else read_votes(asked.votes)
        groups = sorted(set(group_of(self.shape.n_layers)[1:]))
        return self.voting(chosen[group] for group in groups)

    def voting(self, votes: Iterable[Votes]) -> str:
        """The phrase with the votes of the groups of layers."""
        pairs = " ".join(f"{k},{p}" for k, p in dict.fromkeys(votes))
        asked = self.settings
        text = f"firm {self.shape.tiers[0]}, one precision, n={asked.prefetch_kinds}"
        return f"{text}, {asked.agree} {pairs}"


class FIRM(Policy):
    """One precision, in slots per layer. While decoding, what the layers before predict decides
    which experts are expected in the next one (eq. 4 to 6), and the first matrices of those are
    loaded ahead: all gates, then all ups. How many candidates and layers vote is tuned for shallow,
    middle and deep layers (eq. 9 to 11, Algorithm 1). Of several sequences that decode together,
    whatever any of their tokens expects is loaded. Prompts are as DyMoE's with one precision.

    Ours by default, and measured to be as fast or faster: the layer before alone predicts (rank),
    whole experts are loaded, and every (K, P) is counted. The paper's form is an option each: the
    votes of several layers (mol), the gate or the gate and up alone, and hill climbing.

    tuner: what finds K and P.
    """

    about = About(
        name="firm",
        summary=(
            "One precision, lossless. The experts that a layer predicts for the next one are "
            "loaded ahead, and how many of them is tuned while it runs. The paper's form, gates "
            "alone and a vote of several layers, is an option."
        ),
        Settings=FIRMSettings,
        reason="runs one precision",
        precisions=Precisions(most=1),
        wants=Wants(EVERY_STEP),
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
        """One group per (layer, kind), as many slots in each layer. Raises PolicyError for more
        candidates than the model's routers choose."""
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
        # The matrices that are loaded ahead in each layer, as bits, in this order.
        self._kinds = [
            [1 << kind for kind in COMPUTE_ORDER if kind in slots][: asked.prefetch_kinds]
            for slots, *_ in shape.slots
        ]
        self._prompts = Prompts(self.rules, room=self.placement.room)
        self._step = -1
        self._counts = True  # whether this token is counted
        self._ballots: list[list[list[list[int]]]] = []  # [layer][nearest first][token][k]
        # The next layer, the experts expected in it, and what is missing of each predicted expert.
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
        """What this run tuned, once it is fixed: votes, and what they were tuned for."""
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
                # The same as _agree, but faster: most tokens wait for this branch.
                expected = event.ahead_ids[0].tolist()[: self.tuner.of(layer)[0]]
            else:
                for ahead, votes in enumerate(event.ahead_ids_array.tolist()):
                    self._ballots[layer + ahead].insert(0, votes)
                expected = self._agree(event, one)
            self._ask(event, expected, view, out)

    def _agree(self, event: RouteEvent, one: bool) -> list[int]:
        """S of the next layer: eq. 6 for each token, and what any of them expects."""
        layer, way, tuner = event.layer + 1, self.settings.agree, self.tuner
        candidates, layers = tuner.of(layer)
        # A step's last layer computes fewer tokens than those before, whose votes do not fit then.
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
        """Asks for the first matrices of all of them, then for the second ones."""
        layer = event.layer + 1
        kinds = self._kinds[layer]
        whole = len(kinds) == len(self.shape.slots[layer][0])
        for part in (0,) if whole else kinds:
            out.prefetch_all(layer, expected, 0, part)
        if not self._counts:
            return
        self._ahead.score.expect(layer, expected)
        if event.n_tokens == 1:
            # Whatever the way to agree, it chooses among these.
            missing, predicted = view.missing[layer], event.ahead_ids[0].tolist()
            self._expected = (layer, expected, {each: missing[each] for each in predicted})

    def _observe(self, layer: int, used: list[int], view: StoreView) -> None:
        """Compares what was expected of a layer with what one token uses there. What was predicted
        counts as it was in memory then, since it may have been loaded ahead; the rest as it is."""
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
        """The tuning and the monitor learn from decode steps of one token."""
        if report.phase == _DECODE and report.n_tokens == 1 and self._ahead.on:
            self.tuner.token()
        self._ahead.step_done(report)
        return ()

    def report(self) -> Mapping[str, Any]:
        """As Prefetching.report, of the tokens that are counted: recall is eq. 7, precision eq. 8.
        size: the mean of |S| by layer, without which the two say nothing. By group of layers:
        votes, [K, P]; loss, the mean of eq. 11. tuned: whether they are fixed."""
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
    """How many layers ahead the routers are asked: none where what is computed must not depend on
    what is in memory."""
    return (settings.n_ahead or 0) if settings.prefetch != OFF and not rules.exact else 0


def tuned_for(settings: FIRMSettings) -> dict[str, Any]:
    """The settings for which votes are tuned."""
    return {name: getattr(settings, name) for name in _TUNED_FOR} | {"tune": settings.way}


def recalled(
    settings: FIRMSettings,
    tuned: Mapping[str, Any],
    n_slots: int,
    shape: ModelShape,
    rules: Rules,
) -> FIRMSettings:
    """The settings with the votes that an earlier run tuned, and with no more look-ahead than these
    need. Only where this run would tune for the same: with as many layers, matrices and weights of
    the loss, and about as many slots. Else the settings as they are."""
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
