"""Checksums of packed files detect damage."""

import hashlib
import zlib

import numpy as np
import pytest
from command_line import run
from repacking import flip
from verify_files import poke, texts, write_bytes

from gguf_tools import synthetic
from gguf_tools.file.checksums import SliceChecksums, stored
from gguf_tools.file.layout import KEY_CHECKSUMS
from gguf_tools.file.reader import GGUFFile
from gguf_tools.pack import pack


@pytest.fixture(scope="module")
def sound(tmp_path_factory, ggml):
    folder = tmp_path_factory.mktemp("checksums")
    source = synthetic.write(folder / "source.gguf", "tiny-qwen3moe", tiers=("q8_0",))
    return pack(source, folder / "packed.gguf", ["q8_0", "q2_k"], threads=2, ggml=ggml).path


def test_pieces_come_in_any_order():
    data = np.random.default_rng(4).bytes(3 * 1000)
    sums = SliceChecksums(len(data), 3)
    for start, end in ((1500, 3000), (0, 400), (400, 1500)):
        sums.add(start, memoryview(data)[start:end])
    assert sums.values() == [zlib.crc32(data[at : at + 1000]) for at in (0, 1000, 2000)]


def test_a_packed_file_has_a_checksum_for_each_expert(sound, ggml):
    with GGUFFile.open(sound) as file:
        found = stored(file)
        for name, info in file.tensors.items():
            data = file.array(name).tobytes()
            count = info.shape[2] if len(info.shape) == 3 else 1
            size = len(data) // count
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
            assert found[name] == [zlib.crc32(each) for each in pieces], name
    assert texts(sound, ggml) == []
    result = run("verify", sound)
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_damaged_expert_is_named(sound, tmp_path, ggml):
    copy = write_bytes(tmp_path / "copy.gguf", sound.read_bytes())
    with GGUFFile.open(copy) as file:
        info = file.tensors["blk.1.ffn_down_exps.weight.moe_edge.q2_k"]
        expert_bytes = info.nbytes // info.shape[2]
    at = info.offset + 3 * expert_bytes
    flip(copy, at + 5)
    assert texts(copy, ggml) == [
        f"{copy}: tensor {info.name}: offset {at}: expert 3 is damaged: its checksum differs"
    ]


def test_checksums_of_the_wrong_type_are_refused(sound, tmp_path, ggml):
    """Checksums of the type int32 instead of uint32 are refused."""
    copy = write_bytes(tmp_path / "copy.gguf", sound.read_bytes())
    with GGUFFile.open(copy) as file:
        count = len(file.metadata[KEY_CHECKSUMS])
        start, _ = file.value_spans[KEY_CHECKSUMS]
    poke(copy, start + 4, (5).to_bytes(4, "little"))  # int32 instead of uint32
    (sentence,) = texts(copy, ggml)
    assert f"key {KEY_CHECKSUMS}: expected {count} values of type uint32" in sentence


def test_a_file_of_the_hub_has_its_hash(sound, tmp_path, ggml):
    plain = synthetic.write(tmp_path / "plain.gguf", "tiny-qwen3moe")
    data = plain.read_bytes()
    blob = tmp_path / "blobs" / hashlib.sha256(data).hexdigest()
    blob.parent.mkdir()
    link = tmp_path / "snapshots.gguf"
    link.symlink_to(write_bytes(blob, data))
    assert texts(link, ggml) == []
    with GGUFFile.open(blob) as file:
        flip(blob, next(iter(file.tensors.values())).offset)
    (sentence,) = texts(link, ggml)
    assert sentence.startswith(f"{link}: the file differs from the one on the Hub (SHA-256 ")
