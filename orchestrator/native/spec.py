"""The parameters of a native store."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from orchestrator.native.abi import (
    DIRECT_IO,
    EXACT_TIERS,
    RIGID,
    SIMULATED,
    WHOLE_EXPERTS,
    CConfig,
    CGroup,
    CLayer,
)


@dataclass(frozen=True, slots=True)
class Slices:
    """One matrix of each expert of a layer, in one precision, and its location in a model file.

    The matrix is gate, up, down, or gate and up in one. A slice is this matrix of one expert.

    - file: index of the model file in StoreSpec.files.
    - offset: where the slice of expert 0 begins in the file, in bytes. The slices of the other
      experts follow without gaps.
    - expert_bytes: size of each slice.
    - type: quantization type, as ggml's number.
    - group: index in StoreSpec.groups of the memory slots that hold these slices.
    - checksums: CRC-32 of each slice, or empty.
    - interleaved_rows: number of rows of the matrix, if memory holds the rows interleaved;
      otherwise 0.
    - compute_us: microseconds in which the CPU multiplies a slice with one token; 0 if unknown.
    """

    file: int
    offset: int
    expert_bytes: int
    type: int
    group: int
    checksums: tuple[int, ...] = ()
    interleaved_rows: int = 0
    compute_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Misses:
    """Settings for experts that a token needs and that are not in GPU memory (cache misses).

    mode: "copy" copies a missing expert to the GPU, "compute" computes it on the host, and "auto"
    chooses the faster way for each expert. Layers with many tokens always copy. copy: bytes per
    second of copies to the GPU, 0 if unknown. round_trip_us: time lost when host and GPU wait for
    each other once. threads: number of host threads that compute.
    """

    mode: str = "copy"
    copy: float = 0.0
    round_trip_us: float = 0.0
    threads: int = 1

    MODES: ClassVar = ("copy", "compute", "auto")  # in the order of enum moe_edge_miss


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """All parameters of an expert store, which reads experts from files into slots in memory.

    - files: the model files.
    - layers: for each MoE layer, its number in llama.cpp, and the location of its experts in the
      files by (matrix kind, tier). A tier is a stored precision; 0 is the best.
    - groups: (slot size in bytes, number of slots) of each group of slots.
    - device: the GPU whose memory holds the slots; None for host memory.
    """

    files: tuple[Path, ...]
    layers: tuple[tuple[int, dict[tuple[int, int], Slices]], ...]
    groups: tuple[tuple[int, int], ...]
    budget_bytes: int
    n_tiers: int
    n_expert: int
    n_expert_used: int
    max_tokens: int
    n_ahead: int
    n_io_threads: int
    direct_io: bool = True
    # For each group, how many of its slots may hold streamed experts (experts that only a long
    # prompt needs) at a time. Empty: 1.
    n_passing: tuple[int, ...] = ()
    # For each group, whether its slots are in host memory although the store is on a device. Empty:
    # False.
    on_host: tuple[bool, ...] = ()
    # The number of tokens at the end of a prompt whose attention determines the importance of the
    # prompt's tokens. 0: compute no importance. -1: use all tokens.
    importance_window: int = 0
    exact_tiers: bool = False  # do not use a copy in a better tier than requested
    device: str | None = None
    host_bytes: int = 0  # size of the host cache in front of the disk, if the slots are on a device
    misses: Misses = Misses()
    simulated: bool = False  # no file is opened; see orchestrator.lab.replay.simulate
    # Start to compute an expert only when all of its matrices are in memory.
    whole_experts: bool = False
    # Read in the order of the requests, and cancel no read. Only for simulated stores.
    rigid: bool = False

    def with_slices(self, change: Callable[[int, int, Slices], Slices]) -> StoreSpec:
        """Return a copy of these parameters in which `change` has replaced every Slices.

        A Slices is the location of a layer's experts in a file, for one matrix kind and one
        precision. `change` is called with the index of the MoE layer, the matrix kind and the old
        Slices. It returns the new Slices.
        """
        layers = tuple(
            (il, {(kind, tier): change(at, kind, each) for (kind, tier), each in slices.items()})
            for at, (il, slices) in enumerate(self.layers)
        )
        return replace(self, layers=layers)


# Fields that have the same names in C.
_SLICES = ("offset", "expert_bytes", "file", "type", "group", "interleaved_rows", "compute_us")
_NUMBERS = (
    *("budget_bytes", "host_bytes", "n_tiers", "n_expert", "n_expert_used", "max_tokens"),
    *("n_ahead", "n_io_threads", "importance_window"),
)


def c_config(spec: StoreSpec) -> tuple[CConfig, list[Any]]:
    """Return (parameters as a C struct, objects that must stay alive while C reads the struct)."""
    files = (ctypes.c_char_p * len(spec.files))(*(bytes(path) for path in spec.files))
    layers = (CLayer * len(spec.layers))()
    checksums = []
    for c_layer, (il, slices) in zip(layers, spec.layers, strict=True):
        c_layer.il = il
        for (kind, tier), piece in slices.items():
            target = c_layer.slices[kind][tier]
            for name in _SLICES:
                setattr(target, name, getattr(piece, name))
            if piece.checksums:
                checksums.append((ctypes.c_uint32 * spec.n_expert)(*piece.checksums))
                target.checksums = checksums[-1]
    groups = (CGroup * len(spec.groups))(*(CGroup(*each) for each in spec.groups))
    for c_group, n_passing in zip(groups, spec.n_passing, strict=False):
        c_group.n_passing = n_passing
    for c_group, on_host in zip(groups, spec.on_host, strict=False):
        c_group.place = Misses.MODES.index("compute") if on_host else 0
    config = CConfig(
        files=files,
        layers=layers,
        groups=groups,
        copy_bytes_per_s=spec.misses.copy,
        round_trip_us=spec.misses.round_trip_us,
        misses=Misses.MODES.index(spec.misses.mode),
        n_host_threads=spec.misses.threads,
        n_files=len(spec.files),
        n_layers=len(spec.layers),
        n_groups=len(spec.groups),
        flags=DIRECT_IO * spec.direct_io
        | EXACT_TIERS * spec.exact_tiers
        | SIMULATED * spec.simulated
        | WHOLE_EXPERTS * spec.whole_experts
        | RIGID * spec.rigid,
        **{name: getattr(spec, name) for name in _NUMBERS},
    )
    return config, [files, layers, groups, checksums]
