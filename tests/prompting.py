"""What reading prompts costs, in figures: bytes by counting, times on a quiet machine.

    python tests/prompting.py plan    [--model FILE | --shape NAME] [--share 60]
    python tests/prompting.py ubatch  [--model FILE | --shape NAME] [--share 60] [--tokens 2048]
    python tests/prompting.py restart [--model FILE | --shape NAME] [--tokens 800]
    python tests/prompting.py first   [--model FILE | --shape NAME] [--share 50] [--tokens 44]
    python tests/prompting.py context [--model FILE | --shape NAME] [--ram 12GiB] [--ctx 65536]

plan: what each micro-batch takes and what the rule says of it; nothing is computed.
ubatch: the third prompt in a running process, for each micro-batch and for the one that is chosen.
restart: the first token after a restart that finds the prompt on the disk, against reading it.
first: the first prompt some seconds after the start, with and without reading while idle, and with
it where the model was used before, for other prompts.
context: a long context in 16 and in 8 bits, and decoding with that many tokens of room.

--shape makes a model of random weights as `moe-edge bench` does; its --layers and --routing are
here too. share: percent of the model file, for the whole process. Dropping the page cache needs
root.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.experts import ExpertModel
from gguf_tools.units import format_size
from orchestrator.cli.options import demo_model
from orchestrator.config import Config
from orchestrator.cost.disk import read_bandwidth
from orchestrator.cost.planner import Planner
from orchestrator.engine.engine import Engine, Sampling
from orchestrator.errors import BudgetError
from orchestrator.lab.bench.models import HIGH, build_uniform
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.memory.plan import read_per_prompt_token
from orchestrator.settings import parse_size

SIZES = (512, 1024, 2048, 4096)
ONE = Sampling(temp=0.0)


def drawn(engine: Engine, n: int, seed: int) -> list[int]:
    """n ordinary tokens; a random model routes a text as it does any tokens."""
    most = engine.llama.n_vocab - 3
    return [int(t) for t in np.random.default_rng(seed).integers(3, most, n)]


def moved(engine: Engine) -> int:
    """Bytes that were read from the file since the statistics began."""
    if not engine.managed:
        return 0
    stats = engine.store.stats()
    return sum(stats.demand_bytes) + sum(stats.prefetch_bytes)


def timed(engine: Engine, tokens: list[int]) -> tuple[float, int]:
    """Seconds until a prompt's first token, and bytes that were read for it. What is counted
    behind that token, as the statistics of the answer are, is no part of the seconds."""
    before = moved(engine)
    for _ in engine.generate(tokens, ONE, 1):
        pass
    assert engine.last_stats is not None
    return engine.last_stats.ttft_ms / 1e3, moved(engine) - before


def ubatch(job: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The third prompt. resident: with every expert in memory, for the computing alone."""
    n_ctx = job["tokens"] + 16
    capped = {"ubatch": job["n"], "policy": job["policy"], "ctx": n_ctx}
    if not job["resident"]:
        capped["ram"] = job["ram"]
    with Engine.open(Config.build(**config, **capped)) as engine:
        if job["resident"]:
            experts = range(engine.model.n_expert)
            layers = range(engine.model.n_layers)
            engine.store.warm([(layer, e, 0) for layer in layers for e in experts])
        for seed in range(3):
            seconds, read = timed(engine, drawn(engine, job["tokens"], seed))
            engine.reset()
        found = {"mode": engine.mode, "n": engine.plan.n_ubatch, "seconds": seconds}
        if not job["resident"]:
            found["speed"] = read_bandwidth(engine.model, tier=engine.plan.tiers[0]).bytes_per_s
        return found | {"read": read, "slots": engine.plan.budget_bytes}


def restart(job: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """One process: the prompt is read, or comes from the folder. The logits are of its last token
    alone, behind what was read before: what many tokens at once give differs in its last bits."""
    more = {"prompt_cache": Path(job["folder"]), "policy": job["policy"], "ram": job["ram"]}
    settings = {"ctx": job["tokens"] + 64, "conversations": True} | more
    with Engine.open(Config.build(**config, **settings)) as engine:
        tokens = drawn(engine, job["tokens"], 0)
        seconds, read = timed(engine, tokens)
        assert engine.last_stats is not None
        new = engine.last_stats.evaluated_tokens
        if new > 1:
            timed(engine, tokens)
        digest = hashlib.sha256(engine.context.logits()[-1].tobytes()).hexdigest()
        return {"seconds": seconds, "read": read, "new": new, "logits": digest}


def first_settings(job: dict[str, Any]) -> dict[str, Any]:
    settings = {"policy": job["policy"], "ram": job["ram"], "ctx": 4096}
    return settings | {"remember": job["remember"]}


def use(job: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """One process: three other prompts and their answers, whose use of experts is kept."""
    with Engine.open(Config.build(**config, **first_settings(job))) as engine:
        for seed in range(100, 103):
            for _ in engine.generate(drawn(engine, job["tokens"], seed), ONE, 32):
                pass
            engine.reset()
    return {}


def first(job: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """One process: the first prompt, some seconds after the start."""
    with Engine.open(Config.build(**config, **first_settings(job))) as engine:
        start = time.perf_counter()
        if job["idle"]:
            engine.idle()
        time.sleep(max(0.0, job["seconds"] - (time.perf_counter() - start)))
        brought = engine.driver.brought
        seconds, read = timed(engine, drawn(engine, job["tokens"], 7))
        experts = engine.model.n_layers * engine.model.n_expert
        found = {"mode": engine.mode, "seconds": seconds, "read": read}
        return found | {"brought": brought, "experts": experts}


def stretch(n_ctx: int) -> None:
    """Lets random models, which name a short context, have a longer one in this process."""
    read = ExpertModel.open

    def opened(*files: Any) -> ExpertModel:
        model = read(*files)
        longest = max(n_ctx, model.hparams.context_length)
        model.hparams = replace(model.hparams, context_length=longest)
        return model

    ExpertModel.open = opened  # type: ignore[method-assign, assignment]


def context(job: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """One process: how the memory is divided, and the median step of decoding."""
    settings = {"policy": job["policy"], "ram": job["ram"], "ctx": job["ctx"], "kv": job["kv"]}
    stretch(job["ctx"])
    try:
        engine = Engine.open(Config.build(**config, **settings))
    except BudgetError as error:
        return {"error": str(error)}
    with engine:
        plan, took = engine.plan, []
        tokens = drawn(engine, 64 + job["steps"], 0)
        engine.eval(tokens[:64], 0)
        for i in range(64, len(tokens)):
            start = time.perf_counter()
            engine.eval(tokens[i : i + 1], i)
            took.append(time.perf_counter() - start)
        assert plan.slots is not None and plan.shape is not None
        share = plan.slots.total_bytes / plan.shape.all_slot_bytes()
        tok_s = 1 / statistics.median(took[len(took) // 4 :])
        found = {"mode": engine.mode, "kv": plan.kv_bytes, "scratch": plan.scratch_bytes}
        return found | {"slots": plan.slots.total_bytes, "share": share, "tok_s": tok_s}


PARTS = {each.__name__: each for each in (ubatch, restart, use, first, context)}


def run(part: str, config: dict[str, Any], **job: Any) -> dict[str, Any]:
    """In a process of its own, with nothing of files in memory."""
    with suppress(OSError):
        subprocess.run(["sync"], check=False)
        Path("/proc/sys/vm/drop_caches").write_text("3")
    told = json.dumps({"part": part, "config": config, "job": job}, default=str)
    command = [sys.executable, __file__, "--child"]
    out = subprocess.run(command, input=told, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("part", choices=tuple(REPORTS))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", help="a random model, as of `moe-edge bench`")
    parser.add_argument("--routing", default="zipf")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--share", type=float, help="percent of the file for the whole process")
    parser.add_argument("--ram", help="that in bytes, as 12GiB")
    parser.add_argument("--policy", help="[default: dymoe with all experts critical]")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--bytes", action="store_true", help="ubatch: no times")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--ctx", type=int, default=65536)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()

    path = asked.model or demo_model()
    if asked.shape:
        options = BenchOptions(shape=asked.shape, routing=asked.routing, layers=asked.layers)
        path = build_uniform(options, HIGH, lambda text: print(text, file=sys.stderr))
    config = {"model": str(path.resolve()), "threads": asked.threads}
    shares = {"plan": 60.0, "ubatch": 60.0, "first": 50.0}
    share = asked.share or shares.get(asked.part)
    ram = parse_size(asked.ram) if asked.ram else None
    if ram is None and share:
        ram = int(path.stat().st_size * share / 100)
    common = {"policy": asked.policy or "dymoe", "ram": ram}
    if common["policy"] == "dymoe":
        config["retention"] = 1.0
    print(f"{path.name}, {format_size(ram) if ram else 'free memory'}, {common['policy']}")
    REPORTS[asked.part](asked, config, common)


def report_plan(asked: argparse.Namespace, config: dict[str, Any], common: Any) -> None:
    with ExpertModel.open(Path(config["model"])) as model:
        used = model.n_expert_used / model.n_expert
        for size in [*map(int, asked.sizes.split(",")), None]:
            settings = Config.build(**config, **common, ctx=4096, ubatch=size)
            try:
                plan = Planner(settings, model).plan(settings)
            except BudgetError as error:
                print(f"{size}: {error}")
                continue
            read = read_per_prompt_token(plan.n_ubatch, plan.absent_bytes, used)
            print(
                f"{size or 'chosen'} ({plan.n_ubatch}): scratch {format_size(plan.scratch_bytes)}, "
                f"absent {format_size(plan.absent_bytes)}, {read / 1e6:.2f} MB by the rule"
            )


def report_ubatch(asked: argparse.Namespace, config: dict[str, Any], common: Any) -> None:
    n = asked.tokens or 2048
    sizes = [int(each) for each in asked.sizes.split(",")]
    rows: dict[int | None, dict[str, Any]] = {}
    for size in [*sizes, None]:
        try:
            rows[size] = run("ubatch", config, tokens=n, n=size, resident=False, **common)
        except subprocess.CalledProcessError:
            print(f"{size}: no room")
            continue
        row = rows[size]
        least = rows.get(512, row)["read"]
        print(
            f"{size or 'chosen'} ({row['n']}): {row['read'] / n / 1e6:.2f} MB a prompt token, "
            f"{row['read'] / max(1, least):.3f} of 512; slots {format_size(row['slots'])}",
            flush=True,
        )
        if asked.bytes:
            continue
        compute = run("ubatch", config, tokens=n, n=row["n"], resident=True, **common)["seconds"]
        bound = max(compute, row["read"] / row["speed"])
        print(
            f"    {row['seconds']:.1f} s, computing {compute:.1f} s, reading "
            f"{row['read'] / row['speed']:.1f} s: {bound / row['seconds']:.2f} of the bound",
            flush=True,
        )
    print(rows[None]["mode"])


def report_restart(asked: argparse.Namespace, config: dict[str, Any], common: Any) -> None:
    n = asked.tokens or 800
    with tempfile.TemporaryDirectory(dir=".") as folder:
        job = {"tokens": n, "folder": folder, **common}
        read, again = (run("restart", config, **job) for _ in range(2))
    same = read["logits"] == again["logits"]
    print(
        f"{n} tokens: read in {read['seconds']:.2f} s ({format_size(read['read'])}), after a "
        f"restart {again['seconds']:.3f} s ({again['new']} new tokens), "
        f"{again['seconds'] / read['seconds']:.1%}; logits {'equal' if same else 'DIFFER'}"
    )


def report_first(asked: argparse.Namespace, config: dict[str, Any], common: Any) -> None:
    n = asked.tokens or 44
    job = {"tokens": n, "seconds": asked.seconds, "remember": False, **common}
    cold = run("first", config, idle=False, **job)
    warm = run("first", config, idle=True, **job)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # where the use is kept
        known = job | {"remember": True}
        run("use", config, **known)
        used = run("first", config, idle=True, **known)
    print(warm["mode"])
    print(
        f"{n} tokens, {asked.seconds:g} s after the start: {cold['seconds']:.2f} s and "
        f"{format_size(cold['read'])} read"
    )
    for name, row in (("without a profile", warm), ("used before", used)):
        print(
            f"with {row['brought']} of {row['experts']} experts brought, {name}: "
            f"{row['seconds']:.2f} s and {format_size(row['read'])}, "
            f"{row['seconds'] / cold['seconds']:.2f} and {row['read'] / cold['read']:.2f} of it"
        )


def report_context(asked: argparse.Namespace, config: dict[str, Any], common: Any) -> None:
    for kv in ("f16", "q8_0"):
        job = {"ctx": asked.ctx, "kv": kv, "steps": asked.steps, **common}
        found = run("context", config, **job)
        if "error" in found:
            print(f"{kv}: {found['error']}")
            continue
        print(
            f"{kv}: keys and values {format_size(found['kv'])}, scratch "
            f"{format_size(found['scratch'])}, slots {format_size(found['slots'])}: "
            f"{found['share']:.1%} of the experts, {found['tok_s']:.2f} tok/s; {found['mode']}",
            flush=True,
        )


REPORTS = {
    "plan": report_plan,
    "ubatch": report_ubatch,
    "restart": report_restart,
    "first": report_first,
    "context": report_context,
}

if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        told = json.loads(sys.stdin.read())
        print(json.dumps(PARTS[told["part"]](told["job"], told["config"])))
    else:
        main()
