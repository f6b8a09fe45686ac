"""The trace file: written whole, and read with every array checked against the others."""

from __future__ import annotations

import json
import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.file.layout import DOWN, KINDS, MAX_TIERS
from gguf_tools.file.opening import open_file
from orchestrator.allocation.slots import Rules
from orchestrator.cache import files
from orchestrator.errors import PolicyError, SettingError, TraceError
from orchestrator.events import ABSENT, Phase
from orchestrator.lab.replay.trace import (
    ARRAYS,
    COUNTERS,
    FORMAT,
    SEQUENCE_MARKS,
    VERSION,
    Header,
    Trace,
)
from orchestrator.native import MAX_AHEAD
from orchestrator.policy import policy_class

# How much larger than its file a trace may be: routing weights hardly compress.
_UNPACKED_LEAST, _UNPACKED_MOST = 1 << 24, 64


def check_trace_target(path: Path) -> None:
    """Raises TraceError where no trace can be written, before a long run finds out."""
    try:
        files.check_target(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error


def write_trace(path: Path, trace: Trace) -> None:
    """Writes the file under a temporary name and renames it. Raises TraceError."""
    header = json.dumps({"format": FORMAT, **asdict(trace.header)}).encode()
    arrays: dict[str, Any] = {"header": np.frombuffer(header, np.uint8), **trace.arrays}
    try:
        with files.whole_file(path) as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error


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
    with open_file(path) as file:
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
    if [tier for tier in raw["tiers"] if tier in raw["in_use"]] != raw["in_use"]:
        raise _Wrong(f"the header is damaged: in_use is {raw['in_use']!r}")
    _check_settings(raw["policy"], raw["settings"])
    for name in ("layer_ids", "tiers", "files", "in_use", "dense_share"):
        raw[name] = tuple(raw[name])
    return Header(**(raw | {"rules": Rules(**raw["rules"])}))


def _check_settings(policy: str, settings: dict[str, Any]) -> None:
    """Settings of the policy that ran, against its own declarations."""
    try:
        declared = policy_class(policy).Settings
        wanted = declared().as_dict()
        if set(settings) != set(wanted):
            odd = ", ".join(sorted(set(settings) ^ set(wanted)))
            raise _Wrong(f"the header is damaged: settings missing or unknown: {odd}")
        declared(**settings)
    except (PolicyError, SettingError) as error:
        raise _Wrong(f"the header is damaged: {error}") from error


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(low: int, high: int) -> Any:
    return lambda value: type(value) is int and low <= value <= high


def _share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _rules(value: Any) -> bool:
    names = {field.name for field in fields(Rules)}
    return (
        isinstance(value, dict)
        and set(value) == names
        and all(isinstance(each, bool) for each in value.values())
    )


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
    "in_use": _texts(MAX_TIERS),
    "settings": lambda v: isinstance(v, dict),
    "rules": _rules,
    "transition_bytes": _number(0, 2**62),
    "expert_bytes": _number(1, 2**62),
    "io_threads": _number(1, 64),
    "read_bytes_per_s": _number(0, 2**62),
    "read_latency_us": _number(0, 10**9),
    "dense_share": lambda v: isinstance(v, list) and len(v) == len(Phase) and all(map(_share, v)),
}


def _check(trace: Trace) -> None:
    """Every array against its type, the others and the header."""
    a, header = trace.arrays, trace.header
    if set(a) != set(ARRAYS):
        raise _Wrong(f"arrays missing or unknown: {', '.join(sorted(set(a) ^ set(ARRAYS)))}")
    for name, array in a.items():
        kind, n_dims = ARRAYS[name]
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
        "start_tier": (n_layers, header.n_expert),
        "start_hotness": (n_layers, header.n_expert),
        "losses": (n_layers, header.n_expert, len(header.tiers)),
        "costs": (n_layers, header.n_expert, len(header.tiers) + 1),
        "counters": (len(Phase), len(COUNTERS)),
        "published": (len(a["published"]), 4),
        "marks": (len(a["marks"]), 3),
        "restored": (len(a["restored"]), 3),
        "ids": (n_rows, k),
        "held": (n_rows, k),
        "missing": (n_rows, k),
        "weights": (n_rows, k),
        "tokens": (n_rows,),
        "phases": (n_rows,),
        "sequences": (n_rows,),
        "ahead_ids": (n_ahead, k),
        "ahead_scores": (n_ahead, k),
        "ahead_held": (n_ahead, k),
        "ahead_missing": (n_ahead, k),
        "importance": (n_scored,),
    }
    _check_shapes(a, lengths)
    _check_slices(trace)
    _check_routing(trace)
    _check_versions(trace)
    _check_sequences(trace)


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
    if (a["event_ns"] < 0).any() or (a["event_wait_us"] < 0).any():
        raise _Wrong("an event has a negative time")
    if (a["event_ns"] > 2**53).any() or (a["event_wait_us"] > 2**53 // 1000).any():
        raise _Wrong("an event has a time of months")
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
    if (a["phases"] > max(Phase)).any() or (
        a["phases"] < np.repeat(a["step_phase"][step], a["event_tokens"])
    ).any():
        raise _Wrong("phases: a token has none, or is a prompt's in a step without one")
    if ((a["event_computed"] < 0) | (a["event_computed"] > trace.n_expert)).any():
        raise _Wrong("event_computed is out of range")
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


def _check_versions(trace: Trace) -> None:
    a = trace.arrays
    in_use = tuple(range(len(trace.header.in_use)))
    for name in ("start_tier", "held", "ahead_held"):
        if not np.isin(a[name], (*in_use, ABSENT)).all():
            raise _Wrong(f"{name}: a tier is out of range")
    for name in ("missing", "ahead_missing"):
        if (a[name] >> len(KINDS)).any():
            raise _Wrong(f"{name}: a matrix is out of range")
    for name in ("start_hotness", "losses", "costs"):
        if not (np.isfinite(a[name]).all() and (a[name] >= 0).all()):
            raise _Wrong(f"{name}: negative or not a finite number")
    if (a["counters"] < 0).any():
        raise _Wrong("counters: a negative number")
    if not ((a["step_us"] >= 0) & (a["step_us"] <= 2**53 / 1000)).all():
        raise _Wrong("step_us: negative, months, or not a finite number")
    if (a["step_tick"] > 1).any():
        raise _Wrong("step_tick is neither 0 nor 1")
    step, layer, expert, tier = a["published"].T
    ends = len(a["step_phase"]), trace.n_layers, trace.n_expert, len(in_use)
    for name, column, end in zip(
        ("step", "layer", "expert", "tier"), (step, layer, expert, tier), ends, strict=True
    ):
        if ((column < 0) | (column >= end)).any():
            raise _Wrong(f"published: {name} is out of range")
    if (np.diff(step) < 0).any():
        raise _Wrong("published: not in the order of the steps")


def _check_sequences(trace: Trace) -> None:
    a, n_steps = trace.arrays, len(trace.arrays["step_phase"])
    for name in ("marks", "restored"):
        step = a[name][:, 0]
        if ((step < 0) | (step >= n_steps)).any() or (np.diff(step) < 0).any():
            raise _Wrong(f"{name}: not in the order of the steps")
    if not np.isin(a["marks"][:, 1], SEQUENCE_MARKS).all():
        raise _Wrong("marks: neither an end nor a start")
    sizes = a["restored"][:, 2].astype(np.int64)
    if (sizes < 0).any() or sizes.sum() != len(a["restored_use"]):
        raise _Wrong("restored: not of the size of restored_use")
