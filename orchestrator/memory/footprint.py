"""How much memory a model takes: its scratch, what it leaves for experts, and slots for these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from gguf_tools.experts import DEFAULT_KV, ExpertModel, Slice, Tier
from gguf_tools.experts.slices import LayerShapes, LayerSlices
from gguf_tools.file.layout import DOWN, device_slot_bytes, slot_bytes
from gguf_tools.file.reader import metadata_value
from orchestrator.allocation.slots import ModelShape
from orchestrator.config import Config
from orchestrator.memory.request import PlanRequest
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
# What a number in half precision takes of ggml's pool of a GPU, which grows by more than is asked.
POOLED_HALF_BYTES = 2.1

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


def output_tokens(request: PlanRequest, n_vocab: int, n_ubatch: int) -> int:
    """Of how many tokens of one sequence a step may have the logits, in a vocabulary of so many. A
    token's logits are there twice: in the scratch, and where they are read."""
    if request.config.logits_all:
        return n_ubatch
    return max(1, min(n_ubatch, request.scored, SCORING_BYTES // max(1, 2 * 4 * n_vocab)))


def vocabulary_size(model: ExpertModel) -> int:
    """Tokens that the model's vocabulary lists; MetadataError where it is no list."""
    return len(metadata_value(model.parts[0], "tokenizer.ggml.tokens", list, []))


def compute_bytes(
    model: ExpertModel,
    request: PlanRequest,
    n_ctx: int,
    n_tokens: int,
    graph_bytes: int | None = None,
) -> int:
    """What one micro-batch takes: llama.cpp's scratch, the logits beside it, what products take of
    the CPU, and token importance where that may lower anything.

    graph_bytes: the scratch as llama.cpp itself counts it, without token importance. It leaves out
    what the widest product of experts keeps of its inputs in the CPU's work buffer: rows in blocks
    of 8 bits, in two layouts where precisions differ in what they multiply with, and their places.

    None for an upper estimate. Per token, in float32: the attention mask over the context, in half
    precision where attention is flash, else in two precisions; the residual stream; the larger of
    attention's rows and the two sets of rows of the k experts that live at once, and their
    quantized copies.
    """
    config, hparams = request.config, model.hparams
    n_vocab, n_used = vocabulary_size(model), model.n_expert_used
    n_head, n_head_kv = max(hparams.n_head), max(hparams.n_head_kv)
    n_ff = max(shape[0] for layer in model.shapes if (shape := layer[DOWN]) is not None)
    n_rows = max(output_tokens(request, n_vocab, n_tokens), 1 + request.sequences)
    beside = 4 * n_vocab * n_rows
    if graph_bytes is not None:
        row = min(2, len(model.tiers)) * n_ff * ROW_WEIGHT_BYTES + ROW_PLACE_BYTES
        beside += int(n_tokens * n_used * row)
    else:
        heads = n_head + 2 * n_head_kv
        attention = 3 * heads * max(hparams.key_length, hparams.value_length)
        experts = n_used * (n_ff + hparams.embedding_length)
        mask = (1.5 if config.importance == "exact" else 0.5) * n_ctx
        rows = 4 * hparams.embedding_length + max(attention, 2 * experts) + 0.5 * experts
        graph_bytes = 4 * int(n_tokens * (mask + rows)) + beside
    policy = None if config.policy == PLAIN else policy_class(config.policy or DEFAULT)
    if policy is None or not policy.wants.importance or not config.asks_less(policy):
        return graph_bytes + beside
    # The attention weights of the queries that it is taken from, of as many prompts as a step may
    # have; and the queries and keys of a batch and its residual stream, which live longer for it.
    window = min(n_tokens, config.importance_window * (1 + request.sequences))
    queries = {"window": window, "exact": 2 * n_tokens, "load": 0}[config.importance]
    lives = n_tokens * ((n_head + n_head_kv) * hparams.key_length + hparams.embedding_length)
    return graph_bytes + beside + (4 * (queries * n_ctx * n_head + lives) if queries else 0)


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
    model: ExpertModel, config: Config, n_ctx: int, n_tokens: int, flash: bool, piles: bool
) -> int:
    """What a device takes beside what is counted of its scratch, at most: libraries, the rows of a
    product of experts in 8 bits, and what attention makes.

    That is nothing where it is flash and the cache in 16 bits, one layer's keys and values in half
    precision where the cache is in 8, else its weights in single and half precision, and the mask
    in two. What is in half precision grows with the context. piles: what was taken for a shorter
    one stays; else the most is taken at once.
    """
    hparams, made, halves = model.hparams, exchange_bytes(model, n_tokens) // 4, 0
    if not flash:
        halves = max(hparams.n_head) * n_tokens * n_ctx
        made += 4 * (halves + n_tokens * n_ctx)
    elif config.kv != DEFAULT_KV:
        halves = max(hparams.n_head_kv) * (hparams.key_length + hparams.value_length) * n_ctx
    parts = -(-n_ctx // n_tokens)
    pieces = (parts + 1) / 2 if piles else 1 + 1 / parts
    return LIBRARY_BYTES + made + int(POOLED_HALF_BYTES * pieces * halves)


def process_bytes(model: ExpertModel, request: PlanRequest, on_gpu: bool = False) -> int:
    """What the process takes for a model whose weights, cache and scratch are elsewhere."""
    own = (GPU_PROCESS_BYTES if on_gpu else PROCESS_BYTES) + request.beside
    return own + (VOCAB_TOKEN_BYTES + request.beside_token) * vocabulary_size(model)


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


def model_shape(
    model: Experts, tiers: tuple[int, ...], shapes: Sequence[LayerShapes] = ()
) -> ModelShape:
    """The model as policies see it, reduced to some of its tiers, with slots in the host's memory.
    shapes: of a model whose slots are in a device's memory, or in the host's behind it."""

    def slots(size: Callable[[Slice, int, int], int]) -> tuple[tuple[dict[int, int], ...], ...]:
        return tuple(
            tuple(
                {kind: size(one, il, kind) for kind, of in enumerate(kinds) if (one := of[tier])}
                for tier in tiers
            )
            for il, kinds in enumerate(model.slices)
        )

    def on_device(one: Slice, layer: int, kind: int) -> int:
        row_length, _ = shapes[layer][kind] or (0, 0)
        return device_slot_bytes(one.type, one.expert_bytes, row_length)

    n, held = model.n_expert, [model.tiers[tier] for tier in tiers]
    names, bits = tuple(tier.name for tier in held), tuple(tier.bpw for tier in held)
    host = slots(lambda one, *_: slot_bytes(one.offset, one.expert_bytes, n))
    shape = ModelShape(n, model.n_expert_used, names, host, bits if all(bits) else ())
    if not shapes:
        return shape
    return replace(shape, slots=slots(on_device), shares_slots=False, host_slots=host)
