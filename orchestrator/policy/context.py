"""Context-aware placement: every expert in memory, in a precision by what the prompt used (the
near-data paper, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_tools.units import format_size
from orchestrator.errors import BudgetError, PolicyError
from orchestrator.events import DecisionBuffer, Phase, RouteEvent, StepReport, StoreView
from orchestrator.policy.base import (
    Callback,
    ModelShape,
    Policy,
    Rules,
    SlotPlan,
    TierOffer,
    Transition,
)
from orchestrator.policy.dynaexq import DynaExqSettings
from orchestrator.policy.placement import (
    IMPORTANCE,
    PlacementSettings,
    bit_budget,
    importance,
    nominal_bits,
    nominal_losses,
    place,
    shares,
)
from orchestrator.policy.prefix_split import MAX_WIDTHS, prefix_split
from orchestrator.policy.tier_pools import TierPools
from orchestrator.policy.versions import Background
from orchestrator.settings import again, setting


@dataclass(frozen=True)
class ContextSettings(PlacementSettings, Background):
    """What a user can tune."""

    hot_experts: int | None = again(DynaExqSettings, "hot_experts")
    near_tiers: str | None = setting(
        None,
        "Precisions of the experts that are not hot, as q4_k,q2_k.",
        metavar="LIST",
        shown="all below the best one",
    )


# How many tokens the use that earlier runs learned counts as, beside that of this run.
_LEARNED_TOKENS = 1024


class Context(Policy):
    """The K most important experts of each layer in tier 0, the others in the near tiers, all of
    them in memory, by what the prompt of the sequence used.

    In prefill it is asked at each layer, and sums P, how often each expert is used, and W, its
    routing weights; the last layer computes one token of a prompt, so that the look-ahead of the
    layer before stands for it, which sees all tokens. An answer's tokens count in P alone. Behind a
    prompt `importance` and `place` give each expert its tier, and it moves there in the background,
    at step boundaries: down before up, the most important one first. No token waits.
    Sequences that are in memory together add up; when a new one starts alone, sums begin anew, and
    what they were becomes part of the profile.

    A pool of slots holds one tier, so that a layer has the same number of experts in each near tier
    for every sequence: those of the prefix split for like experts whose importance falls as 1/rank
    (`near_weights` importance) or is alike (plain). Each of two near tiers has as many as the
    budget of bits says in any case; what changes by sequence is which experts they are.
    """

    name = "context"
    summary = (
        "Every expert is in memory: in the best precision those that the prompt used most, the "
        "others in lower ones. They are placed once per prompt, in the background, and no token "
        "waits for it."
    )
    Settings = ContextSettings
    least_tiers = 2
    reason = "places every expert by the prompt"
    keeps = "several precisions"
    callback = Callback.PREFILL
    counts = True
    follows_tiers = True
    learns = True
    settings: ContextSettings

    def __init__(
        self,
        shape: ModelShape,
        settings: ContextSettings | None = None,
        rules: Rules | None = None,
    ) -> None:
        """Raises PolicyError where the model has no second precision in use, and for near tiers
        that it lacks or that are too many."""
        super().__init__(shape, settings, rules)
        self._near = self._near_tiers()
        self._bits = [nominal_bits(shape.tiers[tier]) for tier in self._near]
        size = shape.n_layers, shape.n_expert
        self.default_tier = len(shape.tiers) - 1
        self.updates = 0
        self._n_hot = 0
        self._near_counts: tuple[int, ...] = ()
        self._pools: TierPools | None = None
        self._learned: np.ndarray = np.zeros(size)
        self._past: np.ndarray = np.zeros(size)  # use in sequences that are over
        self._use: np.ndarray = np.zeros(size)  # P
        self._gates: np.ndarray = np.zeros(size)  # W
        self._step = -1
        self._predicted = False  # the last layer was counted by the look-ahead of the one before
        self._step_use: np.ndarray = np.zeros(size)
        self._step_gates: np.ndarray = np.zeros(size)
        self._alive: set[int] = set()
        self._placed = True  # no prompt was read since
        self._wanted: np.ndarray | None = None
        self._scores: np.ndarray = np.zeros(size)
        self._moved = 0

    def _near_tiers(self) -> list[int]:
        """Tiers in use that experts may have which are not hot, best first, one of each width."""
        names = list(self.shape.tiers[1:])
        asked = self.settings.near_tiers
        chosen = names if asked is None else [each.strip().lower() for each in asked.split(",")]
        unknown = [each for each in chosen if each not in names]
        if unknown:
            raise PolicyError(
                f"--near-tiers: {unknown[0]} is not below {self.shape.tiers[0]} in the file, which "
                f"holds {', '.join(names)} there"
            )
        by_bits = {
            nominal_bits(each): 1 + names.index(each) for each in reversed(names) if each in chosen
        }
        if len(by_bits) > MAX_WIDTHS:
            raise PolicyError(f"--near-tiers: at most {MAX_WIDTHS} widths, not {len(by_bits)}")
        return [by_bits[bits] for bits in sorted(by_bits, reverse=True)]

    @classmethod
    def high_tier(cls, offer: TierOffer) -> int:
        """The best one of the file."""
        return 0

    @property
    def n_ahead(self) -> int:
        """One, for the last layer's part of a prompt."""
        return 1

    @property
    def all_resident(self) -> bool:
        return True

    @property
    def transition_rate(self) -> int:
        return self.settings.transition_rate

    def plan(self, budget_bytes: int) -> SlotPlan:
        """Every expert near, and K of each layer in the best tier instead: as many as fit, or
        hot_experts of them. Raises BudgetError."""
        n, asked = self.shape.n_expert, self.settings.hot_experts
        most = n if asked is None else min(n, asked)
        for n_hot in range(most, (1 if asked is None else most) - 1, -1):
            counts = self._counts_of(n - n_hot)
            pools = self._pools_of(n_hot, counts)
            if pools.total_bytes <= budget_bytes:
                self._n_hot, self._near_counts, self._pools = n_hot, counts, pools
                return pools.plan()
        raise BudgetError(
            f"{format_size(budget_bytes)} are too little for every expert in one precision: it "
            f"needs {pools.total_bytes} bytes",
            pools.total_bytes,
        )

    def _counts_of(self, n_cold: int) -> tuple[int, ...]:
        """How many experts of a layer get each near tier. Raises PolicyError where the least bits
        are more than near_bits."""
        settings = self.settings
        if settings.near_bits < self._bits[-1]:
            name = self.shape.tiers[self._near[-1]]
            raise PolicyError(
                f"--near-bits {settings.near_bits:g} is less than {name} has: name a lower tier, "
                f"or ask for {self._bits[-1]} or more"
            )
        losses = nominal_losses(self._bits, 1, n_cold)[0]
        weights = 1 / np.arange(1.0, n_cold + 1) if settings.near_weights == IMPORTANCE else None
        return prefix_split(losses, self._bits, bit_budget(n_cold, settings), weights)

    def _pools_of(self, n_hot: int, near: Sequence[int]) -> TierPools:
        counts = [0] * len(self.shape.tiers)
        counts[0] = n_hot
        for tier, n in zip(self._near, near, strict=True):
            counts[tier] = n
        return TierPools(self.shape, counts)

    @property
    def fresh(self) -> bool:
        return self.updates == 0 and not bool(self._use.any())

    @property
    def hotness(self) -> np.ndarray:
        """The share of tokens that use each expert, of earlier runs and of this one."""
        used = self._past + self._use
        if not used.any():
            learned: np.ndarray = self._learned.copy()
            return learned
        k = self.shape.n_expert_used
        before = shares(self._learned, np.zeros_like(used)) * k * _LEARNED_TOKENS
        frequency: np.ndarray = shares(before + used) * k
        return frequency

    def set_hotness(self, scores: np.ndarray) -> None:
        self._learned = np.array(scores, np.float64).reshape(self._learned.shape)

    def start(self) -> list[Transition]:
        """Every expert where the profile alone would have it."""
        wanted = self._place()
        return [
            (layer, expert, int(wanted[layer, expert]))
            for layer, expert in np.ndindex(wanted.shape)
        ]

    def _place(self) -> np.ndarray:
        """The tier of each expert, uint8 [n_layers, n_expert], by what is known now."""
        shape = self.shape
        before = shares(self._learned, np.zeros_like(self._use)) * _LEARNED_TOKENS
        usual = before * shape.n_expert_used + self._past
        settings = self.settings
        self._scores = importance(self._use, self._gates, usual, settings, shape.n_expert_used)
        losses = nominal_losses(self._bits, *self._scores.shape)
        placed = place(self._scores, self._n_hot, losses, self._bits, settings, self._near_counts)
        tiers: np.ndarray = np.array([0, *self._near], np.uint8)[placed]
        return tiers

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Experts as they are in memory; counts what the layer's tokens use."""
        layer, last = event.layer, self.shape.n_layers - 1
        np.minimum(view.resident_array[layer], self.default_tier, out=out.tier_array)
        if event.step != self._step:
            # What a failed step counted is dropped.
            self._step, self._predicted = event.step, False
            self._step_use[:] = self._step_gates[:] = 0
        if not (layer == last and self._predicted):
            self._count(layer, event.ids_array, event.weights_array)
        if layer == last - 1 and event.n_ahead:
            self._predicted = True
            self._count(last, event.ahead_ids_array[0], event.ahead_array[0])

    def _count(self, layer: int, ids: np.ndarray, gates: np.ndarray) -> None:
        n, ids = self.shape.n_expert, ids.ravel()
        self._step_use[layer] += np.bincount(ids, minlength=n)
        self._step_gates[layer] += np.bincount(ids, gates.ravel(), n)

    def step_done(self, report: StepReport) -> Sequence[Transition]:
        """Counts the step, and returns the moves that have slots now. Experts are placed after the
        first token of an answer: a prompt that comes in parts has an end in each of them."""
        if report.counts is None or report.resident is None or report.target is None:
            return ()
        self._alive.difference_update(report.ends)
        if report.starts and not self._alive:
            self._past += self._use
            self._use[:] = self._gates[:] = 0
        self._alive.update(report.starts)
        if report.phase == Phase.PREFILL:
            self._use += self._step_use
            self._gates += self._step_gates
            self._step_use[:] = self._step_gates[:] = 0
            self._placed = False
        else:
            self._use += report.counts
            if not self._placed:
                self._wanted, self._placed = self._place(), True
                self.updates += 1
        return self._moves(report.resident, report.target)

    def _moves(self, resident: np.ndarray, target: np.ndarray) -> list[Transition]:
        """Experts at rest that are not where they should be, as far as slots are free: those to
        lower tiers first, since they free the better ones, then the most important ones."""
        wanted, pools = self._wanted, self._pools
        if wanted is None or pools is None:
            return []
        layers, experts = np.nonzero((resident == target) & (resident != wanted))
        if not len(layers):
            if (target == wanted).all():
                self._wanted = None
            return []
        tiers = wanted[layers, experts]
        up = tiers < resident[layers, experts]
        order = np.lexsort((-self._scores[layers, experts], up))
        tracker = pools.track(resident, target)
        moves = [
            (int(layers[at]), int(experts[at]), int(tiers[at]))
            for at in order
            if tracker.try_reserve(int(layers[at]), int(tiers[at]))
        ]
        self._moved += len(moves)
        return moves

    def report(self) -> Mapping[str, Any]:
        """Since the engine started: placements, and experts that were asked to move for them; hot
        and near experts of a layer by tier."""
        names = [self.shape.tiers[tier] for tier in self._near]
        return {
            "placements": self.updates,
            "moves": self._moved,
            "hot_per_layer": self._n_hot,
            "near_per_layer": dict(zip(names, self._near_counts, strict=True)),
        }

    def describe(self) -> str:
        near = (
            f"{n} {self.shape.tiers[tier]}"
            for tier, n in zip(self._near, self._near_counts, strict=True)
            if n
        )
        return (
            f"context, of {self.shape.n_expert} experts a layer {self._n_hot} hot in "
            f"{self.shape.tiers[0]}, {', '.join(near) or 'none near'}"
        )
