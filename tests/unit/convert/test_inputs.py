"""What is wrong with a checkpoint, in one sentence; and that nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra `convert`")
pytest.importorskip("transformers", reason="needs the extra `convert`")

import transformers
from safetensors.numpy import load_file, save_file

from gguf_tools.convert import convert
from gguf_tools.errors import ConvertError
from gguf_tools.file.reader import GGUFFile
from orchestrator.cli.main import cli

from . import checkpoints, families


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint in several files."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoints.write_checkpoint("qwen3-moe", folder, max_shard_size="300KB")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(whole, copy)
    return copy


def said(folder: Path, *options: str, out: Path | None = None) -> str:
    """The one sentence with which convert refuses a folder."""
    out = out or folder.parent / "out.gguf"
    result = CliRunner().invoke(cli, ["convert", str(folder), str(out), *(options or TIERS)])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    assert not out.is_file()
    assert not list(folder.parent.glob(".*"))
    lines = result.output.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.output
    assert "Traceback" not in lines[0]
    return lines[0].removeprefix("Error: ")


TIERS = ("--tiers", "f16")


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None) if value is None else content.update({key: value})
    path.write_text(json.dumps(content))


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 3
    return found


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json: is missing"


def broken_config(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json: not JSON"


def a_list_for_a_config(folder: Path) -> str:
    (folder / "config.json").write_text("[1]")
    return "config.json: not a JSON object"


def no_architecture(folder: Path) -> str:
    change_json(folder / "config.json", architectures=None)
    return "config.json: names no architecture"


def unknown_architecture(folder: Path) -> str:
    change_json(folder / "config.json", architectures=["FancyForCausalLM"], model_type="fancy")
    return "does not know the architecture FancyForCausalLM"


def more_experts_announced(folder: Path) -> str:
    change_json(folder / "config.json", num_experts=9, num_local_experts=9)
    return "experts are missing"


def cut_data(folder: Path) -> str:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-7])
    return f"{path.name}: tensor"


def cut_header(folder: Path) -> str:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:100])
    return f"{path.name}: ends inside its header"


def empty_shard(folder: Path) -> str:
    path = shards(folder)[0]
    path.write_bytes(b"")
    return f"{path.name}: ends inside its header"


def not_safetensors(folder: Path) -> str:
    path = shards(folder)[0]
    path.write_bytes((9).to_bytes(8, "little") + b"<html>404")
    return f"{path.name}: its header is not JSON"


def huge_header(folder: Path) -> str:
    path = shards(folder)[0]
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    return f"{path.name}: ends inside its header"


def missing_shard(folder: Path) -> str:
    path = shards(folder)[2]
    path.unlink()
    return f"{path.name}: is missing"


def missing_shard_without_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").unlink()
    return missing_shard(folder)


def an_index_that_leads_out(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(content))
    return "is outside of the folder"


def no_weights(folder: Path) -> str:
    for path in [*shards(folder), folder / "model.safetensors.index.json"]:
        path.unlink()
    return "no weights"


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "no tokenizer"


def broken_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text("{]")
    return "tokenizer.json: not JSON"


def unknown_splits(folder: Path) -> str:
    change_json(folder / "tokenizer.json", pre_tokenizer={"type": "WhitespaceSplit"})
    change_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return "splits text by rules that llama.cpp does not know"


def unknown_quantization(folder: Path) -> str:
    change_json(folder / "config.json", quantization_config={"quant_method": "secret"})
    return "secret"


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """All weights in one file, changed."""
    tensors = {name: value for path in shards(folder) for name, value in load_file(path).items()}
    no_weights(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def missing_expert(folder: Path) -> str:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.pop(name))
    return "experts are missing: model.layers.1.mlp.experts"


def unknown_tensor(folder: Path) -> str:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.1.odd": np.ones(3, "f4")}))
    return "model.layers.1.odd"


def odd_shape(folder: Path) -> str:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: np.ones((3, 64), "f4")}))
    return "upstream's converter"


def not_a_number(folder: Path) -> str:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][2, 3] = np.nan

    rewrite(folder, change)
    return "blk.1.ffn_up_exps.weight: a value is not finite"


def infinite_norm(folder: Path) -> str:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][5] = np.inf

    rewrite(folder, change)
    return "output_norm.weight: a value is not finite"


FAULTS = (
    no_config,
    broken_config,
    a_list_for_a_config,
    no_architecture,
    unknown_architecture,
    more_experts_announced,
    cut_data,
    cut_header,
    empty_shard,
    not_safetensors,
    huge_header,
    missing_shard,
    missing_shard_without_index,
    an_index_that_leads_out,
    no_weights,
    no_tokenizer,
    broken_tokenizer,
    unknown_splits,
    unknown_quantization,
    missing_expert,
    unknown_tensor,
    odd_shape,
    not_a_number,
    infinite_norm,
)


@pytest.mark.parametrize("damage", FAULTS, ids=lambda each: each.__name__)
def test_a_damaged_checkpoint(folder: Path, damage: Callable[[Path], str]) -> None:
    expected = damage(folder)
    found = said(folder)
    assert expected in found
    assert str(folder) in found
    assert len(found) < 500


OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class Mine(PreTrainedTokenizerFast):
    pass

open(r"{}", "w").close()
"""


def test_code_of_a_checkpoint_runs_only_when_asked_for(tmp_path: Path) -> None:
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
    out = str(tmp_path / "out.gguf")
    result = CliRunner().invoke(cli, ["convert", str(folder), out, *TIERS, "--trust-remote-code"])
    assert result.exit_code == 0, result.output
    assert trace.exists()


def test_no_folder(tmp_path: Path) -> None:
    assert "does not exist" in said(tmp_path / "none")
    (tmp_path / "text.txt").write_text("x")
    assert "not a folder" in said(tmp_path / "text.txt")


def test_a_model_without_experts(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**families.SIZES)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    checkpoints.save_tokenizer("qwen2", tmp_path / "dense")
    found = said(tmp_path / "dense")
    assert "Qwen3ForCausalLM has no experts: not a Mixture-of-Experts model" in found


@pytest.mark.parametrize(
    ("tiers", "words"),
    [("f17", "unknown tier f17"), ("q2_k,q4_k", "list tiers best first"), ("f16,f16", "not below")],
)
def test_tiers_are_checked_before_anything_is_read(folder: Path, tiers: str, words: str) -> None:
    no_config(folder)
    assert words in said(folder, "--tiers", tiers)


def test_no_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 4096))
    assert "only 0.0 MiB are free" in said(folder)


def test_a_target_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    assert "there is no folder" in said(folder, out=tmp_path / "none" / "out.gguf")
    (tmp_path / "taken").mkdir()
    assert "is a folder" in said(folder, out=tmp_path / "taken")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    assert "cannot be written" in said(folder, out=tmp_path / "locked" / "out.gguf")


def test_the_header_is_shown_before_anything_is_computed(folder: Path, tmp_path: Path) -> None:
    seen = []

    def refuse(path: Path, architecture: str) -> None:
        with GGUFFile.open(path) as file:
            seen.append((architecture, len(file.tensors)))
        raise ConvertError("it cannot run")

    shares: list[float] = []
    with pytest.raises(ConvertError, match="it cannot run"):
        convert(
            folder,
            tmp_path / "out.gguf",
            ["f16"],
            on_header=refuse,
            progress=shares.append,
            threads=1,
        )
    [(architecture, n_tensors)] = seen
    assert architecture == "qwen3moe" and n_tensors > 10
    assert shares == [] and not (tmp_path / "out.gguf").exists()
