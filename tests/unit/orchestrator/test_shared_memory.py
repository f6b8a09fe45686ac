"""Memory that slots, the KV cache and scratch share over time, and the size of micro-batches if
--ubatch is not given."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from asking import request_of
from tables import cases

from gguf_tools import synthetic
from gguf_tools.experts import ExpertModel
from orchestrator.errors import BudgetError
from orchestrator.plan.footprint import SCORING_BYTES, SIZES, compute_bytes, output_tokens
from orchestrator.plan.planning import plan, plan_memory, sizes_to_count
from orchestrator.plan.records import (
    CELL_STEP,
    Counted,
    Device,
    Machine,
    Refusal,
    SharedMemory,
    longest_context,
)
from orchestrator.policy.base import place

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
    (0, 1, 900_000 - 2560),  # a step has at least the first 256 cells
    (256, 512, 900_000 - 2560),
    (257, 1, 900_000 - 5120),
    (2560, 513, 800_000 - 25_600),
    (4096, 4096, 300_000 - 40_960),
)
def test_bytes_left_for_slots(n_cells, n_tokens, slots):
    assert SHARED.slots(n_cells, n_tokens) == slots
    assert SHARED.slots(n_cells, n_tokens, held=1000) == slots
    assert SHARED.slots(n_cells, n_tokens, held=800_000) == SHARED.slots(n_cells, 1, held=800_000)


@cases(
    "least, most, longest",
    (100_000, 10**6, 79_872),
    (100_000, 4000, 4000),  # never longer than `most`, in whole steps or not
    (100_000, 100, 100),
    (897_440, 10**6, 256),
    (897_441, 10**6, 0),
)
def test_the_longest_context_leaves_the_policys_minimum(least, most, longest):
    shared = replace(SHARED, least_slots=least)
    assert shared.longest(most) == longest
    if 0 < longest < most:
        assert shared.slots(longest, 1) >= least > shared.slots(longest + CELL_STEP, 1)


@pytest.mark.parametrize("all_slots", [500_000, 900_000, 2_000_000, 50_000_000])
@pytest.mark.parametrize(("n_cells", "n_tokens"), [(0, 300), (0, 900), (0, 5000), (40_000, 20_000)])
def test_the_micro_batch_minimises_the_bytes_read(all_slots, n_cells, n_tokens):
    """The micro-batch minimises the bytes read: one pass over the missing bytes for each
    micro-batch, then the slots that were freed for it."""
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
    usual = {"conversations": True, "cache_ram": 0}
    return plan_memory(request_of(model=model.path, **{**usual, **settings}), model, Machine(free))


def half(model, **settings):
    """--ram with slots for about half of the experts and a context of 4,096 tokens."""
    usual = {"conversations": False, "ctx": 4096, "ubatch": 512, "policy": "lru"}
    plan = plan_in(model, 2**40, **usual, **settings)
    return plan.total_bytes - plan.slots.total_bytes // 2


@pytest.mark.parametrize("policy", ["lru", "dymoe", "firm"])
def test_a_long_context_takes_nothing_before_it_is_used(model, policy):
    ram = half(model)
    plan = plan_in(model, 2**40, ram=ram, policy=policy)
    fixed = plan_in(model, 2**40, ram=ram, policy=policy, ctx=4096, ubatch=512, conversations=False)
    assert plan.n_ctx == 16384
    assert plan.slots.total_bytes >= fixed.slots.total_bytes
    assert plan.total_bytes <= ram
    assert plan.shared.slots(512, 512) == plan.budget_bytes
    # With a full context the minimum of slots is left, within the limit.
    one_each = sum(group.slot_bytes for group in plan.slots.groups)
    fewest = place(plan.placement.policy, plan.placement.shape).slots.total_bytes
    assert plan.shared.least_slots == max(fewest, one_each)
    assert plan.shared.slots(plan.n_ctx, 512) >= plan.shared.least_slots


@pytest.mark.parametrize("policy", [None, "plain"])
def test_a_model_that_fits_whole_gets_the_longest_context(model, policy):
    whole = plan_in(model, 2**40, ctx=4096, policy="plain")
    for n, n_ctx in ((0, 4096), (3, 4096 + 3 * CELL_STEP), (100, 16384)):
        more = plan_in(model, 2**40, ctx=4096 + n * CELL_STEP, policy="plain").total_bytes
        ram = max(more, whole.total_bytes) + 1000  # less than the next step of the context needs
        plan = plan_in(model, 2**40, ram=ram, policy=policy)
        assert (plan.managed, plan.n_ctx) == (False, n_ctx)
        assert plan.total_bytes <= ram


def test_ctx_and_ubatch_are_upper_limits(model):
    asked = {"ram": half(model), "policy": "lru", "ctx": 8192}
    plan = plan_in(model, 2**40, ubatch=1024, **asked)
    assert plan.shared is not None
    # scratch for larger micro-batches is taken only when used
    assert plan.budget_bytes == plan_in(model, 2**40, **asked).budget_bytes
    assert (plan.n_ctx, plan.n_ubatch) == (8192, 1024)
    assert {plan.micro_batch(0, n) for n in range(1, 8192, 100)} <= {512, 1024}


@pytest.mark.parametrize("less", [0, 31, 32, 33, 56])
def test_micro_batches_do_not_exceed_the_planned_maximum(model, less):
    plan = plan_in(model, 2**40, ram=half(model) - less * MIB, policy="lru")
    assert max(plan.micro_batch(0, n) for n in range(1, plan.n_ctx, 64)) <= plan.n_ubatch


def test_a_context_that_is_too_long_is_refused_with_the_longest_one(model):
    ram, asked = half(model) - 40 * MIB, {"policy": "lru"}
    longest = plan_in(model, 2**40, ram=ram, **asked).n_ctx
    assert longest < 16384
    with pytest.raises(
        BudgetError, match=f"the maximum with the policy lru is {longest} tokens"
    ) as refused:
        plan_in(model, 2**40, ram=ram, ctx=16384, **asked)
    needed = refused.value.needed_bytes
    for ctx in (None, 16384):
        assert plan_in(model, 2**40, ram=needed + MIB, ctx=ctx, **asked).n_ctx == 16384


@cases(
    "settings",
    {"policy": "dynaexq", "low_tier": "q2_k"},
    {"policy": "mixed"},
    {"policy": "lru", "expert_ram": 8 * MIB},
    {"policy": "lru", "conversations": False},
    {"policy": "plain"},
)
def test_memory_is_not_shared_over_time_in_other_cases(model, settings):
    """Memory is fixed for policies that keep every expert, for --expert-ram, without conversations,
    and on llama.cpp's own path."""
    plan = plan_in(model, 2**40, ctx=4096, **settings)
    assert plan.shared is None
    assert plan.micro_batch(0, 5000) == plan.n_ubatch


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A model with many experts and little scratch."""
    tiny = replace(synthetic.preset("tiny-qwen3moe"), n_layer=8, n_expert=128, context=8192)
    path = tmp_path_factory.mktemp("micro") / "many.gguf"
    return ExpertModel.open(synthetic.write(path, tiny, tiers=("q4_k", "q2_k")))


HOST = Machine(64 * 2**30)
CARD = replace(HOST, device=Device("cuda0", "a card", 8 * 2**30, 8 * 2**30, True))


def plan_for(many, machine=HOST, **settings):
    usual = {"policy": "lru", "high_tier": "q4_k", "ctx": 8192}
    return plan_memory(request_of(model=many.path, **(usual | settings)), many, machine)


def cap(many, share, machine=HOST, **settings):
    """Limit that leaves slots for this share of the experts with micro-batches of 512."""
    whole = plan_for(many, machine, ubatch=512, **settings)
    return whole.total_bytes - int((1 - share) * whole.slots.total_bytes)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@cases(
    "machine, name, policy",
    (HOST, "ram", "lru"),
    (HOST, "ram", "dymoe"),
    (HOST, "ram", "firm"),
    (CARD, "vram", "lru"),
)
def test_the_chosen_micro_batch_reads_the_fewest_bytes(many, machine, name, policy, share):
    """The chosen micro-batch reads the fewest bytes.

    Each micro-batch costs one pass over the missing bytes. A prompt token has an eighth of the
    weight of an answer's token, which uses missing experts half as often as others. On a GPU bytes
    cross the link.
    """
    most = 8 * 2**30 if machine is CARD else None
    limit = cap(many, share, machine, policy=policy, **({"vram": most} if most else {}))
    settings = {"policy": policy, name: limit}
    asked = []
    for n in SIZES:
        with suppress(BudgetError):
            asked.append(plan_for(many, machine, ubatch=n, **settings))
    used = many.n_expert_used / many.n_expert
    best = min(asked, key=lambda p: p.absent_bytes * (1 / p.n_ubatch + used / 16))
    plan = plan_for(many, machine, **settings)
    assert (plan.n_ubatch, plan.slots) == (best.n_ubatch, best.slots)
    assert plan.total_bytes <= limit
    assert (plan.n_ubatch > 512) == (share < 0.9)


def test_micro_batches_that_stay_at_512(many):
    """The micro-batch stays at 512 if everything fits, and with --expert-ram, which scratch does
    not reduce. It is never longer than the context."""
    whole = plan_for(many, ram=cap(many, 1.0))
    assert (whole.absent_bytes, whole.n_ubatch) == (0, 512)
    assert plan_for(many, policy=None, high_tier=None).n_ubatch == 512  # llama.cpp's own path
    assert plan_for(many, expert_ram=10 * MIB).n_ubatch == 512
    ram = cap(many, 0.5)
    assert plan_for(many, ram=ram).n_ubatch == 1024
    assert plan_for(many, ram=ram, ctx=1000).n_ubatch == 512
    for asked in ({}, {"ubatch": 4096}):
        assert plan_for(many, ram=ram, ctx=300, **asked).n_ubatch == 300


def test_the_context_and_the_kept_prompts_stay_as_they_are(many):
    settings: dict[str, Any] = {"ram": cap(many, 0.5), "ctx": None, "conversations": True}
    least, plan = plan_for(many, ubatch=512, **settings), plan_for(many, **settings)
    assert plan.n_ubatch > 512
    assert (plan.n_ctx, plan.prompt_bytes) == (least.n_ctx, least.prompt_bytes)


def test_a_policy_that_keeps_every_expert_has_nothing_to_read(many):
    plan = plan_for(many, policy="dynaexq", high_tier=None, low_tier="q2_k", ram=200 * MIB)
    assert plan.placement is not None and plan.placement.wants.all_resident
    assert plan.slots.total_bytes < plan.placement.shape.all_slot_bytes()
    assert (plan.absent_bytes, plan.n_ubatch) == (0, 512)


def test_the_least_budget_is_that_of_the_least_micro_batch(many):
    with pytest.raises(BudgetError) as refused:
        plan_for(many, ram=MIB)
    plan = plan_for(many, ram=refused.value.needed_bytes)
    assert plan.n_ubatch == 512
    with pytest.raises(BudgetError):
        plan_for(many, ram=refused.value.needed_bytes, ubatch=1024)


def test_the_rows_that_llama_does_not_count_are_counted(many):
    request = request_of(model=many.path, policy="lru")
    rows = compute_bytes(many, request, 4096, 1024, 0) - compute_bytes(many, request, 4096, 512, 0)
    # Two layouts of 8-bit blocks for the k rows of n_ff numbers that a token's down product reads.
    assert rows >= 512 * 2 * (2 * 256 * 292 / 256)


def test_every_prompt_of_a_step_has_its_window_of_queries(many):
    """Scratch has 4 bytes for each query, KV cell and head of each prompt. There are no more
    queries than tokens."""
    n_head = max(many.hparams.n_head)

    def taken(sequences, **more):
        usual = {"policy": "dymoe", "low_tier": "q2_k", "importance_window": 32}
        asked = {"model": many.path, "sequences": sequences, **usual, **more}
        load = request_of(**{**asked, "importance": "load"})
        return compute_bytes(many, request_of(**asked), 4096, 512, 0) - compute_bytes(
            many, load, 4096, 512, 0
        )

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
def test_importance_is_reserved_if_prompts_may_be_lowered(many, asked, reserved):
    """The policy requests importance exactly if the plan reserves memory for it."""
    given = {"model": many.path, "sequences": 15, **asked}
    taken, least = (
        compute_bytes(many, request_of(**given, **more), 4096, 512, 0)
        for more in ({}, {"importance": "load"})
    )
    assert (taken > least) == reserved
    if asked.get("policy") in (None, "dymoe", "firm"):
        plan = plan_for(many, ctx=4096, expert_ram=8 * MIB, **{"policy": None} | asked)
        assert plan.placement is not None and plan.placement.wants.importance == reserved


@pytest.mark.parametrize(
    ("most", "fits", "longest"),
    [
        (1000, 255, 0),
        (1000, 256, 256),
        (1000, 767, 512),
        (1000, 1000, 1000),
        (100, 100, 100),
        (131072, 10_000, 9984),
    ],
)
def test_the_longest_context_is_in_whole_steps_and_no_longer_than_asked(most, fits, longest):
    assert longest_context(most, 256, lambda n: n > fits) == longest


def test_scored_steps_are_limited_by_the_memory_for_scores():
    request = request_of(model="m.gguf", scored=4096)
    n_vocab = SCORING_BYTES // 8 // 13
    found = [output_tokens(request, n, 512) for n in (2, n_vocab, SCORING_BYTES)]
    assert found == [512, 13, 1]


def test_the_minimum_has_memory_for_a_context_of_256_tokens(model):
    """A limit without memory for 256 KV cells is refused, also with states of recurrent layers,
    whose scratch counts twice."""

    def count(n_ctx, n_tokens):
        return model.kv_bytes(n_ctx) + 8192, n_tokens * 40_000

    def asked(ram):
        request = request_of(model=model.path, policy="lru", conversations=True, ram=ram)
        counted = Counted.of(sizes_to_count(request, model)[1], count)
        return plan(replace(request, counted=counted), model, Machine(2**40))

    refused = asked(MIB)
    assert isinstance(refused, Refusal) and "context of 256 tokens" in refused.text
    assert isinstance(asked(refused.needed_bytes - 1), Refusal)
    for ram in range(refused.needed_bytes, refused.needed_bytes + 40 * MIB, MIB):
        found = asked(ram)
        assert found.n_ctx >= CELL_STEP and found.total_bytes <= ram


def test_counted_sizes_are_interpolated_linearly():
    """Counted sizes are exact at counted contexts and linear in between, in whole steps of KV
    cells."""

    def count(n_ctx, n_tokens):
        return (3 * n_ctx, 1000 + n_ctx // 2) if n_tokens == 64 else None

    counted = Counted.of([(512, 64), (1024, 64), (256, 64), (256, 128)], count)
    assert [counted.at(n, 64) for n in (256, 512, 1024)] == [count(n, 64) for n in (256, 512, 1024)]
    assert counted.at(513, 64) == counted.at(768, 64) == count(768, 64)
    assert counted.at(2048, 64) == (3 * 2048, 2024)
    assert counted.at(0, 64) == (0, 1000)
    assert counted.at(512, 128) is None
    assert Counted.of([(512, 64)], count).at(4096, 64) == count(512, 64)
