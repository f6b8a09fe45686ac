"""`moe-edge plan`: its measurements of this machine, and its report about a GPU."""

import json
from dataclasses import asdict

import pytest
from asking import request_of

from gguf_tools.experts import ExpertModel
from orchestrator.cli.machine import examine, misses_line, render
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.native import Bandwidths
from orchestrator.native.llama import Bindings
from orchestrator.plan import machine
from orchestrator.plan.footprint import model_shape
from orchestrator.plan.planning import plan as plan_of
from orchestrator.plan.planning import planned as needed
from orchestrator.plan.records import Device, Machine, PlanRequest

pytestmark = pytest.mark.usefixtures("library")

MIB = 1 << 20


def test_a_machine_without_a_gpu(model):
    said: list[str] = []
    health, plans = examine(request_of(model=model, device="cpu", threads=1), said.append)
    parts = ("the disk", "the memory", "this machine")
    assert said == [f"Measuring {part}" for part in parts]
    assert health["gpu"] is None and health["copies"] is None
    assert health["memory_bytes_per_s"] > 0 and health["disk"]["bytes_per_s"] > 0
    text = render(health)
    assert "llama.cpp's own path" in text
    assert plans is not None and len(health["candidates"]) == len(plans.candidates)
    assert health["candidates"][health["taken"]] == asdict(plans.taken)
    assert json.loads(json.dumps(health)) == health


def test_a_refusal_is_reported_instead_of_a_plan(model):
    health, _ = examine(request_of(model=model, device="cpu", ram=1 << 50))
    assert any("is more than" in each for each in health["notes"])
    health, plans = examine(request_of(model=model, device="cpu", ram=1 * MIB))
    assert health["plan"] is None and plans is None
    assert "smallest --ram that works" in health["plan_note"]


def test_copies_to_a_device_are_timed(model):
    health, _ = examine(request_of(model=model, device="host", threads=1, force_managed=True))
    assert health["gpu"] is not None and health["copies"]["pageable"] > 0
    assert f"on {health['gpu']['name']}; " in health["plan"]
    text = render(health)
    assert (
        "a round trip takes" in text
        and "experts are copied to the GPU, because host memory cannot be pinned" in text
    )


def test_the_fastest_way_to_handle_a_miss_is_named():
    slow_link = Bandwidths(pinned=1e9, pageable=1e9, round_trip_us=10, compute=20e9)
    line = misses_line(slow_link, 2_400_000)
    assert "is copied to the GPU in 2.40 ms, or computed on the CPU in 0.12 ms. Computing" in line
    assert (
        "0.02 ms per layer" in line
        and "first missing expert of a layer is computed on the CPU" in line
    )
    far = slow_link._replace(round_trip_us=5000)
    assert misses_line(far, 2_400_000).endswith(" is copied to the GPU")
    assert "computed" not in misses_line(far._replace(compute=0), 2_400_000)


@pytest.fixture
def planned(model):
    """Function that plans for a GPU of 1 GiB by default. more: scratch bytes beyond the
    estimate."""
    with ExpertModel.open(model) as opened:

        def plan(card=1 << 30, more=0, **settings):
            there = Machine(8 << 30, Device("cuda0", "a card", card, card))
            config = Config.build(model=model, **settings)
            request = PlanRequest(config, more_scratch=more)
            return needed(plan_of(request, opened, there))

        yield plan


def test_vram_limits_everything_on_the_card(planned, model):
    lru = {"ctx": 256, "policy": "lru"}
    all_of_it = planned(**lru)
    fixed = all_of_it.total_bytes - all_of_it.slots.total_bytes
    with ExpertModel.open(model) as opened:
        one_expert = model_shape(opened, (0,), opened.shapes).expert_slot_bytes(0, 0)
    vram = fixed + 24 * one_expert
    plan = planned(vram=vram, **lru)
    assert plan.device is not None
    assert plan.total_bytes <= plan.cap_bytes == vram
    # Memory that llama.cpp took beyond the estimate reduces the slots.
    less = planned(vram=vram, more=8 * one_expert, **lru)
    assert 0 < less.slots.total_bytes <= plan.slots.total_bytes - 7 * one_expert
    assert less.total_bytes <= vram
    with pytest.raises(BudgetError, match=r"--vram .* smallest --vram that works") as caught:
        planned(vram=fixed, ctx=256)
    needed = caught.value.needed_bytes
    assert planned(vram=needed, ctx=256).total_bytes <= needed


def test_a_gpu_holds_the_model_or_the_host_needs_memory_for_reads(planned):
    plan = planned(8 << 30)
    assert not plan.managed and plan.device is not None
    with pytest.raises(BudgetError, match="with a GPU: the minimum is") as caught:
        planned(8 << 30, policy="lru", ram=1 * MIB)
    assert planned(8 << 30, policy="lru", ram=caught.value.needed_bytes).host_bytes > 0
    with pytest.raises(BudgetError, match=r"--ram 40 MiB is too small with") as more:
        planned(8 << 30, policy="lru", ram=40 * MIB, cache_ram=3 * MIB)
    assert more.value.needed_bytes == caught.value.needed_bytes + 3 * MIB
    assert planned(8 << 30, policy="lru", ram=more.value.needed_bytes, cache_ram=3 * MIB).managed


def test_a_device_that_does_not_exist_is_refused(model):
    from orchestrator.runtime.runtime import Runtime

    for asked, named in (("cuda63", "cuda63"), ("gpu", "cuda0")):
        if named == "cuda0" and Bindings.load().api.llama_supports_gpu_offload():
            continue
        with pytest.raises(ConfigError, match=f"--device {named}: "):
            Runtime.open(Config.build(model=model, device=asked))


def test_ram_beyond_the_machines_memory_causes_a_warning():
    """A plan warns if --ram is more than the machine's memory. It then uses the machine's
    memory."""
    for ram, warned in ((None, False), (1 << 30, False), (22 << 30, False), (1 << 40, True)):
        assert bool(machine.more_than_there(ram, Machine(22 << 30))) == warned
