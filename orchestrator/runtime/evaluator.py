"""Token-by-token evaluation with a loaded model, while nothing else computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost.losses import LossModel
from orchestrator.errors import ConfigError, NativeError
from orchestrator.events import Phase
from orchestrator.native import Store
from orchestrator.native.llama import LlamaContext, Model
from orchestrator.plan.records import Plan
from orchestrator.policy import Policy
from orchestrator.runtime.driver import Driver
from orchestrator.runtime.load import Loaded


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 [..., n_vocab] of logits of the same shape."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


@dataclass(frozen=True)
class Inside:
    """The parts of a loaded model, for programs that measure or replace them.

    Valid until the model is loaded again. driver, store and policy are there only if the experts
    live in the store: each raises ConfigError otherwise. losses: the cost of lower precisions, if
    the model has a loss table.
    """

    loaded: Loaded
    model: ExpertModel
    losses: LossModel

    @property
    def managed(self) -> bool:
        """Whether the experts live in the store; False on llama.cpp's own path."""
        return self.loaded.driver.store is not None

    @property
    def driver(self) -> Driver:
        """The loop between the policy and the store."""
        return self.loaded.store_driver

    @property
    def store(self) -> Store:
        """The slots of experts and their counters."""
        return self.driver.store

    @property
    def policy(self) -> Policy:
        """The policy that decides."""
        return self.driver.policy

    @property
    def plan(self) -> Plan:
        """The memory plan: sizes of weights, expert slots and context."""
        return self.loaded.plan

    @property
    def config(self) -> Config:
        """The settings with which the model was loaded."""
        return self.loaded.runs.config

    @property
    def llama(self) -> Model:
        """llama.cpp's model and vocabulary."""
        return self.loaded.model

    @property
    def context(self) -> LlamaContext:
        """llama.cpp's context."""
        return self.loaded.context


class Evaluator:
    """Evaluates tokens that the caller chooses and returns their logits.

    `Runtime.evaluator` makes one and says how long it may be used. It has one sequence of its own,
    which eval and eval_each extend, and `Needs.sequences` others, which fork and decode_batch use.
    inside: what the model is made of. costs: returns what was used since the context was lent, by
    the names of GenerationStats.
    """

    def __init__(self, inside: Inside, costs: Callable[[], dict[str, Any]]) -> None:
        self.inside, self.costs = inside, costs
        loaded = inside.loaded
        self._loaded = loaded
        self._steps = loaded.steps

    @property
    def config(self) -> Config:
        """The settings with which the model was loaded."""
        return self.inside.config

    @property
    def plan(self) -> Plan:
        """The memory plan: sizes of weights, expert slots and context."""
        return self.inside.plan

    @property
    def n_ctx(self) -> int:
        """Tokens that fit the context."""
        return self._loaded.context.n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens that the evaluator's own sequence holds."""
        return len(self._steps.cached)

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        special: names of control tokens in the text become those tokens, and the begin token comes
        first if the model wants one.
        """
        return self._loaded.model.tokenize(text, add_special=special, parse_special=special)

    def eval(self, tokens: Sequence[int], pos: int, phase: Phase | None = None) -> np.ndarray:
        """Evaluate tokens at positions pos, pos + 1, ... after dropping the cache from pos on.

        Returns a copy of the last token's logits, float32 [1, n_vocab]. phase: what the policy is
        told; by default decode for a single token and prefill for more. More tokens than a
        micro-batch take several steps. Raises ConfigError for a position that the cache does not
        reach, and NativeError for a step that failed or was cancelled.
        """
        for _ in self._evaluated(tokens, pos, phase):
            pass
        logits: np.ndarray = self._loaded.context.logits().copy()
        return logits

    def eval_each(
        self, tokens: Sequence[int], pos: int, phase: Phase | None = None
    ) -> Iterator[np.ndarray]:
        """Evaluate tokens as eval does, but yield the logits of every token.

        Each array is a view that is valid until the next one. The model has to be loaded with
        `Config.logits_all`, or with `Needs.scored` for steps of at most so many tokens; otherwise
        ConfigError is raised.
        """
        at_once = None if self.config.logits_all else self._loaded.context.outputs
        if at_once is not None and not self._loaded.runs.request.needs.scored:
            raise ConfigError("the model was loaded without memory for every token's logits")
        for n in self._evaluated(tokens, pos, phase, each=True, at_once=at_once):
            yield self._loaded.context.logits(n)

    def _evaluated(
        self,
        tokens: Sequence[int],
        pos: int,
        phase: Phase | None,
        each: bool = False,
        at_once: int | None = None,
    ) -> Iterator[int]:
        """Yield the number of tokens of each step after it."""
        steps = self._steps
        if not tokens or not 0 <= pos <= len(steps.cached):
            raise ConfigError(f"cannot evaluate {len(tokens)} tokens at position {pos}")
        if phase is None:
            phase = Phase.DECODE if len(tokens) == 1 else Phase.PREFILL
        steps.begin()
        steps.rewind(pos)
        if len(steps.cached) != pos:
            raise NativeError("this model's memory cannot be cut in the middle")
        at_once = at_once or self.plan.micro_batch(pos, len(tokens))
        for start in range(0, len(tokens), at_once):
            part = list(tokens[start : start + at_once])
            if not steps.step(part, phase, each):
                raise NativeError("the evaluation was cancelled")
            yield len(part)

    def fork(self, sequence: int) -> None:
        """Let a sequence of decode_batch continue from the tokens of the evaluator's own sequence.

        Its own tokens are dropped before; the new ones are shared, not copied. Raises ConfigError
        for a sequence that the model was not loaded with.
        """
        self._steps.fork(sequence)

    def decode_batch(self, tokens: Sequence[int], sequences: Sequence[int]) -> np.ndarray:
        """Evaluate one more token of each of several sequences, 0 to Needs.sequences - 1, in one
        step.

        Returns a copy of their logits, float32 [len(tokens), n_vocab]. A step that fails leaves the
        sequences as they were. Raises ConfigError for sequences that cannot share a step and for a
        full context, and NativeError for a step that failed or was cancelled.
        """
        self._steps.begin()
        if not self._steps.step_each(tokens, sequences):
            raise NativeError("the evaluation was cancelled")
        logits: np.ndarray = self._loaded.context.logits(len(tokens)).copy()
        return logits

    def reset(self) -> None:
        """Forget every token of every sequence. The experts stay in memory."""
        self._steps.reset()

    def cancel(self) -> None:
        """End the running step soon; safe in a signal handler and from any thread."""
        self._steps.cancel()
