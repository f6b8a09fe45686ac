"""One measurement in a process of its own, so that its memory is its own too.

`python -m orchestrator.lab.bench.child` is told a Job, and answers what it measured. The parent
has put the process into its memory group before Python started: the interpreter counts as well.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.process import peak_rss_bytes
from orchestrator.lab.children import Result, answer
from orchestrator.native.abi import WAITS

PROMPT, DECODE = "prompt", "decode"
COLD = "cold"  # the first prompt, which finds nothing in memory
MIN_STEPS = 8
BACKEND = "MOE_EDGE_TEST_BACKEND"  # names the library of the emulated GPU
# What the emulated GPU counts, in the order of moe_emu_counts().
COUNTS = ("launches", "graphs", "waits", "copies in", "bytes in", "copies out", "bytes out")


class Part(NamedTuple):
    """A stretch of a measurement: one prompt of n tokens, or n decode steps.

    name: what the report finds it by. Decode steps end early after so many seconds, when at
    least at_least of them are done. sequences: so many go on from the prompt before and decode
    together, a token each a step; 0: the prompt's own one does.
    """

    name: str
    kind: str
    n: int
    seconds: float = 0.0
    at_least: int = 1
    sequences: int = 0


def prompt(n: int, name: str = PROMPT) -> Part:
    """A prompt that starts a conversation of its own: nothing before it is in the KV cache."""
    return Part(name, PROMPT, n)


def settle(n: int, seconds: float) -> Part:
    """Decode steps that no report uses."""
    return Part("settle", DECODE, n, seconds)


def decode(n: int, seconds: float) -> Part:
    """Measured decode steps."""
    return Part(DECODE, DECODE, n, seconds, MIN_STEPS)


def longest_context(parts: Sequence[Part], shared: bool = True) -> int:
    """Context that holds the longest conversation of these parts, in the units of the KV cache;
    with all sequences that share it, or the longest of one of them."""
    longest = length = 0
    for part in parts:
        together = max(1, part.sequences) if shared else 1
        length = part.n * together + (length if part.kind == DECODE else 0)
        longest = max(longest, length)
    return -(-longest // 256) * 256


@dataclass(slots=True)
class Job:
    """What a process is told to measure. settings: of PlainModel ("upstream") or Config ("engine").

    text: a file of conversations to take the tokens from; without it they are random.
    warm: read every expert before the first token. warm_host: read every expert in every precision
    into the host memory behind a GPU before the first token.
    counts: also count what the decode steps ask of the emulated GPU.
    device: whose memory to report; the system "device" measures that alone.
    """

    system: str
    model: str
    low: str | None
    settings: dict[str, Any]
    n_ctx: int
    n_ubatch: int
    threads: int
    parts: list[Part]
    seed: int
    text: str | None = None
    warm: bool = False
    warm_host: bool = False
    counts: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        self.parts = [Part(*each) for each in self.parts]  # JSON has lists


SEPARATOR = "\n%\n"  # between the conversations of a text

Draw = Callable[[int], list[int]]


def token_stream(seed: int, n_vocab: int) -> Draw:
    """Random ordinary tokens, the same for every system: a random model that generates
    greedily soon repeats itself, and repeats its routing with it."""
    rng = random.Random(seed)
    return lambda n: [rng.randrange(3, n_vocab - 3) for _ in range(n)]


def text_stream(seed: int, pieces: Sequence[str], tokenize: Callable[[str], Sequence[int]]) -> Draw:
    """Tokens of conversations, in an order of this seed, again and again: what a trained model
    knows how to route."""
    mixed = [f"{piece}\n" for piece in pieces]
    random.Random(seed).shuffle(mixed)
    tokens = itertools.chain.from_iterable(tokenize(piece) for piece in itertools.cycle(mixed))
    return lambda n: list(itertools.islice(tokens, n))


def source(job: Job, n_vocab: int, tokenize: Callable[[str], Sequence[int]]) -> Draw:
    """Where the tokens of a job come from."""
    if job.text is None:
        return token_stream(job.seed, n_vocab)
    pieces = Path(job.text).read_text("utf-8").removesuffix("\n").split(SEPARATOR)
    return text_stream(job.seed, pieces, tokenize)


def play(
    parts: Sequence[Part],
    model: Any,
    draw: Draw,
    store: Any = None,
    counter: Callable[[], dict[str, int]] | None = None,
) -> list[Any]:
    """Time every part, in order: {"name", "tokens", "ms"}, one time for each prompt or step.

    With a store, each part has what the store counted meanwhile. model: an Evaluator, or a
    PlainModel. counter: returns running totals; each part has its share of them as "counts".

    Tokens are drawn for whole parts, so that one that ends early does not change those after it.
    """
    results = []
    shared = any(part.sequences for part in parts)
    pos = 0
    for part in parts:
        tokens = draw(part.n * max(1, part.sequences))
        # Each sequence gets a piece of the tokens of its own.
        steps = [tokens[i :: part.n] for i in range(part.n)]
        if part.kind == PROMPT:
            steps, pos = [tokens], 0
            if shared:
                model.reset()  # earlier sequences hold cells
        for sequence in range(part.sequences):
            model.fork(sequence)
        times: list[float] = []
        reads = [(0, 0)]
        if store is not None:
            calls = store.calls
            store.reset_stats()
        counts = counter() if counter else {}
        deadline = perf_counter() + part.seconds
        for step in steps:
            before = perf_counter()
            if part.sequences:
                model.decode_batch(step, range(part.sequences))
            else:
                model.eval(step, pos)
            now = perf_counter()
            times.append((now - before) * 1e3)
            done_so_far = counter() if counter else {}
            pos += len(step)
            if store is not None:
                stats = store.stats()
                reads.append((sum(stats.demand_bytes), sum(stats.prefetch_bytes)))
            if now > deadline and len(times) >= part.at_least:
                break
        done = sum(map(len, steps[: len(times)]))
        result = {"name": part.name, "tokens": done, "ms": times}
        result["counts"] = {name: n - counts[name] for name, n in done_so_far.items()}
        if store is not None:
            result["store"] = store_counters(store.stats())
            result["callback_us"] = store.callback_us(since=calls)
            # For each prompt or step, what was read because a token waited, and what ahead.
            result["step_reads"] = np.diff(reads, axis=0).tolist()
        results.append(result)
    return results


def free_bytes(device: str | None) -> int:
    """What is free of a device's memory, 0 without one. Raises ConfigError."""
    if device is None:
        return 0
    from orchestrator.native import find_device
    from orchestrator.native.llama import Bindings

    return find_device(Bindings.load().library(), device).memory_bytes


def run_device(job: Job) -> Result:
    """The device itself: its name, its memory, and how fast it is copied to."""
    from orchestrator.errors import ConfigError
    from orchestrator.memory.machine import find_gpu
    from orchestrator.native import measure_device
    from orchestrator.native.llama import Bindings

    bindings = Bindings.load()
    gpu = find_gpu(bindings, job.device or "")
    if gpu is None:
        raise ConfigError(f"--device {job.device}: the benchmark is for a GPU")
    return {
        "name": gpu.info.description,
        "index": gpu.index,
        "total_bytes": gpu.info.total_bytes,
        "copies": measure_device(bindings.library(), gpu.info, job.threads)._asdict(),
    }


def run_upstream(job: Job) -> Result:
    """llama.cpp itself."""
    from orchestrator.lab.bench.plain import PlainModel
    from orchestrator.native import context_memory
    from orchestrator.native.llama import Bindings

    free = free_bytes(job.device)
    with PlainModel(
        Path(job.model),
        n_ctx=job.n_ctx,
        n_ubatch=job.n_ubatch,
        threads=job.threads,
        **job.settings,
    ) as model:
        draw = source(job, model.n_vocab, model.tokenize)
        found: Result = {"parts": play(job.parts, model, draw, None, counter_of(job))}
        if job.device is not None:
            llama = context_memory(Bindings.load().library(), model.context)[1]
            found["memory"] = {"llama": llama, "used": max(0, free - free_bytes(job.device))}
        return found


def run_engine(job: Job) -> Result:
    """Measure moe-edge."""
    from orchestrator.config import Config
    from orchestrator.runtime.runtime import Runtime

    sizes = {"ctx": job.n_ctx, "ubatch": job.n_ubatch, "threads": job.threads}
    config = Config.build(model=job.model, low=job.low, **sizes, **job.settings)
    free = free_bytes(job.device)
    with Runtime.open(config) as runtime, runtime.evaluator() as evaluator:
        inside = evaluator.inside
        store = inside.store if inside.managed else None
        n_vocab = len(inside.model.metadata["tokenizer.ggml.tokens"])
        if store is not None and job.warm:
            layers, experts = range(inside.model.n_layers), range(inside.model.n_expert)
            store.warm([(layer, e, 0) for layer in layers for e in experts])
        if store is not None and job.warm_host:
            store.warm_host()
        draw = source(job, n_vocab, evaluator.tokenize)
        found: Result = {"parts": play(job.parts, evaluator, draw, store, counter_of(job))}
        if store is not None:
            found["policy"] = inside.policy.report()
        if job.device is not None:
            plan = evaluator.plan
            found["memory"] = {
                "fixed": plan.dense_bytes + plan.kv_bytes + plan.scratch_bytes,
                "planned": plan.total_bytes,
                "used": max(0, free - free_bytes(job.device)),
            }
        return found


def store_counters(stats: Any) -> Result:
    """The store's counters, both phases together: a part of a measurement is one of them."""
    routed = [prefill + decode for prefill, decode in zip(*stats.routed, strict=True)]
    demand, prefetched = sum(stats.demand_bytes), sum(stats.prefetch_bytes)
    judged = stats.prefetch_used + stats.prefetch_wasted
    useful = stats.prefetch_used / judged if judged else 0.0
    # to a device: copies that a token waited for or used, of all that were not transitions
    copied, asked = sum(stats.copy_bytes), sum(stats.requests) - sum(stats.hits)
    used = max(0, asked - sum(stats.host_computed)) + stats.prefetch_used
    loads = used + stats.prefetch_wasted
    return {
        "requests": sum(stats.requests),
        "hits": sum(stats.hits),
        "bytes": demand + prefetched + stats.transition_bytes,
        "used_ahead": useful,
        "needed_bytes": demand + useful * prefetched,
        "copied_bytes": copied,
        "needed_copied_bytes": copied * used / loads if loads else 0,
        "host_computed_bytes": sum(stats.host_computed_bytes),
        "routed": {"high": routed[0], "low": sum(routed[1:-1]), "skip": routed[-1]},
        "budget_bytes": stats.budget_bytes,
        "locks": sum(stats.locks),
        "transitions": stats.transitions_begun,
        "table_writes": stats.table_writes,
    } | {
        f"{cause} wait": sum(phase[i] for phase in stats.waited_ns) / 1e3  # microseconds
        for i, cause in enumerate(WAITS)
    }


def counter_of(job: Job) -> Callable[[], dict[str, int]] | None:
    """Return a function that returns the totals of what the process has asked of the emulated GPU
    so far, None for a job that counts nothing. The emulated GPU completes all of it first."""
    if not job.counts:
        return None
    read = ctypes.CDLL(os.environ[BACKEND]).moe_emu_counts
    numbers = (ctypes.c_uint64 * len(COUNTS))()

    def totals() -> dict[str, int]:
        read(numbers)
        return dict(zip(COUNTS, numbers, strict=True))

    return totals


def measure(told: dict[str, Any]) -> Result:
    """What a job as JSON came to."""
    job = Job(**told)
    if job.counts:
        from orchestrator.native.llama import Bindings

        Bindings.load().library().in_turn(1)
    run = {"engine": run_engine, "upstream": run_upstream, "device": run_device}[job.system]
    return run(job) | {"peak_rss": peak_rss_bytes()}


if __name__ == "__main__":
    answer(measure)
