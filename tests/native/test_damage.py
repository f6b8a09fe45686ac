"""Damaged slices: they are detected when they are read, and never used in a computation."""

import os
import random
import zlib

import numpy as np
import pytest
from answering import answered
from click.testing import CliRunner
from command_line import MOE_EDGE, python
from repacking import flip, overwrite, repack

from gguf_tools.errors import DamagedError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE
from gguf_tools.file.reader import GGUFFile
from gguf_tools.verify import verify
from orchestrator.cli.main import cli
from orchestrator.errors import MoeEdgeError, NativeError
from orchestrator.events import Phase
from orchestrator.native.llama import ABORTED
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn, opened
from .transition_driver import HIGH, LOW, Driver, ExpertFile

DAMAGES = 100 if os.environ.get("MOE_EDGE_SLOW") else 9
PAGE_BYTES = 4096
TOKENS = drawn(24, 5)
# Ways to run a model: the store fills slots while it computes, in one tier and in two; the store
# loads everything at the start; llama.cpp alone.
SLOTS = {"expert_ram": 3 << 20}
RUNS = {
    "lru": {"policy": "lru", **SLOTS},
    "dymoe": {"policy": "dymoe", "low_tier": "q2_k", **SLOTS},
    "resident": {"policy": "lru"},
    "plain": {"policy": "plain"},
}


def test_checksums_equal_zlibs(library):
    data = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)
    for start, n in ((0, 0), (0, 1), (3, 15), (1, 64), (7, 63), (5, 128), (2, 4000), (0, 5000)):
        piece = data[start : start + n]
        for before in (0, 123456789):
            found = library.crc32(before, piece.ctypes.data, n)
            assert found == zlib.crc32(piece.tobytes(), before), (start, n)


def use(driver, experts):
    """Run a step that uses these experts of layer 1. Return the error, or None."""
    driver.store.begin_step(Phase.DECODE)
    try:
        driver.apply(1, experts)
        driver.use(1, experts)
    except AssertionError:
        with pytest.raises(NativeError) as failed:
            driver.store.check_step()
        return str(failed.value)
    return None


@pytest.mark.parametrize("part", range(4))
def test_a_slice_of_several_parts(library, tmp_path, part):
    """Damage in any of the four parts of a slice is detected. The parts arrive in any order."""
    file = ExpertFile(tmp_path / "experts.bin", 1, (1_900_001,))
    at = file.start(1, GATE, HIGH, 2) + part * 600_000
    flip(file.path, at)
    driver = Driver(file, library, slots=(4,))
    with driver.store as store:
        assert use(driver, [0, 1]) is None
        for _ in range(2):  # a damaged slice is not remembered as verified
            sentence = use(driver, [2])
            assert sentence is not None and sentence.endswith(
                f"experts.bin: tensor blk.1.ffn_gate_exps.weight (q4_K): offset "
                f"{file.start(1, GATE, HIGH, 2)}: expert 2 is damaged: its checksum differs"
            )
        store.check()
        file.path.write_bytes(file.data)
        assert use(driver, [2, 3]) is None


def test_damage_on_a_device(library, tmp_path, device):
    """A slice is verified before it enters the host cache."""
    file = ExpertFile(tmp_path / "experts.bin")
    flip(file.path, file.start(1, DOWN, LOW, 0) + 8_000)
    driver = Driver(file, library, slots=(2, 3), device=device)
    with driver.store as store:
        for _ in range(2):
            assert "expert 0 is damaged" in str(use(driver, [0, 1]))
        assert use(driver, [2, 1]) is None
        store.check()


@pytest.fixture(scope="module")
def valid(library, packed):
    return packed("q8_0", "q2_k")


def logits(model, how):
    """Return the logits after a prompt. Raises MoeEdgeError."""
    # Without exact tiers, dymoe may compute with any copy that arrives in time.
    exact = {"exact_tiers": True} if how == "dymoe" else {}
    with opened(model, ubatch=32, **RUNS[how], **exact) as runtime, runtime.evaluator() as e:
        return np.array(e.eval(TOKENS, 0))


@pytest.fixture(scope="module")
def right(valid):
    return {how: logits(valid, how) for how in RUNS}


def damage(data, number):
    """Damage one bit or one page, or cut the file, at a random place. Return which."""
    rng = random.Random(f"damage {number}")
    how = ("bit", "page", "cut")[number % 3]
    if how == "bit":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "page":
        pages = range(0, len(data), PAGE_BYTES)
        at = rng.choice([at for at in pages if any(data[at : at + PAGE_BYTES])])
        data[at : at + PAGE_BYTES] = bytes(len(data[at : at + PAGE_BYTES]))
    else:
        del data[rng.randrange(len(data)) :]
    return how


@pytest.mark.parametrize("number", range(DAMAGES))
def test_random_damage_is_found_or_not_read(valid, right, tmp_path, number):
    """`verify` finds all damage. A run fails and names the file, or never reads the damaged bytes.

    In the second case its logits equal those of the valid file, bit for bit.
    """
    data = bytearray(valid.read_bytes())
    how = damage(data, number)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    assert verify(path, threads=1).problems, how
    for run in RUNS:
        try:
            found = logits(path, run)
        except MoeEdgeError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        else:
            assert np.array_equal(found, right[run]), f"{how}, {run}: a wrong result"


@pytest.mark.parametrize("how", RUNS)
def test_a_damaged_slice_that_is_read_is_an_error(valid, tmp_path, how):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(valid.read_bytes())
    with ExpertModel.open(valid) as model:
        for kind in model.slices[1]:  # a prompt reads some experts of the layer
            if kind[0] is not None:
                for expert in range(model.n_expert):
                    flip(path, kind[0].offset + expert * kind[0].expert_bytes + 9)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in RUNS[how].items()]
    result = CliRunner().invoke(cli, ["chat", "-m", str(path), "-p", "a b c d e", *options])
    assert result.exit_code == 1
    assert result.stdout == ""
    sentence = result.stderr.strip().splitlines()[-1]
    assert sentence.startswith(f"Error: {path}: tensor blk.1.ffn_")
    assert ": offset " in sentence and sentence.endswith("is damaged: its checksum differs")


@pytest.mark.parametrize("how", ["lru", "plain"])
def test_a_damaged_dense_tensor_is_an_error(valid, tmp_path, how):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(valid.read_bytes())
    with GGUFFile.open(valid) as file:
        info = file.tensors["blk.2.attn_q.weight"]
    flip(path, info.offset + info.nbytes - 1)
    with pytest.raises(MoeEdgeError) as caught:
        logits(path, how)
    assert str(caught.value) == (
        f"{path}: tensor {info.name}: offset {info.offset}: the tensor is damaged: "
        "its checksum differs"
    )


NAN_F16, NAN_F32 = np.float16("nan").tobytes(), np.float32("nan").tobytes()


@pytest.fixture
def plain_model(tiny_model, tmp_path):
    """An ordinary file without checksums."""
    return repack(tiny_model("qwen3moe", "q8_0"), tmp_path / "plain.gguf")


@pytest.mark.parametrize("policy", ["plain", "lru"])
@pytest.mark.parametrize(
    "tensor", ["blk.0.attn_norm.weight", "output_norm.weight", "blk.1.ffn_gate_inp.weight"]
)
def test_nan_in_a_norm_or_a_router_is_found_while_the_model_loads(plain_model, tensor, policy):
    """NaN in a norm or router is found at load time.

    llama.cpp rounds activations to 8 bits, which turns NaN into ordinary numbers, so a step would
    not show it.
    """
    offset = overwrite(plain_model, tensor, NAN_F32)
    with pytest.raises(DamagedError) as caught:
        opened(plain_model, policy=policy)
    assert f"{plain_model}: tensor {tensor}: offset {offset}: the value is NaN" in str(caught.value)


@pytest.mark.parametrize("policy", ["plain", "lru"])
@pytest.mark.parametrize("tensor", ["blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"])
def test_a_step_that_computes_nan_fails(plain_model, tensor, policy):
    """A NaN scale in a quantized block fails the step with one sentence.

    `verify` names the tensor.
    """
    overwrite(plain_model, tensor, NAN_F16)
    said = "the model computed NaN among the logits of a token"
    with (
        opened(plain_model, policy=policy) as runtime,
        runtime.evaluator() as e,
        pytest.raises(NativeError, match=said),
    ):
        e.eval(TOKENS, 0)
    assert tensor in str(verify(plain_model).problems)
    config = build(plain_model, policy=policy)
    with (
        Runtime.open(config, answering=Answering()) as runtime,
        pytest.raises(NativeError, match=said),
    ):
        answered(runtime, TOKENS, 3)


def test_an_abort_in_llama_cpp_prints_one_sentence(plain_model, tmp_path):
    """A rope dimension of 0 is valid for some architectures. For others llama.cpp aborts."""
    path = repack(plain_model, tmp_path / "odd.gguf", **{"rope.dimension_count": 0})
    result = python(*MOE_EDGE, "chat", "-m", path, "-p", "hello")
    assert (result.returncode, result.stdout) == (ABORTED, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"Error: {path}: llama.cpp had to end the process (")
    assert "GGML_ASSERT(n_embd_head == n_rot) failed" in result.stderr
