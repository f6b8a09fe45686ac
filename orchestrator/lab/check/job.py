"""What one process of a check is told, and the process itself: its memory is its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf_tools.children import child
from orchestrator.config import Config

Result = dict[str, Any]


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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CheckJob:
        return cls(**json.loads(text))


def settings_of(config: Config) -> dict[str, Any]:
    """What Config.build makes the same config of, but for settings of an answer; JSON-ready."""
    declared = config.declared().items()
    found = {name: getattr(config, name) for name, each in declared if not each.answer}
    found |= config.of_policies
    return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}


def run_job(job: CheckJob) -> Result:
    """What a process of its own measured, or {"error": a sentence}."""
    with child(
        [sys.executable, "-m", "orchestrator.lab.check.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        errors="replace",
    ) as process:
        out, err = process.communicate(job.to_json())
    if process.returncode == -signal.SIGKILL:
        return {"error": "the process was killed, as the kernel does where memory is short"}
    if process.returncode < 0:
        return {"error": f"the process died of {signal.Signals(-process.returncode).name}"}
    if process.returncode or not out.strip():
        last = err.strip().splitlines()[-1:] or [f"status {process.returncode}"]
        return {"error": f"the process failed: {last[0]}"}
    result: Result = json.loads(out.strip().splitlines()[-1])
    return result
