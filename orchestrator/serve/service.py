"""A model and its HTTP application, for `moe-edge serve` and for each replica of a fleet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from gguf_tools.experts import ExpertModel
from gguf_tools.process import trim_memory
from orchestrator.config import Config
from orchestrator.native.llama import Bindings
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.load import Progress
from orchestrator.runtime.runtime import Runtime
from orchestrator.serve.admission import SlotManager, return_memory
from orchestrator.serve.app import application
from orchestrator.serve.bodies import Words
from orchestrator.serve.changes import ModelChanges
from orchestrator.serve.served import Served, answering
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.state import State, Stopped

DAY_S = 86400  # a practically unlimited wait
LOOK_S = 0.05  # how often a change of the model looks whether requests have ended


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
        words = _words(config)
        return_memory()
        self.state = state = State(settings)
        self._wanted = _Wanted(config, words, answering(config, settings, words, state.threads))
        self._leaving: Served | None = None  # waits for its last requests
        self._has_failed = False  # neither the other model nor the former one could be loaded
        if settings.allow_model_change:
            state.changes = ModelChanges(
                state.threads, self.change, lambda: self._wanted.config.model, self._for_comparison
            )
        self.app = application(state, note)
        self._note = note
        Bindings.load()

    def load(self, progress: Progress) -> Served | None:
        """Load the model and return it, or None if `stop` was called meanwhile. Thread-safe.

        `progress` is called with each stage of the work. Raises MoeEdgeError if the model cannot be
        loaded, such as NativeError if llama.cpp's server core is missing.
        """
        state, wanted = self.state, self._wanted

        def begins(what: str, done: float | None) -> None:
            if state.stopping:
                raise Stopped
            progress(what, done)

        try:
            runtime = Runtime.open(wanted.config, begins, wanted.answering, say=self._note)
        except Stopped:
            return None
        served = Served(runtime, state.settings, wanted.words, self._note)
        state.gate.open(served.about.n_cells)
        state.slots = SlotManager(state.settings.parallel)
        state.served = served
        if state.stopping:
            runtime.stop()
            return None
        if runtime.note:
            self._note(runtime.note)
        self._note(runtime.mode)
        return served

    def change(self, path: Path, progress: Progress) -> None:
        """Replace the loaded model by the one in another file. Blocks until it is loaded.

        Requests in progress get their answers first. New requests get status 503 until the other
        model is loaded. If it cannot be loaded, or `progress` raises an exception, the former model
        is loaded again and the exception is raised. `progress` is called with each stage of the
        work. Call this on a thread of its own, while no other call runs.

        Raises MoeEdgeError or OSError if the model cannot be loaded. Raises Refusal if no model is
        loaded yet.
        """
        state, former = self.state, self._wanted
        served = None if self._has_failed else state.ready()
        config = former.config.with_changes(model=path, low=None)
        words = _words(config)
        wanted = _Wanted(config, words, answering(config, state.settings, words, state.threads))
        self._leaving = served
        state.absence = f"the server changes its model to {path.stem}: try again later"
        state.served = None
        try:
            while state.users and not state.stopping:
                progress("Waiting for running requests", None)
                sleep(LOOK_S)
        except BaseException:
            state.served, self._leaving = served, None
            raise
        self._leaving = None
        if served is not None:
            if state.stopping:
                state.served = served
                served.runtime.stop()  # `close` frees it
                return
            served.runtime.close()
            del served
            trim_memory()
        self._has_failed, self._wanted = False, wanted
        try:
            self.load(progress)
        except BaseException:
            self._wanted = former
            self._restore()
            raise
        self._note(f"The model was changed to {path.stem}.")

    def _restore(self) -> None:
        """Load the model again that was loaded before. Raises MoeEdgeError if that fails."""
        try:
            self.load(lambda _what, _done: None)
        except BaseException as error:
            self._has_failed = True
            self.state.absence = f"no model is loaded: {error}"
            raise

    def _for_comparison(self) -> dict[str, Any]:
        """Return this server's memory and settings, as arguments of hub_process.compare."""
        config, own = self._wanted.config, self._wanted.answering
        served = self.state.served
        settings = {
            "ram": config.ram if served is None else served.runtime.plan.ram_bytes,
            "ctx": config.ctx,
            "kv": config.kv,
            "threads": config.threads,
        }
        return {"settings": settings, "front_bytes": own.front_bytes, "parallel": own.parallel}

    def stop(self) -> None:
        """Start the shutdown: refuse new requests, and cancel requests that run. Thread-safe."""
        self.state.stopping = True
        if self.state.changes is not None:
            self.state.changes.stop()
        for served in (self._leaving, self.state.served):
            if served is not None:
                served.runtime.stop()

    def close(self, end_s: float) -> bool:
        """Free the model and stop the threads. Return False if llama.cpp still works at `end_s`.

        `end_s` is a time of the monotonic clock. If the result is False, the usage history is
        saved, but nothing is freed, and the caller must end the process. Call this after `load` has
        returned and the last request has ended.
        """
        state = self.state
        state.quick.shutdown(wait=False)
        if state.changes is not None and not state.changes.join(end_s):
            return self._give_up()
        served = state.served
        for thread in threading.enumerate():
            if thread.name.startswith(f"{state.threads}quick"):
                thread.join(max(0.0, end_s - monotonic()))
                if thread.is_alive():
                    if served is not None:
                        served.runtime.close(monotonic())
                    return self._give_up()
        return served is None or served.runtime.close(end_s) or self._give_up()

    def drain(self) -> None:
        """Shut down the server and free its model. Call this after the last request has ended.

        Its conversations are saved in the folder of --prompt-cache.
        """
        self.stop()
        self.close(monotonic() + DAY_S)

    def _give_up(self) -> bool:
        """Log that llama.cpp is still working, and return False."""
        self._note("llama.cpp is still working on a request: the server exits without waiting.")
        return False


@dataclass(frozen=True)
class _Wanted:
    """A model to load: its settings, its tokenizer's words, and how it answers requests."""

    config: Config
    words: Words
    answering: Answering


def _words(config: Config) -> Words:
    """Read the model's file. Raises MoeEdgeError if the file is not a model that can be read."""
    with closing(ExpertModel.open(config.model, config.low)) as model:
        return Words.of(model)
