"""`moe-edge bench`: its options, which the experiments declare, and what they become."""

import json

import pytest
from command_line import run
from tables import cases

from orchestrator.lab.registry import BENCHMARKS, load
from orchestrator.lab.table import Report

BELOW = [name for name in BENCHMARKS if name]


@pytest.fixture
def measured(monkeypatch):
    """measured(name): the options that a benchmark is run with, in the place of running it."""

    def replace(name):
        seen, benchmark = [], type(load(BENCHMARKS, name))
        report = Report(["heading"], [], [])
        monkeypatch.setattr(
            benchmark, "run", lambda self, options, note: seen.append(options) or report
        )
        return seen

    return replace


@cases(
    "name, args, options",
    (
        "",
        ["--caps", "50", "--routing", "zipf", "--quick", "--tokens", "9"],
        {"caps": (0.5,), "routing": "zipf", "quick": True, "tokens": 9},
    ),
    *[
        (name, ["--shape", "demo", "--threads", "1"], {"shape": "demo", "threads": 1})
        for name in BELOW
    ],
)
def test_a_benchmark_gets_its_options(measured, name, args, options):
    seen = measured(name)
    result = run("bench", *name.split(), *args)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "heading\n"
    assert seen == [load(BENCHMARKS, name).options(**options)]
    found = json.loads(run("bench", *name.split(), "--json").stdout)
    assert found == {"heading": ["heading"], "tables": [], "notes": []}
