"""`moe-edge check` on converted families: every run equals llama.cpp bit for bit and uses at most
the planned memory."""

import os

import pytest

from orchestrator.config import Config
from orchestrator.lab.check import CheckOptions, examine

from .families import FAMILIES

# Read at import, because the environment of each test lacks variables of this kind.
ALL = bool(os.environ.get("MOE_EDGE_SLOW"))


@pytest.mark.parametrize("name", FAMILIES)
def test_check_finds_no_problem_in_a_family(name, case, monkeypatch):
    if not ALL and name != "gpt-oss":
        pytest.skip("starts nine processes: set MOE_EDGE_SLOW=1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    config = Config.build(model=case(name).packed, ctx=256, threads=1)
    report = examine(config, CheckOptions(all_tiers=ALL), lambda label, share: None)
    assert report["problems"] == []
    assert len(report["tiers"]) == 1 + ALL
    for tier in report["tiers"]:
        assert [run["compared"]["equal"] for run in tier["runs"]] == [True] * 3
        assert [run["compared"]["rows"] for run in tier["runs"]] == [65] * 3
