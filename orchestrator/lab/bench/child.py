"""One measurement in a process of its own, so that its memory is its own too.

`python -m orchestrator.lab.bench.child` is told a Job, and answers what it measured. The parent
has put the process into its memory group before Python started: the interpreter counts as well.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from gguf_tools.process import peak_rss_bytes
from orchestrator.lab.bench.job import PROMPT, Job, Part
from orchestrator.lab.children import Result, answer

ROUTING_CHUNKS = 8
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


def sources(
    text: str | None, seed: int, n_vocab: int, tokenize: Callable[[str], Sequence[int]]
) -> list[Draw]:
    """Where tokens come from, by the topic of a part: any, and two topics that have nothing in
    common. Those are the two halves of a vocabulary, or of a file of conversations those that begin
    with asking for a story and the others."""
    if text is None:
        middle = n_vocab // 2
        low, high = token_stream(seed, middle), token_stream(seed, n_vocab - middle + 3)
        return [
            token_stream(seed, n_vocab),
            low,
            lambda n: [token + middle - 3 for token in high(n)],
        ]
    pieces = Path(text).read_text("utf-8").removesuffix("\n").split(SEPARATOR)
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for piece in pieces:
        kinds["story" in piece.split("assistant", 1)[0].lower()].append(piece)
    return [text_stream(seed, each, tokenize) for each in (pieces, kinds[True], kinds[False])]


def play(parts: Sequence[Part], model: Any, draws: Sequence[Draw], store: Any = None) -> list[Any]:
    """Times every part, in order: {"name", "tokens", "ms"}, one time for each prompt or step; and
    with a store, what it counted meanwhile. model: an engine, or one that evaluates as it does;
    draws: as of sources.

    Tokens are drawn for whole parts, so that one that ends early does not change those after it.
    """
    results = []
    shared = any(part.sequences for part in parts)
    pos = 0
    for part in parts:
        tokens = draws[part.topic](part.n * max(1, part.sequences))
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
        deadline = perf_counter() + part.seconds
        for step in steps:
            before = perf_counter()
            if part.sequences:
                model.decode_batch(step, range(part.sequences))
            else:
                model.eval(step, pos)
            now = perf_counter()
            times.append((now - before) * 1e3)
            pos += len(step)
            if store is not None:
                stats = store.stats()
                reads.append((sum(stats.demand_bytes), sum(stats.prefetch_bytes)))
            if now > deadline and len(times) >= part.at_least:
                break
        done = sum(map(len, steps[: len(times)]))
        result = {"name": part.name, "tokens": done, "ms": times}
        if store is not None:
            result["store"] = store_counters(store.stats())
            result["callback_us"] = store.callback_us(since=calls)
            # For each prompt or step, what was read because a token waited, and what ahead.
            result["step_reads"] = np.diff(reads, axis=0).tolist()
        results.append(result)
    return results


class DeviceMemory:
    """How much of a device's memory this process takes, beside what the driver needs for itself.
    Raises ConfigError where there is no such device."""

    def __init__(self, name: str) -> None:
        from orchestrator.native.llama import Bindings

        self._library, self._name = Bindings.load().library(), name
        self._free = self._free_bytes()

    def _free_bytes(self) -> int:
        from orchestrator.native import find_device

        return find_device(self._library, self._name).memory_bytes

    def used_bytes(self) -> int:
        """What the process took since this object was made."""
        return max(0, self._free - self._free_bytes())

    def llama_bytes(self, context: int) -> int:
        """What a llama_context and its model take of it, as llama.cpp counts."""
        from orchestrator.native import context_memory

        return context_memory(self._library, context)[1]


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
    from orchestrator.lab.bench.plain import PlainModel, silence

    silence()
    memory = DeviceMemory(job.device) if job.device is not None else None
    with PlainModel(
        Path(job.model),
        n_ctx=job.n_ctx,
        n_ubatch=job.n_ubatch,
        threads=job.threads,
        **job.settings,
    ) as model:
        draws = sources(job.text, job.seed, model.n_vocab, model.tokenize)
        found: Result = {"parts": play(job.parts, model, draws)}
        if memory is not None:
            llama = memory.llama_bytes(model.context)
            found["memory"] = {"llama": llama, "used": memory.used_bytes()}
        return found


def run_engine(job: Job) -> Result:
    """Our engine."""
    from orchestrator.engine.engine import Engine

    memory = DeviceMemory(job.device) if job.device is not None else None
    with Engine.open(job.config()) as engine:
        store = engine.store if engine.managed else None
        n_vocab = len(engine.model.metadata["tokenizer.ggml.tokens"])
        if store is not None and job.warm:
            layers, experts = range(engine.model.n_layers), range(engine.model.n_expert)
            store.warm([(layer, e, 0) for layer in layers for e in experts])
        draws = sources(job.text, job.seed, n_vocab, engine.tokenize)
        found: Result = {"parts": play(job.parts, engine, draws, store)}
        if store is not None:
            found["policy"] = engine.policy.report()
        if memory is not None:
            plan = engine.plan
            found["memory"] = {
                "fixed": plan.dense_bytes + plan.kv_bytes + plan.scratch_bytes,
                "planned": plan.total_bytes,
                "flash": plan.device is not None and plan.device.flash,
                "used": memory.used_bytes(),
            }
        if store is not None and job.routing:
            more = sources(job.text, job.seed + 1, n_vocab, engine.tokenize)[0]
            found["routing"] = _expert_use(engine, job.n_ubatch, more)
        return found


def store_counters(stats: Any) -> Result:
    """The store's counters, both phases together: a part of a measurement is one of them."""
    routed = [prefill + decode for prefill, decode in zip(*stats.routed, strict=True)]
    demand, prefetched = sum(stats.demand_bytes), sum(stats.prefetch_bytes)
    judged = stats.prefetch_used + stats.prefetch_wasted
    useful = stats.prefetch_used / judged if judged else 0.0
    # to a device: copies that a token waited for or used, of all that were not transitions
    copied, asked = sum(stats.copy_bytes), sum(stats.requests) - sum(stats.hits)
    used = max(0, asked - sum(stats.in_place)) + stats.prefetch_used
    loads = used + stats.prefetch_wasted
    in_place = sum(stats.in_place_bytes)
    return {
        "requests": sum(stats.requests),
        "hits": sum(stats.hits),
        "bytes": demand + prefetched + stats.transition_bytes,
        "demand_bytes": demand,
        "transition_bytes": stats.transition_bytes,
        "promoted": stats.experts_promoted,
        "used_ahead": useful,
        "needed_bytes": demand + useful * prefetched,
        "copied_bytes": copied,
        "needed_copied_bytes": copied * used / loads if loads else 0,
        "in_place_bytes": in_place,
        "host_computed_bytes": in_place * sum(stats.host_computed) / max(1, sum(stats.in_place)),
        "wait_ms": sum(stats.wait_us) / 1e3,
        "routed": {"high": routed[0], "low": sum(routed[1:-1]), "skip": routed[-1]},
        "budget_bytes": stats.budget_bytes,
    }


def _expert_use(engine: Any, n_ubatch: int, draw: Draw) -> Result:
    """How often a token uses the experts of each rank, most used first, mean over layers.

    The last layer sees one token of each chunk only, and is left out.
    """
    n_layers, n_expert = engine.model.n_layers, engine.model.n_expert
    counts = np.zeros((n_layers, n_expert), np.int64)
    seen = np.zeros(n_layers, np.int64)

    def record(event: Any) -> None:
        ids = event.ids_array.ravel()
        counts[event.layer] += np.bincount(ids, minlength=n_expert)
        seen[event.layer] += event.n_tokens

    engine.reset()
    engine.store.set_route(record)
    for _ in range(ROUTING_CHUNKS):
        engine.eval(draw(n_ubatch), 0)
    full = seen == seen.max()
    use = np.sort(counts[full] / seen[full][:, None], axis=1)[:, ::-1].mean(axis=0)
    rank = np.arange(1, n_expert + 1)
    fitted = (rank > 1) & (use > 0)
    slope = np.polyfit(np.log(rank[fitted]), np.log(use[fitted]), 1)[0] if fitted.sum() > 1 else 0.0
    return {"tokens": int(seen.max()), "use": use.round(4).tolist(), "exponent": -float(slope)}


def measure(told: dict[str, Any]) -> Result:
    """What a job as JSON came to."""
    job = Job(**told)
    run = {"engine": run_engine, "upstream": run_upstream, "device": run_device}[job.system]
    return run(job) | {"peak_rss": peak_rss_bytes()}


if __name__ == "__main__":
    answer(measure)
