import json
import os
import sys
from contextlib import contextmanager, nullcontext

import pytest

from orchestrator.errors import ConfigError
from orchestrator.lab.bench import host
from orchestrator.lab.bench import loop as bench_loop
from orchestrator.lab.bench import models as bench_models
from orchestrator.lab.bench.caps import Caps, cap_cases
from orchestrator.lab.bench.cases import ONE_TIER
from orchestrator.lab.bench.child import play, text_stream, token_stream
from orchestrator.lab.bench.job import (
    MIN_STEPS,
    Job,
    Part,
    decode,
    longest_context,
    prompt,
    settle,
)
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.lab.table import WIDTH


def job(**changes):
    settings = {
        "system": "upstream",
        "model": "m",
        "low": None,
        "settings": {},
        "n_ctx": 256,
        "n_ubatch": 16,
        "threads": 1,
        "parts": [prompt(16), settle(4, 20.0), decode(20, 60.0)],
        "seed": 1,
    }
    return Job(**(settings | changes))


def test_caps_are_percentages():
    caps = BenchOptions.declared()["caps"]
    assert caps.parse("60, 80%") == (0.6, 0.8)
    with pytest.raises(ConfigError, match="'a,b' is no list of percentages"):
        caps.parse("a,b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "olmo"}, "unknown shape 'olmo'"),
        ({"routing": "flat"}, "unknown routing 'flat'"),
        ({"caps": (60.0,)}, "between 0 and 100"),
        ({"tokens": 0}, "'tokens' must be 1 or more, not 0"),
        ({"threads": 0}, "'threads' must be 1 or more, not 0"),
        ({"seed": -1}, "'seed' must be 0 or more, not -1"),
        ({"retention": 1.1}, "'retention' must be 0.0 to 1.0, not 1.1"),
        ({"retention": float("nan")}, "'retention' must be 0.0 to 1.0, not nan"),
        ({"max_seconds": -1.0}, "'max_seconds' must be 0 or more, not -1.0"),
        ({"caps": ()}, "between 0 and 100"),
        ({"caps": (0.601, 0.604)}, "differ by whole percentages"),
        ({"caps": (0.6, 0.6)}, "differ by whole percentages"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        BenchOptions(**options)


def test_every_system_runs_under_every_cap():
    listed = cap_cases(BenchOptions(caps=(0.5, 0.7), retention=0.6))
    keys = [case.key for case in listed]
    assert len(set(keys)) == len(keys)
    for cap in ("50%", "70%"):
        for name in ("upstream mmap", "lru", ONE_TIER, "dymoe 4/2", "dymoe 4/0"):
            assert f"{name} @{cap}" in keys
    assert [case.role for case in listed].count("reference") == 1
    assert {case.settings["retention"] for case in listed if "dymoe 4/" in case.name} == {0.6}


def timed(parts, draw=None):
    """(results, calls (tokens, pos)) of play()."""
    calls = []
    results = play(
        parts,
        lambda tokens, pos: calls.append((tokens, pos)),
        draw or token_stream(1, 320),
        lambda result: nullcontext(),
    )
    return results, calls


def test_every_system_gets_the_same_tokens():
    parts = job().parts
    results, calls = timed(parts)
    assert timed(parts)[1] == calls
    first, *steps = calls
    assert (len(first[0]), first[1]) == (16, 0)
    assert [pos for _, pos in steps] == list(range(16, 16 + 4 + 20))
    tokens = [token for step, _ in calls for token in step]
    assert all(3 <= token < 317 for token in tokens)
    assert len(set(tokens)) > 20
    assert token_stream(2, 320)(10) != token_stream(1, 320)(10)
    assert [(each["name"], each["tokens"], len(each["ms"])) for each in results] == [
        ("prompt", 16, 1),
        ("settle", 4, 4),
        ("decode", 20, 20),
    ]


def test_parts_end_in_time_and_leave_the_tokens_after_them_alone():
    slow = [prompt(16), settle(4, 0.0), decode(20, 0.0), prompt(8)]
    results, calls = timed(slow)
    assert [len(each["ms"]) for each in results] == [1, 1, MIN_STEPS, 1]
    patient = timed([prompt(16), settle(4, 60.0), decode(20, 60.0), prompt(8)])[1]
    assert calls[-1] == patient[-1]
    assert calls[-1][1] == 0  # a prompt starts a conversation of its own


def test_a_part_is_watched_from_before_its_first_step():
    order = []

    @contextmanager
    def watch(result):
        order.append("in")
        yield
        order.append("out")
        result["seen"] = len(result["ms"])

    results = play(
        [prompt(2), decode(3, 60.0)], lambda t, p: order.append("step"), lambda n: [7] * n, watch
    )
    assert order == ["in", "step", "out", "in", "step", "step", "step", "out"]
    assert [each["seen"] for each in results] == [1, 3]


def test_text_gives_its_conversations_in_an_order_of_the_seed():
    text = "a b\n%\nc\n%\nd e f\n"
    seen = text_stream(0, text, str.split)(6)
    assert sorted(seen) == ["a", "b", "c", "d", "e", "f"]
    longer = text_stream(0, text, str.split)(15)
    assert longer[:6] == longer[6:12] == seen
    assert len({tuple(text_stream(seed, text, str.split)(6)) for seed in range(20)}) > 1


def test_context_holds_the_longest_conversation():
    assert longest_context([prompt(200), decode(56, 1.0)]) == 256
    assert longest_context([prompt(200), decode(57, 1.0)]) == 512
    assert longest_context([prompt(200), decode(20, 1.0), prompt(9), settle(40, 1.0)]) == 256


def test_job_survives_json():
    again = Job.from_json(job(low="x").to_json())
    assert again == job(low="x")
    assert isinstance(again.parts[0], Part)
    assert again.decode_seconds == 80.0


@pytest.fixture
def cgroups(tmp_path):
    """Fake cgroup files: groups made below get the files of a version-1 memory cgroup."""
    own = tmp_path / "memory" / "job"
    own.mkdir(parents=True)
    proc = tmp_path / "cgroup"
    proc.write_text("5:cpu:/job\n4:memory:/job\n0::/\n")
    return tmp_path, proc, own


def test_memory_folders_of_version_1_and_2(cgroups):
    root, proc, own = cgroups
    assert host.memory_folders(root, proc) == [own]
    (root / "cgroup.controllers").write_text("memory\n")
    (root / "a" / "b").mkdir(parents=True)
    proc.write_text("0::/a/b\n")
    assert host.memory_folders(root, proc) == [root / "a" / "b", root / "a"]


def test_no_group_is_a_reason_not_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "memory_folders", lambda: [])
    with host.memory_group(2**20) as group:
        assert group == "no memory cgroup is mounted here"
    # A plain folder has no limit file: writing one fails as it does without permission.
    locked = tmp_path / "missing"
    monkeypatch.setattr(host, "memory_folders", lambda: [locked])
    with host.memory_group(2**20) as group:
        assert isinstance(group, str)
        assert "could not be made" in group


def test_memory_group_counts_kills(tmp_path):
    group = host.MemoryGroup.__new__(host.MemoryGroup)
    group.folder = tmp_path
    assert not group.was_killed()
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert group.was_killed()


def test_a_real_memory_group_holds_its_limit():
    with host.memory_group(64 * 2**20) as group:
        if isinstance(group, str):
            pytest.skip(group)
        folder = group.folder
        limit = next(
            path
            for name in ("memory.limit_in_bytes", "memory.max")
            if (path := folder / name).exists()
        )
        assert int(limit.read_text()) == 64 * 2**20
    assert not folder.exists()


def test_priority_is_given_back():
    def now():
        return os.getpriority(os.PRIO_PROCESS, 0), host._autogroup_nice()

    before = now()
    with host.first_in_line():
        inside = now()
    assert now() == before
    assert inside[0] in (before[0], -20)


def measured(step_ms, **store):
    parts = [
        {"name": "prompt", "tokens": 128, "ms": [5.0]},
        {"name": "settle", "tokens": 4, "ms": [1.0] * 4},
        {"name": "decode", "tokens": len(step_ms), "ms": step_ms},
    ]
    if store:
        for part in parts:
            part |= {"callback_us": 9.0, "store": store}
            part["step_reads"] = [[store["needed_bytes"] / 8, 0]] * len(part["ms"])
    return {"parts": parts, "peak_rss": 50 * 2**20, "mode": "m"}


def counters(needed):
    """Of 8 decode steps that read so many bytes each."""
    return {
        "requests": 100,
        "hits": 60,
        "bytes": 8 * needed,
        "needed_bytes": 8 * needed,
        "wait_ms": 8.0,
        "prefetch_used": 0,
        "prefetch_wasted": 0,
        "routed": {"high": 75, "low": 25, "skip": 0},
        "budget_bytes": 2**20,
        "direct_io": True,
    }


@pytest.fixture
def faked(monkeypatch, no_disk):
    """run() with processes and the disk replaced: 10 ms resident, 1 GB/s, known misses."""
    jobs = []

    def spawn(self, job, group):
        jobs.append(job)
        if job.system == "upstream":
            if job.settings.get("mmap") and job.settings.get("extra_bufts"):
                return {"error": "does not fit: ended by the kernel, out of memory"}
            return measured([200.0] * 8 if job.settings["mmap"] else [8.0] * 8)
        if job.settings["policy"] == "plain":
            return measured([8.0] * 8)
        if job.settings.get("expert_ram") is None:
            result = measured([10.0] * 8, **counters(0.0))
            if job.routing:
                result["routing"] = {"tokens": 64, "use": [0.25] * 8, "exponent": 0.0}
            return result
        return measured([25.0] * 7 + [9000.0], **counters(2e7))

    monkeypatch.setattr(bench_loop.Loop, "_spawn", spawn)
    return Caps().run(BenchOptions(quick=True, caps=(0.6,), runs=2)), jobs


def test_bound_and_speedup_follow_from_what_was_measured(faked):
    report, _ = faked
    rows = {(row["name"], row["cap"]): row for row in report["cases"]}
    lru = rows["lru", 0.6]
    # 20 MB a token at 1 GB/s: 20 ms, more than the 10 ms of computing.
    assert lru["bound_tpot_ms"] == pytest.approx(20.0)
    assert lru["of_bound"] == pytest.approx(20 / 25)
    assert lru["speedup_mmap"] == pytest.approx(8.0)
    assert lru["hit_rate"] == pytest.approx(0.6)
    assert lru["mix"] == {"high": 0.75, "low": 0.25, "skip": 0.0}
    assert lru["callback_us_p50"] == 9.0
    assert "bound_tpot_ms" not in rows["our managed path", None]
    assert report["ratios"]["plain_of_best_upstream"] == pytest.approx(1.0)
    assert report["ratios"]["managed_of_upstream_without_repack"] == pytest.approx(0.8)
    json.dumps(report)


def test_a_failed_case_is_a_row_and_is_not_tried_again(faked):
    report, jobs = faked
    row = next(row for row in report["cases"] if row["name"] == "upstream mmap, repack")
    assert row["error"].startswith("does not fit")
    tries = [job for job in jobs if job.settings.get("mmap") and job.settings.get("extra_bufts")]
    assert len(tries) == 1


def test_runs_are_interleaved(faked):
    _, jobs = faked
    policies = [job.settings.get("policy") for job in jobs if job.system == "engine"]
    ours = ["plain", "lru", "lru", "dymoe", "dymoe", "dymoe", "dynaexq"]
    assert policies == 2 * [*ours, "plain"]  # the last one: a uniform type that fits whole


def test_table_fits_the_terminal_and_names_everything(faked):
    report, _ = faked
    text = Caps().text(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    for phrase in ("lru", "dymoe 4/2", "75/25/0", "80 %", "out of memory", "uniform routing"):
        assert phrase in text
    assert "resident, plain path: 1.00 of upstream" in text


def test_models_are_cached_and_stale_ones_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = BenchOptions(quick=True)
    notes = []
    high, low = bench_models.build_models(options, notes.append)
    assert len(notes) == 2
    stale = high.with_name("tiny-olmoe-uniform-0-q4_k-000000000000.gguf")
    stale.write_bytes(b"")
    assert bench_models.build_models(options, notes.append) == (high, low)
    assert len(notes) == 2
    high.unlink()
    bench_models.build_models(options, notes.append)
    assert not stale.exists()
    assert high.exists()


def test_a_child_that_dies_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\ncat >/dev/null\nkill -ILL $$\n")
    program.chmod(0o755)
    bench = bench_loop.Loop.__new__(bench_loop.Loop)
    assert bench._spawn(job(), None) == {"error": "died of SIGILL"}
    program.write_text("#!/bin/sh\necho 'no such thing' >&2\nexit 3\n")
    assert bench._spawn(job(), None) == {"error": "failed: no such thing"}


def test_quick_benchmark_end_to_end(real_engine):
    report = Caps().run(
        BenchOptions(quick=True, caps=(0.6,), tokens=8, warmup=2, runs=1, threads=1)
    )
    rows = {row["name"]: row for row in report["cases"]}
    failed = {name: row["error"] for name, row in rows.items() if "error" in row}
    assert not failed
    assert rows["dymoe 4/0"]["mix"]["skip"] > 0
    assert rows["dymoe 4/2"]["mix"]["low"] > 0
    assert rows["our managed path"]["hit_rate"] == 1.0
    assert rows["lru"]["hit_rate"] < 1.0
    assert sum(report["routing"]["use"]) == pytest.approx(2.0, rel=0.01)
