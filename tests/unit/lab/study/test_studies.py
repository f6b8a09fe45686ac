"""Policies of the studies, recall and cosine, and recorded logits."""

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.events import SKIP, DecisionBuffer, Phase, RouteEvent, StoreView
from orchestrator.lab.calibrate.measure import tensor
from orchestrator.lab.eval.arithmetic import cosine
from orchestrator.lab.study.activations import (
    ROUTER_LOGITS,
    activations_of,
    recall,
    top,
)
from orchestrator.lab.study.subject import random_critical, usual_high
from orchestrator.runtime.runtime import Runtime

K, N = 4, 16


class Inner:
    """Decode: the two heaviest experts of a token are high, the others low. Prefill: the first five
    experts are high, the others skipped."""

    critical = (1, 2)

    def decide(self, event, view, out):
        if event.phase == Phase.DECODE:
            out.tier_array[event.ids_array[0, 2:]] = 1
        else:
            out.tier_array[5:] = SKIP


def make_event(step, phase):
    ids = np.array([[3, 1, 9, 12]], np.int32)
    empty = np.zeros((1, 1, K))
    event = RouteEvent(
        ids,
        np.ones((1, K), np.float32),
        np.zeros(1, np.int32),
        empty.astype(np.int32),
        empty.astype(np.float32),
        np.zeros(1, np.float32),
        np.full(1, phase, np.uint8),
        np.zeros(1, np.int32),
    )
    event.step, event.phase, event.layer = step, int(phase), 2
    return event


def decide(policy, event):
    out = DecisionBuffer(np.zeros(N, np.uint8), np.zeros(N, np.uint8), np.zeros(8, np.int64))
    policy.decide(event, StoreView(*np.zeros((2, 4, N), np.uint8)), out)
    return out.tier_array


def test_random_critical_experts_are_as_many_but_any():
    policy = random_critical(Inner(), seed=1)
    high = np.zeros(N, int)
    for step in range(400):
        tiers = decide(policy, make_event(step, Phase.DECODE))
        assert sorted(tiers[[3, 1, 9, 12]]) == [0, 0, 1, 1]
        high[[3, 1, 9, 12]] += tiers[[3, 1, 9, 12]] == 0
    assert (np.abs(high[[3, 1, 9, 12]] - 200) < 60).all()
    for step in range(20):
        tiers = decide(policy, make_event(step, Phase.PREFILL))
        assert sorted(tiers[[3, 1, 9, 12]]) == [0, 0, SKIP, SKIP]
    assert policy.critical == (1, 2)


def test_recall_and_cosine_are_their_definitions():
    predicted, actual = np.array([[1, 2], [3, 4]]), np.array([[2, 1], [4, 5]])
    assert recall(predicted, actual).tolist() == [1.0, 0.5]
    assert recall(predicted, actual[:, :1]).tolist() == [1.0, 1.0]
    assert top(np.array([[0.1, 0.9, 0.5]]), 2).tolist() == [[1, 2]]
    a, b = np.random.default_rng(1).normal(size=(2, 5, 8))
    expected = [x @ y / np.sqrt((x @ x) * (y @ y)) for x, y in zip(a, b, strict=True)]
    assert np.allclose(cosine(a, b), expected)


def test_recorded_logits_choose_the_experts_that_the_store_sees(model):
    seen = {}
    config = Config.build(model=model, policy="dymoe", low_tier="q2_k", high_tier="q8_0", threads=1)
    with Runtime.open(config) as runtime, runtime.evaluator() as e:
        tokens = e.tokenize("The fox sat by the river and looked at the stars.")

        class Watch:
            def __getattr__(self, name):
                return getattr(own, name)

            def decide(self, event, view, out):
                seen[event.layer] = event.ids_array.copy(), event.tokens_array.copy()

        own = e.inside.policy
        e.inside.driver.policy = Watch()
        e.eval(tokens, 0, phase=Phase.PREFILL)
        layer_ids = list(e.inside.model.layer_ids)
        router = tensor(e.inside.model, f"blk.{layer_ids[0]}.ffn_gate_inp.weight")
    found, again = activations_of(model, [tokens, tokens], 1)
    k = seen[0][0].shape[1]
    for layer, il in enumerate(layer_ids):
        ids, places = seen[layer]
        ours = np.sort(top(found[ROUTER_LOGITS, il], k)[places], axis=1)
        assert (ours == np.sort(ids, axis=1)).mean() > 0.95, f"layer {il}"
        assert np.array_equal(found[ROUTER_LOGITS, il], again[ROUTER_LOGITS, il])
    assert router is not None
    x = found["ffn_norm", layer_ids[0]]
    assert np.allclose(x @ router.T, found[ROUTER_LOGITS, layer_ids[0]], atol=1e-2)


@pytest.mark.parametrize(
    ("tiers", "high"),
    [
        (("q8_0", "q4_k", "q2_k"), "q4_k"),
        (("f16", "q4_1", "q2_0"), "q4_1"),
        (("q8_0", "iq4_nl", "q2_k"), "iq4_nl"),
        (("q4_k", "q2_k"), "q4_k"),
        (("q8_0", "q4_k"), "q8_0"),  # the lowest tier is not the high one
        (("q8_0",), "q8_0"),
    ],
)
def test_the_usual_high_tier_has_4_bits(tiers, high):
    assert usual_high(tiers) == high
