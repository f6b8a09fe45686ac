"""Trace files: written atomically, and read with full validation."""

from __future__ import annotations

import json
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from gguf_tools.file.layout import DOWN, MAX_TIERS, GGMLType
from gguf_tools.file.opening import open_file
from gguf_tools.file.reader import one_line
from orchestrator.allocation.slots import Rules
from orchestrator.cache import files
from orchestrator.errors import PolicyError, SettingError, TraceError
from orchestrator.events import Phase
from orchestrator.lab.replay.trace import (
    ARRAYS,
    EARLIER,
    FORMAT,
    SEQUENCE_MARKS,
    VERSION,
    Header,
    Trace,
)
from orchestrator.native import MAX_AHEAD
from orchestrator.policy import policy_class

# Maximum size of an unpacked trace: a constant plus a multiple of the file size. Routing weights
# hardly compress, so a larger ratio is a sign of damage.
_UNPACKED_LEAST, _UNPACKED_MOST = 1 << 24, 64


def check_trace_target(path: Path) -> None:
    """Raise TraceError if a trace file cannot be written to this path.

    This is called before a long recording.
    """
    try:
        files.check_target(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace file under a temporary name, then rename it to `path`.

    Raises TraceError if the file cannot be written.
    """
    header = json.dumps({"format": FORMAT, **asdict(trace.header)}).encode()
    arrays: dict[str, Any] = {"header": np.frombuffer(header, np.uint8), **trace.arrays}
    try:
        with files.whole_file(path) as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error


def read_trace(path: Path) -> Trace:
    """Read and validate a trace file. Raises TraceError if the file is invalid."""
    try:
        arrays = _load(path)
        header = _header(arrays.pop("header"))
        if header.version < VERSION:
            arrays = {name: each for name, each in arrays.items() if name not in EARLIER}
            header = replace(header, version=VERSION)
        trace = Trace(header, arrays)
        _check(trace)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _Wrong as wrong:
        raise TraceError(f"{path}: {wrong}") from wrong
    return trace


class _Wrong(Exception):
    """A problem in a trace file. The message does not include the file's name."""


def _load(path: Path) -> dict[str, np.ndarray]:
    damaged = (
        *(ValueError, KeyError, EOFError, MemoryError, NotImplementedError, RuntimeError),
        *(SyntaxError, TypeError, zlib.error, zipfile.BadZipFile, tokenize.TokenError),
    )
    with open_file(path) as file:
        if file.read(4) != b"PK\x03\x04":
            raise _Wrong(
                "this file is not a trace: a trace is a .npz file written by `moe-edge trace`"
            )
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as npz:
                names = set(npz.files)
                if "header" not in names:
                    raise _Wrong("this .npz file is not a trace: it has no header")
                unpacked = sum(member.file_size for member in npz.zip.infolist())
                if unpacked > _UNPACKED_LEAST + _UNPACKED_MOST * path.stat().st_size:
                    raise _Wrong(
                        f"the file is damaged: its unpacked size of {unpacked} bytes is implausible"
                    )
                for member in npz.zip.infolist():
                    _check_size(npz.zip, member)
                return {name: npz[name] for name in sorted(names)}
        except damaged as error:
            raise _Wrong(f"the file is damaged: {error}") from error


def _check_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise _Wrong if the declared size of an array in a trace file is wrong.

    This is checked before NumPy allocates memory for the array.
    """
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise _Wrong(f"the file is damaged: {member.filename} has an unknown .npy version")
        shape, _, dtype = read(file)
        nbytes = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and nbytes != member.file_size - file.tell():
            raise _Wrong(f"the file is damaged: {member.filename} does not have its declared size")


def _header(array: np.ndarray) -> Header:
    try:
        raw: Any = json.loads(array.astype(np.uint8).tobytes().decode())
    except (ValueError, TypeError, RecursionError) as error:
        raise _Wrong(f"the trace's header is damaged: {error}") from error
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise _Wrong("this .npz file is not a trace: its header has another format")
    if raw.get("version") not in (8, VERSION):
        raise _Wrong(
            f"trace version {raw.get('version')} is not supported, only versions 8 and {VERSION} "
            f"are: record the trace again"
        )
    known = {field.name for field in fields(Header)}
    if set(raw) != known:
        odd = one_line(", ".join(sorted(set(raw) ^ known)))
        raise _Wrong(f"the trace's header is damaged: it lacks fields or has unknown fields: {odd}")
    for name, hint in get_type_hints(Header).items():
        if name != "version" and not _fits(name, raw[name], hint):
            raise _Wrong(f"the trace's header is damaged: its field {name} is {raw[name]!r}")
    if [tier for tier in raw["tiers"] if tier in raw["in_use"]] != raw["in_use"]:
        raise _Wrong(
            f"the trace's header is damaged: its field in_use is {raw['in_use']!r}, but must have "
            f"some of the precisions in its field tiers, {raw['tiers']!r}, in the same order"
        )
    _check_settings(raw["policy"], raw["settings"])
    raw["model"] = one_line(raw["model"])
    for name in ("layer_ids", "tiers", "files", "in_use", "dense_share"):
        raw[name] = tuple(raw[name])
    return Header(**(raw | {"rules": Rules(**raw["rules"])}))


def _check_settings(policy: str, settings: dict[str, Any]) -> None:
    """Raise _Wrong if the recorded settings of a policy are not valid for the policy."""
    try:
        declared = policy_class(policy).Settings
        wanted = declared().as_dict()
        if set(settings) != set(wanted):
            odd = one_line(", ".join(sorted(set(settings) ^ set(wanted))))
            raise _Wrong(
                f"the trace's header is damaged: it lacks settings of the policy {policy} or has "
                f"unknown settings: {odd}"
            )
        declared(**settings)
    except (PolicyError, SettingError) as error:
        raise _Wrong(f"the trace's header is damaged: {error}") from error


# Allowed range of each number in the header, also of numbers in lists.
_NUMBERS: dict[str, tuple[float, float]] = {
    "n_expert": (1, 65535),
    "n_expert_used": (1, 65535),
    "layer_ids": (0, 2**31 - 1),
    "transition_bytes": (0, 2**62),
    "expert_bytes": (1, 2**62),
    "io_threads": (1, 64),
    "read_bytes_per_s": (0, 2**62),
    "read_latency_us": (0, 10**9),
    "dense_share": (0, 1),
}
_LENGTHS = {"layer_ids": 4096, "tiers": MAX_TIERS, "files": 1024, "in_use": MAX_TIERS}


def _fits(name: str, value: Any, hint: Any) -> bool:
    """Return whether a JSON value of the header has the right type, range and length.

    `name` is the header's field, and `hint` is its declared type.
    """
    if hint is Rules:
        known = {field.name for field in fields(Rules)}
        return isinstance(value, dict) and set(value) == known and _all(name, value.values(), bool)
    if get_origin(hint) is tuple:
        kind, *others = get_args(hint)
        lengths = (1, _LENGTHS[name]) if others == [...] else (len(Phase), len(Phase))
        is_list = isinstance(value, list) and lengths[0] <= len(value) <= lengths[1]
        return is_list and _all(name, value, kind)
    if hint in (int, float):
        low, high = _NUMBERS[name]
        return type(value) in (int, hint) and low <= value <= high
    return isinstance(value, get_origin(hint) or hint)


def _all(name: str, values: Iterable[Any], hint: Any) -> bool:
    return all(_fits(name, each, hint) for each in values)


def _check(trace: Trace) -> None:
    """Raise _Wrong if arrays of a trace have wrong types or shapes, or contradict each other."""
    a, header = trace.arrays, trace.header
    if set(a) != set(ARRAYS):
        raise _Wrong(
            f"the file is damaged: it lacks arrays or has unknown arrays: "
            f"{', '.join(sorted(set(a) ^ set(ARRAYS)))}"
        )
    for name, (kind, shape) in ARRAYS.items():
        if a[name].dtype != kind or a[name].ndim != len(shape):
            raise _Wrong(
                f"the array {name} has the wrong type or number of dimensions: "
                f"{a[name].dtype}, {a[name].ndim} dimensions"
            )
    if header.n_expert_used > header.n_expert:
        raise _Wrong(
            f"the file is damaged: a token uses {header.n_expert_used} experts, but a layer has "
            f"only {header.n_expert}"
        )
    for name in ("event_ahead", "event_scored"):  # other arrays' lengths depend on these
        _check_shape(name, a[name], {"E": len(a["event_tokens"])})
    lengths = trace.lengths()
    for name in ARRAYS:
        _check_shape(name, a[name], lengths)
    if lengths["S"] == 0 or lengths["E"] == 0:
        raise _Wrong("the trace has no steps")
    _check_ranges(trace)
    _check_slices(trace)
    _check_events(trace)
    for name in ("marks", "restored"):
        if (np.diff(a[name][:, 0]) < 0).any():
            raise _Wrong(f"the file is damaged: its array '{name}' is not sorted by step")
    n_restored = a["restored"][:, 2].sum(dtype=np.int64)
    if n_restored != len(a["restored_use"]):
        raise _Wrong(
            f"the file is damaged: its array 'restored_use' (saved policy states) has "
            f"{len(a['restored_use'])} bytes, but must have {n_restored}, the sum of the sizes in "
            f"its array 'restored'"
        )


def _check_shape(name: str, array: np.ndarray, lengths: Mapping[str, int]) -> None:
    shape = tuple(lengths[n] if isinstance(n, str) else n for n in ARRAYS[name][1])
    if array.shape != shape:
        raise _Wrong(
            f"the file is damaged: its array {name} has the shape {array.shape}, but must have "
            f"the shape {shape}"
        )


_FINITE, _FINITE_32 = (float(np.finfo(kind).max) for kind in (np.float64, np.float32))
# The maximum duration in nanoseconds, about 104 days.
_LONG_NS = 2**53


def _check_ranges(trace: Trace) -> None:
    """Raise _Wrong if a value of an array of a trace is out of range."""
    n_steps, n_layers, n_expert = len(trace.arrays["step_phase"]), trace.n_layers, trace.n_expert
    n_files, most = len(trace.header.files), 2**31 - 1
    step, anything = (0, n_steps - 1), (-most - 1, most)
    ranges: dict[str, tuple[float, float] | list[tuple[float, float]]] = {
        "slices": [(-1, n_files - 1), (0, 2**62), (0, 2**62 // n_expert), (0, 255)],
        "start_hotness": (0, _FINITE),
        "losses": (0, _FINITE),
        "costs": (0, _FINITE),
        "counters": (0, 2**63 - 1),
        "step_phase": (0, max(Phase)),
        "step_tokens": (1, most),
        "marks": [step, (min(SEQUENCE_MARKS), max(SEQUENCE_MARKS)), anything],
        "restored": [step, anything, (0, most)],
        "event_layer": (0, n_layers - 1),
        "event_tokens": (0, most),
        "event_scored": (0, 1),
        "event_computed": (0, n_expert),
        "event_ns": (0, _LONG_NS),
        "event_wait_us": (0, _LONG_NS // 1000),
        "ids": (0, n_expert - 1),
        "ahead_ids": (0, n_expert - 1),
        "weights": (-_FINITE_32, _FINITE_32),
        "ahead_scores": (-_FINITE_32, _FINITE_32),
        "importance": (-_FINITE_32, _FINITE_32),
        "phases": (0, max(Phase)),
    }
    for name, within in ranges.items():
        array = trace.arrays[name]
        columns = [within] if isinstance(within, tuple) else within
        parts = [array] if isinstance(within, tuple) else np.moveaxis(array, -1, 0)
        for number, (part, (low, high)) in enumerate(zip(parts, columns, strict=True)):
            if not ((part >= low) & (part <= high)).all():  # NaN fails this test too
                column = f", column {number}," if len(columns) > 1 else ""
                raise _Wrong(
                    f"the file is damaged: its array {name}{column} has a value outside the range "
                    f"{low} to {high}"
                )


def _check_slices(trace: Trace) -> None:
    slices = trace.arrays["slices"]
    there = slices[..., 0] >= 0
    kinds = np.all(there, axis=2, keepdims=True)
    few = kinds.sum(axis=1) < 2
    if (there != kinds).any() or not there[:, DOWN].all() or few.any():
        raise _Wrong(
            "the file is damaged: in its array 'slices', a layer lacks a matrix, or a matrix lacks "
            "one of the precisions"
        )
    if (slices[..., 2][there] < 1).any() or not np.isin(slices[..., 3], list(GGMLType)).all():
        raise _Wrong(
            "the file is damaged: in its array 'slices', a matrix has no bytes or an unknown type"
        )


def _check_events(trace: Trace) -> None:
    """Raise _Wrong if the route events of a trace are out of order, or contradict their steps."""
    a = trace.arrays
    step, layer = a["event_step"], a["event_layer"].astype(int)
    if (
        not np.array_equal(np.unique(step), np.arange(len(a["step_phase"])))
        or ((np.diff(step) < 0) | (np.diff(step) == 0) & (np.diff(layer) <= 0)).any()
    ):
        raise _Wrong("the events of the trace are not sorted by step and layer")
    if (a["event_ahead"] > np.minimum(MAX_AHEAD, trace.n_layers - 1 - layer)).any():
        raise _Wrong(
            "the file is damaged: an event predicts experts beyond the last layer, or of more than "
            f"{MAX_AHEAD} layers"
        )
    if (a["event_tokens"] > a["step_tokens"][step]).any():
        raise _Wrong(
            "the file is damaged: a layer computes more tokens (array 'event_tokens') than the "
            "whole pass through all layers (array 'step_tokens')"
        )
    if (a["phases"] < np.repeat(a["step_phase"][step], a["event_tokens"])).any():
        raise _Wrong(
            "the file is damaged: in its array 'phases', a decode step has a prefill token"
        )
    for name, scores in (("ids", "weights"), ("ahead_ids", "ahead_scores")):
        # If an event has fewer than k experts per token, the rest of a row repeats the first expert
        # with score 0.
        ids, columns = a[name].astype(int), np.arange(a[name].shape[1])
        ids[(ids == ids[:, :1]) & (a[scores] == 0) & (columns > 0)] = -1
        ids = np.where(ids < 0, -1 - columns, ids)
        if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
            raise _Wrong(f"the array {name} names an expert twice for one token")
