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
    """Return the experts that are not in memory, in the order in which to read them.

    Each item is (layer, expert, tier), where tier is the policy's default precision. Experts with a
    larger share of their layer's tokens come first. If the policy wants whole layers, each layer is
    completed before the next layer begins. The result is empty for a policy that keeps all experts
    in memory.

    wants: the policy's requirements. resident: the best precision in memory of each expert, or
    ABSENT. used: how often tokens used each expert. Both arrays are [n_layers, n_expert].
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
    """Reads experts that will probably be used, in a background thread, while no request runs.

    Experts are read only into free slots, so nothing is evicted. After `start`, call `stop` before
    the model computes again. prefetched: number of experts that were read so far.
    """

    def __init__(self, store: Store) -> None:
        self.prefetched = 0
        self._store = store
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(
        self, wanted: Sequence[Transition], settle: Callable[[], None] = lambda: None
    ) -> None:
        """Start a thread that reads experts into free slots.

        wanted: (layer, expert, tier) of the experts, in the order of reading. settle: blocks until
        no step is being computed; the thread calls it first. If a read fails, the thread ends
        without an error.
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
        """End the thread that reads experts, and wait until it has ended. Safe on any thread.

        If an expert is being read, the store completes the read in the background.
        """
        thread = self._thread
        if thread is not None:
            with interrupts.held():  # else the store might stay cancelled
                self._stopping = True
                self._store.cancel(True)
                thread.join()
                # This also undoes a cancel by another thread. Driver.end_idle cancels again.
                self._store.cancel(False)
                self._thread = None

    def wait(self) -> None:
        """Wait until the thread has read all experts that were given to `start`, or has failed.

        For tests and measurements.
        """
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
