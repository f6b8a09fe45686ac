"""The server process: status before it can answer, connections, and shutdown."""

import asyncio
import json
import resource
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tables import cases

pytest.importorskip("uvicorn", reason="uvicorn is missing: run `make build`")

from served import DEMO, HANG_S, running
from waiting import wait_until

from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.runtime import runtime as runtime_module
from orchestrator.serve.run import (
    LEAST_CONNECTIONS,
    MOST_CONNECTIONS,
    Running,
    listen,
    most_connections,
)
from orchestrator.serve.settings import ServeSettings

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def made(note=lambda _line: None):
    return Running(Config.build(model=DEMO), ServeSettings(port=0), note, lambda *_: None)


def status_of(url):
    with pytest.raises(HTTPError) as refused:
        urlopen(url + "/health", timeout=HANG_S)
    return refused.value.code, json.load(refused.value)["error"]["message"]


def test_health_is_503_while_the_model_is_loading(library, monkeypatch):
    """A client polls /health until the model is ready, and loading may take minutes."""
    running, loading, answered = made(), threading.Event(), threading.Event()
    said = []

    def held(*_):
        loading.set()
        assert answered.wait(HANG_S)
        raise NativeError("the library is missing")

    def ask():
        try:
            assert loading.wait(HANG_S)
            said.append(status_of(running.url))
        finally:
            answered.set()

    monkeypatch.setattr(runtime_module, "server_library", held)
    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(NativeError, match="the library is missing"):
        running.run()
    asking.join()
    assert said == [(503, "the model is loading")]


def test_a_missing_server_core_is_reported(library, monkeypatch):
    def fail(*_):
        raise NativeError("the library is missing")

    monkeypatch.setattr(runtime_module, "server_library", fail)
    with pytest.raises(NativeError, match="the library is missing"):
        made().run()


class Stuck:
    """A runtime whose last step does not end. kept: number of calls that save what was learned."""

    def __init__(self):
        self.kept, self.runtime = 0, self

    def stop(self):
        pass

    def close(self, _end_s):
        self.kept += 1
        return False


@pytest.mark.parametrize("where", ["quick", "decode", ""])
def test_shutdown_does_not_wait_for_stuck_work(library, where):
    """Everything is saved, and one line reports that the server exits without waiting."""
    lines = []
    service = made(lines.append)._service
    stuck, go_on, at_work = Stuck(), threading.Event(), threading.Event()
    service.state.served = stuck if where else None

    def work():
        at_work.set()
        go_on.wait(HANG_S)

    try:
        if where == "quick":
            service.state.quick.submit(work)
            assert at_work.wait(HANG_S)
        service.stop()
        assert service.close(0.0) is not bool(where)
        assert stuck.kept == bool(where)
        assert [line for line in lines if "exits without waiting" in line] == lines
    finally:
        go_on.set()


@cases(
    "soft, hard, parallel, most, raised",
    (1024, 4096, 1, MOST_CONNECTIONS, 4096),
    (256, 256, 4, 200, None),
    (100, 200, 1, 150, 200),
    (40, 40, 4, LEAST_CONNECTIONS, None),
    (256, resource.RLIM_INFINITY, 1, MOST_CONNECTIONS, 4096),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1, MOST_CONNECTIONS, None),
)
def test_connections_follow_the_file_descriptors(monkeypatch, soft, hard, parallel, most, raised):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert most_connections(parallel) == most
    assert asked == ([] if raised is None else [(raised, hard)])


served = running("--ram", "160MiB", "--policy", "lru", "--ctx", "512", files=100)


def test_small_parts_of_an_answer_are_sent_at_once():
    """Connections have TCP_NODELAY. Otherwise each part would wait for the client's
    acknowledgement."""

    async def run():
        no_delay = asyncio.Future()

        async def accepted(_reader, writer):
            sock = writer.get_extra_info("socket")
            no_delay.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen(ServeSettings(port=0)) as sock:
            server = await asyncio.start_server(accepted, sock=sock)
            _, writer = await asyncio.open_connection(*sock.getsockname()[:2])
            found = await no_delay
            writer.close()
            server.close()
        return found

    assert asyncio.run(run())


def test_a_client_from_another_address_gets_its_turn(served):
    """A client at a second address gets an answer although the first address has 30 requests
    waiting."""
    said = [{"role": "user", "content": "hello"}]
    body = json.dumps({"messages": said, "max_tokens": 60, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    data = f"{head}\r\nConnection: close\r\n\r\n".encode() + body
    with ExitStack() as opened:

        def sent(source):
            sock = socket.create_connection(served.address, HANG_S, (source, 0))
            opened.enter_context(sock)
            sock.sendall(data)
            return sock

        crowd = [sent("127.0.0.1") for _ in range(30)]
        assert sent("127.0.0.2").recv(12) == b"HTTP/1.1 200"
        statuses = [sock.recv(12) for sock in crowd]
    assert b"HTTP/1.1 429" in statuses and b"HTTP/1.1 200" in statuses


def test_a_connection_above_the_limit_gets_503(served):
    """Existing connections continue, and the server accepts new ones later."""
    with ExitStack() as stack:
        socks = [stack.enter_context(served.connected()) for _ in range(90)]
        said = socks[-1].recv(1 << 16)
        assert said.startswith(b"HTTP/1.1 503 ") and b"too many connections" in said
        socks[0].sendall(HEALTH + b"\r\n")
        assert socks[0].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert_answers(served)
    assert len(served.lines) < 100 and not any("Traceback" in line for line in served.lines)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_missing_file_descriptors_are_logged_once(served):
    """Without file descriptors the server logs one line and waits. asyncio alone would log 80,000
    lines per second."""
    pid = served.process.pid
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    n_open = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    with ExitStack() as stack:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (n_open + 2, usual[1]))
        stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, usual)
        for _ in range(10):
            stack.enter_context(served.connected())
        said = "No file descriptors are left"
        wait_until(lambda: any(said in line for line in served.lines))
    assert_answers(served)
    assert sum("descriptors" in line for line in served.lines) == 1
    assert not any("Traceback" in line for line in served.lines)


def assert_answers(served):
    """Assert that a new client gets an answer after the server has noticed the closed
    connections."""
    while True:
        with served.connected() as sock:
            sock.sendall(HEALTH + b"Connection: close\r\n\r\n")
            said = sock.recv(1 << 16)
        if said.startswith(b"HTTP/1.1 200 "):
            return
        assert not said or (said.startswith(b"HTTP/1.1 503 ") and served.process.poll() is None)
