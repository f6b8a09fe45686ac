"""Traces without a model: given by hand or random."""

from dataclasses import replace

import numpy as np

from gguf_tools.file.layout import DOWN, GATE, KINDS, UP
from orchestrator.allocation.slots import Rules
from orchestrator.events import Phase
from orchestrator.lab.replay.simulate import set_up
from orchestrator.lab.replay.trace import COUNTERS, STARTS, VERSION, Header, Trace
from orchestrator.policy import policy_class

Q4_K = 12
EXPERT_BYTES = {UP: 4096, GATE: 4096, DOWN: 8192}
LOW_BYTES = {UP: 2048, GATE: 2048, DOWN: 4096}

HEADER = Header(
    version=VERSION,
    model="made up",
    arch="qwen3moe",
    n_expert=8,
    n_expert_used=2,
    layer_ids=(0, 1, 2),
    tiers=("q4_k", "q2_k"),
    files=("a.gguf",),
    policy="lru",
    in_use=("q4_k",),
    settings={},
    rules=Rules(),
    transition_bytes=0,
    expert_bytes=6 * 16384,
    io_threads=2,
    read_bytes_per_s=10**9,
    read_latency_us=0,
    dense_share=(0.5, 0.5),
)


def make_trace(steps, ahead=None, compute_us=100, expert_bytes=None, **changes):
    """Build a trace. steps: (phase, ids [T, k] for each layer). ahead: predictions [A, T, k] for
    each step and layer. compute_us: compute time of a token."""
    sizes = (expert_bytes or EXPERT_BYTES, LOW_BYTES)
    n_layers, k = len(steps[0][1]), steps[0][1][0].shape[1]
    header = replace(HEADER, layer_ids=tuple(range(n_layers)), n_expert_used=k, **changes)
    slices = np.zeros((n_layers, len(KINDS), 2, 4), np.int64)
    slices[..., 0] = -1
    offset = 0
    for tier, by_kind in enumerate(sizes):
        for layer in range(n_layers):
            for kind, size in by_kind.items():
                slices[layer, kind, tier] = 0, offset, size, Q4_K
                offset += size * header.n_expert
    events, ids, tokens, ahead_ids = [], [], [], []
    event_ns: list[int] = []
    for number, (_, layers) in enumerate(steps):
        for layer, chosen in enumerate(layers):
            predicted = ahead[number][layer] if ahead else np.zeros((0, len(chosen), k))
            events.append((number, layer, len(chosen), len(predicted), len(np.unique(chosen))))
            rows = sum(len(each) for each in layers)
            event_ns.append(1000 * compute_us * len(layers[0]) * len(chosen) // rows)
            ids.append(chosen)
            tokens.append(np.arange(len(chosen)))
            ahead_ids.append(predicted.reshape(-1, k))
    columns = np.array(events)
    all_ids, all_ahead = np.concatenate(ids), np.concatenate(ahead_ids)
    scored = np.array([steps[number][0] is Phase.PREFILL for number in columns[:, 0]])
    falling = np.linspace(0.9, 0.1, k, dtype=np.float32)
    arrays = {
        "slices": slices,
        "start_hotness": np.zeros((n_layers, header.n_expert)),
        "losses": np.zeros((n_layers, header.n_expert, 2)),
        "costs": np.zeros((n_layers, header.n_expert, 3)),
        "counters": np.zeros((len(Phase), len(COUNTERS)), np.int64),
        "step_phase": np.array([phase for phase, _ in steps], np.uint8),
        "step_tokens": np.array([len(layers[0]) for _, layers in steps], np.int32),
        "marks": np.array([(0, STARTS, 0)], np.int32),
        "restored": np.zeros((0, 3), np.int32),
        "restored_use": np.zeros(0, np.uint8),
        "event_step": columns[:, 0].astype(np.int32),
        "event_layer": columns[:, 1].astype(np.int16),
        "event_tokens": columns[:, 2].astype(np.int32),
        "event_ahead": columns[:, 3].astype(np.uint8),
        "event_scored": scored.astype(np.uint8),
        "event_computed": columns[:, 4].astype(np.int32),
        "event_ns": np.array(event_ns, np.int64),
        "event_wait_us": np.zeros(len(columns), np.int64),
        "ids": all_ids.astype(np.uint16),
        "weights": np.tile(falling, (len(all_ids), 1)),
        "tokens": np.concatenate(tokens).astype(np.int32),
        "phases": np.repeat([steps[number][0] for number in columns[:, 0]], columns[:, 2]).astype(
            np.uint8
        ),
        "sequences": np.zeros(sum(map(len, tokens)), np.int32),
        "ahead_ids": all_ahead.astype(np.uint16),
        "ahead_scores": np.tile(falling, (len(all_ahead), 1)),
        "importance": np.linspace(1, 0, int(columns[scored, 2].sum()), dtype=np.float32),
    }
    return Trace(header, arrays)


def decode(*steps, **changes):
    """Trace with one token per step. steps: the experts of each layer."""
    return make_trace(
        [(Phase.DECODE, [np.array([ids]) for ids in layers]) for layers in steps], **changes
    )


def random_trace(rng, n_steps=12, n_layers=3, n_expert=8, k=2):
    """A prompt of three tokens, then decode steps. Usage is skewed, so a cache has hits, and half
    of the predictions are right."""
    odds = rng.dirichlet(np.full(n_expert, 0.5)) + 0.01
    odds /= odds.sum()

    def choose(n):
        return np.stack([rng.choice(n_expert, k, replace=False, p=odds) for _ in range(n)])

    steps, ahead = [], []
    for number in range(n_steps):
        n = 3 if number == 0 else 1
        layers = [choose(n) for _ in range(n_layers)]
        following = [
            (layers[layer + 1] if rng.random() < 0.5 else choose(n))[None]
            if layer + 1 < n_layers
            else np.zeros((0, n, k))
            for layer in range(n_layers)
        ]
        steps.append((Phase.PREFILL if number == 0 else Phase.DECODE, layers))
        ahead.append(following)
    return make_trace(steps, ahead, n_expert=n_expert)


def over(trace, policy, budget, low=None, threads=1, **settings):
    """A policy set up for a trace, in q4_k and optionally a lower tier or "skip"."""
    made = policy_class(policy)
    tiers = (0,) if low in (None, "skip") else (0, trace.tier_index(str(low)))
    rules = Rules(skip=low == "skip")
    return set_up(trace, made, budget, made.Settings.of(settings), tiers, rules, threads)
