"""Records the routing of a run: the policy decides as always, the recorder copies the event."""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np

from gguf_tools.layout import KINDS
from orchestrator.bench.disk import read_bandwidth
from orchestrator.choice import LRU, SKIP_TIER
from orchestrator.engine import Engine
from orchestrator.errors import ConfigError, TraceError
from orchestrator.events import Phase, RouteEvent
from orchestrator.replay.trace import VERSION, Header, Trace
from orchestrator.sampling import Sampling


class Recorder:
    """Records while it is entered; trace() afterwards gives the recording.

    A policy that Python is not called for (lru, dynaexq) is called, and decides the same. The
    engine must be managed and must not change its policy meanwhile. Raises ConfigError.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.managed:
            raise ConfigError("the plain path routes unseen: choose --policy lru or dymoe")
        self._engine = engine
        self._step = -1
        self._phases: list[int] = []
        self._tokens_of_step: list[int] = []
        self._starts: list[tuple[int, int]] = []  # ns, waited us, by step and at the end
        self._events: list[tuple[int, int, int, int, bool]] = []
        # bytes: the cheapest copies, and the policy waits for them
        self._ids: list[bytes] = []
        self._weights: list[bytes] = []
        self._tokens: list[bytes] = []
        self._ahead_ids: list[bytes] = []
        self._ahead: list[bytes] = []
        self._importance: list[bytes] = []

    def __enter__(self) -> Recorder:
        self._engine.store.set_route(self._on_route)
        return self

    def __exit__(self, *_: object) -> None:
        engine = self._engine
        self._stamp()
        engine.set_route()

    def _stamp(self) -> None:
        self._starts.append((perf_counter_ns(), sum(self._engine.store.stats().wait_us)))

    def _on_route(self, event: RouteEvent) -> None:
        n = event.n_tokens
        if event.step != self._step:
            self._step = event.step
            self._stamp()
            self._phases.append(event.phase)
            self._tokens_of_step.append(n)
        scores = event.importance_array
        if scores is not None:
            self._importance.append(scores.tobytes())
        here = len(self._phases) - 1, event.layer, n, event.n_ahead, scores is not None
        self._events.append(here)
        self._ids.append(event.ids_array.tobytes())
        self._weights.append(event.weights_array.tobytes())
        self._tokens.append(event.tokens_array.tobytes())
        if event.n_ahead:
            self._ahead_ids.append(event.ahead_ids_array.tobytes())
            self._ahead.append(event.ahead_array.tobytes())
        self._engine.on_route(event)

    def trace(self, read_bytes_per_s: int = 0) -> Trace:
        """What was recorded. Raises TraceError where nothing was."""
        if not self._events:
            raise TraceError("nothing was evaluated, so there is nothing to record")
        k = self._engine.model.n_expert_used
        starts = np.array(self._starts, np.int64)
        events = np.array(self._events, np.int32)
        arrays = {
            "slices": _slices(self._engine),
            "step_phase": np.array(self._phases, np.uint8),
            "step_tokens": np.array(self._tokens_of_step, np.int32),
            "step_us": np.diff(starts[:, 0]) // 1000,
            "step_wait_us": np.diff(starts[:, 1]),
            "event_step": events[:, 0].copy(),
            "event_layer": events[:, 1].astype(np.int16),
            "event_tokens": events[:, 2].copy(),
            "event_ahead": events[:, 3].astype(np.uint8),
            "event_scored": events[:, 4].astype(np.uint8),
            "ids": _joined(self._ids, np.int32).reshape(-1, k).astype(np.uint16),
            "weights": _joined(self._weights, np.float32).reshape(-1, k),
            "tokens": _joined(self._tokens, np.int32),
            "ahead_ids": _joined(self._ahead_ids, np.int32).reshape(-1, k).astype(np.uint16),
            "ahead_scores": _joined(self._ahead, np.float32).reshape(-1, k),
            "importance": _joined(self._importance, np.float32),
        }
        return Trace(_header(self._engine, read_bytes_per_s), arrays)


def _joined(pieces: list[bytes], kind: type[np.generic]) -> np.ndarray:
    return np.frombuffer(b"".join(pieces), kind)


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


def _header(engine: Engine, read_bytes_per_s: int) -> Header:
    model, plan, config = engine.model, engine.plan, engine.config
    names = plan.tier_names
    low = names[1] if len(names) > 1 else None
    if plan.policy is not None and plan.policy.name != LRU and config.low_tier == SKIP_TIER:
        low = SKIP_TIER
    retention = engine.policy.retention
    return Header(
        version=VERSION,
        model=model.name,
        arch=model.arch,
        n_expert=model.n_expert,
        n_expert_used=model.n_expert_used,
        layer_ids=tuple(model.layer_ids),
        tiers=tuple(tier.name for tier in model.tiers),
        files=tuple(path.name for path in model.files),
        policy=engine.policy.name,
        high=names[0],
        low=low,
        retention=1.0 if retention is None else float(retention),
        schedule=config.schedule,
        heavy_hitters=float(config.heavy_hitters),
        prompts_pass=config.prompts_pass,
        renormalize=config.renormalize,
        exact_tiers=config.exact_tiers,
        prefetch=config.prefetch if engine.store.spec.n_ahead else "off",
        n_ahead=engine.store.spec.n_ahead,
        expert_bytes=plan.budget_bytes,
        io_threads=config.io_threads,
        read_bytes_per_s=read_bytes_per_s,
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
    engine.reset()
    bandwidth = _bandwidth(engine)
    with Recorder(engine) as recorder:
        if prefill:
            engine.eval(tokens[:prefill], 0, phase=Phase.PREFILL)
        for pos in range(prefill, len(tokens)):
            engine.eval(tokens[pos : pos + 1], pos, phase=Phase.DECODE)
    return recorder.trace(bandwidth)


def record_answer(engine: Engine, prompt: str, sampling: Sampling, n_tokens: int) -> Trace:
    """Records an answer of at most n_tokens tokens, the prompt as the chat renders it.
    Raises ConfigError for a prompt that does not fit."""
    messages = [{"role": "user", "content": prompt}]
    engine.reset()
    bandwidth = _bandwidth(engine)
    with Recorder(engine) as recorder:
        for _ in engine.generate(engine.render_chat(messages), sampling, n_tokens):
            pass
    return recorder.trace(bandwidth)


def _bandwidth(engine: Engine) -> int:
    """Bytes per second of reads of this very file, as many threads as the store has."""
    threads = engine.config.io_threads
    tier = engine.plan.tiers[0]
    return int(read_bandwidth(engine.model, tier=tier, threads=threads, seconds=0.5).bytes_per_s)
