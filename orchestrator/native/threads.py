"""Decoding with as many threads as find a core beside whatever else runs."""

from __future__ import annotations

from gguf_tools.process import default_threads
from orchestrator.native.library import Library


class FreeCores:
    """Lets a context of the CPU (a llama_context) choose its threads while it decodes, up to one
    for each core that computing should use. Close it before the context is freed."""

    def __init__(self, library: Library, context: int) -> None:
        self._library, self._context = library, context
        library.adapt_threads(context, default_threads())

    def close(self) -> None:
        """From here on the context keeps the threads that it has; safe to call twice."""
        if self._context:
            self._library.adapt_threads(self._context, 0)
        self._context = 0
