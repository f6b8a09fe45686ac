"""What an engine says of itself: a line on what runs, and what one answer cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

from gguf_tools.experts import DEFAULT_KV
from gguf_tools.process import peak_rss_bytes, rss_bytes
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.events import SKIP_TIER, GenerationStats, Phase, percentile
from orchestrator.memory.layouts import layout_text
from orchestrator.native import MAX_TIERS, CStats, Library, Store, touched_memory
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.load import Loaded, Loader
from orchestrator.runtime.loss_meter import LossMeter


def mode_line(config: Config, loader: Loader, loaded: Loaded) -> str:
    """The path, the policy and its slots, how misses are served, the micro-batch, the context."""
    plan, driver = loaded.plan, loaded.driver
    most = "up to " if plan.shared and plan.n_ubatch > min(plan.shared.scratch) else ""
    context = f", micro-batch {most}{plan.n_ubatch}, context {loaded.context.n_ctx}"
    if config.conversations:
        # of a policy whose slots give way to nothing
        aside = "set aside" if plan.slots and not (plan.shared or plan.device) else ""
        notes = ", ".join(filter(None, (aside, _in_use(loader, loaded))))
        context += f" ({notes})" if notes else ""
    if config.kv != DEFAULT_KV:
        context += f" in {config.kv}"
    if not isinstance(driver, Driver):
        return f"llama.cpp's own path: {plan.reason}{context}"
    slots = format_size(plan.slots.total_bytes) if plan.slots else "no"
    stats = driver.store.stats()
    direct = "direct I/O" if stats.direct_io else "buffered I/O"
    pinned = stats.host_pinned or not loader.on_gpu
    pageable = "" if pinned else ", host memory not pinned"
    text = f"managed: {driver.policy.describe()}, {slots} of expert slots, {direct}{pageable}"
    # A policy that keeps all experts in memory has learned since it started; others have settings
    # that change while they run.
    loses = loaded.runs.loses
    if not driver.policy.wants.all_resident:
        loses = loader.planner.loses(replace(plan, placement=driver.policy.placement))
    if loader.on_disk:
        text += f", {loader.on_disk} on disk"
    return text + layout_text(driver.store.spec) + loses.text + _served(driver, loader) + context


def _in_use(loader: Loader, loaded: Loaded) -> str:
    """How many tokens of the context; of a server's sequences by the memory that they take. Empty
    where that is none, or not known."""
    shared, n = loaded.plan.shared, len(loaded.steps.cached)
    if n or shared is None:
        return f"{n} in use" if n else ""
    n = shared.cells(touched_memory(loader.bindings.library()).cache.used)
    return f"{n} in use" if n else ""


def memory_now(library: Library, loaded: Loaded, prompts: int) -> dict[str, int]:
    """What of the cap on the host's memory is in use, by what for, and what is free, in bytes;
    empty where the model lies on a GPU. prompts: what kept ones take, as far as that is known.
    Stranded is what a cache still has of cells that hold no token; the rest of the process is what
    the system counts beyond all of these."""
    plan, driver = loaded.plan, loaded.driver
    if plan.device:
        return {}
    touched = touched_memory(library)
    used = min(touched.cache.used, touched.cache.resident)
    slots = driver.store.stats().slot_bytes_in_use if isinstance(driver, Driver) else None
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


def _served(driver: Driver, loader: Loader) -> str:
    """How a GPU gets the experts that it lacks."""
    if loader.gpu is None:
        return ""
    asked, served = driver.store.spec.misses.mode, driver.store.misses()
    return f", misses: {served}" + (f" ({asked} cannot be had)" if served != asked else "")


# Shares by the name of a tier, best first, and of the tier of no bytes.
Mix = dict[str, float]


def decided(routed: Sequence[int], tiers: Sequence[str], skip: bool) -> Mix | None:
    """Shares of the routed experts by the tier that was decided; None where none was routed.

    routed [MAX_TIERS + 1]: experts by tier, the skipped ones last. tiers: names of those in use.
    skip: whether experts may be skipped."""
    total = sum(routed)
    if not total:
        return None
    mix = {name: n / total for name, n in zip(tiers, routed, strict=False)}
    return mix | {SKIP_TIER: routed[MAX_TIERS] / total} if skip else mix


def computed(matrices: Sequence[int], tiers: Sequence[str]) -> Mix | None:
    """Shares of the matrices by the tier that was computed; None where none was: a better copy in
    memory is used where a lower one was asked for. matrices [MAX_TIERS]"""
    total = sum(matrices)
    return {n: m / total for n, m in zip(tiers, matrices, strict=False)} if total else None


class StoreCosts:
    """What a store did since this was made."""

    def __init__(
        self,
        store: Store | None,
        tiers: Sequence[str],
        skip: bool = False,
        losses: LossMeter | None = None,
    ) -> None:
        """store None: the plain path, where there is nothing to count. tiers: names of those in
        use, best first; skip: experts may be skipped. losses: None where nobody knows what lower
        tiers cost."""
        self._store = store
        self._losses = losses
        self._mark = losses.mark() if losses else None
        self._halved_before = losses.halved_tokens if losses else 0
        self._tiers, self._skip = tiers, skip
        self._before = store.stats() if store else CStats()
        self._calls = store.calls if store else 0

    def fields(self) -> dict[str, Any]:
        """The fields of GenerationStats that the store knows."""
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
        """Estimated losses of the tokens that were decoded; of the prompt's if there were none."""
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
        """As decided and as computed while decoding; in the prompt where nothing was decoded."""
        for phase in (Phase.DECODE, Phase.PREFILL):
            routed = _moved(old.routed[phase], new.routed[phase])
            mix = decided(routed, self._tiers, self._skip)
            if mix is not None:
                matrices = _moved(old.computed[phase], new.computed[phase])
                return mix, computed(matrices, self._tiers) or {}
        return {self._tiers[0]: 1.0}, {self._tiers[0]: 1.0}


class Meter:
    """Counts from its creation; token() at every chosen token; stats() at the end."""

    def __init__(self, costs: StoreCosts, prompt_tokens: int) -> None:
        self._costs, self._prompt_tokens = costs, prompt_tokens
        self.evaluated_tokens = 0
        self.finish = "cancelled"
        self._ended = False
        self._times = [perf_counter()]

    @property
    def tokens(self) -> int:
        """Tokens chosen so far, an end token left out."""
        return len(self._times) - 1 - self._ended

    def token(self, is_end: bool) -> None:
        self._times.append(perf_counter())
        self._ended = is_end

    def stats(self, mode: str, budget_bytes: int, policy: dict[str, Any]) -> GenerationStats:
        """The answer's costs until now, beside what ran, within which slots' budget, and the
        policy's own report."""
        times = self._times
        gaps_ms = [1000.0 * (b - a) for a, b in pairwise(times[1:])]
        return GenerationStats(
            ttft_ms=1000.0 * (times[1] - times[0]) if len(times) > 1 else float("nan"),
            tpot_ms_p50=percentile(gaps_ms, 50),
            tpot_ms_p99=percentile(gaps_ms, 99),
            tokens=self.tokens,
            tokens_per_s=1000.0 * len(gaps_ms) / sum(gaps_ms) if gaps_ms else float("nan"),
            prompt_tokens=self._prompt_tokens,
            evaluated_tokens=self.evaluated_tokens,
            peak_rss_bytes=peak_rss_bytes(),
            budget_bytes=budget_bytes,
            mode=mode,
            finish=self.finish,
            policy=policy,
            **self._costs.fields(),
        )


def _rate(old: CStats, new: CStats, phase: Phase) -> float | None:
    asked = new.requests[phase] - old.requests[phase]
    return (new.hits[phase] - old.hits[phase]) / asked if asked else None


def _moved(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip(before, after, strict=True)]
