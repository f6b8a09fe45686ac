"""``verify``: blocks whose values or scales are not finite."""

import struct

import numpy as np
import pytest
from gguf_craft import model_metadata, model_tensors, write_model
from verify_files import INF_HALF, NAN_HALF, place, poke, texts

from gguf_tools.errors import QuantizeError
from gguf_tools.file.chunks import CHUNK_BYTES
from gguf_tools.file.layout import BLOCK, GGMLType
from gguf_tools.file.reader import GGUFFile
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.quantize.ggml import native_stderr_hidden
from gguf_tools.verify import verify
from gguf_tools.verify.blocks import MAX_COUNTED

# Where the half-precision scales of a block are, and which of them are checked.
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
    assert capfd.readouterr() == ("", "")  # what ggml prints of it stays hidden


def with_tensor(folder, *tensor):
    """A model with one more tensor, and where that is."""
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
    """Whole runs of it are checked by different threads: none of its blocks lies between two."""
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
        f"{path}: tensor odd.weight: offset {odd.offset}: ggml has no check for q8_1"
    ]
    with GGUFFile.open(path) as file:
        assert report.n_tensors == len(file.tensors)
        assert report.nbytes == sum(info.nbytes for info in file.tensors.values()) - odd.nbytes
