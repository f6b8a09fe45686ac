"""Send one Ctrl-C at a random moment of a command, and check the files afterwards.

    python tests/helpers/interrupting.py --times 100 eval trace   (all commands if none is named)
    python tests/helpers/interrupting.py --signal TERM pack     (another signal)

A command must end quietly with status 130 (128 and the signal's number) and leave no file. If it
had finished before, its output and files must equal those of a run without a signal. The time of
the signal counts from the moment when Python has found the command's module.
"""

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
# No correct command takes this long.
HANG_S = 300
# How often a moment is drawn again, if the command had finished or almost finished before it, or
# could not yet handle a signal.
DRAWS = 5
# After this fraction of a run, an interrupt may find the work done.
THROUGH = 0.7
# The command closes the pipe of the first argument when it begins.
_START = """
import os, sys
from orchestrator.__main__ import main
os.close(int(sys.argv.pop(1)))
main()
"""
# Parts of the output that depend on time or memory.
_MEASURED = re.compile(r'"[a-z_]*(?:us|ms|_s|seconds|rss)": [^,}]*|[\d.]+ (?:ms|MB/s|[KM]iB)')


class Result(NamedTuple):
    """The result of a run.

    took_s: from its beginning. reached: whether it was still running at the signal. done: the
    fraction of its CPU time before the signal. A stopped process uses no CPU time, so the fraction
    is also correct on a machine that halts.
    """

    status: int
    out: str
    err: str
    files: dict[str, bytes]
    took_s: float
    reached: bool
    done: float


@dataclass(frozen=True)
class Command:
    """A command line of moe-edge and the folder that it writes to.

    exact: whether its output and files are the same each time. keeps: pattern of the files that may
    remain after an interrupt. lasts_s: for a command that only a signal ends, with status 0: the
    time of the signal. beside: a context that uses the command while it runs.
    """

    args: Sequence[str]
    folder: Path
    exact: bool = True
    keeps: str | None = None
    lasts_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: Callable[[], AbstractContextManager[object]] = nullcontext

    def run(self, after_s=None, number=signal.SIGINT):
        """Run the command. after_s: when to send it a signal, as Ctrl-C does."""
        self._empty_folder()
        reader, writer = os.pipe()
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_WAIT_POLICY": "PASSIVE"}
        if after_s is None:
            after_s = self.lasts_s
        with (
            self.beside(),
            subprocess.Popen(
                [sys.executable, "-c", _START, str(writer), *self.args],
                cwd=REPO,
                env=environment | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writer],
                start_new_session=True,
                preexec_fn=_accept_signals,
                text=True,
            ) as process,
        ):
            before_s = _children_s()
            os.close(writer)
            with os.fdopen(reader, "rb") as begun:
                begun.read()
            start_s, at_start_s = time.monotonic(), _computed_s(process.pid)
            reached = False
            try:
                if after_s is not None:
                    time.sleep(after_s)
                    reached = process.poll() is None
                    process.send_signal(number)
                    at_signal_s = _computed_s(process.pid)
                out, err = process.communicate(timeout=HANG_S)
            finally:
                process.kill()
        took_s, in_all_s = time.monotonic() - start_s, _children_s() - before_s
        left = _processes_of(process.pid)
        if left:
            err += f"Left: processes {left}"
        status = process.returncode
        done = 1.0
        if reached and at_start_s is not None and at_signal_s is not None:
            done = (at_signal_s - at_start_s) / max(0.01, in_all_s - at_start_s)
        return Result(status, out, err, self._files(), took_s, reached, done)

    def _empty_folder(self):
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def _files(self):
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    def complaint(self, whole, found, number):
        """Return the fault of an interrupted run, or ""."""
        if any(word in found.err for word in ("Traceback", "Exception ignored", "Error", "Left:")):
            return f"it prints {found.err.strip()[-600:]}"
        ends_well = (0,) if self.lasts_s is not None else ()
        if found.status in (*_ended_by(number), *ends_well):
            left = sorted(
                name for name in found.files if not (self.keeps and re.search(self.keeps, name))
            )
            return f"it leaves {left}" if left else ""
        if found.status != 0:
            return f"status {found.status}: {found.err.strip()[-300:]}"
        if found.done < THROUGH:
            return "it ignores the signal"
        if self.exact and (
            _same(found.out) != _same(whole.out) or found.files.keys() != whole.files.keys()
        ):
            return "its output or files differ"
        return ""


def _accept_signals():
    """Restore the default signal handlers in a child.

    Otherwise it would inherit the signals that nohup ignores.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _ended_by(number):
    """Return the statuses of a command that a signal ended.

    While it loads, it may end like any program.
    """
    return (128 + number,) if number == signal.SIGINT else (128 + number, -number)


def _same(text):
    """Return a command's output without measured values."""
    return _MEASURED.sub("", text)


def _children_s():
    """Return the CPU seconds of this process's ended children and their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _computed_s(session):
    """Return the CPU seconds of a session's processes and their ended children, or None."""
    ticks = [sum(map(int, fields[11:15])) for fields in _stats_of(session).values()]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _processes_of(session):
    """Return the running processes of a session."""
    return [pid for pid, fields in _stats_of(session).items() if fields[0] != "Z"]


def _stats_of(session):
    """Return the fields of /proc/PID/stat after the name, for each process of a session."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            found[int(path.parent.name)] = fields
    return found


def interrupt(command, times, seed, number=signal.SIGINT):
    """Run a command `times` times with a signal. Return how the runs ended, and the faults."""
    whole = command.run()
    assert whole.status == 0, whole.err
    random, ends, wrong = Random(seed), Counter[str](), []
    for index in range(times):
        for _ in range(DRAWS):
            share = (index + random.random()) / times
            after_s = share * whole.took_s
            found = command.run(after_s, number)
            complaint = command.complaint(whole, found, number)
            is_early = found.status == -number
            is_through = found.status == 0 and command.lasts_s is None
            if is_through:
                # The machine may be faster now.
                whole = whole._replace(took_s=found.took_s)
            is_hit = found.reached and not is_early and (share >= THROUGH or not is_through)
            if complaint or is_hit:
                break
        ends[f"status {found.status}"] += 1
        if complaint:
            wrong.append(f"{after_s:.2f} s after its beginning: {complaint}")
    return ends, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--signal", default="INT", help="INT, TERM or HUP")
    args = parser.parse_args()
    number = signal.Signals[f"SIG{args.signal}"]
    # A script in the background ignores Ctrl-C, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = [str(REPO), str(REPO / "tests" / "helpers")]
    from small_commands import commands

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        known = commands(Path(folder))
        for name in args.names or known:
            ends, wrong = interrupt(known[name](), args.times, args.seed, number)
            counts = ", ".join(f"{n} with {end}" for end, n in sorted(ends.items()))
            print(f"{name}: {counts}; wrong: {len(wrong)}", flush=True)
            for line in wrong:
                print(f"  {line}", flush=True)
            failed |= bool(wrong)
    return failed


if __name__ == "__main__":
    # The module small_commands imports this module by its own name.
    sys.modules["interrupting"] = sys.modules["__main__"]
    sys.exit(main())
