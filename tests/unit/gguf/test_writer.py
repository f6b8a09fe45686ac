"""The GGUF writer, compared with the gguf package's reader. A file is complete or does not
appear."""

import os
import shutil
from collections import namedtuple

import numpy as np
import pytest
from tables import cases

from gguf_tools import errors
from gguf_tools.file.layout import GGMLType, ValueType
from gguf_tools.file.writer import GGUFWriter

gguf = pytest.importorskip("gguf")
VALUES = {
    **{"text": "Grüße", "count": 7, "negative": -7, "wide": 1 << 40, "half": 0.5, "flag": True},
    **{"words": ["a", "", "世界"], "numbers": [3, -1, 2], "floats": [0.5, 0.25]},
}


def begun(path, n=64, alignment=32):
    writer = GGUFWriter(path, alignment)
    writer.declare("a", (n,), GGMLType.F32)
    writer.declare("b", (32, 3), GGMLType.Q8_0)
    return writer


def test_the_gguf_package_reads_what_we_write(tmp_path):
    path = tmp_path / "ours.gguf"
    writer = begun(path, 65, alignment=256)
    for key, value in VALUES.items():
        writer.meta(key, value)
    writer.meta("tiny", 200, ValueType.UINT8)
    data = np.arange(65, dtype=np.float32)
    blocks = np.arange(3 * 34, dtype=np.uint8)
    with writer:
        writer.begin()
        writer.write_tensor("b", [blocks[:50], blocks[50:]])
        writer.write_tensor("a", data)
    theirs = gguf.GGUFReader(path)
    for key, value in VALUES.items():
        assert theirs.fields[key].contents() == value
    assert theirs.fields["tiny"].contents() == 200
    assert theirs.alignment == 256
    first, second = theirs.tensors
    assert (first.name, second.name) == ("a", "b")
    assert (np.asarray(first.data) == data).all()
    assert second.data.tobytes() == blocks.tobytes()
    assert first.data_offset % 256 == second.data_offset % 256 == 0
    assert second.data_offset - first.data_offset == 512


def leftovers(folder):
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [None, b"old"])
def test_an_exception_leaves_the_previous_file(tmp_path, error, old):
    path = tmp_path / "ours.gguf"
    if old:
        path.write_bytes(old)
    with pytest.raises(error), begun(path) as writer:
        writer.begin()
        assert not old or path.read_bytes() == old
        writer.write_tensor("a", bytes(256))
        raise error
    assert leftovers(tmp_path) == ["ours.gguf"] * bool(old)
    assert not old or path.read_bytes() == old


@cases("at, said", (0, "only 34 of 102 bytes were"), (69, "34 bytes at position 69 do not fit"))
def test_missing_and_too_many_bytes_are_an_error(tmp_path, at, said):
    writer = begun(tmp_path / "ours.gguf")
    with pytest.raises(errors.WriteError, match=f"tensor b: {said}"), writer:
        writer.begin()
        writer.write_tensor("a", bytes(256))
        writer.write_at("b", at, bytes(34))
    assert leftovers(tmp_path) == []


def test_disk_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 3 << 20))
    writer = begun(tmp_path / "ours.gguf", 1 << 22)
    with (
        pytest.raises(errors.DiskSpaceError, match=r"needs 16\.0 MiB, .* only 3\.0 MiB free"),
        writer,
    ):
        writer.begin()
    assert leftovers(tmp_path) == []


def test_a_full_disk_later_is_one_sentence(tmp_path, monkeypatch):
    writer = begun(tmp_path / "ours.gguf")

    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(errors.WriteError, match=r"ours\.gguf: No space left on device"), writer:
        writer.begin()
        monkeypatch.setattr(os, "pwrite", full)
        writer.write_tensor("a", bytes(256))
    assert leftovers(tmp_path) == []


def test_missing_folder_and_folder_as_target(tmp_path):
    with pytest.raises(errors.WriteError, match="No such file"), begun(tmp_path / "no" / "x") as w:
        w.begin()
    (tmp_path / "folder").mkdir()
    with pytest.raises(errors.WriteError, match="is a folder"), begun(tmp_path / "folder") as w:
        w.begin()


@cases(
    "declared, error, said",
    (("a", (1,), GGMLType.F32), errors.DuplicateError, "declared twice"),
    (("n" * 64, (1,), GGMLType.F32), errors.TextError, None),
    (("a\nb", (1,), GGMLType.F32), errors.TextError, r"name 'a\\nb' has control characters"),
    (("c", (), GGMLType.F32), errors.TensorShapeError, None),
    (("c", (4, 0), GGMLType.F32), errors.TensorShapeError, None),
    (("c", (128,), GGMLType.Q4_K), errors.TensorShapeError, "not a multiple of 256"),
)
def test_wrong_declarations(tmp_path, declared, error, said):
    with pytest.raises(error, match=said):
        begun(tmp_path / "ours.gguf").declare(*declared)


@cases(
    "key, value, kind, said",
    ("k", 256, ValueType.UINT8, "uint8"),
    ("a\nb", 1, None, r"key 'a\\nb' has control characters"),
    ("k", "x", ValueType.UINT8, "uint8"),
    ("k", 1 << 64, None, "uint64"),
    ("k", ["a", 1], None, "have different types"),
    ("k", object(), None, "no metadata type"),
    ("general.alignment", 64, None, "alignment, 32"),
)
def test_values_that_are_refused(tmp_path, key, value, kind, said):
    with pytest.raises(errors.WriteError, match=said):
        GGUFWriter(tmp_path / "ours.gguf").meta(key, value, kind)


def test_an_alignment_must_be_a_power_of_two(tmp_path):
    with pytest.raises(errors.WriteError, match="power of two"):
        GGUFWriter(tmp_path / "x", 48)
