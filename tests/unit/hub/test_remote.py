"""Headers of models on a server, read with range requests."""

from pathlib import Path

import pytest
from command_line import run
from headers import header, known, metadata
from hub_server import Repo, Sparse

from gguf_tools.errors import GGUFError, HubError
from gguf_tools.experts import ExpertModel
from gguf_tools.file.parts import open_model
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.hub import fetch_headers
from gguf_tools.hub.remote import MOST_BYTES
from orchestrator.cost import planner
from orchestrator.cost.disk import Bandwidth


@pytest.fixture
def large(server):
    """A file of 63 GB with a vocabulary of 50,000 tokens."""
    _, part = known("gpt-oss-120b", "MXFP4")
    file = header(part, part.tensors.values(), metadata(part))
    assert len(file) > 60e9
    server.repos["o/n"] = Repo({"m.gguf": file, "small.gguf": b"no model" * 200})
    return file


@pytest.mark.parametrize("text", ["hf:o/n/m.gguf", "{url}/o/n/resolve/main/m.gguf"])
def test_the_header_of_a_large_file(server, large, tmp_path, text):
    found = fetch_headers(text.format(url=server.url), tmp_path)
    assert found.nbytes == len(large) == found.path.stat().st_size
    assert len(large.first) <= found.read_bytes <= 2 * len(large.first) < MOST_BYTES
    assert found.path.stat().st_blocks * 512 < 2 * found.read_bytes
    with ExpertModel.open(found.path) as model:
        assert model.n_expert == 128 and len(model.metadata["tokenizer.ggml.tokens"]) == 50_000
    assert not [span for _, span in server.data_requests() if span is None]


@pytest.mark.parametrize("text", ["hf:o/n/m-00001-of-00003.gguf", "{url}/m-00001-of-00003.gguf"])
def test_a_model_in_parts(server, tmp_path, text):
    _, part = known("Qwen3-30B-A3B", "Q4_K_M")
    tensors = [*part.tensors.values()]
    files = {}
    for number in range(3):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        own = metadata(part) if number == 0 else {}
        mine = tensors[number::3]
        files[f"m-{number + 1:05d}-of-00003.gguf"] = header(part, mine, {**own, **split})
    server.repos["o/n"] = Repo(files)
    found = fetch_headers(text.format(url=f"{server.url}/o/n/resolve/main"), tmp_path)
    parts = open_model(found.path)
    assert [each.size for each in parts] == [len(each) for each in files.values()]
    assert found.nbytes == sum(map(len, files.values())) and found.read_bytes < MOST_BYTES
    with ExpertModel.of_parts(parts) as model:
        assert model.n_layers == 48


def endless():
    """A file whose header claims a text of 4 GiB."""
    writer = GGUFWriter(Path("x.gguf"))
    writer.meta("general.architecture", "x" * 1000)
    long = writer.header().replace(b"\xe8\x03" + bytes(6), (1 << 32).to_bytes(8, "little"))
    return Sparse(long, 1 << 36)


def test_errors_of_reading_a_remote_header(server, large, tmp_path):
    server.repos["o/n"].files["endless.gguf"] = endless()
    at = f"{server.url}/o/n/resolve/main"
    for text, error, said in (
        ("hf:o/n/none.gguf", HubError, "no file matches none.gguf"),
        ("hf:o", HubError, "write it as hf:OWNER/NAME"),
        (f"{at}/none.gguf", HubError, "the server answered with HTTP status 404"),
        (f"{at}/small.gguf", GGUFError, "not a GGUF file"),
        (f"{at}/endless.gguf", HubError, "the header is longer than 64"),
        ("http://127.0.0.1:1/m.gguf", HubError, "cannot be reached"),
        ("http:///m.gguf", HubError, "cannot be reached"),
        ("http://[m.gguf", HubError, "not a valid URL"),
    ):
        with pytest.raises(error, match=said):
            fetch_headers(text, tmp_path)
    server.ranges = False
    for text in ("hf:o/n/m.gguf", f"{at}/m.gguf"):
        with pytest.raises(HubError, match="does not support range requests"):
            fetch_headers(text, tmp_path)


def test_a_plan_before_anything_is_downloaded(server, large, tmp_path, monkeypatch):
    """The plan is the same as for a local file, with the bandwidth of this machine's disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen, disk = [], Bandwidth(1e9)

    def frontier(self, config):
        seen.append((self._model.path.stat().st_size, self._disk))
        raise HubError("seen")

    monkeypatch.setattr("orchestrator.cost.disk.machine_bandwidth", lambda _: disk)
    monkeypatch.setattr(planner.Planner, "frontier", frontier)
    for text in ("hf:o/n/m.gguf", f"{server.url}/o/n/resolve/main/m.gguf"):
        for args in ([text], ["-m", text]):
            result = run("plan", *args)
            assert result.stderr.endswith("Error: seen\n"), result.output
    assert seen == [(len(large), disk)] * 4
