"""Clients that do not read their answers, and clients that still send when the answer has been
made."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager

import pytest
from tables import cases
from waiting import wait_until

pytest.importorskip("uvicorn", reason="uvicorn is missing: run `make build`")

import uvicorn
from asgi import HANG_S, Client
from fake_served import FakeServed, app_for, quiet, served_by, state_with, whole
from starlette.responses import Response

from orchestrator.serve import door
from orchestrator.serve.app import application
from orchestrator.serve.run import Protocol, _Server, proxy_options
from orchestrator.serve.settings import ServeSettings

BIG = json.dumps({"tokens": [1] * 3_000_000}).encode()
HEAD = b"HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def running(app, patience_s, **options):
    """Serve an application on a socket, with options for uvicorn. Yields the port and the server's
    state."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(64)
    patient = type("Patient", (Protocol,), {"patience_s": patience_s})
    usual = {"ws": "none", "lifespan": "off", "log_config": None, "backlog": 1}
    usual |= {"timeout_keep_alive": 1, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, http=patient, **usual, **options)
    server = _Server(config, quiet)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        yield sock.getsockname()[1], server.server_state
    finally:
        server.should_exit = True
        thread.join(HANG_S)
        sock.close()


def connected(port, received_bytes=0, address=""):
    """Open a connection. address: the client's address."""
    sock = socket.socket()
    if address:
        sock.bind((address, 0))
    if received_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
    sock.settimeout(HANG_S)
    sock.connect(("127.0.0.1", port))
    return sock


def all_of(sock):
    said = b""
    while part := sock.recv(1 << 16):
        said += part
    return said


def wait_until_none(state):
    wait_until(lambda: not state.connections, "a connection stays open")


def sent(port, address, prompt):
    """Open a connection from this address and send a request on it."""
    sock, body = connected(port, address=address), json.dumps({"prompt": prompt}).encode()
    head = f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    sock.sendall(b"POST /v1/completions " + HEAD + head + body)
    return sock


def answer_on(sock):
    """Read the whole reply on a connection, and close it."""
    with sock:
        return all_of(sock)


def test_clients_of_two_addresses_take_turns():
    """The client that fills the queue loses its last place to the other client."""
    served, go_on = FakeServed(*(whole() for _ in range(4))), threading.Event()
    served.requests[0].hold = go_on
    state, app = served_by(served, queue=3)

    def wait_for(n):
        gate = state.gate
        wait_until(lambda: gate.running + gate.waiting == n, f"{n} requests never arrive")

    with running(app, 30.0) as (port, _):
        many = []
        for number in range(4):
            many.append(sent(port, "127.0.0.1", f"a{number}"))
            wait_for(number + 1)
        assert answer_on(sent(port, "127.0.0.1", "refused")).startswith(b"HTTP/1.1 429 ")
        other = sent(port, "127.0.0.2", "b")
        assert answer_on(many[3]).startswith(b"HTTP/1.1 429 ")
        go_on.set()
        for sock in (*many[:3], other):
            assert answer_on(sock).startswith(b"HTTP/1.1 200 ")
    asked = [json.loads(body)["prompt"] for _, body in served.asked]
    assert asked == ["a0", "a1", "b", "a2"]


@cases(
    "trusted, source, client",
    (None, "127.0.0.1", "127.0.0.1"),
    ("127.0.0.1", "127.0.0.1", "192.0.2.7"),
    ("127.0.0.1", "127.0.0.2", "127.0.0.2"),
    ("127.0.0.3,127.0.0.2", "127.0.0.2", "192.0.2.7"),
)
def test_only_a_proxy_that_is_configured_names_the_client(trusted, source, client):
    async def app(scope, receive, send):
        await Response(scope["client"][0])(scope, receive, send)

    options = proxy_options(ServeSettings(trusted_proxy=trusted))
    with running(app, 30.0, **options) as (port, _), connected(port, address=source) as sock:
        more = b"X-Forwarded-For: 192.0.2.7\r\nConnection: close\r\n\r\n"
        sock.sendall(b"GET / " + HEAD + more)
        assert all_of(sock).endswith(f"\r\n\r\n{client}".encode())


def test_a_client_that_does_not_read_loses_its_connection():
    """A client that does not read its answer is disconnected after the patience of 1 s, and its
    unread bytes are counted until then."""
    served = FakeServed(*(whole(BIG) for _ in range(4)))
    state = state_with(served, patience=1)
    with running(application(state, quiet), 1.0) as (port, server):
        socks = [connected(port, 4096) for _ in range(3)]
        for sock in socks:
            sock.sendall(b"GET /props " + HEAD + b"\r\n")
        reading = connected(port)
        reading.sendall(b"GET /props " + HEAD + b"Connection: close\r\n\r\n")
        assert all_of(reading).endswith(BIG)
        wait_until_none(server)
        for sock in (*socks, reading):
            sock.close()
    assert state.unread.n_bytes == 0


@pytest.mark.parametrize("head", [HEAD + b"\r\n", HEAD + b"Connection: close\r\n\r\n"])
def test_closing_does_not_wait_for_a_client_that_does_not_read(head):
    """The connection is aborted, because `close` alone would wait forever for such a client."""

    async def app(scope, receive, send):
        await Response(BIG)(scope, receive, send)

    with running(app, 0.2) as (port, server), connected(port, 4096) as sock:
        sock.sendall(b"GET / " + head)
        sock.recv(1)
        wait_until_none(server)


@cases(
    "host, length, status",
    ("evil.example", 10 * 2**20, 421),
    ("localhost", 10 * 2**20, 413),
    ("localhost", 2**18, 413),
)
def test_a_refusal_arrives_while_the_client_still_sends(host, length, status):
    """The server reads on after a refusal. Closing a connection with unread bytes would reset it,
    and the client would lose the reply."""
    with running(app_for(FakeServed()), 30.0) as (port, _):
        for _ in range(5):
            with connected(port) as sock:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
                sock.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + b"x" * length)
                said = all_of(sock)
            assert said.startswith(f"HTTP/1.1 {status} ".encode()) and b'"message"' in said


def test_a_refused_body_is_discarded_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(door, "DROP_S", 0.1)
    with running(app_for(FakeServed()), 30.0) as (port, server):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: evil\r\nConnection: close\r\n"
        # a client that waits for "100 Continue" has not sent its body
        for more in (b"", b"Expect: 100-continue\r\n"):
            with connected(port) as sock:
                sock.sendall(head + more + b"Content-Length: 1000\r\n\r\n")
                assert all_of(sock).startswith(b"HTTP/1.1 421 ")
        wait_until_none(server)


def test_shutdown_does_not_wait_for_clients_that_send():
    """Shutdown waits neither for a client that starts to send then, nor for one that is already
    sending."""
    state, app = served_by(FakeServed())

    class Sending(Client):
        waits = False

        async def _receive(self):
            self.waits = True
            await asyncio.Event().wait()
            raise AssertionError

    async def run():
        waiting = Sending(app, "POST", "/tokenize", b"", host="evil", content_length="10")
        task = asyncio.create_task(waiting.run())
        while not waiting.waits:
            await asyncio.sleep(0)
        state.stopping = True
        task.cancel()
        assert (await task).status == 421
        late = Sending(app, "POST", "/tokenize", b"", host="evil", content_length="10")
        assert (await late.run()).status == 421 and not late.waits

    asyncio.run(run())
