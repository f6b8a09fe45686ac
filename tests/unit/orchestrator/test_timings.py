"""Which of several timings stands, and what is timed again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_tools.file.layout import GGMLType
from orchestrator.cost import speeds as speeds_module
from orchestrator.cost.products import Attention, Product, Small
from orchestrator.cost.speeds import APART_S, MOST_MOMENTS, OLD_S, Speeds, Timing, Timings

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
        timings.add("x", 2.0**-moment, True)
        found = timings.as_dict()["x"]
    assert len(found) == MOST_MOMENTS
    assert not kept(*found, now=DAY + MOST_MOMENTS * APART_S).is_due("x")


def test_of_many_moments_the_slowest_disturbed_one_is_dropped() -> None:
    early = 10 * DAY - 100 * APART_S
    moments = [(1.0 + at, early + at * APART_S, at == 5) for at in range(MOST_MOMENTS)]
    timings = kept(*moments)
    timings.add("x", 9.0, False)
    left = timings.as_dict()["x"]
    assert [each.seconds for each in left] == [1.0, 2.0, 3.0, 4.0, 6.0, 9.0]
    timings = kept(*moments, now=early + 5 * APART_S)
    timings.add("x", 0.5, False)
    assert len(timings.as_dict()["x"]) == MOST_MOMENTS


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
        monkeypatch.setattr(speeds_module, "_REPEATS", 0)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(speeds_module, "Timer", lambda *_: self)
        monkeypatch.setattr(speeds_module, "time", lambda: self.now)
        monkeypatch.setattr(speeds_module, "Disturbance", lambda: self)

    def seconds(self, what: Product | Small | Attention) -> float:
        self.asked += 1
        return self.seconds_of_all

    def share(self) -> float:
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
    machine: Machine, seconds: float, after_s: float, others: float = 0.0, **settings: int
) -> tuple[float, bool]:
    """(what stands, whether it was disturbed) of a use of this machine."""
    machine.seconds_of_all, machine.others = seconds, others
    machine.now += after_s
    with Speeds(Bindings(), **{"threads": 1} | settings) as speeds:  # type: ignore[arg-type]
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


def test_disturbed_moments_go_on_until_there_is_a_quiet_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However many there were; of the same moment, no more than a few."""
    machine = Machine(monkeypatch, tmp_path)
    for number in range(2 * MOST_MOMENTS):
        assert session(machine, 10.0 + number, APART_S, others=1.0) == (10.0, True)
    assert session(machine, 10.0, 5, others=1.0) == (10.0, True)
    assert machine.asked == 2 * MOST_MOMENTS
    assert session(machine, 1.0, APART_S) == (1.0, False)
    assert session(machine, 1.0, APART_S) == (1.0, False)
    assert session(machine, 1.0, DAY) == (1.0, False)
    assert machine.asked == 2 * MOST_MOMENTS + 2


def test_what_is_known_is_not_timed_with_few_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They lie in caches, and would be too fast."""
    machine = Machine(monkeypatch, tmp_path)
    session(machine, 5.0, 0)
    assert session(machine, 1.0, DAY, pool_bytes=1 << 20) == (5.0, False)
    assert machine.asked == 1


def test_threads_without_a_core_of_their_own_are_no_disturbance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    assert session(machine, 5.0, 0, others=1.0, threads=10_000) == (5.0, False)


def test_a_moment_nobody_saw_to_be_disturbed_does_not_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    assert session(machine, 10.0, 0) == (10.0, False)
    assert session(machine, 1.0, APART_S) == (1.0, False)
    assert session(machine, 1.0, APART_S) == (1.0, False)
    assert session(machine, 1.0, APART_S) == (1.0, False) and machine.asked == 3


def test_a_file_of_the_form_before_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    session(machine, 5.0, 0)
    (path,) = (tmp_path / "moe-edge" / "speed").iterdir()
    data = json.loads(path.read_text())
    path.write_text(json.dumps({"format": data["format"], "seconds": {"Product": 5.0}}))
    assert session(machine, 2.0, 0) == (2.0, False)


def test_what_keeps_this_process_from_its_cores_is_told() -> None:
    """Two processes on one core: one of them waits while the other runs. Both may be stopped at
    any moment, so it is asked again until it tells."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("the kernel does not count how long threads wait for a core")
    code = (
        "import os, signal, time; from gguf_tools.process import Disturbance\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "other = os.fork()\n"
        "while other == 0: pass\n"
        "give_up = time.monotonic() + 60\n"
        "share = 0.0\n"
        "while share <= 0.2 and time.monotonic() < give_up:\n"
        "    others, busy_s = Disturbance(), time.process_time() + 0.2\n"
        "    while time.process_time() < busy_s: pass\n"
        "    share = others.share()\n"
        "os.kill(other, signal.SIGKILL)\n"
        "print(share)"
    )
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert float(found) > 0.2


def test_what_a_token_takes_is_timed_in_rounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The middle of three quiet rounds stands; prompts, whose products take long, have one."""
    machine = Machine(monkeypatch, tmp_path)
    many, small = WHAT._replace(rows=4), Small(64, 1)
    found = {WHAT: [4.0, 1.0, 2.0], small: [6.0, 7.0, 0.5], many: [3.0]}
    beside = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    monkeypatch.setattr(machine, "seconds", lambda what: found[what].pop(0))
    monkeypatch.setattr(machine, "share", lambda: beside.pop(0))
    with Speeds(Bindings(), 2) as speeds:  # type: ignore[arg-type]
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [4.0, 3.0, 6.0]
        assert speeds.again() and not any(found.values())
        # 0.5 was not timed on a quiet machine
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [2.0, 3.0, 6.5]
        assert not speeds.again() and not speeds.disturbed
    machine.now += 5
    with Speeds(Bindings(), 2) as speeds:  # type: ignore[arg-type]
        assert [speeds.seconds(each) for each in (WHAT, many, small)] == [2.0, 3.0, 6.5]
        assert not speeds.again()


def test_a_timing_that_others_disturbed_is_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Twice something ran beside the first of two products: it is timed until nothing does. Then
    nothing is left for the second one."""
    machine = Machine(monkeypatch, tmp_path)
    monkeypatch.setattr(speeds_module, "_REPEATS", 2)
    found, beside = [6.0, 5.0, 1.0, 7.0], [1.0, 1.0, 0.0, 1.0]
    monkeypatch.setattr(machine, "seconds", lambda what: found.pop(0))
    monkeypatch.setattr(machine, "share", lambda: beside.pop(0))
    with Speeds(Bindings(), 2) as speeds:  # type: ignore[arg-type]
        assert speeds.seconds(WHAT) == 1.0 and not speeds.disturbed
        assert speeds.seconds(WHAT._replace(rows=4)) == 7.0 and speeds.disturbed
