"""Run jobs on a thread pool with bounded memory, stopping at the first error."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from gguf_tools import interrupts
from gguf_tools.progress import ProgressMeter

# A job does a piece of work and returns the number of bytes that it has processed.
Job = Callable[[], int]

# How often a thread that waits for a pool checks for an interrupt.
_POLL_S = 0.1

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def workers(threads: int, name: str = "work") -> Iterator[ThreadPoolExecutor]:
    """Create a thread pool for the duration of the `with` block.

    At the end of the block, jobs that have not started are cancelled and running jobs are awaited.
    In the block, interrupts such as Ctrl-C raise no exception. The exception is raised at the end
    of the block, or earlier by a call of `interrupts.check`. The function `in_order` of this module
    makes such calls while it waits for results.

    threads: number of threads.
    name: prefix of the names of the threads.
    """
    # The thread that waits for the pool holds locks that the threads of the pool need. Therefore no
    # interrupt may be raised there.
    with interrupts.held():
        pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T]
) -> Iterator[R]:
    """Apply a function to each item on the pool and yield the results in the order of the items.

    Raises the function's exception, or KeyboardInterrupt.
    """
    for future in [pool.submit(function, item) for item in items]:
        while not wait([future], timeout=_POLL_S).done:
            interrupts.check()
        interrupts.check()
        yield future.result()


def run_all(jobs: Iterable[Job | None], threads: int, meter: ProgressMeter) -> None:
    """Run all jobs on a thread pool. The first error cancels the remaining jobs.

    Only a few jobs are taken from the iterable ahead of time. A None among the jobs is a barrier:
    all jobs before it end before the next one starts. All threads have ended when this function
    returns or raises.

    meter: counts the numbers of bytes that the jobs return.
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
    finished, rest = wait(pending, _POLL_S, FIRST_COMPLETED)
    interrupts.check()
    for future in finished:
        meter.add(future.result())
    return rest
