"""`pull` and `-m hf:` with the real client and a local server that speaks the Hub's protocol."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import MOE_EDGE, REPO, python
from hub_calls import SIZE, blobs, noise, pull, pulled, refused
from hub_server import Fault, Repo
from simulated_machine import simulate
from waiting import wait_until

from gguf_tools import hub as module
from orchestrator.errors import NativeError
from orchestrator.runtime import quantizations


def test_a_repository_with_one_model(server, tmp_path):
    data = noise(1)
    server.repos["o/n"] = Repo({"README.md": b"hi", "m.gguf": data, "mmproj-m.gguf": noise(2)})
    result = pulled("o/n")
    path, encoder, line = result.stdout.splitlines()
    assert Path(path).read_bytes() == data
    assert Path(encoder) == Path(path).with_name("mmproj-m.gguf")
    assert Path(path).name == "m.gguf" and path.startswith(str(tmp_path / "hf/hub"))
    assert shlex.split(line) == ["moe-edge", "chat", "-m", path]
    assert result.stderr.startswith("o/n at c0ffeec0: 2 files, 586 KiB, 586 KiB to download into ")
    assert " free on its disk\n" in result.stderr
    assert not [name for name in blobs(tmp_path) if "incomplete" in name]
    # huggingface_hub finds the file in its own cache
    from huggingface_hub import try_to_load_from_cache

    assert try_to_load_from_cache("o/n", "m.gguf") == path

    before = len(server.data_requests())
    again = pull("hf:o/n")
    assert again.stdout == result.stdout
    assert "already downloaded" in again.stderr
    assert len(server.data_requests()) == before


def no_library(*_):
    raise NativeError("the library is missing")


def test_the_choice_among_models(server, library, monkeypatch, tmp_path):
    simulate(monkeypatch, tmp_path / "cache")
    server.repos["o/n"] = Repo({f"m-{quant}.gguf": noise(3, 2000) for quant in ("Q2_K", "Q4_K_M")})
    result = pull("o/n")  # test_quantizations.py has readable models
    assert result.exit_code == 1 and result.stdout == ""
    assert "m-Q2_K.gguf: header: not a GGUF file" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: o/n contains 2 models. Name one as")
    monkeypatch.setattr(quantizations, "compare", no_library)
    said = refused("o/n")
    assert said == (
        "o/n contains 2 models: `moe-edge plan hf:o/n` compares them on this machine; choose one "
        "as hf:o/n/FILE, or by `moe-edge pull o/n --include PATTERN`: m-Q2_K.gguf (1.95 KiB), "
        "m-Q4_K_M.gguf (1.95 KiB)"
    )
    result = pull("o/n", "--include", "*Q4_K*")
    assert [Path(line).name for line in result.stdout.splitlines()][:1] == ["m-Q4_K_M.gguf"]
    both = pull("o/n", "--include", "*Q4_K*", "--include", "m-Q2_K.gguf").stdout
    assert both.count("moe-edge chat -m") == 2
    assert refused("o/n", "--include", "*Q9*").startswith(
        "o/n: no file matches *Q9*: the repository contains m-Q2"
    )


def test_parts_come_together(server, tmp_path):
    names = [f"Q4/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    files = {name: noise(i, 5000) for i, name in enumerate(names)}
    server.repos["o/n"] = Repo({**files, "Q2/m.gguf": noise(9)})
    result = pull("o/n", "--include", "*00002-of*")
    *paths, line = result.stdout.splitlines()
    assert [Path(path).read_bytes() for path in paths] == list(files.values())
    assert shlex.split(line)[-1] == paths[0]
    del server.repos["o/n"].files[names[1]]
    assert refused("o/n", "--include", "*Q4*") == (
        f"o/n: the repository lacks {names[1]}, a part of {names[0]}"
    )


def test_a_checkpoint(server):
    wanted = {
        "config.json": b"{}",
        **{f"model-0000{part}-of-00002.safetensors": noise(part, 3000) for part in (1, 2)},
        "model.safetensors.index.json": b"{}",
        "tokenizer.model": noise(3, 1500),
    }
    rest = ("consolidated.safetensors", "pytorch_model.bin", "original/model.safetensors")
    server.repos["o/n"] = Repo(
        {**wanted, "README.md": b"x", **{name: noise(4, 3000) for name in rest}}
    )
    result = pull("o/n")
    assert [Path(line).name for line in result.stdout.splitlines()] == sorted(wanted)
    *_, advice, command = result.stderr.splitlines()
    assert advice.endswith("Convert the checkpoint before you run it:")
    words = shlex.split(command)
    assert words[:2] == ["moe-edge", "convert"] and words[-1] == "n.gguf"
    assert sorted(os.listdir(words[-2])) == sorted(wanted)
    server.repos["o/n"] = Repo({"README.md": b"x"})
    assert refused("o/n") == "o/n: no GGUF or safetensors files: the repository contains README.md"


@pytest.mark.parametrize("reset", [False, True])
def test_a_broken_connection_is_resumed(server, tmp_path, reset):
    data = noise(1)
    server.repos["o/n"] = Repo({"m.gguf": data})
    server.faults["m.gguf"] = Fault(after=100_000, times=2, reset=reset)
    result = pulled("o/n")
    assert Path(result.stdout.splitlines()[0]).read_bytes() == data
    spans = [span for path, span in server.data_requests() if path.startswith("/cdn/")]
    assert spans[0] is None and len(spans) == 3
    starts = [int(span.removeprefix("bytes=").rstrip("-")) for span in spans[1:]]
    assert 0 < starts[0] < starts[1] < SIZE or (reset and starts == sorted(starts))
    if not reset:  # a reset may lose data in transit
        assert starts == [100_000, 200_000]
        assert server.sent == SIZE


def test_an_interrupted_download_is_continued(server, tmp_path):
    """A download that was killed half way is continued by the next run, which requests only the
    rest."""
    data = noise(1, 30 << 20)
    server.repos["o/n"] = Repo({"m.gguf": data})
    server.slow = threading.Event()
    own = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf")}
    command = (*MOE_EDGE, "pull", "o/n")
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *command], cwd=REPO, env=os.environ | own, **both)
    folder = tmp_path / "hf/hub/models--o--n/blobs"
    wait_until(
        lambda: (
            process.poll() is not None or any(p.stat().st_size for p in folder.glob("*.incomplete"))
        )
    )
    assert process.poll() is None, process.communicate()
    second = python(*command, **own)
    assert second.returncode == 1
    assert "m.gguf: another process is downloading this file" in second.stderr
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (partial,) = folder.glob("*.incomplete")
    have = partial.stat().st_size
    assert 0 < have < len(data)

    server.slow.set()
    server.slow = None
    found = module.prepare("o/n")
    assert (found.nbytes, found.missing) == (len(data), len(data) - have)
    before = server.sent
    done = python(*command, **own)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]).read_bytes() == data
    assert server.sent - before == len(data) - have
    assert server.data_requests()[-1][1] == f"bytes={have}-"


def test_a_server_that_always_breaks_off_is_given_up(server, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    server.repos["o/n"] = Repo({"m.gguf": noise(1)})
    server.faults["m.gguf"] = Fault(after=0, times=10**6)
    result = pull("o/n")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[1].startswith(f"Error: o/n: {server.url} cannot be reached: ")
    assert len(server.seen) < 200


def test_damaged_data_is_not_kept(server, tmp_path):
    server.repos["o/n"] = Repo({"m.gguf": noise(1)})
    server.corrupt = True
    result = pull("o/n")
    assert result.exit_code == 1
    assert "m.gguf: damaged during the download (wrong SHA-256)" in result.stderr
    assert blobs(tmp_path) == []
    server.corrupt = False
    pulled("o/n")


def test_too_little_space_is_refused_before_the_first_byte(server, monkeypatch, tmp_path):
    server.repos["o/n"] = Repo({"m.gguf": noise(1)})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=SIZE - 1))
    result = pull("o/n")
    assert result.exit_code == 1
    summary, error = result.stderr.splitlines()
    assert "293 KiB to download" in summary
    assert error.startswith("Error: o/n: 293 KiB to download, but only 293 KiB are free in ")
    assert server.data_requests() == []
    assert not (tmp_path / "hf").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=SIZE))
    pulled("o/n")


def test_one_file_by_its_path(server):
    """pull accepts a path in the repository, with and without hf:, so names of other commands can
    be pasted."""
    files = {f"sub/m-[{quant}].gguf": noise(i, 2000) for i, quant in enumerate(("Q2", "Q4"))}
    server.repos["o/n"] = Repo(files)
    for name in ("o/n/sub/m-[Q4].gguf", "hf:o/n/sub/m-[Q4].gguf"):
        path, _ = pull(name).stdout.splitlines()
        assert Path(path).read_bytes() == files["sub/m-[Q4].gguf"]
    assert refused("o/n/m-Q9.gguf").startswith(
        "o/n: no file matches m-Q9.gguf: the repository contains sub/m-[Q2]"
    )


def test_ctrl_c_says_that_nothing_is_lost(server, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    server.repos["o/n"] = Repo({"m.gguf": noise(1)})
    monkeypatch.setattr(module, "fetch", stop)
    result = pull("o/n")
    assert result.exit_code == 130
    assert "the downloaded part is kept. Repeat the command" in result.stderr.splitlines()[-1]


def test_revisions(server):
    old, new = "0" * 40, "1" * 40
    server.repos["o/n"] = Repo({"m.gguf": noise(1)}, commit=old, revisions=("main", "v1"))
    assert refused("o/n", "--revision", "v2") == "o/n: there is no revision v2"
    assert f"snapshots/{old}/" in pull("o/n", "--revision", "v1").stdout
    server.repos["o/n"] = Repo({"m.gguf": noise(1), "b.txt": b"x"}, commit=new)
    second = pull("o/n")
    assert f"snapshots/{new}/" in second.stdout
    assert "already downloaded" in second.stderr  # the same content in another commit


def test_missing_private_and_gated(server, monkeypatch):
    server.repos["o/private"] = Repo({"m.gguf": noise(1)}, token="secret")
    server.repos["o/gated"] = Repo({"m.gguf": noise(2)}, token="secret", gated=True)
    server.repos["o/gone"] = Repo({"m.gguf": noise(1)}, disabled=True)
    for name, said in (
        ("o/none", f"{server.url} has no such model, or it is private: check the name, or log in"),
        ("o/private", f"{server.url} has no such model, or it is private: check the name, or log"),
        ("o/gated", f"access is restricted: accept the terms at {server.url}/o/gated, then"),
        ("o/gone", f"the repository is disabled at {server.url} and cannot be downloaded"),
    ):
        assert refused(name).startswith(f"{name}: {said}")
    monkeypatch.setenv("HF_TOKEN", "secret")
    for name in ("o/private", "o/gated"):
        pulled(name)
    sent_to_cdn = {auth for _, path, _, auth in server.seen if path.startswith("/cdn/")}
    assert sent_to_cdn == {None}  # another host never gets the token


@pytest.mark.parametrize("name", ["name", "a/b/c", "o/n n", "o/n/", "../x", ""])
def test_names_that_are_not_repositories(server, name):
    said = refused(name)
    assert "write it as OWNER/NAME" in said or "no such model" in said
    assert server.data_requests() == []


def test_file_names_that_leave_the_folder(server, tmp_path):
    server.repos["o/n"] = Repo({"../../../evil.gguf": noise(1)})
    assert "leads out of the repository's folder" in refused("o/n")
    assert not list(tmp_path.rglob("evil*"))


def test_a_hub_that_fails(server):
    server.repos["o/n"] = Repo({"m.gguf": noise(1)})
    for status, said in (
        (503, "answered with HTTP status 503: try again later"),
        (401, "answered with HTTP status 401: check the token, or log in"),
        (404, "answered with HTTP status 404: check HF_ENDPOINT"),
    ):
        server.status = status
        assert refused("o/n").startswith(f"o/n: {server.url} {said}")


def test_a_hub_that_fails_at_the_end(server, monkeypatch):
    """Downloaded data is kept, and the next run downloads nothing again."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    server.repos["o/n"] = Repo({"m.gguf": noise(1)})
    server.heads = 1
    result = pull("o/n")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last == f"Error: o/n: {server.url} no longer answers: try again later"
    server.heads, before = None, server.sent
    pulled("o/n")
    assert server.sent == before == SIZE


def test_a_hub_that_cannot_be_reached(server):
    server.stop()
    assert refused("o/n").startswith(f"o/n: {server.url} cannot be reached: ")
