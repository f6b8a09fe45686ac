"""One model and the application that answers with it, whoever listens: `moe-edge serve` on a socket
of its own, or each replica of a fleet."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from gguf_tools.children import child
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.native import ServerLibrary
from orchestrator.native.llama import Bindings
from orchestrator.runtime.load import Progress
from orchestrator.serve.admission import return_memory
from orchestrator.serve.app import application
from orchestrator.serve.backend import Backend, Stopped
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.state import State

LOOK_S = 0.1
DAY_S = 86400  # for what waits without an end
PREBUILT = "libmoe-edge-server.so"  # where a wheel brings it, beside libllama
TOOL = Path(__file__).resolve().parents[2] / "patches" / "tool.py"


class Service:
    """app: of ASGI; it says 503 before load has loaded the model and after stop. Close it."""

    def __init__(
        self, config: Config, settings: ServeSettings, note: Callable[[str], None]
    ) -> None:
        """note gets a line for each request, and what else is to be said. Raises MoeEdgeError: the
        settings are wrong, or there is no such model."""
        # Before some minutes of building, and before anybody is told to wait.
        ExpertModel.open(config.model, config.low).close()
        settings.chat_template_text()
        return_memory()
        self.state = State(settings)
        self.app = application(self.state, note)
        self._config, self._note = config, note
        self._bindings = Bindings.load()

    def load(self, progress: Progress) -> Backend | None:
        """Builds the native server where that is to be done, and loads the model; on any thread.
        None where stop came first. Raises MoeEdgeError, of which NativeError is a server that
        cannot be built."""
        state = self.state

        def begins(what: str, done: float | None) -> None:
            if state.stopping:
                raise Stopped
            progress(what, done)

        try:
            library = server_library(self._bindings, lambda: state.stopping)
            backend = Backend(
                self._config, state.settings, library, begins, state.threads, self._note
            )
        except Stopped:
            return None
        state.gate.open(backend.cells)
        state.backend = backend
        if state.stopping:
            backend.stop()
            return None
        if backend.engine.note:
            self._note(backend.engine.note)
        self._note(backend.engine.mode)
        return backend

    def stop(self) -> None:
        """Ends what it is at soon; for any thread."""
        self.state.stopping = True
        if self.state.backend is not None:
            self.state.backend.stop()

    def close(self, end_s: float) -> bool:
        """Frees everything, once load has returned and nobody asks any more. end_s: of the
        monotonic clock, when nobody waits any longer. Returns whether all has ended. Where a thread
        is still in work of llama.cpp's that nothing ends, all is saved and nothing freed, and the
        process has to end without it."""
        state, backend = self.state, self.state.backend
        kept = backend.kept if backend is not None else None
        for workers in (state.workers, state.quick, kept and kept.thread):
            if workers:
                workers.shutdown(wait=False)
        for thread in threading.enumerate():
            if thread.name.startswith(state.threads):
                thread.join(max(0.0, end_s - monotonic()))
                if thread.is_alive():
                    return self._give_up()
        return backend is None or backend.close(end_s) or self._give_up()

    def drain(self) -> None:
        """The end of one in a fleet, which sends it no more requests and has let those end that it
        had: what it holds goes to --prompt-cache, and all is freed."""
        self.stop()
        self.close(monotonic() + DAY_S)

    def _give_up(self) -> bool:
        self._note("llama.cpp is still at work for a request: the server ends without it.")
        if self.state.backend is not None:
            self.state.backend.engine.keep()
        return False


def server_library(bindings: Bindings, is_stopping: Callable[[], bool]) -> ServerLibrary:
    """The library that goes with the loaded llama.cpp. Compiling it shows its progress on stderr.

    A wheel of moe-edge brings it. Raises NativeError where it cannot be had: this is neither that
    nor a checkout, or no compiler is there; and Stopped, where is_stopping says so while it is
    compiled.
    """
    package = Path(bindings.api.__file__).parent
    prebuilt = package / "lib" / PREBUILT
    if prebuilt.is_file():
        return ServerLibrary(prebuilt)
    if not TOOL.is_file():
        raise NativeError(
            f"the server is compiled from a checkout of moe-edge, and {TOOL} is not there"
        )
    command = [sys.executable, str(TOOL), "server", str(package)]
    # Compilers of an interrupted build would go on for minutes.
    with child(command, kill_group=True, stdout=subprocess.PIPE) as process:
        said = None
        while said is None:
            with suppress(subprocess.TimeoutExpired):
                said, _ = process.communicate(timeout=LOOK_S)
            if is_stopping():
                raise Stopped
    if process.returncode != 0:
        raise NativeError("llama.cpp's server cannot be compiled: the lines above say why")
    return ServerLibrary(Path(said.strip().splitlines()[-1]))
