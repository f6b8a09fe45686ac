"""FIRM-MoE: what earlier layers predict is loaded ahead, and how much of it is tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gguf_tools.file.layout import COMPUTE_ORDER
from orchestrator.allocation.monitor import Monitor, Prediction
from orchestrator.allocation.prefetch import AUTO, ON
from orchestrator.allocation.prefetch import OFF as NEVER
from orchestrator.allocation.prompts import Prompts, even_slots, layer_groups
from orchestrator.allocation.slots import ModelShape, Rules, SlotPlan
from orchestrator.errors import PolicyError, SettingError
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.policy.base import Callback, Policy, Precisions, Tunes, Wants
from orchestrator.policy.firm.heop import (
    OFF,
    Tuner,
    Weights,
    absent_of,
    group_of,
    unused_and_missed,
)
from orchestrator.policy.firm.settings import FIRMSettings, read_votes, write_votes
from orchestrator.policy.firm.votes import MARGIN, RANK, agreed, depth_of, every_set, mask_of

_DECODE = int(Phase.DECODE)

# Tokens of one step, above which the union of what they are predicted to need is nearly all.
_MOST_TOKENS = 8
# What an earlier run tuned holds where there are about as many slots as it had, within this share.
_SAME_SLOTS = 0.1
# It holds for the same values of these settings alone.
_TUNED_FOR = ("agree", "prefetch_kinds", "n_ahead", "waste_weight", "miss_weight")


class FIRM(Policy, Tunes):
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

    name = "firm"
    summary = (
        "One precision, lossless. The experts that a layer predicts for the next one are loaded "
        "ahead, and how many of them is tuned while it runs. The paper's form, gates alone and a "
        "vote of several layers, is an option."
    )
    Settings = FIRMSettings
    reason = "runs one precision"
    precisions = Precisions(most=1)
    wants = Wants(Callback.ALWAYS)
    settings: FIRMSettings

    def __init__(
        self,
        shape: ModelShape,
        settings: FIRMSettings | None = None,
        rules: Rules | None = None,
    ) -> None:
        """Raises PolicyError for more candidates than the model's routers choose."""
        super().__init__(shape, settings, rules)
        self.settings = self.settings.settled()
        most = max(k for k, _ in read_votes(self.settings.votes or "1,1"))
        if most > shape.n_expert_used:
            raise PolicyError(
                f"the votes '{self.settings.votes}' have {most} candidates, and this model's "
                f"routers choose {shape.n_expert_used} experts: K is 1 to {shape.n_expert_used}"
            )
        # The matrices that are loaded ahead in each layer, as bits, in this order.
        self._kinds = [self._first_kinds(layer) for layer in range(shape.n_layers)]
        self._monitor = Monitor()
        self._prediction, self._absent = Prediction(shape.n_layers), Prediction(shape.n_layers)
        self._prompts = Prompts(self.rules, lambda layer, n_used: n_used, ())
        self._slots = 0
        self._step = -1
        self._counts = True  # this token is one that is counted
        self._ballots: list[list[list[list[int]]]] = []  # [layer][nearest first][token][k]
        # The next layer, what is expected of it, and of all that was predicted what is missing.
        self._expected: tuple[int, list[int], dict[int, int]] = (-1, [], {})
        self._every: list[list[int]] = []
        self._make_tuner()

    def _first_kinds(self, layer: int) -> list[int]:
        kinds = [kind for kind in COMPUTE_ORDER if kind in self.shape.slots[layer][0]]
        return [1 << kind for kind in kinds[: self.settings.prefetch_kinds]]

    def _make_tuner(self) -> None:
        asked = self.settings
        # Where what is computed must not depend on what is in memory, nothing is loaded ahead.
        ahead = asked.prefetch != NEVER and not self.rules.exact
        self.wants = replace(self.wants, n_ahead=(asked.n_ahead or 0) if ahead else 0)
        start = self.shape.n_expert_used, depth_of(asked.agree, self.wants.n_ahead)
        self.tuner = Tuner(
            asked.way,
            group_of(self.shape.n_layers),
            start,
            Weights(asked.waste_weight, asked.miss_weight, max(map(len, self._kinds))),
            asked.tune_steps,
            asked.tune_patience,
            asked.tune_tokens,
        )
        if asked.votes is not None:
            self.tuner.fix(read_votes(asked.votes))

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
        """What this run tuned, once it is fixed: votes, and what they were tuned for."""
        if not self.tuner.tuned or not self.wants.n_ahead or self.settings.way == OFF or self.fresh:
            return None
        found = {"votes": write_votes(self.tuner.chosen), "slots": self._slots}
        return found | self._tuned_for()

    def _tuned_for(self) -> dict[str, Any]:
        asked = self.settings
        return {name: getattr(asked, name) for name in _TUNED_FOR} | {"tune": asked.way}

    def recall(self, tuned: Mapping[str, Any]) -> None:
        """Runs with what an earlier run tuned, and with no more look-ahead than that needs. Only
        where this one would tune for the same: with as many layers, matrices and weights of the
        loss, and about as many slots."""
        asked, votes, slots = self.settings, tuned.get("votes"), tuned.get("slots")
        if not self.wants.n_ahead or asked.way == OFF or not isinstance(votes, str):
            return
        if not isinstance(slots, int) or abs(slots - self._slots) > _SAME_SLOTS * self._slots:
            return
        if any(tuned.get(name) != value for name, value in self._tuned_for().items()):
            return
        try:
            if max(k for k, _ in read_votes(votes)) > self.shape.n_expert_used:
                return
            recalled = replace(asked, votes=votes, n_ahead=None, tune=None).settled()
        except (ValueError, SettingError):
            return
        if (recalled.n_ahead or 0) <= self.wants.n_ahead:
            self.settings = recalled
            self._make_tuner()

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        if event.phase != _DECODE and event.n_tokens > 1:
            self._prompts.decide(event, view, out, self.settings.prefetch != NEVER)
            return
        if event.step != self._step:
            self._step = event.step
            self._ballots = [[] for _ in range(self.shape.n_layers)]
            self._expected = (-1, [], {})
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
                expected = self._agree(event, one)
            self._ask(event, expected, view, out)

    def _vote(self, event: RouteEvent, one: bool) -> None:
        """Takes what this layer predicts of the next ones."""
        for ahead in range(event.n_ahead):
            vote = [event.ahead_ids[ahead].tolist()]
            if not one:
                vote = event.ahead_ids_array[ahead].tolist()
            self._ballots[event.layer + 1 + ahead].insert(0, vote)

    def _agree(self, event: RouteEvent, one: bool) -> list[int]:
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
        missing, wanted = view.missing[layer], sum(kinds)
        self._prediction.expect(layer, expected)
        self._absent.expect(layer, [expert for expert in expected if missing[expert] & wanted])
        if event.n_tokens == 1:
            # every way to agree chooses among these
            predicted = event.ahead_ids[0].tolist()
            self._expected = (layer, expected, {each: missing[each] for each in predicted})

    def _observe(self, layer: int, used: list[int], view: StoreView) -> None:
        """Compares what was expected of a layer with what one token uses there. What was predicted
        counts as it was in memory then, since it may have been loaded ahead; the rest as it is."""
        self._prediction.observe(layer, used)
        self._absent.observe(layer, used)
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

    def _prefetches(self) -> bool:
        how = self.settings.prefetch
        return how == ON or (how == AUTO and self._monitor.on)

    def step_done(self, report: StepReport) -> tuple[()]:
        """The tuning and the monitor learn from decode steps of one token."""
        if report.phase == _DECODE and report.n_tokens == 1 and self.wants.n_ahead:
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
        how = self.settings.prefetch if self.wants.n_ahead else NEVER
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
        if not self.wants.n_ahead:
            return text
        pairs = dict.fromkeys(self.tuner.by_group().values())
        votes = " ".join(f"{k},{p}" for k, p in pairs)
        text += f", n={asked.prefetch_kinds}, {asked.agree} {votes}"
        return text if self._monitor.pays else text + ", prefetch paused"
