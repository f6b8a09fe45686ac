"""ctypes bindings of ggml's quantization functions.

Results are byte-identical to llama.cpp's, except for Q2_0 (see `gguf_tools.quantize.q2_0`). The
library is libggml-base of the built llama.cpp. ctypes releases the global interpreter lock during a
call, so threads can quantize in parallel.
"""

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools import built
from gguf_tools.errors import QuantizeError
from gguf_tools.file.layout import BLOCK, IMPORTANCE_TYPES, TIER_TYPES, GGMLType, row_bytes
from gguf_tools.quantize.q2_0 import encode_q2_0
from gguf_tools.quantize.tiers import unusable_tier

Floats = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.uint8]

# The first version with Q1_0 and Q2_0. Older versions abort the process on these types.
MIN_VERSION = (0, 25)
_HALF_MAX = 65504.0
# Minimum importance of a column, as a share of the mean. ggml's quantizers write zeros for a block
# whose columns all have importance 0.
_LEAST_IMPORTANCE = 1e-6
# Types whose range exceeds half precision.
_WIDE = (GGMLType.F32, GGMLType.BF16)
# File names of the library. libgmoe-base.so is its name in moe-edge's wheel.
_NAMES = ("libggml-base.so", "libgmoe-base.so", "libggml-base.dylib", "ggml-base.dll")


class _TypeTraits(ctypes.Structure):
    """The fields of struct ggml_type_traits in ggml.h."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    ]


_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Ggml:
    """The library libggml-base, whose version and block sizes have been checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            library = ctypes.CDLL(str(path))
            library.ggml_version.restype = ctypes.c_char_p
            self.version = str(library.ggml_version() or b"", "ascii", "replace")
            self._traits = library.ggml_get_type_traits
            self._quantize = library.ggml_quantize_chunk
            self._validate = library.ggml_validate_row_data
        except (OSError, AttributeError) as error:
            raise QuantizeError(f"{path}: not a usable libggml-base: {error}") from error
        found = re.match(r"(\d+)\.(\d+)", self.version)
        if found is None or (int(found[1]), int(found[2])) < MIN_VERSION:
            raise QuantizeError(
                f"{path}: ggml {self.version or 'of unknown version'} is not supported, the minimum"
                f" is {MIN_VERSION[0]}.{MIN_VERSION[1]}: {built.advice()}"
            )
        self._traits.argtypes = [ctypes.c_int]
        self._traits.restype = ctypes.POINTER(_TypeTraits)
        self._quantize.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        self._quantize.restype = ctypes.c_size_t
        self._validate.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        self._validate.restype = ctypes.c_bool
        self._to_float: dict[GGMLType, Any] = {}
        for ggml_type, block in BLOCK.items():
            traits = self._traits(ggml_type).contents
            if (traits.blck_size, traits.type_size) != block:
                raise QuantizeError(
                    f"{path}: {ggml_type.tier_name} has blocks of {traits.blck_size} weights in"
                    f" {traits.type_size} bytes, expected {block.weights} weights in"
                    f" {block.bytes} bytes"
                )
            if traits.to_float:
                self._to_float[ggml_type] = _TO_FLOAT(traits.to_float)

    def dequantize(self, ggml_type: GGMLType, data: Blocks, n_per_row: int) -> Floats:
        """Decode quantized rows to float32 [rows, n_per_row].

        Raises QuantizeError if ggml cannot decode the type or the data is not whole rows.
        """
        n_rows, rest = divmod(data.nbytes, row_bytes(ggml_type, n_per_row))
        if rest:
            raise QuantizeError(
                f"{data.nbytes} bytes are not a whole number of rows of {n_per_row} weights"
            )
        if ggml_type is GGMLType.F32:
            return data.view(np.float32).reshape(n_rows, n_per_row)
        to_float = self._to_float.get(ggml_type)
        if to_float is None:
            raise QuantizeError(f"ggml cannot decode {ggml_type.tier_name}")
        data = np.ascontiguousarray(data)
        values = np.empty((n_rows, n_per_row), np.float32)
        to_float(data.ctypes.data, values.ctypes.data, values.size)
        return values

    def can_check(self, ggml_type: GGMLType) -> bool:
        """Return whether `is_valid` can validate data of this type.

        For types that ggml cannot validate, `is_valid` always returns False.
        """
        with native_stderr_hidden():
            return self.is_valid(ggml_type, np.zeros(BLOCK[ggml_type].bytes, np.uint8))

    def is_valid(self, ggml_type: GGMLType, blocks: Blocks) -> bool:
        """Return whether all values and scales in the given blocks are finite.

        ggml prints a line to stderr for an invalid block. Use `native_stderr_hidden` to hide it.
        """
        return bool(self._validate(ggml_type, blocks.ctypes.data, blocks.nbytes))

    def quantize(
        self, ggml_type: GGMLType, values: Floats, importance: Floats | None = None
    ) -> Blocks:
        """Quantize float32 rows [rows, n_per_row] and return the encoded bytes.

        importance: weights of the squared errors of the columns, float32 [n_per_row]. Only their
            ratios matter.

        Raises QuantizeError if the type needs an importance matrix or does not support the row
        length, or if a value is not finite or exceeds half precision. ggml itself would abort the
        process or write invalid blocks.
        """
        n_rows, n_per_row = values.shape
        usable = ggml_type in TIER_TYPES
        if not usable and (importance is None or ggml_type not in IMPORTANCE_TYPES):
            raise QuantizeError(unusable_tier(ggml_type.tier_name))
        if n_per_row % BLOCK[ggml_type].weights:
            raise QuantizeError(
                f"the row length {n_per_row} is not a multiple of {BLOCK[ggml_type].weights}, the"
                f" block size of {ggml_type.tier_name}"
            )
        largest = float(np.max(np.abs(values), initial=0))
        if not np.isfinite(largest):
            raise QuantizeError("a value is not finite")
        if largest > _HALF_MAX and ggml_type not in _WIDE:
            raise QuantizeError(
                f"a value of magnitude {largest:g} exceeds {_HALF_MAX:g}, the maximum of"
                f" {ggml_type.tier_name}"
            )
        values = np.ascontiguousarray(values, np.float32)
        if importance is not None:
            importance = _scaled(importance, n_per_row)
        if ggml_type is GGMLType.Q2_0:
            return encode_q2_0(values, importance)
        weights = None if importance is None else importance.ctypes.data
        blocks = np.empty(n_rows * row_bytes(ggml_type, n_per_row), np.uint8)
        written = self._quantize(
            ggml_type, values.ctypes.data, blocks.ctypes.data, 0, n_rows, n_per_row, weights
        )
        if written != blocks.nbytes:
            raise QuantizeError(
                f"{self.path}: {ggml_type.tier_name}: ggml wrote {written} bytes, expected"
                f" {blocks.nbytes}"
            )
        return blocks


def _scaled(importance: Floats, n_per_row: int) -> Floats:
    """Scale importance values to a mean between 1 and 2, and raise the smallest ones above zero.

    The factor is a power of two, so ggml's result is byte-identical to that of the original values.
    Raises QuantizeError if the shape is wrong or a value is negative or not finite.
    """
    mean = float(np.mean(importance, dtype=np.float64))
    if importance.shape != (n_per_row,) or not np.isfinite(mean) or np.min(importance) < 0:
        raise QuantizeError(f"the importance must be {n_per_row} finite, non-negative values")
    if mean == 0:
        return np.ones(n_per_row, np.float32)
    scale = 2.0 ** (1 - np.frexp(mean)[1])
    floor = mean * scale * _LEAST_IMPORTANCE
    scaled: Floats = np.maximum(importance.astype(np.float64) * scale, floor).astype(np.float32)
    return scaled


@contextmanager
def native_stderr_hidden() -> Iterator[None]:
    """Discard what C code prints to stderr during the block. Python's stderr is not affected.

    Does nothing if the C library does not export its stderr variable.
    """
    libc = ctypes.CDLL(None)
    try:
        stream = ctypes.c_void_p.in_dll(libc, "stderr")
        libc.fopen.restype = ctypes.c_void_p
        null = libc.fopen(os.devnull.encode(), b"w")
    except (ValueError, AttributeError):
        null = None
    if not null:
        yield
        return
    own, stream.value = stream.value, null
    try:
        yield
    finally:
        stream.value = own
        libc.fclose(ctypes.c_void_p(null))


def library_path() -> Path:
    """Return the path of the library libggml-base of the installed llama.cpp.

    Raises QuantizeError if the library is not installed.
    """
    try:
        folder = built.libraries()
    except built.NotBuilt as error:
        raise QuantizeError(
            f"the ggml library, a part of llama.cpp, is not available: {error}"
        ) from None
    for name in _NAMES:
        if (folder / name).exists():
            return folder / name
    raise QuantizeError(f"{folder}: no libggml-base in this folder: {built.advice()}")


@functools.lru_cache(maxsize=4)
def _load(path: Path) -> Ggml:
    return Ggml(path)


def load_ggml(path: Path | None = None) -> Ggml:
    """Return the ggml library, which is loaded at the first call.

    path: the library file. Default: that of the installed llama.cpp.
    Raises QuantizeError if the library is missing or incompatible.
    """
    return _load(library_path() if path is None else path)
