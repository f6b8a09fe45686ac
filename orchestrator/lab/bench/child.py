"""One measurement in its own process, so that its memory can be limited and measured.

`python -m orchestrator.lab.bench.child` receives a Job and returns its measurements. The parent
moves the process into its memory group before Python starts, so the interpreter's memory counts
too.
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

# PROMPTS: each sequence of a batch has its own prompt. The prompts are read one after another.
PROMPT, PROMPTS, DECODE = "prompt", "prompts", "decode"
COLD = "cold"  # name of the first prompt, which finds no experts in memory
MIN_STEPS = 8
BACKEND = (
    "MOE_EDGE_TEST_BACKEND"  # environment variable with the path of the emulated GPU's library
)
# Names of the counters of the emulated GPU, in the order of moe_emu_counts().
COUNTS = ("launches", "graphs", "waits", "copies in", "bytes in", "copies out", "bytes out")


class Part(NamedTuple):
    """One part of a measurement: one or more prompts, or a number of decode steps.

    The field `kind` decides what the process measures:

    - PROMPT: the time to read one prompt of n tokens.
    - PROMPTS: the time of each of `sequences` prompts, one for each sequence. A prompt has n
      tokens.
    - DECODE: the time of each of n decode steps. A step decodes one token of each of `sequences`
      sequences, in one batch. If `sequences` is 0, a single sequence decodes without a batch.

    Other fields:

    - name: identifies the part in the results.
    - seconds, at_least: only for DECODE. Decoding ends early after `seconds`, but not before
      `at_least` steps.

    Decode steps continue the text of the previous part. After PROMPT, all sequences of a batch
    continue the same prompt.
    """

    name: str
    kind: str
    n: int
    seconds: float = 0.0
    at_least: int = 1
    sequences: int = 0


def prompt(n: int, name: str = PROMPT) -> Part:
    """Return a description of one part of a measurement: a prompt of a new conversation.

    The function `play` runs the part later. n: the number of tokens. name: identifies the part in
    the results.
    """
    return Part(name, PROMPT, n)


def settle(n: int, seconds: float) -> Part:
    """Return a Part with n decode steps in which the speed settles before the measurement.

    The function `play` runs these steps later, and ends them early after `seconds`. Reports ignore
    their times.
    """
    return Part("settle", DECODE, n, seconds)


def decode(n: int, seconds: float) -> Part:
    """Return a description of one part of a measurement: n decode steps, each for one token.

    The function `play` runs the part later. It ends the part early after `seconds`, but not before
    8 steps.
    """
    return Part(DECODE, DECODE, n, seconds, MIN_STEPS)


def longest_context(parts: Sequence[Part], shared: bool = True) -> int:
    """Return the length of the longest context in a measurement, in tokens.

    Decode steps lengthen the context, and a prompt starts a new context. The result is rounded up
    to a multiple of 256.

    - parts: the prompts and decode steps of the measurement, in order.
    - shared: if True, all sequences of a batch share one context, so their tokens are added up. If
      False, the result is the length that one sequence needs.
    """
    longest = length = 0
    for part in parts:
        together = max(1, part.sequences) if shared else 1
        # After prompts of several sequences, one of them is also held as the evaluator's own.
        extra = part.n if part.kind == PROMPTS else 0
        length = part.n * together + extra + (length if part.kind == DECODE else 0)
        longest = max(longest, length)
    return -(-longest // 256) * 256


@dataclass(slots=True)
class Job:
    """A measurement that a child process performs.

    - system: "upstream" (upstream llama.cpp, with settings of PlainModel), "engine" (ours, with
      settings of Config), or "device", which measures only the GPU.
    - parts: prompts and decode steps, in order.
    - text: file of conversations that supplies the tokens; None uses random tokens.
    - warm: read every expert before the first token.
    - warm_host: for a GPU, read every expert in every precision into host memory before the first
      token.
    - counts: also count GPU operations. The GPU must then be the emulated one, a library that
      computes on the CPU.
    - device: the device whose memory is reported.
    - start_seconds: time limit for everything except the decode steps; None for the default.
    - copy_times: how often the device copies each expert, to imitate a slower link.
    - sequences: number of sequences that decode in one batch; only for "engine".
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
    start_seconds: float | None = None
    copy_times: int = 1
    sequences: int = 0

    def __post_init__(self) -> None:
        self.parts = [Part(*each) for each in self.parts]  # JSON turns each Part into a list


SEPARATOR = "\n%\n"  # the line between two conversations of a text

Draw = Callable[[int], list[int]]


def token_stream(seed: int, n_vocab: int) -> Draw:
    """Return a function that draws the next n random tokens, without control tokens.

    The tokens depend only on `seed` and `n_vocab`, so every system gets the same tokens.
    """
    # Greedy decoding is not used, because a model with random weights soon repeats itself.
    rng = random.Random(seed)
    return lambda n: [rng.randrange(3, n_vocab - 3) for _ in range(n)]


def text_stream(seed: int, pieces: Sequence[str], tokenize: Callable[[str], Sequence[int]]) -> Draw:
    """Return a function that draws the next n tokens of shuffled, endlessly repeated conversations.

    `pieces` are the conversations. `tokenize` converts a text to tokens.
    """
    mixed = [f"{piece}\n" for piece in pieces]
    random.Random(seed).shuffle(mixed)
    tokens = itertools.chain.from_iterable(tokenize(piece) for piece in itertools.cycle(mixed))
    return lambda n: list(itertools.islice(tokens, n))


def source(job: Job, n_vocab: int, tokenize: Callable[[str], Sequence[int]]) -> Draw:
    """Return a function that supplies the tokens of a job, which is one measurement.

    The function takes a number n and returns a list of the next n tokens. They are from the text of
    the job, or random if the job has no text. n_vocab: the size of the vocabulary. tokenize:
    converts a text to tokens.
    """
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
    """Run the parts of a measurement in order, and return a dict for each part.

    The dict has the "name" of the part, the number of "tokens", and "ms", the time of each prompt
    or decode step.

    - model: an Evaluator or a PlainModel.
    - draw: returns the given number of tokens, which are the next tokens of the text.
    - store: the expert store, whose counters are added to the dict. None if the model has none.
    - counter: returns the counters of a GPU. Their increase is added to the dict as "counts".
    """
    results = []
    shared = any(part.sequences for part in parts)
    pos, apart = 0, False
    for part in parts:
        # One draw per part: a part that ends early does not change the tokens of the next part.
        tokens = draw(part.n * max(1, part.sequences))
        # In each step, every sequence gets its own tokens.
        steps = [tokens[i :: part.n] for i in range(part.n)]
        if part.kind != DECODE:
            steps, pos = [tokens[i : i + part.n] for i in range(0, len(tokens), part.n)], 0
            if shared:
                model.reset()  # free the KV cells of earlier sequences
        elif not apart:
            for sequence in range(part.sequences):
                model.fork(sequence)
        times: list[float] = []
        reads = [(0, 0)]
        if store is not None:
            calls = store.calls
            store.reset_stats()
        counts = counter() if counter else {}
        deadline = perf_counter() + part.seconds
        for number, step in enumerate(steps):
            before = perf_counter()
            if part.kind == PROMPTS:
                model.eval(step, 0)
                model.fork(number)
            elif part.sequences:
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
            if part.kind == DECODE and now > deadline and len(times) >= part.at_least:
                break
        apart = part.kind == PROMPTS
        done = sum(map(len, steps[: len(times)]))
        result = {"name": part.name, "tokens": done, "ms": times}
        result["counts"] = {name: n - counts[name] for name, n in done_so_far.items()}
        if store is not None:
            result["store"] = store_counters(store.stats())
            result["callback_us"] = store.callback_us(since=calls)
            # For each prompt or step: bytes read on demand, and bytes prefetched.
            result["step_reads"] = np.diff(reads, axis=0).tolist()
        results.append(result)
    return results


def free_bytes(device: str | None) -> int:
    """Return the free memory of a device in bytes, or 0 if `device` is None.

    Raises ConfigError if the device is unknown.
    """
    if device is None:
        return 0
    from orchestrator.native import find_device
    from orchestrator.native.llama import Bindings

    return find_device(Bindings.load().library(), device).memory_bytes


def slow_link(job: Job) -> None:
    """Make the GPU of a job copy each expert `job.copy_times` times, to imitate a slower link.

    Does nothing if the job names no GPU or copies each expert once.
    """
    if job.device is None or job.copy_times == 1:
        return
    from orchestrator.native import slow_copies
    from orchestrator.native.llama import Bindings
    from orchestrator.plan.machine import find_gpu

    bindings = Bindings.load()
    gpu = find_gpu(bindings, job.device)
    if gpu is not None:
        slow_copies(bindings.library(), gpu.info, job.copy_times)


def run_device(job: Job) -> Result:
    """Measure a GPU, and return a dict that describes it.

    The dict has the "name" and the "index" of the GPU, the size of its memory ("total_bytes"), and
    the measured bandwidths of copies to the GPU ("copies").

    job: its field `device` names the GPU. Its field `copy_times` says how often the GPU repeats
    each copy, to imitate a slower link. Raises ConfigError if the device is not a GPU.
    """
    from orchestrator.errors import ConfigError
    from orchestrator.native import measure_device
    from orchestrator.native.llama import Bindings
    from orchestrator.plan.machine import find_gpu

    bindings = Bindings.load()
    gpu = find_gpu(bindings, job.device or "")
    if gpu is None:
        raise ConfigError(f"--device {job.device} is not a GPU: this benchmark needs one")
    slow_link(job)
    return {
        "name": gpu.info.description,
        "index": gpu.index,
        "total_bytes": gpu.info.total_bytes,
        "copies": measure_device(bindings.library(), gpu.info, job.threads)._asdict(),
    }


def run_upstream(job: Job) -> Result:
    """Run a job's prompts and decode steps with upstream llama.cpp, and return the measurements.

    The result is a dict. "parts" has the times of each prompt or group of decode steps (see
    `play`). "memory" has the bytes of GPU memory in use, if the job names a device.
    """
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
    """Run a job's prompts and decode steps with our engine, and return the measurements.

    The result is a dict. "parts" has the times of each prompt or group of decode steps (see
    `play`). "policy" has figures of the policy, if the model has an expert store. "memory" has the
    planned and used bytes of GPU memory, if the job names a device.
    """
    from orchestrator.config import Config
    from orchestrator.plan.records import Needs, PlanRequest
    from orchestrator.runtime.runtime import Runtime

    slow_link(job)
    sizes = {"ctx": job.n_ctx, "ubatch": job.n_ubatch, "threads": job.threads}
    config = Config.build(model=job.model, low=job.low, **sizes, **job.settings)
    free = free_bytes(job.device)
    request = PlanRequest(config, Needs(job.sequences))
    with Runtime.open(request) as runtime, runtime.evaluator() as evaluator:
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
    """Return the counters of an expert store as a dict.

    An expert store is the cache of experts in memory. It counts prefill and decode separately. The
    result has their sums.

    - stats: the store's counters since their last reset.
    """
    routed = [prefill + decode for prefill, decode in zip(*stats.routed, strict=True)]
    demand, prefetched = sum(stats.demand_bytes), sum(stats.prefetch_bytes)
    judged = stats.prefetch_used + stats.prefetch_wasted
    useful = stats.prefetch_used / judged if judged else 0.0
    # For a GPU: copies that a token used, out of all copies that were not changes of tier.
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
    """Return a function that reads the counters of the emulated GPU.

    The function waits until the emulated GPU has completed all work. It then returns a dict that
    maps names of operations, such as "launches", to their total numbers.

    job: the measurement. If its field `counts` is False, the result is None instead of a function.
    """
    if not job.counts:
        return None
    read = ctypes.CDLL(os.environ[BACKEND]).moe_emu_counts
    numbers = (ctypes.c_uint64 * len(COUNTS))()

    def totals() -> dict[str, int]:
        read(numbers)
        return dict(zip(COUNTS, numbers, strict=True))

    return totals


def measure(fields: dict[str, Any]) -> Result:
    """Perform one measurement in this process, and return the results as a dict.

    fields: the fields of a Job, which describes the system, the model, the prompts and the decode
    steps. The results have the times of the steps, and the peak memory of this process
    ("peak_rss").
    """
    job = Job(**fields)
    if job.counts:
        from orchestrator.native.llama import Bindings

        Bindings.load().library().in_turn(1)
    run = {"engine": run_engine, "upstream": run_upstream, "device": run_device}[job.system]
    return run(job) | {"peak_rss": peak_rss_bytes()}


if __name__ == "__main__":
    answer(measure)
