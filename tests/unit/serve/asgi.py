"""Asking an ASGI application without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")


# Only what hangs takes so long.
HANG_S = 120.0
SAID = [{"role": "user", "content": "a"}]


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    parts: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One request to an application; leave makes the client go away."""

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes,
        head: list[tuple[bytes, bytes]] | None = None,
        **headers: str,
    ) -> None:
        """head: header fields as they are, in the place of those by name."""
        fields = {"host": "localhost:8080", **{k.replace("_", "-"): v for k, v in headers.items()}}
        self._app = app
        self._scope = {"type": "http", "method": method, "path": path, "query_string": b""}
        self._scope["raw_path"] = path.encode()
        self._scope["headers"] = head or [(k.encode(), v.encode()) for k, v in fields.items()]
        self._incoming = [{"type": "http.request", "body": body, "more_body": False}]
        self._gone = asyncio.Event()
        self.reply = Reply(0, {}, [])

    def leave(self) -> None:
        self._gone.set()

    async def run(self) -> Reply:
        await self._app(self._scope, self._receive, self._send)
        return self.reply

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message.get("body"):
            self.reply.parts.append(message["body"])


def body_of(data: Any) -> bytes:
    """A body as it is, or what is sent as JSON."""
    return data if isinstance(data, bytes) else b"" if data is None else json.dumps(data).encode()


def ask(app: Any, path: str, data: Any = None, method: str = "", **headers: str) -> Reply:
    """One request from its start to its end."""
    method = method or ("GET" if data is None else "POST")

    async def once() -> Reply:
        return await Client(app, method, path, body_of(data), **headers).run()

    return asyncio.run(once())


def in_a_loop(line: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test of what only an event loop has."""

    @wraps(line)
    def run(*args: Any, **more: Any) -> None:
        asyncio.run(line(*args, **more))

    return run


def at_once(app: Any, path: str, *asked: Any) -> list[Any]:
    """The answers to several requests at once."""

    async def all_of() -> list[Any]:
        replies = [begun(app, path, each)[1] for each in asked]
        return [(await each).json() for each in replies]

    return asyncio.run(all_of())


async def end_of(task: asyncio.Task[Any]) -> Any:
    """What comes of it, in time."""
    return await asyncio.wait_for(task, HANG_S)


async def until(is_so: Callable[[], object]) -> None:
    """Waits until something is so."""

    async def come() -> None:
        while not is_so():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(come(), HANG_S)


def begun(
    app: Any, path: str, data: Any, kind: type[Client] = Client
) -> tuple[Client, asyncio.Task[Reply]]:
    """A POST that goes on: its client, and what comes of it. In an event loop."""
    client = kind(app, "POST", path, body_of(data))
    return client, asyncio.create_task(client.run())
