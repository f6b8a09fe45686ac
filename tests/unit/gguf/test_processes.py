"""Child processes end with their block. Also the pool of threads, and the peak memory of this
process."""

import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from command_line import python

from gguf_tools import children, interrupts
from gguf_tools.children import child
from gguf_tools.progress import ProgressMeter
from gguf_tools.workers import run_all

HANG_S = 600  # only a deadlock takes this long
ASLEEP = [sys.executable, "-c", f"import time; time.sleep({2 * HANG_S})"]


def test_a_child_that_still_runs_is_killed():
    with pytest.raises(ZeroDivisionError), child(ASLEEP, stdout=subprocess.PIPE) as process:
        raise ZeroDivisionError
    assert process.poll() is not None


def test_children_of_the_child_are_killed_too():
    starts = (
        "import subprocess, sys; started = subprocess.Popen(sys.argv[1:]); "
        "print(started.pid, flush=True); started.wait()"
    )
    command = [sys.executable, "-c", starts, *ASLEEP]
    with child(command, kill_group=True, stdout=subprocess.PIPE) as process:
        started = psutil.Process(int(process.stdout.readline()))
        assert started.status() != psutil.STATUS_ZOMBIE
    gone, _ = psutil.wait_procs([started], timeout=HANG_S)
    assert gone


def test_an_interrupt_while_a_child_starts_leaves_no_child(monkeypatch):
    made = []

    class Late(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)
            # Like a signal: inside held() it waits for the end of the block.
            interrupts.hand_over(KeyboardInterrupt())

    monkeypatch.setattr(children.subprocess, "Popen", Late)
    with pytest.raises(KeyboardInterrupt), child(ASLEEP, stdout=subprocess.PIPE):
        pytest.fail("the block was entered")
    assert made[0].poll() is not None


def test_none_in_a_list_of_jobs_is_a_barrier():
    running, most, order = set(), [], []

    def job(group, number):
        running.add((group, number))
        most.append({each for each, _ in running.copy()})
        time.sleep(0.002 * (number % 3))
        running.discard((group, number))
        order.append(group)
        return 1

    shares = []
    jobs = [
        each
        for group in range(3)
        for each in (*(partial(job, group, number) for number in range(9)), None)
    ]
    run_all(jobs, 4, ProgressMeter(shares.append, 27))
    assert order == sorted(order) and len(order) == 27
    assert all(len(groups) == 1 for groups in most)
    assert shares[-1] == 1
    run_all([None, None], 2, ProgressMeter(None, 1))


def test_peak_memory_excludes_the_program_before_exec():
    """exec keeps getrusage's peak, so a small program would show that of its large parent."""
    peak = "from gguf_tools.process import peak_rss_bytes; print(peak_rss_bytes())"
    big = (
        "import os, sys; block = b'x' * (300 << 20); "
        f"os.execv(sys.executable, [sys.executable, '-c', {peak!r}])"
    )
    assert 2**20 < int(python("-c", big).stdout) < 200 << 20
