"""Damaged and unusual checkpoints: convert refuses them in one sentence and leaves no files, or
converts them with a note."""

import json
import os
import re
import shutil
from collections import namedtuple

import numpy as np
import pytest
from command_line import run
from tables import cases

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import torch
import transformers
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_load
from safetensors.torch import save_file as torch_save

from gguf_tools.convert import convert
from gguf_tools.convert.quantized import check_quantization
from gguf_tools.errors import ConvertError
from gguf_tools.file.reader import GGUFFile

from . import checkpoints, families


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A good checkpoint in several files."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoints.write_checkpoint("qwen3-moe", folder, max_shard_size="300KB")
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the checkpoint, to be damaged."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(whole, copy)
    return copy


def said(folder, *options, out=None):
    """Run convert, which must fail, and return its single sentence."""
    out = out or folder.parent / "out.gguf"
    result = run("convert", folder, out, *(options or TIERS))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    assert not out.is_file()
    assert not list(folder.parent.glob(".*"))
    lines = result.output.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.output
    assert "Traceback" not in lines[0]
    return lines[0].removeprefix("Error: ")


TIERS = ("--tiers", "f16")


def change_json(path, **changes):
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None) if value is None else content.update({key: value})
    path.write_text(json.dumps(content))


def shards(folder):
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 3
    return found


INDEX = "model.safetensors.index.json"


def no_weights(folder):
    for path in [*shards(folder), folder / INDEX]:
        path.unlink()


def an_index_that_leads_out(folder):
    change_json(folder / INDEX, weight_map={"model.norm.weight": "../elsewhere.safetensors"})


def unknown_splits(folder):
    change_json(folder / "tokenizer.json", pre_tokenizer={"type": "WhitespaceSplit"})
    change_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def one_shard_without_index(folder):
    (folder / INDEX).unlink()
    shards(folder)[2].unlink()


def config(**changes):
    return lambda folder: change_json(folder / "config.json", **changes)


def text(name, content, encoding="utf-8"):
    """Replace the text of a file, or delete it if content is None."""
    if content is None:
        return lambda folder: (folder / name).unlink()
    return lambda folder: (folder / name).write_text(content, encoding)


def shard(number, change):
    """Change the bytes of one weight file, or delete it if `change` returns None."""

    def damage(folder):
        path = shards(folder)[number]
        data = change(path.read_bytes())
        path.unlink() if data is None else path.write_bytes(data)

    return damage


def tensors(change):
    """Put all weights into one file and change them."""

    def damage(folder):
        found = {name: value for path in shards(folder) for name, value in load_file(path).items()}
        no_weights(folder)
        change(found)
        save_file(found, folder / "model.safetensors")

    return damage


def put(name, value, at=None):
    """Set a tensor, or one of its elements."""
    if at is None:
        return tensors(lambda found: found.update({name: value}))
    return tensors(lambda found: found[name].__setitem__(at, value))


def headed(n_bytes, rest):
    """Set the length of the header that the file declares, and its rest."""
    return lambda data: n_bytes.to_bytes(8, "little") + rest


def rope(**parameters):
    return config(rope_parameters={"rope_theta": 10000.0, **parameters})


def nvfp4(missing, own=("weight", "weight_scale", "weight_scale_2")):
    """Store one matrix in NVFP4 without one of its tensors."""

    def damage(folder):
        base = EXPERT.removesuffix("weight")
        types = dict(zip(own, ("uint8", "float8_e4m3fn", "float32"), strict=True))
        shapes = dict(zip(own, ((96, 32), (96, 4), ()), strict=True))
        made = {f"{base}{each}": (types[each], shapes[each]) for each in own if each != missing}
        _of_other_types(folder, EXPERT, made)
        change_json(folder / "config.json", quantization_config={"quant_method": "modelopt"})

    return damage


def fp8_without_scale(folder):
    _of_other_types(folder, EXPERT, {EXPERT: ("float8_e4m3fn", (96, 64))})
    change_json(folder / "config.json", quantization_config={"quant_method": "fp8"})


def _of_other_types(folder, left_out, made):
    """Put all weights except one into one file, and add zeros of these types and shapes."""
    found = {name: value for path in shards(folder) for name, value in torch_load(path).items()}
    no_weights(folder)
    del found[left_out]
    for name, (dtype, shape) in made.items():
        found[name] = torch.zeros(shape, dtype=torch.float32).to(getattr(torch, dtype))
    torch_save(found, folder / "model.safetensors")


def written_by_mlx(folder):
    found = {name: value for path in shards(folder) for name, value in load_file(path).items()}
    no_weights(folder)
    save_file(found, folder / "model.safetensors", metadata={"format": "mlx"})


BY_BITSANDBYTES = "quantized by bitsandbytes .*: convert the original, unquantized checkpoint"
BY_MLX = "written by Apple's MLX .*: convert the original, unquantized checkpoint"
NOT_FINITE = ": a value is not finite"
# name: (change of the checkpoint, regular expression that the sentence must match)
SHARD = r"model-0000{}-of-\d+\.safetensors: "
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
FAULTS = {
    "no config": (text("config.json", None), "config.json: the file is missing"),
    "broken config": (text("config.json", "{"), "config.json: not JSON"),
    "a config with a mark": (
        text("config.json", "\ufeff{}"),
        "config.json: begins with a byte order",
    ),
    "a config in UTF-16": (
        text("config.json", "{}", "utf-16"),
        "config.json: the text is in UTF-16",
    ),
    "a list for a config": (text("config.json", "[1]"), "config.json: not a JSON object"),
    "no architecture": (config(architectures=None), "config.json: no architecture"),
    "unknown architecture": (
        config(architectures=["FancyForCausalLM"], model_type="fancy"),
        "does not support the architecture FancyForCausalLM",
    ),
    "more experts announced": (config(num_experts=9, num_local_experts=9), "experts are missing"),
    "cut data": (shard(1, lambda data: data[:-7]), SHARD.format(2) + "tensor"),
    "cut header": (
        shard(1, lambda data: data[:100]),
        SHARD.format(2) + "truncated inside the header",
    ),
    "empty shard": (shard(0, lambda data: b""), SHARD.format(1) + "truncated inside the header"),
    "no safetensors": (
        shard(0, headed(9, b"<html>404")),
        SHARD.format(1) + "not a safetensors file: the header is not JSON",
    ),
    "huge header": (
        shard(0, headed(1 << 62, b"{}")),
        SHARD.format(1) + "truncated inside the header",
    ),
    "missing shard": (
        shard(2, lambda data: None),
        SHARD.format(3) + r"one of \d+ weight files is missing",
    ),
    "missing shard without index": (
        one_shard_without_index,
        SHARD.format(3) + r"one of \d+ weight files is missing",
    ),
    "an index that leads out": (an_index_that_leads_out, "is outside of the folder"),
    "no weights": (no_weights, "no weights"),
    "no tokenizer": (text("tokenizer.json", None), "no tokenizer"),
    "a template that is no text": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"),
        "chat_template.jinja: not UTF-8",
    ),
    "broken tokenizer": (text("tokenizer.json", "{]"), "tokenizer.json: not JSON"),
    "unknown splits": (unknown_splits, "llama.cpp does not support the tokenizer's pre-tokenizer"),
    "unknown quantization": (config(quantization_config={"quant_method": "secret"}), "secret"),
    "by bitsandbytes": (
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        BY_BITSANDBYTES,
    ),
    "by an older bitsandbytes": (
        config(quantization_config={"load_in_8bit": True}),
        BY_BITSANDBYTES,
    ),
    "in bitsandbytes' form": (
        put("model.norm.weight.quant_state.bitsandbytes__nf4", np.ones(3, "u1")),
        BY_BITSANDBYTES,
    ),
    "by MLX": (written_by_mlx, BY_MLX),
    "quantized by MLX": (config(quantization={"group_size": 64, "bits": 4}), BY_MLX),
    "NVFP4 without its second scale": (
        nvfp4("weight_scale_2"),
        r"experts\.3\.up_proj\.weight_scale has no scale \(.*weight_scale_2 is missing\)",
    ),
    "packed NVFP4 without its second scale": (
        nvfp4("weight_global_scale", ("weight_packed", "weight_scale", "weight_global_scale")),
        r"weight_scale has no scale \(.*weight_scale_2 is missing\)",
    ),
    "FP8 without its scale": (
        fp8_without_scale,
        r"experts\.3\.up_proj\.weight has no scale \(.*weight_scale_inv is missing\)",
    ),
    "unknown rope": (
        rope(rope_type="fancy", factor=4.0),
        "config.json: llama.cpp's converter does not support the RoPE scaling 'fancy'",
    ),
    "rope of other architectures": (
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
        "config.json: llama.cpp's converter does not support the RoPE scaling 'llama3' for this",
    ),
    "rope without a factor": (
        rope(rope_type="yarn", original_max_position_embeddings=128),
        "Missing required keys in `rope_parameters` .* {'factor'}",
    ),
    "rope in the older form": (
        config(rope_parameters=None, rope_scaling={"type": "fancy", "factor": 4.0}),
        "config.json: llama.cpp's converter does not support the RoPE scaling 'fancy'",
    ),
    "missing expert": (
        tensors(lambda found: found.pop(EXPERT)),
        "experts are missing: the layer of model.layers.1.mlp.experts",
    ),
    "unknown tensor": (put("model.layers.1.odd", np.ones(3, "f4")), "model.layers.1.odd"),
    "odd shape": (put(EXPERT, np.ones((3, 64), "f4")), "llama.cpp's converter"),
    "not a number": (put(EXPERT, np.nan, (2, 3)), "blk.1.ffn_up_exps.weight" + NOT_FINITE),
    "infinite norm": (put("model.norm.weight", np.inf, 5), "output_norm.weight" + NOT_FINITE),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_checkpoint(folder, name):
    damage, expected = FAULTS[name]
    damage(folder)
    found = said(folder)
    assert re.search(expected, found), found
    assert str(folder) in found
    assert len(found) < 500


# Types of tensors by name, with all required scales.
@cases(
    "dtypes",
    {"a.weight": "U8", "a.weight_scale": "F8_E4M3", "a.weight_scale_2": "F32"},
    {"a.weight_packed": "U8", "a.weight_scale": "F8_E4M3", "a.weight_global_scale": "F32"},
    {"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"},
    {"a.weight": "F8_E4M3", "a.weight_scale": "BF16"},
    {"a.weight": "F8_E4M3", "a.scale": "F8_E8M0"},
    {"a.weight": "F8_E5M2", "a.qscale_weight": "F32"},
    {"a.weight": "BF16", "a.bias": "F32"},
)
def test_weights_with_all_scales_are_accepted(tmp_path, dtypes):
    settings = {"quantization_config": {"quant_method": "fp8"}}
    check_quantization(tmp_path, settings, dtypes, is_mlx=False)
    check_quantization(tmp_path, {"text_config": settings}, dtypes, is_mlx=False)


def converted(folder, out):
    """(metadata of the converted model, notes that were printed)."""
    result = run("convert", folder, out, *TIERS)
    assert result.exit_code == 0, result.output
    with GGUFFile.open(out) as file:
        return dict(file.metadata), "\n".join(result.output.splitlines()[1:])


FRONT = "---\n{}\n---\n# A model\n"
NO_LIST = "README.md: fields not copied (expected a text or a list of texts): {}"
NO_FIELDS = "README.md: the metadata is not copied: {}"
BOMB = "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("ab", "bc", strict=True))


# (front matter, key, its value in the model or None if absent, part of the note)
@cases(
    "text, key, value, note",
    (FRONT.format("license: mit"), "license", "mit", ""),
    (FRONT.format("license: [mit, bsd]"), "license", "mit,bsd", ""),
    (FRONT.format("\tlicense: mit"), "license", "mit", ""),
    (FRONT.format("license: mit").replace("\n", "\r\n"), "license", "mit", ""),
    ("\ufeff" + FRONT.format("license: mit"), "license", "mit", ""),
    ("---\nlicense: mit\n# A model\n", "license", "mit", ""),
    (FRONT.format(""), "license", None, ""),
    (FRONT.format("license:\nlicense_link: null"), "license", None, ""),
    ("# A model\n", "license", None, ""),
    (FRONT.format("language: [en, null, no]"), "languages", ["en", "no"], ""),
    (FRONT.format("tags: [1, 2.10, true]"), "tags", ["1", "2.10", "true"], ""),
    (FRONT.format("tags: moe"), "tags", ["moe"], ""),
    (FRONT.format("widget: {a: [1, {b: 2}]}"), "tags", None, ""),
    (FRONT.format("base_model: 7"), "base_model.0.name", "7", ""),
    (FRONT.format("base_model: [{name: x}]"), "base_model.0.name", "x", ""),
    (FRONT.format("base_model: {name: x}"), "base_model.count", None, NO_LIST.format("base_model")),
    (FRONT.format("tags: {a: 1}\nname: [a]"), "tags", None, NO_LIST.format("tags, name")),
    (FRONT.format(f"a: &a [x]\n{BOMB}tags: *c"), "tags", None, NO_LIST.format("tags")),
    (FRONT.format('tags: ["\\uD83D"]'), "tags", None, "README.md"),
    (FRONT.format("a: !!python/object/apply:os.abort []"), "tags", None, ""),
    (FRONT.format("base_model: ["), "tags", None, NO_FIELDS.format("not valid YAML in line 3: ")),
    (FRONT.format("- a"), "tags", None, NO_FIELDS.format("the front matter is not a mapping")),
    (FRONT.format("text"), "tags", None, NO_FIELDS.format("the front matter is not a mapping")),
    (
        FRONT.format("[" * 9999),
        "tags",
        None,
        "README.md: the metadata is not copied: ",
    ),
    (
        FRONT.format("license: é").encode("latin-1"),
        "license",
        None,
        NO_FIELDS.format("the file is not"),
    ),
)
def test_odd_front_matter_is_left_out(whole, tmp_path, text, key, value, note):
    """The model is written, and one note names the file."""
    shutil.copytree(whole, tmp_path / "hf")
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "hf" / "README.md").write_bytes(data)
    metadata, said = converted(tmp_path / "hf", tmp_path / "out.gguf")
    assert metadata.get(f"general.{key}") == value
    assert note in said and len(said.splitlines()) == bool(note), said


def test_front_matter_without_an_end(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("gguf_tools.convert.model_card.MAX_BYTES", 64)
    (folder / "README.md").write_text("---\nlicense: mit\n" + "a: é\n" * 99)
    _, said = converted(folder, tmp_path / "out.gguf")
    assert "README.md: the metadata is not copied: the front matter is longer than" in said


@cases(
    "files, template",
    ({"chat_template.jinja": "new"}, "new"),
    ({"chat_template.jinja": "\ufeffnew"}, "new"),
    ({"additional_chat_templates/tools.jinja": "tools"}, "old"),
    ({"chat_template.json": '{"chat_template": "other"}'}, "old"),
    ({}, "old"),
)
def test_a_template_in_its_own_file_takes_precedence(folder, tmp_path, files, template):
    """chat_template.jinja takes precedence over tokenizer_config.json, as in transformers."""
    change_json(folder / "tokenizer_config.json", chat_template="old")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    metadata, said = converted(folder, tmp_path / "out.gguf")
    assert metadata["tokenizer.chat_template"] == template and not said


def test_additional_templates_are_kept(folder, tmp_path):
    change_json(folder / "tokenizer_config.json", chat_template="old")
    (folder / "chat_template.jinja").write_text("new")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    metadata, _ = converted(folder, tmp_path / "out.gguf")
    assert metadata["tokenizer.chat_template"] == "new"
    assert metadata["tokenizer.chat_template.tool_use"] == "tools"


@cases(
    "parameters, note",
    ({"rope_type": "default"}, ""),
    ({"rope_type": "linear", "factor": 4.0}, ""),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, ""),
    (
        {"rope_type": "dynamic", "factor": 4.0},
        "config.json: the RoPE scaling 'dynamic' is not conv",
    ),
)
def test_a_rope_type_that_is_known(folder, tmp_path, parameters, note):
    rope(**parameters)(folder)
    metadata, said = converted(folder, tmp_path / "out.gguf")
    assert note in said and bool(note) == bool(said)
    scaled = parameters["rope_type"] in ("linear", "yarn")
    assert metadata.get("qwen3moe.rope.scaling.factor") == (4.0 if scaled else None)


def test_a_warning_of_upstreams_reaches_the_user(folder, tmp_path):
    """The warning is printed exactly once, as a note."""
    change_json(folder / "tokenizer_config.json", chat_template=5)
    _, said = converted(folder, tmp_path / "out.gguf")
    assert said.startswith("Note: ") and len(said.splitlines()) == 1
    assert "warning of llama.cpp's converter: Bad type for chat_template" in said


OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class Mine(PreTrainedTokenizerFast):
    pass

open(r"{}", "w").close()
"""


def test_code_of_a_checkpoint_runs_only_when_asked_for(tmp_path):
    folder, trace = tmp_path / "hf", tmp_path / "ran"
    checkpoints.write_checkpoint("deepseek-moe", folder)
    change_json(
        folder / "tokenizer_config.json",
        tokenizer_class="Mine",
        auto_map={"AutoTokenizer": [None, "mine.Mine"]},
    )
    (folder / "mine.py").write_text(OWN_TOKENIZER.format(trace))
    assert "use --trust-remote-code" in said(folder)
    assert not trace.exists()
    result = run("convert", folder, tmp_path / "out.gguf", *TIERS, "--trust-remote-code")
    assert result.exit_code == 0, result.output
    assert trace.exists()


def test_sources_that_are_not_a_checkpoint_with_experts(tmp_path):
    assert "does not exist" in said(tmp_path / "none")
    (tmp_path / "text.txt").write_text("x")
    assert "not a folder" in said(tmp_path / "text.txt")
    config = transformers.Qwen3Config(**families.SIZES)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    checkpoints.save_tokenizer("qwen2", tmp_path / "dense")
    found = said(tmp_path / "dense")
    assert "not a Mixture-of-Experts model: Qwen3ForCausalLM has no experts" in found


def test_a_target_that_cannot_be_written(folder, tmp_path):
    assert "does not exist" in said(folder, out=tmp_path / "none" / "out.gguf")
    (tmp_path / "taken").mkdir()
    assert "is a folder" in said(folder, out=tmp_path / "taken")
    (tmp_path / "locked").mkdir(mode=0o555)
    if os.geteuid():  # root may write everywhere
        assert "no permission to write" in said(folder, out=tmp_path / "locked" / "out.gguf")


@cases(
    "tiers, words",
    ("f17", "unknown tier f17"),
    ("q2_k,q4_k", "list the best tier first"),
    ("f16,f16", "not below"),
)
def test_tiers_are_checked_before_anything_is_read(folder, tiers, words):
    (folder / "config.json").unlink()
    assert words in said(folder, "--tiers", tiers)


def test_no_space(folder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 4096))
    assert "only 0.0 MiB free" in said(folder)


def test_the_header_is_shown_before_anything_is_computed(folder, tmp_path):
    seen = []

    def refuse(path):
        with GGUFFile.open(path) as file:
            seen.append((file.metadata["general.architecture"], len(file.tensors)))
        raise ConvertError("it cannot run")

    shares = []
    with pytest.raises(ConvertError, match="it cannot run"):
        own = {"on_header": refuse, "progress": shares.append, "threads": 1}
        convert(folder, tmp_path / "out.gguf", ["f16"], **own)
    [(architecture, n_tensors)] = seen
    assert architecture == "qwen3moe" and n_tensors > 10
    assert shares == [] and not (tmp_path / "out.gguf").exists()
