"""The runs of a check and their memory budgets.

They are llama.cpp's own path, our engine with three budgets, and the run that the user's options
would give.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost.planner import Planner
from orchestrator.errors import BudgetError, MoeEdgeError
from orchestrator.lab.children import Result, run_child
from orchestrator.native.llama import Bindings
from orchestrator.plan.machine import find_gpu, probe
from orchestrator.plan.planning import plan_memory
from orchestrator.plan.records import Machine, PlanRequest
from orchestrator.policy import BASELINE, PLAIN, POLICIES, spends_loss
from orchestrator.runtime.answering import Answering


@dataclass(frozen=True, slots=True)
class CheckJob:
    """A job for a child process: open one model and read tokens with it.

    - settings: arguments of Config.build.
    - rows: output file for the logits, float32 [1 + n_decode, n_vocab]: one row after the prompt
      and one after each decoded token.
    - n_prompt: tokens of the prompt; None uses one micro-batch of the plan.
    - prompt, answer: the tokens; None uses a built-in text and greedy decoding.
    - chosen: the settings come from a plan that was chosen by a loss budget, so settings that have
      no effect are not an error.
    - answers: load the model as for a chat, and also check its tokenizer and chat template.
    - conversations: plan the memory of conversations, as for a chat.

    Three fields select another job instead:

    - other_bytes: choose the policy while another process uses this many bytes; returns its
      settings.
    - budgets: plan the runs of `three_budgets` for this tier; returns their settings.
    - layers: read prompt and answer in one batch, and write the experts' output of each layer to
      `rows` (.npz).
    """

    settings: dict[str, Any]
    rows: str
    n_prompt: int | None
    n_decode: int
    prompt: list[int] | None = None
    answer: list[int] | None = None
    chosen: bool = False
    other_bytes: int | None = None
    budgets: str | None = None
    layers: bool = False
    answers: bool = False
    conversations: bool = False

    def request(self) -> PlanRequest:
        """Return the request of a chat with these settings. Without conversations, it has the
        memory of a chat's process only.
        """
        request = Answering().request(Config.build(**self.settings))
        return replace(request, needs=replace(request.needs, conversations=self.conversations))


def settings_of(config: Config) -> dict[str, Any]:
    """Return JSON-ready arguments of Config.build that reproduce a config.

    Settings of an answer are left out.
    """
    declared = config.declared().items()
    found = {name: getattr(config, name) for name, each in declared if not each.answer}
    found |= config.of_policies
    return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}


def run_job(job: CheckJob) -> Result:
    """Run a job in a child process. Returns its result or {"error": a sentence}."""
    return run_child("orchestrator.lab.check.child", job)


# Prompt length of the compared runs, in tokens.
PROMPT_TOKENS = 128


def machine_of(config: Config) -> Machine:
    """Probe this machine as the engine does. Raises ConfigError for an unknown device."""
    gpu = find_gpu(Bindings.load(), config.device, config.vram)
    return probe(gpu.device if gpu else None)


def plain(config: Config, path: Path, machine: Machine) -> Config:
    """Return the config of llama.cpp's own path for a file's best tier, loaded as for a chat.

    Weights are not repacked, because repacked weights round differently. The file is mapped if the
    model does not fit in memory or --ram. Raises GGUFError.
    """
    free: dict[str, Any] = {"high_tier": None, "ram": None, "vram": None, "misses": None}
    found = config.compared(policy=PLAIN, model=path, **_aside(config) | free)
    with ExpertModel.open(path) as model:
        needed = plan_memory(Answering().request(found), model, machine).total_bytes
    usable = (machine.device or machine).usable_bytes
    cap = usable if machine.device or config.ram is None else min(config.ram, usable)
    fits = needed <= cap
    return found.with_changes(use_mmap=None if fits else True)


def _aside(config: Config) -> dict[str, Any]:
    """Return the settings that a comparison overrides.

    It computes one tier with its own budget. A larger micro-batch would reserve scratch memory that
    the short prompt never uses.
    """
    return {
        "low": None,
        "low_tier": None,
        "renormalize": False,
        "expert_ram": None,
        "exact": True,
        "layout": "auto",
        "remember": False,
        "ubatch": min(config.ubatch or PROMPT_TOKENS, PROMPT_TOKENS),
    }


def three_budgets(config: Config, planner: Planner, tier: str) -> Iterator[tuple[str, Config]]:
    """Yield lossless runs of config.model as (name of the budget, config).

    The budgets are the minimum, all experts in memory, and half way between. If --ram or the
    machine has no space for all experts, the largest allowed budget has another name. The runs use
    the baseline policy. Half way, they use all other policies that have a lossless form and need no
    loss table.

    The planner is that of the runs. It measures scratch memory in the same way as llama.cpp, so the
    minimum is exact to the byte. Raises BudgetError if the minimum exceeds the limit.
    """
    capped = "vram" if planner.machine.device else "ram"
    allowed = getattr(config, capped)

    def lossless(policy: str, cap: int | None) -> Config:
        """Return a run of this policy that computes everything in one tier of the file."""
        asked = dict(POLICIES[policy].precisions.lossless or {}) | {capped: cap}
        return config.compared(policy=policy, high_tier=tier, **_aside(config) | asked)

    most = planner.plan(lossless(BASELINE, allowed))
    low = planner.least(lossless(BASELINE, allowed))
    yield ("minimum", lossless(BASELINE, low))
    for name in half_way():
        cap = max(planner.least(lossless(name, allowed)), (low + most.total_bytes) // 2)
        if allowed is None or cap <= allowed:
            yield ("half way", lossless(name, cap))
    largest = f"all of --{capped}" if allowed else "all that is free"
    name = largest if most.absent_bytes else "everything"
    yield (name, lossless(BASELINE, max(low, most.total_bytes)))


def budgets_of(config: Config, path: Path, tier: str) -> list[tuple[str, Config]]:
    """Return the runs of three_budgets for one tier.

    They are planned in a child process, so that planning leaves no memory allocated. Raises
    BudgetError, or MoeEdgeError if the model cannot be planned.
    """
    settings = settings_of(config.with_changes(model=path, low=None, low_tier=None))
    found = run_job(CheckJob(settings, os.devnull, None, 0, budgets=tier))
    if "needed_bytes" in found:
        raise BudgetError(found["error"], found["needed_bytes"])
    if "error" in found:
        raise MoeEdgeError(found["error"])
    return [(name, Config.build(**each)) for name, each in found["budgets"]]


def half_way() -> list[str]:
    """Return the policies that run with the budget half way between minimum and everything."""
    return [
        name
        for name, policy in POLICIES.items()
        if policy.precisions.lossless is not None and name != BASELINE and not spends_loss(name)
    ]
