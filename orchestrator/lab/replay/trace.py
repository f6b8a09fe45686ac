"""A recorded run: what the routers chose, step by step, in one .npz file.

Format, version 8. Numpy arrays by name; S steps, E route events in the order in which they
came, N = sum of their tokens, A = sum of tokens times look-ahead layers, I = sum of the tokens
that have an importance, P versions published, M marks of sequences, R sequences that went on from
kept tokens, k experts a token:

    header         uint8 [n]      a JSON object in UTF-8, the fields of Header and `format`
    slices         int64 [layers, 4 kinds, tiers, 4]  file, offset, bytes of one expert and
                                  ggml type of every (layer, kind, tier) of the model file;
                                  file -1: no such matrix. Slot sizes follow from these.
    start_tier     uint8 [layers, experts]    best of the tiers in use (0 the best) that was in
                                  memory at the start, events.ABSENT for none
    start_hotness  float64 [layers, experts]  what a policy that learns knew at the start; else 0
    losses         float64 [layers, experts, tiers]  what each expert loses in each tier of the
                                  file, as the policy knew it; 0 where it did not
    costs          float64 [layers, experts, tiers + 1]  what it costs a token with a gate weight of
                                  1 in each tier of the file and, last, skipped, against full
                                  precision, in nats (allocation/estimate.py); 0 where nobody knew
    counters       int64 [2 phases, COUNTERS]  what the run came to
    step_phase     uint8 [S]      orchestrator.events.Phase
    step_tokens    int32 [S]      tokens of the step
    step_us        float64 [S]    microseconds of the step, as the policy was told them
    step_tick      uint8 [S]      1 where the policy renewed what it wants in memory after the step
    published      int32 [P, 4]   step, layer, expert, tier: versions that changed at the boundary
                                  before the step; only of a policy that has all in memory
    marks          int32 [M, 3]   step, SEQUENCE_MARKS, sequence: what the step's report said
    restored       int32 [R, 3]   step, sequence, bytes: before the step, and before what its first
                                  token waits for, a sequence went on from kept tokens, with so
                                  many bytes of what the policy knew of it
    restored_use   uint8 [sum of them]  these bytes
    event_step     int32 [E]
    event_layer    int16 [E]      MoE layers only, counted from 0
    event_tokens   int32 [E]      T of the event; a last layer may see fewer than the step
    event_ahead    uint8 [E]      look-ahead layers, layer+1 .. layer+event_ahead
    event_scored   uint8 [E]      1 where its tokens have an importance
    event_computed int32 [E]      different experts of the event that were not skipped
    event_ns       int64 [E]      until the next event, also that of the next step, less what
                                  recording took
    event_wait_us  int64 [E]      the part of it in which computing waited for reads
    ids            uint16 [N, k]  chosen experts
    held           uint8 [N, k]   the tier in use that was in memory of each then, events.ABSENT for
                                  none
    missing        uint8 [N, k]   the matrices of each that were not, bits 1 << kind
    weights        float32 [N, k] their routing weights
    tokens         int32 [N]      position of each token in its batch
    phases         uint8 [N]      orchestrator.events.Phase of each token
    sequences      int32 [N]      the sequence of each token
    ahead_ids      uint16 [A, k]  predicted experts; an event's are [event_ahead, T, k]
    ahead_scores   float32 [A, k]
    ahead_held     uint8 [A, k]   as held
    ahead_missing  uint8 [A, k]   as missing
    importance     float32 [I]    attention that each token receives (DyMoE eq. 1)

A reader refuses a version it does not know and arrays that the version does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.experts import Tier
from orchestrator.allocation.slots import FileTier, Rules
from orchestrator.errors import TraceError
from orchestrator.events import SKIP_TIER, Phase
from orchestrator.native import MAX_TIERS

FORMAT = "moe-edge-trace"
VERSION = 8

# Columns of the counters: what was moved; routed experts by decided tier, the skipped ones last;
# matrices by the tier that was computed.
MOVED = ("requests", "hits", "demand_bytes", "prefetch_bytes")
ROUTED = tuple(f"routed_{tier}" for tier in (*range(MAX_TIERS), "skip"))
COMPUTED = tuple(f"computed_{tier}" for tier in range(MAX_TIERS))
COUNTERS = (*MOVED, *ROUTED, *COMPUTED)

# What a mark says: dropped since the step before; a first token in the step; the last one of a
# prompt in it.
SEQUENCE_MARKS = ENDS, STARTS, PROMPT_ENDS = 0, 1, 2

ARRAYS: dict[str, tuple[type[np.generic], int]] = {
    "slices": (np.int64, 4),
    "start_tier": (np.uint8, 2),
    "start_hotness": (np.float64, 2),
    "losses": (np.float64, 3),
    "costs": (np.float64, 3),
    "counters": (np.int64, 2),
    "step_phase": (np.uint8, 1),
    "step_tokens": (np.int32, 1),
    "step_us": (np.float64, 1),
    "step_tick": (np.uint8, 1),
    "published": (np.int32, 2),
    "marks": (np.int32, 2),
    "restored": (np.int32, 2),
    "restored_use": (np.uint8, 1),
    "event_step": (np.int32, 1),
    "event_layer": (np.int16, 1),
    "event_tokens": (np.int32, 1),
    "event_ahead": (np.uint8, 1),
    "event_scored": (np.uint8, 1),
    "event_computed": (np.int32, 1),
    "event_ns": (np.int64, 1),
    "event_wait_us": (np.int64, 1),
    "ids": (np.uint16, 2),
    "held": (np.uint8, 2),
    "missing": (np.uint8, 2),
    "weights": (np.float32, 2),
    "tokens": (np.int32, 1),
    "phases": (np.uint8, 1),
    "sequences": (np.int32, 1),
    "ahead_ids": (np.uint16, 2),
    "ahead_scores": (np.float32, 2),
    "ahead_held": (np.uint8, 2),
    "ahead_missing": (np.uint8, 2),
    "importance": (np.float32, 1),
}


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

    @property
    def mix_names(self) -> tuple[str, ...]:
        """Names of what an expert can be decided as."""
        return (*self.in_use, SKIP_TIER) if self.rules.skip else self.in_use


class PlacedSlices(NamedTuple):
    """As gguf_tools.experts.Slice."""

    file_index: int
    offset: int
    expert_bytes: int
    type: int


class Event(NamedTuple):
    """One route event. ids, weights, held, missing [T, k]; tokens, phases, sequences [T];
    ahead_ids, ahead, ahead_held, ahead_missing [A, T, k]; importance [T] or None; n_computed:
    different experts that were not skipped; compute_ns until the next event, without waits for
    reads."""

    layer: int
    ids: np.ndarray
    weights: np.ndarray
    tokens: np.ndarray
    phases: np.ndarray
    sequences: np.ndarray
    ahead_ids: np.ndarray
    ahead: np.ndarray
    importance: np.ndarray | None
    n_computed: int
    compute_ns: int
    held: np.ndarray
    ahead_held: np.ndarray
    missing: np.ndarray
    ahead_missing: np.ndarray


class Step(NamedTuple):
    """One llama_decode. starts, prompt_ends, ends: as of ComputedStep; us: microseconds that the
    policy was told; published: (layer, expert, tier) of what changed right before it."""

    phase: Phase
    n_tokens: int
    events: list[Event]
    starts: tuple[int, ...]
    prompt_ends: tuple[int, ...]
    ends: tuple[int, ...]
    ticks: bool
    us: float
    published: list[tuple[int, int, int]]


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
    def slices(self) -> list[tuple[tuple[PlacedSlices | None, ...], ...]]:
        """As ExpertModel.slices: [layer][kind][tier]."""
        return [
            tuple(
                tuple(PlacedSlices(*each) if each[0] >= 0 else None for each in tiers)
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

    def steps(self) -> Iterator[Step]:
        """The steps in order; arrays are views."""
        a, k = self.arrays, self.header.n_expert_used
        counts, ahead = a["event_tokens"].tolist(), a["event_ahead"].tolist()
        layers, scored = a["event_layer"].tolist(), a["event_scored"].tolist()
        everyone = np.arange(len(a["step_phase"]))
        ends = np.searchsorted(a["event_step"], everyone, side="right")
        changes = np.searchsorted(a["published"][:, 0], np.append(everyone, len(everyone)))
        computed, compute = a["event_computed"].tolist(), self._compute_ns().tolist()
        marked: dict[tuple[int, int], tuple[int, ...]] = {}
        for step, what, sequence in a["marks"].tolist():
            marked[step, what] = (*marked.get((step, what), ()), sequence)
        row = ahead_row = scored_row = first = 0
        for step, end in enumerate(ends.tolist()):
            events = []
            for i in range(first, end):
                n, p = counts[i], ahead[i]
                to, ahead_to, scored_to = row + n, ahead_row + n * p, scored_row + n * scored[i]
                events.append(
                    Event(
                        layers[i],
                        a["ids"][row:to],
                        a["weights"][row:to],
                        a["tokens"][row:to],
                        a["phases"][row:to],
                        a["sequences"][row:to],
                        a["ahead_ids"][ahead_row:ahead_to].reshape(p, n, k),
                        a["ahead_scores"][ahead_row:ahead_to].reshape(p, n, k),
                        a["importance"][scored_row:scored_to] if scored[i] else None,
                        computed[i],
                        compute[i],
                        a["held"][row:to],
                        a["ahead_held"][ahead_row:ahead_to].reshape(p, n, k),
                        a["missing"][row:to],
                        a["ahead_missing"][ahead_row:ahead_to].reshape(p, n, k),
                    )
                )
                row, ahead_row, scored_row = to, ahead_to, scored_to
            first = end
            published = a["published"][changes[step] : changes[step + 1], 1:].tolist()
            yield Step(
                Phase(int(a["step_phase"][step])),
                int(a["step_tokens"][step]),
                events,
                marked.get((step, STARTS), ()),
                marked.get((step, PROMPT_ENDS), ()),
                marked.get((step, ENDS), ()),
                bool(a["step_tick"][step]),
                float(a["step_us"][step]),
                [(layer, expert, tier) for layer, expert, tier in published],
            )
