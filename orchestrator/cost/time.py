"""Predicted seconds of a token and of a prompt under a plan.

They are computed from the measurements of `orchestrator.cost.speeds` and `orchestrator.cost.disk`.

A token passes the layers in sequence. The number m of misses among a layer's k experts has a
binomial distribution. Resident experts are computed while the missing ones are read:

    T = step + output + cells * attention
        + sum of a + E[ max(d + max(E, R((1 - f) m) + E / 3k), R((1 + w) m)) ]

step: time between two tokens. a: time of a policy's decision, 0 if it is not called. d: time of the
layer's dense weights and small operations. E: time of its k experts in their tiers and layout.
R(m) = m * bytes / bandwidth + latency, 0 without misses. The last matrix of an expert is computed
after the last read. Reads during computation also take processor time from a compute thread. f: the
share of misses that was predicted one layer ahead; 0 without look-ahead and in the first layer.
w = 1 - f if f > 0: as many experts are prefetched in vain as were not predicted. A part of a prompt
follows the same formula with as many rows per expert as its tokens need; it reads each expert that
it uses and that is not resident.
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
from orchestrator.cost.speeds import FILE, OWN, UPSTREAM, Costs, Speeds, interpolated
from orchestrator.errors import ProfileError
from orchestrator.events import SKIP, Phase
from orchestrator.plan.layouts import wants_own_layout
from orchestrator.plan.records import Plan

# The share of the next layer's experts that look-ahead predicts (docs/experiments/firm.md).
FORESEEN = 0.8
# Length of predicted prompts, and of the context before a predicted token.
PROMPT_TOKENS = 512
_MOST_STEPS = 64


@dataclass(frozen=True, slots=True)
class Residency:
    """How often tokens use each expert, and how often the expert is then in memory (a hit).

    - uses: the probability that a token's router chooses an expert, float64 [n_layers, n_expert].
    - mix: the fraction of an expert's uses that is computed in each tier (precision), float64
      [n_layers, n_expert, n_tiers]. The other uses are skipped.
    - present: the fraction of an expert's computed uses that are hits, for tokens of an answer,
      [n_layers, n_expert].
    - prompt_hit_rates: the fraction of all experts that a long prompt finds in memory. The first
      value is for its first micro-batch, the second for each later micro-batch.
    - loaded: whether experts are read before the first token.
    - foreseen: the fraction of misses that are predicted one layer ahead.

    Example: uses 0.1, mix (0.5, 0.3) and present 0.75. Of 100 tokens, 10 choose the expert: 5 in
    the first tier, 3 in the second, and 2 skip it. Of the 8 computed uses, 6 are hits.
    """

    uses: np.ndarray
    mix: np.ndarray
    present: np.ndarray
    prompt_hit_rates: tuple[float, float] = (1.0, 1.0)
    loaded: bool = True
    foreseen: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of the requested experts that are in memory (resident) at the request."""
        asked = self.uses * self.mix.sum(axis=2)
        return float((asked * self.present).sum() / max(asked.sum(), 1e-300))


@dataclass(frozen=True, slots=True)
class PlanTime:
    """Predicts how long one token or one prompt takes if a model runs under a plan.

    A plan is a policy with its precisions and memory sizes.

    - costs: the compute times of the model's parts, such as an expert.
    - residency: how often tokens use each expert, and how often the expert is then in memory.
    - disk: the read speed.
    - n_ubatch: the micro-batch size in tokens.
    - asked: whether the policy is called in each layer for each token of an answer, which takes
      time.
    """

    costs: Costs
    residency: Residency
    disk: Bandwidth
    n_ubatch: int
    asked: bool = False

    @property
    def read_bytes(self) -> float:
        """The mean number of bytes that a token of an answer reads from disk."""
        layers = range(self.costs.n_layers)
        missed = zip(layers, map(self._missed, layers), strict=True)
        return float(sum(n * each * self._read(layer) for layer, (_, n, each) in missed))

    @property
    def without_reads(self) -> PlanTime:
        """A copy of this predictor for a disk without delay, so that only computing takes time."""
        return replace(self, disk=Bandwidth(math.inf, latency_s=0.0))

    def token_s(self, cells: int = 0) -> float:
        """Return the predicted seconds per token of an answer after `cells` tokens of context."""
        costs = self.costs
        dense = float(costs.dense_s[0]) / costs.n_layers
        layers = sum(self._layer_s(layer, dense) for layer in range(costs.n_layers))
        asked = costs.n_layers * costs.asked_s if self.asked else 0.0
        return costs.step_s + asked + layers + costs.output_s + cells * costs.attention_s[0]

    def prompt_s(self, n_tokens: int, first: bool = False) -> float:
        """Return the predicted seconds until the answer to a prompt of n_tokens tokens begins.

        first: whether this is the first prompt after the start of the program. It takes longer for
        two reasons. Only the experts that were loaded at the start are in memory. The first read of
        a part of a file is often slower than later ones.
        """
        cold = first and not self.residency.loaded
        early = replace(self, disk=self.disk.at_first)
        total = self.costs.output_s
        for done in range(0, n_tokens, self.n_ubatch):
            size = min(self.n_ubatch, n_tokens - done)
            last = done + size == n_tokens
            if cold and done == 0:
                total += early._part_s(size, done, 0.0, last)
            else:
                total += self._part_s(size, done, self.residency.prompt_hit_rates[done > 0], last)
        return total

    def _missed(self, layer: int) -> tuple[float, float, float]:
        """Return (computed experts, misses, bytes per miss) of one token in a layer, as means."""
        known = self.residency
        asked = known.uses[layer, :, None] * known.mix[layer]
        missing = asked * (1.0 - known.present[layer, :, None])
        n = float(missing.sum())
        moved = float((missing * self.costs.expert_bytes[layer]).sum())
        return float(asked.sum()), n, moved / n if n else 0.0

    def _unforeseen(self, layer: int) -> float:
        """Return the share of a layer's misses that look-ahead does not predict.

        The experts of the first layer are never predicted.
        """
        return 1.0 - self.residency.foreseen if layer else 1.0

    def _read(self, layer: int) -> float:
        """Return the number of experts that are read for each miss in a layer.

        The number exceeds 1 with look-ahead, which also reads experts that are then not used.
        """
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
        """Return the predicted seconds of one micro-batch of a prompt.

        done: prompt tokens before this micro-batch. found: the share of its experts that is in
        memory. last: the micro-batch ends the prompt. In the last layer, only the last token of the
        prompt uses experts.
        """
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


def _binomial(n: int, p: float) -> list[float]:
    return [math.comb(n, m) * p**m * (1.0 - p) ** (n - m) for m in range(n + 1)]


def chances(counts: np.ndarray, n_used: int) -> np.ndarray:
    """Return the probability that a token uses each expert, float64 [n_layers, n_expert].

    counts: how often each expert was used, in any unit, [n_layers, n_expert]. n_used: experts per
    token in each layer. The probabilities are proportional to the counts, at most 1, and sum to
    n_used in each layer. A layer without counts has equal probabilities.
    """
    counts = np.asarray(counts, np.float64)
    counts = np.where(counts.sum(axis=1, keepdims=True) > 0, counts, 1.0)
    uses = n_used * counts / counts.sum(axis=1, keepdims=True)
    for _ in range(_MOST_STEPS):
        over = uses > 1.0
        if not over.any():
            break
        rest = np.where(over, 0.0, uses)
        n_free = n_used - over.sum(axis=1, keepdims=True)
        uses = np.where(
            over, 1.0, rest * n_free / np.maximum(rest.sum(axis=1, keepdims=True), 1e-300)
        )
    return np.asarray(uses)


def resident(tiers: np.ndarray, uses: np.ndarray, n_tiers: int) -> Residency:
    """Describe a plan that always keeps every expert in memory, as a Residency.

    Tokens then find every expert in memory, in the expert's tier (precision).

    - tiers: the tier of each expert, [n_layers, n_expert]: an index below n_tiers, or SKIP for an
      expert that is always skipped.
    - uses: the probability that a token uses each expert, [n_layers, n_expert].
    - n_tiers: the number of tiers, for the last axis of the result's field `mix`.
    """
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
    """Predict how often tokens find experts in memory if the memory for experts is an LRU cache.

    Returns a Residency with the predicted hit rates, and with the given `uses`, `mix` and
    `foreseen`. An expert is assumed to be in memory if one of the last t tokens used it. The number
    t is chosen so that the cache is just full on average (Che, Tung and Wang 2002).

    - shape: the sizes of the model's experts.
    - slots: the memory for experts, in groups of slots of one size.
    - uses: the probability that a token uses each expert, [n_layers, n_expert].
    - mix: the fraction of an expert's uses in each tier (precision), [n_layers, n_expert, n_tiers].
    - foreseen: the fraction of cache misses that are predicted one layer ahead.
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
        scans.append(prompt_hit_rates(n_slots / max(1, int(np.count_nonzero(asked))), several))
        weights.append(slots.groups[index].slot_bytes * asked.sum())
    absent = np.cumprod(1.0 - np.minimum(found, 1.0), axis=2)
    present = (rates * (1.0 - absent)).sum(axis=2) / np.maximum(rates.sum(axis=2), 1e-300)
    first, later = np.average(scans, axis=0, weights=weights) if any(weights) else (0.0, 0.0)
    scan = float(first), float(later)
    return Residency(uses, mix, present, scan, loaded=False, foreseen=foreseen)


def recently_used(rates: np.ndarray, n_slots: int) -> np.ndarray:
    """Return the probability that each item is in a least-recently-used cache of n_slots slots.

    rates: the probability that a step uses each item.
    """
    if np.count_nonzero(rates) <= n_slots:
        return np.where(rates > 0.0, 1.0, 0.0)
    if rates.min() == rates.max():
        return np.full(rates.shape, n_slots / rates.size)
    # With a use probability p, an item was used in the last t steps with probability 1 - (1 - p)^t.
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


def prompt_hit_rates(share: float, several_layers: bool) -> tuple[float, float]:
    """Return the hit rates of experts in a long prompt, as (first, later).

    The prompt is computed in micro-batches (groups of tokens). Each micro-batch uses all experts.
    Its hit rate is the fraction of experts that it finds in memory. `first` is for the first
    micro-batch, and `later` for each following micro-batch.

    - share: the number of expert slots divided by the number of experts. It may exceed 1.
    - several_layers: whether several layers share the slots.

    If each layer has its own slots, or if the slots suffice for all experts, both rates are min(1,
    share). Otherwise, the layers evict each other's experts. The first micro-batch then finds the
    fraction share + (1 - share) log(1 - share), and later micro-batches find no expert.
    """
    # A layer with its own slots computes the experts in memory before it replaces any. If layers
    # share slots, each miss takes a slot that a later layer would have hit. Let y be the share of
    # the other layers' residents that is gone after a share t of the layers. Then
    # y' = ((1 - share) / share + y) / (1 - t). So the first micro-batch finds
    # share + (1 - share) log(1 - share). The next micro-batch begins with layers that the end of
    # this micro-batch evicted.
    if share >= 1.0 or not several_layers:
        return min(1.0, share), min(1.0, share)
    return share + (1.0 - share) * math.log1p(-share), 0.0


def with_skips(known: Residency, skips: Skips, expert_bytes: np.ndarray) -> Residency:
    """Predict how often experts are used and in memory if the policy skips some missing experts.

    A missing expert is not in memory when a token needs it. The policy is assumed to use its whole
    loss budget, the quality loss that it may cause. It first skips the experts with the least loss
    per byte, but never all experts of a token in a layer.

    - known: the prediction for a policy that skips no expert. The result is a changed copy.
    - skips: the mean loss if one use of an expert is skipped, and the loss budget.
    - expert_bytes: the bytes to read one expert of each layer, [n_layers].
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
    # Skipped experts are read afterwards, so as many uses hit as without skipping.
    return replace(
        known, mix=known.mix * left[..., None], present=known.present / np.maximum(left, 1e-300)
    )


def expected(plan: Plan, uses: np.ndarray, n_cells: int = 0) -> Residency:
    """Return the predicted residency of a plan with an expert store (a cache of experts in memory).

    A residency says how often tokens use each expert, and how often they find it in memory. If the
    policy keeps every expert in memory, each expert is assumed to keep the tier (precision) in
    which it starts. For any other policy, the store is assumed to evict the least recently used
    expert.

    uses: the probability that a token uses each expert, [n_layers, n_expert]. n_cells: tokens of
    context in use.
    """
    slots = plan.slots_after(n_cells)
    placement = plan.placement
    assert placement is not None and slots is not None
    if placement.wants.all_resident:
        return resident(started(placement, uses), uses, len(placement.shape.tiers))
    foreseen = FORESEEN if placement.wants.n_ahead else 0.0
    return cached(placement.shape, slots, uses, placement.fractions(uses), foreseen)


def known_uses(config: Config, model: ExpertModel) -> tuple[np.ndarray, bool]:
    """Return how often a token uses each expert, and whether earlier runs measured this.

    The first result is the probability of a use, float64 [n_layers, n_expert]. The probabilities
    are equal if no earlier run measured them.
    """
    remembered = config.with_changes(remember=True)
    counts = UsageKeeper(remembered, model).recall()
    if counts is None:
        with suppress(ProfileError, OSError):
            counts = HotnessKeeper(remembered, model).recall()
    if counts is None:
        return uniform_usage(model), False
    return chances(counts, model.n_expert_used), True


def uniform_usage(model: ExpertModel) -> np.ndarray:
    """Return equal probabilities that a token uses each expert, float64 [n_layers, n_expert]."""
    return chances(np.ones((model.n_layers, model.n_expert)), model.n_expert_used)


def skewed(model: ExpertModel) -> np.ndarray:
    """Return probabilities that a token uses each expert if few experts get most uses.

    The result is float64 [n_layers, n_expert]. By Zipf's law, the n-th expert of a layer is used in
    proportion to 1 / n.
    """
    ranks = np.arange(1, model.n_expert + 1)
    return chances(np.tile(1.0 / ranks, (model.n_layers, 1)), model.n_expert_used)


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Predicts the times of plans of one model from the measured speed of this machine.

    uses: the probability that a token uses each expert, float64 [n_layers, n_expert]. profiled:
    whether earlier runs measured these probabilities. Otherwise they are assumed to be equal.
    """

    model: ExpertModel
    disk: Bandwidth
    speeds: Speeds
    uses: np.ndarray
    profiled: bool = True
    _costs: dict[tuple[tuple[int, ...], str], Costs] = field(default_factory=dict)

    def of_plan(
        self,
        plan: Plan,
        config: Config,
        skips: Skips | None = None,
        n_cells: int = 0,
        uses: np.ndarray | None = None,
    ) -> PlanTime:
        """Return a predictor of the seconds per prompt and per token under one plan.

        - config: the configuration of the plan.
        - skips: the loss that the plan's policy may cause by skipping experts, or None if it skips
          none.
        - n_cells: the number of context tokens in use.
        - uses: the probability that a token uses each expert, [n_layers, n_expert]. None stands for
          the field `uses` of this TimeModel.

        Operations that were never timed are timed now, which takes some seconds. Raises NativeError
        if an operation cannot be timed.
        """
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
