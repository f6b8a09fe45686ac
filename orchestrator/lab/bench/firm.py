"""`moe-edge bench firm`: what each part of FIRM-MoE brings (its Tables 1, 2 and Figures 4, 5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.cases import REFERENCE, Case, global_lru
from orchestrator.lab.bench.child import text_stream, token_stream
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.models import DEMO_TEXT
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.report import HIT, NAME, by_cap, cap_title, memory_notes, moved
from orchestrator.lab.bench.rows import Result, case_row, median_ratio
from orchestrator.lab.lists import numbers
from orchestrator.lab.replay import ReplayOptions, Trace
from orchestrator.lab.replay.record import Disk, Recorder, dense_share
from orchestrator.lab.replay.report import set_up_for, speed_and_time
from orchestrator.lab.replay.simulate import Setup, simulate
from orchestrator.lab.table import Column, Table, fixed
from orchestrator.native import MAX_AHEAD, CStats
from orchestrator.native.llama import Bindings
from orchestrator.policy import policy_class
from orchestrator.policy.firm import FIRM, MARGIN, MOL, RANK
from orchestrator.settings import FROM_0, FROM_1, SIZE, again, setting

NO_PREFETCH = "no prefetch"
BASE = "BB: top-k, whole experts"

# The rows of the table of lengths.
LENGTH_ROWS = ("lru", NO_PREFETCH, "dymoe, r=1", f"firm, {RANK}, n=3")


@dataclass(frozen=True)
class FirmOptions(BenchOptions):
    """bandwidth, latency_us, compute_ms: of the replay. live: real runs of our own rows, too.
    prompts, answers: every pair of these lengths is timed from the start of the prompt to the end
    of the answer, as in the paper's Figure 5. Raises ConfigError."""

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
    prompts: tuple[int, ...] = setting(
        (), "Prompt lengths of a table of lengths.", notation=numbers("lengths"), shown="no table"
    )
    answers: tuple[int, ...] = setting(
        (), "Answer lengths of that table.", notation=numbers("lengths"), shown="no table"
    )
    live: bool = setting(False, "Measure our own rows in real runs, too.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompts) != bool(self.answers):
            raise ConfigError("--prompts and --answers make a table of lengths together: give both")
        if any(each < 2 for each in (*self.prompts, *self.answers)):
            raise ConfigError("prompts and answers are lengths of at least 2 tokens, as 32,128")

    def described(self, *more: str) -> dict[str, Any]:
        return super().described("latency_us", "compute_ms", "live", "prompts", "answers", *more)


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
        *(
            firm(f"firm, {way}, n={n}", OURS, {}, agree=way, prefetch_kinds=n)
            for way, kinds in ((RANK, (1, 2, 3)), (MOL, (1, 3)), (MARGIN, (3,)))
            for n in kinds
        ),
        firm(BASE, PAPERS, whole, prefetch_kinds=3, agree=RANK, votes=f"{k},1"),
        firm("+ FG: gates alone", PAPERS, rigid, prefetch_kinds=1, agree=RANK, votes=f"{k},1"),
        firm("+ MoL", PAPERS, whole, prefetch_kinds=3, agree=MOL, votes=few),
        firm("+ FG + MoL", PAPERS, rigid, prefetch_kinds=1, agree=MOL, votes=few),
        firm("all: tuned", PAPERS, rigid, prefetch_kinds=1, agree=MOL),
    ]


def record(loop: Loop[FirmOptions], options: FirmOptions) -> Trace:
    """The routing of a prompt and of the decode steps, with all experts in memory and every layer
    looking ahead as far as it can. options: the loop's, of other lengths maybe."""
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


class _Outcome(NamedTuple):
    """A row in virtual time. step_ms: by step, of which decoded says which decode."""

    made: Setup
    stats: CStats
    step_ms: np.ndarray
    decoded: np.ndarray


def _played(
    library: Any, trace: Trace, row: Played, cap: float, bytes_per_s: int, options: FirmOptions
) -> _Outcome:
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
    return _Outcome(made, outcome.stats, outcome.step_us / 1000, decoded)


def play(
    library: Any, trace: Trace, row: Played, cap: float, bytes_per_s: int, options: FirmOptions
) -> Result:
    """The figures of one row under a cap on the expert slots, without its first steps."""
    made, stats, step_ms, decoded = _played(library, trace, row, cap, bytes_per_s, options)
    measured = step_ms[decoded][options.warmup :]
    votes = made.policy.tuner.by_group().values() if isinstance(made.policy, FIRM) else ()
    phase = Phase.DECODE
    return {
        "name": row.name,
        "cap": cap,
        "world": row.world,
        "limit_bytes": None,
        "tpot_ms_p50": float(np.median(measured)),
        "tpot_ms_mean": float(measured.mean()),
        "bytes_per_token": (stats.demand_bytes[phase] + stats.prefetch_bytes[phase])
        / int(decoded.sum()),
        "hit_rate": stats.hits[phase] / max(1, stats.requests[phase]),
        "votes": ""
        if row.settings.get("prefetch") == "off"
        else " ".join(f"{k},{p}" for k, p in votes),
    }


def play_lengths(
    library: Any, trace: Trace, cap: float, bytes_per_s: int, options: FirmOptions
) -> list[Result]:
    """For one prompt, the tokens of an answer by the seconds of the prompt and the answer, for each
    length of answers: how fast by row, in tokens/s (the paper's Figure 5)."""
    rows = [row for row in played_rows(trace.n_expert_used) if row.name in LENGTH_ROWS]
    found: list[Result] = [
        {"cap": cap, "prompt": options.prompt_tokens, "answer": n} for n in options.answers
    ]
    for row in rows:
        outcome = _played(library, trace, row, cap, bytes_per_s, options)
        prompt_ms = outcome.step_ms[~outcome.decoded].sum()
        spent_ms = prompt_ms + outcome.step_ms[outcome.decoded].cumsum()
        for each in found:
            each[row.name] = 1000 * each["answer"] / float(spent_ms[each["answer"] - 1])
    return found


def live_cases(options: FirmOptions) -> list[Case]:
    """Our own rows under each cap, in real runs."""
    if not options.live:
        return []
    listed = [REFERENCE]
    for cap in options.caps:
        listed.append(global_lru(cap))
        rows = [NO_PREFETCH, "dymoe, r=1", *(f"firm, {RANK}, n={n}" for n in (1, 2, 3))]
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

LENGTH_COLUMNS = (
    Column("prompt", "prompt"),
    Column("answer", "answer"),
    *(Column(name, name, fixed(1)) for name in LENGTH_ROWS),
    Column("x lru", lambda row: row[LENGTH_ROWS[-1]] / row["lru"], fixed(2)),
    Column("x dymoe", lambda row: row[LENGTH_ROWS[-1]] / row["dymoe, r=1"], fixed(2)),
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
        trace = record(loop, loop.options)
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
        return {
            "cases": rows,
            "lengths": self._lengths(loop, library, speed),
            "replay_bytes_per_s": speed,
        }

    def _lengths(self, loop: Loop[FirmOptions], library: Any, bytes_per_s: int) -> list[Result]:
        """Figure 5: a run is recorded for each length of the prompt, with the longest answer."""
        found = []
        for n_prompt in loop.options.prompts:
            loop.note(f"recording a prompt of {n_prompt} tokens")
            longest = max(loop.options.answers)
            options = replace(loop.options, prompt_tokens=n_prompt, tokens=longest)
            trace = record(loop, options)
            for cap in options.caps:
                found += play_lengths(library, trace, cap, bytes_per_s, options)
        return found

    def intro(self, report: Result) -> list[str]:
        options, speed = report["options"], report["replay_bytes_per_s"] / 1e9
        return [
            f"{options['tokens']} decode steps. Virtual time: routing recorded once, reads of "
            f"{speed:.2f} GB/s and {options['latency_us']} us. n: matrices of an expert that are "
            f"loaded ahead; rank, mol, margin: the vote, with K and P tuned; x base: against no "
            f"prefetch, or BB; x none: bytes against no prefetch"
        ]

    def tables(self, report: Result) -> list[Table]:
        live = [row for row in report["cases"] if row["world"] is None]
        found = [
            Table(title, COLUMNS, rows, memory_notes(rows))
            for title, rows in by_cap(report | {"cases": live})
        ]
        for world, rows in _by_world(report):
            found.append(Table(f"{cap_title(rows[0]['cap'], rows)}, {world}", COLUMNS, rows))
        for cap in dict.fromkeys(row["cap"] for row in report["lengths"]):
            rows = [row for row in report["lengths"] if row["cap"] == cap]
            title = (
                f"tokens of an answer by the seconds of its prompt and itself, {cap:.0%}, {OURS}"
            )
            found.append(Table(title, LENGTH_COLUMNS, rows))
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
                row["speedup"] = _times_as_fast(row, other)
                if other.get("bytes_per_token") and "bytes_per_token" in row:
                    row["bytes_ratio"] = row["bytes_per_token"] / other["bytes_per_token"]


def _times_as_fast(row: Result, other: Result) -> float:
    """Means of a run in virtual time, which nothing disturbs; of real runs the ratios within each
    run, since the machine's speed drifts."""
    if "tpot_ms_p50_runs" in row:
        return median_ratio(other["tpot_ms_p50_runs"], row["tpot_ms_p50_runs"])
    return float(other["tpot_ms_mean"] / row["tpot_ms_mean"])
