"""Shared parts of all benchmarks: options, parts of a run, machine, models, and the loop."""

import shutil
import sys
from types import SimpleNamespace

import pytest

from orchestrator.errors import ConfigError, MoeEdgeError
from orchestrator.lab import children as host
from orchestrator.lab.bench import models
from orchestrator.lab.bench.benchmark import Benchmark
from orchestrator.lab.bench.caps import CapOptions, Caps
from orchestrator.lab.bench.child import (
    MIN_STEPS,
    Job,
    decode,
    longest_context,
    play,
    prompt,
    settle,
    token_stream,
)
from orchestrator.lab.bench.options import BenchOptions
from orchestrator.native.abi import WAITS


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


class Played:
    """A model that computes nothing and records its calls."""

    def __init__(self):
        self.calls, self.forked, self.steps, self.resets = [], [], [], 0

    def eval(self, tokens, pos):
        self.calls.append((tokens, pos))

    def fork(self, sequence):
        self.forked.append((sequence, len(self.steps)))

    def decode_batch(self, tokens, sequences):
        self.steps.append((tokens, list(sequences)))

    def reset(self):
        self.resets += 1


def timed(parts):
    """(results, calls (tokens, pos)) of play()."""
    model = Played()
    return play(parts, model, token_stream(1, 320)), model.calls


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


def test_parts_have_a_time_limit_that_does_not_change_later_tokens():
    results, calls = timed([prompt(16), settle(4, 0.0), decode(20, 0.0), prompt(8)])
    assert [len(each["ms"]) for each in results] == [1, 1, MIN_STEPS, 1]
    patient = timed([prompt(16), settle(4, 60.0), decode(20, 60.0), prompt(8)])[1]
    assert calls[-1] == patient[-1]
    assert calls[-1][1] == 0  # a prompt starts a new conversation


def test_each_sequence_gets_its_own_tokens():
    """All sequences fork from the prompt and continue with different tokens."""
    numbers = iter(range(10**6))
    model = Played()
    parts = CapOptions(tokens=3, prompt_tokens=2, warmup=1, together=2).parts()
    done = play(parts, model, lambda n: [next(numbers) for _ in range(n)])
    assert model.calls == [([0, 1], 0), ([2], 2)]
    assert model.forked == [(0, 0), (1, 0)]
    assert model.steps == [([3, 6], [0, 1]), ([4, 7], [0, 1]), ([5, 8], [0, 1])]
    assert model.resets == 1 and done[-1]["tokens"] == 6
    options = CapOptions(tokens=10, prompt_tokens=7, together=40)
    assert (options.sequences, options.n_ubatch) == (40, 40)
    assert longest_context(options.parts()) == 512  # 7 + 16 + 40 * 10 KV cells
    assert longest_context(options.parts(), shared=False) == 256


def test_a_part_has_the_counters_of_its_own_steps():
    """A part's result has demand and prefetched bytes for each of its steps, and the store's
    counters during it."""

    class Store:
        calls = 3

        def __init__(self):
            self.read = 0

        def reset_stats(self):
            self.read = 0

        def stats(self):
            keys = ("demand_bytes", "prefetch_bytes", "requests", "hits", "copy_bytes")
            keys += ("host_computed_bytes", "host_computed")
            found = SimpleNamespace(**{key: [0, 0] for key in keys})
            found.demand_bytes, found.prefetch_bytes = [0, self.read], [0, 2 * self.read]
            found.routed = [[0, 0, 0], [3, 2, 1]]
            found.prefetch_used, found.prefetch_wasted, found.budget_bytes = 3, 1, 9
            found.transition_bytes = found.transitions_begun = found.table_writes = 0
            found.locks, found.waited_ns = [0, 0], [[0] * len(WAITS)] * 2
            return found

        def callback_us(self, since):
            return 10.0 * since

    store = Store()

    class Reads(Played):
        def eval(self, tokens, pos):
            store.read += len(tokens)

    first, last = play([prompt(2), decode(3, 60.0)], Reads(), lambda n: [7] * n, store)
    assert first["step_reads"] == [[2, 4]]
    assert last["step_reads"] == [[1, 2]] * 3
    assert last["callback_us"] == 30.0
    counted = last["store"]
    assert (counted["bytes"], counted["needed_bytes"]) == (9, 3 + 0.75 * 6)
    assert counted["routed"] == {"high": 3, "low": 2, "skip": 1}


def test_a_context_beyond_the_model_is_refused_before_measuring(no_disk):
    options = CapOptions(shape="demo", prompt_tokens=900, tokens=300)
    with pytest.raises(ConfigError, match="context of 1280 tokens, the model was trained for 1024"):
        Caps().run(options)


def test_a_missing_memory_cgroup_gives_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "memory_folders", lambda: [])
    with host.memory_group(2**20) as group:
        assert group == "no memory cgroup is mounted here"
    # In a plain folder the limit file cannot be written, as without permission.
    monkeypatch.setattr(host, "memory_folders", lambda: [tmp_path / "missing"])
    with host.memory_group(2**20) as group:
        assert isinstance(group, str)
        assert "cannot be created" in group


def test_a_memory_cgroup_has_its_limit():
    with host.memory_group(64 * 2**20) as group:
        if isinstance(group, str):
            pytest.skip(group)
        limits = [group.with_name(name) for name in ("memory.limit_in_bytes", "memory.max")]
        (limit,) = (path for path in limits if path.exists())
        assert int(limit.read_text()) == 64 * 2**20
    assert not group.parent.exists()


def test_models_are_cached_and_stale_ones_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notes = []

    def build():
        return models.build_models(BenchOptions(quick=True), ("q4_k", "q2_k"), notes.append)

    high, low = build()
    assert len(notes) == 2
    stale = high.with_name("tiny-olmoe-uniform-0-q4_k-000000000000.gguf")
    stale.write_bytes(b"")
    assert build() == [high, low]
    assert len(notes) == 2
    high.unlink()
    build()
    assert not stale.exists()
    assert high.exists()


def test_a_full_disk_is_reported_before_writing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = BenchOptions(shape="qwen3-30b", layers=48)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=20 * 10**9))
    notes = []
    with pytest.raises(MoeEdgeError, match=r"needs 25\.12 GiB, and .* has 18\.63 GiB"):
        models.build_models(options, ("q4_k", "q2_k"), notes.append)
    assert "writing model files of 25.12 GiB" in notes[0]
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kill -ILL $$", "the process was ended by SIGILL"),
        ("kill -KILL $$", "the process was killed (SIGKILL), probably because memory ran out"),
        ("echo 'no such thing' >&2; exit 3", "the process failed: no such thing"),
        ("exec sleep 60", "the process exceeded its time limit of 0 s"),
    ],
)
def test_a_child_that_does_not_answer_is_reported(monkeypatch, tmp_path, line, said):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat >/dev/null\n{line}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    if "sleep" in line:
        monkeypatch.setattr("orchestrator.lab.bench.benchmark.START_SECONDS", 0.2)
    assert Benchmark._spawn(job(parts=[])) == {"error": said}
