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


class OtherWork:
    """What other programs take of the cores that this process may use, from here on. What a
    machine's owner takes of a virtual one counts as theirs, where the system tells it."""

    def __init__(self) -> None:
        self._start = _work_s()

    def cores(self) -> float:
        """How many of these cores were busy with something else, the mean since the start."""
        now, busy, own = (end - start for end, start in zip(_work_s(), self._start, strict=True))
        return max(0.0, busy - own) / now if now > 0 else 0.0


def _work_s() -> tuple[float, float, float]:
    """Seconds: of a clock, of work on the usable cores, and of this process' own work."""
    try:
        cores = psutil.cpu_times(percpu=True)
    except OSError:
        cores = []  # a sandbox that does not tell
    if hasattr(os, "sched_getaffinity"):
        cores = [cores[at] for at in os.sched_getaffinity(0) if at < len(cores)]
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    busy = sum(getattr(core, kind, 0.0) for core in cores for kind in kinds)
    own = os.times()
    return perf_counter(), busy, own.user + own.system


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


def private_bytes() -> int:
    """What this process has in memory now that is not of files, which programs share."""
    taken = psutil.Process().memory_info()
    return max(0, int(taken.rss) - int(getattr(taken, "shared", taken.rss)))
