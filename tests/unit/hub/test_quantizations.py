"""The quantizations of a repository, compared on a simulated machine before a download."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from command_line import run
from headers import header, known, metadata
from hub_calls import blobs, noise, pull
from hub_server import Fault, Repo, Sparse
from simulated_machine import simulate
from tables import cases

from gguf_tools import hub, synthetic
from gguf_tools.errors import HubError, HubUnreachableError
from gguf_tools.hub import listing, remote
from orchestrator.cost.outlook import FITS, NO_ROOM, NOT, STREAMS, WELL, Outlook
from orchestrator.runtime import quantizations
from orchestrator.runtime.quantizations import Quantization, best_of
from orchestrator.runtime.support import MANAGED, Support

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
def machine(server, monkeypatch, tmp_path, library):
    """A simulated machine with 1 TiB of free disk space."""
    simulate(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(listing, "free_bytes", lambda _: 1 << 40)


@pytest.fixture
def repo(server, machine, monkeypatch):
    """A repository with three quantizations, one of them in parts, and an image projector.

    llama.cpp does not know the architecture of these headers, so it is not asked.
    """
    monkeypatch.setattr(quantizations, "support_of", lambda *_, **__: Support(MANAGED, ""))
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
    assert [row["here"] for row in rows.values()] == [STREAMS, STREAMS, FITS]
    speeds = [row["tokens_s"] for row in rows.values()]
    assert speeds == sorted(speeds) and 8.4 < rows["m-Q8_0.gguf"]["bits"] < 8.6
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
        "Error: o/n contains 3 models. Name one as o/n/FILE, or several with --include PATTERN. "
        f"To download the model that suits this machine best, run `moe-edge pull o/n/{best}`"
    )
    result = pull("o/n", "--json", "--revision", repo.commit)
    assert result.exit_code == 1 and len(json.loads(result.stdout)["rows"]) == 3
    assert f" --revision {repo.commit}`" in result.stderr
    assert not blobs(tmp_path)


def endless(data):
    """A file whose header claims 2^40 words, but has the same bytes after some of them."""
    at = data.first.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    many = (1 << 40).to_bytes(8, "little")
    return Sparse(data.first[:at] + many + data.first[at + 8 :], 1 << 39)


def projector():
    part = known(MODEL, "Q8_0")[1]
    return Sparse(header(part, [], {"general.architecture": "clip"}).first, 2000)


def test_each_file_that_cannot_be_read_has_one_sentence(server, repo):
    good, whole = {*repo.files}, quantization("Q4_K_M")
    repo.files |= {
        "bad-text.gguf": noise(2, 5000),
        "bad-cut.gguf": whole.first[:300_000],
        "bad-projector.gguf": projector(),
        "bad-dropped.gguf": quantization("Q8_0", "a"),
        "bad-part-00001-of-00002.gguf": noise(3, 5000),
        "bad-endless.gguf": endless(whole),
        "bad-size.gguf": Sparse(quantization("Q8_0", "b").first, 1 << 62),
    }
    server.faults["bad-dropped.gguf"] = Fault(after=1000, times=99)
    said = {
        "bad-text.gguf": "header: not a GGUF file",
        "bad-cut.gguf": "tokenizer.ggml.tokens",
        "bad-projector.gguf": "no expert tensors",
        "bad-dropped.gguf": "cannot be reached",
        "bad-part": "the repository lacks bad-part-00002-of-00002.gguf, a part of bad-part-00001",
        "bad-endless.gguf": "the header is longer than 64",
        "bad-size.gguf": "",  # the file system's sentence
    }
    found, rows = compared()
    assert len({tuple(row) for row in rows.values()}) == 1, "each row has the same keys"
    for name, sentence in said.items():
        bad = rows[name]
        assert bad["why"] and sentence in bad["why"], bad
        assert "\n" not in bad["why"] and "moe-edge-" not in bad["why"]
        assert bad["here"] == (NO_ROOM if name == "bad-size.gguf" else None) and not bad["best"]
    assert 32 << 20 <= found["header_bytes"] < 64 << 20
    here = [row["here"] for row in rows.values() if row["file"] in good]
    assert here == [STREAMS, STREAMS, FITS] and found["best"] in good
    lines = run("plan", "hf:o/n", *RAM).stdout.splitlines()
    assert all(sum(line.startswith(name) for line in lines) == 1 for name in said)


def test_vocabularies_are_read_once(server, repo):
    """Two requests read less than half of the header of each further quantization. A longer chat
    template is read too, and another vocabulary is read in full."""
    alone = compared()[0]["header_bytes"]
    whole = len(repo.files["m-Q8_0.gguf"].first)
    repo.files["m2.gguf"] = quantization("Q8_0")
    first = compared()[0]["header_bytes"] - alone
    repo.files["m2.gguf"] = quantization("Q8_0", "a" * 3000)
    assert compared()[0]["header_bytes"] - alone < first + 10_000 and first < whole / 2
    words = [f"other {n}" for n in range(50_000)]
    _, part = known(MODEL, "Q8_0")
    more = {**part.metadata, "tokenizer.ggml.tokens": words}
    repo.files["m2.gguf"] = header(part, part.tensors.values(), more)
    found, rows = compared()
    assert found["header_bytes"] - alone > whole / 2
    assert rows["m2.gguf"]["tokens_s"] == rows["m-Q8_0.gguf"]["tokens_s"]


def test_headers_of_a_repository_are_bounded(server, repo, monkeypatch):
    monkeypatch.setattr(remote, "MOST_OF_ALL", 1 << 20)
    found, rows = compared()
    assert found["header_bytes"] <= 1 << 20
    assert any("longer than 1 MiB together" in row["why"] for row in rows.values())


def test_a_server_that_stops_answering_is_left_alone(server, repo, monkeypatch):
    listed = hub.list_models("o/n")
    more = tuple(replace(listed.models[0], name=f"{n}.gguf") for n in range(20))
    server.status = 503
    before = len(server.seen)
    assert refused_by(listed, more) == {HubError} and len(server.seen) - before == 20
    server.stop()
    assert refused_by(listed, more) == {HubUnreachableError}


def refused_by(listed, models):
    with TemporaryDirectory() as folder:
        found, _ = hub.fetch_listed_headers(replace(listed, models=models), Path(folder))
    return set(map(type, found))


def test_the_hub_does_not_answer(server, repo):
    server.status = 503
    for result in (run("plan", "hf:o/n", *RAM), pull("o/n")):
        assert result.exit_code == 1 and "status 503" in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_downloaded_model_needs_no_space_and_no_request(server, machine, tmp_path, monkeypatch):
    files = {
        f"{kind}.gguf": synthetic.write(tmp_path / kind, "tiny-qwen3moe", tiers=(kind,))
        for kind in ("q8_0", "q4_k")
    }
    server.repos["o/n"] = Repo({name: path.read_bytes() for name, path in files.items()})
    assert pull("o/n/q4_k.gguf").exit_code == 0
    monkeypatch.setattr(listing, "free_bytes", lambda _: 100)
    before = server.sent
    found, rows = compared()
    assert {name: row["here"] for name, row in rows.items()} == {
        "q8_0.gguf": NO_ROOM,
        "q4_k.gguf": FITS,
    }
    assert rows["q4_k.gguf"]["missing_bytes"] == 0 and found["best"] == "q4_k.gguf"
    assert (
        found["header_bytes"] == server.sent - before <= len(server.repos["o/n"].files["q8_0.gguf"])
    )


def test_an_architecture_that_llama_cpp_does_not_know(server, machine):
    server.repos["o/n"] = Repo({f"{name}.gguf": quantization(name) for name in ("Q8_0", "Q2_K")})
    _, rows = compared()
    assert all("unknown model architecture" in row["why"] for row in rows.values())
    result = pull("o/n")
    assert result.stderr.endswith("PATTERN. None of these models would run on this machine\n")


Q2, Q4, Q8, F16 = (
    Quantization(name, size, size, bits, Outlook(STREAMS, 1, tokens_s=4.0))
    for name, size, bits in (("2", 20, 2.6), ("4", 40, 4.8), ("8", 80, 8.5), ("16", 160, 16.0))
)


def fast(row, tokens_s, runs=FITS):
    return replace(row, outlook=Outlook(runs, 1, tokens_s=tokens_s))


@cases(
    "rows, free, best",
    ([], 99, None),
    ([F16, fast(Q8, 5.0), fast(Q4, 9.0), fast(Q2, 20.0)], 999, "8"),
    ([fast(F16, 50.0), fast(Q8, 60.0)], 999, "8"),
    ([fast(F16, 50.0), Q8], 999, "8"),
    ([fast(F16, 1.0)], 999, "16"),
    ([fast(Q8, 50.0), fast(Q4, 60.0)], 70, "4"),
    ([Q8, fast(Q4, 4.5), fast(Q2, 4.2)], 999, "4"),
    ([fast(Q8, None, NOT), replace(Q4, outlook=None, why="cut")], 999, None),
    ([replace(fast(Q8, WELL), missing_bytes=0), fast(Q4, 60.0)], 0, "8"),
)
def test_the_best_choice(rows, free, best):
    assert best_of(rows, free) == best
