"""One request on its way: its turn, its silence, its parts, and the client that goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

from starlette.types import Receive, Scope, Send

from orchestrator.errors import ConfigError, NativeError
from orchestrator.serve.backend import SCORE_BYTES, Backend
from orchestrator.serve.bodies import Body
from orchestrator.serve.gate import Gate, TooMany, Unread
from orchestrator.serve.parts import Parts
from orchestrator.serve.seats import Conversation, Seats, with_seat
from orchestrator.serve.shape import Shape
from orchestrator.serve.wire import (
    NOT_SUPPORTED,
    Refusal,
    error_event,
    error_object,
    failure_at,
    grammar_failure,
    has_costs,
    message_of,
    with_costs,
)

# A silence after which a stream gets a comment, so that nobody takes the connection for dead.
PING_S = 5.0
PING = b": working\n\n"
# How long a client may take for the last word of its answer before its connection is cut.
LAST_WORD_S = 1.0
STREAM, JSON = "text/event-stream", "application/json; charset=utf-8"


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

    async def fail(self, status: int, message: str, kind: str | None = None) -> None:
        """Ends the answer with an error: as its status, or as an event where a stream has
        begun."""
        error = json.dumps(error_object(status, message, kind), ensure_ascii=False).encode()
        if self.status is None:
            retry = {"retry-after": "1"} if status in (429, 503) else None
            await self.begin(status, JSON, retry)
            await self.part(error, more=False)
        else:
            await self.part(error_event(self._route, error), more=False)


class Answer:
    """A response of starlette's kind: an application of ASGI that answers one request."""

    def __init__(
        self,
        backend: Backend,
        gate: Gate,
        unread: Unread,
        seats: Seats,
        workers: Executor,
        route: str,
        body: Body,
        *,
        conversation: Conversation | None,
        is_stream: bool,
        places: int,
        changes: dict[str, Any],
        most_s: float | None,
        is_stopping: Callable[[], bool],
        check: Callable[[], Awaitable[None]],
        compute: Callable[[int], Awaitable[Iterable[bytes]]] | None = None,
        shape: Shape | None = None,
    ) -> None:
        """check: raises Refusal for a request that llama.cpp would refuse; asked before a stream
        begins whose turn has not come. compute: makes the answer in the place of llama.cpp's
        server, on a sequence; the parts of a JSON object, for which the place is not kept. shape:
        turns parts of llama.cpp's answer into the form of its path."""
        self._backend, self._gate, self._workers = backend, gate, workers
        self._unread, self._sending = unread, 0  # bytes that the client does not take
        self._final: dict[str, Any] | None = None  # its costs, once the work has ended
        self._is_over = False  # nobody takes any more of it
        self._seats, self._conversation = seats, conversation
        self._route, self._body = route, body
        self._is_stream, self._places, self._most_s = is_stream, places, most_s
        self._changes = changes  # of the policy's settings
        self._is_stopping, self._check = is_stopping, check
        self._compute, self._shape = compute, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = Outlet(send, self._route)
        # Closes the connection with what is unsent: who reads nothing would keep it for ever.
        abort = scope.get("state", {}).get("abort", lambda: None)
        work = asyncio.create_task(self._work(out, abort))
        gone = asyncio.create_task(self._client_gone(receive))
        try:
            await asyncio.wait(
                {work, gone}, timeout=self._most_s, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                return work.result()
            self._is_over = True
            work.cancel()
            await asyncio.wait({work})
            if not gone.done():
                late = out.fail(504, f"the request took longer than --timeout {self._most_s:g}")
                try:
                    await asyncio.wait_for(late, LAST_WORD_S)
                except asyncio.TimeoutError:
                    abort()
        finally:
            self._is_over = True
            self._unread.leave(self)
            for task in (work, gone):
                task.cancel()

    async def _work(self, out: Outlet, abort: Callable[[], None]) -> None:
        try:
            ticket = self._gate.join(self._places)
        except TooMany:
            await out.fail(429, "too many requests wait already (--queue): try again later")
            return
        with ExitStack() as held:  # what others wait for; closed with the work, before the answer
            held.callback(ticket.leave)
            try:
                await self._turn(ticket.turn, out)
                held.enter_context(self._backend.changed(self._changes))
                seat = self._seats.take(self._conversation)
                held.callback(self._seats.leave, seat)
                if self._compute is None:
                    await self._ask(with_seat(self._body.take(), seat), out, held, abort)
                    return
                parts = await self._compute(seat or 0)
                held.close()
                self._unread.keep(self, SCORE_BYTES * self._backend.most_scored, abort)
                await out.begin(200, JSON)
                for part in parts:
                    await out.part(part)
                    await asyncio.sleep(0)  # a part takes a while to write: others go on meanwhile
                await out.part(b"", more=False)
            except ConfigError as error:
                await out.fail(400, str(error))
            except NativeError as error:
                await out.fail(500, str(error))
            except Refusal as refusal:
                await out.fail(refusal.status, refusal.message, refusal.kind)

    async def _ask(
        self, body: bytes, out: Outlet, held: ExitStack, abort: Callable[[], None]
    ) -> None:
        """Runs the request on a thread of its own and sends what comes."""
        until_now = self._backend.costs()
        is_shared = self._gate.running > 1
        request = self._backend.request(self._route, body)
        del body  # llama.cpp has its own, as long as it is at work

        def costs() -> dict[str, Any]:
            nonlocal is_shared
            is_shared = is_shared or self._gate.running > 1
            return {**until_now(), "shared_steps": is_shared}

        def at_end() -> None:
            self._final = costs()  # what runs afterwards is no part of it
            held.close()
            if not self._is_over:
                self._unread.keep(self, self._sending + request.n_left, abort)

        def made(text: bytes, status: int, is_stream: bool) -> bytes:
            if self._shape is not None:
                text = self._shape(text, is_stream)
            if status == 200 and has_costs(text, is_stream, self._route):
                text = with_costs(text, self._final or costs(), is_stream, self._route)
            return text

        try:
            parts = Parts(request, self._workers, at_end)
        except OSError as error:
            raise Refusal(
                503, f"the server has no room for the request: {error.strerror}"
            ) from None
        try:
            is_all = False
            while not is_all:
                come = await parts.next(PING_S if self._is_stream else None)
                if come is None:
                    await out.ping()
                    continue
                text, is_all = come
                if not text:
                    continue
                status, is_stream = request.status, request.is_stream
                failed_at = failure_at(status, text)
                if failed_at >= 0:
                    if failed_at:
                        before = made(text[:failed_at], status, is_stream)
                        await self._send(out, status, is_stream, before)
                    raise self._failed(text[failed_at:])
                if status == NOT_SUPPORTED:
                    raise Refusal(400, message_of(text))
                is_shared = is_shared or self._gate.running > 1
                await self._send(out, status, is_stream, made(text, status, is_stream))
            await parts.close()  # raises what the thread raised, while an error can be said
            if out.status is None:
                await out.begin(request.status, JSON)
            await out.part(b"", more=False)
        finally:
            # The place is given back when the work has ended, and not before.
            await parts.close()

    async def _send(self, out: Outlet, status: int, is_stream: bool, text: bytes) -> None:
        if out.status is not None and not is_stream:
            # Comments went out before llama.cpp said that there would be no stream.
            text = error_event(self._route, text)
        if out.status is None:
            await out.begin(status, STREAM if is_stream else JSON)
        self._sending = len(text)
        await out.part(text)
        self._sending = 0

    def _failed(self, text: bytes) -> Refusal:
        if self._is_stopping():
            return Refusal(503, "the server is shutting down")
        too_much = grammar_failure(text)
        if too_much is not None:
            return Refusal(400, too_much)
        return Refusal(500, self._backend.failure() or "llama.cpp failed to evaluate")

    async def _turn(self, turn: asyncio.Future[None], out: Outlet) -> None:
        """Waits for it, and keeps a stream alive meanwhile."""
        while not turn.done():
            await asyncio.wait({turn}, timeout=PING_S if self._is_stream else None)
            if not turn.done() and out.status is None:
                await self._check()  # the last moment at which a refusal has its status
            if not turn.done():
                await out.ping()

    async def _client_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_over = True
