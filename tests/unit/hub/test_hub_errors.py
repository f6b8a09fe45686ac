"""What can go wrong between us and the Hub: one sentence each."""

import time

import pytest
from hub_calls import SIZE, noise, pull, refused
from hub_server import Repo


def test_missing_private_and_gated(server, monkeypatch):
    server.repos["o/private"] = Repo({"m.gguf": noise(1)}, token="secret")
    server.repos["o/gated"] = Repo({"m.gguf": noise(2)}, token="secret", gated=True)
    server.repos["o/gone"] = Repo({"m.gguf": noise(1)}, disabled=True)
    for name, said in (
        ("o/none", f"no such model at {server.url}, or a private one: check the name, or log in"),
        ("o/private", f"no such model at {server.url}, or a private one: check the name, or log"),
        ("o/gated", f"access to it is restricted: accept its terms at {server.url}/o/gated, then"),
        ("o/gone", f"disabled at {server.url}: nobody can download it"),
    ):
        assert refused(name).startswith(f"{name}: {said}")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pull("o/private").exit_code == 0
    assert pull("o/gated").exit_code == 0
    sent_to_cdn = {auth for _, path, _, auth in server.seen if path.startswith("/cdn/")}
    assert sent_to_cdn == {None}  # another host never sees the token


@pytest.mark.parametrize("name", ["name", "a/b/c", "o/n n", "o/n/", "../x", ""])
def test_names_that_are_none(server, name):
    said = refused(name)
    assert "write it as OWNER/NAME" in said or "no such model" in said
    assert server.data_requests() == []


def test_file_names_that_leave_the_folder(server, tmp_path):
    server.repos["o/n"] = Repo({"../../../evil.gguf": noise(1)})
    assert "leaves its folder" in refused("o/n")
    assert not list(tmp_path.rglob("evil*"))


def test_a_hub_that_fails(server):
    server.repos["o/n"] = Repo({"m.gguf": noise(1)})
    for status, said in (
        (503, "answers 503: try again later"),
        (401, "answers 401: is the token right? log in"),
        (404, "answers 404: is HF_ENDPOINT right?"),
    ):
        server.status = status
        assert refused("o/n").startswith(f"o/n: {server.url} {said}")


def test_a_hub_that_fails_at_the_end(server, monkeypatch):
    """What was downloaded stays: the next run fetches nothing again."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    server.repos["o/n"] = Repo({"m.gguf": noise(1)})
    server.heads = 1
    result = pull("o/n")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last == f"Error: o/n: {server.url} no longer answers: try again later"
    server.heads, before = None, server.sent
    assert pull("o/n").exit_code == 0
    assert server.sent == before == SIZE


def test_a_hub_that_is_not_there(server):
    server.stop()
    assert refused("o/n").startswith(f"o/n: {server.url} cannot be reached: ")
