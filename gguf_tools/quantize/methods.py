"""How the weights of an expert become blocks: what ``pack`` calls for each matrix."""

import os
from typing import Protocol

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType
from gguf_tools.quantize.ggml import Blocks, Floats, Ggml
from gguf_tools.quantize.imatrix import ExpertImportance, Imatrix, read_imatrix


class ExpertQuantizer(Protocol):
    """A quantization method.

    ``method`` and ``calibration`` are written into a file's metadata. ``has_importance``: it also
    serves the types that need an importance matrix.

    Calls come from several threads, layer by layer in increasing order: all calls for a layer
    have ended before the first one for the next. A matrix may come in runs of rows. The types of
    one run are asked for one after the other, by one thread.
    """

    method: str
    calibration: str
    has_importance: bool

    def quantize(
        self, layer: int, kind: int, expert: int, values: Floats, ggml_type: GGMLType
    ) -> Blocks:
        """Encoded bytes of float32 rows [rows, row length] of an expert's matrix.

        ``layer`` counts MoE layers. Raises QuantizeError without the file's name.
        """


class Rtn:
    """ggml as it is: each block on its own goes to the nearest values that its format has."""

    method = "rtn"
    calibration = "none"
    has_importance = False

    def __init__(self, ggml: Ggml) -> None:
        self.ggml = ggml

    def quantize(
        self, layer: int, kind: int, expert: int, values: Floats, ggml_type: GGMLType
    ) -> Blocks:
        return self.ggml.quantize(ggml_type, values)


class ByImportance:
    """ggml's quantization, which minimises the error of each block weighted by how large the
    columns' inputs are: sum_j E[x_j^2] (w_j - q_j)^2."""

    method = "imatrix"
    has_importance = True

    def __init__(
        self, ggml: Ggml, imatrix: Imatrix, model: ExpertModel, calibration: str | None = None
    ) -> None:
        """calibration: what the file shall say of it, if not what the imatrix says. Raises
        MismatchError where the imatrix is another model's."""
        self.ggml = ggml
        self.importance = ExpertImportance(imatrix, model)
        self.calibration = calibration or imatrix.summary()

    @classmethod
    def of_file(
        cls, path: str | os.PathLike[str], model: ExpertModel, ggml: Ggml
    ) -> "ByImportance":
        """The method with a file of llama.cpp. Raises GGUFError."""
        return cls(ggml, read_imatrix(path), model)

    def note(self) -> str | None:
        """A sentence on the experts that saw too few tokens, None where there is none."""
        return self.importance.note()

    def quantize(
        self, layer: int, kind: int, expert: int, values: Floats, ggml_type: GGMLType
    ) -> Blocks:
        return self.ggml.quantize(ggml_type, values, self.importance.of(layer, kind, expert))
