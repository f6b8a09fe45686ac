"""The HTTP application: who may ask, what there is, and who answers it."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic, time
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.serve.answer import Answer
from orchestrator.serve.backend import UNREAD_BYTES, Backend
from orchestrator.serve.bodies import Bodies, Hold, Holding, bodies_bytes
from orchestrator.serve.bounds import settle_bounds
from orchestrator.serve.fields import settle_fields
from orchestrator.serve.formats import settle_format
from orchestrator.serve.gate import Gate, Unread
from orchestrator.serve.length import COUNTING, check_length
from orchestrator.serve.metrics import metrics_text
from orchestrator.serve.openapi import document
from orchestrator.serve.page import page_response
from orchestrator.serve.scoring import Scoring, wants_scores
from orchestrator.serve.seats import Conversation, Seats, conversation_of
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.shape import settle_probs
from orchestrator.serve.tools import settle_tool_choice
from orchestrator.serve.unserved import settle_unserved
from orchestrator.serve.wire import (
    Refusal,
    error_object,
    read_body,
    read_object,
    said_bytes,
    written,
)

# Paths that decode, and so take their turn; and other paths of the same.
GENERATING = {
    "/v1/chat/completions": ("/chat/completions",),
    "/v1/completions": (),
    "/v1/responses": ("/responses",),
    "/v1/messages": (),
    "/completion": ("/completions",),
    "/infill": (),
}
QUICK = {
    "/v1/chat/completions/input_tokens": ("/chat/completions/input_tokens",),
    "/v1/responses/input_tokens": ("/responses/input_tokens",),
    "/v1/messages/count_tokens": (),
    "/tokenize": (),
    "/detokenize": (),
    "/apply-template": (),
}
READ = {"/v1/models": ("/models",), "/props": ()}
HEALTH = ("/health", "/v1/health")
OPEN = (*HEALTH, "/")  # without a key
PICTURE = "/experts"
DESCRIPTION = "/openapi.json"
# What llama.cpp's server does not read of a request, or leaves out of it; in this order.
SETTLED = (settle_tool_choice, settle_format, settle_bounds)
# The field with live settings of the policy for one request.
OURS = "moe_edge"

# How the names of threads begin that are in llama.cpp for a request.
THREADS = ANSWER_THREAD, QUICK_THREAD, SCORE_THREAD = "answer", "quick", "score"
STOPPING = Refusal(503, "the server is shutting down")
# What a path may have as it is in the log.
PLAIN = "/:@!$&'()*+,;=~"
GONE = 499  # nginx's status for a client that went away


class State:
    """What the application answers with: the backend, once it has loaded."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        keys = settings.keys()
        # Clients send a key that is not ASCII as UTF-8, and some as Latin-1.
        self.keys = frozenset(each for key in keys for each in _as_bytes(key))
        self.gate = Gate(settings.parallel, settings.queue)
        self.unread = Unread(UNREAD_BYTES)
        self.seats = Seats(settings.parallel)
        self.backend: Backend | None = None
        self.began_s = int(time())  # of the Unix clock
        self.stopping = False
        self.workers: Executor = ThreadPoolExecutor(settings.parallel, ANSWER_THREAD)
        self.quick: Executor = ThreadPoolExecutor(2, QUICK_THREAD)
        self.scorer: Executor = ThreadPoolExecutor(1, SCORE_THREAD)
        self.bodies = Bodies(self.quick)

    def ready(self) -> Backend:
        """Raises Refusal while the model loads, and at the end."""
        if self.stopping:
            raise STOPPING
        if self.backend is None:
            raise Refusal(503, "the model is loading")
        return self.backend


def _as_bytes(key: str) -> Iterator[bytes]:
    yield key.encode("utf-8", "surrogateescape")
    with suppress(UnicodeEncodeError):
        yield key.encode("latin-1")


def application(state: State, log: Callable[[str], None]) -> Starlette:
    """log gets one line a request, without its contents."""
    endpoints = Endpoints(state)
    routes = [Route(path, endpoints.health) for path in HEALTH]
    routes.append(Route("/metrics", endpoints.metrics))
    routes.append(Route(PICTURE, endpoints.experts))
    routes.append(Route(DESCRIPTION, endpoints.description))
    routes.append(Route("/", endpoints.page))
    models = [Route(f"{path}/{{id:path}}", endpoints.model) for path in ("/v1/models", "/models")]
    routes += models
    for methods, endpoint, paths in (
        (["GET"], endpoints.read, READ),
        (["POST"], endpoints.generate, GENERATING),
        (["POST"], endpoints.quick, QUICK),
    ):
        for path, others in paths.items():
            routes += [
                Route(each, endpoint(path), methods=methods)  # type: ignore[operator]
                for each in (path, *others)
            ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Log, state, log), Middleware(Door, state)],
        exception_handlers={Refusal: _refused, 404: _missing, 405: _missing},
    )


class Endpoints:
    """One method a kind of request."""

    def __init__(self, state: State) -> None:
        self._state = state

    def generate(self, route: str) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Any:
            state = self._state
            backend = state.ready()
            hold = await self._hold(request, backend)
            try:
                data, changes = await self._object(request, route, backend, hold)
                return Holding(await self._answer_to(backend, route, data, changes), hold)
            except BaseException:
                hold.release()
                raise

        return endpoint

    async def _answer_to(
        self, backend: Backend, route: str, data: dict[str, Any], changes: dict[str, Any]
    ) -> Answer:
        state = self._state
        parallel, timeout = state.settings.parallel, state.settings.timeout
        scoring = shape = None
        conversation: Conversation | None = None
        if wants_scores(route, data):
            make = partial(Scoring, backend, state.scorer, data, lambda: state.stopping)
            scoring = await asyncio.get_running_loop().run_in_executor(state.quick, make)
            places, conversation = parallel, Conversation()  # nothing else decodes
        else:
            shape = settle_probs(route, data, backend.slot_context)
            places = _places(data, parallel)
            if parallel > 1:
                conversation = conversation_of(route, data)
        body = written(data)

        async def check() -> None:
            ask = partial(self._answer, backend)
            await check_length(ask, route, body, json.loads(body), backend.slot_context)

        return Answer(
            backend,
            state.gate,
            state.unread,
            state.seats,
            state.workers,
            route,
            body,
            conversation=conversation,
            is_stream=data.get("stream") is True,
            places=places,
            changes=changes,
            most_s=float(timeout) if timeout else None,
            is_stopping=lambda: state.stopping,
            check=check,
            compute=scoring.answer if scoring else None,
            shape=shape,
        )

    def quick(self, route: str) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            backend = self._state.ready()
            hold = await self._hold(request, backend)
            try:
                data, _ = await self._object(request, route, backend, hold)
                return await self._ask(backend, route, written(data))
            finally:
                hold.release()

        return endpoint

    def read(self, route: str) -> Callable[[Request], Any]:
        async def endpoint(_request: Request) -> Response:
            return await self._ask(self._state.ready(), route, b"")

        return endpoint

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        asked = request.path_params["id"]
        _, text = await self._answer(self._state.ready(), "/v1/models", b"")
        for found in json.loads(text)["data"]:
            if found["id"] == asked:
                return JSONResponse(found)
        raise Refusal(404, f"there is no model '{asked[:80]}' here (GET /v1/models names it)")

    async def health(self, _request: Request) -> Response:
        self._state.ready()
        return JSONResponse({"status": "ok"})

    async def experts(self, _request: Request) -> Response:
        return JSONResponse(self._state.ready().picture())

    async def page(self, _request: Request) -> Response:
        return page_response()

    async def description(self, _request: Request) -> Response:
        return JSONResponse(document(bool(self._state.keys)))

    async def metrics(self, _request: Request) -> Response:
        backend = self._state.ready()
        _, text = await self._answer(backend, "/metrics", b"")
        ours = metrics_text(backend, self._state.gate, self._state.unread)
        return Response(
            text + ours.encode(),
            media_type="text/plain; version=0.0.4",
            headers={"process-start-time-unix": str(self._state.began_s)},
        )

    async def _hold(self, request: Request, backend: Backend) -> Hold:
        """A place for a request's body, once there is room beside the others'."""
        most = backend.most_body_bytes
        together = bodies_bytes(most, self._state.settings.parallel)
        return await self._state.bodies.hold(said_bytes(request, most), together)

    async def _object(
        self, request: Request, route: str, backend: Backend, hold: Hold
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A request's object for llama.cpp, and what it has for the policy."""
        patience = self._state.settings.patience
        try:
            body = await asyncio.wait_for(read_body(request, backend.most_body_bytes), patience)
        except asyncio.TimeoutError:
            late = f"the request was not here after --patience, {patience} s"
            raise Refusal(408, late) from None
        hold.shrink(len(body))
        data = read_object(body)
        changes = data.pop(OURS, None) or {}
        if not isinstance(changes, dict):
            raise Refusal(400, f"{OURS} must be an object of settings")
        form = COUNTING.get(route, route)
        settle_unserved(form, data)
        settle_fields(form, data, backend.slot_context)
        for settle in SETTLED:
            settle(form, data)
        return data, changes

    async def _ask(self, backend: Backend, route: str, body: bytes) -> Response:
        status, text = await self._answer(backend, route, body)
        return Response(text, status, media_type="application/json")

    async def _answer(self, backend: Backend, route: str, body: bytes) -> tuple[int, bytes]:
        def work() -> tuple[int, bytes]:
            return backend.request(route, body).whole()

        return await asyncio.get_running_loop().run_in_executor(self._state.quick, work)


def _places(data: dict[str, Any], most: int) -> int:
    """How many sequences a request takes: its `n`. Raises Refusal for more than there are."""
    n: int = data.get("n_cmpl", data.get("n", 1))  # in llama.cpp's order
    if n > most:
        raise Refusal(400, f"n is {n}, and this server answers {most} at once (--parallel)")
    return n


class Door:
    """The first to see a request: Host, origin and key."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = self._allowed(origin, headers)
        refusal = self._refusal(scope, headers, allowed)
        answer: ASGIApp = self._app
        if refusal is not None:
            answer = _error(refusal)
        elif scope["method"] == "OPTIONS" and origin and allowed:
            answer = Response(status_code=204)
        if origin and allowed and self._state.settings.cors_origin:
            send = _with_cors(send, origin, headers.get("access-control-request-headers"))
        await answer(scope, receive, send)

    def _allowed(self, origin: str | None, headers: Headers) -> bool:
        """Whether a page of this origin may ask. A browser names it where it is another than this
        server's own, and for each POST."""
        asked = self._state.settings.cors_origin
        same = origin is None or urlsplit(origin).netloc == headers.get("host", "")
        return same or asked in ("*", origin)

    def _refusal(self, scope: Scope, headers: Headers, allowed: bool) -> Refusal | None:
        state = self._state
        if (
            state.settings.is_local
            and _name_of(headers.get("host", "")) not in state.settings.hosts
        ):
            return Refusal(
                421, "this server has another name (--allow-host adds one to its Host header)"
            )
        if not allowed:
            return Refusal(403, "pages of another origin may not ask (--cors-origin allows one)")
        if state.keys and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            scheme, _, token = headers.get("authorization", "").partition(" ")
            brought = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not any(hmac.compare_digest(brought.encode("latin-1"), key) for key in state.keys):
                return Refusal(401, "a key is missing or wrong: Authorization: Bearer KEY")
        return None


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    with suppress(ValueError):
        return (urlsplit(f"//{host}").hostname or "").lower()
    return ""


def _with_cors(send: Send, origin: str, wanted: str | None) -> Send:
    """wanted: the header fields that a browser asks for before it sends a page's request. SDKs send
    fields of their own, and a page that is let in may send any."""
    fields = {
        "access-control-allow-origin": origin,
        "access-control-allow-headers": wanted or "authorization, content-type, x-api-key",
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "vary": "origin, access-control-request-headers",
    }

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [(name.encode(), text.encode()) for name, text in fields.items()]
            message["headers"] = [*message.get("headers", []), *more]
        await send(message)

    return sending


class Log:
    """One line a request: when it has ended, its path, its status and its time."""

    def __init__(self, app: ASGIApp, state: State, log: Callable[[str], None]) -> None:
        self._app, self._state, self._log = app, state, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begin_s = GONE, monotonic()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            # At the end uvicorn gives up what is open, and would show where it was.
            if not self._state.stopping:
                raise
            if status == GONE:
                await _error(STOPPING)(scope, receive, sending)
        finally:
            # As it would be in a request: a line feed or a colour would be a line of its own.
            path = quote(scope["path"][:80], safe=PLAIN)
            took_s = monotonic() - begin_s
            if (path, status) != (PICTURE, 200):  # a page asks for it all the time
                self._log(f"{scope['method']} {path} {status} {took_s:.1f} s")


def _error(refusal: Refusal) -> JSONResponse:
    headers = {"retry-after": "1"} if refusal.status == 503 else None
    error = error_object(refusal.status, refusal.message, refusal.kind)
    return JSONResponse(error, refusal.status, headers)


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _error(error)


async def _missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "does not take this method" if status == 405 else "is nothing that this server has"
    reply = _error(Refusal(status, f"{request.url.path[:80]} {what}"))
    reply.headers.update(getattr(error, "headers", None) or {})  # of 405: which methods it takes
    return reply
