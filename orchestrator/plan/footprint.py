"""Memory footprint of a model: scratch, KV copies, process memory, and slot sizes."""

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
from orchestrator.plan.records import PlanRequest
from orchestrator.policy import DEFAULT, PLAIN, policy_class

# Process memory apart from weights, KV cache and batches: the interpreter, numpy, libraries, thread
# stacks and tables; and per token of the vocabulary, its copies in Python and llama.cpp. Measured:
# 59 to 62 MiB including pages of libraries; 2 MiB more if Python had to compile modules, and 3 MiB
# more if the kernel uses huge pages by default. 240 bytes per token without merges. With a GPU, the
# driver uses additional memory in the process.
PROCESS_BYTES = 67 * 2**20
GPU_PROCESS_BYTES = 96 * 2**20
VOCAB_TOKEN_BYTES = 600

# cuBLAS with its workspace (32 MiB on Hopper), synchronisation buffers of kernels, and tables.
LIBRARY_BYTES = 64 * 2**20
# Bytes per half-precision number in ggml's GPU pool, which allocates more than requested.
POOLED_HALF_BYTES = 2.1

# The share of the memory left for experts that the prompt cache may take, and the number of
# checkpoints of a sequence whose memory cannot be truncated.
PROMPT_SHARE = 1 / 32
PROMPT_MARKS = 6

# Bytes per number of an input row of an expert product (8 bits with the block's scales and sums),
# and bytes per row for its index.
ROW_WEIGHT_BYTES = 292 / 256
ROW_PLACE_BYTES = 16

# Maximum size of the logits of one part of a scored prompt.
SCORING_BYTES = 16 * 2**20

# The default context if memory is short.
LEAST_CONTEXT = 4096

# Possible micro-batch sizes, in tokens, if --ubatch is not set.
SIZES = (512, 1024, 2048, 4096)


def output_tokens(request: PlanRequest, n_vocab: int, n_ubatch: int) -> int:
    """Return for how many tokens of one sequence a step may compute logits at once.

    - With the setting `logits_all`, the result is n_ubatch, the micro-batch size.
    - If prompt tokens may be scored, the result is `request.needs.scored`, the maximum number of
      tokens to score at once. It is at most n_ubatch. The logits and a copy of them must also fit
      into SCORING_BYTES.
    - Otherwise the result is 1, because only the last token of a prompt needs logits.

    n_vocab: size of the vocabulary, the number of logits of a token.
    """
    if request.config.logits_all:
        return n_ubatch
    return max(1, min(n_ubatch, request.needs.scored, SCORING_BYTES // max(1, 2 * 4 * n_vocab)))


def vocabulary_size(model: ExpertModel) -> int:
    """Return the number of tokens in the model's vocabulary.

    Raises MetadataError if the vocabulary in the file is not a list.
    """
    return len(metadata_value(model.parts[0], "tokenizer.ggml.tokens", list, []))


def compute_bytes(
    model: ExpertModel,
    request: PlanRequest,
    n_ctx: int,
    n_tokens: int,
    graph_bytes: int | None = None,
) -> int:
    """Return the memory that the computation of one micro-batch takes, in bytes.

    It consists of the buffers of llama.cpp's compute graph, logits, and work buffers of matrix
    products. If the policy may lower the precision of experts, it also has buffers for the
    importance of tokens.

    n_tokens: micro-batch size. graph_bytes: size of the graph's buffers as counted by llama.cpp for
    this context and micro-batch; None to use an upper estimate.
    """
    config, hparams = request.config, model.hparams
    n_vocab, n_used = vocabulary_size(model), model.n_expert_used
    n_head, n_head_kv = max(hparams.n_head), max(hparams.n_head_kv)
    n_ff = max(shape[0] for layer in model.shapes if (shape := layer[DOWN]) is not None)
    n_rows = max(output_tokens(request, n_vocab, n_tokens), 1 + request.needs.sequences)
    extra = 4 * n_vocab * n_rows
    if graph_bytes is not None:
        # llama.cpp does not count the CPU's work buffer of the widest expert product, which has
        # inputs in 8-bit blocks and row indices.
        row = min(2, len(model.tiers)) * n_ff * ROW_WEIGHT_BYTES + ROW_PLACE_BYTES
        extra += int(n_tokens * n_used * row)
    else:
        # Per token, in float32: the mask over the context, the residual stream, and the larger of
        # attention's rows and two sets of rows of the token's experts with their quantized copies.
        # With flash attention, the mask is in half precision, otherwise in two precisions.
        heads = n_head + 2 * n_head_kv
        attention = 3 * heads * max(hparams.key_length, hparams.value_length)
        experts = n_used * (n_ff + hparams.embedding_length)
        mask = (1.5 if config.importance == "exact" else 0.5) * n_ctx
        rows = 4 * hparams.embedding_length + max(attention, 2 * experts) + 0.5 * experts
        graph_bytes = 4 * int(n_tokens * (mask + rows)) + extra
    policy = None if config.policy == PLAIN else policy_class(config.policy or DEFAULT)
    if policy is None or not policy.wants.importance or not config.asks_less(policy):
        return graph_bytes + extra
    # Attention weights of the queries that determine importance, for as many prompts as a step may
    # have; and the queries, keys and residual stream of a batch, which live longer for it.
    window = min(n_tokens, config.importance_window * (1 + request.needs.sequences))
    queries = {"window": window, "exact": 2 * n_tokens, "load": 0}[config.importance]
    lives = n_tokens * ((n_head + n_head_kv) * hparams.key_length + hparams.embedding_length)
    return graph_bytes + extra + (4 * (queries * n_ctx * n_head + lives) if queries else 0)


def part_bytes(model: ExpertModel, config: Config) -> int:
    """Return an upper estimate of the size of one checkpoint of a sequence, in bytes.

    A checkpoint is the part of the sequence's state that is saved, so that the sequence can be
    truncated later. It has the float32 states of recurrent layers and the sliding attention window
    of all layers. The result is 0 for a model that has neither.
    """

    def number(name: str) -> int:
        value = model.metadata.get(f"{model.hparams.arch}.{name}", 0)
        return value if isinstance(value, int) and value > 0 else 0

    inner, state = number("ssm.inner_size"), number("ssm.state_size")
    shifted = inner + 2 * number("ssm.group_count") * state
    recurrent = state * inner + max(0, number("ssm.conv_kernel") - 1) * shifted
    window = model.kv_bytes(number("attention.sliding_window"), config.kv)
    return 4 * recurrent * model.hparams.block_count + window


def copying_bytes(model: ExpertModel, config: Config, n_ctx: int) -> int:
    """Return the bytes of llama.cpp's buffer for saving a sequence to a file or loading it.

    The buffer holds the keys or the values of one layer for n_ctx tokens. The result is 0 if the
    configuration turns the prompt cache off.
    """
    layers = len(model.hparams.n_head_kv)
    return model.kv_bytes(n_ctx, config.kv) // layers if config.prompt_cache else 0


def kernel_bytes(
    model: ExpertModel, config: Config, n_ctx: int, n_tokens: int, flash: bool, keeps_buffers: bool
) -> int:
    """Return an upper bound of the GPU memory that GPU kernels allocate themselves, in bytes.

    This memory is not part of the compute graph's buffers. It holds GPU libraries, quantized copies
    of the experts' inputs, and attention buffers.

    n_tokens: micro-batch size. flash: whether flash attention is used. keeps_buffers: attention
    buffers for shorter contexts stay allocated as the context grows; otherwise only the largest
    ones count.
    """
    hparams, made, halves = model.hparams, exchange_bytes(model, n_tokens) // 4, 0
    # Without flash attention, the attention weights are buffered in single and half precision, and
    # the mask in two precisions. With flash attention, a 16-bit KV cache needs no buffers. An 8-bit
    # cache needs the keys and values of one layer in half precision.
    if not flash:
        halves = max(hparams.n_head) * n_tokens * n_ctx
        made += 4 * (halves + n_tokens * n_ctx)
    elif config.kv != DEFAULT_KV:
        halves = max(hparams.n_head_kv) * (hparams.key_length + hparams.value_length) * n_ctx
    # The half-precision buffers grow with the context.
    parts = -(-n_ctx // n_tokens)
    pieces = (parts + 1) / 2 if keeps_buffers else 1 + 1 / parts
    return LIBRARY_BYTES + made + int(POOLED_HALF_BYTES * pieces * halves)


def process_bytes(model: ExpertModel, request: PlanRequest, on_gpu: bool = False) -> int:
    """Return the memory of the process without weights, KV cache and compute buffers, in bytes.

    on_gpu: a GPU holds the experts. Its driver takes additional memory in the process.
    """
    own = (GPU_PROCESS_BYTES if on_gpu else PROCESS_BYTES) + request.needs.extra_bytes
    return own + (VOCAB_TOKEN_BYTES + request.needs.extra_token_bytes) * vocabulary_size(model)


def exchange_bytes(model: ExpertModel, n_tokens: int) -> int:
    """Return the bytes that host and GPU exchange when the host computes experts of one layer.

    They are the inputs and the results of all experts that n_tokens tokens use in the layer.
    """
    longest = max(max(shape) for kinds in model.shapes for shape in kinds if shape is not None)
    return 3 * 4 * n_tokens * model.n_expert_used * longest


class Experts(Protocol):
    """The number, precisions (tiers) and sizes of experts, from a model or a recorded trace."""

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
    """Return the layers, experts and slot sizes of a model, as policies need them.

    tiers: indices of the precisions (tiers) in use. shapes: matrix shapes of each layer, if a GPU
    holds the experts; otherwise empty. With `shapes`, the field `slots` of the result has the slot
    sizes in GPU memory, and `host_slots` has those in host memory. Without `shapes`, `slots` has
    the sizes in host memory.
    """

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
