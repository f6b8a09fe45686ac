"""Reads a text in as few steps as memory allows, so that each pass reads each expert about once.

Experts come through the store. The caller can lower or skip experts at random in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.closing import Closing
from gguf_tools.experts import ExpertModel
from gguf_tools.process import private_bytes
from orchestrator.cost.calibrating import LOGITS_BYTES
from orchestrator.errors import BudgetError
from orchestrator.events import DecisionBuffer, RouteEvent
from orchestrator.lab.observe import (
    CalibrationBudget,
    Node,
    Observer,
    expert_input_bytes,
    expert_product,
    load_within,
)
from orchestrator.plan.footprint import vocabulary_size
from orchestrator.policy import DEFAULT

# Maximum number of tokens and of sequences per step.
_MOST_TOKENS, _MOST_SEQUENCES = 8192, 250
# At most 1 / _LOGITS_SHARE of the memory cap is used for the logits of a step.
_LOGITS_SHARE = 8
# Name of the graph node that contains a layer's gate weights [T, k, 1], at the route hook.
_ROUTED = "moe_edge_route"
# Private memory of a process that has not loaded a model. After a model is freed, a process has
# more, because malloc keeps freed memory.
_OWN_BYTES = 38 << 20

# A callback for each layer of a step. It sets the tiers of experts. It returns a mask, bool [T, k],
# of the experts that each token skips, or None.
Change = Callable[[RouteEvent, DecisionBuffer], np.ndarray | None]
# A callback that receives (layer, matrix kind, computed product of the expert matrices).
Seen = Callable[[int, int, Node], None]


class Step(NamedTuple):
    """The logits of one evaluation step, in which several windows (pieces of text) were read.

    Logits were computed for n tokens of the windows.

    - windows: the indices of the windows that were read. windows[i] was read as sequence i.
    - logits: float32 [n, n_vocab], in the order of the text. They are valid until the next step.
    - of: int [n]. logits[j] belongs to a token of the window windows[of[j]].

    Example: with windows [4, 5] and of [0, 0, 1], logits[0] and logits[1] are from window 4, and
    logits[2] is from window 5.
    """

    windows: list[int]
    of: np.ndarray
    logits: np.ndarray


class TextReader(Closing):
    """A loaded model that can read one text several times.

    In each reading, some experts can be skipped or computed in a lower precision. The text consists
    of windows (pieces of text). Several windows are read together in each step. Free the object
    with close.

    - steps: for each step, the indices of its windows.
    - reading: the indices of the windows of the current step.
    - scored: for each window, a bool array with one value per token. True means that the logits of
      the token are computed.
    """

    def __init__(
        self,
        path: Path,
        windows: Sequence[Sequence[int]],
        threads: int,
        ram: int | None,
        low: str | None = None,
        scored: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Load the model, with steps that contain as many tokens as fit in memory.

        - ram: memory cap in bytes; None means no cap.
        - low: precision (tier) to which experts may be lowered; None keeps the best tier.
        - scored: bool [n] for each window; True for tokens whose logits should be computed. None
          chooses the tokens. Fewer tokens are used if memory is short.

        Raises BudgetError with the minimum cap if `ram` is too small, and the exceptions of loading
        a model.
        """
        self._windows = windows
        with ExpertModel.open(path) as model:
            n_vocab = vocabulary_size(model)
            self._layer_of = {il: layer for layer, il in enumerate(model.layer_ids)}
            window_of = partial(expert_input_bytes, model)
        total, longest = sum(map(len, windows)), max(map(len, windows))
        logits_bytes = LOGITS_BYTES if ram is None else ram // _LOGITS_SHARE
        sizes = [min(total, _MOST_TOKENS)]
        while sizes[-1] > longest:
            sizes.append(max(longest, sizes[-1] // 2))
        if scored is None:
            scored = _scored(windows, logits_bytes // (8 * n_vocab))
        # Try the least memory last: one window per step, with the logits of only one token.
        last = [np.arange(len(each)) == np.flatnonzero(each)[-1] for each in scored]
        tried = [*((size, scored) for size in sizes), (longest, last)]
        more: dict[str, Any] = {"logits_all": False}
        if low is not None:
            more |= {"policy": DEFAULT, "low_tier": low, "prefetch": "off", "exact_tiers": True}
        self._mask: np.ndarray | None = None
        self._seen: Seen | None = None
        self._masks = False
        with ExitStack() as stack:
            for size, self.scored in tried:
                self.steps = list(_steps(windows, size))
                outputs = max(sum(int(self.scored[n].sum()) for n in step) for step in self.steps)
                sequences = max(map(len, self.steps))
                own = window_of(size) + 8 * n_vocab * outputs
                own += max(0, private_bytes() - _OWN_BYTES)
                budget = None if ram is None else CalibrationBudget(ram, own)
                try:
                    loaded, self._driver = load_within(
                        stack, path, size, threads, budget, sequences, **more
                    )
                    break
                except BudgetError:
                    if self.scored is not scored:
                        raise
            self.reading = self.steps[0]
            self._driver.store.set_step_done(None)
            self._driver.set_route(self._route)
            self._observer = Observer(
                loaded,
                size,
                threads,
                self._is_wanted,
                self._on_node,
                store=self._driver.store,
                sequences=sequences,
                outputs=outputs,
            )
            self._observer.owned = stack.pop_all()

    def read(self, change: Change, seen: Seen | None = None, masks: bool = False) -> Iterator[Step]:
        """Read the whole text once, and yield the logits of each step as a Step.

        In each step, the model reads several windows (pieces of the text) in one batch.

        - change: called in each layer. It may lower the precision of experts, or skip them.
        - seen: receives each computed product of a layer's expert matrices.
        - masks: whether `change` may skip an expert for some tokens but not for others.

        Raises NativeError if the evaluation fails, and the exceptions of `change` and `seen`.
        """
        self._change, self._seen, self._masks = change, seen, masks
        for numbers in self.steps:
            self.reading = numbers
            scored = np.concatenate([self.scored[each] for each in numbers])
            self._observer.read_each([self._windows[each] for each in numbers], scored)
            of = np.repeat(np.arange(len(numbers)), [self.scored[n].sum() for n in numbers])
            yield Step(numbers, of, self._observer.logits(len(of)))

    def _route(self, event: RouteEvent) -> None:
        decision = self._driver.store.decision
        self._mask = self._change(event, decision)
        self._driver.store.apply(decision)

    def _is_wanted(self, node: Node) -> bool:
        if node.name == _ROUTED:
            return self._masks
        return self._seen is not None and expert_product(node, self._layer_of) is not None

    def _on_node(self, node: Node) -> None:
        if node.name == _ROUTED:
            if self._mask is not None:
                node.view()[0, :, :, 0][self._mask] = 0.0
            return
        product = expert_product(node, self._layer_of)
        if product is not None and self._seen is not None:
            self._seen(*product, node)

    def close(self) -> None:
        """Free the context and the model. A second call has no effect."""
        self._observer.close()


def _steps(windows: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield the indices of the windows (pieces of text) to read in each step.

    A step has at most `size` tokens, except if a single window has more.
    """
    step: list[int] = []
    left = size
    for number, window in enumerate(windows):
        if len(window) > left or len(step) == _MOST_SEQUENCES:
            yield step
            step, left = [], size
        step.append(number)
        left -= len(window)
    yield step


def _scored(windows: Sequence[Sequence[int]], most: int) -> list[np.ndarray]:
    """Choose the tokens whose logits are computed, evenly spread over the windows.

    About `most` tokens are chosen in total, and at least one per window. Returns bool [n] for each
    window.
    """
    n = sum(map(len, windows))
    every = max(1, -(-n // max(1, most)))
    found = []
    for window in windows:
        chosen = np.zeros(len(window), bool)
        chosen[min(len(window) - 1, every // 2) :: every] = True
        found.append(chosen)
    return found
