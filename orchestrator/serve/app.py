"""The HTTP application: routes and their endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.serve.admission import CLIENT, Body, client_left, conversations_of
from orchestrator.serve.answer import Exchange, until_left
from orchestrator.serve.changes import ModelChanges
from orchestrator.serve.door import Door, error_response
from orchestrator.serve.ollama import (
    VERSION,
    Lines,
    OllamaRequest,
    capabilities,
    listed,
    running,
    shown,
)
from orchestrator.serve.overflow import drop_oldest
from orchestrator.serve.requests import (
    settle_fields,
    settle_length,
    settle_probs,
    settle_request,
)
from orchestrator.serve.schemas import (
    COUNTING,
    GENERATING,
    MODELS,
    PATHS,
    QUICK,
    READ,
    SHOW,
    TASKS,
    document,
    paths,
)
from orchestrator.serve.scoring import score, wants_scores
from orchestrator.serve.served import Served
from orchestrator.serve.state import State
from orchestrator.serve.views import metrics_text, page_response, picture
from orchestrator.serve.wire import (
    ANTHROPIC,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    STOPPING,
    Refusal,
    anthropic_error,
    body_remedy,
    check_text,
    length_of,
    mapped,
    read_body,
    read_object,
    written,
)

# Paths whose answers do not need the loaded model.
WITHOUT_MODEL = ("/", "/openapi.json", "/api/version", MODELS, TASKS)
# Longest body of a request for a task.
TASK_BYTES = 4096


def application(state: State, log: Callable[[str], None]) -> Starlette:
    """Return the HTTP application with all routes. `log` gets one line for each request.

    The line contains no text of the request or of the answer.
    """
    endpoints = Endpoints(state)
    answers: dict[str, Callable[[Request], Any]] = {
        **{path: partial(endpoints.generate, path) for path in GENERATING},
        **{path: partial(endpoints.quick, path) for path in QUICK},
        **{path: partial(endpoints.read, path) for path in READ},
        "/health": endpoints.health,
        "/metrics": endpoints.metrics,
        "/experts": endpoints.experts,
        "/openapi.json": endpoints.description,
        "/": endpoints.page,
        MODELS: endpoints.local_models,
        TASKS: endpoints.start_or_stop_task,
        "/api/tags": endpoints.ollama_models,
        "/api/ps": endpoints.ollama_running,
        "/api/version": endpoints.ollama_version,
        SHOW: endpoints.ollama_show,
        "/v1/models/{id}": endpoints.model,
    }
    return Starlette(
        routes=[
            Route(
                each.replace("{id}", "{id:path}"),
                answer,
                methods=[*PATHS[each]],
                middleware=[] if path in WITHOUT_MODEL else [Middleware(Using, state)],
            )
            for path, answer in answers.items()
            for each in paths(path)
        ],
        middleware=[Middleware(Door, state, log)],
        exception_handlers=dict.fromkeys((Refusal, MoeEdgeError, HTTPException), _failed),
    )


class Using:
    """ASGI middleware that counts the requests which may be using the model.

    The server frees a model only while this number is 0.
    """

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.users += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.users -= 1


class Endpoints:
    """Answers the server's HTTP requests. It has one method for each kind of request."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def generate(self, route: str, request: Request) -> ASGIApp:
        """Return the response to a request that generates tokens."""
        return await self._of_body(request, partial(self._answer_to, route))

    def _answer_to(self, route: str, served: Served, body: Body) -> ASGIApp:
        """Return the response to a request, and set `body.data` to the request for llama.cpp.

        Call this on a thread, because it may take seconds. Raises Refusal (an error response) for a
        request that cannot be served.
        """
        state, parallel = self._state, self._state.settings.parallel
        data, n_bytes = _parsed(served, body)
        of_ollama = None
        if route in (OLLAMA_CHAT, OLLAMA_GENERATE):
            of_ollama = OllamaRequest(route, data, served.about.n_ctx)
            if not of_ollama.has_prompt:
                return JSONResponse(of_ollama.loaded())
            route, data = of_ollama.route, of_ollama.data
        changes = settle_request(route, data, n_bytes, served)
        exchange = Exchange(state, served, route, body, data.get("stream") is True)
        exchange.settings = served.settings_for(changes)
        n_dropped = drop_oldest(route, data, served, body, state.settings.overflow)
        if of_ollama is not None:
            exchange.outlet = partial(Lines, request=of_ollama, n_dropped=n_dropped)
        if wants_scores(route, data):
            exchange.places = parallel  # scoring needs the whole context
            exchange.compute = partial(score, state, served, body)
        else:
            exchange.shape = settle_probs(route, data, served.about.n_ctx, n_dropped)
            n = data.get("n_cmpl", data.get("n", 1))  # llama.cpp prefers n_cmpl, too
            if n > parallel:
                raise Refusal(
                    400,
                    f"n is {n}, but this server computes at most {parallel} answers at the same "
                    f"time (--parallel)",
                )
            if parallel > 1:
                exchange.conversations = conversations_of(data, parallel)
            exchange.places = len(exchange.conversations)
            if served.parallel > 1:
                exchange.cells = settle_length(route, data, served, exchange.places, body)
        body.data = written(data)
        return exchange

    async def quick(self, route: str, request: Request) -> ASGIApp:
        """Return the response to a POST request that generates no tokens, such as /tokenize.

        llama.cpp's server computes the answer.
        """

        def work(served: Served, body: Body) -> ASGIApp:
            data, n_bytes = _parsed(served, body)
            settle_request(route, data, n_bytes, served)
            status, text = body.ask(served.runtime, route, written(data))
            if self._state.stopping and status != 200:
                raise STOPPING
            if COUNTING.get(route) == ANTHROPIC and status >= 400:
                text = mapped(text, False, anthropic_error)
            return Response(text, status, media_type="application/json")

        return await self._of_body(request, work)

    async def read(self, route: str, _request: Request) -> Response:
        """Return the answer of llama.cpp's server to a GET request."""
        status, text = await _read_of(self._state, route)
        if route == "/v1/models":
            return JSONResponse(self._with_capabilities(json.loads(text)), status)
        return Response(text, status, media_type="application/json")

    async def model(self, request: Request) -> Response:
        """Return a description of the loaded model.

        Raises Refusal with status 404 if the path names another model.
        """
        name, found = request.path_params["id"], await self._model()
        if found["id"] == name:
            return JSONResponse(found)
        raise Refusal(404, f"model '{name[:80]}' is not loaded: GET /v1/models names the model")

    async def _model(self) -> dict[str, Any]:
        """Return the loaded model as an entry of OpenAI's model list."""
        _, text = await _read_of(self._state, "/v1/models")
        (found,) = self._with_capabilities(json.loads(text))["data"]
        return dict(found)

    def _with_capabilities(self, models: dict[str, Any]) -> dict[str, Any]:
        """Return OpenAI's model list with the capabilities of the model, in Ollama's words."""
        served = self._state.ready()
        data = [{**each, "capabilities": capabilities(served)} for each in models.get("data", ())]
        return {**models, "data": data}

    async def ollama_models(self, _request: Request) -> Response:
        """Return the loaded model as Ollama's list of models (`/api/tags`)."""
        model, served = await self._model(), self._state.ready()
        return JSONResponse({"models": [listed(model, served)]})

    async def ollama_running(self, _request: Request) -> Response:
        """Return the loaded model as Ollama's list of running models (`/api/ps`)."""
        model, served = await self._model(), self._state.ready()
        return JSONResponse({"models": [running(model, served)]})

    async def ollama_version(self, _request: Request) -> Response:
        """Return the version of Ollama's API that this server follows."""
        return JSONResponse({"version": VERSION})

    async def ollama_show(self, _request: Request) -> Response:
        """Return Ollama's details of the loaded model (`/api/show`)."""
        model, served = await self._model(), self._state.ready()
        _, text = await _read_of(self._state, "/props")
        template = json.loads(text)["chat_template"]
        return JSONResponse(shown(model, served, template))

    async def health(self, _request: Request) -> Response:
        """Return status 200 if the model is ready. Raises Refusal (status 503) otherwise."""
        self._state.ready()
        return JSONResponse({"status": "ok"})

    async def experts(self, _request: Request) -> Response:
        """Return which experts are in memory and how often tokens used them, for the web page."""
        return JSONResponse(picture(self._state.ready().runtime))

    async def page(self, _request: Request) -> Response:
        """Return the web page with which users can chat."""
        return page_response(self._state.changes is not None)

    async def local_models(self, _request: Request) -> Response:
        """Return the models on this machine, the latest task and the latest comparison, as JSON.

        A task lists, downloads or loads models, or compares the models of a repository. A
        comparison says how these models would run on this machine.
        """
        return JSONResponse(self._changes().as_dict())

    async def start_or_stop_task(self, request: Request) -> Response:
        """Start the task that a request names, or stop the running task if the action is "stop".

        A task lists, downloads or loads models, or compares the models of a repository. The
        response is JSON with the models on this machine, the task, and the latest comparison.
        """
        changes, patience = self._changes(), self._state.settings.patience
        read = read_body(request, TASK_BYTES, "", lambda _n_bytes: None)
        try:
            data = read_object(await asyncio.wait_for(read, patience))
        except asyncio.TimeoutError:
            raise late_body(patience) from None
        settle_fields(TASKS, data, 0)
        changes.carry_out(data["action"], data.get("model", ""))
        return JSONResponse(changes.as_dict())

    def _changes(self) -> ModelChanges:
        """Return the object that changes the model.

        Raises Refusal (an error response) without --allow-model-change and during shutdown.
        """
        if self._state.stopping:
            raise STOPPING
        if self._state.changes is None:
            raise Refusal(
                403,
                "clients may not change the model: start the server with --allow-model-change to "
                "allow it",
            )
        return self._state.changes

    async def description(self, _request: Request) -> Response:
        """Return the OpenAPI description of the server."""
        return JSONResponse(document(bool(self._state.keys)))

    async def metrics(self, _request: Request) -> Response:
        """Return metrics in Prometheus' format, of this server or of all replicas of a fleet."""
        state = self._state
        state.ready()
        return Response(
            await (state.all_metrics or partial(metrics_of, state))(),
            media_type="text/plain; version=0.0.4",
            headers={"process-start-time-unix": str(state.began_s)},
        )

    async def _of_body(self, request: Request, work: Callable[[Served, Body], ASGIApp]) -> ASGIApp:
        """Read the body of a request, and return the response that `work` makes from it.

        `work` runs on a thread. The body's memory stays reserved until the response ends. Raises
        Refusal (an error response) if the body cannot be read or `work` refuses the request.
        """
        state, settings, served = self._state, self._state.settings, self._state.ready()
        client = request.scope.get("state", {}).get(CLIENT, "")
        body = Body(state.bodies, served.most_body_bytes, client, served.most_image_bytes)
        try:
            useful = settings.most_body_bytes(served.about.n_ctx) + 2 * served.most_image_bytes
            most = served.most_body_bytes + served.most_image_bytes
            remedy = body_remedy(most, useful, served.images is not None)
            read = read_body(request, most, remedy, body.count)
            try:
                body.data = await asyncio.wait_for(read, settings.patience)
            except asyncio.TimeoutError:
                raise late_body(settings.patience) from None
            look = asyncio.create_task(body.run(partial(work, served, body)))
            left = asyncio.create_task(until_left(request.receive))
            try:
                await asyncio.wait({look, left}, return_when=asyncio.FIRST_COMPLETED)
                if not look.done():
                    look.cancel()
                    await asyncio.wait({look})
                    raise client_left()
                answer = look.result()
            finally:
                left.cancel()
                look.cancel()
            body.count(len(body.data))  # work may have written a longer body
        except BaseException:
            body.take()
            raise

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await answer(scope, receive, send)
            finally:
                body.take()

        return answered


def _parsed(served: Served, body: Body) -> tuple[dict[str, Any], int]:
    """Parse a body and free its bytes. Return the request, and the length of the body.

    Raises Refusal (an error response) for a body that is not a JSON object, or is too long.
    """
    check_text(body.data, served.most_body_bytes)
    data, n_bytes = read_object(body.data), length_of(body.data)
    body.data = b""
    return data, n_bytes


def late_body(patience_s: int) -> Refusal:
    """Return the error response to a request whose body did not arrive in time."""
    return Refusal(408, f"the request did not arrive within {patience_s} s (--patience)")


async def _read_of(state: State, route: str) -> tuple[int, bytes]:
    """Send llama.cpp's server a GET request, and return (HTTP status, answer).

    Raises Refusal (an error response) during shutdown, because the answer may then be empty.
    """
    runtime, loop = state.ready().runtime, asyncio.get_running_loop()
    answer = await loop.run_in_executor(state.quick, lambda: runtime.query(route).whole())
    if state.stopping:
        raise STOPPING
    return answer


async def metrics_of(state: State) -> str:
    """Return the metrics of llama.cpp and of this server as one text in Prometheus' format.

    Raises Refusal (an error response) if no model is loaded.
    """
    _, text = await _read_of(state, "/metrics")
    return text.decode() + metrics_text(state, state.ready())


async def _failed(request: Request, error: Exception) -> Response:
    """Return the error response for an exception, in the format that clients of the path expect."""
    path, more = request.url.path, dict[str, str]()
    if isinstance(error, HTTPException):
        wrong_method = error.status_code == 405
        fault = f"{path[:80]} is not a path of this server"
        if wrong_method:
            fault = f"{path[:80]} does not support the HTTP method of this request"
        more = error.headers or {}  # names the methods that the path supports
        error = Refusal(error.status_code, fault)
    elif isinstance(error, MoeEdgeError):
        error = Refusal(400 if isinstance(error, ConfigError) else 500, str(error))
    assert isinstance(error, Refusal)
    reply = error_response(error, path)
    reply.headers.update(more)
    return reply
