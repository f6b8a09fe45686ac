"""Activations that studies record: equal with and without a memory limit, and read within the
limit."""

import pytest

from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.lab import observe
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.study.activations import activations_of
from orchestrator.lab.study.dymoe import Similarity
from orchestrator.lab.study.near_data import PromptContext
from orchestrator.lab.study.subject import Subject
from orchestrator.lab.study.votes import VotesStudy

TOKENS = list(range(20, 60))


def test_activations_are_the_same_within_a_cap(library, model):
    (found,) = activations_of(model, [TOKENS], 1)
    (again,) = activations_of(model, [TOKENS], 1, ram=100 << 20)
    assert found.keys() == again.keys()
    assert all((found[key] == again[key]).all() for key in found)


@pytest.mark.parametrize("study", [Similarity, VotesStudy, PromptContext])
def test_a_study_that_reads_keeps_to_the_cap(library, model, domains, monkeypatch, study):
    limits = []

    def too_small(*given):
        limits.append(given[-1])
        raise BudgetError("as it says there")

    monkeypatch.setattr(observe, "load_within", too_small)
    config = Config.build(model=model, threads=1, ctx=128, ram=100 << 20)
    options = EvalOptions(text=domains, window=16, tokens=48)
    on = Subject(config, options, lambda what, done: None)
    with pytest.raises(BudgetError, match="as it says there"):
        study().measure(on)
    (limit,) = limits
    assert limit.ram == 100 << 20 and limit.own > 0 and "study" in limit.use
