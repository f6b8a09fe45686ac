"""The quantizations of a repository, compared on a simulated machine before a download."""

import json

import pytest
from command_line import run
from headers import header, known, metadata
from hub_calls import blobs, noise, pull
from hub_server import Fault, Repo, Sparse
from simulated_machine import simulate
from tables import cases

from gguf_tools.hub import listing
from orchestrator.cost.outlook import FITS, STREAMS, Outlook
from orchestrator.runtime.quantizations import Quantization, best_of

MODEL = "Qwen3-30B-A3B"
RAM = ("--ram", "12GiB")


def quantization(precision, template=""):
    """A file of this model. template: its chat template."""
    _, part = known(MODEL, precision)
    more = {**metadata(part), "tokenizer.chat_template": "{{ messages }}" + template}
    return header(part, part.tensors.values(), more)


def in_parts(precision):
    _, part = known(MODEL, precision)
    tensors = [*part.tensors.values()]
    files = {}
    for number in range(2):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        own = metadata(part) if number == 0 else {}
        file = header(part, tensors[number::2], {**own, **split})
        files[f"{precision}/m-{precision}-{number + 1:05d}-of-00002.gguf"] = file
    return files


@pytest.fixture
def repo(server, monkeypatch, tmp_path, library):
    """A repository with three quantizations, one of them in parts, on a simulated machine."""
    simulate(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(listing, "free_bytes", lambda _: 1 << 40)
    files = {f"m-{name}.gguf": quantization(name) for name in ("Q8_0", "Q4_K_M")}
    server.repos["o/n"] = Repo({**files, **in_parts("Q2_K"), "mmproj-m.gguf": noise(1, 9000)})
    return server.repos["o/n"]


def compared(*more):
    result = run("plan", "hf:o/n", *RAM, "--json", *more)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    return found, {row["file"].split("-0000")[0]: row for row in found["rows"]}


def test_quantizations_are_compared(server, repo, tmp_path):
    found, rows = compared()
    assert [*rows] == ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "Q2_K/m-Q2_K"]
    print(found)
    assert [row["here"] for row in rows.values()] == [STREAMS, STREAMS, FITS]
    speeds = [row["tokens_s"] for row in rows.values()]
    assert speeds == sorted(speeds) and [8.4 < row["bits"] < 8.6 for row in rows.values()][0]
    reading = [row["reading"] for row in rows.values()]
    assert reading[0] > reading[1] > 0.1 and reading[2] == 0.0
    best = [row["file"] for row in rows.values() if row["best"]]
    assert best == [found["best"]]
    assert found["best"] == best_of(
        [
            Quantization(row["file"], row["disk_bytes"], 0, row["bits"], of_row(row))
            for row in found["rows"]
        ],
        found["free_bytes"],
    )
    total = sum(len(data) for name, data in repo.files.items() if "Q" in name)
    assert sum(row["disk_bytes"] for row in found["rows"]) == total
    assert found["header_bytes"] <= server.sent < 5 << 20
    assert not [span for _, span in server.data_requests() if span is None]
    assert not blobs(tmp_path)

    text = run("plan", "hf:o/n", *RAM).stdout
    line = next(line for line in text.splitlines() if found["best"] in line)
    assert line.startswith("*") and text.count("\n*") == 1
    assert "computing" in text and "reading" in text and "mmproj" not in text


def of_row(row):
    return Outlook(row["runs"], row["ram_bytes"], row["tokens_s"])


def test_a_pull_that_names_no_model_compares_them(server, repo, tmp_path):
    result = pull("o/n")
    assert (result.exit_code, result.stdout) == (1, "")
    *table, error = result.stderr.splitlines()
    best = next(line.split()[1] for line in table if line.startswith("* "))
    assert error == (
        "Error: o/n contains 3 models: choose one. The best for this machine: "
        f"`moe-edge pull o/n/{best}`"
    )
    result = pull("o/n", "--json", "--revision", repo.commit)
    assert result.exit_code == 1 and len(json.loads(result.stdout)["rows"]) == 3
    assert f" --revision {repo.commit}`" in result.stderr
    assert not blobs(tmp_path)


def broken(name, repo, server):
    """Break one file in some way. Returns the sentence about it."""
    if name == "no model":
        repo.files["m-bad.gguf"] = noise(2, 5000)
        return "header: not a GGUF file"
    if name == "cut":
        repo.files["m-bad.gguf"] = quantization("Q4_K_M").first[:300_000]
        return "metadata entry|tokenizer.ggml.tokens|truncated|key"
    if name == "projector":
        file = Sparse(
            header(known(MODEL, "Q8_0")[1], [], {"general.architecture": "clip"}).first, 2000
        )
        repo.files["m-bad.gguf"] = file
        return "clip|expert"
    if name == "dropped connection":
        repo.files["m-bad.gguf"] = quantization("Q8_0", "a")
        server.faults["m-bad.gguf"] = Fault(after=1000, times=9)
        return "cannot be reached"
    if name == "part missing":
        repo.files["m-bad-00001-of-00002.gguf"] = noise(3, 5000)
        return "the repository lacks m-bad-00002-of-00002.gguf"
    repo.files["m-bad.gguf"] = dict(endless=endless())[name]
    return "the header is longer than 64"


def endless():
    data = quantization("Q4_K_M")
    at = data.first.index(b"tokenizer.ggml.tokens")
    return Sparse(data.first[: at - 8] + (1 << 40).to_bytes(8, "little"), 1 << 44)


@cases("name", "no model", "cut", "projector", "dropped connection", "part missing")
def test_a_file_that_cannot_be_read_has_one_sentence(name, server, repo):
    said = broken(name, repo, server)
    found, rows = compared()
    (bad,) = (row for file, row in rows.items() if "bad" in file)
    import re

    assert re.search(said, bad["why"]), bad["why"]
    assert "\n" not in bad["why"] and "/tmp" not in bad["why"]
    assert bad["here"] is None and not bad["best"]
    assert [row["here"] for row in rows.values() if row is not bad] == [STREAMS, STREAMS, FITS]
    text = run("plan", "hf:o/n", *RAM).stdout
    assert sum("m-bad" in line for line in text.splitlines()) == 2
