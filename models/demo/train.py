"""Train the demo model: `python -m models.demo.train --data DIR --out DIR`.

The schedule has two phases: a constant rate on the broad mix, then a linear decay on the chat
mix. Its budget is either steps (`--steps`: repeatable) or time (`--minutes`, `--until`: for a
machine whose speed is not known); a file `until` in the output folder with HH:MM (UTC) moves
the deadline of a running training. `--resume` continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MISSING = "training needs torch and tokenizers: pip install 'moe-edge[convert]'"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m models.demo.train", description=__doc__)
    p.add_argument("--data", type=Path, help="folder of the text collection")
    p.add_argument("--out", type=Path, required=True, help="checkpoints, log and result")
    p.add_argument("--cache", type=Path, help="token streams (default: OUT/cache)")
    p.add_argument("--tiny", action="store_true", help="a toy of 2 layers in under a minute")
    p.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint.pt")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=int, help="train so many steps")
    budget.add_argument("--minutes", type=float, help="train so long")
    budget.add_argument("--until", help="train until HH:MM (UTC)")
    p.add_argument("--decay", type=float, default=0.3, help="share of the budget that decays")
    p.add_argument("--rows", type=int, default=16, help="rows in a batch")
    p.add_argument("--length", type=int, default=512, help="tokens in a row")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    p.add_argument("--no-compile", action="store_true", help="do not compile the kernels")
    args = p.parse_args(argv)
    if not args.tiny and args.data is None:
        p.error("--data is needed (or --tiny)")
    if not args.tiny and args.steps is None and args.minutes is None and args.until is None:
        p.error("one of --steps, --minutes and --until is needed")
    return args


def keep_memory() -> None:
    """Let glibc keep freed blocks: a step frees and asks for the same gigabyte again.

    Without it every large tensor is mapped and zeroed by the kernel anew, which costs as much
    as the arithmetic on it. No effect outside glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    trim_threshold, mmap_max, arena_max = -1, -4, -8
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(arena_max, 1)


class Schedule:
    """Position in the budget: steps, or the wall clock."""

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        self.steps: int | None = args.steps
        self.decay: float = args.decay
        self.file = out / "until"
        self.start = time.time()
        self.deadline = self.start + 60 * (args.minutes or 0)
        if args.until:
            self.deadline = _utc_today(args.until)

    def read(self, step: int) -> tuple[float, float]:
        """(share of the budget used, learning-rate factor) before step `step`."""
        if self.steps is not None:
            used = step / max(self.steps, 1)
        else:
            if step % 10 == 0 and self.file.exists():
                self.deadline = _utc_today(self.file.read_text().strip())
            used = (time.time() - self.start) / max(self.deadline - self.start, 1.0)
        left = max(1.0 - used, 0.0)
        return used, min(left / max(self.decay, 1e-9), 1.0)


def _utc_today(clock: str) -> float:
    """Unix time of the next HH:MM (UTC) from half a day ago on."""
    hour, minute = clock.split(":")
    now = dt.datetime.now(dt.UTC)
    t = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
    if t < now - dt.timedelta(hours=12):
        t += dt.timedelta(days=1)
    return t.timestamp()


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    part = path.with_suffix(".part")
    write(part)
    part.replace(path)


def train(args: argparse.Namespace) -> Path:
    """Run the training and return the folder of the Hugging Face checkpoint."""
    try:
        import torch

        from models.demo import data, export
        from models.demo.model import DemoModel, ModelConfig
        from models.demo.optim import Optimizer
    except ModuleNotFoundError as e:
        if e.name not in ("torch", "tokenizers", "numpy", "safetensors"):
            raise
        raise SystemExit(MISSING) from None

    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    cache = args.cache or out / "cache"
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    if args.tiny:
        cfg = ModelConfig(
            vocab_size=1024, num_layers=2, num_experts=4, num_experts_per_tok=2, num_heads=4
        )
        args.steps, args.rows, args.length = args.steps or 12, min(args.rows, 8), 128
        args.minutes = args.until = None
        tok = data.build_tiny(cache, seed=args.seed, vocab_size=cfg.vocab_size)
    else:
        cfg = ModelConfig()
        tok = data.build(args.data, cache, seed=args.seed, vocab_size=cfg.vocab_size)
    keep_memory()
    model = DemoModel(cfg, compiled=not (args.no_compile or args.tiny))
    opt = Optimizer(model)
    mixer = data.Mixer(cache, args.seed, args.length)
    schedule = Schedule(args, out)
    state: dict[str, Any] = {"step": 0, "tokens": 0, "final_steps": 0}
    saved = out / "checkpoint.pt"
    if args.resume and saved.exists():
        old = torch.load(saved, weights_only=False)
        model.load_state_dict(old["model"])
        opt.load_state_dict(old["opt"])
        mixer.rng.bit_generator.state = old["rng"]
        state, schedule.start = old["state"], old["start"]

    def save() -> None:
        write_atomically(
            saved,
            lambda p: torch.save(
                {
                    "model": model.state_dict(), "opt": opt.state_dict(), "state": state,
                    "rng": mixer.rng.bit_generator.state, "start": schedule.start,
                    "config": cfg.to_dict(),
                },
                p,
            ),
        )  # fmt: skip

    last_save = last_log = time.time()
    log_tokens, sums, count = 0, torch.zeros(2), 0
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        while True:
            used, scale = schedule.read(state["step"])
            if used >= 1.0:
                break
            final = scale < 1.0
            batch = mixer.batch(args.rows, data.FINAL if final else data.STABLE)
            loss, aux, load = model.loss(**batch)
            (loss + aux).backward()
            opt.step(scale * min((state["step"] + 1) / 100, 1.0))
            for p in model.parameters():
                p.grad = None
            state["step"] += 1
            state["final_steps"] += final
            state["tokens"] += batch["tokens"].numel()
            sums += torch.stack([loss.detach(), aux.detach()])
            count, log_tokens = count + 1, log_tokens + batch["tokens"].numel()
            if count == 20 or args.tiny:
                now = time.time()
                record = {
                    "step": state["step"], "tokens": state["tokens"], "used": round(used, 4),
                    "rate": round(scale, 4), "loss": round(float(sums[0]) / count, 4),
                    "aux": round(float(sums[1]) / count, 4),
                    "load": [round(float(load.min()), 3), round(float(load.max()), 3)],
                    "tokens_per_s": round(log_tokens / (now - last_log)),
                }  # fmt: skip
                print(json.dumps(record), file=log, flush=True)
                print(json.dumps(record), flush=True)
                last_log, log_tokens, count = now, 0, 0
                sums.zero_()
            if time.time() - last_save > 240:
                save()
                last_save = time.time()
    if not args.tiny:
        save()
    hf = out / "hf"
    export.export(model, tok, hf)
    print(f"{state['step']} steps, {state['tokens']} tokens; checkpoint in {hf}")
    return hf


def main(argv: list[str] | None = None) -> int:
    train(parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
