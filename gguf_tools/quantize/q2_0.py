"""Q2_0 blocks with a least-squares scale.

A Q2_0 block holds 64 weights as d * (q - 1), q = 0 .. 3. ggml's encoder takes d = max|x|,
which suits models that are ternary by training; on a normal distribution it leaves 71 % of
the root mean square as error, and nothing but Q2_0 offers two bits for rows that are not a
multiple of 256. With d chosen by least squares the same format leaves 35 % (Q2_K: 30 %).
"""

import numpy as np
import numpy.typing as npt

from gguf_tools.file.layout import BLOCK, GGMLType

ROUNDS = 2


def encode_q2_0(
    values: npt.NDArray[np.float32], importance: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.uint8]:
    """Encoded bytes [rows * n / 64 * 18] of float32 rows [rows, n], n % 64 == 0.

    Magnitudes must be in the range of half precision. importance: positive weights of the
    columns' squared errors [n].

    For given codes c = q - 1 the best scale is d = <x, c> / <c, c>, and it explains
    <x, c>^2 / <c, c> of |x|^2, with <a, b> = sum_j importance_j a_j b_j. Codes start from d = rms
    and d = -rms (the codes reach further on one side), are recomputed from the best d, and the
    better end is kept.
    """
    block, block_bytes = BLOCK[GGMLType.Q2_0]
    x = values.reshape(-1, block)
    if importance is None:
        importance = np.ones(values.shape[1], np.float32)
    weight = np.broadcast_to(importance, values.shape).reshape(-1, block)
    rms = np.sqrt(np.average(np.square(x), axis=1, weights=weight)).astype(np.float32)
    best_gain = np.zeros(len(x), np.float32)
    best_scale = np.zeros(len(x), np.float32)
    for start in (rms, -rms):
        scale = start
        for _ in range(ROUNDS):
            codes = _codes(x, scale)
            weighted = weight * codes
            dot = np.einsum("ij,ij->i", x, weighted)
            square = np.einsum("ij,ij->i", codes, weighted)
            square = np.where(square == 0, 1, square).astype(np.float32)
            gain = dot * dot / square
            better = gain > best_gain
            scale = dot / square
            best_gain = np.where(better, gain, best_gain)
            best_scale = np.where(better, scale, best_scale)
    half = best_scale.astype(np.float16)
    packed = (_codes(x, half.astype(np.float32)) + 1).astype(np.uint8).reshape(-1, block // 4, 4)
    blocks = np.empty((len(x), block_bytes), np.uint8)
    blocks[:, :2] = half.view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = np.bitwise_or.reduce(packed << np.array([0, 2, 4, 6], np.uint8), axis=2)
    return blocks.reshape(-1)


def _codes(x: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Nearest codes -1 .. 2 of each weight; 0 where the scale is 0."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(np.rint(x * inverse[:, None]), -1, 2)
