"""Our files in upstream's library and tools, built without our patches."""

from pathlib import Path

import numpy as np
import pytest
import unpatched
from tables import cases

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import parse_expert_name
from gguf_tools.file.reader import GGUFFile
from gguf_tools.pack import export, pack
from gguf_tools.quantize.ggml import load_ggml
from gguf_tools.quantize.imatrix import read_imatrix
from gguf_tools.quantize.methods import ByImportance
from orchestrator.lab.calibrate.capture import WINDOW
from orchestrator.lab.calibrate.methods import Method, save_imatrix

from .families import FAMILIES
from .running import managed_logits, our_logits

DEMO = Path(__file__).parents[3] / "models" / "demo" / "moe-edge-demo.gguf"
PLAIN = ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "iq4_xs", "iq4_nl", "q4_0", "q5_1")
# The demo's own texts, so that each expert gets tokens.
TEXT = (DEMO.parent / "conversations.txt").read_text()[:20000]
FOUND = unpatched.find()
pytestmark = pytest.mark.skipif(
    isinstance(FOUND, str), reason=FOUND if isinstance(FOUND, str) else ""
)


@pytest.fixture(scope="module")
def upstream():
    return FOUND


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The demo model's best tier as an ordinary GGUF."""
    path = tmp_path_factory.mktemp("source") / "q8.gguf"
    export(DEMO, path, "q8_0")
    return path


@pytest.fixture(scope="module")
def text(source):
    path = source.with_name("text.txt")
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def ours(source, text):
    """An importance matrix computed by moe-edge."""
    out = source.with_name("ours.gguf")
    save_imatrix(Method("imatrix", text, threads=1), source, out, lambda _: None)
    return out


@pytest.fixture(scope="module")
def theirs(upstream, source, text):
    """theirs(suffix): an importance matrix by llama-imatrix, in GGUF or in the older format
    "dat"."""

    def make(suffix):
        out = source.with_name(f"theirs.{suffix}")
        if not out.exists():
            arguments = ["-m", source, "-f", text, "-o", out, "--output-format", suffix, "-t", 1]
            arguments += ["-c", WINDOW, "-b", WINDOW, "-ub", WINDOW, "--parse-special"]
            upstream.tool("llama-imatrix", *arguments)
        return out

    return make


def experts(path):
    """Yield (name, type, bytes) of each expert tensor."""
    with GGUFFile.open(path) as file:
        for info in file.tensors.values():
            if parse_expert_name(info.name) is not None:
                yield info.name, info.type, file.bytes_at(info.offset, info.nbytes).tobytes()


def packed(source, out, tier, imatrix=None):
    with ExpertModel.open(source) as model:
        by = None if imatrix is None else ByImportance.of_file(imatrix, model, load_ggml())
        pack(model, out, [tier], quantizer=by, threads=1)
    return out


def quantized(upstream, source, out, tier, imatrix=None):
    chosen = [] if imatrix is None else ["--imatrix", imatrix]
    arguments = [*chosen, "--allow-requantize", "--pure", "--tensor-type", f"ffn_.*_exps={tier}"]
    upstream.tool("llama-quantize", *arguments, source, out, "q8_0", 1)
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_exported_families_give_the_same_bits_upstream(name, case, tmp_path, upstream):
    """The exported tier in upstream's library equals the packed file with a store here, bit for
    bit."""
    made = case(name)
    export(made.packed, tmp_path / "f16.gguf", "f16")
    found = upstream.logits(tmp_path / "f16.gguf", made.tokens, made.answer)
    here = managed_logits(made.packed, made.tokens, made.answer, "f16")
    np.testing.assert_array_equal(found, here)


@pytest.mark.parametrize("tier", ["q8_0", "q4_k", "q2_k"])
def test_exported_tiers_of_the_demo_give_the_same_bits_upstream(tier, tmp_path, upstream):
    export(DEMO, tmp_path / "one.gguf", tier)
    tokens, answer = list(range(5, 45)), list(range(300, 316))
    found = upstream.logits(tmp_path / "one.gguf", tokens, answer)
    budget = 12 << 20
    here = our_logits(DEMO, tokens, answer, policy="lru", high_tier=tier, expert_ram=budget)
    np.testing.assert_array_equal(found, here)


@pytest.mark.parametrize("tier", PLAIN)
def test_tiers_equal_those_of_llama_quantize(tier, source, tmp_path, upstream):
    mine = packed(source, tmp_path / "mine.gguf", tier)
    other = quantized(upstream, source, tmp_path / "other.gguf", tier)
    assert list(experts(mine)) == list(experts(other))


@cases(
    "made_by, tier",
    *(("us", tier) for tier in ("q4_k", "q2_k", "iq4_xs", "iq2_xs", "iq1_s")),
    ("llama-imatrix", "q2_k"),
    ("llama-imatrix, the older format", "q2_k"),
)
def test_tiers_by_importance_equal_those_of_llama_quantize(
    made_by, tier, source, ours, theirs, tmp_path, upstream
):
    """Both programs read each other's importance matrices and write the same bytes."""
    imatrix = ours if made_by == "us" else theirs("dat" if "older" in made_by else "gguf")
    mine = packed(source, tmp_path / "mine.gguf", tier, imatrix)
    other = quantized(upstream, source, tmp_path / "other.gguf", tier, imatrix)
    assert list(experts(mine)) == list(experts(other))


def test_importance_is_that_of_llama_imatrix(ours, theirs):
    """The mean importance of the same text differs by at most 2 %. The programs differ in their use
    of the end of the text, which is shorter than a window."""
    mine, other = read_imatrix(ours), read_imatrix(theirs("gguf"))
    for name, entry in mine.entries.items():
        mean = entry.sums.sum() / entry.counts.sum()
        their = other.entries[name]
        assert mean == pytest.approx(their.sums.sum() / their.counts.sum(), rel=0.02), name
