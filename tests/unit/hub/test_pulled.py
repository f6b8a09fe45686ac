"""Downloaded models: listed, found by short names, and removed. Also the user cache."""

import json
import re

import pytest
from command_line import REPO, run
from hub_calls import blobs, noise, pull
from hub_server import Repo

from gguf_tools import synthetic
from gguf_tools.errors import HubError
from gguf_tools.hub import find_pulled, pulled
from orchestrator.cache.files import KINDS

FOLDER = re.compile(r'(?:cache_dir\(\)|\bcache|"cache"\)) / "(\w+)"')


@pytest.fixture
def models(server):
    """Two quantizations in one repository, one in another, and a checkpoint."""
    server.repos["o/big"] = Repo(
        {"big-Q4.gguf": noise(1, 3000), "big-Q2.gguf": noise(2, 2000), "mmproj-big.gguf": noise(3)}
    )
    server.repos["p/small"] = Repo({"sub/small-Q4.gguf": noise(4, 1000)})
    server.repos["p/weights"] = Repo({"config.json": b"{}", "model.safetensors": noise(5, 500)})
    for words in (["o/big", "--include", "big*"], ["p/small"], ["p/weights"]):
        assert pull(*words).exit_code == 0


def test_models_are_listed_by_short_names(models):
    found = json.loads(run("list", "--json").stdout)["models"]
    assert [(each["name"], each["bytes"]) for each in found] == [
        ("big-Q2", 2000),
        ("big-Q4", 3000),
        ("small-Q4", 1000),
        ("p/weights", 502),
    ]
    text = run("list").stdout
    assert "a checkpoint, for convert" in text and "small-Q4" in text


NAMES = {
    "big-Q4": "big-Q4.gguf",
    "BIG-q4": "big-Q4.gguf",
    "big-Q2.gguf": "big-Q2.gguf",
    "o/big/big-Q2": "big-Q2.gguf",
    "small": "sub/small-Q4.gguf",
    "p/small": "sub/small-Q4.gguf",
    "p/small/sub/small-Q4.gguf": "sub/small-Q4.gguf",
}


def test_names_of_a_model(models):
    assert {name: getattr(find_pulled(name), "file", None) for name in NAMES} == NAMES
    assert find_pulled("weights") is None
    assert find_pulled("none-Q4") is None
    with pytest.raises(
        HubError, match=r"several downloaded models have this name: choose one of big-Q2, big-Q4"
    ):
        find_pulled("o/big")


def test_a_short_name_runs(server, tmp_path, monkeypatch):
    tiny = synthetic.write(tmp_path / "tiny.gguf", "tiny-qwen3moe")
    server.repos["o/n"] = Repo({"tiny-Q4.gguf": tiny.read_bytes()})
    assert pull("o/n").exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert "tiny-Q4.gguf" in json.loads(run("inspect", "tiny-Q4", "--json").stdout)["files"][0]
    # An existing file of this name takes precedence.
    tiny.rename("tiny-Q4")
    assert json.loads(run("inspect", "tiny-Q4", "--json").stdout)["files"][0].endswith("tiny-Q4")


def test_one_of_two_models_is_removed(models, tmp_path):
    result = run("rm", "big-Q2")
    assert result.stdout == "o/big/big-Q2.gguf: 1.95 KiB freed\n"
    assert find_pulled("big-Q4") is not None and find_pulled("big-Q2") is None
    result = run("rm", "o/big", "weights")
    assert result.exit_code == 1, "an unknown name must remove nothing"
    assert find_pulled("big-Q4") is not None
    assert run("rm", "o/big", "p/weights").exit_code == 0
    assert len(blobs(tmp_path)) == 1
    assert [each.repo for each in pulled()] == ["p/small"]


def test_the_user_cache_is_listed_and_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert json.loads(run("cache", "--json").stdout) == {"cache": []}
    for name, size in (("bench", 50_000), ("tuned", 100), ("unknown", 10)):
        (tmp_path / "moe-edge" / name).mkdir(parents=True)
        (tmp_path / "moe-edge" / name / "a").write_bytes(noise(1, size))
    (tmp_path / "moe-edge" / "lock").touch()
    found = json.loads(run("cache", "--json").stdout)["cache"]
    assert [each["name"] for each in found] == ["bench", "tuned", "unknown"]
    assert found[0]["bytes"] >= 50_000
    assert "models that `moe-edge bench` generated" in run("cache").stdout
    result = run("cache", "--clear", "bench", "--clear", "benhc")
    assert result.exit_code == 1
    assert (
        "--clear benhc: the cache has no folder of this name. It has bench, tuned, unknown"
        in result.stderr
    )
    assert (tmp_path / "moe-edge/bench/a").exists()
    assert "bench: " in run("cache", "--clear", "bench").stdout
    assert run("cache", "--clear", "bench").stdout.startswith("nothing: ")
    assert run("cache", "--clear", "all").exit_code == 0
    assert [path.name for path in (tmp_path / "moe-edge").iterdir()] == ["lock"]


def test_every_folder_of_the_cache_is_explained():
    files = [path for room in ("orchestrator", "patches") for path in (REPO / room).rglob("*.py")]
    named = {name for path in files for name in FOLDER.findall(path.read_text())}
    assert {"bench", "servers", "wheels"} <= named
    assert named - {"lock"} <= KINDS.keys()
