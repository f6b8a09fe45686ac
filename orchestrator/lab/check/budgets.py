"""What runs of a check are told, and which it makes: llama.cpp's own, ours with three budgets, and
what a user would get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost.planner import Planner
from orchestrator.errors import BudgetError, MoeEdgeError
from orchestrator.lab.children import Result, run_child
from orchestrator.memory.machine import Machine, find_gpu, probe
from orchestrator.memory.plan import plan_memory
from orchestrator.native.llama import Bindings
from orchestrator.policy import BASELINE, PLAIN, POLICIES, spends_loss
from orchestrator.runtime.answering import Answering


@dataclass(frozen=True, slots=True)
class CheckJob:
    """One model to open and to read tokens with.

    settings: of Config.build. rows: the file for the logits, float32 [1 + n_decode, n_vocab]:
    behind the prompt, and behind each decoded token. n_prompt: tokens of the prompt, None for a
    micro-batch of the plan. prompt, answer: the tokens; None for a text of our own and the
    likeliest tokens. chosen: the settings are of a plan that a loss chose, and its policy may have
    no use for some of them. beside: instead, that choice is made, in a memory of which another
    process has so many bytes; the result has its settings. layers: instead, prompt and answer are
    read in one batch, and rows gets what the experts of each layer give, an .npz. answers: load the
    model as a chat does, and look at its tokenizer and its chat template too.
    """

    settings: dict[str, Any]
    rows: str
    n_prompt: int | None
    n_decode: int
    prompt: list[int] | None = None
    answer: list[int] | None = None
    chosen: bool = False
    beside: int | None = None
    budgets: str | None = None
    layers: bool = False
    answers: bool = False


def settings_of(config: Config) -> dict[str, Any]:
    """What Config.build makes the same config of, but for settings of an answer; JSON-ready."""
    declared = config.declared().items()
    found = {name: getattr(config, name) for name, each in declared if not each.answer}
    found |= config.of_policies
    return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}


def run_job(job: CheckJob) -> Result:
    """What a process of its own measured, or {"error": a sentence}."""
    return run_child("orchestrator.lab.check.child", job)


# Tokens of the prompt that a comparison reads.
PROMPT_TOKENS = 128


def machine_of(config: Config) -> Machine:
    """This machine as the engine sees it. Raises ConfigError for a device that is not here."""
    gpu = find_gpu(Bindings.load(), config.device, config.vram)
    return probe(gpu.device if gpu else None)


def plain(config: Config, path: Path, machine: Machine) -> Config:
    """Return the config of llama.cpp's own path over a file's best tier, loaded as for a chat. It
    has no repacked weights, since they round in another way, and is mapped if it is larger than the
    memory, or than --ram. Raises GGUFError."""
    free: dict[str, Any] = {"high_tier": None, "ram": None, "vram": None, "misses": None}
    found = Answering().config(config.compared(policy=PLAIN, model=path, **_aside(config) | free))
    with ExpertModel.open(path) as model:
        needed = plan_memory(found, model, machine).total_bytes
    usable = (machine.device or machine).usable_bytes
    cap = usable if machine.device or config.ram is None else min(config.ram, usable)
    fits = needed <= cap
    return found.with_changes(use_mmap=None if fits else True)


def _aside(config: Config) -> dict[str, Any]:
    """What a comparison leaves aside: it computes one tier, and the budget is its own. Scratch for
    more than its prompt would be planned, and never taken."""
    return {
        "low": None,
        "low_tier": None,
        "renormalize": False,
        "expert_ram": None,
        "exact": True,
        "layout": "auto",
        "remember": False,
        "conversations": False,
        "ubatch": min(config.ubatch or PROMPT_TOKENS, PROMPT_TOKENS),
    }


def three_budgets(config: Config, planner: Planner, tier: str) -> Iterator[tuple[str, Config]]:
    """Yield lossless runs of config.model by the name of their cap on everything: the least that
    works, all experts in memory, and half way between the two. If --ram or the machine does not
    allow all experts, the largest cap that they allow has another name. Each run is with the
    baseline or, half way, with every other policy that has a lossless form and needs no loss table,
    which a model need not have.

    The planner is that of the runs: it counts scratch as llama.cpp does, so that the least cap is
    right to the byte. Raises BudgetError if not even the least is allowed.
    """
    capped = "vram" if planner.machine.device else "ram"
    allowed = getattr(config, capped)

    def lossless(policy: str, cap: int | None) -> Config:
        """A policy that computes everything in one tier of the file."""
        asked = dict(POLICIES[policy].precisions.lossless or {}) | {capped: cap}
        return config.compared(policy=policy, high_tier=tier, **_aside(config) | asked)

    most = planner.plan(lossless(BASELINE, allowed))
    low = planner.least(lossless(BASELINE, allowed))
    yield ("the least", lossless(BASELINE, low))
    for name in half_way():
        cap = max(planner.least(lossless(name, allowed)), (low + most.total_bytes) // 2)
        if allowed is None or cap <= allowed:
            yield ("half way", lossless(name, cap))
    largest = f"all of --{capped}" if allowed else "all that is free"
    name = largest if most.absent_bytes else "everything"
    yield (name, lossless(BASELINE, max(low, most.total_bytes)))


def budgets_of(config: Config, path: Path, tier: str) -> list[tuple[str, Config]]:
    """Return the runs of three_budgets for one precision. They are planned in a process of their
    own, whose memory is free again for the runs. Raises BudgetError, or MoeEdgeError for a model
    that cannot be planned."""
    settings = settings_of(config.with_changes(model=path, low=None, low_tier=None))
    found = run_job(CheckJob(settings, os.devnull, None, 0, budgets=tier))
    if "needed_bytes" in found:
        raise BudgetError(found["error"], found["needed_bytes"])
    if "error" in found:
        raise MoeEdgeError(found["error"])
    return [(name, Config.build(**each)) for name, each in found["budgets"]]


def half_way() -> list[str]:
    """The policies that are compared half way between the least and everything."""
    return [
        name
        for name, policy in POLICIES.items()
        if policy.precisions.lossless is not None and name != BASELINE and not spends_loss(name)
    ]
