"""Strategies on a simulated GPU with near-data CXL memory.

The memory computes experts next to its DRAM (the near-data paper, section 5). Times are virtual, in
milliseconds, and one sequence decodes. The routing comes from a trace, whose layers are tiled to
the shape of a large model, or is random with a given skew and similarity.

One constant is fitted: `PaperModel.fitted_migrations`, the number of experts that MoNDE moves for
each token. The paper does not state this rate, so it was chosen such that the speed-ups over MoNDE
come close to the paper's. A ratio over MoNDE therefore confirms nothing. Ratios over `near-only`
and the times of the near-data memory contain no fitted constant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.allocation.placement import PlacementSettings, importance, place
from orchestrator.allocation.pools import nominal_losses, shares
from orchestrator.errors import ConfigError, TraceError
from orchestrator.events import Phase
from orchestrator.lab.eval.arithmetic import cosine
from orchestrator.lab.replay.trace import Step, Trace
from orchestrator.lab.table import Column, Table, fixed, percent
from orchestrator.settings import setting

FULL_BITS = 16
_MATRICES = 3  # gate, up and down
# From the paper's Table 2: bandwidth inside the near-data memory; its multiply-accumulates per
# second at 16 bits (64 arrays of 4 x 4 at 1 GHz); peak FLOPS and memory size of the GPU.
NEAR_BYTES_PER_S, NEAR_MACS_PER_S = 512e9, 64 * 4**2 * 1e9
GPU_FLOPS, GPU_BYTES = 989.4e12, 80e9
# Our choices, because the paper states no value: the bandwidth of the GPU's memory (an H100's data
# sheet), the bandwidth of the link in each direction and its latency (PCIe 4.0 x16, less protocol
# overhead). A third choice is in `PaperModel.near_ms`: weights of b bits are packed, so that the
# arrays do 16 / b times as many multiply-accumulates per second.
GPU_BYTES_PER_S = 3350e9
LINK_BYTES_PER_S, LINK_US = 25e9, 2.0
# Widths of the near-data memory's replicas (section 4.2).
NEAR_BITS = (4, 3, 2, 1)
# Bits of a token's experts by the rank of their gate weight; the last value also applies to all
# later ranks. HOBBIT loads the first expert of a token in 16 bits and the others in 4 bits.
GPU_LRU_BITS, HOBBIT_BITS = (FULL_BITS,), (FULL_BITS, 4)
# Prompt and answer lengths of the end-to-end times, in tokens.
LENGTHS = ((128, 512), (512, 512), (512, 2048))

# Generated routing: number of sequences; tokens per prompt and per answer; exponent of the experts'
# popularity by rank; cosine similarity of the popularity in a prompt to the mean of all prompts and
# to that in its answer (the paper's Figure 4).
N_SEQUENCES, N_TOKENS = 8, 128
SKEW = 0.6
PROMPTS_COSINE, ANSWER_COSINE = 0.85, 0.89

NEAR_ONLY, MONDE, STATIC, CONTEXT = "near-only", "monde", "static", "context"
GPU_LRU, HOBBIT = "gpu-lru", "hobbit"


def link_ms(n_bytes: float) -> float:
    """Return the simulated time to copy n_bytes between the GPU and the near-data memory.

    Near-data memory computes experts itself. The time is in milliseconds, without the latency of
    the link.
    """
    return 1e3 * n_bytes / LINK_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model in Table 1 of the paper "Context-Aware MoE Inference on GPU-NDP Systems".

    The methods that return times simulate a GPU with a near-data memory, which computes the experts
    that it holds.

    - kv_width: width of a token's key vector, and of its value vector.
    - other_weights: number of weights outside the experts.
    - n_hot: number of experts per layer that the GPU holds. The near-data memory holds all others.
    - fitted_migrations: how many experts the compared method MoNDE copies to the GPU for each
      token. The paper does not state this number. It is fitted to the paper's speed-ups.
    """

    name: str
    hidden: int
    ffn: int
    n_layers: int
    n_expert: int
    n_expert_used: int
    kv_width: int
    other_weights: float
    n_hot: int
    fitted_migrations: float

    @property
    def size(self) -> tuple[int, int]:
        return self.n_layers, self.n_expert

    @property
    def expert_weights(self) -> int:
        return _MATRICES * self.hidden * self.ffn

    def expert_bytes(self, bits: float = FULL_BITS) -> float:
        """Return the size of one expert at this many bits per weight, without scales."""
        return self.expert_weights * bits / 8

    @property
    def move_ms(self) -> float:
        """Time to copy one 16-bit expert from the near-data memory to the GPU, in milliseconds.

        A near-data memory is a memory that also computes the experts that it holds.
        """
        return link_ms(self.expert_bytes())

    @property
    def gpu_slots(self) -> float:
        """Number of 16-bit experts that fit in the GPU's memory next to the other weights."""
        return (GPU_BYTES - 2 * self.other_weights) / self.expert_bytes()

    def gpu_ms(self, n_tokens: float = 1, bits: float = FULL_BITS) -> float:
        """Return the time to compute one expert on the GPU for n_tokens tokens, in milliseconds.

        This is the time to read its weights or the time to multiply, whichever is longer.
        """
        read = self.expert_bytes(bits) / GPU_BYTES_PER_S
        return 1e3 * max(read, 2 * n_tokens * self.expert_weights / GPU_FLOPS)

    def near_ms(self, bits: float = FULL_BITS, n_tokens: float = 1) -> float:
        """Return the time in which the near-data memory computes one expert, in milliseconds.

        A near-data memory computes experts in the memory that holds them, without the GPU.

        - bits: bits per weight of the expert.
        - n_tokens: number of tokens that use the expert.
        """
        read = self.expert_bytes(bits) / NEAR_BYTES_PER_S
        macs_per_s = NEAR_MACS_PER_S * FULL_BITS / bits
        return 1e3 * max(read, n_tokens * self.expert_weights / macs_per_s)

    def trip_ms(self, n_tokens: float = 1) -> float:
        """Return the time to send activations from the GPU to the near-data memory and back.

        The near-data memory needs them because it computes experts itself. They are the FP16
        activations of n_tokens tokens for one layer. The time is in milliseconds.
        """
        return 2 * (LINK_US / 1e3 + link_ms(2 * self.hidden * n_tokens))

    def dense_ms(self, n_tokens: float = 1) -> float:
        """Return the time to compute a layer's attention matrices on the GPU, in milliseconds.

        They are the query, key, value and output matrices. Reads of the KV cache are ignored.
        """
        weights = 2 * self.hidden * (self.hidden + self.kv_width)
        read, multiply = 2 * weights / GPU_BYTES_PER_S, 2 * n_tokens * weights / GPU_FLOPS
        return 1e3 * max(read, multiply)

    def prompt_layer_ms(
        self, tokens: np.ndarray, on_gpu: np.ndarray, n_prompt: int
    ) -> tuple[float, np.ndarray]:
        """Return the time of one layer in a prompt, and which experts are copied to the GPU.

        The GPU computes its own and the copied experts. The near-data memory, which can compute
        experts itself, computes the others. The experts with the most tokens are copied. Their
        number is chosen so that the layer takes the least time.

        - tokens: number of tokens of each expert, float64 [n_expert].
        - on_gpu: whether each expert is on the GPU from the start, bool [n_expert].
        - n_prompt: number of tokens of the prompt.

        The time is in milliseconds. The copied experts are returned as bool [n_expert].
        """
        gpu = sum(self.gpu_ms(n) for n in tokens[on_gpu] if n > 0)
        rest = [e for e in np.argsort(-tokens, kind="stable") if not on_gpu[e] and tokens[e] > 0]
        near = [self.near_ms(n_tokens=tokens[e]) for e in rest]
        trip = self.trip_ms(n_prompt)
        best, n_streamed = np.inf, 0
        for n in range(len(rest) + 1):
            left = sum(near[n:]) + (trip if n < len(rest) else 0.0)
            took = max(gpu, n * self.move_ms, left)
            if took < best:
                best, n_streamed = took, n
        streamed = np.zeros(len(tokens), bool)
        streamed[rest[:n_streamed]] = True
        return self.dense_ms(n_prompt) + best, streamed


SHAPES = {
    shape.name: shape
    for shape in (
        PaperModel("mixtral-8x7b", 4096, 14336, 32, 8, 2, 1024, 1.6e9, 4, 1.1),
        PaperModel("mixtral-8x22b", 6144, 16384, 56, 8, 2, 1024, 5.1e9, 2, 2.8),
    )
}


@dataclass(frozen=True)
class NearData(PlacementSettings):
    """Options for the simulation of a GPU with a memory that computes experts (near-data memory).

    The GPU holds and computes `hot` experts of each layer. All other experts are in the near-data
    memory.

    Raises SettingError for a value out of range. Raises ConfigError if `hot` is more than the
    number of experts of a layer, or more than the GPU can hold.
    """

    shape: str = setting(
        "mixtral-8x7b",
        f"Shape of the simulated model: {' or '.join(SHAPES)}.",
        choices=tuple(SHAPES),
    )
    hot: int | None = setting(
        None,
        "Number of hot experts per layer. The GPU computes them.",
        within=(0, 65535),
        shown="as in the paper",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        model, most = self.model, int(self.model.gpu_slots / self.model.n_layers)
        if self.n_hot > model.n_expert:
            raise ConfigError(
                f"--hot {self.n_hot} is too large: {model.name} has "
                f"{model.n_expert} experts per layer"
            )
        if self.n_hot > most:
            raise ConfigError(
                f"--hot {self.n_hot} is too large: the simulated GPU ({GPU_BYTES / 1e9:g} GB) "
                f"holds at most {most} experts per layer of {model.name}"
            )

    @property
    def model(self) -> PaperModel:
        return SHAPES[self.shape]

    @property
    def n_hot(self) -> int:
        return self.model.n_hot if self.hot is None else self.hot


@dataclass(frozen=True, slots=True)
class Sequence:
    """The routing of one prompt and its answer.

    - counts: number of prompt tokens routed to each expert, float64 [n_layers, n_expert].
    - gates: sum of each expert's gate weights for the prompt, float64 [n_layers, n_expert].
    - ids: the experts of each answer token, int64 [T, n_layers, k], the largest gate weight first.
      An entry is -1 if the token uses fewer experts.
    """

    counts: np.ndarray
    gates: np.ndarray
    ids: np.ndarray

    def decode_counts(self) -> np.ndarray:
        """Return the number of answer tokens that use each expert, float64 [n_layers, n_expert]."""
        return _by_expert(self.ids, self.counts.shape)


def _layers_of(ids: np.ndarray) -> np.ndarray:
    """Return the layer index of each element of ids [T, n_layers, k]."""
    return np.broadcast_to(np.arange(ids.shape[1])[None, :, None], ids.shape)


def _by_expert(
    ids: np.ndarray, size: tuple[int, ...], weights: np.ndarray | float = 1.0
) -> np.ndarray:
    """Sum weights [T, n_layers, k] by expert, or count uses, as float64 [n_layers, n_expert].

    An id of -1 is ignored.
    """
    found = np.zeros(size)
    there = ids >= 0
    amounts = np.broadcast_to(weights, ids.shape)[there]
    np.add.at(found, (_layers_of(ids)[there], ids[there]), amounts)
    return found


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of consecutive prompts and their answers.

    - source: description of the routing's origin, for the report.
    - sequences: the prompts and answers.
    - usual: expert usage that is known before the first sequence, float64 [n_layers, n_expert]. It
      is zero if unknown.
    """

    source: str
    sequences: list[Sequence]
    usual: np.ndarray

    def others(self, index: int) -> np.ndarray:
        """Return the mean expert usage in the answers of all sequences except for number `index`.

        A sequence is a prompt with its answer. The usage of an expert in an answer is the fraction
        of the answer's tokens that use the expert. The result is float64 [n_layers, n_expert].

        If the routing has only one sequence, the field `usual` is returned.
        """
        rest = [each for at, each in enumerate(self.sequences) if at != index]
        if not rest:
            return self.usual
        mean: np.ndarray = np.mean([e.decode_counts() / max(1, len(e.ids)) for e in rest], axis=0)
        return mean


def generated(shape: PaperModel) -> Routing:
    """Generate random routing, the experts that each token uses, for a large model.

    `shape` is the model, such as Mixtral-8x7B. Each layer of each sequence has its own
    probabilities of experts, which differ a little between prompt and answer. Each token draws its
    experts with these probabilities.
    """
    random = np.random.default_rng(0)
    powers = np.arange(1, shape.n_expert + 1, dtype=np.float64) ** -SKEW
    popularity = powers / powers.sum()

    def fresh(count: int) -> np.ndarray:
        return random.permuted(np.broadcast_to(popularity, (count, *shape.size)), axis=2)

    usual = np.repeat(fresh(1), N_SEQUENCES, axis=0)
    in_prompt = blended(usual, fresh(N_SEQUENCES), PROMPTS_COSINE)
    in_answer = blended(in_prompt, fresh(N_SEQUENCES), ANSWER_COSINE)
    made = []
    for prompt, answer in zip(in_prompt, in_answer, strict=True):
        ids, weights = _choose(random, prompt, shape.n_expert_used)
        chosen, _ = _choose(random, answer, shape.n_expert_used)
        counts, gates = (_by_expert(ids, shape.size, each) for each in (1.0, weights))
        made.append(Sequence(counts, gates, chosen))
    source = (
        f"{N_SEQUENCES} generated sequences, each with {N_TOKENS} prompt tokens and {N_TOKENS} "
        f"answer tokens. Their expert usage follows Zipf's law with exponent {SKEW:g}"
    )
    return Routing(source, made, np.zeros(shape.size))


def blended(base: np.ndarray, other: np.ndarray, wanted: float) -> np.ndarray:
    """Mix two arrays so that the result has a wanted mean cosine similarity to `base`.

    The result is (1 - x) base + x other, with one x for all. Similarity is computed along the last
    axis. If `other` is more similar to `base` than wanted, the result is `other`.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        similarity = cosine(base, (1 - middle) * base + middle * other).mean()
        low, high = (middle, high) if similarity > wanted else (low, middle)
    return (1 - high) * base + high * other


def _choose(
    random: np.random.Generator, popularity: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw k distinct experts of each layer for N_TOKENS tokens, with probabilities [L, E].

    Returns the ids in the order drawn and falling routing weights, both [N_TOKENS, L, k].
    """
    keys = np.log(popularity)[None] + random.gumbel(size=(N_TOKENS, *popularity.shape))
    ids = np.argsort(-keys, axis=2)[..., :k]
    raw = np.sort(random.gamma(1.0, size=ids.shape), axis=2)[..., ::-1]
    return ids, raw / raw.sum(axis=2, keepdims=True)


def from_trace(shape: PaperModel, trace: Trace) -> Routing:
    """Return the routing of a trace, adapted to the layers and experts of a model of the paper.

    If the model has more layers than the trace, the trace's layers are repeated. If it has fewer
    experts, groups of neighboring experts are merged into one expert each.

    Raises ConfigError if the experts cannot be divided into equal groups, or if the trace has fewer
    experts per token than the model. Raises TraceError if the trace has no prompt with an answer.
    """
    fold, rest = divmod(trace.n_expert, shape.n_expert)
    if rest or trace.n_expert_used < shape.n_expert_used:
        raise ConfigError(
            f"the trace cannot be mapped to {shape.name}: in the trace, a token uses "
            f"{trace.n_expert_used} of {trace.n_expert} experts; in {shape.name}, "
            f"{shape.n_expert_used} of {shape.n_expert}. Leave the trace out to generate the "
            f"routing"
        )
    tiled = np.arange(shape.n_layers) % trace.n_layers
    sequences = []
    for prompt, answer in _sequences(trace):
        ids, weights = _rows(prompt, fold, shape, trace.n_layers)
        rows, _ = _rows(answer, fold, shape, trace.n_layers)
        if len(ids) and len(rows):
            ids, weights = ids[:, tiled], weights[:, tiled]
            counts, gates = (_by_expert(ids, shape.size, each) for each in (1.0, weights))
            sequences.append(Sequence(counts, gates, rows[:, tiled]))
    if not sequences:
        raise TraceError(
            "the trace has no prompt with an answer: record one with `moe-edge trace -p`, or with "
            "--text and --prefill"
        )
    known = trace.arrays["start_hotness"].reshape(trace.n_layers, shape.n_expert, fold).sum(axis=2)
    n_tokens = sum(len(each.ids) for each in sequences)
    source = (
        f"trace of the model {trace.header.model}, {len(sequences)} sequences with {n_tokens} "
        f"decoded tokens"
    )
    return Routing(source, sequences, known[tiled])


def folded(
    ids: np.ndarray, weights: np.ndarray, fold: int, shape: PaperModel
) -> tuple[np.ndarray, np.ndarray]:
    """Merge each group of `fold` neighboring experts of a trace into one expert.

    For example, fold = 4 merges the experts 0 to 3 into expert 0. The gate weights of a group are
    added.

    - ids, weights: the k experts of each token before the merge, and their gate weights, [T, k].
    - shape: the model with the merged experts. Its tokens use m = shape.n_expert_used experts.

    Returns the ids and gate weights after the merge, [T, m]: the m experts of each token with the
    largest gate weights, largest first. If a token has fewer than m merged experts, the remaining
    ids are -1.
    """
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
    """Yield the steps of each prompt and of its answer.

    A further prompt of the same conversation begins a new pair.
    """
    prompt: list[Step] = []
    answer: list[Step] = []
    for step in trace.steps():
        again = step.phase is Phase.PREFILL and bool(answer)
        if (step.starts or again) and (prompt or answer):
            yield prompt, answer
            prompt, answer = [], []
        (prompt if step.phase is Phase.PREFILL else answer).append(step)
    yield prompt, answer


def _rows(
    steps: list[Step], fold: int, shape: PaperModel, n_layers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts of the steps' tokens and their weights, both [T, n_layers, n_expert_used].

    The last layer computes only one token of a prompt. If the trace has look-ahead, the prediction
    of the layer before is used for it.
    """
    n_tokens = sum(step.n_tokens for step in steps)
    ids = np.full((n_tokens, n_layers, shape.n_expert_used), -1, np.int64)
    weights, start = np.zeros(ids.shape), 0
    for step in steps:
        before = None
        for event in step.events:
            chosen, gates = event.ids, event.weights
            if step.phase is Phase.PREFILL and event.layer == n_layers - 1 and before is not None:
                chosen, gates = before.ahead_ids[0], before.ahead_scores[0]
            kept, gates = folded(chosen.astype(np.int64), gates, fold, shape)
            here = slice(start, start + len(kept))
            ids[here, event.layer], weights[here, event.layer] = kept, gates
            before = event if event.layer == n_layers - 2 and len(event.ahead_ids) else None
        start += step.n_tokens
    return ids, weights


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of all experts while one sequence is computed.

    An expert is either on the GPU, with 16 bits per weight, or in the near-data memory, which
    computes experts itself.

    - hot: whether each expert is on the GPU, bool [n_layers, n_expert].
    - bits: bits per weight of each expert, float64 [n_layers, n_expert].
    """

    hot: np.ndarray
    bits: np.ndarray


@dataclass(frozen=True, slots=True)
class Decoded:
    """The simulated decoding of an answer, as means per token.

    Some experts are on the GPU. The near-data memory holds the others and computes them itself.

    - step_ms: duration of a decode step.
    - near_ms: time in which the near-data memory computes its experts.
    - hot_mass: fraction of the used experts that are on the GPU.
    """

    step_ms: float
    near_ms: float
    hot_mass: float


def placed(asked: NearData, scores: np.ndarray) -> Plan:
    """Return a plan that places each expert either on the GPU or in the near-data memory.

    A near-data memory computes the experts that it holds. In each layer, the n_hot experts with the
    highest scores are on the GPU, with 16 bits per weight. The near-data memory has all others,
    with at most near_bits bits per weight on average. Their precisions are chosen such that the
    total quality loss is small.

    - asked: the options, which have n_hot and near_bits.
    - scores: the importance of each expert, float64 [n_layers, n_expert].
    """
    losses = nominal_losses(NEAR_BITS, *asked.model.size)
    tiers = place(scores, asked.n_hot, losses, NEAR_BITS, asked)
    widths = np.array([FULL_BITS, *NEAR_BITS], np.float64)
    return Plan(tiers == 0, widths[tiers])


def decode(shape: PaperModel, plan: Plan, sequence: Sequence) -> Decoded:
    """Simulate the decoding of one answer on a GPU with a near-data memory.

    A near-data memory computes the experts that it holds. Returns means over the answer's tokens:
    the duration of a decode step and the time that the near-data memory takes, in milliseconds, and
    the fraction of the used experts that are on the GPU.

    - shape: the simulated model.
    - plan: the place and the precision of each expert.
    - sequence: the experts that each answer token uses.
    """
    ids = sequence.ids
    there, layers = ids >= 0, _layers_of(ids)
    hot = plan.hot[layers, ids] & there
    times = np.vectorize(shape.near_ms, otypes=[float])(plan.bits)
    near = np.where(there & ~hot, times[layers, ids], 0.0).sum(axis=2)
    # The GPU and the near-data memory compute concurrently.
    near_ms = np.where(near > 0, near + shape.trip_ms(), 0.0)
    layer_ms = shape.dense_ms() + np.maximum((hot * shape.gpu_ms()).sum(axis=2), near_ms)
    steps = layer_ms.sum(axis=1)
    hot_mass = float(hot.sum() / max(1, there.sum()))
    return Decoded(float(steps.mean()), float(near.sum(axis=1).mean()), hot_mass)


def on_demand(
    shape: PaperModel, sequences: list[Sequence], bits: tuple[int, ...], n_slots: float
) -> Decoded:
    """Simulate decoding on a GPU that copies missing experts into its LRU cache on demand.

    - sequences: the answers to decode. The experts of each token have the order of their gate
      weights, the largest first.
    - bits: bits per weight of a token's experts, in this order. For example, (16, 4) means 16 bits
      for the first expert and 4 bits for all others.
    - n_slots: size of the cache, as the number of 16-bit experts that fit.

    Returns the mean duration of a decode step in milliseconds, and the fraction of used experts
    that were in the cache. Before this measurement, the first sequence is decoded once to fill the
    cache.
    """
    free = n_slots * shape.expert_bytes()
    held: OrderedDict[tuple[int, int], float] = OrderedDict()  # least recently used first
    ranks = [bits[min(at, len(bits) - 1)] for at in range(shape.n_expert_used)]
    sizes = [shape.expert_bytes(each) for each in ranks]
    computing = [shape.gpu_ms(bits=each) for each in ranks]
    dense = shape.n_layers * shape.dense_ms()
    steps: list[float] = []
    hits = asked = 0
    for number, sequence in enumerate([sequences[0], *sequences]):
        for token in sequence.ids.tolist():
            took = dense
            for layer, experts in enumerate(token):
                for rank, expert in enumerate(experts):
                    if expert < 0:
                        continue
                    took += computing[rank]
                    there = held.pop((layer, expert), 0.0)
                    hit = there >= sizes[rank]  # in this precision or a better one
                    held[layer, expert] = max(there, sizes[rank])
                    if not hit:
                        took += LINK_US / 1e3 + link_ms(sizes[rank])
                        free -= sizes[rank] - there
                        while free < 0:
                            free += held.popitem(last=False)[1]
                    if number:
                        asked, hits = asked + 1, hits + hit
            if number:
                steps.append(took)
    return Decoded(float(np.mean(steps)), 0.0, hits / max(1, asked))


@dataclass(frozen=True, slots=True)
class Run:
    """The simulated times of prompts and their answers, for one method of placing experts.

    Times are in milliseconds. The simulation has several sequences (prompts with their answers).
    Each of them is simulated with each pair of prompt length and answer length in LENGTHS.

    - decoded: mean times of the decode steps of each sequence. They do not depend on the lengths.
    - prompts: time to compute the prompt, [n_sequences, len(LENGTHS)].
    - moves: time to copy experts to the GPU after the prompt, [n_sequences, len(LENGTHS)].
    """

    decoded: list[Decoded]
    prompts: np.ndarray
    moves: np.ndarray

    def mean(self, name: str) -> float:
        return float(np.mean([getattr(each, name) for each in self.decoded]))

    def times(self) -> list[dict[str, float]]:
        """Return a dict of times for each pair of prompt length and answer length in LENGTHS.

        A dict has the two lengths and these times in milliseconds, as means over all sequences:

        - "prompt_ms": to compute the prompt.
        - "migration_ms": to copy experts to the GPU after the prompt.
        - "total_ms": to do both, and to decode the answer.
        """
        rows = []
        for column, (prompt, answer) in enumerate(LENGTHS):
            prompt_ms = float(self.prompts[:, column].mean())
            migration_ms = float(self.moves[:, column].mean())
            rows.append(
                {
                    "prompt": prompt,
                    "answer": answer,
                    "prompt_ms": prompt_ms,
                    "migration_ms": migration_ms,
                    "total_ms": prompt_ms + migration_ms + answer * self.mean("step_ms"),
                }
            )
        return rows


def strategies(asked: NearData, routing: Routing) -> dict[str, Run]:
    """Simulate several methods of placing experts, with the same prompts and answers.

    Most methods divide the experts between a GPU and a near-data memory, which computes experts
    itself. Two methods have no such memory and copy missing experts to the GPU.

    Returns a Run for each method by its name: the times of prompts, of moving experts and of
    decoding.
    """
    shape, sequences = asked.model, routing.sequences

    def run(plans: list[Plan], there: list[Plan]) -> Run:
        """Simulate with one plan per sequence. `there` is the placement that each prompt finds."""
        pairs = zip(plans, sequences, strict=True)
        decoded = [decode(shape, plan, sequence) for plan, sequence in pairs]
        return Run(decoded, *_before(shape, sequences, plans, there))

    near = Plan(np.zeros(shape.size, bool), np.full(shape.size, float(FULL_BITS)))
    only = run([near] * len(sequences), [near] * len(sequences))
    moved = shape.fitted_migrations * shape.move_ms
    monde = [replace(each, step_ms=each.step_ms + moved) for each in only.decoded]
    static, context = [], []
    for at, each in enumerate(sequences):
        usual = routing.others(at)
        static.append(placed(asked, usual))
        # The same as the policy `context`, with the usual usage as its profile.
        scores = importance(each.counts, each.gates, usual, asked, shape.n_expert_used)
        context.append(placed(asked, scores))
    started = placed(asked, shares(routing.usual))
    found = {
        NEAR_ONLY: only,
        MONDE: replace(only, decoded=monde),
        STATIC: run(static, static),
        CONTEXT: run(context, [started, *context[:-1]]),
    }
    # Without near-data memory, experts that do not fit on the GPU are copied once per prompt.
    n = shape.n_layers * shape.n_expert
    copied = max(0.0, n - shape.gpu_slots) * shape.move_ms
    prompts = []
    for n_prompt, _ in LENGTHS:
        computed = n * shape.gpu_ms(n_prompt * shape.n_expert_used / shape.n_expert)
        prompts.append(shape.n_layers * shape.dense_ms(n_prompt) + max(copied, computed))
    for name, bits in ((GPU_LRU, GPU_LRU_BITS), (HOBBIT, HOBBIT_BITS)):
        decoded = on_demand(shape, sequences, bits, shape.gpu_slots)
        found[name] = Run([decoded], np.array([prompts]), np.zeros((1, len(LENGTHS))))
    return found


def _before(
    shape: PaperModel, sequences: list[Sequence], plans: list[Plan], there: list[Plan]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompt times and the migration times, both [n_sequences, len(LENGTHS)]."""
    prompts, moves = np.zeros((2, len(plans), len(LENGTHS)))
    for at, (plan, before, sequence) in enumerate(zip(plans, there, sequences, strict=True)):
        used = sequence.counts.sum(axis=1, keepdims=True)
        share = sequence.counts / np.where(used > 0, used, 1)
        for column, (n_prompt, _) in enumerate(LENGTHS):
            loaded = np.zeros_like(before.hot)
            for layer in range(shape.n_layers):
                tokens = share[layer] * n_prompt * shape.n_expert_used
                took, loaded[layer] = shape.prompt_layer_ms(tokens, before.hot[layer], n_prompt)
                prompts[at, column] += took
            # Experts that the prompt streamed to the GPU need no migration.
            moves[at, column] = (plan.hot & ~before.hot & ~loaded).sum() * shape.move_ms
    return prompts, moves


def replay_near_data(asked: NearData, trace: Trace | None) -> dict[str, Any]:
    """Simulate a GPU with a near-data memory (a memory that computes experts itself).

    All methods of placing experts are simulated with the same routing. This is the routing of the
    trace, or random routing if `trace` is None. Returns a dict for JSON. Raises ConfigError or
    TraceError if the trace is not suitable.
    """
    shape = asked.model
    routing = generated(shape) if trace is None else from_trace(shape, trace)
    runs, rows = strategies(asked, routing), {}
    bases = {"over_near_only": runs[NEAR_ONLY], "over_monde": runs[MONDE]}
    for name, run in runs.items():
        step, lengths = run.mean("step_ms"), run.times()
        for key, base in bases.items():
            for row, slower in zip(lengths, base.times(), strict=True):
                row[key] = slower["total_ms"] / row["total_ms"]
        rows[name] = {
            "step_ms": step,
            **{key: base.mean("step_ms") / step for key, base in bases.items()},
            "near_ms": run.mean("near_ms"),
            "hot_mass": run.mean("hot_mass"),
            "lengths": lengths,
        }
    similarities = [cosine(each.counts, each.decode_counts()).mean() for each in routing.sequences]
    return {
        "shape": shape.name,
        "routing": routing.source,
        "n_hot": asked.n_hot,
        "near_bits": asked.near_bits,
        "fitted_migrations": shape.fitted_migrations,
        "prefill_decode_cosine": float(np.mean(similarities)),
        "runs": rows,
    }


def near_tables(result: dict[str, Any]) -> list[Table]:
    """Return two tables that compare simulated methods of placing experts.

    The simulated machine is a GPU with a near-data memory, which computes the experts that it
    holds. The first table has the times of decode steps. The second has the times of whole answers
    with their prompts.

    - result: the result of replay_near_data.
    """
    name, times, seconds = Column("", "name", left=True), fixed(2), fixed(2, 1e3)
    ratios = [
        Column("x near-only", "over_near_only", times),
        Column("x monde (fitted)", "over_monde", times),
    ]
    steps = [
        name,
        Column("ms/token", "step_ms", times),
        *ratios,
        Column("near ms", "near_ms", times),
        Column("on the GPU", "hot_mass", percent(1, " %")),
    ]
    whole = [
        name,
        Column("prompt:answer", lambda row: f"{row['prompt']}:{row['answer']}"),
        Column("prompt s", "prompt_ms", seconds),
        Column("moves s", "migration_ms", seconds),
        Column("all s", "total_ms", seconds),
        *ratios,
    ]
    runs = [{"name": each, **run} for each, run in result["runs"].items()]
    lengths = [{"name": run["name"], **row} for run in runs for row in run["lengths"]]
    title = (
        f"model {result['shape']}. In rows {STATIC} and {CONTEXT}, the GPU has {result['n_hot']} "
        f"experts of each layer. All others are in near-data memory (memory that also computes "
        f"experts), with at most {result['near_bits']:g} bits per weight on average. Routing: "
        f"{result['routing']}"
    )
    return [
        Table(f"Decode steps: {title}", steps, runs),
        Table(f"End to end: {title}", whole, lengths),
    ]
