"""What `moe-edge doctor` would have predicted of a benchmark's rows, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.config import Config
from orchestrator.cost.time import TimeModel
from orchestrator.lab.bench.cases import Case
from orchestrator.lab.bench.loop import Loop, Measured
from orchestrator.lab.bench.rows import Result
from orchestrator.memory.machine import probe
from orchestrator.memory.plan import plan_memory
from orchestrator.native.llama import Bindings

_KEY = "predicted_"


def predict(loop: Loop[Any], case: Case, number: int, measured: Measured) -> None:
    """Adds to the last result of a case of our engine what its plan was to take, by what this
    machine computes in the same minute, the routing that the run measured so far, and the disk's
    speed before and after. Raises MoeEdgeError."""
    if case.system != "engine" or case.tier is not None:
        return
    result = measured.results[case.key][-1]
    speed = statistics.mean(result.get("disk", [measured.bandwidths[-1].bytes_per_s]))
    uses, job, options = _uses(loop, measured), loop.job(case, number), loop.options
    config = Config.build(
        model=job.model,
        low=job.low,
        ctx=job.n_ctx,
        ubatch=job.n_ubatch,
        threads=job.threads,
        **job.settings,
    )
    plan = plan_memory(config, loop.model, probe())
    behind = options.prompt_tokens + options.warmup + options.tokens // 2
    disk = measured.bandwidths[-1]._replace(bytes_per_s=speed).beside(config)
    with TimeModel(Bindings.load(), config, loop.model, disk, uses, fresh=True) as times:
        found = times.of_plan(plan)
        result |= {
            f"{_KEY}tpot_ms": 1e3 * found.token_s(behind),
            f"{_KEY}ttft_ms": 1e3 * found.prompt_s(options.prompt_tokens, first=not job.warm),
            f"{_KEY}hit_rate": found.residency.hit_rate,
        }


def predicted(runs: Sequence[Result]) -> Result:
    """The medians of what was predicted in all runs of a case; nothing where nothing was."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.items():
            if name.startswith(_KEY):
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


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
