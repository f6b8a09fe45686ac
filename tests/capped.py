"""The memory of every command that loads a model, each in a memory cgroup of its own ``--ram``.

    python tests/capped.py --model PACKED.gguf --ram 1GiB --text TEXT.txt [COMMAND ...]

The kernel ends a process that needs more than the cgroup's limit. What may be dropped at any time,
pages of files, counts for nobody; peak is what may not, read every few milliseconds. Needs root and
cgroups of version 1 or 2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
ROOT = Path("/sys/fs/cgroup")
LOOK_S = 0.005
MIB = 1 << 20
_START = "import sys; from orchestrator.__main__ import main; sys.argv[0] = 'moe-edge'; main()"


class Group:
    """A memory cgroup with a limit."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Raises OSError where none can be made."""
        self.folder = folder
        folder.mkdir()
        try:
            first = folder / "memory.limit_in_bytes"
            self._is_first = first.exists()
            (first if self._is_first else folder / "memory.max").write_text(str(limit_bytes))
            if not self._is_first:
                (folder / "memory.swap.max").write_text("0")
        except OSError:
            self.close()
            raise

    @classmethod
    def make(cls, limit_bytes: int) -> Group:
        parent = ROOT / "memory" if (ROOT / "memory").is_dir() else ROOT
        return cls(parent / f"moe-edge-{os.getpid()}-{time.monotonic_ns()}", limit_bytes)

    def enter(self) -> None:
        """For a child before it becomes another program."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def used_bytes(self) -> int:
        """What cannot be dropped: memory that no file is behind, and the kernel's own."""
        found = dict(
            line.split() for line in (self.folder / "memory.stat").read_text().splitlines()
        )
        if not self._is_first:
            return int(found["anon"]) + int(found.get("kernel", 0))
        kernel = int((self.folder / "memory.kmem.usage_in_bytes").read_text())
        return int(found["rss"]) + kernel

    def close(self) -> None:
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)


class Run(NamedTuple):
    """How a command went in its cgroup: its status, what it said, its peak in bytes."""

    status: int
    out: str
    err: str
    peak_bytes: int


def run(args: Sequence[str], limit_bytes: int, python: str = sys.executable) -> Run:
    """A command of moe-edge in a cgroup. Raises OSError where none can be made."""
    with _group(limit_bytes) as group:
        process = subprocess.Popen(
            [python, "-c", _START, *args],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO), "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=group.enter,
            text=True,
        )
        peak = 0

        def look() -> None:
            nonlocal peak
            while process.poll() is None:
                peak = max(peak, group.used_bytes())
                time.sleep(LOOK_S)

        watcher = threading.Thread(target=look)
        watcher.start()
        out, err = process.communicate()
        watcher.join()
        return Run(process.returncode, out, err, peak)


@contextmanager
def _group(limit_bytes: int) -> Iterator[Group]:
    group = Group.make(limit_bytes)
    try:
        yield group
    finally:
        group.close()


def commands(
    model: Path, text: Path, out: Path, tokens: int, types: str = "q4_k"
) -> dict[str, list[str]]:
    """Command lines by name, without --ram."""
    reads = ["-m", str(model), "--ctx=1024"]
    text_of = [f"--text={text}", f"--tokens={tokens}"]
    calib = [f"--calib={text}", f"--calib-tokens={tokens}"]
    packed = ["pack", str(model), str(out / "p.gguf"), f"--tiers={types},q2_k", *calib]
    return {
        "chat": ["chat", *reads, "-p", "Tell me a story.", "--max-tokens=64"],
        "chat, dymoe": ["chat", *reads, "--policy=dymoe", "-p", "Tell me.", "--max-tokens=64"],
        "eval": ["eval", *reads, *text_of],
        "eval --kl": ["eval", *reads, *text_of, "--kl"],
        "trace": ["trace", *reads, *text_of, "--out", str(out / "t.npz")],
        "calibrate": [
            *("calibrate", str(model), *calib, f"--types={types}"),
            *("--out", str(out / "c.json")),
        ],
        "calibrate --save-imatrix": [
            *("calibrate", str(model), *calib, "--save-imatrix", str(out / "i.gguf"))
        ],
        "pack --method imatrix": [*packed, "--method=imatrix"],
        "pack --method gptq": [*packed, "--method=gptq"],
    }


def main() -> int:
    sys.path.insert(0, str(REPO))
    from orchestrator.settings import parse_size

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--ram", type=parse_size, default="1GiB")
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    failed = False
    print(f"{'command':26} {'cap':>6} {'peak':>6} {'of cap':>7}  (MiB)", flush=True)
    with tempfile.TemporaryDirectory(dir=args.model.parent) as folder:
        known = commands(args.model, args.text, Path(folder), args.tokens)
        for name in args.names or known:
            found = run([*known[name], f"--ram={args.ram}"], args.ram)
            share = found.peak_bytes / args.ram
            figures = f"{args.ram / MIB:6.0f} {found.peak_bytes / MIB:6.0f} {share:7.1%}"
            said = found.err.strip().splitlines()[-1:] if found.status else []
            print(f"{name:26} {figures}  status {found.status} {' '.join(said)}", flush=True)
            failed |= found.status != 0
            for path in Path(folder).iterdir():
                path.unlink()
    return failed


if __name__ == "__main__":
    sys.exit(main())
