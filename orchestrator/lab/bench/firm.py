"""`moe-edge bench firm`: what each part of FIRM-MoE brings (its Tables 1, 2 and Figures 4, 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.events import Phase
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import Case
from orchestrator.lab.bench.child import sources
from orchestrator.lab.bench.loop import Loop
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import HIT, NAME, moved
from orchestrator.lab.bench.rows import Result
from orchestrator.lab.replay import ReplayOptions, Trace
from orchestrator.lab.replay.record import Disk, Recorder, dense_share
from orchestrator.lab.replay.report import set_up_for, speed_and_time
from orchestrator.lab.replay.simulate import simulate
from orchestrator.lab.table import Column, fixed
from orchestrator.native import MAX_AHEAD
from orchestrator.native.llama import Bindings
from orchestrator.policy import policy_class
from orchestrator.policy.firm import FIRM, MOL, RANK
from orchestrator.settings import FROM_0, FROM_1, SIZE, again, setting

NO_PREFETCH = "no prefetch"
BASE = "BB: top-k, whole experts"


@dataclass(frozen=True)
class FirmOptions(BenchOptions):
    """bandwidth, latency_us, compute_ms: of the replay. Raises ConfigError."""

    routing: str = again(BenchOptions, "routing", "zipf")
    tokens: int = again(BenchOptions, "tokens", 256)
    prompt_tokens: int = again(BenchOptions, "prompt_tokens", 32)
    caps: tuple[float, ...] = again(BenchOptions, "caps", (0.5, 0.6, 0.8))
    runs: int = again(BenchOptions, "runs", 1, option=False)
    rows: tuple[str, ...] = again(BenchOptions, "rows", option=False)
    retention: float = again(BenchOptions, "retention", option=False)
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


class Played(NamedTuple):
    """A row in virtual time. changes: of ReplayOptions."""

    name: str
    policy: str
    settings: dict[str, Any]
    changes: dict[str, Any]


def our_rows() -> list[Played]:
    """What is compared as the store reads: with no prefetch."""
    off = {"prefetch": "off"}
    return [
        Played("lru", "lru", {}, {}),
        Played("whole experts waited for", FIRM.name, off, {"wait": "whole"}),
        Played(NO_PREFETCH, FIRM.name, off, {}),
        Played("dymoe, r=1", "dymoe", {"prefetch": "on", "retention": 1.0}, {}),
        *(
            Played(
                f"firm, {way}, n={n}",
                FIRM.name,
                {"prefetch": "on", "agree": way, "prefetch_kinds": n},
                {},
            )
            for way, n in ((RANK, 1), (RANK, 3), (MOL, 1))
        ),
    ]


def papers_rows(k: int) -> list[Played]:
    """What the paper compares, on a link with one queue for all reads: with its base. K = P = 3
    where the model has as many experts a token as k."""
    few = f"{min(3, k)},3"
    rigid, whole = {"link": "rigid"}, {"link": "rigid", "wait": "whole"}

    def firm(name: str, changes: dict[str, Any], **settings: Any) -> Played:
        return Played(name, FIRM.name, {"prefetch": "on", **settings}, changes)

    return [
        firm(BASE, whole, prefetch_kinds=3, agree=RANK, votes=f"{k},1"),
        firm("+ FG: gates alone", rigid, prefetch_kinds=1, agree=RANK, votes=f"{k},1"),
        firm("+ MoL", whole, prefetch_kinds=3, agree=MOL, votes=few),
        firm("+ FG + MoL", rigid, prefetch_kinds=1, agree=MOL, votes=few),
        firm("all: tuned", rigid, prefetch_kinds=1, agree=MOL),
    ]


def record(loop: Loop[FirmOptions]) -> Trace:
    """The routing of a prompt and of the decode steps, with all experts in memory and every layer
    looking ahead as far as it can."""
    options = loop.options
    config = Config.build(
        model=loop.high,
        policy=FIRM.name,
        agree=MOL,
        n_ahead=MAX_AHEAD,
        prefetch="on",
        tune="off",
        force_managed=True,
        expert_ram=2 * loop.model.tier_bytes[0],
        ctx=options.n_ctx,
        ubatch=options.n_ubatch,
        threads=options.n_threads,
    )
    first, n = options.prompt_tokens, options.warmup + options.tokens
    with Engine.open(config) as engine:
        layers, experts = range(engine.model.n_layers), range(engine.model.n_expert)
        engine.store.warm([(layer, expert, 0) for layer in layers for expert in experts])
        n_vocab = len(engine.model.metadata["tokenizer.ggml.tokens"])
        tokens = sources(loop.text, options.seed, n_vocab, engine.tokenize)[0](first + n)
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
    """The figures of one row under a cap on the expert slots, without its first steps. answer: its
    tokens by the seconds from the start of the prompt to its end, as in the paper's Figure 5."""
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
    stats, phase = outcome.stats, Phase.DECODE
    decoded = np.array(outcome.phases) == phase
    step_ms = outcome.step_us / 1000
    steps = step_ms[decoded]
    spent_ms = step_ms[~decoded].sum() + steps[: options.tokens].sum()
    measured = steps[options.warmup :]
    votes = made.policy.tuner.by_group().values() if isinstance(made.policy, FIRM) else ()
    return {
        "name": row.name,
        "cap": cap,
        "limit_bytes": None,
        "tpot_ms_p50": float(np.median(measured)),
        "tpot_ms_mean": float(measured.mean()),
        "answer_tokens_per_s": 1000 * options.tokens / float(spent_ms),
        "bytes_per_token": (stats.demand_bytes[phase] + stats.prefetch_bytes[phase]) / len(steps),
        "hit_rate": stats.hits[phase] / max(1, stats.requests[phase]),
        "votes": ""
        if row.settings.get("prefetch") == "off"
        else " ".join(f"{k},{p}" for k, p in votes),
    }


class Firm(Benchmark[Loop[FirmOptions]]):
    """The parts of FIRM-MoE, in virtual time over one recorded run."""

    options = FirmOptions
    columns = (
        NAME,
        Column("TPOT", "tpot_ms_p50", fixed(2), "ms"),
        Column("mean", "tpot_ms_mean", fixed(2), "ms"),
        Column("x base", "speedup", fixed(3)),
        Column("answer tok/s", "answer_tokens_per_s", fixed(1)),
        moved(digits=2),
        Column("x none", "bytes_ratio", fixed(2)),
        HIT,
        Column("K,P", "votes", left=True),
    )

    def cases(self, loop: Loop[FirmOptions]) -> list[Case]:
        """No real runs."""
        return []

    def rows(self, loop: Loop[FirmOptions]) -> list[Result]:
        loop.run([])
        loop.note("recording the routing, with everything in memory")
        trace = record(loop)
        speed = loop.options.bandwidth or int(loop.bandwidths[0].bytes_per_s)
        library = Bindings.load().library()
        rows: list[Result] = []
        for cap in loop.options.caps:
            loop.note(f"replaying at {cap:.0%}")
            for world, base, listed in (
                ("as the store reads", NO_PREFETCH, our_rows()),
                ("rigid link, as in the paper", BASE, papers_rows(trace.n_expert_used)),
            ):
                played = [play(library, trace, row, cap, speed, loop.options) for row in listed]
                (other,) = (row for row in played if row["name"] == base)
                for row in played:
                    row["world"] = world
                    row["speedup"] = other["tpot_ms_mean"] / row["tpot_ms_mean"]
                    if other["bytes_per_token"]:
                        row["bytes_ratio"] = row["bytes_per_token"] / other["bytes_per_token"]
                rows += played
        return rows

    def groups(
        self, loop: Loop[FirmOptions], rows: Sequence[Result]
    ) -> Iterator[tuple[str, list[Result]]]:
        for cap, world in dict.fromkeys((row["cap"], row["world"]) for row in rows):
            same = [row for row in rows if (row["cap"], row["world"]) == (cap, world)]
            yield f"expert slots of {cap:.0%} of the experts, {world}", same

    def intro(self, loop: Loop[FirmOptions]) -> list[str]:
        options = loop.options
        speed = "measured" if options.bandwidth is None else f"{options.bandwidth / 1e9:.2f} GB/s"
        return [
            f"{options.tokens} decode steps behind a prompt of {options.prompt_tokens} tokens. "
            f"Virtual time: routing recorded once, reads of {speed} and {options.latency_us} us. "
            "n: matrices of an expert that are loaded ahead; rank, mol: the vote, with K and P "
            "tuned; x base: against no prefetch, or BB; answer tok/s: by the time of the prompt "
            "and the answer; x none: bytes against no prefetch"
        ]
