"""The training loop, run by one process per core on parameters in shared memory.

Processes keep all cores busy even on a shared machine. Threads would wait for the slowest core at
each of about a thousand products per step, but processes wait only twice per step. A step consists
of small batches that the processes take from a counter, so a process on a busy core takes fewer.

    barrier A | take batches, add up gradients in own buffers | barrier B |
    each process sums and applies the gradients of the layers it owns | barrier A ...
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from models.demo.training import data
from models.demo.training.kernels import Kernels
from models.demo.training.model import DemoModel
from models.demo.training.optim import Optimizer


@dataclass(frozen=True)
class LoopConfig:
    """Parameters of the training loop, which every process gets."""

    cache: Path
    out: Path
    seed: int
    length: int
    rows: int
    batches: int
    compiled: bool
    log_every: int
    save_every_s: float = 240.0


class Shared:
    """State that all training processes share. The first process creates it for the others."""

    def __init__(self, model: DemoModel, world: int) -> None:
        self.world = world
        model.share_memory()
        self.grads = [
            [torch.zeros_like(p).share_memory_() for p in model.parameters()] for _ in range(world)
        ]
        self.momentum = [torch.zeros_like(p).share_memory_() for p in model.parameters()]
        # Command of the first process: learning-rate factor, whether the final phase has begun,
        # whether to stop, number of the step.
        self.command = torch.zeros(4, dtype=torch.float64).share_memory_()
        # Statistics of each process: sum of losses, sum of balance losses, number of batches,
        # smallest and largest load of an expert.
        self.sums = torch.zeros(world, 5, dtype=torch.float64).share_memory_()
        ctx = mp.get_context("spawn")
        self.ticket = ctx.Value("q", 0)
        self.barrier = ctx.Barrier(world)

    def take(self) -> int:
        with self.ticket.get_lock():
            n = int(self.ticket.value)
            self.ticket.value = n + 1
            return n


def keep_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the kernel.

    Every step allocates the same gigabytes again. Otherwise the kernel would map and zero every
    large tensor anew, which takes as long as the arithmetic. Has no effect with other C libraries.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    trim_threshold, mmap_max, arena_max = -1, -4, -8
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(arena_max, 1)


class Worker:
    """A process of the training loop, which computes batches and updates its own parameters.

    Rank 0 also handles the schedule, the log and the checkpoints.
    """

    def __init__(self, rank: int, model: DemoModel, shared: Shared, cfg: LoopConfig) -> None:
        torch.set_num_threads(1)
        self.rank, self.model, self.shared, self.cfg = rank, model, shared, cfg
        self.params = list(model.parameters())
        for p, g in zip(self.params, shared.grads[rank], strict=True):
            p.grad = g
        self.opt = Optimizer(model, rank, shared.world, shared.momentum)
        self.mixer = data.Mixer(cfg.cache, cfg.seed, cfg.length)

    def step(self) -> bool:
        """Run one optimizer step together with the other processes.

        Returns False if the training is over.
        """
        shared, cfg = self.shared, self.cfg
        shared.barrier.wait()
        scale, final, stop, number = shared.command.tolist()
        if stop:
            return False
        for g in shared.grads[self.rank]:
            g.zero_()
        mine = shared.sums[self.rank]
        while (ticket := shared.take()) < cfg.batches:
            # Seed by position, so that a batch does not depend on the process that computes it.
            self.mixer.seed(cfg.seed, int(number), ticket)
            batch = self.mixer.batch(cfg.rows, data.FINAL if final else data.STABLE)
            loss, aux, load = self.model.loss(**batch)
            ((loss + aux) / cfg.batches).backward()
            low, high = float(load.min()), float(load.max())
            mine += torch.tensor([loss.item(), aux.item(), 1.0, 0.0, 0.0])
            mine[3:] = torch.tensor([low, high])
        shared.barrier.wait()
        if self.rank == 0:
            shared.ticket.value = 0
        for i in self.opt.owned:
            for other in range(shared.world):
                if other != self.rank:
                    shared.grads[self.rank][i].add_(shared.grads[other][i])
        self.opt.step(scale)
        return True


def _follow(rank: int, model: DemoModel, shared: Shared, cfg: LoopConfig) -> None:
    """Run training steps until the training is over. Every process except the first runs this."""
    keep_memory()
    model.kernels = Kernels(cfg.compiled)
    worker = Worker(rank, model, shared, cfg)
    while worker.step():
        pass


def run(
    model: DemoModel,
    cfg: LoopConfig,
    world: int,
    schedule: Callable[[int], tuple[float, float]],
    resume: dict[str, Any] | None,
) -> dict[str, int]:
    """Train `model` in place until the budget is used. Returns the counters of the training.

    - world: number of processes.
    - schedule: returns the used share of the budget and the learning-rate factor for a step.
    - resume: state of an interrupted training; None starts anew.
    """
    keep_memory()
    shared = Shared(model, world)
    state = {"step": 0, "tokens": 0, "final_steps": 0}
    # Each process compiles its own functions, because compiled functions cannot be sent.
    model.kernels = None  # type: ignore[assignment]
    ctx = mp.get_context("spawn")
    others = [ctx.Process(target=_follow, args=(r, model, shared, cfg)) for r in range(1, world)]
    for p in others:
        p.start()
    model.kernels = Kernels(cfg.compiled)
    worker = Worker(0, model, shared, cfg)
    if resume:
        model.load_state_dict(resume["model"])
        worker.opt.load_state_dict(resume["opt"])
        state = resume["state"]
    last_save = last_log = time.time()
    seen = state["tokens"]
    with (cfg.out / "log.jsonl").open("a", encoding="utf-8") as log:
        while True:
            used, scale = schedule(state["step"])
            over = used >= 1.0
            warm = min((state["step"] + 1) / 40, 1.0)
            shared.command[:] = torch.tensor([scale * warm, scale < 1, over, state["step"]])
            if not over and time.time() - last_save > cfg.save_every_s:
                save(cfg.out, model, worker.opt, state)
                last_save = time.time()
            if not worker.step():
                break
            state["step"] += 1
            state["final_steps"] += scale < 1
            state["tokens"] += cfg.batches * cfg.rows * cfg.length
            if state["step"] % cfg.log_every == 0:
                now, sums = time.time(), shared.sums.clone()
                shared.sums.zero_()
                total = sums.sum(0)
                record = {
                    "step": state["step"], "tokens": state["tokens"], "used": round(used, 4),
                    "rate": round(scale, 4), "loss": round(float(total[0] / total[2]), 4),
                    "aux": round(float(total[1] / total[2]), 4),
                    "load": [round(float(sums[:, 3].min()), 3), round(float(sums[:, 4].max()), 3)],
                    "taken": sums[:, 2].int().tolist(),
                    "tokens_per_s": round((state["tokens"] - seen) / (now - last_log)),
                }  # fmt: skip
                print(json.dumps(record), file=log, flush=True)
                print(json.dumps(record), flush=True)
                last_log, seen = now, state["tokens"]
    for p in others:
        p.join()
    save(cfg.out, model, worker.opt, state)
    return state


def save(out: Path, model: DemoModel, opt: Optimizer, state: dict[str, int]) -> None:
    """Write the checkpoint OUT/checkpoint.pt. An existing file is replaced atomically."""
    part = out / "checkpoint.part"
    tensors: dict[str, Tensor] = model.state_dict()
    torch.save(
        {"model": tensors, "opt": opt.state_dict(), "state": state, "config": model.cfg.to_dict()},
        part,
    )
    part.replace(out / "checkpoint.pt")
