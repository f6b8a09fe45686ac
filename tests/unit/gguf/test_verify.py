"""`verify` reports damage with its place, and nothing for good files."""

import json
import struct

import numpy as np
import pytest
from command_line import run
from gguf_craft import model_metadata, model_tensors, write_model
from gguf_split import split
from repacking import repack
from tables import cases
from verify_files import INF_HALF, LOW, NAN_HALF, UP, place, poke, texts, write_bytes

from gguf_tools import synthetic
from gguf_tools.errors import QuantizeError
from gguf_tools.file.chunks import CHUNK_BYTES
from gguf_tools.file.layout import BLOCK, GGMLType
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.pack import pack
from gguf_tools.quantize.ggml import native_stderr_hidden
from gguf_tools.verify import verify
from gguf_tools.verify.blocks import MAX_COUNTED
from orchestrator.cli.options import demo_model


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
        f"{paths[1]}: part 2 of 3 is missing: put all parts of {paths[0].name} into one folder"
    ]


@pytest.mark.parametrize("n_parts", [2, 3])
def test_a_part_of_another_quantization(two_files, tmp_path, ggml, n_parts):
    """A part from another quantization is reported by its experts' type, although names, shapes and
    counts are equal."""
    high, low = (split(path, tmp_path / path.stem, n_parts, name="model") for path in two_files)
    assert texts(high[0], ggml) == texts(low[0], ggml) == []
    high[1].write_bytes(low[1].read_bytes())
    assert texts(high[0], ggml) == [
        f"{high[1]}: this part seems to belong to another quantization: its experts are q2_k,"
        " but q4_k in the other parts"
    ]


def test_data_in_the_padding(copy, ggml):
    with GGUFFile.open(copy) as file:
        infos = sorted(file.tensors.values(), key=lambda each: each.offset)
    first = next(i for i, each in enumerate(infos[:-1]) if each.nbytes % 4096)
    end = infos[first].offset + infos[first].nbytes
    poke(copy, end + 1, b"x")
    after = infos[first + 1]
    assert texts(copy, ggml) == [
        f"{copy}: tensor {after.name}: offset {after.offset}: the padding after"
        f" {infos[first].name}, which ends at {end}, is not zero"
    ]


def test_data_after_the_last_tensor(copy, ggml):
    with copy.open("ab") as file:
        file.write(b"\0" * 4096)
    (said,) = texts(copy, ggml)
    assert "after the last tensor" in said and str(copy) in said


def test_a_gap_between_tensors(packed, tmp_path, ggml):
    """A gap between tensors is reported. The reader would accept it, but llama.cpp does not."""
    whole = packed.read_bytes()
    with GGUFFile.open(packed) as file:
        *_, before, last = file.tensors.values()
        offset = last.offset - file.data_offset
    at = whole.index(struct.pack("<Q", offset), whole.index(last.name.encode()))
    moved = whole[:at] + struct.pack("<Q", offset + 4096) + whole[at + 8 : last.offset]
    path = write_bytes(tmp_path / "m.gguf", moved + bytes(4096) + whole[last.offset :])
    assert texts(path, ggml) == [
        f"{path}: tensor {last.name}: offset {last.offset + 4096}: the data is expected at offset"
        f" {last.offset}, after {before.name}"
    ]


def test_the_blocks_of_a_dense_model_are_checked(tmp_path, ggml):
    tensors = [("token_embd.weight", (64, 3), GGMLType.F32)]
    path = write_model(tmp_path / "m.gguf", tensors, model_metadata("llama"))
    poke(path, place(path, "token_embd.weight").offset, struct.pack("<f", float("inf")))
    said = texts(path, ggml)
    assert "not a Mixture-of-Experts model" in said[0]  # its header names experts
    assert "value 0 at offset" in said[1]


def test_a_good_dense_model_is_not_damaged(tmp_path, ggml):
    """A dense model has no problems, but verify reports that it cannot run."""
    tensors = [("token_embd.weight", (64, 3), GGMLType.F32)]
    path = write_model(tmp_path / "m.gguf", tensors, model_metadata("llama", expert_count=None))
    report = verify(path, ggml=ggml, threads=1)
    assert report.problems == [] and "not a Mixture-of-Experts model" in report.no_experts
    done = run("verify", path)
    assert done.exit_code == 3
    assert done.stdout == f"{path}: no problems found; 1 tensors, 768 B, no experts\n"
    assert f"{path}: the model cannot run: no expert tensors" in done.stderr


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
    assert said.startswith(f"{other}: not the same model as {high}: ")
    (said,) = texts(high, ggml, low=tmp_path / "none.gguf")
    assert said == f"{tmp_path / 'none.gguf'}: No such file or directory"


def call(*words):
    return run("verify", "--threads", 1, *words)


def test_command(copy, tmp_path):
    result = call(copy)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"Note: {copy} has no checksums. ")
    assert result.stdout.startswith(f"{copy}: no problems found; ")
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


# Offsets of the half-precision scales in a block.
SCALES = {"q4_k": (0, 2), "q2_k": (80, 82), "q8_0": (0,)}


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
            was = copy.read_bytes()[offset + at :][:2]
            poke(copy, offset + at, struct.pack("<H", value))
            assert texts(copy, ggml) == [
                f"{copy}: tensor {name}: {tier} block {block} (expert {block // per_expert})"
                f" at offset {offset} is not finite"
            ]
            poke(copy, offset + at, was)
    assert texts(copy, ggml) == []
    assert capfd.readouterr() == ("", "")  # ggml's own messages are hidden


def with_tensor(folder, *tensor):
    """(path of a model with one more tensor, that tensor)."""
    path = write_model(folder / "m.gguf", [*model_tensors(), tensor])
    return path, place(path, tensor[0])


def test_a_tensor_of_noise_is_one_sentence(tmp_path, ggml):
    path, info = with_tensor(tmp_path, "noise.weight", (4096, 2), GGMLType.F16)
    poke(path, info.offset, b"\xff" * info.nbytes)
    assert texts(path, ggml) == [
        f"{path}: tensor noise.weight: value 0 at offset {info.offset} is not finite, and at"
        f" least {MAX_COUNTED - 1} more"
    ]


def test_every_block_of_a_tensor_of_many_runs(tmp_path, ggml):
    """Several threads check runs of blocks, and no block at their borders is missed."""
    path = tmp_path / "m.gguf"
    with GGUFWriter(path) as writer:
        for key, value in model_metadata().items():
            writer.meta(key, value)
        for name, shape, kind in (*model_tensors(), ("large.weight", (4096, 5000), GGMLType.Q8_0)):
            writer.declare(name, shape, kind)
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


def blocks_with_a_bad_value(ggml, kind, blocks):
    """Numbers of the blocks with a value that is not finite, by dequantizing each, or by ggml's
    validation for types that it cannot dequantize."""
    bad = []
    for number, block in enumerate(blocks):
        try:
            good = np.isfinite(ggml.dequantize(kind, block, BLOCK[kind].weights)).all()
        except QuantizeError:
            with native_stderr_hidden():
                good = ggml.is_valid(kind, block)
        if kind is GGMLType.MXFP4:  # ggml refuses this exponent, which means NaN
            good = block[0] != 255
        if not good:
            bad.append(number)
    return bad


@pytest.mark.parametrize("kind", [each for each in GGMLType if each is not GGMLType.Q8_1])
def test_noise_under_every_type(tmp_path, ggml, kind):
    """Damage in random bytes is found by halving runs of blocks, with the same result as checking
    single blocks."""
    rows = 5 if BLOCK[kind].weights == 1 else 300
    path, info = with_tensor(tmp_path, "noise.weight", (256, rows), kind)
    noise = np.random.default_rng(kind).integers(0, 256, info.nbytes, np.uint8)
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
    path, odd = with_tensor(tmp_path, "odd.weight", (256, 2), GGMLType.Q8_1)
    report = verify(path, ggml=ggml, threads=1)
    assert [each.text for each in report.problems] == [
        f"{path}: tensor odd.weight: offset {odd.offset}: ggml cannot validate type q8_1"
    ]
    with GGUFFile.open(path) as file:
        assert report.n_tensors == len(file.tensors)
        assert report.nbytes == sum(info.nbytes for info in file.tensors.values()) - odd.nbytes


BITS = "the tiers have 4.50, 2.62 bits per weight"


def test_a_missing_tier(packed, tmp_path, ggml):
    gate = "blk.0.ffn_gate_exps.weight.moe_edge.q2_k"
    path = repack(packed, tmp_path / "m.gguf", drop={LOW, gate})
    assert sorted(texts(path, ggml)) == [
        f"{path}: tensor {name} is missing, but key moe_edge.tiers lists tier q2_k"
        for name in (gate, LOW)
    ]
    path = repack(packed, tmp_path / "n.gguf", drop={UP})
    offset = place(path, LOW).offset
    assert texts(path, ggml)[0] == (
        f"{path}: tensor {LOW}: offset {offset}: the best tier {UP} is missing"
    )


@cases(
    "changes, said, rest",
    (
        {"alignment": 64},
        "alignment 64, but a packed file needs a multiple of 4096",
        "the offset is not a multiple of 4096",
    ),
    ({"meta": {"qwen3moe.expert_count": 7}}, "expert", None),
    ({"meta": {"moe_edge.tier_bpw": [4.5]}}, f"key moe_edge.tier_bpw [4.5], but {BITS}", None),
    (
        {"meta": {"moe_edge.format_version": 99}},
        "moe_edge.format_version: the file has format version 99",
        None,
    ),
)
def test_an_alignment_and_numbers_that_are_wrong(packed, tmp_path, ggml, changes, said, rest):
    path = repack(packed, tmp_path / "m.gguf", **changes)
    first, *others = texts(path, ggml)
    assert first.startswith(f"{path}: ") and said in first
    assert bool(others) == bool(rest) and all(rest in each for each in others)


def test_a_tier_that_is_not_announced(packed, tmp_path, ggml):
    wrong = UP + ".moe_edge.q3_k"
    path = repack(packed, tmp_path / "m.gguf", rename={LOW: wrong})
    said = texts(path, ggml)
    assert len(said) == 2
    assert any(f"{wrong}: offset" in each and "does not list q3_k" in each for each in said)
    assert any(f"tensor {LOW} is missing" in each for each in said)


def test_a_layer_without_its_experts(packed, tmp_path, ggml):
    with GGUFFile.open(packed) as file:
        gone = {name for name in file.tensors if name.startswith("blk.1.") and "_exps" in name}
    path = repack(packed, tmp_path / "m.gguf", drop=gone)
    assert texts(path, ggml) == [f"{path}: layer 1 has a router but no experts"]


def test_layers_that_predict_further_tokens_have_no_tiers(tmp_path, ggml):
    metadata = model_metadata(block_count=3, nextn_predict_layers=1)
    source = write_model(tmp_path / "src.gguf", model_tensors(layers=range(3)), metadata)
    path = pack(source, tmp_path / "out.gguf", ["q8_0", "q4_0"], ggml=ggml).path
    assert texts(path, ggml) == []
    assert "blk.2.ffn_up_exps.weight.moe_edge.q4_0" not in GGUFFile.open(path).tensors


@cases(
    "key, value, said",
    ("fallbacks", ["down: q8_0 is fine"], "lacks the entry down: q4_k -> iq4_nl (rows"),
    ("quantization", 7, "expected a text"),
    ("calibration", ["a"], "expected a text"),
    ("fallbackz", ["a"], "unknown key"),
    ("tiers", ["y4_k"], "y4_k is not a ggml type"),
)
def test_metadata_about_quantization_is_checked(tmp_path, ggml, key, value, said):
    tensors = model_tensors(n_embd=256, n_ff=64)
    source = write_model(tmp_path / "src.gguf", tensors, model_metadata(embedding_length=256))
    good = pack(source, tmp_path / "good.gguf", ["q4_k"], ggml=ggml).path
    assert texts(good, ggml) == []
    bad = repack(good, tmp_path / "bad.gguf", meta={f"moe_edge.{key}": value})
    (found,) = texts(bad, ggml)
    assert found.startswith(f"{bad}: key moe_edge.{key}") and said in found
