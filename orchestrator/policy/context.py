"""Context-aware placement (the near-data paper, section 4).

Every expert is resident, in a tier that depends on its use by the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
)
from orchestrator.allocation.settings import Background, Shared
from orchestrator.allocation.slots import ModelShape, Rules, Transition
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
    About,
    History,
    Learned,
    Placement,
    Policy,
    PolicyRequirements,
    Precisions,
)
from orchestrator.settings import inherit, setting

_MAGIC = b"moe-edge use 1\n"


class SequenceUse:
    """Counts how often the tokens of each sequence in the context use each expert.

    Each prompt token is counted for its own sequence, and its routing weights (gates) are added up
    as well. In decode steps, only the total of all tokens is known. Each sequence in the context
    gets an equal share of this total.

    `sums` has the counts of the sequences in the context. `past` has the counts of ended sequences,
    float64 [n_layers, n_expert].
    """

    def __init__(self, n_layers: int, n_expert: int) -> None:
        self._size = n_layers, n_expert
        self.past: np.ndarray = np.zeros(self._size)
        # Counts P and gate sums W of each sequence, float64 [2, n_layers, n_expert].
        self._of: dict[int, np.ndarray] = {}
        self._step = -1
        self._in_step: dict[int, np.ndarray] = {}
        self._given: set[int] = set()  # sequences that were restored since the last step

    def _none(self) -> np.ndarray:
        return np.zeros((2, *self._size))

    @property
    def sums(self) -> np.ndarray:
        """The use of each expert by all sequences in the context, float64 [2, n_layers, n_expert].

        The first entry has the number of uses, and the second entry has the sums of routing
        weights.
        """
        total: np.ndarray = np.sum([self._none(), *self._of.values()], axis=0)
        return total

    def count(
        self, step: int, layer: int, ids: np.ndarray, gates: np.ndarray, sequences: np.ndarray
    ) -> None:
        """Count which experts the tokens of a step use in one layer.

        The counts become part of a sequence's use when `step_done` reports that the step succeeded.
        Counts of an earlier step that failed are dropped.

        - ids, gates: the chosen experts and their routing weights, [T, k] for T tokens.
        - sequences: the sequence of each token, [T].
        """
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
        """Add the expert uses of a finished step to the counts of the sequences in the context.

        An expert use is the use of one expert by one token in one layer. Sequences that ended are
        handled first: their counts move to `past`, the counts of all ended sequences. The counts of
        new sequences start at 0.
        """
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
        """Return the expert use of one sequence as bytes, or None if the sequence is unknown.

        The bytes contain how often the sequence's tokens used each expert, and the sums of the
        routing weights.
        """
        use = self._of.get(sequence)
        return None if use is None else _MAGIC + use.astype("<f8").tobytes()

    def restore(self, sequence: int, state: bytes) -> None:
        """Replace one sequence's use of experts by the bytes that `save` returned.

        Raises PolicyError if the bytes are damaged or were saved for another model.
        """
        body, none = state[len(_MAGIC) :], self._none()
        written = state.startswith(_MAGIC) and len(body) == 8 * none.size
        use = np.frombuffer(body if written else b"", "<f8")
        if not written or not (np.isfinite(use) & (use >= 0)).all():
            raise PolicyError("the state of a sequence is damaged or belongs to another model")
        self._of[sequence] = use.reshape(none.shape).astype(np.float64)
        self._given.add(sequence)


OWN, SHARED = "own", "shared"
ASYNC, WAIT = "async", "wait"
AUTO, DEVICE, HOST = "auto", "device", "host"


@dataclass(frozen=True)
class ContextSettings(PlacementSettings, Background):
    """Settings of the policy `context`.

    The policy chooses the precision of each expert by how much the conversation uses the expert.
    """

    hot_experts: int | None = inherit(Shared, "hot_experts")
    near_tiers: str | None = setting(
        None,
        "Precisions, such as q4_k,q2_k, for the experts that are not in the best precision.",
        metavar="LIST",
        shown="all below the best precision",
    )
    near_slots: str = setting(
        OWN,
        "How memory is divided among the lower precisions. own: each has a fixed number of "
        "experts. shared: after each prompt, the policy chooses the number of experts in each.",
        choices=(OWN, SHARED),
    )
    near_place: str = setting(
        AUTO,
        "Where a system with a GPU stores experts in lower precisions. device: in the GPU's "
        "memory. host: in host memory, and the CPU computes them. auto: in the GPU's memory if "
        "they all fit, otherwise in host memory.",
        choices=(AUTO, DEVICE, HOST),
    )
    losses: Path | None = inherit(Shared, "losses")
    placement: str = setting(
        ASYNC,
        "When experts change their precision after a prompt. async: during the answer. wait: "
        "before the first token of the answer, which then comes later.",
        choices=(ASYNC, WAIT),
    )

    @classmethod
    def without_effect(cls, asked: Mapping[str, Any]) -> str | None:
        if asked.get("losses") is None or asked.get("near_slots") == SHARED:
            return None
        return (
            f"--losses has no effect with --near-slots {OWN}, because {OWN} fixes the number of "
            f"experts in each precision: leave --losses out, or give --near-slots {SHARED}"
        )


# The usage learned by earlier runs counts as this many tokens of this run.
_LEARNED_TOKENS = 1024


class NearTiers(NamedTuple):
    """The lower precisions (near tiers) in which the policy stores the less important experts.

    Each field has one entry per near tier, best tier first.

    - tiers: the indices of the tiers among all tiers of the model.
    - names: the names of the tiers.
    - bits: the bits per weight by the names, such as 4 for q4_k.
    - stored: the actual bits per weight; empty if unknown.
    """

    tiers: list[int]
    names: list[str]
    bits: list[int]
    stored: list[float]

    @classmethod
    def of(cls, shape: ModelShape, settings: ContextSettings) -> NearTiers:
        """Return the precisions (tiers) to use for experts that are not in the best precision.

        The setting near_tiers names them. By default, they are all precisions of the model below
        the best. Raises PolicyError if the model lacks a named precision, or if there are too many
        precisions.
        """
        tiers = near_tiers(shape.tiers, settings.near_tiers)
        names = [shape.tiers[tier] for tier in tiers]
        stored = [shape.bits[tier] for tier in tiers] if shape.bits else []
        return cls(tiers, names, [nominal_bits(name) for name in names], stored)


def _places_to_try(shape: ModelShape, settings: ContextSettings, shares_slots: bool) -> list[bool]:
    """Return the memories in which experts in lower tiers may be stored, in the order to try them.

    An entry is True for the host memory of a system with a GPU, and False otherwise.
    """
    asked = settings.near_place
    if not shape.host_slots or asked == DEVICE:
        return [False]
    return [True] if asked == HOST or shares_slots else [False, True]


def uniform_counts(n_cold: int, near: NearTiers, settings: ContextSettings) -> tuple[int, ...]:
    """Return how many experts of a layer are stored in each lower tier (precision).

    The numbers minimize the total quality loss, but the mean bits per weight of these experts are
    at most the setting near_bits. All experts are assumed to lose the same quality in a tier, so
    the numbers are the same for every layer.

    - n_cold: the number of experts of a layer that are not in the best tier.
    - near: the lower tiers.

    Raises PolicyError if near_bits is less than the bits per weight of the lowest tier.
    """
    bits = near.bits
    if settings.near_bits < bits[-1]:
        raise PolicyError(
            f"--near-bits {settings.near_bits:g} is too small: the lowest precision "
            f"{near.names[-1]} has {bits[-1]} bits per weight. Give at least {bits[-1]}, or name "
            "a lower precision with --near-tiers"
        )
    losses = nominal_losses(bits, 1, n_cold)[0]
    # The importance of the experts is assumed to fall as 1/rank, or to be uniform. With two near
    # tiers, the bit budget determines both numbers.
    weights = 1 / np.arange(1.0, n_cold + 1) if settings.near_weights == IMPORTANCE else None
    return prefix_split(losses, bits, bit_budget(n_cold, settings), weights)


def pools_of(
    shape: ModelShape,
    near: NearTiers,
    n_hot: int,
    counts: Sequence[int],
    shares_slots: bool,
    on_host: bool,
) -> TierPools:
    """Return the memory slots for all experts of a model, grouped into pools of one slot size.

    A slot is memory for one expert. Every layer has n_hot experts in tier 0, the best precision,
    and its other experts in lower tiers.

    - near: the lower tiers.
    - counts: the number of a layer's experts in each lower tier.
    - shares_slots: whether a slot for lower tiers can hold any of them. If False, each slot is for
      one tier.
    - on_host: whether slots for lower tiers are in host memory, and those for tier 0 in GPU memory.
      If False, all slots are in the same memory.
    """
    unused = set(range(1, len(shape.tiers))) - set(near.tiers)
    groups: list[tuple[tuple[int, ...], int]] = [((tier,), 0) for tier in sorted(unused)]
    if shares_slots:
        groups.append((tuple(near.tiers), sum(counts)))
    else:
        groups += [((tier,), n) for tier, n in zip(near.tiers, counts, strict=True)]
    layers = shape.n_layers
    places = [Places(tiers, [n] * layers, on_host=on_host) for tiers, n in groups]
    if on_host:
        pairs = zip(shape.slots, shape.host_slots, strict=True)
        shape = replace(shape, slots=tuple((there[0], *here[1:]) for there, here in pairs))
    return TierPools(shape, [Places((0,), [n_hot] * layers, reserve=False), *places])


def as_uses(learned: np.ndarray, n_expert_used: int) -> np.ndarray:
    """Convert the expert usage of earlier runs to numbers of uses, [n_layers, n_expert].

    The result can be added to the uses that are counted in this run. It stands for _LEARNED_TOKENS
    tokens, each of which uses n_expert_used experts per layer. learned: the fraction of tokens that
    used each expert, [n_layers, n_expert].
    """
    return shares(learned, np.zeros_like(learned)) * n_expert_used * _LEARNED_TOKENS


@dataclass(frozen=True, kw_only=True)
class ContextPlacement(Placement):
    """The expert slots of the policy `context`, with K hot experts per layer in the best tier.

    - near: the lower precisions (near tiers) of the other experts.
    - n_hot: K.
    - near_counts: the number of experts per layer in each near tier.
    - shares_slots: whether each slot can hold any near tier. The number of experts in each near
      tier then changes with the conversation.
    - pools: the slots, grouped by size.
    - on_host: whether a system with a GPU keeps the near tiers in host memory.
    - hotness: the fraction of tokens that used each expert in earlier runs, or None.
    """

    near: NearTiers
    shares_slots: bool
    n_hot: int
    near_counts: tuple[int, ...]
    pools: TierPools
    on_host: bool
    hotness: np.ndarray | None

    def of_use(
        self, counts: np.ndarray, gates: np.ndarray, before: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (importance, tiers) of all experts, which follow from their use in a conversation.

        All arrays are [n_layers, n_expert]. The arguments are:

        - counts: how often tokens of the conversation used the expert.
        - gates: the sum of the routing weights of these uses.
        - before: how often tokens of earlier conversations and runs used the expert.

        The importance (float64) is the weighted mean of the three arrays, each divided by its sum
        over the layer. `before` counts less in longer conversations.

        The tiers (uint8) are the precisions that the experts should have. The most important
        experts of a layer get tier 0, the best, and the others lower tiers.
        """
        settings, near = self.settings, self.near
        scores = importance(counts, gates, before, settings, self.shape.n_expert_used)
        losses = nominal_losses(near.bits, *scores.shape)
        if self.losses is not None:
            losses = self.losses[..., near.tiers]
        most = None if self.shares_slots else self.near_counts
        placed = place(scores, self.n_hot, losses, near.bits, settings, most)
        tiers: np.ndarray = np.array([0, *near.tiers], np.uint8)[placed]
        return scores, tiers

    def first(self, hotness: np.ndarray | None = None) -> Sequence[Transition]:
        """Return all experts, and the tier in which each is loaded before the first token.

        Each entry is (layer, expert, tier). Experts that are used more get better tiers
        (precisions).

        hotness: the fraction of tokens that use each expert, [n_layers, n_expert]. None stands for
        the usage in earlier runs.
        """
        none = np.zeros((self.shape.n_layers, self.shape.n_expert))
        known = self.hotness if hotness is None else hotness
        before = none if known is None else as_uses(known, self.shape.n_expert_used)
        return every_expert_to(self.of_use(none, none, before)[1])

    @property
    def text(self) -> str:
        near, names = self.near, self.near.names
        if near.stored:
            names = [f"{a} ({b:.2f} bits)" for a, b in zip(names, near.stored, strict=True)]
        counts = zip(self.near_counts, names, strict=True)
        lower = [f"{n} in {name}" for n, name in counts if n]
        if self.shares_slots:
            most, precisions = self.settings.near_bits, " or ".join(names)
            n_lower = sum(self.near_counts)
            lower = [
                f"{n_lower} experts per layer in {precisions} (on average at most {most:g} bits "
                "per weight)"
            ]
        best = f"{self.n_hot} of {self.shape.n_expert} experts per layer in {self.shape.tiers[0]}"
        if self.on_host:
            lower.append("experts in lower precisions are computed by the CPU")
        return ", ".join(["context", best, *lower])


class ContextAware(Policy):
    """Keeps the most important experts of each layer in the best precision, others in lower ones.

    Every expert stays in memory. Its importance follows from its use in the conversation and in
    earlier runs. After each prompt, the policy chooses the precision (tier) of each expert again.
    The tiers change in the background. With the setting `placement` "wait", the first token of an
    answer waits for the changes.

    With `near_slots` "shared", a slot for lower tiers can hold any of them. The policy then also
    chooses how many experts each lower tier gets (prefix split, section 4.2 of the near-data
    paper).
    """

    about = About(
        name="context",
        summary=(
            "Keeps every expert in memory. The experts that the conversation used most get the "
            "best precision, the others lower ones. Precisions change in the background after each "
            "prompt."
        ),
        Settings=ContextSettings,
        reason="chooses the precision of every expert by the prompt",
        precisions=Precisions(least=2, keeps="several precisions"),
        # llama.cpp computes the last layer only for the last token of a prompt. One layer of
        # look-ahead predicts the last layer's experts for all prompt tokens.
        wants=PolicyRequirements(
            (Phase.PREFILL,), n_ahead=1, counts=True, states=True, all_resident=True
        ),
    )
    settings: ContextSettings
    placement: ContextPlacement

    @classmethod
    def place(
        cls,
        shape: ModelShape,
        settings: Any,
        rules: Rules,
        budget_bytes: int,
        history: History,
    ) -> ContextPlacement:
        """Divide a memory budget into slots that hold every expert, and return the slots.

        A slot is memory for one expert. In each layer, K experts get slots of tier 0, the best
        precision. K is the setting hot_experts. By default, K is as large as the budget allows, and
        at least 1.

        The other experts get slots of lower tiers, according to three settings:

        - near_tiers: the lower tiers to use.
        - near_bits: the maximum of the other experts' mean bits per weight.
        - near_slots: whether a slot holds only one of the lower tiers, or any.

        Raises PolicyError if the model or the machine cannot have such slots.
        """
        near = NearTiers.of(shape, settings)
        shares_slots = settings.near_slots == SHARED and len(near.tiers) > 1
        places = _places_to_try(shape, settings, shares_slots)
        if shares_slots and not (shape.shares_slots or places[-1]):
            raise PolicyError(
                f"--near-slots {SHARED} does not work in the GPU's memory: leave --near-slots "
                f"out, or add --near-place {HOST}"
            )
        n, asked = shape.n_expert, settings.hot_experts
        most = n if asked is None else min(n, asked)
        fewest = 1 if asked is None else most
        for on_host, n_hot in product(places, range(most, fewest - 1, -1)):
            counts = uniform_counts(n - n_hot, near, settings)
            pools = pools_of(shape, near, n_hot, counts, shares_slots, on_host)
            slots = pools.plan()
            if slots.total_bytes <= budget_bytes:
                break
        # With exact rules, tokens wait as well, because results must not depend on residency.
        waits = rules.exact or settings.placement == WAIT
        wants = replace(
            cls.about.wants,
            default_tier=len(shape.tiers) - 1,
            transition_rate=0 if waits else settings.transition_rate or 0,
            waits=waits,
            learns=True,
        )
        return ContextPlacement(
            *(cls, shape, settings, rules, slots, wants),
            # With fixed counts per tier, losses have no influence.
            losses=history.losses(shape.tiers) if shares_slots else None,
            near=near,
            shares_slots=shares_slots,
            n_hot=n_hot,
            near_counts=counts,
            pools=pools,
            on_host=on_host,
            hotness=history.hotness(),
        )

    def _set_up(self) -> None:
        self._near = self.placement.near
        size = self.shape.n_layers, self.shape.n_expert
        self.updates = 0
        self.use = SequenceUse(*size)
        self._learned: np.ndarray = np.zeros(size)
        self._predicted = -1  # the step in which predictions were counted for the last layer
        self._placed = True  # whether no prompt was read since tiers were chosen last
        self._wanted: np.ndarray | None = None
        self._latest: np.ndarray | None = None  # the tiers that were chosen last
        self._scores: np.ndarray = np.zeros(size)
        self._moved = self._steps = 0

    def learned(self) -> Learned:
        """Return the fraction of tokens that used each expert, as knowledge for the next run.

        The fraction is computed from the uses in this run and in earlier runs together.
        """
        used = self.use.past + self.use.sums[0]
        if not used.any():
            return Learned(hotness=np.array(self._learned))
        frequency: np.ndarray = shares(self._before() + used) * self.shape.n_expert_used
        return Learned(hotness=frequency)

    def _before(self) -> np.ndarray:
        """Return the expert usage that earlier runs learned, as a number of uses."""
        return as_uses(self._learned, self.shape.n_expert_used)

    def recall(self, hotness: np.ndarray) -> None:
        self._learned = np.array(hotness, np.float64).reshape(self._learned.shape)

    def save_sequence(self, sequence: int) -> bytes | None:
        return self.use.save(sequence)

    def restore_sequence(self, sequence: int, state: bytes) -> None:
        """Restore the expert use of a sequence from the bytes that save_sequence returned.

        The experts keep their current tiers (precisions) for now. The policy chooses new tiers at
        the sequence's next answer, as after a prompt.
        """
        self.use.restore(sequence, state)
        self._placed = False

    def warm(
        self, resident: np.ndarray | None = None, target: np.ndarray | None = None
    ) -> Sequence[Transition] | None:
        """Return the experts to load before the next token, each as (layer, expert, tier).

        Without arguments, at the start of a run, the result has all experts. Experts that earlier
        runs used more get better tiers (precisions).

        With arguments, before an answer, there are two cases:

        - If `wants.waits` is False, the result is None: the answer begins at once.
        - Otherwise, the policy chooses a tier for each expert by the prompt. The result has the
          experts for whose new tier a slot is free now.

        resident: each expert's tier now. target: its tier after the changes in progress.
        """
        if resident is None or target is None:
            wanted = self._latest = self._place()
            return every_expert_to(wanted)
        if not self.wants.waits:
            return None
        self._place_anew()
        return self._moves(resident, target)

    def _place(self) -> np.ndarray:
        """Return the tier that each expert should have for its use, uint8 [n_layers, n_expert]."""
        use = self.use
        counts, gates = use.sums
        self._scores, tiers = self.placement.of_use(counts, gates, self._before() + use.past)
        return tiers

    def decide(self, event: RouteEvent, view: StoreView, out: DecisionBuffer) -> None:
        """Write to `out` the precision (tier) in which tokens use each expert of a layer.

        - An expert in memory gets the best tier in which it is in memory, so that no read is
          needed.
        - Any other expert gets the lowest tier. If a token uses the expert, the store reads it.

        The method also counts how often tokens use each expert. After a prompt, the policy chooses
        new tiers by these counts.
        """
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

    def on_step(self, report: StepReport) -> Sequence[Transition]:
        """Count the expert use of a finished step, and return the experts to move to another tier.

        After a prompt, the first decode step also chooses a new tier (precision) for every expert.
        The result has only the moves for which a slot is free now. Later steps return the other
        moves.
        """
        if report.counts is None or report.resident is None or report.target is None:
            return ()
        self.use.step_done(report)
        if report.phase == Phase.PREFILL:
            self._placed = False
        else:
            self._steps += self._wanted is not None
            self._place_anew()
        return self._moves(report.resident, report.target)

    def _place_anew(self) -> None:
        """Choose the tier of each expert again if a prompt was read since the last choice."""
        if self._placed:
            return
        self._wanted = self._latest = self._place()
        self._placed = True
        self.updates += 1
        self._steps = 0

    def _moves(self, resident: np.ndarray, target: np.ndarray) -> list[Transition]:
        """Return the transitions of experts to their chosen tiers for which slots are free now.

        Transitions to lower tiers come first, then those of the most important experts.
        """
        wanted = self._wanted
        if wanted is None:
            return []
        if (resident == wanted).all():
            self._wanted = None
            return []
        moves = self.placement.pools.moves_to(wanted, resident, target, self._scores)
        self._moved += len(moves)
        return moves

    def report(self) -> Mapping[str, Any]:
        """Return figures about the policy's work since the runtime started.

        - placements: how often, after a prompt, the policy chose the tiers (precisions) of all
          experts.
        - moves: how many changes of an expert's tier it requested.
        - steps: how many decode steps it took until all experts had the latest chosen tiers.
        - hot_per_layer: the number of experts of a layer in the best tier.
        - near_per_layer: the mean number of experts of a layer in each lower (near) tier, by name.
        - near_bits: the mean bits per weight of all experts in lower tiers. It uses the bits in the
          tiers' names, such as 4 for q4_k.
        - near_bits_stored: the same mean, with the bits that weights take in the file.
        """
        latest, placement, names = self._latest, self.placement, self._near.names
        near = [float(n) for n in placement.near_counts]
        if latest is not None and placement.shares_slots:
            near = [float((latest == tier).sum() / len(latest)) for tier in self._near.tiers]
        found: dict[str, Any] = {
            "placements": self.updates,
            "moves": self._moved,
            "steps": self._steps,
            "hot_per_layer": placement.n_hot,
            "near_per_layer": dict(zip(names, near, strict=True)),
        }
        if any(near):
            found["near_bits"] = float(np.average(self._near.bits, weights=near))
        if any(near) and self._near.stored:
            found["near_bits_stored"] = float(np.average(self._near.stored, weights=near))
        return found
