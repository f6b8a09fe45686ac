"""``verify``: what the metadata promises of tiers, layers and how a file was made."""

import pytest
from gguf_craft import model_metadata, model_tensors, write_model
from verify_files import LOW, UP, place, repack, texts

from gguf_tools.file.reader import GGUFFile
from gguf_tools.pack import pack


def test_a_missing_tier(packed, tmp_path, ggml):
    gate = "blk.0.ffn_gate_exps.weight.moe_edge.q2_k"
    path = repack(packed, tmp_path / "m.gguf", drop={LOW, gate})
    assert sorted(texts(path, ggml)) == [
        f"{path}: tensor {name} is missing, but key moe_edge.tiers announces tier q2_k"
        for name in (gate, LOW)
    ]
    path = repack(packed, tmp_path / "n.gguf", drop={UP})
    offset = place(path, LOW).offset
    assert texts(path, ggml)[0] == (
        f"{path}: tensor {LOW}: offset {offset}: its best tier {UP} is missing"
    )


@pytest.mark.parametrize(
    ("changes", "said", "rest"),
    [
        (
            {"alignment": 64},
            "alignment 64; an expert file is aligned to 4096 bytes",
            "not a multiple of 4096",
        ),
        ({"meta": {"qwen3moe.expert_count": 7}}, "expert", None),
        (
            {"meta": {"moe_edge.tier_bpw": [4.5]}},
            "key moe_edge.tier_bpw [4.5], but the tiers hold 4.50, 2.62 bits per weight",
            None,
        ),
        ({"meta": {"moe_edge.format_version": 99}}, "moe_edge.format_version: 99", None),
    ],
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


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("fallbacks", ["down: q8_0 is fine"], "does not say: down: q4_k -> iq4_nl (rows"),
        ("quantization", 7, "not a text"),
        ("calibration", ["a"], "not a text"),
        ("fallbackz", ["a"], "unknown"),
        ("tiers", ["y4_k"], "y4_k is no type"),
    ],
)
def test_what_is_said_about_the_making(tmp_path, ggml, key, value, said):
    tensors = model_tensors(n_embd=256, n_ff=64)
    source = write_model(tmp_path / "src.gguf", tensors, model_metadata(embedding_length=256))
    good = pack(source, tmp_path / "good.gguf", ["q4_k"], ggml=ggml).path
    assert texts(good, ggml) == []
    bad = repack(good, tmp_path / "bad.gguf", meta={f"moe_edge.{key}": value})
    (found,) = texts(bad, ggml)
    assert found.startswith(f"{bad}: key moe_edge.{key}") and said in found
