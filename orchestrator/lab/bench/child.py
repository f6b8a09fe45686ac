"""One measurement in a process of its own, so that its memory is its own too.

`python -m orchestrator.lab.bench.child` reads a Job as JSON from stdin and writes what it
measured as one JSON line to stdout. The parent has put the process into its memory group
before Python started: the interpreter counts as well.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from gguf_tools.process import peak_rss_bytes
from orchestrator.errors import MoeEdgeError
from orchestrator.lab.bench.job import PROMPT, Job, Part

ROUTING_CHUNKS = 8
SEPARATOR = "\n%\n"  # between the conversations of a text

Eval = Callable[[list[int], int], object]
Draw = Callable[[int], list[int]]
Watch = Callable[[dict[str, Any]], AbstractContextManager[None]]


def token_stream(seed: int, n_vocab: int) -> Draw:
    """Random ordinary tokens, the same for every system: a random model that generates
    greedily soon repeats itself, and repeats its routing with it."""
    rng = random.Random(seed)
    return lambda n: [rng.randrange(3, n_vocab - 3) for _ in range(n)]


def text_stream(seed: int, text: str, tokenize: Callable[[str], Sequence[int]]) -> Draw:
    """Tokens of conversations, in an order of this seed, again and again: what a trained model
    knows how to route."""
    pieces = [part + "\n" for part in text.removesuffix("\n").split(SEPARATOR)]
    random.Random(seed).shuffle(pieces)
    tokens = itertools.chain.from_iterable(tokenize(piece) for piece in itertools.cycle(pieces))
    return lambda n: list(itertools.islice(tokens, n))


def topic_streams(job: Job, n_vocab: int, tokenize: Callable[[str], Sequence[int]]) -> list[Draw]:
    """Two texts that have nothing in common: conversations that begin with asking for a story and
    the others, or the two halves of a vocabulary."""
    if job.text is None:
        middle = n_vocab // 2
        low, high = token_stream(job.seed, middle), token_stream(job.seed, n_vocab - middle + 3)
        return [low, lambda n: [token + middle - 3 for token in high(n)]]
    stories: list[str] = []
    others: list[str] = []
    for piece in Path(job.text).read_text("utf-8").removesuffix("\n").split(SEPARATOR):
        asked = piece.split("assistant", 1)[0]
        (stories if "story" in asked.lower() else others).append(piece)
    return [text_stream(job.seed, SEPARATOR.join(each), tokenize) for each in (stories, others)]


class Together:
    """Several sequences of an engine, which go on from its prompt."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def eval(self, tokens: list[int], pos: int) -> object:
        """Engine.eval; what starts a conversation ends all sequences, which hold cells."""
        if pos == 0:
            self._engine.reset()
        return self._engine.eval(tokens, pos)

    def fork(self, n: int) -> None:
        for sequence in range(n):
            self._engine.fork(sequence)

    def step(self, tokens: list[int]) -> object:
        return self._engine.decode_batch(tokens, range(len(tokens)))


def play(
    parts: Sequence[Part],
    evaluate: Eval,
    draw: Draw,
    watch: Watch,
    topics: Sequence[Draw] = (),
    together: Together | None = None,
    after_step: Callable[[dict[str, Any]], None] = lambda result: None,
) -> list[dict[str, Any]]:
    """Times every part, in order: {"name", "tokens", "ms"}, one time for each prompt or step.

    together evaluates the steps of parts with several sequences. watch(result) is entered before
    a part and left after it, and may add to the result. topics are the sources of the parts that
    have one. after_step(result) may add what else is of one prompt or step, outside of its time.
    Tokens are drawn for whole parts, so that one that ends early does not change those after it.
    """
    results = []
    pos = 0
    for part in parts:
        n_together = part.sequences if together is not None else 0
        tokens = (draw if part.topic < 0 else topics[part.topic])(part.n * max(1, n_together))
        if part.kind == PROMPT:
            pos = 0
        # each sequence gets a piece of the tokens of its own
        steps = [tokens] if part.kind == PROMPT else [tokens[i :: part.n] for i in range(part.n)]
        if together is not None and n_together:
            together.fork(n_together)
        result: dict[str, Any] = {"name": part.name, "tokens": 0, "ms": []}
        with watch(result):
            deadline = perf_counter() + part.seconds
            for step in steps:
                before = perf_counter()
                if together is not None and n_together:
                    together.step(step)
                else:
                    evaluate(step, pos)
                now = perf_counter()
                result["ms"].append((now - before) * 1e3)
                after_step(result)
                result["tokens"] += len(step)
                pos += len(step)
                if now > deadline and len(result["ms"]) >= part.at_least:
                    break
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


def run_device(job: Job) -> dict[str, Any]:
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
        "memory_bytes": gpu.info.memory_bytes,
        "total_bytes": gpu.info.total_bytes,
        "copies": measure_device(bindings.library(), gpu.info, job.threads)._asdict(),
    }


def run_upstream(job: Job) -> dict[str, Any]:
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
        draw = _source(job, job.seed, model.n_vocab, model.tokenize)
        topics = topic_streams(job, model.n_vocab, model.tokenize) if job.has_topics else []
        parts = play(job.parts, model.eval, draw, lambda result: nullcontext(), topics)
        found: dict[str, Any] = {"parts": parts}
        if memory is not None:
            llama = memory.llama_bytes(model.context)
            found["memory"] = {"llama": llama, "used": memory.used_bytes()}
        return found


def run_engine(job: Job) -> dict[str, Any]:
    from orchestrator.engine.engine import Engine

    config = job.config()
    memory = DeviceMemory(job.device) if job.device is not None else None
    with Engine.open(config) as engine:
        n_vocab = len(engine.model.metadata["tokenizer.ggml.tokens"])
        managed = engine.managed
        if managed and job.warm:
            layers, experts = range(engine.model.n_layers), range(engine.model.n_expert)
            engine.store.warm([(layer, e, 0) for layer in layers for e in experts])
        draw = _source(job, job.seed, n_vocab, engine.tokenize)
        watch: Watch = _store_watch(engine.store) if managed else lambda result: nullcontext()
        result: dict[str, Any] = {"mode": engine.mode}
        topics = topic_streams(job, n_vocab, engine.tokenize) if job.has_topics else []
        together = Together(engine) if config.sequences else None
        evaluate: Eval = engine.eval if together is None else together.eval
        step_reads = _step_reads(engine.store) if managed else lambda result: None
        result["parts"] = play(job.parts, evaluate, draw, watch, topics, together, step_reads)
        result["policy"] = engine.policy.report() if managed else {}
        if memory is not None:
            plan = engine.plan
            result["memory"] = {
                "fixed": plan.dense_bytes + plan.kv_bytes + plan.scratch_bytes,
                "planned": plan.total_bytes,
                "cap": plan.vram_bytes,
                "flash": plan.device is not None and plan.device.flash,
                "llama": engine.device_bytes,
                "used": memory.used_bytes(),
            }
        if managed and job.routing:
            more = _source(job, job.seed + 1, n_vocab, engine.tokenize)
            result["routing"] = _expert_use(engine, job.n_ubatch, more)
        return result


def _source(job: Job, seed: int, n_vocab: int, tokenize: Callable[[str], Sequence[int]]) -> Draw:
    if job.text is None:
        return token_stream(seed, n_vocab)
    return text_stream(seed, Path(job.text).read_text("utf-8"), tokenize)


def _store_watch(store: Any) -> Watch:
    """Adds the store's counters of a part to its result."""

    @contextmanager
    def watch(result: dict[str, Any]) -> Iterator[None]:
        calls = store.calls
        store.reset_stats()
        yield
        result["store"] = store_counters(store.stats())
        result["callback_us"] = store.callback_us(since=calls)

    return watch


def _step_reads(store: Any) -> Callable[[dict[str, Any]], None]:
    """Adds to a part's "step_reads", for each prompt or step, the bytes that were read because a
    token waited, and those that were read ahead."""

    def add(result: dict[str, Any]) -> None:
        reads = result.setdefault("step_reads", [])
        stats = store.stats()  # reset where a part begins
        so_far = (sum(stats.demand_bytes), sum(stats.prefetch_bytes))
        before = [sum(each) for each in zip(*reads, strict=True)] or (0, 0)
        reads.append([now - then for now, then in zip(so_far, before, strict=True)])

    return add


def store_counters(stats: Any) -> dict[str, Any]:
    """The store's counters, both phases together: a part of a measurement is one of them."""
    routed = [prefill + decode for prefill, decode in zip(*stats.routed, strict=True)]
    demand, prefetched = sum(stats.demand_bytes), sum(stats.prefetch_bytes)
    judged = stats.prefetch_used + stats.prefetch_wasted
    useful = prefetched * stats.prefetch_used / judged if judged else 0
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
        "needed_bytes": demand + useful,
        "copied_bytes": copied,
        "needed_copied_bytes": copied * used / loads if loads else 0,
        "in_place_bytes": in_place,
        "host_computed_bytes": in_place * sum(stats.host_computed) / max(1, sum(stats.in_place)),
        "wait_ms": sum(stats.wait_us) / 1e3,
        "routed": {"high": routed[0], "low": sum(routed[1:-1]), "skip": routed[-1]},
        "prefetch_used": stats.prefetch_used,
        "prefetch_wasted": stats.prefetch_wasted,
        "slot_bytes_peak": stats.slot_bytes_peak,
        "budget_bytes": stats.budget_bytes,
        "direct_io": bool(stats.direct_io),
    }


def _expert_use(engine: Any, n_ubatch: int, draw: Draw) -> dict[str, Any]:
    """How often a token uses the experts of each rank, most used first, mean over layers.

    The last layer sees one token of each chunk only, and is left out.
    """
    import numpy as np

    n_layers, n_expert = engine.model.n_layers, engine.model.n_expert
    counts = np.zeros((n_layers, n_expert), np.int64)
    seen = np.zeros(n_layers, np.int64)

    def record(event: Any) -> None:
        ids = event.ids_array.ravel()
        counts[event.layer] += np.bincount(ids, minlength=n_expert)
        seen[event.layer] += event.n_tokens

    engine.store.set_route(record)
    for _ in range(ROUTING_CHUNKS):
        engine.eval(draw(n_ubatch), 0)
    full = seen == seen.max()
    use = np.sort(counts[full] / seen[full][:, None], axis=1)[:, ::-1].mean(axis=0)
    rank = np.arange(1, n_expert + 1)
    fitted = (rank > 1) & (use > 0)
    slope = np.polyfit(np.log(rank[fitted]), np.log(use[fitted]), 1)[0] if fitted.sum() > 1 else 0.0
    return {"tokens": int(seen.max()), "use": use.round(4).tolist(), "exponent": -float(slope)}


def main() -> int:
    job = Job.from_json(sys.stdin.read())
    run = {"engine": run_engine, "upstream": run_upstream, "device": run_device}[job.system]
    try:
        result = run(job)
    except MoeEdgeError as error:
        result = {"error": str(error)}
    result["peak_rss"] = peak_rss_bytes()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
