"""Jobs on all cores with bounded memory, stopped by the first error."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from gguf_tools.progress import ProgressMeter

# A job is a piece of work that returns the number of bytes it has dealt with.
Job = Callable[[], int]


def run_all(jobs: Iterable[Job | None], threads: int, meter: ProgressMeter) -> None:
    """Run all jobs on a pool, a few ahead at a time; the first error stops the rest. Jobs before
    a None have ended before those behind it begin.

    The pool has ended when this returns or raises, Ctrl-C included, so that nobody writes to a
    file that the caller has given up.
    """
    pending: set[Future[int]] = set()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="pack")
    try:
        for job in jobs:
            if job is not None:
                pending.add(pool.submit(job))
            while len(pending) >= 2 * threads + 2 or (job is None and pending):
                pending = _collect(pending, meter)
        while pending:
            pending = _collect(pending, meter)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(pending: set[Future[int]], meter: ProgressMeter) -> set[Future[int]]:
    finished, rest = wait(pending, return_when=FIRST_COMPLETED)
    for future in finished:
        meter.add(future.result())
    return rest
