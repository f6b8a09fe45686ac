"""FIRM-MoE: matrices of experts are predicted, fetched and waited for one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gguf_tools.file.layout import COMPUTE_ORDER
from orchestrator.errors import SettingError
from orchestrator.events import ABSENT, DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.policy.base import Callback, ModelShape, Policy, Rules, SlotPlan
from orchestrator.policy.heop import ALL, GROUPS, OFF, WAYS, Tuner, Votes, Weights, group_of
from orchestrator.policy.monitor import Monitor, Prediction
from orchestrator.policy.prefetch import AUTO, ON, LookAhead
from orchestrator.policy.prefetch import OFF as NEVER
from orchestrator.policy.prompts import Prompts, even_slots, layer_groups
from orchestrator.policy.votes import MARGIN, RANK, agreed, depth_of, every_set
from orchestrator.policy.votes import WAYS as VOTES_WAYS
from orchestrator.settings import setting

_DECODE = int(Phase.DECODE)

# Tokens of one step, above which the union of what they are predicted to need is nearly all.
_MOST_TOKENS = 8
# What an earlier run tuned holds for slots as many as it had, within this share of them.
_SAME_SLOTS = 0.1


def read_votes(text: str) -> list[Votes]:
    """(K, P) of each group of layers from "4,1", for all of them, or "4,1/8,3/8,3". Raises
    ValueError."""
    pairs = [tuple(int(part) for part in pair.split(",")) for pair in text.split("/")]
    if len(pairs) not in (1, len(GROUPS)) or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise ValueError(text)
    return [(k, p) for k, p in pairs] * (len(GROUPS) // len(pairs))


def write_votes(votes: Sequence[Votes]) -> str:
    """As read_votes reads it."""
    return "/".join(f"{k},{p}" for k, p in votes)


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
        "What the layers that look ahead have to agree on: mol, an expert is among the first K "
        "of each of P layers; rank, it is among the first K of the nearest one; margin, it is far "
        "enough above the last one there.",
        metavar="HOW",
        choices=VOTES_WAYS,
    )
    votes: str | None = setting(
        None,
        "K,P: the candidates of a vote and the layers that vote; K,P/K,P/K,P for shallow, middle "
        "and deep layers.",
        metavar="K,P",
        shown="tuned",
    )
    tune: str = setting(
        ALL,
        "How K and P are found: climb, the paper's hill climbing; all, every pair counted on the "
        "same tokens; off.",
        metavar="HOW",
        choices=WAYS,
    )
    tune_steps: int = setting(
        32, "Decode steps between two changes of K and P.", within=(1, 2**24), hidden=True
    )
    tune_patience: int = setting(
        2, "Changes without gain, after which climb turns round.", within=(1, 2**16), hidden=True
    )
    tune_tokens: int = setting(
        512, "Decode steps after which K and P stay.", within=(1, 2**24), hidden=True
    )
    waste_weight: float = setting(
        0.5, "Loss of an expert that is loaded ahead for nothing.", within=(0.0, 1e6), hidden=True
    )
    miss_weight: float = setting(
        0.5, "Loss of an expert that is loaded on demand.", within=(0.0, 1e6), hidden=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            read_votes(self.votes or "1,1")
        except ValueError:
            raise SettingError(
                "votes",
                f"must be K,P such as 4,1, or three of them as 4,1/8,3/8,3, not '{self.votes}'",
            ) from None

    @property
    def usual_ahead(self) -> int:
        """As many as the paper's, where they all vote."""
        return depth_of(self.agree, 3)


class FIRM(Policy):
    """One precision, in slots per layer. While decoding, votes of the layers before decide which
    experts are expected in the next one (eq. 4 to 6), and the first matrices of those are loaded
    ahead: all gates, then all ups. How many candidates and layers vote is tuned for shallow,
    middle and deep layers (eq. 9 to 11, Algorithm 1). Of several sequences that decode together,
    whatever any of their tokens expects is loaded. Prompts are as DyMoE's with one precision.

    tuner: what finds K and P.
    """

    name = "firm"
    summary = (
        "One precision, lossless. The gate, up and down of an expert are loaded one by one; "
        "several layers agree on what the next one needs, and how many is tuned while it runs."
    )
    Settings = FIRMSettings
    most_tiers = 1
    reason = "runs one precision"
    callback = Callback.ALWAYS
    tunes = True
    settings: FIRMSettings

    def __init__(
        self,
        shape: ModelShape,
        settings: FIRMSettings | None = None,
        rules: Rules | None = None,
    ) -> None:
        super().__init__(shape, settings, rules)
        self.settings = self.settings.settled()
        kinds = self.settings.prefetch_kinds
        # What is asked for ahead in each layer, in this order; 0 for whole experts.
        self._parts = [self._masks(layer, kinds) for layer in range(shape.n_layers)]
        self._monitor = Monitor()
        self._prediction, self._absent = Prediction(shape.n_layers), Prediction(shape.n_layers)
        self._prompts = Prompts(self.rules, lambda layer, n_used: n_used, ())
        self._slots = 0
        self._step = -1
        self._counts = True  # this token is one that is counted
        self._ballots: list[list[list[list[int]]]] = []  # [layer][nearest first][token][k]
        self._expected: tuple[int, list[int], list[int]] = (-1, [], [])  # layer, S, its absent
        self._every: list[list[int]] = []
        self._absent_mask = 0
        self._make_tuner()

    def _masks(self, layer: int, n: int) -> list[int]:
        kinds = [kind for kind in COMPUTE_ORDER if kind in self.shape.slots[layer][0]]
        return [1 << kind for kind in kinds[:n]] if n < len(kinds) else [0]

    def _make_tuner(self) -> None:
        asked = self.settings
        start = self.shape.n_expert_used, depth_of(asked.agree, self.n_ahead)
        self.tuner = Tuner(
            asked.tune,
            group_of(self.shape.n_layers),
            start,
            Weights(asked.waste_weight, asked.miss_weight),
            asked.tune_steps,
            asked.tune_patience,
            asked.tune_tokens,
        )
        if asked.votes is not None:
            self.tuner.fix(read_votes(asked.votes))

    @property
    def n_ahead(self) -> int:
        """None where what is computed must not depend on what is in memory."""
        wanted = self.settings.prefetch != NEVER and not self.rules.exact
        return (self.settings.n_ahead or 0) if wanted else 0

    @property
    def fresh(self) -> bool:
        return self.tuner.tokens == 0

    def plan(self, budget_bytes: int) -> SlotPlan:
        """One group per (layer, kind), as many slots in each layer. Raises BudgetError."""
        counts = even_slots(self.shape, budget_bytes)
        self._slots = sum(counts)
        self._prompts.room = [(n, 0) for n in counts]
        return layer_groups(self.shape, [[n] for n in counts])

    @property
    def tuned(self) -> Mapping[str, Any] | None:
        """What was tuned, once it is fixed: {"votes", "agree", "slots"}."""
        asked = self.settings
        if not self.tuner.tuned or not self.n_ahead or asked.tune == OFF or self.fresh:
            return None
        return {
            "votes": write_votes(self.tuner.chosen),
            "agree": asked.agree,
            "slots": self._slots,
        }

    def recall(self, tuned: Mapping[str, Any]) -> None:
        """Runs with what an earlier run tuned, and with no more look-ahead than that needs. Only
        where nothing else was asked for and the slots are about as many as they were."""
        asked = self.settings
        votes, slots = tuned.get("votes"), tuned.get("slots")
        wanted = asked.tune != OFF and asked.votes is None and tuned.get("agree") == asked.agree
        if not wanted or not isinstance(votes, str) or not isinstance(slots, int):
            return
        if not self.n_ahead or abs(slots - self._slots) > _SAME_SLOTS * self._slots:
            return
        try:
            deepest = max(layers for _, layers in read_votes(votes))
            self.settings = replace(asked, votes=votes, n_ahead=min(deepest, self.n_ahead))
        except (ValueError, SettingError):
            return
        self._make_tuner()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.phase != _DECODE and event.n_tokens > 1:
            self._prompts.decide(event, view, out, self.settings.prefetch != NEVER)
            return
        if event.step != self._step:
            self._step = event.step
            self._ballots = [[] for _ in range(self.shape.n_layers)]
            self._expected = (-1, [], [])
            self._counts = self.tuner.counts
        one = event.n_tokens == 1
        if one and self._counts:
            self._observe(event.layer, event.ids.tolist(), view)
        if event.n_ahead and event.n_tokens <= _MOST_TOKENS and self._prefetches():
            layer = event.layer + 1
            if one and not self._counts and self.settings.agree == RANK:
                # what _agree comes to, on the decisions that most tokens wait for
                expected = event.ahead_ids[0].tolist()[: self.tuner.of(layer)[0]]
            else:
                self._vote(event, one)
                expected = self._agree(event, view, one)
            self._ask(layer, expected, view, out)

    def _vote(self, event: RouteEvent, one: bool) -> None:
        """Takes what this layer predicts of the next ones."""
        for ahead in range(event.n_ahead):
            vote = [event.ahead_ids[ahead].tolist()]
            if not one:
                vote = event.ahead_ids_array[ahead].tolist()
            self._ballots[event.layer + 1 + ahead].insert(0, vote)

    def _agree(self, event: RouteEvent, view: StoreView, one: bool) -> list[int]:
        """S of the next layer: eq. 6 for each token, and what any of them expects."""
        layer, way, tuner = event.layer + 1, self.settings.agree, self.tuner
        candidates, layers = tuner.of(layer)
        # a step's first layers may have had tokens that later ones do not compute
        ballots = [each for each in self._ballots[layer] if len(each) == event.n_tokens]
        expected: list[int] = []
        for token in range(event.n_tokens):
            votes = [ballot[token] for ballot in ballots]
            scores = event.ahead_array[0, token].tolist() if way == MARGIN else ()
            found = agreed(way, votes, candidates, layers, scores)
            expected += found if one else [each for each in found if each not in expected]
            if one and tuner.counts_all:
                depth = depth_of(way, self.n_ahead)
                self._every = every_set(way, votes, depth, scores)
                bits = np.packbits(view.resident_array[layer] == ABSENT, bitorder="little")
                self._absent_mask = int.from_bytes(bits.tobytes(), "little")
        return expected

    def _ask(self, layer: int, expected: list[int], view: StoreView, out: DecisionBuffer) -> None:
        """Asks for the first matrices of all of them, then for the second ones."""
        for kinds in self._parts[layer]:
            out.prefetch_all(layer, expected, 0, kinds)
        if not self._counts:
            return
        resident = view.resident[layer]
        absent = [expert for expert in expected if resident[expert] == ABSENT]
        self._expected = (layer, expected, absent)
        self._prediction.expect(layer, expected)
        self._absent.expect(layer, absent)

    def _observe(self, layer: int, used: list[int], view: StoreView) -> None:
        """Compares what was expected of a layer with what one token uses there."""
        self._prediction.observe(layer, used)
        self._absent.observe(layer, used)
        expected_layer, expected, absent = self._expected
        if layer != expected_layer:
            self._every = []
            return
        resident = view.resident[layer]
        unused = len([expert for expert in absent if expert not in used])
        missed = len([e for e in used if e not in expected and resident[e] == ABSENT])
        self.tuner.observe(layer, unused, missed)
        if self._every:
            self.tuner.count(layer, self._every, used, self._absent_mask)
            self._every = []

    def _prefetches(self) -> bool:
        how = self.settings.prefetch
        return how == ON or (how == AUTO and self._monitor.on)

    def step_done(self, report: StepReport) -> tuple[()]:
        """The tuning and the monitor learn from decode steps of one token."""
        if report.phase == _DECODE and report.n_tokens == 1 and self.n_ahead:
            if self._prefetches():
                self.tuner.token()
            if self.settings.prefetch == AUTO:
                self._monitor.step(report.us)
        return ()

    def report(self) -> Mapping[str, Any]:
        """prefetch: as of DyMoE. Of the look-ahead of the tokens that are counted, by layer:
        recall, eq. 7; precision, eq. 8; size, the mean of |S|, without which the two say nothing;
        and absent_precision, that of what was not in memory. By group of layers: votes, [K, P];
        loss, the mean of eq. 11. tuned: whether they are fixed."""
        how = self.settings.prefetch if self.n_ahead else NEVER
        if how == AUTO:
            how = ON if self._monitor.pays else "paused"
        return {
            "prefetch": how,
            "recall": self._prediction.recall(),
            "precision": self._prediction.precision(),
            "size": self._prediction.size(),
            "absent_precision": self._absent.precision(),
            "votes": {name: list(votes) for name, votes in self.tuner.by_group().items()},
            "loss": self.tuner.losses(),
            "tuned": self.tuner.tuned,
        }

    def describe(self) -> str:
        asked, text = self.settings, f"firm {self.shape.tiers[0]}, one precision"
        if not self.n_ahead:
            return text
        pairs = dict.fromkeys(self.tuner.by_group().values())
        votes = " ".join(f"{k},{p}" for k, p in pairs)
        text += f", n={asked.prefetch_kinds}, {asked.agree} {votes}"
        return text if self._monitor.pays else text + ", prefetch paused"
