"""What requests of a server share: its keys, places, threads, and the model once it is there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from time import time

from orchestrator.serve.admission import UNREAD_BYTES, Bodies, Gate, Seats, Unread
from orchestrator.serve.backend import Backend
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.wire import STOPPING, Refusal

_number = count(1)


class State:
    """What the application answers with: the backend, once it has loaded. threads: how the names of
    its threads begin that are in llama.cpp for a request. all_metrics: what `/metrics` says, where
    this is one server of several."""

    def __init__(self, settings: ServeSettings) -> None:
        self.threads = f"server{next(_number)}-"
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
        self.all_metrics: Callable[[], Awaitable[str]] | None = None
        self.workers: Executor = ThreadPoolExecutor(settings.parallel, f"{self.threads}answer")
        self.quick: Executor = ThreadPoolExecutor(2, f"{self.threads}quick")
        self.bodies = Bodies(self.quick, lambda: self.stopping)

    def ready(self) -> Backend:
        """Raises Refusal while the model loads, where its file was written to, and at the end."""
        if self.stopping:
            raise STOPPING
        if self.backend is None:
            raise Refusal(503, "the model is loading")
        self.check()
        return self.backend

    def check(self) -> None:
        """Raises Refusal where what the model answers is not to be trusted any more."""
        fault = self.backend.fault() if self.backend is not None else ""
        if fault:
            raise Refusal(503, fault)


def _as_bytes(key: str) -> Iterator[bytes]:
    yield key.encode("utf-8", "surrogateescape")
    with suppress(UnicodeEncodeError):
        yield key.encode("latin-1")
