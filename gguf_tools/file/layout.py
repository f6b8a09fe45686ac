"""Constants of the GGUF format and of packed files: names, types and sizes.

Sources: the GGUF specification (ggml/docs/gguf.md) and the block structs of ggml 0.25.3
(ggml-common.h). `gguf_tools.quantize.ggml` compares the block sizes with the ggml library when it
loads the library.
"""

import math
import re
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"GGUF"
VERSION = 3
READABLE_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
EXPERT_ALIGNMENT = 4096
MAX_DIMS = 4
MAX_NAME_BYTES = 63
MAX_TIERS = 5
IO_BLOCK_BYTES = 4096

# Kinds of expert matrices. The index of a kind is its value in the native enum moe_edge_kind.
KINDS = ("up", "gate", "gate_up", "down")
UP, GATE, GATE_UP, DOWN = range(4)
# The order in which a graph computes the matrices.
COMPUTE_ORDER = (GATE_UP, GATE, UP, DOWN)

FORMAT_VERSION = 1
KEY_PREFIX = "moe_edge."
KEY_FORMAT_VERSION = "moe_edge.format_version"
KEY_TIERS = "moe_edge.tiers"
KEY_TIER_BPW = "moe_edge.tier_bpw"
KEY_QUANTIZATION = "moe_edge.quantization"
KEY_CALIBRATION = "moe_edge.calibration"
KEY_FALLBACKS = "moe_edge.fallbacks"
KEY_CHECKSUMS = "moe_edge.crc32"
TIER_MARK = ".moe_edge."
EMBEDDINGS = "token_embd.weight"
OUTPUT = "output.weight"  # missing if the model uses the embeddings as output matrix
# Embeddings per layer or n-gram. A graph reads only a few of its rows per token.
LOOKUP_TABLE = "per_layer_token_embd.weight"
# A layer's router: a matrix with one row per expert, or a table of expert indices per token ID.
ROUTER = "ffn_gate_inp.weight"
ROUTING_TABLE = "ffn_gate_tid2eid.weight"

KEY_ARCHITECTURE = "general.architecture"
KEY_ALIGNMENT = "general.alignment"
KEY_FILE_TYPE = "general.file_type"
KEY_QUANTIZATION_VERSION = "general.quantization_version"
KEY_SPLIT_NO = "split.no"
KEY_SPLIT_COUNT = "split.count"
KEY_SPLIT_TENSORS = "split.tensors.count"
QUANTIZATION_VERSION = 2


class ValueType(IntEnum):
    """Type tags of metadata values in a GGUF file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# The format character of the struct module for each metadata type of fixed size.
VALUE_FORMAT = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


class GGMLType(IntEnum):
    """The tensor types of ggml, with the numbers of ggml's enum ggml_type.

    The gaps in the numbers are types that ggml has removed.
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def tier_name(self) -> str:
        """The type's lower-case name, such as `q4_k`, by which users choose a precision (tier)."""
        return self.name.lower()


class BlockSize(NamedTuple):
    """Number of weights and number of bytes in one quantization block of a ggml type."""

    weights: int
    bytes: int


BLOCK = {
    GGMLType.F32: BlockSize(1, 4),
    GGMLType.F16: BlockSize(1, 2),
    GGMLType.Q4_0: BlockSize(32, 18),
    GGMLType.Q4_1: BlockSize(32, 20),
    GGMLType.Q5_0: BlockSize(32, 22),
    GGMLType.Q5_1: BlockSize(32, 24),
    GGMLType.Q8_0: BlockSize(32, 34),
    GGMLType.Q8_1: BlockSize(32, 36),
    GGMLType.Q2_K: BlockSize(256, 84),
    GGMLType.Q3_K: BlockSize(256, 110),
    GGMLType.Q4_K: BlockSize(256, 144),
    GGMLType.Q5_K: BlockSize(256, 176),
    GGMLType.Q6_K: BlockSize(256, 210),
    GGMLType.Q8_K: BlockSize(256, 292),
    GGMLType.IQ2_XXS: BlockSize(256, 66),
    GGMLType.IQ2_XS: BlockSize(256, 74),
    GGMLType.IQ3_XXS: BlockSize(256, 98),
    GGMLType.IQ1_S: BlockSize(256, 50),
    GGMLType.IQ4_NL: BlockSize(32, 18),
    GGMLType.IQ3_S: BlockSize(256, 110),
    GGMLType.IQ2_S: BlockSize(256, 82),
    GGMLType.IQ4_XS: BlockSize(256, 136),
    GGMLType.I8: BlockSize(1, 1),
    GGMLType.I16: BlockSize(1, 2),
    GGMLType.I32: BlockSize(1, 4),
    GGMLType.I64: BlockSize(1, 8),
    GGMLType.F64: BlockSize(1, 8),
    GGMLType.IQ1_M: BlockSize(256, 56),
    GGMLType.BF16: BlockSize(1, 2),
    GGMLType.TQ1_0: BlockSize(256, 54),
    GGMLType.TQ2_0: BlockSize(256, 66),
    GGMLType.MXFP4: BlockSize(32, 17),
    GGMLType.NVFP4: BlockSize(64, 36),
    GGMLType.Q1_0: BlockSize(128, 18),
    GGMLType.Q2_0: BlockSize(64, 18),
}

# Types that a tier can have without an importance matrix. TQ1_0 and TQ2_0 are left out because they
# only suit models that were trained with ternary weights.
TIER_TYPES = (
    GGMLType.F32,
    GGMLType.F16,
    GGMLType.BF16,
    GGMLType.Q8_0,
    GGMLType.Q6_K,
    GGMLType.Q5_K,
    GGMLType.Q5_1,
    GGMLType.Q5_0,
    GGMLType.Q4_K,
    GGMLType.Q4_1,
    GGMLType.Q4_0,
    GGMLType.IQ4_NL,
    GGMLType.IQ4_XS,
    GGMLType.MXFP4,
    GGMLType.Q3_K,
    GGMLType.IQ3_S,
    GGMLType.IQ3_XXS,
    GGMLType.IQ2_S,
    GGMLType.Q2_K,
    GGMLType.Q2_0,
    GGMLType.Q1_0,
)

# Types that require an importance matrix. ggml accepts IQ1_M without one, but the result is no
# better than Q1_0, which is smaller and much faster to quantize.
IMPORTANCE_TYPES = (
    GGMLType.IQ2_XS,
    GGMLType.IQ2_XXS,
    GGMLType.IQ1_M,
    GGMLType.IQ1_S,
)

# Replacements for a type whose block does not divide the row length, the nearest size first. Q2_0
# also has two bits per weight, but blocks of 64. IQ4_NL has the size of Q4_0 and a smaller error.
FALLBACK = {
    GGMLType.Q6_K: (GGMLType.Q8_0,),
    GGMLType.Q5_K: (GGMLType.Q5_1,),
    GGMLType.Q4_K: (GGMLType.IQ4_NL,),
    GGMLType.IQ4_XS: (GGMLType.IQ4_NL,),
    GGMLType.Q3_K: (GGMLType.IQ4_NL,),
    GGMLType.IQ3_S: (GGMLType.IQ4_NL,),
    GGMLType.IQ3_XXS: (GGMLType.IQ4_NL,),
    GGMLType.IQ2_S: (GGMLType.Q2_0, GGMLType.IQ4_NL),
    GGMLType.Q2_K: (GGMLType.Q2_0, GGMLType.IQ4_NL),
    GGMLType.IQ2_XS: (GGMLType.Q2_0, GGMLType.IQ4_NL),
    GGMLType.IQ2_XXS: (GGMLType.Q2_0, GGMLType.IQ4_NL),
    GGMLType.IQ1_M: (GGMLType.Q1_0, GGMLType.Q2_0, GGMLType.IQ4_NL),
    GGMLType.IQ1_S: (GGMLType.Q1_0, GGMLType.Q2_0, GGMLType.IQ4_NL),
    GGMLType.Q1_0: (GGMLType.Q2_0, GGMLType.IQ4_NL),
    GGMLType.Q2_0: (GGMLType.IQ4_NL,),
}

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)

# The llama_ftype of a model whose matrices are mostly of one type.
FILE_TYPE = {
    GGMLType.F32: 0,
    GGMLType.F16: 1,
    GGMLType.Q4_0: 2,
    GGMLType.Q4_1: 3,
    GGMLType.Q8_0: 7,
    GGMLType.Q5_0: 8,
    GGMLType.Q5_1: 9,
    GGMLType.Q2_K: 10,
    GGMLType.Q3_K: 11,
    GGMLType.Q4_K: 14,
    GGMLType.Q5_K: 16,
    GGMLType.Q6_K: 18,
    GGMLType.IQ2_XXS: 19,
    GGMLType.IQ2_XS: 20,
    GGMLType.IQ3_XXS: 23,
    GGMLType.IQ1_S: 24,
    GGMLType.IQ4_NL: 25,
    GGMLType.IQ3_S: 26,
    GGMLType.IQ2_S: 28,
    GGMLType.IQ4_XS: 30,
    GGMLType.IQ1_M: 31,
    GGMLType.BF16: 32,
    GGMLType.TQ1_0: 36,
    GGMLType.TQ2_0: 37,
    GGMLType.MXFP4: 38,
    GGMLType.NVFP4: 39,
    GGMLType.Q1_0: 40,
    GGMLType.Q2_0: 41,
}

_EXPERT_NAME = re.compile(
    r"blk\.(0|[1-9][0-9]{0,8})\.ffn_(up|gate|gate_up|down)_exps\.weight(?:\.moe_edge\.([a-z0-9_]+))?"
)
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\..*", re.DOTALL)


class ExpertName(NamedTuple):
    """The parts of an expert tensor's name: layer number, matrix kind and precision (tier).

    The tier is None for the best precision, which the name does not contain.
    """

    il: int
    kind: int
    tier: str | None


def parse_expert_name(name: str) -> ExpertName | None:
    """Return the layer, kind and tier in an expert tensor's name. Return None for other tensors."""
    match = _EXPERT_NAME.fullmatch(name)
    if match is None:
        return None
    return ExpertName(int(match[1]), KINDS.index(match[2]), match[3])


def layer_of(name: str) -> int | None:
    """Return the layer number in a tensor's name, or None if the tensor belongs to no layer."""
    match = _LAYER_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def expert_tensor_name(il: int, kind: int, tier: str | None = None) -> str:
    """Return the name of a layer's expert tensor, such as `blk.0.ffn_up_exps.weight`.

    il: layer number.
    kind: kind of the matrix, an index into KINDS.
    tier: name of a lower precision, which is appended: `blk.0.ffn_up_exps.weight.moe_edge.q2_k`.
    """
    base = f"blk.{il}.ffn_{KINDS[kind]}_exps.weight"
    return base if tier is None else base + TIER_MARK + tier


def type_by_name(name: str) -> GGMLType | None:
    """Return the ggml type with a name such as `q4_k`, or None if there is no such type.

    Upper and lower case are equivalent.
    """
    return GGMLType.__members__.get(name.strip().upper())


def row_bytes(ggml_type: GGMLType, n: int) -> int:
    """Return the number of bytes of a matrix row of n weights in a ggml type.

    n must be a multiple of the type's block size.
    """
    block = BLOCK[ggml_type]
    return n // block.weights * block.bytes


def bits_per_weight(ggml_type: GGMLType) -> float:
    """Return the bits per weight of a ggml type, including the scales of its blocks."""
    block = BLOCK[ggml_type]
    return 8 * block.bytes / block.weights


def fitting_type(ggml_type: GGMLType, n: int) -> GGMLType:
    """Return the type in which rows of n weights are stored if `ggml_type` is requested.

    This is the requested type if its block size divides n. Otherwise it is the first suitable
    fallback of this type, or F16 if none is suitable.
    """
    for candidate in (ggml_type, *FALLBACK.get(ggml_type, (GGMLType.Q8_0,))):
        if n % BLOCK[candidate].weights == 0:
            return candidate
    return GGMLType.F16


def fallback_notes(kind: int, requested: GGMLType, n: int) -> list[str]:
    """Return a note for the user if rows of n weights cannot be stored in the requested type.

    Rows are stored in whole blocks, so n must be a multiple of the type's block size. The result is
    a list with one text, which names the matrix and the type used instead. If the rows fit the
    requested type, the list is empty.

    kind: kind of the expert matrix that has these rows, an index into KINDS.
    """
    found = fitting_type(requested, n)
    if found is requested:
        return []
    return [
        f"{KINDS[kind]}: {requested.tier_name} -> {found.tier_name} (rows of {n} are not a multiple"
        f" of {BLOCK[requested].weights})"
    ]


def pad(n: int, alignment: int) -> int:
    """Round n up to a multiple of alignment."""
    return -(-n // alignment) * alignment


def slot_bytes(offset: int, expert_bytes: int, n_expert: int = 1) -> int:
    """Return the bytes of a memory slot that can hold any of several experts' matrices.

    A matrix is read in whole 4096-byte blocks of the file (direct I/O). If it starts inside a
    block, it can need one block more than its size suggests. The result is the largest size that
    any matrix needs. For one matrix, the native function `moe_edge_slot_bytes` returns the same.

    offset: position of the first matrix in the file, in bytes.
    expert_bytes: size of one matrix.
    n_expert: number of matrices, which follow each other in the file.
    """
    period = IO_BLOCK_BYTES // math.gcd(IO_BLOCK_BYTES, expert_bytes)
    starts = ((offset + e * expert_bytes) % IO_BLOCK_BYTES for e in range(min(n_expert, period)))
    return pad(max(starts) + expert_bytes, IO_BLOCK_BYTES)


# CUDA kernels read rows of quantized weights up to the next multiple of this number of weights.
_DEVICE_ROW = 512
# Alignment in bytes of a slot pool in GPU memory, and of each slot of unquantized weights.
POOL_ALIGNMENT = 256


def device_slot_bytes(ggml_type: GGMLType, expert_bytes: int, row_length: int) -> int:
    """Return the size of a slot in GPU memory that holds one expert's matrix.

    Kernels may read some bytes past the end of the matrix. The slot includes these bytes, rounded
    up to whole blocks of the type. The native function `moe_edge_device_slot_bytes` returns the
    same size.

    expert_bytes: size of the matrix.
    row_length: number of weights in a row of the matrix.
    """
    block = BLOCK[ggml_type]
    if block.weights == 1:
        return pad(expert_bytes, POOL_ALIGNMENT)
    past = pad(-row_length % _DEVICE_ROW, block.weights)
    return expert_bytes + row_bytes(ggml_type, past)
