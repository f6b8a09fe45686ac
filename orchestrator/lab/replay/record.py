"""Records the routing of a run. The policy decides as usual; the recorder copies the events."""

from __future__ import annotations

import json
import statistics
from contextlib import closing
from dataclasses import replace
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import KINDS
from orchestrator.cost.disk import read_bandwidth
from orchestrator.errors import ConfigError, TraceError
from orchestrator.events import SKIP, ComputedStep, Phase, RouteEvent, distinct, percentile
from orchestrator.lab.replay.figures import counted
from orchestrator.lab.replay.simulate import Transport
from orchestrator.lab.replay.trace import ARRAYS, ENDS, PROMPT_ENDS, STARTS, VERSION, Header, Trace
from orchestrator.native import CStats
from orchestrator.plan.footprint import model_shape
from orchestrator.policy import BASELINE, PLAIN, POLICIES, policy_class
from orchestrator.policy.base import place
from orchestrator.runtime.evaluator import Evaluator, Inside
from orchestrator.runtime.runtime import Runtime

# Number of decode steps, and of prompts, that measure the compute time outside the experts.
DENSE_STEPS, DENSE_PROMPTS = 9, 3

# Largest number of tokens of a recorded answer, unless another limit is given.
ANSWER_TOKENS = 512


class Recorder:
    """Records which experts each token uses while a model runs, so that the run can be replayed.

    Use it as a context manager around the run, and then call trace(). Enter and leave it while no
    step runs. The caller must turn off the prefetching of experts between answers.

    Raises ConfigError if the model has no expert store (cache of experts). Also raises it if the
    policy has learned from earlier steps, or if experts were prefetched between answers. A replay
    could not repeat such a run.
    """

    def __init__(self, inside: Inside) -> None:
        if not inside.managed:
            raise ConfigError(
                f"the model runs on llama.cpp's own path (--policy {PLAIN}), which cannot "
                f"record routing: use --policy {' or '.join(POLICIES)}"
            )
        policy = inside.policy
        advice = "load the model again and start recording before the first answer"
        if policy.wants.learns and inside.driver.steps:
            raise ConfigError(
                f"recording cannot start, because the policy {policy.name} has already learned "
                f"from earlier steps, which a replay cannot repeat: {advice}"
            )
        if inside.driver.prefetched:
            raise ConfigError(
                f"recording cannot start, because experts were prefetched while the model was "
                f"idle, which a replay cannot repeat: {advice}"
            )
        self._inside = inside
        self._policy = policy
        self._step = -1
        self._since = self._waited_us = 0
        # The recorded data by the name of the trace's array. Data of a whole event is kept as
        # bytes, because that is the fastest copy and the policy waits for it.
        self._rows: dict[str, list[Any]] = {name: [] for name in ARRAYS}
        self._hotness: np.ndarray | None = None
        self._before = self._after = CStats()

    def __enter__(self) -> Recorder:
        driver, store = self._inside.driver, self._inside.store
        self._hotness = driver.learned().hotness
        self._before = store.stats()
        driver.on_restored = self._on_restored
        self._waited_us = sum(self._before.wait_us)
        driver.set_route(self._on_route)
        store.set_step_done(self._on_step_done)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_event(perf_counter_ns())
        self._after = self._inside.store.stats()
        driver = self._inside.driver
        driver.set_route()
        driver.on_restored = None
        self._inside.store.set_step_done(driver.step_done)

    @property
    def _n_steps(self) -> int:
        return len(self._rows["step_phase"])

    def _on_step_done(self, step: ComputedStep) -> None:
        """Record which sequences began or ended in a step, then report the step to the policy."""
        if self._n_steps and step.number == self._step:
            named = {ENDS: step.ends, STARTS: step.starts, PROMPT_ENDS: step.prompt_ends}
            self._rows["marks"] += [
                (self._n_steps - 1, what, sequence)
                for what, sequences in named.items()
                for sequence in sequences
            ]
        self._inside.driver.step_done(step)

    def _on_restored(self, sequence: int, state: bytes) -> None:
        """Record that a sequence was restored from the prompt cache before the next step.

        `state` is the policy's saved state of the sequence.
        """
        self._rows["restored"].append((self._n_steps, sequence, len(state)))
        self._rows["restored_use"].append(state)

    def _end_event(self, now_ns: int) -> None:
        """Record the time since the previous layer's event, and how much of it was spent on waits.

        Records nothing if this is the first event.
        """
        waited_us = sum(self._inside.store.stats().wait_us)
        if self._rows["event_step"]:
            self._rows["event_ns"].append(now_ns - self._since)
            self._rows["event_wait_us"].append(waited_us - self._waited_us)
        self._waited_us = waited_us

    def _on_route(self, event: RouteEvent) -> None:
        self._end_event(perf_counter_ns())
        rows, (ids, weights) = self._rows, event.filled
        if event.step != self._step:
            self._step = event.step
            rows["step_phase"].append(event.phase)
            rows["step_tokens"].append(event.n_tokens)
        for name, array in {
            "ids": ids,
            "weights": weights,
            "tokens": event.tokens_array,
            "phases": event.phases_array,
            "sequences": event.sequences_array,
            "ahead_ids": event.ahead_ids_array,
            "ahead_scores": event.ahead_array,
        }.items():
            rows[name].append(array.tobytes())
        scores = event.importance_array
        if scores is not None:
            rows["importance"].append(scores.tobytes())
        rows["event_step"].append(self._n_steps - 1)
        rows["event_layer"].append(event.layer)
        rows["event_tokens"].append(event.n_tokens)
        rows["event_ahead"].append(event.n_ahead)
        rows["event_scored"].append(scores is not None)
        self._since = perf_counter_ns()  # excludes the time that the recorder needs
        driver = self._inside.driver
        asked = driver.asks(event.phase)
        (driver.on_route if asked else driver.on_route_unasked)(event)
        decided_ns = perf_counter_ns()
        tiers = self._inside.store.decision.tier_array[distinct(ids)]
        rows["event_computed"].append(int((tiers != SKIP).sum()))
        done_ns = perf_counter_ns()
        self._since += done_ns - decided_ns
        if not asked:
            self._since = done_ns

    def trace(self, disk: Transport) -> Trace:
        """Return the recorded run.

        `disk` is the measured speed of the disk. The trace contains it, so that a replay simulates
        the same disk. Raises TraceError if no steps were recorded.
        """
        rows, before, after = self._rows, self._before, self._after
        if not rows["event_step"]:
            raise TraceError(
                "the recording is empty, because no token was computed: evaluate a text, or answer "
                "a prompt, while the recorder is active"
            )
        # Drop the sequences that were restored after the last step, because they had no effect.
        kept = sum(step < self._n_steps for step, *_ in rows["restored"])
        for name in ("restored", "restored_use"):
            del rows[name][kept:]
        inside, hotness, policy = self._inside, self._hotness, self._policy
        model, tiers = inside.model, [tier.name for tier in inside.model.tiers]
        unknown = np.zeros((model.n_layers, model.n_expert))
        losses, no_costs = (np.zeros((*unknown.shape, len(tiers) + n)) for n in (0, 1))
        if policy.placement.losses is not None:
            losses[..., list(inside.plan.tiers)] = policy.placement.losses
        costs = inside.losses.costs(tiers)
        found = {
            "start_hotness": unknown if hotness is None else hotness,
            "slices": _slices(inside.model),
            "losses": losses,
            "costs": no_costs if costs is None else costs,
            "counters": counted(after) - counted(before),
        }
        k = model.n_expert_used
        arrays = {
            name: found[name] if name in found else _array(name, rows[name], k) for name in ARRAYS
        }
        read = after.transition_bytes - before.transition_bytes
        return Trace(_header(inside, disk, int(read)), arrays)


def _array(name: str, rows: list[Any], k: int) -> np.ndarray:
    """Return an array of a trace, built from the recorded rows.

    `rows` contains numbers, lists of numbers, or bytes, depending on the array.
    """
    kind, shape = ARRAYS[name]
    if shape[0] in ("N", "A", "I", "B"):
        came = np.int32 if name in ("ids", "ahead_ids") else kind
        array = np.frombuffer(b"".join(rows), came).astype(kind, copy=False)
    else:
        array = np.array(rows, kind)
    columns = [k if each == "k" else int(each) for each in shape[1:]]
    return array.reshape(-1, *columns)


def _slices(model: ExpertModel) -> np.ndarray:
    found = np.full((model.n_layers, len(KINDS), len(model.tiers), 4), -1, np.int64)
    found[..., 1:] = 0
    for layer, kinds in enumerate(model.slices):
        for kind, tiers in enumerate(kinds):
            for tier, each in enumerate(tiers):
                if each is not None:
                    found[layer, kind, tier] = each
    return found


def _header(inside: Inside, disk: Transport, transition_bytes: int) -> Header:
    model, plan, config = inside.model, inside.plan, inside.config
    return Header(
        version=VERSION,
        model=model.name,
        arch=model.hparams.arch,
        n_expert=model.n_expert,
        n_expert_used=model.n_expert_used,
        layer_ids=tuple(model.layer_ids),
        tiers=tuple(tier.name for tier in model.tiers),
        files=tuple(path.name for path in model.files),
        policy=inside.policy.name,
        in_use=plan.tier_names,
        settings=inside.policy.settings.as_dict(),
        rules=inside.policy.rules,
        transition_bytes=transition_bytes,
        expert_bytes=plan.budget_bytes,
        io_threads=config.io_threads,
        read_bytes_per_s=disk.bytes_per_s,
        read_latency_us=disk.latency_us,
        dense_share=(0.5, 0.5),  # a default, until it is measured
    )


def record_text(
    evaluator: Evaluator, text: str, n_tokens: int | None = None, prefill: int = 0
) -> Trace:
    """Evaluate a text and return the recording of its routing.

    The first `prefill` tokens are read as a prompt. Each other token is a decode step. Evaluation
    stops after `n_tokens` tokens, by default at the size of the context. Raises ConfigError if the
    text is empty or a count is too large.
    """
    tokens, n_ctx = evaluator.tokenize(text), evaluator.n_ctx
    if n_tokens is not None and n_tokens > n_ctx:
        raise ConfigError(
            f"--tokens {n_tokens} is larger than the context of {n_ctx} tokens: increase --ctx"
        )
    tokens = tokens[: min(n_tokens or n_ctx, n_ctx)]
    if not tokens:
        raise ConfigError("the text is empty")
    if prefill > len(tokens):
        raise ConfigError(
            f"--prefill {prefill} is larger than the {len(tokens)} tokens to evaluate"
        )
    disk = measured(evaluator.inside)
    with Recorder(evaluator.inside) as recorder:
        if prefill:
            evaluator.eval(tokens[:prefill], 0, phase=Phase.PREFILL)
        for pos in range(prefill, len(tokens)):
            evaluator.eval(tokens[pos : pos + 1], pos, phase=Phase.DECODE)
    return _with_dense_share(evaluator, recorder.trace(disk))


def record_answer(runtime: Runtime, prompt: str, n_tokens: int | None) -> Trace:
    """Let a model answer a prompt, and return a recording of which experts each token uses.

    - runtime: the loaded model. It must not prefetch experts between answers
      (`Answering.reads_ahead`), because a replay could not repeat this.
    - n_tokens: maximum length of the answer. None uses ANSWER_TOKENS.

    Raises ConfigError if the prompt does not fit in the context.
    """
    disk = measured(runtime.inside)
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": n_tokens or ANSWER_TOKENS,
    }
    with Recorder(runtime.inside) as recorder:
        with closing(runtime.submit(json.dumps(body).encode())) as answer:
            for _ in answer:
                pass
        with runtime.evaluator():  # returns after the last step
            pass
    with runtime.evaluator() as evaluator:
        return _with_dense_share(evaluator, recorder.trace(disk))


def _with_dense_share(evaluator: Evaluator, trace: Trace) -> Trace:
    return replace(trace, header=replace(trace.header, dense_share=dense_share(evaluator, trace)))


def measured(inside: Inside) -> Transport:
    """Measure how fast the experts of a loaded model are read from its file.

    `inside` gives access to the loaded model and its settings. Returns the bandwidth with all I/O
    threads, the latency of one read, and the number of I/O threads.
    """
    threads, tier = inside.config.io_threads, inside.plan.tiers[0]
    many = read_bandwidth(inside.model, tier=tier, threads=threads, seconds=0.5)
    one = read_bandwidth(inside.model, tier=tier, threads=1, seconds=0.5)
    # One thread waits for the latency of each read. Many threads overlap their latencies.
    latency_s = one.slice_bytes * (1 / one.bytes_per_s - 1 / many.bytes_per_s)
    return Transport(int(many.bytes_per_s), max(0, round(1e6 * latency_s)), threads)


def dense_share(evaluator: Evaluator, trace: Trace) -> tuple[float, float]:
    """Measure the fraction of a step's compute time that is spent outside the experts.

    Steps that skip all experts are timed, and compared with the recorded steps. Returns one
    fraction for prefill and one for decode. Clears the KV cache.
    """
    inside = evaluator.inside
    steps: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    prompt_tokens = trace.arrays["step_tokens"][trace.arrays["step_phase"] == Phase.PREFILL]
    n = min(int(prompt_tokens.max(initial=1)), max(1, evaluator.n_ctx - DENSE_STEPS))
    token = evaluator.tokenize("a")[-1:]

    def skip(_event: RouteEvent) -> None:
        inside.store.decision.tier_array[:] = SKIP
        inside.store.apply(inside.store.decision)

    def timed(tokens: list[int], pos: int, phase: Phase) -> None:
        start = perf_counter()
        evaluator.eval(tokens, pos, phase=phase)
        steps[phase].append(1e3 * (perf_counter() - start) / len(tokens))

    driver = inside.driver
    policy = driver.policy
    driver.set_route(skip)
    shape = model_shape(inside.model, inside.plan.tiers[:1])
    driver.policy = place(policy_class(BASELINE), shape).make()
    try:
        for _ in range(DENSE_PROMPTS):
            evaluator.reset()
            timed(token * n, 0, Phase.PREFILL)
        for pos in range(n, min(n + DENSE_STEPS, evaluator.n_ctx)):
            timed(token, pos, Phase.DECODE)
    finally:
        driver.policy = policy
        driver.set_route()
        evaluator.reset()
    shares = []
    for phase in Phase:
        here = trace.arrays["step_phase"] == phase
        whole = trace.compute_ms[here] / trace.arrays["step_tokens"][here]
        least = statistics.median(steps[phase]) if steps[phase] else 0.0
        usual = percentile(whole, 50) if len(whole) else 0.0
        shares.append(min(1.0, least / usual) if usual and least else 0.5)
    return shares[Phase.PREFILL], shares[Phase.DECODE]
