"""`kill -9` at chosen moments.

Work runs in a forked child that kills itself, without cleanup, at the N-th call of our modules'
functions. A moment is therefore a place in the work, not a time. It is the same on a fast and on a
busy machine, and every call is equally likely.

    total = calls_of(work, "gguf_tools.file.writer")
    for at in moments(total, 20, seed=0):
        killed(work, at, "gguf_tools.file.writer")
        ...  # check what is left

Only calls in the named modules and packages count. Name those that write. Otherwise most moments
fall into the reading before.
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback
from itertools import count
from random import Random


def moments(total, n, seed):
    """Return n numbers from 1 to total, in order.

    They include the last calls, which name the files.
    """
    random = Random(seed)
    late = [total - each for each in range(min(total, max(1, n // 4)))]
    return sorted(late + [random.randint(1, total) for _ in range(n - len(late))])


def calls_of(work, *modules):
    """Return the number of calls in these modules while the work runs, in all threads.

    It is about the same each time. Raises AssertionError if the work fails.
    """
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as result:
        pid = _fork(work, modules, None, writer)
        os.close(writer)
        text = result.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the work ended with status {status}"
    return int(text)


def killed(work, at, *modules):
    """Run the work in a child that is killed at call number `at`.

    Return False if the work ended before. Raises AssertionError if it fails otherwise.
    """
    pid = _fork(work, modules, at, None)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the work ended with status {status}"
    return status != 0


def check_model_at_twenty_deaths(work, out, modules, seed, older=b""):
    """Kill work that writes a model at twenty moments, and check the files.

    The file with the final name must be complete, or the older file of that name. The next run must
    remove the leftovers of killed runs.
    """
    from gguf_tools.verify import verify

    total = calls_of(work, *modules)
    whole = out.read_bytes()
    died = 0
    for at in moments(total, 20, seed):
        out.unlink(missing_ok=True)
        if older:
            out.write_bytes(older)
        died += killed(work, at, *modules)
        assert out.exists() or not older, "the older file is gone"
        if out.exists():
            assert out.read_bytes() in (whole, older)
            assert verify(out, threads=1).problems == []
        assert len(os.listdir(out.parent)) <= 2, "leftovers of earlier runs are still there"
    assert died >= 15
    work()
    assert os.listdir(out.parent) == [out.name]
    assert out.read_bytes() == whole and verify(out, threads=1).problems == []


class Stopped:
    """Work in a child that stops at call number `at`, as on a busy machine.

    A context manager: the child ends with the block.
    """

    def __init__(self, work, at, *modules):
        self.pid = _fork(work, modules, at, None, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the work ended before it could be stopped"

    def finish(self):
        """Continue the work. Return its exit status."""
        return self._end(signal.SIGCONT)

    def _end(self, sign):
        pid, self.pid = self.pid, 0
        os.kill(pid, sign)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.pid:
            self._end(signal.SIGKILL)


def _fork(work, modules, at, report, sign=signal.SIGKILL):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        faulthandler.disable()  # pytest's handler would print in the child
        prefixes = tuple(f"{name}." for name in modules)
        calls = count(1)
        last = 0

        def profile(frame, event, arg):
            nonlocal last
            name = frame.f_globals.get("__name__", "") + "."
            if not event.endswith("return") and name.startswith(prefixes):
                last = next(calls)
                if last == at:
                    os.kill(os.getpid(), sign)

        threading.setprofile(profile)
        sys.setprofile(profile)
        work()
        sys.setprofile(None)
        if report is not None:
            os.write(report, str(last).encode())
        status = 0
    except BaseException:  # noqa: BLE001 - the child must not continue as a second pytest
        traceback.print_exc()
    finally:
        os._exit(status)
