"""Running the server: a socket, a model that loads behind it, and a clean end."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gguf_tools import interrupts
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.llama import Bindings
from orchestrator.serve.app import State, application
from orchestrator.serve.backend import Backend, Stopped
from orchestrator.serve.library import server_library
from orchestrator.serve.settings import ServeSettings

CLOSE_S = 1  # that open answers get at the end
# How long one of Python's threads may keep the others waiting.
SWITCH_S = 0.0005


class Protocol(H11Protocol):
    """uvicorn's, which closes a connection on which the head of a request does not come.

    uvicorn itself bounds the time between two requests, until the first byte of the next one.
    """

    patience_s = 30.0
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._awaits_head():
            self._wait_for_head()
        elif self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        """From the first byte on, however many follow."""
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.patience_s, self._close_unused)

    def _close_unused(self) -> None:
        self._waiting = None
        if self._awaits_head() and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's, which leaves the signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(settings: ServeSettings) -> socket.socket:
    """A socket that listens. Raises ConfigError where the address cannot be had."""
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(128)
        except BaseException:
            made.close()
            raise
        return made
    except OSError as error:
        raise ConfigError(
            f"--host {settings.host} --port {settings.port}: {error.strerror}"
        ) from None


class Running:
    """One server from its start to its end. run is for the main thread, stop for any."""

    def __init__(
        self,
        config: Config,
        settings: ServeSettings,
        note: Callable[[str], None],
        progress: Callable[[float], None],
    ) -> None:
        """note gets lines for the person at the terminal. Raises MoeEdgeError: the settings are
        wrong, there is no such model, or the native server cannot be built."""
        # Before some minutes of building, and before anybody is told to wait.
        ExpertModel.open(config.model, config.low).close()
        self._config, self._settings = config, settings
        self._note, self._progress = note, progress
        self._state = State(settings)
        self._socket = listen(settings)
        try:
            self._library = server_library(Bindings.load())
        except BaseException:
            self._socket.close()
            raise
        self._failure: BaseException | None = None
        options = uvicorn.Config(
            application(self._state, note),
            http=type("Patient", (Protocol,), {"patience_s": settings.patience}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = _Server(options)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serves until stop, SIGINT or SIGTERM; loads the model meanwhile.

        Raises what loading raised.
        """
        # Policies decide in Python between the layers of a step: they wait for the event loop no
        # longer than this.
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        loading = threading.Thread(target=self._load, name="load")
        url = self.url
        try:
            with interrupts.calling(self.stop, ending=True):
                self._note(f"Listening on {url}; the model loads.")
                loading.start()
                asyncio.run(self._server.serve(sockets=[self._socket]))
        finally:
            self.stop()
            sys.setswitchinterval(before)
            if loading.ident is not None:
                loading.join()
            self._close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends the server soon."""
        self._state.stopping = True
        self._server.should_exit = True
        backend = self._state.backend
        if backend is not None:
            backend.stop()

    def _load(self) -> None:
        try:
            backend = Backend(self._config, self._settings, self._library, self._loaded_share)
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - run raises it
            self._failure = error
            self.stop()
            return
        self._state.backend = backend
        if self._state.stopping:
            backend.stop()
            return
        engine = backend.engine
        if engine.note:
            self._note(engine.note)
        self._note(engine.mode)
        self._note(f"{backend.name} is ready at {self.url}/v1; Ctrl-C ends it.")

    def _loaded_share(self, done: float) -> None:
        if self._state.stopping:
            raise Stopped
        self._progress(done)

    def _close(self) -> None:
        state = self._state
        for workers in (state.workers, state.quick, state.scorer):
            workers.shutdown()
        self._socket.close()
        if state.backend is not None:
            state.backend.close()
