"""A model that reads within a memory cap: its experts come through the store, as in any run with
``--ram``, in the best precision and without a loss. What the calibration itself keeps comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN
from gguf_tools.units import format_size
from orchestrator.config import Config
from orchestrator.engine.driver import Driver
from orchestrator.engine.load import Loader
from orchestrator.errors import BudgetError
from orchestrator.lab.observe import Node, Observer
from orchestrator.native.llama import Bindings, Model
from orchestrator.policy import BASELINE

# Copies of a window's activations that live at once: as they come, in half precision, scaled.
_COPIES = 4


class CalibrationRoom(NamedTuple):
    """A cap, and what of it is taken beside the model that reads, and for what. In bytes."""

    ram: int
    own: int
    use: str = "the calibration itself"


def window_bytes(model: ExpertModel, n_ctx: int) -> int:
    """What one layer's activations of a window take while they are handled."""
    embd = model.hparams.embedding_length
    n_ff = max(shape[0] for layer in model.shapes if (shape := layer[DOWN]) is not None)
    return _COPIES * 4 * n_ctx * (embd + model.n_expert_used * n_ff)


def load_within(
    stack: ExitStack,
    path: Path,
    n_ctx: int,
    threads: int,
    room: CalibrationRoom | None,
    **more: Any,
) -> tuple[Model, Driver]:
    """The model for windows of n_ctx tokens in all, without its context, and what its experts come
    through; the stack closes both. room None: as much as there is; more: settings beside those.

    Raises BudgetError naming the smallest cap that works.
    """
    with ExitStack() as own:
        model = own.enter_context(ExpertModel.open(path))
        settings = {"policy": BASELINE, "high_tier": model.tiers[0].name, "logits_all": True}
        config = Config.build(
            model=path,
            ctx=n_ctx,
            ubatch=n_ctx,
            threads=threads,
            # A byte at least, so that the plan says what it needs.
            ram=None if room is None else max(1, room.ram - room.own),
            **settings | more,
        )
        loader = Loader(config, model)
        try:
            loaded = own.enter_context(closing(loader.load(loader.planner.runs(config))))
        except BudgetError as error:
            if room is None:
                raise
            needed = error.needed_bytes + room.own
            raise BudgetError(
                f"--ram {format_size(room.ram)} is too little: the smallest that works here is "
                f"{format_size(needed, up=True)}, {format_size(room.own)} of them for {room.use}",
                needed,
            ) from error
        # Whoever watches makes one of its own.
        loaded.context.close()
        assert isinstance(loaded.driver, Driver)
        stack.enter_context(own.pop_all())
    return loaded.model, loaded.driver


def observe(
    path: Path,
    n_ctx: int,
    threads: int,
    wanted: Callable[[Node], bool],
    seen: Callable[[Node], None],
    room: CalibrationRoom | None = None,
) -> Observer:
    """An observer of a model that keeps to a cap, with experts read from the file as they are
    needed; room None: of the plain model, mapped. wanted, seen: as of Observer. Raises GGUFError,
    NativeError or BudgetError."""
    with ExitStack() as stack:
        if room is None:
            store, bindings = None, Bindings.load()
            model = Model(bindings, path, managed=False, use_extra_bufts=False, use_mmap=True)
            stack.callback(model.close)
        else:
            model, driver = load_within(stack, path, n_ctx, threads, room)
            store = driver.store
        observer = Observer(model, n_ctx, threads, wanted, seen, store=store)
        observer.owned = stack.pop_all()
    return observer
