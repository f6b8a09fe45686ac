"""Jobs on all cores with bounded memory, stopped by the first error."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from gguf_tools import interrupts
from gguf_tools.progress import ProgressMeter

# A job is a piece of work that returns the number of bytes it has dealt with.
Job = Callable[[], int]

_LOOK_S = 0.1

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def workers(threads: int, name: str = "work") -> Iterator[ThreadPoolExecutor]:
    """A pool that has ended when the block has, Ctrl-C included; what did not begin by then never
    does.

    Whoever waits for a pool holds locks that its threads want, so no interrupt may be raised there:
    wait by in_order, which looks for one.
    """
    with interrupts.held():
        pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T]
) -> Iterator[R]:
    """What the function makes of each item, in their order. Raises what it raises."""
    for future in [pool.submit(function, item) for item in items]:
        while not wait([future], timeout=_LOOK_S).done:
            interrupts.check()
        interrupts.check()
        yield future.result()


def run_all(jobs: Iterable[Job | None], threads: int, meter: ProgressMeter) -> None:
    """Run all jobs on a pool, a few ahead at a time; the first error stops the rest. Jobs before
    a None have ended before those behind it begin.

    The pool has ended when this returns or raises, Ctrl-C included, so that nobody writes to a
    file that the caller has given up.
    """
    pending: set[Future[int]] = set()
    with workers(threads, "pack") as pool:
        for job in jobs:
            if job is not None:
                pending.add(pool.submit(job))
            while len(pending) >= 2 * threads + 2 or (job is None and pending):
                pending = _collect(pending, meter)
        while pending:
            pending = _collect(pending, meter)


def _collect(pending: set[Future[int]], meter: ProgressMeter) -> set[Future[int]]:
    finished, rest = wait(pending, _LOOK_S, FIRST_COMPLETED)
    interrupts.check()
    for future in finished:
        meter.add(future.result())
    return rest
