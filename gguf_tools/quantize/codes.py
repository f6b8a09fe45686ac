"""Read and write the codes of single weights inside a quantization block.

A block consists of scales and of one code per weight. This module knows which bits hold each code
(from ggml-common.h and the dequantize functions of ggml-quants.c). It obtains the value of a code
by letting ggml decode the block. IQ2 and IQ3 types are not supported, because they encode groups of
weights by a codebook.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gguf_tools.file.layout import BLOCK, GGMLType
from gguf_tools.quantize.ggml import Blocks, Floats

# Decodes the bytes of whole blocks to float32 values.
Decode = Callable[[Blocks], Floats]


class Plane(NamedTuple):
    """A range of bytes in a quantization block that holds some bits of each weight's code.

    A code is the integer that the block stores for a weight. For example, with start = 2, width = 4
    and group = 16, byte 2 holds code 0 in its low 4 bits and code 16 in its high 4 bits. Byte 3
    holds codes 1 and 17, and so on.

    start: index of the plane's first byte in the block.
    width: number of bits of each code that the plane holds.
    group: distance between the codes that share a byte.
    low: index of the first bit of each code that the plane holds. 0 is the code's lowest bit.
    """

    start: int
    width: int
    group: int
    low: int = 0


class Coding(NamedTuple):
    """How a ggml type stores the weights of a quantization block as small integers (codes).

    The block has a code for each weight, and scale factors. A weight is computed from its code:

    - If `scales` is empty, the weights for successive codes are equally spaced.
    - Otherwise, `scales` is a table of numbers that is the same for all blocks. The weight is
      scales[code - first], times a scale factor of the block.

    planes: the byte ranges of the block that hold the codes. Some types hold the low and the high
        bits of the codes in different planes.
    first, last: the smallest and the largest code in use.
    scales: the table, with one number for each code from `first` to `last`, or empty.
    flip: bit mask. The block stores `code XOR flip` instead of the code.
    """

    planes: tuple[Plane, ...]
    first: int
    last: int
    scales: tuple[int, ...] = ()
    flip: int = 0


# kvalues_iq4nl and kvalues_mxfp4 of ggml-common.h.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
CODINGS = {
    GGMLType.Q1_0: Coding((Plane(2, 1, 1),), 0, 1),
    GGMLType.Q2_0: Coding((Plane(2, 2, 1),), 0, 3),
    GGMLType.Q4_0: Coding((Plane(2, 4, 16),), 0, 15),
    GGMLType.Q4_1: Coding((Plane(4, 4, 16),), 0, 15),
    GGMLType.Q5_0: Coding((Plane(6, 4, 16), Plane(2, 1, 1, 4)), 0, 31),
    GGMLType.Q5_1: Coding((Plane(8, 4, 16), Plane(4, 1, 1, 4)), 0, 31),
    # Signed codes, of which ggml does not use -128.
    GGMLType.Q8_0: Coding((Plane(2, 8, 1),), 1, 255, flip=0x80),
    GGMLType.Q2_K: Coding((Plane(16, 2, 32),), 0, 3),
    GGMLType.Q3_K: Coding((Plane(32, 2, 32), Plane(0, 1, 32, 2)), 0, 7),
    GGMLType.Q4_K: Coding((Plane(16, 4, 32),), 0, 15),
    GGMLType.Q5_K: Coding((Plane(48, 4, 32), Plane(16, 1, 32, 4)), 0, 31),
    GGMLType.Q6_K: Coding((Plane(0, 4, 64), Plane(128, 2, 32, 4)), 0, 63),
    GGMLType.IQ4_NL: Coding((Plane(2, 4, 16),), 0, 15, _IQ4),
    GGMLType.IQ4_XS: Coding((Plane(8, 4, 16),), 0, 15, _IQ4),
    GGMLType.MXFP4: Coding((Plane(1, 4, 16),), 0, 15, _FP4),
}


def put_codes(ggml_type: GGMLType, blocks: Blocks, codes: Blocks) -> None:
    """Replace the codes in quantized blocks, and keep the scales.

    A code is the small integer that a block stores for a weight.

    blocks: uint8 [number of blocks, bytes per block], modified in place.
    codes: the new codes, uint8 [number of blocks, weights per block].
    """
    coding = CODINGS[ggml_type]
    codes = codes ^ np.uint8(coding.flip)
    for start, width, group, low in coding.planes:
        per_byte = 8 // width
        n_bytes = codes.shape[1] // per_byte
        field = ((codes >> np.uint8(low)) & np.uint8((1 << width) - 1)).reshape(
            len(codes), -1, per_byte, group
        )
        packed = np.zeros((len(codes), n_bytes), np.uint8)
        for place in range(per_byte):
            packed |= (field[:, :, place] << np.uint8(width * place)).reshape(len(codes), -1)
        blocks[:, start : start + n_bytes] = packed


def code_values(ggml_type: GGMLType, blocks: Blocks, decode: Decode) -> Floats:
    """Return one or two numbers for each weight, from which its value for any code is computed.

    A code is the small integer that a block stores for a weight. The value also depends on the
    scale factors in the block. `first`, `last` and `scales` are fields of CODINGS[ggml_type]:

    - If `scales` is empty: two numbers, the weight's values for the codes `first` and `last`. The
      values for the codes between them are equally spaced.
    - Otherwise: one number s. The weight's value for a code is s * scales[code - first].

    blocks: uint8 [number of blocks, bytes per block]. The codes in them are ignored.
    decode: function that decodes the bytes of blocks to float32 weights.

    Returns float32 [2 or 1, number of blocks, weights per block].
    """
    coding = CODINGS[ggml_type]
    weights = BLOCK[ggml_type].weights
    if coding.scales:
        wanted = [coding.first + coding.scales.index(1)]
    else:
        wanted = [coding.first, coding.last]
    trial = blocks.copy()
    values = np.empty((len(wanted), len(blocks), weights), np.float32)
    for index, code in enumerate(wanted):
        put_codes(ggml_type, trial, np.full((len(blocks), weights), code, np.uint8))
        values[index] = decode(trial.reshape(-1)).reshape(len(blocks), weights)
    return values
