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

from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.serve.admission import Body, Conversation, Holding, conversations_of
from orchestrator.serve.answer import Answer, Asked
from orchestrator.serve.backend import Backend
from orchestrator.serve.door import Door, error_response
from orchestrator.serve.ollama import VERSION, Lines, OllamaRequest, described, shown
from orchestrator.serve.requests import (
    check_length,
    read_request,
    settle_length,
    settle_probs,
)
from orchestrator.serve.schemas import COUNTING, GENERATING, QUICK, READ, SHOW, document, paths
from orchestrator.serve.scoring import Scoring, wants_scores
from orchestrator.serve.state import State
from orchestrator.serve.views import metrics_text, page_response
from orchestrator.serve.wire import (
    ANTHROPIC,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    Refusal,
    anthropic_error,
    mapped,
    read_body,
    written,
)


def application(state: State, log: Callable[[str], None]) -> Starlette:
    """log gets one line a request, without its contents."""
    endpoints = Endpoints(state)
    kinds: list[tuple[str, Iterable[str], Callable[[str], Any]]] = [
        ("POST", GENERATING, endpoints.generate),
        ("POST", QUICK, endpoints.quick),
        ("GET", READ, endpoints.read),
        ("GET", ["/health"], lambda _: endpoints.health),
        ("GET", ["/metrics"], lambda _: endpoints.metrics),
        ("GET", ["/experts"], lambda _: endpoints.experts),
        ("GET", ["/openapi.json"], lambda _: endpoints.description),
        ("GET", ["/"], lambda _: endpoints.page),
        ("GET", ["/api/tags", "/api/ps"], lambda _: endpoints.ollama_models),
        ("GET", ["/api/version"], lambda _: endpoints.ollama_version),
        ("POST", [SHOW], lambda _: endpoints.ollama_show),
        ("GET", ["/v1/models/{id}"], lambda _: endpoints.model),
    ]
    return Starlette(
        routes=[
            Route(each.replace("{id}", "{id:path}"), endpoint(path), methods=[method])
            for method, of_kind, endpoint in kinds
            for path in of_kind
            for each in paths(path)
        ],
        middleware=[Middleware(Door, state, log)],
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
                work = partial(self._answer_to, backend, route, body)
                answer = await self._state.bodies.run(work)
                body.count(len(body.data))  # written anew, it may be longer
                return Holding(answer, body, paces_itself=True)
            except BaseException:
                body.close()
                raise

        return endpoint

    def _answer_to(self, backend: Backend, route: str, body: Body) -> Answer | Response:
        """Reads the body, and leaves in it what llama.cpp will get. On a thread."""
        state = self._state
        outlet = None
        if route in (OLLAMA_CHAT, OLLAMA_GENERATE):
            asked_so = OllamaRequest(route, body.data, backend.slot_context)
            if not asked_so.has_prompt:
                return JSONResponse(asked_so.loaded())
            route, body.data = asked_so.route, written(asked_so.data)
            outlet = partial(Lines, request=asked_so)
        parallel = state.settings.parallel
        data, changes = read_request(route, body.data, backend)
        settings = backend.settings_for(changes)
        make = shape = None
        conversations, cells = [Conversation()], 0
        ask = partial(_asked, backend)
        if wants_scores(route, data):
            places = parallel  # nothing else decodes
            make = partial(self._score, backend, body)
        else:
            shape = settle_probs(route, data, backend.slot_context)
            _check_places(data, parallel)
            if parallel > 1:
                conversations = conversations_of(data, parallel)
            places = len(conversations)
            if backend.parallel > 1:
                cells = settle_length(ask, route, data, backend, places)
        body.data = written(data)

        async def check() -> None:
            if backend.parallel > 1:
                return  # settle_length has
            checking = partial(check_length, ask, route, body.data, backend.slot_context)
            await state.bodies.run(checking)

        is_stream = data.get("stream") is True
        asked = Asked(is_stream, places, cells, conversations, settings, shape, check, make, outlet)
        return Answer(state, backend, route, body, asked)

    async def _score(self, backend: Backend, body: Body, sequence: int) -> Iterable[bytes]:
        state, data = self._state, body.take()
        stopping = partial(getattr, state, "stopping")
        scoring = await state.bodies.run(
            lambda: Scoring(backend, state.scorer, json.loads(data), stopping)
        )
        return await scoring.answer(sequence)

    def quick(self, route: str) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Any:
            backend = self._state.ready()
            body = await self._read(request, backend)

            def work() -> tuple[int, bytes]:
                data, _ = read_request(route, body.data, backend)
                status, text = _asked(backend, route, written(data))
                if COUNTING.get(route) == ANTHROPIC and status >= 400:
                    text = mapped(text, False, anthropic_error)
                return status, text

            try:
                status, text = await self._state.bodies.run(work)
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
        asked, found = request.path_params["id"], await self._model()
        if found["id"] == asked:
            return JSONResponse(found)
        raise Refusal(404, f"there is no model '{asked[:80]}' here (GET /v1/models names it)")

    async def _model(self) -> dict[str, Any]:
        _, text = await self._ask("/v1/models")
        (found,) = json.loads(text)["data"]
        return dict(found)

    async def ollama_models(self, _request: Request) -> Response:
        model, backend = await self._model(), self._state.ready()
        return JSONResponse({"models": [described(model, backend.architecture)]})

    async def ollama_version(self, _request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def ollama_show(self, _request: Request) -> Response:
        model, backend = await self._model(), self._state.ready()
        _, text = await self._ask("/props")
        template = json.loads(text)["chat_template"]
        return JSONResponse(shown(model, backend.architecture, backend.slot_context, template))

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
        state = self._state
        state.ready()
        return Response(
            await (state.all_metrics or partial(metrics_of, state))(),
            media_type="text/plain; version=0.0.4",
            headers={"process-start-time-unix": str(state.began_s)},
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
        return await _read_of(self._state, route)


async def _read_of(state: State, route: str) -> tuple[int, bytes]:
    """llama.cpp's answer to a request without a body."""
    ask = partial(_asked, state.ready(), route, b"")
    return await asyncio.get_running_loop().run_in_executor(state.quick, ask)


async def metrics_of(state: State) -> str:
    """llama.cpp's counters and ours. Raises Refusal where no model is loaded."""
    _, text = await _read_of(state, "/metrics")
    return text.decode() + metrics_text(state, state.ready())


def _asked(backend: Backend, route: str, body: bytes) -> tuple[int, bytes]:
    """(status, answer) of a request that decodes nothing. On a thread."""
    return backend.request(route, body).whole()


def _check_places(data: dict[str, Any], most: int) -> None:
    """Raises Refusal for a request of more answers to a prompt than there are sequences."""
    n: int = data.get("n_cmpl", data.get("n", 1))  # in llama.cpp's order
    if n > most:
        raise Refusal(400, f"n is {n}, and this server answers {most} at once (--parallel)")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(error, request.url.path)


async def _failed(request: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, ConfigError) else 500
    return error_response(Refusal(status, str(error)), request.url.path)


async def _missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "does not take this method" if status == 405 else "is nothing that this server has"
    path = request.url.path
    reply = error_response(Refusal(status, f"{path[:80]} {what}"), path)
    reply.headers.update(getattr(error, "headers", None) or {})  # of 405: which methods it takes
    return reply
