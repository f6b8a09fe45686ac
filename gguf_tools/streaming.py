"""Jobs on all cores with bounded memory, stopped by the first error; files read in pieces."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .reader import GGUFFile

CHUNK_BYTES = 8 << 20

# A piece of work that returns the bytes it wrote.
Job = Callable[[], int]
# Called with the finished share, 0 to 1, on the calling thread.
Progress = Callable[[float], None]


@runtime_checkable
class Sized(Protocol):
    """A Progress that also wants to know of how many bytes it is told the shares."""

    total_bytes: int


class Meter:
    """Bytes done so far, reported as a share of the total."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = max(1, total)
        self.done = 0
        if isinstance(progress, Sized):
            progress.total_bytes = total

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(min(1.0, self.done / self.total))


def chunks(
    file: GGUFFile, offset: int, nbytes: int
) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]]:
    """(start, view) pieces of a byte range of a file, in order."""
    for start in range(0, nbytes, CHUNK_BYTES):
        yield start, file.bytes_at(offset + start, min(CHUNK_BYTES, nbytes - start))


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes, hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def run_all(jobs: Iterable[Job | None], threads: int, meter: Meter) -> None:
    """Run all jobs on a pool, a few ahead at a time; the first error stops the rest. Those before
    a None have ended before those behind it begin.

    The pool has ended when this returns or raises, Ctrl-C included: nobody writes to a
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


def _collect(pending: set[Future[int]], meter: Meter) -> set[Future[int]]:
    finished, rest = wait(pending, return_when=FIRST_COMPLETED)
    for future in finished:
        meter.add(future.result())
    return rest
