"""The HTTP application: what there is, and who answers it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gguf_tools.units import format_size
from orchestrator.errors import MoeEdgeError
from orchestrator.serve.answer import Answer
from orchestrator.serve.backend import Backend
from orchestrator.serve.bodies import PIECES_SHARE, VALUE_BYTES, Body, Holding
from orchestrator.serve.bounds import settle_bounds
from orchestrator.serve.door import HEALTH, PICTURE, Door, Log, Way, error_response
from orchestrator.serve.fields import fault_of, settle_fields
from orchestrator.serve.formats import settle_format
from orchestrator.serve.length import COUNTING, check_length
from orchestrator.serve.metrics import metrics_text
from orchestrator.serve.openapi import document
from orchestrator.serve.page import page_response
from orchestrator.serve.requests import COMMON
from orchestrator.serve.scoring import Scoring, wants_scores
from orchestrator.serve.seats import Conversation, conversation_of
from orchestrator.serve.shape import anthropic_error, settle_probs
from orchestrator.serve.state import State
from orchestrator.serve.tools import settle_tool_choice
from orchestrator.serve.unserved import settle_unserved
from orchestrator.serve.wire import (
    ANTHROPIC,
    Refusal,
    inner,
    mapped,
    read_body,
    read_object,
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
DESCRIPTION = "/openapi.json"
# What llama.cpp's server does not read of a request, or leaves out of it; in this order.
SETTLED = (settle_tool_choice, settle_format, settle_bounds)
# The field with live settings of the policy for one request.
OURS = "moe_edge"
TOKEN_LISTS = ("prompt", "content", "tokens")


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
        middleware=[
            Middleware(Way, state),
            Middleware(Log, state, log),
            Middleware(Door, state),
        ],
        exception_handlers={
            Refusal: _refused,
            MoeEdgeError: _failed,
            404: _missing,
            405: _missing,
        },
    )


class Endpoints:
    """One method a kind of request."""

    def __init__(self, state: State) -> None:
        self._state = state

    def generate(self, route: str) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Any:
            backend = self._state.ready()
            body = await self._read(request, backend)
            try:
                answer = await body.run(partial(self._answer_to, backend, route, body))
                body.count(len(body.data))  # written anew, it may be longer
                return Holding(answer, body, paces_itself=True)
            except BaseException:
                body.close()
                raise

        return endpoint

    def _answer_to(self, backend: Backend, route: str, body: Body) -> Answer:
        """Reads the body, and leaves in it what llama.cpp will get. On a thread: a list of a
        hundred thousand tokens takes a while."""
        state = self._state
        parallel, timeout = state.settings.parallel, state.settings.timeout
        data, changes = _object(route, body.data, backend)
        scores, shape, conversation = wants_scores(route, data), None, None
        if scores:
            places, conversation = parallel, Conversation()  # nothing else decodes
        else:
            shape = settle_probs(route, data, backend.slot_context)
            places = _places(data, parallel)
            if parallel > 1:
                conversation = conversation_of(route, data)
        is_stream = data.get("stream") is True
        body.data = written(data)

        async def check() -> None:
            ask = partial(_asked, backend)
            await body.run(partial(check_length, ask, route, body.data, backend.slot_context))

        async def compute(sequence: int) -> Iterable[bytes]:
            asked = body.take()
            stopping = partial(getattr, state, "stopping")
            scoring = await body.run(
                lambda: Scoring(backend, state.scorer, json.loads(asked), stopping)
            )
            return await scoring.answer(sequence)

        return Answer(
            backend,
            state.gate,
            state.unread,
            state.seats,
            state.workers,
            route,
            body,
            conversation=conversation,
            is_stream=is_stream,
            places=places,
            changes=changes,
            most_s=float(timeout) if timeout else None,
            is_stopping=lambda: state.stopping,
            check=check,
            compute=compute if scores else None,
            shape=shape,
        )

    def quick(self, route: str) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Any:
            backend = self._state.ready()
            body = await self._read(request, backend)

            def work() -> tuple[int, bytes]:
                data, _ = _object(route, body.data, backend)
                status, text = _asked(backend, route, written(data))
                if COUNTING.get(route) == ANTHROPIC and status >= 400:
                    text = mapped(text, False, anthropic_error)
                return status, text

            try:
                status, text = await body.run(work)
                body.take()
                answer = Response(text, status, media_type="application/json")
                return Holding(answer, body, paces_itself=False)
            except BaseException:
                body.close()
                raise

        return endpoint

    def read(self, route: str) -> Callable[[Request], Any]:
        async def endpoint(_request: Request) -> Response:
            status, text = await self._ask(route)
            return Response(text, status, media_type="application/json")

        return endpoint

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        asked = request.path_params["id"]
        _, text = await self._ask("/v1/models")
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
        _, text = await self._ask("/metrics")
        state = self._state
        ours = metrics_text(backend, state.gate, state.unread, state.bodies)
        return Response(
            text + ours.encode(),
            media_type="text/plain; version=0.0.4",
            headers={"process-start-time-unix": str(self._state.began_s)},
        )

    async def _read(self, request: Request, backend: Backend) -> Body:
        """A request's body, once all of it is here. Close it. Raises Refusal."""
        settings = self._state.settings
        longest = backend.most_body_bytes
        useful = settings.most_body_bytes(backend.slot_context)
        body = Body(self._state.bodies, longest)
        try:
            read = read_body(request, longest, useful, body.count)
            body.data = await asyncio.wait_for(read, settings.patience)
        except asyncio.TimeoutError:
            body.close()
            late = f"the request was not here after --patience, {settings.patience} s"
            raise Refusal(408, late) from None
        except BaseException:
            body.close()
            raise
        return body

    async def _ask(self, route: str) -> tuple[int, bytes]:
        """llama.cpp's answer to a request without a body."""
        state = self._state
        ask = partial(_asked, state.ready(), route, b"")
        return await asyncio.get_running_loop().run_in_executor(state.quick, ask)


def _asked(backend: Backend, route: str, body: bytes) -> tuple[int, bytes]:
    """(status, answer) of a request that decodes nothing. On a thread."""
    return backend.request(route, body).whole()


def _object(route: str, body: bytes, backend: Backend) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request's object for llama.cpp, and what it has for the policy. Raises Refusal."""
    data = read_object(body)
    changes = data.pop(OURS, None) or {}
    fault = fault_of(COMMON[OURS], changes, OURS)
    if fault is not None:
        raise Refusal(400, fault)
    _check_values(data, len(body), backend.most_body_bytes)
    form = COUNTING.get(route, route)
    settle_unserved(form, data)
    settle_fields(form, data, backend.slot_context)
    for settle in SETTLED:
        settle(form, data)
    return data, changes


def _check_values(data: dict[str, Any], n_bytes: int, longest_bytes: int) -> None:
    """Raises Refusal for a request of which more would be made than there is memory for."""
    most = longest_bytes // PIECES_SHARE
    if data.get("with_pieces") and n_bytes > most:
        raise Refusal(400, f"with_pieces takes a request of at most {format_size(most)}")
    most = longest_bytes // VALUE_BYTES
    # Tokens are numbers in lists of their own, which take no more than texts do.
    level = [value for name, value in data.items() if name not in TOKEN_LISTS]
    n_values = 0
    while level:
        n_values += len(level)
        if n_values > most:
            raise Refusal(400, f"a request has at most {most} values, and this one has more")
        level = inner(level)


def _places(data: dict[str, Any], most: int) -> int:
    """How many sequences a request takes: its `n`. Raises Refusal for more than there are."""
    n: int = data.get("n_cmpl", data.get("n", 1))  # in llama.cpp's order
    if n > most:
        raise Refusal(400, f"n is {n}, and this server answers {most} at once (--parallel)")
    return n


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(error)


async def _failed(_request: Request, error: Exception) -> Response:
    return error_response(Refusal(500, str(error)))


async def _missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "does not take this method" if status == 405 else "is nothing that this server has"
    reply = error_response(Refusal(status, f"{request.url.path[:80]} {what}"))
    reply.headers.update(getattr(error, "headers", None) or {})  # of 405: which methods it takes
    return reply
