"""`moe-edge bench firm`: its rows, and a small run in virtual time."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.errors import SettingError
from orchestrator.lab.bench.firm import BASE, NO_PREFETCH, FirmOptions, our_rows, papers_rows
from orchestrator.policy import POLICIES


@pytest.mark.parametrize("k", [2, 8])
def test_rows_are_the_papers(k: int) -> None:
    """Settings that policies take; K = P = 3, as far as the model has as many experts a token."""
    paper = {row.name: row for row in papers_rows(k)}
    ours = {row.name: row for row in our_rows()}
    assert not paper.keys() & ours.keys()
    for row in (*paper.values(), *ours.values()):
        POLICIES[row.policy].Settings.of(row.settings)
    assert all(row.changes["link"] == "rigid" for row in paper.values())
    assert ["wait" in row.changes for row in paper.values()] == [True, False, True, False, False]
    assert paper["+ FG + MoL"].settings["votes"] == f"{min(3, k)},3"
    assert NO_PREFETCH in ours and BASE in paper
    with pytest.raises(SettingError):
        FirmOptions(bandwidth=0)


def test_a_small_run(real_engine: None) -> None:
    options = ["--quick", "--tokens", "24", "--caps", "50", "--threads", "1", "--compute-ms", "2"]
    done = CliRunner().invoke(
        cli, ["bench", "firm", *options, "--bandwidth", "50MB", "--prompt-tokens", "4", "--json"]
    )
    assert done.exit_code == 0, done.output
    ours, papers = json.loads(done.stdout)["tables"]
    rows = {row["name"]: row for row in (*ours["data"], *papers["data"])}
    assert rows[NO_PREFETCH]["speedup"] == rows[BASE]["speedup"] == 1.0
    # reads of single matrices are waited for one by one: never slower than for all of them
    assert rows["whole experts waited for"]["speedup"] < 1.0
    one, all_of_it = rows["firm, rank, n=1"], rows["firm, rank, n=3"]
    assert one["bytes_ratio"] <= all_of_it["bytes_ratio"]
    assert rows[NO_PREFETCH]["hit_rate"] > 0
    # The prompt and each of 24 tokens compute for 2 ms.
    fastest = 1000 * 24 / (25 * 2)
    assert all(0 < row["answer_tokens_per_s"] <= fastest for row in rows.values())
