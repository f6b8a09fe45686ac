"""The data that passes between store, policy and callers: route events, decisions, step reports.

RouteEvent, StoreView and DecisionBuffer are views of the native store's own memory. They are built
once per store, and their contents are valid only while a route callback runs. Inputs are read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal, overload

import numpy as np

SKIP = 255  # tier of an expert that is not computed
SKIP_TIER = "skip"  # the name of that tier
ABSENT = 254  # residency of an expert of which no tier is in memory
MAX_PREFETCH = 1024
ALL_KINDS = 0  # in a prefetch request: every matrix of the expert


class Phase(IntEnum):
    """The purpose of a token or step. A step with at least one prompt token is prefill."""

    PREFILL = 0
    DECODE = 1


@overload
def served(asked: int, resident: int) -> int: ...
@overload
def served(asked: int | np.ndarray, resident: np.ndarray) -> np.ndarray: ...
def served(asked: int | np.ndarray, resident: int | np.ndarray) -> int | np.ndarray:
    """Return the tier in which an expert is computed.

    It is the requested tier, or a better one if it is resident. asked: a tier or SKIP. resident:
    the best tier in memory, or ABSENT.
    """
    if isinstance(asked, int) and isinstance(resident, int):
        return asked if asked == SKIP else min(asked, resident)
    found: np.ndarray = np.where(np.equal(asked, SKIP), SKIP, np.minimum(asked, resident))
    return found


# Memoryviews of single rows: converting one to a list takes a third of the time of a numpy array.
def _rows(array: np.ndarray, code: Literal["i", "f", "B"]) -> tuple[memoryview, ...]:
    """Return a read-only memoryview of each row of a two-dimensional array."""
    return tuple(row.data.cast("B").cast(code).toreadonly() for row in array)


def _frozen(array: np.ndarray) -> np.ndarray:
    view: np.ndarray = array.view()
    view.flags.writeable = False
    return view


class RouteEvent:
    """The experts that the router of one MoE layer chose for the T tokens of a step.

    layer: index among the MoE layers. phase, step: phase and number of the step. k: experts per
    token in this layer. n_ahead: number of following layers with predictions,
    layer+1 .. layer+n_ahead. Predictions have the width of the layer with the largest k. For a
    layer with a smaller k, the row is padded with its first expert at score 0.

    Read-only memoryviews of the first token, the only token of a single-sequence decode step:
        ids, weights     [k]  chosen experts and their routing weights
        ahead_ids[p]     [k]  experts that layer+1+p is predicted to choose, best first
        ahead_scores[p]  [k]  their scores
    Read-only arrays of all tokens:
        ids_array int32, weights_array float32 [T, k]; tokens_array int32 [T], the position
        of each token in its batch; phases_array uint8 and sequences_array int32 [T], the Phase of
        each token and the sequence that it belongs to; ahead_ids_array int32 and ahead_array
        float32 [n_ahead, T, k], predicted top-k and their scores (DyMoE eq. 6); importance_array
        float32 [T], the attention that each token receives (eq. 1), or None if not computed
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
        """Wrap the store's buffers.

        ids int32 and weights float32 [max_tokens, k]; tokens int32, importance float32, phases
        uint8 and sequences int32 [max_tokens]; ahead_ids int32 and ahead float32 [n_ahead_max,
        max_tokens, k].
        """
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
        """Set k, the number of experts per token in the layer of this event."""
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
        """ids_array and weights_array with the width of the layer with the largest k.

        Columns from k on repeat the row's first expert with weight 0.
        """
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
    """Which experts are in memory now.

    resident[layer][expert]: the best tier of which every matrix is resident, or ABSENT.
    resident_array: the same memory, uint8 [n_layers, n_expert]. missing[layer][expert]: a bit mask,
    1 << kind for each matrix that is resident in no tier.
    """

    def __init__(self, resident: np.ndarray, missing: np.ndarray) -> None:
        """Wrap two arrays of the store: resident and missing, uint8 [n_layers, n_expert]."""
        self.resident, self.missing = _rows(resident, "B"), _rows(missing, "B")
        self.resident_array = _frozen(resident)


class DecisionBuffer:
    """The policy's answer to a route event, written in place.

    tier[expert]: a tier index or SKIP. Every entry is 0, the best tier, before each event; only
    entries of routed experts are read. passing[expert]: 1 streams the expert, so that it does not
    evict frequently used experts (see moe-edge.h); 0 before each event. renormalize: if experts of
    a token are skipped, its remaining weights are scaled to the original sum.
    """

    def __init__(self, tier: np.ndarray, passing: np.ndarray, prefetch: np.ndarray) -> None:
        """Wrap writable arrays: tier, passing (uint8 [n_expert]) and prefetch (int64)."""
        self.tier = tier.data
        self.tier_array = tier
        self.passing_array = passing
        self._prefetch = prefetch.data.cast("B").cast("q")
        self.n_prefetch = 0
        self.renormalize = False

    def prefetch(self, layer: int, expert: int, tier: int, passing: int = 0) -> None:
        """Request an expert before it is needed; call in order of urgency.

        Requests over the buffer's capacity are dropped, because a prefetch is optional.
        """
        n = self.n_prefetch
        if n < len(self._prefetch):
            self._prefetch[n] = layer | expert << 16 | tier << 32 | passing << 48
            self.n_prefetch = n + 1

    def prefetch_all(
        self, layer: int, experts: Sequence[int], tier: int, kinds: int = ALL_KINDS
    ) -> None:
        """Call prefetch() for each expert, in one Python call to save time in a decode step.

        kinds: bit mask of matrix kinds.
        """
        prefetch, n = self._prefetch, self.n_prefetch
        rest = layer | tier << 32 | kinds << 40
        for expert in experts[: len(prefetch) - n]:
            prefetch[n] = rest | expert << 16
            n += 1
        self.n_prefetch = n


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The store's record of one step that the model computed. us: microseconds from start to end.

    Sequence numbers: starts, sequences whose first token is in the step; prompt_ends, sequences
    with a prompt token whose logits were requested; ends, sequences dropped since the previous
    step.
    """

    number: int
    phase: Phase
    n_tokens: int
    us: float
    starts: tuple[int, ...]
    prompt_ends: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one finished step to the policy.

    n_tokens: tokens in it. us: microseconds from start to end.

    Arrays [n_layers, n_expert] that the policy may request; None if it did not request them for
    this step: counts, the tokens routed to each expert since the last report that included counts;
    resident, uint8, the tier of each expert in memory, or ABSENT; target, the tier after the
    transition under way, equal to resident if there is no transition.

    Sequence numbers: starts, sequences that began in this step; prompt_ends, sequences whose prompt
    ended in it; ends, sequences dropped since the previous step.

    unusual: whether the latest ROUTING_TOKENS tokens use experts differently from the texts of the
    loss table. None in reports in which this was not determined.
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
    """Measurements of one answer. Times are in milliseconds unless the name says otherwise.

    ttft_ms: time from the call until the first token is chosen. tpot_ms_p50, tpot_ms_p99:
    percentiles of the time between later tokens; nan with fewer than two tokens. hit_rate: share of
    matrices that were resident in the requested tier or a better one during decoding;
    prefill_hit_rate: the same for prefill. Both are None if no matrix was requested.

    mix: shares of the routed experts by requested tier, during decoding. computed: shares of the
    matrices by the tier that was computed, which is better than requested if a better copy was
    resident.

    kl_estimate: estimated KL divergence from the best tier in use, in nats per token, for texts
    that are sensitive to errors (see orchestrator.allocation.estimate); kl_low: the same for the
    least sensitive texts. Both are None if unknown. limit_halved: the policy used half of the
    allowed loss in a part of the answer, because the text used experts differently from the texts
    of the loss table.

    budget_bytes: budget of the expert slots. policy: the policy's own report.
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
        """Return plain types for JSON, with nan replaced by None."""
        return {
            key: None if isinstance(value, float) and value != value else value
            for key, value in asdict(self).items()
        }


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 to 100) with linear interpolation; nan for no values."""
    if not len(values):
        return float("nan")
    found = sorted(map(float, values))
    whole, part = divmod((len(found) - 1) * (q / 100), 1)
    low, high = found[int(whole)], found[min(int(whole) + 1, len(found) - 1)]
    # Interpolate from the nearer end, so that rounding cannot leave the interval.
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)


def distinct(numbers: np.ndarray) -> np.ndarray:
    """Return the distinct values of an array of non-negative integers, int64 [n], sorted.

    np.unique, np.percentile and np.median import numpy.ma, which takes up to 9 MiB of memory.
    """
    return np.flatnonzero(np.bincount(numbers.ravel()))
