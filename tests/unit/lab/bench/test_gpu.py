"""The benchmark of a GPU: its cases, its ratios, its table; run for real on the host device."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from orchestrator.engine.load import SPARE_BYTES
from orchestrator.errors import ConfigError
from orchestrator.lab.bench import gpu
from orchestrator.lab.bench.ablation import BASELINE, CACHE, MIXED_AHEAD, SKIP_AHEAD
from orchestrator.lab.bench.gpu import (
    MANAGED_ON_GPU,
    PAPER,
    UPSTREAM,
    UPSTREAM_CPU,
    UPSTREAM_ON_GPU,
    Gpu,
    GpuLoop,
    GpuOptions,
    Room,
    add_bounds,
    add_ratios,
    gpu_cases,
    gpu_goals,
    streamed,
)

MIB, GIB = 2**20, 2**30
ROOM = Room(ours=2 * GIB, theirs=GIB, layers=(GIB,) * 8)


def test_upstream_keeps_what_does_not_fit_on_the_cpu():
    """Upstream takes 1 GiB less for itself than ours does: it may keep one layer more."""
    assert [ROOM.vram_bytes(share) for share in (0.25, 0.5)] == [4 * GIB, 6 * GIB]
    assert [ROOM.cpu_moe(share) for share in (0.01, 0.25, 0.5, 0.99)] == [7, 5, 3, 0]
    larger = Room(ours=GIB, theirs=3 * GIB, layers=(GIB,) * 8)
    assert (larger.vram_bytes(0.1), larger.cpu_moe(0.1)) == (3 * GIB + int(0.8 * GIB), 8)


@pytest.mark.parametrize("kernels", [0, 300 * MIB])
def test_what_kernels_take_is_room(monkeypatch, tmp_path, kernels):
    """Whatever the rows launch takes of both engines' memory is measured with theirs, and is not
    taken from the experts' share. The plan refuses less than its estimate, so that counts where
    kernels take less."""
    options = GpuOptions(caps=(0.25, 0.5), prompt_tokens=8)
    pieces = [SimpleNamespace(expert_bytes=GIB // 8)]
    model = SimpleNamespace(n_layers=4, n_expert=8, tier_bytes=(4 * GIB,), slices=[[pieces]] * 4)
    file = tmp_path / "model.gguf"
    file.touch()
    loop = GpuLoop(options, file, file, model, lambda _: None)
    asked = []

    def measure(case, _number):
        asked.append(case.settings)
        if case.system == "engine":
            slots = case.settings["expert_ram"]
            memory = {"fixed": 600 * MIB, "planned": 600 * MIB + slots, "flash": True}
            return {"memory": memory | {"used": 500 * MIB + slots + kernels}}
        on_gpu = (model.n_layers - case.settings["cpu_moe"]) * GIB
        return {"memory": {"llama": 400 * MIB + on_gpu, "used": 450 * MIB + on_gpu + kernels}}

    monkeypatch.setattr(loop, "measure", measure)
    monkeypatch.setattr(gpu, "kernel_bytes", lambda *_: 64 * MIB)
    loop.measure_room(1)
    ours, theirs = (500, 450) if kernels else (600, 464)
    assert loop.room.ours == ours * MIB + kernels + SPARE_BYTES
    assert loop.room.theirs == theirs * MIB + kernels + SPARE_BYTES
    assert loop.room.vram_bytes(0.5) == loop.room.ours + 2 * GIB
    assert asked[0]["low_tier"] and asked[0]["prefetch"] == "on" and asked[1]["gpu"] == 1


def test_cases_of_each_share():
    listed = gpu_cases(GpuOptions(caps=(0.25, 0.5)), ROOM, gpu=1)
    on_cpu = {
        (case.name, case.cap): case.settings["cpu_moe"]
        for case in listed
        if "cpu_moe" in case.settings
    }
    assert on_cpu == {
        (f"{UPSTREAM} 5", 0.25): 5,
        (f"{UPSTREAM} 3", 0.5): 3,
        (UPSTREAM_CPU, 0.25): 8,
        (UPSTREAM_CPU, 0.5): 8,
    }
    assert {case.settings["gpu"] for case in listed if case.system == "upstream"} == {1}
    keys = [case.key for case in listed]
    assert len(set(keys)) == len(keys)
    names = {case.name for case in listed if case.cap == 0.25}
    assert names >= {"lru", *PAPER, "dymoe 4/2", "dymoe 4/0", "dynaexq 4/2"}
    ways = {case.settings.get("misses") for case in listed if case.name.startswith("lru, ")}
    assert ways == {None, "copy", "read", "compute"}  # None: all on the GPU, nothing is missed
    assert {case.settings["misses"] for case in listed if case.name in PAPER} == {"copy"}


def row(name, cap, role, tpot, ttft):
    return {
        "name": name,
        "cap": cap,
        "role": role,
        "tpot_ms_p50_runs": tpot,
        "ttft_ms_runs": ttft,
    }


def test_ratios_are_against_the_better_upstream_of_each_run():
    rows = [
        row(UPSTREAM_ON_GPU, None, "resident", [2.0, 2.0], [10.0, 10.0]),
        row(MANAGED_ON_GPU, None, "reference", [2.5, 4.0], [20.0, 10.0]),
        row(UPSTREAM, 0.5, "upstream", [8.0, 12.0], [100.0, 100.0]),
        row(UPSTREAM_CPU, 0.5, "upstream", [9.0, 10.0], [90.0, 200.0]),
        row("lru", 0.5, "", [4.0, 2.0], [45.0, 50.0]),
    ]
    add_ratios(rows)
    assert (rows[1]["speedup"], rows[1]["ttft_speedup"]) == (0.65, 0.75)
    assert (rows[4]["speedup"], rows[4]["ttft_speedup"]) == (3.5, 2.0)
    assert "speedup" not in rows[0] and "speedup" not in rows[2]


def part(name, tokens, ms, copied, needed, read=0):
    store = {
        "requests": 4,
        "hits": 2,
        "routed": {"high": 1, "low": 1, "skip": 0},
        "bytes": read,
        "needed_bytes": read,
        "wait_ms": 0,
        "copied_bytes": copied,
        "needed_copied_bytes": needed,
        "in_place_bytes": 0,
        "host_computed_bytes": 0,
    }
    return {"name": name, "tokens": tokens, "ms": ms, "store": store}


def test_copies_while_a_prompt_is_read():
    run = {
        "parts": [part("prompt", 100, [500.0], 2e9, 2e9), part("decode", 4, [1.0] * 4, 8e6, 4e6)]
    }
    found = streamed([run])
    assert found["copied_bytes_per_token"] == 2e6
    assert found["needed_copied_bytes_per_token_runs"] == [1e6]
    assert found["prompt_copy_speed_runs"] == [4e9]
    assert streamed([{"parts": [{"name": "prompt", "tokens": 1, "ms": [1.0]}]}]) == {}


def measured(name, cap, role, tpot, copied, read=0.0, in_place=0.0, by_host=0.0):
    return row(name, cap, role, [tpot], [100.0]) | {
        "tpot_ms_p50": tpot,
        "needed_copied_bytes_per_token_runs": [copied],
        "needed_bytes_per_token_runs": [read],
        "in_place_bytes_per_token_runs": [in_place],
        "host_computed_bytes_per_token_runs": [by_host],
        "prompt_copy_speed_runs": [9e9],
    }


def test_the_bound_is_the_slower_of_computing_and_what_was_missed():
    rows = [
        measured(MANAGED_ON_GPU, None, "reference", 2.0, 0),
        measured("copies", 0.5, "", 8.0, 40e6),
        measured("computes", 0.5, "", 4.0, 10e6),
        measured("reads", 0.5, "", 40.0, 10e6, 20e6),
        measured("in place", 0.5, "", 12.0, 10e6, in_place=25e6),
        measured("by the host", 0.5, "", 12.0, 10e6, in_place=30e6, by_host=30e6),
    ]
    speeds = {"pinned": 10e9, "pageable": 2e9, "read": 5e9, "compute": 5e9}
    add_bounds(rows, [speeds], [1e9])
    assert "bound_tpot_ms" not in rows[0]
    assert [each["bound_tpot_ms"] for each in rows[1:]] == [4.0, 2.0, 20.0, 6.0, 6.0]
    assert [each["of_bound"] for each in rows[1:]] == [0.5] * 5
    assert [each["bound_by"] for each in rows[1:3]] == ["misses", "computing"]
    assert rows[1]["of_copy_peak"] == 0.9


def paper_table(times):
    rows = [measured(UPSTREAM, 0.5, "upstream", 40.0, 0)]
    rows += [measured(name, 0.5, "", tpot, 0) for name, tpot in zip(PAPER, times, strict=True)]
    add_ratios(rows)
    return {each["goal"]: each for each in gpu_goals(rows, skewed=True)}


def test_goals():
    found = paper_table([60.0, 20.0, 15.0, 14.0, 12.0, 10.0])
    one_tier = found["TPOT over upstream's best, one tier"]
    assert (one_tier["measured"], one_tier["row"], one_tier["met"]) == (40 / 15, PAPER[2], True)
    assert found["TPOT over upstream's best, 4/2"]["met"]
    assert not found["TTFT over upstream's best"]["met"]
    assert found["TPOT of the paper's rows in its order"]["met"]
    assert found["TPOT, all on the GPU, over upstream's"]["met"] is None
    assert found["TPOT over load on demand"]["row"] == SKIP_AHEAD
    slower = paper_table([60.0, 20.0, 15.0, 14.0, 16.0, 10.0])
    assert slower["TPOT of the paper's rows in its order"]["met"] is False


def test_ratios_of_the_paper_are_asked_of_the_smallest_and_the_largest_share():
    rows = []
    for cap, row_5, row_6 in ((0.25, 20.0, 15.0), (0.5, 18.0, 10.0)):
        times = [50.0, 40.0, 30.0, 25.0, row_5, row_6]
        rows += [measured(name, cap, "", t, 0) for name, t in zip(PAPER, times, strict=True)]
    add_ratios(rows)
    asked = [each for each in gpu_goals(rows, True) if each["goal"] == "TPOT over load on demand"]
    assert [(each["cap"], each["row"], each["measured"], each["met"]) for each in asked] == [
        (0.25, MIXED_AHEAD, 2.5, True),
        (0.5, SKIP_AHEAD, 5.0, True),
    ]


def test_uniform_routing_has_no_goal_for_speed():
    rows = [measured(CACHE, 0.5, "", 4.0, 0), measured(BASELINE, 0.5, "", 8.0, 0)]
    add_ratios(rows)
    assert not [
        each for each in gpu_goals(rows, skewed=False) if "upstream's best," in each["goal"]
    ]


def test_without_a_gpu_there_is_one_sentence():
    with pytest.raises(ConfigError, match="--device cuda63"):
        Gpu().run(GpuOptions(device="cuda63"))


def test_every_case_runs_on_the_host_device(real_engine):
    options = GpuOptions(
        quick=True,
        device="host",
        caps=(0.6,),
        tokens=8,
        warmup=1,
        prompt_tokens=16,
        runs=1,
        layers=2,
    )
    report = Gpu().run(options)
    json.dumps(report)
    rows = {(case["name"], case["cap"]): case for case in report["cases"]}
    assert not [case for case in report["cases"] if "error" in case]
    assert rows[MANAGED_ON_GPU, None]["hit_rate"] == 1
    assert 0 < rows["lru", 0.6]["hit_rate"] < 1
    assert rows["dynaexq 4/2", 0.6]["mix"]["low"] > 0
    assert rows[BASELINE, 0.6]["hit_rate"] == 0
    assert all(rows[name, 0.6]["bound_tpot_ms"] > 0 for name in ("lru", *PAPER))
    assert report["goals"] == []  # of a quick pass
    assert {goal["cap"] for goal in gpu_goals(report["cases"], skewed=False)} == {None, 0.6}
    lines = Gpu().text(report).splitlines()
    assert max(map(len, lines)) <= 100
