"""A server that lists, compares, downloads and changes models, with a local Hub."""

import json
import shutil
import sys
import threading
import time
from http.client import HTTPResponse
from pathlib import Path
from urllib.error import HTTPError

import pytest
from asgi import ask
from browser import browsing
from fake_served import FakeServed, app_for, served_by
from page import asked, opened
from served import DEMO, serving
from waiting import wait_until

from gguf_tools import synthetic

sys.path.append(str(Path(__file__).parents[1] / "hub"))
from hub_server import Hub, Repo

TASK = "/local-models/task"
CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "What is the capital of Norway?"}]
BROKEN = b"GGUF" + bytes(5000)


@pytest.fixture(scope="module")
def hub():
    hub = Hub()
    hub.start()
    demo = DEMO.read_bytes()
    hub.repos["o/n"] = Repo({"n-Q8_0.gguf": demo, "n-Q4_K_M.gguf": demo, "n-Q2_K.gguf": BROKEN})
    hub.repos["o/other"] = Repo({"other.gguf": demo + bytes(32)})
    yield hub
    hub.stop()


@pytest.fixture(scope="module")
def served(hub, tmp_path_factory, library):
    folder = tmp_path_factory.mktemp("served")
    options = ("--ram", "160MiB", "--policy", "lru", "--ctx", "512", "--allow-model-change")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(folder / "hf"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            patch.delenv(name, raising=False)
        with serving(folder, *options) as running:
            yield running


def until(is_so):
    """Wait until a task of the server is so far. Ask rarely, because the server has to work."""

    def asked():
        time.sleep(0.1)
        return is_so()

    wait_until(asked)


def models(served):
    return json.loads(served.get("/local-models"))


def done(served, action, model="", state="done"):
    """Run a task to its end and return the answer of /local-models."""
    served.post(TASK, {"action": action, "model": model})
    until(lambda: models(served)["task"]["state"] != "running")
    found = models(served)
    assert found["task"]["state"] == state, found["task"]
    return found


def answer(served):
    data = {"messages": SAID, "max_tokens": 8, "temperature": 0}
    return served.post(CHAT, data)["choices"][0]["message"]["content"]


def loaded(served):
    (name,) = [each["name"] for each in models(served)["models"] if each["loaded"]]
    (known,) = json.loads(served.get("/v1/models"))["data"]
    return name, known["id"]


def test_a_model_is_compared_pulled_and_loaded(served, hub):
    assert [each["loaded"] for each in models(served)["models"]] == [True]
    before = answer(served)
    found = done(served, "compare", "o/n")["compared"]
    rows = {row["file"]: row for row in found["rows"]}
    assert rows["n-Q8_0.gguf"]["here"] in ("fits", "streams") and rows["n-Q2_K.gguf"]["why"]
    assert rows["n-Q8_0.gguf"]["tokens_s"] > 0 and rows[found["best"]]["best"]
    # The limit is that of the server.
    assert found["ram_bytes"] == 160 << 20

    name = done(served, "pull", "o/n/n-Q8_0.gguf")["models"][-1]["name"]
    assert name == "n-Q8_0" and loaded(served) == ("moe-edge-demo", "moe-edge-demo")
    done(served, "load", name)
    assert loaded(served) == ("n-Q8_0", "n-Q8_0")
    assert answer(served) == before
    assert json.loads(served.get("/health")) == {"status": "ok"}
    done(served, "load", "moe-edge-demo")
    assert loaded(served) == ("moe-edge-demo", "moe-edge-demo") and answer(served) == before
    assert not any("Traceback" in line for line in served.lines)


def test_a_model_that_cannot_be_loaded_leaves_the_former_one(served, hub):
    done(served, "pull", "o/n/n-Q2_K.gguf")
    before = loaded(served)
    said = done(served, "load", "n-Q2_K", "failed")["task"]["error"]
    assert "n-Q2_K.gguf" in said and said.count("\n") == 0
    assert loaded(served) == before and answer(served)
    said = done(served, "load", "../etc/passwd", "failed")["task"]["error"]
    assert said == "../etc/passwd: there is no downloaded model of this name"
    for wrong in ("o/none", "o/n/none.gguf", "/etc/passwd", "x", "-h"):
        assert done(served, "pull", wrong, "failed")["task"]["error"]
    assert done(served, "compare", "o/none", "failed")["task"]["error"]


def test_requests_in_progress_are_answered_first(served, hub):
    done(served, "pull", "o/n/n-Q8_0.gguf")
    body = json.dumps({"messages": SAID, "max_tokens": 200, "ignore_eos": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    slow = served.connected()
    slow.sendall(head.encode() + body[:9])
    served.get("/health")  # the server has seen the earlier request
    served.post(TASK, {"action": "load", "model": "n-Q8_0"})
    until(lambda: models(served)["task"]["doing"] == "Waiting for running requests")
    with pytest.raises(HTTPError) as refused:
        answer(served)
    assert refused.value.code == 503 and refused.value.headers["retry-after"] == "1"
    said = json.load(refused.value)["error"]["message"]
    assert said == "the server changes its model to n-Q8_0: try again later"
    # Another task has to wait. A change that waits can be stopped.
    with pytest.raises(HTTPError) as refused:
        served.post(TASK, {"action": "list"})
    assert refused.value.code == 409
    served.post(TASK, {"action": "stop"})
    until(lambda: models(served)["task"]["state"] == "stopped")
    assert loaded(served)[0] != "n-Q8_0"
    served.post(TASK, {"action": "load", "model": "n-Q8_0"})
    until(lambda: models(served)["task"]["doing"] == "Waiting for running requests")
    slow.sendall(body[9:])
    with HTTPResponse(slow) as reply:
        reply.begin()
        assert reply.status == 200
        assert json.loads(reply.read())["usage"]["completion_tokens"] == 200
    slow.close()
    until(lambda: models(served)["task"]["state"] == "done")
    assert loaded(served) == ("n-Q8_0", "n-Q8_0") and answer(served)


def test_a_download_can_be_stopped_and_continued(served, hub):
    hub.slow = threading.Event()
    try:
        served.post(TASK, {"action": "pull", "model": "o/other"})
        until(lambda: (models(served)["task"]["done"] or 0) > 0)
        task = models(served)["task"]
        assert task["doing"] == "Downloading" and 0 < task["done"] < 1
        served.post(TASK, {"action": "stop"})
        until(lambda: models(served)["task"]["state"] == "stopped")
        assert answer(served)  # the server works on
    finally:
        hub.slow.set()
        hub.slow = None
    names = [each["name"] for each in done(served, "pull", "o/other")["models"]]
    assert "other" in names
    spans = [span for path, span in hub.data_requests() if span is not None]
    assert any(not span.startswith("bytes=0-") for span in spans)


def test_a_server_that_downloads_can_be_stopped(hub, tmp_path, library, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    hub.slow = threading.Event()
    try:
        options = ("--ram", "160MiB", "--policy", "lru", "--ctx", "512", "--allow-model-change")
        with serving(tmp_path, *options) as running:
            running.post(TASK, {"action": "pull", "model": "o/other"})
            until(lambda: (models(running)["task"]["done"] or 0) > 0)
            status, said = running.end()
    finally:
        hub.slow.set()
        hub.slow = None
    assert status == 0 and "Traceback" not in said


def test_the_page_compares_downloads_and_loads(served, hub, tmp_path):
    name = "<b>page.gguf"
    hub.repos["o/page"] = Repo({name: DEMO.read_bytes() + bytes(64)})
    with browsing(tmp_path) as browser:
        tab = opened(browser, served.url)
        tab.value("$('list').click()")
        tab.value("$('choose').click()")
        tab.until("$('pulled').children.length > 0")
        tab.value("$('repo').focus()")
        tab.type("o/page")
        tab.press("Enter")
        tab.until("$('doing').innerText === 'Compared o/page' && $('rows').children.length === 1")
        assert "best here" in tab.value("$('rows').innerText")
        tab.value("$('rows').querySelector('button').click()")
        tab.until("$('doing').innerText.startsWith('Downloaded ') && $('halt').hidden")
        tab.until("$('rows').innerText.includes('downloaded')")
        tab.value(
            "[...$('pulled').querySelectorAll('button')].find((each) => "
            "each.ariaLabel === 'Use <b>page').click()"
        )
        tab.until("$('doing').innerText === 'Now in use: <b>page'")
        tab.until("$('mode').innerText.startsWith('<b>page: ')")
        tab.value("$('models').close()")
        asked(tab, "What is the capital of Norway?")
        tab.until("!running && messages.length === 2 && !messages[1].end")
        assert not tab.events("Runtime.exceptionThrown")


def test_a_server_without_any_model_can_load_one(hub, tmp_path, library, monkeypatch):
    """A change that fails after the former model was freed, and the former file is gone."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    path = tmp_path / "former.gguf"
    shutil.copy(DEMO, path)
    one_tier = synthetic.write(tmp_path / "one.gguf", "tiny-qwen3moe", tiers=("q8_0",))
    hub.repos["o/one"] = Repo({"one.gguf": Path(one_tier).read_bytes()})
    options = ("-m", str(path), "--ram", "160MiB", "--policy", "dymoe", "--low-tier", "q2_k")
    with serving(tmp_path, *options, "--ctx", "512", "--allow-model-change") as running:
        done(running, "pull", "o/one")
        done(running, "pull", "o/n/n-Q8_0.gguf")
        why = done(running, "load", "one", "failed")["task"]["error"]
        assert "q2_k" in why and answer(running)
        path.unlink()
        assert done(running, "load", "one", "failed")["task"]["error"]
        with pytest.raises(HTTPError) as refused:
            answer(running)
        said = json.load(refused.value)["error"]["message"]
        assert refused.value.code == 503 and said.startswith("no model is loaded: ")
        done(running, "load", "n-Q8_0")
        assert answer(running)
        status, text = running.end()
    assert status == 0 and "Traceback" not in text


def test_without_the_option_nothing_is_offered():
    app = app_for(FakeServed())
    for reply in (ask(app, "/local-models"), ask(app, TASK, {"action": "list"})):
        assert reply.status == 403
        assert reply.json()["error"]["message"] == (
            "clients may not change the model: start the server with --allow-model-change to "
            "allow it"
        )
    assert b'<body class="may-change">' not in ask(app, "/").body


class Changes:
    """Records the tasks that are started."""

    def __init__(self):
        self.begun = []

    def as_dict(self):
        return {"models": [], "task": None, "compared": None}

    def carry_out(self, *task):
        self.begun.append(task)


def test_requests_for_tasks_are_checked():
    state, app = served_by(FakeServed())
    state.changes = changes = Changes()
    assert ask(app, TASK, {"action": "pull", "model": "a/b"}).status == 200
    assert changes.begun == [("pull", "a/b")]
    for wrong in ({}, {"action": "run"}, {"action": "pull", "model": 5}, [], b"x"):
        assert ask(app, TASK, wrong).status == 400
    assert ask(app, TASK, {"action": "pull", "model": "a" * 5000}).status == 413
    assert b'<body class="may-change">' in ask(app, "/").body
    # Pages of other origins cannot start tasks.
    said = {"action": "pull", "model": "a/b"}
    assert ask(app, TASK, said, origin="http://evil.example").status == 403
    assert len(changes.begun) == 1
