"""Predict the rows of Table 3 on a slow link by replay: `bench gpu --table3 --predict`.

No GPU and no model are used. The routing is drawn from the same distribution as that of the
random-weight model. Each row is then replayed with a simulated link. Computing takes the time that
one H200 took.

The same replay for the run that was measured on the H200 shows what a replay leaves out. This
difference is added as a second prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gguf_tools import synthetic
from gguf_tools.file.layout import DOWN, GATE, KINDS, UP, row_bytes, type_by_name
from gguf_tools.synthetic import weights
from gguf_tools.synthetic.tensors import RESIDUAL_POWER, ROUTER_SPREAD
from orchestrator.allocation.slots import Rules
from orchestrator.cost.losses import default_path
from orchestrator.events import SKIP_TIER, Phase
from orchestrator.lab.bench import table3
from orchestrator.lab.bench.cases import (
    CACHE,
    CACHE_AHEAD,
    MIXED,
    MIXED_AHEAD,
    ON_DEMAND,
    SKIP_AHEAD,
    Case,
)
from orchestrator.lab.bench.models import DEMO_MODEL, HIGH, LOW, Note
from orchestrator.lab.bench.rows import HIT, NAME, Result, moved
from orchestrator.lab.replay.report import ReplayOptions, set_up_for, speed_and_time
from orchestrator.lab.replay.simulate import simulate
from orchestrator.lab.replay.trace import COUNTERS, STARTS, VERSION, Header, Trace
from orchestrator.lab.table import Column, Report, Table, fixed
from orchestrator.native.llama import Bindings
from orchestrator.policy import policy_class

# Computing on the H200 of 2026-11-26 with every expert on the GPU, per layer: a decoded token for
# which the policy is asked, and a token of a prompt, in microseconds.
DECODE_US, PREFILL_US = 173.0, 5.0
# The run that was measured on the H200: layers, link in bytes per second, tokens of a prompt, and
# ms per token by row.
MEASURED_LAYERS, MEASURED_LINK, MEASURED_PROMPT = 6, 48e9, 1024
MEASURED_MS = {
    ON_DEMAND: 4.05,
    CACHE: 2.05,
    CACHE_AHEAD: 2.72,
    MIXED: 4.34,
    MIXED_AHEAD: 4.28,
    SKIP_AHEAD: 3.30,
    "dynaexq 4/2": 2.32,
}
# Fraction of the compute time outside the experts.
DENSE_SHARE = 0.5
SETTLE_STEPS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """The steps of a benchmark process: prompts and decode steps.

    - steps: consecutive groups of equal steps, each as (phase, tokens per step, number of steps).
    """

    n_layers: int
    steps: Sequence[tuple[Phase, int, int]]


def draw_trace(shape: synthetic.Shape, run: Run, seed: int = 0) -> Trace:
    """Generate a trace, a record of the experts that each token uses in each layer.

    The experts are drawn at random, without running a model. Some are used much more often than
    others (zipf). A router's logit is the bias of the expert plus random noise for each token. Most
    of the noise is the same in two neighboring layers. The experts of the next layer can therefore
    be predicted, with errors.
    """
    rng = np.random.default_rng(seed)
    k, n_expert, layers = shape.n_expert_used, shape.n_expert, run.n_layers
    usage = weights.zipf_usage(n_expert, k, 1.0)
    bias = weights.router_bias(usage, k)
    biases = [rng.permutation(bias) for _ in range(layers)]
    steps = [(phase, n) for phase, n, times in run.steps for _ in range(times)]
    found: dict[str, list[np.ndarray]] = {
        name: [] for name in ("ids", "weights", "ahead_ids", "ahead_scores")
    }
    events = []
    for number, (phase, n) in enumerate(steps):
        noise = rng.standard_normal((n, n_expert))
        for layer in range(layers):
            ids, scores = _route(biases[layer] + noise, k)
            found["ids"].append(ids)
            found["weights"].append(scores)
            ahead = int(layer + 1 < layers)
            if ahead:
                # The noise at the next router that is known in this layer, and the layer's own.
                known = rng.standard_normal((n, n_expert))
                share = (1 + RESIDUAL_POWER * layer) / (1 + RESIDUAL_POWER * (layer + 1))
                noise = np.sqrt(share) * known
                noise += np.sqrt(1 - share) * rng.standard_normal((n, n_expert))
                ids_ahead, scores_ahead = _route(biases[layer + 1] + known, k)
                found["ahead_ids"].append(ids_ahead)
                found["ahead_scores"].append(scores_ahead)
            events.append((number, layer, n, ahead, len(np.unique(ids)), phase))
    return _trace(shape, layers, steps, np.array(events), found)


def _route(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best experts of each token, and their normalized weights, best first [n, k]."""
    chosen = np.argpartition(-logits, k - 1, axis=1)[:, :k]
    best = np.take_along_axis(logits, chosen, axis=1)
    order = np.argsort(-best, axis=1)
    ids, best = (np.take_along_axis(each, order, axis=1) for each in (chosen, best))
    scores = np.exp(ROUTER_SPREAD * (best - best[:, :1]))
    scores /= scores.sum(axis=1, keepdims=True)
    return ids.astype(np.uint16), scores.astype(np.float32)


def _trace(
    shape: synthetic.Shape,
    layers: int,
    steps: Sequence[tuple[Phase, int]],
    events: np.ndarray,
    found: Mapping[str, list[np.ndarray]],
) -> Trace:
    """Return a trace of these events, with the sizes of the model's experts in both precisions."""
    k, n_expert = shape.n_expert_used, shape.n_expert
    tokens = events[:, 2]
    of_step = tokens * np.where(events[:, 5] == Phase.PREFILL, PREFILL_US, DECODE_US)
    joined = {
        name: np.concatenate(each) if each else np.zeros((0, k), np.uint16)
        for name, each in found.items()
    }
    arrays = joined | {
        "slices": _slices(shape, layers),
        "start_hotness": np.zeros((layers, n_expert)),
        "losses": np.zeros((layers, n_expert, 2)),
        "costs": np.zeros((layers, n_expert, 3)),
        "counters": np.zeros((len(Phase), len(COUNTERS)), np.int64),
        "step_phase": np.array([phase for phase, _ in steps], np.uint8),
        "step_tokens": np.array([n for _, n in steps], np.int32),
        "marks": np.array([(0, STARTS, 0)], np.int32),
        "restored": np.zeros((0, 3), np.int32),
        "restored_use": np.zeros(0, np.uint8),
        "event_step": events[:, 0].astype(np.int32),
        "event_layer": events[:, 1].astype(np.int16),
        "event_tokens": tokens.astype(np.int32),
        "event_ahead": events[:, 3].astype(np.uint8),
        "event_scored": np.zeros(len(events), np.uint8),
        "event_computed": events[:, 4].astype(np.int32),
        "event_ns": (1000 * of_step).astype(np.int64),
        "event_wait_us": np.zeros(len(events), np.int64),
        "tokens": np.concatenate([np.arange(n, dtype=np.int32) for n in tokens.tolist()]),
        "phases": np.repeat(events[:, 5], tokens).astype(np.uint8),
        "sequences": np.zeros(int(tokens.sum()), np.int32),
        "importance": np.zeros(0, np.float32),
    }
    header = Header(
        version=VERSION,
        model=f"{shape.arch}, drawn",
        arch=shape.arch,
        n_expert=n_expert,
        n_expert_used=k,
        layer_ids=tuple(range(layers)),
        tiers=(HIGH, LOW),
        files=("drawn",),
        policy="lru",
        in_use=(HIGH,),
        settings={},
        rules=Rules(),
        transition_bytes=0,
        expert_bytes=1,
        io_threads=1,
        read_bytes_per_s=1,
        read_latency_us=0,
        dense_share=(DENSE_SHARE, DENSE_SHARE),
    )
    return Trace(header, arrays)


def _slices(shape: synthetic.Shape, layers: int) -> np.ndarray:
    """Return the file, offset, bytes and type of each expert matrix [layer, kind, tier, 4]."""
    sizes = {
        GATE: (shape.n_embd, shape.n_ff_exp),
        UP: (shape.n_embd, shape.n_ff_exp),
        DOWN: (shape.n_ff_exp, shape.n_embd),
    }
    found = np.zeros((layers, len(KINDS), 2, 4), np.int64)
    found[..., 0] = -1
    offset = 0
    for tier, name in enumerate((HIGH, LOW)):
        kind_of = type_by_name(name)
        assert kind_of is not None
        for layer in range(layers):
            for kind, (row, n_rows) in sizes.items():
                n_bytes = row_bytes(kind_of, row) * n_rows
                found[layer, kind, tier] = 0, offset, n_bytes, kind_of
                offset += n_bytes * shape.n_expert
    return found


def expert_bytes(trace: Trace) -> int:
    """Return the size in bytes of all experts in the high precision, for the model of a trace."""
    return int(trace.n_expert * trace.arrays["slices"][:, :, 0, 2].sum())


def replayed(trace: Trace, case: Case, speed: float, measured_from: int) -> Result:
    """Simulate the prompts and decode steps of a benchmark case, and return its metrics.

    A case is a policy with its settings under a cap on GPU memory. The result is a dict with keys
    such as "tpot_ms_p50" (time per token) and "hit_rate".

    - trace: the experts that each token uses in each layer.
    - speed: bandwidth of the link to the GPU, in bytes per second.
    - measured_from: number of first decode steps that the decode times ignore.
    """
    settings, every = dict(case.settings), expert_bytes(trace)
    settings.pop("force_managed", None)
    table = None if settings.pop("losses", None) is None else default_path(DEMO_MODEL)
    low = settings.pop("low_tier", None if table is None else SKIP_TIER)
    assert case.cap is not None
    slots = int(case.cap * every)
    if case.one_token:
        slots = every * trace.n_expert_used // (trace.n_expert * trace.n_layers)
    given = {
        "policy": settings.pop("policy"),
        "low_tier": low,
        "losses": table,
        "expert_ram": slots,
        "bandwidth": int(speed),
    }
    options = replace(ReplayOptions.of(given), settings=settings)
    transport, time = speed_and_time(trace.header, options)
    setup = set_up_for(trace, options, policy_class(options.policy or ""), transport)
    outcome = simulate(Bindings.load().library(), trace, setup, transport, time)
    stats, decoded = outcome.stats, trace.arrays["step_phase"] == Phase.DECODE
    step_ms = outcome.step_us / 1000
    tokens, n_decoded = step_ms[decoded][measured_from:], int(decoded.sum())
    moved_bytes = stats.demand_bytes[Phase.DECODE] + stats.prefetch_bytes[Phase.DECODE]
    prompts = step_ms[~decoded]
    return {
        "name": case.name,
        "cap": case.cap,
        "tpot_ms_p50": float(np.median(tokens)),
        "tpot_ms_p99": float(np.percentile(tokens, 99)),
        "tpot_ms_p50_runs": [float(np.median(tokens))],
        "ttft_ms": float(prompts[1]) if len(prompts) > 1 else None,
        "ttft_ms_runs": [float(prompts[min(1, len(prompts) - 1)])],
        "long_ms": float(prompts[2]) if len(prompts) > 2 else None,
        "hit_rate": stats.hits[Phase.DECODE] / max(1, stats.requests[Phase.DECODE]),
        "copied_bytes_per_token": (moved_bytes + stats.transition_bytes) / n_decoded,
        "waited_ms": stats.wait_us[Phase.DECODE] / 1000 / n_decoded,
    }


def measured_minus_simulated(shape: synthetic.Shape, cases: Sequence[Case]) -> dict[str, float]:
    """Return the measured minus the simulated decode time of each benchmark case.

    The result maps names of cases to milliseconds per token and layer. The measured times are those
    of an H200 GPU. Cases that were not measured on this GPU are left out.

    - shape: the tensor sizes of the simulated model.
    - cases: policies with their settings under a cap on GPU memory.
    """
    decode = (Phase.DECODE, 1, 128)
    steps = [(Phase.PREFILL, MEASURED_PROMPT, 2), (Phase.DECODE, 1, SETTLE_STEPS), decode]
    trace = draw_trace(shape, Run(MEASURED_LAYERS, steps))
    found = {}
    for case in cases:
        if case.name in MEASURED_MS:
            row = replayed(trace, case, MEASURED_LINK, SETTLE_STEPS)
            missing = MEASURED_MS[case.name] - row["tpot_ms_p50"]
            found[case.name] = missing / MEASURED_LAYERS
    return found


def predict(on: Any, note: Note) -> Report:
    """Predict the speeds that `moe-edge bench gpu --table3` would measure, by simulation.

    Returns a report with the time per token, the time to read a prompt, and the hit rate of our
    engine. It has a row for each policy with its settings in Table 3 of the DyMoE paper.

    - on: the options of the benchmark. `link` is the simulated bandwidth of copies to the GPU.
    - note: receives progress messages.
    """
    shape = synthetic.preset(on.model_name)
    layers = on.layers or shape.n_layer
    steps = [
        (Phase.PREFILL, on.prompt_tokens, 1),
        (Phase.DECODE, 1, on.warmup),
        (Phase.PREFILL, on.prompt_tokens, 1),
        (Phase.DECODE, 1, on.tokens),
        (Phase.PREFILL, on.n_ubatch, 1),
    ]
    trace = draw_trace(replace(shape, n_layer=layers), Run(layers, steps), on.seed)
    some = default_path(DEMO_MODEL)
    under = {cap: table3.cases_under(cap, cap == on.caps[0], on.retention, some) for cap in on.caps}
    lacking = measured_minus_simulated(
        shape, table3.cases_under(table3.ALL_ROWS_CAP, True, on.retention, some)
    )
    rows = []
    for cases in under.values():
        for case in cases:
            note(f"replaying {case.key}")
            row = replayed(trace, case, on.link, on.warmup)
            extra = lacking.get(case.name)
            row["as_h200_ms"] = None if extra is None else row["tpot_ms_p50"] + layers * extra
            rows.append(row)
    table3.add_over_row_1(rows)
    columns = (
        NAME,
        Column("p50", "tpot_ms_p50", fixed(1), "ms"),
        Column("p99", "tpot_ms_p99", fixed(1), "ms"),
        Column("as H200", "as_h200_ms", fixed(1), "ms"),
        Column(f"{on.prompt_tokens}", "ttft_ms", fixed(0), "ms"),
        Column(f"{on.n_ubatch}", "long_ms", fixed(0), "ms"),
        HIT,
        moved("copied_bytes_per_token"),
        Column("wait", "waited_ms", fixed(1), "ms"),
        Column("x TPOT", "speedup_tpot", fixed(2)),
        Column("paper", lambda row: table3.paper_text(row, "tpot")),
    )
    tables = []
    for cap in on.caps:
        same = [row for row in rows if row["cap"] == cap]
        tables.append(Table(f"{cap:.0%} of the experts on the GPU", columns, same))
    notes = ", ".join(f'"{name}" {ms:.3f}' for name, ms in lacking.items())
    heading = [
        "These speeds are simulated, not measured.",
        f"Simulated model: the shape of {on.model_name} with {layers} layers. Each token uses "
        "randomly drawn experts.",
        f"Simulated link to the GPU: {on.link / 1e9:g} GB/s, one copy at a time, no latency. "
        "Missing experts are copied before prefetched experts.",
        f"Assumed compute time: {DECODE_US:g} us per layer for a decoded token, and "
        f"{PREFILL_US:g} us per layer for a prompt token, as on an H200 with every expert on the "
        "GPU. Half of the compute time is outside the experts.",
        "Also assumed: high-precision and low-precision experts compute equally fast, and host "
        "memory holds every expert.",
        f'The column "as H200" is the column "p50" plus {layers} times the correction of the row. '
        "A correction is the measured time of a layer minus its simulated time. We do not know why "
        "these times differ.",
        f"Corrections (measured minus simulated time), in ms per token and layer: {notes}.",
        f"The measured times in these corrections are from an H200, with a model of "
        f"{MEASURED_LAYERS} layers and a link of {MEASURED_LINK / 1e9:g} GB/s. Low-precision "
        f"experts were read from the disk.",
    ]
    note_of_upstream = (
        "The tables have no row for upstream llama.cpp, because llama.cpp computes experts on the "
        "CPU. The CPU is not simulated."
    )
    return Report(heading, tables, [note_of_upstream])
