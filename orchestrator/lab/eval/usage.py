"""What the store did while a text was judged: the mix of tiers, hits and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.engine.engine import Engine
from orchestrator.engine.loss_meter import LossMeter
from orchestrator.events import Phase
from orchestrator.lab.replay.figures import ratio
from orchestrator.native import MAX_TIERS, CStats


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Shares of the routed experts that were asked for in the high tier, in a lower one and
    not at all; the share of matrices that were computed in a lower tier; the share found in
    memory; bytes read. Shares are None where nothing was counted. kl_estimate: nats a token from
    the file's best tier, as allocation/estimate.py foresees it; None where that is not known."""

    high: float | None
    low: float | None
    skip: float | None
    computed_low: float | None
    hit_rate: float | None
    bytes_read: int
    kl_estimate: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def counters(engine: Engine) -> CStats | None:
    """The store's counters now; None on the plain path, which has no store."""
    return engine.store.stats() if engine.managed else None


def foresee_from(engine: Engine, best: str) -> LossMeter | None:
    """Attaches a meter that foresees, from here on, what the engine loses against this tier of the
    file; None where nothing can be foreseen."""
    if not engine.managed:
        return None
    estimate = engine.losses.of_plan(engine.plan, best)
    meter = None if estimate is None else LossMeter(estimate, engine.config.exact_tiers)
    engine.driver.meter = meter
    return meter


def usage_between(
    old: CStats | None, new: CStats | None, phase: Phase, losses: LossMeter | None = None
) -> StoreUsage | None:
    """What happened between two readings of the counters in steps of one phase. losses: since the
    first reading."""
    if old is None or new is None:
        return None

    def moved(name: str) -> Any:
        before, after = getattr(old, name)[phase], getattr(new, name)[phase]
        if isinstance(before, int):
            return after - before
        return [b - a for a, b in zip(before, after, strict=True)]

    routed, computed = moved("routed"), moved("computed")
    asked = sum(routed)
    requests = moved("requests")
    return StoreUsage(
        high=ratio(routed[0], asked),
        low=ratio(sum(routed[1:MAX_TIERS]), asked),
        skip=ratio(routed[MAX_TIERS], asked),
        computed_low=ratio(sum(computed[1:]), sum(computed)),
        hit_rate=ratio(moved("hits"), requests),
        bytes_read=moved("demand_bytes")
        + moved("prefetch_bytes")
        + (new.transition_bytes - old.transition_bytes),
        kl_estimate=losses.mean(phase) if losses else None,
    )
