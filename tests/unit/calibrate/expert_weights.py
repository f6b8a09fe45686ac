"""The weights of an expert, for tests that compute what a model computes."""

from __future__ import annotations

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.quantize import Ggml


def weights(
    model: ExpertModel, layer: int, kind: int, expert: int, ggml: Ggml, tier: int = 0
) -> np.ndarray:
    """One expert's matrix in a tier, float32 [rows, row length]."""
    where, shape = model.slices[layer][kind][tier], model.shapes[layer][kind]
    assert where is not None and shape is not None
    data = model.parts[where.file_index].bytes_at(
        where.offset + expert * where.expert_bytes, where.expert_bytes
    )
    return ggml.dequantize(where.type, data, shape[0])
