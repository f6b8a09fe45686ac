"""A folder of hostile files: each is refused with its own named error, at once, with
hardly any memory, and with a message that says where to look. So is every cut of a sound file, and
every flip of a header's bytes that leaves none: random damage is in tests/fuzz."""

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
ARRAY = struct.pack("<I", ValueType.ARRAY)


def nested(depth):
    """One-element arrays inside arrays, ``depth`` deep, with no end of their own."""
    return struct.pack("<IQ", ValueType.ARRAY, 1) * depth


def array(kind, n):
    return ARRAY + struct.pack("<IQ", kind, n)


GOOD_TENSOR = tensor("a", (32,))
# error: name: (bytes, what the message must say beside the file)
HEADERS = {
    errors.TruncatedError: {
        "empty": (b"", "empty"),
        "one-byte": (b"G", "offset 0"),
        "header-cut": (craft()[:20], "header"),
        "tensor-list-cut": (
            craft(tensors=[tensor("n" * 60), GOOD_TENSOR], align=1)[:-9],
            "tensor a: the file ends here: 4 bytes needed, 3 left",
        ),
    },
    errors.MagicError: {
        "magic": (craft(magic=b"GGML"), "b'GGML'"),
        "pickle": (b"\x80\x04\x95rest", "not a GGUF file"),
        "lfs": (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "a pointer of Git LFS, not the model: fetch that with `git lfs pull`",
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
            craft([struct.pack("<Q", 100) + b"k" * 20], align=1),
            "entry 0: a string of 100 bytes cannot fit in the 20",
        ),
        "key-length-huge": (
            craft([struct.pack("<Q", HUGE) + b"k" * 64]),
            f"string of {HUGE} bytes",
        ),
        "value-length": (
            craft([text("k") + struct.pack("<IQ", ValueType.STRING, 1 << 40)]),
            "key k",
        ),
        "array-count": (
            craft([text("k") + array(ValueType.UINT8, HUGE)]),
            f"array of {HUGE} values",
        ),
        "array-count-overflow": (craft([text("k") + array(ValueType.UINT64, 1 << 61)]), "key k"),
        "array-strings": (
            craft([text("k") + array(ValueType.STRING, 1 << 50) + b"\0" * 64]),
            "key k",
        ),
        "array-cut": (
            craft(
                [text("k") + array(ValueType.STRING, 2) + text("a") + b"\5" + b"\0" * 9], align=1
            ),
            "key k: a string of 5 bytes cannot fit in the 2",
        ),
        "array-wide": (
            craft([text("k") + array(ValueType.ARRAY, 1 << 40) + b"\0" * 640]),
            "cannot fit",
        ),
        "name-length": (craft(tensors=[struct.pack("<Q", 1 << 62) + b"\0" * 64]), "tensor 0"),
    },
    errors.TextError: {
        "kv-count-plausible": (
            craft(n_kv=3, tensors=[b"\0" * 64]),
            "metadata entry 1: empty key (at offset 72)",
        ),
        "key-empty": (craft([kv("", 1)]), "empty key"),
        "key-utf8": (craft([text(b"\xff\xfe") + b"\0" * 16]), "UTF-8"),
        "value-utf8": (
            craft([text("k") + struct.pack("<I", ValueType.STRING) + text(b"ok\xc3\x28")]),
            "key k: not valid UTF-8",
        ),
        "tensor-list-short": (
            craft(tensors=[GOOD_TENSOR + b"\0" * 40], n_tensors=2),
            "tensor 1: empty tensor name",
        ),
        "name-empty": (craft(tensors=[tensor("")]), "empty tensor name"),
        "name-long": (craft(tensors=[tensor("n" * 64)]), "64 bytes"),
        "name-utf8": (craft(tensors=[tensor(b"\xe0\x80")]), "tensor 0"),
    },
    errors.DuplicateError: {
        "key-twice": (craft([ARCH, ARCH]), "key general.architecture"),
        "name-twice": (
            craft(tensors=[GOOD_TENSOR, tensor("a", (32,), 0, 128)], data=b"\0" * 256),
            "tensor a",
        ),
    },
    errors.MetadataError: {
        "value-type": (
            craft([text("k") + struct.pack("<I", 13) + b"\0" * 8]),
            "key k: unknown metadata value type 13",
        ),
        "value-bool": (
            craft([text("k") + struct.pack("<IB", ValueType.BOOL, 2)]),
            "boolean value 2",
        ),
        "array-type": (craft([text("k") + array(77, 0)]), "type 77"),
        "array-bool": (
            craft([text("k") + array(ValueType.BOOL, 3) + b"\0\1\7"]),
            "boolean value 7",
        ),
        "alignment-0": (craft([kv("general.alignment", 0, U32)]), "not a power of two"),
        "alignment-33": (craft([kv("general.alignment", 33, U32)]), "33"),
        "alignment-text": (craft([kv("general.alignment", "32")]), "uint32"),
    },
    errors.NestingError: {
        "array-cycle": (
            craft([text("k") + ARRAY + nested(1000) + struct.pack("<IQ", 0, 0)]),
            "nested more than",
        ),
        "array-cycle-no-end": (craft([text("k") + ARRAY + nested(50)]), "key k"),
    },
    errors.TensorBoundsError: {
        "alignment-huge": (
            craft([kv("general.alignment", 1 << 31, U32)], [GOOD_TENSOR], b"\0" * 128),
            "tensor a",
        ),
        "data-missing": (craft(tensors=[GOOD_TENSOR]), "128 bytes"),
        "data-cut": (craft(tensors=[GOOD_TENSOR], data=b"\0" * 127), "tensor a: offset"),
        "offset-past-end": (
            craft(tensors=[tensor("a", offset=1 << 40)], data=b"\0" * 128),
            "past the end",
        ),
        "offset-wraps": (
            craft(tensors=[tensor("a", offset=HUGE - 31)], data=b"\0" * 128),
            "tensor a",
        ),
        "size-beyond-file": (
            craft(tensors=[tensor("a", (1 << 40,))], data=b"\0" * 64),
            f"{1 << 42} bytes",
        ),
    },
    errors.TensorShapeError: {
        "dims-0": (craft(tensors=[tensor("a", (), n_dims=0) + b"\0" * 8]), "0 dim"),
        "dims-5": (craft(tensors=[tensor("a", (1, 1, 1, 1, 1))]), "5 dimensions"),
        "dims-huge": (craft(tensors=[tensor("a", (32,), n_dims=0xFFFFFFFF)]), "tensor a"),
        "dim-0": (craft(tensors=[tensor("a", (32, 0))]), "[32, 0]"),
        "dim-overflow": (craft(tensors=[tensor("a", (1 << 32, 1 << 32))]), "impossible shape"),
        "dim-negative": (craft(tensors=[tensor("a", (HUGE,))]), str(HUGE)),
        "dim-wraps-to-small": (
            craft(tensors=[tensor("a", (1 << 33, 1 << 31, 2))], data=b"\0" * 64),
            "tensor a",
        ),
        "row-not-a-block": (
            craft(tensors=[tensor("a", (32, 2), GGMLType.Q4_K)]),
            "256, the block of q4_k",
        ),
    },
    errors.TensorTypeError: {
        "type-unknown": (craft(tensors=[tensor("a", ggml_type=999)]), "999"),
        "type-removed": (craft(tensors=[tensor("a", ggml_type=4)]), "type 4"),
        "type-negative": (craft(tensors=[tensor("a", ggml_type=0xFFFFFFFF)]), "tensor a"),
    },
    errors.TensorOffsetError: {
        "offset-misaligned": (
            craft(tensors=[tensor("a", offset=4)], data=b"\0" * 256),
            "not a multiple of the alignment 32",
        ),
        "offset-of-gguf-split": (
            craft(
                [kv("general.alignment", 64, U32), kv("split.count", 2, U32)],
                [GOOD_TENSOR, tensor("b", offset=32)],
                b"\0" * 256,
            ),
            "split the model before it is packed",
        ),
    },
    errors.TensorOverlapError: {
        "overlap": (
            craft(tensors=[GOOD_TENSOR, tensor("b", (32,), 0, 96)], data=b"\0" * 512),
            "lies inside tensor a",
        ),
        "overlap-same": (
            craft(tensors=[GOOD_TENSOR, tensor("b", (32,), 0, 0)], data=b"\0" * 512),
            "tensor b",
        ),
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
