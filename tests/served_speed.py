"""How fast `moe-edge serve` decodes: against a chat, and several answers at once against in turn.

    python tests/served_speed.py overhead MODEL.gguf [--pairs 8] [--tokens 96] [-- OPTION ...]
    python tests/served_speed.py parallel MODEL.gguf [--pairs 8] [--tokens 96] [-- OPTION ...]
    python tests/served_speed.py cost MODEL.gguf [--tokens 2000] [-- OPTION ...]

OPTIONs are those of `moe-edge serve`, behind `--`, as in `-- --policy lru --ram 1500MiB`.

overhead: the server and an engine of the same settings run at the same time and take turns, so
that whatever else the machine does meets both. Each answers the same tokens greedily, and is timed
from its first text to its last one: the server as its client sees it. Above 1 the chat is faster.
A server needs more memory than a chat, so that the same --ram leaves it fewer slots: the hit rates
of both are printed, and only where they are alike do the times tell what serving costs. Pairs
during which other processes took more than a twentieth of a core are left out of the median.

parallel: one server with --parallel N answers N prompts together, then one after another, in turns.
Its ratio is the time in turn over the time together, prompts included.

cost: the processor time of a streamed token, thread by thread of the server. Other work on the
machine moves it little, since it is no time on a clock.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

import psutil  # noqa: E402
from served import serving  # noqa: E402
from speaking import Said, post, stream  # noqa: E402

PROMPTS = (
    "Tell me a story about a brave rabbit.",
    "Tell me about Norway.",
    "What is inflation?",
    "Tell me a story about two friends.",
    "Tell me about Peru.",
    "What is a molecule?",
    "Tell me a story about the sea.",
    "Tell me about Japan.",
)

# Of a core, for processes that are not measured.
MOST_ELSEWHERE = 0.05

# A chat without a terminal: one line in for each answer, one line out with its seconds.
CHAT = """
import sys
from contextlib import ExitStack
from time import perf_counter
import click
from orchestrator.cli_options import make_config, model_options
from orchestrator.engine import Engine
from orchestrator.sampling import Sampling

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


def at_once(url: str, requests: list[dict[str, object]]) -> list[Said]:
    """All requests together; their answers in the same order."""
    said: list[Said] = [Said()] * len(requests)

    def ask(at: int) -> None:
        said[at] = stream(url, requests[at])

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def summary(name: str, ratios: list[float]) -> str:
    """The median and its bootstrapped 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    rng = random.Random(1)
    drawn = sorted(statistics.median(rng.choices(logs, k=len(logs))) for _ in range(10000))
    low, high = math.exp(drawn[250]), math.exp(drawn[9750])
    return f"{name}: median {statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}"


def in_turns(
    pairs: int,
    one: Callable[[], float],
    other: Callable[[], float],
    ours_s: Callable[[], float] | None = None,
) -> list[float]:
    """one's time over the other's, pair by pair; which begins changes. ours_s: the processor time
    that what is measured has taken, ever; then pairs beside much other work are left out."""
    every: list[float] = []
    ratios: list[float] = []
    for number in range(pairs):
        before = busy_s() - ours_s() if ours_s else 0.0
        start = perf_counter()
        if number % 2:
            b, a = other(), one()
        else:
            a, b = one(), other()
        took = perf_counter() - start
        others = (busy_s() - ours_s() - before) / took if ours_s else 0.0
        calm = others < MOST_ELSEWHERE
        every.append(a / b)
        if calm:
            ratios.append(a / b)
        beside = f", others {others:.2f} of a core" + ("" if calm else ": left out")
        print(
            f"{number + 1:3}: {a:.3f} s, {b:.3f} s, ratio {a / b:.4f}" + (beside if ours_s else ""),
            flush=True,
        )
    if len(ratios) < len(every):
        print(summary(f"all {pairs} pairs, the busy ones too", every))
    if not ratios:
        sys.exit("other processes took processor time all the while")
    return ratios


def busy_s() -> float:
    """Processor time of all processes, and what other machines took of this one."""
    t = psutil.cpu_times()
    return float(t.user + t.nice + t.system + t.irq + t.softirq + t.steal)


def overhead(cache: Path, asked: argparse.Namespace) -> None:
    options = ["-m", str(asked.model), "--threads", str(asked.threads), *asked.options]
    with serving(cache, *options) as served:
        data = {"content": asked.prompt, "add_special": True}
        tokens = post(served.url, "/tokenize", data)[1]["tokens"]
        request = {"prompt": tokens, "temperature": 0, "n_predict": asked.tokens}
        chat = Chat(options, tokens, asked.tokens)
        seen: set[int] = set()
        rates: dict[str, set[str]] = {"server": set(), "chat": set()}

        def of_server() -> float:
            said = stream(served.url, request)
            seen.add(said.last["timings"]["predicted_n"])
            rates["server"].add(str(said.last["timings"]["hit_rate"])[:6])
            return said.decoding_s

        def of_chat() -> float:
            seconds, n, rate = chat.answer()
            seen.add(n)
            rates["chat"].add(rate[:6])
            return seconds

        of_server(), of_chat()  # caches are cold
        for each in rates.values():
            each.clear()
        processes = [psutil.Process(pid) for pid in (served.process.pid, chat.pid, os.getpid())]

        def ours_s() -> float:
            times = [each.cpu_times() for each in processes]
            return sum(each.user + each.system for each in times)

        ratios = in_turns(asked.pairs, of_server, of_chat, ours_s)
        print(f"answers have {sorted(seen)} tokens")
        print("hit rates: " + ", ".join(f"{name} {sorted(each)}" for name, each in rates.items()))
        print(summary("server's time over the chat's", ratios))
        chat.close()


def parallel(cache: Path, asked: argparse.Namespace) -> None:
    n = asked.parallel
    options = ["-m", str(asked.model), "--threads", str(asked.threads), "--ctx", "512"]
    with serving(cache, *options, "--parallel", str(n), *asked.options) as served:
        round_ = 0

        def requests() -> list[dict[str, object]]:
            # Never the same prompt twice in a row, so that none is in the memory of a sequence.
            nonlocal round_
            round_ += 1
            return [
                {
                    "prompt": f"{PROMPTS[(at + n * round_) % len(PROMPTS)]} {round_}",
                    "temperature": 0,
                    "n_predict": asked.tokens,
                    "ignore_eos": True,
                    "cache_prompt": False,
                }
                for at in range(n)
            ]

        def check(said: list[Said]) -> None:
            got = [each.last.get("timings", {}).get("predicted_n") for each in said]
            if got != [asked.tokens] * n:
                sys.exit(f"answers of {asked.tokens} tokens have {got}")

        def together() -> float:
            start = perf_counter()
            check(at_once(served.url, requests()))
            return perf_counter() - start

        def in_turn() -> float:
            start = perf_counter()
            check([stream(served.url, each) for each in requests()])
            return perf_counter() - start

        together()
        ratios = in_turns(asked.pairs, in_turn, together)
        print(summary(f"{n} in turn over {n} at once", ratios))


def cost(cache: Path, asked: argparse.Namespace) -> None:
    options = ["-m", str(asked.model), "--threads", str(asked.threads), "--ctx"]
    options += [str(asked.tokens + 256), *asked.options]
    request = {
        "prompt": asked.prompt,
        "temperature": 0,
        "n_predict": asked.tokens,
        "ignore_eos": True,
    }
    with serving(cache, *options) as served:
        process = psutil.Process(served.process.pid)

        def spent_s() -> dict[int, float]:
            return {each.id: each.user_time + each.system_time for each in process.threads()}

        stream(served.url, {**request, "n_predict": 32})  # caches are cold
        before = spent_s()
        said = stream(served.url, request)
        after = spent_s()
        n = said.last["timings"]["predicted_n"]
        by_thread = {each: 1e6 * (s - before.get(each, 0)) / n for each, s in after.items()}
    loop = by_thread.pop(served.process.pid)
    others = sorted(by_thread.values(), reverse=True)
    print(f"{n} tokens in {len(said.texts)} parts; microseconds of processor time a token:")
    print(
        f"in all {loop + sum(others):.0f}, of which the event loop {loop:.0f}, then by thread",
        end=" ",
    )
    print(" ".join(f"{each:.0f}" for each in others if each >= 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("overhead", "parallel", "cost"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument(
        "--prompt",
        default="<|im_start|>user\nTell me a story about a brave "
        "rabbit.<|im_end|>\n<|im_start|>assistant\n",
    )
    given = [*sys.argv[1:], "--"]
    end = given.index("--")
    asked = parser.parse_args(given[:end])
    asked.options = given[end + 1 : -1]
    from gguf_tools.process import default_threads

    asked.model = asked.model.resolve()
    asked.threads = asked.threads or default_threads()
    with tempfile.TemporaryDirectory() as cache:
        {"overhead": overhead, "parallel": parallel, "cost": cost}[asked.what](Path(cache), asked)


if __name__ == "__main__":
    main()
