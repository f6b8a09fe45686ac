"""The benchmark of a GPU: its cases, its ratios, its table; run for real on the host device."""

from __future__ import annotations

import json

import pytest

from orchestrator.bench import GpuOptions, render_gpu, run_gpu
from orchestrator.bench.gpu import (
    MANAGED,
    RESIDENT,
    UPSTREAM,
    UPSTREAM_CPU,
    add_ratios,
    gpu_cases,
)
from orchestrator.errors import ConfigError


def test_upstream_keeps_what_does_not_fit_on_the_cpu():
    listed = gpu_cases(GpuOptions(caps=(0.25, 0.5)), n_layers=8)
    on_cpu = {
        (case.name, case.cap): case.settings["cpu_moe"]
        for case in listed
        if "cpu_moe" in case.settings
    }
    assert on_cpu == {
        (UPSTREAM, 0.25): 6,
        (UPSTREAM, 0.5): 4,
        (UPSTREAM_CPU, 0.25): 8,
        (UPSTREAM_CPU, 0.5): 8,
    }
    keys = [case.key for case in listed]
    assert len(set(keys)) == len(keys)


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
        row(RESIDENT, None, "resident", [2.0, 2.0], [10.0, 10.0]),
        row(MANAGED, None, "managed", [2.5, 4.0], [20.0, 10.0]),
        row(UPSTREAM, 0.5, "upstream", [8.0, 12.0], [100.0, 100.0]),
        row(UPSTREAM_CPU, 0.5, "upstream", [9.0, 10.0], [90.0, 200.0]),
        row("lru", 0.5, "", [4.0, 2.0], [45.0, 50.0]),
    ]
    add_ratios(rows)
    assert (rows[1]["speedup"], rows[1]["ttft_speedup"]) == (0.65, 0.75)
    assert (rows[4]["speedup"], rows[4]["ttft_speedup"]) == (3.5, 2.0)
    assert "speedup" not in rows[0] and "speedup" not in rows[2]


def test_without_a_gpu_there_is_one_sentence():
    with pytest.raises(ConfigError, match="--device cuda63"):
        run_gpu(GpuOptions(device="cuda63"))


def test_every_case_runs_on_the_host_device(real_engine):
    options = GpuOptions(
        quick=True, device="host", caps=(0.6,), tokens=8, warmup=1, prompt_tokens=16, runs=1
    )
    report = run_gpu(options)
    json.dumps(report)
    rows = {(case["name"], case["cap"]): case for case in report["cases"]}
    assert not [case for case in report["cases"] if "error" in case]
    assert rows[MANAGED, None]["hit_rate"] == 1
    assert 0 < rows["lru", 0.6]["hit_rate"] < 1
    assert rows["dynaexq 4/2", 0.6]["mix"]["low"] > 0
    lines = render_gpu(report).splitlines()
    assert max(map(len, lines)) <= 100
