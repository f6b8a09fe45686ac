"""The tensors of a model while it reads a text, through llama.cpp's evaluation callback.

Within a memory cap its experts come through the store, as in any run with ``--ram``, in the best
precision and without a loss. What the reader itself keeps comes first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gguf_tools import interrupts
from gguf_tools.closing import Closing
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import DOWN, parse_expert_name
from gguf_tools.units import format_least, format_size
from orchestrator.config import Config
from orchestrator.errors import BudgetError, NativeError
from orchestrator.native import Store
from orchestrator.native.llama import Bindings, LlamaContext, Model
from orchestrator.policy import BASELINE
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.load import Loader

_NUMBERS = {0: np.float32, 26: np.int32}


class _Tensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h, up to its name. There are functions for the rest, but none
    for the operands; Node compares what it can with them."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


class Node:
    """A tensor of the graph; valid during the callback that got it."""

    def __init__(self, lib: Any, address: int) -> None:
        self._lib = lib
        self._address = address
        self._tensor = _Tensor.from_address(address)

    @property
    def name(self) -> str:
        return str(self._tensor.name, "utf-8", "replace")

    @property
    def op(self) -> str:
        """The operation as ggml calls it, as MUL_MAT_ID."""
        return str(self._lib.ggml_op_desc(self._address), "ascii", "replace")

    def source(self, index: int) -> Node:
        """An operand. Raises NativeError where there is none."""
        address = self._tensor.src[index]
        if not address:
            raise NativeError(f"{self.name}: the operation has no operand {index}")
        return Node(self._lib, address)

    def array(self) -> np.ndarray:
        """A copy of the values, as view has them."""
        values: np.ndarray = self.view().copy()
        return values

    def view(self) -> np.ndarray:
        """The values where they lie, float32 or int32, slowest dimension first: [ne3, ne2, ne1,
        ne0]. Writing there changes what is computed from them.

        Raises NativeError for other types."""
        tensor = self._tensor
        kind = _NUMBERS.get(tensor.type)
        if kind is None:
            raise NativeError(
                f"{self.name}: cannot be read: its numbers are neither float32 nor int32"
            )
        n_bytes = self._lib.ggml_nbytes(self._address)
        data = (ctypes.c_uint8 * n_bytes).from_address(tensor.data)
        shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        values: np.ndarray = np.ndarray(shape, kind, data, strides=strides)
        return values

    def check(self) -> None:
        """Raises NativeError where ggml's own functions see another tensor."""
        lib, tensor, at = self._lib, self._tensor, self._address
        if (
            lib.ggml_get_name(at) != tensor.name
            or lib.ggml_get_data(at) != tensor.data
            or lib.ggml_n_dims(at) != max([1, *(i + 1 for i in range(4) if tensor.ne[i] > 1)])
        ):
            raise NativeError("llama.cpp lays out its tensors in another way: run `make build`")


def expert_product(node: Node, layer_of: Mapping[int, int]) -> tuple[int, int] | None:
    """Of which layer's experts a node is the product, and by which of their matrices; None for
    other nodes. layer_of: the numbers of layers by those in names of tensors."""
    parsed = parse_expert_name(node.source(0).name) if node.op == "MUL_MAT_ID" else None
    layer = layer_of.get(parsed.il) if parsed else None
    return None if parsed is None or layer is None else (layer, parsed.kind)


class Observer(Closing):
    """A context of a model that shows tensors of each read. Free it with close.

    owned: what is closed after it, nothing unless who makes it says so."""

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        threads: int,
        wanted: Callable[[Node], bool],
        seen: Callable[[Node], None],
        *,
        store: Store | None = None,
        sequences: int = 1,
        outputs: int | None = None,
    ) -> None:
        """wanted says of each node of the graph, before it is computed, whether seen gets it
        once it is; what either raises comes out of read. store: the model's experts come through
        it. sequences: that may be read at once, each with as large a part of n_ctx tokens; outputs:
        tokens with logits, None for all.

        Raises NativeError."""
        bindings = Bindings.load()
        self._lib: Any = bindings.api._lib
        self._wanted, self._seen = wanted, seen
        self._failed = self._checked = False
        for name, result in (
            ("ggml_get_name", ctypes.c_char_p),
            ("ggml_get_data", ctypes.c_void_p),
            ("ggml_nbytes", ctypes.c_size_t),
            ("ggml_n_dims", ctypes.c_int),
            ("ggml_op_desc", ctypes.c_char_p),
        ):
            function = getattr(self._lib, name)
            function.argtypes, function.restype = [ctypes.c_void_p], result
        self.model, self.owned, self._store = model, ExitStack(), store
        self._callback = bindings.api.ggml_backend_sched_eval_callback(self._on_tensor)
        self._context = LlamaContext(
            bindings,
            model,
            n_ctx=n_ctx,
            n_ubatch=n_ctx,
            threads=threads,
            # The last layer sees those tokens alone that want logits.
            outputs=outputs or n_ctx,
            flash_attention=True,
            cb_eval=self._callback,
            # Each has cells of its own, so that none looks at another's.
            n_seq_max=sequences,
        )

    def read(self, tokens: Sequence[int]) -> None:
        """Evaluates at most n_ctx tokens on their own, in one batch. Raises NativeError."""
        self.read_each([tokens])

    def read_each(self, windows: Sequence[Sequence[int]], scored: np.ndarray | None = None) -> None:
        """Evaluates windows of at most n_ctx tokens in all, each as a sequence of its own, in one
        batch. scored: bool [n], which tokens get logits, None for all. Raises NativeError, with the
        store's own reason where the step failed for one."""
        n = sum(map(len, windows))
        if not 1 <= n <= self._context.n_ubatch:
            raise NativeError(f"{n} tokens do not fit a context of {self._context.n_ubatch}")
        self._context.forget_all()
        self._failed = False
        status = self._context.decode_each(
            [token for window in windows for token in window],
            [at for window in windows for at in range(len(window))],
            [sequence for sequence, window in enumerate(windows) for _ in window],
            scored,
        )
        if status != 0:
            if self._store is not None:
                self._store.check_step()
            raise NativeError(f"llama.cpp failed to evaluate {n} tokens")

    def logits(self, n: int) -> np.ndarray:
        """float32 [n, n_vocab] of the n tokens of the last read that got logits: a view, valid
        until the next one."""
        return self._context.logits(n)

    @interrupts.called_from_c
    def _on_tensor(self, address: int, ask: bool, _user: int | None) -> bool:
        # After an error, True when asked and False when it is computed ends the evaluation.
        if self._failed or interrupts.asked():
            return ask
        try:
            node = Node(self._lib, address)
            if not self._checked:
                node.check()
                self._checked = True
            if ask:
                return self._wanted(node)
            self._seen(node)
            return True
        except BaseException as error:  # noqa: BLE001 - read raises it, once C has returned
            interrupts.hand_over(error)
            self._failed = True
            return ask

    def close(self) -> None:
        """Frees the context, and what it owns; safe to call twice."""
        self._context.close()
        self.owned.close()


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
                f"{format_least(needed)}, {format_size(room.own)} of them for {room.use}",
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
