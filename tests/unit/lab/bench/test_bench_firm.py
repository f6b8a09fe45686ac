"""`moe-edge bench firm`: its rows, and a small run in virtual time."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.errors import ConfigError, SettingError
from orchestrator.lab.bench.firm import (
    BASE,
    LENGTH_ROWS,
    NO_PREFETCH,
    OURS,
    PAPERS,
    live_cases,
    played_rows,
)
from orchestrator.lab.bench.firm import FirmOptions as Options
from orchestrator.policy import POLICIES
from orchestrator.policy.firm import AGREE_WAYS


@pytest.mark.parametrize("k", [2, 8])
def test_rows_are_the_papers(k: int) -> None:
    """Settings that policies take; K = P = 3, as far as the model has as many experts a token."""
    rows = {row.name: row for row in played_rows(k)}
    assert len(rows) == len(played_rows(k))
    for row in rows.values():
        POLICIES[row.policy].Settings.of(row.settings)
    paper = [row for row in rows.values() if row.world == PAPERS]
    assert all(row.changes["link"] == "rigid" for row in paper)
    assert ["wait" in row.changes for row in paper] == [True, False, True, False, False]
    assert rows["+ FG + MoL"].settings["votes"] == f"{min(3, k)},3"
    assert rows[NO_PREFETCH].world == OURS
    votes = [row.name.split(", ")[1] for row in rows.values() if ", n=" in row.name]
    assert set(votes) == set(AGREE_WAYS)  # no row leaves its vote to the default


def test_live_rows_are_those_of_our_own_that_exist() -> None:
    assert live_cases(Options()) == []
    keys = [case.key for case in live_cases(Options(live=True, caps=(0.6,)))]
    ours = [f"firm, rank, n={n}" for n in (1, 2, 3)]
    names = ["lru", NO_PREFETCH, "dymoe, r=1", *ours]
    assert keys == ["our managed path", *(f"{name} @60%" for name in names)]
    with pytest.raises(SettingError):
        Options(bandwidth=0)


@pytest.mark.parametrize("given", [{"prompts": (8,)}, {"prompts": (8,), "answers": (1,)}])
def test_lengths_that_make_no_table(given: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError):
        Options(**given)


def test_a_small_run(real_engine: None) -> None:
    options = ["--quick", "--tokens", "24", "--caps", "50", "--runs", "1", "--threads", "1"]
    options += ["--bandwidth", "50MB", "--prompts", "4,16", "--answers", "6,24"]
    done = CliRunner().invoke(cli, ["bench", "firm", *options, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    rows = {(row["name"], row["world"]): row for row in report["cases"]}
    assert rows[NO_PREFETCH, OURS]["speedup"] == rows[BASE, PAPERS]["speedup"] == 1.0
    # reads of single matrices are waited for one by one: never slower than for all of them
    assert rows["whole experts waited for", OURS]["speedup"] < 1.0
    one, all_of_it = rows["firm, rank, n=1", OURS], rows["firm, rank, n=3", OURS]
    assert one["bytes_ratio"] <= all_of_it["bytes_ratio"]
    assert rows[NO_PREFETCH, OURS]["hit_rate"] > 0
    lengths = [(row["prompt"], row["answer"]) for row in report["lengths"]]
    assert lengths == [(4, 6), (4, 24), (16, 6), (16, 24)]
    for name in LENGTH_ROWS:
        short, long = report["lengths"][0][name], report["lengths"][1][name]
        assert 0 < 6 / short < 24 / long  # seconds


def test_a_small_run_with_live_rows(real_engine: None) -> None:
    """Its tables too: they are made of both kinds of rows."""
    options = ["--quick", "--tokens", "8", "--caps", "50", "--runs", "1", "--threads", "1"]
    rows = ["--rows", f"managed,{NO_PREFETCH},n=1"]
    done = CliRunner().invoke(
        cli, ["bench", "firm", *options, *rows, "--bandwidth", "50MB", "--live"]
    )
    assert done.exit_code == 0, done.output
    live, virtual = done.stdout.split(OURS)[0], done.stdout.split(OURS)[1]
    assert "everything resident" in live and "everything resident" not in virtual
    assert f"{NO_PREFETCH}: peak" in live
    assert "rank, n=3" in virtual and "rank, n=3" not in live
