"""Record traces of evaluations, and replay them."""

from dataclasses import dataclass
from typing import Any

from orchestrator.lab.replay import ReplayOptions, Trace, read_trace, replay, write_trace
from orchestrator.lab.replay.record import Recorder
from orchestrator.lab.replay.report import set_up_for
from orchestrator.lab.replay.simulate import Compute, Transport, simulate
from orchestrator.native import CStats
from orchestrator.native.llama import Bindings
from orchestrator.policy import Policy, policy_class
from orchestrator.runtime.runtime import Runtime

DISK = Transport(10**9, 50, 4)
# slow, fast, instant
SPEEDS = (Transport(50 * 10**6, 300, 2), Transport(4 * 10**9, 20, 8), Transport(0, 0, 1))


@dataclass
class Run:
    """A recorded evaluation.

    trace: as read back from its file. stats: counters of the real store. policy: the policy after
    the run. said: the result of the run function.
    """

    trace: Trace
    stats: CStats
    policy: Policy
    said: Any


def recorded(config, folder, run):
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        with Recorder(e.inside) as recorder:
            said = run(e)
        trace, stats, policy = recorder.trace(DISK), e.inside.store.stats(), e.inside.policy
    write_trace(folder / "t.npz", trace)
    return Run(read_trace(folder / "t.npz"), stats, policy, said)


def replayed(trace, speed, time=None):
    """Replay a trace with its recorded policy, settings and slots."""
    setup = set_up_for(trace, ReplayOptions(), policy_class(trace.header.policy), speed)
    library, time = Bindings.load().library(), time or Compute(20.0, 20.0)
    return simulate(library, trace, setup, speed, time), setup.policy


def reported(trace, **options):
    """Return the report of `moe-edge replay`."""
    return replay(Bindings.load().library(), trace, ReplayOptions(**options))
