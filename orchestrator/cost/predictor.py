"""What plans of one model will take on this machine: `orchestrator.cost.predict`, with what was
measured here."""

from __future__ import annotations

from copy import deepcopy

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.process import default_threads, usable_cores
from orchestrator.cache.profile import HotnessKeeper, UsageKeeper
from orchestrator.config import Config
from orchestrator.cost.disk import Bandwidth
from orchestrator.cost.predict import (
    FORESEEN,
    Costs,
    Prediction,
    Reading,
    Residency,
    cached,
    chances,
    resident,
    uniform_uses,
)
from orchestrator.cost.products import POOL_BYTES
from orchestrator.cost.speeds import FILE, OWN, UPSTREAM, Speeds, model_costs
from orchestrator.errors import ProfileError
from orchestrator.events import Phase
from orchestrator.memory.footprint import process_bytes
from orchestrator.memory.hardware import probe
from orchestrator.memory.layouts import wants_own_layout
from orchestrator.memory.plan import MemoryPlan
from orchestrator.native.llama import Bindings
from orchestrator.policy.base import Learns

# A cap that leaves less is too small for any model.
_LEAST_SPARE_BYTES = 8 << 20


def spare_bytes(config: Config, model: ExpertModel) -> int:
    """What measuring this machine may take for a moment: most of what the cap leaves beside the
    process, before a model is loaded."""
    free = probe().memory_bytes
    left = min(config.ram or free, free) - process_bytes(model, config)
    return max(_LEAST_SPARE_BYTES, left * 3 // 4)


def known_uses(config: Config, model: ExpertModel) -> np.ndarray | None:
    """How often tokens use each expert, as far as earlier runs said: [n_layers, n_expert], rows sum
    to the experts that a token uses. None where nothing is known."""
    remembered = config.with_changes(remember=True)
    counts = UsageKeeper(remembered, model).recall()
    if counts is None:
        try:
            counts = HotnessKeeper(remembered, model).recall()
        except (ProfileError, OSError):
            counts = None
    return None if counts is None else chances(counts, model.n_expert_used)


def uses_or_alike(known: np.ndarray | None, model: ExpertModel) -> np.ndarray:
    """Uses that are known; else as if all experts were used alike. As known_uses has them."""
    if known is None:
        return uniform_uses(model.n_layers, model.n_expert, model.n_expert_used)
    return known


def reading_of(disk: Bandwidth, config: Config, bytes_per_s: float | None = None) -> Reading:
    """A disk that was measured. Reading takes a core from computing where there are no more cores
    than threads that compute. bytes_per_s: a speed of another moment."""
    computing = config.threads or default_threads()
    taken = disk.core_s_per_byte if computing >= usable_cores() else 0.0
    return Reading(bytes_per_s or disk.bytes_per_s, disk.latency_s, taken)


class Predictor:
    """Predictions for one model, this many threads and this disk. Close it: it keeps what it
    measured for the next one."""

    def __init__(
        self,
        bindings: Bindings,
        config: Config,
        model: ExpertModel,
        reading: Reading,
        uses: np.ndarray | None = None,
        fresh: bool = False,
    ) -> None:
        """reading: the disk. uses: as Residency has them; None for what is known of earlier runs,
        or else all experts alike. fresh: what is known of this machine is measured again."""
        self._bindings, self._config, self._model, self._reading = bindings, config, model, reading
        pool = min(POOL_BYTES, spare_bytes(config, model))
        self._speeds = Speeds(bindings, config.threads or default_threads(), fresh, pool)
        self._costs: dict[tuple[tuple[int, ...], str], Costs] = {}
        known = known_uses(config, model) if uses is None else uses
        self.profiled = known is not None
        self.uses = uses_or_alike(known, model)

    def costs(self, tiers: tuple[int, ...], layout: str) -> Costs:
        """Of experts in these tiers of the file. Raises NativeError."""
        if (tiers, layout) not in self._costs:
            found = model_costs(self._speeds, self._bindings, self._model, tiers, layout)
            self._costs[tiers, layout] = found
        return self._costs[tiers, layout]

    def of_plan(self, plan: MemoryPlan, config: Config | None = None) -> Prediction:
        """Of a plan that plan_memory made with a config, in the layout that it would have. Raises
        NativeError."""
        config = config or self._config
        if plan.policy is None or plan.shape is None or plan.slots is None:
            repacks = config.use_extra_bufts is not False
            layout = UPSTREAM if repacks else FILE
            tiers = np.zeros(self.uses.shape, np.int64)
            there, asked = resident(tiers, self.uses, 1), False
        else:
            layout = OWN if wants_own_layout(config, plan) else FILE
            there = expected(plan, self.uses)
            asked = Phase.DECODE in plan.policy.wants.asked_in
        return self._prediction(plan.tiers, layout, there, plan.n_ubatch, asked)

    def of_tiers(self, tiers: np.ndarray, n_ubatch: int, layout: str = OWN) -> Prediction:
        """Of every expert in memory in a tier of the file of its own, [n_layers, n_expert], in a
        layout of orchestrator.cost.speeds. Raises NativeError."""
        used = tuple(sorted(set(tiers.ravel().tolist()) & set(range(len(self._model.tiers)))))
        place = np.full(256, 255)
        place[list(used)] = range(len(used))
        there = resident(place[tiers], self.uses, len(used))
        return self._prediction(used, layout, there, n_ubatch)

    def _prediction(
        self,
        tiers: tuple[int, ...],
        layout: str,
        there: Residency,
        n_ubatch: int,
        asked: bool = False,
    ) -> Prediction:
        return Prediction(self.costs(tiers, layout), there, self._reading, n_ubatch, asked)

    @property
    def disturbed(self) -> bool:
        """Whether other programs ran whenever something was measured that was asked for."""
        return self._speeds.disturbed

    def close(self) -> None:
        """Keeps what was measured."""
        self._speeds.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def expected(plan: MemoryPlan, uses: np.ndarray) -> Residency:
    """What a managed plan will have in memory, where tokens use experts with these chances: each
    in the tier in which its policy starts it, where all stay in memory; else what was used last."""
    assert plan.policy is not None and plan.shape is not None and plan.slots is not None
    policy, shape = plan.policy, plan.shape
    if policy.wants.all_resident:
        started = deepcopy(policy)
        if isinstance(started, Learns):
            started.set_hotness(uses)
        tiers = np.full(uses.shape, len(shape.tiers) - 1)
        for layer, expert, tier in started.start():
            tiers[layer, expert] = tier
        return resident(tiers, uses, len(shape.tiers))
    foreseen = FORESEEN if policy.wants.n_ahead else 0.0
    return cached(shape, plan.slots, uses, policy.asked_mix(uses), foreseen)
