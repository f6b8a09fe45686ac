"""Bandwidth of the disk for a model's experts.

It is measured by reading as the store does for misses, at several moments, and kept in the user
cache.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from time import perf_counter, process_time, sleep, time
from typing import NamedTuple

import psutil

from gguf_tools import interrupts
from gguf_tools.experts import ExpertModel
from gguf_tools.experts.slices import Slice
from gguf_tools.file.layout import (
    COMPUTE_ORDER,
    DOWN,
    IO_BLOCK_BYTES,
    GGMLType,
    expert_tensor_name,
    pad,
)
from gguf_tools.file.writer import GGUFWriter
from gguf_tools.process import usable_cores
from gguf_tools.workers import in_order, workers
from orchestrator.cache.files import digest, user_folder
from orchestrator.cache.profile import identity
from orchestrator.config import Config
from orchestrator.cost.speeds import Timings

# The store's read size: MOE_EDGE_PART_BYTES of patches/native/moe-edge-reads.h.
PART_BYTES = 512 * 2**10
# The read buffer of each thread, larger than a core's own caches.
_SLOTS_BYTES = 8 * 2**20
# Number of rounds that repeat the same reads. The median ignores a round in which the disk paused.
_ROUNDS = 3
# Experts that are read alone, with a pause as long as a token computes between two layers.
_ALONE, _PAUSE_S, _ALONE_S = 16, 0.002, 0.25

# File systems on remote or host disks, by the kernel's names.
_ELSEWHERE = {
    "9p": "a drive of the host system, such as a Windows drive in WSL (9p)",
    "drvfs": "a drive of Windows (drvfs)",
    "nfs": "another machine's disk (NFS)",
    "nfs4": "another machine's disk (NFS)",
    "cifs": "another machine's disk (SMB)",
    "smb3": "another machine's disk (SMB)",
    "fuse.sshfs": "another machine's disk (SSH)",
}
_USB, _SPINNING = "a USB disk", "a spinning disk"
# A faster disk is not a spinning one. Virtual machines may report any disk as rotational.
_SPINS_BELOW = 300e6

_FORMAT = "moe-edge disk 3"
# Number of measurements of a disk, of which the fastest is used.
_MEASUREMENTS = 6
_MIB = 1 << 20
# Experts of a file of noise, in one layer: 134 MB.
_NOISE_EXPERTS = 20
# The smallest timing that is stored, because a timing of 0 is invalid.
_LEAST_S = 1e-9


class Bandwidth(NamedTuple):
    """The measured read speed of a disk.

    - bytes_per_s: bytes per second of all I/O threads together.
    - direct: whether the reads bypassed the page cache (O_DIRECT).
    - slice_bytes: the mean size of one read.
    - core_s_per_byte: the processor time of reading, in seconds per byte. If every core computes,
      reading delays the compute threads by this time.
    - latency_s: seconds for each request, in addition to the time for its bytes.
    - first_bytes_per_s: bytes per second for data that no cache holds, because it has not been read
      for a long time; 0 if unknown.
    """

    bytes_per_s: float
    direct: bool = True
    slice_bytes: int = 0
    # A read takes a core from one compute thread, and the other compute threads wait for it.
    core_s_per_byte: float = 0.0
    latency_s: float = 1e-4
    # Often lower, because a virtual machine's host may cache bytes that were read before.
    first_bytes_per_s: float = 0.0

    @property
    def at_first(self) -> Bandwidth:
        """A copy of this bandwidth for data that no cache holds.

        Caches do not hold data that has not been read for a long time. Reading such data is often
        slower. In the copy, bytes_per_s has the value of first_bytes_per_s, if that is known.
        """
        return self._replace(bytes_per_s=self.first_bytes_per_s or self.bytes_per_s)

    def with_compute_threads(self, config: Config) -> Bandwidth:
        """Return a copy of this bandwidth for a run with the compute threads of `config`.

        If the compute threads leave a core free, reading does not delay them. The field
        core_s_per_byte, the processor time of reading one byte, is then 0 in the copy. Otherwise,
        the copy has the same values.
        """
        shares_cores = (config.n_threads) >= usable_cores()
        return self._replace(core_s_per_byte=self.core_s_per_byte if shares_cores else 0.0)

    def seconds(self, n_bytes: float) -> float:
        """Return the seconds to read n_bytes that are requested together; 0 for 0 bytes."""
        return n_bytes / self.bytes_per_s + self.latency_s if n_bytes > 0 else 0.0

    def disturbs_s(self, n_bytes: float, waited_s: float) -> float:
        """Return by how many seconds reading n_bytes from disk delays the compute threads.

        waited_s: the seconds for which the compute threads wait for a read anyway. Reading does not
        delay them during that time.
        """
        seconds = self.seconds(n_bytes)
        busy = max(0.0, 1.0 - waited_s / seconds) if seconds else 0.0
        return busy * n_bytes * self.core_s_per_byte


class _Read(NamedTuple):
    path: Path
    offset: int
    length: int


def _parts(path: Path, start: int, expert_bytes: int) -> list[_Read]:
    """Return the reads of one expert's matrix, split into parts as the expert store splits them.

    start: byte offset of the matrix in the file. The reads begin and end at multiples of the disk's
    block size.
    """
    first = start // IO_BLOCK_BYTES * IO_BLOCK_BYTES
    end = pad(start + expert_bytes, IO_BLOCK_BYTES)
    parts = max(1, (expert_bytes + PART_BYTES // 2) // PART_BYTES)
    step = pad(-(-(end - first) // parts), IO_BLOCK_BYTES)
    return [_Read(path, at, min(step, end - at)) for at in range(first, end, step)]


def _missed(model: ExpertModel, tier: int, rng: random.Random) -> Iterator[_Read]:
    """Yield the reads of successive tokens as if no expert were in memory.

    Each token reads the layers in order, with randomly chosen experts in each layer. Within a
    layer, the matrix kinds are read in the order of computation.
    """
    for layer in cycle(model.slices):
        experts = rng.sample(range(model.n_expert), model.n_expert_used)
        for kind in COMPUTE_ORDER:
            for expert in experts:
                yield from _matrix(model, layer[kind][tier], expert)


def _matrix(model: ExpertModel, piece: Slice | None, expert: int) -> list[_Read]:
    """Return the reads of one matrix of an expert.

    piece: the matrix of all experts of the layer, or None if the layer has no matrix of this kind.
    The result is then empty.
    """
    if piece is None:
        return []
    start = piece.offset + expert * piece.expert_bytes
    return _parts(model.files[piece.file_index], start, piece.expert_bytes)


def _open_direct(path: Path) -> tuple[int, bool]:
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        try:
            return os.open(path, os.O_RDONLY | flag), True
        except OSError:
            pass  # without O_DIRECT support the store uses buffered reads too
    return os.open(path, os.O_RDONLY), False


def read_bandwidth(
    model: ExpertModel, *, tier: int = 0, threads: int = 4, seconds: float = 1.5, seed: int = 0
) -> Bandwidth:
    """Measure the bandwidth of a model's disk by reading experts for some seconds.

    Several threads read randomly chosen experts, layer by layer, as an expert store does if no
    expert is in memory. Nothing else runs, so the result is an upper bound for a store with the
    same number of I/O threads. Raises OSError if a read fails.

    tier: index of the precision that is read. 0 is the best.
    seed: seed of the random choice.
    """
    files = {path: _open_direct(path) for path in set(model.files)}
    direct = all(is_direct for _, is_direct in files.values())
    queue, lock = _missed(model, tier, random.Random(seed)), Lock()
    reads: list[_Read] = []

    def work(index: int, in_time: Callable[[], bool]) -> int:
        total = at = 0
        with _slots() as view:
            while in_time():
                with lock:
                    read = next(queue)
                if at + read.length > _SLOTS_BYTES:
                    at = 0
                with view[at : at + read.length] as slot:
                    total += os.preadv(files[read.path][0], [slot], read.offset)
                at += read.length
                reads.append(read)
        return total

    try:
        busy_s = process_time()
        each_s = seconds / (1 + _ROUNDS)
        first = bytes_per_s(work, threads, each_s)
        queue = cycle(list(reads))
        speed = statistics.median(bytes_per_s(work, threads, each_s) for _ in range(_ROUNDS))
        core_s = process_time() - busy_s
        opened = {path: fd for path, (fd, _) in files.items()}
        latency_s = _latency_s(model, tier, opened, threads, speed, seed)
    finally:
        for fd, _ in files.values():
            os.close(fd)
    total = sum(read.length for read in reads)
    mean = total // max(1, len(reads))
    return Bandwidth(speed, direct, mean, core_s / max(1, total), latency_s, min(first, speed))


def _latency_s(
    model: ExpertModel, tier: int, files: dict[Path, int], threads: int, speed: float, seed: int
) -> float:
    """Return the additional seconds for an expert that is read alone (Bandwidth.latency_s).

    files: maps each path to an open file descriptor. speed: bytes per second of the disk. The
    result is the median over some experts that were read just before. A single expert has too few
    parts to keep a disk busy, and the disk was idle before.
    """
    rng, late, end = random.Random(seed), list[float](), perf_counter() + _ALONE_S

    with _slots() as view, workers(threads) as pool:  # which ends before its memory does

        def one(at: int, read: _Read) -> int:
            first = at % max(1, _SLOTS_BYTES - read.length)
            with view[first : first + read.length] as slot:
                return os.preadv(files[read.path], [slot], read.offset)

        while len(late) < _ALONE and (not late or perf_counter() < end):
            layer, expert = rng.choice(model.slices), rng.randrange(model.n_expert)
            reads = [
                read for kind in COMPUTE_ORDER for read in _matrix(model, layer[kind][tier], expert)
            ]
            starts = accumulate((read.length for read in reads), initial=0)
            at = [*zip(starts, reads, strict=False)]
            for again in (False, True):
                sleep(_PAUSE_S)
                asked = perf_counter()
                total = sum(in_order(pool, lambda each: one(*each), at))
                if again:
                    late.append(perf_counter() - asked - total / speed)
    return max(0.0, statistics.median(late))


@contextmanager
def _slots() -> Iterator[memoryview]:
    """Yield a buffer like the slots of the expert store, in huge pages if the system supports them.

    The buffer is private memory, because shared memory (the default of mmap) gets no huge pages.
    """
    private = mmap.mmap(-1, _SLOTS_BYTES, flags=mmap.MAP_PRIVATE)
    with private as memory, memoryview(memory) as view:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        yield view


def bytes_per_s(
    work: Callable[[int, Callable[[], bool]], int], threads: int, seconds: float
) -> float:
    """Run `work` in several threads, and return the bytes per second that they move together.

    Each thread calls work(index, in_time) once, where index is the number of the thread. `work`
    should move bytes as long as in_time() returns True, and return the number of these bytes.
    in_time() returns True until `seconds` have passed, and at its first call in each thread. An
    exception of `work` is raised again.
    """
    start = perf_counter()

    def clock() -> Callable[[], bool]:
        moves = 0

        def in_time() -> bool:
            nonlocal moves
            moves += 1
            left = moves == 1 or perf_counter() < start + seconds
            return left and not interrupts.asked()

        return in_time

    with workers(threads) as pool:
        total = sum(in_order(pool, lambda index: work(index, clock()), range(threads)))
    return total / (perf_counter() - start)


def device_of(path: Path) -> int:
    """Return the device number (st_dev) of the file system that holds a file.

    A saved measurement of a disk is stored with this number. If another disk is later mounted at
    the same path, the number usually differs.
    """
    return path.stat().st_dev


def kept_bandwidth(model: ExpertModel, config: Config, measures: bool = True) -> Bandwidth:
    """Return the measured bandwidth of the disk that holds a model file.

    The bandwidth is for reads while compute threads run. It is the best of several measurements at
    different times, because other programs slow a disk down. They are stored in the user cache. If
    more measurements are needed, this function makes one, which takes one or two seconds.

    measures: whether this function may measure. If it is False, and the disk was never measured,
    OSError is raised. OSError is also raised if a read fails.
    """
    place = [str(model.path.resolve()), device_of(model.path), identity(model)]
    measure = partial(read_bandwidth, model, threads=config.io_threads) if measures else None
    found = _kept(place, config, measure)
    # The disk's own cache may hold the bytes of one measurement, but not a model.
    return found.at_first if slow_kind(model.path) in (_USB, _SPINNING) else found


def machine_bandwidth(config: Config) -> Bandwidth:
    """Return the measured bandwidth of the disk that holds the user cache.

    It is used to predict the speed of a model that is not on this machine yet. The result is the
    best of several measurements, which are stored in the user cache. Until there are enough of
    them, a call makes one more, at most every ten minutes. To measure, it writes a file of random
    bytes, reads the file and deletes it. Raises OSError if the file cannot be written or read.
    """
    folder = user_folder("cache") / "speed"
    folder.mkdir(parents=True, exist_ok=True)

    def measured() -> Bandwidth:
        with TemporaryDirectory(prefix="noise-", dir=folder) as made:
            return read_bandwidth(_noise(Path(made) / "noise.gguf"), threads=config.io_threads)

    return _kept(["noise", str(folder.resolve()), device_of(folder)], config, measured)


def _noise(path: Path) -> ExpertModel:
    """Write a model file whose experts are random bytes, and return the opened model.

    Random bytes are used because no disk can compress them.
    """
    rng, kind = random.Random(0), GGMLType.Q8_0
    with GGUFWriter(path) as writer:
        numbers = {"block_count": 1, "embedding_length": 2048, "expert_used_count": 8}
        for key, value in numbers.items():
            writer.meta(f"noise.{key}", value)
        writer.meta("general.architecture", "noise")
        for each in COMPUTE_ORDER[1:]:
            rows = (2048, 1024) if each != DOWN else (1024, 2048)
            writer.declare(expert_tensor_name(0, each), (*rows, _NOISE_EXPERTS), kind)
        writer.begin()
        for name, tensor in writer.tensors.items():
            writer.write_tensor(name, rng.randbytes(tensor.nbytes))
    return ExpertModel.open(path)


def _kept(
    place: list[object], config: Config, measure: Callable[[], Bandwidth] | None
) -> Bandwidth:
    """Return the saved bandwidth of a disk, for reads while compute threads run.

    place: identifies the disk. measure: called if a measurement is due; None if nothing may be
    measured. Raises OSError if the measurement fails or if there is none.
    """
    path = user_folder("cache") / "speed" / f"disk-{digest(*place, config.io_threads)}.json"
    timings = Timings.load(path, _FORMAT, time())
    keys = ("read", "core", "latency", "first")
    # No sign shows whether the disk was idle, so even two equal measurements may both have been
    # disturbed. All _MEASUREMENTS are therefore made.
    if measure is not None and any(timings.is_due(each, _MEASUREMENTS) for each in keys):
        disk = measure()
        took = (
            *(_MIB / disk.bytes_per_s, _MIB * disk.core_s_per_byte),
            *(disk.latency_s, _MIB / disk.at_first.bytes_per_s),
        )
        for key, seconds in zip(keys, took, strict=True):
            timings.add(key, max(_LEAST_S, seconds), quiet=True)
        timings.save(path, _FORMAT)
    elif timings.least("first") is None:
        raise OSError("the speed of the disk was not measured yet: run `moe-edge plan MODEL`")
    read, core, latency, first = (timings.least(each) or _LEAST_S for each in keys)
    found = Bandwidth(
        _MIB / read,
        core_s_per_byte=core / _MIB,
        latency_s=latency,
        first_bytes_per_s=_MIB / first,
    )
    return found.with_compute_threads(config)


def slow_kind(path: Path, sysfs: Path = Path("/sys")) -> str | None:
    """Return the kind of the disk that holds a file, such as "a USB disk", if this kind is slow.

    The slow kinds are USB disks, spinning disks, network drives and drives of a host system. For
    any other disk, the result is None. sysfs: the folder at which Linux's sysfs is mounted.
    """
    here = path.resolve()
    mounts = [
        each for each in psutil.disk_partitions(all=True) if here.is_relative_to(each.mountpoint)
    ]
    if not mounts:
        return None
    # The last of several mounts at one path hides the others.
    mount = max(reversed(mounts), key=lambda each: len(each.mountpoint))
    if mount.fstype in _ELSEWHERE:
        return _ELSEWHERE[mount.fstype]
    with suppress(OSError):  # no block device, or none that this system shows
        number = os.stat(mount.device).st_rdev
        place = (sysfs / f"dev/block/{os.major(number)}:{os.minor(number)}").resolve()
        # An encrypted or logical volume lists its disks as slaves.
        for disk in (place, *(each.resolve() for each in place.glob("slaves/*"))):
            if any(part.startswith("usb") for part in disk.parts):
                return _USB
            flags = [folder / "queue/rotational" for folder in (disk, disk.parent)]
            spins = any(flag.is_file() and flag.read_text().strip() == "1" for flag in flags)
            if spins and any(part.startswith("ata") for part in disk.parts):
                return _SPINNING
    return None


def slow_disk(model: ExpertModel, config: Config) -> str | None:
    """Return a note for the user if a model is on a slow kind of disk, such as a USB disk.

    The note has the measured speed. If the speed must be measured first, this takes one or two
    seconds. The result is None for any other disk.
    """
    kind = slow_kind(model.path)
    if kind is None:
        return None
    with suppress(OSError):  # loading reports the error
        speed = kept_bandwidth(model, config).at_first.bytes_per_s
        if kind != _SPINNING or speed < _SPINS_BELOW:
            return (
                f"The model is on {kind} (read speed {speed / 1000000.0:.0f} MB/s). Loading the "
                "model and reading experts take long. Copy the model to an internal SSD."
            )
    return None
