"""A Mixture-of-Experts model on disk, with the file positions of every expert in every tier.

ExpertModel represents three kinds of input: an ordinary GGUF (one tier), a packed file (several
tiers), and two ordinary GGUFs of the same model in a higher and a lower precision. Opening a model
reads only metadata and routing tables. The native store reads the experts' weights later, at the
positions given by Slice.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf_tools import errors
from gguf_tools.closing import Closing
from gguf_tools.experts.hparams import Hyperparameters, listed_tiers
from gguf_tools.experts.loadable import check_loadable
from gguf_tools.experts.pairing import check_pair
from gguf_tools.experts.slices import LayerShapes, LayerSlices, Tier
from gguf_tools.experts.tensors import (
    LocatedTensor,
    check_routing_tables,
    cut_slices,
    first_expert,
    sort_tensors,
    sum_tiers,
)
from gguf_tools.file.layout import BLOCK, KEY_FALLBACKS, KEY_SPLIT_NO, GGMLType, pad
from gguf_tools.file.parts import SPLIT_NAME, open_model
from gguf_tools.file.reader import GGUFFile, metadata_value, one_line
from gguf_tools.units import format_size

KV_CELL_PADDING = 256
# Types of the KV cache, by the values of the option --kv.
KV_TYPES = {"f16": GGMLType.F16, "q8_0": GGMLType.Q8_0}
DEFAULT_KV = "f16"


@dataclass(slots=True)
class ExpertModel(Closing):
    """An opened Mixture-of-Experts model, with the position of each expert in its files.

    The index `layer` counts only layers with experts (MoE layers). The index `il` counts all
    layers. A kind is one of the matrices up, gate, gate_up and down. A tier is a stored precision.
    All sizes are in bytes.

    layer_ids: the layer number `il` of each MoE layer.
    tiers: the stored precisions, the best first.
    files: paths of the model's files.
    parts: the opened files, in the same order.
    slices: position of the experts, as `slices[layer][kind][tier]`.
    shapes: (row length, rows) of one expert's matrix, as `shapes[layer][kind]`.
    dense_bytes: size of all tensors that are not experts.
    dense_layer_bytes: the part of dense_bytes in each layer, by `il`.
    tier_bytes: size of all experts in each tier.
    has_shared: whether layers have shared experts.
    lookup: the lookup tables, such as the token embeddings. A token needs only a few of their rows,
        so these tensors can stay on disk.
    fallbacks: notes of a packed file on matrices whose type differs from their tier's.
    """

    path: Path
    name: str
    hparams: Hyperparameters
    layer_ids: list[int]
    tiers: list[Tier]
    files: list[Path]
    slices: list[LayerSlices]
    shapes: list[LayerShapes]
    dense_bytes: int
    dense_layer_bytes: list[int]
    tier_bytes: list[int]
    has_shared: bool
    lookup: list[LocatedTensor]
    fallbacks: list[str]
    parts: list[GGUFFile]

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], low: str | os.PathLike[str] | None = None
    ) -> "ExpertModel":
        """Open a GGUF model with experts, in one precision or packed with several.

        low: a file of the same model in a lower precision, which becomes an additional tier.

        Raises NotMoEError for a model without experts. Raises MissingTierError if a tier that the
        metadata lists is missing. Raises MismatchError if `low` is another model or not less
        precise. Raises other GGUFErrors for malformed files.
        """
        return cls.of_parts(open_model(path), None if low is None else open_model(low))

    @classmethod
    def of_parts(cls, parts: list[GGUFFile], low: list[GGUFFile] | None = None) -> "ExpertModel":
        """Create a model from files that `open_model` has opened.

        low: opened files of the same model in a lower precision, which becomes an additional tier.

        Raises NotMoEError, MismatchError or another GGUFError if the files are not a valid model.
        """
        model = _of_one(list(parts))
        return model if low is None else _join(model, _of_one(list(low)))

    @property
    def split_files(self) -> list[list[GGUFFile]]:
        """The opened files, as a list with one inner list for each GGUF model.

        An inner list has the parts of a split model, or a single file. Usually there is one inner
        list. There are two if `open` was called with its argument `low`, a second model file in a
        lower precision.
        """
        found: list[list[GGUFFile]] = []
        for part in self.parts:
            if not part.metadata.get(KEY_SPLIT_NO):
                found.append([])
            found[-1].append(part)
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the model's first file."""
        return self.parts[0].metadata

    @property
    def n_layers(self) -> int:
        """The number of MoE layers."""
        return len(self.layer_ids)

    @property
    def n_expert(self) -> int:
        """The number of experts in each MoE layer."""
        return self.hparams.n_expert

    @property
    def n_expert_used(self) -> int:
        """The number of experts that each token uses in each MoE layer (top-k)."""
        return self.hparams.n_expert_used

    @property
    def lookup_bytes(self) -> int:
        """The total size of the model's lookup tables.

        A lookup table is a tensor, such as the token embeddings, of which a token needs only a few
        rows. It can therefore stay on disk.
        """
        return sum(table.info.nbytes for table in self.lookup)

    @property
    def lookup_text(self) -> str:
        """The names and sizes of the model's lookup tables, for display. Empty without tables.

        A lookup table is a tensor, such as the token embeddings, of which a token needs only a few
        rows. It can therefore stay on disk.
        """
        infos = [table.info for table in self.lookup]
        return " and ".join(f"{info.name} ({format_size(info.nbytes)})" for info in infos)

    def tier_index(self, name: str) -> int:
        """Return the index of the tier with this name. Upper and lower case are equivalent.

        Raises MissingTierError if the model has no such tier.
        """
        for index, tier in enumerate(self.tiers):
            if tier.name == name.lower():
                return index
        known = ", ".join(tier.name for tier in self.tiers)
        raise errors.MissingTierError(
            f"{self.path}: there is no tier {name}: choose one of {known}"
        )

    def kv_bytes(self, n_ctx: int, kv: str = DEFAULT_KV) -> int:
        """Estimate the size of a KV cache for n_ctx tokens from the metadata.

        Latent attention (MLA) stores keys only. The estimate counts recurrent layers as full
        attention. It leaves out recurrent states and the keys of a sparse-attention indexer.

        kv: type of the cache, a key of KV_TYPES.
        """
        hparams = self.hparams
        value_length = 0 if hparams.is_mla else hparams.value_length
        per_token = sum(hparams.n_head_kv) * (hparams.key_length + value_length)
        block = BLOCK[KV_TYPES[kv]]
        return per_token * block.bytes * pad(n_ctx, KV_CELL_PADDING) // block.weights

    def kinds(self, layer: int) -> list[int]:
        """Return the kinds of expert matrices in a MoE layer, as indices into `layout.KINDS`."""
        return [kind for kind, shape in enumerate(self.shapes[layer]) if shape is not None]

    def close(self) -> None:
        """Release the memory mappings of all files."""
        for part in self.parts:
            part.close()


def _of_one(parts: list[GGUFFile]) -> ExpertModel:
    """Create a model from the files of one model, without a second model of lower precision.

    Raises GGUFError if the model is invalid or has no experts.
    """
    first = parts[0]
    tier_names = listed_tiers(first)
    hparams = Hyperparameters.read(first, first_expert(parts))
    check_loadable(parts, hparams)
    check_routing_tables(parts, hparams.n_expert)
    tensors = sort_tensors(parts, hparams, tier_names)
    slices, shapes = cut_slices(parts, tensors, tier_names, hparams.n_expert)
    tiers, tier_bytes = sum_tiers(first, tier_names, slices, shapes, hparams.n_expert)
    return ExpertModel(
        path=first.path,
        name=one_line(metadata_value(first, "general.name", str, "")) or _stem(first.path),
        hparams=hparams,
        layer_ids=sorted(tensors.best),
        tiers=tiers,
        files=[part.path for part in parts],
        slices=slices,
        shapes=shapes,
        dense_bytes=tensors.dense_bytes,
        dense_layer_bytes=tensors.dense_layer_bytes,
        tier_bytes=tier_bytes,
        has_shared=tensors.has_shared,
        lookup=tensors.lookup,
        fallbacks=[one_line(str(text)) for text in metadata_value(first, KEY_FALLBACKS, list, [])],
        parts=parts,
    )


def _stem(path: Path) -> str:
    """Return a model file's name without `.gguf` and without the part number of a split model."""
    match = SPLIT_NAME.fullmatch(path.name)
    return match[1] if match else path.stem


def _join(high: ExpertModel, low: ExpertModel) -> ExpertModel:
    """Return the model `high` with the tiers (precisions) of the model `low` appended.

    Raises MismatchError if `low` is another model or not less precise.
    """
    check_pair(high, low)
    taken = {tier.name for tier in high.tiers}
    low_tiers = [
        tier._replace(name=f"{tier.name}-low") if tier.name in taken else tier for tier in low.tiers
    ]
    shift = len(high.files)
    slices: list[LayerSlices] = [
        tuple(
            high_kind
            + tuple(each and each._replace(file_index=each.file_index + shift) for each in low_kind)
            for high_kind, low_kind in zip(high_layer, low_layer, strict=True)
        )
        for high_layer, low_layer in zip(high.slices, low.slices, strict=True)
    ]
    return replace(
        high,
        tiers=high.tiers + low_tiers,
        tier_bytes=high.tier_bytes + low.tier_bytes,
        slices=slices,
        files=high.files + low.files,
        parts=high.parts + low.parts,
    )
