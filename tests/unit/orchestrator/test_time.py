"""Predicted times of tokens and prompts, and the predicted residency of experts."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from shapes import placed

from gguf_tools.experts import ExpertModel
from orchestrator.allocation.slots import ModelShape, SlotGroup, SlotPlan
from orchestrator.config import Config
from orchestrator.cost.disk import Bandwidth
from orchestrator.cost.losses import Skips
from orchestrator.cost.speeds import ROWS, Costs, Speeds
from orchestrator.cost.time import (
    PlanTime,
    Residency,
    TimeModel,
    cached,
    chances,
    known_uses,
    prompt_hit_rates,
    recently_used,
    resident,
    skewed,
    with_skips,
)
from orchestrator.events import SKIP
from orchestrator.plan.planning import plan_memory
from orchestrator.plan.records import Machine, PlanRequest
from orchestrator.policy.dynaexq import DynaExq

LAYERS, EXPERTS, USED = 3, 8, 2

DISK = Bandwidth(1e6, latency_s=1e-3)


def costs(expert_s=0.010, dense_s=0.030):
    """An expert takes expert_s for each row. Its 5,000 bytes take 5 ms of DISK."""
    per_row = np.array(ROWS) * expert_s
    return Costs(
        expert_s=np.tile(per_row, (LAYERS, 1, 1)),
        expert_bytes=np.full((LAYERS, 1), 5000),
        dense_s=np.array(ROWS) * dense_s,
        output_s=0.004,
        attention_s=(1e-5, 1e-6),
    )


def all_there():
    uses = np.full((LAYERS, EXPERTS), USED / EXPERTS)
    return resident(np.zeros((LAYERS, EXPERTS), int), uses, 1)


def missing(share, foreseen=0.0):
    there = all_there()
    present = np.full_like(there.present, 1.0 - share)
    return Residency(there.uses, there.mix, present, (1.0 - share,) * 2, False, foreseen)


def test_a_token_with_everything_in_memory_is_the_sum_of_its_parts():
    found = PlanTime(costs(), all_there(), DISK, 512)
    assert found.token_s() == pytest.approx(LAYERS * USED * 0.010 + 0.030 + 0.004)
    assert found.token_s(100) - found.token_s() == pytest.approx(100 * 1e-5)
    assert (found.residency.hit_rate, found.read_bytes) == (1.0, 0.0)


def test_fixed_times_are_added_per_token_and_per_decided_layer():
    besides = replace(costs(), step_s=0.5, asked_s=0.25)
    alone = PlanTime(costs(), all_there(), DISK, 512).token_s()
    unasked = PlanTime(besides, all_there(), DISK, 512)
    assert unasked.token_s() == pytest.approx(alone + 0.5)
    assert replace(unasked, asked=True).token_s() == pytest.approx(alone + 0.5 + LAYERS * 0.25)


def test_reads_are_hidden_by_computing_resident_experts():
    # Reading one expert takes 5 + 1 ms, and computing two takes 20 ms. Reading two takes 11 ms. All
    # reads are hidden.
    hidden = PlanTime(costs(), missing(0.5), DISK, 512)
    assert hidden.token_s() == pytest.approx(LAYERS * USED * 0.010 + 0.030 + 0.004)
    assert hidden.read_bytes == pytest.approx(LAYERS * USED * 0.5 * 5000)
    # At a tenth of the disk's speed. Of two experts none, one or two miss, with probabilities 1/4,
    # 1/2 and 1/4.
    slow = PlanTime(costs(), missing(0.5), Bandwidth(1e5, latency_s=1e-3), 512)
    tail = 0.020 / 6
    layer = 0.25 * 0.020 + 0.5 * (0.051 + tail) + 0.25 * (0.101 + tail)
    assert slow.token_s() == pytest.approx(LAYERS * (layer + 0.010) + 0.004)


def test_prefetches_are_also_hidden_by_dense_weights():
    disk = Bandwidth(4e5, latency_s=0.0)
    late = PlanTime(costs(), missing(1.0), disk, 512)
    early = PlanTime(costs(), missing(1.0, foreseen=1.0), disk, 512)
    # 25 ms of reading, 10 ms of dense weights, 20 ms of experts. The first layer is not predicted.
    waits = 0.010 + 0.025 + 0.020 / 6
    assert late.token_s() == pytest.approx(LAYERS * waits + 0.004)
    assert early.token_s() == pytest.approx(waits + (LAYERS - 1) * 0.030 + 0.004)
    # as many predicted experts are read in vain as were not predicted
    some = PlanTime(costs(), missing(1.0, foreseen=0.75), disk, 512)
    assert some.read_bytes == pytest.approx(late.read_bytes * (1 + 1.25 * (LAYERS - 1)) / LAYERS)


def test_reading_takes_a_core_while_threads_compute_and_not_while_they_wait():
    """Reading an expert takes 5 ms, and 4 ms of a core. The core's time counts only while threads
    compute."""

    def took(bytes_per_s, foreseen=0.0):
        disk = Bandwidth(bytes_per_s, latency_s=0.0, core_s_per_byte=0.004 / 5000)
        free = Bandwidth(bytes_per_s, latency_s=0.0)
        there = missing(1.0, foreseen)
        one, other = (PlanTime(costs(), there, each, 64) for each in (disk, free))
        assert disk.disturbs_s(0, 0.0) == 0.0
        assert one.prompt_s(64) > other.prompt_s(64)
        return (one.token_s() - other.token_s()) / LAYERS

    assert took(1e6) == pytest.approx(0.008)  # two experts, all of it during 20 ms of computation
    tail = 0.020 / 6
    assert took(1e5) == pytest.approx(0.008 * (0.020 - tail) / 0.100)  # during 20 of 100 ms
    assert took(2.5e5, 1.0) > took(2.5e5)  # predicted experts are read during more computation


def test_a_prompt_reads_each_expert_once_per_micro_batch():
    disk = Bandwidth(1e3, latency_s=0.0)  # 5 s per expert
    whole = PlanTime(costs(0.0, 0.0), missing(1.0), disk, 64).prompt_s(64)
    # the last layer computes only the last token
    n_read = (LAYERS - 1) * EXPERTS * (1 - 0.75**64) + EXPERTS * 0.25
    assert whole == pytest.approx(5 * n_read, rel=0.02)
    halves = PlanTime(costs(0.0, 0.0), missing(1.0), disk, 32).prompt_s(64)
    assert halves == pytest.approx(whole * 2 * (1 - 0.75**32) / (1 - 0.75**64), rel=0.1)
    warm = PlanTime(costs(0.0, 0.0), missing(0.5), disk, 64)
    assert warm.prompt_s(64, first=True) == pytest.approx(whole, rel=1e-6)
    assert warm.prompt_s(64) == pytest.approx(whole / 2, rel=0.02)


def test_the_first_reads_have_the_disks_first_speed():
    """The first pass of the first prompt reads at `first_bytes_per_s`. Its second part, later
    prompts and tokens read bytes that were read before."""
    disk = Bandwidth(1e3, latency_s=0.0, first_bytes_per_s=250.0)
    of = PlanTime(costs(0.0, 0.0), missing(1.0), disk, 32)
    usual = replace(of, disk=disk._replace(first_bytes_per_s=0.0))
    assert of.token_s() == usual.token_s() and of.prompt_s(64) == usual.prompt_s(64)
    both, part = usual.prompt_s(64, first=True), usual.prompt_s(32, first=True)
    assert of.prompt_s(32, first=True) == pytest.approx(4 * part, rel=0.01)
    assert of.prompt_s(64, first=True) > both
    assert of.prompt_s(64, first=True) < 4 * both


def test_skipped_experts_cost_nothing():
    tiers = np.zeros((LAYERS, EXPERTS), int)
    tiers[:, EXPERTS // 2 :] = SKIP
    there = resident(tiers, np.full((LAYERS, EXPERTS), USED / EXPERTS), 1)
    found = PlanTime(costs(), there, DISK, 64)
    assert found.token_s() == pytest.approx(LAYERS * USED / 2 * 0.010 + 0.030 + 0.004)
    assert found.read_bytes == 0 and found.residency.hit_rate == 1.0


def lru_hits(uses, n_slots, steps=6000):
    """Hit rate of a simulated LRU cache. As in the store, a step finds what was resident when it
    began."""
    rng, held = np.random.default_rng(1), OrderedDict[int, None]()
    hits = asked = 0
    for _ in range(steps):
        items = np.flatnonzero(rng.random(len(uses)) < uses).tolist()
        hits += sum(item in held for item in items)
        asked += len(items)
        for item in items:
            held[item] = None
            held.move_to_end(item)
        while len(held) > n_slots:
            held.popitem(last=False)
    return hits / asked


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.1])
def test_hit_rates_equal_those_of_a_simulated_cache(exponent):
    uses = chances(np.arange(1.0, 65.0)[None] ** -exponent, 8)[0]
    for n_slots in (16, 38, 58):
        there = recently_used(uses, n_slots)
        assert there.sum() == pytest.approx(n_slots, rel=1e-6)
        assert (uses * there).sum() / 8 == pytest.approx(lru_hits(uses, n_slots), abs=0.03)
    assert recently_used(uses, 64).min() == 1.0


def test_a_scan_over_layers_that_share_their_slots():
    n_layers, n_expert = 40, 60
    for share in (0.3, 0.6, 0.9):
        rng = np.random.default_rng(2)
        everything = [(layer, e) for layer in range(n_layers) for e in range(n_expert)]
        rng.shuffle(everything)
        n_slots = int(share * len(everything))
        held = OrderedDict.fromkeys(map(tuple, everything[:n_slots]))
        found = []
        for _ in range(2):
            hits = 0
            for layer in range(n_layers):
                there = [(layer, e) for e in range(n_expert) if (layer, e) in held]
                hits += len(there)
                for each in [*there, *((layer, e) for e in range(n_expert))]:
                    held[each] = None
                    held.move_to_end(each)
                while len(held) > n_slots:
                    held.popitem(last=False)
            found.append(hits / len(everything))
        assert prompt_hit_rates(share, True) == pytest.approx(tuple(found), abs=0.03)
    assert prompt_hit_rates(0.6, False) == (0.6, 0.6)
    assert prompt_hit_rates(1.0, True) == (1.0, 1.0)


def test_two_tiers_in_slots_of_their_own():
    shape = ModelShape(4, 2, ("high", "low"), (({0: 100}, {0: 50}),))
    slots = SlotPlan((SlotGroup(100, 4), SlotGroup(50, 1)), {(0, 0, 0): 0, (0, 0, 1): 1})
    mix = np.tile([0.75, 0.25], (1, 4, 1))
    there = cached(shape, slots, np.full((1, 4), 0.5), mix)
    assert there.mix[0, 0] == pytest.approx([0.75, 0.25])
    assert there.hit_rate == pytest.approx(1.0)  # a high copy also serves requests for low
    fewer = SlotPlan((SlotGroup(100, 2), SlotGroup(50, 4)), slots.group_of)
    there = cached(shape, fewer, np.full((1, 4), 0.5), mix)
    assert there.hit_rate == pytest.approx(0.75 * 0.5 + 0.25, abs=1e-6)


def test_hot_experts_that_stay_high_are_not_missed():
    """One expert stays in a high slot. The others share too few low slots."""
    shape = ModelShape(8, 2, ("high", "low"), (({0: 100}, {0: 50}),))
    policy = placed(DynaExq, shape, budget=350)
    assert policy.caching and policy.capacity.tolist() == [1] and policy.cached.tolist() == [5]
    uses = chances(np.array([[1.0, 30.0, 1.0, 1.0, 1.0, 40.0, 1.0, 1.0]]), 2)
    mix = policy.fractions(uses)
    assert mix[0, :, 0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0] and (mix.sum(axis=2) == 1).all()
    slots = SlotPlan((SlotGroup(100, 1), SlotGroup(50, 5)), {(0, 0, 0): 0, (0, 0, 1): 1})
    there = cached(shape, slots, uses, mix)
    assert there.present[0, 5] == 1.0
    rest = np.delete(uses[0], 5)
    found = (2 - rest.sum() + (rest * recently_used(rest, 5)).sum()) / 2
    assert there.hit_rate == pytest.approx(found)
    mean = policy.fractions(np.ones((1, 8))).mean(axis=1)
    alike = cached(shape, slots, uses, np.tile(mean, (1, 8, 1)))
    assert alike.hit_rate < there.hit_rate - 0.05


def test_predictions_for_plans_of_a_model(bindings, model):
    config = Config.build(model=model, ctx=256, threads=1, force_managed=True)
    with ExpertModel.open(model) as opened, Speeds(bindings, 1) as speeds:
        predictor = TimeModel(opened, Bandwidth(1e8), speeds, *known_uses(config, opened))
        few = {"policy": "lru", "expert_ram": opened.tier_bytes[0] // 2}

        def predicted(uses=None, **settings):
            asked = config.with_changes(**settings)
            plan = plan_memory(PlanRequest(asked), opened, Machine(8 << 30))
            return predictor.of_plan(plan, asked, uses=uses)

        whole, half = predicted(policy="lru"), predicted(**few)
        assert whole.residency.hit_rate == 1.0 and whole.read_bytes == 0.0
        assert 0.4 < half.residency.hit_rate < 0.6
        assert half.token_s() > whole.token_s() and half.read_bytes > 0
        assert half.prompt_s(64, first=True) > half.prompt_s(64) > whole.prompt_s(64)
        assert half.residency.hit_rate < predicted(skewed(opened), **few).residency.hit_rate < 1.0
        skips = predicted(**{**few, "policy": "dymoe", "low_tier": "skip", "retention": 0.5})
        assert skips.read_bytes < half.read_bytes and skips.asked and not half.asked
        # Both paths use the same kernels for a token.
        assert predicted(policy="plain", force_managed=False).token_s() == whole.token_s()


def half_there():
    """Two layers with four experts, two per token. The first half of each layer is resident."""
    present = np.tile([1.0, 1.0, 0.25, 0.0], (2, 1))
    return Residency(np.full((2, 4), 0.5), np.ones((2, 4, 1)), present)


NATS = np.array([[1.0, 1.0, 4.0, 2.0], [1.0, 1.0, 3.0, 9.0]])


def lost(before, after):
    skipped = before.uses * (before.mix - after.mix).sum(axis=2)
    return float((skipped * NATS).sum())


def test_the_cheapest_misses_are_skipped_until_the_loss_is_spent():
    known, sizes = half_there(), np.array([1, 1])
    same = with_skips(known, Skips(NATS, 0.0), sizes)
    assert (same.mix == known.mix).all() and (same.present == known.present).all()
    # Expert 3 of the first layer has 0.5 missing uses. In half of them it is the token's top
    # expert.
    some = with_skips(known, Skips(NATS, 0.25), sizes)
    assert lost(known, some) == pytest.approx(0.25)
    changed = np.argwhere(some.mix[..., 0] < 1).tolist()
    assert changed == [[0, 3]]
    more = with_skips(known, Skips(NATS, 1.2), sizes)
    assert lost(known, more) == pytest.approx(1.2)
    assert np.argwhere(more.mix[..., 0] < 1).tolist() == [[0, 2], [0, 3], [1, 2]]
    # The number of uses that find the expert resident stays the same.
    assert more.mix[..., 0] * more.present == pytest.approx(known.present)
    assert more.hit_rate > some.hit_rate > known.hit_rate
