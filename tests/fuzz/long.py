"""Fuzzing for any length of time: `make fuzz`, or

    python tests/fuzz/long.py --seconds 600

Half of the time the search is random. In the other half it follows code coverage, if atheris is
installed (pip install atheris). The process may use 256 MiB more memory than at its start, and a
case 20 seconds of CPU time.

A finding is a crash, a hang or an unexpected exception. It is printed once, with the seed bytes
that reproduce it (`--replay HEX`), and the search continues. Exits with 1 if there was a finding.
"""

import argparse
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent))

MORE_BYTES = 256 << 20
CASE_SECONDS = 20
SEED_BYTES = 256


class Hang(Exception):
    """A case took too much CPU time."""


class Bytes(Random):
    """A random source that returns given bytes, and then zeros, so that a fuzzer can control it."""

    def __init__(self, data):
        super().__init__(0)
        self._bits, self._left = int.from_bytes(data, "little"), 8 * len(data)

    def getrandbits(self, k):
        taken = self._bits & ((1 << k) - 1)
        self._bits >>= k
        return taken

    def random(self):
        return self.getrandbits(24) / (1 << 24)


@contextlib.contextmanager
def limits():
    """Limit the memory, and the CPU time of a case."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MORE_BYTES
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))

    def stop(*_):
        raise Hang(f"more than {CASE_SECONDS} s of CPU time")

    old = signal.signal(signal.SIGPROF, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
        resource.setrlimit(resource.RLIMIT_AS, before)


class Search:
    """Run cases and count their results. The first byte of a seed chooses the target."""

    def __init__(self, folder, names):
        from targets import TARGETS, Bench

        self.bench = Bench(folder)
        self.targets = {name: TARGETS[name] for name in names or TARGETS}
        self.answers = {name: Counter() for name in self.targets}
        self.findings = {}

    def case(self, data):
        name = list(self.targets)[(data[0] if data else 0) % len(self.targets)]
        signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
        try:
            answer = self.targets[name](self.bench, Bytes(data[1:]))
        except Exception as error:  # noqa: BLE001 - every exception is a finding
            answer = "FINDING"
            self._found(name, data, error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.answers[name][answer] += 1

    def _found(self, name, data, error):
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = (type(error).__name__, f"{Path(last.filename).name}:{last.lineno}")
        if where not in self.findings:
            self.findings[where] = data.hex()
            lines = "".join(traceback.format_exception(error))
            print(f"FINDING in {name}: --replay {data.hex()}\n{lines}", flush=True)

    def report(self, seconds):
        for name, answers in self.answers.items():
            found = ", ".join(f"{answer} {n}" for answer, n in answers.most_common())
            print(f"{name}: {answers.total()}: {found}")
        total = sum(answers.total() for answers in self.answers.values())
        print(f"{total} cases in {seconds:.0f} s, {len(self.findings)} findings", flush=True)
        return 1 if self.findings else 0


def at_random(search, seconds, random):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        search.case(random.randbytes(SEED_BYTES))


def follow_coverage(search, seconds, random, done):
    """Run libFuzzer's loop, which only ends with the process."""
    import atheris

    end = time.monotonic() + seconds

    def case(data):
        if time.monotonic() < end:
            search.case(data)
        else:
            os._exit(done())

    corpus = search.bench.folder / "corpus"
    corpus.mkdir()
    for number in range(128):
        (corpus / str(number)).write_bytes(random.randbytes(SEED_BYTES))
    options = [f"-max_len={SEED_BYTES}", "-rss_limit_mb=0", "-verbosity=0"]
    seed = f"-seed={random.randrange(1, 1 << 31)}"
    atheris.Setup([sys.argv[0], *options, seed, str(corpus)], case)
    atheris.Fuzz()


def instrumented():
    """Return whether atheris is installed. It then instruments our packages for coverage."""
    try:
        import atheris
    except ImportError:
        return False
    with atheris.instrument_imports(include=["gguf_tools", "orchestrator"]):
        import targets  # noqa: F401
    return True


def main():
    parser = argparse.ArgumentParser(description="Reads damaged files until the time is over.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", default=[], help="may be repeated")
    parser.add_argument("--replay", metavar="HEX", help="one case, by its seed bytes")
    parser.add_argument("--random", action="store_true", help="at random only, without atheris")
    options = parser.parse_args()
    guided = not options.random and not options.replay and instrumented()
    folder = tempfile.mkdtemp(prefix="moe-edge-fuzz-")
    search = Search(Path(folder), options.target)
    start = time.monotonic()

    def done():
        shutil.rmtree(folder)
        return search.report(time.monotonic() - start)

    with limits():
        random = Random(options.seed)
        if options.replay:
            search.case(bytes.fromhex(options.replay))
        else:
            at_random(search, options.seconds / (2 if guided else 1), random)
            if guided:
                follow_coverage(search, options.seconds / 2, random, done)
    return done()


if __name__ == "__main__":
    sys.exit(main())
