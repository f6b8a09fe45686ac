"""pack and export: bytes, metadata, and no files left after errors."""

import os

import numpy as np
import pytest
from command_line import run
from gguf_craft import model_metadata, model_tensors, write_model
from gguf_split import split
from tables import cases
from verify_files import place, poke

from gguf_tools import errors
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, UP, GGMLType, expert_tensor_name
from gguf_tools.file.reader import GGUFFile
from gguf_tools.pack import export, pack

INTEGERS = dict.fromkeys(range(4), GGMLType.I16)
NO_FLOATS = r"src\.gguf: tensor blk\.0\..*: ggml cannot decode i16"
KEPT = {"custom.key": ["kept", "as it is"]}


def source(path, n_ff=256, n_embd=256, **changes):
    metadata = model_metadata(embedding_length=n_embd) | {"general.file_type": 1} | KEPT
    return write_model(path, model_tensors(n_embd=n_embd, n_ff=n_ff, **changes), metadata)


@pytest.fixture
def packed_as(tmp_path, ggml):
    """packed_as(*tiers, **changes of the source): the report of `pack`."""

    def make(*tiers, **changes):
        src = source(tmp_path / "src.gguf", **changes)
        return pack(src, tmp_path / "out.gguf", list(tiers), ggml=ggml)

    return make


def tensor_bytes(path):
    with GGUFFile.open(path) as file:
        return {name: file.array(name).tobytes() for name in file.tensors}


def expert_data(model, found, expert):
    return model.parts[0].bytes_at(found.offset + expert * found.expert_bytes, found.expert_bytes)


def test_pack_and_export(tmp_path, ggml):
    src = source(tmp_path / "src.gguf")
    tiers = ["q8_0", "q4_k", "q2_k"]
    shares = []
    report = pack(src, tmp_path / "packed.gguf", tiers, progress=shares.append, ggml=ggml)
    assert report.fallbacks == report.warnings == []
    assert [tier[:2] for tier in report.tiers] == [("q8_0", 8.5), ("q4_k", 4.5), ("q2_k", 2.625)]
    assert report.nbytes == report.path.stat().st_size
    assert shares == sorted(shares) and shares[-1] == 1.0

    with ExpertModel.open(report.path) as model, ExpertModel.open(src) as original:
        assert [tier.name for tier in model.tiers] == tiers
        assert model.dense_bytes == original.dense_bytes
        assert model.tier_bytes == [nbytes for _, _, nbytes in report.tiers]
        for layer in range(2):
            for kind in (UP, GATE, DOWN):
                where = original.slices[layer][kind][0]
                for tier, found in enumerate(model.slices[layer][kind]):
                    assert found.offset % 4096 == 0
                    for expert in range(model.n_expert):
                        values = expert_data(original, where, expert)
                        rows = values.view(np.float16).astype(np.float32).reshape(256, 256)
                        data = expert_data(model, found, expert)
                        assert data.tobytes() == ggml.quantize(found.type, rows).tobytes(), tier
        own = {"format_version": 1, "tiers": tiers, "tier_bpw": [8.5, 4.5, 2.625]}
        own |= {"quantization": "rtn", "calibration": "none"}
        written = {f"moe_edge.{key}": value for key, value in own.items()}
        written |= KEPT | {"general.file_type": 7}
        assert model.metadata.items() >= written.items()
        assert model.parts[0].alignment == 4096

    packed, dense = tensor_bytes(report.path), tensor_bytes(src)
    assert packed["token_embd.weight"] == dense["token_embd.weight"]

    gguf = pytest.importorskip("gguf")
    for tier, file_type in (("q8_0", 7), ("q4_k", 14), ("q2_k", 10)):
        out = export(report.path, tmp_path / f"{tier}.gguf", tier).path
        theirs = gguf.GGUFReader(out)
        assert theirs.fields["general.file_type"].contents() == file_type
        assert theirs.fields["general.quantization_version"].contents() == 2
        assert not any("moe_edge" in key for key in theirs.fields)
        assert {each.name for each in theirs.tensors} == set(dense)
        suffix = "" if tier == "q8_0" else f".moe_edge.{tier}"
        for name, data in tensor_bytes(out).items():
            assert data == packed[name + suffix if "_exps" in name else name]
        with ExpertModel.open(out) as model:
            assert [each.name for each in model.tiers] == [tier]
            assert model.parts[0].alignment == 32


def test_equal_types_keep_their_bytes(tmp_path, ggml):
    src = source(tmp_path / "src.gguf", n_ff=512)
    first = pack(src, tmp_path / "first.gguf", ["q8_0", "q4_k", "q2_k"], ggml=ggml).path
    again = pack(first, tmp_path / "again.gguf", ["q4_k", "q2_k"], ggml=None).path
    before, after = tensor_bytes(first), tensor_bytes(again)
    name = expert_tensor_name(1, DOWN)
    assert after[name] == before[name + ".moe_edge.q4_k"]
    assert after[name + ".moe_edge.q2_k"] == before[name + ".moe_edge.q2_k"]
    out = export(again, tmp_path / "out.gguf").path
    assert tensor_bytes(out)[name] == after[name]


@cases("ggml_type", GGMLType.F32, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q6_K, GGMLType.IQ4_XS)
def test_other_source_types(tmp_path, ggml, ggml_type):
    f16 = source(tmp_path / "f16.gguf")
    packed = pack(f16, tmp_path / "one.gguf", [ggml_type.tier_name], ggml=ggml).path
    src = export(packed, tmp_path / "src.gguf").path
    out = pack(src, tmp_path / "out.gguf", [ggml_type.tier_name, "q2_k"], ggml=ggml).path
    name = expert_tensor_name(0, UP)
    with GGUFFile.open(out) as file, GGUFFile.open(src) as original:
        assert file.array(name).tobytes() == original.array(name).tobytes()
        values = ggml.dequantize(ggml_type, original.array(name), 256)
        low = file.array(f"{name}.moe_edge.q2_k")
        assert low.tobytes() == ggml.quantize(GGMLType.Q2_K, values).tobytes()


def test_rows_that_k_quants_cannot_hold(packed_as):
    report = packed_as("q4_k", "q2_k", n_ff=192)
    expected = [
        "down: q4_k -> iq4_nl (rows of 192 are not a multiple of 256)",
        "down: q2_k -> q2_0 (rows of 192 are not a multiple of 256)",
    ]
    assert report.fallbacks == expected
    with ExpertModel.open(report.path) as model:
        assert model.fallbacks == expected
        assert [tier.name for tier in model.tiers] == ["q4_k", "q2_k"]
        assert model.metadata["moe_edge.quantization"] == "rtn, q2_0 by least squares"
        types = [each.type for each in model.slices[0][DOWN]]
        assert types == [GGMLType.IQ4_NL, GGMLType.Q2_0]
        assert [each.type for each in model.slices[0][UP]] == [GGMLType.Q4_K, GGMLType.Q2_K]
        assert model.tiers[1].bpw == pytest.approx((2 * 2.625 + 2.25) / 3)


def test_an_older_type_holds_the_same_numbers(packed_as, tmp_path, ggml):
    """Released versions of llama.cpp cannot read Q2_0, so export writes it as Q4_0."""
    packed = packed_as("q4_k", "q2_k", n_ff=192).path
    kept = export(packed, tmp_path / "kept.gguf", "q2_k")
    assert kept.warnings == ["only recent builds of llama.cpp can read q2_0"]
    made = export(packed, tmp_path / "made.gguf", "q2_k", older=True)
    assert made.warnings == []
    [note] = made.fallbacks
    assert note.startswith("q2_0 is written as q4_0 because released versions of")
    for report in (kept, made):  # numbers of the written file, not of the tier
        with ExpertModel.open(report.path) as model:
            assert report.tiers == [("q2_k", model.tiers[0].bpw, model.tier_bytes[0])]
    assert made.tiers[0][1] > kept.tiers[0][1]
    with GGUFFile.open(kept.path) as new, GGUFFile.open(made.path) as old:
        assert list(new.tensors) == list(old.tensors)
        changed = 0
        for name, info in new.tensors.items():
            data = old.array(name)
            if info.type is not GGMLType.Q2_0:
                assert data.tobytes() == new.array(name).tobytes()
                continue
            changed += 1
            assert old.tensors[name].type is GGMLType.Q4_0
            values = ggml.dequantize(GGMLType.Q4_0, data, 192)
            assert values.any()
            assert (ggml.dequantize(GGMLType.Q2_0, new.array(name), 192) == values).all()
        assert changed == 2


@cases(
    "flags, written, said",
    ([], GGMLType.Q4_0, "use --keep-types"),
    (["--keep-types"], GGMLType.Q2_0, "only recent builds of llama.cpp can read q2_0"),
)
def test_export_writes_older_types_unless_keep_types_is_given(
    packed_as, tmp_path, flags, written, said
):
    packed, out = packed_as("q4_k", "q2_k", n_ff=192).path, tmp_path / "older.gguf"
    result = run("export", "--tier", "q2_k", packed, out, *flags)
    assert result.exit_code == 0 and said in result.output, result.output
    with GGUFFile.open(out) as file:
        assert file.tensors[expert_tensor_name(0, DOWN)].type is written


@cases(
    "tiers, changes, said",
    (("q4_k", "q2_k"), {"n_ff": 96, "n_embd": 96}, r"tier q2_k takes 4\.50 bits per weight"),
    (("q8_0",), {"types": INTEGERS}, NO_FLOATS),
    (("q9_0",), {}, "unknown tier q9_0"),
)
def test_models_and_tiers_that_cannot_be_packed(packed_as, tmp_path, tiers, changes, said):
    with pytest.raises(errors.QuantizeError, match=said):
        packed_as(*tiers, **changes)
    assert os.listdir(tmp_path) == ["src.gguf"]


def test_warnings_about_the_source(tmp_path, ggml):
    src = source(tmp_path / "src.gguf")
    low = pack(src, tmp_path / "low.gguf", ["q4_k"], ggml=ggml).path
    report = pack(low, tmp_path / "up.gguf", ["q8_0", "q4_k"], ggml=ggml)
    assert len(report.warnings) == 1
    assert "less than the requested q8_0" in report.warnings[0]
    report = pack(low, tmp_path / "down.gguf", ["q4_k", "q2_k"], ggml=ggml)
    assert "smaller if the source has 8 bits or more" in report.warnings[0]


def test_dense_matrices_on_demand(tmp_path, ggml):
    tensors = [
        ("output.weight", (256, 8), GGMLType.F16),
        ("blk.0.attn_q.weight", (256, 256), GGMLType.F32),
        ("blk.0.attn_q_norm.weight", (64, 4), GGMLType.F32),
        ("blk.0.odd.weight", (40, 4), GGMLType.F32),
        ("output_norm.weight", (256,), GGMLType.F32),
        *model_tensors(n_embd=256, n_ff=256),
    ]
    src = write_model(tmp_path / "src.gguf", tensors, model_metadata(embedding_length=256))
    experts = {name for name, *_ in tensors if "_exps" in name}
    matrices = {"output.weight", "blk.0.attn_q.weight", "token_embd.weight"}
    for dense, changed in ((None, experts), ("q8_0", experts | matrices)):
        out = pack(src, tmp_path / "out.gguf", ["q4_k"], dense=dense, ggml=ggml).path
        with GGUFFile.open(src) as a, GGUFFile.open(out) as b:
            types = {name: (a.tensors[name].type, b.tensors[name].type) for name in a.tensors}
            assert {name for name, (old, new) in types.items() if old != new} == changed
            values = a.array("output.weight").view(np.float16).astype(np.float32).reshape(8, 256)
            again = ggml.dequantize(types["output.weight"][1], b.array("output.weight"), 256)
    np.testing.assert_allclose(again, values, atol=0.002)


def test_split_source(tmp_path, ggml):
    parts = split(source(tmp_path / "src.gguf"), tmp_path, 2)
    out = pack(parts[0], tmp_path / "out.gguf", ["q4_k"], ggml=ggml).path
    with ExpertModel.open(out) as model:
        assert len(model.files) == 1
        assert not any(key.startswith("split.") for key in model.metadata)


def test_values_that_are_not_finite(tmp_path, ggml):
    src = source(tmp_path / "src.gguf")
    name = expert_tensor_name(1, GATE)
    poke(src, place(src, name).offset + 2 * 256 * 256 * 2, b"\x00\x7c")
    said = rf"tensor {name}: expert 2: a value is not finite"
    with pytest.raises(errors.QuantizeError, match=said):
        pack(src, tmp_path / "out.gguf", ["q4_k"], ggml=ggml)
    assert os.listdir(tmp_path) == ["src.gguf"]


def test_target_equal_to_source(tmp_path, ggml):
    src = source(tmp_path / "src.gguf")
    before = src.read_bytes()
    with pytest.raises(errors.WriteError, match="also the input"):
        pack(src, src, ["q4_k"], ggml=ggml)
    (tmp_path / "link.gguf").symlink_to(src)
    with pytest.raises(errors.WriteError, match="also the input"):
        export(src, tmp_path / "link.gguf")
    assert src.read_bytes() == before


def test_an_error_in_progress_leaves_nothing(tmp_path, ggml):
    src = source(tmp_path / "src.gguf")

    def stop(share):
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(src, tmp_path / "out.gguf", ["q4_k", "q2_k"], progress=stop, ggml=ggml)
    with pytest.raises(KeyboardInterrupt):
        export(src, tmp_path / "out.gguf", progress=stop)
    assert os.listdir(tmp_path) == ["src.gguf"]
