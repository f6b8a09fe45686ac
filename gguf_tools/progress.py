"""How far a long piece of work has come."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

# It is called with the finished share, 0 to 1, on the thread that asked for the work.
Progress = Callable[[float], None]


@runtime_checkable
class SizedProgress(Protocol):
    """A Progress that also wants to know how many bytes all of them are."""

    total_bytes: int


class ProgressMeter:
    """Bytes done so far, reported as a share of the total."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = max(1, total)
        self.done = 0
        if isinstance(progress, SizedProgress):
            progress.total_bytes = total

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(min(1.0, self.done / self.total))
