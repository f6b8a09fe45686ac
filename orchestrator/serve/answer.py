"""One generating request.

It waits for its turn, streams its answer, and handles timeouts and disconnects.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive, Scope, Send

from orchestrator.errors import NativeError, PolicyError
from orchestrator.runtime.answer import REST_S, Answer, Pace
from orchestrator.serve.admission import CLIENT, PACES_ITSELF, Body, Conversation
from orchestrator.serve.requests import check_length
from orchestrator.serve.served import SCORE_BYTES, Served
from orchestrator.serve.state import State
from orchestrator.serve.wire import (
    NOT_SUPPORTED,
    STOPPING,
    Refusal,
    Shaping,
    error_event,
    failure_at,
    grammar_failure,
    is_whole,
    message_of,
    progress_of,
    should_add_costs,
    with_costs,
    with_progress,
    without_empty_events,
)
from orchestrator.settings import Settings

# After this silence a stream sends a comment, so that proxies do not close an idle connection.
PING_S = 5.0
PING = b": working\n\n"
# While a prompt is read, a stream with `return_progress` sends a report this often.
PROGRESS_S = 1.0
# How long a client may take to read the final error before its connection is closed.
LAST_WORD_S = 1.0
STREAM, JSON = "text/event-stream", "application/json; charset=utf-8"


async def until_left(receive: Receive) -> None:
    """Wait until the client of a request has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Outlet:
    """Writes the HTTP response to one request: first the headers, then the parts of the body.

    `status` is the HTTP status that was sent, or None before the headers are sent.
    """

    def __init__(self, send: Send, route: str) -> None:
        self._send, self._route = send, route
        self.status: int | None = None

    async def begin(
        self, status: int, content_type: str, more: dict[str, str] | None = None
    ) -> None:
        """Send the HTTP status and the headers. `more` holds further header fields."""
        self.status = status
        fields = {"content-type": content_type, "cache-control": "no-store", **(more or {})}
        if content_type == STREAM:
            fields["x-accel-buffering"] = "no"  # or nginx would buffer the stream
        headers = [(name.encode(), text.encode()) for name, text in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, data: bytes, more: bool = True) -> None:
        """Send a part of the response's body. `more` is False for the last part."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def ping(self) -> None:
        """Send a comment in the stream, to show that the request is still being processed."""
        if self.status is None:
            await self.begin(200, STREAM)
        await self.part(PING)

    async def fail(self, refusal: Refusal) -> None:
        """End the response with an error.

        Before the headers are sent, the error becomes the HTTP response. Afterwards it becomes an
        event of the stream.
        """
        error = json.dumps(refusal.as_object(), ensure_ascii=False).encode()
        if self.status is None:
            await self.begin(refusal.status, JSON, refusal.headers)
            await self.part(error, more=False)
        else:
            await self.part(error_event(self._route, error), more=False)


@dataclass(eq=False)
class Exchange:
    """An ASGI response that waits until its request may run, then computes and sends the answer.

    - state, served: the state of the server, and the loaded model.
    - route, body: path and body of the request.
    - is_stream: whether the client asked for a stream of events.
    - places: the number of parallel answers that the request needs.
    - cells: the number of KV cells to reserve for the request.
    - conversations: one for each sequence of llama.cpp's server that the request needs. A
      Conversation helps to find a sequence that already holds the beginning of the prompt.
    - settings: the settings of the policy for this request; None with `--policy plain`.
    - shape: converts llama.cpp's answer to the format of the path; None if no conversion is needed.
    - compute: a function that computes the answer; None if llama.cpp's server computes it.
    - outlet: a function that makes the writer of the HTTP response; None for `Outlet`.
    """

    state: State
    served: Served
    route: str
    body: Body
    is_stream: bool
    places: int = 1
    cells: int = 0
    conversations: Sequence[Conversation] = (Conversation(),)
    settings: Settings | None = None
    shape: Shaping | None = None
    compute: Callable[[], Awaitable[Iterable[bytes]]] | None = None
    outlet: Callable[[Send], Outlet] | None = None
    _sending: int = 0  # bytes that are being written to the client
    _is_over: bool = False  # the client gets nothing more
    _client: str = ""  # the client's name: a key or an address
    _abort: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The timeouts of `Door` do not apply; this method has its own.
        scope.setdefault("state", {})[PACES_ITSELF] = True
        self._client = scope["state"].get(CLIENT, "")
        out = (self.outlet or partial(Outlet, route=self.route))(send)
        # Closes the connection and drops unsent bytes. A client that reads nothing would otherwise
        # keep it open for ever.
        self._abort = scope["state"].get("abort", self._abort)
        most_s = self.state.settings.timeout or None
        work = asyncio.create_task(self._work(out))
        gone = asyncio.create_task(self._client_gone(receive))
        try:
            await asyncio.wait({work, gone}, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            self._is_over = True
            work.cancel()
            await asyncio.wait({work})
            if not gone.done():
                late = Refusal(504, f"the request took longer than --timeout {most_s}")
                try:
                    await asyncio.wait_for(out.fail(late), LAST_WORD_S)
                except asyncio.TimeoutError:
                    self._abort()
        finally:
            self._is_over = True
            self.state.unread.leave(self)
            for task in (work, gone):
                task.cancel()

    async def _work(self, out: Outlet) -> None:
        state = self.state
        with ExitStack() as held:  # reservations; returned when the work ends
            try:
                ticket = state.gate.join(self.places, self.cells, self._client)
                held.callback(state.gate.leave, ticket)
                await self._turn(ticket.turn, out)
                taken, stale = state.slots.take(self.conversations, self.cells)
                held.callback(state.slots.leave, taken)
                # If the old cells of the slots do not fit next to this request, drop them first.
                stale_ones = () if state.gate.widen(ticket, stale) else taken
                if self.compute is None:
                    await self._ask(taken, stale_ones, out, held)
                    return
                parts = await self.compute()
                held.close()
                state.unread.keep(self, SCORE_BYTES * self.served.most_scored, self._abort)
                await out.begin(200, JSON)
                for part in parts:
                    await out.part(part)
                    await asyncio.sleep(0)  # lets other requests run between parts
                await out.part(b"", more=False)
            except PolicyError as error:
                await out.fail(Refusal(400, str(error)))
            except NativeError as error:
                await out.fail(Refusal(500, str(error)))
            except Refusal as refusal:
                await out.fail(STOPPING if state.stopping else refusal)

    async def _ask(
        self, sequences: Sequence[int], stale: Sequence[int], out: Outlet, held: ExitStack
    ) -> None:
        """Submit the request to the runtime, and send the answer to the client.

        `sequences` are the slots of the request. The slots in `stale` drop their old KV cells
        before the prompt starts. `held` returns all reservations when it is closed.
        """
        gate = self.state.gate
        try:
            # llama.cpp keeps its own copy, so the body is freed after the call.
            answer = self.served.runtime.submit(
                self.body.take(), self.route, sequences, self.settings, stale
            )
        except OSError as error:
            raise Refusal(
                503, f"the server cannot start this request ({error.strerror}): try again later"
            ) from None

        def at_end() -> None:
            held.close()
            if not self._is_over:
                self.state.unread.keep(self, self._sending + answer.n_left, self._abort)

        async def send(text: bytes) -> None:
            status, is_stream = answer.status, answer.is_stream
            if self.shape is not None:
                text = self.shape.shape(text, is_stream)
            if status == 200 and should_add_costs(text, is_stream, self.route):
                text = with_costs(text, answer.costs(), is_stream, self.route)
            if out.status is None:
                await out.begin(status, STREAM if is_stream else JSON)
            elif not is_stream:
                # Pings were sent before llama.cpp answered without a stream, with an error.
                text = error_event(self.route, text)
            self._sending = len(text)
            await out.part(text)
            self._sending = 0

        parts = Parts(answer, at_end)
        try:
            is_all, last = False, b""
            reading = b""  # the latest progress report while the prompt is read
            while not is_all:
                # The progress of a step that several requests share cannot be divided among them.
                reports = bool(reading) and gate.running == 1
                silence_s = PROGRESS_S if reports else PING_S
                come = await parts.next(silence_s if self.is_stream else None)
                if come is None and reports:
                    await send(with_progress(reading, answer.tokens_done()))
                    continue
                if come is None:
                    await out.ping()
                    continue
                text, is_all = come
                if answer.is_stream:
                    text = without_empty_events(text)
                reading = progress_of(text)
                if not text:
                    continue
                if self.state.stopping and answer.status == 400:
                    raise STOPPING  # llama.cpp cancelled the request
                last = text
                failed_at = failure_at(answer.status, text)
                if failed_at > 0:
                    await send(text[:failed_at])
                if failed_at >= 0:
                    raise self._failed(text[failed_at:], answer)
                self.state.check()
                if answer.status == NOT_SUPPORTED:
                    raise Refusal(400, message_of(text))
                await send(text)
            await parts.close()  # raises the answer's error before the response ends
            if self.state.stopping and not is_whole(last, answer.is_stream):
                raise STOPPING
            if out.status is None:
                await out.begin(answer.status, JSON)
            await out.part(b"", more=False)
        finally:
            # Wait for the end of the computation before the place is returned.
            await parts.close()

    def _failed(self, text: bytes, answer: Answer) -> Refusal:
        """Return the error response for an answer `text` in which llama.cpp reported an error."""
        if self.state.stopping:
            return STOPPING
        too_much = grammar_failure(text)
        if too_much is not None:
            return Refusal(400, too_much)
        return Refusal(500, answer.failure() or "llama.cpp failed to evaluate")

    async def _turn(self, turn: asyncio.Future[None], out: Outlet) -> None:
        """Wait for the turn of the request. In a stream, send pings meanwhile."""
        while not turn.done():
            await asyncio.wait({turn}, timeout=PING_S if self.is_stream else None)
            if not turn.done() and out.status is None:
                await self._check()  # last chance to refuse with an HTTP status
            if not turn.done():
                await out.ping()
        turn.result()  # raises Refusal if another client got the place

    async def _check(self) -> None:
        """Raise Refusal (an error response) if the prompt is too long for the context.

        If requests share the context, `settle_length` has already checked this.
        """
        if self.served.parallel == 1:
            work = partial(check_length, self.route, self.body.data, self.served, self.body)
            await self.body.run(work)

    async def _client_gone(self, receive: Receive) -> None:
        await until_left(receive)
        self._is_over = True


class Parts:
    """Lets a coroutine read an answer in parts while the runtime computes it.

    Call `close` at the end in any case.
    """

    def __init__(self, answer: Answer, at_end: Callable[[], None]) -> None:
        """Start to watch the answer.

        `at_end` is called once in the event loop when the computation has ended, even if parts of
        the answer are still unread.
        """
        self._loop = asyncio.get_running_loop()
        self._answer, self._at_end = answer, at_end
        self._pace = Pace(self._loop.time)
        self._woken, self._is_signalled = asyncio.Event(), False
        self._ended = asyncio.Event()  # at_end has been called
        self._loop.add_reader(answer.fileno(), self._on_readable)

    async def next(self, within_s: float | None) -> tuple[bytes, bool] | None:
        """Return (new text, whether it is the last part of the answer).

        Returns None if nothing arrives within `within_s` seconds. If within_s is None, it waits
        without a limit.
        """
        if self._pace.rests:
            await self._wait(REST_S)  # the end of the answer ends the pause
            text, is_all = self._take()
            if text or is_all:
                return text, is_all
            self._pace.nothing()
        while True:
            text, is_all = self._take()
            if text or is_all:
                self._pace.came()
                return text, is_all
            if not await self._wait(within_s):
                return None

    async def close(self) -> None:
        """Cancel the computation of the answer if it still runs, and wait for its end.

        Raises the answer's error if the computation failed.
        """
        self._answer.cancel()
        self._check_end()
        await self._ended.wait()
        self._answer.close()  # does not block: the computation has ended
        if self._answer.error is not None:
            raise self._answer.error

    def _take(self) -> tuple[bytes, bool]:
        text, is_all = self._answer.take()
        if is_all:  # take may have consumed the byte that signals the end
            self._loop.call_soon(self._check_end)
        return text, is_all

    async def _wait(self, within_s: float | None) -> bool:
        """Wait until text may have arrived. Return False if `within_s` seconds pass first."""
        late = None if within_s is None else self._loop.call_later(within_s, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            if late is not None:
                late.cancel()
        self._woken.clear()
        was_signalled, self._is_signalled = self._is_signalled, False
        return was_signalled

    def _on_readable(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._answer.fileno(), 16)
        self._is_signalled = True
        self._woken.set()
        self._check_end()

    def _check_end(self) -> None:
        """Call at_end once when the computation of the answer has ended."""
        if self._answer.has_ended and not self._ended.is_set():
            self._ended.set()
            self._loop.remove_reader(self._answer.fileno())
            self._is_signalled = True
            self._woken.set()
            self._at_end()
