"""What this process may use of the machine's cores, and what it has used of its memory."""

import os
import platform
import sys
from pathlib import Path
from time import perf_counter

import psutil


def processor_name() -> str:
    """The processor as a person knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use, hardware threads counted each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Cores that computing should use: the physical ones where there are many, and no more than
    this process may use."""
    allowed = usable_cores()
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical) if allowed > 4 else allowed)


def compute_threads(asked: int | None) -> int:
    """Return the number of compute threads to use: `asked`, capped at the usable cores, or the
    default if `asked` is None. Threads beyond the cores wait for each other at every barrier, and a
    token then takes minutes."""
    return min(asked, usable_cores()) if asked else default_threads()


class Disturbance:
    """How much other programs keep this process from its cores, from here on."""

    def __init__(self) -> None:
        self._start, self._waited_s = perf_counter(), _waited_s()

    def share(self) -> float:
        """Of the time since then, what threads of this process were ready to run and had no core,
        added up; 0 where the system does not tell, as on others than Linux."""
        took = perf_counter() - self._start
        return max(0.0, _waited_s() - self._waited_s) / took if took > 0 else 0.0


def _waited_s(tasks: Path = Path("/proc/self/task")) -> float:
    total = 0
    for task in tasks.glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # a thread that is gone, or a kernel that does not count
    return total / 1e9


def peak_rss_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most memory that this program ever had resident.

    VmHWM says it where there is one. The figure of getrusage survives exec, so that it may be
    that of the program which started this one.
    """
    try:
        for line in status.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "VmHWM":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """What this process has in memory now."""
    return int(psutil.Process().memory_info().rss)


def private_bytes() -> int:
    """What this process has in memory now that is not of files, which programs share."""
    taken = psutil.Process().memory_info()
    return max(0, int(taken.rss) - int(getattr(taken, "shared", taken.rss)))
