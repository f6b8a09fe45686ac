"""What `moe-edge plan` finds of this machine, and what it says of a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from gguf_tools.process import usable_cores
from orchestrator.cli.machine import examine, misses_line, render
from orchestrator.config import Config
from orchestrator.errors import BudgetError, ConfigError
from orchestrator.memory.footprint import device_shape
from orchestrator.memory.machine import (
    Device,
    Machine,
    more_than_there,
    too_many_threads,
)
from orchestrator.memory.plan import plan_memory
from orchestrator.native import Bandwidths
from orchestrator.native.llama import Bindings

pytestmark = pytest.mark.usefixtures("library")

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return synthetic.write(path, "tiny-olmoe", tiers=("q4_k", "q2_k"))


def test_a_machine_without_a_gpu(model: Path) -> None:
    said: list[str] = []
    health, plans = examine(Config.build(model=model, device="cpu", threads=1), said.append)
    parts = ("the disk", "the memory", "this machine")
    assert said == [f"Measuring {part}" for part in parts]
    assert health["gpu"] is None and health["copies"] is None
    assert health["memory_bytes_per_s"] > 0 and health["disk"]["bytes_per_s"] > 0
    text = render(health)
    assert "llama.cpp's own path" in text
    assert plans is not None and len(health["candidates"]) == len(plans.candidates)
    assert health["candidates"][health["taken"]] == asdict(plans.taken)
    assert json.loads(json.dumps(health)) == health


def test_what_does_not_fit_is_said_instead_of_a_plan(model: Path) -> None:
    health, _ = examine(Config.build(model=model, device="cpu", ram=1 << 50))
    assert any("is more than" in each for each in health["notes"])
    health, plans = examine(Config.build(model=model, device="cpu", ram=1 * MIB))
    assert health["plan"] is None and plans is None
    assert "smallest --ram that works" in health["plan_note"]


def test_copies_to_a_device_are_timed(model: Path) -> None:
    health, _ = examine(Config.build(model=model, device="host", threads=1, force_managed=True))
    assert health["gpu"] is not None and health["copies"]["pageable"] > 0
    assert f"on {health['gpu']['name']}; " in health["plan"]
    text = render(health)
    assert "there and back" in text and "all are copied: host memory cannot be pinned" in text


def test_the_quickest_way_of_a_miss_is_named() -> None:
    slow_link = Bandwidths(pinned=1e9, pageable=1e9, round_trip_us=10, read=2e9, compute=20e9)
    line = misses_line(slow_link, 2_400_000)
    assert "copied 2.40 ms, read in place 1.20 ms, computed here 0.12 ms" in line
    assert "0.02 ms a layer" in line and "first of a layer is computed here" in line
    far = slow_link._replace(round_trip_us=5000)
    assert "is read in place, more are shared" in misses_line(far, 2_400_000)
    assert "is copied, more are shared" in misses_line(far._replace(pinned=4e9), 2_400_000)
    assert "computed" not in misses_line(far._replace(compute=0), 2_400_000)


def on_gpu(total: int, ram: int = 8 << 30) -> Machine:
    return Machine(ram, Device("cuda0", "a card", total, total))


def test_vram_caps_everything_there(model: Path) -> None:
    with ExpertModel.open(model) as opened:
        config = Config.build(model=model, ctx=256)
        all_of_it = plan_memory(config.with_changes(policy="lru"), opened, on_gpu(1 << 30))
        fixed = all_of_it.total_bytes - all_of_it.slots.total_bytes
        one_expert = device_shape(opened, (0,)).expert_slot_bytes(0, 0)
        vram = fixed + 24 * one_expert
        plan = plan_memory(config.with_changes(vram=vram, policy="lru"), opened, on_gpu(1 << 30))
        assert plan.slots is not None and plan.device is not None
        assert plan.total_bytes <= plan.vram_bytes == vram
        # what llama.cpp was seen to take beyond the estimate comes off the slots
        less = plan_memory(
            config.with_changes(vram=vram, policy="lru"), opened, on_gpu(1 << 30), 8 * one_expert
        )
        assert 0 < less.slots.total_bytes <= plan.slots.total_bytes - 7 * one_expert
        assert less.total_bytes <= vram
        with pytest.raises(BudgetError, match=r"--vram .* smallest --vram that works") as caught:
            plan_memory(config.with_changes(vram=fixed), opened, on_gpu(1 << 30))
        again = config.with_changes(vram=caught.value.needed_bytes)
        assert plan_memory(again, opened, on_gpu(1 << 30)).total_bytes <= caught.value.needed_bytes


def test_a_card_takes_the_whole_model_where_it_fits(model: Path) -> None:
    with ExpertModel.open(model) as opened:
        plan = plan_memory(Config.build(model=model), opened, on_gpu(8 << 30))
        assert not plan.managed and plan.device is not None


def test_the_host_behind_a_card_needs_room_for_reads(model: Path) -> None:
    with ExpertModel.open(model) as opened:
        config = Config.build(model=model, policy="lru", ram=1 * MIB)
        with pytest.raises(BudgetError, match="beside a GPU: the smallest that works") as caught:
            plan_memory(config, opened, on_gpu(8 << 30))
        again = config.with_changes(ram=caught.value.needed_bytes)
        assert plan_memory(again, opened, on_gpu(8 << 30)).host_bytes > 0


def test_a_device_that_is_not_here(model: Path) -> None:
    from orchestrator.engine.engine import Engine

    for asked, named in (("cuda63", "cuda63"), ("gpu", "cuda0")):
        if named == "cuda0" and Bindings.load().api.llama_supports_gpu_offload():
            continue
        with pytest.raises(ConfigError, match=f"--device {named}: "):
            Engine.open(Config.build(model=model, device=asked))


def test_more_than_there_is_is_warned_of() -> None:
    """The plan takes what is there; llama.cpp, too, runs with what it gets."""
    for ram, warned in ((None, False), (1 << 30, False), (22 << 30, False), (1 << 40, True)):
        assert bool(more_than_there(ram, Machine(22 << 30))) == warned
    for threads, warned in ((None, False), (usable_cores(), False), (usable_cores() + 1, True)):
        assert bool(too_many_threads(threads)) == warned
