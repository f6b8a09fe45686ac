"""Jobs on a pool: a None keeps apart what comes before and behind it."""

import time
from functools import partial

from gguf_tools.progress import ProgressMeter
from gguf_tools.workers import run_all


def test_none_waits_for_all_before_it() -> None:
    running, most, order = set(), [], []

    def job(group: int, number: int) -> int:
        running.add((group, number))
        most.append({each for each, _ in running.copy()})
        time.sleep(0.002 * (number % 3))
        running.discard((group, number))
        order.append(group)
        return 1

    shares: list[float] = []
    jobs = [
        each
        for group in range(3)
        for each in (*(partial(job, group, number) for number in range(9)), None)
    ]
    run_all(jobs, 4, ProgressMeter(shares.append, 27))
    assert order == sorted(order) and len(order) == 27
    assert all(len(groups) == 1 for groups in most)
    assert shares[-1] == 1


def test_none_alone() -> None:
    run_all([None, None], 2, ProgressMeter(None, 1))
