"""How far skipping experts moves an answer, found out while nobody asks: its tokens are computed
again, twice, once as they are and once with experts skipped as a policy does that spends a loss:
of those that happen to be missing, which are drawn here, the ones that are foreseen to lose least.
What is foreseen of these is too little, since errors in it choose them; so the scale has to be that
of what is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from orchestrator.allocation.estimate import Probed, depth_prior
from orchestrator.engine.driver import Driver
from orchestrator.engine.steps import Held
from orchestrator.engine.texts import log_softmax
from orchestrator.errors import NativeError
from orchestrator.events import SKIP, RouteEvent
from orchestrator.native.llama import LlamaContext

# Sequences of the context that a probe takes, behind those of conversations: what is computed as it
# is, and with skipping.
N_SEQUENCES = 2
# The share of a token's experts that are drawn to be missing, but for its first one, which no
# policy skips.
_MISSING = 0.5
# How strongly the price follows: by this share of what a token was off what is allowed.
_GAIN = 0.2
# More of one answer says little more about the next one.
_MOST_TOKENS = 256


def room_for(n_cached: int, n_tokens: int, n_ctx: int) -> int:
    """How many tokens of an answer may be probed beside what the context holds."""
    return max(0, min(n_tokens, _MOST_TOKENS, (n_ctx - n_cached) // N_SEQUENCES))


class Prober:
    """Probes answers, one after the other, so that they move by about what is allowed: a scale
    is another one for larger moves."""

    def __init__(self, first: int) -> None:
        """first: of its sequences, as llama.cpp calls them."""
        self._sequences = first, first + 1
        # In nats before the scale: what costs more is not skipped.
        self._price: float | None = None

    def probe(
        self,
        context: LlamaContext,
        driver: Driver,
        power: np.ndarray,
        held: Held,
        known: Probed,
        allowed: float,
        goes_on: Callable[[], bool],
    ) -> Probed | None:
        """Probes what is held, behind the tokens that stand before it. Each token is a
        step of its own, as it was, and errors add up behind each other as they do in an answer that
        skips. What is missing is read as in passing, so that what is in memory keeps its place;
        nothing else stays of it.

        power: as of Outputs. known: of earlier answers. allowed: nats a token. goes_on: asked
        before each token. Returns what was found until it ended; None where that is nothing, and
        where the sequence no longer holds it.
        """
        if context.length(held.sequence) < held.start:
            return None
        plainly, skippingly = self._sequences
        random = np.random.default_rng(known.answers)
        costs = depth_prior(len(power))[:, None] * power
        decision, store = driver.store.decision, driver.store
        dearest = float(costs.max())
        price = self._price or float(np.median(costs)) / driver.policy.shape.n_expert_used**2
        gates, skipping, in_step = np.zeros((2, len(power))), False, 0.0
        n, kl, lost = 0, 0.0, 0.0

        def on_route(event: RouteEvent) -> None:
            nonlocal in_step
            ids, squares = event.ids_array[0], np.square(event.weights_array[0], dtype=np.float64)
            decision.passing_array[:] = 1
            if skipping:
                bills = squares * costs[event.layer, ids]
                skipped = (random.random(len(ids)) < _MISSING) & (bills <= price)
                skipped[squares.argmax()] = False
                decision.tier_array[ids[skipped]] = SKIP
                in_step += float(bills[skipped].sum())
            else:
                gates[:, event.layer] += len(ids), squares.sum()
            store.apply(decision)

        def log_odds(token: int, at: int, sequence: int) -> np.ndarray:
            status = context.decode_each([token], [at], [sequence])
            driver.check(status)
            if status:
                raise NativeError("the probe was stopped")
            return log_softmax(context.logits()[0])

        try:
            with driver.unlearned(on_route):
                for sequence in self._sequences:
                    context.share(sequence, held.start, held.sequence)
                for at, token in enumerate(held.tokens[held.start :], held.start):
                    if not goes_on():
                        break
                    skipping = False
                    plain = log_odds(token, at, plainly)
                    skipping, in_step = True, 0.0
                    moved = log_odds(token, at, skippingly)
                    kl += max(0.0, float((np.exp(plain) * (plain - moved)).sum()))
                    lost, n = lost + in_step, n + 1
                    so_far = known + Probed.of_answer(n, kl, lost, gates)
                    off = 1 - in_step * so_far.scale / allowed if lost else 1.0
                    price = min(price * math.exp(_GAIN * max(-1.0, off)), dearest)
        except NativeError:
            pass  # it was stopped, or something cannot be read: the token that needs it says why
        finally:
            self._price = price
            for sequence in self._sequences:
                context.forget_from(0, sequence)
                driver.sequence_end(sequence)
        return Probed.of_answer(n, kl, lost, gates) if lost else None
