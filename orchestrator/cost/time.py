"""What a token and a prompt will take under a plan, in seconds: arithmetic over what
`orchestrator.cost.speeds` and `orchestrator.cost.disk` measured of this machine.

A token goes through the layers one after the other. Of a layer's k experts m miss, with the chances
of a binomial distribution. What is there is computed while the missing ones are read:

    T = step + output + cells * attention
        + sum of a + E[ max(d + max(E, R((1 - f) m) + E / 3k), R((1 + w) m)) ]

step: what lies between two tokens. a: what a policy takes to decide, 0 where none is asked. d: the
layer's dense weights and small operations. E: its k experts, in their tiers and layout.
R(m) = m * bytes / bandwidth + latency, 0 without misses; behind the last read the last matrix of an
expert is computed. What is read while threads compute takes a core from one of them besides. f: the
share of the misses that were foreseen a layer ahead, 0 without a look-ahead, and in the first
layer. w = 1 - f, where f > 0: as many as were not foreseen are read in vain. A part of a prompt is
the same with as many rows for each expert as its tokens bring; it reads each expert that it uses
and that is not there.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import ModelShape, SlotPlan
from orchestrator.cache.profile import HotnessKeeper, UsageKeeper
from orchestrator.config import Config
from orchestrator.cost.disk import Bandwidth
from orchestrator.cost.losses import Skips, started
from orchestrator.cost.speeds import FILE, OWN, ROWS, UPSTREAM, Costs, Speeds
from orchestrator.errors import ProfileError
from orchestrator.events import SKIP, Phase
from orchestrator.memory.footprint import process_bytes
from orchestrator.memory.layouts import wants_own_layout
from orchestrator.memory.machine import probe
from orchestrator.memory.plan import MemoryPlan
from orchestrator.memory.request import PlanRequest

# Of the experts of the next layer, look-ahead finds so many (docs/experiments/firm.md).
FORESEEN = 0.8
# Tokens of the prompts that are predicted, and of the context behind which a token is.
PROMPT_TOKENS = 512
_MOST_STEPS = 64
# A cap that leaves less is too small for any model.
_LEAST_SPARE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Residency:
    """What tokens use of the experts, and what of it is in memory.

    uses: float64 [n_layers, n_expert], the chance that a token uses an expert; rows sum to k. mix:
    float64 [n_layers, n_expert, n_tiers], the shares of those uses that are computed in each tier;
    what is missing to 1 is skipped. present: [n_layers, n_expert], the share of those uses that
    finds the expert in memory. scanned: of what a prompt uses, the share that its first part finds
    there, and each part after it. loaded: it is there before the first token. foreseen: f above, in
    the layers behind the first one.
    """

    uses: np.ndarray
    mix: np.ndarray
    present: np.ndarray
    scanned: tuple[float, float] = (1.0, 1.0)
    loaded: bool = True
    foreseen: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of the experts that tokens compute which is in memory when it is asked for."""
        asked = self.uses * self.mix.sum(axis=2)
        return float((asked * self.present).sum() / max(asked.sum(), 1e-300))


@dataclass(frozen=True, slots=True)
class PlanTime:
    """What one plan takes. n_ubatch: the tokens of a prompt that are computed at once; asked:
    whether a policy is asked about each layer of a token."""

    costs: Costs
    residency: Residency
    disk: Bandwidth
    n_ubatch: int
    asked: bool = False

    @property
    def read_bytes(self) -> float:
        """What a token of an answer reads."""
        layers = range(self.costs.n_layers)
        missed = zip(layers, map(self._missed, layers), strict=True)
        return float(sum(n * each * self._read(layer) for layer, (_, n, each) in missed))

    def token_s(self, cells: int = 0) -> float:
        """Seconds of one token of an answer behind a context of so many tokens."""
        costs = self.costs
        dense = float(costs.dense_s[0]) / costs.n_layers
        layers = sum(self._layer_s(layer, dense) for layer in range(costs.n_layers))
        asked = costs.n_layers * costs.asked_s if self.asked else 0.0
        return costs.step_s + asked + layers + costs.output_s + cells * costs.attention_s[0]

    def prompt_s(self, n_tokens: int, first: bool = False) -> float:
        """Seconds until the first token of the answer to a prompt of so many tokens. first: the
        first prompt after the start finds what is loaded then, and not what decoding left, and
        what its first part reads has not been read for long."""
        cold = first and not self.residency.loaded
        early = replace(self, disk=self.disk.at_first)
        total = self.costs.output_s
        for done in range(0, n_tokens, self.n_ubatch):
            size = min(self.n_ubatch, n_tokens - done)
            last = done + size == n_tokens
            if cold and done == 0:
                total += early._part_s(size, done, 0.0, last)
            else:
                total += self._part_s(size, done, self.residency.scanned[done > 0], last)
        return total

    def _missed(self, layer: int) -> tuple[float, float, float]:
        """(experts that a token computes, those of them that it misses, bytes of a missing one)."""
        known = self.residency
        asked = known.uses[layer, :, None] * known.mix[layer]
        missing = asked * (1.0 - known.present[layer, :, None])
        n = float(missing.sum())
        moved = float((missing * self.costs.expert_bytes[layer]).sum())
        return float(asked.sum()), n, moved / n if n else 0.0

    def _unforeseen(self, layer: int) -> float:
        """1 - f. Nobody asks for the first layer's experts before its own router has chosen."""
        return 1.0 - self.residency.foreseen if layer else 1.0

    def _read(self, layer: int) -> float:
        """1 + w."""
        wrong = self._unforeseen(layer)
        return 1.0 + (wrong if wrong < 1.0 else 0.0)

    def _layer_s(self, layer: int, dense_s: float) -> float:
        known = self.residency
        asked = known.uses[layer, :, None] * known.mix[layer]
        experts = float((asked * self.costs.expert_s[layer, :, 0]).sum())
        n_asked, n_missed, each = self._missed(layer)
        n = max(1, round(n_asked))
        tail, seconds = experts / (3 * n), self.disk.seconds
        total = 0.0
        for m, chance in enumerate(_binomial(n, min(1.0, n_missed / max(n_asked, 1e-300)))):
            late = seconds(self._unforeseen(layer) * m * each)
            there = max(experts, late + tail if late else 0.0)
            read = m * each * self._read(layer)
            took = max(dense_s + there, seconds(read))
            delay = self.disk.disturbs_s(read, took - dense_s - experts)
            total += chance * (took + delay)
        return total

    def _part_s(self, n_tokens: int, done: int, found: float, last: bool) -> float:
        """One part of a prompt, behind `done` tokens. In the last layer it computes the experts of
        the prompt's last token alone."""
        costs, known = self.costs, self.residency
        dense = float(interpolated(costs.dense_s, n_tokens)) / costs.n_layers
        total = n_tokens * (done + n_tokens / 2) * costs.attention_s[n_tokens > 1]
        for layer in range(costs.n_layers):
            n = n_tokens if layer + 1 < costs.n_layers else int(last)
            asked = known.uses[layer, :, None] * known.mix[layer]  # [n_expert, n_tiers]
            used = 1.0 - (1.0 - np.minimum(asked, 1.0)) ** n
            rows = n * asked / np.maximum(used, 1e-300)
            experts = sum(
                float((used[:, tier] * interpolated(curve, rows[:, tier])).sum())
                for tier, curve in enumerate(costs.expert_s[layer])
            )
            read = (1.0 - found) * float((used * costs.expert_bytes[layer]).sum())
            late = self.disk.seconds(self._unforeseen(layer) * read)
            took = max(dense + max(experts, late), self.disk.seconds(read))
            total += took + self.disk.disturbs_s(read, took - dense - experts)
        return total


def interpolated(curve: np.ndarray, rows: float | np.ndarray) -> np.ndarray:
    """Seconds for so many rows, of a curve over ROWS; below the first one as for it."""
    beyond = np.maximum(1.0, np.asarray(rows) / ROWS[-1])
    return np.asarray(np.interp(rows, ROWS, curve) * beyond)


def _binomial(n: int, p: float) -> list[float]:
    return [math.comb(n, m) * p**m * (1.0 - p) ** (n - m) for m in range(n + 1)]


def chances(counts: np.ndarray, n_used: int) -> np.ndarray:
    """Uses of Residency from how often tokens used each expert, or any hotness, [n_layers,
    n_expert]: in proportion, but none above 1. A layer that nobody used counts as uniform."""
    counts = np.asarray(counts, np.float64)
    counts = np.where(counts.sum(axis=1, keepdims=True) > 0, counts, 1.0)
    uses = n_used * counts / counts.sum(axis=1, keepdims=True)
    for _ in range(_MOST_STEPS):
        over = uses > 1.0
        if not over.any():
            break
        rest = np.where(over, 0.0, uses)
        room = n_used - over.sum(axis=1, keepdims=True)
        uses = np.where(
            over, 1.0, rest * room / np.maximum(rest.sum(axis=1, keepdims=True), 1e-300)
        )
    return np.asarray(uses)


def resident(tiers: np.ndarray, uses: np.ndarray, n_tiers: int) -> Residency:
    """Every expert in memory in the tier that tiers [n_layers, n_expert] says, an index of the
    costs' tiers, or SKIP for one that is always skipped."""
    mix = (tiers[:, :, None] == np.arange(n_tiers)) * 1.0
    present = np.where(tiers == SKIP, 0.0, 1.0)
    return Residency(uses, mix, present)


def cached(
    shape: ModelShape,
    slots: SlotPlan,
    uses: np.ndarray,
    mix: np.ndarray,
    foreseen: float = 0.0,
) -> Residency:
    """Experts that come and go in least-recently-used order in the slots of a plan.

    mix, foreseen: as in Residency. Uses are taken as
    independent of each other, so an expert is in its group's slots where it was used within the
    last t tokens, 1 - (1 - p)^t, with the t for which as many are there as there are slots (Che,
    Tung and Wang 2002). A lower tier's use finds a better copy as well.
    """
    rates = uses[:, :, None] * mix
    found = np.zeros_like(rates)
    scans, weights = [], []
    held: dict[int, list[tuple[int, int, int]]] = {}
    for key, index in slots.group_of.items():
        held.setdefault(index, []).append(key)
    for index, keys in held.items():
        asked = np.stack([rates[layer, :, tier] for layer, _, tier in keys])
        n_slots = slots.groups[index].n_slots
        there = recently_used(asked, n_slots)
        for (layer, kind, tier), each in zip(keys, there, strict=True):
            parts = shape.slots[layer][tier]
            found[layer, :, tier] += parts[kind] / sum(parts.values()) * each
        several = len({layer for layer, _, _ in keys}) > 1
        scans.append(scanned(n_slots / max(1, int(np.count_nonzero(asked))), several))
        weights.append(slots.groups[index].slot_bytes * asked.sum())
    absent = np.cumprod(1.0 - np.minimum(found, 1.0), axis=2)
    present = (rates * (1.0 - absent)).sum(axis=2) / np.maximum(rates.sum(axis=2), 1e-300)
    first, later = np.average(scans, axis=0, weights=weights) if any(weights) else (0.0, 0.0)
    scan = float(first), float(later)
    return Residency(uses, mix, present, scan, loaded=False, foreseen=foreseen)


def recently_used(rates: np.ndarray, n_slots: int) -> np.ndarray:
    """The chance of each item to be in as many slots as n_slots, where each step uses it with the
    chance in rates, and what was used longest ago makes room."""
    if np.count_nonzero(rates) <= n_slots:
        return np.where(rates > 0.0, 1.0, 0.0)
    if rates.min() == rates.max():
        return np.full(rates.shape, n_slots / rates.size)
    pace = -np.log1p(-np.minimum(rates, 1.0 - 1e-12))

    def there(t: float) -> np.ndarray:
        return np.asarray(-np.expm1(-pace * t))

    low, high = 0.0, 1.0
    while there(high).sum() < n_slots and high < 1e12:
        high *= 2.0
    for _ in range(_MOST_STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if there(middle).sum() < n_slots else (low, middle)
    return there(high)


def scanned(share: float, several_layers: bool) -> tuple[float, float]:
    """Of the experts of which so large a share has slots: what the first pass of a prompt over all
    of them finds there, and each pass after it.

    A layer with slots of its own computes what is there before it replaces anything. Where layers
    share their slots, each miss takes one that a later layer was to find: a share y of what the
    rest of the layers had is gone after t of them, y' = ((1 - share) / share + y) / (1 - t), so
    that they find share + (1 - share) log(1 - share). The next pass begins with layers that the
    end of this one replaced.
    """
    if share >= 1.0 or not several_layers:
        return min(1.0, share), min(1.0, share)
    return share + (1.0 - share) * math.log1p(-share), 0.0


def with_skips(known: Residency, skips: Skips, expert_bytes: np.ndarray) -> Residency:
    """What tokens use where of their missing experts those are skipped that cost least a byte,
    until they cost what is allowed in the mean. What is skipped is read behind, so that as many
    uses of an expert find it in memory as without skipping.

    known: without skipping. expert_bytes: [n_layers], what reading one moves. Of each token's
    experts in a layer one at least is never skipped. The gates of an expert's uses differ, and
    those with the least are skipped first, which is better than the mean says.
    """
    asked = known.uses * known.mix.sum(axis=2)
    missing = asked * (1.0 - known.present)
    most = 1.0 - 1.0 / max(1.0, float(asked.sum(axis=1).mean()))
    order = np.argsort((skips.nats / np.asarray(expert_bytes)[:, None]).ravel(), kind="stable")
    cost = (missing * skips.nats * most).ravel()[order]
    before = np.cumsum(cost) - cost
    part = np.clip((skips.allowed - before) / np.maximum(cost, 1e-30), 0.0, 1.0)
    share = np.zeros(missing.size)
    share[order] = most * part
    skipped = (1.0 - known.present) * share.reshape(missing.shape)
    left = 1.0 - skipped
    return replace(
        known, mix=known.mix * left[..., None], present=known.present / np.maximum(left, 1e-300)
    )


def expected(plan: MemoryPlan, uses: np.ndarray, n_cells: int = 0) -> Residency:
    """What a managed plan will have in memory, where tokens use experts with these chances: each
    in the tier in which its policy starts it, where all stay in memory; else what was used last.
    n_cells: of the context in use."""
    slots = plan.slots_behind(n_cells)
    placement = plan.placement
    assert placement is not None and slots is not None
    if placement.wants.all_resident:
        return resident(started(placement, uses), uses, len(placement.shape.tiers))
    foreseen = FORESEEN if placement.wants.n_ahead else 0.0
    return cached(placement.shape, slots, uses, placement.fractions(uses), foreseen)


def spare_bytes(config: Config, model: ExpertModel) -> int:
    """What measuring this machine may take for a moment: most of what the cap leaves beside the
    process, before a model is loaded."""
    free = probe().memory_bytes
    left = min(config.ram or free, free) - process_bytes(model, PlanRequest.of(config))
    return max(_LEAST_SPARE_BYTES, left * 3 // 4)


def known_uses(config: Config, model: ExpertModel) -> tuple[np.ndarray, bool]:
    """How often a token uses each expert, as of Residency, and whether earlier runs said so: else
    it is as if all experts were used alike."""
    remembered = config.with_changes(remember=True)
    counts = UsageKeeper(remembered, model).recall()
    if counts is None:
        with suppress(ProfileError, OSError):
            counts = HotnessKeeper(remembered, model).recall()
    if counts is None:
        return alike(model), False
    return chances(counts, model.n_expert_used), True


def alike(model: ExpertModel) -> np.ndarray:
    """Uses of Residency as if all experts were used alike."""
    return chances(np.ones((model.n_layers, model.n_expert)), model.n_expert_used)


def skewed(model: ExpertModel) -> np.ndarray:
    """Uses of Residency as if few experts of a layer were used mostly: by Zipf's law, the n-th in
    proportion to 1 / n."""
    ranks = np.arange(1, model.n_expert + 1)
    return chances(np.tile(1.0 / ranks, (model.n_layers, 1)), model.n_expert_used)


@dataclass(frozen=True, slots=True)
class TimeModel:
    """What plans of one model take on this machine, at these speeds of its processor and of its
    disk, beside the threads that compute.

    uses: as of Residency. profiled: earlier runs said so.
    """

    model: ExpertModel
    disk: Bandwidth
    speeds: Speeds
    uses: np.ndarray
    profiled: bool = True
    _costs: dict[tuple[tuple[int, ...], str], Costs] = field(default_factory=dict)

    def of_plan(
        self,
        plan: MemoryPlan,
        config: Config,
        skips: Skips | None = None,
        n_cells: int = 0,
        uses: np.ndarray | None = None,
    ) -> PlanTime:
        """Of a plan that plan_memory made with a config, in the layout that it would have. skips:
        what its policy may skip of what is missing. n_cells: of the context in use. uses: in the
        place of what is known. Measures what is not known of this machine, for some seconds.
        Raises NativeError."""
        uses = self.uses if uses is None else uses
        asked = False
        if plan.placement is None:
            layout = FILE if config.use_extra_bufts is False else UPSTREAM
            there = resident(np.zeros(uses.shape, np.int64), uses, 1)
        else:
            layout = OWN if wants_own_layout(config, plan) else FILE
            there = expected(plan, uses, n_cells)
            asked = Phase.DECODE in plan.placement.wants.asked_in
        at = plan.tiers, layout
        if at not in self._costs:
            self._costs[at] = self.speeds.costs(self.model, *at)
        costs = self._costs[at]
        if skips is not None:
            there = with_skips(there, skips, costs.expert_bytes[:, 0])
        return PlanTime(costs, there, self.disk, plan.micro_batch(0, PROMPT_TOKENS), asked)
