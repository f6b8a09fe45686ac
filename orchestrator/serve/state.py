"""State that all requests share: keys, queues, threads, and the loaded model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from time import time

from orchestrator.serve.admission import UNREAD_BYTES, Bodies, Gate, SlotManager, UnreadAnswers
from orchestrator.serve.changes import ModelChanges
from orchestrator.serve.served import Served
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.wire import STOPPING, Refusal

_number = count(1)


class Stopped(Exception):
    """Raised if the server shuts down while a model loads or a prompt is scored."""


class State:
    """Everything that the requests of one server share: the model, keys, queues and threads.

    `served` is the model, or None while no model is loaded. `absence` then says why. `users` is the
    number of requests that may be using the model. `changes` exists with --allow-model-change:
    it downloads models and changes the loaded one. `threads` is the prefix of the names of the
    server's threads. `all_metrics` returns the metrics of all replicas if the server is part of a
    fleet. `began_s` is the Unix time of the start.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.threads = f"server{next(_number)}-"
        self.settings = settings
        keys = settings.keys()
        # Most clients encode a non-ASCII key as UTF-8, some as Latin-1. Accept both.
        self.keys = frozenset(each for key in keys for each in _as_bytes(key))
        self.gate = Gate(settings.parallel, settings.queue)
        self.unread = UnreadAnswers(UNREAD_BYTES)
        self.slots = SlotManager(settings.parallel)
        self.served: Served | None = None
        self.absence = "the model is loading"
        self.users = 0
        self.changes: ModelChanges | None = None
        self.began_s = int(time())
        self.stopping = False
        self.all_metrics: Callable[[], Awaitable[str]] | None = None
        # Three threads: one for bodies, one for metrics and other queries, one for scoring.
        self.quick: Executor = ThreadPoolExecutor(3, f"{self.threads}quick")
        self.bodies = Bodies(self.quick, lambda: self.stopping)

    def ready(self) -> Served:
        """Return the loaded model.

        Raises Refusal (an error response) while the model loads, during shutdown, and if the model
        file has changed.
        """
        if self.stopping:
            raise STOPPING
        if self.served is None:
            raise Refusal(503, self.absence)
        self.check()
        return self.served

    def check(self) -> None:
        """Raise Refusal (an error response) if the model can no longer answer correctly.

        This happens if the model file has changed.
        """
        fault = self.served.runtime.fault() if self.served is not None else ""
        if fault:
            raise Refusal(503, fault)


def _as_bytes(key: str) -> Iterator[bytes]:
    yield key.encode("utf-8", "surrogateescape")
    with suppress(UnicodeEncodeError):
        yield key.encode("latin-1")
