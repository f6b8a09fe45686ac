"""What the benchmark asks of the operating system: a memory limit, and a cold page cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
GROUP_NAME = "moe-edge-bench"


def _limited(folder: Path, limit_bytes: int) -> None:
    """Makes a memory cgroup (version 1 or 2) with this limit. Raises OSError where that is not
    allowed."""
    folder.mkdir()
    try:
        old = (folder / "memory.limit_in_bytes").exists()
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit_bytes))
        # Without this, swap would take what the limit refuses.
        with contextlib.suppress(OSError):
            if old:
                (folder / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
            else:
                (folder / "memory.swap.max").write_text("0")
    except OSError:
        folder.rmdir()
        raise


def memory_folders(root: Path = CGROUP_ROOT, proc: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Cgroup folders below which a memory group may be made, likeliest first."""
    found = []
    for line in proc.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            found.append(root / "memory" / path.lstrip("/"))
        elif controllers == "" and (root / "cgroup.controllers").exists():
            own = root / path.lstrip("/")
            found += [own, own.parent] if own != root else [own]
    return [folder for folder in found if folder.is_dir()]


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | str]:
    """A memory cgroup with this limit: the file that takes the id of a process that enters it. It
    is removed on leaving, when its processes must have ended. A text is the reason why there is
    none."""
    reason = "no memory cgroup is mounted here"
    try:
        folders = memory_folders()
    except OSError as error:
        folders, reason = [], str(error)
    for parent in folders:
        for left_over in parent.glob(f"{GROUP_NAME}-*"):
            with contextlib.suppress(OSError):  # not one that is in use
                left_over.rmdir()
        folder = parent / f"{GROUP_NAME}-{os.getpid()}"
        try:
            _limited(folder, limit_bytes)
        except OSError as error:
            reason = f"a memory cgroup could not be made ({error.strerror}: {error.filename})"
            continue
        try:
            yield folder / "cgroup.procs"
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return
    yield reason


def forget_files(paths: Iterable[Path]) -> str:
    """Takes files out of the page cache. Returns "" or what could not be done."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        DROP_CACHES.write_text("3\n")
    except OSError as error:
        return f"only the model's own pages were dropped, not all of the cache ({error.strerror})"
    return ""
