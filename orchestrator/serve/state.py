"""What requests of a server share: its keys, places, threads, and the model once it is loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from time import time

from orchestrator.serve.admission import UNREAD_BYTES, Bodies, Gate, Seats, Unread
from orchestrator.serve.served import Served
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.wire import STOPPING, Refusal

_number = count(1)


class Stopped(Exception):
    """The server was told to end while it loaded a model or scored a prompt."""


class State:
    """What the application answers with.

    served: the model, once it is loaded. threads: how the names of the server's threads begin.
    all_metrics: returns the answer of `/metrics` for all servers, if this is one of several.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.threads = f"server{next(_number)}-"
        self.settings = settings
        keys = settings.keys()
        # Clients send a key that is not ASCII as UTF-8, and some as Latin-1.
        self.keys = frozenset(each for key in keys for each in _as_bytes(key))
        self.gate = Gate(settings.parallel, settings.queue)
        self.unread = Unread(UNREAD_BYTES)
        self.seats = Seats(settings.parallel)
        self.served: Served | None = None
        self.began_s = int(time())  # of the Unix clock
        self.stopping = False
        self.all_metrics: Callable[[], Awaitable[str]] | None = None
        # One for bodies, one for figures, one for scores.
        self.quick: Executor = ThreadPoolExecutor(3, f"{self.threads}quick")
        self.bodies = Bodies(self.quick, lambda: self.stopping)

    def ready(self) -> Served:
        """Return the model. Raises Refusal while it loads, if its file was written to, and at the
        end."""
        if self.stopping:
            raise STOPPING
        if self.served is None:
            raise Refusal(503, "the model is loading")
        self.check()
        return self.served

    def check(self) -> None:
        """Raises Refusal if the answers of the model cannot be right any more."""
        fault = self.served.runtime.fault() if self.served is not None else ""
        if fault:
            raise Refusal(503, fault)


def _as_bytes(key: str) -> Iterator[bytes]:
    yield key.encode("utf-8", "surrogateescape")
    with suppress(UnicodeEncodeError):
        yield key.encode("latin-1")
