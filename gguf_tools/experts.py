"""Where every expert of a model lies on disk, in every precision there is.

One view over the three kinds of input: an ordinary GGUF (one tier), a packed multi-tier
file, and two ordinary GGUFs of one model as high and low. Nothing is copied or read here
beyond metadata; a Slice says where the native store finds the bytes.
"""

import os
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from . import errors
from .hparams import (
    MAX_LAYERS,
    announced_tiers,
    expert_count,
    expert_used,
    number,
    per_layer,
    positive,
    routed_blocks,
)
from .layout import (
    DOWN,
    GATE,
    GATE_UP,
    KEY_FALLBACKS,
    KEY_TIERS,
    KINDS,
    TIER_MARK,
    UP,
    GGMLType,
    expert_tensor_name,
    layer_of,
    pad,
    parse_expert_name,
)
from .pairing import check_pair
from .reader import (
    SPLIT_NAME,
    GGUFFile,
    TensorInfo,
    architecture,
    metadata_value,
    open_model,
)

KV_CELL_PADDING = 256
KV_BYTES_PER_VALUE = 2
MAX_CONTEXT = 1 << 40

_KIND_SETS = ({UP, GATE, DOWN}, {UP, DOWN}, {GATE_UP, DOWN})


class Tier(NamedTuple):
    """One stored precision: bits per weight over all its matrices, and the mean bytes of
    an expert (all matrices of one layer and index)."""

    name: str
    bpw: float
    bytes_per_expert: int


class Slice(NamedTuple):
    """The experts of one (layer, kind, tier): expert e is the ``expert_bytes`` bytes at
    ``offset + e * expert_bytes`` of ``files[file_index]``."""

    file_index: int
    offset: int
    expert_bytes: int
    type: GGMLType


# [kind][tier] of one layer; None where the layer has no such matrix.
LayerSlices = tuple[tuple[Slice | None, ...], ...]


@dataclass(slots=True)
class ExpertModel:
    """A Mixture-of-Experts model as the engine sees it on disk.

    ``slices[layer][kind][tier]`` counts MoE layers only; ``layer_ids[layer]`` is the
    model's own layer number. ``shapes[layer][kind]`` is (row length, rows) of one
    expert's matrix. Tiers are ordered best first. Sizes are bytes. ``dense_bytes`` counts
    all that is no expert, ``dense_layer_bytes[il]`` what of it is in each of the
    ``block_count`` layers.
    """

    path: Path
    name: str
    arch: str
    n_layers: int
    layer_ids: list[int]
    n_expert: int
    n_expert_used: int
    tiers: list[Tier]
    files: list[Path]
    slices: list[LayerSlices]
    shapes: list[tuple[tuple[int, int] | None, ...]]
    dense_bytes: int
    dense_layer_bytes: list[int]
    tier_bytes: list[int]
    block_count: int
    context_length: int
    embedding_length: int
    n_head: list[int]
    n_head_kv: list[int]
    key_length: int
    value_length: int
    is_mla: bool
    has_shared: bool
    fallbacks: list[str]
    parts: list[GGUFFile]

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], low: str | os.PathLike[str] | None = None
    ) -> "ExpertModel":
        """Open an ordinary or packed model, with ``low`` as an additional lower tier.

        Raises GGUFError: a malformed file, a model without experts (NotMoEError), a tier
        that is announced but absent (MissingTierError), or a ``low`` that is another
        model or not less precise (MismatchError, naming the first difference).
        """
        return cls.of_parts(open_model(path), None if low is None else open_model(low))

    @classmethod
    def of_parts(cls, parts: list[GGUFFile], low: list[GGUFFile] | None = None) -> "ExpertModel":
        """The model in opened files, as ``open_model`` gives them; raises as ``open`` does."""
        model = _open_one(list(parts))
        return model if low is None else _join(model, _open_one(list(low)))

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the first file."""
        return self.parts[0].metadata

    def tier_index(self, name: str) -> int:
        """Index of a tier by name; MissingTierError lists the tiers there are."""
        for index, tier in enumerate(self.tiers):
            if tier.name == name.lower():
                return index
        known = ", ".join(tier.name for tier in self.tiers)
        raise errors.MissingTierError(f"{self.path}: tier {name} is missing; it holds {known}")

    def kv_bytes(self, n_ctx: int) -> int:
        """Bytes of an F16 KV cache for n_ctx tokens, as upstream allocates it.

        Latent attention (MLA) stores keys only. Sliding-window and recurrent layers are
        counted as full attention: an upper bound.
        """
        value_length = 0 if self.is_mla else self.value_length
        per_token = sum(self.n_head_kv) * (self.key_length + value_length)
        return per_token * KV_BYTES_PER_VALUE * pad(n_ctx, KV_CELL_PADDING)

    def kinds(self, layer: int) -> list[int]:
        """Matrix kinds that a MoE layer has, in the order of ``layout.KINDS``."""
        return [kind for kind, shape in enumerate(self.shapes[layer]) if shape is not None]

    def close(self) -> None:
        """Let go of the mapped files."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> "ExpertModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Found(NamedTuple):
    """An expert tensor and the file that holds it."""

    file_index: int
    info: TensorInfo


def _open_one(parts: list[GGUFFile]) -> ExpertModel:
    first = parts[0]
    arch = architecture(first)
    block_count = positive(first, f"{arch}.block_count", MAX_LAYERS)
    n_routed_blocks = routed_blocks(first, arch)
    tier_names = announced_tiers(first)

    best: dict[int, dict[int, _Found]] = {}
    lower: dict[tuple[int, int, str], _Found] = {}
    dense_bytes = 0
    dense_layer_bytes = [0] * block_count
    has_shared = False
    for file_index, part in enumerate(parts):
        for info in part.tensors.values():
            parsed = parse_expert_name(info.name)
            if parsed is None or parsed.il >= n_routed_blocks:
                if TIER_MARK in info.name:
                    raise errors.MetadataError(
                        f"{part.path}: tensor {info.name}: offset {info.offset}: not a tier of"
                        " an expert matrix"
                    )
                dense_bytes += info.nbytes
                block = layer_of(info.name)
                if block is not None and block < block_count:
                    dense_layer_bytes[block] += info.nbytes
                has_shared |= "_shexp." in info.name
            elif parsed.tier is None:
                best.setdefault(parsed.il, {})[parsed.kind] = _Found(file_index, info)
            elif parsed.tier not in tier_names[1:]:
                raise errors.MissingTierError(
                    f"{part.path}: tensor {info.name}: offset {info.offset}: key {KEY_TIERS}"
                    f" does not list {parsed.tier} as a lower tier"
                )
            else:
                lower[parsed.il, parsed.kind, parsed.tier] = _Found(file_index, info)
    if not best:
        raise errors.NotMoEError(
            f"{first.path}: no expert tensors: not a Mixture-of-Experts model"
            + (
                " (one tensor per expert is an old layout: convert the model again)"
                if "blk.0.ffn_gate.0.weight" in first.tensors
                else ": llama.cpp itself runs it"
            )
        )

    layer_ids = sorted(best)
    n_expert = expert_count(first, arch, next(iter(best[layer_ids[0]].values())).info)
    slices: list[LayerSlices] = []
    shapes: list[tuple[tuple[int, int] | None, ...]] = []
    for il in layer_ids:
        _check_layer(parts, il, best[il], n_expert)
        shapes.append(tuple(_matrix_shape(best[il].get(kind)) for kind in range(len(KINDS))))
        slices.append(
            tuple(
                _tier_slices(parts, il, kind, best[il].get(kind), tier_names, lower, n_expert)
                for kind in range(len(KINDS))
            )
        )
    if lower:
        (il, kind, _), found = next(iter(lower.items()))
        raise errors.MissingTensorError(
            f"{parts[found.file_index].path}: tensor {found.info.name}: offset"
            f" {found.info.offset}: its best tier {expert_tensor_name(il, kind)} is missing"
        )

    tiers, tier_bytes = _tiers(tier_names, slices, shapes, n_expert)
    for high, low in pairwise(tiers):
        if low.bpw > high.bpw:
            raise errors.MetadataError(
                f"{first.path}: key {KEY_TIERS}: tier {low.name} ({low.bpw:.2f} bits per weight)"
                f" is not below {high.name} ({high.bpw:.2f}); tiers are listed best first"
            )
    n_head = per_layer(first, f"{arch}.attention.head_count", block_count, [1])
    n_head_kv = per_layer(first, f"{arch}.attention.head_count_kv", block_count, n_head)
    embedding_length = positive(first, f"{arch}.embedding_length")
    head_length = embedding_length // max(1, max(n_head))
    return ExpertModel(
        path=first.path,
        name=str(metadata_value(first, "general.name", str, _stem(first.path))),
        arch=arch,
        n_layers=len(layer_ids),
        layer_ids=layer_ids,
        n_expert=n_expert,
        n_expert_used=expert_used(first, arch, block_count, n_expert),
        tiers=tiers,
        files=[part.path for part in parts],
        slices=slices,
        shapes=shapes,
        dense_bytes=dense_bytes,
        dense_layer_bytes=dense_layer_bytes,
        tier_bytes=tier_bytes,
        block_count=block_count,
        context_length=number(first, f"{arch}.context_length", 0, MAX_CONTEXT),
        embedding_length=embedding_length,
        n_head=n_head,
        n_head_kv=n_head_kv,
        key_length=number(first, f"{arch}.attention.key_length", head_length),
        value_length=number(first, f"{arch}.attention.value_length", head_length),
        is_mla=f"{arch}.attention.key_length_mla" in first.metadata,
        has_shared=has_shared,
        fallbacks=[str(text) for text in metadata_value(first, KEY_FALLBACKS, list, [])],
        parts=parts,
    )


def _stem(path: Path) -> str:
    """The file's name without its ending, and without the number of its part."""
    match = SPLIT_NAME.fullmatch(path.name)
    return match[1] if match else path.stem


def _matrix_shape(found: _Found | None) -> tuple[int, int] | None:
    return None if found is None else (found.info.shape[0], found.info.shape[1])


def _check_layer(parts: list[GGUFFile], il: int, layer: dict[int, _Found], n_expert: int) -> None:
    """A layer has a legal set of matrices whose shapes fit each other."""
    where = f"{parts[next(iter(layer.values())).file_index].path}: "
    if set(layer) not in _KIND_SETS:
        needed = {GATE_UP, DOWN} if GATE_UP in layer else {UP, DOWN}
        missing = sorted(needed - set(layer))
        if not missing:
            have = ", ".join(KINDS[kind] for kind in sorted(layer))
            raise errors.MissingTensorError(f"{where}layer {il}: unexpected matrices {have}")
        raise errors.MissingTensorError(
            f"{where}tensor {expert_tensor_name(il, missing[0])} is missing"
        )
    for found in layer.values():
        shape = found.info.shape
        if len(shape) != 3 or shape[2] != n_expert:
            raise _shape_error(parts, found, f"expected {n_expert} experts in 3 dimensions")
    down = layer[DOWN].info.shape
    n_in, n_ff = down[1], down[0]
    for kind, rows in ((UP, n_ff), (GATE, n_ff), (GATE_UP, 2 * n_ff)):
        if kind in layer and layer[kind].info.shape[:2] != (n_in, rows):
            raise _shape_error(
                parts, layer[kind], f"expected [{n_in}, {rows}, {n_expert}] beside the down matrix"
            )


def _shape_error(parts: list[GGUFFile], found: _Found, text: str) -> errors.GGUFError:
    return errors.TensorShapeError(
        f"{parts[found.file_index].path}: tensor {found.info.name}: offset {found.info.offset}:"
        f" shape {list(found.info.shape)}; {text}"
    )


def _tier_slices(
    parts: list[GGUFFile],
    il: int,
    kind: int,
    base: _Found | None,
    tier_names: list[str],
    lower: dict[tuple[int, int, str], _Found],
    n_expert: int,
) -> tuple[Slice | None, ...]:
    """Slices of one matrix in every tier; takes what it uses out of ``lower``."""
    if base is None:
        return (None,) * len(tier_names)
    slices = [_slice(base, n_expert)]
    for tier in tier_names[1:]:
        found = lower.pop((il, kind, tier), None)
        if found is None:
            raise errors.MissingTierError(
                f"{parts[base.file_index].path}: tensor {expert_tensor_name(il, kind, tier)} is"
                f" missing, but key {KEY_TIERS} announces tier {tier}"
            )
        if found.info.shape != base.info.shape:
            raise _shape_error(parts, found, f"its best tier is {list(base.info.shape)}")
        slices.append(_slice(found, n_expert))
    return tuple(slices)


def _slice(found: _Found, n_expert: int) -> Slice:
    info = found.info
    return Slice(found.file_index, info.offset, info.nbytes // n_expert, info.type)


def _tiers(
    names: list[str],
    slices: list[LayerSlices],
    shapes: list[tuple[tuple[int, int] | None, ...]],
    n_expert: int,
) -> tuple[list[Tier], list[int]]:
    weights = sum(shape[0] * shape[1] for layer in shapes for shape in layer if shape)
    tiers = []
    tier_bytes = []
    for index, name in enumerate(names):
        by_type: Counter[GGMLType] = Counter()
        for layer in slices:
            for kind in layer:
                each = kind[index]
                if each is not None:
                    by_type[each.type] += each.expert_bytes
        per_expert = sum(by_type.values())
        dominant = by_type.most_common(1)[0][0].tier_name
        tiers.append(
            Tier(name or dominant, 8 * per_expert / weights, -(-per_expert // len(slices)))
        )
        tier_bytes.append(per_expert * n_expert)
    return tiers, tier_bytes


def _join(high: ExpertModel, low: ExpertModel) -> ExpertModel:
    """The high model with the tiers of ``low`` below its own; raises MismatchError."""
    check_pair(high, low)
    taken = {tier.name for tier in high.tiers}
    high.tiers += [
        tier._replace(name=f"{tier.name}-low") if tier.name in taken else tier for tier in low.tiers
    ]
    high.tier_bytes += low.tier_bytes
    shift = len(high.files)
    high.slices = [
        tuple(
            high_kind
            + tuple(each and each._replace(file_index=each.file_index + shift) for each in low_kind)
            for high_kind, low_kind in zip(high_layer, low_layer, strict=True)
        )
        for high_layer, low_layer in zip(high.slices, low.slices, strict=True)
    ]
    high.files += low.files
    high.parts += low.parts
    return high
