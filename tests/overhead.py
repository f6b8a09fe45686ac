"""What a token takes through the server against a chat: `python tests/served_speed.py overhead`.

The server and an engine of the same settings, each in a process of its own, take turns with the
same tokens, greedily. Turns are short, which one begins changes, and whoever waits is stopped
(SIGSTOP), so that a change of the machine's speed meets both. A turn is timed from its first text
to its last one, the server's as its client sees it. Both are started anew some times, since a
process keeps the pages and the cores that it once got.

Beside each time stands what the kernel counted: how often a compute thread gave up its core
(it sleeps at a barrier, or waits for the next step), how long it was ready without one, and the
processor time of the whole process. Sleeping makes a token longer, and comes and goes by itself
on both sides: so a line through the pairs also says what serving takes where both sleep alike.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep

import psutil
from served import Served
from speaking import stream

HERE = Path(__file__).resolve().parents[1]
SETTLE_S = 0.02  # between two turns, until threads of the last one sleep

# A chat without a terminal: one line in for each answer, one line out with its seconds.
CHAT = """
import sys
from contextlib import ExitStack
from time import perf_counter
import click
from orchestrator.cli.options import make_config, model_options
from orchestrator.engine.engine import Engine
from orchestrator.config import Sampling

@click.command()
@model_options
def chat(**options):
    n = int(sys.stdin.readline())
    tokens = list(map(int, sys.stdin.readline().split()))
    with Engine.open(make_config(options)) as engine:
        print("ready", flush=True)
        for _ in sys.stdin:
            times = [perf_counter() for _ in engine.generate(tokens, Sampling(temp=0), n)]
            stats = engine.last_stats
            print(times[-1] - times[0], stats.tokens, stats.hit_rate, flush=True)

chat()
"""


class Chat:
    """The engine in a process of its own, answering on demand."""

    def __init__(self, options: list[str], tokens: list[int], n: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHAT, *options],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._say(f"{n}\n{' '.join(map(str, tokens))}")
        self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self) -> tuple[float, int, str]:
        """(seconds from the first text to the last, tokens, hit rate)."""
        self._say("")
        seconds, tokens, hit_rate = self._read().split()
        return float(seconds), int(tokens), hit_rate

    def close(self) -> None:
        self._process.communicate()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the chat ended: see above")
        return line


class Client:
    """A running server, asked as the chat is."""

    def __init__(self, served: Served, tokens: list[int], n: int) -> None:
        self._served = served
        self._request = {"prompt": tokens, "temperature": 0, "n_predict": n}

    @property
    def pid(self) -> int:
        return self._served.process.pid

    def answer(self) -> tuple[float, int, str]:
        """(seconds from the first text to the last, tokens, hit rate)."""
        said = stream(self._served.url, self._request)
        timings = said.last["timings"]
        return said.decoding_s, timings["predicted_n"], str(timings["hit_rate"])


@dataclass
class Counted:
    """The kernel's counts of one thread, since it began."""

    cpu_ns: int = 0
    delay_ns: int = 0  # ready without a core
    slept: int = 0  # times that it gave up its core

    def __sub__(self, other: Counted) -> Counted:
        return Counted(
            self.cpu_ns - other.cpu_ns, self.delay_ns - other.delay_ns, self.slept - other.slept
        )


def counted(pid: int) -> dict[int, Counted]:
    """By thread of a process."""
    found: dict[int, Counted] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            cpu_ns, delay_ns, _ = map(int, (task / "schedstat").read_text().split())
            status = re.search(
                r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.M
            )
            found[int(task.name)] = Counted(cpu_ns, delay_ns, int(status[1]) if status else 0)
    return found


@dataclass
class Turn:
    """One answer of one side, with figures a token."""

    seconds: float
    cpu_ms: float
    delay_ms: float  # of all compute threads
    slept: float  # the same


@dataclass
class Side:
    """One of the two: its process, and what its turns came to."""

    name: str
    asked: Chat | Client
    threads: int
    turns: list[Turn] = field(default_factory=list)
    lengths: set[int] = field(default_factory=set)
    hit_rates: set[str] = field(default_factory=set)

    def take_turn(self) -> Turn:
        os.kill(self.asked.pid, signal.SIGCONT)
        sleep(SETTLE_S)
        before = counted(self.asked.pid)
        seconds, n, hit_rate = self.asked.answer()
        after = counted(self.asked.pid)
        os.kill(self.asked.pid, signal.SIGSTOP)
        spent = [each - before.get(thread, Counted()) for thread, each in after.items()]
        computing = sorted(spent, key=lambda each: each.cpu_ns)[-self.threads :]
        self.lengths.add(n)
        self.hit_rates.add(hit_rate[:6])
        return Turn(
            seconds,
            sum(each.cpu_ns for each in spent) / n / 1e6,
            sum(each.delay_ns for each in computing) / n / 1e6,
            sum(each.slept for each in computing) / n,
        )


def summary(name: str, by_start: list[list[float]]) -> str:
    """The median of all ratios, and its 95 % interval: starts are drawn, then pairs of each."""
    rng = random.Random(1)

    def drawn() -> float:
        starts = rng.choices(by_start, k=len(by_start))
        return statistics.median(
            math.log(each) for pairs in starts for each in rng.choices(pairs, k=len(pairs))
        )

    many = sorted(drawn() for _ in range(4000))
    middle = statistics.median(each for pairs in by_start for each in pairs)
    low, high = math.exp(many[100]), math.exp(many[-101])
    return f"{name}: median {middle:.4f}, 95 % interval {low:.4f} to {high:.4f}"


def at_equal_sleeping(pairs: list[tuple[Turn, Turn]]) -> str:
    """Of (server, chat): the ratio of their times where both sleep as often, by the line of its
    logarithm over the difference in sleeps, and how much more often the server sleeps."""
    more = [a.slept - b.slept for a, b in pairs]
    logs = [math.log(a.seconds / b.seconds) for a, b in pairs]
    rng = random.Random(1)
    middles, lines = [], []
    for _ in range(4000):
        chosen = rng.choices(range(len(pairs)), k=len(pairs))
        x = [more[at] for at in chosen]
        middles.append(statistics.mean(x))
        if len(set(x)) > 1:
            line = statistics.linear_regression(x, [logs[at] for at in chosen])
            lines.append(math.exp(line.intercept))
    ratio = math.exp(statistics.linear_regression(more, logs).intercept)
    (low, high), (least, most) = (
        (each[len(each) // 40], each[-len(each) // 40]) for each in (sorted(lines), sorted(middles))
    )
    return (
        f"where both sleep alike: {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f};"
        f" the server sleeps {statistics.mean(more):.0f} times a token more,"
        f" {least:.0f} to {most:.0f}"
    )


def busy_s() -> float:
    """Processor time of all processes, and what other machines took of this one."""
    t = psutil.cpu_times()
    return float(t.user + t.nice + t.system + t.irq + t.softirq + t.steal)


@contextlib.contextmanager
def stopped(sides: list[Side]) -> Iterator[None]:
    """Sides that wait for their turn; they go on at the end, whatever happens."""
    try:
        for side in sides:
            os.kill(side.asked.pid, signal.SIGSTOP)
        yield
    finally:
        for side in sides:
            os.kill(side.asked.pid, signal.SIGCONT)


def take_turns(server: Side, chat: Side, pairs: int, most_elsewhere: float) -> list[bool]:
    """Adds so many turns to each; of each pair whether other processes took little meanwhile, as a
    share of a core."""
    processes = [psutil.Process(pid) for pid in (server.asked.pid, chat.asked.pid, os.getpid())]

    def ours_s() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in processes)

    calm: list[bool] = []
    with stopped([server, chat]):
        server.take_turn(), chat.take_turn()  # caches are cold
        for number in range(pairs):
            before, start = busy_s() - ours_s(), perf_counter()
            for side in (server, chat) if number % 2 else (chat, server):
                side.turns.append(side.take_turn())
            others = (busy_s() - ours_s() - before) / (perf_counter() - start)
            calm.append(others < most_elsewhere)
            a, b = server.turns[-1], chat.turns[-1]
            print(
                f"{number + 1:3}: {a.seconds:.3f} s, {b.seconds:.3f} s, ratio"
                f" {a.seconds / b.seconds:.4f}, slept {a.slept:.0f}, {b.slept:.0f} times a token,"
                f" without a core {a.delay_ms:.2f}, {b.delay_ms:.2f} ms,"
                f" others {others:.2f} of a core" + ("" if calm[-1] else ": left out"),
                flush=True,
            )
    return calm


def middle(turns: list[Turn], name: str) -> float:
    return statistics.median(getattr(each, name) for each in turns)


def report(starts: list[tuple[Side, Side, list[bool]]]) -> None:
    """The figures of all starts of (server, chat, which pairs count)."""
    pairs = [
        [(a, b) for a, b, calm in zip(server.turns, chat.turns, which, strict=True) if calm]
        for server, chat, which in starts
    ]
    pairs = [each for each in pairs if each]
    if not pairs:
        sys.exit("other processes took processor time all the while")
    for number, name in enumerate(("server", "chat")):
        sides = [each[number] for each in starts]
        turns = [pair[number] for each in pairs for pair in each]
        lengths = sorted(set().union(*(each.lengths for each in sides)))
        rates = sorted(set().union(*(each.hit_rates for each in sides)))
        shortest = min(each.seconds for each in turns)
        print(
            f"{name}: {lengths} tokens, hit rates {rates}; a token, in the median:"
            f" {middle(turns, 'cpu_ms'):.2f} ms of processor time, compute threads"
            f" {middle(turns, 'delay_ms'):.2f} ms without a core,"
            f" slept {middle(turns, 'slept'):.0f} times; the shortest turn {shortest:.3f} s"
        )
    print(summary("processor time", [[a.cpu_ms / b.cpu_ms for a, b in each] for each in pairs]))
    ratios = [[a.seconds / b.seconds for a, b in each] for each in pairs]
    print(summary(f"server's time over the chat's, {sum(map(len, ratios))} pairs", ratios))
    flat = [pair for each in pairs for pair in each]
    if len({a.slept - b.slept for a, b in flat}) > 1:
        print(at_equal_sleeping(flat))
