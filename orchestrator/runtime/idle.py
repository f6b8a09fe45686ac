"""Reads experts that are likely to be used into free slots while no request runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from gguf_tools import interrupts
from orchestrator.allocation.slots import Transition
from orchestrator.events import ABSENT
from orchestrator.native import Store
from orchestrator.policy.base import PolicyRequirements


def likely(
    wants: PolicyRequirements, resident: np.ndarray, used: np.ndarray
) -> Sequence[Transition]:
    """Return the absent experts in the order in which to read them into free slots.

    The order is by each expert's share of its layer's uses, the likeliest first. If the policy
    wants whole layers, it is layer by layer from the first one on. Experts that were never used
    come last. resident: as StepReport.resident. used: how often tokens used each expert, not
    negative, [n_layers, n_expert].
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
    """Reads experts in a thread, one after another, the likeliest first.

    An expert is read into free slots only: nothing is evicted for it. No step may begin before
    `stop` has returned. prefetched: the number of experts that were read since the start.
    """

    def __init__(self, store: Store) -> None:
        self.prefetched = 0
        self._store = store
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(
        self, wanted: Sequence[Transition], settle: Callable[[], None] = lambda: None
    ) -> None:
        """Start to read experts.

        Reading ends after the last one or at the first one that fails; the token that needs that
        expert reports why. settle: returns when no step is computed.
        """
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
        """End the thread, and return when it has ended. Any thread may call it.

        The thread does not wait for the expert that it reads: the store completes that read in the
        background. Afterwards the store is not cancelled, even if it was before.
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
        """Wait for the end of the thread. For tests and measurements."""
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
            self.prefetched += found
