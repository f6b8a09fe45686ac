"""One measurement in a process of its own, so that its memory is its own too.

`python -m orchestrator.bench.child` reads a Job as JSON from stdin and writes what it
measured as one JSON line to stdout. The parent has put the process into its memory group
before Python started: the interpreter counts as well.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from gguf_tools.process import peak_rss_bytes
from orchestrator.bench.job import Job
from orchestrator.errors import MoeEdgeError

MIN_STEPS = 8
ROUTING_CHUNKS = 8

Eval = Callable[[list[int], int], object]


def token_stream(seed: int, n_vocab: int) -> Callable[[int], list[int]]:
    """Random ordinary tokens, the same for every system: a random model that generates
    greedily soon repeats itself, and repeats its routing with it."""
    rng = random.Random(seed)
    return lambda n: [rng.randrange(3, n_vocab - 3) for _ in range(n)]


def time_steps(job: Job, evaluate: Eval, n_vocab: int, start: Callable[[], None]) -> dict[str, Any]:
    """Prefill, unmeasured steps, then measured ones; times in milliseconds.

    start is called between the unmeasured and the measured steps.
    """
    draw = token_stream(job.seed, n_vocab)
    prompt = draw(job.prompt_tokens)
    began = perf_counter()
    evaluate(prompt, 0)
    ttft_ms = (perf_counter() - began) * 1e3
    pos = len(prompt)
    warm_until = perf_counter() + job.max_seconds / 3
    for token in draw(job.warmup):
        evaluate([token], pos)
        pos += 1
        if perf_counter() > warm_until:
            break
    start()
    step_ms: list[float] = []
    deadline = perf_counter() + job.max_seconds
    for token in draw(job.tokens):
        before = perf_counter()
        evaluate([token], pos)
        now = perf_counter()
        step_ms.append((now - before) * 1e3)
        pos += 1
        if now > deadline and len(step_ms) >= MIN_STEPS:
            break
    return {"ttft_ms": ttft_ms, "step_ms": step_ms}


def run_upstream(job: Job) -> dict[str, Any]:
    from orchestrator.bench.plain import PlainModel

    with PlainModel(
        Path(job.model),
        n_ctx=job.n_ctx,
        n_ubatch=job.n_ubatch,
        threads=job.threads,
        **job.settings,
    ) as model:
        return time_steps(job, model.eval, model.n_vocab, lambda: None)


def run_engine(job: Job) -> dict[str, Any]:
    from orchestrator.config import Config
    from orchestrator.engine import Engine

    config = Config.build(
        model=job.model,
        low=job.low,
        ctx=job.n_ctx,
        n_ubatch=job.n_ubatch,
        threads=job.threads,
        **job.settings,
    )
    with Engine.open(config) as engine:
        n_vocab = len(engine.model.metadata["tokenizer.ggml.tokens"])
        managed = engine.managed
        if managed and job.warm:
            layers, experts = range(engine.model.n_layers), range(engine.model.n_expert)
            engine.store.warm([(layer, e, 0) for layer in layers for e in experts])
        calls = 0

        def start() -> None:
            nonlocal calls
            if managed:
                calls = engine.store.calls
                engine.store.reset_stats()

        result = time_steps(job, engine.eval, n_vocab, start)
        result["mode"] = engine.mode
        if managed:
            n_steps = len(result["step_ms"])
            result["store"] = _counters(engine.store.stats(), n_steps)
            result["callback_us"] = engine.store.callback_us(since=calls)
        if managed and job.routing:
            result["routing"] = _expert_use(engine, job, n_vocab)
        return result


def _counters(stats: Any, n_steps: int) -> dict[str, Any]:
    """The store's counters of the decode phase, bytes and times per token."""
    decode = 1
    routed = list(stats.routed[decode])
    prefetched = stats.prefetch_bytes[decode]
    looked_up = stats.prefetch_used + stats.prefetch_wasted
    useful = prefetched * stats.prefetch_used / looked_up if looked_up else 0
    return {
        "requests": stats.requests[decode],
        "hits": stats.hits[decode],
        "bytes_per_token": (stats.demand_bytes[decode] + prefetched) / n_steps,
        "needed_bytes_per_token": (stats.demand_bytes[decode] + useful) / n_steps,
        "wait_ms_per_token": stats.wait_us[decode] / 1e3 / n_steps,
        "routed": {"high": routed[0], "low": sum(routed[1:-1]), "skip": routed[-1]},
        "prefetch_used": stats.prefetch_used,
        "prefetch_wasted": stats.prefetch_wasted,
        "slot_bytes_peak": stats.slot_bytes_peak,
        "budget_bytes": stats.budget_bytes,
        "direct_io": bool(stats.direct_io),
    }


def _expert_use(engine: Any, job: Job, n_vocab: int) -> dict[str, Any]:
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
    draw = token_stream(job.seed + 1, n_vocab)
    for _ in range(ROUTING_CHUNKS):
        engine.eval(draw(job.n_ubatch), 0)
    full = seen == seen.max()
    use = np.sort(counts[full] / seen[full][:, None], axis=1)[:, ::-1].mean(axis=0)
    rank = np.arange(1, n_expert + 1)
    fitted = (rank > 1) & (use > 0)
    slope = np.polyfit(np.log(rank[fitted]), np.log(use[fitted]), 1)[0] if fitted.sum() > 1 else 0.0
    return {"tokens": int(seen.max()), "use": use.round(4).tolist(), "exponent": -float(slope)}


def main() -> int:
    job = Job(**json.load(sys.stdin))
    try:
        result = run_engine(job) if job.system == "engine" else run_upstream(job)
    except MoeEdgeError as error:
        result = {"error": str(error)}
    result["peak_rss"] = peak_rss_bytes()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
