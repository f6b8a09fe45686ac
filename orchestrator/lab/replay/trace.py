"""A recorded run: what the routers chose, step by step, in one .npz file.

Format, version 9: the numpy arrays of ARRAYS by name, and `header`, uint8 [n], a JSON object in
UTF-8 of the fields of Header and `format`. A reader refuses a version it does not know and arrays
that the version does not have. Version 8 has those of EARLIER, too, which are left aside.
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

# Columns of the counters: what was moved; routed experts by decided tier, the skipped ones last;
# matrices by the tier that was computed.
MOVED = ("requests", "hits", "demand_bytes", "prefetch_bytes")
ROUTED = tuple(f"routed_{tier}" for tier in (*range(MAX_TIERS), "skip"))
COMPUTED = tuple(f"computed_{tier}" for tier in range(MAX_TIERS))
COUNTERS = (*MOVED, *ROUTED, *COMPUTED)

# What a mark says: dropped since the step before; a first token in the step; the last one of a
# prompt in it.
SEQUENCE_MARKS = ENDS, STARTS, PROMPT_ENDS = 0, 1, 2

# Each array's type and shape. S steps, E route events in the order in which they came, N the sum of
# their tokens, A the sum of tokens times look-ahead layers, I the sum of the tokens that have an
# importance, M marks of sequences, R sequences that went on from kept tokens, B bytes of these;
# L layers, X experts of a layer, k of them a token, T tiers of the file.
ARRAYS: dict[str, tuple[type[np.generic], tuple[str | int, ...]]] = {
    # File, offset, bytes of one expert and ggml type of every matrix of the model file; file -1: no
    # such matrix. Slot sizes follow from these.
    "slices": (np.int64, ("L", len(KINDS), "T", 4)),
    # What a policy that learns knew at the start; else 0.
    "start_hotness": (np.float64, ("L", "X")),
    # What each expert loses in each tier, as the policy knew it; 0 where it did not.
    "losses": (np.float64, ("L", "X", "T")),
    # What it costs a token with a gate weight of 1 in each tier and, last, skipped, against full
    # precision, in nats (allocation/estimate.py); 0 where nobody knew.
    "costs": (np.float64, ("L", "X", "T+1")),
    # What the run came to, by phase: COUNTERS.
    "counters": (np.int64, (len(Phase), len(COUNTERS))),
    "step_phase": (np.uint8, ("S",)),
    "step_tokens": (np.int32, ("S",)),
    # Step, one of SEQUENCE_MARKS, sequence: what the step's report said.
    "marks": (np.int32, ("M", 3)),
    # Step, sequence, bytes: before the step, and before what its first token waits for, a sequence
    # went on from kept tokens, with so many bytes of what the policy knew of it.
    "restored": (np.int32, ("R", 3)),
    # These bytes, one after the other.
    "restored_use": (np.uint8, ("B",)),
    "event_step": (np.int32, ("E",)),
    # MoE layers only, counted from 0.
    "event_layer": (np.int16, ("E",)),
    # A last layer may see fewer than the step.
    "event_tokens": (np.int32, ("E",)),
    # How many layers behind its own are predicted.
    "event_ahead": (np.uint8, ("E",)),
    # 1 where its tokens have an importance.
    "event_scored": (np.uint8, ("E",)),
    # Different experts of the event that were not skipped.
    "event_computed": (np.int32, ("E",)),
    # Nanoseconds until the next event, also that of the next step, less what recording took.
    "event_ns": (np.int64, ("E",)),
    # The part of it in which computing waited for reads, in microseconds.
    "event_wait_us": (np.int64, ("E",)),
    # Chosen experts and their routing weights; rows are filled as RouteEvent.filled.
    "ids": (np.uint16, ("N", "k")),
    "weights": (np.float32, ("N", "k")),
    # Position of each token in its batch, its phase and its sequence.
    "tokens": (np.int32, ("N",)),
    "phases": (np.uint8, ("N",)),
    "sequences": (np.int32, ("N",)),
    # Predicted experts; an event's are [event_ahead, T, k].
    "ahead_ids": (np.uint16, ("A", "k")),
    "ahead_scores": (np.float32, ("A", "k")),
    # Attention that each token receives (DyMoE eq. 1).
    "importance": (np.float32, ("I",)),
}
# What version 8 has besides: what was in memory, and when versions changed.
EARLIER = (
    *("start_tier", "step_us", "step_tick", "published"),
    *("held", "missing", "ahead_held", "ahead_missing"),
)
# Those that route events have a part of each, by the letter of their first axis.
_BY_EVENT = {name: shape[0] for name, (_, shape) in ARRAYS.items() if shape[0] in ("N", "A", "I")}


@dataclass(frozen=True, slots=True)
class Header:
    """What ran. tiers: of the model file, best first; files: their names; in_use: the tiers that
    the policy worked with, best first. settings: the policy's own, as it declares them; rules:
    those that hold for every policy. expert_bytes: budget of the slots. read_bytes_per_s, of as
    many reads at once as there are threads, and read_latency_us, which one alone takes beside its
    bytes: measured on the file, 0 where they were not. dense_share: by phase, the part of the
    computing that is not in the experts, measured with all of them skipped. transition_bytes is
    what transitions read."""

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
    """One route event of T tokens, its arrays as of ARRAYS, those of A predicted layers as
    [A, T, k]; importance is None where its tokens have none. compute_ns: until the next event,
    without waits for reads."""

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
    """One llama_decode. starts, prompt_ends, ends: as of ComputedStep."""

    phase: Phase
    n_tokens: int
    events: list[Event]
    starts: tuple[int, ...]
    prompt_ends: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """A checked recording; arrays as the module describes them, `header` apart."""

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
        """The most tokens of one event."""
        return max(1, int(self.arrays["event_tokens"].max(initial=1)))

    @property
    def tiers(self) -> list[Tier]:
        """As ExpertModel.tiers, with no more known of each than its name."""
        return [Tier(name, 0.0, 0) for name in self.header.tiers]

    @property
    def slices(self) -> list[tuple[tuple[Slice | None, ...], ...]]:
        """As ExpertModel.slices: [layer][kind][tier]."""
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
        """The tier of this name. Raises TraceError listing the tiers there are."""
        try:
            return FileTier(self.header.tiers.index(name.lower()))
        except ValueError:
            known = ", ".join(self.header.tiers)
            raise TraceError(f"tier {name} is missing: the trace is of {known}") from None

    @property
    def step_ms(self) -> np.ndarray:
        """float64 [S]: what each step took, waits included."""
        return self._by_step(self.arrays["event_ns"]) / 1e6

    @property
    def wait_ms(self) -> np.ndarray:
        """float64 [S]: how long it waited for reads."""
        return self._by_step(self.arrays["event_wait_us"]) / 1e3

    @property
    def compute_ms(self) -> np.ndarray:
        """float64 [S]: what it took without the waits."""
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
        """(sequence, what the policy knew of it) of those that went on from kept tokens, by the
        step before which they did."""
        found: dict[int, list[tuple[int, bytes]]] = {}
        at = 0
        for step, sequence, n_bytes in self.arrays["restored"].tolist():
            state = self.arrays["restored_use"][at : at + n_bytes].tobytes()
            found.setdefault(step, []).append((sequence, state))
            at += n_bytes
        return found

    def lengths(self) -> dict[str, int]:
        """How long the axes of ARRAYS are, by letter."""
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
        """The steps in order; arrays are views."""
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
