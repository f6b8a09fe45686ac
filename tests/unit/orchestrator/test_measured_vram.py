"""A plan for a GPU is repeated with the memory that the loaded model was observed to take."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

from tables import cases

from orchestrator.config import Config
from orchestrator.cost.planner import ResolvedPlan
from orchestrator.plan.records import PlanRequest
from orchestrator.runtime.load import MOST_LOADS, SPARE_BYTES, Loader

MIB = 2**20
CAP, FREE = 1000 * MIB, 4000 * MIB


USUAL = {"more": 0, "n_ubatch": 512, "total_bytes": CAP, "cap_bytes": CAP, "absent_bytes": 1}


def planned_with(**changes):
    """A plan whose slots fill the cap, so more bytes of scratch leave fewer for slots."""
    return SimpleNamespace(**(USUAL | changes))


@dataclass
class Gpu:
    """A simulated GPU.

    modules: bytes of kernels, taken when the first model computes and never freed. beyond: bytes
    that a model takes more than planned, minus those that the plan includes.
    """

    modules: int
    beyond: int
    taken: int = 0
    others: ClassVar[int] = 0
    loads: list[int] = field(default_factory=list)


def planned(plan):
    return ResolvedPlan(PlanRequest(Config.build(model="m.gguf")), plan, None)


def load(gpu, monkeypatch):
    """Load a model on this GPU and return the plan that is kept."""
    loader = object.__new__(Loader)
    loader.gpu = SimpleNamespace(index=0)

    def _load(runs, _progress):
        plan = runs.plan
        gpu.loads.append(plan.more)

        def warm_up():
            own = gpu.modules + plan.total_bytes + gpu.beyond - plan.more
            gpu.taken = max(gpu.taken, own)

        def close():
            gpu.taken = gpu.modules

        return SimpleNamespace(plan=plan, warm_up=warm_up, close=close)

    monkeypatch.setattr(loader, "_load", _load)
    plans = {"plan": lambda _config, more: planned_with(more=more), "loses": lambda _plan: None}
    loader.planner = SimpleNamespace(**plans)
    monkeypatch.setattr(loader, "_free_bytes", lambda: FREE - gpu.taken - gpu.others)
    return loader.load(planned(planned_with())).plan


@cases(
    "modules, beyond, more",
    (0, -5 * MIB, 0),  # the estimate was sufficient
    (60 * MIB, 20 * MIB, 80 * MIB + SPARE_BYTES),
    # The kernels that the first model loaded also count for the second.
    (60 * MIB, -400 * MIB, -340 * MIB + SPARE_BYTES),
)
def test_memory_beyond_the_estimate_reduces_the_slots(modules, beyond, more, monkeypatch):
    gpu = Gpu(modules, beyond)
    assert load(gpu, monkeypatch).more == more
    assert gpu.taken <= CAP
    assert gpu.loads == ([0, more] if more else [0])


def test_loading_ends_after_a_few_attempts(monkeypatch):
    """Loading ends after MOST_LOADS attempts, even if another program takes more GPU memory each
    time."""
    gpu = Gpu(modules=0, beyond=0)
    others = iter(range(0, FREE, 300 * MIB))
    monkeypatch.setattr(Gpu, "others", property(lambda _: next(others)), raising=False)
    load(gpu, monkeypatch)
    assert len(gpu.loads) == MOST_LOADS
