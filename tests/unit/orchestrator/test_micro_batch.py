"""How many tokens of a prompt are computed at once where that was not asked for."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tables import cases

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.memory.footprint import SIZES, compute_bytes
from orchestrator.memory.machine import Device, Machine
from orchestrator.memory.plan import plan_memory

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Many experts beside little scratch."""
    tiny = replace(synthetic.preset("tiny-qwen3moe"), n_layer=8, n_expert=128, context=8192)
    path = tmp_path_factory.mktemp("micro") / "many.gguf"
    return ExpertModel.open(synthetic.write(path, tiny, tiers=("q4_k", "q2_k")))


HOST = Machine(64 * 2**30)
CARD = replace(HOST, device=Device("cuda0", "a card", 8 * 2**30, 8 * 2**30, True))


def plan_for(model, machine=HOST, **settings):
    usual = {"policy": "lru", "high_tier": "q4_k", "ctx": 8192}
    return plan_memory(Config.build(model=model.path, **(usual | settings)), model, machine)


def cap(model, share, machine=HOST, **settings):
    """A cap that leaves slots for this share of the experts in micro-batches of 512."""
    whole = plan_for(model, machine, ubatch=512, **settings)
    return whole.total_bytes - int((1 - share) * whole.slots.total_bytes)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@cases(
    "machine, name, policy",
    (HOST, "ram", "lru"),
    (HOST, "ram", "dymoe"),
    (HOST, "ram", "firm"),
    (CARD, "vram", "lru"),
)
def test_it_is_the_one_of_those_that_can_be_asked_for_that_reads_least(
    model, machine, name, policy, share
):
    """A pass for each micro-batch, and for each token of a prompt an eighth of an answer's, which
    uses what is absent half as often as the rest; on a card over its link."""
    most = 8 * 2**30 if machine is CARD else None
    limit = cap(model, share, machine, policy=policy, **({"vram": most} if most else {}))
    settings = {"policy": policy, name: limit}
    asked = []
    for n in SIZES:
        with suppress(BudgetError):
            asked.append(plan_for(model, machine, ubatch=n, **settings))
    used = model.n_expert_used / model.n_expert
    best = min(asked, key=lambda p: p.absent_bytes * (1 / p.n_ubatch + used / 16))
    plan = plan_for(model, machine, **settings)
    assert (plan.n_ubatch, plan.slots) == (best.n_ubatch, best.slots)
    assert plan.total_bytes <= limit
    assert (plan.n_ubatch > 512) == (share < 0.9)


def test_where_it_stays_at_the_least(model):
    """What fits whole, and a cap on slots alone, which scratch costs none of: nothing would bound
    it. Besides, it is no longer than the context."""
    whole = plan_for(model, ram=cap(model, 1.0))
    assert (whole.absent_bytes, whole.n_ubatch) == (0, 512)
    assert plan_for(model, policy=None, high_tier=None).n_ubatch == 512  # the plain path
    assert plan_for(model, expert_ram=10 * MIB).n_ubatch == 512
    ram = cap(model, 0.5)
    assert plan_for(model, ram=ram).n_ubatch == 1024
    assert plan_for(model, ram=ram, ctx=1000).n_ubatch == 512
    for asked in ({}, {"ubatch": 4096}):
        assert plan_for(model, ram=ram, ctx=300, **asked).n_ubatch == 300


def test_the_context_and_the_kept_prompts_stay_as_they_are(model):
    settings: dict[str, Any] = {"ram": cap(model, 0.5), "ctx": None, "conversations": True}
    least, plan = plan_for(model, ubatch=512, **settings), plan_for(model, **settings)
    assert plan.n_ubatch > 512
    assert (plan.n_ctx, plan.prompt_bytes) == (least.n_ctx, least.prompt_bytes)


def test_a_policy_that_keeps_every_expert_has_nothing_to_read(model):
    plan = plan_for(model, policy="dynaexq", high_tier=None, low_tier="q2_k", ram=200 * MIB)
    assert plan.policy is not None and plan.policy.wants.all_resident
    assert plan.slots.total_bytes < plan.policy.shape.all_slot_bytes()
    assert (plan.absent_bytes, plan.n_ubatch) == (0, 512)


def test_the_least_budget_is_that_of_the_least_micro_batch(model):
    with pytest.raises(BudgetError) as refused:
        plan_for(model, ram=MIB)
    plan = plan_for(model, ram=refused.value.needed_bytes)
    assert plan.n_ubatch == 512
    with pytest.raises(BudgetError):
        plan_for(model, ram=refused.value.needed_bytes, ubatch=1024)


def test_the_rows_that_llama_does_not_count_are_counted(model):
    config = Config.build(model=model.path, policy="lru")
    rows = compute_bytes(model, config, 4096, 1024, 0) - compute_bytes(model, config, 4096, 512, 0)
    # two layouts of 8-bit blocks for the k rows of n_ff numbers that a token's down product has
    assert rows >= 512 * 2 * (2 * 256 * 292 / 256)


def test_every_prompt_of_a_step_has_its_window_of_queries(model):
    """4 bytes for each query, place in the context and head; no more queries than tokens."""
    n_head = max(model.hparams.n_head)

    def taken(sequences, **more):
        usual = {"policy": "dymoe", "low_tier": "q2_k", "importance_window": 32}
        config = Config.build(model=model.path, sequences=sequences, **(usual | more))
        load = config.with_changes(importance="load")
        return compute_bytes(model, config, 4096, 512, 0) - compute_bytes(model, load, 4096, 512, 0)

    assert taken(3) - taken(0) == 4 * 3 * 32 * 4096 * n_head
    assert taken(31) - taken(15) == 0


@cases(
    "asked, reserved",
    ({}, False),
    ({"policy": "dymoe"}, False),
    ({"policy": "dymoe", "retention": 1.0, "low_tier": "q2_k"}, False),
    ({"policy": "dymoe", "low_tier": "q2_k", "exact": True}, False),
    ({"policy": "firm"}, False),
    ({"policy": "mixed"}, False),
    ({"policy": "plain"}, False),
    ({"low_tier": "q2_k"}, True),
    ({"low_tier": "skip", "retention": 1.0}, True),
    ({"policy": "dymoe", "retention": 0.9}, True),
)
def test_importance_takes_memory_where_a_prompt_may_be_lowered(model, asked, reserved):
    """And nowhere else does a policy want it, so that nothing is taken unplanned."""
    config = Config.build(model=model.path, sequences=15, **asked)
    without = config.with_changes(importance="load")
    taken, least = (compute_bytes(model, each, 4096, 512, 0) for each in (config, without))
    assert (taken > least) == reserved
    if config.policy in (None, "dymoe", "firm"):
        plan = plan_for(model, ctx=4096, expert_ram=8 * MIB, **{"policy": None} | asked)
        assert plan.policy is not None and plan.policy.wants.importance == reserved
