"""`moe-edge bench firm`: what each part of FIRM-MoE brings (its Tables 1 and 2, its Figure 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from orchestrator.config import Config
from orchestrator.engine import Engine
from orchestrator.events import Phase
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import REFERENCE, Case, global_lru
from orchestrator.lab.bench.child import text_stream, token_stream
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import DEMO_TEXT
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import HIT, NAME, by_cap, cap_title, memory_notes, moved
from orchestrator.lab.bench.rows import Result, case_row
from orchestrator.lab.table import Column, Table, fixed
from orchestrator.llama import Bindings
from orchestrator.native import MAX_AHEAD
from orchestrator.policy import policy_class
from orchestrator.policy.firm import FIRM
from orchestrator.replay import ReplayOptions, Trace
from orchestrator.replay.record import Disk, Recorder, dense_share
from orchestrator.replay.report import set_up_for, speed_and_time
from orchestrator.replay.simulate import simulate
from orchestrator.settings import FROM_0, FROM_1, SIZE, again, setting

NO_PREFETCH = "no prefetch"
BASE = "BB: top-k, whole experts"


@dataclass(frozen=True)
class FirmOptions(BenchOptions):
    """bandwidth, latency_us, compute_ms: of the replay. live: real runs of our own rows, too."""

    routing: str = again(BenchOptions, "routing", "zipf")
    tokens: int = again(BenchOptions, "tokens", 256)
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 32)
    caps: tuple[float, ...] = again(BenchOptions, "caps", (0.5, 0.6, 0.8))
    bandwidth: int | None = setting(
        None,
        "Reads of the replay in bytes a second.",
        within=FROM_1,
        unit=SIZE,
        shown="measured",
    )
    latency_us: int = setting(100, "Of a read in the replay.", within=FROM_0)
    compute_ms: float | None = setting(
        None, "Computing a token in the replay.", metavar="MS", within=FROM_0, shown="as recorded"
    )
    live: bool = setting(False, "Measure our own rows in real runs, too.")

    def described(self, *more: str) -> dict[str, Any]:
        return super().described("latency_us", "compute_ms", "live", *more)


class Played(NamedTuple):
    """A row in virtual time. changes: of ReplayOptions. world: ours or the paper's."""

    name: str
    world: str
    policy: str
    settings: dict[str, Any]
    changes: dict[str, Any]


OURS, PAPERS = "as the store reads", "rigid link, as in the paper"


def played_rows(k: int) -> list[Played]:
    """What is compared in virtual time. The paper's rows have one queue for all reads; its
    K = P = 3 where the model has as many experts a token."""
    few = f"{min(3, k)},3"
    rigid, whole = {"link": "rigid"}, {"link": "rigid", "wait": "whole"}

    def firm(name: str, world: str, changes: dict[str, Any], **settings: Any) -> Played:
        return Played(name, world, FIRM.name, {"prefetch": "on", **settings}, changes)

    off = {"prefetch": "off"}
    return [
        Played("lru", OURS, "lru", {}, {}),
        Played("whole experts waited for", OURS, FIRM.name, off, {"wait": "whole"}),
        Played(NO_PREFETCH, OURS, FIRM.name, off, {}),
        Played("dymoe, r=1", OURS, "dymoe", {"prefetch": "on", "retention": 1.0}, {}),
        *(firm(f"firm, n={n}", OURS, {}, prefetch_kinds=n) for n in (1, 2, 3)),
        *(firm(f"firm, {way}", OURS, {}, agree=way) for way in ("mol", "margin")),
        firm(BASE, PAPERS, whole, prefetch_kinds=3, agree="rank", votes=f"{k},1"),
        firm("+ FG: gates alone", PAPERS, rigid, prefetch_kinds=1, agree="rank", votes=f"{k},1"),
        firm("+ MoL", PAPERS, whole, prefetch_kinds=3, agree="mol", votes=few),
        firm("+ FG + MoL", PAPERS, rigid, prefetch_kinds=1, agree="mol", votes=few),
        firm("all: tuned", PAPERS, rigid, prefetch_kinds=1, agree="mol"),
    ]


def live_cases(options: FirmOptions) -> list[Case]:
    """Our own rows under each cap, in real runs."""
    if not options.live:
        return []
    listed = [REFERENCE]
    for cap in options.caps:
        listed.append(global_lru(cap))
        rows = [NO_PREFETCH, "dymoe, r=1", *(f"firm, n={n}" for n in (1, 2, 3))]
        for row in played_rows(8):
            if row.name in rows:
                listed.append(
                    Case(row.name, "engine", cap, "", {**row.settings, "policy": row.policy})
                )
    return listed


COLUMNS = (
    NAME,
    Column("TPOT", "tpot_ms_p50", fixed(2), "ms"),
    Column("mean", "tpot_ms_mean", fixed(2), "ms"),
    Column("x base", "speedup", fixed(3)),
    moved("bytes_per_token", 2),
    Column("x none", "bytes_ratio", fixed(2)),
    HIT,
    Column("K,P", "votes", left=True),
)


class Firm(Benchmark[Loop[FirmOptions]]):
    """The parts of FIRM-MoE: in virtual time over one recorded run, and live where asked for."""

    options = FirmOptions
    listed = staticmethod(live_cases)

    def figures(self, loop: Loop[FirmOptions], measured: Measured) -> Result:
        rows = [
            case_row(case, runs, loop.limit_bytes(case)) | {"world": None}
            for case, runs in measured.each()
        ]
        _compare([row for row in rows if "error" not in row], NO_PREFETCH)
        loop.note("recording the routing, with everything in memory")
        trace = record(loop)
        speed = loop.options.bandwidth or int(measured.bandwidths[0].bytes_per_s)
        library = Bindings.load().library()
        for cap in loop.options.caps:
            loop.note(f"replaying at {cap:.0%}")
            for world in (OURS, PAPERS):
                some = [
                    play(library, trace, row, cap, speed, loop.options)
                    for row in played_rows(trace.n_expert_used)
                    if row.world == world
                ]
                _compare(some, NO_PREFETCH if world == OURS else BASE)
                rows += some
        return {"cases": rows, "replay_bytes_per_s": speed}

    def intro(self, report: Result) -> list[str]:
        options, speed = report["options"], report["replay_bytes_per_s"] / 1e9
        return [
            f"{options['tokens']} decode steps. Virtual time: routing recorded once, reads of "
            f"{speed:.2f} GB/s and {options['latency_us']} us. n: matrices of an expert that are "
            f"loaded ahead; x base: against no prefetch, or BB; x none: bytes against no prefetch"
        ]

    def tables(self, report: Result) -> list[Table]:
        live = [row for row in report["cases"] if row["world"] is None]
        found = [
            Table(title, COLUMNS, rows, memory_notes(rows))
            for title, rows in by_cap({"cases": live})
        ]
        for world, rows in _by_world(report):
            found.append(Table(f"{cap_title(rows[0]['cap'], rows)}, {world}", COLUMNS, rows))
        return found


def _by_world(report: Result) -> Iterator[tuple[str, list[Result]]]:
    rows = [row for row in report["cases"] if row["world"] is not None]
    for cap, world in dict.fromkeys((row["cap"], row["world"]) for row in rows):
        yield world, [row for row in rows if (row["cap"], row["world"]) == (cap, world)]


def _compare(rows: list[Result], base: str) -> None:
    """Adds how much faster than the base under the same cap, and how much more is read."""
    for row in rows:
        for other in rows:
            if other["name"] == base and other["cap"] == row["cap"]:
                row["speedup"] = other["tpot_ms_mean"] / row["tpot_ms_mean"]
                if other.get("bytes_per_token") and "bytes_per_token" in row:
                    row["bytes_ratio"] = row["bytes_per_token"] / other["bytes_per_token"]


def record(loop: Loop[FirmOptions]) -> Trace:
    """The routing of a prompt and of the decode steps, with all experts in memory and every layer
    looking ahead as far as it can."""
    options = loop.options
    config = Config.build(
        model=loop.high,
        policy=FIRM.name,
        n_ahead=MAX_AHEAD,
        prefetch="on",
        tune="off",
        force_managed=True,
        expert_ram=2 * loop.model.tier_bytes[0],
        ctx=options.n_ctx,
        n_ubatch=options.n_ubatch,
        threads=options.n_threads,
    )
    n = options.warmup + options.tokens
    with Engine.open(config) as engine:
        layers, experts = range(engine.model.n_layers), range(engine.model.n_expert)
        engine.store.warm([(layer, expert, 0) for layer in layers for expert in experts])
        if options.trained:
            draw = text_stream(options.seed, DEMO_TEXT.read_text("utf-8"), engine.tokenize)
        else:
            n_vocab = len(engine.model.metadata["tokenizer.ggml.tokens"])
            draw = token_stream(options.seed, n_vocab)
        tokens, first = draw(options.prompt_tokens + n), options.prompt_tokens
        with Recorder(engine) as recorder:
            engine.eval(tokens[:first], 0, phase=Phase.PREFILL)
            for pos in range(first, len(tokens)):
                engine.eval(tokens[pos : pos + 1], pos)
        trace = recorder.trace(Disk(0, options.latency_us))
        share = dense_share(engine, trace)
    return replace(
        trace, header=replace(trace.header, dense_share=share, settings={}, policy="lru")
    )


def play(
    library: Any, trace: Trace, row: Played, cap: float, bytes_per_s: int, options: FirmOptions
) -> Result:
    """The figures of one row under a cap on the expert slots, without its first steps."""
    whole = sum(
        kind[0].expert_bytes * trace.n_expert for layer in trace.slices for kind in layer if kind[0]
    )
    asked = ReplayOptions(
        policy=row.policy,
        settings=row.settings,
        expert_ram=int(cap * whole),
        bandwidth=bytes_per_s,
        latency_us=options.latency_us,
        io_threads=options.io_threads,
        compute_ms=options.compute_ms,
        **row.changes,
    )
    speed, time = speed_and_time(trace.header, asked)
    made = set_up_for(trace, asked, policy_class(row.policy), speed)
    outcome = simulate(library, trace, made, speed, time)
    decoded = np.array(outcome.phases) == Phase.DECODE
    step_ms = outcome.step_us[decoded][options.warmup :] / 1000
    stats, phase = outcome.stats, Phase.DECODE
    votes = made.policy.tuner.by_group().values() if isinstance(made.policy, FIRM) else ()
    return {
        "name": row.name,
        "cap": cap,
        "world": row.world,
        "limit_bytes": None,
        "tpot_ms_p50": float(np.median(step_ms)),
        "tpot_ms_mean": float(step_ms.mean()),
        "bytes_per_token": (stats.demand_bytes[phase] + stats.prefetch_bytes[phase])
        / int(decoded.sum()),
        "hit_rate": stats.hits[phase] / max(1, stats.requests[phase]),
        "votes": ""
        if row.settings.get("prefetch") == "off"
        else " ".join(f"{k},{p}" for k, p in votes),
    }
