"""What llama.cpp would take of memory for a model, asked of it without the model's data."""

from __future__ import annotations

from functools import cached_property

from orchestrator.config import Config
from orchestrator.errors import NativeError
from orchestrator.memory.footprint import output_tokens
from orchestrator.native import host_scratch
from orchestrator.native.llama import Bindings, Context, Model


class Probe:
    """What llama.cpp would take of the host's memory for a model of which only the header is
    read: where it is asked for what is not known yet, and once while the probe is entered."""

    def __init__(self, bindings: Bindings, config: Config) -> None:
        self._bindings, self._config = bindings, config
        self._known: dict[tuple[int, int], int | None] = {}

    @cached_property
    def _model(self) -> Model:
        return Model(
            self._bindings,
            self._config.model,
            managed=True,
            use_extra_bufts=False,
            use_mmap=False,
            no_data=True,
        )

    def scratch(self, n_ctx: int, n_ubatch: int) -> int | None:
        """Bytes for a context of so many tokens and so many of them at once, without token
        importance, which needs a store. None for a model that llama.cpp does not load: loading
        says why."""
        if (n_ctx, n_ubatch) not in self._known:
            self._known[n_ctx, n_ubatch] = self._measured(n_ctx, n_ubatch)
        return self._known[n_ctx, n_ubatch]

    def _measured(self, n_ctx: int, n_ubatch: int) -> int | None:
        config = self._config
        try:
            context = Context(
                self._bindings,
                self._model,
                n_ctx=n_ctx,
                n_ubatch=n_ubatch,
                threads=1,
                outputs=output_tokens(config, self._model.n_vocab, n_ubatch),
                flash_attention=config.importance != "exact",
                sequences=config.sequences,
                kv=config.kv,
            )
        except NativeError:
            return None
        try:
            return host_scratch(self._bindings.library(), context.handle)
        finally:
            context.close()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        if "_model" in self.__dict__:
            self._model.close()
            del self._model
