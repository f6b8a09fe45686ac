"""`moe-edge bench`: its options, which the experiments declare, and what they become."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.lab.registry import BENCHMARKS, load_benchmark

BELOW = [name for name in BENCHMARKS if name]


def run(*args: str):
    return CliRunner().invoke(cli, list(args))


@pytest.fixture
def measured(monkeypatch):
    """measured(name): the options that a benchmark is run with, in the place of running it."""

    def replace(name):
        seen, benchmark = [], type(load_benchmark(name))
        monkeypatch.setattr(
            benchmark, "run", lambda self, options, note: seen.append(options) or {"a": 1}
        )
        monkeypatch.setattr(benchmark, "text", lambda self, report: f"table of {report}")
        return seen

    return replace


ASKED = [
    (
        "",
        ["--caps", "50", "--routing", "zipf", "--quick", "--tokens", "9"],
        {"caps": (0.5,), "routing": "zipf", "quick": True, "tokens": 9},
    ),
    ("prefill", ["--prompts", "4,8", "--long", "0"], {"prompts": (4, 8), "long": 0}),
    *[(name, ["--shape", "demo", "--runs", "1"], {"shape": "demo", "runs": 1}) for name in BELOW],
]


@pytest.mark.parametrize(("name", "args", "options"), ASKED)
def test_a_benchmark_gets_its_options(measured, name, args, options):
    seen = measured(name)
    result = run("bench", *name.split(), *args)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "table of {'a': 1}\n"
    assert seen == [load_benchmark(name).options(**options)]
    assert json.loads(run("bench", *name.split(), "--json").stdout) == {"a": 1}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--caps much", 2, "'--caps': 'much' is no list of percentages"),
        ("prefill --prompts 4,x", 2, "'--prompts': '4,x' is no list of prompt lengths"),
        ("--runs 3 ablation", 2, "--runs comes after the command"),
        ("--quick prefill", 2, "--quick comes after the command"),
        ("--seed 0 prefill", 2, "--seed comes after the command"),
        # The routing of a trained model is its own.
        (
            "ablation --shape demo --routing uniform",
            1,
            "--routing has no effect with --shape demo",
        ),
    ],
)
def test_what_is_refused(words, status, said):
    result = run("bench", *words.split())
    assert result.exit_code == status and said in result.stderr


def test_a_plot_without_matplotlib_is_refused_before_measuring(monkeypatch, tmp_path):
    benchmark = type(load_benchmark("ablation"))
    monkeypatch.setattr(benchmark, "run", lambda *arguments: pytest.fail("it measured"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    result = run("bench", "ablation", "--out", str(tmp_path / "plots"))
    assert result.exit_code == 1
    assert "pip install 'moe-edge[plot]'" in result.stderr
    assert not (tmp_path / "plots").exists()


def test_only_an_experiment_that_draws_has_a_folder_for_plots():
    for name in BENCHMARKS:
        text = run("bench", *name.split(), "--help").stdout
        assert ("--out" in text) == load_benchmark(name).draws == (name == "ablation"), name


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
