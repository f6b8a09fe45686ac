"""Runs the server: listens, loads the model in the background, and shuts down."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gguf_tools import interrupts
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.runtime.load import Progress
from orchestrator.serve.service import Service
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.wire import Refusal

CLOSE_S = 0.5  # how long open answers may take to end during shutdown
END_S = 1.2  # how long shutdown waits for threads inside llama.cpp
# The most open connections. Each takes some kilobytes and a file descriptor. OTHER_FILES
# descriptors stay free for the model's files, and each answer needs two more.
MOST_CONNECTIONS = 256
LEAST_CONNECTIONS = 4
OTHER_FILES = 48
# The limit of file descriptors if the system sets none or a larger one.
MOST_FILES = 4096
BACKLOG = 128
# Bytes of further requests that a client may send while it waits for an answer (pipelining).
MOST_PIPELINED_BYTES = 2**16


class Protocol(H11Protocol):
    """Extends uvicorn's HTTP protocol by timeouts for slow clients.

    A connection is closed if no complete request head arrives within patience_s seconds. When a
    connection is closed, the client has patience_s seconds to read the remaining data. After that
    the data is dropped. uvicorn itself only has a timeout for the first byte of the next request.
    """

    patience_s = 30.0
    most_connections = MOST_CONNECTIONS
    _waiting: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.app_state: dict[str, Any] = {**self.app_state, "abort": self._abort}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection and start its timeout, or send an error if too many are open."""
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.write(_full())
            self._close()
        else:
            self._wait_for_head()

    def _abort(self) -> None:
        """Close the connection at once. Unsent data is lost."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Process data from the client, and start or stop the timeout for the head of a request."""
        super().data_received(data)
        self._keep_reading()
        if self._awaits_head():
            self._wait_for_head()
        elif self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _keep_reading(self) -> None:
        """Keep reading from the connection while a complete request is being answered.

        uvicorn stops reading when the next request arrives early. It would then not notice that the
        client closes the connection.
        """
        if self._awaits_head() or self.conn.their_state is not h11.DONE:
            return
        if len(self.conn.trailing_data[0]) > MOST_PIPELINED_BYTES:
            self._abort()
        else:
            self.flow.resume_reading()

    def _awaits_head(self) -> bool:
        """Return whether the next data on the connection belongs to the head of a request."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        """Start the timeout for the head of the next request, unless the timeout already runs."""
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.patience_s, self._close_unused)

    def _close_unused(self) -> None:
        self._waiting = None
        if self._awaits_head() and not self.transport.is_closing():
            self._close()

    def on_response_complete(self) -> None:
        """Finish a request after its response is complete.

        If the connection is being closed, the client has patience_s seconds to read the rest of the
        response. After that the rest is dropped.
        """
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no further request has begun in time."""
        super().timeout_keep_alive_handler()
        self._close()

    def _close(self) -> None:
        """Close the connection after its data is sent, or after patience_s at the latest."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self.patience_s, self.transport.abort)


def _full() -> bytes:
    """Return the HTTP response for a client that connects while too many connections are open."""
    error = Refusal(503, "too many connections are open: try again later")
    body = json.dumps(error.as_object()).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Server(uvicorn.Server):
    """Changes uvicorn's server: it handles no signals, and survives a lack of file descriptors."""

    def __init__(self, config: uvicorn.Config, note: Callable[[str], None]) -> None:
        super().__init__(config)
        self._note, self._is_out = note, False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets, each with a queue of up to BACKLOG new connections.

        If accepting a connection fails, asyncio repeats it without a pause, as often as the queue
        is long. So asyncio gets the queue length 1, and this method then sets the real length on
        the sockets.
        """
        asyncio.get_running_loop().set_exception_handler(self._failed)
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    def _failed(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        if not str(what.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(what)
        elif not self._is_out:
            self._is_out = True
            self._note(
                "No file descriptors are left: new clients wait until others disconnect. "
                "Raise the limit with ulimit -n."
            )


def most_connections(parallel: int) -> int:
    """Return how many connections may be open at once.

    Also raises the process's limit of file descriptors up to MOST_FILES if the system allows it.
    `parallel` is the number of answers that may run at once, each of which needs two descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, files - OTHER_FILES - 2 * parallel))


def proxy_options(settings: ServeSettings) -> dict[str, Any]:
    """Return uvicorn's options for X-Forwarded-For headers, as keyword arguments.

    Only headers from a configured proxy are trusted. By default uvicorn would trust every client on
    this machine.
    """
    return {
        "proxy_headers": settings.trusted_proxy is not None,
        "forwarded_allow_ips": settings.trusted_proxy or "",
    }


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens on the host and port of the settings.

    Raises ConfigError if the address is not available.
    """
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        made = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
        # asyncio sets TCP_NODELAY only on sockets with a protocol number. Without it each answer on
        # a kept-alive connection waits about 40 ms for the client's delayed acknowledgement.
        return socket.socket(family, made.type, socket.IPPROTO_TCP, fileno=made.detach())
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise ConfigError(f"--host {host} --port {port}: {why}") from None


class Running:
    """Runs one HTTP server from its start to its shutdown.

    Call `run` on the main thread. Any thread may call `stop`.
    """

    def __init__(
        self,
        config: Config,
        settings: ServeSettings,
        note: Callable[[str], None],
        progress: Progress,
    ) -> None:
        """Check the settings and listen on the address. The model is loaded later, by `run`.

        `note` gets messages for the user at the terminal, and `progress` the progress of loading.
        Raises MoeEdgeError for wrong settings or a model file that cannot be read.
        """
        self._service = Service(config, settings, note)
        self._note, self._progress = note, progress
        self._socket = listen(settings)
        self._failure: BaseException | None = None
        self._stopped_s = float("inf")
        bounds = {
            "patience_s": settings.patience,
            "most_connections": most_connections(settings.parallel),
        }
        options = uvicorn.Config(
            self._service.app,
            http=type("Patient", (Protocol,), bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            **proxy_options(settings),
            timeout_graceful_shutdown=CLOSE_S,  # type: ignore[arg-type]
            backlog=1,
        )
        self._server = _Server(options, note)

    @property
    def url(self) -> str:
        """The server's URL, with the port that was chosen if the setting is 0."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> bool:
        """Load the model, and serve requests until `stop`, SIGINT or SIGTERM.

        Returns False if llama.cpp does not end a running request in time. The usage history is then
        saved, but nothing is freed, and the caller must end the process. Raises any error of
        loading the model, such as NativeError if llama.cpp's server core is missing.
        """
        loading = threading.Thread(target=self._load, name="load")
        url = self.url
        try:
            with interrupts.calling(self.stop, ending=True):
                self._note(f"Listening on {url}; the model is loading.")
                loading.start()
                asyncio.run(self._server.serve(sockets=[self._socket]))
        finally:
            self.stop()
            if loading.ident is not None:
                loading.join()
            self._socket.close()
            has_ended = self._service.close(self._stopped_s + END_S)
        if self._failure is not None:
            raise self._failure
        return has_ended

    def stop(self) -> None:
        """Tell the server to shut down, and return at once. `run` returns after the shutdown."""
        self._stopped_s = min(self._stopped_s, monotonic())
        self._server.should_exit = True
        self._service.stop()

    def _load(self) -> None:
        """Load the model.

        This runs on a thread; `run` raises its error after the server has stopped.
        """
        try:
            served = self._service.load(self._progress)
        except BaseException as error:  # noqa: BLE001 - run raises it
            self._failure = error
            self.stop()
            return
        if served is not None:
            self._note(f"{served.about.name} is ready at {self.url}/v1. Press Ctrl-C to stop.")
