"""What this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_HEADROOM_SHARE = 0.1
_HEADROOM_BYTES = (256 * 2**20, 2 * 2**30)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a probe found. memory_bytes is free memory, or what is left under a cgroup's
    limit where that is less."""

    memory_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Free memory less a headroom for everything else that runs."""
        low, high = _HEADROOM_BYTES
        headroom = min(max(int(self.memory_bytes * _HEADROOM_SHARE), low), high)
        return max(0, self.memory_bytes - headroom)


def probe() -> Machine:
    """Reads this machine."""
    free = psutil.virtual_memory().available
    for limit, used in _cgroup_limits():
        free = min(free, max(0, limit - used))
    return Machine(free)


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
