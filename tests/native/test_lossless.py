"""With one tier, logits of a managed model equal upstream's, bit for bit."""

import numpy as np
import pytest

from gguf_tools.experts import ExpertModel
from orchestrator.errors import BudgetError

from .conftest import DEVICES, drawn, greedy, opened

DEVICE = DEVICES[1]
SHAPES = (
    *("qwen3moe", "qwen2moe", "olmoe", "mixtral"),
    *("deepseek", "deepseek2", "deepseek2-fused", "phimoe"),
)
TWO = {"policy": "dymoe", "high_tier": "q4_k", "low_tier": "q2_k"}
# All experts are critical, and slots for the low tier are reserved.
ALL = {**TWO, "retention": 0.999}
# Three layers that vote, with tuning, so that every step prefetches other experts.
FIRM = {"policy": "firm", "prefetch": "on", "agree": "mol", "tune_steps": 1, "tune_tokens": 30}
AMPLE = 64 << 20
PROMPT = drawn(40)


def run(model, n_decode, **options):
    """Return logits [1 + n_decode, n_vocab] of a prompt in two chunks and of greedy decoding."""
    usual = {"ctx": 512, "ubatch": 32, "threads": 2, "use_extra_bufts": False}
    with opened(model, **(usual | options)) as runtime, runtime.evaluator() as e:
        rows = greedy(e, PROMPT, n_decode)
        if e.inside.managed:
            e.inside.store.check()
            stats = e.inside.store.stats()
            assert stats.slot_bytes_peak <= stats.budget_bytes
    return rows


def smallest_budget(model, **options):
    with pytest.raises(BudgetError) as refused:
        run(model, 0, expert_ram=1, **options)
    return refused.value.needed_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_at_every_budget(shape, tiny_model):
    """Logits equal upstream's at every budget.

    The smallest budget has one slot per group, so every layer with two experts needs waves.
    """
    model = tiny_model(shape, "q4_k")
    reference = run(model, 12)
    assert np.isfinite(reference).all()
    with ExpertModel.open(model) as file:
        whole = file.tier_bytes[0]
    least = smallest_budget(model, policy="lru")
    assert least < whole // 4
    for budget in (2 * whole, whole // 2, least):
        found = run(model, 12, policy="lru", expert_ram=budget)
        np.testing.assert_array_equal(found, reference, err_msg=f"{budget} bytes")


@pytest.mark.parametrize(
    ("shape", "tiers", "n_decode", "options", "factors"),
    [
        *(("qwen3moe", (tier,), 220, {"policy": "lru"}, (3,)) for tier in ("f16", "q8_0")),
        *(("qwen3moe", (tier,), 220, {"policy": "lru"}, (3,)) for tier in ("q4_k", "q2_k")),
        ("qwen3moe", ("q4_k",), 40, {}, (2,)),  # the default with one tier
        # slots per layer, look-ahead and prefetch
        ("qwen3moe", ("q4_k", "q2_k"), 40, ALL, (1, 2, 20)),
        ("qwen3moe", ("q4_k", "q2_k"), 40, {**ALL, "device": DEVICE}, (2,)),
        # matrices that are loaded one by one
        *(
            (shape, ("q4_k",), 40, {**FIRM, "prefetch_kinds": n, "tune": tune}, (1, 3))
            for n, tune in ((1, "all"), (2, "climb"), (3, "all"))
            for shape in ("qwen3moe", "deepseek2-fused")
        ),
        # late copies to the device, which poison their destinations
        *(
            (shape, ("q4_k",), 12, {"policy": "lru", "device": DEVICE}, (100, 3, 1))
            for shape in ("qwen3moe", "deepseek2-fused", "mixtral")
        ),
    ],
)
def test_equal_with_every_policy(shape, tiers, n_decode, options, factors, tiny_model):
    """Logits equal upstream's with every policy, bit for bit.

    factors: multiples of the smallest budget.
    """
    model = tiny_model(shape, *tiers)
    reference = run(model, n_decode)
    budget = smallest_budget(model, **options)
    for factor in factors:
        found = run(model, n_decode, expert_ram=factor * budget, **options)
        np.testing.assert_array_equal(found, reference, err_msg=f"{factor}")


@pytest.mark.parametrize(
    ("tier", "options"),
    [
        ("q2_k", {"policy": "lru", "high_tier": "q2_k", "expert_ram": 1 << 20}),
        ("q2_k", {"policy": "dynaexq", "low_tier": "q2_k", "hot_experts": 0, "expert_ram": AMPLE}),
        ("q8_0", {"policy": "dynaexq", "expert_ram": AMPLE}),
        ("q8_0", {"policy": "mixed", "expert_ram": AMPLE}),
    ],
)
def test_one_tier_of_a_packed_file_equals_the_exported_file(tier, options, three, tiny_model):
    found = run(three, 40, **options)
    np.testing.assert_array_equal(found, run(tiny_model("qwen3moe", tier), 40))


def test_tiers_on_a_device_equal_those_in_host_memory(both):
    """With exact tiers, logits of a store on a device equal those of a store in host memory.

    A low request without a high copy computes the low tier.
    """
    options = {**TWO, "exact_tiers": True, "retention": 0.5, "n_ahead": 0}
    options["expert_ram"] = 2 * smallest_budget(both, device=DEVICE, **ALL)
    found = run(both, 40, device=DEVICE, **options)
    np.testing.assert_array_equal(found, run(both, 40, device="cpu", **options))
