"""Records the routing of a run: the policy decides as always, the recorder copies the event."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from gguf_tools.file.layout import KINDS
from orchestrator.config import Sampling
from orchestrator.cost.disk import read_bandwidth
from orchestrator.errors import ConfigError, TraceError
from orchestrator.events import SKIP, ComputedStep, Phase, RouteEvent, distinct, percentile
from orchestrator.lab.replay.figures import counted
from orchestrator.lab.replay.simulate import Transport
from orchestrator.lab.replay.trace import ARRAYS, ENDS, PROMPT_ENDS, STARTS, VERSION, Header, Trace
from orchestrator.memory.footprint import model_shape
from orchestrator.native import CStats
from orchestrator.policy import BASELINE, POLICIES, policy_class
from orchestrator.policy.base import place
from orchestrator.runtime.engine import Engine

# Steps from which the share of computing outside the experts is measured.
DENSE_STEPS, DENSE_PROMPTS = 9, 3


class Recorder:
    """Records while it is entered; trace() afterwards gives the recording.

    Python is called in every step, also where the policy is not asked; what the store does is the
    same. The engine must be managed and must not change its policy meanwhile. Raises ConfigError,
    also where the policy has learned from steps before: a replay starts where the policy started.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.managed:
            raise ConfigError(
                f"the plain path routes unseen: choose --policy {' or '.join(POLICIES)}"
            )
        policy = engine.policy
        if policy.wants.learns and engine.driver.steps:
            raise ConfigError(
                f"the policy {policy.name} has decided already: record with a new engine"
            )
        engine.end_idle()
        if engine.driver.brought:
            raise ConfigError(
                "experts were read while nothing was asked for, in an order that a replay does not "
                "know: record with a new engine"
            )
        self._engine = engine
        self._policy = policy
        self._step = -1
        self._since = self._waited_us = 0
        # Of arrays of the trace by name: numbers or rows of steps and events, and of what events
        # have parts of, bytes: the cheapest copies, since the policy waits for them.
        self._rows: dict[str, list[Any]] = {name: [] for name in ARRAYS}
        self._hotness: np.ndarray | None = None
        self._before = self._after = CStats()

    def __enter__(self) -> Recorder:
        engine, store = self._engine, self._engine.store
        self._hotness = engine.driver.learned().hotness
        self._before = store.stats()
        engine.driver.on_restored = self._on_restored
        self._waited_us = sum(self._before.wait_us)
        engine.driver.set_route(self._on_route)
        store.set_step_done(self._on_step_done)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_event(perf_counter_ns())
        self._after = self._engine.store.stats()
        driver = self._engine.driver
        driver.set_route()
        driver.on_restored = None
        self._engine.store.set_step_done(driver.step_done)

    @property
    def _n_steps(self) -> int:
        return len(self._rows["step_phase"])

    def _on_step_done(self, step: ComputedStep) -> None:
        """The policy learns as always; what it is told is recorded."""
        if self._n_steps and step.number == self._step:
            named = {ENDS: step.ends, STARTS: step.starts, PROMPT_ENDS: step.prompt_ends}
            self._rows["marks"] += [
                (self._n_steps - 1, what, sequence)
                for what, sequences in named.items()
                for sequence in sequences
            ]
        self._engine.driver.step_done(step)

    def _on_restored(self, sequence: int, state: bytes) -> None:
        """Before the step that comes next."""
        self._rows["restored"].append((self._n_steps, sequence, len(state)))
        self._rows["restored_use"].append(state)

    def _end_event(self, now_ns: int) -> None:
        """The time of the event before, if there is one."""
        waited_us = sum(self._engine.store.stats().wait_us)
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
        self._since = perf_counter_ns()  # what was before, a run without recording does not do
        driver = self._engine.driver
        asked = driver.asks(event.phase)
        (driver.on_route if asked else driver.on_route_unasked)(event)
        decided_ns = perf_counter_ns()
        tiers = self._engine.store.decision.tier_array[distinct(ids)]
        rows["event_computed"].append(int((tiers != SKIP).sum()))
        done_ns = perf_counter_ns()
        self._since += done_ns - decided_ns
        if not asked:
            self._since = done_ns

    def trace(self, disk: Transport) -> Trace:
        """What was recorded, from such a disk. Raises TraceError where nothing was."""
        rows, before, after = self._rows, self._before, self._after
        if not rows["event_step"]:
            raise TraceError("nothing was evaluated, so there is nothing to record")
        # A sequence that went on with no step behind it did nothing.
        kept = sum(step < self._n_steps for step, *_ in rows["restored"])
        for name in ("restored", "restored_use"):
            del rows[name][kept:]
        engine, hotness, policy = self._engine, self._hotness, self._policy
        model, tiers = engine.model, [tier.name for tier in engine.model.tiers]
        unknown = np.zeros((model.n_layers, model.n_expert))
        losses, no_costs = (np.zeros((*unknown.shape, len(tiers) + n)) for n in (0, 1))
        if policy.placement.losses is not None:
            losses[..., list(engine.plan.tiers)] = policy.placement.losses
        costs = engine.losses.costs(tiers)
        found = {
            "start_hotness": unknown if hotness is None else hotness,
            "slices": _slices(engine),
            "losses": losses,
            "costs": no_costs if costs is None else costs,
            "counters": counted(after) - counted(before),
        }
        k = model.n_expert_used
        arrays = {
            name: found[name] if name in found else _array(name, rows[name], k) for name in ARRAYS
        }
        read = after.transition_bytes - before.transition_bytes
        return Trace(_header(engine, disk, int(read)), arrays)


def _array(name: str, rows: list[Any], k: int) -> np.ndarray:
    """An array of a trace from numbers, rows of numbers, or bytes as the hook has them."""
    kind, shape = ARRAYS[name]
    if shape[0] in ("N", "A", "I", "B"):
        came = np.int32 if name in ("ids", "ahead_ids") else kind
        array = np.frombuffer(b"".join(rows), came).astype(kind, copy=False)
    else:
        array = np.array(rows, kind)
    columns = [k if each == "k" else int(each) for each in shape[1:]]
    return array.reshape(-1, *columns)


def _slices(engine: Engine) -> np.ndarray:
    model = engine.model
    found = np.full((model.n_layers, len(KINDS), len(model.tiers), 4), -1, np.int64)
    found[..., 1:] = 0
    for layer, kinds in enumerate(model.slices):
        for kind, tiers in enumerate(kinds):
            for tier, each in enumerate(tiers):
                if each is not None:
                    found[layer, kind, tier] = each
    return found


def _header(engine: Engine, disk: Transport, transition_bytes: int) -> Header:
    model, plan, config = engine.model, engine.plan, engine.config
    return Header(
        version=VERSION,
        model=model.name,
        arch=model.hparams.arch,
        n_expert=model.n_expert,
        n_expert_used=model.n_expert_used,
        layer_ids=tuple(model.layer_ids),
        tiers=tuple(tier.name for tier in model.tiers),
        files=tuple(path.name for path in model.files),
        policy=engine.policy.name,
        in_use=plan.tier_names,
        settings=engine.policy.settings.as_dict(),
        rules=engine.policy.rules,
        transition_bytes=transition_bytes,
        expert_bytes=plan.budget_bytes,
        io_threads=config.io_threads,
        read_bytes_per_s=disk.bytes_per_s,
        read_latency_us=disk.latency_us,
        dense_share=(0.5, 0.5),  # until it is measured
    )


def record_text(engine: Engine, text: str, n_tokens: int | None = None, prefill: int = 0) -> Trace:
    """Records the evaluation of a text: its first `prefill` tokens as a prompt, the others
    one by one, each a decode step. n_tokens None: as many as the context holds.

    Raises ConfigError for a text or a count that does not fit.
    """
    tokens = engine.tokenize(text)
    if n_tokens is not None and n_tokens > engine.n_ctx:
        raise ConfigError(
            f"--tokens {n_tokens} is more than the context of {engine.n_ctx} holds: raise --ctx"
        )
    tokens = tokens[: min(n_tokens or engine.n_ctx, engine.n_ctx)]
    if not tokens:
        raise ConfigError("the text is empty")
    if prefill > len(tokens):
        raise ConfigError(f"--prefill {prefill} is more than the {len(tokens)} tokens to evaluate")

    def play() -> None:
        if prefill:
            engine.eval(tokens[:prefill], 0, phase=Phase.PREFILL)
        for pos in range(prefill, len(tokens)):
            engine.eval(tokens[pos : pos + 1], pos, phase=Phase.DECODE)

    return _recorded(engine, play)


def record_answer(engine: Engine, prompt: str, sampling: Sampling, n_tokens: int) -> Trace:
    """Records an answer of at most n_tokens tokens, the prompt as the chat renders it.
    Raises ConfigError for a prompt that does not fit."""
    messages = [{"role": "user", "content": prompt}]

    def play() -> None:
        for _ in engine.generate(engine.render_chat(messages), sampling, n_tokens):
            pass

    return _recorded(engine, play)


def _recorded(engine: Engine, play: Callable[[], None]) -> Trace:
    """What play computes, with this disk's speed and the share outside the experts."""
    engine.reset()
    disk = measured(engine)
    with Recorder(engine) as recorder:
        play()
    trace = recorder.trace(disk)
    return replace(trace, header=replace(trace.header, dense_share=dense_share(engine, trace)))


def measured(engine: Engine) -> Transport:
    """Reads of this very file: as many threads as the store has, and one alone, which shows what
    a read takes beside its bytes."""
    threads, tier = engine.config.io_threads, engine.plan.tiers[0]
    many = read_bandwidth(engine.model, tier=tier, threads=threads, seconds=0.5)
    one = read_bandwidth(engine.model, tier=tier, threads=1, seconds=0.5)
    latency_s = one.slice_bytes * (1 / one.bytes_per_s - 1 / many.bytes_per_s)
    return Transport(int(many.bytes_per_s), max(0, round(1e6 * latency_s)), threads)


def dense_share(engine: Engine, trace: Trace) -> tuple[float, float]:
    """By phase, the share of a recorded step's computing that stays when every expert is
    skipped: median of some steps against the median of the recorded ones. The policy learns
    nothing from them; the conversation is lost."""
    steps: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    prompt_tokens = trace.arrays["step_tokens"][trace.arrays["step_phase"] == Phase.PREFILL]
    n = min(int(prompt_tokens.max(initial=1)), max(1, engine.n_ctx - DENSE_STEPS))
    token = engine.tokenize("a")[-1:]

    def skip(_event: RouteEvent) -> None:
        engine.store.decision.tier_array[:] = SKIP
        engine.store.apply(engine.store.decision)

    def timed(tokens: list[int], pos: int, phase: Phase) -> None:
        start = perf_counter()
        engine.eval(tokens, pos, phase=phase)
        steps[phase].append(1e3 * (perf_counter() - start) / len(tokens))

    driver = engine.driver
    policy = driver.policy
    driver.set_route(skip)
    shape = model_shape(engine.model, engine.plan.tiers[:1])
    driver.policy = place(policy_class(BASELINE), shape).make()
    try:
        for _ in range(DENSE_PROMPTS):
            engine.reset()
            timed(token * n, 0, Phase.PREFILL)
        for pos in range(n, min(n + DENSE_STEPS, engine.n_ctx)):
            timed(token, pos, Phase.DECODE)
    finally:
        driver.policy = policy
        driver.set_route()
        engine.reset()
    shares = []
    for phase in Phase:
        here = trace.arrays["step_phase"] == phase
        whole = trace.compute_ms[here] / trace.arrays["step_tokens"][here]
        least = statistics.median(steps[phase]) if steps[phase] else 0.0
        usual = percentile(whole, 50) if len(whole) else 0.0
        shares.append(min(1.0, least / usual) if usual and least else 0.5)
    return shares[Phase.PREFILL], shares[Phase.DECODE]
