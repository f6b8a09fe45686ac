"""Describes a loaded model: its status line, its memory, and its store's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gguf_tools.experts import DEFAULT_KV
from gguf_tools.process import rss_bytes
from gguf_tools.units import format_size
from orchestrator.events import SKIP_TIER, Phase
from orchestrator.native import MAX_TIERS, CStats, Library, Store, touched_memory
from orchestrator.plan.layouts import layout_text
from orchestrator.runtime.load import Loaded, Loader
from orchestrator.runtime.loss_meter import LossMeter


def status_line(loader: Loader, loaded: Loaded) -> str:
    """Return the status line, one line that describes how a loaded model runs.

    It names the policy, the precisions, the memory of expert slots, the micro-batch and the
    context.
    """
    plan, driver, request = loaded.plan, loaded.driver, loaded.runs.request
    up_to = "up to " if plan.shared and plan.n_ubatch > min(plan.shared.scratch) else ""
    context = f", micro-batch {up_to}{plan.n_ubatch}, context {loaded.context.n_ctx}"
    if request.needs.conversations:
        # The slots of some policies never give memory back, so the context has its own.
        aside = "set aside" if plan.slots and not (plan.shared or plan.device) else ""
        notes = ", ".join(filter(None, (aside, _in_use(loader, loaded))))
        context += f" ({notes})" if notes else ""
    if request.config.kv != DEFAULT_KV:
        context += f" in {request.config.kv}"
    if driver.store is None or driver.policy is None:
        return f"llama.cpp's own path: {plan.reason}{context}"
    slots = format_size(plan.slots.total_bytes) if plan.slots else "no memory"
    stats = driver.store.stats()
    direct = "direct I/O" if stats.direct_io else "buffered I/O"
    pinned = stats.host_pinned or not loader.on_gpu
    parts = [f"managed: {driver.policy.describe()}", f"{slots} for experts", direct]
    if not pinned:
        parts.append("host memory not pinned")
    # If all experts are in memory, the policy may have learned since the plan was made. Settings of
    # other policies can change while they run.
    loses = loaded.runs.loses
    if not driver.policy.wants.all_resident:
        loses = loader.planner.loses(replace(plan, placement=driver.policy.placement))
    if loader.on_disk:
        parts.append(f"{loader.on_disk} on disk")
    endings = (layout_text(driver.store.spec), loses.text, _served(driver.store, loader), context)
    return ", ".join(parts) + "".join(endings)


def _in_use(loader: Loader, loaded: Loaded) -> str:
    """Return a phrase about the number of context tokens in use, such as "120 in use".

    The number may be estimated from the memory of the KV cells. Return "" if it is 0 or unknown.
    """
    shared, n = loaded.plan.shared, len(loaded.steps.cached)
    if n or shared is None:
        return f"{n} in use" if n else ""
    n = shared.cells(touched_memory(loader.bindings.library()).cache.used)
    return f"{n} in use" if n else ""


def memory_now(library: Library, loaded: Loaded, prompts: int) -> dict[str, int]:
    """Return the host memory of a loaded model, divided by purpose, as {purpose: bytes}.

    All entries except "free" are memory in use. "free" is the unused part of the memory cap
    (--ram). "stranded context" is memory of KV cells that are no longer in use, but still resident.
    "rest of the process" is resident memory that no other entry explains. The result is empty if
    the model is on a GPU.

    prompts: bytes that copies of earlier conversations take.
    """
    plan, driver = loaded.plan, loaded.driver
    if plan.device:
        return {}
    touched = touched_memory(library)
    used = min(touched.cache.used, touched.cache.resident)
    slots = driver.store.stats().slot_bytes_in_use if driver.store is not None else None
    parts = {
        "dense weights": plan.dense_bytes,
        "experts": plan.expert_bytes if slots is None else int(slots),
        "context": used,
        "stranded context": touched.cache.resident - used,
        "scratch": touched.scratch.resident + touched.work.resident,
        "kept prompts": prompts,
    }
    parts["rest of the process"] = max(0, rss_bytes() - sum(parts.values()))
    return parts | {"free": max(0, plan.ram_bytes - sum(parts.values()))}


def _served(store: Store, loader: Loader) -> str:
    """Return a phrase for the status line that says how a GPU gets experts that it lacks.

    Return "" without a GPU.
    """
    if loader.gpu is None:
        return ""
    asked, served = store.spec.misses.mode, store.misses()
    return f", misses: {served}" + (f" ({asked} is not possible)" if served != asked else "")


# Shares by the name of a tier, the best first; SKIP_TIER stands for skipped experts.
Mix = dict[str, float]


def decided(routed: Sequence[int], tiers: Sequence[str], skip: bool) -> Mix | None:
    """Return the precisions that the policy chose for routed experts, as {precision: share}.

    Return None if no expert was routed. routed: number of routed experts in each tier, [MAX_TIERS +
    1]. The last item counts skipped experts. tiers: names of the precisions in use. skip: whether
    experts may be skipped; the result then has an entry for skipped experts.
    """
    total = sum(routed)
    if not total:
        return None
    mix = {name: n / total for name, n in zip(tiers, routed, strict=False)}
    return mix | {SKIP_TIER: routed[MAX_TIERS] / total} if skip else mix


def computed(matrices: Sequence[int], tiers: Sequence[str]) -> Mix | None:
    """Return the precisions in which expert matrices were computed, as {precision: share}.

    Return None if no matrix was computed. A matrix may be computed in a better precision than the
    policy decided, if that is in memory. matrices: number of matrices in each tier, [MAX_TIERS].
    tiers: names of the precisions in use.
    """
    total = sum(matrices)
    return {n: m / total for n, m in zip(tiers, matrices, strict=False)} if total else None


class StoreCosts:
    """Measurements of an expert store (a cache of expert weights) since this object was created.

    `fields` returns them: cache hit rates, bytes read, time spent waiting for reads, precisions of
    the experts, and the estimated quality loss.
    """

    def __init__(
        self,
        store: Store | None,
        tiers: Sequence[str],
        skip: bool = False,
        losses: LossMeter | None = None,
    ) -> None:
        """Begin to count. store: None for a model without an expert store.

        tiers: names of the precisions in use, best first. skip: whether experts may be skipped.
        losses: adds up the estimated quality loss, or None if it is not known.
        """
        self._store = store
        self._losses = losses
        self._mark = losses.mark() if losses else None
        self._halved_before = losses.halved_tokens if losses else 0
        self._tiers, self._skip = tiers, skip
        self._before = store.stats() if store else CStats()
        self._calls = store.calls if store else 0

    def fields(self) -> dict[str, Any]:
        """Return the measurements of the expert store since this object was created, by name.

        Examples are hit_rate, bytes_read and wait_ms. The names and units are those of
        GenerationStats.
        """
        store = self._store
        if store is None:
            best = {self._tiers[0]: 1.0}
            return {
                **dict.fromkeys(("hit_rate", "prefill_hit_rate", "callback_us_p50")),
                **{"bytes_read": 0, "wait_ms": 0.0, "mix": best, "computed": best},
            }
        old, new = self._before, store.stats()
        bytes_read, wait_ms = new.transition_bytes - old.transition_bytes, 0.0
        for phase in Phase:
            bytes_read += new.demand_bytes[phase] - old.demand_bytes[phase]
            bytes_read += new.prefetch_bytes[phase] - old.prefetch_bytes[phase]
            wait_ms += (new.wait_us[phase] - old.wait_us[phase]) / 1000.0
        mix, as_computed = self._mixes(old, new)
        return {
            "hit_rate": _rate(old, new, Phase.DECODE),
            "prefill_hit_rate": _rate(old, new, Phase.PREFILL),
            "bytes_read": bytes_read,
            "wait_ms": wait_ms,
            "mix": mix,
            "computed": as_computed,
            "callback_us_p50": store.callback_us(since=self._calls),
            **self._lost(),
        }

    def _lost(self) -> dict[str, Any]:
        """Return the estimated quality loss (KL divergence) as three fields of GenerationStats.

        kl_estimate is the loss for texts that are sensitive to errors, in nats per token. kl_low is
        the loss for the least sensitive texts. The losses are those of the decoded tokens, or of
        the prompt if no token was decoded. limit_halved is whether a policy could use only half of
        the allowed loss for some of the tokens.
        """
        losses = self._losses
        if losses is None or self._mark is None:
            return {"kl_estimate": None, "kl_low": None, "limit_halved": False}
        found = losses.since(self._mark, Phase.DECODE)
        if found is None:
            found = losses.since(self._mark, Phase.PREFILL)
        return {
            "kl_estimate": found,
            "kl_low": None if found is None else losses.estimate.spread * found,
            "limit_halved": losses.halved_tokens > self._halved_before,
        }

    def _mixes(self, old: CStats, new: CStats) -> tuple[Mix, Mix]:
        """Return (share of experts per decided precision, share per computed precision).

        The shares are those of decoded tokens, or of the prompt if no token was decoded. old, new:
        the store's counters at the start and at the end.
        """
        for phase in (Phase.DECODE, Phase.PREFILL):
            routed = _increase(old.routed[phase], new.routed[phase])
            mix = decided(routed, self._tiers, self._skip)
            if mix is not None:
                matrices = _increase(old.computed[phase], new.computed[phase])
                return mix, computed(matrices, self._tiers) or {}
        return {self._tiers[0]: 1.0}, {self._tiers[0]: 1.0}


def _rate(old: CStats, new: CStats, phase: Phase) -> float | None:
    asked = new.requests[phase] - old.requests[phase]
    return (new.hits[phase] - old.hits[phase]) / asked if asked else None


def _increase(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip(before, after, strict=True)]
