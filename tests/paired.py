"""Speed of this checkout against another one, other settings, or upstream, in turns.

    python tests/paired.py MODEL.gguf --other FOLDER --python FOLDER/.venv/bin/python
                           [--policy lru] [--expert-ram 1040MiB] [--pairs 12]
    python tests/paired.py MODEL.gguf --ours use_extra_bufts=true --theirs use_extra_bufts=false
                           [--prompt 512]
    python tests/paired.py MODEL.gguf --upstream

The last one is our plain path against upstream at its best flags. With --prompt each block is
prompts of so many tokens in the place of decode steps.

Both run at the same time, each in a process of its own, and take turns: while one computes a block
the other waits. So whatever else the machine does meets both. A pair is one start of the two; its
ratio is the other's median step over ours, above 1 where ours is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
WARM_UP, BLOCKS, STEPS = 30, 10, 12

# Runs in both checkouts, so it uses only what both have.
WORKER = """
import json, sys, time
import numpy as np
from contextlib import contextmanager

tokens = [int(t) for t in np.random.default_rng(7).integers(5, 1000, 4000)]


@contextmanager
def opened(settings):
    # yields evaluate(tokens, pos), and what asks for the callback's microseconds
    if settings.pop("upstream", False):
        from orchestrator.lab.bench.plain import PlainModel, silence

        silence()
        with PlainModel(**{"mmap": False, "extra_bufts": True} | settings) as model:
            yield model.eval, lambda: None
        return
    from orchestrator.config import Config
    from orchestrator.engine.engine import Engine

    with Engine.open(Config.build(**settings)) as engine:
        model = engine.model
        if engine.managed and engine.config.expert_ram is None:
            layers, experts = range(model.n_layers), range(model.n_expert)
            engine.store.warm([(layer, expert, 0) for layer in layers for expert in experts])
        yield engine.eval, engine.store.callback_us if engine.managed else lambda: None


with opened(json.loads(sys.argv[1])) as (evaluate, callback_us):
    at = 32
    evaluate(tokens[:at], 0)
    print("ready", flush=True)
    for line in sys.stdin:
        n_steps, n_prompt = map(int, line.split())
        times = []
        for _ in range(n_steps):
            n, at = (n_prompt, 0) if n_prompt else (1, at)
            start = time.perf_counter()
            evaluate(tokens[at : at + n], at)
            times.append(1e3 * (time.perf_counter() - start))
            at += n
        print(json.dumps([times, callback_us()]), flush=True)
"""


class Side:
    """One checkout, decoding on demand."""

    def __init__(self, tree: Path, python: str, settings: dict[str, Any]) -> None:
        self.ms: list[float] = []
        self.callback_us: float | None = None
        self._process = subprocess.Popen(
            [python, "-c", WORKER, json.dumps(settings)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args[0]} ended: see above")  # type: ignore[index]
        return line

    def run(self, steps: int, prompt: int) -> list[float]:
        """Milliseconds of each step but the first, which finds cold caches. prompt: a step is a
        prompt of so many tokens, 0 for one decoded token."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps} {prompt}\n")
        self._process.stdin.flush()
        times, self.callback_us = json.loads(self._read())
        return times[1:]

    def close(self) -> None:
        self._process.communicate()


def run_pair(sides: dict[str, Any], first: str, prompt: int) -> dict[str, Side]:
    """Both sides in turns; which one begins changes from block to block."""
    order = sorted(sides, key=lambda name: name != first)
    made = {name: Side(*sides[name]) for name in order}
    for name in order:
        made[name].run(2 if prompt else WARM_UP, prompt)
    for _ in range(BLOCKS):
        for name in order:
            made[name].ms += made[name].run(2 if prompt else STEPS, prompt)
        order.reverse()
    for side in made.values():
        side.close()
    return made


def setting(text: str) -> tuple[str, Any]:
    """A name and its value from NAME=JSON."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--other", type=Path, default=HERE, help="the other checkout")
    parser.add_argument("--python", default=sys.executable, help="its Python, with its library")
    parser.add_argument("--ours", nargs="*", default=[], metavar="NAME=JSON", help="our settings")
    parser.add_argument("--theirs", nargs="*", default=[], metavar="NAME=JSON", help="the other's")
    parser.add_argument("--upstream", action="store_true", help="our plain path against upstream")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt, for prompts")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--expert-ram", help="cap on the expert slots; without it all are resident")
    parser.add_argument("--pairs", type=int, default=12)
    asked = parser.parse_args()

    sys.path.insert(0, str(HERE))
    from gguf_tools.process import default_threads
    from orchestrator.settings import parse_size

    settings: dict[str, Any] = {"model": str(asked.model.resolve()), "policy": asked.policy}
    settings |= {"ctx": 4096, "force_managed": True}
    if asked.prompt:
        settings["ubatch"] = asked.prompt
    if asked.expert_ram:
        settings["expert_ram"] = parse_size(asked.expert_ram)
    ours, theirs = (settings | dict(map(setting, each)) for each in (asked.ours, asked.theirs))
    if asked.upstream:
        both = {"threads": default_threads()}
        at_once = max(64, asked.prompt)
        plain = {"model": settings["model"], "policy": "plain", "ctx": 4096}
        ours = plain | both | {"ubatch": at_once}
        theirs = {"path": settings["model"], "upstream": True, "n_ctx": 4096} | both
        theirs["n_ubatch"] = at_once
    sides = {
        "other": (asked.other, asked.python, theirs),
        "ours": (HERE, sys.executable, ours),
    }
    ratios: list[float] = []
    for number in range(asked.pairs):
        made = run_pair(sides, ("other", "ours")[number % 2], asked.prompt)
        medians = {name: statistics.median(side.ms) for name, side in made.items()}
        ratios.append(medians["other"] / medians["ours"])
        called = {name: side.callback_us for name, side in made.items()}
        print(f"{number + 1:3} {medians} callback {called} ratio {ratios[-1]:.4f}", flush=True)
    logs = [math.log(ratio) for ratio in ratios]
    rng = random.Random(1)
    drawn = sorted(statistics.median(rng.choices(logs, k=len(logs))) for _ in range(10000))
    low, high = math.exp(drawn[250]), math.exp(drawn[9750])
    print(f"median ratio {statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
