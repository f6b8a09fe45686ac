"""Read a dense Llama model, and write it with every matrix in F16.

The source has blocks of 4 bits. Splitting its layers moves neurons between blocks, which would
quantize them a second time. So all comparisons use the dequantized model in F16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf_tools.closing import Closing
from gguf_tools.file.layout import FILE_TYPE, KEY_FILE_TYPE, GGMLType, ValueType
from gguf_tools.file.reader import GGUFFile, metadata_value
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.quantize.ggml import load_ggml
from orchestrator.errors import ConfigError

Floats = npt.NDArray[np.float32]
ARCH = "llama"


class DenseModel(Closing):
    """An open GGUF file of a Llama model without experts. Free it with close or `with`."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises GGUFError if it is invalid.

        Raises ConfigError if the model has another architecture or has experts.
        """
        self.path, self._ggml = path, load_ggml()
        self.file = GGUFFile.open(path)
        arch = metadata_value(self.file, "general.architecture", str, "")
        if arch != ARCH or f"{ARCH}.expert_count" in self.file.metadata:
            raise ConfigError(f"{path}: a dense model of architecture {ARCH} is needed")
        self.n_layers = self._number("block_count")
        self.n_embd = self._number("embedding_length")
        self.n_ff = self._number("feed_forward_length")

    def _number(self, name: str) -> int:
        return int(metadata_value(self.file, f"{ARCH}.{name}", int, 0))

    def matrix(self, name: str) -> Floats:
        """Return a tensor of the file as float32 [rows, row length].

        Raises MissingTensorError if the file has no tensor of this name.
        """
        data, info = self.file.array(name), self.file.tensors[name]
        return self._ggml.dequantize(info.type, data, info.shape[0])

    def ffn(self, layer: int, kind: str) -> Floats:
        """Return a matrix of a layer's FFN as float32. `kind` is "gate", "up" or "down".

        gate and up are [n_ff, n_embd]; down is [n_embd, n_ff].
        """
        return self.matrix(f"blk.{layer}.ffn_{kind}.weight")

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        self.file.close()


def write_dense(model: DenseModel, path: Path) -> None:
    """Write a copy of the model in which every matrix is F16.

    All other tensors stay unchanged.
    """
    with GGUFWriter(path) as writer:
        for key in model.file.metadata:
            writer.meta_encoded(key, model.file.encoded_value(key))
        writer.meta(KEY_FILE_TYPE, FILE_TYPE[GGMLType.F16], ValueType.UINT32)
        for info in model.file.tensors.values():
            matrix = len(info.shape) > 1
            writer.declare(info.name, info.shape, GGMLType.F16 if matrix else info.type)
        writer.begin()
        for info in model.file.tensors.values():
            if len(info.shape) > 1:
                writer.write_tensor(info.name, model.matrix(info.name).astype(np.float16))
            else:
                writer.write_tensor(info.name, model.file.array(info.name))
