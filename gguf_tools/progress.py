"""Report the progress of long operations."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

# A callback that receives the finished share, 0 to 1. It is called on the thread that started the
# work.
Progress = Callable[[float], None]


@runtime_checkable
class SizedProgress(Protocol):
    """A progress callback that needs to know the total number of bytes.

    ProgressMeter sets the attribute total_bytes before it calls the callback.
    """

    total_bytes: int


class ProgressMeter:
    """Counts processed bytes and calls a progress callback with their share of the total."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = max(1, total)
        self.done = 0
        if isinstance(progress, SizedProgress):
            progress.total_bytes = total

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more bytes as processed, and call the callback with the new share."""
        self.done += nbytes
        if self.progress is not None:
            self.progress(min(1.0, self.done / self.total))
