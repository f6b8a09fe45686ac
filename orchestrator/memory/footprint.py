"""How much memory a model takes: its scratch, what it leaves for experts, and slots for these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from gguf_tools.experts import DEFAULT_KV, ExpertModel, Tier
from gguf_tools.experts.slices import LayerSlices
from gguf_tools.file.layout import DOWN, EMBEDDINGS, device_slot_bytes, slot_bytes
from gguf_tools.file.reader import metadata_value
from orchestrator.allocation.slots import ModelShape
from orchestrator.config import Config
from orchestrator.policy import DEFAULT, PLAIN, policy_class

# Everything that is neither weights nor KV nor growing with the batch: the interpreter,
# numpy, the libraries, thread stacks, tables; and, for each token of the vocabulary, its
# copies in Python and in llama.cpp. Measured: 59 to 62 MiB, the pages of libraries among them;
# 2 more where Python's modules had to be compiled first, and 3 where the kernel gives huge pages
# unasked. 240 bytes of the vocabulary without merges. Beside a GPU, its driver has memory of its
# own in the process.
PROCESS_BYTES = 67 * 2**20
GPU_PROCESS_BYTES = 96 * 2**20
VOCAB_TOKEN_BYTES = 600

# cuBLAS with its workspace (32 MiB on Hopper), what kernels of a product need to meet, tables.
LIBRARY_BYTES = 64 * 2**20
# ggml's pool of a GPU takes so much more than it is asked for.
POOL_GROWTH = 1.05

# Of what is left for experts, prompts that were read before may take this share, and this many
# marks in a sequence whose memory cannot be cut.
PROMPT_SHARE = 1 / 32
PROMPT_MARKS = 6

# Of a row that a product of experts multiplies: a number in 8 bits with its block's scales and
# sums, and the row's place.
ROW_WEIGHT_BYTES = 292 / 256
ROW_PLACE_BYTES = 16

# What the logits of a part of a prompt that is scored may take.
SCORING_BYTES = 16 * 2**20

# The context where none is asked for and memory is short.
LEAST_CONTEXT = 4096

# Tokens of a prompt that are computed at once, where that was not asked for.
SIZES = (512, 1024, 2048, 4096)


def output_tokens(config: Config, n_vocab: int, n_ubatch: int) -> int:
    """Of how many tokens of one sequence a step may have the logits, in a vocabulary of so many. A
    token's logits are there twice: in the scratch, and where they are read."""
    if config.logits_all:
        return n_ubatch
    return max(1, min(n_ubatch, config.scored, SCORING_BYTES // max(1, 2 * 4 * n_vocab)))


def vocabulary_size(model: ExpertModel) -> int:
    """Tokens that the model's vocabulary lists; MetadataError where it is no list."""
    return len(metadata_value(model.parts[0], "tokenizer.ggml.tokens", list, []))


def compute_bytes(
    model: ExpertModel, config: Config, n_ctx: int, n_tokens: int, graph_bytes: int | None = None
) -> int:
    """What one micro-batch takes: llama.cpp's scratch, the logits beside it, what products take of
    the CPU, and token importance.

    graph_bytes: the scratch as llama.cpp itself counts it, without token importance. It leaves out
    what the widest product of experts keeps of its inputs in the CPU's work buffer: rows in blocks
    of 8 bits, in two layouts where precisions differ in what they multiply with, and their places.

    None for an upper estimate. Per token, in float32: the attention mask over the context, in half
    precision where attention is flash, else in two precisions; the residual stream; the larger of
    attention's rows and the two sets of rows of the k experts that live at once, and their
    quantized copies.
    """
    hparams, n_vocab, n_used = model.hparams, vocabulary_size(model), model.n_expert_used
    n_ff = max(shape[0] for layer in model.shapes if (shape := layer[DOWN]) is not None)
    n_rows = max(output_tokens(config, n_vocab, n_tokens), 1 + config.sequences + config.probes)
    beside = 4 * n_vocab * n_rows
    if graph_bytes is not None:
        row = min(2, len(model.tiers)) * n_ff * ROW_WEIGHT_BYTES + ROW_PLACE_BYTES
        beside += int(n_tokens * n_used * row)
    else:
        heads = max(hparams.n_head) + 2 * max(hparams.n_head_kv)
        attention = 3 * heads * max(hparams.key_length, hparams.value_length)
        experts = n_used * (n_ff + hparams.embedding_length)
        mask = (1.5 if config.importance == "exact" else 0.5) * n_ctx
        rows = 4 * hparams.embedding_length + max(attention, 2 * experts) + 0.5 * experts
        graph_bytes = 4 * int(n_tokens * (mask + rows)) + beside
    policy = None if config.policy == PLAIN else policy_class(config.policy or DEFAULT)
    if policy is not None and policy.wants.importance and config.asks_less(policy):
        beside += importance_bytes(model, config, n_ctx, n_tokens)
    return graph_bytes + beside


def importance_bytes(model: ExpertModel, config: Config, n_ctx: int, n_tokens: int) -> int:
    """What token importance takes of a step, where it may lower anything: the attention weights of
    the queries that it is taken from, of as many prompts as a step may have; and the queries and
    keys of a batch and its residual stream, which live longer for it."""
    hparams, window = model.hparams, config.importance_window * (1 + config.sequences)
    if config.importance == "load":
        return 0
    queries = min(window, n_tokens) if config.importance == "window" else 2 * n_tokens
    heads = max(hparams.n_head) + max(hparams.n_head_kv)
    weights = queries * n_ctx * max(hparams.n_head)
    return 4 * (weights + n_tokens * (heads * hparams.key_length + hparams.embedding_length))


def part_bytes(model: ExpertModel, config: Config) -> int:
    """An upper estimate of what a mark takes in a sequence whose memory cannot be cut: the states
    of recurrent layers in float32, and what a window sees in all layers. 0 for other models."""

    def number(name: str) -> int:
        value = model.metadata.get(f"{model.hparams.arch}.{name}", 0)
        return value if isinstance(value, int) and value > 0 else 0

    inner, state = number("ssm.inner_size"), number("ssm.state_size")
    shifted = inner + 2 * number("ssm.group_count") * state
    recurrent = state * inner + max(0, number("ssm.conv_kernel") - 1) * shifted
    window = model.kv_bytes(number("attention.sliding_window"), config.kv)
    return 4 * recurrent * model.hparams.block_count + window


def copying_bytes(model: ExpertModel, config: Config, n_ctx: int) -> int:
    """What llama.cpp takes while it writes a sequence to a file or reads it: the keys or values of
    one layer, at most."""
    layers = len(model.hparams.n_head_kv)
    return model.kv_bytes(n_ctx, config.kv) // layers if config.prompt_cache else 0


def kernel_bytes(
    model: ExpertModel, config: Config, n_ctx: int, n_tokens: int, flash: bool, piles: bool = False
) -> int:
    """What the kernels of a device take beside llama.cpp's scratch, at most.

    cuBLAS and its workspace; a batch's activations as q8_1, a row for each expert of a token, of
    two lengths; and what attention makes in half precision. Where it is flash, that is one layer's
    keys and values of a cache in 8 bits; else its weights. Either grows with the cache, and what
    was taken for shorter ones stays: piles says so; our executor takes the longest at once.
    """
    hparams, rows = model.hparams, n_tokens * model.n_expert_used
    widths = {shape[i] for layer in model.shapes for shape in layer if shape for i in (0, 1)}
    activations = sum(rows * (width + 512) * 36 // 32 for width in sorted(widths)[-2:])
    weights = 2 * n_ctx * max(hparams.n_head) * n_tokens
    if flash:
        cell = max(hparams.n_head_kv) * (hparams.key_length + hparams.value_length)
        weights = 0 if config.kv == DEFAULT_KV else 2 * n_ctx * cell
    chunks = -(-n_ctx // n_tokens)
    grown = weights * (chunks + 1) // 2 if piles else weights + weights // chunks
    return LIBRARY_BYTES + int(POOL_GROWTH * (activations + grown))


def process_bytes(model: ExpertModel, config: Config, on_gpu: bool = False) -> int:
    """What the process takes for a model whose weights, cache and scratch are elsewhere."""
    own = (GPU_PROCESS_BYTES if on_gpu else PROCESS_BYTES) + config.beside
    return own + (VOCAB_TOKEN_BYTES + config.beside_token) * vocabulary_size(model)


def look_ahead_bytes(model: ExpertModel) -> int:
    """Copies of the routers in half precision, which a policy looks ahead with."""
    return 2 * (len(model.slices) - 1) * model.n_expert * model.hparams.embedding_length


def embedding_bytes(model: ExpertModel) -> int:
    """The token embeddings, which llama.cpp keeps in the host's memory beside a GPU; nothing where
    they stay on disk."""
    on_disk = any(table.info.name == EMBEDDINGS for table in model.lookup)
    infos = [part.tensors.get(EMBEDDINGS) for part in model.parts if not on_disk]
    return max((info.nbytes for info in infos if info is not None), default=0)


def exchange_bytes(model: ExpertModel, n_tokens: int) -> int:
    """Rows of a layer that the host computes for a device: inputs and results of each expert of so
    many tokens."""
    longest = max(max(shape) for kinds in model.shapes for shape in kinds if shape is not None)
    return 3 * 4 * n_tokens * model.n_expert_used * longest


class Experts(Protocol):
    """What ExpertModel and a recorded trace both know of a model."""

    @property
    def n_expert(self) -> int: ...
    @property
    def n_expert_used(self) -> int: ...
    @property
    def tiers(self) -> Sequence[Tier]: ...
    @property
    def slices(self) -> Sequence[LayerSlices]: ...


def model_shape(model: Experts, tiers: tuple[int, ...]) -> ModelShape:
    """The model as policies see it, reduced to some of its tiers, with slots in the host's
    memory."""

    def sizes(kinds: LayerSlices, tier: int) -> dict[int, int]:
        held = {kind: each for kind, by_tier in enumerate(kinds) if (each := by_tier[tier])}
        n = model.n_expert
        return {kind: slot_bytes(each.offset, each.expert_bytes, n) for kind, each in held.items()}

    names = tuple(model.tiers[tier].name for tier in tiers)
    bits = tuple(model.tiers[tier].bpw for tier in tiers)
    slots = tuple(tuple(sizes(kinds, tier) for tier in tiers) for kinds in model.slices)
    return ModelShape(model.n_expert, model.n_expert_used, names, slots, bits if all(bits) else ())


def device_shape(model: ExpertModel, tiers: tuple[int, ...]) -> ModelShape:
    """The same with slots in a device's memory, or in the host's behind it."""

    def size(layer: int, kind: int, tier: int) -> int:
        each, shape = model.slices[layer][kind][tier], model.shapes[layer][kind]
        assert each is not None and shape is not None
        return device_slot_bytes(each.type, each.expert_bytes, shape[0])

    host = model_shape(model, tiers)
    slots = tuple(
        tuple({kind: size(layer, kind, tier) for kind in model.kinds(layer)} for tier in tiers)
        for layer in range(len(host.slots))
    )
    return replace(host, slots=slots, shares_slots=False, host_slots=host.slots)
