"""Which of several timings stands, and what is timed again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_tools.file.layout import GGMLType
from gguf_tools.process import OtherWork
from orchestrator import speeds as speeds_module
from orchestrator.products import Attention, Product, Small
from orchestrator.speeds import Speeds
from orchestrator.timings import APART_S, MOST_MOMENTS, OLD_S, Timing, Timings

DAY = 86400.0


def kept(*of: tuple[float, float, bool], now: float = 10 * DAY) -> Timings:
    return Timings(now, {"x": [Timing(*each) for each in of]})


def test_the_least_stands_and_two_quiet_ones_that_agree_end_it() -> None:
    assert kept().least("x") is None and kept().is_due("x")
    early = 9 * DAY
    one = kept((3.0, early, True))
    assert one.least("x") == 3.0 and one.is_due("x")
    slow = kept((3.0, early, True), (9.0, early + APART_S, True))
    assert slow.least("x") == 3.0 and slow.is_due("x")  # either may have been disturbed
    assert not kept((3.0, early, True), (3.3, early + APART_S, True)).is_due("x")
    assert kept((3.0, early, True), (3.3, early + APART_S, False)).is_due("x")


def test_a_quiet_moment_is_not_asked_twice_and_a_busy_one_is() -> None:
    before = 10 * DAY - APART_S / 2
    assert not kept((3.0, before, True)).is_due("x")
    assert kept((3.0, before, False)).is_due("x")
    both = kept((3.0, before, True))
    both.add("x", 2.0, False)
    assert both.as_dict() == {"x": [(2.0, before, False)]}
    both.add("x", 5.0, True)
    assert both.as_dict() == {"x": [(2.0, before, False)]}


def test_timings_that_never_agree_come_to_an_end() -> None:
    found: list[tuple[float, float, bool]] = []
    for moment in range(MOST_MOMENTS):
        timings = kept(*found, now=DAY + moment * APART_S)
        assert timings.is_due("x")
        timings.add("x", 2.0**-moment, moment % 2 == 0)
        found = timings.as_dict()["x"]
    assert len(found) == MOST_MOMENTS
    assert not kept(*found, now=DAY + MOST_MOMENTS * APART_S).is_due("x")


def test_a_machine_that_got_slower_is_believed_in_time() -> None:
    fast = (1.0, 0.0, True), (1.0, APART_S, True)
    slow = (3.0, OLD_S, True)
    assert kept(*fast, slow, now=OLD_S).least("x") == 1.0
    later = kept(*fast, slow, now=OLD_S + APART_S)
    assert later.least("x") == 3.0 and later.is_due("x")
    ahead = kept((1.0, 11 * DAY, True))
    assert ahead.least("x") is None  # the clock was wrong then, or is now


@pytest.mark.parametrize(
    "damage", [None, [], {"x": 3}, {"x": [[1.0, 2.0]]}, {"x": [[-1.0, 2.0, True]]}]
)
def test_what_is_damaged_counts_as_nothing(damage: object) -> None:
    assert Timings.read(damage, DAY).as_dict() == {}


class Machine:
    """Stands for products.Timer, the clock, and other programs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.seconds_of_all, self.now, self.others, self.asked = 1.0, DAY, 0.0, 0
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(speeds_module, "Timer", lambda *_: self)
        monkeypatch.setattr(speeds_module, "time", lambda: self.now)
        monkeypatch.setattr(speeds_module, "OtherWork", lambda: self)
        monkeypatch.setattr(speeds_module, "default_threads", lambda: 2)

    def seconds(self, what: Product | Small | Attention) -> float:
        self.asked += 1
        return self.seconds_of_all

    def cores(self) -> float:
        return self.others

    def close(self) -> None:
        pass


class Bindings:
    """As far as speeds ask."""

    class api:
        _lib = None

        @staticmethod
        def llama_print_system_info() -> bytes:
            return b"a system"


WHAT = Product(GGMLType.Q4_K, 256, 64, 1)


def session(
    machine: Machine, seconds: float, after_s: float, others: float = 0.0
) -> tuple[float, bool]:
    """(what stands, whether it was disturbed) of a use of this machine."""
    machine.seconds_of_all, machine.others = seconds, others
    machine.now += after_s
    with Speeds(Bindings(), 2) as speeds:  # type: ignore[arg-type]
        return speeds.seconds(WHAT), speeds.disturbed


def test_a_disturbed_moment_does_not_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other programs made a product take ten times as long when it was first measured."""
    machine = Machine(monkeypatch, tmp_path)
    assert session(machine, 10.0, 0, others=1.0) == (10.0, True)
    assert session(machine, 1.0, 5) == (1.0, False)
    assert session(machine, 10.0, 5) == (1.0, False) and machine.asked == 2
    assert session(machine, 8.0, APART_S, others=1.0) == (1.0, False)
    assert session(machine, 1.1, APART_S) == (1.0, False) and machine.asked == 4
    assert session(machine, 9.0, DAY) == (1.0, False) and machine.asked == 4


def test_a_moment_nobody_saw_to_be_disturbed_does_not_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    assert session(machine, 10.0, 0) == (10.0, False)
    assert session(machine, 1.0, APART_S) == (1.0, False)
    assert session(machine, 1.0, APART_S) == (1.0, False)
    assert session(machine, 1.0, APART_S) == (1.0, False) and machine.asked == 3


def test_fewer_threads_leave_a_core_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    machine.others = 0.9
    for threads, disturbed in ((1, False), (2, True)):
        with Speeds(Bindings(), threads) as speeds:  # type: ignore[arg-type]
            speeds.seconds(WHAT)
            assert speeds.disturbed == disturbed


def test_a_file_of_the_form_before_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    session(machine, 5.0, 0)
    (path,) = (tmp_path / "moe-edge" / "speed").iterdir()
    data = json.loads(path.read_text())
    path.write_text(json.dumps({"format": data["format"], "seconds": {"Product": 5.0}}))
    assert session(machine, 2.0, 0) == (2.0, False)


def test_other_work_is_told_from_ones_own() -> None:
    others = OtherWork()
    loop = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", loop], check=True)
    seen = others.cores()
    assert seen > 0.05
    mine = OtherWork()
    sum(range(3_000_000))
    assert mine.cores() < 64


def test_a_system_that_does_not_tell_counts_as_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(percpu: bool) -> None:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr("gguf_tools.process.psutil.cpu_times", refused)
    assert OtherWork().cores() == 0
