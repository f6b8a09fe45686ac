"""The studies of votes in FIRM-MoE: strategies by hand, and the loss of an invented trace."""

import sys
from pathlib import Path

import numpy as np
import pytest

from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.replay import ReplayOptions
from orchestrator.lab.study.firm import (
    BASE,
    NO_PREFETCH,
    Played,
    compared_variants,
    expert_bytes,
    measure_votes,
    parts,
)
from orchestrator.lab.study.votes import strategies, union, weighted
from orchestrator.policy import POLICIES

sys.path.append(str(Path(__file__).parents[2] / "replay"))
from traces import make_trace

VOTES = [[5, 2, 7, 1], [2, 5, 9, 7], [7, 2, 4, 5]]


def test_ways_to_predict():
    """Strategies give the predictions by hand. Expert 5 has the weight 1.5 + 1.0 + 0.5 if the third
    layer's last candidate counts; expert 7 then has it too."""
    assert union(VOTES, 2, 2) == [5, 2]
    assert union(VOTES, 4, 3) == [5, 2, 7, 1, 9, 4]
    assert weighted(VOTES, 4, 3.0) == [5, 2, 7]
    assert weighted(VOTES, 3, 2.0) == [5, 2, 7]  # weights 2.5, 3.0 and 2.0
    assert weighted(VOTES, 3, 2.5) == [5, 2]
    assert weighted(VOTES[:2], 4, 3.0) == [5, 2, 7]  # only two layers vote
    scores = [1.0, 0.5, 0.3, 0.1]
    named = {label: predict(VOTES, scores) for label, (_, predict) in strategies(4, 4).items()}
    assert named["top 2"] == [5, 2]
    assert named["MoL K=4 P=3"] == named["weighted >= 3.0"] == [5, 2, 7]
    assert named["margin, K=2"] == [5, 2, 7]  # at least twice the last score


@pytest.mark.parametrize("k", [2, 8])
def test_parts_are_the_papers(k):
    """All parts have valid settings. K = P = 3, limited by the experts per token."""
    by_base = parts(k)
    listed = [part for several in by_base.values() for part in several]
    assert len({part.name for part in listed}) == len(listed)
    for part in listed:
        POLICIES[part.policy].Settings.of(part.settings)
    paper = {part.name: part for part in by_base[BASE]}
    assert all(part.changes["link"] == "rigid" for part in paper.values())
    assert ["wait" in part.changes for part in paper.values()] == [True, False, True, False, False]
    assert paper["+ FG + MoL"].settings["votes"] == f"{min(3, k)},3"


@pytest.fixture
def trace():
    """A trace where layer 2 is predicted correctly by layer 1 and wrongly by layer 0."""
    rng = np.random.default_rng(0)
    steps, ahead = [], []
    for _ in range(40):
        chosen = [rng.permutation(8)[:2] for _ in range(3)]
        steps.append((Phase.DECODE, [each[None] for each in chosen]))
        wrong = np.array([e for e in range(8) if e not in chosen[2]])[:2]
        ahead.append([np.stack([chosen[1], wrong])[:, None], chosen[2][None, None], []])
        ahead[-1][2] = np.zeros((0, 1, 2))
    return make_trace(steps, ahead)


def test_the_parts_over_a_trace(library, trace):
    on = Played(library, trace, ReplayOptions(bandwidth=50_000_000, compute_ms=2.0))
    for base in (NO_PREFETCH, BASE):
        table, panel = compared_variants(on, base, (0.1, 0.5, 0.8))
        assert len(panel.lines) == len(parts(2)[base])
        said = "Not measured: a cache with slots for 10% of the experts, because it is too small "
        said += "for one of the policies."
        assert table.footnotes[-1] == said
        for held in (0.5, 0.8):
            rows = {row["name"]: row for row in table.rows if row["held"] == held}
            assert rows[base]["speedup"] == 1.0 and 0 < rows[base]["hit_rate"] < 1
            # Each of 40 tokens computes for 2 ms.
            assert all(0 < row["answer_tokens_per_s"] <= 1000 / 2 for row in rows.values())
            if base == NO_PREFETCH:
                # Reads of single matrices are waited for one at a time, which is never slower than
                # waiting for all.
                assert rows["waits for whole experts"]["speedup"] <= 1.0
                one, every = rows["firm, rank, n=1"], rows["firm, rank, n=3"]
                assert one["bytes_ratio"] <= every["bytes_ratio"] and one["votes"]
                assert rows[base]["votes"] == rows["lru"]["votes"] == ""
    took_ms = on.answer(parts(2)[NO_PREFETCH][0], int(0.5 * expert_bytes(trace)))
    assert len(took_ms) == 40 and (np.diff(took_ms) >= 2.0 - 1e-3).all()
    with pytest.raises(ConfigError, match="slots for 10% of the experts cannot hold"):
        compared_variants(on, BASE, (0.1,))


def test_the_loss_of_a_trace(library, trace):
    """The best vote uses one layer, and tuning finds it."""
    found = measure_votes(Played(library, trace, ReplayOptions()))
    (table,) = found.tables
    assert "(off-policy): " in table.footnotes[4] and "in-sample: " in table.footnotes[5]
    deep = next(row for row in table.rows if row["group"] == "deep")
    losses = deep["losses"]
    assert losses[0][1] == 0.0 < losses[0][0] < losses[1][1]
    assert deep["all"] == (2, 1)
    assert table.title.startswith("Wrong and missing predictions of experts per layer and token")
