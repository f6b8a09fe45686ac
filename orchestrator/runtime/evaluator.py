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
    """Return the log-probabilities of logits [..., n_vocab], as float64 of the same shape."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


@dataclass(frozen=True)
class Inside:
    """The parts of a loaded model, for programs that measure or replace them.

    The object is valid until the model is loaded again. On llama.cpp's own path (`--policy plain`),
    the properties driver, store and policy raise ConfigError. model: the layout of the model's
    files. losses: estimates the quality loss of lower precisions from the model's loss table.
    """

    loaded: Loaded
    model: ExpertModel
    losses: LossModel

    @property
    def managed(self) -> bool:
        """Whether an expert store holds the experts; False on llama.cpp's own path."""
        return self.loaded.driver.store is not None

    @property
    def driver(self) -> Driver:
        """The driver, which connects the policy with the expert store."""
        return self.loaded.store_driver

    @property
    def store(self) -> Store:
        """The expert store, which holds experts in slots and counts hits and reads."""
        return self.driver.store

    @property
    def policy(self) -> Policy:
        """The policy, which decides the precision in which each expert is computed."""
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
        """llama.cpp's model, with its vocabulary."""
        return self.loaded.model

    @property
    def context(self) -> LlamaContext:
        """llama.cpp's context, with the KV cache."""
        return self.loaded.context


class Evaluator:
    """Evaluates tokens that the caller chooses, and returns their logits.

    Use it in a `with` block of `Runtime.evaluator`. The methods eval and eval_each append tokens to
    one sequence, the main sequence. If the model was loaded with `Needs.sequences`, there are
    additional sequences, to which decode_batch appends tokens.

    - inside: gives access to the loaded model, such as its policy, expert store and llama.cpp
      context.
    - costs: returns measurements since the block began, such as hit_rate, by field names of
      GenerationStats.
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
        """Number of tokens that fit the context."""
        return self._loaded.context.n_ctx

    @property
    def n_cached(self) -> int:
        """Number of tokens that the main sequence holds."""
        return len(self._steps.cached)

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        special: parse the names of control tokens in the text, and begin with the BOS token if the
        model uses one.
        """
        return self._loaded.model.tokenize(text, add_special=special, parse_special=special)

    def eval(self, tokens: Sequence[int], pos: int, phase: Phase | None = None) -> np.ndarray:
        """Evaluate tokens of the main sequence at positions pos, pos + 1, and so on.

        Tokens that the sequence holds from pos on are dropped first. Returns a copy of the last
        token's logits, float32 [1, n_vocab]. phase: the phase that is reported to the policy. By
        default, a single token is decode, and more tokens are prefill. Tokens that exceed a
        micro-batch take several steps.

        Raises ConfigError if pos is beyond the end of the sequence. Raises NativeError if a step
        fails or is cancelled.
        """
        for _ in self._evaluated(tokens, pos, phase):
            pass
        logits: np.ndarray = self._loaded.context.logits().copy()
        return logits

    def eval_each(
        self, tokens: Sequence[int], pos: int, phase: Phase | None = None
    ) -> Iterator[np.ndarray]:
        """Evaluate tokens of the main sequence from position pos on, and yield all their logits.

        Each step yields one array, float32 [tokens of the step, n_vocab]. The array is a view that
        is valid until the next step. Tokens that the sequence holds from pos on are dropped first.
        Raises ConfigError if the model was loaded without memory for these logits
        (`Config.logits_all` or `Needs.scored`). Raises NativeError if a step fails or is cancelled.
        """
        at_once = None if self.config.logits_all else self._loaded.context.outputs
        if at_once is not None and not self._loaded.runs.request.needs.scored:
            raise ConfigError(
                "the model was loaded without memory for every token's logits: load it with "
                "Config.logits_all or Needs.scored"
            )
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
        """Evaluate tokens in steps from position pos on, and yield the size of each step in tokens.

        each: compute the logits of every token, instead of only the last token of a step. at_once:
        largest number of tokens in a step; None for the micro-batch size of the plan.
        """
        steps = self._steps
        if not tokens or not 0 <= pos <= len(steps.cached):
            raise ConfigError(
                f"cannot evaluate {len(tokens)} tokens at position {pos}: give one token "
                f"or more, and a position from 0 to {len(steps.cached)}, the length of the sequence"
            )
        if phase is None:
            phase = Phase.DECODE if len(tokens) == 1 else Phase.PREFILL
        steps.begin()
        steps.rewind(pos)
        if len(steps.cached) != pos:
            raise NativeError(
                f"this model cannot drop the tokens from position {pos} on: evaluate the whole "
                "sequence again from position 0"
            )
        at_once = at_once or self.plan.micro_batch(pos, len(tokens))
        for start in range(0, len(tokens), at_once):
            part = list(tokens[start : start + at_once])
            if not steps.step(part, phase, each):
                raise NativeError("the evaluation was cancelled")
            yield len(part)

    def fork(self, sequence: int) -> None:
        """Make another sequence continue from the tokens of the main sequence.

        sequence: number of the other sequence, as for decode_batch. It drops its former tokens, and
        shares the KV cells of the main sequence. Raises ConfigError if the sequence does not exist.
        """
        self._steps.fork(sequence)

    def decode_batch(self, tokens: Sequence[int], sequences: Sequence[int]) -> np.ndarray:
        """Append one token to each of several sequences, and evaluate these tokens in one step.

        sequences: the sequence of each token. Numbers begin at 0 and do not include the main
        sequence. Returns a copy of the logits, float32 [len(tokens), n_vocab]. If the step fails,
        its tokens are dropped again. Raises ConfigError if the context is full, and if a sequence
        is named twice or does not exist. Raises NativeError if the step fails or is cancelled.
        """
        self._steps.begin()
        if not self._steps.step_each(tokens, sequences):
            raise NativeError("the evaluation was cancelled")
        logits: np.ndarray = self._loaded.context.logits(len(tokens)).copy()
        return logits

    def reset(self) -> None:
        """Drop all tokens of all sequences. The experts stay in memory."""
        self._steps.reset()

    def cancel(self) -> None:
        """Make the running step end soon. Safe in a signal handler and on any thread."""
        self._steps.cancel()
