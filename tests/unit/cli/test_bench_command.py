"""`moe-edge bench`: its options, which the experiments declare, and what they become."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.lab.registry import BENCHMARKS, load_benchmark
from orchestrator.lab.table import Report


def run(*args: str):
    return CliRunner().invoke(cli, list(args))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_shows_the_defaults_of_the_benchmark(name):
    text = " ".join(run("bench", *name.split(), "--help").stdout.split())
    checked = 0
    for declared in load_benchmark(name).options.declared().values():
        found = re.search(rf"{declared.flag} .*?(\[default: (.*?)\]|  -)", text)
        if found and declared.default_text:
            assert found.group(2) == declared.default_text, declared.name
            checked += 1
        assert bool(found) <= declared.option
    assert checked >= 8


@pytest.fixture
def measured(monkeypatch):
    """measured(name): the options that a benchmark is run with, in the place of running it."""

    def replace(name):
        seen, benchmark = [], type(load_benchmark(name))
        report = Report(["heading"], [], [])
        monkeypatch.setattr(
            benchmark, "run", lambda self, options, note: seen.append(options) or report
        )
        return seen

    return replace


def test_bench_gets_its_options(measured):
    seen = measured("")
    result = run("bench", "--caps", "50", "--routing", "zipf", "--quick", "--tokens", "9")
    assert result.exit_code == 0
    assert seen == [load_benchmark("").options(caps=(0.5,), routing="zipf", quick=True, tokens=9)]
    result = run("bench", "--caps", "much")
    assert result.exit_code == 2
    assert "'--caps': 'much' is no list of percentages" in result.stderr


@pytest.mark.parametrize("command", BENCHMARKS)
def test_commands_below_bench_get_their_options(measured, command):
    seen = measured(command)
    result = run("bench", *command.split(), "--shape", "demo", "--threads", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "heading\n"
    assert seen == [load_benchmark(command).options(shape="demo", threads=1)]
    found = json.loads(run("bench", *command.split(), "--json").stdout)
    assert found == {"heading": ["heading"], "tables": [], "notes": []}


def test_options_before_a_command_below_bench_are_refused():
    for words in ("bench --runs 3 ablation", "bench --quick topics", "bench --seed 0 topics"):
        result = run(*words.split())
        assert result.exit_code == 2, words
        assert f"{words.split()[1]} comes after the command" in result.stderr


def test_routing_of_a_trained_model_is_its_own():
    result = run("bench", "ablation", "--shape", "demo", "--routing", "uniform")
    assert result.exit_code == 1
    assert "--routing has no effect with --shape demo" in result.stderr


def test_listing_the_benchmarks_loads_none_but_the_first():
    """The names and the first sentences come from the registry."""
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from orchestrator.cli.main import cli\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0\n"
        "loaded = [name for name in sys.modules if name.startswith('orchestrator.lab.')]\n"
        "assert not loaded, loaded\n"
        "text = CliRunner().invoke(cli, ['bench', '--help']).stdout\n"
        "assert 'ablation ' in text and 'orchestrator.lab.bench.ablation' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
