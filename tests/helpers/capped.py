"""Run every command that loads a model in a memory cgroup with the limit of its ``--ram``.

    python tests/helpers/capped.py --model PACKED.gguf --ram 1GiB --text TEXT.txt [COMMAND ...]

The kernel kills a process that needs more memory than its cgroup's limit. The peak is the memory
that cannot be dropped, sampled every few milliseconds. File pages can be dropped and do not count.
The output also shows the pages of programs and libraries, which the kernel charges to the first
cgroup that uses them.

A command without --ram runs in the same cgroup. With `--ram least`, each command gets the smallest
limit that it names itself. It plans to use all of it, so the difference to the peak shows how much
the plan is too high. Needs root and cgroups of version 1 or 2.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from orchestrator.settings import parse_size

REPO = Path(__file__).resolve().parents[2]
ROOT = Path("/sys/fs/cgroup")
LOOK_S = 0.005
# Reading a process's memory map is slow.
MAPS_S = 0.5
MIB = 1 << 20
# Requests of each client, if there are several.
ASKED = 20
ANSWER_TOKENS = 64
# The schema of a JSON answer, whose grammar needs memory.
YEARS = {"type": "array", "items": {"type": "number"}}
FACTS = {"type": "object", "properties": {"name": {"type": "string"}, "years": YEARS}}
FORM = {"name": "facts", "schema": FACTS | {"required": ["name", "years"]}}
# Maximum number of tokens that a chat template and the beginning of a text add.
TEMPLATE_TOKENS = 64
# A limit that is large enough for a command to report its minimum.
AMPLE = 1 << 30
# A command reads what is left in its cgroup, and the kernel uses part of that.
KERNEL = 8 << 20
_LEAST = re.compile(r"the smallest (?:--ram )?that works[^;]*? is ([\d.]+ \w+)")
_START = "import sys; from orchestrator.__main__ import main; sys.argv[0] = 'moe-edge'; main()"


class Group:
    """A memory cgroup with a limit."""

    def __init__(self, folder, limit_bytes):
        """Raises OSError if the cgroup cannot be created."""
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
    def make(cls, limit_bytes):
        parent = ROOT / "memory" if (ROOT / "memory").is_dir() else ROOT
        return cls(parent / f"moe-edge-{os.getpid()}-{time.monotonic_ns()}", limit_bytes)

    def enter(self):
        """Move this process into the cgroup. Called in a child before it runs another program."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def used_bytes(self):
        """Return the bytes that cannot be dropped: anonymous memory and the kernel's own."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        found = dict(line.split() for line in lines)
        if not self._is_first:
            return int(found["anon"]) + int(found.get("kernel", 0))
        kernel = int((self.folder / "memory.kmem.usage_in_bytes").read_text())
        return int(found["rss"]) + kernel

    def close(self):
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)


class Run(NamedTuple):
    """The result of a command in its cgroup.

    It has the status, the output, the peak in bytes, and the bytes of program and library pages of
    its first process.
    """

    status: int
    out: str
    err: str
    peak_bytes: int
    library_bytes: int


def run(args, limit_bytes, use=None):
    """Run a command of moe-edge in a cgroup. Raises OSError if the cgroup cannot be created.

    use: called with the process while it runs.
    """
    with closing(Group.make(limit_bytes)) as group:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *args],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO), "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=group.enter,
            text=True,
        )
        peak = libraries = 0

        def look():
            nonlocal peak
            while process.poll() is None:
                peak = max(peak, group.used_bytes())
                time.sleep(LOOK_S)

        def look_at_maps():
            nonlocal libraries
            while process.poll() is None:
                libraries = max(libraries, _library_bytes(process.pid))
                time.sleep(MAPS_S)

        watchers = [threading.Thread(target=each) for each in (look, look_at_maps)]
        for each in watchers:
            each.start()
        if use is not None:
            use(process)
        out, err = process.communicate()
        for each in watchers:
            each.join()
        return Run(process.returncode, out, err, peak, libraries)


def _library_bytes(pid):
    """Return the resident bytes of a process's program files."""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text()
    except OSError:
        return 0
    total, counts = 0, False
    for line in text.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.rpartition(" ")[2]
            counts = ".so" in name or "/bin/" in name
        elif counts and line.startswith(("Shared_Clean:", "Private_Clean:")):
            total += int(line.split()[1]) * 1024
    return total


def ask_server(port, clients, full=()):
    """Return a function that sends requests to a server and then ends it.

    Several clients send prompts of all lengths at the same time. A single client sends the prompts
    of `full` in sequence, and then requests an answer in JSON.
    """

    def use(process):
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        else:
            return

        def post(path, body):
            asked = urllib.request.Request(
                f"{url}/v1/{path}",
                json.dumps(body | {"max_tokens": ANSWER_TOKENS}).encode(),
                {"Content-Type": "application/json"},
            )
            with suppress(OSError):  # the process reports why it ended
                urllib.request.urlopen(asked, timeout=3600).read()

        def ask(number):
            for turn in range(ASKED if clients > 1 else len(full)):
                n = 100 - (37 * turn + 11 * number) % 90
                prompt = "Once upon a time, " * n if clients > 1 else full[turn]
                post("completions", {"prompt": prompt, "stream": turn % 2 > 0})
            if clients == 1:
                said = {"role": "user", "content": "Hello"}
                form = {"type": "json_schema", "json_schema": FORM}
                post("chat/completions", {"messages": [said], "response_format": form})

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask, range(clients)))
        process.send_signal(signal.SIGTERM)

    return use


class Line(NamedTuple):
    """A command line.

    has_ram: it has the option --ram. port: the port of a server. clients: the number of its
    clients. full: the prompts of a single client. before: arguments of a command that makes the
    input, without a limit.
    """

    args: list[str]
    has_ram: bool = True
    port: int = 0
    clients: int = 1
    full: Sequence[str] = ()
    before: Sequence[str] = ()

    def run(self, ram, *more):
        own = [f"--ram={ram}"] if self.has_ram else []
        return self._run(ram, *own, *more)

    def run_least(self):
        """Run with the smallest limit that the command names. Return the result and the limit.

        A command without --ram gets a large limit.
        """
        if not self.has_ram:
            return self.run(AMPLE), AMPLE
        ram, found = 1, self._run(AMPLE, "--ram=1B")
        while (named := _LEAST.search(found.err + found.out)) and parse_size(named[1]) > ram:
            ram = parse_size(named[1])
            found = self._run(ram + KERNEL, f"--ram={ram}")
        return found, ram

    def _run(self, limit_bytes, *more):
        if self.before:
            made = run(self.before, AMPLE)
            if made.status:
                return made
        use = ask_server(self.port, self.clients, self.full) if self.port else None
        return run([*self.args, *more], limit_bytes, use=use)


def filling(model, words, n_tokens):
    """Repeat words to a text of nearly n_tokens tokens, and not more."""
    from orchestrator.native.llama import Bindings, Model

    often = 64
    vocabulary = Model(
        Bindings.load(), model, managed=True, use_extra_bufts=False, use_mmap=False, no_data=True
    )
    try:
        each = len(vocabulary.tokenize(words * often, True, True)) / often
    finally:
        vocabulary.close()
    return words * int(n_tokens / each)


def commands(model, text, out, tokens, types="q4_k", ctx=1024):
    """Return command lines by name, without --ram. ctx: context of the commands that have one."""
    reads = ["-m", str(model), f"--ctx={ctx}"]
    # Nearly the full context: memory is planned for it, and used when it is written.
    n_tokens_of_prompt = ctx - ANSWER_TOKENS - TEMPLATE_TOKENS
    long, other = (
        filling(model, words, n_tokens_of_prompt) for words in ("Once upon a time, ", "And then a ")
    )
    text_of = [f"--text={text}", f"--tokens={tokens}"]
    calib = [f"--calib={text}", f"--calib-tokens={tokens}"]
    trace = out / "t.npz"
    traced = [*reads, *text_of, "--ram=1GiB", "--expert-ram=16MiB", "--force", f"--out={trace}"]
    packed = ["pack", str(model), str(out / "p.gguf"), f"--tiers={types},q2_k"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    chat = ["chat", *reads, "-p", long, f"--max-tokens={ANSWER_TOKENS}"]
    serve = ["serve", *reads, f"--port={port}"]
    judge = ["eval", *reads, *text_of]
    calibrate = ["calibrate", str(model), *calib]
    found = {
        "chat": Line(chat),
        "chat, dymoe": Line([*chat, "--policy=dymoe"]),
        "chat, --max-loss": Line(
            [*chat, "--max-loss=0.01", f"--losses={out / 'l.json'}"],
            before=[*calibrate, "--force", f"--out={out / 'l.json'}"],
        ),
        "chat, dynaexq": Line([*chat, "--policy=dynaexq"]),
        # The first prompt's state is kept when another prompt comes.
        "serve": Line(serve, port=port, full=[long, other, long]),
        "serve, 8 clients": Line(serve, port=port, clients=8),
        "eval": Line(judge),
        "eval --kl": Line([*judge, "--kl"]),
        "eval --prefill": Line([*judge, "--prefill", "--window=1024"]),
        "trace": Line(["trace", *reads, *text_of, "--out", str(trace)]),
        "replay": Line(["replay", str(trace)], False, before=["trace", *traced]),
        "plan": Line(["plan", *reads]),
        "doctor": Line(["doctor", *reads]),
        "calibrate": Line([*calibrate, f"--types={types}", "--force", f"--out={out / 'c.json'}"]),
        "calibrate --save-imatrix": Line([*calibrate, "--save-imatrix", str(out / "i.gguf")]),
        "pack": Line(packed, has_ram=False),
        "pack --method imatrix": Line([*packed, *calib, "--method=imatrix"]),
        "pack --method gptq": Line([*packed, *calib, "--method=gptq"]),
        "check": Line(["check", "-m", str(model), "--tokens=8", "--no-verify"]),
        "inspect": Line(["inspect", str(model)], has_ram=False),
        "verify": Line(["verify", str(model)], has_ram=False),
        "export": Line(["export", str(model), str(out / "e.gguf"), f"--tier={types}"], False),
        "bench --quick": Line(["bench", "--quick", "--runs=1"], has_ram=False),
    }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--ram", default="1GiB", help="a size, or `least`")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ctx", type=int, default=1024)
    args = parser.parse_args()
    failed = False
    print(f"{'command':26} {'cap':>6} {'peak':>6} {'of cap':>7} {'libraries':>9}  (MiB)")
    with tempfile.TemporaryDirectory() as folder:
        known = commands(args.model, args.text, Path(folder), args.tokens, ctx=args.ctx)
        if unknown := ", ".join(sorted(set(args.names) - set(known))):
            parser.error(f"no command {unknown}: choose from {', '.join(known)}")
        for name in args.names or known:
            if args.ram == "least":
                found, ram = known[name].run_least()
            else:
                ram = parse_size(args.ram)
                found = known[name].run(ram)
            share = found.peak_bytes / ram
            figures = f"{ram / MIB:6.0f} {found.peak_bytes / MIB:6.0f} {share:7.1%}"
            figures += f" {found.library_bytes / MIB:9.0f}"
            said = found.err.strip().splitlines()[-1:] if found.status else []
            print(f"{name:26} {figures}  status {found.status} {' '.join(said)}", flush=True)
            failed |= found.status != 0
            for path in Path(folder).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return failed


if __name__ == "__main__":
    sys.exit(main())
