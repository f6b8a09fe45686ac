"""Convert tensors without loss from new ggml types to types that every llama.cpp release reads."""

import numpy as np
import numpy.typing as npt

from gguf_tools.file.layout import BLOCK, GGMLType

# With scale d, a Q2_0 weight is d * (-1, 0, 1 or 2), and a Q4_0 weight is d * (q - 8), q = 0 .. 15.
OLDER = {GGMLType.Q2_0: GGMLType.Q4_0}
_LOWEST_CODE = 8 - 1


def growth(new: GGMLType) -> int:
    """Return the factor by which tensors of the type `new` grow if converted to an older type.

    new: a type that released versions of llama.cpp cannot read. OLDER[new] is the older type.
    """
    old = OLDER[new]
    return BLOCK[old].bytes * BLOCK[new].weights // (BLOCK[old].weights * BLOCK[new].bytes)


def q2_0_as_q4_0(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Convert Q2_0 blocks to Q4_0 blocks with the same scales and the same weights.

    blocks: uint8 [n * 18], n blocks of 64 weights.
    Returns uint8 [2 * n * 18], 2 n blocks of 32 weights.
    """
    weights, nbytes = BLOCK[GGMLType.Q2_0]
    rows = blocks.reshape(-1, nbytes)
    codes = rows[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    halves = codes.reshape(-1, 2, 2, weights // 4) + np.uint8(_LOWEST_CODE)
    out = np.empty((len(rows), 2, BLOCK[GGMLType.Q4_0].bytes), np.uint8)
    out[:, :, :2] = rows[:, None, :2]
    out[:, :, 2:] = halves[:, :, 0] | halves[:, :, 1] << 4
    return out.reshape(-1)
