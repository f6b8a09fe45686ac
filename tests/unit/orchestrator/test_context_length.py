"""The context where none is asked for."""

from dataclasses import replace

import pytest

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.memory import plan as planning
from orchestrator.memory.machine import Machine
from orchestrator.memory.plan import SHARE, longest_affordable, plan_memory

MIB = 2**20


def affordable(left, spare=2**60, least=4096, most=131072):
    """With a cache of 1000 bytes a token."""
    return longest_affordable(least, most, lambda n: 1000 * n, left, spare)


def test_the_cache_takes_its_share_of_what_is_left():
    found = affordable(16 * 10_000 * 1000)
    assert found == 9984  # 10,000 tokens in steps of 256
    assert 1000 * found <= SHARE * 16 * 10_000 * 1000


@pytest.mark.parametrize(("left", "tokens"), [(10**12, 131072), (10**6, 4096), (0, 4096)])
def test_it_is_never_longer_than_the_model_nor_shorter_than_the_least(left, tokens):
    assert affordable(left) == tokens


def test_a_model_of_a_short_context_gets_all_of_it():
    assert affordable(0, least=1000, most=1000) == 1000


def test_it_takes_no_more_than_is_spare():
    assert affordable(10**12, spare=5000 * 1000) == (4096 + 5000) // 256 * 256
    assert affordable(10**12, spare=0) == 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with the context of a large one, and experts many times as large as its cache
    for 4096 tokens."""
    tiny = synthetic.preset("tiny-qwen3moe")
    shape = replace(tiny, context=65536, n_expert=128, n_head_kv=1, head_dim=32)
    folder = tmp_path_factory.mktemp("long")
    return ExpertModel.open(synthetic.write(folder / "long.gguf", shape, tiers=("q4_k", "q2_k")))


def plan_in(model, free, **settings):
    return plan_memory(Config.build(model=model.path, **settings), model, Machine(free))


def test_more_memory_gives_more_context_until_the_models_own(model):
    contexts = [plan_in(model, free * MIB).n_ctx for free in (400, 450, 1000, 3000, 64 * 1024)]
    assert contexts == sorted(contexts)
    assert len(set(contexts)) > 2
    assert contexts[0] >= 4096
    assert contexts[-1] == 65536


def test_what_fits_with_the_least_context_still_fits(model):
    least = plan_in(model, 64 * 2**30, ctx=4096, ubatch=16).total_bytes
    for spare in (0, MIB // 4, 40 * MIB):
        plan = plan_in(model, 64 * 2**30, ram=least + spare, ubatch=16)
        assert not plan.managed
        assert plan.total_bytes <= least + spare


def test_a_policy_without_room_beside_it_gets_the_least_context(model, monkeypatch):
    settings = {"policy": "lru", "force_managed": True, "ubatch": 16}
    with pytest.raises(BudgetError) as too_little:
        plan_in(model, 64 * 2**30, ctx=4096, ram=MIB, **settings)
    monkeypatch.setattr(planning, "longest_affordable", lambda *_: 65536)
    least = too_little.value.needed_bytes
    assert plan_in(model, 64 * 2**30, ram=least, **settings).n_ctx == 4096
    assert plan_in(model, 64 * 2**30, ram=least + 60 * MIB, **settings).n_ctx == 65536


def test_a_context_that_was_asked_for_is_that(model):
    assert plan_in(model, 400 * MIB, ctx=512).n_ctx == 512
    assert plan_in(model, 64 * 2**30, ctx=4096).n_ctx == 4096
