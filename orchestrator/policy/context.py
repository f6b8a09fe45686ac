"""Context-aware placement: every expert in memory, in a precision by what the prompt used (the
near-data paper, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.allocation.placement import (
    IMPORTANCE,
    PlacementSettings,
    bit_budget,
    importance,
    near_tiers,
    place,
    prefix_split,
)
from orchestrator.allocation.pools import (
    Places,
    TierPools,
    every_expert_to,
    nominal_bits,
    nominal_losses,
    shares,
    too_little,
)
from orchestrator.allocation.settings import Background, Shared
from orchestrator.allocation.slots import SlotPlan, Transition
from orchestrator.errors import PolicyError
from orchestrator.events import (
    DecisionBuffer,
    Phase,
    RouteEvent,
    StepReport,
    StoreView,
    served,
)
from orchestrator.policy.base import (
    KeepsSequences,
    Learns,
    Policy,
    Precisions,
    WaitsBeforeAnswer,
    Wants,
    WeighsLosses,
)
from orchestrator.settings import again, setting

_MAGIC = b"moe-edge use 1\n"


class SequenceUse:
    """Sums of the sequences that are in memory; what those that are over used is in `past`, float64
    [n_layers, n_expert].

    A token of a prompt counts for its own sequence. What a decode step used is known for all of its
    tokens together, so that it counts in equal parts for all sequences in memory: their sum is
    exact, and so is a sequence that is alone. Answers have no gate sums.
    """

    def __init__(self, n_layers: int, n_expert: int) -> None:
        self._size = n_layers, n_expert
        self.past: np.ndarray = np.zeros(self._size)
        # Of each sequence counts P and gates W, float64 [2, n_layers, n_expert].
        self._of: dict[int, np.ndarray] = {}
        self._step = -1
        self._in_step: dict[int, np.ndarray] = {}
        self._given: set[int] = set()  # restored since the last step

    def _none(self) -> np.ndarray:
        return np.zeros((2, *self._size))

    @property
    def sums(self) -> np.ndarray:
        """P and W of all sequences in memory, float64 [2, n_layers, n_expert]."""
        total: np.ndarray = np.sum([self._none(), *self._of.values()], axis=0)
        return total

    def count(
        self, step: int, layer: int, ids: np.ndarray, gates: np.ndarray, sequences: np.ndarray
    ) -> None:
        """Tokens of a step: the experts ids and their weights gates [T, k], and the sequence of
        each token [T]. What an earlier step counted that failed is dropped."""
        if step != self._step:
            self._step = step
            self._in_step.clear()
        for sequence in sorted(set(sequences.tolist())):
            mine = sequences == sequence
            use = self._in_step.setdefault(sequence, self._none())
            chosen, n = ids[mine].ravel(), self._size[1]
            use[0, layer] += np.bincount(chosen, minlength=n)
            use[1, layer] += np.bincount(chosen, gates[mine].ravel(), n)

    def step_done(self, report: StepReport) -> None:
        """A step that succeeded: sequences end and begin, and what it used is added."""
        for sequence in {*report.ends, *report.starts} - self._given:
            if (over := self._of.pop(sequence, None)) is not None:
                self.past += over[0]
        self._given.clear()
        for sequence in report.starts:
            self._of.setdefault(sequence, self._none())
        if report.phase == Phase.PREFILL:
            for sequence, use in self._in_step.items():
                self._of[sequence] = self._of.get(sequence, 0) + use
            self._in_step.clear()
        elif self._of and report.counts is not None:
            for use in self._of.values():
                use[0] += report.counts / len(self._of)
        elif report.counts is not None:
            self.past += report.counts

    def save(self, sequence: int) -> bytes | None:
        """What one sequence used so far; None for one that is not in memory."""
        use = self._of.get(sequence)
        return None if use is None else _MAGIC + use.astype("<f8").tobytes()

    def restore(self, sequence: int, state: bytes) -> None:
        """A sequence goes on from where another one was saved, in the place of what it used itself.
        Raises PolicyError for what save did not write for this model."""
        body, none = state[len(_MAGIC) :], self._none()
        written = state.startswith(_MAGIC) and len(body) == 8 * none.size
        use = np.frombuffer(body if written else b"", "<f8")
        if not written or not (np.isfinite(use) & (use >= 0)).all():
            raise PolicyError("the state of a sequence is damaged, or of another model")
        self._of[sequence] = use.reshape(none.shape).astype(np.float64)
        self._given.add(sequence)


OWN, SHARED = "own", "shared"
ASYNC, WAIT = "async", "wait"
AUTO, DEVICE, HOST = "auto", "device", "host"


@dataclass(frozen=True)
class ContextSettings(PlacementSettings, Background):
    """What a user can tune."""

    hot_experts: int | None = again(Shared, "hot_experts")
    near_tiers: str | None = setting(
        None,
        "Precisions of the experts that are not hot, as q4_k,q2_k.",
        metavar="LIST",
        shown="all below the best one",
    )
    near_slots: str = setting(
        OWN,
        "What a slot of theirs holds: one precision (own), so many of each in every layer, or any "
        "of them (shared), so that each prompt has its own bits, in slots of the largest.",
        choices=(OWN, SHARED),
    )
    near_place: str = setting(
        AUTO,
        "Where a GPU's near experts are: in its memory (device); in the host's, whose threads "
        "compute them beside the GPU and nothing of them is copied (host); auto: there only where "
        "the GPU has no room for all.",
        choices=(AUTO, DEVICE, HOST),
    )
    losses: Path | None = again(Shared, "losses")
    placement: str = setting(
        ASYNC,
        "Experts move beside the answer (async), or before its first token, which waits (wait).",
        choices=(ASYNC, WAIT),
    )

    @classmethod
    def without_effect(cls, asked: Mapping[str, Any]) -> str | None:
        if asked.get("losses") is None or asked.get("near_slots") == SHARED:
            return None
        return (
            f"--losses has no effect with --near-slots {OWN}, where each lower precision has the "
            f"same number of experts in every layer, whatever they lose: leave it out, or give "
            f"--near-slots {SHARED}"
        )


# What earlier runs learned counts as the use of so many tokens of this run.
_LEARNED_TOKENS = 1024


class ContextAware(Policy, Learns, WeighsLosses, KeepsSequences, WaitsBeforeAnswer):
    """The K most important experts of each layer in tier 0, the others in the near tiers, all of
    them in memory, by what the conversation used.

    In prefill it is asked at each layer, and sums P, how often each expert is used, and W, its
    routing weights; the last layer computes one token of a prompt, so that the look-ahead of the
    layer before stands for it, which sees all tokens. An answer's tokens count in P alone. Behind a
    prompt `importance` and `place` give each expert its tier, and it moves there in the background,
    at step boundaries: down before up, the most important one first. No token waits, but the first
    one of an answer where that is asked for. `SequenceUse` says which sequences add up. What those
    that are over used becomes part of the profile.

    Where near tiers share slots, the prefix split of section 4.2 gives each layer as many experts
    of each near tier as it finds best for the sequence. Where each has its own, the counts are
    fixed: those of the split for like experts whose importance falls as 1/rank (`near_weights`
    importance) or is alike (plain). Of two near tiers each has as many as the budget of bits says
    in any case, so that slots of their own are as good and smaller.
    """

    name = "context"
    summary = (
        "Every expert is in memory: in the best precision those that the conversation used most, "
        "the others in lower ones. They are placed once per prompt, in the background, and no "
        "token waits for it."
    )
    Settings = ContextSettings
    reason = "places every expert by the prompt"
    precisions = Precisions(least=2, keeps="several precisions")
    # The last layer's part of a prompt is seen by looking one layer ahead.
    wants = Wants((Phase.PREFILL,), n_ahead=1, counts=True, states=True, all_resident=True)
    settings: ContextSettings

    def _set_up(self) -> None:
        """Raises PolicyError where the model has no second precision in use, for near tiers that it
        lacks or that are too many, and for shared slots on a device."""
        shape = self.shape
        self._near = near_tiers(shape.tiers, self.settings.near_tiers)
        self._names = [shape.tiers[tier] for tier in self._near]
        self._bits = [nominal_bits(name) for name in self._names]
        # Bits a weight of each near tier as stored; empty where they are not known.
        self._stored = [shape.bits[tier] for tier in self._near] if shape.bits else []
        self._shares = self.settings.near_slots == SHARED and len(self._near) > 1
        # Tokens wait, too, where what is computed must not depend on what is in memory by now.
        self._waits = self.rules.exact or self.settings.placement == WAIT
        self._on_host = False  # the near tiers of a GPU; after plan
        if self._shares and not (shape.shares_slots or self._places[-1]):
            raise PolicyError(
                f"--near-slots {SHARED} needs slots in host memory: leave it out, or give "
                f"--near-place {HOST}"
            )
        size = shape.n_layers, shape.n_expert
        rate = self.settings.transition_rate or 0
        self.wants = replace(
            self.wants,
            default_tier=len(shape.tiers) - 1,
            transition_rate=0 if self._waits else rate,  # none where a token waits for them
        )
        self.use = SequenceUse(*size)
        self._n_hot = 0
        self._near_counts: tuple[int, ...] = ()
        self._pools: TierPools | None = None
        self._learned: np.ndarray = np.zeros(size)
        self._predicted = -1  # the step of which look-ahead has counted the last layer
        self._placed = True  # whether no prompt was read since the latest placement
        self._wanted: np.ndarray | None = None
        self._latest: np.ndarray | None = None  # wanted by the latest placement
        self._scores: np.ndarray = np.zeros(size)
        self._moved = self._steps = 0

    @property
    def losses_matter(self) -> bool:
        """Not where the counts of each tier are fixed: they leave nothing to choose by losses."""
        return self._shares

    @property
    def _places(self) -> list[bool]:
        """Whether near tiers are on the host of a GPU: what is tried, in turn."""
        asked, shape = self.settings.near_place, self.shape
        if not shape.host_slots or asked == DEVICE:
            return [False]
        return [True] if asked == HOST or self._shares else [False, True]

    def plan(self, budget_bytes: int) -> SlotPlan:
        """Every expert near, and K of each layer in the best tier instead: as many as fit, or
        hot_experts of them. Raises BudgetError."""
        n, asked = self.shape.n_expert, self.settings.hot_experts
        most = n if asked is None else min(n, asked)
        for on_host in self._places:
            for n_hot in range(most, (1 if asked is None else most) - 1, -1):
                counts = self._like_counts(n - n_hot)
                pools = self._pools_of(n_hot, counts, on_host)
                slots = pools.plan()
                if slots.total_bytes <= budget_bytes:
                    self._n_hot, self._near_counts, self._pools = n_hot, counts, pools
                    self._on_host = on_host
                    return slots
        raise too_little(budget_bytes, slots.total_bytes)

    def _like_counts(self, n_cold: int) -> tuple[int, ...]:
        """How many of n_cold experts of a layer get each near tier where all are alike. Raises
        PolicyError where the least bits are more than near_bits."""
        asked, bits = self.settings, self._bits
        if asked.near_bits < bits[-1]:
            raise PolicyError(
                f"--near-bits {asked.near_bits:g} is less than {self._names[-1]} has: name a lower "
                f"tier, or ask for {bits[-1]} or more"
            )
        losses = nominal_losses(bits, 1, n_cold)[0]
        weights = 1 / np.arange(1.0, n_cold + 1) if asked.near_weights == IMPORTANCE else None
        return prefix_split(losses, bits, bit_budget(n_cold, asked), weights)

    def _pools_of(self, n_hot: int, counts: Sequence[int], on_host: bool) -> TierPools:
        """Slots for n_hot experts of each layer in tier 0, and for counts of them in the near
        tiers. on_host: the near ones are in the host's memory behind a GPU, with its threads
        computing them."""
        unused = set(range(1, len(self.shape.tiers))) - set(self._near)
        near: list[tuple[tuple[int, ...], int]] = [((tier,), 0) for tier in sorted(unused)]
        if self._shares:
            near.append((tuple(self._near), sum(counts)))
        else:
            near += [((tier,), n) for tier, n in zip(self._near, counts, strict=True)]
        shape, layers = self.shape, self.shape.n_layers
        places = [Places(tiers, [n] * layers, on_host=on_host) for tiers, n in near]
        if on_host:
            pairs = zip(shape.slots, shape.host_slots, strict=True)
            shape = replace(shape, slots=tuple((there[0], *here[1:]) for there, here in pairs))
        return TierPools(shape, [Places((0,), [n_hot] * layers, reserve=False), *places])

    @property
    def fresh(self) -> bool:
        return self.updates == 0 and not bool(self.use.sums.any())

    @property
    def hotness(self) -> np.ndarray:
        """The share of tokens that use each expert, of earlier runs and of this one."""
        used = self.use.past + self.use.sums[0]
        if not used.any():
            return np.array(self._learned)
        frequency: np.ndarray = shares(self._before() + used) * self.shape.n_expert_used
        return frequency

    def _before(self) -> np.ndarray:
        """What earlier runs learned, as uses of this one."""
        k = self.shape.n_expert_used
        return shares(self._learned, np.zeros_like(self._learned)) * k * _LEARNED_TOKENS

    def set_hotness(self, scores: np.ndarray) -> None:
        self._learned = np.array(scores, np.float64).reshape(self._learned.shape)

    def save_sequence(self, sequence: int) -> bytes | None:
        return self.use.save(sequence)

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """It is placed anew behind what follows, as behind a prompt."""
        self.use.restore(sequence, state)
        self._placed = False

    def start(self) -> list[Transition]:
        """Every expert where the profile alone would have it."""
        wanted = self._latest = self._place()
        return every_expert_to(wanted)

    def _place(self) -> np.ndarray:
        """The tier of each expert, uint8 [n_layers, n_expert], by what is known now."""
        use, settings, k = self.use, self.settings, self.shape.n_expert_used
        counts, gates = use.sums
        self._scores = importance(counts, gates, self._before() + use.past, settings, k)
        losses = nominal_losses(self._bits, *self._scores.shape)
        if self.losses is not None:
            losses = self.losses[..., self._near]
        most = None if self._shares else self._near_counts
        placed = place(self._scores, self._n_hot, losses, self._bits, settings, most)
        tiers: np.ndarray = np.array([0, *self._near], np.uint8)[placed]
        return tiers

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Experts as they are in memory; counts what the layer's tokens use."""
        step, layer, last = event.step, event.layer, self.shape.n_layers - 1
        out.tier_array[:] = served(self.wants.default_tier, view.resident_array[layer])
        of = event.sequences_array
        of_prompt = event.phases_array[:, None] == int(Phase.PREFILL)
        if layer < last or self._predicted != step:
            self.use.count(step, layer, event.ids_array, event.weights_array * of_prompt, of)
        if layer == last - 1 and event.n_ahead:
            self._predicted = step
            gates = event.ahead_array[0] * of_prompt
            self.use.count(step, last, event.ahead_ids_array[0], gates, of)

    def step_done(self, report: StepReport) -> Sequence[Transition]:
        """Counts the step, and returns the moves that have slots now. Experts are placed after the
        first token of an answer: a prompt that comes in parts has an end in each of them."""
        if report.counts is None or report.resident is None or report.target is None:
            return ()
        self.use.step_done(report)
        if report.phase == Phase.PREFILL:
            self._placed = False
        else:
            self._steps += self._wanted is not None
            self._place_anew()
        return self._moves(report.resident, report.target)

    def before_answer(
        self, resident: np.ndarray, target: np.ndarray
    ) -> Sequence[Transition] | None:
        if not self._waits:
            return None
        self._place_anew()
        return self._moves(resident, target)

    def _place_anew(self) -> None:
        """Behind a prompt, once."""
        if self._placed:
            return
        self._wanted = self._latest = self._place()
        self._placed = True
        self.updates += 1
        self._steps = 0

    def _moves(self, resident: np.ndarray, target: np.ndarray) -> list[Transition]:
        """What may move now towards the latest placement, the most important experts first."""
        wanted, pools = self._wanted, self._pools
        if wanted is None or pools is None:
            return []
        if (resident == wanted).all():
            self._wanted = None
            return []
        moves = pools.moves_to(wanted, resident, target, self._scores)
        self._moved += len(moves)
        return moves

    def report(self) -> Mapping[str, Any]:
        """Since the engine started: placements, and experts that were asked to move for them;
        decode steps that the latest one took; hot and near experts of a layer by tier, on average,
        and the near ones' bits, nominal and as stored."""
        latest, near = self._latest, [float(n) for n in self._near_counts]
        if latest is not None and self._shares:
            near = [float((latest == tier).sum() / len(latest)) for tier in self._near]
        found: dict[str, Any] = {
            "placements": self.updates,
            "moves": self._moved,
            "steps": self._steps,
            "hot_per_layer": self._n_hot,
            "near_per_layer": dict(zip(self._names, near, strict=True)),
        }
        if any(near):
            found["near_bits"] = float(np.average(self._bits, weights=near))
        if any(near) and self._stored:
            found["near_bits_stored"] = float(np.average(self._stored, weights=near))
        return found

    def describe(self) -> str:
        names = self._names
        if self._stored:
            names = [f"{a} ({b:.2f} bits)" for a, b in zip(names, self._stored, strict=True)]
        counts = zip(self._near_counts, names, strict=True)
        near = ", ".join(f"{n} {name}" for n, name in counts if n) or "none near"
        if self._shares:
            bits = f"{self.settings.near_bits:g} nominal bits"
            near = f"{sum(self._near_counts)} in {', '.join(names)}, {bits} on average"
        where = ", which the host computes" if self._on_host else ""
        return (
            f"context, of {self.shape.n_expert} experts a layer {self._n_hot} hot in "
            f"{self.shape.tiers[0]}, {near}{where}"
        )
