"""`verify` finds what is wrong, says where, and finds nothing in good files."""

import json
import struct

import pytest
from click.testing import CliRunner
from gguf_craft import model_metadata, write_model
from gguf_split import split
from verify_files import NAN_HALF, UP, place, poke, texts, write_bytes

from gguf_tools import synthetic
from gguf_tools.file.layout import BLOCK, GGMLType
from gguf_tools.file.reader import GGUFFile
from gguf_tools.verify import verify
from orchestrator.cli.main import cli


@pytest.mark.parametrize("tiers", [("f32",), ("f16",), ("q8_0",), ("q4_k", "q2_k")])
def test_good_files(tmp_path, ggml, tiers):
    path = synthetic.write(tmp_path / "m.gguf", "tiny-olmoe", tiers=tiers)
    shares = []
    report = verify(path, ggml=ggml, threads=2, progress=shares.append)
    assert report.problems == []
    assert report.tiers == list(tiers)
    assert shares == sorted(shares) and shares[-1] == 1.0
    with GGUFFile.open(path) as file:
        sizes = [(info.nbytes, BLOCK[info.type].bytes) for info in file.tensors.values()]
    assert report.nbytes == sum(nbytes for nbytes, _ in sizes)
    assert report.n_blocks == sum(nbytes // block for nbytes, block in sizes)


def test_the_demo_model_is_good(ggml):
    from orchestrator.cli.options import demo_model

    assert texts(demo_model(), ggml) == []


def test_parts_are_checked(packed, tmp_path, ggml):
    paths = split(packed, tmp_path, 3)
    report = verify(paths[0], ggml=ggml, threads=1)
    assert (report.problems, report.files) == ([], paths)
    with GGUFFile.open(paths[2]) as file:
        info = next(each for each in file.tensors.values() if each.type is GGMLType.Q4_K)
    poke(paths[2], info.offset, struct.pack("<H", NAN_HALF))
    assert texts(paths[0], ggml) == [
        f"{paths[2]}: tensor {info.name}: q4_k block 0 (expert 0) at offset {info.offset} is not"
        " finite"
    ]
    paths[1].unlink()
    assert texts(paths[0], ggml) == [
        f"{paths[1]}: part 2 of 3 is missing; all parts of {paths[0].name} belong in one folder"
    ]


@pytest.mark.parametrize("n_parts", [2, 3])
def test_a_part_of_another_quantization(two_files, tmp_path, ggml, n_parts):
    """Same names, shapes and counts; the first part alone says what the model is."""
    high, low = (split(path, tmp_path / path.stem, n_parts, name="model") for path in two_files)
    assert texts(high[0], ggml) == texts(low[0], ggml) == []
    high[1].write_bytes(low[1].read_bytes())
    assert texts(high[0], ggml) == [
        f"{high[1]}: a part of another quantization? Its experts are q2_k, those of the other"
        " parts q4_k"
    ]


def test_data_in_the_padding(copy, ggml):
    with GGUFFile.open(copy) as file:
        infos = sorted(file.tensors.values(), key=lambda each: each.offset)
    first = next(i for i, each in enumerate(infos[:-1]) if each.nbytes % 4096)
    end = infos[first].offset + infos[first].nbytes
    poke(copy, end + 1, b"x")
    after = infos[first + 1]
    assert texts(copy, ggml) == [
        f"{copy}: tensor {after.name}: offset {after.offset}: data between it and the end of"
        f" {infos[first].name} at {end}"
    ]


def test_data_behind_the_last_tensor(copy, ggml):
    with copy.open("ab") as file:
        file.write(b"\0" * 4096)
    (said,) = texts(copy, ggml)
    assert "behind the last tensor" in said and str(copy) in said


def test_a_gap_between_tensors(packed, tmp_path, ggml):
    """The reader follows offsets and accepts a hole; llama.cpp does not."""
    whole = packed.read_bytes()
    with GGUFFile.open(packed) as file:
        *_, before, last = file.tensors.values()
        offset = last.offset - file.data_offset
    at = whole.index(struct.pack("<Q", offset), whole.index(last.name.encode()))
    moved = whole[:at] + struct.pack("<Q", offset + 4096) + whole[at + 8 : last.offset]
    path = write_bytes(tmp_path / "m.gguf", moved + bytes(4096) + whole[last.offset :])
    assert texts(path, ggml) == [
        f"{path}: tensor {last.name}: offset {last.offset + 4096}: expected at {last.offset},"
        f" behind {before.name}"
    ]


def test_a_dense_model_is_checked_all_the_same(tmp_path, ggml):
    tensors = [("token_embd.weight", (64, 3), GGMLType.F32)]
    path = write_model(tmp_path / "m.gguf", tensors, model_metadata("llama"))
    poke(path, place(path, "token_embd.weight").offset, struct.pack("<f", float("inf")))
    said = texts(path, ggml)
    assert "not a Mixture-of-Experts model" in said[0]
    assert "value 0 at offset" in said[1]


def test_a_pair_of_files(two_files, packed, tmp_path, ggml):
    high, low = two_files
    report = verify(high, low, ggml=ggml, threads=1)
    assert (report.problems, report.tiers, report.files) == ([], ["q4_k", "q2_k"], two_files)
    one = verify(low, ggml=ggml, threads=1)
    assert report.nbytes == verify(high, ggml=ggml, threads=1).nbytes + one.nbytes

    parts = split(low, tmp_path / "parts", 3)
    assert verify(high, parts[0], ggml=ggml, threads=1).files == [high, *parts]
    with GGUFFile.open(parts[1]) as file:
        info = next(each for each in file.tensors.values() if each.type is GGMLType.Q2_K)
    poke(parts[1], info.offset + 80, struct.pack("<H", NAN_HALF))
    (said,) = texts(high, ggml, low=parts[0])
    assert said.startswith(f"{parts[1]}: tensor {info.name}: q2_k block 0")

    (said,) = texts(low, ggml, low=high)
    assert "swap the two files" in said
    other = synthetic.write(tmp_path / "other.gguf", "tiny-qwen3moe", tiers=("q2_k",), seed=5)
    (said,) = texts(high, ggml, low=other)
    assert said.startswith(f"{other}: not the model of {high}: ")
    (said,) = texts(high, ggml, low=tmp_path / "none.gguf")
    assert said == f"{tmp_path / 'none.gguf'}: No such file or directory"


def call(*words):
    return CliRunner().invoke(cli, ["verify", "--threads", "1", *map(str, words)])


def test_command(copy, tmp_path):
    result = call(copy)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"Note: {copy}: has no checksums, ")
    assert result.stdout.startswith(f"{copy}: good: ")
    assert "experts in q4_k, q2_k\n" in result.stdout
    facts = json.loads(call("--json", copy).stdout)
    assert (facts["ok"], facts["problems"], facts["files"]) == (True, [], [str(copy)])
    assert facts["without_checksums"] == [str(copy)]

    info = place(copy, UP)
    poke(copy, info.offset, struct.pack("<H", NAN_HALF))
    for path, said in ((copy, f"tensor {UP}: q4_k block 0"), (tmp_path / "none.gguf", "none.gguf")):
        result = call(path)
        assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (1, "", 1)
        assert said in result.stdout
    result = call("--json", copy)
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["ok"]) == (1, False)
    (problem,) = facts["problems"]
    assert (problem["tensor"], problem["offset"], problem["block"]) == (UP, info.offset, 0)
