"""`inspect`: facts about a file as numbers and as text."""

import json

import pytest
from command_line import run
from gguf_craft import model_metadata, model_tensors, packed_metadata, write_model, write_packed
from gguf_split import split
from tables import cases

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, GATE, UP, GGMLType
from gguf_tools.inspect import BUDGET_SHARES, describe, render
from gguf_tools.pack import export
from gguf_tools.units import format_size
from orchestrator.settings import parse_size


def table_of(path):
    return [" ".join(line.split()) for line in render(facts_of(path)).splitlines()]


def facts_of(path):
    with ExpertModel.open(path) as model:
        return describe(model)


def test_describe_packed(tmp_path):
    facts = facts_of(write_packed(tmp_path / "m.gguf"))
    assert json.loads(json.dumps(facts)) == facts
    assert facts["architecture"] == "qwen3moe"
    assert (facts["layers"], facts["moe_layers"]) == (2, 2)
    assert (facts["experts"], facts["experts_used"]) == (4, 2)
    assert facts["kv_tokens"] == 512
    assert [
        (tier["name"], tier["bits_per_weight"], tier["expert_bytes"]) for tier in facts["tiers"]
    ] == [("q8_0", 8.5, 3 * 64 * 34), ("q4_0", 4.5, 3 * 64 * 18)]
    assert facts["tiers"][0]["types"] == {"up": ["q8_0"], "gate": ["q8_0"], "down": ["q8_0"]}
    assert facts["matrices"][0] == {"kind": "up", "row": 64, "rows": 32}


def test_budgets_count_whole_slots(tmp_path):
    tensors = model_tensors(
        n_embd=512, n_ff=512, tiers=("q8_0", "q4_0"), tier_types=(GGMLType.Q8_0, GGMLType.Q4_0)
    )
    metadata = packed_metadata(embedding_length=512)
    facts = facts_of(write_model(tmp_path / "m.gguf", tensors, metadata, alignment=4096))
    assert [budget["share"] for budget in facts["budgets"]] == list(BUDGET_SHARES)
    experts = [budget["experts_per_layer"] for budget in facts["budgets"]]
    # 4 experts per layer. Slots of q4_0 have 4.5 / 8.5 of the size of q8_0 slots, without rounding.
    assert [each["q8_0"] for each in experts] == [1, 1, 2, 3, 4]
    assert [each["q4_0"] for each in experts] == [1, 3, 4, 4, 4]
    for budget in facts["budgets"]:
        rest = facts["dense_bytes"] + facts["kv_bytes"]
        assert budget["ram_bytes"] == budget["slot_bytes"] + rest
    assert facts["budgets"][-1]["slot_bytes"] == facts["tiers"][0]["bytes"]


def test_mixed_types_and_fallbacks_are_listed(tmp_path):
    types = {UP: GGMLType.Q4_K, GATE: GGMLType.Q4_K, DOWN: GGMLType.IQ4_NL}
    tensors = model_tensors(n_embd=256, n_ff=32, types=types)
    metadata = {
        **model_metadata(embedding_length=256),
        "moe_edge.format_version": 1,
        "moe_edge.tiers": ["q4_k"],
        "moe_edge.fallbacks": ["down: q4_k -> iq4_nl (rows of 32)"],
    }
    facts = facts_of(write_model(tmp_path / "m.gguf", tensors, metadata))
    assert facts["tiers"][0]["types"]["down"] == ["iq4_nl"]
    assert "fallback down: q4_k -> iq4_nl (rows of 32)" in render(facts)


def test_texts_of_a_file_are_shown_in_one_line_without_control_characters(tmp_path):
    tensors = model_tensors(tiers=("q8_0", "q4_0"), tier_types=(GGMLType.Q8_0, GGMLType.Q4_0))
    hostile = "a\nb\r\x1b[31m\u202e"
    metadata = packed_metadata(**{"name": hostile}) | {
        f"moe_edge.{key}": [hostile] if key == "fallbacks" else hostile
        for key in ("quantization", "calibration", "fallbacks")
    }
    path = write_model(tmp_path / "m.gguf", tensors, metadata, alignment=4096)
    facts = facts_of(path)
    texts = [facts[name] for name in ("name", "quantization", "calibration")]
    assert [*texts, *facts["fallbacks"]] == ["a b [31m"] * 4
    said = run("inspect", path).output
    assert all(line.isprintable() for line in said.splitlines())
    assert not any(line.startswith("b") for line in said.splitlines())


def test_a_table_that_is_read_by_rows_is_named(tmp_path):
    tensors = [*model_tensors(), ("per_layer_token_embd.weight", (1024, 3), GGMLType.F32)]
    path = write_model(tmp_path / "m.gguf", tensors)
    said = "row by row if moe-edge manages the experts: per_layer_token_embd.weight (12 KiB)"
    assert said in run("inspect", path).stdout
    assert json.loads(run("inspect", path, "--json").stdout)["lookup_bytes"] == 12 << 10


@cases(
    "n, text",
    (0, "0 B"),
    (999, "999 B"),
    (1024, "1 KiB"),
    (1 << 20, "1 MiB"),
    (100 << 20, "100 MiB"),
    (1030 << 20, "1.01 GiB"),
    (3 << 29, "1.5 GiB"),
    (1293 << 10, "1.26 MiB"),
    (20 << 30, "20 GiB"),
)
def test_sizes_are_formatted_with_binary_units(n, text):
    assert format_size(n) == text


def test_a_size_rounded_up_is_enough():
    for n in (1, 1023, 1025, (1 << 20) + 1, (345 << 20) + 1, (6 << 30) + 1):
        assert n <= parse_size(format_size(n, up=True)) <= 1.02 * n


def mixed_model(path):
    """Three layers: one dense, and two whose down matrices have different types."""
    tensors = [("token_embd.weight", (256, 3), GGMLType.F32)]
    tensors += [("blk.0.ffn_up.weight", (256, 32), GGMLType.F32)]
    for il, down in ((1, GGMLType.Q8_0), (2, GGMLType.IQ4_NL)):
        types = {UP: GGMLType.Q4_K, GATE: GGMLType.Q4_K, DOWN: down}
        tensors += model_tensors(n_embd=256, n_ff=32, types=types, layers=[il])[1:]
    return write_model(path, tensors, model_metadata(embedding_length=256, block_count=3))


def test_each_layer_is_accounted_for(tmp_path):
    facts = facts_of(mixed_model(tmp_path / "m.gguf"))
    dense, first, second = facts["per_layer"]
    assert dense == {"layer": 0, "dense_bytes": 256 * 32 * 4, "tiers": []}
    router = 256 * 4 * 4
    up_and_gate, weights = 2 * 4 * 32 * 144, 4 * 32 * 256
    for layer, name, block in ((first, "q8_0", 34), (second, "iq4_nl", 18)):
        assert layer["dense_bytes"] == router
        (tier,) = layer["tiers"]
        assert tier["bytes"] == up_and_gate + weights // 32 * block
        assert tier["types"] == {"up": "q4_k", "gate": "q4_k", "down": name}
    assert facts["outside_layers_bytes"] == 256 * 3 * 4
    assert facts["outside_layers_bytes"] + 256 * 32 * 4 + 2 * router == facts["dense_bytes"]


def test_the_layer_table_names_odd_types_and_joins_equal_layers(tmp_path):
    table = table_of(mixed_model(tmp_path / "mixed.gguf"))
    assert "layers dense q4_k types" in table
    assert "0 32 KiB - -" in table
    assert "1 4 KiB 70 KiB q4_k, down q8_0" in table
    assert "2 4 KiB 54 KiB q4_k, down iq4_nl" in table
    table = table_of(write_packed(tmp_path / "packed.gguf"))
    assert "layers dense q8_0 q4_0" in table
    assert "0-1 1 KiB 25.5 KiB 13.5 KiB" in table


def test_parts_and_pairs_have_the_layers_of_one_file(tmp_path):
    whole = write_packed(tmp_path / "whole.gguf")
    expected = facts_of(whole)["per_layer"]
    assert facts_of(split(whole, tmp_path / "parts", 3)[0])["per_layer"] == expected
    high, low = (export(whole, tmp_path / f"{tier}.gguf", tier).path for tier in ("q8_0", "q4_0"))
    result = run("inspect", high, "--low", low, "--json")
    assert json.loads(result.stdout)["per_layer"] == expected


def test_the_plot_shows_every_tier(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    path = write_packed(tmp_path / "m.gguf", name="Mo$E^{\x1b" + "long" * 20)
    first, second, picture = (tmp_path / name for name in ("a.svg", "b.svg", "c.PNG"))
    for out in (first, second, picture):
        result = run("inspect", path, "--json", "--plot", out)
        assert result.exit_code == 0, result.output
        assert result.stdout == run("inspect", path, "--json").stdout
        assert str(out) in result.stderr
    svg = first.read_text()
    assert svg == second.read_text()
    for text in ("experts in q8_0", "4.50 bits/weight, 27 KiB", "dense weights", "Mo$E^{longlong"):
        assert text in svg
    assert svg.count("fill: #0072b2") == 3  # two layers and the legend
    assert picture.read_bytes().startswith(b"\x89PNG")
