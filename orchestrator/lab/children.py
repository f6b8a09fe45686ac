"""Runs jobs in child processes, with a memory limit and a cold page cache if needed.

A child receives its job as JSON on stdin, and answers with a line of JSON on stdout. It can thus
measure its own memory and speed.
"""

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
from time import monotonic
from typing import Any

from gguf_tools import interrupts
from gguf_tools.children import child
from orchestrator.errors import BudgetError, MoeEdgeError

Result = dict[str, Any]
# While waiting for a child process, check for an interrupt after this many seconds.
_LOOK_S = 0.5


def run_child(
    module: str,
    job: Any,
    seconds: float | None = None,
    enter: Callable[[], object] | None = None,
) -> Result:
    """Run a Python module in a child process with a job, and return its result.

    The module calls `answer`, which reads the job as JSON and prints the result. `seconds` is the
    time limit. `enter` is called in the child before Python starts. Returns {"error": message} if
    the process fails or is ended.
    """
    try:
        with child(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            errors="replace",
            preexec_fn=enter,
        ) as process:
            out, err = _answered(process, json.dumps(asdict(job)), seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"the process exceeded its time limit of {seconds:.0f} s"}
    status = process.returncode
    if status == -signal.SIGKILL:
        return {"error": "the process was killed (SIGKILL), probably because memory ran out"}
    if status < 0:
        return {"error": f"the process was ended by {signal.Signals(-status).name}"}
    if status or not out.strip():
        last = err.strip().splitlines()[-1:] or [f"status {status}"]
        return {"error": f"the process failed: {last[0]}"}
    result: Result = json.loads(out.strip().splitlines()[-1])
    return result


def _answered(process: subprocess.Popen[str], job: str, seconds: float | None) -> tuple[str, str]:
    """Send the job to a child process, and return its output on stdout and stderr.

    Raises TimeoutExpired after `seconds`. Raises the interrupt (such as Ctrl-C) of this thread if
    it arrives during the wait.
    """
    end_s = monotonic() + (seconds or 0.0)
    text: str | None = job
    while True:
        interrupts.check()
        try:
            return process.communicate(text, timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            text = None  # the job is already sent
            if seconds is not None and monotonic() > end_s:
                raise subprocess.TimeoutExpired(process.args, seconds) from None


def answer(run: Callable[[Any], Result]) -> None:
    """Read a job from stdin, perform it with `run`, and print the result as JSON.

    A child process that run_child started calls this. If `run` raises MoeEdgeError, the result is
    {"error": message}.
    """
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


def _create_limited_group(folder: Path, limit_bytes: int) -> None:
    """Create a cgroup (version 1 or 2) that limits the memory of its processes.

    Raises OSError if that is not permitted.
    """
    folder.mkdir()
    try:
        old = (folder / "memory.limit_in_bytes").exists()
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit_bytes))
        # Limit swap as well. Otherwise the process would swap instead of hitting the limit.
        with contextlib.suppress(OSError):
            if old:
                (folder / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
            else:
                (folder / "memory.swap.max").write_text("0")
    except OSError:
        folder.rmdir()
        raise


def memory_folders() -> list[Path]:
    """Return the folders in which this process can try to create a cgroup with a memory limit.

    A cgroup is a group of processes whose memory Linux limits. The caller should try the folders in
    this order, because the system may refuse some of them.
    """
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
    """Create a cgroup with a memory limit, and yield the path of its file for process ids.

    A process whose id is written to the file is limited. At the end of the `with` block, the cgroup
    is removed. Its processes must have ended before. If the cgroup cannot be created, the reason is
    yielded as a string.
    """
    reason = "no memory cgroup is mounted here"
    try:
        folders = memory_folders()
    except OSError as error:
        folders, reason = [], str(error)
    for parent in folders:
        for left_over in parent.glob(f"{GROUP_NAME}-*"):
            with contextlib.suppress(OSError):  # a cgroup that has processes cannot be removed
                left_over.rmdir()
        folder = parent / f"{GROUP_NAME}-{os.getpid()}"
        try:
            _create_limited_group(folder, limit_bytes)
        except OSError as error:
            reason = f"a memory cgroup cannot be created ({error.strerror}: {error.filename})"
            continue
        try:
            yield folder / "cgroup.procs"
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return
    yield reason


def forget_files(paths: Iterable[Path]) -> str:
    """Evict files from the page cache, so that later reads use the disk.

    Evicts the whole page cache if the system permits it, and then returns "". If not, only these
    files are evicted, and the result is a message that says why.
    """
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        DROP_CACHES.write_text("3\n")
    except OSError as error:
        return f"only the model's pages were evicted, not the whole page cache ({error.strerror})"
    return ""
