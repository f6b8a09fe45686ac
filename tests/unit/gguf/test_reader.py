"""The GGUF reader, compared with the gguf package's writer, and its views."""

import numpy as np
import pytest
from gguf_craft import craft, kv, tensor, write_model
from verify_files import write_bytes

from gguf_tools import errors
from gguf_tools.file.layout import BLOCK, GGMLType
from gguf_tools.file.reader import GGUFFile, metadata_value

gguf = pytest.importorskip("gguf")
VALUES = {
    **{"u8": ("uint8", 200), "i8": ("int8", -3), "u16": ("uint16", 60000)},
    **{"i16": ("int16", -30000), "u32": ("uint32", 4_000_000_000)},
    **{"i32": ("int32", -2_000_000_000), "u64": ("uint64", (1 << 64) - 1)},
    **{"i64": ("int64", -(1 << 63)), "f32": ("float32", 0.5), "f64": ("float64", 0.1)},
    **{
        "yes": ("bool", True),
        "text": ("string", "Grüße, 世界"),
        "words": ("array", ["a", "", "ß"]),
    },
    **{"numbers": ("array", [1, -2, 3]), "floats": ("array", [0.5, 0.25])},
    "flags": ("array", [True, False]),
}


def test_reads_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, (kind, value) in VALUES.items():
        getattr(writer, f"add_{kind}")(key, value)
    small = np.arange(6, dtype=np.float32).reshape(2, 3)
    half = np.arange(64, dtype=np.float16).reshape(2, 1, 32)
    q8 = gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("small", small)
    writer.add_tensor("half", half)
    writer.add_tensor("q8", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile.open(path) as file:
        assert file.metadata["general.architecture"] == "qwen3moe"
        for key, (_, value) in VALUES.items():
            assert file.metadata[key] == value and type(file.metadata[key]) is type(value)
        for name, data, shape, kind in (
            ("small", small, (3, 2), GGMLType.F32),
            ("half", half, (32, 1, 2), GGMLType.F16),
            ("q8", q8, (64, 4), GGMLType.Q8_0),
        ):
            assert (file.tensors[name].shape, file.tensors[name].type) == (shape, kind)
            assert file.array(name).tobytes() == data.tobytes()


def test_block_sizes_are_those_of_the_gguf_package():
    for ggml_type, block in BLOCK.items():
        # the package has float32 scales here, as older versions of ggml
        if ggml_type is GGMLType.Q8_1:
            continue
        try:
            theirs = gguf.GGMLQuantizationType(int(ggml_type))
        except ValueError:
            continue
        if theirs in gguf.GGML_QUANT_SIZES:
            assert tuple(block) == gguf.GGML_QUANT_SIZES[theirs]


def test_views_are_read_only_and_outlive_the_file(tmp_path):
    file = GGUFFile.open(write_model(tmp_path / "m.gguf"))
    view = file.array("token_embd.weight")
    file.close()
    assert not view.flags.writeable
    assert view.nbytes == 64 * 3 * 4
    assert np.isfinite(view.view(np.float32)).all()
    with pytest.raises(errors.FileAccessError, match="closed"):
        file.array("token_embd.weight")


def test_unknown_tensor_and_range_past_the_end(tmp_path):
    with GGUFFile.open(write_model(tmp_path / "m.gguf")) as file:
        with pytest.raises(errors.MissingTensorError, match="tensor nope is missing"):
            file.array("nope")
        with pytest.raises(errors.TensorBoundsError, match="past the end"):
            file.bytes_at(file.size - 1, 2)


def test_version_2_and_nested_arrays_are_read(tmp_path):
    data = craft([kv("deep", [[1, 2], [3]]), kv("empty", [])], version=2)
    with GGUFFile.open(write_bytes(tmp_path / "m.gguf", data)) as file:
        assert file.metadata == {"deep": [[1, 2], [3]], "empty": []}


def test_gaps_and_a_short_end_are_allowed(tmp_path):
    two = [tensor("a", (1,), 0, 64), tensor("b", (1,), 0, 0)]
    path = write_bytes(tmp_path / "m.gguf", craft(tensors=two, data=bytes(range(68))))
    with GGUFFile.open(path) as file:
        assert file.array("a").tolist() == [64, 65, 66, 67]
        assert file.array("b").tolist() == [0, 1, 2, 3]


def test_metadata_value_checks_the_type(tmp_path):
    path = write_model(tmp_path / "m.gguf", extra=[("flag", True, None, None)])
    with GGUFFile.open(path) as file:
        assert metadata_value(file, "absent", int, 7) == 7
        assert metadata_value(file, "flag", bool, None) is True
        with pytest.raises(errors.MetadataError, match="key flag: unexpected value of type bool"):
            metadata_value(file, "flag", int, 0)
