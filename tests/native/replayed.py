"""A recorded run, replayed on the clock that it was recorded with."""

from __future__ import annotations

from typing import Any

from orchestrator.lab.replay import ReplayOptions, Trace, replay
from orchestrator.native.llama import Bindings


def replayed_exactly(trace: Trace) -> dict[str, dict[str, Any]]:
    """The rows of agreement by name; what was counted and decided has to agree to the last one."""
    result = replay(Bindings.load().library(), trace, ReplayOptions())
    assert result["clock"] == "recorded"
    rows = {row["name"]: row for row in result["agreement"]}
    exact = ["hits", "of requests", "prompt: hits", "promoted", "demoted"]
    exact += [name for name in rows if name.startswith(("routed in", "computed in"))]
    for name in exact:
        assert rows[name]["error"] == 0, name
    return rows
