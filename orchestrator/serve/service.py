"""One model and the application that answers with it, for `moe-edge serve` and for each replica of
a fleet."""

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

DAY_S = 86400  # for what waits without an end


class Service:
    """app: of ASGI; it says 503 before load has loaded the model and after stop. Close it."""

    def __init__(
        self, config: Config, settings: ServeSettings, note: Callable[[str], None]
    ) -> None:
        """note gets a line for each request, and what else is to be said. Raises MoeEdgeError: the
        settings are wrong, or there is no such model."""
        # What is wrong with them is said before the model loads.
        with closing(ExpertModel.open(config.model, config.low)) as model:
            self._words = Words.of(model)
        return_memory()
        self.state = state = State(settings)
        self._answering = answering(config, settings, self._words, state.threads)
        self.app = application(state, note)
        self._config, self._note = config, note
        Bindings.load()

    def load(self, progress: Progress) -> Served | None:
        """Load the model, on any thread; None if stop came first. Raises MoeEdgeError, of which
        NativeError means that llama.cpp's server core cannot be had."""
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
        """End everything soon, from any thread."""
        self.state.stopping = True
        if self.state.served is not None:
            self.state.served.runtime.stop()

    def close(self, end_s: float) -> bool:
        """Free everything, after load has returned and the last request has ended.

        end_s: of the monotonic clock, when a thread that is still in llama.cpp is given up. What
        was learned is kept then, nothing is freed, and False is returned: the process has to end.
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
        """End one server of a fleet, which has no requests left: keep its conversations in
        --prompt-cache, and free everything."""
        self.stop()
        self.close(monotonic() + DAY_S)

    def _give_up(self) -> bool:
        self._note("llama.cpp is still at work for a request: the server ends without it.")
        return False
