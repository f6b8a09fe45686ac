"""Mixture-of-Experts models that people run, by their published shapes: `models.json` here. Of each
a header can be made, as a file of it would have one."""

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

# What a quantizer takes where a row is no multiple of a type's block, as llama.cpp's does.
_INSTEAD = {
    GGMLType.Q2_K: GGMLType.IQ4_NL,
    GGMLType.Q3_K: GGMLType.IQ4_NL,
    GGMLType.Q4_K: GGMLType.Q5_0,
    GGMLType.Q6_K: GGMLType.Q8_0,
}


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of a file, by the name that repositories give it: of matrices that are no experts,
    of the one of the vocabulary, of experts' gate and up, and of their down in the layers with more
    bits (about a half, as llama.cpp chooses them) and in the others."""

    dense: GGMLType
    output: GGMLType
    experts: GGMLType
    down: tuple[GGMLType, GGMLType]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published shape. total_b, active_b: billions of parameters, as published. d_ff: of the
    dense_layers leading layers; d_shared: of all shared experts together. mla: ranks and lengths of
    latent attention. recurrent: how many layers have no attention, and their matrices [n_in,
    n_out]. output_gate: attention has a gate of its queries' size. source: the repository at
    Hugging Face; seen: where, and on which day, its configuration was read."""

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
        """Weights of all matrices."""
        return sum(prod(shape) for _, shape, _ in self._tensors(_precisions()["Q8_0"]))

    @property
    def active(self) -> tuple[int, int]:
        """Weights that a token uses: without the vocabulary's matrices, and with them."""
        layers = self.layers - self.dense_layers
        unused = 3 * self.d_model * self.d_expert * (self.experts - self.top_k) * layers
        used = self.parameters - unused
        return used - self.d_model * self.vocab * (2 - self.tied), used

    def parts(self, precision: str) -> list[GGUFFile]:
        """The header of a file of it, in one of its precisions, as ExpertModel.of_parts takes it.
        No file of it is anywhere."""
        writer = GGUFWriter(Path(f"{self.name}-{precision}.gguf"))
        for key, value in self._metadata().items():
            writer.meta(key, value)
        for name, shape, kind in self._tensors(_precisions()[precision]):
            writer.declare(name, shape, kind)
        header = writer.header()
        size = pad(len(header), writer.alignment) + writer.data_bytes
        part = GGUFFile(writer.path, header, size)
        # Only their number counts, and parsing them would take most of the time.
        part.metadata["tokenizer.ggml.tokens"] = [""] * self.vocab
        return [part]

    def _metadata(self) -> dict[str, Any]:
        latent = self.mla
        cells = [1 if latent else self.kv_heads, 0]
        lengths = [self.head_dim, self.head_dim]
        if latent:
            lengths = [latent["kv_rank"] + latent["rope"], latent["kv_rank"]]
        without = [self._is_recurrent(layer) for layer in range(self.layers)]
        found = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.d_model,
            "expert_count": self.experts,
            "expert_used_count": self.top_k,
            "attention.head_count": [0 if each else self.heads for each in without],
            "attention.head_count_kv": [cells[each] for each in without],
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
        """Layers with attention are spread evenly, the last one among them."""
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
        """The matrices of a layer that mix tokens."""
        d, heads = self.d_model, self.heads
        if self._is_recurrent(layer):
            assert self.recurrent is not None
            matrices: Sequence[Sequence[int]] = self.recurrent["matrices"]
            return matrices
        if self.mla is None:
            queries, cells = heads * self.head_dim, self.kv_heads * self.head_dim
            gate = [(d, queries)] * self.output_gate
            return [(d, queries), *gate, (d, cells), (d, cells), (queries, d)]
        latent = self.mla
        query = heads * (latent["nope"] + latent["rope"])
        rank, of_cells = latent["q_rank"], latent["kv_rank"]
        return [
            *([(d, rank), (rank, query)] if rank else [(d, query)]),
            (d, of_cells + latent["rope"]),
            (of_cells, heads * latent["nope"]),
            (of_cells, heads * latent["v"]),
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
    """With the type that its rows allow."""
    if shape[0] % BLOCK[kind].weights:
        kind = _INSTEAD.get(kind, GGMLType.F16)
    return name, shape, kind if shape[0] % BLOCK[kind].weights == 0 else GGMLType.F16


def _has_more_bits(layer: int, n: int) -> bool:
    """Whether a mix of llama.cpp gives this layer's down matrices its finer type: the first and
    the last eighth of the layers, and each third one between them."""
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
    """All of them, the smallest first."""
    return tuple(
        KnownModel(**{**each, "precisions": tuple(each["precisions"])})
        for each in _data()["models"]
    )
