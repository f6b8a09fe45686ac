"""How fast `moe-edge serve` decodes: against a chat, and several answers at once against in turn.

    python tests/served_speed.py overhead MODEL.gguf [--starts 3] [--pairs 8] [--tokens 96] [-- ...]
    python tests/served_speed.py parallel MODEL.gguf [--pairs 8] [--tokens 96] [-- OPTION ...]
    python tests/served_speed.py cost MODEL.gguf [--tokens 2000] [-- OPTION ...]

OPTIONs are those of `moe-edge serve`, behind `--`, as in `-- --policy lru --ram 1500MiB`.

overhead: the server and an engine of the same settings in turns, as tests/overhead.py has it, with
--pairs in each of --starts. Above 1 the chat is faster. A server needs more memory than a chat, so
that the same --ram leaves it fewer slots: the hit rates of both are printed, and only where they
are alike do the times tell what serving costs. Pairs during which other processes took more than
a twentieth of a core are left out.

parallel: one server with --parallel N answers N prompts together, then one after another, in turns.
Its ratio is the time in turn over the time together, prompts included.

cost: the processor time of a streamed token, thread by thread of the server. Other work on the
machine moves it little, since it is no time on a clock.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

import psutil  # noqa: E402
from overhead import Chat, Client, Side, report, summary, take_turns  # noqa: E402
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


def in_turns(pairs: int, one: Callable[[], float], other: Callable[[], float]) -> list[float]:
    """one's time over the other's, pair by pair; which begins changes."""
    ratios: list[float] = []
    for number in range(pairs):
        if number % 2:
            b, a = other(), one()
        else:
            a, b = one(), other()
        ratios.append(a / b)
        print(f"{number + 1:3}: {a:.3f} s, {b:.3f} s, ratio {a / b:.4f}", flush=True)
    return ratios


def overhead(cache: Path, asked: argparse.Namespace) -> None:
    options = ["-m", str(asked.model), "--threads", str(asked.threads), *asked.options]
    starts: list[tuple[Side, Side, list[bool]]] = []
    tokens: list[int] = []
    for _ in range(asked.starts):
        with ExitStack() as both:
            # Which one loads first changes, once the prompt's tokens are known.
            if len(starts) % 2:
                chat = both.enter_context(closing(Chat(options, tokens, asked.tokens)))
                served = both.enter_context(serving(cache, *options))
            else:
                served = both.enter_context(serving(cache, *options))
                data = {"content": asked.prompt, "add_special": True}
                tokens = post(served.url, "/tokenize", data)[1]["tokens"]
                chat = both.enter_context(closing(Chat(options, tokens, asked.tokens)))
            client = Client(served, tokens, asked.tokens)
            sides = Side("server", client, asked.threads), Side("chat", chat, asked.threads)
            starts.append((*sides, take_turns(*sides, asked.pairs, MOST_ELSEWHERE)))
    report(starts)


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
        print(summary(f"{n} in turn over {n} at once", [ratios]))


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
    parser.add_argument("--starts", type=int, default=3, help="of both processes of `overhead`")
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
