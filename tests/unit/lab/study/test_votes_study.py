"""The studies of votes in FIRM-MoE: strategies by hand, and the loss of an invented trace."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.events import Phase
from orchestrator.lab.replay import write_trace
from orchestrator.lab.study.firm import BASE, NO_PREFETCH, parts
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
    named = {label: predict(VOTES, scores) for label, (_, predict) in strategies(4).items()}
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
def trace(tmp_path):
    """A trace where layer 2 is predicted correctly by layer 1 and wrongly by layer 0."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    rng = np.random.default_rng(0)
    steps, ahead = [], []
    for _ in range(40):
        chosen = [rng.permutation(8)[:2] for _ in range(3)]
        steps.append((Phase.DECODE, [each[None] for each in chosen]))
        wrong = np.array([e for e in range(8) if e not in chosen[2]])[:2]
        ahead.append([np.stack([chosen[1], wrong])[:, None], chosen[2][None, None], []])
        ahead[-1][2] = np.zeros((0, 1, 2))
    write_trace(tmp_path / "t.npz", make_trace(steps, ahead))
    return tmp_path / "t.npz"


def test_the_parts_over_a_trace(library, trace, tmp_path):
    options = ["--bandwidth", "50MB", "--compute-ms", "2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, ["replay", str(trace), "--study", "firm", *options, "--json"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "firm.png").read_bytes()[1:4] == b"PNG"
    for table in json.loads(done.stdout)["tables"]:
        for held in {row["held"] for row in table["data"]}:
            rows = {row["name"]: row for row in table["data"] if row["held"] == held}
            base = NO_PREFETCH if NO_PREFETCH in rows else BASE
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


def test_the_loss_of_a_trace(library, trace, tmp_path):
    """The best vote uses one layer, and tuning finds it."""
    out = tmp_path / "out"
    arguments = ["replay", str(trace), "--study", "votes-loss", "--policy", "firm"]
    done = CliRunner().invoke(cli, [*arguments, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "votes-loss.png").read_bytes()[1:4] == b"PNG"
    shown = (out / "votes-loss.md").read_text()
    assert "Off-policy: " in shown and "In-sample: " in shown
    (table,) = json.loads((out / "votes-loss.json").read_text())["tables"]
    deep = next(row for row in table["rows"] if row["group"] == "deep")
    losses = deep["losses"]
    assert losses[0][1] == 0.0 < losses[0][0] < losses[1][1]
    assert deep["all"] == [2, 1]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 1 and "give --out DIR" in refused.stderr
    refused = CliRunner().invoke(cli, [*arguments, "--out", str(out), "--expert-ram", "64MiB"])
    assert "all experts were in memory" not in refused.stderr  # every expert was loaded once
    refused = CliRunner().invoke(cli, ["replay", str(trace), "--out", str(out)])
    assert refused.exit_code == 2 and "add --study NAME" in refused.stderr
