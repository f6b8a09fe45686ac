"""A recorded run: what the routers chose, step by step, in one .npz file.

Format, version 1. Numpy arrays by name; S steps, E route events in the order in which they
came, N = sum of their tokens, A = sum of tokens times look-ahead layers, I = sum of the tokens
that have an importance, k experts a token:

    header         uint8 [n]      a JSON object in UTF-8, the fields of Header and `format`
    slices         int64 [layers, 4 kinds, tiers, 4]  file, offset, bytes of one expert and
                                  ggml type of every (layer, kind, tier) of the model file;
                                  file -1: no such matrix. Slot sizes follow from these.
    step_phase     uint8 [S]      orchestrator.events.Phase
    step_tokens    int32 [S]      tokens of the step
    step_us        int64 [S]      from its first route event to that of the next step
    step_wait_us   int64 [S]      the part of it in which computing waited for reads
    event_step     int32 [E]
    event_layer    int16 [E]      MoE layers only, counted from 0
    event_tokens   int32 [E]      T of the event; a last layer may see fewer than the step
    event_ahead    uint8 [E]      look-ahead layers, layer+1 .. layer+event_ahead
    event_scored   uint8 [E]      1 where its tokens have an importance
    ids            uint16 [N, k]  chosen experts
    weights        float32 [N, k] their routing weights
    tokens         int32 [N]      position of each token in its batch
    ahead_ids      uint16 [A, k]  predicted experts; an event's are [event_ahead, T, k]
    ahead_scores   float32 [A, k]
    importance     float32 [I]    attention that each token receives (DyMoE eq. 1)

A reader refuses a version it does not know and arrays that the version does not have. Of dynaexq
only the routing is recorded; a replay uses its default settings and starts without hotness.
"""

from __future__ import annotations

import json
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gguf_tools.experts import Tier
from gguf_tools.layout import DOWN, KINDS, MAX_TIERS
from orchestrator.config import PREFETCHES, SCHEDULES
from orchestrator.errors import TraceError
from orchestrator.events import Phase
from orchestrator.native import MAX_AHEAD

FORMAT = "moe-edge-trace"
VERSION = 1

# How much larger than its file a trace may be: routing weights hardly compress.
_UNPACKED_LEAST, _UNPACKED_MOST = 1 << 24, 64

_ARRAYS: dict[str, tuple[type[np.generic], int]] = {
    "header": (np.uint8, 1),
    "slices": (np.int64, 4),
    "step_phase": (np.uint8, 1),
    "step_tokens": (np.int32, 1),
    "step_us": (np.int64, 1),
    "step_wait_us": (np.int64, 1),
    "event_step": (np.int32, 1),
    "event_layer": (np.int16, 1),
    "event_tokens": (np.int32, 1),
    "event_ahead": (np.uint8, 1),
    "event_scored": (np.uint8, 1),
    "ids": (np.uint16, 2),
    "weights": (np.float32, 2),
    "tokens": (np.int32, 1),
    "ahead_ids": (np.uint16, 2),
    "ahead_scores": (np.float32, 2),
    "importance": (np.float32, 1),
}


@dataclass(frozen=True, slots=True)
class Header:
    """What ran. tiers: of the model file, best first; files: their names; high and low name
    the tiers in use, low "skip" or None where there was none. expert_bytes: budget of the
    slots. read_bytes_per_s: measured on the file, 0 where it was not."""

    version: int
    model: str
    arch: str
    n_expert: int
    n_expert_used: int
    layer_ids: tuple[int, ...]
    tiers: tuple[str, ...]
    files: tuple[str, ...]
    policy: str
    high: str
    low: str | None
    retention: float
    schedule: str
    heavy_hitters: float
    prompts_pass: bool
    renormalize: bool
    exact_tiers: bool
    prefetch: str
    n_ahead: int
    expert_bytes: int
    io_threads: int
    read_bytes_per_s: int


class PlacedSlices(NamedTuple):
    """As gguf_tools.experts.Slice."""

    file_index: int
    offset: int
    expert_bytes: int
    type: int


class Event(NamedTuple):
    """One route event. ids, weights [T, k]; tokens [T]; ahead_ids, ahead [A, T, k];
    importance [T] or None."""

    layer: int
    ids: np.ndarray
    weights: np.ndarray
    tokens: np.ndarray
    ahead_ids: np.ndarray
    ahead: np.ndarray
    importance: np.ndarray | None


class Step(NamedTuple):
    """One llama_decode; compute_us: its time without the waits for reads."""

    phase: Phase
    n_tokens: int
    compute_us: int
    events: list[Event]


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

    def tier_index(self, name: str) -> int:
        """Index of a tier by name. Raises TraceError listing the tiers there are."""
        try:
            return self.header.tiers.index(name.lower())
        except ValueError:
            known = ", ".join(self.header.tiers)
            raise TraceError(f"tier {name} is missing: the trace is of {known}") from None

    def steps(self) -> Iterator[Step]:
        """The steps in order; arrays are views."""
        a, k = self.arrays, self.header.n_expert_used
        counts, ahead = a["event_tokens"].tolist(), a["event_ahead"].tolist()
        layers, scored = a["event_layer"].tolist(), a["event_scored"].tolist()
        ends = np.searchsorted(a["event_step"], np.arange(len(a["step_phase"])), side="right")
        compute = np.maximum(a["step_us"] - a["step_wait_us"], 0).tolist()
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
                        a["ahead_ids"][ahead_row:ahead_to].reshape(p, n, k),
                        a["ahead_scores"][ahead_row:ahead_to].reshape(p, n, k),
                        a["importance"][scored_row:scored_to] if scored[i] else None,
                    )
                )
                row, ahead_row, scored_row = to, ahead_to, scored_to
            first = end
            phase = Phase(int(a["step_phase"][step]))
            yield Step(phase, int(a["step_tokens"][step]), compute[step], events)


def check_target(path: Path) -> None:
    """Raises TraceError where no trace can be written, before a long run finds out."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise TraceError(f"{path}: cannot be written: name a file in a folder of yours")


def write_trace(path: Path, trace: Trace) -> None:
    """Writes the file under a temporary name and renames it. Raises TraceError."""
    header = json.dumps({"format": FORMAT, **asdict(trace.header)}).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            arrays: dict[str, Any] = {"header": np.frombuffer(header, np.uint8), **trace.arrays}
            np.savez_compressed(file, **arrays)
        os.replace(temporary, path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_trace(path: Path) -> Trace:
    """The recording in a file, checked throughout. Raises TraceError in one sentence."""
    try:
        arrays = _load(path)
        header = _header(arrays.pop("header"))
        trace = Trace(header, arrays)
        _check(trace)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _Wrong as wrong:
        raise TraceError(f"{path}: {wrong}") from wrong
    return trace


class _Wrong(Exception):
    """What is wrong with a file, without its name."""


def _load(path: Path) -> dict[str, np.ndarray]:
    damaged = (
        *(ValueError, KeyError, EOFError, MemoryError, NotImplementedError, RuntimeError),
        *(SyntaxError, TypeError, zlib.error, zipfile.BadZipFile, tokenize.TokenError),
    )
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise _Wrong("not a trace: `moe-edge trace` writes .npz files")
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as npz:
                names = set(npz.files)
                if "header" not in names:
                    raise _Wrong("a .npz file, but not a trace: it has no header")
                unpacked = sum(member.file_size for member in npz.zip.infolist())
                if unpacked > _UNPACKED_LEAST + _UNPACKED_MOST * path.stat().st_size:
                    raise _Wrong(f"damaged: it would unpack to {unpacked} bytes")
                for member in npz.zip.infolist():
                    _check_size(npz.zip, member)
                return {name: npz[name] for name in sorted(names)}
        except damaged as error:
            raise _Wrong(f"damaged: {error}") from error


def _check_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """That an array is no larger than what is there of it: numpy allocates first."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise _Wrong(f"damaged: {member.filename} is of an unknown version")
        shape, _, dtype = read(file)
        nbytes = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and nbytes != member.file_size - file.tell():
            raise _Wrong(f"damaged: {member.filename} is not of the size that it says")


def _header(array: np.ndarray) -> Header:
    try:
        raw: Any = json.loads(array.astype(np.uint8).tobytes().decode())
    except (ValueError, TypeError, RecursionError) as error:
        raise _Wrong(f"the header is damaged: {error}") from error
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise _Wrong("a .npz file, but not a trace: its header says otherwise")
    if raw.get("version") != VERSION:
        raise _Wrong(
            f"a trace of version {raw.get('version')}; this moe-edge reads {VERSION}: record again"
        )
    known = {field.name for field in fields(Header)}
    if set(raw) != known:
        odd = ", ".join(sorted(set(raw) ^ known))
        raise _Wrong(f"the header is damaged: fields missing or unknown: {odd}")
    for name, kind in _FIELDS.items():
        if not kind(raw[name]):
            raise _Wrong(f"the header is damaged: {name} is {raw[name]!r}")
    for name in ("layer_ids", "tiers", "files"):
        raw[name] = tuple(raw[name])
    return Header(**raw)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(low: int, high: int) -> Any:
    return lambda value: type(value) is int and low <= value <= high


def _texts(most: int) -> Any:
    return lambda value: (
        isinstance(value, list) and 1 <= len(value) <= most and all(map(_text, value))
    )


_FIELDS: dict[str, Any] = {
    "model": _text,
    "arch": _text,
    "n_expert": _number(1, 65535),
    "n_expert_used": _number(1, 65535),
    "layer_ids": lambda v: (
        isinstance(v, list)
        and 1 <= len(v) <= 4096
        and all(type(il) is int and 0 <= il < 2**31 for il in v)
    ),
    "tiers": _texts(MAX_TIERS),
    "files": _texts(1024),
    "policy": _text,
    "high": _text,
    "low": lambda v: v is None or _text(v),
    "retention": lambda v: type(v) in (int, float) and 0 <= v <= 1,
    "schedule": lambda v: v in SCHEDULES,
    "heavy_hitters": lambda v: type(v) in (int, float) and 0 <= v <= 1,
    "prompts_pass": lambda v: isinstance(v, bool),
    "renormalize": lambda v: isinstance(v, bool),
    "exact_tiers": lambda v: isinstance(v, bool),
    "prefetch": lambda v: v in PREFETCHES,
    "n_ahead": _number(0, MAX_AHEAD),
    "expert_bytes": _number(1, 2**62),
    "io_threads": _number(1, 64),
    "read_bytes_per_s": _number(0, 2**62),
}


def _check(trace: Trace) -> None:
    """Every array against its type, the others and the header."""
    a, header = trace.arrays, trace.header
    wanted = set(_ARRAYS) - {"header"}
    if set(a) != wanted:
        raise _Wrong(f"arrays missing or unknown: {', '.join(sorted(set(a) ^ wanted))}")
    for name, array in a.items():
        kind, n_dims = _ARRAYS[name]
        if array.dtype != kind or array.ndim != n_dims:
            raise _Wrong(f"{name} is {array.dtype} in {array.ndim} dimensions")
    k, n_layers, tokens = header.n_expert_used, trace.n_layers, a["event_tokens"].astype(np.int64)
    if k > header.n_expert:
        raise _Wrong(f"{k} of {header.n_expert} experts a token")
    lengths: dict[str, tuple[int, ...]] = {
        name: a[f"{name[:4]}_phase"].shape for name in a if name.startswith("step_")
    }
    lengths |= {name: tokens.shape for name in a if name.startswith("event_")}
    _check_shapes(a, lengths)
    n_rows = int(tokens.sum())
    n_ahead = int((tokens * a["event_ahead"]).sum())
    n_scored = int((tokens * a["event_scored"]).sum())
    lengths = {
        "slices": (n_layers, len(KINDS), len(header.tiers), 4),
        "ids": (n_rows, k),
        "weights": (n_rows, k),
        "tokens": (n_rows,),
        "ahead_ids": (n_ahead, k),
        "ahead_scores": (n_ahead, k),
        "importance": (n_scored,),
    }
    _check_shapes(a, lengths)
    _check_slices(trace)
    _check_routing(trace)


def _check_shapes(arrays: dict[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise _Wrong(f"{name} has the shape {arrays[name].shape}, not {shape}")


def _check_slices(trace: Trace) -> None:
    slices = trace.arrays["slices"]
    file, offset, expert_bytes = slices[..., 0], slices[..., 1], slices[..., 2]
    there = file >= 0
    kinds = np.all(there, axis=2, keepdims=True)
    few = kinds.sum(axis=1) < 2
    if (there != kinds).any() or not there[:, DOWN].all() or few.any():
        raise _Wrong("slices: a layer lacks a matrix or one of its tiers")
    if (file[there] >= len(trace.header.files)).any() or (expert_bytes[there] < 1).any():
        raise _Wrong("slices: a file number or a size is out of range")
    far = 2**62 // trace.header.n_expert
    if ((offset[there] < 0) | (offset[there] > 2**62) | (expert_bytes[there] > far)).any():
        raise _Wrong("slices: an offset or a size is out of range")
    if ((slices[..., 3] < 0) | (slices[..., 3] > 255)).any():
        raise _Wrong("slices: a type is out of range")


def _check_routing(trace: Trace) -> None:
    a, n_layers = trace.arrays, trace.n_layers
    step, ahead = a["event_step"], a["event_ahead"]
    layer: np.ndarray = a["event_layer"]
    n_steps = len(a["step_phase"])
    if n_steps == 0 or len(step) == 0:
        raise _Wrong("it holds no step")
    if (a["step_phase"] > max(Phase)).any() or (a["step_tokens"] < 1).any():
        raise _Wrong("a step has no phase or no tokens")
    if (a["step_us"] < 0).any() or (a["step_wait_us"] < 0).any():
        raise _Wrong("a step has a negative time")
    if not np.array_equal(np.unique(step), np.arange(n_steps)) or (np.diff(step) < 0).any():
        raise _Wrong("its events are not in the order of their steps")
    if ((layer < 0) | (layer >= n_layers)).any() or (
        (np.diff(step) == 0) & (np.diff(layer) <= 0)
    ).any():
        raise _Wrong("an event's layer is out of range or out of order")
    if (ahead > np.minimum(MAX_AHEAD, n_layers - 1 - layer)).any():
        raise _Wrong("an event looks ahead beyond the last layer")
    if (a["event_tokens"] < 0).any() or (a["event_tokens"] > a["step_tokens"][step]).any():
        raise _Wrong("an event has more tokens than its step")
    for name in ("ids", "ahead_ids"):
        if (a[name] >= trace.n_expert).any():
            raise _Wrong(f"{name}: an expert is out of range")
        if (np.diff(np.sort(a[name], axis=1), axis=1) == 0).any():
            raise _Wrong(f"{name}: a token has an expert twice")
    if (a["event_scored"] > 1).any():
        raise _Wrong("event_scored is neither 0 nor 1")
    for name in ("weights", "ahead_scores", "importance"):
        if not np.isfinite(a[name]).all():
            raise _Wrong(f"{name}: not a finite number")
