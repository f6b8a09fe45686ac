"""A model and its HTTP application, for `moe-edge serve` and for each replica of a fleet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from time import monotonic

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.native.llama import Bindings
from orchestrator.runtime.load import Progress
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.admission import return_memory
from orchestrator.serve.app import application
from orchestrator.serve.bodies import Words
from orchestrator.serve.served import Served, answering
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.state import State, Stopped

DAY_S = 86400  # a practically unlimited wait


class Service:
    """A model and its HTTP application, the ASGI callable `app`.

    The application answers with status 503 before `load` has finished and after `stop`. The caller
    must call `close` at the end.
    """

    def __init__(
        self, config: Config, settings: ServeSettings, note: Callable[[str], None]
    ) -> None:
        """Check the settings and the model file. The model is loaded later, by `load`.

        `note` gets log lines and messages for the user. Raises MoeEdgeError for wrong settings or a
        model file that cannot be read.
        """
        # These checks run before the model loads.
        with closing(ExpertModel.open(config.model, config.low)) as model:
            self._words = Words.of(model)
        return_memory()
        self.state = state = State(settings)
        self._answering = answering(config, settings, self._words, state.threads)
        self.app = application(state, note)
        self._config, self._note = config, note
        Bindings.load()

    def load(self, progress: Progress) -> Served | None:
        """Load the model and return it, or None if `stop` was called meanwhile. Thread-safe.

        `progress` is called with each stage of the work. Raises MoeEdgeError if the model cannot be
        loaded, such as NativeError if llama.cpp's server core is missing.
        """
        state = self.state

        def begins(what: str, done: float | None) -> None:
            if state.stopping:
                raise Stopped
            progress(what, done)

        try:
            runtime = Runtime.open(self._config, begins, self._answering, say=self._note)
        except Stopped:
            return None
        served = Served(runtime, state.settings, self._words, self._note)
        state.gate.open(served.about.n_cells)
        state.served = served
        if state.stopping:
            runtime.stop()
            return None
        if runtime.note:
            self._note(runtime.note)
        self._note(runtime.mode)
        return served

    def stop(self) -> None:
        """Start the shutdown: refuse new requests, and cancel requests that run. Thread-safe."""
        self.state.stopping = True
        if self.state.served is not None:
            self.state.served.runtime.stop()

    def close(self, end_s: float) -> bool:
        """Free the model and stop the threads. Return False if llama.cpp still works at `end_s`.

        `end_s` is a time of the monotonic clock. If the result is False, the usage history is
        saved, but nothing is freed, and the caller must end the process. Call this after `load` has
        returned and the last request has ended.
        """
        state, served = self.state, self.state.served
        state.quick.shutdown(wait=False)
        for thread in threading.enumerate():
            if thread.name.startswith(f"{state.threads}quick"):
                thread.join(max(0.0, end_s - monotonic()))
                if thread.is_alive():
                    if served is not None:
                        served.runtime.close(monotonic())
                    return self._give_up()
        return served is None or served.runtime.close(end_s) or self._give_up()

    def drain(self) -> None:
        """Stop a server that has no requests left, and free its memory.

        Its conversations are saved to --prompt-cache.
        """
        self.stop()
        self.close(monotonic() + DAY_S)

    def _give_up(self) -> bool:
        """Log that llama.cpp is still working, and return False."""
        self._note("llama.cpp is still working on a request: the server exits without waiting.")
        return False
