"""What `floor` gains over lossless streaming on this machine, on a model of any weights.

    python tests/floor_live.py MODEL.gguf --losses OTHER.gguf.calib.json [--max-loss 0.007]
        [--share 0.5] [--turns 3] [--steps 96]

Weights that are drawn by chance cannot be calibrated, so the losses are those of another model, as
`moe-edge replay --losses` takes them: stretched over the depth, and repeated over the experts. The
table is written to a temporary file, and the model stays as it is. Each row decodes the same tokens
in a process of its own, in turns. Measure on a machine that is quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost import losses
from orchestrator.cost.disk import read_bandwidth
from orchestrator.engine.engine import Engine
from orchestrator.events import Phase
from orchestrator.lab.bench.child import token_stream
from orchestrator.memory.footprint import model_shape

PROMPT, WARM_UP = 128, 48


def stretched(table: losses.LossTable, model: ExpertModel) -> losses.LossTable:
    """A fitted table of another model in the shape of this one, whose gates are taken to be alike.
    Raises ValueError for one without factors."""
    if table.fit is None:
        raise ValueError("the loss table has no factors: calibrate its model again")
    size = model.n_layers, model.n_expert
    layers = np.linspace(0, len(table.power) - 1, size[0]).round().astype(int)
    at = np.ix_(layers, np.arange(size[1]) % table.power.shape[1])
    factors = tuple(table.fit.factors[layer] for layer in layers)
    return replace(
        table,
        loss=table.filled()[at],
        power=np.nan_to_num(table.power, nan=float(np.nanmean(table.power)))[at],
        counts=np.ones(size, np.int64),
        gates=np.full(size, 1 / model.n_expert_used**2),
        fit=table.fit._replace(factors=factors),
    )


def decode(settings: dict[str, Any], n_steps: int) -> dict[str, Any]:
    """Milliseconds of each decode step behind a prompt of PROMPT tokens and WARM_UP others, and
    what was read in them."""
    with Engine.open(Config.build(**settings)) as engine:
        draw = token_stream(7, len(engine.model.metadata["tokenizer.ggml.tokens"]))
        tokens = draw(PROMPT + WARM_UP + n_steps)
        engine.eval(tokens[:PROMPT], 0)
        times = []
        for at in range(PROMPT, len(tokens)):
            if at == PROMPT + WARM_UP:
                before = engine.store.stats()
            start = time.perf_counter()
            engine.eval([tokens[at]], at)
            times.append(1e3 * (time.perf_counter() - start))
        after, phase = engine.store.stats(), Phase.DECODE
        report = dict(engine.policy.report())

    def a_token(name: str) -> float:
        return float(getattr(after, name)[phase] - getattr(before, name)[phase]) / n_steps

    return {
        "ms": times[WARM_UP:],
        "waited_mib": a_token("demand_bytes") / 2**20,
        "ahead_mib": a_token("prefetch_bytes") / 2**20,
        "wait_ms": a_token("wait_us") / 1e3,
        "decide_ms": a_token("callback_us") / 1e3,
        **{name: report.get(name) for name in ("loss", "missing", "lowered")},
    }


def measured(settings: dict[str, Any], n_steps: int) -> dict[str, Any]:
    """One process."""
    told = json.dumps({"settings": settings, "steps": n_steps})
    args = [sys.executable, __file__, "--worker"]
    done = subprocess.run(args, input=told, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{settings}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--losses", type=Path, required=True, help="a fitted table of any model")
    parser.add_argument("--max-loss", default="0.007,0.014", help="nats a token, a row each")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts, in slots")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=96)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "losses.json"
        with ExpertModel.open(asked.model) as model:
            losses.save(table, model, stretched(losses.load(asked.losses, None), model))
            slots = int(asked.share * model_shape(model, (0,)).all_slot_bytes())
        base: dict[str, Any] = {"model": str(asked.model), "expert_ram": slots, "ctx": 512}
        base |= {"ubatch": PROMPT}
        rows: dict[str, dict[str, Any]] = {
            "lru": {"policy": "lru"},
            "dymoe, r = 1": {"policy": "dymoe", "retention": 1.0},
        }
        for allowed in map(float, asked.max_loss.split(",")):
            spent = {"policy": "floor", "max_loss": allowed, "losses": str(table)}
            rows[f"floor {allowed:g}"] = spent
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
        disk = []
        for turn in range(asked.turns):
            with ExpertModel.open(asked.model) as model:
                disk.append(read_bandwidth(model).bytes_per_s / 1e9)
            print(f"turn {turn + 1}: the disk reads {disk[-1]:.2f} GB/s", flush=True)
            for name, settings in rows.items():
                run = measured(base | settings, asked.steps)
                found[name].append(run)
                print(f"  {name:14} {statistics.mean(run['ms']):8.1f} ms", flush=True)
    show(found)


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """A row each: means over the steps, medians over the turns, and the ratio turn by turn."""
    print(
        "\nmean ms (median) | of lru | of dymoe | MiB waited for, ahead | ms waited, decided | "
        "missing, skipped | KL"
    )
    for name, runs in found.items():
        means = [statistics.mean(run["ms"]) for run in runs]
        ratios = [
            statistics.median(
                statistics.mean(other["ms"]) / mean
                for other, mean in zip(found[base], means, strict=True)
            )
            for base in ("lru", "dymoe, r = 1")
        ]
        middle = statistics.median(means)
        p50 = statistics.median(statistics.median(run["ms"]) for run in runs)
        print(
            f"{name:14} {middle:7.1f} ({p50:.1f}) | {ratios[0]:.2f}x | {ratios[1]:.2f}x | "
            + " | ".join(
                ", ".join(_middle(runs, key, form) for key, form in group)
                for group in (
                    (("waited_mib", ".1f"), ("ahead_mib", ".1f")),
                    (("wait_ms", ".1f"), ("decide_ms", ".1f")),
                    (("missing", ".1%"), ("lowered", ".1%")),
                    (("loss", ".4f"),),
                )
            )
        )


def _middle(runs: list[dict[str, Any]], key: str, form: str) -> str:
    """The median over the turns; a dash where a policy does not say it."""
    values = [run[key] for run in runs if run[key] is not None]
    return format(statistics.median(values), form) if values else "-"


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        told = json.loads(sys.stdin.read())
        print(json.dumps(decode(told["settings"], told["steps"])))
    else:
        main()
