"""Observes a model's tensors while it reads a text, with llama.cpp's evaluation callback.

Under a memory cap, the experts come through the store, losslessly in the best precision. The memory
of the observing code is subtracted from the cap first.
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
from orchestrator.plan.records import Needs, PlanRequest
from orchestrator.policy import BASELINE
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.load import Loader

_NUMBERS = {0: np.float32, 26: np.int32}


class _Tensor(ctypes.Structure):
    """The first fields of the C struct ggml_tensor, up to the tensor's name.

    ggml has functions that read the other fields, but none for the operands `src`. Node.check
    compares this layout with those functions.
    """

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
    """A tensor of llama.cpp's compute graph. Valid only during the callback that receives it."""

    def __init__(self, lib: Any, address: int) -> None:
        self._lib = lib
        self._address = address
        self._tensor = _Tensor.from_address(address)

    @property
    def name(self) -> str:
        return str(self._tensor.name, "utf-8", "replace")

    @property
    def op(self) -> str:
        """The name of the ggml operation that computes the tensor, such as MUL_MAT_ID."""
        return str(self._lib.ggml_op_desc(self._address), "ascii", "replace")

    def source(self, index: int) -> Node:
        """Return the tensor that is the operand with this index.

        Raises NativeError if the operation has no such operand.
        """
        address = self._tensor.src[index]
        if not address:
            raise NativeError(f"the operation of the tensor {self.name} has no operand {index}")
        return Node(self._lib, address)

    def array(self) -> np.ndarray:
        """Return a copy of the tensor's values, float32 or int32 [ne3, ne2, ne1, ne0].

        Raises NativeError for other types.
        """
        values: np.ndarray = self.view().copy()
        return values

    def view(self) -> np.ndarray:
        """Return the tensor's values without a copy, float32 or int32 [ne3, ne2, ne1, ne0].

        Writing to the array changes the computation. Raises NativeError for other types.
        """
        tensor = self._tensor
        kind = _NUMBERS.get(tensor.type)
        if kind is None:
            raise NativeError(
                f"the tensor {self.name} cannot be read: its type is neither float32 nor int32"
            )
        n_bytes = self._lib.ggml_nbytes(self._address)
        data = (ctypes.c_uint8 * n_bytes).from_address(tensor.data)
        shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        values: np.ndarray = np.ndarray(shape, kind, data, strides=strides)
        return values

    def check(self) -> None:
        """Check that this object reads the fields of its tensor from the right places in memory.

        Raises NativeError if ggml's own functions return another name, data address or number of
        dimensions. The loaded llama.cpp library then has another memory layout of tensors.
        """
        lib, tensor, at = self._lib, self._tensor, self._address
        if (
            lib.ggml_get_name(at) != tensor.name
            or lib.ggml_get_data(at) != tensor.data
            or lib.ggml_n_dims(at) != max([1, *(i + 1 for i in range(4) if tensor.ne[i] > 1)])
        ):
            raise NativeError("the layout of llama.cpp's tensors has changed: run `make build`")


def expert_product(node: Node, layer_of: Mapping[int, int]) -> tuple[int, int] | None:
    """Return (layer, kind) if a graph node multiplies by expert matrices, or else None.

    - layer: index of the layer among the model's MoE layers.
    - kind: index of the kind of matrix in KINDS, such as the index of "up".

    `layer_of` maps layer numbers to these indices. A layer number is part of a tensor's name, such
    as 5 in "blk.5.ffn_up_exps.weight". A layer that is missing in `layer_of` is ignored: the result
    is None.
    """
    parsed = parse_expert_name(node.source(0).name) if node.op == "MUL_MAT_ID" else None
    layer = layer_of.get(parsed.il) if parsed else None
    return None if parsed is None or layer is None else (layer, parsed.kind)


class Observer(Closing):
    """A llama.cpp context that passes selected tensors of the graph to a callback.

    Free it with close. `owned` is an exit stack that is closed after the context. Callers add to it
    what the context needs, such as the model.
    """

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
        """Create the context.

        - wanted: returns True for the tensors to observe. It is called before a tensor is computed.
        - seen: receives each of these tensors after it is computed.
        - store: the store that supplies the model's experts; None if llama.cpp has loaded them.
        - sequences: maximum number of sequences per batch. Each one gets an equal share of n_ctx.
        - outputs: maximum number of tokens with logits; None means all.

        The methods that evaluate raise the exceptions of `wanted` and `seen`. Raises NativeError if
        the context cannot be created.
        """
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
            # Compute logits only for this number of tokens. The last layer then computes only these
            # tokens.
            outputs=outputs or n_ctx,
            flash_attention=True,
            cb_eval=self._callback,
            # Give each sequence its own KV cells, so that it does not attend to the others.
            n_seq_max=sequences,
        )

    def read(self, tokens: Sequence[int]) -> None:
        """Evaluate at most n_ctx tokens as one sequence in one batch.

        Raises NativeError if the evaluation fails.
        """
        self.read_each([tokens])

    def read_each(self, windows: Sequence[Sequence[int]], scored: np.ndarray | None = None) -> None:
        """Evaluate several token lists in one batch, each as its own sequence from position 0.

        Afterwards, the method `logits` returns the logits.

        - windows: the token lists, with at most n_ctx tokens in total.
        - scored: which tokens get logits, bool [n] for the n tokens of all lists in order. None
          selects all tokens.

        Raises NativeError if the evaluation fails.
        """
        n = sum(map(len, windows))
        if not 1 <= n <= self._context.n_ubatch:
            raise NativeError(f"{n} tokens do not fit a context of {self._context.n_ubatch} tokens")
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
        """Return the logits of the last evaluation, float32 [n, n_vocab].

        n is the number of tokens whose logits were computed. The array is a view that is valid
        until the next evaluation.
        """
        return self._context.logits(n)

    @interrupts.called_from_c
    def _on_tensor(self, address: int, ask: bool, _user: int | None) -> bool:
        # After an error, end the evaluation. The result that ends it is True before a tensor is
        # computed, and False afterwards.
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
        except BaseException as error:  # noqa: BLE001 - raised again after C has returned
            interrupts.hand_over(error)
            self._failed = True
            return ask

    def close(self) -> None:
        """Free the context, and then the objects that it needs, such as the model (see `owned`).

        A second call has no effect.
        """
        self._context.close()
        self.owned.close()


# Number of float32 copies of the expert inputs that are in memory at a time.
_COPIES = 4


class CalibrationBudget(NamedTuple):
    """The memory cap of a process that loads a model and reads a text.

    - ram: the cap, in bytes.
    - own: number of bytes of the cap that are reserved for the process's own data.
    - use: purpose of this data, for error messages.
    """

    ram: int
    own: int
    use: str = "the calibration itself"


def expert_input_bytes(model: ExpertModel, n_ctx: int) -> int:
    """Return how much memory is needed to record the inputs of a model's experts, in bytes.

    The inputs are recorded while the model reads a text. They are in memory for only one layer at a
    time, in several copies.

    - n_ctx: number of tokens that the model reads at once.
    """
    embd = model.hparams.embedding_length
    n_ff = max(shape[0] for layer in model.shapes if (shape := layer[DOWN]) is not None)
    return _COPIES * 4 * n_ctx * (embd + model.n_expert_used * n_ff)


def load_within(
    stack: ExitStack,
    path: Path,
    n_ctx: int,
    threads: int,
    budget: CalibrationBudget | None,
    sequences: int = 0,
    **more: Any,
) -> tuple[Model, Driver]:
    """Load a model within a memory cap, and return it with the driver of its expert cache.

    The caller must create a llama.cpp context for the model. Enough of the cap is left free for
    this context.

    - stack: frees the model and the expert cache when it is closed.
    - n_ctx: length of the context and size of its batch, in tokens.
    - budget: the memory cap; None means no cap.
    - sequences: number of sequences of the context, in addition to the first.
    - more: further settings of Config.build.

    Raises BudgetError with the minimum cap if the cap is too small.
    """
    with ExitStack() as own:
        model = own.enter_context(ExpertModel.open(path))
        settings = {"policy": BASELINE, "high_tier": model.tiers[0].name, "logits_all": True}
        config = Config.build(
            model=path,
            ctx=n_ctx,
            ubatch=n_ctx,
            threads=threads,
            # With at least 1 byte, planning fails with a message about the needed memory.
            ram=None if budget is None else max(1, budget.ram - budget.own),
            **settings | more,
        )
        loader = Loader(PlanRequest(config, Needs(sequences)), model)
        try:
            loaded = own.enter_context(closing(loader.load(loader.planner.runs(config))))
        except BudgetError as error:
            if budget is None:
                raise
            needed = error.needed_bytes + budget.own
            raise BudgetError(
                f"--ram {format_size(budget.ram)} is too small. The minimum is "
                f"{format_least(needed)}, including {format_size(budget.own)} for {budget.use}",
                needed,
            ) from error
        # Free this context, because the observer creates its own.
        loaded.context.close()
        driver = loaded.store_driver
        stack.enter_context(own.pop_all())
    return loaded.model, driver


def observe(
    path: Path,
    n_ctx: int,
    threads: int,
    wanted: Callable[[Node], bool],
    seen: Callable[[Node], None],
    budget: CalibrationBudget | None = None,
) -> Observer:
    """Load a model and return an observer of its compute graph.

    - wanted: returns whether a tensor of the graph should be observed.
    - seen: receives each observed tensor.
    - budget: a memory cap, with which experts are read from the file on demand. With None,
      llama.cpp maps the whole model.

    Raises GGUFError if the file is invalid, BudgetError if the cap is too small, and NativeError if
    the model cannot be loaded.
    """
    with ExitStack() as stack:
        if budget is None:
            store, bindings = None, Bindings.load()
            model = Model(bindings, path, managed=False, use_extra_bufts=False, use_mmap=True)
            stack.callback(model.close)
        else:
            model, driver = load_within(stack, path, n_ctx, threads, budget)
            store = driver.store
        observer = Observer(model, n_ctx, threads, wanted, seen, store=store)
        observer.owned = stack.pop_all()
    return observer
