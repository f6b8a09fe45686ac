"""Whether the plan that a loss chooses is the fastest one that was measured.

    python tests/planned.py MODEL.gguf --max-loss 0.01 [--memory 40,60,80,100] [--text TEXT]

For each memory, a share of the experts in the file's best precision as a cap on their slots, every
plan of the frontier whose foreseen KL is within the loss decodes the same tokens, each in a process
of its own, in turns. The plan that `chat` would take is compared with the fastest one by their
medians. Measure on a machine that is quiet. The model needs a fitted loss table (`moe-edge
calibrate`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost.planner import Planner
from orchestrator.cost.plans import AS_FAST, Candidate, Frontier
from orchestrator.engine.engine import Engine
from orchestrator.memory.footprint import model_shape

TEXT = Path(__file__).resolve().parents[1] / "models" / "demo" / "conversations.txt"
PROMPT, WARM_UP, STEPS, TURNS = 64, 32, 96, 3


def decode(settings: dict[str, Any], text: Path) -> list[float]:
    """Milliseconds of each decode step behind a prompt of PROMPT tokens and WARM_UP others."""
    with Engine.open(Config.build(**settings)) as engine:
        tokens = engine.tokenize(text.read_text(encoding="utf-8")[:20_000])
        engine.eval(tokens[:PROMPT], 0)
        times = []
        for at in range(PROMPT, PROMPT + WARM_UP + STEPS):
            start = time.perf_counter()
            engine.eval([tokens[at]], at)
            times.append(1e3 * (time.perf_counter() - start))
    return times[WARM_UP:]


def measured(settings: dict[str, Any], text: Path) -> float:
    """The median of one process."""
    told = json.dumps({"settings": settings, "text": str(text)})
    args = [sys.executable, __file__, "--worker"]
    done = subprocess.run(args, input=told, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{settings}: {done.stderr.strip().splitlines()[-1:]}")
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def plans(base: dict[str, Any], allowed: float) -> tuple[Frontier, list[Candidate]]:
    """The frontier of one memory, and its plans within the loss."""
    config = Config.build(**base, max_loss=allowed)
    with ExpertModel.open(config.model) as model:
        found = Planner(config, model).frontier(config)
    within = [each for each in found.candidates if each.kl is not None and each.kl <= allowed]
    return found, within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--max-loss", type=float, required=True, help="nats a token")
    parser.add_argument("--memory", default="40,60,80,100", help="shares in percent")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    with ExpertModel.open(asked.model) as model:
        whole = model_shape(model, (0,)).all_slot_bytes()
    for percent in map(int, asked.memory.split(",")):
        base = {"model": str(asked.model), "expert_ram": whole * percent // 100}
        base |= {"threads": asked.threads} if asked.threads else {}
        found, within = plans(base, asked.max_loss)
        medians: dict[str, list[float]] = {each.label: [] for each in within}
        for _ in range(TURNS):
            for each in within:
                medians[each.label].append(measured({**base, **each.asked}, asked.text))
        times = {label: statistics.median(each) for label, each in medians.items()}
        fastest = min(times.values())
        taken = times[found.taken.label]
        print(f"{percent} % ({base['expert_ram'] / 2**20:.1f} MiB of slots)")
        for each in sorted(within, key=lambda each: times[each.label]):
            mark = "*" if each is found.taken else " "
            print(
                f"  {mark} {each.label:<52} {times[each.label]:8.2f} ms, predicted "
                f"{1e3 * each.token_s:8.2f}, KL {each.kl:.4f}"
            )
        verdict = "within" if taken <= 1.03 * fastest else "beyond"
        print(
            f"  taken: {taken / fastest:.3f} of the fastest, {verdict} 3 % ({AS_FAST=})", flush=True
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        told = json.loads(sys.stdin.read())
        print(json.dumps(decode(told["settings"], Path(told["text"]))))
    else:
        main()
