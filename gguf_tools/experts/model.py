"""A Mixture-of-Experts model as it lies on disk, in every precision there is.

One view serves the three kinds of input: an ordinary GGUF (one tier), a packed multi-tier
file, and two ordinary GGUFs of one model as high and low. Nothing is copied here, and beyond
metadata only what chooses experts by token is read; a Slice says where the native store finds the
bytes.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf_tools import errors
from gguf_tools.closing import Closing
from gguf_tools.experts.hparams import Hyperparameters, announced_tiers
from gguf_tools.experts.loadable import check_loadable
from gguf_tools.experts.pairing import check_pair
from gguf_tools.experts.slices import LayerShapes, LayerSlices, Tier
from gguf_tools.experts.tensors import (
    Found,
    check_choices,
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
# What keys and values may be kept in, by the names of --kv.
KV_TYPES = {"f16": GGMLType.F16, "q8_0": GGMLType.Q8_0}
DEFAULT_KV = "f16"


@dataclass(slots=True)
class ExpertModel(Closing):
    """A Mixture-of-Experts model as the engine sees it on disk.

    ``slices[layer][kind][tier]`` counts MoE layers only; ``layer_ids[layer]`` is the
    model's own layer number. ``shapes[layer][kind]`` is (row length, rows) of one
    expert's matrix. Tiers are ordered best first. Sizes are bytes. ``dense_bytes`` counts
    all that is no expert, ``dense_layer_bytes[il]`` what of it is in each of the model's
    own layers. ``lookup`` are the tables of it that are read by rows, which can stay on disk.
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
    lookup: list[Found]
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
        model = _of_one(list(parts))
        return model if low is None else _join(model, _of_one(list(low)))

    @property
    def split_files(self) -> list[list[GGUFFile]]:
        """The parts of each model file: one list, or two for a model with ``low``."""
        found: list[list[GGUFFile]] = []
        for part in self.parts:
            if not part.metadata.get(KEY_SPLIT_NO):
                found.append([])
            found[-1].append(part)
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the first file."""
        return self.parts[0].metadata

    @property
    def n_layers(self) -> int:
        """MoE layers."""
        return len(self.layer_ids)

    @property
    def n_expert(self) -> int:
        """Experts of each MoE layer."""
        return self.hparams.n_expert

    @property
    def n_expert_used(self) -> int:
        """Experts that a token uses in each MoE layer."""
        return self.hparams.n_expert_used

    @property
    def lookup_bytes(self) -> int:
        """Of ``dense_bytes``, the tables that can stay on disk."""
        return sum(table.info.nbytes for table in self.lookup)

    @property
    def lookup_text(self) -> str:
        """Their names and sizes, empty where there are none."""
        infos = [table.info for table in self.lookup]
        return " and ".join(f"{info.name} ({format_size(info.nbytes)})" for info in infos)

    def tier_index(self, name: str) -> int:
        """Index of a tier by name; MissingTierError lists the tiers there are."""
        for index, tier in enumerate(self.tiers):
            if tier.name == name.lower():
                return index
        known = ", ".join(tier.name for tier in self.tiers)
        raise errors.MissingTierError(f"{self.path}: tier {name} is missing; it holds {known}")

    def kv_bytes(self, n_ctx: int, kv: str = DEFAULT_KV) -> int:
        """Bytes of a KV cache for n_ctx tokens, as the header says. kv: of KV_TYPES.

        Latent attention (MLA) stores keys only. Recurrent layers are counted as full attention, and
        nothing for their states, nor for the keys of an indexer: llama.cpp counts those.
        """
        hparams = self.hparams
        value_length = 0 if hparams.is_mla else hparams.value_length
        per_token = sum(hparams.n_head_kv) * (hparams.key_length + value_length)
        block = BLOCK[KV_TYPES[kv]]
        return per_token * block.bytes * pad(n_ctx, KV_CELL_PADDING) // block.weights

    def kinds(self, layer: int) -> list[int]:
        """Matrix kinds that a MoE layer has, in the order of ``layout.KINDS``."""
        return [kind for kind, shape in enumerate(self.shapes[layer]) if shape is not None]

    def close(self) -> None:
        """Let go of the mapped files."""
        for part in self.parts:
            part.close()


def _of_one(parts: list[GGUFFile]) -> ExpertModel:
    """One model, without another one as its lower tiers."""
    first = parts[0]
    tier_names = announced_tiers(first)
    hparams = Hyperparameters.read(first, first_expert(parts))
    check_loadable(parts, hparams)
    check_choices(parts, hparams.n_expert)
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
    """The file's name without its ending, and without the number of its part."""
    match = SPLIT_NAME.fullmatch(path.name)
    return match[1] if match else path.stem


def _join(high: ExpertModel, low: ExpertModel) -> ExpertModel:
    """The high model with the tiers of ``low`` below its own; raises MismatchError."""
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
