"""The rows of `moe-edge bench firm` in virtual time: one recorded run, played under each policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.bench.child import text_stream, token_stream
from orchestrator.lab.bench.loop import Loop
from orchestrator.lab.bench.models import DEMO_TEXT
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.bench.rows import Result
from orchestrator.lab.lists import numbers
from orchestrator.lab.replay import ReplayOptions, Trace
from orchestrator.lab.replay.record import Disk, Recorder, dense_share
from orchestrator.lab.replay.report import set_up_for, speed_and_time
from orchestrator.lab.replay.simulate import Setup, simulate
from orchestrator.native import MAX_AHEAD, CStats
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
