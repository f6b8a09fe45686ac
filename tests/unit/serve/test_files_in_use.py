"""A model file that is replaced or written to while it is served: reported, and bytes of two files
are never mixed."""

import json
import os
import shutil
import signal
from pathlib import Path
from urllib.error import HTTPError

import pytest
from asgi import ask
from fake_served import FakeServed, app_for, streaming
from paths import CHAT
from served import serving
from tables import cases

from orchestrator.runtime.damage import InUse

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
WRITTEN, OTHER = "was written to while it is in use", "is another file now"


def touch(path):
    os.utime(path, ns=(1, 1))


def renamed(path):
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").rename(path)


@cases(
    "change, says, is_fault",
    (lambda path: None, "", False),
    (touch, WRITTEN, True),
    (lambda path: os.truncate(path, 1), WRITTEN, True),
    (renamed, OTHER, False),
    (Path.unlink, OTHER, False),
)
def test_changes_of_a_file_are_detected(tmp_path, change, says, is_fault):
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.write_bytes(b"abc")
    files = InUse(paths)
    change(paths[1])
    sentence, found = files.look()
    assert (found, bool(sentence)) == (is_fault, bool(says)) and says in sentence


class Comparing:
    """A running check of a file's checksums, which the test ends."""

    def __init__(self, error):
        self.is_running, self.error = True, error

    def stop(self):
        self.is_running = False


@pytest.mark.parametrize("error", [None, ValueError("damaged")])
def test_a_file_that_was_touched_is_compared_with_its_checksums(tmp_path, error):
    path = tmp_path / "model"
    path.write_bytes(b"abc")
    check = Comparing(error)
    files = InUse([path], lambda: check)
    assert files.look() == ("", False)
    touch(path)
    sentence, is_fault = files.look()
    assert is_fault and "now compared with the stored checksums" in sentence
    check.is_running = False
    sentence, is_fault = files.look()
    assert (is_fault, WRITTEN in sentence) == (error is not None,) * 2
    os.truncate(path, 1)
    assert files.look()[1]


class Rewritten(FakeServed):
    """A model whose file is written to after two checks of it."""

    looks = 2

    def fault(self):
        self.looks -= 1
        return "" if self.looks >= 0 else WRITTEN


def test_an_answer_ends_when_its_file_is_written_to():
    parts = [b'data: {"choices": [{"delta": {"content": "%d"}}]}\n\n' % n for n in range(3)]
    app = app_for(Rewritten(streaming(*parts)))
    reply = ask(app, CHAT, {**ASK, "stream": True})
    assert reply.status == 200 and b'"0"' in reply.body and b'"2"' not in reply.body
    assert WRITTEN.encode() in reply.parts[-1]
    for path, data in ((CHAT, ASK), ("/health", None)):
        assert ask(app, path, data).status == 503


def test_a_served_file(library, tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_model("qwen3moe", "q8_0", "q4_k", seed=1), path)
    options = ("-m", str(path), "--policy", "lru", "--expert-ram", "1MiB", "--ctx", "512")
    with serving(tmp_path, *options, "--cache-ram", "0") as server:

        def said():
            return str(server.post(CHAT, ASK)["choices"])

        first = said()
        renamed(path)
        path.write_bytes(bytes(path.stat().st_size))  # zeros, in the new file
        assert said() == said() == first
        end = server.end(signal.SIGTERM)[1]
    assert end.count(f"{path} {OTHER}") == 1
    shutil.copyfile(tiny_model("qwen3moe", "q8_0", "q4_k", seed=1), path)
    with serving(tmp_path, *options) as server:
        server.post(CHAT, ASK)
        with open(path, "r+b") as file:
            file.write(file.read(1))
        for _ in range(2):
            with pytest.raises(HTTPError) as refused:
                server.post(CHAT, ASK)
            assert refused.value.code == 503
            assert WRITTEN in json.load(refused.value)["error"]["message"]
        end = server.end(signal.SIGTERM)[1]
    assert end.count(f"{path} {WRITTEN}") == 1
