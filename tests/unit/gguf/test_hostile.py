"""Malicious files. Each is refused at once, with little memory, by a specific error whose message
says where the problem is.

All truncations of a good file and many flipped header bytes are tested too. Random damage is tested
in tests/fuzz.
"""

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf_craft import ARCH, U32, craft, kv, tensor, text, write_packed

from gguf_tools import errors
from gguf_tools.file.layout import GGMLType, ValueType
from gguf_tools.file.reader import GGUFFile

HUGE = (1 << 64) - 1
A, NAMELESS = tensor("a"), b"\0" * 64
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
U64 = struct.Struct("<Q").pack


def value(kind, rest=b"", **changes):
    """A file with one metadata value "k": the number of its type, and raw bytes."""
    return craft([text("k") + struct.pack("<I", kind) + rest], **changes)


def array(kind, n, rest=b"", **changes):
    return value(ValueType.ARRAY, struct.pack("<IQ", kind, n) + rest, **changes)


def nested(depth):
    """One-element arrays inside arrays, `depth` levels deep, without an end."""
    return value(ValueType.ARRAY, struct.pack("<IQ", ValueType.ARRAY, 1) * depth)


def of(*tensors, n_bytes=0, **changes):
    """A file with tensors only and n_bytes of data."""
    return craft(tensors=tensors, data=bytes(n_bytes), **changes)


def aligned(alignment, kind=U32):
    return kv("general.alignment", alignment, kind)


# error: {name: (bytes, part of the message after the file name)}
HEADERS = {
    errors.TruncatedError: {
        "empty": (b"", "empty"),
        "one-byte": (b"G", "offset 0"),
        "header-cut": (craft()[:20], "header"),
        "tensor-list-cut": (
            of(tensor("n" * 60), A, align=1)[:-9],
            "tensor a: the file ends here: 4 bytes needed, 3 left",
        ),
    },
    errors.MagicError: {
        "magic": (craft(magic=b"GGML"), "b'GGML'"),
        "pickle": (b"\x80\x04\x95rest", "not a GGUF file"),
        "lfs": (
            LFS,
            "this is a Git LFS pointer, not the model: run `git lfs pull` to fetch the model",
        ),
    },
    errors.VersionError: {
        "version-0": (craft(version=0), "version 0"),
        "version-1": (craft(version=1), "version 1"),
        "version-4": (craft(version=4), "offset 4"),
        "big-endian": (craft(version=3 << 24), "big-endian"),
    },
    errors.CountError: {
        "tensor-count": (craft(n_tensors=HUGE), f"{HUGE} tensors"),
        "kv-count": (craft(n_kv=HUGE), f"{HUGE} metadata entries"),
        "kv-cut": (craft()[:32], "1 metadata entries cannot fit in the 8 bytes"),
        "key-length": (
            craft([U64(100) + b"k" * 20], align=1),
            "entry 0: a string of 100 bytes cannot fit in the 20",
        ),
        "key-length-huge": (craft([U64(HUGE) + b"k" * 64]), f"string of {HUGE} bytes"),
        "value-length": (value(ValueType.STRING, U64(1 << 40)), "key k"),
        "array-count": (array(ValueType.UINT8, HUGE), f"array of {HUGE} values"),
        "array-count-overflow": (array(ValueType.UINT64, 1 << 61), "key k"),
        "array-strings": (array(ValueType.STRING, 1 << 50, NAMELESS), "key k"),
        "array-cut": (
            array(ValueType.STRING, 2, text("a") + b"\5" + b"\0" * 9, align=1),
            "key k: a string of 5 bytes cannot fit in the 2",
        ),
        "array-wide": (array(ValueType.ARRAY, 1 << 40, b"\0" * 640), "cannot fit"),
        "name-length": (of(U64(1 << 62) + NAMELESS), "tensor 0"),
    },
    errors.TextError: {
        "kv-count-plausible": (of(NAMELESS, n_kv=3), "metadata entry 1: empty key (at offset 72)"),
        "key-empty": (craft([kv("", 1)]), "empty key"),
        "key-control": (
            craft([kv("a\n\x1b[31m", 1)]),
            "entry 0: key 'a\\n\\x1b[31m' has control characters (at offset 24)",
        ),
        "name-control": (
            of(tensor("a\u202eb")),
            "tensor 0: tensor name 'a\\u202eb' has control characters",
        ),
        "key-utf8": (craft([text(b"\xff\xfe") + b"\0" * 16]), "UTF-8"),
        "value-utf8": (value(ValueType.STRING, text(b"ok\xc3\x28")), "key k: not valid UTF-8"),
        "tensor-list-short": (of(A + b"\0" * 40, n_tensors=2), "tensor 1: empty tensor name"),
        "name-empty": (of(tensor("")), "empty tensor name"),
        "name-long": (of(tensor("n" * 64)), "64 bytes"),
        "name-utf8": (of(tensor(b"\xe0\x80")), "tensor 0"),
    },
    errors.DuplicateError: {
        "key-twice": (craft([ARCH, ARCH]), "key general.architecture"),
        "name-twice": (of(A, tensor("a", offset=128), n_bytes=256), "tensor a"),
    },
    errors.MetadataError: {
        "value-type": (value(13, b"\0" * 8), "key k: unknown metadata value type 13"),
        "value-bool": (value(ValueType.BOOL, b"\2"), "boolean value 2"),
        "array-type": (array(77, 0), "type 77"),
        "array-bool": (array(ValueType.BOOL, 3, b"\0\1\7"), "boolean value 7"),
        "alignment-0": (craft([aligned(0)]), "not a power of two"),
        "alignment-33": (craft([aligned(33)]), "33"),
        "alignment-text": (craft([aligned("32", None)]), "uint32"),
    },
    errors.NestingError: {
        "array-cycle": (nested(1000), "nested more than"),
        "array-cycle-no-end": (nested(50), "key k"),
    },
    errors.TensorBoundsError: {
        "alignment-huge": (craft([aligned(1 << 31)], [A], b"\0" * 128), "tensor a"),
        "data-missing": (of(A), "128 bytes"),
        "data-cut": (of(A, n_bytes=127), "tensor a: offset"),
        "offset-past-end": (of(tensor("a", offset=1 << 40), n_bytes=128), "past the end"),
        "offset-wraps": (of(tensor("a", offset=HUGE - 31), n_bytes=128), "tensor a"),
        "size-beyond-file": (of(tensor("a", (1 << 40,)), n_bytes=64), f"{1 << 42} bytes"),
    },
    errors.TensorShapeError: {
        "dims-0": (of(tensor("a", (), n_dims=0) + b"\0" * 8), "0 dim"),
        "dims-5": (of(tensor("a", (1, 1, 1, 1, 1))), "5 dimensions"),
        "dims-huge": (of(tensor("a", n_dims=0xFFFFFFFF)), "tensor a"),
        "dim-0": (of(tensor("a", (32, 0))), "[32, 0]"),
        "dim-overflow": (of(tensor("a", (1 << 32, 1 << 32))), "impossible shape"),
        "dim-negative": (of(tensor("a", (HUGE,))), str(HUGE)),
        "dim-wraps-to-small": (of(tensor("a", (1 << 33, 1 << 31, 2)), n_bytes=64), "tensor a"),
        "row-not-a-block": (of(tensor("a", (32, 2), GGMLType.Q4_K)), "256, the block size of q4_k"),
    },
    errors.TensorTypeError: {
        "type-unknown": (of(tensor("a", ggml_type=999)), "999"),
        "type-removed": (of(tensor("a", ggml_type=4)), "type 4"),
        "type-negative": (of(tensor("a", ggml_type=0xFFFFFFFF)), "tensor a"),
    },
    errors.TensorOffsetError: {
        "misaligned": (
            of(tensor("a", offset=4), n_bytes=256),
            "not a multiple of the alignment 32",
        ),
        "offset-of-gguf-split": (
            craft(
                [aligned(64), kv("split.count", 2, U32)], [A, tensor("b", offset=32)], bytes(256)
            ),
            "split the model first, then pack it",
        ),
    },
    errors.TensorOverlapError: {
        "overlap": (of(A, tensor("b", offset=96), n_bytes=512), "overlaps tensor a"),
        "overlap-same": (of(A, tensor("b"), n_bytes=512), "tensor b"),
    },
}


@pytest.mark.parametrize(
    ("name", "error"), [(name, error) for error, named in HEADERS.items() for name in named]
)
def test_hostile_header(name, error, tmp_path):
    data, says = HEADERS[error][name]
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started_s = time.process_time()
    try:
        with pytest.raises(error) as caught:
            GGUFFile.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)
    assert peak < 1 << 20
    assert time.process_time() - started_s < 5


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_packed(tmp_path_factory.mktemp("fuzz") / "packed.gguf").read_bytes()


def test_every_truncation_is_refused(packed):
    end = GGUFFile(Path("whole.gguf"), packed)
    last = max(info.offset + info.nbytes for info in end.tensors.values())
    stops = [*range(1, end.data_offset), end.data_offset, last - 4097, last - 1]
    for stop in stops:
        with pytest.raises(errors.GGUFError, match=r"^cut\.gguf: "):
            GGUFFile(Path("cut.gguf"), packed[:stop])
    assert len(GGUFFile(Path("cut.gguf"), packed[:last]).tensors) == len(end.tensors)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_header_byte(packed, mask):
    refused = 0
    for at in range(GGUFFile(Path("whole.gguf"), packed).data_offset):
        data = bytearray(packed)
        data[at] ^= mask
        try:
            GGUFFile(Path("flip.gguf"), bytes(data))
        except errors.GGUFError as error:
            assert str(error).startswith("flip.gguf: ")
            refused += 1
    assert refused > 100
