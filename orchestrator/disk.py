"""How fast this disk delivers experts: direct reads of the very slices a miss would read."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from gguf_tools import interrupts
from gguf_tools.experts import ExpertModel
from gguf_tools.file.layout import IO_BLOCK_BYTES, pad
from gguf_tools.workers import in_order, workers


class Bandwidth(NamedTuple):
    """bytes_per_s of `direct` (O_DIRECT) or buffered reads of slice_bytes on average."""

    bytes_per_s: float
    direct: bool
    slice_bytes: int


class _Window(NamedTuple):
    path: Path
    offset: int
    length: int


def _windows(model: ExpertModel, tier: int) -> list[_Window]:
    """The block-aligned window around every expert matrix of a tier."""
    found = []
    for layer in model.slices:
        for tiers in layer:
            piece = tiers[tier]
            if piece is None:
                continue
            for expert in range(model.n_expert):
                start = piece.offset + expert * piece.expert_bytes
                first = start // IO_BLOCK_BYTES * IO_BLOCK_BYTES
                length = pad(start + piece.expert_bytes - first, IO_BLOCK_BYTES)
                found.append(_Window(model.files[piece.file_index], first, length))
    return found


def _open_direct(path: Path) -> tuple[int, bool]:
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        try:
            return os.open(path, os.O_RDONLY | flag), True
        except OSError:
            pass  # the file system refuses; buffered reads are what the store does then too
    return os.open(path, os.O_RDONLY), False


def read_bandwidth(
    model: ExpertModel, *, tier: int = 0, threads: int = 4, seconds: float = 1.5, seed: int = 0
) -> Bandwidth:
    """Reads expert matrices of a tier in random order for so long, one at a time a thread.

    An upper limit for a store with as many I/O threads: nothing else runs meanwhile.
    Raises OSError.
    """
    windows = _windows(model, tier)
    files = {path: _open_direct(path) for path in {window.path for window in windows}}
    direct = all(is_direct for _, is_direct in files.values())
    longest = max(window.length for window in windows)

    def work(index: int, in_time: Callable[[], bool]) -> int:
        order, total = random.Random(f"{seed} {index}"), 0
        with mmap.mmap(-1, longest) as memory, memoryview(memory) as view:
            while in_time():
                window = order.choice(windows)
                total += os.preadv(files[window.path][0], [view[: window.length]], window.offset)
        return total

    try:
        speed = bytes_per_s(work, threads, seconds)
    finally:
        for fd, _ in files.values():
            os.close(fd)
    mean_bytes = sum(window.length for window in windows) // len(windows)
    return Bandwidth(speed, direct, mean_bytes)


def bytes_per_s(
    work: Callable[[int, Callable[[], bool]], int], threads: int, seconds: float
) -> float:
    """What so many threads move together. work gets the number of its thread and whether there is
    time left, which it asks; it returns the bytes that it moved. Raises what work raises."""
    start = perf_counter()

    def in_time() -> bool:
        return perf_counter() < start + seconds and not interrupts.asked()

    with workers(threads) as pool:
        total = sum(in_order(pool, lambda index: work(index, in_time), range(threads)))
    return total / (perf_counter() - start)
