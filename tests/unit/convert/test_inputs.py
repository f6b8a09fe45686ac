"""What is wrong with a checkpoint, in one sentence; and that nothing is left behind."""

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

import transformers
from safetensors.numpy import load_file, save_file

from gguf_tools.convert import convert
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
    """A copy of it to damage."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(whole, copy)
    return copy


def said(folder, *options, out=None):
    """The one sentence with which convert refuses a folder."""
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
    """A file of the folder says this; None: it is gone."""
    if content is None:
        return lambda folder: (folder / name).unlink()
    return lambda folder: (folder / name).write_text(content, encoding)


def shard(number, change):
    """One file of weights holds other bytes; None: it is gone."""

    def damage(folder):
        path = shards(folder)[number]
        data = change(path.read_bytes())
        path.unlink() if data is None else path.write_bytes(data)

    return damage


def tensors(change):
    """All weights in one file, changed."""

    def damage(folder):
        found = {name: value for path in shards(folder) for name, value in load_file(path).items()}
        no_weights(folder)
        change(found)
        save_file(found, folder / "model.safetensors")

    return damage


def put(name, value, at=None):
    """A tensor takes this value, or has it in one place."""
    if at is None:
        return tensors(lambda found: found.update({name: value}))
    return tensors(lambda found: found[name].__setitem__(at, value))


def headed(n_bytes, rest):
    """A file that says that its header is so long."""
    return lambda data: n_bytes.to_bytes(8, "little") + rest


NOT_FINITE = ": a value is not finite"
# name: what is done to a checkpoint, and what the sentence has, as a regular expression.
SHARD = r"model-0000{}-of-\d+\.safetensors: "
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
FAULTS = {
    "no config": (text("config.json", None), "config.json: is missing"),
    "broken config": (text("config.json", "{"), "config.json: not JSON"),
    "a config with a mark": (
        text("config.json", "\ufeff{}"),
        "config.json: begins with a byte order",
    ),
    "a config in UTF-16": (text("config.json", "{}", "utf-16"), "config.json: it is in UTF-16"),
    "a list for a config": (text("config.json", "[1]"), "config.json: not a JSON object"),
    "no architecture": (config(architectures=None), "config.json: names no architecture"),
    "unknown architecture": (
        config(architectures=["FancyForCausalLM"], model_type="fancy"),
        "does not know the architecture FancyForCausalLM",
    ),
    "more experts announced": (config(num_experts=9, num_local_experts=9), "experts are missing"),
    "cut data": (shard(1, lambda data: data[:-7]), SHARD.format(2) + "tensor"),
    "cut header": (shard(1, lambda data: data[:100]), SHARD.format(2) + "ends inside its header"),
    "empty shard": (shard(0, lambda data: b""), SHARD.format(1) + "ends inside its header"),
    "no safetensors": (
        shard(0, headed(9, b"<html>404")),
        SHARD.format(1) + "its header is not JSON",
    ),
    "huge header": (shard(0, headed(1 << 62, b"{}")), SHARD.format(1) + "ends inside its header"),
    "missing shard": (shard(2, lambda data: None), SHARD.format(3) + "is missing"),
    "missing shard without index": (one_shard_without_index, SHARD.format(3) + "is missing"),
    "an index that leads out": (an_index_that_leads_out, "is outside of the folder"),
    "no weights": (no_weights, "no weights"),
    "no tokenizer": (text("tokenizer.json", None), "no tokenizer"),
    "broken tokenizer": (text("tokenizer.json", "{]"), "tokenizer.json: not JSON"),
    "unknown splits": (unknown_splits, "splits text by rules that llama.cpp does not know"),
    "unknown quantization": (config(quantization_config={"quant_method": "secret"}), "secret"),
    "missing expert": (
        tensors(lambda found: found.pop(EXPERT)),
        "experts are missing: model.layers.1.mlp.experts",
    ),
    "unknown tensor": (put("model.layers.1.odd", np.ones(3, "f4")), "model.layers.1.odd"),
    "odd shape": (put(EXPERT, np.ones((3, 64), "f4")), "upstream's converter"),
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
    assert "give --trust-remote-code" in said(folder)
    assert not trace.exists()
    result = run("convert", folder, tmp_path / "out.gguf", *TIERS, "--trust-remote-code")
    assert result.exit_code == 0, result.output
    assert trace.exists()


def test_a_source_that_is_no_checkpoint_of_experts(tmp_path):
    assert "does not exist" in said(tmp_path / "none")
    (tmp_path / "text.txt").write_text("x")
    assert "not a folder" in said(tmp_path / "text.txt")
    config = transformers.Qwen3Config(**families.SIZES)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    checkpoints.save_tokenizer("qwen2", tmp_path / "dense")
    found = said(tmp_path / "dense")
    assert "Qwen3ForCausalLM has no experts: not a Mixture-of-Experts model" in found


def test_a_target_that_cannot_be_written(folder, tmp_path):
    assert "there is no folder" in said(folder, out=tmp_path / "none" / "out.gguf")
    (tmp_path / "taken").mkdir()
    assert "is a folder" in said(folder, out=tmp_path / "taken")
    (tmp_path / "locked").mkdir(mode=0o555)
    if os.geteuid():  # root may write everywhere
        assert "cannot be written" in said(folder, out=tmp_path / "locked" / "out.gguf")


@cases(
    "tiers, words",
    ("f17", "unknown tier f17"),
    ("q2_k,q4_k", "list tiers best first"),
    ("f16,f16", "not below"),
)
def test_tiers_are_checked_before_anything_is_read(folder, tiers, words):
    (folder / "config.json").unlink()
    assert words in said(folder, "--tiers", tiers)


def test_no_space(folder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 4096))
    assert "only 0.0 MiB are free" in said(folder)


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
