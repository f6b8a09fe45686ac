"""What the layers tell each other: the router's choice, its answer, an answer's costs.

RouteEvent, StoreView and DecisionBuffer are views of the native store's own memory.
They are built once per store; their contents are valid only while a route callback
runs. Inputs are read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal, overload

import numpy as np

SKIP = 255  # tier of an expert that contributes nothing
SKIP_TIER = "skip"  # its name
ABSENT = 254  # residency: no tier of the expert is in memory
MAX_PREFETCH = 1024
ALL_KINDS = 0  # in a prefetch request: every matrix of the layer


class Phase(IntEnum):
    """What a token, or a step, is for: a step with a token of a prompt is prefill."""

    PREFILL = 0
    DECODE = 1


@overload
def served(asked: int, resident: int) -> int: ...
@overload
def served(asked: int | np.ndarray, resident: np.ndarray) -> np.ndarray: ...
def served(asked: int | np.ndarray, resident: int | np.ndarray) -> int | np.ndarray:
    """The tier in which an expert is computed that is asked for in one: a better copy that is in
    memory serves as well. asked: a tier or SKIP; resident: the best tier in memory, or ABSENT."""
    if isinstance(asked, int) and isinstance(resident, int):
        return asked if asked == SKIP else min(asked, resident)
    found: np.ndarray = np.where(np.equal(asked, SKIP), SKIP, np.minimum(asked, resident))
    return found


# Memoryviews of single rows beside numpy: turning one into a list costs a third.
def _rows(array: np.ndarray, code: Literal["i", "f", "B"]) -> tuple[memoryview, ...]:
    """A read-only memoryview for each row of a two-dimensional array."""
    return tuple(row.data.cast("B").cast(code).toreadonly() for row in array)


def _frozen(array: np.ndarray) -> np.ndarray:
    view: np.ndarray = array.view()
    view.flags.writeable = False
    return view


class RouteEvent:
    """What the router of one MoE layer chose for the T tokens of a step.

    layer counts MoE layers only; phase is the step's; step counts steps.
    k experts a token in this layer; n_ahead look-ahead layers present: layer+1 .. layer+n_ahead.
    What is predicted is as wide as in the layer that uses most: behind what a layer uses, its first
    expert comes again, with a score of 0.

    Read-only memoryviews of the first token, the only one of a decode step:
        ids, weights     [k]  chosen experts and their routing weights
        ahead_ids[p]     [k]  experts that layer+1+p is predicted to choose, best first
        ahead_scores[p]  [k]  their scores
    Read-only arrays of all tokens:
        ids_array int32, weights_array float32 [T, k]; tokens_array int32 [T], the position
        of each token in its batch; phases_array uint8 and sequences_array int32 [T], the Phase of
        each token and the sequence that it belongs to; ahead_ids_array int32 and ahead_array
        float32 [n_ahead, T, k], predicted top-k and their scores (DyMoE eq. 6); importance_array
        float32 [T], the attention that each token receives (eq. 1), where has_importance
    """

    def __init__(
        self,
        ids: np.ndarray,
        weights: np.ndarray,
        tokens: np.ndarray,
        ahead_ids: np.ndarray,
        ahead: np.ndarray,
        importance: np.ndarray,
        phases: np.ndarray,
        sequences: np.ndarray,
    ) -> None:
        """ids int32 [max_tokens, k], weights float32 alike, tokens int32 [max_tokens],
        ahead_ids int32 and ahead float32 [P, max_tokens, k], importance float32, phases uint8 and
        sequences int32 [max_tokens]."""
        self._ids = _frozen(ids)
        self._weights = _frozen(weights)
        self._tokens = _frozen(tokens)
        self._ahead_ids = _frozen(ahead_ids)
        self._ahead = _frozen(ahead)
        self._importance = _frozen(importance)
        self._phases = _frozen(phases)
        self._sequences = _frozen(sequences)
        self._first = (*_rows(ids[:1], "i"), *_rows(weights[:1], "f"))
        self.use(ids.shape[1])
        self.ahead_ids = _rows(ahead_ids[:, 0], "i")
        self.ahead_scores = _rows(ahead[:, 0], "f")
        self.layer = 0
        self.phase = int(Phase.DECODE)
        self.n_tokens = 1
        self.n_ahead = 0
        self.has_importance = 0
        self.step = 0

    def use(self, k: int) -> None:
        """The event is of a layer in which a token uses k experts."""
        self.k = k
        self.ids, self.weights = (row[:k] for row in self._first)

    @property
    def ids_array(self) -> np.ndarray:
        return self._ids[: self.n_tokens, : self.k]

    @property
    def weights_array(self) -> np.ndarray:
        return self._weights[: self.n_tokens, : self.k]

    @property
    def filled(self) -> tuple[np.ndarray, np.ndarray]:
        """ids_array and weights_array as wide as in the layer that uses most: behind k, a row's
        first expert comes again, with a weight of 0."""
        return self._ids[: self.n_tokens], self._weights[: self.n_tokens]

    @property
    def tokens_array(self) -> np.ndarray:
        return self._tokens[: self.n_tokens]

    @property
    def phases_array(self) -> np.ndarray:
        return self._phases[: self.n_tokens]

    @property
    def sequences_array(self) -> np.ndarray:
        return self._sequences[: self.n_tokens]

    @property
    def ahead_ids_array(self) -> np.ndarray:
        return self._ahead_ids[: self.n_ahead, : self.n_tokens]

    @property
    def ahead_array(self) -> np.ndarray:
        return self._ahead[: self.n_ahead, : self.n_tokens]

    @property
    def importance_array(self) -> np.ndarray | None:
        return self._importance[: self.n_tokens] if self.has_importance else None


class StoreView:
    """What is in memory now: resident[layer][expert] is the best tier of which every matrix
    is resident, or ABSENT; resident_array uint8 [n_layers, n_expert] is the same memory.
    missing[layer][expert] has the bits 1 << kind of its matrices that are there in no tier."""

    def __init__(self, resident: np.ndarray, missing: np.ndarray) -> None:
        """Both uint8 [n_layers, n_expert]."""
        self.resident, self.missing = _rows(resident, "B"), _rows(missing, "B")
        self.resident_array = _frozen(resident)


class DecisionBuffer:
    """The answer to a route event, written in place.

    tier[expert] starts as 0 (the best tier) for every expert before each event; only
    routed experts are read. A tier index or SKIP. passing[expert] starts as 0: 1 streams
    the expert through memory, so that what is used often stays (moe-edge.h). renormalize:
    the remaining weights of a token keep their sum when experts of it are skipped.
    """

    def __init__(self, tier: np.ndarray, passing: np.ndarray, prefetch: np.ndarray) -> None:
        """tier and passing uint8 [n_expert], prefetch int64 [capacity], all writable."""
        self.tier = tier.data
        self.tier_array = tier
        self.passing_array = passing
        self._prefetch = prefetch.data.cast("B").cast("q")
        self.n_prefetch = 0
        self.renormalize = False

    def prefetch(self, layer: int, expert: int, tier: int, passing: int = 0) -> None:
        """Asks for an expert before it is needed, most urgent first. What is over the buffer's
        capacity is dropped: a prefetch is never owed."""
        n = self.n_prefetch
        if n < len(self._prefetch):
            self._prefetch[n] = layer | expert << 16 | tier << 32 | passing << 48
            self.n_prefetch = n + 1

    def prefetch_all(
        self, layer: int, experts: Sequence[int], tier: int, kinds: int = ALL_KINDS
    ) -> None:
        """prefetch() of each of them, in one call: a decode step's time. kinds is a bit mask of
        matrix kinds."""
        prefetch, n = self._prefetch, self.n_prefetch
        rest = layer | tier << 32 | kinds << 40
        for expert in experts[: len(prefetch) - n]:
            prefetch[n] = rest | expert << 16
            n += 1
        self.n_prefetch = n


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """What the store says of a step that a model computed, in microseconds from its start to its
    end. By sequence name: starts, those with a first token in it; prompt_ends, those with a token
    of a prompt whose logits were asked for; ends, those dropped since the step before."""

    number: int
    phase: Phase
    n_tokens: int
    us: float
    starts: tuple[int, ...]
    prompt_ends: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a policy is told of one finished step: tokens in it, and microseconds from its start
    to its end.

    What the policy asks for besides, [n_layers, n_expert] each, None in a step for which it does
    not want it: counts, the tokens routed to each expert since the last report that had them;
    resident, uint8, the tier that each expert is in, or ABSENT; target, the tier that a transition
    brings, the same one where none is under way. By sequence name: starts, those that began in this
    step; prompt_ends, those whose prompt ended in it; ends, those dropped
    since the step before. unusual: whether the latest ROUTING_TOKENS tokens use experts in another
    way than the texts of the loss table, in the report that finds it out; else None.
    """

    phase: Phase
    n_tokens: int
    us: float
    counts: np.ndarray | None = None
    resident: np.ndarray | None = None
    target: np.ndarray | None = None
    starts: tuple[int, ...] = ()
    prompt_ends: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    unusual: bool | None = None


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one answer cost. Times in milliseconds unless named otherwise.

    ttft_ms runs from the call until the first token is chosen. tpot is the time between
    tokens after it; nan with fewer than two. hit_rate is the share of matrices whose
    asked-for tier (or a better one) was in memory while decoding; prefill_hit_rate the
    same in prefill; None where nothing was asked for. mix: shares of the routed experts by
    decided tier, while decoding; computed: of the matrices by the tier that was computed, which is
    a better one where that was in memory. kl_estimate: nats a token from the best tier in use, as
    orchestrator.allocation.estimate has it for texts that are sensitive to errors; kl_low: for
    those that are not; both None where that is not known. limit_halved: whether the policy spent
    half of the loss that is allowed in a part of the answer, since the text used experts in another
    way than the texts of the loss table. budget_bytes is the budget of the expert slots. policy is
    what the policy reports about itself.
    """

    ttft_ms: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    tokens: int
    tokens_per_s: float
    prompt_tokens: int
    evaluated_tokens: int
    hit_rate: float | None
    prefill_hit_rate: float | None
    bytes_read: int
    wait_ms: float
    mix: dict[str, float]
    computed: dict[str, float]
    peak_rss_bytes: int
    budget_bytes: int
    mode: str
    callback_us_p50: float | None
    finish: str
    policy: dict[str, Any]
    kl_estimate: float | None = None
    kl_low: float | None = None
    limit_halved: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain types, nan turned into None: fit for JSON."""
        return {
            key: None if isinstance(value, float) and value != value else value
            for key, value in asdict(self).items()
        }


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) with linear interpolation; nan of nothing."""
    if not len(values):
        return float("nan")
    found = sorted(map(float, values))
    whole, part = divmod((len(found) - 1) * (q / 100), 1)
    low, high = found[int(whole)], found[min(int(whole) + 1, len(found) - 1)]
    # From the nearer end, so that rounding leaves neither.
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)


def distinct(numbers: np.ndarray) -> np.ndarray:
    """The numbers that occur in an array of any shape, none of them below 0: int64 [n], sorted.

    np.unique, np.percentile and np.median load numpy.ma, which takes memory of a run that counts
    each MiB, 9 MiB of it where no compiled form of it is on disk.
    """
    return np.flatnonzero(np.bincount(numbers.ravel()))
