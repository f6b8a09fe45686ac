"""One request: parts of its answer, costs, keep-alive comments, errors, and clients that leave."""

import asyncio
import json
import os
from threading import Event

import pytest
from asgi import SAID, Client, ask, begun, body_of, end_of, in_a_loop, until
from fake_served import (
    FakeRequest,
    FakeServed,
    app_for,
    reply_of,
    served_by,
    streaming,
    whole,
)
from paths import CHAT, COMPLETIONS, COUNT, MESSAGES, NATIVE, RESPONSES
from tables import cases

from orchestrator.errors import NativeError
from orchestrator.serve import answer
from orchestrator.serve import state as state_module
from orchestrator.serve.wire import progress_of, with_progress

# Fields for all paths. Each path ignores those of the others.
ASK = {"messages": SAID, "input": "a", "input_prefix": "a", "input_suffix": "b"}
STREAM = {**ASK, "stream": True}
PART, FINAL = b"data: {}\n\n", b'data: {"choices": [], "timings": {"predicted_n": 3}}\n\n'
FAILED = b'{"error": {"message": "Compute error."}}'
REFUSED_GRAMMAR = (
    b'{"error": {"code": 500, "message": "got exception: the grammar is refused: why"}}'
)


def event(data):
    return b"data: " + data + b"\n\n"


def progress(processed):
    read = {"total": 100, "cache": 0, "processed": processed, "time_ms": 5}
    return event(json.dumps({"choices": [], "prompt_progress": read}).encode())


@cases(
    "events, done, sent",
    (progress(20), 40.7, progress(60)),
    (progress(20) + progress(50), 0.2, progress(50)),
    (progress(80), 40.7, progress(100)),
    (progress(20) + PART, 40.7, None),
    (PART, 40.7, None),
    (b"event: message_start\n" + progress(20), 40.7, None),
)
def test_progress_is_repeated_with_the_part_read_since(events, done, sent):
    found = progress_of(events)
    assert (with_progress(found, done) if found else None) == sent


@in_a_loop
async def test_a_stream_reports_how_much_of_one_step_is_read(monkeypatch):
    """Progress within a step is reported, but not while several requests share the step."""
    monkeypatch.setattr(answer, "PROGRESS_S", 0.01)
    monkeypatch.setattr(answer, "PING_S", 0.05)
    pause, other_pause = Event(), Event()
    reads = [streaming(progress(20), FINAL, pause=pause), streaming(PART, FINAL, pause=other_pause)]
    _, app = served_by(FakeServed(*reads), parallel=2)
    client, task = begun(app, CHAT, {**STREAM, "return_progress": True})
    await until(lambda: progress(60) in client.reply.parts)
    other, other_task = begun(app, CHAT, STREAM)
    await until(lambda: other.reply.parts and answer.PING in client.reply.parts)
    pause.set()
    other_pause.set()
    assert b'"hit_rate"' in (await end_of(task)).body
    await end_of(other_task)
    assert client.reply.parts[0] == progress(20)


def test_the_last_event_of_a_stream_has_the_costs():
    reply = reply_of(request := streaming(PART, FINAL, event(b"[DONE]")), CHAT, STREAM)
    assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream"
    assert [reply.parts[0], reply.parts[2]] == [PART, event(b"[DONE]")]
    timings = json.loads(reply.parts[1].removeprefix(b"data: "))["timings"]
    assert timings == {"predicted_n": 3, "hit_rate": 0.5, "shared_steps": False}
    assert request.closed


OURS = {"hit_rate": 0.5, "shared_steps": False}
WITHIN, WITH_OURS = [{"input": {"timings": {}}}], {"timings": OURS}
QUOTED, FIELDS = '"timings":{', {"prompt": "a", "response_fields": ["content"]}


@cases(
    "path, data, made, sent",
    (CHAT, ASK, {"timings": {}}, WITH_OURS),
    (CHAT, ASK, {"content": "fjord ø", "timings": {}}, {"content": "fjord ø", **WITH_OURS}),
    # Answers to which llama.cpp adds no timings.
    (RESPONSES, ASK, {"output": []}, {"output": [], **WITH_OURS}),
    (MESSAGES, ASK, {"content": []}, {"content": [], **WITH_OURS}),
    (
        *(NATIVE, {"prompt": ["a", "b"]}),
        [{"timings": {"predicted_n": 1}}, {"timings": {}}],
        [{"timings": {"predicted_n": 1, **OURS}}, WITH_OURS],
    ),
    # Costs are inserted into the text of an answer without parsing it, even if its content contains
    # the word "timings".
    (
        *(CHAT, ASK),
        {"content": QUOTED, "timings": {"n": 1}, "list": [{"timings": {}}]},
        {"content": QUOTED, "timings": {"n": 1, **OURS}, "list": [WITH_OURS]},
    ),
    (MESSAGES, ASK, {"content": WITHIN}, {"content": WITHIN, **WITH_OURS}),
    # If the request names the response fields, no others are added.
    (NATIVE, FIELDS, {"content": "timings"}, {"content": "timings"}),
)
def test_a_whole_answer_has_the_costs(path, data, made, sent):
    written = json.dumps(made, ensure_ascii=False).encode()
    reply = reply_of(whole(written), path, data)
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json() == sent and ("ø".encode() in written) is ("ø".encode() in reply.body)


def test_a_stream_of_anthropics_has_the_costs_in_its_summary():
    start = b"event: message_start\n" + PART
    summary = b"event: message_delta\n" + event(b'{"type": "message_delta", "usage": {}}')
    summary += b"event: message_stop\n" + event(b'{"type": "message_stop"}')
    first, end = reply_of(streaming(start, summary), MESSAGES, STREAM).parts
    assert first == start
    found = [json.loads(line[6:]) for line in end.split(b"\n") if line.startswith(b"data: ")]
    assert found[0]["timings"]["hit_rate"] == 0.5 and found[0]["usage"] == {}
    assert found[1] == {"type": "message_stop"}


class Exhausted(FakeRequest):
    """A native request that fails after its last part."""

    def run(self, ready=-1):
        super().run(ready)
        raise NativeError("there was too little main memory for the answer")


TOO_LONG = b'{"error": {"message": "too long"}}'


@cases(
    "made, status, code, says",
    (whole(TOO_LONG, 400), 400, None, "too long"),
    # If the model cannot serve the request, the status is 400 and not 501.
    (whole(b'{"error": {"code": 501, "message": "no gaps"}}', 501), 400, 400, "no gaps"),
    (whole(FAILED, 500), 500, 500, "the disk is gone"),
    (streaming(PART, event(FAILED)), 200, 500, "the disk is gone"),
    (whole(REFUSED_GRAMMAR, 500), 400, 400, "the grammar is refused: why"),
    (streaming(PART, event(REFUSED_GRAMMAR)), 200, 400, "the grammar is refused: why"),
    (Exhausted(200, False, []), 500, 500, "too little main memory"),
    (Exhausted(200, True, [PART]), 200, 500, "too little main memory"),
)
def test_failures_are_a_status_or_the_last_event(made, status, code, says):
    reply = reply_of(made, CHAT, STREAM if status in (200, 400) else ASK)
    assert reply.status == status
    if status == 200:
        assert reply.parts[0] == PART and reply.parts[-1].startswith(b"data: ")
    error = json.loads(reply.parts[-1].removeprefix(b"data: "))["error"]
    assert says in error["message"] and error.get("code") == code


def test_empty_events_of_several_prompts_are_left_out():
    reply = reply_of(streaming(PART, b"data: null\n\n", PART + b"data: null\n\n"), CHAT, STREAM)
    assert reply.body.count(PART) == 2 and b"null" not in reply.body.replace(PART, b"")


@pytest.mark.parametrize(
    ("made", "data"),
    [
        (whole(b""), ASK),
        (whole(b'{"error": {"message": "the request was given up"}}', 400), ASK),
        (streaming(PART), STREAM),
    ],
)
def test_an_answer_cut_by_shutdown_is_an_error(made, data):
    state, app = served_by(FakeServed(made))
    made.hold = Event()

    async def run():
        _, task = begun(app, CHAT, data)
        await until(lambda: state.gate.running == 1 and state.served.asked)
        state.stopping = True
        made.hold.set()
        return await end_of(task)

    reply = asyncio.run(run())
    assert reply.status == 503 or b"the server is shutting down" in reply.parts[-1]


@cases(
    "path, data, answer, status",
    (COUNT, {"messages": SAID}, b'{"error": {"message": "the request was given up"}}', 400),
    ("/tokenize", {"content": "a"}, b"", 200),
    ("/metrics", None, b"", 200),
    ("/v1/models", None, b"", 200),
)
def test_a_short_answer_cut_by_shutdown_is_an_error(path, data, answer, status):
    state, app = served_by(FakeServed(whole(answer, status, hold=Event())))

    async def run():
        method = "GET" if data is None else "POST"
        task = asyncio.create_task(Client(app, method, path, body_of(data)).run())
        await until(lambda: state.served.asked)
        state.stopping = True
        state.served.requests[0].hold.set()
        return await end_of(task)

    reply = asyncio.run(run())
    assert reply.status == 503 and b"the server is shutting down" in reply.body


def test_parts_before_a_failed_step_are_sent():
    """If tokens are fast, one read has several parts. An error text in the model's answer is not an
    error."""
    said = event(b'{"content": "Compute error."}')
    request = streaming(said, event(FAILED), event(b"[DONE]"), at_once=True)
    request.run()
    reply = reply_of(request, CHAT, STREAM)
    assert reply.parts[0] == said
    assert b"the disk is gone" in reply.parts[1] and len(reply.parts) == 2


def test_parts_before_a_failed_step_have_their_form_and_costs():
    said = {"index": 0, "text": "a", "logprobs": {"content": []}}
    first = json.dumps({"choices": [said], "timings": {}}).encode()
    request = streaming(event(first), event(FAILED), at_once=True)
    request.run()
    data = {"prompt": "a", "logprobs": 1, "stream": True}
    got = json.loads(reply_of(request, COMPLETIONS, data).parts[0].removeprefix(b"data: "))
    assert got["choices"][0]["logprobs"]["text_offset"] == []
    assert got["timings"]["hit_rate"] == 0.5


@pytest.fixture
def pings(monkeypatch):
    """Keep-alive comments after 20 ms of silence."""
    monkeypatch.setattr(answer, "PING_S", 0.02)


async def streamed(app, goes_on, path=CHAT, data=STREAM, enough=bool):
    """Run a stream to its end. goes_on: event that is set as soon as `enough` accepts the parts
    received."""
    client, running = begun(app, path, data)
    await until(lambda: enough(client.reply.parts))
    goes_on.set()
    return await end_of(running)


@pytest.mark.parametrize(("path", "named"), [(CHAT, b""), ("/v1/messages", b"event: error\n")])
def test_a_silent_stream_is_kept_alive_before_its_prompt_is_read(pings, path, named):
    """A waiting stream gets comments. An error after them is an event, with a name in Anthropic's
    form."""
    hold, other = Event(), Event()
    served = FakeServed(whole(b'{"error": {}}', 400, hold=hold), whole(FAILED, 500, hold=other))
    app = app_for(served)
    reply = asyncio.run(streamed(app, hold, path))
    assert reply.status == 200 and reply.parts[0].startswith(b":")
    # After keep-alive comments an error is an event, because the status has been sent.
    outer = b'"type": "error", ' if named else b""
    assert reply.parts[-1] == named + b"data: {" + outer + b'"error": {}}\n\n'
    failed = asyncio.run(streamed(app, other, path)).parts[-1]
    assert failed.startswith(named + b'data: {"type": "error"') and b"the disk is gone" in failed


def counted(tokens):
    return b'{"input_tokens": %d}' % tokens


def tokenized(tokens):
    return json.dumps({"tokens": [1] * tokens}).encode()


@cases(
    "path, data, count_of",
    (CHAT, {"messages": SAID}, counted),
    (RESPONSES, {"input": "a"}, counted),
    (MESSAGES, {"messages": SAID}, counted),
    (COMPLETIONS, {"prompt": "a"}, tokenized),
)
@in_a_loop
async def test_prompts_that_are_too_long_are_refused_before_the_stream(pings, path, data, count_of):
    """A prompt that is too long gets status 400 although the request would have to wait. A prompt
    that fits waits with keep-alive comments and is answered."""
    hold = Event()
    counts = [whole(count_of(n)) for n in (512, 511)]
    unread = [whole(b'{"error": {"message": "no such role"}}', 400)] * ("messages" in data)
    served = FakeServed(whole(hold=hold), counts[0], *unread, counts[1], streaming(FINAL))
    app = app_for(served)
    asked = {**data, "stream": True}
    _, running = begun(app, CHAT, ASK)
    await until(lambda: served.asked)
    long = await end_of(begun(app, path, asked)[1])
    error = long.json()["error"]
    assert long.status == 400 and error["type"] == "exceed_context_size_error"
    # the names of upstream's fields
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (512, 512)
    assert "512" in error["message"]
    for _ in unread:
        odd = await end_of(begun(app, path, asked)[1])
        assert odd.status == 400 and odd.json()["error"]["message"] == "no such role"
    short = await streamed(app, hold, path, asked)
    assert short.status == 200 and short.parts[0].startswith(b":")
    assert b"hit_rate" in short.parts[-1]
    await running
    assert counts[0].closed and counts[1].closed
    assert len(served.asked) == 4 + len(unread)  # each prompt is counted once


@in_a_loop
async def test_waiting_has_a_timeout_and_the_queue_a_limit():
    holds = [whole(hold=Event()) for _ in range(3)]
    state, app = served_by(FakeServed(*holds), queue=1, timeout=1)
    replies = await asyncio.gather(*(begun(app, CHAT, ASK)[1] for _ in range(3)))
    assert sorted(reply.status for reply in replies) == [429, 504, 504]
    assert state.gate.running == state.gate.waiting == 0
    assert holds[0].closed and holds[0].cancelled.is_set()


@pytest.mark.parametrize("leaving", [0, 2])
def test_a_client_that_leaves_ends_its_work_and_lets_the_next_one_in(leaving):
    """The place of a running request is freed. A client that leaves the queue frees none."""
    hold = Event()
    served = FakeServed(whole(hold=hold), whole(), whole())
    state, app = served_by(served)

    async def leave():
        running = []
        for number in range(3):
            running.append(begun(app, CHAT, ASK))
            await until(lambda number=number: state.gate.running + state.gate.waiting > number)
        client, task = running.pop(leaving)
        client.leave()
        await end_of(task)
        if leaving == 0:
            assert served.requests[0].cancelled.is_set() and served.requests[0].closed
        else:
            await asyncio.sleep(0.05)
            assert (state.gate.running, state.gate.waiting) == (1, 1)
            assert len(served.asked) == 1  # the second request waits until the first has ended
        hold.set()
        return [(await end_of(each)).status for _, each in running]

    assert asyncio.run(leave()) == [200, 200]
    assert state.gate.running == state.gate.waiting == 0


class Deaf(Client):
    """A client that reads nothing after the first part until `hears` is set."""

    def __init__(self, *args):
        super().__init__(*args)
        self.hears, self.aborted = asyncio.Event(), asyncio.Event()
        self._scope["state"] = {"abort": self.aborted.set}

    async def _send(self, message):
        await super()._send(message)
        if message["type"] == "http.response.body":
            await self.hears.wait()


@pytest.mark.parametrize("most_bytes", [1000, 1])
@in_a_loop
async def test_an_unread_answer_holds_no_place_when_complete(monkeypatch, most_bytes):
    """Unread answers stay in memory up to a limit. Beyond it, the oldest connection is aborted."""
    monkeypatch.setattr(state_module, "UNREAD_BYTES", most_bytes)
    state, app = served_by(
        FakeServed(*(streaming(PART, FINAL) for _ in range(3))), parallel=1, queue=0
    )
    running = []
    for _ in range(2):
        running.append(begun(app, CHAT, STREAM, Deaf))
        client = running[-1][0]
        await until(lambda client=client: client.reply.parts and state.gate.running == 0)
    first, second = (client for client, _ in running)
    assert state.unread.n_bytes > 0
    assert first.aborted.is_set() == (most_bytes == 1) and not second.aborted.is_set()
    assert (await begun(app, CHAT, STREAM)[1]).status == 200  # the only place is free
    for client, task in running:
        client.hears.set()
        assert b'"hit_rate"' in (await end_of(task)).body
    assert state.unread.n_bytes == 0


@in_a_loop
async def test_a_client_that_leaves_does_not_evict_a_slow_one(monkeypatch):
    monkeypatch.setattr(state_module, "UNREAD_BYTES", 1)
    state, app = served_by(
        FakeServed(streaming(PART, FINAL), streaming(PART, FINAL, pause=Event()))
    )
    slow, ends = begun(app, CHAT, STREAM, Deaf)
    await until(lambda: state.unread.n_bytes > 0)
    leaving, left = begun(app, CHAT, STREAM)
    await until(lambda: leaving.reply.parts)
    leaving.leave()
    await end_of(left)
    assert state.gate.running == 0 and not slow.aborted.is_set()
    slow.hears.set()
    await end_of(ends)


@in_a_loop
async def test_a_client_that_reads_nothing_is_cut_at_the_timeout():
    app = app_for(FakeServed(streaming(PART, FINAL, pause=Event())), timeout=1)
    deaf, ends = begun(app, CHAT, STREAM, Deaf)
    await end_of(ends)
    assert deaf.aborted.is_set()


def test_missing_file_descriptors_refuse_a_request_and_free_its_place(monkeypatch):
    def none(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", none)
    request = whole()
    state, app = served_by(FakeServed(request), parallel=1)
    reply = ask(app, CHAT, ASK)
    assert reply.status == 503 and "Too many open files" in reply.json()["error"]["message"]
    assert state.gate.running == 0 and request.closed
