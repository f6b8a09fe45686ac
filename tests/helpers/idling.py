"""What is learned while nobody asks, ended at random moments, and what that leaves.

    python tests/helpers/idling.py [--times 100] [--ram 95MiB] [--low-tier q2_k] [--seed 0]

The demo model, without its loss table and with experts on disk, reads the same texts as prompts
and answers twice, in a memory cgroup of its cap each time: once each answer is probed behind it,
and the next one asked for at a random moment of that; once nobody probes. Both are lossless, so
that each row of logits has to be the same, bit for bit. With --low-tier the weights of that are
sampled as well, anew each time. Needs root and cgroups.
"""

import argparse
import hashlib
import multiprocessing
import os
import pickle
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import capped

from orchestrator.cache.profile import UsageKeeper
from orchestrator.config import Config
from orchestrator.cost.losses import LossModel
from orchestrator.engine.engine import Engine
from orchestrator.engine.learned import Learned
from orchestrator.events import Phase
from orchestrator.settings import parse_size

DEMO = capped.REPO / "models/demo/moe-edge-demo.gguf"
PROMPT, ANSWER = 24, 48  # tokens
FIRST = 2  # answers behind which all of it is waited for


class Heard(NamedTuple):
    """One answer: the hash of its rows of logits, experts asked for and in memory, how long ending
    took behind it, and whether something was still computed then."""

    rows: str
    asked: int
    hits: int
    end_s: float
    cut: bool


def answers(settings, times, seed, probes):
    """probes: else nobody does, and all waits are as long."""
    # Each time is as the first one, and what is learned changes no answer.
    UsageKeeper.save = lambda _: None
    LossModel.learned = lambda *_: None
    if not probes:
        Learned.probe = lambda *_: None
    draw, heard, lasts_s = random.Random(seed), [], 0.0
    with Engine.open(Config.build(**settings)) as engine:
        usage = engine._loader.learned.usage
        text = engine.tokenize((capped.REPO / "ARCHITECTURE.md").read_text("utf-8"))
        for number in range(times + FIRST):
            start = draw.randrange(len(text) - PROMPT - ANSWER)
            tokens = text[start : start + PROMPT + ANSWER]
            rows = hashlib.sha256(engine.eval(tokens[:PROMPT], 0).tobytes())
            before = engine.store.stats()
            for at in range(PROMPT, len(tokens)):
                rows.update(engine.eval([tokens[at]], at, Phase.DECODE).tobytes())
            after, phase = engine.store.stats(), Phase.DECODE
            asked, hits = (
                int(getattr(after, name)[phase] - getattr(before, name)[phase])
                for name in ("requests", "hits")
            )
            engine._answer = range(PROMPT, len(tokens))
            usage._errors.clear()
            usage._probed_now = usage._unprobed
            moment, idle = draw.random(), engine.driver._idle
            begun = time.monotonic()
            engine.idle()
            if number < FIRST:  # how long all of it takes
                idle.wait()
                lasts_s = time.monotonic() - begun
            elif probes:
                time.sleep(moment * lasts_s)
            thread, begun = idle._thread, time.monotonic()
            cut = thread is not None and thread.is_alive()
            engine.end_idle()
            took = time.monotonic() - begun
            if number >= FIRST and not cut:  # it was through before
                lasts_s *= moment
            engine.store.check()
            heard.append(Heard(rows.hexdigest(), asked, hits, took, cut))
        print(f"{engine.mode}; all of an answer's takes {lasts_s:.2f} s", flush=True)
    return heard


def record(group, out, *args):
    (group / "cgroup.procs").write_text(str(os.getpid()))
    out.write_bytes(pickle.dumps(answers(*args)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ram", default="95MiB")
    parser.add_argument("--low-tier", default=None)
    args = parser.parse_args()
    ram, found, peaks = parse_size(args.ram), [], []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / DEMO.name
        model.symlink_to(DEMO)
        os.environ["XDG_CACHE_HOME"] = folder
        settings = {"model": model, "ram": ram, "ctx": 256, "threads": 2, "probes": 2}
        settings |= {"remember": True, "force_managed": True, "policy": "lru"}
        if args.low_tier is not None:
            # Look-ahead stops and begins again by how well it does.
            settings |= {"policy": "floor", "low_tier": args.low_tier, "prefetch": "off"}
        for probes in (True, False):
            group, out = capped.Group.make(ram), Path(folder) / f"{probes}"
            asked = group.folder, out, settings, args.times, args.seed, probes
            worker = multiprocessing.get_context("spawn").Process(target=record, args=asked)
            peaks.append(0)
            try:
                worker.start()
                while worker.is_alive():
                    peaks[-1] = max(peaks[-1], group.used_bytes())
                    worker.join(capped.LOOK_S)
            finally:
                group.close()
            found.append(pickle.loads(out.read_bytes()))
    probed, plain = found
    ends = [each.end_s for each in probed[FIRST:] if each.cut]
    wrong = sum(a.rows != b.rows for a, b in zip(probed, plain, strict=True))
    hits = [
        sum(each.hits for each in of[FIRST:]) / sum(each.asked for each in of[FIRST:])
        for of in found
    ]
    print(
        f"{len(ends)} of {args.times} ended while it computed: {1e3 * max(ends):.1f} ms at most,"
        f" {1e3 * statistics.median(ends):.1f} in the median; hits of the answers behind it"
        f" {hits[0]:.4f}, {hits[1]:.4f} where nobody probes; {wrong} of {len(probed)} answers with"
        f" other rows; cap {ram / capped.MIB:.0f} MiB, peak {peaks[0] / capped.MIB:.1f} and"
        f" {peaks[1] / capped.MIB:.1f}"
    )
    return int(bool(wrong or max(*peaks) > ram or max(ends) > 0.05))


if __name__ == "__main__":
    sys.exit(main())
