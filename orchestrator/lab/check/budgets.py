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
    """A job for a child process of `moe-edge check`: load a model, read a prompt, decode tokens.

    - settings: arguments of Config.build.
    - rows: output file for the logits, float32 [1 + n_decode, n_vocab]. It has one row after the
      prompt and one after each decoded token.
    - prompt: the token ids of the prompt. None uses n_prompt tokens of a built-in text.
    - n_prompt: the length of the built-in prompt. None uses the number of tokens that the memory
      plan computes at once (a micro-batch).
    - answer: the token ids to decode. With None, the model chooses the tokens (greedy decoding).
    - n_decode: number of decoded tokens.
    - chosen: the program, not the user, has chosen the policy in `settings`. Settings that this
      policy does not have are then ignored instead of refused.
    - answers: load the model as for a chat, and also check its tokenizer and chat template.
    - conversations: plan the memory for saved conversations, as for a chat.

    Three fields select another job instead:

    - other_bytes: choose the policy while another process uses this many bytes of memory, and
      return the settings with this policy.
    - budgets: plan the runs of `three_budgets` for this precision, and return their settings.
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
        """Return the request that asks the memory planner to plan the model of this job.

        The plan reserves the memory that a chat needs for its answers. The field `conversations`
        decides whether it also has memory for saved conversations.
        """
        request = Answering().request(Config.build(**self.settings))
        return replace(request, needs=replace(request.needs, conversations=self.conversations))


def settings_of(config: Config) -> dict[str, Any]:
    """Return JSON-ready arguments of Config.build that reproduce a config.

    Settings of a single answer, such as its temperature, are left out.
    """
    declared = config.declared().items()
    found = {name: getattr(config, name) for name, each in declared if not each.answer}
    found |= config.of_policies
    return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}


def run_job(job: CheckJob) -> Result:
    """Run a job in a child process. Returns its result, or {"error": message} if it fails."""
    return run_child("orchestrator.lab.check.child", job)


# Length of the prompt in the runs that are compared, in tokens.
PROMPT_TOKENS = 128


def machine_of(config: Config) -> Machine:
    """Return the size of the free memory on this machine, and on the GPU that the config selects.

    Raises ConfigError if the GPU does not exist, or if the config has a limit on GPU memory but no
    GPU.
    """
    gpu = find_gpu(Bindings.load(), config.device, config.vram)
    return probe(gpu.device if gpu else None)


def plain(config: Config, path: Path, machine: Machine) -> Config:
    """Return the config of the reference run: llama.cpp runs the model without our engine.

    The run uses the best of the precisions (tiers) that the file has for its experts. Weights are
    not repacked for the CPU, because repacked weights round differently. The file is memory-mapped
    if the model does not fit in the GPU's memory or, without a GPU, in memory or in --ram. Raises
    GGUFError if the file is invalid.
    """
    free: dict[str, Any] = {"high_tier": None, "ram": None, "vram": None, "misses": None}
    found = config.compared(policy=PLAIN, model=path, **_comparison_settings(config) | free)
    with ExpertModel.open(path) as model:
        needed = plan_memory(Answering().request(found), model, machine).total_bytes
    usable = (machine.device or machine).usable_bytes
    cap = usable if machine.device or config.ram is None else min(config.ram, usable)
    fits = needed <= cap
    return found.with_changes(use_mmap=None if fits else True)


def _comparison_settings(config: Config) -> dict[str, Any]:
    """Return the values of settings that all runs of a comparison share.

    Each run computes one tier within its own memory budget. The micro-batch is small, because a
    larger one would reserve scratch memory that the short prompt never uses.
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
    """Yield runs of a model with three memory budgets, each as (name of the budget, config).

    All runs are lossless: each expert is computed in the precision `tier`.

    - "minimum": one run with an LRU cache, and the smallest memory with which this cache works.
    - "half way": one run for each lossless policy except the LRU cache (see `half_way`). Its memory
      is the mean of the other two budgets, or the policy's own minimum if that is larger. Runs
      above the memory cap of `config` are omitted.
    - "everything": one run with an LRU cache, and memory for all experts. If they do not fit, the
      run has all permitted memory, and a name such as "all free memory".

    Raises BudgetError if the minimum exceeds the cap or the free memory.
    """
    capped = "vram" if planner.machine.device else "ram"
    allowed = getattr(config, capped)

    def lossless(policy: str, cap: int | None) -> Config:
        """Return the config of a lossless run with this policy and this memory cap."""
        asked = dict(POLICIES[policy].precisions.lossless or {}) | {capped: cap}
        return config.compared(
            policy=policy, high_tier=tier, **_comparison_settings(config) | asked
        )

    most = planner.plan(lossless(BASELINE, allowed))
    # The planner measures scratch memory in the same way as llama.cpp, so the minimum is exact.
    low = planner.least(lossless(BASELINE, allowed))
    yield ("minimum", lossless(BASELINE, low))
    for name in half_way():
        cap = max(planner.least(lossless(name, allowed)), (low + most.total_bytes) // 2)
        if allowed is None or cap <= allowed:
            yield ("half way", lossless(name, cap))
    largest = f"all of --{capped}" if allowed else "all free memory"
    name = largest if most.absent_bytes else "everything"
    yield (name, lossless(BASELINE, max(low, most.total_bytes)))


def budgets_of(config: Config, path: Path, tier: str) -> list[tuple[str, Config]]:
    """Return the runs of `moe-edge check`, each as (name of the memory budget, config).

    The list has one run with the smallest possible memory, and one run with memory for all experts
    (or with all permitted memory, if they do not fit). Both use an LRU cache. In addition, each
    other policy that can compute all experts in one precision (see `half_way`) has one run with a
    medium budget, if the memory cap permits it. All runs compute each expert in the precision
    `tier`.

    - config: the user's settings, with the memory cap.
    - path: the model file.

    Raises BudgetError if the smallest budget exceeds the memory cap or the free memory, and
    MoeEdgeError for another failure.
    """
    settings = settings_of(config.with_changes(model=path, low=None, low_tier=None))
    # Plan in a child process, so that no memory stays allocated in this process.
    found = run_job(CheckJob(settings, os.devnull, None, 0, budgets=tier))
    if "needed_bytes" in found:
        raise BudgetError(found["error"], found["needed_bytes"])
    if "error" in found:
        raise MoeEdgeError(found["error"])
    return [(name, Config.build(**each)) for name, each in found["budgets"]]


def half_way() -> list[str]:
    """Return the names of the policies that a check runs with a medium memory budget.

    They are all policies that can compute every expert in the same precision, as llama.cpp does.
    The baseline policy (an LRU cache) is left out, because the check runs it with the smallest and
    the largest budget. Policies with a limit on the quality loss (`max_loss`) are left out, too.
    """
    return [
        name
        for name, policy in POLICIES.items()
        if policy.precisions.lossless is not None and name != BASELINE and not spends_loss(name)
    ]
