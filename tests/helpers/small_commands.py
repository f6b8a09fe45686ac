"""Commands on small models, for tests/helpers/interrupting.py: a second or a few each."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from interrupting import REPO, Command

# How long a server runs that nothing but a signal ends; it answers within the first half.
SERVED_S = 4.0
# Of a model in the Hub of the tests: enough for some hundred parts.
PULLED_BYTES = 256 << 20
# What a machine was seen to do, which the next command need not find out again.
MEASURED = r"/speed/[0-9a-f]+\.json$"

_F = TypeVar("_F", bound=Callable[["SmallCommands"], Command])
_NAMES: dict[str, str] = {}


def _named(name: str) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        _NAMES[name] = function.__name__
        return function

    return register


def commands(folder: Path, size: int = 1) -> dict[str, Callable[[], Command]]:
    """Commands by name, on small models that are made when they are asked for. size: how much
    longer than a second they shall take, about."""
    made = SmallCommands(folder, size)
    return {name: getattr(made, function) for name, function in _NAMES.items()}


class SmallCommands:
    """What the commands read, each made once in a folder, and the command lines."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size

    @_named("eval")
    def judge(self) -> Command:
        return self._command("eval", *self._slots(), *self._reads(500 * self._size), "--json")

    @_named("eval --kl")
    def judge_beside(self) -> Command:
        reads = self._reads(500 * self._size)
        return self._command("eval", *self._slots(), *reads, "--kl", "--json")

    @_named("study")
    def study(self) -> Command:
        tables = self._out("tables")
        reads = self._reads(520 * self._size)
        model = [each for each in self._slots() if not str(each).startswith("--policy")]
        return self._command(
            *("eval", *model, *reads, "--study=similarity", "--out", tables), exact=False
        )

    @_named("trace")
    def record(self) -> Command:
        tokens = min(500, 300 * self._size)
        return self._command(
            "trace", *self._slots(), *self._reads(tokens), "--out", self._out("t.npz")
        )

    @_named("calibrate")
    def calibrate(self) -> Command:
        return self._command(
            *("calibrate", self._model("f16"), *self._calib()),
            *("--types=q4_k", "--out", self._out("c.json")),
        )

    @_named("pack")
    def pack(self) -> Command:
        return self._pack("imatrix")

    @_named("gptq")
    def pack_gptq(self) -> Command:
        return self._pack("gptq")

    @_named("convert")
    def convert(self) -> Command:
        sys.path.insert(0, str(REPO))
        from tests.unit.convert.checkpoints import write_checkpoint

        checkpoint = self._folder / "checkpoint"
        if not checkpoint.exists():
            write_checkpoint("qwen3-moe", checkpoint)
        return self._command("convert", checkpoint, self._out("c.gguf"), "--tiers=q8_0,q4_k,q2_k")

    @_named("replay")
    def replay(self) -> Command:
        trace = self._folder / "recorded.npz"
        if not trace.exists():
            done = self.record().run()
            assert done.status == 0, done.err
            trace.write_bytes(done.files["t.npz"])
        return self._command("replay", trace, "--policy=lru", "--expert-ram=2MiB", "--json")

    @_named("chat")
    def chat(self) -> Command:
        tokens = f"--max-tokens={300 * self._size}"
        return self._command(
            "chat", *self._slots(), "-p", "hello", "--threads=1", "--temp=0", tokens, exact=False
        )

    @_named("bench")
    def bench(self) -> Command:
        """A few rows, each in a process of its own; the models are made in its own cache, where
        those that are whole stay."""
        return self._command(
            *("bench", "--quick", "--runs=1", "--tokens=16", "--caps=60", "--rows=lru,dymoe"),
            exact=False,
            keeps=rf"bench/[^.][^/]*\.gguf$|{MEASURED}",
            environment={"XDG_CACHE_HOME": str(self._out("cache"))},
        )

    @_named("export")
    def export(self) -> Command:
        demo = REPO / "models/demo/moe-edge-demo.gguf"
        return self._command("export", demo, self._out("e.gguf"), "--tier=q4_k")

    @_named("verify")
    def verify(self) -> Command:
        return self._command("verify", REPO / "models/demo/moe-edge-demo.gguf", "--threads=1")

    @_named("inspect")
    def inspect(self) -> Command:
        return self._command("inspect", REPO / "models/demo/moe-edge-demo.gguf", "--json")

    @_named("check")
    def check(self) -> Command:
        return self._command(
            *("check", "-m", self._model("q8_0"), "--tokens=8", "--out", self._out("report.txt")),
            exact=False,
        )

    @_named("doctor")
    def doctor(self) -> Command:
        return self._of_a_machine("doctor")

    @_named("plan")
    def plan(self) -> Command:
        return self._of_a_machine("plan")

    @_named("pull")
    def pull(self) -> Command:
        """From a Hub on this machine. An unfinished download stays, for the next time."""
        sys.path.insert(0, str(REPO / "tests/unit/hub"))
        from hub_server import Hub, Repo

        hub = Hub()
        hub.repos["me/model"] = Repo({"model.gguf": b"GGUF" + bytes(PULLED_BYTES)})
        hub.start()
        # A client that was ended is what this is about.
        hub.server.handle_error = lambda *_: None
        return self._command(
            *("pull", "me/model"),
            keeps=r"\.incomplete$|/refs/|\.lock$|CACHEDIR",
            environment={"HF_ENDPOINT": hub.url, "HF_HOME": str(self._out("hf"))},
        )

    @_named("serve")
    def serve(self) -> Command:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return self._command(
            *("serve", *self._slots(), "--threads=1", f"--port={port}", "--parallel=2"),
            exact=False,
            lasts_s=SERVED_S * self._size,
            beside=lambda: _asking(port),
        )

    def _command(self, *args: object, **fields: object) -> Command:
        folder = self._folder / "out"
        folder.mkdir(exist_ok=True)
        return Command([str(arg) for arg in args], folder, **fields)  # type: ignore[arg-type]

    def _of_a_machine(self, name: str) -> Command:
        """One that has never been measured: what is found goes into its cache."""
        return self._command(
            *(name, "-m", self._model("q8_0"), "--ctx=512", "--json"),
            exact=False,
            keeps=MEASURED,
            environment={"XDG_CACHE_HOME": str(self._out("cache"))},
        )

    def _out(self, name: str) -> Path:
        return self._folder / "out" / name

    def _model(self, *tiers: str) -> Path:
        from gguf_tools import synthetic

        path = self._folder / f"{'-'.join(tiers)}.gguf"
        if not path.exists():
            synthetic.write(path, "tiny-qwen3moe", tiers=tiers)
        return path

    def _slots(self) -> list[object]:
        packed = self._model("q8_0", "q4_k", "q2_k")
        return ["-m", packed, "--policy=dymoe", "--expert-ram=3MiB", "--low-tier=q2_k", "--ctx=512"]

    def _text(self) -> Path:
        path = self._folder / "text.txt"
        path.write_text(
            "Some words of a text that says the same over and over. " * 200 * self._size
        )
        return path

    def _reads(self, tokens: int) -> list[object]:
        return ["--threads=1", "--text", self._text(), f"--tokens={tokens}"]

    def _calib(self) -> list[object]:
        return ["--calib", self._text(), f"--calib-tokens={512 * self._size}"]

    def _pack(self, method: str) -> Command:
        return self._command(
            *("pack", self._model("f16"), self._out("p.gguf"), "--tiers=q8_0,q4_k,q2_k"),
            *(f"--method={method}", *self._calib()),
        )


@contextlib.contextmanager
def _asking(port: int) -> Iterator[None]:
    """Two clients that ask again and again, as soon as somebody listens."""
    over = threading.Event()
    body = json.dumps({"prompt": "hello", "max_tokens": 200, "stream": True}).encode()

    def ask() -> None:
        while not over.wait(0.05):
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                body,
                {"Content-Type": "application/json"},
            )
            # What the server does when it ends is not the client's to judge.
            with (
                contextlib.suppress(OSError, ValueError),
                urllib.request.urlopen(request, timeout=5) as answer,
            ):
                while not over.is_set() and answer.read(100):
                    pass

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for each in clients:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in clients:
            each.join()
