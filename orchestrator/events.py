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
ABSENT = 254  # residency of an expert that is in memory in no tier
MAX_PREFETCH = 1024
ALL_KINDS = 0  # in a prefetch request: every matrix of the expert


class Phase(IntEnum):
    """Prefill or decode, as the phase of a token or of a step.

    Prompt tokens are prefill and tokens of answers are decode. A step with at least one prompt
    token is prefill.
    """

    PREFILL = 0
    DECODE = 1


@overload
def served(asked: int, resident: int) -> int: ...
@overload
def served(asked: int | np.ndarray, resident: np.ndarray) -> np.ndarray: ...
def served(asked: int | np.ndarray, resident: int | np.ndarray) -> int | np.ndarray:
    """Return the tier (precision) in which an expert is computed if a policy requests `asked`.

    Tiers are numbers, 0 is the best. Both arguments may be arrays.

    - asked: the requested tier, or SKIP. For SKIP, the result is SKIP.
    - resident: the best tier in which the expert is in memory, or ABSENT.

    The result is `resident` if it is better than the requested tier. Otherwise, it is the requested
    tier, which is read if necessary.
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

    - layer: the index among the MoE layers.
    - step, phase, n_tokens: the number of the step, its phase (prefill or decode), and T.
    - k: the number of experts per token in this layer.
    - n_ahead: the number of following layers whose experts are predicted.

    Read-only arrays with the values of all tokens:

        ids_array         int32   [T, k]               chosen experts
        weights_array     float32 [T, k]               their routing weights
        tokens_array      int32   [T]                  position of each token in its batch
        phases_array      uint8   [T]                  phase of each token
        sequences_array   int32   [T]                  sequence of each token
        ahead_ids_array   int32   [n_ahead, T, k_max]  predicted experts, best first
        ahead_array       float32 [n_ahead, T, k_max]  scores of the predicted experts
        importance_array  float32 [T]                  attention that a token receives, or None

    Predictions are from DyMoE, eq. 6, and importance is from eq. 1. Example: in an event of layer
    3, ahead_ids_array[0] has predictions for layer 4, and ahead_ids_array[1] for layer 5. k_max is
    the largest k of all layers. If a predicted layer has a smaller k, its rows are filled up with
    the first expert of the row, at score 0.

    Read-only memoryviews with the values of the first token. If the step has a single token,
    reading them is faster than reading the arrays:

        ids              [k]      first row of ids_array
        weights          [k]      first row of weights_array
        ahead_ids[p]     [k_max]  first row of ahead_ids_array[p]
        ahead_scores[p]  [k_max]  first row of ahead_array[p]
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
        """Make an event that reads these buffers of the native store without copying them.

        ids int32 and weights float32 are [max_tokens, k]. tokens int32, importance float32, phases
        uint8 and sequences int32 are [max_tokens]. ahead_ids int32 and ahead float32 are
        [n_ahead_max, max_tokens, k].
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
        """Set the number of experts per token to k.

        The store reuses one event for all layers. It calls this method before an event of a layer
        that has another number of experts per token. Afterwards, the arrays and memoryviews of
        chosen experts have k columns.
        """
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
        """A pair of arrays: the experts chosen for each token, and their routing weights.

        Both arrays are [T, k_max]. k_max is the largest number of experts per token in any layer.
        If this layer has a smaller number k, the columns from k on repeat the row's first expert
        with weight 0.
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
    """A read-only view of which experts are in memory now.

    - resident[layer][expert]: the best tier in which all matrices of the expert are in memory, or
      ABSENT.
    - resident_array: the same values, uint8 [n_layers, n_expert].
    - missing[layer][expert]: a bit mask of the expert's matrices that are not in memory in any
      tier. The bit of a matrix kind is 1 << kind.
    """

    def __init__(self, resident: np.ndarray, missing: np.ndarray) -> None:
        """Make a view of two arrays of the native store, uint8 [n_layers, n_expert]."""
        self.resident, self.missing = _rows(resident, "B"), _rows(missing, "B")
        self.resident_array = _frozen(resident)


class DecisionBuffer:
    """The policy's decision for one layer, written into memory of the native store.

    The store resets all entries to 0 before it calls the policy for a layer.

    - tier[expert]: the tier (precision) in which the expert is computed, or SKIP; 0 is the best
      tier. Only the entries of experts that the router chose are read.
    - passing_array[expert]: 1 if the expert should be evicted before all others, because it will
      not be used again soon.
    - renormalize: whether the weights of a token's other experts are scaled up if some are skipped.
    """

    def __init__(self, tier: np.ndarray, passing: np.ndarray, prefetch: np.ndarray) -> None:
        """Make a buffer that writes to these arrays without copying them.

        tier and passing are uint8 [n_expert], and prefetch is int64.
        """
        self.tier = tier.data
        self.tier_array = tier
        self.passing_array = passing
        self._prefetch = prefetch.data.cast("B").cast("q")
        self.n_prefetch = 0
        self.renormalize = False

    def prefetch(self, layer: int, expert: int, tier: int, passing: int = 0) -> None:
        """Request that an expert is read in a tier (precision) before its layer needs it.

        Request the most urgent experts first. If the buffer is full, the request is dropped.
        passing: 1 if the expert should be evicted before all others, because it will not be used
        again soon; 0 to keep it like any recently used expert.
        """
        n = self.n_prefetch
        if n < len(self._prefetch):
            self._prefetch[n] = layer | expert << 16 | tier << 32 | passing << 48
            self.n_prefetch = n + 1

    def prefetch_all(
        self, layer: int, experts: Sequence[int], tier: int, kinds: int = ALL_KINDS
    ) -> None:
        """Request that several experts of a layer are read before the layer needs them.

        If the buffer becomes full, the remaining requests are dropped. This method is faster than a
        call of `prefetch` for each expert.

        experts: the experts, which the caller must sort by falling urgency. tier: the precision in
        which they are read. kinds: a bit mask of the matrices to read; ALL_KINDS for all.
        """
        prefetch, n = self._prefetch, self.n_prefetch
        rest = layer | tier << 32 | kinds << 40
        for expert in experts[: len(prefetch) - n]:
            prefetch[n] = rest | expert << 16
            n += 1
        self.n_prefetch = n


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The store's record of one step that the model computed.

    - number: the number of the step.
    - us: the time from start to end, in microseconds.
    - starts: the sequences whose first token is in the step.
    - prompt_ends: the sequences with a prompt token whose logits were requested. This is usually
      the last token of the prompt.
    - ends: the sequences that were dropped since the previous step.
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
    """The report that a policy gets after each step (one pass of tokens through all layers).

    - us: the time of the step in microseconds.
    - counts: the number of tokens routed to each expert since the last report that had counts.
    - resident: the tier (precision) in which each expert is in memory, or ABSENT, uint8.
    - target: the tier in which each expert will be when all changes of tier in progress are done,
      or ABSENT, uint8.
    - starts, prompt_ends: the sequences that began in this step, and the sequences whose prompt
      ended in this step.
    - ends: the sequences that were dropped since the previous step.
    - unusual: whether recent text uses experts differently from the text with which losses were
      calibrated. None if this was not checked after this step.

    counts, resident and target are [n_layers, n_expert]. They are None in reports for which the
    policy did not request them.
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
    """Measurements of one answer.

    - ttft_ms: milliseconds from the call until the first token is chosen.
    - tpot_ms_p50, tpot_ms_p99: percentiles 50 and 99 of the milliseconds between two tokens; nan
      with fewer than two tokens.
    - hit_rate: the fraction of the requested expert matrices that were in memory during decoding,
      in the requested tier or a better one. None if no matrix was requested.
    - prefill_hit_rate: the same fraction during prefill.
    - bytes_read, wait_ms: the bytes of experts read, and the time spent waiting for reads.
    - mix: the fraction of the routed experts for which each tier was requested during decoding.
    - computed: the fraction of the matrices that were computed in each tier. A better tier than
      requested is computed if it is in memory.
    - kl_estimate: the estimated KL divergence from the best tier in use, in nats per token, for
      texts that are sensitive to errors. kl_low: the same for the least sensitive texts. None if
      unknown.
    - limit_halved: whether a part of the answer could use only half of the allowed loss, because
      its text used experts differently from the texts of the loss table.
    - budget_bytes: the memory budget of the expert slots.
    - mode: the status line. policy: the figures that the policy reports.
    - finish: the reason why the answer ended.
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
        """Return the measurements by name as plain types for JSON, with None instead of nan."""
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

    The function replaces np.unique, which imports numpy.ma and so takes up to 9 MiB of memory.
    """
    return np.flatnonzero(np.bincount(numbers.ravel()))
