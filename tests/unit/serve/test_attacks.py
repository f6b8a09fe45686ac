"""Malicious and slow clients: each gets one clear status, and the server continues."""

import json
import socket
from contextlib import suppress

import pytest
from served import running

KEY = "a key"
HOST = b"Host: localhost\r\n"
KEYED = HOST + b"x-api-key: a key\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n"
served = running(
    *("--ram", "160MiB", "--policy", "lru", "--ctx", "512", "--api-key", KEY),
    *("--body-limit", "64KiB", "--patience", "5"),
)


def answer_to(served, data):
    """Send data and return the reply until the server closes the connection."""
    with served.connected() as sock:
        said = b""
        # The server may reply and close before it has received everything.
        with suppress(ConnectionError):
            sock.sendall(data)
        try:
            while part := sock.recv(65536):
                said += part
        except ConnectionError:
            pass
    return said


def request(head, body=b""):
    length = f"Content-Length: {len(body)}\r\n".encode() if body else b""
    return head + length + b"Connection: close\r\n\r\n" + body


def chat(text, **more):
    data = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}
    return request(CHAT + KEYED, json.dumps(data).encode())


NO_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}
GET, CHUNKED, LAST = b"GET /%b HTTP/1.1\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n"
ATTACKS = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "another protocol": (b"PRI * HTTP/2.0\r\nConnection: close\r\n\r\n", 421),
    "an old protocol without a host": (b"GET /v1/models HTTP/1.0\r\nx-api-key: a key\r\n\r\n", 421),
    "no key": (request(CHAT + HOST, b"{}"), 401),
    "a wrong key": (request(CHAT + HOST + b"Authorization: Bearer no\r\n", b"{}"), 401),
    "a key of odd bytes": (request(CHAT + HOST + b"x-api-key: \xff\xfe\r\n", b"{}"), 401),
    "no host": (request(b"GET /v1/models HTTP/1.1\r\nx-api-key: a key\r\n"), 400),
    "another name": (request(b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n"), 421),
    "two names": (request(b"GET / HTTP/1.1\r\n" + HOST + b"Host: evil.example\r\n"), 400),
    "another origin": (request(CHAT + KEYED + b"Origin: https://evil.example\r\n", b"{}"), 403),
    "an invalid origin": (request(CHAT + HOST + b"Origin: http://[x\r\n", b"{}"), 403),
    "path traversal": (request(b"GET /../../../etc/passwd HTTP/1.1\r\n" + KEYED), 404),
    "encoded traversal": (request(b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + KEYED), 404),
    "traversal after a path": (request(GET % b"v1/models/../../etc/passwd" + KEYED), 404),
    "an absolute URL": (request(b"GET file:///etc/passwd HTTP/1.1\r\n" + KEYED), 404),
    "a long line": (request(b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n" + KEYED), 400),
    "many fields": (request(b"GET / HTTP/1.1\r\n" + HOST + b"x-a: b\r\n" * 20_000), 400),
    "a huge Content-Length": (request(CHAT + KEYED + b"Content-Length: 99999999999\r\n"), 413),
    "a huge body in chunks": (
        request(CHAT + KEYED + CHUNKED) + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 4 + LAST,
        413,
    ),
    "a length below zero": (CHAT + KEYED + b"Content-Length: -1\r\n\r\n", 400),
    "two lengths": (CHAT + KEYED + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "broken chunks": (CHAT + KEYED + CHUNKED + b"\r\nzz\r\n{}\r\n" + LAST, 400),
    "broken UTF-8": (request(CHAT + KEYED, b'{"messages":"\xff"}'), 400),
    "broken JSON": (request(CHAT + KEYED, b'{"messages":'), 400),
    "deep JSON": (request(CHAT + KEYED, b"[" * 60_000), 400),
    "a text too long": (chat("word " * 3000), 400),
    "an unknown method": (request(b"DELETE /v1/models HTTP/1.1\r\n" + KEYED), 405),
    "an invalid grammar": (chat("x", grammar="root ::= ("), 400),
    "an invalid schema": (chat("x", response_format=NO_SCHEMA), 400),
    "a lone surrogate": (chat("\ud800"), 400),
    "the middle of an emoji": (chat("\U0001f469\u200d"), 200),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_gets_one_clear_status(served, name):
    data, status = ATTACKS[name]
    said = answer_to(served, data)
    assert said.count(b"HTTP/1.1 ") == 1, said[:400]
    assert said.startswith(f"HTTP/1.1 {status} ".encode()), said[:400]
    assert b"root:" not in said and b"Traceback" not in said
    assert b"\nserver:" not in said.lower()  # a Server field would name uvicorn
    assert_goes_on(served)


def assert_goes_on(served):
    assert json.loads(served.get("/health"))["status"] == "ok"
    assert not any("Traceback" in line for line in served.lines), served.lines


def test_slow_clients_are_disconnected_and_block_no_other(served):
    started = b"GET /health HTTP/1.1\r\nHost: loc"
    # A client that sends single bytes does not extend its timeout.
    slow = [served.connected() for _ in range(40)]
    body = served.connected()
    body.sendall(CHAT + KEYED + b"Content-Length: 100\r\n\r\n{")
    for sock in slow:
        sock.sendall(started)
    assert answer_to(served, chat("hello")).startswith(b"HTTP/1.1 200 ")
    for at, sock in enumerate(slow):
        said = trickle(sock, b"alhost" * 50)
        assert said == b"" or said.startswith(b"HTTP/1.1 4"), (at, said)
    said = trickle(body, b" " * 90)
    assert said.startswith(b"HTTP/1.1 408 "), said
    assert_goes_on(served)


def trickle(sock, data):
    """Send one byte at a time until the server replies or closes. Returns the reply."""
    said = b""
    sock.settimeout(0.2)
    with sock:
        for at in range(len(data)):
            try:
                sock.sendall(data[at : at + 1])
                part = sock.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                return said
            said += part
            if not part:
                return said
    pytest.fail("the server waits without a limit")


def test_a_client_that_leaves_after_one_more_byte_is_noticed(served):
    """If a client sends one byte more and leaves, its request ends at once and frees its place."""
    long = chat("hello", max_tokens=400, ignore_eos=True, stream=True).replace(
        b"Connection: close\r\n", b""
    )
    for _ in range(4):
        with served.connected() as sock:
            sock.sendall(long + b"G")
            sock.recv(1)  # the stream has started
    assert answer_to(served, chat("hello")).startswith(b"HTTP/1.1 200 ")
    said = "\n".join(served.lines)
    assert said.count("POST /v1/chat/completions 200 0.") >= 4, said


def test_an_absolute_url_as_request_target(served):
    asked = request(b"GET http://localhost/health HTTP/1.1\r\n" + KEYED)
    assert answer_to(served, asked).startswith(b"HTTP/1.1 200 ")
    asked = request(b"GET http://evil.example/v1/models HTTP/1.1\r\n" + KEYED)
    assert answer_to(served, asked).startswith(b"HTTP/1.1 421 ")


def test_too_many_parts_of_a_message_are_refused(served):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call] * 500}
    data = {"messages": [{"role": "user", "content": "a"}, said], "max_tokens": 1}
    reply = answer_to(served, request(CHAT + KEYED, json.dumps(data).encode()))
    assert reply.startswith(b"HTTP/1.1 400 ") and b"501 parts of messages" in reply
    # The same number of parts in one tool result, in Anthropic's form.
    blocks = [{"type": "text", "text": "a"}] * 500
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    data = {"messages": [{"role": "user", "content": [result]}], "max_tokens": 1}
    head = b"POST /v1/messages HTTP/1.1\r\n" + KEYED
    reply = answer_to(served, request(head, json.dumps(data).encode()))
    assert reply.startswith(b"HTTP/1.1 400 ") and b"500 parts of messages" in reply


def test_a_client_that_reads_nothing_blocks_no_other(served):
    silent = served.connected()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    silent.sendall(chat("hello", stream=True, max_tokens=100, ignore_eos=True))
    assert answer_to(served, chat("hello")).startswith(b"HTTP/1.1 200 ")
    silent.close()
    assert_goes_on(served)


def test_no_local_file_is_read(served, tmp_path):
    (tmp_path / "secret").write_text("a secret")
    for field in ("lora", "slot_save_path", "filename", "grammar_file", "image_url"):
        said = answer_to(served, chat("hello", **{field: str(tmp_path / "secret")}))
        assert b"a secret" not in said
    parts = [{"type": "image_url", "image_url": {"url": f"file://{tmp_path}/secret"}}]
    data = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    said = answer_to(served, request(CHAT + KEYED, data))
    assert not said.startswith(b"HTTP/1.1 200") and b"a secret" not in said
