"""A worker's calls run one after another, and their callers can be interrupted."""

import os
import signal
import threading
import time

import pytest
from waiting import HANG_S, wait_until

from gguf_tools import interrupts
from orchestrator.errors import ClosedError
from orchestrator.library.worker import Stops, Worker


@pytest.fixture
def worker():
    made = Worker("test")
    yield made
    made.end()
    made.join()


def press_when(is_so):
    """Sends SIGINT to this process once something is so."""

    def press():
        wait_until(is_so)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()


def test_it_returns_results_and_raises_errors(worker):
    assert worker.call(lambda: threading.current_thread().name) == "test"
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0)
    assert worker.call(lambda: worker.call(lambda: 7)) == 7  # a call inside of a call


def test_calls_of_many_threads_run_one_after_another(worker):
    running, most, done = [], [], []

    def work():
        running.append(1)
        most.append(len(running))
        time.sleep(0.001)
        running.pop()

    def caller():
        worker.call(work)
        done.append(1)

    threads = [threading.Thread(target=caller) for _ in range(20)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(done) == 20 and set(most) == {1}


def test_an_interrupted_call_ends_and_its_result_is_discarded(worker):
    began, discarded, stopped = threading.Event(), [], []
    before = signal.getsignal(signal.SIGINT)

    def work():
        began.set()
        wait_until(lambda: interrupts.asked())
        return "a result that nobody gets"

    press_when(began.is_set)
    with pytest.raises(KeyboardInterrupt):
        worker.call(work, stop=lambda: stopped.append(1), discard=discarded.append)
    assert discarded == ["a result that nobody gets"] and stopped == [1]
    assert signal.getsignal(signal.SIGINT) is before
    assert not interrupts.asked()
    assert worker.call(lambda: interrupts.asked()) is False


def test_an_interrupt_stops_native_work_that_runs(worker):
    stops, stopped = Stops(), threading.Event()

    def work():
        with stops.including(stopped.set):
            os.kill(os.getpid(), signal.SIGINT)
            assert stopped.wait(HANG_S)
        stopped.clear()
        stops()

    with pytest.raises(KeyboardInterrupt):
        worker.call(work, stops)
    assert not stopped.is_set()  # work that has ended is not stopped


def test_a_call_after_the_end_is_refused():
    """Another thread may have closed the model since the caller looked."""
    worker = Worker("test")
    worker.end()
    worker.join()
    with pytest.raises(ClosedError, match="this model is closed"):
        worker.call(lambda: 7)


def test_an_interrupt_is_raised_once_in_the_work(worker):
    """A signal interrupts the work once, as on the main thread. Code that cleans up still runs."""
    began, told = threading.Event(), []

    def work():
        began.set()
        try:
            with interrupts.held():
                wait_until(lambda: interrupts.asked())
                told.append("held")
        finally:
            interrupts.check()
            with interrupts.held():
                told.append("cleaned up")

    press_when(began.is_set)
    with pytest.raises(KeyboardInterrupt):
        worker.call(work)
    assert told == ["held", "cleaned up"]
