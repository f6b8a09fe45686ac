"""Find the expert tensors in a model's files, check them, and divide them into slices."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from gguf_tools import errors
from gguf_tools.experts.hparams import Hyperparameters
from gguf_tools.experts.slices import LayerShapes, LayerSlices, Slice, Tier
from gguf_tools.file.layout import (
    DOWN,
    EMBEDDINGS,
    GATE,
    GATE_UP,
    KEY_TIERS,
    KINDS,
    LOOKUP_TABLE,
    OUTPUT,
    ROUTER,
    ROUTING_TABLE,
    TIER_MARK,
    UP,
    GGMLType,
    expert_tensor_name,
    layer_of,
    parse_expert_name,
)
from gguf_tools.file.parse import TensorInfo
from gguf_tools.file.reader import GGUFFile

_KIND_SETS = ({UP, GATE, DOWN}, {UP, DOWN}, {GATE_UP, DOWN})


class LocatedTensor(NamedTuple):
    """A tensor, and the index of the model's file that contains the tensor."""

    file_index: int
    info: TensorInfo


@dataclass
class SortedTensors:
    """The tensors of a model, divided into experts and dense tensors.

    The index `il` is the layer number, `kind` the kind of the matrix, and `tier` the name of a
    precision.

    dense_bytes: size of all tensors that are not experts.
    dense_layer_bytes: the part of dense_bytes in each layer.
    has_shared: whether a layer has shared experts.
    lookup: dense tensors of which only single rows are read.
    best: expert tensors of the best tier, as `best[il][kind]`.
    lower: expert tensors of lower tiers, as `lower[il, kind, tier]`.
    """

    dense_layer_bytes: list[int]
    dense_bytes: int = 0
    has_shared: bool = False
    lookup: list[LocatedTensor] = field(default_factory=list)
    best: dict[int, dict[int, LocatedTensor]] = field(default_factory=dict)
    lower: dict[tuple[int, int, str], LocatedTensor] = field(default_factory=dict)


def first_expert(parts: list[GGUFFile]) -> TensorInfo:
    """Return an expert tensor of the first layer with experts.

    Raises NotMoEError if no layer has experts.
    """
    found = [
        (parsed.il, info)
        for part in parts
        for info in part.tensors.values()
        if (parsed := parse_expert_name(info.name)) is not None and parsed.tier is None
    ]
    if not found:
        raise _no_experts(parts[0])
    return min(found, key=lambda each: each[0])[1]


def sort_tensors(
    parts: list[GGUFFile], hparams: Hyperparameters, tier_names: list[str]
) -> SortedTensors:
    """Divide the tensors of a model into expert tensors and others, and return both groups.

    If a model has experts in several precisions (tiers), the names of tensors in lower tiers end
    with the tier, for example `.moe_edge.q2_k`. Expert tensors of multi-token prediction layers
    count as others.

    parts: the opened files of the model.
    hparams: numbers from the model's metadata, such as the number of layers.
    tier_names: the names of the tiers, best first. Names of tensors in the first tier have no
        ending.

    Raises NotMoEError if the model has no expert tensors. Raises MissingTierError if an expert
    tensor's name ends with a tier that is not in `tier_names[1:]`. Raises MetadataError if the name
    of another tensor ends like the name of a lower tier.
    """
    tensors = SortedTensors([0] * hparams.block_count)
    tied = not any(OUTPUT in part.tensors for part in parts)
    for file_index, part in enumerate(parts):
        for info in part.tensors.values():
            parsed = parse_expert_name(info.name)
            if parsed is None or parsed.il >= hparams.routed_blocks:
                if TIER_MARK in info.name:
                    raise errors.MetadataError(
                        f"{part.path}: tensor {info.name}: offset {info.offset}: the name ends like"
                        " that of a tier, but is not the name of an expert matrix"
                    )
                tensors.dense_bytes += info.nbytes
                if info.name == LOOKUP_TABLE or (info.name == EMBEDDINGS and not tied):
                    tensors.lookup.append(LocatedTensor(file_index, info))
                block = layer_of(info.name)
                if block is not None and block < hparams.block_count:
                    tensors.dense_layer_bytes[block] += info.nbytes
                tensors.has_shared |= "_shexp." in info.name
            elif parsed.tier is None:
                tensors.best.setdefault(parsed.il, {})[parsed.kind] = LocatedTensor(
                    file_index, info
                )
            elif parsed.tier not in tier_names[1:]:
                raise errors.MissingTierError(
                    f"{part.path}: tensor {info.name}: offset {info.offset}: key {KEY_TIERS}"
                    f" does not list {parsed.tier} as a lower tier"
                )
            else:
                tensors.lower[parsed.il, parsed.kind, parsed.tier] = LocatedTensor(file_index, info)
    if not tensors.best:
        raise _no_experts(parts[0])
    return tensors


def _no_experts(first: GGUFFile) -> errors.NotMoEError:
    return errors.NotMoEError(
        f"{first.path}: no expert tensors: "
        + (
            "the file has the old layout with one tensor per expert: convert the model again"
            if "blk.0.ffn_gate.0.weight" in first.tensors
            else "not a Mixture-of-Experts model: use llama.cpp to run it"
        )
    )


def cut_slices(
    parts: list[GGUFFile], tensors: SortedTensors, tier_names: list[str], n_expert: int
) -> tuple[list[LayerSlices], list[LayerShapes]]:
    """Return the file positions and the shapes of the expert matrices of every MoE layer.

    The first list has the positions, and the second list the shapes, in layer order. Raises
    GGUFError if a matrix or a tier (precision) is missing or has a wrong shape.
    """
    lower = dict(tensors.lower)
    slices: list[LayerSlices] = []
    shapes: list[LayerShapes] = []
    gated = any(GATE in best for best in tensors.best.values())
    for il, best in sorted(tensors.best.items()):
        _check_layer(parts, il, best, n_expert, gated)
        shapes.append(tuple(_matrix_shape(best.get(kind)) for kind in range(len(KINDS))))
        slices.append(
            tuple(
                _tier_slices(parts, il, kind, best.get(kind), tier_names, lower, n_expert)
                for kind in range(len(KINDS))
            )
        )
    if lower:
        (il, kind, _), found = next(iter(lower.items()))
        raise errors.MissingTensorError(
            f"{parts[found.file_index].path}: tensor {found.info.name}: offset"
            f" {found.info.offset}: the best tier {expert_tensor_name(il, kind)} is missing"
        )
    return slices, shapes


def _matrix_shape(found: LocatedTensor | None) -> tuple[int, int] | None:
    return None if found is None else (found.info.shape[0], found.info.shape[1])


def _check_layer(
    parts: list[GGUFFile], il: int, layer: dict[int, LocatedTensor], n_expert: int, gated: bool
) -> None:
    """Check that a layer has a valid set of expert matrices with matching shapes.

    Raises MissingTensorError or TensorShapeError otherwise.

    il: layer number.
    layer: the layer's expert tensors by kind.
    gated: whether any layer of the model has separate gate matrices.
    """
    file = parts[next(iter(layer.values())).file_index].path
    if set(layer) not in _KIND_SETS or (gated and set(layer) == {UP, DOWN}):
        needed = {GATE_UP, DOWN} if GATE_UP in layer else {UP, DOWN} | ({GATE} if gated else set())
        missing = sorted(needed - set(layer))
        if not missing:
            have = ", ".join(KINDS[kind] for kind in sorted(layer))
            raise errors.MissingTensorError(
                f"{file}: layer {il}: unexpected matrices of experts: {have}"
            )
        raise errors.MissingTensorError(
            f"{file}: tensor {expert_tensor_name(il, missing[0])} is missing"
        )
    for found in layer.values():
        shape = found.info.shape
        if len(shape) != 3 or shape[2] != n_expert:
            raise _shape_error(
                parts, found, f"expected {n_expert} experts in the last of 3 dimensions"
            )
    down = layer[DOWN].info.shape
    n_in, n_ff = down[1], down[0]
    for kind, rows in ((UP, n_ff), (GATE, n_ff), (GATE_UP, 2 * n_ff)):
        if kind in layer and layer[kind].info.shape[:2] != (n_in, rows):
            raise _shape_error(
                parts,
                layer[kind],
                f"expected the shape [{n_in}, {rows}, {n_expert}] to match the down matrix",
            )


def check_routing_tables(parts: list[GGUFFile], n_expert: int) -> None:
    """Check that each router has an output for every expert, and that routing tables are valid.

    A routing table selects experts by token ID. Raises TensorShapeError if a router has too few
    outputs. Raises TensorTypeError if a routing table does not have the type I32, and
    ExpertIndexError if it contains an expert that does not exist.
    """
    for file_index, part in enumerate(parts):
        for info in part.tensors.values():
            found = LocatedTensor(file_index, info)
            if info.name.endswith(ROUTER) and info.shape[-1] < n_expert:
                raise _shape_error(
                    parts, found, f"expected an output for each of {n_expert} experts"
                )
            if not info.name.endswith(ROUTING_TABLE):
                continue
            tensor = f"{part.path}: tensor {info.name}: offset {info.offset}"
            if info.type is not GGMLType.I32:
                raise errors.TensorTypeError(
                    f"{tensor}: the type is {info.type.tier_name}, expected i32"
                )
            chosen = part.array(info.name).view("<i4")
            wrong = chosen[(chosen < 0) | (chosen >= n_expert)]
            if wrong.size:
                raise errors.ExpertIndexError(
                    f"{tensor}: the table refers to expert {wrong[0]}, but the model has"
                    f" {n_expert} experts"
                )


def _shape_error(parts: list[GGUFFile], found: LocatedTensor, text: str) -> errors.GGUFError:
    return errors.TensorShapeError(
        f"{parts[found.file_index].path}: tensor {found.info.name}: offset {found.info.offset}:"
        f" shape {list(found.info.shape)}, {text}"
    )


def _tier_slices(
    parts: list[GGUFFile],
    il: int,
    kind: int,
    base: LocatedTensor | None,
    tier_names: list[str],
    lower: dict[tuple[int, int, str], LocatedTensor],
    n_expert: int,
) -> tuple[Slice | None, ...]:
    """Return the file position of one kind of expert matrix of a layer, for each precision (tier).

    All positions are None if the layer has no such matrix. Entries used from `lower` are removed,
    so that unused ones can be reported. Raises GGUFError if a tier is missing or has another shape.

    base: the matrix in the best tier.
    lower: the matrices in lower tiers, by layer number, kind and tier.
    """
    if base is None:
        return (None,) * len(tier_names)
    slices = [_slice(base, n_expert)]
    for tier in tier_names[1:]:
        found = lower.pop((il, kind, tier), None)
        if found is None:
            raise errors.MissingTierError(
                f"{parts[base.file_index].path}: tensor {expert_tensor_name(il, kind, tier)} is"
                f" missing, but key {KEY_TIERS} lists tier {tier}"
            )
        if found.info.shape != base.info.shape:
            raise _shape_error(parts, found, f"but the best tier has {list(base.info.shape)}")
        slices.append(_slice(found, n_expert))
    return tuple(slices)


def _slice(found: LocatedTensor, n_expert: int) -> Slice:
    info = found.info
    return Slice(found.file_index, info.offset, info.nbytes // n_expert, info.type)


def sum_tiers(
    first: GGUFFile,
    names: list[str],
    slices: list[LayerSlices],
    shapes: list[LayerShapes],
    n_expert: int,
) -> tuple[list[Tier], list[int]]:
    """Return two lists: a model's precisions (tiers), and the size of all experts in each tier.

    The sizes are in bytes. Both lists are in the order of `names`.

    Raises MetadataError if a tier has more bits per weight than the tier before it.
    """
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
    for high, low in pairwise(tiers):
        if low.bpw > high.bpw:
            raise errors.MetadataError(
                f"{first.path}: key {KEY_TIERS}: tier {low.name} ({low.bpw:.2f} bits per weight)"
                f" is not below {high.name} ({high.bpw:.2f}): list the best tier first"
            )
    return tiers, tier_bytes
