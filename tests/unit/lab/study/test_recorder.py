"""Activations that studies record: equal with and without a memory limit, and read within the
limit."""

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import cli
from orchestrator.errors import BudgetError
from orchestrator.lab import observe
from orchestrator.lab.study.activations import activations_of

TOKENS = list(range(20, 60))


def test_activations_are_the_same_within_a_cap(library, model):
    (found,) = activations_of(model, [TOKENS], 1)
    (again,) = activations_of(model, [TOKENS], 1, ram=100 << 20)
    assert found.keys() == again.keys()
    assert all((found[key] == again[key]).all() for key in found)


@pytest.mark.parametrize("name", ["similarity", "votes", "context"])
def test_a_study_that_reads_keeps_to_the_cap(library, model, domains, tmp_path, monkeypatch, name):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[plot]'")
    limits = []

    def too_small(*given):
        limits.append(given[-1])
        raise BudgetError("as it says there")

    monkeypatch.setattr(observe, "load_within", too_small)
    options = ["-m", str(model), "--threads", "1", "--ctx", "128", "--window", "16"]
    options += ["--text", str(domains), "--study", name, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli, ["eval", *options, "--max-tokens", "48", "--ram", "100MiB"])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "Error: as it says there")
    (limit,) = limits
    assert limit.ram == 100 << 20 and limit.own > 0 and "study" in limit.use
