"""Quantization methods for expert weights, as used by `pack`."""

import os
from typing import Protocol

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import GGMLType
from gguf_tools.quantize.ggml import Blocks, Floats, Ggml
from gguf_tools.quantize.imatrix import ExpertImportance, Imatrix, read_imatrix


class ExpertQuantizer(Protocol):
    """Interface of a method that quantizes the weights of experts.

    `quantize` is called from several threads. All calls for a layer end before the first call for
    the next layer. If the same rows are quantized to several types, one thread makes these calls
    one after another.

    method, calibration: texts to record in the metadata of the packed file.
    has_importance: whether the method supports types that need an importance matrix.
    """

    method: str
    calibration: str
    has_importance: bool

    def quantize(
        self, layer: int, kind: int, expert: int, values: Floats, ggml_type: GGMLType
    ) -> Blocks:
        """Quantize float32 rows [rows, row length] of an expert's matrix and encode them.

        Returns the encoded bytes. Raises QuantizeError if a value cannot be quantized. The caller
        adds the file name to the message.

        layer: index of the MoE layer.
        kind: kind of the matrix, an index into KINDS.
        """


class Rtn:
    """Quantizes by rounding to nearest: ggml quantizes each block without calibration data."""

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
    """Quantizes with ggml and an importance matrix.

    ggml minimizes the error of each block, weighted by the mean squared input of each column: sum_j
    E[x_j^2] (w_j - q_j)^2.
    """

    method = "imatrix"
    has_importance = True

    def __init__(
        self, ggml: Ggml, imatrix: Imatrix, model: ExpertModel, calibration: str | None = None
    ) -> None:
        """Look up the importance of each expert's columns in an importance matrix.

        calibration: text to record in the packed file. Default: the matrix's own summary.
        Raises MismatchError if the importance matrix belongs to another model.
        """
        self.ggml = ggml
        self.importance = ExpertImportance(imatrix, model)
        self.calibration = calibration or imatrix.summary()

    @classmethod
    def of_file(
        cls, path: str | os.PathLike[str], model: ExpertModel, ggml: Ggml
    ) -> "ByImportance":
        """Create this quantizer from an importance matrix file of llama.cpp.

        Raises GGUFError if the file is invalid or belongs to another model.
        """
        return cls(ggml, read_imatrix(path), model)

    def note(self) -> str | None:
        """Return a note for the user on experts with too few calibration tokens.

        Return None if no expert has too few.
        """
        return self.importance.note()

    def quantize(
        self, layer: int, kind: int, expert: int, values: Floats, ggml_type: GGMLType
    ) -> Blocks:
        return self.ggml.quantize(ggml_type, values, self.importance.of(layer, kind, expert))
