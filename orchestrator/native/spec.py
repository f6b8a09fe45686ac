"""What a native store is built from."""

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
    """Where the experts of one (layer, kind, tier) lie; see struct moe_edge_slices. checksums: a
    CRC-32 for each expert, none where the file has none. interleaved_rows: 0, or the rows of a
    matrix whose slots hold it in the CPU's own layout. compute_us: what the host's threads take to
    compute one expert that a device lacks, 0 where that was not measured."""

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
    """How a store on a device serves experts that the device lacks, if a layer has few tokens.

    mode: "copy", "compute" or "auto". copy: the speed of copies to the device in bytes per second,
    0 if it is unknown. round_trip_us: the time that is lost when the host and the device wait for
    each other once. threads: how many threads of the host compute. Slices.compute_us has the time
    that the host needs for one expert."""

    mode: str = "copy"
    copy: float = 0.0
    round_trip_us: float = 0.0
    threads: int = 1

    MODES: ClassVar = ("copy", "compute", "auto")  # in the order of enum moe_edge_miss


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Everything a store is built from.

    layers: (il, {(kind, tier): Slices}) for each MoE layer in order, tiers numbered
    best first without gaps; groups: (slot_bytes, n_slots). n_passing[group]: slots that
    passing requests may take from the others; 1 where it is empty. on_host[group]: its slots are in
    the host's memory behind a device, whose threads compute them; none where it is empty.
    importance_window: token
    importance from the last W queries; 0 none, -1 all of them. exact_tiers: a request drops
    a better copy. whole_experts: an op gets an expert once all matrices of it are there. rigid:
    reads go in the order in which they were asked for, and none is taken back.
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
    n_passing: tuple[int, ...] = ()
    on_host: tuple[bool, ...] = ()
    importance_window: int = 0
    exact_tiers: bool = False
    device: str | None = None  # whose memory the slots are; None for the host's
    host_bytes: int = 0  # the cache of experts behind a device
    misses: Misses = Misses()
    simulated: bool = False  # no file is opened; see orchestrator.lab.replay.simulate
    whole_experts: bool = False
    rigid: bool = False  # simulated stores only

    def with_slices(self, change: Callable[[int, int, Slices], Slices]) -> StoreSpec:
        """With what change makes of each, by the number of its layer and its kind."""
        layers = tuple(
            (il, {(kind, tier): change(at, kind, each) for (kind, tier), each in slices.items()})
            for at, (il, slices) in enumerate(self.layers)
        )
        return replace(self, layers=layers)


# Fields that C has by the same names.
_SLICES = ("offset", "expert_bytes", "file", "type", "group", "interleaved_rows", "compute_us")
_NUMBERS = (
    *("budget_bytes", "host_bytes", "n_tiers", "n_expert", "n_expert_used", "max_tokens"),
    *("n_ahead", "n_io_threads", "importance_window"),
)


def c_config(spec: StoreSpec) -> tuple[CConfig, list[Any]]:
    """The C configuration and what must live as long as it is read."""
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
