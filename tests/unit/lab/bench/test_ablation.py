"""`moe-edge bench ablation`: the six rows of DyMoE's Table 3."""

import pytest
from made_runs import part, rows_of, run

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.lab.bench.ablation import Ablation, AblationOptions
from orchestrator.lab.bench.benchmark import Benchmark, token_slot_bytes
from orchestrator.lab.bench.cases import (
    CACHE,
    CACHE_AHEAD,
    MANAGED,
    MIXED,
    MIXED_AHEAD,
    ON_DEMAND,
    PAPER,
    SKIP_AHEAD,
    paper_rows,
)
from orchestrator.lab.bench.child import COLD, DECODE, PROMPT
from orchestrator.plan.footprint import model_shape
from orchestrator.policy.base import place
from orchestrator.policy.lru import LRU

DECODE_MS = dict(zip(PAPER, (100.0, 50.0, 40.0, 45.0, 25.0, 20.0), strict=True))


def test_rows_differ_in_one_part_each():
    rows = {case.name: case for case in paper_rows(0.6, 0.75)}
    assert tuple(rows) == PAPER
    settings = {name: case.settings for name, case in rows.items()}
    assert [case.one_token for case in rows.values()] == [True] + [False] * 5
    assert settings[CACHE] == settings[CACHE_AHEAD] | {"prefetch": "off"}
    assert settings[MIXED] == settings[MIXED_AHEAD] | {"prefetch": "off"}
    assert settings[MIXED] == settings[CACHE] | {"retention": 0.75, "low_tier": "q2_k"}
    assert settings[SKIP_AHEAD] == settings[MIXED_AHEAD] | {"low_tier": "skip"}
    assert settings[CACHE_AHEAD]["prefetch"] == "on"


def test_slots_of_one_token_hold_k_experts_of_one_layer(tmp_path):
    model = ExpertModel.open(synthetic.write(tmp_path / "m.gguf", "tiny-olmoe"))
    shape = model_shape(model, (0,))
    groups = place(LRU, shape, budget_bytes=token_slot_bytes(shape)).slots.groups
    assert {group.n_slots for group in groups} == {model.n_expert_used}


def fake_run(job):
    """Output of a process for this job, with the durations of DECODE_MS."""
    low, ahead = job.settings.get("low_tier"), job.settings.get("prefetch")
    name = {
        (None, "off"): CACHE,
        (None, "on"): CACHE_AHEAD,
        ("q2_k", "off"): MIXED,
        ("q2_k", "on"): MIXED_AHEAD,
        ("skip", "on"): SKIP_AHEAD,
    }.get((low, ahead), ON_DEMAND)
    ms = DECODE_MS[name]
    routed = {"high": 3, "low": 0, "skip": 1} if low == "skip" else {"high": 4, "low": 0, "skip": 0}
    parts = []
    for each in job.parts:
        times = [ms] * each.n
        if each.kind == PROMPT:
            times = [10 * ms if each.name == COLD else 3 * ms]
        counted = {"hits": 4 if each.name == DECODE else 10, "bytes": 2e6 * each.n}
        parts.append(part(each.name, times, each.n, routed=routed, **counted))
    recall = [None, 0.5, 0.75] if ahead == "on" else [None, None, None]
    return run(*parts, policy={"recall": recall})


@pytest.fixture
def faked(monkeypatch, no_disk):
    jobs = []

    def spawn(job, enter=None):
        jobs.append(job)
        # the row with a limit of 80 %
        if job.settings.get("low_tier") == "skip" and job.settings["expert_ram"] > 1.9e6:
            return {"error": "died of SIGILL"}
        return fake_run(job)

    monkeypatch.setattr(Benchmark, "_spawn", staticmethod(spawn))
    options = AblationOptions(quick=True, caps=(0.6, 0.8), runs=2, tokens=6, warmup=2)
    return Ablation().run(options), jobs


def test_speedups_refer_to_load_on_demand_under_the_same_cap(faked):
    report, jobs = faked
    rows = rows_of(report)
    for cap in (0.6, 0.8):
        for name in PAPER[:5] if cap == 0.8 else PAPER:
            row = rows[name, cap]
            assert row["speedup_tpot"] == pytest.approx(100 / DECODE_MS[name])
            assert row["speedup_ttft"] == pytest.approx(100 / DECODE_MS[name])
            assert row["ttft_ms"] == pytest.approx(3 * DECODE_MS[name])
            assert row["ttft_cold_ms"] == pytest.approx(10 * DECODE_MS[name])
            assert row["hit_rate"] == pytest.approx(0.4)  # only measured decode steps count
            assert row["bytes_per_token"] == pytest.approx(2e6)
    assert rows[SKIP_AHEAD, 0.6]["mix"] == {"high": 0.75, "low": 0.0, "skip": 0.25}
    assert "speedup_tpot" not in rows[MANAGED, None]
    assert rows[SKIP_AHEAD, 0.8]["error"] == "died of SIGILL"
    slots = [job.settings["expert_ram"] for job in jobs if job.settings.get("expert_ram")]
    assert slots.count(min(slots)) == 4  # row 1 with two limits and two runs


@pytest.mark.parametrize("shape", ["olmoe", "demo"])
def test_quick_ablation_end_to_end(real_engine, shape):
    options = AblationOptions(
        shape=shape, quick=True, caps=(0.6,), tokens=24, warmup=4, runs=1, threads=1
    )
    report = Ablation().run(options)
    rows = {row["name"]: row for row in report.rows}
    assert not {name: row["error"] for name, row in rows.items() if "error" in row}
    # Upstream appears only if the process is capped.
    assert list(rows) == [MANAGED, "lru", *PAPER]
    # Load on demand reads experts again each time; a cache keeps some.
    assert rows[ON_DEMAND]["hit_rate"] == 0.0
    assert rows[MANAGED]["hit_rate"] == 1.0
    for name in PAPER[1:]:
        assert 0 < rows[name]["hit_rate"] < 1
        assert rows[name]["bytes_per_token"] < rows[ON_DEMAND]["bytes_per_token"]
    assert rows[MIXED]["mix"]["low"] > 0 < rows[SKIP_AHEAD]["mix"]["skip"]
    assert rows[CACHE]["mix"]["high"] == 1.0
    recall = rows[CACHE_AHEAD]["policy"]["recall"]
    assert recall[0] is None and all(0 < share <= 1 for share in recall[1:])
    assert f"{'trained' if shape == 'demo' else 'zipf'} routing" in report.text()
