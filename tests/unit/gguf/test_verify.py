"""`verify` finds what is wrong, says where, and finds nothing in good files."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from click.testing import CliRunner
from gguf_craft import (
    model_metadata,
    model_tensors,
    packed_metadata,
    write_model,
    write_packed,
)
from gguf_split import split

from gguf_tools import synthetic
from gguf_tools.errors import QuantizeError
from gguf_tools.file.chunks import CHUNK_BYTES
from gguf_tools.file.layout import BLOCK, DOWN, GGMLType
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack import export, pack
from gguf_tools.quantize.ggml import native_stderr_hidden
from gguf_tools.verify import verify
from gguf_tools.verify.blocks import MAX_COUNTED
from orchestrator.cli import cli

NAN_HALF, INF_HALF = 0x7E00, 0xFC00
# Where the half-precision scales of a block are, and which of them are checked.
SCALES = {"q4_k": (0, 2), "q2_k": (80, 82), "q8_0": (0,)}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "packed.gguf"
    return synthetic.write(path, "tiny-qwen3moe", tiers=("q4_k", "q2_k"))


@pytest.fixture
def copy(packed, tmp_path):
    return write_bytes(tmp_path / "copy.gguf", packed.read_bytes())


def write_bytes(path, data):
    path.write_bytes(data)
    return path


def poke(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def place(path, name):
    with GGUFFile.open(path) as file:
        return file.tensors[name]


def texts(path, ggml, **options):
    return [each.text for each in verify(path, ggml=ggml, threads=1, **options).problems]


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
    from orchestrator.cli_options import demo_model

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


def test_parts_may_differ_in_some_matrices(tmp_path, ggml):
    """As in a mixed quantization, which keeps more bits for some layers' down matrices."""
    tensors = model_tensors(layers=[0])
    tensors += model_tensors(layers=[1], types={DOWN: GGMLType.F32})[1:]
    path = write_model(tmp_path / "m.gguf", tensors)
    assert texts(split(path, tmp_path / "parts", 2)[0], ggml) == []


@pytest.mark.parametrize("value", [NAN_HALF, INF_HALF])
@pytest.mark.parametrize("tier", ["q4_k", "q2_k"])
def test_a_scale_that_is_not_finite(copy, ggml, capfd, value, tier):
    name = "blk.1.ffn_down_exps.weight" + (".moe_edge.q2_k" if tier == "q2_k" else "")
    info = place(copy, name)
    block_bytes = BLOCK[info.type].bytes
    n_blocks = info.nbytes // block_bytes
    per_expert = info.shape[0] * info.shape[1] // 256
    for at in SCALES[tier]:
        for block in (0, per_expert, n_blocks - 1):
            offset = info.offset + block * block_bytes
            with copy.open("rb") as file:
                file.seek(offset + at)
                was = file.read(2)
            poke(copy, offset + at, struct.pack("<H", value))
            assert texts(copy, ggml) == [
                f"{copy}: tensor {name}: {tier} block {block} (expert {block // per_expert})"
                f" at offset {offset} is not finite"
            ]
            poke(copy, offset + at, was)
    assert texts(copy, ggml) == []
    assert capfd.readouterr() == ("", "")  # what ggml prints of it stays hidden


def test_stderr_works_again_afterwards(copy, ggml, capfd):
    info = place(copy, "blk.0.ffn_up_exps.weight")
    poke(copy, info.offset, struct.pack("<H", NAN_HALF))
    assert len(texts(copy, ggml)) == 1
    with GGUFFile.open(copy) as file:
        assert not ggml.is_valid(info.type, file.array(info.name))
    assert "found nan value at block 0" in capfd.readouterr().err


def test_several_problems_are_several_sentences(copy, ggml):
    float_info = place(copy, "blk.0.attn_norm.weight")
    poke(copy, float_info.offset + 8, struct.pack("<f", float("nan")))
    info = place(copy, "blk.0.ffn_up_exps.weight")
    for block in (3, 4, 9):
        poke(copy, info.offset + block * 144 + 2, struct.pack("<H", INF_HALF))
    of_values, of_blocks = sorted(texts(copy, ggml), key=len)
    at = float_info.offset + 8
    assert of_values == (
        f"{copy}: tensor blk.0.attn_norm.weight: value 2 at offset {at} is not finite"
    )
    at = info.offset + 3 * 144
    assert of_blocks == (
        f"{copy}: tensor {info.name}: q4_k block 3 (expert 0) at offset {at} is not finite, and 2"
        " more"
    )


def test_a_tensor_of_noise_is_one_sentence(tmp_path, ggml):
    tensors = [*model_tensors(), ("noise.weight", (4096, 2), GGMLType.F16)]
    path = write_model(tmp_path / "m.gguf", tensors)
    info = place(path, "noise.weight")
    poke(path, info.offset, b"\xff" * info.nbytes)
    assert texts(path, ggml) == [
        f"{path}: tensor noise.weight: value 0 at offset {info.offset} is not finite, and at"
        f" least {MAX_COUNTED - 1} more"
    ]


def test_every_block_of_a_tensor_of_many_runs(tmp_path, ggml):
    """Whole runs of it are checked by different threads: none of its blocks lies between two."""
    tensors = [*model_tensors(), ("large.weight", (4096, 5000), GGMLType.Q8_0)]
    path = tmp_path / "m.gguf"
    with GGUFWriter(path) as writer:
        for key, value in model_metadata().items():
            writer.meta(key, value)
        for name, shape, ggml_type in tensors:
            writer.declare(name, shape, ggml_type)
        writer.begin()
        for declared in writer.tensors.values():
            writer.write_tensor(declared.name, bytes(declared.nbytes))
    info = place(path, "large.weight")
    per_run = CHUNK_BYTES // 34
    assert info.nbytes > 2 * CHUNK_BYTES
    for block in (0, per_run - 1, per_run, 2 * per_run - 1, 2 * per_run, info.nbytes // 34 - 1):
        offset = info.offset + 34 * block
        poke(path, offset, struct.pack("<H", NAN_HALF))
        (problem,) = verify(path, ggml=ggml, threads=2).problems
        assert (problem.tensor, problem.block, problem.offset) == (info.name, block, offset)
        poke(path, offset, b"\0\0")
    assert texts(path, ggml) == []


def repack(source, target, *, drop=(), alignment=4096, rename=None, types=None, meta=None):
    """A copy with tensors left out or renamed and metadata replaced; offsets fit again."""
    with GGUFFile.open(source) as file:
        writer = GGUFWriter(target, alignment)
        for key in file.metadata:
            if key != "general.alignment":
                writer.meta_encoded(key, file.encoded_value(key))
        for key, value in (meta or {}).items():
            writer.meta(key, value)
        kept = [info for info in file.tensors.values() if info.name not in drop]
        names = {info.name: (rename or {}).get(info.name, info.name) for info in kept}
        for info in kept:
            ggml_type = (types or {}).get(info.name, info.type)
            writer.declare(names[info.name], info.shape, ggml_type)
        with writer:
            writer.begin()
            for info in kept:
                data = file.array(info.name)
                nbytes = writer.tensors[names[info.name]].nbytes
                if nbytes != data.nbytes:
                    data = np.zeros(nbytes, np.uint8)
                writer.write_tensor(names[info.name], data)
    return target


UP = "blk.1.ffn_up_exps.weight"
LOW = UP + ".moe_edge.q2_k"


def test_a_missing_tier(packed, tmp_path, ggml):
    gate = "blk.0.ffn_gate_exps.weight.moe_edge.q2_k"
    path = repack(packed, tmp_path / "m.gguf", drop={LOW, gate})
    assert sorted(texts(path, ggml)) == [
        f"{path}: tensor {name} is missing, but key moe_edge.tiers announces tier q2_k"
        for name in (gate, LOW)
    ]


def test_a_missing_best_tier(packed, tmp_path, ggml):
    path = repack(packed, tmp_path / "m.gguf", drop={UP})
    offset = place(path, LOW).offset
    assert texts(path, ggml)[0] == (
        f"{path}: tensor {LOW}: offset {offset}: its best tier {UP} is missing"
    )


def test_a_tier_that_is_not_announced(packed, tmp_path, ggml):
    wrong = UP + ".moe_edge.q3_k"
    path = repack(packed, tmp_path / "m.gguf", rename={LOW: wrong})
    said = texts(path, ggml)
    assert len(said) == 2
    assert any(f"{wrong}: offset" in each and "does not list q3_k" in each for each in said)
    assert any(f"tensor {LOW} is missing" in each for each in said)


def test_a_tier_of_another_type(packed, tmp_path, ggml):
    path = repack(packed, tmp_path / "m.gguf", types={LOW: GGMLType.Q3_K})
    offset = place(path, LOW).offset
    said = texts(path, ggml)
    assert said[0] == f"{path}: tensor {LOW}: offset {offset}: q3_k, but tier q2_k is q2_k there"
    assert "key moe_edge.tier_bpw [4.5, 2.625], but the tiers hold 4.50, 2.7" in said[1]


def test_alignment_of_an_expert_file(packed, tmp_path, ggml):
    path = repack(packed, tmp_path / "m.gguf", alignment=64)
    said = texts(path, ggml)
    assert said[0] == f"{path}: alignment 64; an expert file is aligned to 4096 bytes"
    assert all("not a multiple of 4096" in each for each in said[1:])


def test_wrong_counts(packed, tmp_path, ggml):
    path = repack(packed, tmp_path / "m.gguf", meta={"qwen3moe.expert_count": 7})
    (said,) = texts(path, ggml)
    assert "expert" in said and said.startswith(f"{path}: ")
    path = repack(packed, tmp_path / "n.gguf", meta={"moe_edge.tier_bpw": [4.5]})
    (said,) = texts(path, ggml)
    assert said == (
        f"{path}: key moe_edge.tier_bpw [4.5], but the tiers hold 4.50, 2.62 bits per weight"
    )
    path = repack(packed, tmp_path / "o.gguf", meta={"moe_edge.format_version": 99})
    (said,) = texts(path, ggml)
    assert "moe_edge.format_version: 99" in said


def test_a_layer_without_its_experts(packed, tmp_path, ggml):
    with GGUFFile.open(packed) as file:
        gone = {name for name in file.tensors if name.startswith("blk.1.") and "_exps" in name}
    path = repack(packed, tmp_path / "m.gguf", drop=gone)
    assert texts(path, ggml) == [f"{path}: layer 1 has a router but no experts"]


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
    size = copy.stat().st_size
    with copy.open("ab") as file:
        file.write(b"\0" * 4096)
    (said,) = texts(copy, ggml)
    assert "behind the last tensor" in said and str(copy) in said
    os.truncate(copy, size)
    assert texts(copy, ggml) == []


def test_a_gap_between_tensors(packed, tmp_path, ggml):
    """The reader follows offsets and accepts a hole; llama.cpp does not."""
    whole = packed.read_bytes()
    with GGUFFile.open(packed) as file:
        infos = list(file.tensors.values())
        data = file.data_offset
    last = infos[-1]
    entry = last.name.encode() + struct.pack(f"<I{len(last.shape)}Q", len(last.shape), *last.shape)
    entry += struct.pack("<I", last.type)
    at = whole.index(entry) + len(entry)
    shifted = struct.pack("<Q", last.offset - data + 4096)
    moved = whole[:at] + shifted + whole[at + 8 : last.offset] + bytes(4096) + whole[last.offset :]
    path = write_bytes(tmp_path / "m.gguf", moved)
    assert texts(path, ggml) == [
        f"{path}: tensor {last.name}: offset {last.offset + 4096}: expected at {last.offset},"
        f" behind {infos[-2].name}"
    ]


@pytest.mark.parametrize("size", [0, 10, 2000, -5000])
def test_a_file_cut_short(copy, ggml, size):
    os.truncate(copy, size if size >= 0 else copy.stat().st_size + size)
    (said,) = texts(copy, ggml)
    assert said.startswith(f"{copy}: ")


def test_a_dense_model_is_checked_all_the_same(tmp_path, ggml):
    tensors = [("token_embd.weight", (64, 3), GGMLType.F32)]
    path = write_model(tmp_path / "m.gguf", tensors, model_metadata("llama"))
    poke(path, place(path, "token_embd.weight").offset, struct.pack("<f", float("inf")))
    said = texts(path, ggml)
    assert "not a Mixture-of-Experts model" in said[0]
    assert "value 0 at offset" in said[1]


def blocks_with_a_bad_value(ggml, kind, blocks):
    """Numbers of the blocks that hold a value which is no finite number, by what ggml makes of
    them; of types that it makes nothing of, by what it says."""
    bad = []
    for number, block in enumerate(blocks):
        try:
            good = np.isfinite(ggml.dequantize(kind, block, BLOCK[kind].weights)).all()
        except QuantizeError:
            with native_stderr_hidden():
                good = ggml.is_valid(kind, block)
        if kind is GGMLType.MXFP4:  # of which ggml refuses the exponent that means "no number"
            good = block[0] != 255
        if not good:
            bad.append(number)
    return bad


@pytest.mark.parametrize("kind", [each for each in GGMLType if each is not GGMLType.Q8_1])
def test_noise_under_every_type(tmp_path, ggml, kind):
    """What is found in noise, by halving runs of blocks, is what is wrong with single ones."""
    rows = 5 if BLOCK[kind].weights == 1 else 300
    tensors = [*model_tensors(), ("noise.weight", (256, rows), kind)]
    path = write_model(tmp_path / "m.gguf", tensors)
    rng = np.random.default_rng(kind)
    with GGUFFile.open(path) as file:
        info = file.tensors["noise.weight"]
    noise = rng.integers(0, 256, info.nbytes, np.uint8)
    poke(path, info.offset, noise.tobytes())
    bad = blocks_with_a_bad_value(ggml, kind, noise.reshape(-1, BLOCK[kind].bytes))
    report = verify(path, ggml=ggml, threads=2)
    cannot_be_wrong = {"i8", "i16", "i32", "i64", "nvfp4"}
    assert bool(bad) == (kind.tier_name not in cannot_be_wrong)
    if not bad:
        assert report.problems == []
        return
    (problem,) = report.problems
    assert (problem.block, problem.tensor) == (bad[0], "noise.weight")
    more = f", and {len(bad) - 1} more"
    assert problem.text.endswith("not finite" + more * (len(bad) > 1))


def test_a_type_that_ggml_cannot_check(tmp_path, ggml):
    tensors = [*model_tensors(), ("odd.weight", (256, 2), GGMLType.Q8_1)]
    path = write_model(tmp_path / "m.gguf", tensors)
    offset = place(path, "odd.weight").offset
    report = verify(path, ggml=ggml, threads=1)
    assert [each.text for each in report.problems] == [
        f"{path}: tensor odd.weight: offset {offset}: ggml has no check for q8_1"
    ]
    assert report.n_tensors == len(tensors)
    assert report.nbytes == sum(
        int(np.prod(shape)) * BLOCK[kind].bytes for _, shape, kind in tensors[:-1]
    )


def test_layers_that_predict_further_tokens_have_no_tiers(tmp_path, ggml):
    metadata = model_metadata(block_count=3, nextn_predict_layers=1)
    source = write_model(tmp_path / "src.gguf", model_tensors(layers=range(3)), metadata)
    path = pack(source, tmp_path / "out.gguf", ["q8_0", "q4_0"], ggml=ggml).path
    assert texts(path, ggml) == []
    assert "blk.2.ffn_up_exps.weight.moe_edge.q4_0" not in GGUFFile.open(path).tensors


@pytest.fixture
def two_files(packed, tmp_path):
    return [export(packed, tmp_path / f"{tier}.gguf", tier).path for tier in ("q4_k", "q2_k")]


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


def test_the_command_takes_a_pair(two_files):
    high, low = map(str, two_files)
    result = CliRunner().invoke(cli, ["verify", high, "--low", low, "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert f"{high} and 1 more: good" in result.stdout and "in q4_k, q2_k" in result.stdout
    result = CliRunner().invoke(cli, ["verify", low, "--low", high, "--threads", "1", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"][0]["file"] == high


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"moe_edge.fallbacks": ["down: q8_0 is fine"]},
            "does not say: down: q4_k -> iq4_nl (rows",
        ),
        ({"moe_edge.quantization": 7}, "key moe_edge.quantization: not a text"),
        ({"moe_edge.calibration": ["a"]}, "key moe_edge.calibration: not a text"),
        ({"moe_edge.fallbackz": ["a"]}, "key moe_edge.fallbackz: unknown"),
        ({"moe_edge.tiers": ["y4_k"]}, "key moe_edge.tiers: y4_k is no type"),
    ],
)
def test_what_is_said_about_the_making(tmp_path, ggml, change, said):
    types = dict.fromkeys((0, 1, 2, 3), GGMLType.F16)
    source = write_model(
        tmp_path / "src.gguf",
        model_tensors(n_embd=256, n_ff=64, types=types),
        model_metadata(embedding_length=256),
    )
    good = pack(source, tmp_path / "good.gguf", ["q4_k"], ggml=ggml).path
    assert texts(good, ggml) == []
    bad = tmp_path / "bad.gguf"
    with GGUFFile.open(good) as file, GGUFWriter(bad, file.alignment) as writer:
        for key in file.metadata:
            if key != "general.alignment":
                writer.meta_encoded(key, file.encoded_value(key))
        for key, value in change.items():
            writer.meta(key, value)
        for info in file.tensors.values():
            writer.declare(info.name, info.shape, info.type)
        writer.begin()
        for name in file.tensors:
            writer.write_tensor(name, file.array(name))
    (found,) = texts(bad, ggml)
    assert found.startswith(f"{bad}: key moe_edge.") and said in found


def test_mutated_headers_give_sentences(packed, tmp_path, ggml):
    """Whatever bytes a header has: a report, where every finding starts with the file."""
    whole = packed.read_bytes()
    with GGUFFile.open(packed) as file:
        header = file.data_offset
    random = np.random.default_rng(5)
    path = tmp_path / "m.gguf"
    found = 0
    for _ in range(150):
        data = bytearray(whole)
        for at in random.integers(0, header, random.integers(1, 4)):
            data[at] = random.integers(0, 256)
        report = verify(write_bytes(path, bytes(data)), ggml=ggml, threads=1)
        assert all(problem.text.startswith(f"{path}: ") for problem in report.problems)
        found += bool(report.problems)
    assert found > 20


def call(*words):
    return CliRunner().invoke(cli, ["verify", *map(str, words)])


def test_command(copy, tmp_path):
    result = call("--threads", 1, copy)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{copy}: good: ")
    assert "experts in q4_k, q2_k\n" in result.stdout
    facts = json.loads(call("--json", copy).stdout)
    assert (facts["ok"], facts["problems"], facts["files"]) == (True, [], [str(copy)])

    info = place(copy, UP)
    poke(copy, info.offset, struct.pack("<H", NAN_HALF))
    result = call(copy)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.count("\n") == 1 and f"tensor {UP}: q4_k block 0" in result.stdout
    result = call("--json", copy)
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["ok"]) == (1, False)
    (problem,) = facts["problems"]
    assert (problem["tensor"], problem["offset"], problem["block"]) == (UP, info.offset, 0)

    result = call(tmp_path / "none.gguf")
    assert (result.exit_code, result.stdout.count("\n")) == (1, 1)
    assert "none.gguf" in result.stdout


def test_a_packed_file_of_the_writer_s_own(tmp_path, ggml):
    path = write_packed(tmp_path / "m.gguf")
    said = texts(path, ggml)  # random bytes: scales are not finite somewhere, nothing else
    assert said and all("is not finite" in each for each in said)
    assert packed_metadata()["moe_edge.tiers"] == verify(path, ggml=ggml).tiers
