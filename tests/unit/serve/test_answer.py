"""One request on its way: parts, costs, silences, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")

from asgi import HANG_S, Client, FakeBackend, FakeRequest, Reply, app_for, ask, state_with
from starlette.types import ASGIApp

from orchestrator.errors import NativeError
from orchestrator.serve import answer
from orchestrator.serve import backend as state_module
from orchestrator.serve.app import application
from orchestrator.serve.wire import with_costs

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "a"}]
# What each path needs, and leaves out of the others' where it has no use for it.
ASK = {"messages": SAID, "input": "a", "input_prefix": "a", "input_suffix": "b"}
STREAM = {**ASK, "stream": True}
ANY = json.dumps(ASK).encode()
FINAL = b'data: {"choices": [], "timings": {"predicted_n": 3}}\n\n'


def quiet(_line: str) -> None:
    pass


def test_a_stream_comes_in_parts_and_its_last_one_has_the_costs() -> None:
    request = FakeRequest(200, True, [b"data: {}\n\n", FINAL, b"data: [DONE]\n\n"])
    reply = ask(app_for(FakeBackend(request)), CHAT, STREAM)
    assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream"
    assert [reply.parts[0], reply.parts[2]] == [b"data: {}\n\n", b"data: [DONE]\n\n"]
    timings = json.loads(reply.parts[1].removeprefix(b"data: "))["timings"]
    assert timings == {"predicted_n": 3, "hit_rate": 0.5, "shared_steps": False}
    assert request.closed


def test_an_answer_at_once_has_the_costs_too() -> None:
    request = FakeRequest(200, False, [b'{"timings": {}}'])
    reply = ask(app_for(FakeBackend(request)), CHAT, ASK)
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json()["timings"]["hit_rate"] == 0.5


def test_letters_stay_as_they_are_beside_the_costs() -> None:
    request = FakeRequest(200, False, ['{"content": "fjord ø", "timings": {}}'.encode()])
    reply = ask(app_for(FakeBackend(request)), CHAT, ASK)
    assert '"fjord ø"'.encode() in reply.body and b"hit_rate" in reply.body


def test_answers_without_figures_of_llama_cpps_have_ours() -> None:
    summary = (
        b'event: message_delta\ndata: {"type": "message_delta", "usage": {}}\n\n'
        b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
    )
    app = app_for(
        FakeBackend(
            FakeRequest(200, False, [b'{"output": []}']),
            FakeRequest(200, False, [b'{"content": []}']),
            FakeRequest(200, True, [b"event: message_start\ndata: {}\n\n", summary]),
            FakeRequest(200, False, [b'[{"timings": {"predicted_n": 1}}, {"timings": {}}]']),
        )
    )
    for path in ("/v1/responses", "/v1/messages"):
        assert ask(app, path, ASK).json()["timings"]["hit_rate"] == 0.5
    start, end = ask(app, "/v1/messages", STREAM).parts
    assert start == b"event: message_start\ndata: {}\n\n"
    found = [json.loads(line[6:]) for line in end.split(b"\n") if line.startswith(b"data: ")]
    assert found[0]["timings"]["hit_rate"] == 0.5 and found[0]["usage"] == {}
    assert found[1] == {"type": "message_stop"}
    several = ask(app, "/completion", {"prompt": ["a", "b"]}).json()
    assert [each["timings"]["hit_rate"] for each in several] == [0.5, 0.5]
    assert several[0]["timings"]["predicted_n"] == 1


def test_who_wants_some_fields_alone_gets_no_others() -> None:
    request = FakeRequest(200, False, [b'{"content": "timings"}'])
    app = app_for(FakeBackend(request))
    wanted = {"prompt": "a", "response_fields": ["content"]}
    assert ask(app, "/completion", wanted).json() == {"content": "timings"}


@pytest.mark.parametrize("data", [ASK, STREAM])
def test_what_llama_cpp_refuses_is_refused(data: dict[str, object]) -> None:
    request = FakeRequest(400, False, [b'{"error": {"message": "too long"}}'])
    reply = ask(app_for(FakeBackend(request)), CHAT, data)
    assert reply.status == 400 and reply.json()["error"]["message"] == "too long"


def test_what_the_model_cannot_do_is_no_failure_of_the_server() -> None:
    request = FakeRequest(501, False, [b'{"error": {"code": 501, "message": "no gaps"}}'])
    reply = ask(app_for(FakeBackend(request)), "/infill", ASK)
    assert reply.status == 400
    assert reply.json()["error"]["code"] == 400 and reply.json()["error"]["message"] == "no gaps"


def test_a_step_that_failed_says_why() -> None:
    failed = b'{"error": {"message": "Compute error."}}'
    backend = FakeBackend(
        FakeRequest(500, False, [failed]),
        FakeRequest(200, True, [b"data: {}\n\n", b"data: " + failed + b"\n\n"]),
        FakeRequest(200, False, [b'{"choices": "Compute error."}']),
    )
    app = app_for(backend)
    reply = ask(app, CHAT, ASK)
    assert reply.status == 500 and reply.json()["error"]["message"] == "the disk is gone"
    reply = ask(app, CHAT, STREAM)
    assert reply.status == 200 and b"the disk is gone" in reply.parts[-1]
    assert reply.parts[-1].startswith(b"data: ")
    # A model may say so.
    reply = ask(app, CHAT, ASK)
    assert reply.json()["choices"] == "Compute error."


def test_what_came_before_a_step_failed_is_sent() -> None:
    """Several parts come at once where tokens are fast."""
    said, failed = (
        b'data: {"content": "Compute error."}\n\n',
        b'data: {"error": {"message": "Compute error."}}\n\n',
    )
    request = FakeRequest(200, True, [said, failed, b"data: [DONE]\n\n"], at_once=True)
    request.run()
    reply = ask(app_for(FakeBackend(request)), CHAT, STREAM)
    assert reply.parts[0] == said
    assert b"the disk is gone" in reply.parts[1] and len(reply.parts) == 2


def test_what_came_before_a_step_failed_has_its_form_and_its_costs() -> None:
    said = {"index": 0, "text": "a", "logprobs": {"content": []}}
    event = json.dumps({"choices": [said], "timings": {}}).encode()
    failed = b'{"error": {"message": "Compute error."}}'
    parts = [b"data: " + part + b"\n\n" for part in (event, failed)]
    request = FakeRequest(200, True, parts, at_once=True)
    request.run()
    data = {"prompt": "a", "logprobs": 1, "stream": True}
    app = app_for(FakeBackend(request))
    got = json.loads(ask(app, "/v1/completions", data).parts[0].removeprefix(b"data: "))
    assert got["choices"][0]["logprobs"]["text_offset"] == []
    assert got["timings"]["hit_rate"] == 0.5


async def streamed(
    app: ASGIApp,
    goes_on: Event,
    path: str = CHAT,
    data: object = STREAM,
    enough: Callable[[list[bytes]], object] = bool,
) -> Reply:
    """A stream whose request goes on, to its end, once the parts that have come are enough."""
    client = Client(app, "POST", path, json.dumps(data).encode())
    running = asyncio.create_task(client.run())
    await client.heard(enough)
    goes_on.set()
    return await asyncio.wait_for(running, HANG_S)


@pytest.mark.parametrize(("path", "named"), [(CHAT, b""), ("/v1/messages", b"event: error\n")])
def test_a_silent_stream_is_kept_alive_before_its_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch, path: str, named: bytes
) -> None:
    """Anthropic's clients know an error by its event's name."""
    monkeypatch.setattr(answer, "PING_S", 0.02)
    hold, other = Event(), Event()
    backend = FakeBackend(
        FakeRequest(400, False, [b'{"error": {}}'], hold),
        FakeRequest(500, False, [b'{"error": {"message": "Compute error."}}'], other),
    )
    app = app_for(backend)
    reply = asyncio.run(streamed(app, hold, path))
    assert reply.status == 200 and reply.parts[0].startswith(b":")
    # An error that comes after the comments is an event, not a status.
    outer = b'"type": "error", ' if named else b""
    assert reply.parts[-1] == named + b"data: {" + outer + b'"error": {}}\n\n'
    failed = asyncio.run(streamed(app, other, path)).parts[-1]
    assert failed.startswith(named + b'data: {"type": "error"') and b"the disk is gone" in failed


LONG, SHORT = b'{"input_tokens": 512}', b'{"input_tokens": 511}'


@pytest.mark.parametrize(
    ("path", "data", "counts"),
    [
        (CHAT, {"messages": SAID}, (LONG, SHORT)),
        ("/v1/responses", {"input": "a"}, (LONG, SHORT)),
        ("/v1/messages", {"messages": SAID}, (LONG, SHORT)),
        (
            "/v1/completions",
            {"prompt": "a"},
            tuple(json.dumps({"tokens": [1] * n}).encode() for n in (512, 511)),
        ),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_before_its_stream_begins(
    monkeypatch: pytest.MonkeyPatch, path: str, data: dict[str, object], counts: tuple[bytes, bytes]
) -> None:
    """Also where its turn comes so late that comments go out before."""
    monkeypatch.setattr(answer, "PING_S", 0.02)
    hold = Event()
    first, last = FakeRequest(200, False, [b"{}"], hold), FakeRequest(200, True, [FINAL])
    counted = [FakeRequest(200, False, [count]) for count in counts]
    backend = FakeBackend(first, *counted, last)
    app = app_for(backend)
    body = json.dumps({**data, "stream": True}).encode()

    async def three() -> None:
        running = asyncio.create_task(Client(app, "POST", CHAT, ANY).run())
        while not backend.asked:
            await asyncio.sleep(0.01)
        long = await asyncio.wait_for(Client(app, "POST", path, body).run(), HANG_S)
        error = long.json()["error"]
        assert long.status == 400 and error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (512, 512)  # as upstream says it
        assert "512" in error["message"]
        short = await streamed(app, hold, path, {**data, "stream": True})
        assert short.status == 200 and short.parts[0].startswith(b":")
        assert b"hit_rate" in short.parts[-1]
        await running

    asyncio.run(three())
    assert counted[0].closed and counted[1].closed
    assert len(backend.asked) == 4  # each is counted once


def test_what_cannot_be_read_is_refused_before_its_stream_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer, "PING_S", 0.02)
    hold = Event()
    refused = FakeRequest(400, False, [b'{"error": {"message": "no such role"}}'])
    backend = FakeBackend(FakeRequest(200, False, [b"{}"], hold), refused)
    app = app_for(backend)

    async def two() -> None:
        running = asyncio.create_task(Client(app, "POST", CHAT, ANY).run())
        while not backend.asked:
            await asyncio.sleep(0.01)
        body = json.dumps(STREAM).encode()
        reply = await asyncio.wait_for(Client(app, "POST", CHAT, body).run(), HANG_S)
        assert reply.status == 400 and reply.json()["error"]["message"] == "no such role"
        hold.set()
        await running

    asyncio.run(two())


def test_a_stream_is_kept_alive_while_a_tool_call_is_withheld(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer, "PING_S", 0.02)
    pause = Event()
    role, call = b'data: {"role": "assistant"}\n\n', b'data: {"tool_calls": []}\n\n'
    request = FakeRequest(200, True, [role, call], pause=pause)
    app = app_for(FakeBackend(request))

    def kept_alive(parts: list[bytes]) -> bool:
        return len(parts[parts.index(role) :]) > 3 if role in parts else False

    parts = asyncio.run(streamed(app, pause, enough=kept_alive)).parts
    at = parts.index(role)  # on a busy machine there are comments before it, too
    assert parts[-1] == call
    # A comment is an event of its own: it begins with a colon and ends with an empty line.
    comments = parts[:at] + parts[at + 1 : -1]
    assert all(part.startswith(b":") and part.endswith(b"\n\n") for part in comments)


def test_nobody_waits_for_ever_and_the_line_is_bounded() -> None:
    holds = [FakeRequest(200, False, [b"{}"], Event()) for _ in range(3)]
    state = state_with(FakeBackend(*holds), queue=1, timeout=1)
    app = application(state, quiet)

    async def three() -> list[int]:
        clients = [Client(app, "POST", CHAT, ANY) for _ in range(3)]
        replies = await asyncio.gather(*(client.run() for client in clients))
        return sorted(reply.status for reply in replies)

    assert asyncio.run(three()) == [429, 504, 504]
    assert state.gate.running == state.gate.waiting == 0
    assert holds[0].closed and holds[0].cancelled.is_set()


def test_a_client_that_leaves_ends_its_work_and_gives_its_place_back() -> None:
    request = FakeRequest(200, False, [b"{}"], Event())
    after = FakeRequest(200, False, [b"{}"])
    state = state_with(FakeBackend(request, after))
    app = application(state, quiet)

    async def leave() -> int:
        client = Client(app, "POST", CHAT, ANY)
        running = asyncio.create_task(client.run())
        while not state.gate.running:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(Client(app, "POST", CHAT, ANY).run())
        client.leave()
        await asyncio.wait_for(running, HANG_S)
        assert request.cancelled.is_set() and request.closed
        return (await asyncio.wait_for(second, HANG_S)).status

    assert asyncio.run(leave()) == 200


def test_a_client_that_leaves_the_line_lets_nobody_in() -> None:
    hold = Event()
    first, second = FakeRequest(200, False, [b"{}"], hold), FakeRequest(200, False, [b"{}"])
    backend = FakeBackend(first, second)
    state = state_with(backend)
    app = application(state, quiet)

    async def leave() -> list[int]:
        clients = [Client(app, "POST", CHAT, ANY) for _ in range(3)]
        running = []
        for number, client in enumerate(clients):
            running.append(asyncio.create_task(client.run()))
            while state.gate.running + state.gate.waiting <= number:
                await asyncio.sleep(0.01)
        clients[2].leave()
        await asyncio.wait_for(running[2], HANG_S)
        await asyncio.sleep(0.05)
        assert (state.gate.running, state.gate.waiting) == (1, 1)
        assert len(backend.asked) == 1  # the second one waits until the first has ended
        hold.set()
        replies = [await asyncio.wait_for(each, HANG_S) for each in running[:2]]
        return [reply.status for reply in replies]

    assert asyncio.run(leave()) == [200, 200]
    assert state.gate.running == state.gate.waiting == 0


class Deaf(Client):
    """A client that takes nothing from the first part on, until it hears."""

    def __init__(self, app: ASGIApp, data: object) -> None:
        super().__init__(app, "POST", CHAT, json.dumps(data).encode())
        self.hears, self.aborted = asyncio.Event(), asyncio.Event()
        self._scope["state"] = {"abort": self.aborted.set}

    async def _send(self, message: dict[str, Any]) -> None:
        await super()._send(message)
        if message["type"] == "http.response.body":
            await self.hears.wait()


@pytest.mark.parametrize("most_bytes", [1000, 1])
def test_who_reads_nothing_holds_no_place_once_the_answer_is_made(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """What is unread stays in memory, counted, and the oldest of it goes."""
    monkeypatch.setattr(state_module, "UNREAD_BYTES", most_bytes)
    parts = [b"data: {}\n\n", FINAL]
    backend = FakeBackend(*(FakeRequest(200, True, parts) for _ in range(3)))
    state = state_with(backend, parallel=1, queue=0)
    app = application(state, quiet)

    async def run() -> None:
        deaf = [Deaf(app, STREAM) for _ in range(2)]
        running = []
        for each in deaf:
            running.append(asyncio.create_task(each.run()))
            await each.heard(bool)
            await asyncio.wait_for(until(lambda: state.gate.running == 0), HANG_S)
        assert state.unread.n_bytes > 0
        assert deaf[0].aborted.is_set() == (most_bytes == 1) and not deaf[1].aborted.is_set()
        reply = await Client(app, "POST", CHAT, json.dumps(STREAM).encode()).run()
        assert reply.status == 200  # its one place is free
        for each, task in zip(deaf, running, strict=True):
            each.hears.set()
            reply = await asyncio.wait_for(task, HANG_S)
            assert b'"hit_rate"' in reply.body
        assert state.unread.n_bytes == 0

    asyncio.run(run())


def test_steps_are_shared_with_who_came_before_the_end() -> None:
    """Also where the end is taken once its place is given back."""
    pause, other = Event(), Event()
    backend = FakeBackend(
        FakeRequest(200, True, [b"data: {}\n\n", FINAL], pause=pause),
        FakeRequest(200, False, [b"{}"], other),
    )
    state = state_with(backend, parallel=2)
    app = application(state, quiet)

    async def run() -> Reply:
        deaf = Deaf(app, STREAM)
        first = asyncio.create_task(deaf.run())
        await deaf.heard(bool)
        second = asyncio.create_task(Client(app, "POST", CHAT, ANY).run())
        await asyncio.wait_for(until(lambda: state.gate.running == 2), HANG_S)
        pause.set()
        await asyncio.wait_for(until(lambda: state.gate.running == 1), HANG_S)
        deaf.hears.set()
        reply = await asyncio.wait_for(first, HANG_S)
        other.set()
        await asyncio.wait_for(second, HANG_S)
        return reply

    assert b'"shared_steps": true' in asyncio.run(run()).body


def test_who_leaves_takes_no_memory_from_who_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "UNREAD_BYTES", 1)
    parts = [b"data: {}\n\n", FINAL]
    backend = FakeBackend(
        FakeRequest(200, True, parts), FakeRequest(200, True, parts, pause=Event())
    )
    state = state_with(backend)
    app = application(state, quiet)

    async def run() -> None:
        slow, leaving = Deaf(app, STREAM), Client(app, "POST", CHAT, json.dumps(STREAM).encode())
        running = []
        for each in (slow, leaving):
            running.append(asyncio.create_task(each.run()))
            await each.heard(bool)
            await asyncio.wait_for(
                until(lambda: state.unread.n_bytes > 0),
                HANG_S,
            )
        leaving.leave()
        await asyncio.wait_for(running[1], HANG_S)
        assert state.gate.running == 0 and not slow.aborted.is_set()
        slow.hears.set()
        await asyncio.wait_for(running[0], HANG_S)

    asyncio.run(run())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_who_reads_nothing_until_the_timeout_is_cut() -> None:
    hold = Event()
    backend = FakeBackend(FakeRequest(200, True, [b"data: {}\n\n", FINAL], pause=hold))
    app = app_for(backend, timeout=1)

    async def run() -> None:
        deaf = Deaf(app, STREAM)
        await asyncio.wait_for(deaf.run(), HANG_S)
        assert deaf.aborted.is_set()

    asyncio.run(run())


def test_a_grammar_that_is_given_up_in_an_answer_is_the_requests_fault() -> None:
    failed = b'{"error": {"code": 500, "message": "got exception: the grammar is refused: why"}}'
    backend = FakeBackend(
        FakeRequest(500, False, [failed]),
        FakeRequest(200, True, [b"data: {}\n\n", b"data: " + failed + b"\n\n"]),
    )
    app = app_for(backend)
    reply = ask(app, CHAT, ASK)
    assert reply.status == 400
    assert reply.json()["error"]["message"] == "the grammar is refused: why"
    assert b'"code": 400' in ask(app, CHAT, STREAM).parts[-1]


def test_costs_are_put_into_an_answer_that_is_not_parsed() -> None:
    """A text may say what the figures are called."""
    said = json.dumps({"content": '"timings":{', "timings": {"n": 1}, "list": [{"timings": {}}]})
    made = json.loads(with_costs(said.encode(), {"ours": 2}, False, CHAT))
    assert made == {
        "content": '"timings":{',
        "timings": {"ours": 2, "n": 1},
        "list": [{"timings": {"ours": 2}}],
    }
    called = b'{"content": [{"input": {"timings": {}}}]}\n'
    made = json.loads(with_costs(called, {"ours": 2}, False, "/v1/messages"))
    assert made == {"content": [{"input": {"timings": {}}}], "timings": {"ours": 2}}


class Exhausted(FakeRequest):
    """A native request that ends before its end."""

    def run(self, ready: int = -1) -> None:
        super().run(ready)
        raise NativeError("there was no memory for the answer")


def test_an_answer_without_memory_is_an_error_in_a_sentence() -> None:
    parts = [b"data: {}\n\n"]
    backend = FakeBackend(Exhausted(200, False, []), Exhausted(200, True, parts))
    app = app_for(backend)
    reply = ask(app, CHAT, ASK)
    assert reply.status == 500 and "no memory" in reply.json()["error"]["message"]
    reply = ask(app, CHAT, STREAM)
    assert reply.parts[0] == parts[0] and b"no memory" in reply.parts[-1]


def test_a_request_without_file_descriptors_is_refused_and_its_place_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(answer, "Parts", none)
    state = state_with(FakeBackend(FakeRequest(200, False, [])), parallel=1)
    reply = ask(application(state, quiet), CHAT, ASK)
    assert reply.status == 503 and "Too many open files" in reply.json()["error"]["message"]
    assert state.gate.running == 0
