"""A folder of hostile files: each is refused with its own named error, at once, with
hardly any memory, and with a message that says where to look."""

import os
import re
import struct
import time
import tracemalloc

import pytest
from gguf_craft import (
    ARCH,
    N_EMBD,
    U32,
    craft,
    kv,
    model_metadata,
    model_tensors,
    packed_metadata,
    tensor,
    text,
    write_model,
)
from gguf_split import split

from gguf_tools import errors
from gguf_tools.experts import ExpertModel
from gguf_tools.layout import DOWN, GATE, GGMLType, ValueType, expert_tensor_name
from gguf_tools.reader import GGUFFile, open_model

HUGE = (1 << 64) - 1
ARRAY = struct.pack("<I", ValueType.ARRAY)


def nested(depth):
    """One-element arrays inside arrays, ``depth`` deep, with no end of their own."""
    return struct.pack("<IQ", ValueType.ARRAY, 1) * depth


def array(kind, n):
    return ARRAY + struct.pack("<IQ", kind, n)


GOOD_TENSOR = tensor("a", (32,))

# name: (bytes, error, what the message must say beside the file)
HEADERS = {
    "empty": (b"", errors.TruncatedError, "empty"),
    "one-byte": (b"G", errors.TruncatedError, "offset 0"),
    "magic": (craft(magic=b"GGML"), errors.MagicError, "b'GGML'"),
    "pickle": (b"\x80\x04\x95rest", errors.MagicError, "not a GGUF file"),
    "version-0": (craft(version=0), errors.VersionError, "version 0"),
    "version-1": (craft(version=1), errors.VersionError, "version 1"),
    "version-4": (craft(version=4), errors.VersionError, "offset 4"),
    "big-endian": (craft(version=3 << 24), errors.VersionError, "big-endian"),
    "header-cut": (craft()[:20], errors.TruncatedError, "header"),
    "tensor-count": (craft(n_tensors=HUGE), errors.CountError, f"{HUGE} tensors"),
    "kv-count": (craft(n_kv=HUGE), errors.CountError, f"{HUGE} metadata entries"),
    "kv-count-plausible": (
        craft(n_kv=3, tensors=[b"\0" * 64]),
        errors.TextError,
        "metadata entry 1: empty key (at offset 72)",
    ),
    "kv-cut": (craft()[:32], errors.CountError, "1 metadata entries cannot fit in the 8 bytes"),
    "key-length": (
        craft([struct.pack("<Q", 100) + b"k" * 20], align=1),
        errors.CountError,
        "entry 0: a string of 100 bytes cannot fit in the 20",
    ),
    "key-length-huge": (
        craft([struct.pack("<Q", HUGE) + b"k" * 64]),
        errors.CountError,
        f"string of {HUGE} bytes",
    ),
    "key-empty": (craft([kv("", 1)]), errors.TextError, "empty key"),
    "key-utf8": (craft([text(b"\xff\xfe") + b"\0" * 16]), errors.TextError, "UTF-8"),
    "key-twice": (craft([ARCH, ARCH]), errors.DuplicateError, "key general.architecture"),
    "value-type": (
        craft([text("k") + struct.pack("<I", 13) + b"\0" * 8]),
        errors.MetadataError,
        "key k: unknown metadata value type 13",
    ),
    "value-utf8": (
        craft([text("k") + struct.pack("<I", ValueType.STRING) + text(b"ok\xc3\x28")]),
        errors.TextError,
        "key k: not valid UTF-8",
    ),
    "value-length": (
        craft([text("k") + struct.pack("<IQ", ValueType.STRING, 1 << 40)]),
        errors.CountError,
        "key k",
    ),
    "value-bool": (
        craft([text("k") + struct.pack("<IB", ValueType.BOOL, 2)]),
        errors.MetadataError,
        "boolean value 2",
    ),
    "array-count": (
        craft([text("k") + array(ValueType.UINT8, HUGE)]),
        errors.CountError,
        f"array of {HUGE} values",
    ),
    "array-count-overflow": (
        craft([text("k") + array(ValueType.UINT64, 1 << 61)]),
        errors.CountError,
        "key k",
    ),
    "array-strings": (
        craft([text("k") + array(ValueType.STRING, 1 << 50) + b"\0" * 64]),
        errors.CountError,
        "key k",
    ),
    "array-type": (craft([text("k") + array(77, 0)]), errors.MetadataError, "type 77"),
    "array-cut": (
        craft([text("k") + array(ValueType.STRING, 2) + text("a") + b"\5" + b"\0" * 9], align=1),
        errors.CountError,
        "key k: a string of 5 bytes cannot fit in the 2",
    ),
    "array-bool": (
        craft([text("k") + array(ValueType.BOOL, 3) + b"\0\1\7"]),
        errors.MetadataError,
        "boolean value 7",
    ),
    "array-cycle": (
        craft([text("k") + ARRAY + nested(1000) + struct.pack("<IQ", 0, 0)]),
        errors.NestingError,
        "nested more than",
    ),
    "array-cycle-no-end": (craft([text("k") + ARRAY + nested(50)]), errors.NestingError, "key k"),
    "array-wide": (
        craft([text("k") + array(ValueType.ARRAY, 1 << 40) + b"\0" * 640]),
        errors.CountError,
        "cannot fit",
    ),
    "alignment-0": (
        craft([kv("general.alignment", 0, U32)]),
        errors.MetadataError,
        "not a power of two",
    ),
    "alignment-33": (craft([kv("general.alignment", 33, U32)]), errors.MetadataError, "33"),
    "alignment-text": (craft([kv("general.alignment", "32")]), errors.MetadataError, "uint32"),
    "alignment-huge": (
        craft([kv("general.alignment", 1 << 31, U32)], [GOOD_TENSOR], b"\0" * 128),
        errors.TensorBoundsError,
        "tensor a",
    ),
    "tensor-list-cut": (
        craft(tensors=[tensor("n" * 60), GOOD_TENSOR], align=1)[:-9],
        errors.TruncatedError,
        "tensor a: the file ends here: 4 bytes needed, 3 left",
    ),
    "tensor-list-short": (
        craft(tensors=[GOOD_TENSOR + b"\0" * 40], n_tensors=2),
        errors.TextError,
        "tensor 1: empty tensor name",
    ),
    "name-empty": (craft(tensors=[tensor("")]), errors.TextError, "empty tensor name"),
    "name-long": (craft(tensors=[tensor("n" * 64)]), errors.TextError, "64 bytes"),
    "name-utf8": (craft(tensors=[tensor(b"\xe0\x80")]), errors.TextError, "tensor 0"),
    "name-length": (
        craft(tensors=[struct.pack("<Q", 1 << 62) + b"\0" * 64]),
        errors.CountError,
        "tensor 0",
    ),
    "name-twice": (
        craft(tensors=[GOOD_TENSOR, tensor("a", (32,), 0, 128)], data=b"\0" * 256),
        errors.DuplicateError,
        "tensor a",
    ),
    "dims-0": (
        craft(tensors=[tensor("a", (), n_dims=0) + b"\0" * 8]),
        errors.TensorShapeError,
        "0 dim",
    ),
    "dims-5": (
        craft(tensors=[tensor("a", (1, 1, 1, 1, 1))]),
        errors.TensorShapeError,
        "5 dimensions",
    ),
    "dims-huge": (
        craft(tensors=[tensor("a", (32,), n_dims=0xFFFFFFFF)]),
        errors.TensorShapeError,
        "tensor a",
    ),
    "dim-0": (craft(tensors=[tensor("a", (32, 0))]), errors.TensorShapeError, "[32, 0]"),
    "dim-overflow": (
        craft(tensors=[tensor("a", (1 << 32, 1 << 32))]),
        errors.TensorShapeError,
        "impossible shape",
    ),
    "dim-negative": (craft(tensors=[tensor("a", (HUGE,))]), errors.TensorShapeError, str(HUGE)),
    "dim-wraps-to-small": (
        craft(tensors=[tensor("a", (1 << 33, 1 << 31, 2))], data=b"\0" * 64),
        errors.TensorShapeError,
        "tensor a",
    ),
    "row-not-a-block": (
        craft(tensors=[tensor("a", (32, 2), GGMLType.Q4_K)]),
        errors.TensorShapeError,
        "256, the block of q4_k",
    ),
    "type-unknown": (craft(tensors=[tensor("a", ggml_type=999)]), errors.TensorTypeError, "999"),
    "type-removed": (craft(tensors=[tensor("a", ggml_type=4)]), errors.TensorTypeError, "type 4"),
    "type-negative": (
        craft(tensors=[tensor("a", ggml_type=0xFFFFFFFF)]),
        errors.TensorTypeError,
        "tensor a",
    ),
    "data-missing": (craft(tensors=[GOOD_TENSOR]), errors.TensorBoundsError, "128 bytes"),
    "data-cut": (
        craft(tensors=[GOOD_TENSOR], data=b"\0" * 127),
        errors.TensorBoundsError,
        "tensor a: offset",
    ),
    "offset-past-end": (
        craft(tensors=[tensor("a", offset=1 << 40)], data=b"\0" * 128),
        errors.TensorBoundsError,
        "past the end",
    ),
    "offset-wraps": (
        craft(tensors=[tensor("a", offset=HUGE - 31)], data=b"\0" * 128),
        errors.TensorBoundsError,
        "tensor a",
    ),
    "offset-misaligned": (
        craft(tensors=[tensor("a", offset=4)], data=b"\0" * 256),
        errors.TensorOffsetError,
        "not a multiple of the alignment 32",
    ),
    "offset-of-gguf-split": (
        craft(
            [kv("general.alignment", 64, U32), kv("split.count", 2, U32)],
            [GOOD_TENSOR, tensor("b", offset=32)],
            b"\0" * 256,
        ),
        errors.TensorOffsetError,
        "split the model before it is packed",
    ),
    "overlap": (
        craft(tensors=[GOOD_TENSOR, tensor("b", (32,), 0, 96)], data=b"\0" * 512),
        errors.TensorOverlapError,
        "lies inside tensor a",
    ),
    "overlap-same": (
        craft(tensors=[GOOD_TENSOR, tensor("b", (32,), 0, 0)], data=b"\0" * 512),
        errors.TensorOverlapError,
        "tensor b",
    ),
    "size-beyond-file": (
        craft(tensors=[tensor("a", (1 << 40,))], data=b"\0" * 64),
        errors.TensorBoundsError,
        f"{1 << 42} bytes",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_header(name, tmp_path):
    data, error, says = HEADERS[name]
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


def without(tensors, name):
    return [each for each in tensors if each[0] != name]


def retyped(tensors, name, **changes):
    return [
        (each[0], changes.get("shape", each[1]), changes.get("type", each[2]))
        if each[0] == name
        else each
        for each in tensors
    ]


UP_1, DOWN_1 = expert_tensor_name(1, 0), expert_tensor_name(1, DOWN)
PACKED = model_tensors(tiers=("q8_0", "q4_0"), tier_types=(GGMLType.Q8_0, GGMLType.Q4_0))
LOW_1 = expert_tensor_name(1, DOWN, "q4_0")

# name: (tensors, metadata, error, what the message must say)
MODELS = {
    "no-architecture": (
        model_tensors(),
        {k: v for k, v in model_metadata().items() if k != "general.architecture"},
        errors.MissingKeyError,
        "general.architecture",
    ),
    "architecture-number": (
        model_tensors(),
        {**model_metadata(), "general.architecture": 7},
        errors.MetadataError,
        "general.architecture",
    ),
    "no-block-count": (
        model_tensors(),
        model_metadata(block_count=None),
        errors.MissingKeyError,
        "qwen3moe.block_count",
    ),
    "absurd-block-count": (
        model_tensors(),
        model_metadata(block_count=1 << 31),
        errors.MetadataError,
        "block_count",
    ),
    "no-embedding-length": (
        model_tensors(),
        model_metadata(embedding_length=None),
        errors.MissingKeyError,
        "embedding_length",
    ),
    "no-experts-used": (
        model_tensors(),
        model_metadata(expert_used_count=None),
        errors.MissingKeyError,
        "expert_used_count",
    ),
    "too-many-experts-used": (
        model_tensors(),
        model_metadata(expert_used_count=5),
        errors.MetadataError,
        "5 of 4",
    ),
    "negative-context": (
        model_tensors(),
        model_metadata(context_length=-1),
        errors.MetadataError,
        "context_length",
    ),
    "heads-text": (
        model_tensors(),
        model_metadata(head_count_kv="two"),
        errors.MetadataError,
        "head_count_kv",
    ),
    "heads-list-short": (
        model_tensors(layers=range(2)),
        model_metadata(head_count_kv=[2, 2, 2], block_count=4),
        errors.MetadataError,
        "expected 4 numbers",
    ),
    "dense": (
        [("token_embd.weight", (N_EMBD, 3), GGMLType.F32)],
        model_metadata(),
        errors.NotMoEError,
        "no expert tensors: not a Mixture-of-Experts model: llama.cpp itself runs it",
    ),
    "one-tensor-per-expert": (
        [("blk.0.ffn_gate.0.weight", (N_EMBD, 3), GGMLType.F32)],
        model_metadata(),
        errors.NotMoEError,
        "old layout",
    ),
    "no-up": (without(model_tensors(), UP_1), model_metadata(), errors.MissingTensorError, UP_1),
    "no-down": (
        without(model_tensors(), DOWN_1),
        model_metadata(),
        errors.MissingTensorError,
        DOWN_1,
    ),
    "gate-up-and-gate": (
        [*model_tensors(fused=True), (expert_tensor_name(1, GATE), (64, 32, 4), GGMLType.F16)],
        model_metadata(),
        errors.MissingTensorError,
        "unexpected matrices",
    ),
    "wrong-expert-count": (
        retyped(model_tensors(), DOWN_1, shape=(32, 64, 3)),
        model_metadata(),
        errors.TensorShapeError,
        "expected 4 experts",
    ),
    "experts-without-third-dimension": (
        retyped(model_tensors(), DOWN_1, shape=(32, 64)),
        model_metadata(),
        errors.TensorShapeError,
        DOWN_1,
    ),
    "wrong-rows": (
        retyped(model_tensors(), UP_1, shape=(64, 64, 4)),
        model_metadata(),
        errors.TensorShapeError,
        "beside the down matrix",
    ),
    "missing-tier": (
        without(PACKED, LOW_1),
        packed_metadata(),
        errors.MissingTierError,
        f"{LOW_1} is missing",
    ),
    "missing-tier-everywhere": (
        model_tensors(types={0: GGMLType.Q8_0, 1: GGMLType.Q8_0, 3: GGMLType.Q8_0}),
        packed_metadata(),
        errors.MissingTierError,
        "announces tier q4_0",
    ),
    "unannounced-tier": (
        PACKED,
        packed_metadata(tiers=("q8_0",)),
        errors.MissingTierError,
        "does not list q4_0",
    ),
    "tier-without-best": (
        [*PACKED, (expert_tensor_name(1, 2, "q4_0"), (64, 64, 4), GGMLType.Q4_0)],
        packed_metadata(),
        errors.MissingTensorError,
        "its best tier",
    ),
    "tier-shape": (
        retyped(PACKED, LOW_1, shape=(32, 64, 2)),
        packed_metadata(),
        errors.TensorShapeError,
        LOW_1,
    ),
    "tier-of-a-dense-tensor": (
        [*PACKED, ("token_embd.weight.moe_edge.q4_0", (64, 3), GGMLType.Q4_0)],
        packed_metadata(),
        errors.MetadataError,
        "token_embd.weight.moe_edge.q4_0",
    ),
    "tiers-worst-first": (
        model_tensors(tiers=("q4_0", "q8_0"), tier_types=(GGMLType.Q4_0, GGMLType.Q8_0)),
        packed_metadata(tiers=("q4_0", "q8_0")),
        errors.MetadataError,
        "best first",
    ),
    "tiers-twice": (
        PACKED,
        packed_metadata(tiers=("q4_0", "q4_0")),
        errors.MetadataError,
        "different",
    ),
    "tiers-six": (
        PACKED,
        packed_metadata(tiers=tuple("abcdef")),
        errors.MetadataError,
        "1 to 5",
    ),
    "tiers-numbers": (
        PACKED,
        {**packed_metadata(), "moe_edge.tiers": [8, 4]},
        errors.MetadataError,
        "moe_edge.tiers",
    ),
    "tiers-absent": (
        PACKED,
        {k: v for k, v in packed_metadata().items() if k != "moe_edge.tiers"},
        errors.MissingKeyError,
        "moe_edge.tiers",
    ),
    "format-absent": (
        PACKED,
        {k: v for k, v in packed_metadata().items() if k != "moe_edge.format_version"},
        errors.MissingKeyError,
        "moe_edge.format_version",
    ),
    "format-newer": (
        PACKED,
        {**packed_metadata(), "moe_edge.format_version": 2},
        errors.VersionError,
        "this version reads 1",
    ),
    "fallbacks-number": (
        PACKED,
        {**packed_metadata(), "moe_edge.fallbacks": 7},
        errors.MetadataError,
        "key moe_edge.fallbacks: unexpected value of type uint32",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_hostile_model(name, tmp_path):
    tensors, metadata, error, says = MODELS[name]
    path = write_model(tmp_path / f"{name}.gguf", tensors, metadata)
    with pytest.raises(error) as caught:
        ExpertModel.open(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_missing_file_folder_and_pipe(tmp_path):
    with pytest.raises(errors.FileAccessError, match="No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(errors.FileAccessError, match="directory"):
        GGUFFile.open(tmp_path)


def part(path, number, count, tensors, total):
    return write_model(
        path,
        tensors,
        model_metadata() if number == 0 else {"general.architecture": "qwen3moe"},
        extra=[
            ("split.no", number, ValueType.UINT16, None),
            ("split.count", count, ValueType.UINT16, None),
            ("split.tensors.count", total, ValueType.INT32, None),
        ],
    )


def split_paths(folder):
    return [folder / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]


def test_split_without_second_part(tmp_path):
    first, second = split_paths(tmp_path)
    part(first, 0, 2, model_tensors(), 9)
    with pytest.raises(errors.SplitError, match=f"{second.name}: part 2 of 2 is missing"):
        open_model(first)


def test_split_opened_at_second_part(tmp_path):
    _, second = split_paths(tmp_path)
    part(second, 1, 2, model_tensors(), 9)
    with pytest.raises(errors.SplitError, match="m-00001-of-00002"):
        open_model(second)


def test_split_with_a_wrong_name(tmp_path):
    part(tmp_path / "m.gguf", 0, 2, model_tensors(), 9)
    with pytest.raises(errors.SplitError, match="NAME-00001-of-00002"):
        open_model(tmp_path / "m.gguf")


def test_split_with_a_foreign_part(tmp_path):
    first, second = split_paths(tmp_path)
    half = model_tensors()
    part(first, 0, 2, half[:4], len(half))
    part(second, 0, 2, half[4:], len(half))
    with pytest.raises(errors.SplitError, match=r"split\.no"):
        open_model(first)


@pytest.mark.parametrize(
    ("start", "error", "says"),
    [(3, errors.DuplicateError, "m-00001-of-00002"), (5, errors.SplitError, "split.tensors.count")],
    ids=["a tensor in both", "missing tensors"],
)
def test_split_with_another_second_part(start, error, says, tmp_path):
    first, second = split_paths(tmp_path)
    half = model_tensors()
    part(first, 0, 2, half[:4], len(half))
    part(second, 1, 2, half[start:], len(half))
    with pytest.raises(error, match=re.escape(says)):
        open_model(first)


@pytest.fixture
def split_model(tmp_path):
    """Paths of a whole model in three parts as gguf-split leaves it."""
    return split(write_model(tmp_path / "whole.gguf"), tmp_path, 3)


def refused(path):
    with pytest.raises(errors.GGUFError) as caught:
        open_model(path)
    return str(caught.value)


def test_split_part_without_the_model_s_metadata_names_the_first(split_model):
    assert refused(split_model[2]) == (
        f"{split_model[2]}: part 3 of 3; open the first part, m-00001-of-00003.gguf"
    )


def test_split_parts_in_the_wrong_order(split_model):
    _, second, third = split_model
    second.rename(spare := second.with_name("spare"))
    third.rename(second)
    spare.rename(third)
    assert refused(split_model[0]) == f"{second}: key split.no: 2, expected 1"


def test_split_first_part_under_another_s_name(split_model):
    first, second, _ = split_model
    first.replace(second)
    assert refused(second).startswith(f"{second}: named part 2 of 3, but it is part 1")


def test_split_part_of_another_split(split_model, tmp_path):
    other = split(tmp_path / "whole.gguf", tmp_path / "other", 2)
    other[1].replace(split_model[1])
    assert refused(split_model[0]) == f"{split_model[1]}: key split.count: 2, expected 3"


def test_split_part_of_another_model(split_model, tmp_path):
    larger = write_model(tmp_path / "larger.gguf", model_tensors(layers=range(3)))
    other = split(larger, tmp_path / "other", 3)
    other[1].replace(split_model[1])
    said = refused(split_model[0])
    assert said.startswith(
        f"{split_model[1]}: not of the model of {split_model[0].name}: key split.t"
    )


def test_split_part_that_says_another_architecture(tmp_path):
    first, second = split_paths(tmp_path)
    tensors = model_tensors()
    part(first, 0, 2, tensors[:4], len(tensors))
    keys = [("split.no", 1, ValueType.UINT16, None), ("split.count", 2, ValueType.UINT16, None)]
    write_model(second, tensors[4:], {"general.architecture": "olmoe"}, extra=keys)
    said = refused(first)
    assert said.startswith(f"{second}: not of the model of") and "'olmoe' here" in said


def test_split_part_that_is_a_model_of_its_own(split_model, tmp_path):
    (tmp_path / "whole.gguf").replace(split_model[1])
    assert refused(split_model[0]).startswith(f"{split_model[1]}: key split.no is missing")


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_split_with_a_truncated_part(split_model, size):
    part = split_model[1]
    with GGUFFile.open(part) as file:
        last = list(file.tensors.values())[-1]
    # -1: one byte short of the last tensor; what follows is padding
    os.truncate(part, size if size >= 0 else last.offset + last.nbytes - 1)
    assert refused(split_model[0]).startswith(f"{part}: ")


def test_name_of_a_split_model_without_one(tmp_path):
    whole = write_model(tmp_path / "whole.gguf", metadata=model_metadata(name=None))
    with ExpertModel.open(split(whole, tmp_path, 2, name="my-model")[0]) as model:
        assert model.name == "my-model"
