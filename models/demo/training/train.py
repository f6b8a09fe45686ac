"""Train the demo model: `python -m models.demo.training.train --data DIR --out DIR`.

Training has two phases: a constant learning rate on the broad mix, then a linear decay on the chat
mix. The budget is a number of steps (`--steps`, reproducible) or a time (`--minutes`, `--until`).
To change the deadline of a running training, write HH:MM (UTC) to the file `until` in the output
folder. `--resume` continues from the last checkpoint with a new time budget. For example,
`--resume --minutes M --decay 1` ends a training.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
import time
from pathlib import Path

MISSING = "training needs torch and tokenizers: python3 patches/tool.py setup --extras convert"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m models.demo.training.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--data", type=Path, help="folder of the text collection")
    p.add_argument(
        "--out",
        type=Path,
        default=Path("demo-run"),
        help="folder for checkpoints, log and result (default: demo-run)",
    )
    p.add_argument("--cache", type=Path, help="folder for token streams (default: OUT/cache)")
    p.add_argument(
        "--tiny", action="store_true", help="train a toy model of 2 layers in under a minute"
    )
    p.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint.pt")
    budget = p.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=int, help="number of steps to train")
    budget.add_argument("--minutes", type=float, help="time to train, in minutes")
    budget.add_argument("--until", help="time of day to stop, as HH:MM (UTC)")
    p.add_argument(
        "--decay",
        type=float,
        default=0.3,
        help="share of the budget in which the learning rate decays",
    )
    p.add_argument("--batches", type=int, default=2, help="batches per step")
    p.add_argument("--rows", type=int, default=4, help="rows per batch")
    p.add_argument("--length", type=int, default=512, help="tokens per row")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="number of processes (default: one per core)",
    )
    p.add_argument("--no-compile", action="store_true", help="do not compile the kernels")
    args = p.parse_args(argv)
    if not args.tiny and args.data is None:
        p.error("--data is needed (or --tiny)")
    if not args.tiny and args.steps is None and args.minutes is None and args.until is None:
        p.error("one of --steps, --minutes and --until is needed")
    return args


class Schedule:
    """Computes the learning rate from the used share of the training budget.

    The budget is a number of steps, or a time.
    """

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        self.steps: int | None = args.steps
        self.decay: float = args.decay
        self.file = out / "until"
        self.start = time.time()
        self.deadline = self.start + 60 * (args.minutes or 0)
        if args.until:
            self.deadline = _utc_today(args.until)

    def read(self, step: int) -> tuple[float, float]:
        """Return the used share of the budget, and the learning-rate factor of a step."""
        if self.steps is not None:
            used = step / max(self.steps, 1)
        else:
            if step % 10 == 0 and self.file.exists():
                self.deadline = _utc_today(self.file.read_text().strip())
            used = (time.time() - self.start) / max(self.deadline - self.start, 1.0)
        left = max(1.0 - used, 0.0)
        return used, min(left / max(self.decay, 1e-9), 1.0)


def _utc_today(clock: str) -> float:
    """Return the Unix time of a clock time HH:MM (UTC) of today.

    A time more than 12 hours ago means tomorrow.
    """
    hour, minute = clock.split(":")
    now = dt.datetime.now(dt.timezone.utc)
    t = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
    if t < now - dt.timedelta(hours=12):
        t += dt.timedelta(days=1)
    return t.timestamp()


def train(args: argparse.Namespace) -> Path:
    """Train the demo model, and return the folder of its Hugging Face checkpoint.

    `args` are the parsed command-line arguments.
    """
    try:
        import torch

        from models.demo.training import data, export, workers
        from models.demo.training.model import DemoModel, ModelConfig
    except ModuleNotFoundError as e:
        if e.name not in ("torch", "tokenizers", "numpy", "safetensors"):
            raise
        raise SystemExit(MISSING) from None

    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    cache = args.cache or out / "cache"
    torch.manual_seed(args.seed)
    world = args.processes
    if args.tiny:
        cfg = ModelConfig(vocab_size=1024, num_layers=2, num_experts=4, num_experts_per_tok=2)
        args.steps, args.rows, args.length, args.batches = args.steps or 12, 4, 128, 2
        args.minutes = args.until = None
        world = 1
        tok = data.build_tiny(cache, seed=args.seed, vocab_size=cfg.vocab_size)
    else:
        cfg = ModelConfig()
        tok = data.build(args.data, cache, seed=args.seed, vocab_size=cfg.vocab_size)
    model = DemoModel(cfg)
    schedule = Schedule(args, out)
    saved = out / "checkpoint.pt"
    resume = None
    if args.resume and saved.exists():
        resume = torch.load(saved, weights_only=False)
    loop = workers.LoopConfig(
        cache=cache, out=out, seed=args.seed, length=args.length, rows=args.rows,
        batches=args.batches, compiled=not (args.no_compile or args.tiny),
        log_every=1 if args.tiny else 20,
    )  # fmt: skip
    state = workers.run(model, loop, world, schedule.read, resume)
    hf = out / "hf"
    export.export(model, tok, hf)
    print(f"{state['step']} steps, {state['tokens']} tokens; checkpoint in {hf}")
    return hf


def main(argv: list[str] | None = None) -> int:
    train(parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
