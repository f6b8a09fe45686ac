"""The measurement of the disk's speed, which reads in the same parts as the store, and the stored
results."""

import os
import re
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from tables import cases

from gguf_tools import process, synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost import disk
from orchestrator.cost.disk import Bandwidth, kept_bandwidth
from orchestrator.cost.speeds import APART_S

HANG_S = 600  # only a deadlock takes this long

NATIVE = Path(__file__).resolve().parents[3] / "patches" / "native"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("taken") / "two.gguf"
    return ExpertModel.open(synthetic.write(path, "tiny-olmoe", tiers=("q4_k", "q2_k")))


def test_parts_are_those_of_the_store():
    source = (NATIVE / "moe-edge-reads.h").read_text()
    found = re.search(r"#define MOE_EDGE_PART_BYTES \((\d+) << (\d+)\)", source)
    assert int(found[1]) << int(found[2]) == disk.PART_BYTES


def test_a_matrix_is_read_whole_in_blocks():
    path = Path("m")
    for start, size in ((4096 * 7, 1_179_648), (4096 * 7 + 32, 1_179_648), (100, 40_000)):
        reads = disk._parts(path, start, size)
        assert len(reads) == (2 if size > disk.PART_BYTES else 1)
        assert reads[0].offset <= start
        assert reads[-1].offset + reads[-1].length >= start + size
        assert all(read.offset % 4096 == read.length % 4096 == 0 for read in reads)
        for one, after in pairwise(reads):
            assert one.offset + one.length == after.offset


def test_core_time_of_reading_is_measured(model, monkeypatch):
    busy = iter([5.0, 7.0])
    monkeypatch.setattr(disk, "process_time", lambda: next(busy))
    found = disk.read_bandwidth(model, threads=1, seconds=0)
    assert found.core_s_per_byte == pytest.approx(2.0 / (4 * found.slice_bytes))  # four reads
    for threads, taken in ((None, found.core_s_per_byte), (1, 0.0)):
        monkeypatch.setattr(disk, "usable_cores", lambda: 2)
        monkeypatch.setattr(process, "default_threads", lambda: 2)
        config = Config.build(model=model.path, threads=threads)
        assert found.with_compute_threads(config) == found._replace(core_s_per_byte=taken)


def test_a_short_pause_of_the_disk_does_not_lower_its_speed(model, monkeypatch):
    rounds = iter([0.3e9, 1.0e9, 0.1e9, 1.2e9])
    monkeypatch.setattr(disk, "bytes_per_s", lambda *_: next(rounds))
    found = disk.read_bandwidth(model, threads=1, seconds=0)
    assert (found.bytes_per_s, found.at_first.bytes_per_s) == (1.0e9, 0.3e9)


def test_latency_is_measured_with_the_reads_of_one_expert(model, monkeypatch):
    """A disk with 1 GB/s and 20 ms of latency. The three matrices of an expert are read in
    parallel. The latency is the duration of a read minus the time of its bytes at 1 GB/s."""
    read, now_s = os.preadv, [0.0]

    def pass_by():
        now_s[0] += 0.02

    together = threading.Barrier(3, pass_by)

    def preadv(*args):
        together.wait(HANG_S)
        return read(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(disk, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(disk, "bytes_per_s", lambda *_: 1e9)
    found = disk.read_bandwidth(model, threads=4, seconds=0)
    assert 0.019 < found.latency_s < 0.02  # the remainder is the time of the bytes


def test_the_fastest_of_several_measurements_is_stored(model, monkeypatch):
    """Up to six measurements are taken, at least APART_S seconds apart, and the fastest is used.
    Equal results do not end them, because both may have been disturbed."""
    now, speeds = [1e9], [4e8, 4.1e8, 1e9, 1e9, 9e8, 1e9]
    measured: list[float] = []

    def read_bandwidth(*_, **__):
        measured.append(speeds[len(measured)])
        return Bandwidth(measured[-1], True, 4096, 0.0, 0.0)

    monkeypatch.setattr(disk, "read_bandwidth", read_bandwidth)
    monkeypatch.setattr(disk, "time", lambda: now[0])
    config = Config.build(model=model.path)
    for times, wait, best in (
        (1, 0.0, 4e8),
        (1, 1.0, 4e8),
        (2, APART_S, 4.1e8),
        (3, APART_S, 1e9),
        *((each, APART_S, 1e9) for each in (4, 5, 6)),
        (6, 10 * APART_S, 1e9),
    ):
        now[0] += wait
        assert kept_bandwidth(model, config).bytes_per_s == pytest.approx(best)
        assert len(measured) == times


@cases("kind, best", (None, 2e9), (disk._SPINNING, 1e8), (disk._USB, 1e8), ("NFS", 2e9))
def test_the_cache_of_a_slow_disk_does_not_count(model, monkeypatch, kind, best):
    measurement = Bandwidth(2e9, True, 4096, 0.0, 0.0, first_bytes_per_s=1e8)
    monkeypatch.setattr(disk, "read_bandwidth", lambda *_, **__: measurement)
    monkeypatch.setattr(disk, "slow_kind", lambda _path: kind)
    found = kept_bandwidth(model, Config.build(model=model.path))
    assert found.bytes_per_s == pytest.approx(best)


def test_a_disk_is_known_by_its_device(model, user_folder, monkeypatch):
    """Stored speeds belong to a device, because another disk may be mounted at the same path with
    the same file on it."""
    for device, speed in enumerate((1e9, 2e9, 1e9)):
        monkeypatch.setattr(disk, "device_of", lambda _path, at=device: at)
        measurement = Bandwidth(speed, True, 4096, 0.0, 0.0)
        monkeypatch.setattr(disk, "read_bandwidth", lambda *_, it=measurement, **__: it)
        found = kept_bandwidth(model, Config.build(model=model.path))
        assert found.bytes_per_s == pytest.approx(speed)
    assert len(list((user_folder / "cache" / "moe-edge" / "speed").iterdir())) == 3


ATA = "devices/pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda"
USB = "devices/pci0000:00/0000:00:14.0/usb2/2-1/2-1:1.0/host6/target6:0:0/6:0:0:0/block/sdb"


@cases(
    "system, place, spins, speed, kind",
    ("9p", "", "0", 2e9, "a drive of the host system, such as a Windows drive in WSL (9p)"),
    ("nfs4", "", "0", 1e8, "another machine's disk (NFS)"),
    ("ext4", USB, "0", 4e8, "a USB disk"),
    ("ext4", f"{USB}/sdb1", "1", 4e7, "a USB disk"),
    ("ext4", f"{ATA}/sda1", "1", 1.5e8, "a spinning disk"),
    ("ext4", f"{ATA}/sda1", "1", 5e8, None),  # a virtual machine's disk claims to spin
    ("ext4", ATA, "0", 1.5e8, None),
    ("ext4", "devices/pci0000:00/0000:00:02.0/virtio1/block/vda", "1", 1.5e8, None),
    ("ext4", "", "0", 1.5e8, None),  # no device in sysfs, as in a container
)
def test_a_slow_disk_is_named_with_its_speed(
    model, monkeypatch, tmp_path, system, place, spins, speed, kind
):
    """The note names the kind of the file system with the longest mount point above the model."""
    mount = SimpleNamespace(mountpoint=str(model.path.parent), fstype=system, device="/dev/null")
    root = SimpleNamespace(mountpoint="/", fstype="nfs", device="host:/")
    monkeypatch.setattr(disk.psutil, "disk_partitions", lambda **_: [root, mount])
    if place:
        whole = tmp_path / (place if place.count("sd") < 2 else str(Path(place).parent))
        (whole / "queue").mkdir(parents=True)
        (whole / "queue/rotational").write_text(f"{spins}\n")
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / "dev/block").mkdir(parents=True)
        number = os.stat("/dev/null").st_rdev
        link = tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}"
        link.symlink_to(tmp_path / place)
    monkeypatch.setattr(disk, "slow_kind", partial(disk.slow_kind, sysfs=tmp_path))
    monkeypatch.setattr(disk, "kept_bandwidth", lambda *_: Bandwidth(speed))
    said = disk.slow_disk(model, Config.build(model=model.path))
    if kind is None:
        assert said is None
    else:
        assert said.startswith(f"The model is on {kind} (read speed {speed / 1e6:.0f} MB/s). ")
