"""The driver waits for the store until its reads are done, or until a cancellation or signal."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from tables import cases

from gguf_tools import interrupts
from orchestrator.errors import NativeError
from orchestrator.policy.base import PolicyRequirements
from orchestrator.runtime.driver import Driver

LOW, HIGH = (np.full((1, 1), tier, np.uint8) for tier in (1, 0))


class Asking:
    """A policy that requests one expert."""

    wants = PolicyRequirements(waits=True)

    def warm(self, resident, target):
        return [(0, 0, 0)] if (resident == LOW).all() else None


class FakeStore:
    """A store with one expert in transition, which is complete after `looks` steps, or never if
    `looks` is None."""

    def __init__(self, looks, loading):
        self.looks, self.loading = looks, loading

    def states(self):
        return (HIGH if self.looks == 0 else LOW), HIGH

    def begin_step(self, _phase):
        self.looks = None if self.looks is None else self.looks - 1

    def limit(self, _n_bytes):
        self.begin_step(None)
        return int(self.looks != 0)

    def transition(self, moves):
        return len(moves)

    def stats(self):
        return SimpleNamespace(transitions_failed=0)

    def cancel(self, on):
        pass


def press():
    os.kill(os.getpid(), signal.SIGINT)


def limits(driver):
    driver._set_limit(1)


@cases(
    "waits, looks, loading, act, ends",
    (Driver.before_answer, 3, 1, None, None),
    (Driver.before_answer, None, 0, None, "none is running"),
    (Driver.before_answer, None, 1, "cancel", None),
    (Driver.before_answer, None, 1, "press", KeyboardInterrupt),
    (limits, 3, 1, None, None),
    (limits, 1, 0, None, None),  # the last read completed between two checks
    (limits, None, 0, None, "none is running"),
    (limits, None, 1, "cancel", "cancelled"),
    (limits, None, 1, "press", KeyboardInterrupt),
)
def test_every_wait_ends(waits, looks, loading, act, ends):
    driver = Driver(Asking(), FakeStore(looks, loading), lambda: None)
    if act is not None:
        driver._pause = press if act == "press" else lambda: driver.cancel(True)
    error = NativeError if isinstance(ends, str) else ends
    with interrupts.listening():
        if ends is None:
            return waits(driver)
        match = ends if error is NativeError else None
        # As in a C call: the signal is raised after the wait has ended.
        with pytest.raises(error, match=match), interrupts.held():
            waits(driver)
        interrupts.forget()
