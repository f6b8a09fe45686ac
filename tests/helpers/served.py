"""A server in a separate process, for tests that act as its clients."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from real_cache import REAL_CACHE
from waiting import wait_until

from orchestrator.native import ServerLibrary
from orchestrator.native.llama import Bindings

REPO = Path(__file__).resolve().parents[2]
DEMO = REPO / "models/demo/moe-edge-demo.gguf"
# No correct answer takes this long.
HANG_S = 300


@cache
def library_path():
    """Return the path of the server core's library, next to libllama.

    It is compiled first if its sources were edited. The library of a wheel is used as it is.
    """
    package = Path(Bindings.load().api.__file__).parent
    if "sets" not in json.loads((package / "moe_edge_build.json").read_text()):
        command = [sys.executable, str(REPO / "patches/tool.py"), "server", str(package)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(REAL_CACHE.parent)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return package / "lib" / "libmoe-edge-server.so"


def server_library():
    return ServerLibrary(library_path())


class Served:
    """A running `moe-edge serve`. url: its address without a path."""

    def __init__(self, process):
        self.process = process
        self.lines = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.search(r"Listening on (http://\S+);", line)
            if found:
                self.url = found[1]
            if " is ready at " in line:
                self._ready.set()
        self._ready.set()

    def wait_ready(self):
        """Wait until the server is ready. Raises AssertionError with its log if it ends before."""
        assert self._ready.wait(HANG_S), "timed out: the server is not ready"
        assert " is ready at " in "".join(self.lines), "\n".join(self.lines)

    def get(self, path):
        with urlopen(self.url + path, timeout=HANG_S) as answer:
            text = answer.read().decode()
        return text

    def post(self, path, data):
        """Post a request and return the JSON of its answer.

        Raises HTTPError for an error status.
        """
        head = {"Content-Type": "application/json"}
        request = Request(self.url + path, json.dumps(data).encode(), head)
        with urlopen(request, timeout=HANG_S) as answer:
            return json.load(answer)

    def asked(self, path, data, **head):
        """Send a request and return its connection."""
        connection = http.client.HTTPConnection(*self.address, timeout=HANG_S)
        connection.request("POST", path, json.dumps(data), head)
        return connection

    @property
    def address(self):
        where = urlsplit(self.url)
        return where.hostname, where.port

    def connected(self):
        return socket.create_connection(self.address, timeout=HANG_S)

    def until_running(self, n):
        """Wait until n requests are running."""
        said = f"moe_edge_requests_running {n}\n"
        wait_until(lambda: said in self.get("/metrics"), f"timed out: {n} requests are not running")

    def end(self, signum=signal.SIGTERM):
        """Send a signal. Return (status, output on stderr)."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        status = self.process.wait(HANG_S)
        self._reader.join(HANG_S)
        return status, "\n".join(self.lines)


@contextlib.contextmanager
def serving(cache, *options, files=None):
    """A server of the demo model on a free port, with its user folders in `cache`.

    files: the maximum number of file descriptors.
    """
    pytest.importorskip("uvicorn", reason="uvicorn is missing: run `make build`")
    library_path()
    own = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(REPO), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "orchestrator", "serve", "--port", "0", "--threads", "1"]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    pipe = {"stderr": subprocess.PIPE, "text": True, "env": os.environ | own}
    with subprocess.Popen([*command, *options], cwd=REPO, **pipe) as process:
        served = Served(process)
        try:
            served.wait_ready()
            yield served
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                served.end(signal.SIGKILL if process.poll() is None else 0)


def running(*options, files=None):
    """A fixture: one such server for the tests of a module."""

    @pytest.fixture(scope="module")
    def served(tmp_path_factory, library):
        with serving(tmp_path_factory.mktemp("served"), *options, files=files) as server:
            yield server

    return served
