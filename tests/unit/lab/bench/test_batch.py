"""The benchmark of sequences that decode together: its parts, and what its figures follow from."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from orchestrator.errors import ConfigError
from orchestrator.lab.bench.batch import Batch, BatchOptions, batch_cases, batch_name, batch_row
from orchestrator.lab.bench.child import play
from orchestrator.lab.bench.job import DECODE, PROMPT, longest_context


@pytest.mark.parametrize("batches", [(), (0, 1), (4, 4), (1, 256)])
def test_bad_batches_are_named(batches):
    with pytest.raises(ConfigError, match="batches"):
        BatchOptions(batches=batches)


def test_each_batch_has_a_prompt_of_its_own():
    options = BatchOptions(tokens=10, prompt_tokens=7, batches=(1, 3, 40))
    parts = options.parts()[2:]
    assert [part.kind for part in parts] == 3 * [PROMPT, DECODE]
    assert [part.sequences for part in parts] == [0, 1, 0, 3, 0, 40]
    assert (options.sequences, options.n_ubatch) == (40, 40)
    assert longest_context(parts) == 512  # 7 + 40 * 10 cells
    assert longest_context(parts, shared=False) == 256
    assert BatchOptions(batches=(2,)).n_ubatch == 32
    names = [case.name for case in batch_cases(options)]
    assert names[1:] == ["lru", "dymoe 4, r=1", "dymoe 4/2", "dynaexq 4/2"]


def test_each_sequence_gets_its_own_tokens():
    """They fork from the prompt, and go on with pieces of their own."""

    class Together:
        def __init__(self):
            self.forked, self.steps = [], []

        def fork(self, n):
            self.forked.append((n, len(self.steps)))

        def step(self, tokens):
            self.steps.append(tokens)

    numbers = iter(range(10**6))
    together, alone = Together(), []
    options = BatchOptions(tokens=3, prompt_tokens=2, warmup=1, batches=(2, 3))
    done = play(
        options.parts(),
        lambda tokens, pos: alone.append((tokens, pos)),
        lambda n: [next(numbers) for _ in range(n)],
        lambda result: nullcontext(),
        together=together,
    )
    assert alone == [([0, 1], 0), ([2], 2), ([3, 4], 0), ([11, 12], 0)]
    assert together.forked == [(2, 0), (3, 3)]
    assert together.steps == [[5, 8], [6, 9], [7, 10], [13, 16, 19], [14, 17, 20], [15, 18, 21]]
    assert [part["tokens"] for part in done if part["name"].startswith("batch")] == [6, 9]


def run(ms, high, low, requests=30, hits=24):
    store = {
        "requests": requests,
        "hits": hits,
        "bytes": 8000,
        "needed_bytes": 0,
        "wait_ms": 6.0,
        "routed": {"high": high, "low": low, "skip": 0},
    }
    return {"mode": "m", "parts": [{"name": "batch 4", "tokens": 8, "ms": ms, "store": store}]}


def test_figures_follow_from_what_was_measured():
    """Two steps of four tokens, in two layers; 12 different experts, so three a layer and step."""
    case = batch_cases(BatchOptions())[1]
    row = batch_row(case, 4, [run([4.0, 6.0], 9, 3), run([2.0, 2.0], 9, 3)], 1 << 30, 2)
    assert row["step_ms_p50"] == (5.0 + 2.0) / 2
    assert row["tokens_per_s"] == pytest.approx(4e3 / 3.5)
    assert row["tokens_per_s_each"] == pytest.approx(1e3 / 3.5)
    assert (row["hit_rate"], row["experts"]) == (0.8, 3.0)
    assert row["mix"] == {"high": 0.75, "low": 0.25, "skip": 0.0}
    assert row["bytes_per_token"] == 1000.0
    assert row["wait_ms_per_step"] == 3.0
    assert batch_row(case, 4, [{"error": "no"}], None, 2)["error"] == "no"


def test_quick_batches_end_to_end(real_engine):
    options = BatchOptions(quick=True, runs=1, tokens=8, batches=(1, 5), threads=1, caps=(0.99,))
    report = Batch().run(options)
    rows = {(row["name"], row["batch"]): row for row in report["cases"]}
    assert not any("error" in row for row in rows.values())
    for name in ("our managed path", "dynaexq 4/2"):
        assert rows[name, 1]["hit_rate"] == rows[name, 5]["hit_rate"] == 1.0
    assert rows["lru", 5]["hit_rate"] < 1.0
    assert rows["lru", 1]["experts"] == report["model"]["n_expert_used"]
    assert rows["lru", 1]["experts"] < rows["lru", 5]["experts"] <= report["model"]["n_expert"]
    text = Batch().text(report)
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("note"))
    for name, n in rows:
        assert name in text
        assert batch_name(n) not in text  # a name between processes
    assert "5 together" in text
    json.dumps(report)
