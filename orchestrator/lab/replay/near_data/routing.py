"""What a model of another shape would route: layers of a trace tiled to it, or random numbers with
a given skew and likeness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from orchestrator.errors import ConfigError, TraceError
from orchestrator.events import Phase
from orchestrator.lab.replay.near_data.machine import PaperModel
from orchestrator.lab.replay.trace import Step, Trace
from orchestrator.settings import Settings, setting


@dataclass(frozen=True, slots=True)
class Sequence:
    """One prompt and its answer. counts, gates: float64 [n_layers, n_expert], how often the prompt
    used each expert, and the sums of its routing weights. ids: int64 [T, n_layers, k], experts of
    the answer's tokens, -1 for none; the one with the largest gate comes first."""

    counts: np.ndarray
    gates: np.ndarray
    ids: np.ndarray

    def decode_counts(self) -> np.ndarray:
        """How often the answer used each expert, float64 [n_layers, n_expert]."""
        return _by_expert(self.ids, self.counts.shape)


def layers_of(ids: np.ndarray) -> np.ndarray:
    """The layer of each of ids [T, n_layers, k]."""
    return np.broadcast_to(np.arange(ids.shape[1])[None, :, None], ids.shape)


def _by_expert(
    ids: np.ndarray, size: tuple[int, ...], weights: np.ndarray | float = 1.0
) -> np.ndarray:
    """Sums of weights [T, n_layers, k], or how often each expert was used, float64 [n_layers,
    n_expert]; -1 is none."""
    found = np.zeros(size)
    there = ids >= 0
    amounts = np.broadcast_to(weights, ids.shape)[there]
    np.add.at(found, (layers_of(ids)[there], ids[there]), amounts)
    return found


@dataclass(frozen=True, slots=True)
class Routing:
    """Sequences one after the other, and what is known before the first one: usual, float64
    [n_layers, n_expert], zeros for nothing. source: where they come from, for the report."""

    source: str
    sequences: list[Sequence]
    usual: np.ndarray

    def others(self, index: int) -> np.ndarray:
        """What is known of the usual use without one sequence: the mean shares of the others'
        answers, else the usual use."""
        rest = [each for at, each in enumerate(self.sequences) if at != index]
        if not rest:
            return self.usual
        shares = [each.decode_counts() / max(1, len(each.ids)) for each in rest]
        mean: np.ndarray = np.mean(shares, axis=0)
        return mean


@dataclass(frozen=True)
class Generated(Settings):
    """Routing of random numbers, where no trace is given. Each layer of each sequence has a
    distribution of its own, and its tokens choose different experts by it."""

    skew: float = setting(
        0.6,
        "Exponent of the experts' popularity by rank, 0 for none; of generated routing.",
        within=(0.0, 8.0),
        hidden=True,
    )
    prefill_decode_cosine: float = setting(
        0.89,
        "Cosine between the popularity in a prompt and in its answer, as in the near-data paper's "
        "Figure 4; of generated routing.",
        within=(0.0, 1.0),
        hidden=True,
    )
    sequences: int = setting(
        8, "How many sequences are generated.", within=(1, 10_000), hidden=True
    )
    tokens: int = setting(
        128,
        "Tokens of each generated prompt, and of each answer.",
        within=(1, 10**6),
        hidden=True,
    )


# Between the popularity in a prompt and in the mean of all prompts.
_SEQUENCES_COSINE = 0.85


def generated(shape: PaperModel, options: Generated) -> Routing:
    """Random routing for a shape."""
    random = np.random.default_rng(0)
    n, size = options.sequences, (shape.n_layers, shape.n_expert)
    ranks = np.arange(1, shape.n_expert + 1, dtype=np.float64)
    popularity = ranks**-options.skew / (ranks**-options.skew).sum()

    def fresh(count: int) -> np.ndarray:
        return random.permuted(np.broadcast_to(popularity, (count, *size)), axis=2)

    usual = np.repeat(fresh(1), n, axis=0)
    in_prompt = blended(usual, fresh(n), _SEQUENCES_COSINE)
    in_answer = blended(in_prompt, fresh(n), options.prefill_decode_cosine)
    made = []
    for prompt, answer in zip(in_prompt, in_answer, strict=True):
        ids, weights = _choose(random, prompt, options.tokens, shape.n_expert_used)
        chosen, _ = _choose(random, answer, options.tokens, shape.n_expert_used)
        made.append(Sequence(_by_expert(ids, size), _by_expert(ids, size, weights), chosen))
    source = (
        f"{n} generated sequences of {options.tokens} + {options.tokens} tokens, skew "
        f"{options.skew:g}"
    )
    return Routing(source, made, np.zeros(size))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine similarity along the last axis."""
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    found: np.ndarray = (a * b).sum(axis=-1) / np.where(lengths > 0, lengths, 1)
    return found


def blended(base: np.ndarray, other: np.ndarray, wanted: float) -> np.ndarray:
    """(1 - x) base + x other along the last axis, with the x at which the mean cosine with base is
    the one wanted; `other` itself where even that is more alike."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        alike = cosine(base, (1 - middle) * base + middle * other).mean()
        low, high = (middle, high) if alike > wanted else (low, middle)
    return (1 - high) * base + high * other


def _choose(
    random: np.random.Generator, popularity: np.ndarray, n: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """For n tokens k different experts of each layer, drawn one after the other by popularity
    [L, E], and routing weights that fall in this order: [n, L, k] both."""
    keys = np.log(popularity)[None] + random.gumbel(size=(n, *popularity.shape))
    ids = np.argsort(-keys, axis=2)[..., :k]
    raw = np.sort(random.gamma(1.0, size=ids.shape), axis=2)[..., ::-1]
    return ids, raw / raw.sum(axis=2, keepdims=True)


def from_trace(shape: PaperModel, trace: Trace) -> Routing:
    """The routing of a trace, as a model of this shape.

    Layers are repeated until there are as many as the shape has. Where the trace has more experts,
    neighbours are taken as one, whose weight is the sum of theirs, and a token keeps its best
    n_expert_used. Raises ConfigError where experts cannot be shared out so, TraceError for a trace
    without a prompt or without an answer.
    """
    fold, rest = divmod(trace.n_expert, shape.n_expert)
    if rest or trace.n_expert_used < shape.n_expert_used:
        raise ConfigError(
            f"the trace routes to {trace.n_expert_used} of {trace.n_expert} experts, which cannot "
            f"stand for {shape.n_expert_used} of {shape.n_expert} of {shape.name}: leave the trace "
            f"out to generate the routing"
        )
    tiled = np.arange(shape.n_layers) % trace.n_layers
    sequences = []
    for prompt, answer in _sequences(trace):
        counts = np.zeros((trace.n_layers, shape.n_expert))
        gates = np.zeros_like(counts)
        for layer, ids, weights in _prompt_rows(prompt, trace.n_layers):
            kept, gate = folded(ids, weights, fold, shape)
            counts[layer] += np.bincount(kept[kept >= 0], minlength=shape.n_expert)
            gates[layer] += np.bincount(kept[kept >= 0], gate[kept >= 0], shape.n_expert)
        rows = _answer_rows(answer, fold, shape, trace.n_layers)
        if counts.any() and len(rows):
            sequences.append(Sequence(counts[tiled], gates[tiled], rows[:, tiled]))
    if not sequences:
        raise TraceError(
            "the trace has no prompt with an answer: record one with `moe-edge trace -p`, or with "
            "--text and --prefill"
        )
    known = trace.arrays["start_hotness"].reshape(trace.n_layers, shape.n_expert, fold).sum(axis=2)
    n_tokens = sum(len(each.ids) for each in sequences)
    source = f"{trace.header.model}: {len(sequences)} sequences with {n_tokens} decoded tokens"
    return Routing(source, sequences, known[tiled])


def folded(
    ids: np.ndarray, weights: np.ndarray, fold: int, shape: PaperModel
) -> tuple[np.ndarray, np.ndarray]:
    """Experts [T, k] and weights of a trace as those of a shape: `fold` neighbours are one, and the
    n_expert_used with the largest sums of weights stay, the largest first; -1 where a token has
    fewer. [T, n_expert_used] both."""
    rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    sums = np.zeros((len(ids), shape.n_expert))
    used = np.zeros(sums.shape, bool)
    np.add.at(sums, (rows, ids // fold), weights)
    used[rows, ids // fold] = True
    ranked = np.argsort(np.where(used, -sums, np.inf), axis=1, kind="stable")
    best = ranked[:, : shape.n_expert_used]
    there = np.take_along_axis(used, best, axis=1)
    gates = np.where(there, np.take_along_axis(sums, best, axis=1), 0.0)
    return np.where(there, best, -1), gates


def _sequences(trace: Trace) -> Iterator[tuple[list[Step], list[Step]]]:
    """The steps of each prompt and of its answer; a further prompt of a conversation begins another
    one."""
    prompt: list[Step] = []
    answer: list[Step] = []
    for step in trace.steps():
        again = step.phase is Phase.PREFILL and bool(answer)
        if (step.starts or again) and (prompt or answer):
            yield prompt, answer
            prompt, answer = [], []
        (prompt if step.phase is Phase.PREFILL else answer).append(step)
    yield prompt, answer


def _prompt_rows(steps: list[Step], n_layers: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(layer, experts [T, k], weights) of each layer of each step; the last layer, which computes
    one token of a prompt, as the one before predicts it, where the trace looks ahead."""
    for step in steps:
        before = None
        for event in step.events:
            if event.layer == n_layers - 1 and before is not None and len(before.ahead_ids):
                yield event.layer, before.ahead_ids[0].astype(np.int64), before.ahead_scores[0]
            else:
                yield event.layer, event.ids.astype(np.int64), event.weights
            before = event if event.layer == n_layers - 2 else None


def _answer_rows(steps: list[Step], fold: int, shape: PaperModel, n_layers: int) -> np.ndarray:
    """Experts of the tokens of decode steps, int64 [T, n_layers, n_expert_used]."""
    rows = []
    for step in steps:
        row = np.full((step.n_tokens, n_layers, shape.n_expert_used), -1, np.int64)
        for event in step.events:
            kept, _ = folded(event.ids.astype(np.int64), event.weights, fold, shape)
            row[: len(kept), event.layer] = kept
        rows.append(row)
    return np.concatenate(rows) if rows else np.zeros((0, n_layers, shape.n_expert_used), np.int64)
