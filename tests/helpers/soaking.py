"""Run a server under load for a long time. Check its memory, and that it refuses only with 429.

    python tests/helpers/soaking.py clients [--model M] [--clients 8] [--seconds 600] [--share 0.6]
    python tests/helpers/soaking.py requests [--model M] [--requests 1000] [--cache-ram 8MiB]

clients: concurrent clients, some of which disconnect, and slots for a fraction (--share) of the
experts in the best precision. The server's queue holds half of the clients, so some get 429. Fails
if the process exceeds its memory limit, or for any other status.

requests: conversations in sequence. Fails if the resident memory at the end is more than 2 % above
that at the request with which the prompt cache was first full.
"""

import argparse
import random
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

import psutil  # noqa: E402
from served import DEMO, serving  # noqa: E402

from orchestrator.settings import parse_size  # noqa: E402

COUNTRIES = ("Norway", "Peru", "Japan", "Chad", "Spain", "Chile", "Kenya", "India", "Italy", "Cuba")
MOST_GROWTH = 1.02


def conversation(rng, n_predict):
    """Return a random request. Some are long."""
    about = " ".join(rng.choices(COUNTRIES, k=rng.choice((1, 4, 40))))
    text = f"{rng.randrange(10**6)}: tell me about {about}."
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": rng.randrange(1, n_predict),
        "temperature": 0.8,
        "seed": rng.randrange(2**31),
        "stream": rng.random() < 0.5,
    }


def ask(served, data, leaves):
    """Return the status of one request. leaves: the client disconnects after the first line."""
    with closing(served.asked("/v1/chat/completions", data)) as connection:
        answer = connection.getresponse()
        if leaves:
            answer.readline()
            return answer.status
        text = answer.read()
        if answer.status == 200 and (b'"error"' in text or b'"timings"' not in text):
            return 500  # the error came after the status
        return answer.status


class Memory:
    """The peak resident memory of a process, sampled repeatedly."""

    def __init__(self, pid):
        self._process = psutil.Process(pid)
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now_bytes(self):
        resident = self._process.memory_info().rss
        return resident

    def _watch(self):
        while not self._ended.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self.now_bytes())

    def close(self):
        self._ended.set()
        self._thread.join()


def ram_for(model, share):
    """Return the memory limit with slots for this fraction of the best precision's experts."""
    from gguf_tools.experts import ExpertModel
    from orchestrator.config import Config
    from orchestrator.lab.check.budgets import machine_of
    from orchestrator.plan.planning import plan_memory
    from orchestrator.serve.bodies import Words
    from orchestrator.serve.served import answering
    from orchestrator.serve.settings import ServeSettings

    config = Config.build(model=model, policy="lru", force_managed=True, ctx=512)
    with ExpertModel.open(model) as opened:
        request = answering(config, ServeSettings(), Words.of(opened), "").request(config)
        whole = plan_memory(request, opened, machine_of(config)).total_bytes
        return whole - int((1 - share) * opened.tier_bytes[0])


def soak_clients(cache, model, clients, seconds, share):
    """Return the count of each status.

    Raises AssertionError for a status other than 200 and 429, and for memory above the limit.
    """
    ram = ram_for(model, share)
    options = ("-m", str(model), "--ctx=512", f"--ram={ram}", f"--queue={clients // 2 - 1}")
    statuses = Counter()
    with serving(cache, *options) as served:
        memory = Memory(served.process.pid)
        end = monotonic() + seconds

        def client(number):
            rng = random.Random(number)
            while monotonic() < end:
                status = ask(served, conversation(rng, 60), leaves=rng.random() < 0.1)
                statuses[status] += 1
                if status == 429:
                    sleep(0.2)

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(client, range(clients)))
        memory.close()
        served.post("/tokenize", {"content": "still running"})
        status, said = served.end()
        assert status == 0 and "Traceback" not in said, said[-2000:]
    peak = memory.peak_bytes / 2**20
    print(f"statuses {dict(statuses)}, peak {peak:.1f} MiB of {ram / 2**20:.1f}")
    assert set(statuses) <= {200, 429}, statuses
    assert memory.peak_bytes <= ram, (memory.peak_bytes, ram)
    return statuses


def soak_requests(cache, model, requests, cache_ram):
    """Return the resident bytes when the prompt cache was first full, and at the end."""
    limit = parse_size(cache_ram)
    rng = random.Random(1)
    options = ("-m", str(model), "--ctx=512", "--ram=180MiB", "--policy=lru", "--high-tier=q4_k")
    first, at, kept = 0, 0, 0
    with serving(cache, *options, f"--cache-ram={cache_ram}") as served:
        memory = Memory(served.process.pid)
        for number in range(1, requests + 1):
            data = conversation(rng, 24) | {"stream": False}
            answer = served.post("/v1/chat/completions", data)
            kept += answer["usage"]["total_tokens"] * kv_bytes(model)
            if not first and kept > limit:
                first, at = memory.now_bytes(), number
            if number % 50 == 0 or number == at:
                print(f"{number:5}: {memory.now_bytes() / 2**20:.1f} MiB", flush=True)
        last = memory.now_bytes()
        memory.close()
    assert first, "the prompt cache was never full: use more --requests or less --cache-ram"
    growth = f"{first / 2**20:.1f} MiB, at the end {last / 2**20:.1f}: {last / first:.4f}"
    print(f"full at {at}: {growth}")
    return first, last


def kv_bytes(model):
    """Return the KV bytes of one token."""
    from gguf_tools.experts import ExpertModel

    with ExpertModel.open(model) as opened:
        return int(opened.kv_bytes(1024)) // 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("clients", "requests"))
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--share", type=float, default=0.6, help="of the experts' bytes")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--cache-ram", default="8MiB")
    asked = parser.parse_args()
    model = asked.model.resolve()
    with tempfile.TemporaryDirectory() as cache:
        if asked.what == "clients":
            soak_clients(Path(cache), model, asked.clients, asked.seconds, asked.share)
        else:
            first, last = soak_requests(Path(cache), model, asked.requests, asked.cache_ram)
            if last > MOST_GROWTH * first:
                sys.exit("the memory grows")


if __name__ == "__main__":
    main()
