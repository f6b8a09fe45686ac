"""Runs of an engine that are recorded, and replays of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.lab.replay import ReplayOptions, Trace, read_trace, replay, write_trace
from orchestrator.lab.replay.record import Disk, Recorder
from orchestrator.lab.replay.report import set_up_for
from orchestrator.lab.replay.simulate import Compute, Outcome, Transport, simulate
from orchestrator.native import CStats
from orchestrator.native.llama import Bindings
from orchestrator.policy import Policy, policy_class

DISK = Disk(10**9, 50)
# Slow, fast, and instant.
SPEEDS = (Transport(50 * 10**6, 300, 2), Transport(4 * 10**9, 20, 8), Transport(0, 0, 1))


@dataclass
class Run:
    """A trace as it is read back, the real store's counters, the policy in the end, and what the
    run returned."""

    trace: Trace
    stats: CStats
    policy: Policy
    said: Any


def recorded(config: Config, folder: Path, run: Callable[[Engine], Any]) -> Run:
    with Engine.open(config) as engine:
        with Recorder(engine) as recorder:
            said = run(engine)
        trace, stats, policy = recorder.trace(DISK), engine.store.stats(), engine.policy
    write_trace(folder / "t.npz", trace)
    return Run(read_trace(folder / "t.npz"), stats, policy, said)


def replayed(
    trace: Trace,
    speed: Transport,
    time: Compute | None = None,
    see: Callable[[Policy], None] | None = None,
    **how: bool,
) -> tuple[Outcome, Policy]:
    """With the recorded policy, settings and slots; see: is shown the policy before it begins; how:
    as_recorded, unless something else of `simulate` is asked for."""
    setup = set_up_for(trace, ReplayOptions(), policy_class(trace.header.policy), speed)
    if see is not None:
        see(setup.policy)
    library, time = Bindings.load().library(), time or Compute(20.0, 20.0)
    how = how or {"as_recorded": True}
    return simulate(library, trace, setup, speed, time, **how), setup.policy


def reported(trace: Trace, **options: Any) -> dict[str, Any]:
    """What `moe-edge replay` finds."""
    return replay(Bindings.load().library(), trace, ReplayOptions(**options))


def replayed_exactly(trace: Trace) -> dict[str, dict[str, Any]]:
    """The rows of agreement by name; what was counted and decided has to agree to the last one."""
    result = reported(trace)
    assert result["clock"] == "recorded"
    rows = {row["name"]: row for row in result["agreement"]}
    exact = ["hits", "of requests", "prompt: hits", "promoted", "demoted"]
    exact += [name for name in rows if name.startswith(("routed in", "computed in"))]
    for name in exact:
        assert rows[name]["error"] == 0, name
    return rows
