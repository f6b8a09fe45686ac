"""Commands with a model named by its Hub repository."""

import json

import pytest
from command_line import run
from gguf_split import split
from hub_calls import noise
from hub_server import Repo

from gguf_tools import hub as module
from gguf_tools import synthetic
from gguf_tools.errors import HubError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return synthetic.write(tmp_path_factory.mktemp("m") / "m.gguf", "tiny-qwen3moe")


def test_chat_with_a_model_of_the_hub(server, tiny, tmp_path, monkeypatch, library):
    parts = split(tiny, tmp_path / "parts", 2)
    files = {f"sub/{path.name}": path.read_bytes() for path in parts}
    server.repos["o/n"] = Repo({**files, "other.gguf": noise(1)})
    options = ["--ctx", "256", "--threads", "1", "--temp", "0", "--max-tokens", "3", "-p", "a"]

    def chat(model):
        return run("chat", "-m", model, *options)

    name = f"hf:o/n/sub/{parts[0].name}"
    result = chat(name)
    assert result.exit_code == 0, result.output
    assert "o/n at c0ffeec0: 2 files" in result.stderr
    assert result.stdout == chat(tiny).stdout
    again = chat(name)
    assert (again.stdout, again.stderr) == (result.stdout, "")
    assert "contains 2 models" in chat("hf:o/n").stderr
    server.repos["o/n"].files |= {f"{folder}/other.gguf": noise(2) for folder in "ab"}
    # exactly this file, which is not a model
    assert "other.gguf: header" in chat("hf:o/n/other.gguf").stderr
    del server.repos["o/n"].files["other.gguf"]
    assert "several models match: a/other.gguf, b/other.gguf" in chat("hf:o/n/other.gguf").stderr
    assert "write it as hf:OWNER/NAME or hf:OWNER/NAME/FILE.gguf" in chat("hf:o").stderr

    server.status = 503  # the cache suffices
    assert chat(name).stdout == result.stdout
    assert "status 503" in chat("hf:o/none").stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_inspect_and_verify_a_model_of_the_hub(server, tiny, command):
    server.repos["o/n"] = Repo({"m.gguf": tiny.read_bytes()})
    here, result = (run(command, "--json", each) for each in (tiny, "hf:o/n"))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout).keys() == json.loads(here.stdout).keys()


def test_resolve_without_a_gguf(server):
    server.repos["o/n"] = Repo({"model.safetensors": noise(1), "config.json": b"{}"})
    with pytest.raises(HubError, match=r"no GGUF model among the files: config\.json, model\.safe"):
        module.resolve("hf:o/n", print)
    assert server.data_requests() == []


CHECKPOINT = {
    "config.json": b'{"architectures": ["A"]}',
    "model.safetensors": noise(1, 3000),
    "tokenizer.json": b"{}",
}


def resolved(text):
    return module.resolve_checkpoint(text, lambda note: None)


def test_a_checkpoint_takes_precedence_over_a_gguf(server):
    server.repos["o/n"] = Repo({**CHECKPOINT, "n.gguf": noise(2)}, revisions=("main", "v2"))
    folder, name = resolved("hf:o/n")
    assert name == "n"
    assert {path.name for path in folder.iterdir()} == set(CHECKPOINT)
    assert (folder / "model.safetensors").read_bytes() == CHECKPOINT["model.safetensors"]
    server.status = 503
    assert resolved("hf:o/n") == (folder, name)
    with pytest.raises(HubError, match="status 503"):
        resolved("hf:o/n@v2")
    server.status = 0
    assert (resolved("hf:o/n@v2")[0] / "config.json").exists()
    with pytest.raises(HubError, match="no revision v3"):
        resolved("hf:o/n@v3")
    server.status = 503
    assert resolved("hf:o/n@v2")[0] == folder


def test_convert_reports_errors_of_a_downloaded_checkpoint(server, tmp_path):
    server.repos["o/n"] = Repo(CHECKPOINT)
    words = ["convert", "hf:o/n", tmp_path / "out.gguf", "--tiers"]
    assert "unknown tier f17" in run(*words, "q4_k,f17").output
    assert server.data_requests() == []
    result = run(*words, "q4_k")
    assert result.exit_code == 1
    assert "model.safetensors: truncated inside the header" in result.output


def test_convert_packs_a_gguf(server, tiny, tmp_path):
    server.repos["o/n"] = Repo({"n.gguf": tiny.read_bytes()})
    for number, source in enumerate(("hf:o/n", tiny)):
        result = run("convert", source, tmp_path / f"{number}.gguf", "--tiers", "q8_0,q2_k")
        assert result.exit_code == 0, result.output
        assert "experts in q8_0" in result.output
