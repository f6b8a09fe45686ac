"""`moe-edge gpu-check`: each step is a process with a time limit, and results survive the end of
the call."""

import random
import signal
import subprocess
import sys
import time

import pytest

from orchestrator.errors import ConfigError
from orchestrator.lab import gpu_check
from orchestrator.lab.gpu_check import ROOT, Folder, Step

TEST = "tests/native/cuda/test_kernels.py::test_random_swaps[gpu]"

# A call with 30 steps that record their number at their end. Steps from number `most` on take as
# long as a step may, so the call is still running when it is killed.
CALL = """
import sys
from pathlib import Path
from orchestrator.lab import gpu_check
ran, report, most = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
gpu_check.TRIES = 1000
def steps(*_):
    for i in range(30):
        line = f"[ {i} -lt {most} ] || exec sleep 60; "
        line += f"sleep 0.04; echo said {i}; echo {i} >> {ran}"
        yield gpu_check.Step("engine", f"step {i}", ("sh", "-c", line), 60.0)
gpu_check._steps = steps
gpu_check.find_gpu = lambda: (True, "one")
sys.exit(not gpu_check.run(report, None, "", False, print))
"""


def test_every_test_for_a_gpu_has_its_part_and_its_order():
    """Each test has a part and a unique name, under which pytest finds it."""
    steps = gpu_check.find_tests(emulated=False)
    parts = [step.part for step in steps]
    assert set(parts) == set(gpu_check.PARTS)
    assert all("[gpu" in step.name or "test_gpu.py" in step.name for step in steps)
    assert len({step.slug for step in steps}) == len(steps)
    assert gpu_check.part_of(TEST) == "managed"
    assert gpu_check.part_of("tests/native/cuda/test_gpu.py::test_upstreams_operators") == "kernels"


def test_killed_at_ten_random_moments(tmp_path):
    """Finished steps are in the report and are not repeated. The next call continues after them."""
    ran, report = tmp_path / "ran", tmp_path / "report.md"
    ran.touch()
    call = [sys.executable, "-c", CALL, str(ran), str(report)]
    chance, kills, known = random.Random(7), 0, 0
    while kills < 10:
        some = [*call, str(min(known + 3, 29))]
        process = subprocess.Popen(
            some, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(chance.uniform(0.1, 0.5))
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        kept = {each.name for each in Folder(report).outcomes() if each.outcome == "passed"}
        assert len(kept) >= known
        known = len(kept)
        if report.exists():
            assert sum(f"| {name} | passed |" in report.read_text() for name in kept) >= known - 1
    command = [*call, "30"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    assert {each.outcome for each in Folder(report).outcomes()} == {"passed"}
    text = report.read_text()
    assert all(f"| step {i} | passed |" in text and f"    said {i}\n" in text for i in range(30))
    times = [ran.read_text().split().count(str(i)) for i in range(30)]
    # A step that finished but was not yet recorded when the call was killed runs again.
    assert all(times) and sum(times) <= 30 + kills
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    assert sum(times) == len(ran.read_text().split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A report folder on a machine with a GPU."""
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: (True, "one"))
    return Folder(tmp_path / "report.md")


def check(folder, *steps):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_check, "_steps", lambda *_: iter(steps))
        return gpu_check.run(folder.report, None, "", False, print)


def shell(name, line, limit_s=60.0):
    return Step("engine", name, ("sh", "-c", line), limit_s)


def test_a_hang_and_a_crash_end_their_step_alone(folder, monkeypatch):
    """A step that hangs is killed together with its child processes."""
    alive, wait = folder.path / "alive", subprocess.Popen.wait
    hang = shell("hang", f"echo begun; (while :; do date > {alive}; sleep 0.02; done) & wait", 0.2)

    def wait_once_it_hangs(process, limit_s=None):
        while limit_s == hang.limit_s and not alive.exists():
            time.sleep(0.01)
        return wait(process, limit_s)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_it_hangs)
    crash, fine = shell("crash", "kill -SEGV $$"), shell("fine", "echo good")
    assert not check(folder, hang, crash, fine)
    a, b, c = Folder(folder.report).outcomes()
    assert [each.outcome for each in (b, a, c)].count("failed") == 2
    found = {each.name: each for each in (a, b, c)}
    assert "it took longer than 0.2 s: " in found["hang"].reason
    assert "begun" in found["hang"].output
    assert found["crash"].reason == "signal 11 (SIGSEGV)"
    assert found["fine"].outcome == "passed"
    for _ in range(20):  # a killed process may complete its current system call
        alive.unlink(missing_ok=True)
        time.sleep(0.2)
        if not alive.exists():
            break
    assert not alive.exists()


def test_without_a_gpu_all_is_skipped(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: (False, "no driver"))
    monkeypatch.setattr(gpu_check, "find_tests", lambda *_: [])
    report = tmp_path / "report.md"
    assert gpu_check.run(report, None, "", False, print)
    assert report.read_text().count("| skipped |") == len(gpu_check.COMMANDS)
    assert "no GPU can be used (no driver)" in capsys.readouterr().out


def test_the_paper_s_table_needs_neither_tests_nor_the_demo(folder, monkeypatch):
    """The part table3 runs only its benchmarks, each within eight minutes."""
    monkeypatch.setattr(gpu_check, "find_tests", lambda *_: pytest.fail("tests are listed"))
    steps = list(gpu_check._steps("table3", folder, emulated=False))
    assert len(steps) == 4 and all(step.limit_s == 480 for step in steps)
    assert all("--table3" in step.command and "--keep" in step.command for step in steps)
    assert not any(str(gpu_check.DEMO_MODEL) in step.command for step in steps)


def test_an_unknown_part_and_a_missing_checkout_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--part 'all' is unknown: choose one of device, "):
        gpu_check.run(tmp_path / "r.md", "all", "", False, print)
    monkeypatch.setattr(gpu_check, "TESTS", tmp_path / "none")
    with pytest.raises(ConfigError, match="checkout"):
        gpu_check.run(tmp_path / "r.md", None, "", True, print)
