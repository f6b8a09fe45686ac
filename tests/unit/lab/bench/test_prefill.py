import json
from itertools import pairwise

import pytest

from orchestrator.errors import ConfigError
from orchestrator.lab.bench import loop
from orchestrator.lab.bench.ablation import CACHE_AHEAD, MIXED_AHEAD, SKIP_AHEAD
from orchestrator.lab.bench.cases import MANAGED
from orchestrator.lab.bench.job import DECODE, PROMPT
from orchestrator.lab.bench.prefill import ALL_SLOTS, Prefill, PrefillOptions, prefill_cases
from orchestrator.lab.lists import parse_numbers
from orchestrator.lab.table import WIDTH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ()}, "at least 2 tokens"),
        ({"prompts": (8, 1)}, "at least 2 tokens"),
        ({"prompts": (8, 8)}, "prompts must differ"),
        ({"repeats": 0}, "'repeats' must be 1 or more, not 0"),
        ({"ubatch": 0}, "'ubatch' must be 1 or more, not 0"),
        ({"long": -1}, "'long' must be 0 or more, not -1"),
        ({"prefetch": "off"}, "'prefetch' must be on or auto, not 'off'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        PrefillOptions(**options)


def test_lengths_are_numbers():
    assert parse_numbers("8, 16") == (8, 16)
    for wrong in ("8,,", "8;16"):
        message = f"'{wrong}' is no list of prompt lengths such as 8,16,32"
        with pytest.raises(ConfigError, match=message):
            parse_numbers(wrong, "prompt lengths")


def test_every_prompt_finds_what_decoding_left():
    parts = PrefillOptions(prompts=(8, 32), repeats=2, tokens=16, long=300).parts()
    kinds = [(part.name, part.kind) for part in parts]
    for before, (name, kind) in pairwise(kinds):
        if kind == PROMPT:
            assert before[1] == DECODE, name
    assert [name for name, _ in kinds].count("prompt 32") == 2
    assert [(part.name, part.n) for part in parts[-3:]] == [
        ("before", 16),
        ("long", 300),
        ("after", 16),
    ]
    assert "long" not in {part.name for part in PrefillOptions(long=0).parts()}
    assert (PrefillOptions().long_tokens, PrefillOptions(shape="demo").long_tokens) == (1024, 512)


def test_the_rule_for_prompts_is_measured_against_itself():
    cases = {case.name: case.settings for case in prefill_cases(PrefillOptions(caps=(0.6,)))}
    assert cases[ALL_SLOTS] == cases[CACHE_AHEAD] | {"prompts_pass": False}


def fake_run(job):
    """Prompts take 2 ms a token; 4/2 is twice as fast, 4/0 four times; decoding after the long
    prompt is half as fast as before."""
    low = job.settings.get("low_tier")
    factor = {None: 1.0, "q2_k": 2.0, "skip": 4.0}[low]
    parts = []
    for part in job.parts:
        ms = 10.0 if part.name == "before" else 20.0
        times = [2.0 * part.n / factor] if part.kind == PROMPT else [ms] * part.n
        store = {
            "requests": 10,
            "hits": 2 if part.name == "after" else 8,
            "bytes": 1e6 * part.n,
            "needed_bytes": 1e6 * part.n,
            "wait_ms": 0.5 * sum(times),
            "routed": {"high": 4, "low": 0, "skip": 0},
            "budget_bytes": 2**20,
            "direct_io": True,
        }
        parts.append(
            {"name": part.name, "tokens": part.n, "ms": times, "store": store, "callback_us": 9.0}
        )
    return {"parts": parts, "peak_rss": 50 * 2**20, "mode": "m", "policy": {}}


@pytest.fixture
def report(monkeypatch, no_disk):
    def spawn(self, job, group):
        assert job.n_ubatch == 64
        return fake_run(job)

    monkeypatch.setattr(loop.Loop, "_spawn", spawn)
    options = PrefillOptions(
        quick=True, caps=(0.6,), runs=2, prompts=(8, 32), tokens=9, long=300, ubatch=64
    )
    return Prefill().run(options)


def test_ratios_refer_to_one_precision(report):
    rows = {(row["name"], row["cap"]): row for row in report["cases"]}
    assert set(rows) == {
        (MANAGED, None),
        ("lru", 0.6),
        (CACHE_AHEAD, 0.6),
        (ALL_SLOTS, 0.6),
        (MIXED_AHEAD, 0.6),
        (SKIP_AHEAD, 0.6),
    }
    one, mixed = rows[CACHE_AHEAD, 0.6], rows[MIXED_AHEAD, 0.6]
    assert [(each["tokens"], each["ms"]) for each in one["prompts"]] == [(8, 16.0), (32, 64.0)]
    assert [each["speedup"] for each in mixed["prompts"]] == [2.0, 2.0]
    assert [each["speedup"] for each in rows[SKIP_AHEAD, 0.6]["prompts"]] == [4.0, 4.0]
    assert "speedup" not in rows[MANAGED, None]["prompts"][0]
    assert mixed["prompts"][1]["waited"] == pytest.approx(0.5)
    assert mixed["prompts"][1]["bytes"] == pytest.approx(32e6)  # of one prompt
    json.dumps(report)


def test_a_long_prompt_is_seen_from_both_sides(report):
    long = next(row["long"] for row in report["cases"] if row["name"] == CACHE_AHEAD)
    assert (long["before"]["hit_rate"], long["after"]["hit_rate"]) == (0.8, 0.2)
    assert long["slower_after"] == 2.0
    assert long["long"]["ms"] == 600.0
    assert long["after"]["bytes"] == pytest.approx(1e6)  # of one token


def test_table_fits_the_terminal_and_names_everything(report):
    text = Prefill().text(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    for phrase in ("one precision", "4/2", "4/0", "all in memory", "lru", "chunks of 64", "2.00"):
        assert phrase in text


def test_quick_prefill_end_to_end(real_engine):
    options = PrefillOptions(
        quick=True,
        caps=(0.6,),
        runs=1,
        threads=1,
        prompts=(4, 24),
        repeats=1,
        tokens=12,
        warmup=4,
        long=96,
        ubatch=32,
    )
    report = Prefill().run(options)
    rows = {row["name"]: row for row in report["cases"]}
    assert not [row["error"] for row in rows.values() if "error" in row]
    for name in (CACHE_AHEAD, ALL_SLOTS, MIXED_AHEAD, SKIP_AHEAD, "lru"):
        short = rows[name]["prompts"][0]
        assert 0 < short["hit_rate"] < 1
        assert short["bytes"] > 0
        assert rows[name]["long"]["long"]["ms"] > 0
        assert rows[name]["long"]["before"]["hit_rate"] > 0
    assert rows[MANAGED]["prompts"][0]["hit_rate"] == 1.0
    assert rows[MANAGED]["prompts"][0]["bytes"] == 0
    assert "96 tokens in chunks of 32" in Prefill().text(report)
