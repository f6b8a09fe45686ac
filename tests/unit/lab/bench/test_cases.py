"""The six rows of DyMoE's Table 3, and prompts of several sequences."""

import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.lab.bench.benchmark import token_slot_bytes
from orchestrator.lab.bench.cases import (
    CACHE,
    CACHE_AHEAD,
    MIXED,
    MIXED_AHEAD,
    ON_DEMAND,
    PAPER,
    SKIP_AHEAD,
    paper_rows,
)
from orchestrator.lab.bench.child import DECODE, PROMPT, PROMPTS, Part, longest_context, play
from orchestrator.lab.bench.gpu import add_over_demand
from orchestrator.plan.footprint import model_shape
from orchestrator.policy.base import place
from orchestrator.policy.lru import LRU


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


def test_speedups_refer_to_load_on_demand_under_the_same_cap():
    rows = [
        {"name": name, "cap": cap, "tpot_ms_p50_runs": [ms], "ttft_ms_runs": [3 * ms]}
        for cap in (0.6, 0.8)
        for name, ms in ((ON_DEMAND, 100.0 * cap), (CACHE, 50.0 * cap))
    ]
    add_over_demand(rows)
    for row in rows:
        expected = 1.0 if row["name"] == ON_DEMAND else 2.0
        assert row["speedup_tpot"] == row["speedup_ttft"] == pytest.approx(expected)


class Told:
    """A model that records the calls it receives."""

    def __init__(self):
        self.calls = []

    def reset(self):
        self.calls.append("reset")

    def eval(self, tokens, pos):
        self.calls.append((tokens, pos))

    def fork(self, sequence):
        self.calls.append(f"fork {sequence}")

    def decode_batch(self, tokens, sequences):
        self.calls.append((tokens, list(sequences)))


def test_sequences_have_prompts_of_their_own_or_share_the_last_one():
    """Tokens are drawn as 0, 1, 2, .. for the first parts and go on from there."""
    parts = [
        Part(PROMPTS, PROMPTS, 2, sequences=2),
        Part(DECODE, DECODE, 1, 60.0, 1, 2),
        Part(PROMPT, PROMPT, 3),
        Part(DECODE, DECODE, 1, 60.0, 1, 2),
    ]
    drawn, told = iter(range(100)), Told()
    found = play(parts, told, lambda n: [next(drawn) for _ in range(n)])
    apart = ["reset", ([0, 1], 0), "fork 0", ([2, 3], 0), "fork 1", ([4, 5], [0, 1])]
    shared = ["reset", ([6, 7, 8], 0), "fork 0", "fork 1", ([9, 10], [0, 1])]
    assert told.calls == apart + shared
    assert [len(part["ms"]) for part in found] == [2, 1, 1, 1]
    assert [part["tokens"] for part in found] == [4, 2, 3, 2]
    assert longest_context(parts) == 256
    assert longest_context([Part(PROMPTS, PROMPTS, 64, sequences=8)]) == 768
