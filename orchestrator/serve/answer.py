"""One request on its way: its turn, its silence, its parts, and the client that goes away."""

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
    has_costs,
    is_whole,
    message_of,
    progress_of,
    with_costs,
    with_progress,
    without_nothing,
)
from orchestrator.settings import Settings

# A silence after which a stream gets a comment, so that nobody takes the connection for dead.
PING_S = 5.0
PING = b": working\n\n"
# A stream that reports how much of a prompt is read does so this often within one step.
PROGRESS_S = 1.0
# How long a client may take for the last word of its answer before its connection is cut.
LAST_WORD_S = 1.0
STREAM, JSON = "text/event-stream", "application/json; charset=utf-8"


async def until_left(receive: Receive) -> None:
    """Return when the client of a request has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Outlet:
    """The way out of one request to a path: the status and its kind once, then parts."""

    def __init__(self, send: Send, route: str) -> None:
        self._send, self._route = send, route
        self.status: int | None = None  # once it is sent

    async def begin(
        self, status: int, content_type: str, more: dict[str, str] | None = None
    ) -> None:
        self.status = status
        fields = {"content-type": content_type, "cache-control": "no-store", **(more or {})}
        if content_type == STREAM:
            fields["x-accel-buffering"] = "no"  # nginx would hold it back
        headers = [(name.encode(), text.encode()) for name, text in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def ping(self) -> None:
        """Says in a stream that the work goes on."""
        if self.status is None:
            await self.begin(200, STREAM)
        await self.part(PING)

    async def fail(self, refusal: Refusal) -> None:
        """Ends the answer with an error: as its status, or as an event where a stream has
        begun."""
        error = json.dumps(refusal.as_object(), ensure_ascii=False).encode()
        if self.status is None:
            await self.begin(refusal.status, JSON, refusal.headers)
            await self.part(error, more=False)
        else:
            await self.part(error_event(self._route, error), more=False)


@dataclass(eq=False)
class Exchange:
    """One request from its turn to the last byte of its answer. Starlette sends it as a response.

    places: of the gate. cells: of the context that all share. conversations: what each sequence
    that it takes may hold already. settings: of the policy. shape: turns llama.cpp's answer into
    the form of its path. compute: answers instead of llama.cpp's server; it returns the parts of a
    JSON object, which are sent after the request's place is free again. outlet: the way to the
    client, if it is not that of the path.
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
    _sending: int = 0  # bytes that the client does not take
    _is_over: bool = False  # nobody takes any more of it
    _client: str = ""  # who asks, as the door says it
    _abort: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # It has bounds of its own for a client that does not read.
        scope.setdefault("state", {})[PACES_ITSELF] = True
        self._client = scope["state"].get(CLIENT, "")
        out = (self.outlet or partial(Outlet, route=self.route))(send)
        # Closes the connection with what is unsent: who reads nothing would keep it for ever.
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
        with ExitStack() as held:  # what others wait for; closed with the work, before the answer
            try:
                ticket = state.gate.join(self.places, self.cells, self._client)
                held.callback(state.gate.leave, ticket)
                await self._turn(ticket.turn, out)
                taken, stale = state.seats.take(self.conversations, self.cells)
                held.callback(state.seats.leave, taken)
                # Beside what they hold there may be no room for what runs.
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
                    await asyncio.sleep(0)  # a part takes a while to write: others go on meanwhile
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
        """Submit the request and send what comes of it. stale: sequences that first drop what they
        hold."""
        gate = self.state.gate
        try:
            # llama.cpp has its own copy of the body while it works.
            body = self.body.take()
            answer = self.served.runtime.submit(body, self.route, sequences, self.settings, stale)
        except OSError as error:
            raise Refusal(
                503, f"the server has no room for the request: {error.strerror}"
            ) from None

        def at_end() -> None:
            held.close()
            if not self._is_over:
                self.state.unread.keep(self, self._sending + answer.n_left, self._abort)

        async def send(text: bytes) -> None:
            status, is_stream = answer.status, answer.is_stream
            if self.shape is not None:
                text = self.shape.shape(text, is_stream)
            if status == 200 and has_costs(text, is_stream, self.route):
                text = with_costs(text, answer.costs(), is_stream, self.route)
            if out.status is None:
                await out.begin(status, STREAM if is_stream else JSON)
            elif not is_stream:
                # Comments went out before llama.cpp said that there would be no stream.
                text = error_event(self.route, text)
            self._sending = len(text)
            await out.part(text)
            self._sending = 0

        parts = Parts(answer, at_end)
        try:
            is_all, last = False, b""
            reading = b""  # the last report on the prompt that is being read
            while not is_all:
                # the tokens of a shared step cannot be told apart
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
                    text = without_nothing(text)
                reading = progress_of(text)
                if not text:
                    continue
                if self.state.stopping and answer.status == 400:
                    raise STOPPING  # llama.cpp gave the request up
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
            await parts.close()  # raises the error of the answer while it can be said
            if self.state.stopping and not is_whole(last, answer.is_stream):
                raise STOPPING
            if out.status is None:
                await out.begin(answer.status, JSON)
            await out.part(b"", more=False)
        finally:
            # The place is given back when the work has ended, and not before.
            await parts.close()

    def _failed(self, text: bytes, answer: Answer) -> Refusal:
        if self.state.stopping:
            return STOPPING
        too_much = grammar_failure(text)
        if too_much is not None:
            return Refusal(400, too_much)
        return Refusal(500, answer.failure() or "llama.cpp failed to evaluate")

    async def _turn(self, turn: asyncio.Future[None], out: Outlet) -> None:
        """Wait for it, and keep a stream alive meanwhile."""
        while not turn.done():
            await asyncio.wait({turn}, timeout=PING_S if self.is_stream else None)
            if not turn.done() and out.status is None:
                await self._check()  # the last moment at which a refusal has its status
            if not turn.done():
                await out.ping()
        turn.result()  # raises Refusal if another client got the place

    async def _check(self) -> None:
        """Raise Refusal for a request that llama.cpp would refuse. If sequences share the context,
        this was checked before."""
        if self.served.parallel == 1:
            work = partial(check_length, self.route, self.body.data, self.served, self.body)
            await self.body.run(work)

    async def _client_gone(self, receive: Receive) -> None:
        await until_left(receive)
        self._is_over = True


class Parts:
    """What comes of an answer, for one coroutine. Close it, whether all was taken or not."""

    def __init__(self, answer: Answer, at_end: Callable[[], None]) -> None:
        """at_end: called in the event loop once the answer has ended, whether all of it was taken
        or not."""
        self._loop = asyncio.get_running_loop()
        self._answer, self._at_end = answer, at_end
        self._pace = Pace(self._loop.time)
        self._woken, self._told = asyncio.Event(), False
        self._ended = asyncio.Event()  # at_end has been called
        self._loop.add_reader(answer.fileno(), self._tell)

    async def next(self, within_s: float | None) -> tuple[bytes, bool] | None:
        """Return what has come, and whether that was all; None if nothing comes within so many
        seconds. None waits for ever."""
        if self._pace.rests:
            await self._coming(REST_S)  # shorter at the end of the answer
            text, is_all = self._take()
            if text or is_all:
                return text, is_all
            self._pace.nothing()
        while True:
            text, is_all = self._take()
            if text or is_all:
                self._pace.came()
                return text, is_all
            if not await self._coming(within_s):
                return None

    async def close(self) -> None:
        """End the answer, and return after at_end was called. Raises the error of the answer."""
        self._answer.cancel()
        self._look()
        await self._ended.wait()
        self._answer.close()  # its thread has nothing left to do
        if self._answer.error is not None:
            raise self._answer.error

    def _take(self) -> tuple[bytes, bool]:
        text, is_all = self._answer.take()
        if is_all:  # take may have read the byte that says so
            self._loop.call_soon(self._look)
        return text, is_all

    async def _coming(self, within_s: float | None) -> bool:
        """Wait until something may have come; False if nothing does within so many seconds."""
        late = None if within_s is None else self._loop.call_later(within_s, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            if late is not None:
                late.cancel()
        self._woken.clear()
        told, self._told = self._told, False
        return told

    def _tell(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._answer.fileno(), 16)
        self._told = True
        self._woken.set()
        self._look()

    def _look(self) -> None:
        """Call at_end if the answer has ended, once."""
        if self._answer.has_ended and not self._ended.is_set():
            self._ended.set()
            self._loop.remove_reader(self._answer.fileno())
            self._told = True
            self._woken.set()
            self._at_end()
