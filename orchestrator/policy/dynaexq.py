"""DynaExq: every expert resident in exactly one version, hot ones high."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_tools.units import format_size
from orchestrator.errors import PolicyError
from orchestrator.events import Phase, StepReport
from orchestrator.policy.base import ModelShape, Policy, Rules, SlotPlan, TierOffer, Transition
from orchestrator.policy.versions import (
    HIGH,
    LOW,
    Background,
    ExpertState,
    VersionPools,
    cache_plan,
    expert_states,
    least_resident_bytes,
    resident_plan,
)
from orchestrator.settings import setting

UNDER_WAY = frozenset(map(int, (ExpertState.PROMOTING, ExpertState.DEMOTING)))

# Swaps that wait for a slot between two updates; each update makes the list anew.
MAX_QUEUE = 64


@dataclass(slots=True)
class Swap:
    """One change of a layer's hot set: `down` is demoted, its high slot goes to `up`. down None:
    a high slot is free already. promoting: the second half has been asked for."""

    layer: int
    up: int
    down: int | None
    promoting: bool = False

    @property
    def moving(self) -> int:
        """The expert that its present half moves."""
        return self.up if self.promoting or self.down is None else self.down


@dataclass(frozen=True)
class DynaExqSettings(Background):
    """What a user can tune."""

    update_steps: int = setting(
        32,
        "Decode steps between two updates of the hot sets, 0 for none; a prompt's part ends an "
        "interval too.",
        within=(0, 2**24),
        hidden=True,
    )
    hotness_decay: float = setting(
        0.8, "The alpha of the hotness's moving average.", within=(0.0, 1.0), hidden=True
    )
    hysteresis: float = setting(
        0.25,
        "By how many mean scores of its layer an expert has to be hotter than the one that it "
        "replaces.",
        within=(0.0, 1e6),
        hidden=True,
    )
    rank_slack: int = setting(
        0,
        "How many ranks below the hot set an expert may fall before it is replaced.",
        within=(0, 65535),
        hidden=True,
    )
    hot_experts: int | None = setting(
        None,
        "The most experts of a layer that may be high.",
        within=(0, 65535),
        shown="what the budget has room for",
        hidden=True,
    )


class DynaExq(Policy):
    """n_l experts of each layer in tier 0, the others in tier 1, all of them in memory.

    At each update S <- alpha S + (1 - alpha) count (3.5); an expert outside the hot set replaces
    one inside where it is among the n_l hottest, the other is not among the n_l + rank_slack
    hottest, and S differs by more than hysteresis times the layer's mean S: both forms of
    hysteresis, the margin in a unit that does not depend on how many tokens an interval had. The
    slack is 0 unless asked for: it keeps an expert that nobody uses any more, as long as the
    others outside are used even less.

    An interval is update_steps decode steps; a prompt's part ends it too, since it tells as much
    as many of them. A policy has no clock, so an interval in time, as in the paper, would have to
    come from outside. The last layer sees only tokens with an output: a prompt says little about
    it, and as S is compared within a layer only, nothing else changes.

    Where the low copies alone do not fit, they are cached instead (`caching`): per layer, the
    least recently used goes first, and tokens wait for what is missing.
    """

    name = "dynaexq"
    summary = (
        "Every expert is in memory, in one of two precisions: high the ones that are used most, as "
        "many as the budget has room for, and low the others. They are exchanged in the "
        "background, and no token waits for it."
    )
    Settings = DynaExqSettings
    least_tiers = most_tiers = 2
    reason = "fills the budget with high copies"
    counts = True
    follows_tiers = True
    learns = True
    default_tier = LOW
    settings: DynaExqSettings

    def __init__(
        self,
        shape: ModelShape,
        settings: DynaExqSettings | None = None,
        rules: Rules | None = None,
    ) -> None:
        """Raises PolicyError where the model has no second precision in use."""
        if len(shape.tiers) < self.least_tiers or (rules is not None and rules.skip):
            raise PolicyError(
                "the policy dynaexq keeps every expert in one of two precisions: give --low FILE "
                "or a file packed with several tiers, and not --low-tier skip"
            )
        super().__init__(shape, settings, rules)
        self._pools: VersionPools | None = None
        self.capacity = np.zeros(shape.n_layers, np.int64)  # n_l
        self.caching = False
        self._scores: np.ndarray = np.zeros((shape.n_layers, shape.n_expert))
        self._counts = np.zeros((shape.n_layers, shape.n_expert), np.int64)
        self._steps = 0
        self._queue: deque[Swap] = deque()
        self._active: list[Swap] = []
        self.updates = 0
        self._done = {"promotions": 0, "demotions": 0, "given_up": 0}

    @classmethod
    def high_tier(cls, offer: TierOffer) -> int:
        """The tier above the low one that was named, else above the best one whose copies all
        fit; else above the lowest."""
        if len(offer.names) < 2:
            return 0
        if offer.low is not None:
            return max(0, offer.low - 1)
        above = range(len(offer.names) - 1)
        fits = (
            at
            for at in above
            if resident_plan(offer.shape(at, at + 1), offer.budget_bytes, None) is not None
        )
        return next(fits, above[-1])

    @property
    def all_resident(self) -> bool:
        return not self.caching

    @property
    def transition_rate(self) -> int:
        return self.settings.transition_rate

    def plan(self, budget_bytes: int) -> SlotPlan:
        """Every expert low, and n_l = spare bytes / (high - low) of each layer high instead;
        where that does not fit, slots for some low copies of each layer. Raises BudgetError."""
        resident = resident_plan(self.shape, budget_bytes, self.settings.hot_experts)
        if resident is None:
            slots, kept = cache_plan(self.shape, budget_bytes)
            self.caching, self.capacity, self._pools = True, np.array(kept), None
            return slots
        slots, self._pools = resident
        self.caching, self.capacity = False, np.array(self._pools.capacity)
        return slots

    @property
    def fresh(self) -> bool:
        """Whether no step was reported yet."""
        return self.updates == self._steps == 0

    @property
    def hotness(self) -> np.ndarray:
        """S, float64 [n_layers, n_expert], a copy; zeros before the first update."""
        scores: np.ndarray = self._scores.copy()
        return scores

    def set_hotness(self, scores: np.ndarray) -> None:
        """Starts from the S of an earlier run, [n_layers, n_expert]."""
        self._scores = np.array(scores, np.float64).reshape(self._scores.shape)

    def start(self) -> list[Transition]:
        """What to load before the first token: each expert in one version, the n_l hottest high
        (the first ones without a hotness); while caching, as many low copies as fit."""
        order = np.argsort(-self._scores, axis=1, kind="stable")
        wanted = []
        for layer, n in enumerate(self.capacity.tolist()):
            hot, cold = order[layer, :n].tolist(), order[layer, n:].tolist()
            if self.caching:
                wanted += [(layer, expert, LOW) for expert in hot]
            else:
                wanted += [(layer, expert, HIGH) for expert in hot]
                wanted += [(layer, expert, LOW) for expert in cold]
        return wanted

    def step_done(self, report: StepReport) -> Sequence[Transition]:
        """Learns from the step's counts; returns the transitions to start now."""
        if report.counts is None or report.resident is None or report.target is None:
            return ()
        states = expert_states(report.resident, report.target)
        self._counts += report.counts
        self._steps += 1
        interval = self.settings.update_steps
        if interval and (report.phase == Phase.PREFILL or self._steps >= interval):
            self._update(states)
        if not (self._queue or self._active) or self._pools is None:
            return ()
        return self._advance(states, self._pools)

    def _update(self, states: np.ndarray) -> None:
        """The end of an interval: S, and the list of swaps that it asks for."""
        alpha = self.settings.hotness_decay
        self._scores = alpha * self._scores + (1 - alpha) * self._counts
        self._counts[:] = 0
        self._steps = 0
        self.updates += 1
        if self.caching:
            return
        hot = (states == ExpertState.HI) | (states == ExpertState.PROMOTING)
        busy = np.zeros_like(hot)
        for swap in self._active:
            hot[swap.layer, swap.up] = busy[swap.layer, swap.up] = True
            if swap.down is not None:
                hot[swap.layer, swap.down] = False
                busy[swap.layer, swap.down] = True
        self._queue = deque(self._swaps(hot, busy))

    def _swaps(self, hot: np.ndarray, busy: np.ndarray) -> list[Swap]:
        """The changes of the hot sets: into free places, then the largest gain first; MAX_QUEUE
        of them. hot and busy bool [L, E]: in the hot set when all that is under way is done;
        under way."""
        scores, n = self._scores, self.capacity[:, None]
        settings = self.settings
        unit = np.maximum(scores.mean(axis=1, keepdims=True), np.finfo(float).tiny)
        order = np.argsort(-scores, axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(order.shape[1])[None, :], axis=1)

        rising = np.where(hot | busy | (rank >= n), -np.inf, scores)
        falling = np.where(~hot | busy | (rank < n + settings.rank_slack), np.inf, scores)
        up = np.argsort(-rising, axis=1, kind="stable")
        down = np.argsort(falling, axis=1, kind="stable")
        free = self.capacity - hot.sum(axis=1)
        swaps = []
        for layer in np.flatnonzero(free > 0).tolist():
            places = up[layer, : free[layer]].tolist()
            swaps += [Swap(layer, expert, None) for expert in places if rising[layer, expert] > 0]
            up[layer] = np.roll(up[layer], -int(free[layer]))
        best = np.take_along_axis(rising, up, axis=1)
        worst = np.take_along_axis(falling, down, axis=1)
        possible = np.isfinite(best) & np.isfinite(worst)
        gain = np.where(possible, best, 0.0) - np.where(possible, worst, 0.0)
        gain /= unit
        layers, places = np.nonzero(possible & (gain > settings.hysteresis))
        largest = np.argsort(-gain[layers, places], kind="stable")[:MAX_QUEUE]
        for layer, place in zip(layers[largest].tolist(), places[largest].tolist(), strict=True):
            swaps.append(Swap(layer, int(up[layer, place]), int(down[layer, place])))
        return swaps[:MAX_QUEUE]

    def _advance(self, states: np.ndarray, pools: VersionPools) -> list[Transition]:
        """The next half of each swap under way, then new ones as far as slots are free:
        demotions come first, since they free the high slots."""
        if len(self._active) >= pools.most_swaps and all(
            states[swap.layer, swap.moving] in UNDER_WAY for swap in self._active
        ):
            return []
        tracker = pools.track(states)
        moves: list[Transition] = []
        self._active = [swap for swap in self._active if self._go_on(swap, states, tracker, moves)]
        while self._queue:
            swap = self._queue[0]
            layer, down = swap.layer, swap.down
            if states[layer, swap.up] != ExpertState.LO or (
                down is not None and states[layer, down] != ExpertState.HI
            ):
                self._queue.popleft()
                continue
            if not tracker.try_reserve(layer, HIGH if down is None else LOW):
                break
            moves.append((layer, swap.up, HIGH) if down is None else (layer, down, LOW))
            swap.promoting = down is None
            self._active.append(self._queue.popleft())
        return moves

    def _go_on(
        self,
        swap: Swap,
        states: np.ndarray,
        tracker: VersionPools.Tracker,
        moves: list[Transition],
    ) -> bool:
        """False when the swap is over: done, or given up because the store could not."""
        state = states[swap.layer, swap.moving]
        if state in UNDER_WAY:
            return True
        if swap.promoting:
            self._done["promotions" if state == ExpertState.HI else "given_up"] += 1
            return False
        if state != ExpertState.LO:
            self._done["given_up"] += 1
            return False
        if tracker.try_reserve(swap.layer, HIGH):
            self._done["demotions"] += 1
            moves.append((swap.layer, swap.up, HIGH))
            swap.promoting = True
        return True

    def report(self) -> Mapping[str, Any]:
        """Since the engine started: updates of the hotness, experts promoted and demoted, swaps
        given up and waiting; high_per_layer is n_l, the fewest and the most."""
        high = [0, 0] if self.caching else [int(self.capacity.min()), int(self.capacity.max())]
        waiting = len(self._queue) + len(self._active)
        return {
            "high_per_layer": high,
            "updates": self.updates,
            **self._done,
            "waiting": waiting,
        }

    def describe(self) -> str:
        high, low = self.shape.tiers[:2]
        fewest, most = int(self.capacity.min()), int(self.capacity.max())
        n = str(fewest) if fewest == most else f"{fewest} to {most}"
        of = f"{n} of {self.shape.n_expert} experts a layer"
        if self.caching:
            needed = format_size(least_resident_bytes(self.shape))
            return f"dynaexq {low}, caching {of}: low copies of all do not fit, they take {needed}"
        return f"dynaexq {high}/{low}, {of} high"
