"""The recording of a run, step by step, with its routing. It is stored as one .npz file.

Format, version 9: the NumPy arrays listed in ARRAYS, and `header`, uint8 [n]: a UTF-8 JSON object
with the fields of Header and `format`. A reader refuses unknown versions and unknown arrays.
Version 8 also has the arrays of EARLIER, which are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.experts import Slice, Tier
from gguf_tools.file.layout import KINDS, GGMLType
from orchestrator.allocation.slots import FileTier, Rules
from orchestrator.errors import TraceError
from orchestrator.events import Phase
from orchestrator.native import MAX_TIERS

FORMAT = "moe-edge-trace"
VERSION = 9

# Columns of the counters: requests and bytes; routed experts by the chosen tier, skipped ones last;
# matrices by the computed tier.
MOVED = ("requests", "hits", "demand_bytes", "prefetch_bytes")
ROUTED = tuple(f"routed_{tier}" for tier in (*range(MAX_TIERS), "skip"))
COMPUTED = tuple(f"computed_{tier}" for tier in range(MAX_TIERS))
COUNTERS = (*MOVED, *ROUTED, *COMPUTED)

# Events of a sequence: it ended since the previous step; the step has its first token; the step has
# the last token of its prompt.
SEQUENCE_MARKS = ENDS, STARTS, PROMPT_ENDS = 0, 1, 2

# Each array's type and shape. S: steps. E: route events in order. N: tokens of all events.
# A: tokens times look-ahead layers, summed. I: tokens with an importance score. M: marks of
# sequences. R: sequences restored from the prompt cache. B: bytes of their policy state.
# L: layers. X: experts per layer. k: experts per token. T: tiers of the file.
ARRAYS: dict[str, tuple[type[np.generic], tuple[str | int, ...]]] = {
    # File, offset, bytes of one expert, and ggml type of each matrix; file -1 means no such matrix.
    # Slot sizes are derived from these.
    "slices": (np.int64, ("L", len(KINDS), "T", 4)),
    # Hotness that the policy had learned before the start; 0 if it learns nothing.
    "start_hotness": (np.float64, ("L", "X")),
    # Relative error of each expert in each tier, as known to the policy; 0 if unknown.
    "losses": (np.float64, ("L", "X", "T")),
    # Quality loss in nats of a token with gate weight 1, relative to full precision, in each tier
    # and (last column) skipped (allocation/estimate.py); 0 if unknown.
    "costs": (np.float64, ("L", "X", "T+1")),
    # Counters of the whole run, by phase.
    "counters": (np.int64, (len(Phase), len(COUNTERS))),
    "step_phase": (np.uint8, ("S",)),
    "step_tokens": (np.int32, ("S",)),
    # Step, one of SEQUENCE_MARKS, sequence, from the step's report.
    "marks": (np.int32, ("M", 3)),
    # Step, sequence, bytes of policy state: the sequence was restored from the prompt cache before
    # the step and before the transitions that its first token waits for.
    "restored": (np.int32, ("R", 3)),
    # The policy states of all restored sequences, concatenated.
    "restored_use": (np.uint8, ("B",)),
    "event_step": (np.int32, ("E",)),
    # MoE layers only, counted from 0.
    "event_layer": (np.int16, ("E",)),
    # The last layer may process fewer tokens than the step.
    "event_tokens": (np.int32, ("E",)),
    # Number of later layers that are predicted.
    "event_ahead": (np.uint8, ("E",)),
    # 1 if its tokens have importance scores.
    "event_scored": (np.uint8, ("E",)),
    # Number of distinct experts that were not skipped.
    "event_computed": (np.int32, ("E",)),
    # Nanoseconds until the next event (also across steps), without the recorder's own time.
    "event_ns": (np.int64, ("E",)),
    # Part of that time spent waiting for reads, in microseconds.
    "event_wait_us": (np.int64, ("E",)),
    # Chosen experts and their routing weights; short rows are padded as in RouteEvent.filled.
    "ids": (np.uint16, ("N", "k")),
    "weights": (np.float32, ("N", "k")),
    # Position of each token in its batch, its phase and its sequence.
    "tokens": (np.int32, ("N",)),
    "phases": (np.uint8, ("N",)),
    "sequences": (np.int32, ("N",)),
    # Predicted experts; those of one event have the shape [event_ahead, T, k].
    "ahead_ids": (np.uint16, ("A", "k")),
    "ahead_scores": (np.float32, ("A", "k")),
    # Attention received by each token (DyMoE eq. 1).
    "importance": (np.float32, ("I",)),
}
# Additional arrays of version 8: residency, and the times at which it changed.
EARLIER = (
    *("start_tier", "step_us", "step_tick", "published"),
    *("held", "missing", "ahead_held", "ahead_missing"),
)
# Arrays that hold a part per route event, with the letter of their first axis.
_BY_EVENT = {name: shape[0] for name, (_, shape) in ARRAYS.items() if shape[0] in ("N", "A", "I")}


@dataclass(frozen=True, slots=True)
class Header:
    """Facts about a recorded run.

    - tiers: tiers of the model file, best first. files: names of the files.
    - in_use: tiers that the policy used, best first.
    - settings: the policy's own settings. rules: the settings that all policies share.
    - transition_bytes: bytes read by tier transitions.
    - expert_bytes: memory budget of the expert slots.
    - read_bytes_per_s: measured read bandwidth with all I/O threads; 0 if not measured.
    - read_latency_us: measured latency of a single read, without its transfer time; 0 if not
      measured.
    - dense_share: by phase, the fraction of compute time outside the experts, measured with all
      experts skipped.
    """

    version: int
    model: str
    arch: str
    n_expert: int
    n_expert_used: int
    layer_ids: tuple[int, ...]
    tiers: tuple[str, ...]
    files: tuple[str, ...]
    policy: str
    in_use: tuple[str, ...]
    settings: dict[str, Any]
    rules: Rules
    transition_bytes: int
    expert_bytes: int
    io_threads: int
    read_bytes_per_s: int
    read_latency_us: int
    dense_share: tuple[float, float]


class Event(NamedTuple):
    """One route event of T tokens, with its part of the arrays in ARRAYS.

    Predictions for A layers have the shape [A, T, k]. importance is None without scores. compute_ns
    is the time until the next event, without waits for reads.
    """

    layer: int
    n_computed: int
    compute_ns: int
    ids: np.ndarray
    weights: np.ndarray
    tokens: np.ndarray
    phases: np.ndarray
    sequences: np.ndarray
    ahead_ids: np.ndarray
    ahead_scores: np.ndarray
    importance: np.ndarray | None


class Step(NamedTuple):
    """One llama_decode call. starts, prompt_ends and ends have the meaning of ComputedStep."""

    phase: Phase
    n_tokens: int
    events: list[Event]
    starts: tuple[int, ...]
    prompt_ends: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """A validated recording: the header, and the arrays listed in ARRAYS."""

    header: Header
    arrays: dict[str, np.ndarray]

    @property
    def n_expert(self) -> int:
        return self.header.n_expert

    @property
    def n_expert_used(self) -> int:
        return self.header.n_expert_used

    @property
    def n_layers(self) -> int:
        return len(self.header.layer_ids)

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of one event."""
        return max(1, int(self.arrays["event_tokens"].max(initial=1)))

    @property
    def tiers(self) -> list[Tier]:
        """The same as ExpertModel.tiers, but only the names are known."""
        return [Tier(name, 0.0, 0) for name in self.header.tiers]

    @property
    def slices(self) -> list[tuple[tuple[Slice | None, ...], ...]]:
        """The same as ExpertModel.slices: [layer][kind][tier]."""
        return [
            tuple(
                tuple(
                    Slice(file, offset, n_bytes, GGMLType(kind)) if file >= 0 else None
                    for file, offset, n_bytes, kind in tiers
                )
                for tiers in kinds
            )
            for kinds in self.arrays["slices"].tolist()
        ]

    def tier_index(self, name: str) -> FileTier:
        """Return the index of a tier.

        Raises TraceError, which lists the tiers, if it is unknown.
        """
        try:
            return FileTier(self.header.tiers.index(name.lower()))
        except ValueError:
            known = ", ".join(self.header.tiers)
            raise TraceError(f"the trace has no tier {name}: choose one of {known}") from None

    @property
    def step_ms(self) -> np.ndarray:
        """Duration of each step in milliseconds, waits included, float64 [S]."""
        return self._by_step(self.arrays["event_ns"]) / 1e6

    @property
    def wait_ms(self) -> np.ndarray:
        """Time that each step waited for reads in milliseconds, float64 [S]."""
        return self._by_step(self.arrays["event_wait_us"]) / 1e3

    @property
    def compute_ms(self) -> np.ndarray:
        """Duration of each step without waits in milliseconds, float64 [S]."""
        return self._by_step(self._compute_ns()) / 1e6

    def _compute_ns(self) -> np.ndarray:
        took: np.ndarray = self.arrays["event_ns"] - 1000 * self.arrays["event_wait_us"]
        compute: np.ndarray = np.maximum(took, 0)
        return compute

    def _by_step(self, values: np.ndarray) -> np.ndarray:
        n_steps = len(self.arrays["step_phase"])
        sums: np.ndarray = np.bincount(self.arrays["event_step"], values, n_steps)
        return sums

    def restored(self) -> dict[int, list[tuple[int, bytes]]]:
        """Return the restored sequences with their policy states.

        The keys are the steps before which they were restored.
        """
        found: dict[int, list[tuple[int, bytes]]] = {}
        at = 0
        for step, sequence, n_bytes in self.arrays["restored"].tolist():
            state = self.arrays["restored_use"][at : at + n_bytes].tobytes()
            found.setdefault(step, []).append((sequence, state))
            at += n_bytes
        return found

    def lengths(self) -> dict[str, int]:
        """Return the lengths of the axes of ARRAYS by letter."""
        a, header = self.arrays, self.header
        tokens = a["event_tokens"].astype(np.int64)
        return {
            "L": self.n_layers,
            "X": header.n_expert,
            "k": header.n_expert_used,
            "T": len(header.tiers),
            "T+1": len(header.tiers) + 1,
            "S": len(a["step_phase"]),
            "E": len(tokens),
            "N": int(tokens.sum()),
            "A": int((tokens * a["event_ahead"]).sum()),
            "I": int((tokens * a["event_scored"]).sum()),
            "M": len(a["marks"]),
            "R": len(a["restored"]),
            "B": len(a["restored_use"]),
        }

    def steps(self) -> Iterator[Step]:
        """Yield the steps in order. Their arrays are views."""
        a = self.arrays
        everyone = np.arange(len(a["step_phase"]) + 1)
        events = np.searchsorted(a["event_step"], everyone).tolist()
        marked: dict[tuple[int, int], tuple[int, ...]] = {}
        for step, what, sequence in a["marks"].tolist():
            marked[step, what] = (*marked.get((step, what), ()), sequence)
        every_event = self._events()
        for step, phase in enumerate(a["step_phase"].tolist()):
            yield Step(
                Phase(phase),
                int(a["step_tokens"][step]),
                list(islice(every_event, events[step + 1] - events[step])),
                marked.get((step, STARTS), ()),
                marked.get((step, PROMPT_ENDS), ()),
                marked.get((step, ENDS), ()),
            )

    def _events(self) -> Iterator[Event]:
        a, k = self.arrays, self.header.n_expert_used
        tokens = a["event_tokens"].astype(np.int64)
        each = {"N": tokens, "A": tokens * a["event_ahead"], "I": tokens * a["event_scored"]}
        bounds = {axis: [0, *np.cumsum(n).tolist()] for axis, n in each.items()}
        layers, computed = a["event_layer"].tolist(), a["event_computed"].tolist()
        ahead, scored, compute = a["event_ahead"].tolist(), a["event_scored"], self._compute_ns()
        for i, layer in enumerate(layers):
            part: dict[str, Any] = {}
            for name, axis in _BY_EVENT.items():
                of = bounds[str(axis)]
                part[name] = a[name][of[i] : of[i + 1]]
                if axis == "A":
                    part[name] = part[name].reshape(ahead[i], int(tokens[i]), k)
            if not scored[i]:
                part["importance"] = None
            yield Event(layer, computed[i], int(compute[i]), **part)
