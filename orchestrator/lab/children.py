"""Processes of our own that are told what to do as JSON on stdin and answer with a JSON line on
stdout: what one of them measures of its memory and speed is its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from gguf_tools.children import child
from orchestrator.errors import BudgetError, MoeEdgeError

Result = dict[str, Any]


def run_child(
    module: str,
    told: str,
    seconds: float | None = None,
    enter: Callable[[], object] | None = None,
) -> Result:
    """What `python -m module` answers, or {"error": a sentence}. seconds: the longest time that it
    may take; enter: what the process calls before Python starts."""
    try:
        with child(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            errors="replace",
            preexec_fn=enter,
        ) as process:
            out, err = process.communicate(told, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"still not done after {seconds:.0f} s"}
    status = process.returncode
    if status == -signal.SIGKILL:
        return {"error": "the process was killed, as the kernel does where memory is short"}
    if status < 0:
        return {"error": f"the process died of {signal.Signals(-status).name}"}
    if status or not out.strip():
        last = err.strip().splitlines()[-1:] or [f"status {status}"]
        return {"error": f"the process failed: {last[0]}"}
    result: Result = json.loads(out.strip().splitlines()[-1])
    return result


def answer(run: Callable[[Any], Result]) -> None:
    """What such a process does: gives run what it was told, and writes what that returns, or
    {"error": a sentence}."""
    try:
        result = run(json.load(sys.stdin))
    except MoeEdgeError as error:
        result = {"error": str(error)}
        if isinstance(error, BudgetError):
            result["needed_bytes"] = error.needed_bytes
    print(json.dumps(result))
