"""Decode speed of this checkout against another one, while the machine drifts.

    python tests/paired.py MODEL.gguf --other FOLDER --python FOLDER/.venv/bin/python
                           [--policy lru] [--expert-ram 1040MiB] [--pairs 12]

Both run at the same time, each in a process of its own, and take turns: while one decodes a block
of tokens the other waits. So whatever else the machine does meets both. A pair is one start of the
two; its ratio is the other's median step over ours, above 1 where ours is faster.
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
from orchestrator.config import Config
from orchestrator.engine import Engine
from orchestrator.events import Phase

tokens = [int(t) for t in np.random.default_rng(7).integers(5, 1000, 4000)]
with Engine.open(Config.build(**json.loads(sys.argv[1]))) as engine:
    model, at = engine.model, 32
    if engine.config.expert_ram is None:
        layers, experts = range(model.n_layers), range(model.n_expert)
        engine.store.warm([(layer, expert, 0) for layer in layers for expert in experts])
    engine.eval(tokens[:at], 0)
    print("ready", flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            engine.eval(tokens[at : at + 1], at, phase=Phase.DECODE)
            times.append(1e3 * (time.perf_counter() - start))
            at += 1
        print(json.dumps([times, engine.store.callback_us()]), flush=True)
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

    def decode(self, steps: int) -> list[float]:
        """Milliseconds of each step but the first, which finds cold caches."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        times, self.callback_us = json.loads(self._read())
        return times[1:]

    def close(self) -> None:
        self._process.communicate()


def run_pair(sides: dict[str, Any], first: str) -> dict[str, Side]:
    """Both sides in turns; which one begins changes from block to block."""
    order = sorted(sides, key=lambda name: name != first)
    made = {name: Side(*sides[name]) for name in order}
    for name in order:
        made[name].decode(WARM_UP)
    for _ in range(BLOCKS):
        for name in order:
            made[name].ms += made[name].decode(STEPS)
        order.reverse()
    for side in made.values():
        side.close()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--other", type=Path, required=True, help="the other checkout")
    parser.add_argument("--python", required=True, help="its Python, with its library")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--expert-ram", help="cap on the expert slots; without it all are resident")
    parser.add_argument("--pairs", type=int, default=12)
    asked = parser.parse_args()

    sys.path.insert(0, str(HERE))
    from orchestrator.settings import parse_size

    settings: dict[str, Any] = {"model": str(asked.model.resolve()), "policy": asked.policy}
    settings |= {"ctx": 4096, "n_ubatch": 64, "force_managed": True}
    if asked.expert_ram:
        settings["expert_ram"] = parse_size(asked.expert_ram)
    sides = {
        "other": (asked.other, asked.python, settings),
        "ours": (HERE, sys.executable, settings),
    }
    ratios: list[float] = []
    for number in range(asked.pairs):
        made = run_pair(sides, ("other", "ours")[number % 2])
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
