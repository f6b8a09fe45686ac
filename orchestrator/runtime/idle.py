"""Reads experts that are likely to be used into free slots while no request runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from gguf_tools import interrupts
from orchestrator.allocation.slots import Transition
from orchestrator.events import ABSENT
from orchestrator.native import Store
from orchestrator.policy.base import Wants


def likely(wants: Wants, resident: np.ndarray, used: np.ndarray) -> Sequence[Transition]:
    """Experts to read into free slots while nothing is asked for, the likeliest first: those that
    are absent, by the share of its layer's uses that each had; none where all are there. Where
    the policy wants whole layers, layer by layer from the first on.

    resident: uint8 [n_layers, n_expert] as of StepReport. used: how often tokens used each expert,
    not negative, [n_layers, n_expert]; where nobody did, they come last, by layers.
    """
    if wants.all_resident:
        return ()
    share = used / np.maximum(used.sum(axis=1, keepdims=True), 1e-300)
    order = np.argsort(-share, axis=None, kind="stable")
    layers, experts = np.unravel_index(order, share.shape)
    absent = np.flatnonzero(resident[layers, experts] == ABSENT)
    if wants.whole_layers:
        absent = absent[np.argsort(layers[absent], kind="stable")]
    pairs = zip(layers[absent].tolist(), experts[absent].tolist(), strict=True)
    return [(layer, expert, wants.default_tier) for layer, expert in pairs]


class Idle:
    """Reads experts in a thread of its own, one after the other, the likeliest first.

    An expert is read into free slots or not at all: nothing is evicted for it, so experts that are
    used more stay, and no memory but the slots is taken. No step may begin before stop has
    returned.

    brought: the number of experts that were read since the start.
    """

    def __init__(self, store: Store) -> None:
        self.brought = 0
        self._store = store
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(
        self, wanted: Sequence[Transition], settle: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to read these experts, and end after the last one or at the first one that cannot
        be read: the token that needs that expert says why. settle: returns when no step runs any
        more."""
        self.stop()
        if not wanted:
            return
        self._stopping = False
        with interrupts.held():  # else stop might find a thread that was never started
            self._thread = threading.Thread(
                target=self._run, args=(wanted, settle), name="while idle", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread's work, and returns when the thread has ended. From any thread.

        The thread stops waiting for the expert that it reads: the store completes that read in the
        background. The store is not cancelled afterwards, whatever it was before.
        """
        thread = self._thread
        if thread is not None:
            with interrupts.held():  # else the store might stay cancelled
                self._stopping = True
                self._store.cancel(True)
                thread.join()
                self._store.cancel(False)
                self._thread = None

    def wait(self) -> None:
        """Until everything was looked at. For tests and measurements."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, wanted: Sequence[Transition], settle: Callable[[], None]) -> None:
        settle()
        for each in wanted:
            if self._stopping:
                return
            found = self._store.bring(*each)
            if found is None:
                return
            self.brought += found
