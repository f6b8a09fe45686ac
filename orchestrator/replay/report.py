"""`moe-edge replay`: a policy beside plain LRU, Belady's optimum and the lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_tools.units import format_size
from orchestrator.choice import DYMOE, LRU, PLAIN, USUAL_RETENTION
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.events import Phase, percentile
from orchestrator.native import MAX_TIERS, Library
from orchestrator.policy import PolicySettings
from orchestrator.replay.bounds import Optimum, belady, bound_us
from orchestrator.replay.simulate import (
    Compute,
    Outcome,
    Plan,
    Transport,
    measured,
    plan,
    simulate,
)
from orchestrator.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What differs from the recorded run; None: as recorded. bandwidth in bytes per second,
    compute_ms for each decoded token, without waits."""

    policy: str | None = None
    expert_ram: int | None = None
    retention: float | None = None
    high_tier: str | None = None
    low_tier: str | None = None
    schedule: str | None = None
    prefetch: str | None = None
    n_ahead: int | None = None
    bandwidth: int | None = None
    latency_us: int = 0
    io_threads: int | None = None
    compute_ms: float | None = None


def replay(library: Library, trace: Trace, options: ReplayOptions) -> dict[str, Any]:
    """Plays the trace with the asked-for policy and with lru, and adds the bounds: plain
    types, fit for JSON.

    Both run from an empty store, over the same transport, with slots of as many bytes.
    belady and bound take the slots of lru, in its one precision. Raises MoeEdgeError.
    """
    header = trace.header
    if options.policy == PLAIN:
        raise ConfigError("the plain path has no store to replay: choose another --policy")
    speed = Transport(
        options.bandwidth or header.read_bytes_per_s,
        options.latency_us,
        options.io_threads or header.io_threads,
    )
    if speed.bytes_per_s == 0:
        raise ConfigError("the trace has no measured bandwidth: give --bandwidth, as 2GB")
    time = measured(trace)
    if options.compute_ms is not None:
        time = Compute(time.prefill_us, 1000 * options.compute_ms)
    asked = make_plan(trace, options, options.policy or header.policy, speed)
    plain = asked if asked.name == LRU else make_plan(trace, options, LRU, speed)
    outcomes = {asked.name: simulate(library, trace, asked, speed, time)}
    if plain is not asked:
        outcomes[LRU] = simulate(library, trace, plain, speed, time)
    best = belady(trace, plain.shape, plain.slots, plain.high)
    tokens = [0, 0]
    for step in trace.steps():
        tokens[step.phase] += step.n_tokens
    return {
        "model": header.model,
        "steps": len(trace.arrays["step_phase"]),
        "prefill_tokens": tokens[Phase.PREFILL],
        "decode_tokens": tokens[Phase.DECODE],
        "expert_bytes": asked.spec.budget_bytes,
        "policy": asked.policy.describe(),
        "n_ahead": asked.spec.n_ahead,
        "bandwidth": speed.bytes_per_s,
        "latency_us": speed.latency_us,
        "io_threads": speed.threads,
        "compute_ms": {
            "prefill_token": time.prefill_us / 1000,
            "decode_token": time.decode_us / 1000,
        },
        "runs": {name: _figures(outcome) for name, outcome in outcomes.items()},
        "belady": _best(best),
        "bound": _bound(best, tokens, time, speed),
        "recorded": _recorded(trace),
    }


def make_plan(trace: Trace, options: ReplayOptions, policy: str, speed: Transport) -> Plan:
    """The named policy over a trace, with what the options change. Raises MoeEdgeError."""
    header = trace.header
    high = options.high_tier or header.high
    low = options.low_tier or header.low
    if options.retention is not None:
        retention = options.retention
    elif low is None:
        retention = 1.0
    else:
        has_one = header.policy == DYMOE and header.low is not None
        retention = header.retention if has_one else USUAL_RETENTION
    recorded_ahead = int(trace.arrays["event_ahead"].max(initial=0))
    n_ahead = recorded_ahead if options.n_ahead is None else options.n_ahead
    if n_ahead > recorded_ahead:
        raise ConfigError(
            f"the trace looks {recorded_ahead} layers ahead, not {n_ahead}: record it with the "
            f"policy dymoe"
        )
    if options.prefetch == "on" and n_ahead == 0:
        raise ConfigError("--prefetch on: the trace does not look ahead, record it with dymoe")
    if options.prefetch is not None:
        prefetch = options.prefetch
    else:
        prefetch = header.prefetch if header.policy == policy else PolicySettings().prefetch
    settings = PolicySettings(
        retention=retention,
        prefetch=prefetch,
        renormalize=header.renormalize,
        schedule=options.schedule or header.schedule,
        heavy_hitters=header.heavy_hitters,
        prompts_pass=header.prompts_pass,
    )
    expert_bytes = options.expert_ram or header.expert_bytes
    try:
        return plan(trace, policy, expert_bytes, settings, high, low, n_ahead, speed.threads)
    except BudgetError as error:
        least = error.needed_bytes
        raise BudgetError(
            f"--expert-ram {format_size(expert_bytes)} is too small: the smallest that works with "
            f"the policy {policy} is {least} bytes ({format_size(least)})",
            least,
        ) from None


def _figures(outcome: Outcome) -> dict[str, Any]:
    stats = outcome.stats
    decode = np.array([phase is Phase.DECODE for phase in outcome.phases])
    tpot = (outcome.step_us[decode] / 1000).tolist()
    first = int(decode.argmax()) if decode.any() else len(decode)
    found: dict[str, Any] = {}
    for phase in Phase:
        routed = list(stats.routed[phase])
        total = sum(routed)
        found[phase.name.lower()] = {
            "requests": stats.requests[phase],
            "hits": stats.hits[phase],
            "hit_rate": _share(stats.hits[phase], stats.requests[phase]),
            "demand_bytes": stats.demand_bytes[phase],
            "prefetch_bytes": stats.prefetch_bytes[phase],
            "wait_ms": stats.wait_us[phase] / 1000,
            "mix": {
                "high": _share(routed[0], total),
                "low": _share(sum(routed[1:MAX_TIERS]), total),
                "skip": _share(routed[MAX_TIERS], total),
            },
        }
    found |= {
        "transition_bytes": stats.transition_bytes,
        "promotions": stats.promotions,
        "evictions": stats.evictions,
        "prefetch_used": stats.prefetch_used,
        "prefetch_wasted": stats.prefetch_wasted,
        "ttft_ms": float(outcome.step_us[:first].sum() / 1000) if first else None,
        "tpot_ms_mean": float(np.mean(tpot)) if tpot else None,
        "tpot_ms_p50": percentile(tpot, 50) if tpot else None,
        "tpot_ms_p99": percentile(tpot, 99) if tpot else None,
    }
    return found


def _best(best: Optimum) -> dict[str, Any]:
    return {
        phase.name.lower(): {
            "requests": best.requests[phase],
            "hits": best.hits[phase],
            "hit_rate": _share(best.hits[phase], best.requests[phase]),
            "miss_bytes": best.miss_bytes[phase],
        }
        for phase in Phase
    }


def _bound(
    best: Optimum, tokens: list[int], time: Compute, speed: Transport
) -> dict[str, float | None]:
    least = [
        bound_us(time.of(phase) * tokens[phase], best.miss_bytes[phase], speed.bytes_per_s) / 1000
        for phase in Phase
    ]
    n = tokens[Phase.DECODE]
    return {
        "prefill_ms": least[Phase.PREFILL] if tokens[Phase.PREFILL] else None,
        "tpot_ms_mean": least[Phase.DECODE] / n if n else None,
    }


def _recorded(trace: Trace) -> dict[str, Any]:
    """What the steps of the recorded run took, for comparison."""
    a = trace.arrays
    decode = a["step_phase"] == Phase.DECODE
    tpot = (a["step_us"][decode] / 1000).tolist()
    return {
        "policy": trace.header.policy,
        "tpot_ms_mean": float(np.mean(tpot)) if tpot else None,
        "tpot_ms_p50": percentile(tpot, 50) if tpot else None,
        "tpot_ms_p99": percentile(tpot, 99) if tpot else None,
        "wait_ms": {
            phase.name.lower(): float(a["step_wait_us"][a["step_phase"] == phase].sum() / 1000)
            for phase in Phase
        },
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def render(result: dict[str, Any]) -> str:
    """The same as a table for a person."""
    tokens, prompt = result["decode_tokens"], result["prefill_tokens"]
    compute = result["compute_ms"]["decode_token"]
    lines = [
        f"{result['model']}: {prompt} prompt tokens, {tokens} decoded; "
        f"{format_size(result['expert_bytes'])} of expert slots",
        f"reads: {format_size(result['bandwidth'])}/s, {result['latency_us']} us, "
        f"{result['io_threads']} at once; computing: {compute:.2f} ms a decoded token",
        "",
        f"{'':<20}{'hits':>8}{'read/token':>13}{'wait/token':>13}"
        f"{'TPOT p50':>11}{'mean':>10}{'p99':>10}{'TTFT':>11}",
    ]
    for name, run in result["runs"].items():
        decode = run["decode"]
        moved = decode["demand_bytes"] + decode["prefetch_bytes"]
        lines.append(
            f"{name:<20}{_percent(decode['hit_rate']):>8}{_size(moved, tokens):>13}"
            f"{_ms(decode['wait_ms'] / tokens if tokens else None):>13}"
            f"{_ms(run['tpot_ms_p50']):>11}{_ms(run['tpot_ms_mean']):>10}"
            f"{_ms(run['tpot_ms_p99']):>10}{_ms(run['ttft_ms']):>11}"
        )
        if run["transition_bytes"]:
            lines.append(f"  and {format_size(run['transition_bytes'])} in the background, in all")
    best, bound, recorded = result["belady"]["decode"], result["bound"], result["recorded"]
    lines.append(
        f"{'Belady, lru slots':<20}{_percent(best['hit_rate']):>8}"
        f"{_size(best['miss_bytes'], tokens):>13}"
    )
    lines.append(
        f"{'bound, one precision':<20}{'':>8}{'':>13}{'':>13}{'':>11}"
        f"{_ms(bound['tpot_ms_mean']):>10}{'':>10}{_ms(bound['prefill_ms']):>11}"
    )
    lines.append(
        f"{'recorded ' + recorded['policy']:<20}{'':>8}{'':>13}{'':>13}"
        f"{_ms(recorded['tpot_ms_p50']):>11}{_ms(recorded['tpot_ms_mean']):>10}"
        f"{_ms(recorded['tpot_ms_p99']):>10}"
    )
    lines += ["", f"policy: {result['policy']}, look-ahead {result['n_ahead']}"]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _size(size_bytes: int, tokens: int) -> str:
    return format_size(size_bytes / tokens) if tokens else "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
