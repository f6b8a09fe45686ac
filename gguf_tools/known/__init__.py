"""Published shapes of popular Mixture-of-Experts models, from which a GGUF header can be generated.

The shapes are in `models.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from gguf_tools.file.layout import (
    BLOCK,
    DOWN,
    EMBEDDINGS,
    GATE,
    KINDS,
    OUTPUT,
    UP,
    GGMLType,
    expert_tensor_name,
    pad,
    type_by_name,
)
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter

DATA = Path(__file__).with_name("models.json")

# The types that llama.cpp's quantizer uses if a type's block does not divide the row length.
_FALLBACK = {
    GGMLType.Q2_K: GGMLType.IQ4_NL,
    GGMLType.Q3_K: GGMLType.IQ4_NL,
    GGMLType.Q4_K: GGMLType.Q5_0,
    GGMLType.Q6_K: GGMLType.Q8_0,
}


@dataclass(frozen=True, slots=True)
class Precision:
    """The tensor types of a quantization mix of llama.cpp, such as Q4_K_M.

    dense: type of the matrices that are not experts.
    output: type of the output matrix.
    experts: type of the experts' gate and up matrices.
    down: two types of the experts' down matrices. About half of the layers use the first type,
        which has more bits. All other layers use the second type.
    """

    dense: GGMLType
    output: GGMLType
    experts: GGMLType
    down: tuple[GGMLType, GGMLType]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The dimensions of a published model, from which memory needs can be computed.

    total_b, active_b: published number of parameters, in billions.
    dense_layers: number of layers without experts, at the start.
    d_ff, d_expert, d_shared: feed-forward width of a dense layer, of one expert, and of all shared
        experts of a layer together.
    tied: whether the embeddings are also the output matrix.
    precisions: names of the available quantization mixes.
    source: repository on the Hugging Face Hub.
    seen: where and when the configuration was read.
    mla: ranks and head lengths of multi-head latent attention, if the model uses it.
    recurrent: number of layers without attention, and the shapes [n_in, n_out] of their matrices.
    output_gate: whether attention has an output gate, of the size of its queries.
    """

    name: str
    total_b: float
    active_b: float
    layers: int
    dense_layers: int
    d_model: int
    d_ff: int
    d_expert: int
    experts: int
    top_k: int
    d_shared: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool
    precisions: tuple[str, ...]
    source: str
    seen: str
    mla: Mapping[str, int] | None = None
    recurrent: Mapping[str, Any] | None = None
    output_gate: bool = False

    @property
    def parameters(self) -> int:
        """The total number of weights in the model's matrices."""
        return sum(prod(shape) for _, shape, _ in self._tensors(_precisions()["Q8_0"]))

    @property
    def active(self) -> tuple[int, int]:
        """The number of weights used per token, as two numbers.

        The first number leaves out embeddings and output matrix. The second includes them.
        """
        layers = self.layers - self.dense_layers
        unused = 3 * self.d_model * self.d_expert * (self.experts - self.top_k) * layers
        used = self.parameters - unused
        return used - self.d_model * self.vocab * (2 - self.tied), used

    def parts(self, precision: str) -> list[GGUFFile]:
        """Return a GGUF file with this model's header but without tensor data, in a list.

        The file is generated in memory. ExpertModel.of_parts, which takes a list of files, accepts
        the result.

        precision: name of the quantization mix, such as Q4_K_M, which determines the types of the
            tensors.
        """
        writer = GGUFWriter(Path(f"{self.name}-{precision}.gguf"))
        for key, value in self._metadata().items():
            writer.meta(key, value)
        for name, shape, kind in self._tensors(_precisions()[precision]):
            writer.declare(name, shape, kind)
        header = writer.header()
        size = pad(len(header), writer.alignment) + writer.data_bytes
        part = GGUFFile(writer.path, header, size)
        # Only the number of tokens matters. Encoding and parsing them would take most of the time.
        part.metadata["tokenizer.ggml.tokens"] = [""] * self.vocab
        return [part]

    def _metadata(self) -> dict[str, Any]:
        latent = self.mla
        kv_heads = [1 if latent else self.kv_heads, 0]
        lengths = [self.head_dim, self.head_dim]
        if latent:
            lengths = [latent["kv_rank"] + latent["rope"], latent["kv_rank"]]
        recurrent = [self._is_recurrent(layer) for layer in range(self.layers)]
        found = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.d_model,
            "expert_count": self.experts,
            "expert_used_count": self.top_k,
            "attention.head_count": [0 if each else self.heads for each in recurrent],
            "attention.head_count_kv": [kv_heads[each] for each in recurrent],
            "attention.key_length": lengths[0],
            "attention.value_length": lengths[1],
        }
        if latent:
            found["attention.key_length_mla"] = latent["nope"] + latent["rope"]
        return {
            "general.architecture": "known",
            "general.name": self.name,
            **{f"known.{key}": value for key, value in found.items()},
        }

    def _is_recurrent(self, layer: int) -> bool:
        """Return whether a layer has recurrent matrices instead of attention.

        Layers with attention are evenly spaced, and the last layer is one of them.
        """
        n = self.layers - (self.recurrent["layers"] if self.recurrent else 0)
        return (layer + 1) * n // self.layers == layer * n // self.layers

    def _tensors(self, types: Precision) -> Iterator[tuple[str, tuple[int, ...], GGMLType]]:
        d = self.d_model
        yield _tensor(EMBEDDINGS, (d, self.vocab), types.dense)
        for layer in range(self.layers):
            at = f"blk.{layer}."
            for number, shape in enumerate(self._mixing(layer)):
                yield _tensor(f"{at}attn_{number}.weight", tuple(shape), types.dense)
            if layer < self.dense_layers:
                yield from _gated(at, "", d, self.d_ff, types.dense)
                continue
            yield f"{at}ffn_gate_inp.weight", (d, self.experts), GGMLType.F32
            wide, down = (d, self.d_expert, self.experts), (self.d_expert, d, self.experts)
            for kind in (GATE, UP):
                yield _tensor(expert_tensor_name(layer, kind), wide, types.experts)
            finer = types.down[not _has_more_bits(layer, self.layers)]
            yield _tensor(expert_tensor_name(layer, DOWN), down, finer)
            if self.d_shared:
                yield from _gated(at, "_shexp", d, self.d_shared, types.dense)
        if not self.tied:
            yield _tensor(OUTPUT, (d, self.vocab), types.output)

    def _mixing(self, layer: int) -> Sequence[Sequence[int]]:
        """Return the shapes of a layer's attention matrices.

        In a layer without attention, return those of its recurrent matrices.
        """
        d, heads = self.d_model, self.heads
        if self._is_recurrent(layer):
            assert self.recurrent is not None
            matrices: Sequence[Sequence[int]] = self.recurrent["matrices"]
            return matrices
        if self.mla is None:
            queries, keys = heads * self.head_dim, self.kv_heads * self.head_dim
            gate = [(d, queries)] * self.output_gate
            return [(d, queries), *gate, (d, keys), (d, keys), (queries, d)]
        latent = self.mla
        query = heads * (latent["nope"] + latent["rope"])
        q_rank, kv_rank = latent["q_rank"], latent["kv_rank"]
        return [
            *([(d, q_rank), (q_rank, query)] if q_rank else [(d, query)]),
            (d, kv_rank + latent["rope"]),
            (kv_rank, heads * latent["nope"]),
            (kv_rank, heads * latent["v"]),
            (heads * latent["v"], d),
        ]


def _gated(
    at: str, suffix: str, d: int, n_ff: int, kind: GGMLType
) -> Iterator[tuple[str, tuple[int, ...], GGMLType]]:
    for name in (KINDS[GATE], KINDS[UP]):
        yield _tensor(f"{at}ffn_{name}{suffix}.weight", (d, n_ff), kind)
    yield _tensor(f"{at}ffn_down{suffix}.weight", (n_ff, d), kind)


def _tensor(
    name: str, shape: tuple[int, ...], kind: GGMLType
) -> tuple[str, tuple[int, ...], GGMLType]:
    """Return name, shape and type of a tensor.

    If the type's block size does not divide the row length, its fallback type is returned instead.
    """
    if shape[0] % BLOCK[kind].weights:
        kind = _FALLBACK.get(kind, GGMLType.F16)
    return name, shape, kind if shape[0] % BLOCK[kind].weights == 0 else GGMLType.F16


def _has_more_bits(layer: int, n: int) -> bool:
    """Return whether llama.cpp's quantization mixes give this layer's down matrices more bits.

    This is the case in the first and the last eighth of the n layers, and in every third layer
    between them.
    """
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


@cache
def _precisions() -> dict[str, Precision]:
    def read(name: str) -> GGMLType:
        kind = type_by_name(name)
        assert kind is not None, name
        return kind

    return {
        name: Precision(
            read(each["dense"]),
            read(each["output"]),
            read(each["experts"]),
            (read(each["down"][0]), read(each["down"][1])),
        )
        for name, each in _data()["precisions"].items()
    }


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all models whose dimensions are known, the smallest first."""
    return tuple(
        KnownModel(**{**each, "precisions": tuple(each["precisions"])})
        for each in _data()["models"]
    )
