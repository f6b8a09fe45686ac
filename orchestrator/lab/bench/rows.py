"""From what the processes printed to the figures of one case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.lab.bench.cases import Case
from orchestrator.lab.bench.job import DECODE, PROMPT

Result = dict[str, Any]


def named(run: Result, name: str) -> list[Result]:
    """The parts of one run that have this name."""
    return [part for part in run["parts"] if part["name"] == name]


def times_ms(run: Result, name: str) -> list[float]:
    """All times of the parts of this name."""
    return [each for part in named(run, name) for each in part["ms"]]


def median_ms(runs: Sequence[Result], name: str) -> list[float]:
    """For each run, the median time of the parts of this name.

    Speeds come from medians, of a run's times and then of the runs: other work on the machine
    moves a mean far more.
    """
    return [float(np.median(times_ms(run, name))) for run in runs]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over the runs of a ratio within a run: a machine's speed drifts."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def store_figures(parts: Sequence[Result]) -> Result:
    """Hits, bytes and the mix of precisions over parts of a managed run; {} of others."""
    stores = [part["store"] for part in parts if "store" in part]
    if not stores:
        return {}
    tokens = sum(part["tokens"] for part in parts)
    requests = sum(each["requests"] for each in stores)
    routed = {key: sum(each["routed"][key] for each in stores) for key in stores[0]["routed"]}
    total = sum(routed.values())
    return {
        "hit_rate": sum(each["hits"] for each in stores) / requests if requests else None,
        "bytes": sum(each["bytes"] for each in stores),
        "bytes_per_token": sum(each["bytes"] for each in stores) / tokens,
        "needed_bytes_per_token": sum(each["needed_bytes"] for each in stores) / tokens,
        "wait_ms_per_token": sum(each["wait_ms"] for each in stores) / tokens,
        "mix": {key: n / total if total else 0.0 for key, n in routed.items()},
    }


def failure(runs: Sequence[Result]) -> Result:
    """{"error": why} where a run failed, else {}."""
    return next(({"error": each["error"]} for each in runs if "error" in each), {})


def case_row(case: Case, runs: Sequence[Result], limit_bytes: int | None) -> Result:
    """The figures of one case over its runs: decode speed, TTFT, store, memory.

    p99 is that of all decode steps, or prompts, together.
    """
    row: Result = {"name": case.name, "cap": case.cap, "role": case.role}
    row["limit_bytes"] = limit_bytes
    if failed := failure(runs):
        return row | failed
    steps = [each for run in runs for each in times_ms(run, DECODE)]
    medians, ttft = median_ms(runs, DECODE), median_ms(runs, PROMPT)
    tpot_ms = statistics.median(medians)
    row |= {
        "tokens": len(steps),
        "tpot_ms_p50": tpot_ms,
        "tpot_ms_p99": float(np.percentile(steps, 99)),
        "tpot_ms_mean": float(np.mean(steps)),
        "tpot_ms_p50_runs": medians,
        "tokens_per_s": 1e3 / tpot_ms,
        "ttft_ms": statistics.median(ttft),
        "ttft_ms_runs": ttft,
        "ttft_ms_p99": float(np.percentile([t for run in runs for t in times_ms(run, PROMPT)], 99)),
        "peak_rss_bytes": max(each["peak_rss"] for each in runs),
        "mode": runs[0].get("mode", "upstream"),
        "policy": runs[-1].get("policy", {}),
    }
    if limit_bytes and case.system == "engine":
        row["over_promise"] = row["peak_rss_bytes"] > limit_bytes
    parts = [part for run in runs for part in named(run, DECODE)]
    found = store_figures(parts)
    if found:
        by_run = [store_figures(named(run, DECODE)) for run in runs]
        row |= {
            "hit_rate": found["hit_rate"],
            "mix": found["mix"],
            "bytes_per_token": statistics.median(each["bytes_per_token"] for each in by_run),
            "needed_bytes_per_token_runs": [each["needed_bytes_per_token"] for each in by_run],
            "wait_ms_per_token": statistics.median(each["wait_ms_per_token"] for each in by_run),
            "budget_bytes": parts[0]["store"]["budget_bytes"],
            "direct_io": parts[0]["store"]["direct_io"],
        }
        callbacks = [part["callback_us"] for part in parts if part["callback_us"] is not None]
        row["callback_us_p50"] = statistics.median(callbacks) if callbacks else None
    return row
