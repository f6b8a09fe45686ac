"""Middleware around every request: host, origin and key checks, the log, and time limits."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.serve.admission import CLIENT, PACES_ITSELF
from orchestrator.serve.schemas import MODELS, paths
from orchestrator.serve.state import State
from orchestrator.serve.wire import STOPPING, Refusal, is_ollama, ollama_error

OPEN = (*paths("/health"), "/")  # paths that need no key
POLLED = ("/experts", MODELS)  # by the page, so the log leaves out successful requests
# A name or an address, and a port.
_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(?::\d+)?", re.ASCII)
# Characters of a path that the log does not escape.
PLAIN = "/:@!$&'()*+,;=~"
GONE = 499  # nginx's status for a client that went away
# Complete responses are sent in parts of this length.
PART_BYTES = 2**16
# If a response is ready before the whole request has arrived, up to this much of the rest is read
# and dropped. Without this, a client that is still sending when the connection closes may lose the
# response.
DROP_S, DROP_BYTES = 2.0, 64 * 2**20


class Door:
    """ASGI middleware that checks each request, logs it, and disconnects slow clients.

    A client is disconnected if it takes too long to read its response or to send the rest of its
    request. Endpoints that generate tokens set time limits of their own. At the end of each request
    the log gets one line: method, path, status and time.
    """

    def __init__(self, app: ASGIApp, state: State, log: Callable[[str], None]) -> None:
        self._app, self._state, self._log = app, state, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _without_address(scope)
        begin_s = monotonic()
        address = scope.get("client")
        scope.setdefault("state", {})[CLIENT] = f"address {address[0]}" if address else ""
        client = _Client(self._state, scope, receive, send)
        try:
            await self._let_in(scope, client)
        except asyncio.CancelledError:
            # During shutdown uvicorn cancels open requests and would log a traceback.
            if not self._state.stopping:
                raise
            if client.status == GONE:
                await error_response(STOPPING, scope["path"])(scope, client.receive, client.send)
        finally:
            self._state.unread.leave(client)
            # Escaped as in a URL, so that a line feed or a colour code cannot forge log lines.
            path = quote(scope["path"][:80], safe=PLAIN)
            if path not in POLLED or client.status != 200:
                took_s = monotonic() - begin_s
                self._log(f"{scope['method']} {path} {client.status} {took_s:.1f} s")

    async def _let_in(self, scope: Scope, client: _Client) -> None:
        """Check a request's host, origin and API key. Then run the application or send an error."""
        headers, cors = Headers(scope=scope), self._state.settings.cors_origin
        origin = headers.get("origin")
        # A browser sends Origin for each POST, and for each page of another origin.
        allowed = (
            origin is None or _place_of(origin) == headers.get("host", "") or cors in ("*", origin)
        )
        if origin and allowed and cors:
            client.fields = _cors_fields(origin, headers.get("access-control-request-headers"))
        refusal = self._refusal(scope, headers, allowed)
        answer: ASGIApp = self._app
        if refusal is not None:
            answer = error_response(refusal, scope["path"])
        elif scope["method"] == "OPTIONS" and origin:
            answer = Response(status_code=204)
        await answer(scope, client.receive, client.send)

    def _refusal(self, scope: Scope, headers: Headers, allowed: bool) -> Refusal | None:
        """Return the error response for a request that must be refused, or None.

        `allowed` tells whether the origin of the request is allowed.
        """
        state = self._state
        host = headers.get("host", "")
        if state.settings.is_local and _name_of(host) not in state.settings.hosts:
            return Refusal(
                421,
                f"'{host[:80]}' in the Host header is not a name of this server: start the server "
                "with --allow-host NAME to allow it",
            )
        if not allowed:
            return Refusal(
                403,
                "requests from web pages of another origin are refused: start the server with "
                "--cors-origin ORIGIN to allow an origin",
            )
        if state.keys and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            key = given.encode("latin-1")
            if not any(hmac.compare_digest(key, each) for each in state.keys):
                return Refusal(
                    401, "the API key is missing or wrong: send Authorization: Bearer KEY"
                )
            scope.setdefault("state", {})[CLIENT] = f"key {hashlib.sha256(key).hexdigest()}"
        return None


class _Client:
    """Wraps `receive` and `send` of one request, to add header fields and time limits.

    `status` is the HTTP status of the response, or 499 before it is sent. `fields` are header
    fields that are added to the response.
    """

    def __init__(self, state: State, scope: Scope, receive: Receive, send: Send) -> None:
        self._state, self._scope, self._receive, self._send = state, scope, receive, send
        headers = Headers(scope=scope)
        self._is_all_here = (
            headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        ) or "expect" in headers  # this client sends its body only after a 100 Continue
        self._is_cut = False
        self.status = GONE
        self.fields: dict[str, str] = {}

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            self._is_all_here = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            more = [(name.encode(), text.encode()) for name, text in self.fields.items()]
            await self._say({**message, "headers": [*message.get("headers", []), *more]})
            return
        data, goes_on = message.get("body", b""), message.get("more_body", False)
        if self._paces_itself:
            parts = [data]
        else:
            parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)] or [b""]
        if len(parts) > 1:
            self._state.unread.keep(self, len(data), self._cut)
        waits = not (goes_on or self._is_all_here or self._state.stopping)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1 and not goes_on and not waits
            await self._say(_body(part, not is_last))
        if waits:
            try:
                await asyncio.wait_for(self._drop(), DROP_S)
            except asyncio.TimeoutError:
                pass
            except asyncio.CancelledError:
                if not self._state.stopping:
                    raise
            await self._say(_body(b"", False))

    @property
    def _paces_itself(self) -> bool:
        return PACES_ITSELF in self._scope.get("state", ())

    async def _say(self, message: Message) -> None:
        if self._is_cut:
            return
        if self._paces_itself:
            await self._send(message)
            return
        try:
            await asyncio.wait_for(self._send(message), self._state.settings.patience)
        except asyncio.TimeoutError:
            self._cut()

    def _cut(self) -> None:
        """Close the connection to the client at once. Unsent data is lost."""
        self._is_cut = True
        self._scope.get("state", {}).get("abort", lambda: None)()

    async def _drop(self) -> None:
        """Read the rest of the request's body and discard it."""
        n_bytes = 0
        while not self._is_all_here and n_bytes < DROP_BYTES:
            n_bytes += len((await self.receive()).get("body", b""))


def _body(data: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _place_of(origin: str) -> str | None:
    """Return the host and port in an Origin header, or None if the header is not valid."""
    with suppress(ValueError):
        return urlsplit(origin).netloc
    return None


def _name_of(host: str) -> str:
    """Return the name in a Host header without the port, or "" if the header is not valid."""
    found = _HOST.fullmatch(host)
    return found[1].strip("[]").lower() if found else ""


def _without_address(scope: Scope) -> Scope:
    """Return an ASGI scope in which a host in the path is moved to the Host header.

    HTTP lets a client send `GET http://localhost/health`. The host in that URL then replaces the
    Host header (RFC 9112, section 3.2.2). Any other scope is returned unchanged.
    """
    path = scope["path"]
    scheme, mark, rest = path.partition("://")
    if not mark or scheme.lower() not in ("http", "https"):
        return scope
    host, _, path = rest.partition("/")
    headers = [(name, text) for name, text in scope["headers"] if name != b"host"]
    headers.append((b"host", host.encode("latin-1", "replace")))
    raw = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    return {**scope, "path": f"/{path}", "raw_path": raw, "headers": headers}


def _cors_fields(origin: str, wanted: str | None) -> dict[str, str]:
    """Return the CORS header fields of a response.

    `wanted` names the header fields for which a browser asks permission. All of them are allowed,
    because SDKs send fields of their own.
    """
    return {
        "access-control-allow-origin": origin,
        "access-control-allow-headers": wanted or "authorization, content-type, x-api-key",
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "vary": "origin, access-control-request-headers",
    }


def error_response(refusal: Refusal, path: str) -> JSONResponse:
    """Return the HTTP response for an error, in the format that clients of the path expect."""
    said = ollama_error(refusal.message) if is_ollama(path) else refusal.as_object()
    return JSONResponse(said, refusal.status, refusal.headers)
