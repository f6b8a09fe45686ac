"""Random weights of types that only ggml can encode: a few blocks of quantized Gaussians, drawn
again and again. A matrix is as long as a real one, and few of its blocks had to be quantized."""

from __future__ import annotations

import functools

import numpy as np

from gguf_tools.file.layout import BLOCK, TIER_TYPES, GGMLType
from gguf_tools.synthetic.weights import BLOCK_TYPES, GAUSSIAN_TYPES, Bytes

# IQ2_XXS and IQ2_XS cannot be made without an importance: all columns alike.
DRAWN_TYPES = tuple(
    kind
    for kind in (*TIER_TYPES, GGMLType.IQ2_XS, GGMLType.IQ2_XXS)
    if kind not in (*BLOCK_TYPES, *GAUSSIAN_TYPES, GGMLType.BF16)
)
_POOL_WEIGHTS = 2**16
_ROW_WEIGHTS = 256


def drawn_matrix(seed: list[int], kind: GGMLType, n_weights: int, std: float) -> Bytes:
    """Random weights [n_weights] of standard deviation `std`, encoded as `kind`; n_weights is a
    multiple of its block. Raises QuantizeError without ggml's library."""
    pool = _pool(kind, std)
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(pool), n_weights // BLOCK[kind].weights)
    return pool[chosen].reshape(-1)


@functools.cache
def _pool(kind: GGMLType, std: float) -> Bytes:
    """Blocks [n, block_bytes] of Gaussian weights."""
    from gguf_tools.quantize.ggml import load_ggml

    values = np.random.default_rng(20_28).standard_normal(
        (_POOL_WEIGHTS // _ROW_WEIGHTS, _ROW_WEIGHTS)
    )
    importance = np.ones(_ROW_WEIGHTS, np.float32)
    data = load_ggml().quantize(kind, (std * values).astype(np.float32), importance)
    return data.reshape(-1, BLOCK[kind].bytes)
