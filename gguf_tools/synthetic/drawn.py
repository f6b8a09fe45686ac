"""Generate random weights of types that only ggml can encode.

ggml quantizes a small pool of blocks of normally distributed weights. A matrix of any size is then
drawn at random from the pool, which is much faster than quantizing the whole matrix.
"""

from __future__ import annotations

import functools

import numpy as np

from gguf_tools.file.layout import BLOCK, TIER_TYPES, GGMLType
from gguf_tools.synthetic.weights import BLOCK_TYPES, GAUSSIAN_TYPES, Bytes

# IQ2_XXS and IQ2_XS need an importance matrix. It gives all columns the same importance.
DRAWN_TYPES = tuple(
    kind
    for kind in (*TIER_TYPES, GGMLType.IQ2_XS, GGMLType.IQ2_XXS)
    if kind not in (*BLOCK_TYPES, *GAUSSIAN_TYPES, GGMLType.BF16)
)
_POOL_WEIGHTS = 2**16
_ROW_WEIGHTS = 256


def drawn_matrix(seed: list[int], kind: GGMLType, n_weights: int, std: float) -> Bytes:
    """Return n_weights random weights with standard deviation `std`, encoded as type `kind`.

    The blocks are drawn at random from a fixed set of quantized blocks.

    n_weights: a multiple of the type's block size.
    Raises QuantizeError if the ggml library is not installed.
    """
    pool = _pool(kind, std)
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(pool), n_weights // BLOCK[kind].weights)
    return pool[chosen].reshape(-1)


@functools.cache
def _pool(kind: GGMLType, std: float) -> Bytes:
    """Return a fixed set of quantized blocks of normally distributed weights, [n, block_bytes].

    std: standard deviation of the weights.
    """
    from gguf_tools.quantize.ggml import load_ggml

    values = np.random.default_rng(20_28).standard_normal(
        (_POOL_WEIGHTS // _ROW_WEIGHTS, _ROW_WEIGHTS)
    )
    importance = np.ones(_ROW_WEIGHTS, np.float32)
    data = load_ggml().quantize(kind, (std * values).astype(np.float32), importance)
    return data.reshape(-1, BLOCK[kind].bytes)
