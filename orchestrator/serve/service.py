"""One model and the application that answers with it, whoever listens: `moe-edge serve` on a socket
of its own, or each replica of a fleet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.engine.load import Progress
from orchestrator.native.llama import Bindings
from orchestrator.serve.admission import return_memory
from orchestrator.serve.app import application
from orchestrator.serve.backend import Backend, State, Stopped, server_library
from orchestrator.serve.settings import ServeSettings


class Service:
    """app: of ASGI; it says 503 before load has loaded the model and after stop. Close it."""

    def __init__(
        self, config: Config, settings: ServeSettings, note: Callable[[str], None]
    ) -> None:
        """note gets a line for each request, and what else is to be said. Raises MoeEdgeError: the
        settings are wrong, or there is no such model."""
        # Before some minutes of building, and before anybody is told to wait.
        ExpertModel.open(config.model, config.low).close()
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
        for workers in (state.workers, state.quick, state.scorer, kept and kept.thread):
            if workers:
                workers.shutdown(wait=False)
        for thread in threading.enumerate():
            if thread.name.startswith(state.threads):
                thread.join(min(max(0.0, end_s - monotonic()), threading.TIMEOUT_MAX))
                if thread.is_alive():
                    return self._give_up()
        return backend is None or backend.close(end_s) or self._give_up()

    def _give_up(self) -> bool:
        self._note("llama.cpp is still at work for a request: the server ends without it.")
        if self.state.backend is not None:
            self.state.backend.engine.keep()
        return False
