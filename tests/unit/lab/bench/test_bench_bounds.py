"""The bound of a row: what it computes, what it missed, and how fast its disk was."""

import pytest

from orchestrator.lab.bench.caps import Computing, add_bound, bound_notes, computing, step_bytes

ALL_HIGH = {"high": 1.0, "low": 0.0, "skip": 0.0}


def decode_run(ms, reads, disk, store=None):
    """A run whose steps took ms and read `reads`, (waited for, ahead) bytes each."""
    moved = sum(sum(each) for each in reads)
    counters = {"bytes": moved, "prefetch_used": 3, "prefetch_wasted": 1} | (store or {})
    part = {"name": "decode", "tokens": len(ms), "ms": ms, "store": counters, "step_reads": reads}
    return {"parts": [part], "disk": disk}


def row(ms, mix=ALL_HIGH):
    return {"name": "lru", "mix": mix, "tpot_ms_p50_runs": [ms]}


def test_a_skipped_and_a_low_expert_compute_less():
    compute = Computing([20.0], [16.0], [17.0], 0.75)
    assert compute.of_mix(0, ALL_HIGH) == 20.0
    # a quarter of the experts left out saves 3 ms, half of them would save 6
    assert compute.of_mix(0, {"high": 0.5, "low": 0.0, "skip": 0.5}) == pytest.approx(14.0)
    assert compute.of_mix(0, {"high": 0.5, "low": 0.5, "skip": 0.0}) == pytest.approx(18.0)
    # noise that makes the cheaper one slower saves nothing
    assert Computing([20.0], [21.0], None, 1).of_mix(0, {"high": 0, "low": 1, "skip": 0}) == 20.0


def test_the_bound_is_the_median_of_the_steps_and_not_their_mean():
    # three steps miss nothing, two miss 100 MB: the median step is bound by its 5 ms of computing
    found = row(6.0)
    add_bound(
        found,
        [decode_run([6.0, 6.0, 6.0, 110.0, 110.0], [[0, 0]] * 3 + [[1e8, 0]] * 2, [1e9, 1e9])],
        Computing([5.0], None, None, 1.0),
    )
    assert found["bound_tpot_ms"] == 5.0
    assert found["bound_by"] == "computing"
    assert found["of_bound"] == pytest.approx(5 / 6)
    assert not found["disk_changed"]


def test_the_best_probe_beside_a_row_binds_it():
    found = row(25.0)
    run = decode_run([25.0] * 4, [[2e7, 0]] * 4, [1e9, 1.25e9])
    add_bound(found, [run], Computing([5.0], None, None, 1.0))
    assert found["bound_tpot_ms"] == pytest.approx(16.0)  # 20 MB at 1.25 GB/s
    assert found["bound_by"] == "reading"


def test_a_disk_that_became_faster_is_seen_and_bounds_the_row():
    # 20 MB in 12.8 ms are 1.56 GB/s, of a disk whose probes said 1.05
    found = row(12.8)
    run = decode_run([12.8] * 4, [[2e7, 0]] * 4, [1.05e9, 1.05e9])
    add_bound(found, [run], Computing([5.0], None, None, 1.0))
    assert found["of_bound"] == pytest.approx(1.0)
    assert found["disk_changed"]
    (line,) = bound_notes([found])
    assert "read at 1.56 GB/s, probes 1.05 to 1.05: the disk was faster" in line
    assert "ABOVE" not in line


def test_a_row_above_its_bound_is_named():
    found = row(10.0)
    add_bound(
        found, [decode_run([10.0] * 4, [[0, 0]] * 4, [1e9])], Computing([12.0], None, None, 1.0)
    )
    assert "ABOVE 105% of its bound" in bound_notes([found])[0]


def test_what_was_read_ahead_counts_as_far_as_it_was_used():
    run = decode_run([1.0], [[10, 8]], [1e9])
    assert step_bytes(run["parts"][0]) == [16.0]
    none = decode_run([1.0], [[10, 8]], [1e9], {"prefetch_used": 0, "prefetch_wasted": 0})
    assert step_bytes(none["parts"][0]) == [10.0]


def test_computing_is_the_better_flags_of_upstream_run_by_run():
    def upstream(role, *ms, **more):
        return {"role": role, "tpot_ms_p50_runs": list(ms)} | more

    rows = [
        upstream("upstream", 10.0, 9.0),
        upstream("upstream", 8.0, 11.0),
        upstream("reference", 1.0, 1.0),  # our managed path is no bound of itself
        upstream("low", 7.0, 7.0),
        {"role": "fewer", "error": "died"},
    ]
    assert computing(rows, 0.75) == Computing([8.0, 9.0], [7.0, 7.0], None, 0.75)
    assert computing(rows[2:3], 0.75) is None
