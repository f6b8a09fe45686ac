"""Random mixes of requests in limited memory, compared with runs in ample memory.

The mixes have prompts, answers, stops, cuts and forks.

    python tests/helpers/mixing.py [--mixes 300] [--longest 32000] [--seed 0]
        [--policy lru] [--layers 4]

Slots, a context and scratch share the limit, and the micro-batch depends on the free memory.
Therefore each micro-batch is recorded, and computed again by llama.cpp's own path with the whole
model in memory. With `exact`, every row of logits is the same, bit for bit.

The limited process is in a memory cgroup with a second process that allocates and frees memory all
the time. The cgroup's limit allows for both. Needs root and cgroups.
"""

import argparse
import hashlib
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import capped
import numpy as np
from asking import request_of

from gguf_tools import synthetic
from orchestrator.errors import NativeError
from orchestrator.native import touched_memory
from orchestrator.runtime.runtime import Runtime
from orchestrator.settings import parse_size

SEQUENCES = 4
SHAPE = replace(
    synthetic.preset("tiny-qwen3moe"),
    context=40960,
    n_layer=4,
    n_expert=128,
    n_head_kv=2,
    head_dim=64,
)
ANSWER = 24  # maximum number of tokens
REST_S = 0.1  # pause of the second process, so that one core is enough for both


@dataclass(frozen=True, slots=True)
class Read:
    """A recorded read of tokens.

    pos: position of the first token. at_once: sizes of the micro-batches. sequences: one token for
    each of these sequences, or None for the evaluator's own sequence. row: hash of the last logits,
    or "" if the read was stopped. is_reset: the evaluator was reset before. fork: sequences that
    were forked before.
    """

    tokens: tuple[int, ...]
    pos: int
    at_once: tuple[int, ...]
    row: str
    sequences: tuple[int, ...] | None = None
    is_reset: bool = False
    fork: tuple[int, ...] = ()


def settings_of(model, n_ctx, **more):
    usual = {"ctx": n_ctx, "sequences": SEQUENCES, "threads": 1, "exact": True}
    return request_of(model=model, **usual, **more)


def tight(model, policy):
    """Return a memory limit with slots for half of the experts and the smallest context."""
    config = settings_of(model, 4096, policy=policy, ubatch=512, force_managed=True)
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        return e.plan.total_bytes - e.plan.slots.total_bytes // 2


def hash_of(row):
    return hashlib.sha256(row.tobytes()).hexdigest()


class Mixes:
    """Random requests to one evaluator under a memory limit."""

    def __init__(self, e, seed, longest):
        shared = e.plan.shared
        self._e, self._shared = e, shared
        self._random, self._longest = random.Random(seed), longest
        self._steps = []
        self._stop_after = 0  # micro-batches
        e.inside.store.set_step_done(self._step_done)

    def _step_done(self, step):
        self._e.inside.driver.step_done(step)
        self._steps.append(step.n_tokens)
        if len(self._steps) == self._stop_after:
            self._e.cancel()

    def mix(self):
        """Yield some prompts with answers. The conversation is new or continues."""
        draw, e = self._random, self._e
        is_reset, apart = True, 0  # cells of other sequences
        for _ in range(draw.randint(2, 5)):
            held, apart = (0, 0) if is_reset else (e.n_cached, apart)
            n_free = e.n_ctx - (1 + SEQUENCES) * ANSWER - held - apart
            if n_free < 10:
                return
            n = min(n_free, int(10 * (self._longest / 10) ** draw.random()))
            pos = draw.choice((held, held, draw.randint(0, held)))
            self._stop_after = draw.randint(0, 2) if n > 1024 else 0
            yield (done := self._read(n, pos, is_reset))
            is_reset = draw.random() < 0.3
            self._stop_after = 0
            if not done.row:
                is_reset = is_reset or not e.n_cached
                continue
            for _ in range(draw.randint(0, ANSWER)):
                yield self._read(1, e.n_cached, False)
            if draw.random() < 0.4:
                apart = e.n_cached + SEQUENCES * ANSWER
                yield from self._forked()

    def _forked(self):
        draw, new = self._random, tuple(range(SEQUENCES))
        for each in new:
            self._e.fork(each)
        for _ in range(draw.randint(1, ANSWER)):
            some = tuple(sorted(draw.sample(range(SEQUENCES), draw.randint(1, SEQUENCES))))
            tokens = self._drawn(len(some))
            rows = self._e.decode_batch(tokens, some)
            self._look()
            yield Read(tokens, 0, (len(some),), hash_of(rows), some, fork=new)
            new = ()

    def _read(self, n, pos, is_reset):
        e, tokens, row = self._e, self._drawn(n), ""
        if is_reset:
            e.reset()
        self._steps.clear()
        try:
            row = hash_of(e.eval(tokens, pos))
        except NativeError:
            if not self._stop_after:
                raise
        self._look()
        kept, at_once = e.n_cached - pos, []
        while sum(at_once) < kept:
            at_once.append(self._steps[len(at_once)])
        return Read(tokens[:kept], pos, tuple(at_once), row, is_reset=is_reset)

    def _drawn(self, n):
        return tuple(self._random.choices(range(10, 300), k=n))

    def _look(self):
        """Check that slots and touched memory fit the shared limit, and the store's invariants."""
        store = self._e.inside.store
        touched = sum(each.resident for each in touched_memory(store.library))
        assert store.stats().slot_bytes + touched <= self._shared.n_bytes
        store.check()


def count_differences(e, reads):
    """Return the number of rows that differ with ample memory."""
    wrong = 0
    for read in reads:
        if read.is_reset:
            e.reset()
        for each in read.fork:
            e.fork(each)
        if read.sequences is not None:
            wrong += hash_of(e.decode_batch(read.tokens, read.sequences)) != read.row
            continue
        start, row = 0, None
        for n in read.at_once:
            row = e.eval(read.tokens[start : start + n], read.pos + start)
            start += n
        wrong += bool(read.row) and (row is None or hash_of(row) != read.row)
    return wrong


def record(config, seed, mixes, longest, group, out):
    """Write each mix into a file. Runs in a cgroup."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        (out / "n_ctx").write_text(str(e.n_ctx))
        for number in range(mixes):
            reads = list(Mixes(e, seed + number, longest).mix())
            (out / f"{number}.new").write_bytes(pickle.dumps(reads))
            (out / f"{number}.new").rename(out / f"{number}.mix")


def press(n_bytes, model, group):
    """Allocate and free memory and read a file, without end. Runs in the same cgroup."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    while True:
        taken = np.ones(random.randint(1, n_bytes), np.uint8)
        with open(model, "rb") as file:
            while file.read(1 << 20):
                pass
        time.sleep(REST_S)
        del taken


def peak_of(pid):
    """Return the anonymous resident bytes of a process, or 0 after its end."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mixes", type=int, default=300)
    parser.add_argument("--longest", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pressure", default="128MiB", help="maximum memory of the second process")
    args = parser.parse_args()
    pressure, start = parse_size(args.pressure), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        shape = replace(SHAPE, n_layer=args.layers)
        model = synthetic.write(Path(folder) / "model.gguf", shape, tiers=("q8_0",))
        n_ctx = min(SHAPE.context, 2 * args.longest)
        ram = tight(model, args.policy)
        config = settings_of(model, n_ctx, policy=args.policy, ram=ram, conversations=True)
        group = capped.Group.make(ram + pressure)
        asked = (config, args.seed, args.mixes, args.longest, group.folder, Path(folder))
        worker = start.Process(target=record, args=asked)
        other = start.Process(target=press, args=(pressure // 2, model, group.folder), daemon=True)
        peak = 0
        try:
            worker.start()
            other.start()
            while worker.is_alive():
                peak = max(peak, peak_of(worker.pid or 0))
                worker.join(capped.LOOK_S)
        finally:
            other.kill()
            other.join()
            group.close()
        done = sorted(Path(folder).glob("*.mix"), key=lambda path: int(path.stem))
        rows = wrong = 0
        n_ctx = int((Path(folder) / "n_ctx").read_text())  # positions of KV cells depend on it
        with (
            Runtime.open(settings_of(model, n_ctx, ubatch=4096)) as runtime,
            runtime.evaluator() as e,
        ):
            for path in done:
                reads = pickle.loads(path.read_bytes())
                rows += sum(bool(read.row) for read in reads)
                wrong += count_differences(e, reads)
    print(
        f"{len(done)} of {args.mixes} mixes, {rows} rows, {wrong} of them different with ample "
        f"memory; limit {ram >> 20} MiB, peak {peak >> 20}; status {worker.exitcode}"
    )
    return int(bool(worker.exitcode or wrong or peak > ram))


if __name__ == "__main__":
    sys.exit(main())
