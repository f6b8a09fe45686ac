"""What one process of a check is told, and the process itself: its memory is its own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.lab.children import Result, run_child


@dataclass(frozen=True, slots=True)
class CheckJob:
    """One model to open and to read tokens with.

    settings: of Config.build. rows: the file for the logits, float32 [1 + n_decode, n_vocab]:
    behind the prompt, and behind each decoded token. n_prompt: tokens of the prompt, None for a
    micro-batch of the plan. prompt, answer: the tokens; None for a text of our own and the
    likeliest tokens. chosen: the settings are of a plan that a loss chose, and its policy may have
    no use for some of them. beside: instead, that choice is made, in a memory of which another
    process has so many bytes; the result has its settings. layers: instead, prompt and answer are
    read in one batch, and rows gets what the experts of each layer give, an .npz.
    """

    settings: dict[str, Any]
    rows: str
    n_prompt: int | None
    n_decode: int
    prompt: list[int] | None = None
    answer: list[int] | None = None
    chosen: bool = False
    beside: int | None = None
    layers: bool = False


def settings_of(config: Config) -> dict[str, Any]:
    """What Config.build makes the same config of, but for settings of an answer; JSON-ready."""
    declared = config.declared().items()
    found = {name: getattr(config, name) for name, each in declared if not each.answer}
    found |= config.of_policies
    return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}


def run_job(job: CheckJob) -> Result:
    """What a process of its own measured, or {"error": a sentence}."""
    return run_child("orchestrator.lab.check.child", json.dumps(asdict(job)))
