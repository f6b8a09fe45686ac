"""What all requests of a server share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from time import time

from orchestrator.serve.backend import UNREAD_BYTES, Backend
from orchestrator.serve.bodies import Bodies
from orchestrator.serve.gate import Gate, Unread
from orchestrator.serve.seats import Seats
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.wire import Refusal

_number = count(1)
STOPPING = Refusal(503, "the server is shutting down")


class State:
    """What the application answers with: the backend, once it has loaded. threads: how the names of
    its threads begin that are in llama.cpp for a request."""

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
        self.workers: Executor = ThreadPoolExecutor(settings.parallel, f"{self.threads}answer")
        self.quick: Executor = ThreadPoolExecutor(2, f"{self.threads}quick")
        self.scorer: Executor = ThreadPoolExecutor(1, f"{self.threads}score")
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
