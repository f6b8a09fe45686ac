"""Pairs of tiers: the computed precisions, and the weights of experts after others are skipped."""

import numpy as np
import pytest
from repacking import repack

from orchestrator.events import Phase
from orchestrator.native import MAX_TIERS
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn

N_KINDS, SKIPPED = 3, MAX_TIERS  # gate, up, down; the index of skipped experts in the statistics
TOKENS = drawn(12, 1)
THREE = ("q8_0", "q4_k", "q2_k")


def open_model(model, **options):
    """Open a model in which half of the experts are critical in every layer, without prefetch."""
    settings = {"retention": 0.5, "schedule": "flat", "n_ahead": 0, "expert_ram": 1 << 26}
    return Runtime.open(build(model, use_extra_bufts=False, **settings).compared(**options))


def decode(e):
    """Logits [T, n_vocab], each token decoded as a step of an answer."""
    rows = [e.eval([token], pos, phase=Phase.DECODE)[-1] for pos, token in enumerate(TOKENS)]
    return np.stack(rows)


def uniform(model):
    with open_model(model, policy="plain", expert_ram=None) as runtime, runtime.evaluator() as e:
        return decode(e)


@pytest.mark.parametrize(
    ("tiers", "high", "low"),
    [
        (("q8_0", "q4_k"), None, None),
        (("q4_k", "q3_k"), None, None),
        (("f16", "q8_0"), None, None),
        (THREE, "q8_0", "q4_k"),
        (THREE, "q8_0", "q2_k"),
        (THREE, "q4_k", "q2_k"),
    ],
)
def test_pairs_of_tiers(tiers, high, low, packed):
    """A pair of tiers from a packed file gives the same logits as two ordinary files.

    Each expert is computed in the decided tier. Neither tier alone gives these logits.
    """
    first, second = high or tiers[0], low or tiers[-1]
    options = {"policy": "dymoe", "exact_tiers": True}
    with (
        open_model(packed(*tiers), high_tier=high, low_tier=low, **options) as runtime,
        runtime.evaluator() as e,
    ):
        assert f"{first}/{second}" in runtime.mode
        found = decode(e)
        stats = e.inside.store.stats()
        routed, computed = list(stats.routed[Phase.DECODE]), list(stats.computed[Phase.DECODE])
    assert routed[0] == routed[1] > 0
    assert routed[2:] == [0] * (MAX_TIERS - 1)
    assert computed == [N_KINDS * n for n in routed[:MAX_TIERS]]

    one, other = packed(first), packed(second)
    with open_model(one, low=other, **options) as runtime, runtime.evaluator() as e:
        np.testing.assert_array_equal(found, decode(e))
    assert not np.array_equal(found, uniform(one))
    assert not np.array_equal(found, uniform(other))


@pytest.mark.parametrize("shape", ["qwen3moe", "olmoe"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_of_the_remaining_expert(shape, renormalize, tiny_model, tmp_path):
    """If the worse of two experts is skipped, `renormalize` decides the weight of the other.

    The result is compared with the same model that uses one expert per token. If weights are
    normalised (qwen3moe), that model gives its expert the sum of all weights, which must equal the
    result with `renormalize`. If not (olmoe), its expert keeps its weight, which must equal the
    result without `renormalize`.
    """
    model = tiny_model(shape, "f16")
    expected = uniform(repack(model, tmp_path / "single.gguf", expert_used_count=1))
    options = {"policy": "dymoe", "low_tier": "skip", "renormalize": renormalize}
    with open_model(model, **options) as runtime, runtime.evaluator() as e:
        found = decode(e)
        routed = e.inside.store.stats().routed[Phase.DECODE]
        assert routed[0] == routed[SKIPPED] > 0
    difference = float(np.abs(found - expected).max() / expected.std())
    if renormalize == (shape == "qwen3moe"):
        assert difference < 1e-3
    else:
        assert difference > 0.1
