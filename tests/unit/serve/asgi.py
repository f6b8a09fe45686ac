"""Requests to an ASGI application without a socket."""

import asyncio
import json
from dataclasses import dataclass
from functools import wraps

import pytest

pytest.importorskip("starlette", reason="starlette is missing: run `make build`")


# Timeout in seconds. Only a deadlock takes this long.
HANG_S = 120.0
SAID = [{"role": "user", "content": "a"}]


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    parts: list[bytes]

    @property
    def body(self):
        return b"".join(self.parts)

    def json(self):
        return json.loads(self.body)


class Client:
    """One request to an application. `leave` disconnects the client."""

    def __init__(self, app, method, path, body, head=None, **headers):
        """head: raw header fields, instead of those given by name."""
        fields = {"host": "localhost:8080", **{k.replace("_", "-"): v for k, v in headers.items()}}
        self._app = app
        self._scope = {"type": "http", "method": method, "path": path, "query_string": b""}
        self._scope["raw_path"] = path.encode()
        self._scope["headers"] = head or [(k.encode(), v.encode()) for k, v in fields.items()]
        self._incoming = [{"type": "http.request", "body": body, "more_body": False}]
        self._gone = asyncio.Event()
        self.reply = Reply(0, {}, [])

    def leave(self):
        self._gone.set()

    async def run(self):
        await self._app(self._scope, self._receive, self._send)
        return self.reply

    async def _receive(self):
        if self._incoming:
            return self._incoming.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message.get("body"):
            self.reply.parts.append(message["body"])


def body_of(data):
    """Return bytes unchanged, and other data as JSON."""
    return data if isinstance(data, bytes) else b"" if data is None else json.dumps(data).encode()


def ask(app, path, data=None, method="", **headers):
    """Send one request and return its whole reply."""
    method = method or ("GET" if data is None else "POST")

    async def once():
        return await Client(app, method, path, body_of(data), **headers).run()

    return asyncio.run(once())


def in_a_loop(line):
    """Decorator: run a test in an event loop."""

    @wraps(line)
    def run(*args, **more):
        asyncio.run(line(*args, **more))

    return run


def at_once(app, path, *asked):
    """Return the JSON replies of several requests that are sent at once."""

    async def all_of():
        replies = [begun(app, path, each)[1] for each in asked]
        return [(await each).json() for each in replies]

    return asyncio.run(all_of())


async def end_of(task):
    """Return the task's result, or fail after HANG_S."""
    return await asyncio.wait_for(task, HANG_S)


async def until(is_so):
    """Wait until the condition `is_so` is true, or fail after HANG_S."""

    async def come():
        while not is_so():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(come(), HANG_S)


def begun(app, path, data, kind=Client):
    """Start a POST request and return its client and its task. Needs a running event loop."""
    client = kind(app, "POST", path, body_of(data))
    return client, asyncio.create_task(client.run())
