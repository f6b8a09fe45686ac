"""Commands on small models, which take a few seconds each, for tests/helpers/interrupting.py."""

import contextlib
import json
import socket
import sys
import threading
import urllib.request
from functools import partial

from interrupting import REPO, Command

# Run time of a server, which only a signal ends. It answers within the first half.
SERVED_S = 4.0
# Size of a model in the tests' Hub: enough for several hundred parts.
PULLED_BYTES = 256 << 20
# Measurements of a machine, which the next command reuses.
MEASURED = r"/speed/[0-9a-f]+\.json$"
DEMO = REPO / "models/demo/moe-edge-demo.gguf"
# Command lines. SLOTS, READS, CALIB, MODEL/... and OUT/... are replaced by options, a model or an
# output path.
PLAIN = {
    "eval": "eval SLOTS --policy=dymoe READS=500 --json",
    "eval --kl": "eval SLOTS --policy=dymoe READS=500 --kl --json",
    "trace": "trace SLOTS --policy=dymoe READS=300 --out OUT/t.npz",
    "calibrate": "calibrate MODEL/f16 CALIB --types=q4_k --out OUT/c.json",
    "pack": "pack MODEL/f16 OUT/p.gguf --tiers=q8_0,q4_k,q2_k --method=imatrix CALIB",
    "gptq": "pack MODEL/f16 OUT/p.gguf --tiers=q8_0,q4_k,q2_k --method=gptq CALIB",
    "export": f"export {DEMO} OUT/e.gguf --tier=q4_k",
    "verify": f"verify {DEMO} --threads=1",
    "inspect": f"inspect {DEMO} --json",
}
# Commands whose output varies.
VARYING = {
    "chat": "chat SLOTS --policy=dymoe -p hello --threads=1 --temp=0 --max-tokens=300",
    "check": "check -m MODEL/q8_0 --tokens=8 --out OUT/report.txt",
}


def commands(folder):
    """Return commands by name, on small models that are written on demand."""
    made = SmallCommands(folder)
    return {
        **{name: partial(made.plain, line) for name, line in PLAIN.items()},
        **{name: partial(made.plain, line, exact=False) for name, line in VARYING.items()},
        **{"doctor": partial(made.of_a_machine, "doctor -m MODEL/q8_0 --ctx=512 --json")},
        **{"plan": partial(made.of_a_machine, "plan -m MODEL/q8_0 --ctx=512 --json")},
        # A few rows, each in a separate process. Models are written into the command's own cache.
        "bench": partial(
            made.of_a_machine,
            "bench --quick --runs=1 --tokens=16 --caps=60 --rows=lru,dymoe",
            keeps=rf"bench/[^.][^/]*\.gguf$|{MEASURED}",
        ),
        "convert": made.convert,
        "replay": made.replay,
        "pull": made.pull,
        "serve": made.serve,
    }


class SmallCommands:
    """The inputs of the commands, each written once into a folder, and the command lines."""

    def __init__(self, folder):
        self._folder = folder

    def plain(self, line, **fields):
        folder = self._folder / "out"
        folder.mkdir(exist_ok=True)
        return Command([arg for word in line.split() for arg in self._args(word)], folder, **fields)

    def of_a_machine(self, line, keeps=MEASURED):
        """A command on a machine that was never measured. Its measurements go into its cache."""
        cache = {"XDG_CACHE_HOME": str(self._folder / "out" / "cache")}
        return self.plain(line, exact=False, keeps=keeps, environment=cache)

    def convert(self):
        sys.path.insert(0, str(REPO))
        from tests.unit.convert.checkpoints import write_checkpoint

        checkpoint = self._folder / "checkpoint"
        if not checkpoint.exists():
            write_checkpoint("qwen3-moe", checkpoint)
        return self.plain(f"convert {checkpoint} OUT/c.gguf --tiers=q8_0,q4_k,q2_k")

    def replay(self):
        trace = self._folder / "recorded.npz"
        if not trace.exists():
            done = self.plain(PLAIN["trace"]).run()
            assert done.status == 0, done.err
            trace.write_bytes(done.files["t.npz"])
        return self.plain(f"replay {trace} --policy=lru --expert-ram=2MiB --json")

    def pull(self):
        """A download from a Hub on this machine.

        The file stays for the next time, complete or in part.
        """
        sys.path.insert(0, str(REPO / "tests/unit/hub"))
        from hub_server import Hub, Repo

        hub = Hub()
        hub.repos["me/model"] = Repo({"model.gguf": b"GGUF" + bytes(PULLED_BYTES)})
        hub.start()
        # The test ends clients, so their errors are expected.
        hub.server.handle_error = lambda *_: None
        return self.plain(
            "pull me/model",
            keeps=r"\.incomplete$|/refs/|\.lock$|CACHEDIR",
            environment={"HF_ENDPOINT": hub.url, "HF_HOME": str(self._folder / "out" / "hf")},
        )

    def serve(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return self.plain(
            f"serve SLOTS --policy=dymoe --threads=1 --port={port} --parallel=2",
            exact=False,
            lasts_s=SERVED_S,
            beside=partial(_asking, port),
        )

    def _args(self, word):
        """Return the arguments that replace a word of a command line."""
        kind, _, rest = word.replace("=", "/", 1).partition("/")
        if kind == "SLOTS":
            packed = self._model("q8_0", "q4_k", "q2_k")
            return ["-m", packed, "--expert-ram=3MiB", "--low-tier=q2_k", "--ctx=512"]
        if kind == "READS":
            return ["--threads=1", "--text", self._text(), f"--tokens={rest}"]
        if kind == "CALIB":
            return ["--calib", self._text(), "--calib-tokens=512"]
        if kind == "MODEL":
            return [self._model(rest)]
        if kind == "OUT":
            return [str(self._folder / "out" / rest)]
        return [word]

    def _model(self, *tiers):
        from gguf_tools import synthetic

        path = self._folder / f"{'-'.join(tiers)}.gguf"
        if not path.exists():
            synthetic.write(path, "tiny-qwen3moe", tiers=tiers)
        return str(path)

    def _text(self):
        path = self._folder / "text.txt"
        path.write_text("Some words of a text that says the same over and over. " * 200)
        return str(path)


@contextlib.contextmanager
def _asking(port):
    """Two clients that send requests repeatedly, as soon as the server listens."""
    over = threading.Event()
    body = json.dumps({"prompt": "hello", "max_tokens": 200, "stream": True}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})

    def ask():
        while not over.wait(0.05):
            # Errors at the server's end are expected.
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
