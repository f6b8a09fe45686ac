"""`moe-edge replay`: compares a policy with plain LRU, Belady's optimum and the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf_tools.units import format_size
from orchestrator.allocation.look_ahead import LookAhead
from orchestrator.cost.losses import calibrate_command, no_losses
from orchestrator.errors import ConfigError, PolicyError, TiersError, TraceError
from orchestrator.events import SKIP_TIER, Phase
from orchestrator.lab.replay.figures import belady, counted, figures, ratio, recorded_figures
from orchestrator.lab.replay.simulate import (
    Compute,
    Outcome,
    Setup,
    Transport,
    foreseen,
    set_up,
    simulate,
)
from orchestrator.lab.replay.trace import Header, Trace
from orchestrator.lab.table import Column, Row, Table, percent
from orchestrator.native import MAX_AHEAD, Library
from orchestrator.plan.options import unused_option
from orchestrator.plan.planning import tiers_between
from orchestrator.policy import (
    BASELINE,
    PLAIN,
    POLICIES,
    Policy,
    policy_class,
    policy_settings,
    spends_loss,
)
from orchestrator.settings import MORE, SIZE, Settings, setting

# Values of the options `link` and `wait`: how reads share the disk, and which reads a matrix
# product waits for.
LINKS = SHARED, RIGID = ("shared", "rigid")
WAITS = MATRIX, WHOLE = ("matrix", "whole")


@dataclass(frozen=True)
class ReplayOptions(Settings):
    """Options of a replay. An option that is None has the same value as in the recorded run.

    `settings` maps the names of policy settings to values. Raises SettingError for a value out of
    range.
    """

    policy: str | None = setting(
        None,
        lambda: f"Policy with which the trace is replayed: {', '.join(POLICIES)}.",
        shown="as recorded",
    )
    expert_ram: int | None = setting(
        None, "Memory limit for the experts (expert slots).", unit=SIZE, shown="as recorded"
    )
    high_tier: str | None = setting(
        None, "High precision, such as q4_k.", metavar="TIER", shown="as recorded"
    )
    low_tier: str | None = setting(
        None,
        "Low precision, such as q2_k. The value skip leaves out less important experts.",
        metavar="TIER",
        shown="as recorded",
    )
    bandwidth: int | None = setting(
        None,
        "Bandwidth of the simulated disk in bytes per second, such as 2GB.",
        unit=SIZE,
        shown="measured when recorded",
    )
    latency_us: int | None = setting(
        None,
        "Latency of a read of the simulated disk, in microseconds.",
        within=(0, 10**7),
        shown="measured when recorded",
        group=MORE,
    )
    io_threads: int | None = setting(
        None, "Concurrent reads.", within=(1, 64), shown="as recorded", group=MORE
    )
    compute_ms: float | None = setting(
        None,
        "Compute time of a decoded token, without waits, in milliseconds.",
        metavar="MS",
        within=(0, 10**6),
        shown="as recorded",
        group=MORE,
    )
    link: str = setting(
        SHARED,
        "Order of reads from the simulated disk. shared: demand reads first, outdated prefetches "
        "cancelled, as in a real run. rigid: demand reads and prefetches in the order of their "
        "requests.",
        choices=LINKS,
        group=MORE,
    )
    wait: str = setting(
        MATRIX,
        "When a matrix of an expert can be computed: after this matrix has been read (matrix), "
        "or after the whole expert has been read (whole).",
        choices=WAITS,
        group=MORE,
    )
    losses: Path | None = setting(
        None,
        "Take the quality losses from this loss table. The table may be of another model: it is "
        "stretched to the layers and experts of the trace.",
        shown="as recorded",
        group=MORE,
    )
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.settings.items():
            policy_settings()[name].check(value)


def replay(library: Library, trace: Trace, options: ReplayOptions) -> dict[str, Any]:
    """Replay a trace with the chosen policy and with the policy lru, and compare the results.

    Both replays start with an empty expert store, and have the same simulated disk and memory. The
    result also has two limits: the hits of an optimal cache, and the shortest possible time with
    these hits.

    Returns a dict for JSON. Raises MoeEdgeError if the trace cannot be replayed with these options.
    """
    header = trace.header
    if options.policy == PLAIN:
        raise ConfigError(
            f"--policy {PLAIN} cannot be replayed, because it has no cache of experts: choose "
            f"another policy"
        )
    speed, time = speed_and_time(header, options)
    asked = set_up_for(trace, options, policy_class(options.policy or header.policy), speed)
    name = asked.policy.name
    plain = asked
    if name != BASELINE:
        bare = replace(options, settings={})
        plain = set_up_for(trace, bare, policy_class(BASELINE), speed)
    runs = {name: _figures(trace, asked, simulate(library, trace, asked, speed, time))}
    if plain is not asked:
        runs[BASELINE] = _figures(trace, plain, simulate(library, trace, plain, speed, time))
    best = belady(trace, plain.shape, plain.slots, plain.tiers[0])
    tokens, compute_us = _work(trace, time)
    # The bound is the longer of the compute time and the time to read the optimal cache's misses.
    least_ms = [
        max(computing, missed * 1e6 / speed.bytes_per_s) / 1000
        for computing, missed in zip(compute_us, best["miss_bytes"], strict=True)
    ]
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
        "link": options.link,
        "wait": options.wait,
        "transition_rate": asked.policy.wants.transition_rate,
        "compute_ms": {
            f"{phase.name.lower()}_token": ratio(compute_us[phase] / 1000, tokens[phase])
            for phase in Phase
        },
        "dense_share": list(header.dense_share),
        "runs": runs,
        "belady": {
            phase.name.lower(): {
                **{name: by_phase[phase] for name, by_phase in best.items()},
                "hit_rate": ratio(best["hits"][phase], best["requests"][phase]),
            }
            for phase in Phase
        },
        "bound": {
            "prefill_ms": least_ms[Phase.PREFILL] if tokens[Phase.PREFILL] else None,
            "tpot_ms_mean": ratio(least_ms[Phase.DECODE], tokens[Phase.DECODE]),
        },
        "recorded": {"policy": header.policy, **recorded_figures(trace)},
    }


def speed_and_time(header: Header, options: ReplayOptions) -> tuple[Transport, Compute]:
    """Return the disk speed and the compute times with which a recorded run is simulated again.

    The first value is a Transport, and the second is a Compute. Their values are those of the
    recording, unless `options` has others.

    - header: facts about the recorded run.
    - options: options of the simulation.

    Raises ConfigError if the disk speed was not recorded and is not in the options.
    """
    speed = Transport(
        options.bandwidth or header.read_bytes_per_s,
        header.read_latency_us if options.latency_us is None else options.latency_us,
        options.io_threads or header.io_threads,
    )
    if speed.bytes_per_s == 0:
        raise ConfigError("the trace has no measured bandwidth: give one, such as --bandwidth 2GB")
    decode_us = None if options.compute_ms is None else 1000 * options.compute_ms
    return speed, Compute(None, decode_us, header.dense_share)


def set_up_for(
    trace: Trace, options: ReplayOptions, policy: type[Policy], speed: Transport
) -> Setup:
    """Create a policy and its memory for experts, ready for the replay of a trace.

    - policy: the class of the policy.
    - speed: the speed of the simulated disk, with the number of concurrent reads.

    Raises MoeEdgeError if the policy cannot be replayed with these options.
    """
    header = trace.header
    for name in options.settings:
        if name not in policy.Settings.declared():
            raise unused_option(name, policy.name)
    recorded = header.settings if header.policy == policy.name else {}
    settings = policy.Settings.changed(recorded, options.settings)
    if isinstance(settings, LookAhead):
        depth = int(trace.arrays["event_ahead"].max(initial=0))
        if depth == trace.n_layers - 1:
            depth = MAX_AHEAD  # the recording predicts all layers
        settings = settings.limited(depth, options.settings)
    tiers, skip = _tiers(trace, options, policy)
    expert_bytes = options.expert_ram or header.expert_bytes
    estimate = foreseen(trace, tiers, options.losses)
    if spends_loss(policy.name) and estimate is None:
        raise no_losses(
            f"the trace was recorded without a loss table: run {calibrate_command(header.model)} "
            f"and record the trace again"
        )
    try:
        return set_up(
            trace,
            policy,
            expert_bytes,
            settings,
            tiers,
            replace(header.rules, skip=skip),
            speed.threads,
            estimate,
            whole_experts=options.wait == WHOLE,
            rigid=options.link == RIGID,
        )
    except TiersError as error:
        raise PolicyError(f"{error.problem}: {_more_tiers(trace, tiers)}") from None


def _more_tiers(trace: Trace, tiers: tuple[int, ...]) -> str:
    """Return the advice, in an error message, for a policy that needs a second precision."""
    lower = trace.header.tiers[tiers[0] + 1 :]
    if lower:
        return f"add --low-tier {lower[0]} (a lower precision of the recorded model)"
    return "record a new trace, with a model file that is packed with several precisions"


def _tiers(
    trace: Trace, options: ReplayOptions, policy: type[Policy]
) -> tuple[tuple[int, ...], bool]:
    """Return the precisions that a policy uses in a replay, and whether it may skip experts.

    The precisions are indices into the trace's tiers, best first. Raises TraceError if the trace
    lacks a requested tier.
    """
    header = trace.header
    high = options.high_tier or header.in_use[0]
    lower = SKIP_TIER if header.rules.skip else header.in_use[-1]
    low = options.low_tier or (lower if header.rules.skip or len(header.in_use) > 1 else None)
    first = trace.tier_index(high)
    same = options.high_tier is None and options.low_tier is None
    if same and header.policy == policy.name:
        in_use = tuple(trace.tier_index(name) for name in header.in_use)
        return in_use, header.rules.skip
    if policy.precisions.most == 1:
        return (first,), False
    if low in (None, SKIP_TIER) or (policy.precisions.skips and options.low_tier is None):
        return (first,), policy.precisions.skips or low == SKIP_TIER
    last = trace.tier_index(low or "")
    if last <= first:
        raise TraceError(f"the low tier {low} must have fewer bits than the high tier {high}")
    return tiers_between(policy, first, last, len(header.tiers)), policy.precisions.skips


def _work(trace: Trace, time: Compute) -> tuple[list[int], list[float]]:
    """Return the number of tokens and the compute time in microseconds of a trace.

    Each list has the values of the phases prefill and decode.
    """
    tokens, compute_us = [0, 0], [0.0, 0.0]
    for step in trace.steps():
        tokens[step.phase] += step.n_tokens
        compute_us[step.phase] += sum(time.layers_ns(step)) / 1000
    return tokens, compute_us


def _figures(trace: Trace, setup: Setup, outcome: Outcome) -> dict[str, Any]:
    stats = outcome.stats
    found = figures(
        setup.shape.tiers,
        setup.policy.rules.skip,
        counted(stats),
        [stats.wait_us[phase] / 1000 for phase in Phase],
        trace.arrays["step_phase"],
        outcome.step_us / 1000,
    )
    names = (
        *("transition_bytes", "experts_promoted", "experts_demoted", "promotions", "evictions"),
        *("prefetch_used", "prefetch_wasted"),
    )
    lost = None if outcome.losses is None else outcome.losses.mean(Phase.DECODE)
    return found | {name: getattr(stats, name) for name in names} | {"kl_estimate": lost}


def render(result: dict[str, Any]) -> str:
    """Format the result of a replay as a table for a terminal."""
    tokens, prompt = result["decode_tokens"], result["prefill_tokens"]
    compute = result["compute_ms"]["decode_token"] or result["compute_ms"]["prefill_token"]
    odd = f", --link {RIGID}" if result["link"] == RIGID else ""
    odd += f", --wait {WHOLE}" if result["wait"] == WHOLE else ""
    heading = [
        f"model {result['model']}: {prompt} prompt tokens, {tokens} decoded tokens; memory for "
        f"experts: {format_size(result['expert_bytes'])}",
        f"simulated disk: {format_size(result['bandwidth'])}/s, latency {result['latency_us']} "
        f"us, {result['io_threads']} concurrent reads{odd}",
        f"compute time: {compute:.2f} ms per token "
        f"({100 * result['dense_share'][Phase.DECODE]:.0f} % outside the experts)",
    ]
    best, bound, recorded = result["belady"]["decode"], result["bound"], result["recorded"]
    rows = [
        *({"name": name, **run} for name, run in result["runs"].items()),
        {
            "name": f"Belady, {BASELINE} slots",
            "decode": {"hit_rate": best["hit_rate"], "demand_bytes": best["miss_bytes"]},
        },
        {
            "name": "bound, one precision",
            "tpot_ms_mean": bound["tpot_ms_mean"],
            "ttft_ms": bound["prefill_ms"],
        },
        {"name": f"recorded {recorded['policy']}", **recorded},
    ]

    def a_token(*names: str) -> Callable[[Row], float | None]:
        """Return a function that sums decode metrics of a row, per decoded token.

        `names` are the keys of the metrics. The function returns None if all of them are missing.
        """

        def found(row: Row) -> float | None:
            decode = row.get("decode", {})
            here = [decode[name] for name in names if name in decode]
            return ratio(sum(here), tokens) if here else None

        return found

    columns = [
        Column("", "name", left=True),
        Column("hits", lambda row: row.get("decode", {}).get("hit_rate"), percent(1, " %")),
        Column("read/token", a_token("demand_bytes", "prefetch_bytes"), format_size),
        Column("wait/token", a_token("wait_ms"), _ms),
        Column("TPOT p50", "tpot_ms_p50", _ms),
        Column("mean", "tpot_ms_mean", _ms),
        Column("p99", "tpot_ms_p99", _ms),
        Column("TTFT", "ttft_ms", _ms),
    ]
    notes = []
    for name, run in result["runs"].items():
        if run["kl_estimate"]:
            notes.append(f"{name}: estimated quality loss {run['kl_estimate']:.4f} nats per token")
        if run["transition_bytes"]:
            ups, downs = run["experts_promoted"], run["experts_demoted"]
            notes.append(
                f"{name}: experts changed to a higher precision {ups} times, and to a lower one "
                f"{downs} times"
            )
    parts = ["\n".join(heading), Table("", columns, rows, notes).text()]
    parts.append(f"policy: {result['policy']}, look-ahead {result['n_ahead']}")
    return "\n\n".join(parts)


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 1e4 else f"{value / 1000:.0f} s"
