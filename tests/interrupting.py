"""One Ctrl-C at a random moment of a command, and what it leaves.

    python tests/interrupting.py --times 100 eval trace     all commands where none is named
    python tests/interrupting.py --signal TERM pack         another signal that ends a command

A command ends quietly with status 130 (128 and the signal's number) and leaves no file, or it was
through before and all that it says and writes is that of a run which nobody interrupts. The moment
counts from when Python has found the command's module: what comes before is Python's own.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
# Only what hangs takes so long.
HANG_S = 300
# An interrupt in the last part of a run may find the work done.
THROUGH = 0.7
# The pipe that the first argument numbers is closed when the command begins.
_START = """
import os, sys
from orchestrator.__main__ import main
os.close(int(sys.argv.pop(1)))
main()
"""
# What a command says of the time that it took, and of files that tell of it.
_MEASURED = re.compile(r'"[a-z_]*(?:us|ms|_s|seconds|rss)": [^,}]*|[\d.]+ (?:ms|MB/s|[KM]iB)')


class Result(NamedTuple):
    """How a run ended. took_s: from its begin; after_s: from the interrupt."""

    status: int
    out: str
    err: str
    files: dict[str, bytes]
    took_s: float
    after_s: float


class Command(NamedTuple):
    """A command line of moe-edge and the folder that it writes to. exact: whether it says and
    writes the same each time."""

    args: Sequence[str]
    folder: Path
    exact: bool = True

    def run(
        self,
        after_s: float | None = None,
        repo: Path = REPO,
        number: signal.Signals = signal.SIGINT,
    ) -> Result:
        """Runs it; after_s: when to send it a signal, as Ctrl-C does."""
        for path in self.folder.iterdir():
            path.unlink()
        reader, writer = os.pipe()
        environment = {**os.environ, "PYTHONPATH": str(repo), "OMP_WAIT_POLICY": "PASSIVE"}
        with subprocess.Popen(
            [sys.executable, "-c", _START, str(writer), *self.args],
            cwd=repo,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[writer],
            start_new_session=True,
            text=True,
        ) as process:
            os.close(writer)
            with os.fdopen(reader, "rb") as begun:
                begun.read()
            start_s = sent_s = time.monotonic()
            try:
                if after_s is not None:
                    time.sleep(after_s)
                    sent_s = time.monotonic()
                    process.send_signal(number)
                out, err = process.communicate(timeout=HANG_S)
            finally:
                process.kill()
        end_s = time.monotonic()
        files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        left = _processes_of(process.pid)
        if left:
            err += f"Left: processes {left}"
        return Result(process.returncode, out, err, files, end_s - start_s, end_s - sent_s)

    def complaint(self, whole: Result, found: Result, number: signal.Signals) -> str:
        """What is wrong with a run that was interrupted, or nothing."""
        if any(word in found.err for word in ("Traceback", "Exception ignored", "Error", "Left:")):
            return f"it says {found.err.strip()[-600:]}"
        if found.status in _ended_by(number):
            return f"it leaves {sorted(found.files)}" if found.files else ""
        if found.status != 0:
            return f"status {found.status}: {found.err.strip()[-300:]}"
        # Of its own time: a busy machine is now fast, now slow.
        if 1 - found.after_s / found.took_s < THROUGH:
            return "it goes on to the end"
        if self.exact and (
            _same(found.out) != _same(whole.out) or found.files.keys() != whole.files.keys()
        ):
            return "it says or writes something else"
        return ""


def _ended_by(number: signal.Signals) -> tuple[int, ...]:
    """How a command ends by a signal: while it loads, as any program does."""
    return (128 + number,) if number == signal.SIGINT else (128 + number, -number)


def _same(text: str) -> str:
    """What a command says, without what it measured of the time."""
    return _MEASURED.sub("", text)


def _processes_of(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def commands(folder: Path, size: int = 1) -> dict[str, Callable[[], Command]]:
    """Commands by name, on small models that are made when they are asked for. size: how much
    longer than a second they shall take, about."""
    from gguf_tools import synthetic

    def model(*tiers: str) -> Path:
        path = folder / f"{'-'.join(tiers)}.gguf"
        if not path.exists():
            synthetic.write(path, "tiny-qwen3moe", tiers=tiers)
        return path

    def text() -> Path:
        path = folder / "text.txt"
        path.write_text("Some words of a text that says the same over and over. " * 200 * size)
        return path

    def command(*args: object, exact: bool = True) -> Command:
        out = folder / "out"
        out.mkdir(exist_ok=True)
        return Command([str(arg) for arg in args], out, exact)

    def slots() -> list[object]:
        packed = model("q8_0", "q4_k", "q2_k")
        return ["-m", packed, "--policy=dymoe", "--expert-ram=3MiB", "--low-tier=q2_k", "--ctx=512"]

    def judge() -> Command:
        tokens = f"--tokens={500 * size}"
        return command("eval", *slots(), "--threads=1", "--text", text(), tokens, "--json")

    def record() -> Command:
        tokens = f"--tokens={min(500, 300 * size)}"
        out = folder / "out" / "t.npz"
        return command("trace", *slots(), "--threads=1", "--text", text(), tokens, "--out", out)

    def calibrate() -> Command:
        return command(
            *("calibrate", model("f16"), "--calib", text(), f"--calib-tokens={512 * size}"),
            *("--types=q4_k", "--out", folder / "out" / "c.json"),
        )

    def pack(method: str) -> Command:
        return command(
            *("pack", model("f16"), folder / "out" / "p.gguf", "--tiers=q8_0,q4_k,q2_k"),
            *(f"--method={method}", "--calib", text(), f"--calib-tokens={512 * size}"),
        )

    def convert() -> Command:
        sys.path.insert(0, str(REPO))
        from tests.unit.convert.checkpoints import write_checkpoint

        checkpoint = folder / "checkpoint"
        if not checkpoint.exists():
            write_checkpoint("qwen3-moe", checkpoint)
        return command("convert", checkpoint, folder / "out" / "c.gguf", "--tiers=q8_0,q4_k,q2_k")

    def replay() -> Command:
        trace = folder / "recorded.npz"
        if not trace.exists():
            made = record()
            done = made.run()
            assert done.status == 0, done.err
            trace.write_bytes(done.files["t.npz"])
        return command("replay", trace, "--policy=lru", "--expert-ram=2MiB", "--json")

    def chat() -> Command:
        tokens = f"--max-tokens={300 * size}"
        return command("chat", *slots(), "-p", "hello", "--threads=1", tokens, exact=False)

    def bench() -> Command:
        return command("bench", "--quick", "--runs=1", "--tokens=16", exact=False)

    return {
        "eval": judge,
        "trace": record,
        "calibrate": calibrate,
        "pack": lambda: pack("imatrix"),
        "gptq": lambda: pack("gptq"),
        "convert": convert,
        "replay": replay,
        "chat": chat,
        "bench": bench,
    }


def interrupt(
    command: Command,
    times: int,
    seed: str,
    repo: Path = REPO,
    number: signal.Signals = signal.SIGINT,
) -> tuple[Counter[str], list[str]]:
    """Runs a command so many times with a signal. Returns how the runs ended, and what was
    wrong."""
    whole = command.run(repo=repo)
    assert whole.status == 0, whole.err
    random, ends, wrong = Random(seed), Counter[str](), []
    for index in range(times):
        share = (index + random.random()) / times
        found = command.run(share * whole.took_s, repo, number)
        ends[f"status {found.status}"] += 1
        complaint = command.complaint(whole, found, number)
        if complaint:
            wrong.append(f"at {share:.3f} of {whole.took_s:.2f} s: {complaint}")
    return ends, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--signal", default="INT", help="INT, TERM or HUP")
    parser.add_argument("--repo", type=Path, default=REPO, help="another checkout to run")
    args = parser.parse_args()
    number = signal.Signals[f"SIG{args.signal}"]
    # A script in the background ignores Ctrl-C, and what it starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, str(REPO))
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        known = commands(Path(folder), args.size)
        for name in args.names or known:
            ends, wrong = interrupt(known[name](), args.times, args.seed, args.repo, number)
            counts = ", ".join(f"{n} with {end}" for end, n in sorted(ends.items()))
            print(f"{name}: {counts}; wrong: {len(wrong)}", flush=True)
            for line in wrong:
                print(f"  {line}", flush=True)
            failed |= bool(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(main())
