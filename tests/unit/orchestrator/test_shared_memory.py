"""Memory that slots, a context and scratch take in turn."""

from dataclasses import replace

import pytest
from tables import cases

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.errors import BudgetError
from orchestrator.memory.machine import Machine
from orchestrator.memory.plan import least_slots, plan_memory
from orchestrator.memory.shared import CELL_STEP, SharedMemory

MIB = 2**20
SHARED = SharedMemory(
    n_bytes=1_000_000,
    least_slots=100_000,
    all_slots=2_000_000,
    cell_bytes=9.0,
    scratch={512: (100_000, 1.0), 1024: (200_000, 1.0), 4096: (700_000, 1.0)},
)


@cases(
    "n_cells, n_tokens, slots",
    (0, 1, 900_000 - 2560),  # a step has its first cells
    (256, 512, 900_000 - 2560),
    (257, 1, 900_000 - 5120),
    (2560, 513, 800_000 - 25_600),
    (4096, 4096, 300_000 - 40_960),
)
def test_what_is_left_for_slots(n_cells, n_tokens, slots):
    assert SHARED.slots(n_cells, n_tokens) == slots
    assert SHARED.slots(n_cells, n_tokens, held=1000) == slots
    assert SHARED.slots(n_cells, n_tokens, held=800_000) == SHARED.slots(n_cells, 1, held=800_000)


@cases(
    "least, most, longest",
    (100_000, 10**6, 79_872),
    (100_000, 4000, 4000),
    (897_440, 10**6, 256),
    (897_441, 10**6, 0),
)
def test_the_longest_context_leaves_what_a_policy_needs(least, most, longest):
    shared = replace(SHARED, least_slots=least)
    assert shared.longest(most) == longest
    if 0 < longest < most:
        assert shared.slots(longest, 1) >= least > shared.slots(longest + CELL_STEP, 1)


@pytest.mark.parametrize("all_slots", [500_000, 900_000, 2_000_000, 50_000_000])
@pytest.mark.parametrize(("n_cells", "n_tokens"), [(0, 300), (0, 900), (0, 5000), (40_000, 20_000)])
def test_a_prompt_is_read_with_the_least_reads(all_slots, n_cells, n_tokens):
    """Passes over what has no slot, then what gave way comes back."""
    shared, end = replace(SHARED, all_slots=all_slots), n_cells + n_tokens

    def read(size):
        held = min(all_slots, shared.slots(end, size))
        passes, usual = -(-n_tokens // size), min(all_slots, shared.slots(end, 512))
        return passes * (all_slots - held) + usual - held

    possible = [n for n in shared.scratch if n == 512 or shared.slots(end, n) >= 100_000]
    assert read(shared.micro_batch(n_cells, n_tokens)) == min(map(read, possible))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tiny = synthetic.preset("tiny-qwen3moe")
    shape = replace(tiny, context=16384, n_layer=4, n_expert=256, n_head_kv=1, head_dim=32)
    path = tmp_path_factory.mktemp("shared") / "model.gguf"
    return ExpertModel.open(synthetic.write(path, shape, tiers=("q4_k", "q2_k")))


def plan_in(model, free, **settings):
    config = Config.build(model=model.path, **{"conversations": True, "cache_ram": 0, **settings})
    return plan_memory(config, model, Machine(free))


def half(model, **settings):
    """A cap with slots for about half of the experts beside a context of 4,096."""
    usual = {"conversations": False, "ctx": 4096, "ubatch": 512, "policy": "lru"}
    plan = plan_in(model, 2**40, **usual, **settings)
    assert plan.slots is not None
    return plan.total_bytes - plan.slots.total_bytes // 2


@pytest.mark.parametrize("policy", ["lru", "dymoe", "firm"])
def test_a_long_context_takes_nothing_before_it_is_used(model, policy):
    ram = half(model)
    plan = plan_in(model, 2**40, ram=ram, policy=policy)
    fixed = plan_in(model, 2**40, ram=ram, policy=policy, ctx=4096, ubatch=512, conversations=False)
    assert plan.shared is not None and plan.slots is not None and fixed.slots is not None
    assert plan.n_ctx == 16384
    assert plan.slots.total_bytes >= fixed.slots.total_bytes
    assert plan.total_bytes <= ram
    assert plan.shared.slots(512, 512) == plan.budget_bytes
    # At the end of the context the fewest slots are there, and all of it is within the cap.
    assert plan.policy is not None
    one_each = sum(group.slot_bytes for group in plan.slots.groups)
    assert plan.shared.least_slots == max(least_slots(plan.policy), one_each)
    assert plan.shared.slots(plan.n_ctx, 512) >= plan.shared.least_slots


@pytest.mark.parametrize("policy", [None, "plain"])
def test_what_fits_whole_gets_the_longest_context_beside_it(model, policy):
    whole = plan_in(model, 2**40, ctx=4096, policy="plain")
    for n, n_ctx in ((0, 4096), (3, 4096 + 3 * CELL_STEP), (100, 16384)):
        more = plan_in(model, 2**40, ctx=4096 + n * CELL_STEP, policy="plain").total_bytes
        ram = max(more, whole.total_bytes) + 1000  # less than a step more
        plan = plan_in(model, 2**40, ram=ram, policy=policy)
        assert (plan.managed, plan.n_ctx) == (False, n_ctx)
        assert plan.total_bytes <= ram


def test_what_is_asked_for_are_upper_limits(model):
    asked = {"ram": half(model), "policy": "lru", "ctx": 8192}
    plan = plan_in(model, 2**40, ubatch=1024, **asked)
    assert plan.shared is not None
    assert plan.budget_bytes == plan_in(model, 2**40, **asked).budget_bytes  # until it is used
    assert (plan.n_ctx, plan.n_ubatch) == (8192, 1024)
    assert {plan.micro_batch(0, n) for n in range(1, 8192, 100)} <= {512, 1024}


@pytest.mark.parametrize("less", [0, 31, 32, 33, 56])
def test_no_prompt_is_read_in_more_at_once_than_the_context_takes(model, less):
    plan = plan_in(model, 2**40, ram=half(model) - less * MIB, policy="lru")
    assert max(plan.micro_batch(0, n) for n in range(1, plan.n_ctx, 64)) <= plan.n_ubatch


@pytest.mark.parametrize("probes", [0, 2])
def test_a_context_that_is_too_long_is_refused_with_the_longest_one(model, probes):
    ram, asked = half(model) - 40 * MIB, {"policy": "lru", "probes": probes}
    longest = plan_in(model, 2**40, ram=ram, **asked).n_ctx
    assert longest < 16384
    with pytest.raises(BudgetError, match=f"the longest context .* {longest} tokens") as refused:
        plan_in(model, 2**40, ram=ram, ctx=16384, **asked)
    needed = refused.value.needed_bytes
    for ctx in (None, 16384):  # the model's own length, and not that of each sequence
        assert plan_in(model, 2**40, ram=needed + MIB, ctx=ctx, **asked).n_ctx == 16384


@cases(
    "settings",
    {"policy": "dynaexq", "low_tier": "q2_k"},
    {"policy": "mixed"},
    {"policy": "lru", "expert_ram": 8 * MIB},
    {"policy": "lru", "conversations": False},
    {"policy": "plain"},
)
def test_others_are_divided_once(model, settings):
    """Those that keep every expert in memory, with slots that were asked for, and what holds no
    conversation."""
    plan = plan_in(model, 2**40, ctx=4096, **settings)
    assert plan.shared is None
    assert plan.micro_batch(0, 5000) == plan.n_ubatch
