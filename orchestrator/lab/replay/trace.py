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

# Counters: requests and bytes; routed experts by the chosen tier, and skipped experts; computed
# matrices by tier.
MOVED = ("requests", "hits", "demand_bytes", "prefetch_bytes")
ROUTED = tuple(f"routed_{tier}" for tier in (*range(MAX_TIERS), "skip"))
COMPUTED = tuple(f"computed_{tier}" for tier in range(MAX_TIERS))
COUNTERS = (*MOVED, *ROUTED, *COMPUTED)

# Marks of a sequence: it ended since the previous step; the step has its first token; the step has
# the last token of its prompt.
SEQUENCE_MARKS = ENDS, STARTS, PROMPT_ENDS = 0, 1, 2

# Type and shape of each array of a trace. S: steps. E: route events (one layer of a step) in order.
# N: tokens of all events. A: for each event, tokens times predicted layers, summed. I: tokens with
# an importance score. M: marks of sequences. R: sequences restored from the prompt cache. B: bytes
# of the policy's state of these sequences. L: layers. X: experts per layer. k: experts per token.
# T: tiers of the file.
ARRAYS: dict[str, tuple[type[np.generic], tuple[str | int, ...]]] = {
    # File index, offset, bytes of one expert, and ggml type of each matrix. File -1 means that the
    # matrix does not exist.
    "slices": (np.int64, ("L", len(KINDS), "T", 4)),
    # How often tokens used each expert in earlier runs, as the policy had learned it; 0 if it
    # learns nothing.
    "start_hotness": (np.float64, ("L", "X")),
    # Relative error of each expert in each tier, as the policy knew it; 0 if unknown.
    "losses": (np.float64, ("L", "X", "T")),
    # Quality loss of an expert at gate weight 1, in nats, relative to full precision: in each tier,
    # and if it is skipped (last column); 0 if unknown.
    "costs": (np.float64, ("L", "X", "T+1")),
    # Counters of the whole run, for prefill and decode.
    "counters": (np.int64, (len(Phase), len(COUNTERS))),
    "step_phase": (np.uint8, ("S",)),
    "step_tokens": (np.int32, ("S",)),
    # Step, mark (one of SEQUENCE_MARKS) and sequence.
    "marks": (np.int32, ("M", 3)),
    # Step, sequence, and bytes of policy state. The sequence was restored from the prompt cache
    # before the step.
    "restored": (np.int32, ("R", 3)),
    # The saved policy states of all restored sequences, concatenated.
    "restored_use": (np.uint8, ("B",)),
    "event_step": (np.int32, ("E",)),
    # Index of the layer among the MoE layers.
    "event_layer": (np.int16, ("E",)),
    # Number of tokens that the layer processed. In the last layer, it may be lower than in the
    # step.
    "event_tokens": (np.int32, ("E",)),
    # Number of following layers for which experts are predicted.
    "event_ahead": (np.uint8, ("E",)),
    # 1 if the event's tokens have importance scores.
    "event_scored": (np.uint8, ("E",)),
    # Number of distinct experts that the policy did not skip.
    "event_computed": (np.int32, ("E",)),
    # Nanoseconds until the next event, even if it is in the next step, without the recorder's own
    # time.
    "event_ns": (np.int64, ("E",)),
    # Time until the next event that was spent waiting for reads, in microseconds.
    "event_wait_us": (np.int64, ("E",)),
    # Chosen experts of each token, and their gate weights. Short rows are padded, see
    # RouteEvent.filled.
    "ids": (np.uint16, ("N", "k")),
    "weights": (np.float32, ("N", "k")),
    # Position of each token in its batch.
    "tokens": (np.int32, ("N",)),
    # Phase (prefill or decode) of each token.
    "phases": (np.uint8, ("N",)),
    # Sequence that each token belongs to.
    "sequences": (np.int32, ("N",)),
    # Predicted experts. Those of one event have the shape [event_ahead, T, k].
    "ahead_ids": (np.uint16, ("A", "k")),
    "ahead_scores": (np.float32, ("A", "k")),
    # Importance score of each token: the attention that it receives (DyMoE eq. 1).
    "importance": (np.float32, ("I",)),
}
# Additional arrays of version 8 with the cached experts, and the times at which they changed.
EARLIER = (
    *("start_tier", "step_us", "step_tick", "published"),
    *("held", "missing", "ahead_held", "ahead_missing"),
)
# Arrays that contain a part for each route event, with the letter of their first axis.
_BY_EVENT = {name: shape[0] for name, (_, shape) in ARRAYS.items() if shape[0] in ("N", "A", "I")}


@dataclass(frozen=True, slots=True)
class Header:
    """Facts about a recorded run, stored in a trace file.

    - tiers: precisions in the model file, best first.
    - in_use: those of the tiers that the policy used.
    - settings: the policy's own settings. rules: the settings that all policies share.
    - transition_bytes: bytes that the run read to change experts to another tier.
    - expert_bytes: memory limit for the experts.
    - read_bytes_per_s: measured read bandwidth; 0 if unknown.
    - read_latency_us: latency of a read, without its transfer time; 0 if not measured.
    - dense_share: fraction of the compute time outside the experts, for prefill and decode.
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
    """The recorded routing of one layer in a step: the router chose k experts for each of T tokens.

    - n_computed: number of distinct experts that were not skipped.
    - compute_ns: nanoseconds until the next event, without waits for reads.
    - ids [T, k]: the experts of each token.
    - weights [T, k]: the gate weights of these experts.
    - tokens [T]: position of each token in the batch.
    - phases, sequences [T]: phase and sequence of each token.
    - ahead_ids [A, T, k]: predicted experts of each token in the next A layers. ahead_ids[0] is for
      the next layer.
    - ahead_scores [A, T, k]: scores of the predicted experts.
    - importance [T]: attention that each token receives; None if unknown.
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
    """One recorded llama_decode call, with the routing of its layers.

    - starts: sequences whose first token is in this step.
    - prompt_ends: sequences whose last prompt token is in this step.
    - ends: sequences that ended before this step.
    """

    phase: Phase
    n_tokens: int
    events: list[Event]
    starts: tuple[int, ...]
    prompt_ends: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """A recording of which experts each token used while a model ran, and how long each step took.

    - header: facts about the run, such as the model and the policy.
    - arrays: the recorded data by name. ARRAYS describes each array.
    """

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
        """The largest number of tokens that one layer processes in a step."""
        return max(1, int(self.arrays["event_tokens"].max(initial=1)))

    @property
    def tiers(self) -> list[Tier]:
        """The precisions (tiers) of the recorded model's file, best first.

        Only the names are set. The sizes in the Tier objects are 0, because a trace does not have
        them.
        """
        return [Tier(name, 0.0, 0) for name in self.header.tiers]

    @property
    def slices(self) -> list[tuple[tuple[Slice | None, ...], ...]]:
        """The positions of the expert matrices in the model's files: [layer][kind][tier].

        A kind is a matrix of an expert, such as up or down, and a tier is a precision. An element
        is None if the model does not have these matrices.
        """
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
        """Return the index of the tier with this name.

        Raises TraceError, which lists the known tiers, if the trace has no such tier.
        """
        try:
            return FileTier(self.header.tiers.index(name.lower()))
        except ValueError:
            known = ", ".join(self.header.tiers)
            raise TraceError(f"the trace has no tier {name}: choose one of {known}") from None

    @property
    def step_ms(self) -> np.ndarray:
        """The duration of each step including waits for reads, in milliseconds, float64 [S]."""
        return self._by_step(self.arrays["event_ns"]) / 1e6

    @property
    def wait_ms(self) -> np.ndarray:
        """The time that each step waited for reads, in milliseconds, float64 [S]."""
        return self._by_step(self.arrays["event_wait_us"]) / 1e3

    @property
    def compute_ms(self) -> np.ndarray:
        """The duration of each step without waits for reads, in milliseconds, float64 [S]."""
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
        """Return the sequences that were restored from the prompt cache, by step.

        A key is the index of the step before which they were restored. A value is a list of
        (sequence, saved state of the policy).
        """
        found: dict[int, list[tuple[int, bytes]]] = {}
        at = 0
        for step, sequence, n_bytes in self.arrays["restored"].tolist():
            state = self.arrays["restored_use"][at : at + n_bytes].tobytes()
            found.setdefault(step, []).append((sequence, state))
            at += n_bytes
        return found

    def lengths(self) -> dict[str, int]:
        """Return a dict with the length of each axis of the trace's arrays.

        The keys of the dict are the names of the axes in ARRAYS, such as "S" for the steps.
        """
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
        """Yield the recorded steps in order. Their arrays are views of the trace."""
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
