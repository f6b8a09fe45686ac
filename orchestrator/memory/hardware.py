"""What this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from gguf_tools.process import private_bytes, usable_cores
from gguf_tools.units import format_size
from orchestrator.memory.footprint import PROCESS_BYTES

_HEADROOM_SHARE = 0.1
_HEADROOM_BYTES = (256 * 2**20, 2 * 2**30)


@dataclass(frozen=True, slots=True)
class Device:
    """Memory beside the host's that experts may live in. name: "cuda0", say; memory_bytes is
    what was free when it was found. flash: it computes the model's attention as flash attention."""

    name: str
    description: str
    memory_bytes: int
    total_bytes: int
    flash: bool = False

    @property
    def usable_bytes(self) -> int:
        """Free memory less a headroom for what draws the screen."""
        return _less_headroom(self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a probe found. memory_bytes is free memory, or what is left under a cgroup's limit where
    that is less; what the process itself has taken counts as free. device: where experts are to
    live, None for the host's memory."""

    memory_bytes: int
    device: Device | None = None

    @property
    def usable_bytes(self) -> int:
        """Free memory less a headroom for everything else that runs."""
        return _less_headroom(self.memory_bytes)


def _less_headroom(free: int) -> int:
    low, high = _HEADROOM_BYTES
    return max(0, free - min(max(int(free * _HEADROOM_SHARE), low), high))


def probe(device: Device | None = None) -> Machine:
    """Reads this machine; a device is given, since only the native library can see one."""
    free = psutil.virtual_memory().available
    for limit, used in _cgroup_limits():
        free = min(free, max(0, limit - used))
    return Machine(free + _own_bytes(), device)


def _own_bytes() -> int:
    """What this process takes already of what a plan counts for it, so that it is not counted
    twice. Another model that it has in memory is not in that."""
    return min(private_bytes(), PROCESS_BYTES)


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of every memory cgroup around this
    process; version 1 and 2."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif controllers == "":
            base, names = root, ("memory.max", "memory.current")
        else:
            continue
        folder = base / path.lstrip("/")
        while folder == base or base in folder.parents:
            found = _read_limit(folder, *names)
            if found is not None:
                limits.append(found)
            folder = folder.parent
    return limits


def _read_limit(folder: Path, limit_name: str, usage_name: str) -> tuple[int, int] | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / usage_name).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) >= 2**60:
        return None
    counters = dict(line.split(maxsplit=1) for line in stat if " " in line)
    prefix = "total_" if "total_inactive_file" in counters else ""
    droppable = sum(int(counters.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return int(limit), max(0, used - droppable)


def too_many_threads(threads: int | None) -> str | None:
    """A sentence for more compute threads than cores: they wait for each other at each product."""
    cores = usable_cores()
    if threads is None or threads <= cores:
        return None
    return (
        f"--threads {threads} on {cores} core{'s' * (cores != 1)} is many times slower than "
        f"--threads {cores}."
    )


def more_than_there(ram: int | None, machine: Machine) -> str | None:
    """A sentence for a cap that is no cap: the plan takes what is there."""
    if ram is None or ram <= machine.memory_bytes:
        return None
    free = format_size(machine.memory_bytes)
    return f"--ram {format_size(ram)} is more than the {free} that are free: those are the cap."
