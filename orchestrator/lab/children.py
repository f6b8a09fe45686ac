"""Processes of our own that are told what to do as JSON on stdin and answer with a JSON line on
stdout: what one of them measures of its memory and speed is its own. And what they are given by the
operating system: a memory limit, and a cold page cache."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gguf_tools.children import child
from orchestrator.errors import BudgetError, MoeEdgeError

Result = dict[str, Any]


def run_child(
    module: str,
    told: Any,
    seconds: float | None = None,
    enter: Callable[[], object] | None = None,
) -> Result:
    """What `python -m module` answers that is told a record, or {"error": a sentence}. seconds: the
    longest time that it may take; enter: what the process calls before Python starts."""
    try:
        with child(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            errors="replace",
            preexec_fn=enter,
        ) as process:
            out, err = process.communicate(json.dumps(asdict(told)), timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"still not done after {seconds:.0f} s"}
    status = process.returncode
    if status == -signal.SIGKILL:
        return {"error": "the process was killed, as the kernel does where memory is short"}
    if status < 0:
        return {"error": f"the process died of {signal.Signals(-status).name}"}
    if status or not out.strip():
        last = err.strip().splitlines()[-1:] or [f"status {status}"]
        return {"error": f"the process failed: {last[0]}"}
    result: Result = json.loads(out.strip().splitlines()[-1])
    return result


def answer(run: Callable[[Any], Result]) -> None:
    """What such a process does: gives run what it was told, and writes what that returns, or
    {"error": a sentence}."""
    try:
        result = run(json.load(sys.stdin))
    except MoeEdgeError as error:
        result = {"error": str(error)}
        if isinstance(error, BudgetError):
            result["needed_bytes"] = error.needed_bytes
    print(json.dumps(result))


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


def memory_folders() -> list[Path]:
    """Cgroup folders below which a memory group may be made, likeliest first."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            found.append(CGROUP_ROOT / "memory" / path.lstrip("/"))
        elif controllers == "" and (CGROUP_ROOT / "cgroup.controllers").exists():
            own = CGROUP_ROOT / path.lstrip("/")
            found += [own, own.parent] if own != CGROUP_ROOT else [own]
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
