"""What `moe-edge doctor` would have predicted of a benchmark's rows, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.config import Config
from orchestrator.hardware import probe
from orchestrator.lab.bench.cases import Case
from orchestrator.lab.bench.job import Job
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.rows import Result
from orchestrator.llama import Bindings
from orchestrator.plan import plan_memory
from orchestrator.predict import Reading
from orchestrator.predictor import Predictor


def add_predictions(loop: Loop[Any], measured: Measured, rows: Sequence[Result]) -> None:
    """Adds to each row of our engine what its plan was to take, by what this machine computes, the
    routing that the run measured, and the disk's speed in the run. Raises MoeEdgeError."""
    listed = [
        (row, case, loop.job(case, 0))
        for row, (case, _) in zip(rows, measured.each(), strict=True)
        if case.system == "engine" and case.tier is None and "error" not in row
    ]
    if not listed:
        return
    speed = statistics.median(each.bytes_per_s for each in measured.bandwidths)
    bindings, uses = Bindings.load(), _uses(loop, measured)
    plain = Config.build(model=loop.high, low=loop.low, threads=loop.options.n_threads)
    with Predictor(bindings, plain, loop.model, Reading(speed), uses, fresh=True) as predictor:
        for row, case, job in listed:
            row |= _predicted(loop, predictor, case, job)


def _predicted(loop: Loop[Any], predictor: Predictor, case: Case, job: Job) -> Result:
    config = Config.build(
        model=job.model,
        low=job.low,
        ctx=job.n_ctx,
        ubatch=job.n_ubatch,
        threads=job.threads,
        **job.settings,
    )
    options = loop.options
    plan = plan_memory(config, loop.model, probe())
    found = predictor.of_plan(plan, config)
    behind = options.prompt_tokens + options.warmup + options.tokens // 2
    return {
        "predicted_tpot_ms": 1e3 * found.token_s(behind),
        "predicted_ttft_ms": 1e3 * found.prompt_s(options.prompt_tokens, first=not job.warm),
        "predicted_hit_rate": found.hit_rate,
    }


def _uses(loop: Loop[Any], measured: Measured) -> np.ndarray | None:
    """The routing that a run measured, in every layer alike, which says as much of hits as the
    layers' own; None where none did."""
    runs = (each for row in measured.results.values() for each in row)
    use = next((each["routing"]["use"] for each in runs if "routing" in each), None)
    if use is None:
        return None
    chances = np.asarray(use) * loop.model.n_expert_used / max(sum(use), 1e-300)
    return np.tile(np.minimum(chances, 1.0), (loop.model.n_layers, 1))


def prediction_notes(rows: Sequence[Result]) -> list[str]:
    """Prediction and measurement of each row, and their ratio."""
    return [
        f"{row['name']}: predicted {row['predicted_tpot_ms']:.1f} ms a token, measured over that "
        f"{row['tpot_ms_p50'] / row['predicted_tpot_ms']:.2f}; TTFT "
        f"{row['predicted_ttft_ms']:.0f} ms, {row['ttft_ms'] / row['predicted_ttft_ms']:.2f}; "
        f"hits {row['predicted_hit_rate']:.1%}"
        for row in rows
        if "predicted_tpot_ms" in row
    ]
