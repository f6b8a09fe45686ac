"""`moe-edge bench`: its cases, the bound of a row, and a small run."""

import json
from types import SimpleNamespace

import pytest
from made_runs import part, rows_of, run

from orchestrator.lab.bench.benchmark import QUICK_NOTE, Benchmark
from orchestrator.lab.bench.caps import (
    CapOptions,
    Caps,
    Computing,
    add_disk_bound,
    computing,
    step_bytes,
)
from orchestrator.lab.bench.models import UNIFORM, tier_expert_bytes

ALL_HIGH = {"high": 1.0, "low": 0.0, "skip": 0.0}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Caps()
    made.open(CapOptions(quick=True, retention=0.6), lambda text: None)
    return made


def test_every_system_runs_under_every_cap(bench):
    listed = bench.cases()
    keys = [case.key for case in listed]
    assert len(set(keys)) == len(keys)
    for cap in ("60%", "80%"):
        for name in ("upstream mmap", "lru", "dymoe 4, r=1", "dymoe 4/2", "dymoe 4/0"):
            assert f"{name} @{cap}" in keys
    assert [case.role for case in listed].count("reference") == 1
    assert {case.settings["retention"] for case in listed if "dymoe 4/" in case.name} == {0.6}
    # The largest uniform type that fits is compared under the same limit.
    assert {(case.cap, case.tier) for case in listed if case.cap and case.tier} == {
        (0.6, "q2_k"),
        (0.8, "q3_k"),
    }
    uniform = bench.job(next(case for case in listed if case.tier == "q3_k"), 0)
    assert "-q3_k-" in uniform.model and uniform.low is None
    fewer = next(case for case in listed if case.role == "fewer")
    assert bench.job(fewer, 0).settings["experts_used"] == ("olmoe.expert_used_count", 1)
    bench.on = CapOptions(quick=True, together=4, caps=(0.6,))
    assert {case.system for case in bench.cases()} == {"engine"}


def test_the_largest_type_that_fits_is_taken(bench):
    experts = bench.model.tier_bytes[0]
    sizes = {tier: tier_expert_bytes(bench.model, tier) for tier in UNIFORM}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    for tier in ("iq4_xs", "q3_k", "iq2_xxs"):
        assert bench.largest_whole((sizes[tier] + 0.5) / experts) == tier
        assert bench.largest_whole((sizes[tier] - 0.5) / experts) != tier
    assert bench.largest_whole(0.1) is None


def test_the_whole_process_counts_if_it_is_limited(bench):
    bench.on = SimpleNamespace(
        caps_process=True, n_ctx=256, n_ubatch=16, trained=False, routing="uniform"
    )
    # a tiny model is smaller than the process
    assert bench.largest_whole(0.99) is None
    bench.file_bytes = 2**40
    assert bench.largest_whole(0.99) == "q6_k"


def test_a_skipped_and_a_low_expert_compute_less():
    compute = Computing([20.0], [16.0], [17.0], 0.75)
    assert compute.of_mix(0, ALL_HIGH) == 20.0
    # skipping a quarter of the experts saves 3 ms, half would save 6
    assert compute.of_mix(0, {"high": 0.5, "low": 0.0, "skip": 0.5}) == pytest.approx(14.0)
    assert compute.of_mix(0, {"high": 0.5, "low": 0.5, "skip": 0.0}) == pytest.approx(18.0)
    # noise that makes the cheaper form slower gives no negative saving
    assert Computing([20.0], [21.0], [], 1).of_mix(0, {"high": 0, "low": 1, "skip": 0}) == 20.0


def test_computing_is_the_better_flags_of_upstream_run_by_run():
    def upstream(role, *ms, cap=None, **more):
        return {"role": role, "cap": cap, "tpot_ms_p50_runs": list(ms)} | more

    rows = [
        upstream("upstream", 10.0, 9.0),
        upstream("upstream", 8.0, 11.0),
        upstream("reference", 1.0, 1.0),  # our own path with a store is no bound for itself
        upstream("low", 7.0, 7.0),
        {"role": "fewer", "cap": None, "error": "died"},
    ]
    assert computing(rows, 0.75) == Computing([8.0, 9.0], [7.0, 7.0], [], 0.75)
    assert computing(rows[2:3], 0.75).high == []


@pytest.mark.parametrize(
    ("ms", "reads", "disk", "computed", "bound", "by"),
    [
        # Three steps miss nothing, two miss 100 MB: computing bounds the median step.
        ([6.0] * 3 + [110.0] * 2, [[0, 0]] * 3 + [[1e8, 0]] * 2, [1e9], 5.0, 5.0, "computing"),
        # The faster measurement of the disk bounds the row: 20 MB at 1.25 GB/s.
        ([25.0] * 4, [[2e7, 0]] * 4, [1e9, 1.25e9], 5.0, 16.0, "misses"),
        # If the disk became faster, the row bounds it: 20 MB in 12.8 ms, although 1.05 GB/s was
        # measured.
        ([12.8] * 4, [[2e7, 0]] * 4, [1.05e9, 1.05e9], 5.0, 12.8, "misses"),
    ],
)
def test_the_bound_of_a_row(ms, reads, disk, computed, bound, by):
    moved = sum(sum(each) for each in reads)
    made = part("decode", ms, bytes=moved) | {"step_reads": reads}
    row = {"mix": ALL_HIGH, "tpot_ms_p50_runs": [sorted(ms)[len(ms) // 2]]}
    add_disk_bound(row, [run(made, disk=disk)], Computing([computed], [], [], 1.0))
    assert row["bound_tpot_ms"] == pytest.approx(bound)
    assert row["bound_by"] == by
    assert row["of_bound"] == pytest.approx(bound / row["tpot_ms_p50_runs"][0])


def test_prefetched_bytes_count_as_far_as_they_were_used():
    made = part("decode", [1.0], used_ahead=0.75) | {"step_reads": [[10, 8]]}
    assert step_bytes(made) == [16.0]


@pytest.fixture
def faked(monkeypatch, no_disk):
    """Results of run() with simulated processes and disk: 10 ms if resident, 1 GB/s, known
    misses."""
    jobs, notes = [], []

    def spawn(job, enter=None):
        jobs.append(job)
        prompt = part("prompt", [5.0], 128)
        if job.system == "upstream":
            if job.settings.get("mmap") and job.settings.get("extra_bufts"):
                return {"error": "out of memory"}
            return run(prompt, part("decode", [200.0 if job.settings["mmap"] else 8.0] * 8))
        if job.settings["policy"] == "plain":
            return run(prompt, part("decode", [8.0] * 8))
        if job.settings.get("expert_ram") is None:
            return run(prompt, part("decode", [10.0] * 8, hits=10))
        mix = {"high": 75, "low": 25, "skip": 0}
        missed = {"bytes": 1.6e8, "needed_bytes": 1.6e8, "routed": mix}
        return run(prompt, part("decode", [25.0] * 7 + [9000.0], **missed))

    monkeypatch.setattr(Benchmark, "_spawn", staticmethod(spawn))
    report = Caps().run(CapOptions(quick=True, caps=(0.6,), runs=2), notes.append)
    assert notes[0] == QUICK_NOTE
    return report, jobs


def test_bound_and_speedup_follow_from_the_measurements(faked):
    report, _ = faked
    rows = rows_of(report)
    lru = rows["lru", 0.6]
    # 20 MB per token at 1 GB/s: 20 ms, more than 8 ms of computing.
    assert lru["bound_tpot_ms"] == pytest.approx(20.0)
    assert lru["of_bound"] == pytest.approx(20 / 25)
    assert lru["speedup_mmap"] == pytest.approx(8.0)
    assert lru["of_resident"] == pytest.approx(10 / 25)
    assert lru["hit_rate"] == pytest.approx(0.4)
    assert lru["mix"] == {"high": 0.75, "low": 0.25, "skip": 0.0}
    assert lru["bytes_per_token"] == pytest.approx(2e7)
    assert lru["callback_us_p50"] == 9.0
    assert "bound_tpot_ms" not in rows["our managed path", None]
    assert json.loads(json.dumps(report.as_dict()))["tables"][1]["data"][2]["name"] == "lru"


def test_a_failed_case_is_a_row_and_is_not_tried_again(faked):
    report, jobs = faked
    assert rows_of(report)["upstream mmap, repack", 0.6]["error"] == "out of memory"
    tries = [job for job in jobs if job.settings.get("mmap") and job.settings.get("extra_bufts")]
    assert len(tries) == 1


def test_runs_are_interleaved(faked):
    _, jobs = faked
    policies = [job.settings.get("policy") for job in jobs if job.system == "engine"]
    assert policies == 2 * ["plain", "lru", "lru", "dymoe", "dymoe", "dymoe", "dynaexq"]
    seeds = [job.seed for job in jobs]
    assert seeds == sorted(seeds) and set(seeds) == {0, 1}


def test_quick_benchmark_end_to_end(real_engine):
    options = CapOptions(quick=True, caps=(0.6,), tokens=8, warmup=2, runs=1, threads=1)
    rows = {row["name"]: row for table in Caps().run(options).tables for row in table.rows}
    assert not {name: row["error"] for name, row in rows.items() if "error" in row}
    assert rows["dymoe 4/0"]["mix"]["skip"] > 0
    assert rows["dymoe 4/2"]["mix"]["low"] > 0
    assert rows["our managed path"]["hit_rate"] == 1.0
    assert rows["lru"]["hit_rate"] < 1.0


def test_sequences_together_end_to_end(real_engine):
    options = CapOptions(quick=True, runs=1, tokens=8, together=5, threads=1, caps=(0.99,))
    report = Caps().run(options)
    rows = {row["name"]: row for row in report.rows}
    assert not any("error" in row for row in rows.values())
    for name in ("our managed path", "dynaexq 4/2"):
        assert rows[name]["hit_rate"] == 1.0
        assert rows[name]["tokens_per_s"] == pytest.approx(5e3 / rows[name]["tpot_ms_p50"])
    assert rows["lru"]["hit_rate"] < 1.0
    assert "lru: " in report.text() and "times the speed with everything in memory" in report.text()
