"""Free memory and the memory limits (cgroups) of this process."""

import psutil
import pytest

from orchestrator.plan import machine
from orchestrator.plan.machine import probe
from orchestrator.plan.records import Machine


def test_a_part_of_memory_is_left_as_headroom():
    assert Machine(2**30).usable_bytes == 2**30 - 2**28
    assert Machine(100 * 2**30).usable_bytes == 98 * 2**30
    assert Machine(1000).usable_bytes == 0
    assert 0 < probe().memory_bytes <= psutil.virtual_memory().total


def write_group(folder, names, limit, used, stat):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def test_cgroup_version_1(tmp_path):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    stat = "cache 5\ninactive_file 1\ntotal_active_file 100\ntotal_inactive_file 20\n"
    write_group(tmp_path / "memory" / "a" / "b", names, "1000", 500, stat)
    write_group(tmp_path / "memory" / "a", names, "9223372036854771712", 700, stat)
    write_group(tmp_path / "memory", names, "5000", 4000, stat)
    proc = tmp_path / "cgroup"
    proc.write_text("5:cpu,cpuacct:/x\n4:memory:/a/b\n")
    assert machine._cgroup_limits(tmp_path, proc) == [(1000, 380), (5000, 3880)]


def test_cgroup_version_2_and_none(tmp_path):
    names = ("memory.max", "memory.current")
    write_group(tmp_path / "s.slice" / "u", names, "max", 10, "anon 1\n")
    write_group(tmp_path / "s.slice", names, "2000", 300, "active_file 50\ninactive_file 50\n")
    proc = tmp_path / "cgroup"
    proc.write_text("0::/s.slice/u\n")
    assert machine._cgroup_limits(tmp_path, proc) == [(2000, 200)]
    assert machine._cgroup_limits(tmp_path, tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("most", "high", "found"),
    [
        ("2000", "1500", [(1500, 300)]),
        ("2000", "max", [(2000, 300)]),
        ("max", "1500", [(1500, 300)]),
        ("1000", "1500", [(1000, 300)]),
        ("max", "max", []),
        ("max", "0", [(0, 300)]),
    ],
)
def test_memory_above_which_the_kernel_slows_a_cgroup_down_is_a_limit(tmp_path, most, high, found):
    group, proc = tmp_path / "u", tmp_path / "cgroup"
    write_group(group, ("memory.max", "memory.current"), most, 300, "")
    (group / "memory.high").write_text(f"{high}\n")
    proc.write_text("0::/u\n")
    assert machine._cgroup_limits(tmp_path, proc) == found
