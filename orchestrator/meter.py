"""What one answer costs: times here, and the native store's counters before and after."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

from gguf_tools.process import peak_rss_bytes
from orchestrator.events import GenerationStats, Phase, percentile
from orchestrator.native import MAX_TIERS, CStats, Store


class Meter:
    """Counts from its creation; token() at every chosen token; stats() at the end."""

    def __init__(self, store: Store | None, prompt_tokens: int) -> None:
        """store None: the plain path, where there is nothing to count."""
        self._store = store
        self._prompt_tokens = prompt_tokens
        self.evaluated_tokens = 0
        self.finish = "cancelled"
        self._ended = False
        self._times = [perf_counter()]
        self._before = store.stats() if store else CStats()
        self._calls = store.calls if store else 0

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
        store, times = self._store, self._times
        gaps_ms = [1000.0 * (b - a) for a, b in pairwise(times[1:])]
        hit_rate = prefill_hit_rate = callback_us = None
        bytes_read, wait_ms = 0, 0.0
        mix = {"high": 1.0, "low": 0.0, "skip": 0.0}
        if store is not None:
            old, new = self._before, store.stats()
            prefill_hit_rate = _rate(old, new, Phase.PREFILL)
            hit_rate = _rate(old, new, Phase.DECODE)
            for phase in Phase:
                bytes_read += new.demand_bytes[phase] - old.demand_bytes[phase]
                bytes_read += new.prefetch_bytes[phase] - old.prefetch_bytes[phase]
                wait_ms += (new.wait_us[phase] - old.wait_us[phase]) / 1000.0
            bytes_read += new.transition_bytes - old.transition_bytes
            mix = _mix(old, new)
            callback_us = store.callback_us(since=self._calls)
        return GenerationStats(
            ttft_ms=1000.0 * (times[1] - times[0]) if len(times) > 1 else float("nan"),
            tpot_ms_p50=percentile(gaps_ms, 50),
            tpot_ms_p99=percentile(gaps_ms, 99),
            tokens=self.tokens,
            tokens_per_s=1000.0 * len(gaps_ms) / sum(gaps_ms) if gaps_ms else float("nan"),
            prompt_tokens=self._prompt_tokens,
            evaluated_tokens=self.evaluated_tokens,
            hit_rate=hit_rate,
            prefill_hit_rate=prefill_hit_rate,
            bytes_read=bytes_read,
            wait_ms=wait_ms,
            mix=mix,
            peak_rss_bytes=peak_rss_bytes(),
            budget_bytes=budget_bytes,
            mode=mode,
            callback_us_p50=callback_us,
            finish=self.finish,
            policy=policy,
        )


def _rate(old: CStats, new: CStats, phase: Phase) -> float | None:
    asked = new.requests[phase] - old.requests[phase]
    return (new.hits[phase] - old.hits[phase]) / asked if asked else None


def _mix(old: CStats, new: CStats) -> dict[str, float]:
    """Shares of the routed experts by decided tier while decoding; of the prefill where
    nothing was decoded."""
    for phase in (Phase.DECODE, Phase.PREFILL):
        counts = [b - a for a, b in zip(old.routed[phase], new.routed[phase], strict=True)]
        total = sum(counts)
        if total:
            return {
                "high": counts[0] / total,
                "low": sum(counts[1:MAX_TIERS]) / total,
                "skip": counts[MAX_TIERS] / total,
            }
    return {"high": 1.0, "low": 0.0, "skip": 0.0}
