"""dynaexq on a model: the resident tier is computed, and no token waits."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from asking import needs_in

from orchestrator.allocation.pools import Places, TierPools
from orchestrator.errors import BudgetError, ConfigError, PolicyError
from orchestrator.events import ABSENT, Phase
from orchestrator.plan.records import PlanRequest
from orchestrator.policy import dynaexq
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn, greedy, until

PROMPT = drawn(40)
DEMO = Path(__file__).parents[2] / "models/demo/moe-edge-demo.gguf"
AMPLE = 64 << 20


def opened(model, answering=None, **options):
    usual = {"policy": "dynaexq", "expert_ram": AMPLE, "ubatch": 32, "use_extra_bufts": False}
    needs = needs_in(options)
    return Runtime.open(PlanRequest(build(model, **(usual | options)), needs), answering=answering)


def logits(e):
    """Logits of a prompt in two chunks and of 12 greedily decoded tokens."""
    return greedy(e, PROMPT, 12)


def run(model, **options):
    with opened(model, **options) as runtime, runtime.evaluator() as e:
        return logits(e)


def arrive(e):
    """Wait until every transition is complete and published."""
    until(
        lambda: np.equal(*e.inside.store.states()).all(),
        lambda: e.inside.store.begin_step(Phase.DECODE),
    )


def test_logits_after_a_promotion_and_a_demotion_of_all_experts(
    both, tiny_model, monkeypatch, device
):
    """Logits equal those of the high file, and after the demotion those of the low file."""

    def pools_for_all(shape, _budget, _most):
        every = [shape.n_expert] * shape.n_layers
        places = [Places((tier,), every, reserve=False) for tier in (0, 1)]
        return TierPools(shape, places), [0] * shape.n_layers

    high, low = (
        run(tiny_model("qwen3moe", tier), policy="plain", expert_ram=None)
        for tier in ("q4_k", "q2_k")
    )
    monkeypatch.setattr(dynaexq, "resident_plan", pools_for_all)
    with opened(both, device=device or "cpu", update_steps=0) as runtime, runtime.evaluator() as e:
        store = e.inside.store
        experts = np.argwhere(store.resident() == 1).tolist()
        np.testing.assert_array_equal(logits(e), low)
        for tier, expected in ((0, high), (1, low)):
            assert store.transition([(*each, tier) for each in experts]) == len(experts)
            arrive(e)
            np.testing.assert_array_equal(logits(e), expected)
        stats = store.stats()
        assert stats.experts_promoted == stats.experts_demoted == len(experts)
        assert bool(sum(stats.copy_bytes)) == bool(sum(stats.host_hits)) == bool(device)
        store.check()


def test_low_copies_that_do_not_fit_are_cached(both, tiny_model):
    reference = run(tiny_model("qwen3moe", "q2_k"), policy="plain", expert_ram=None)
    with pytest.raises(BudgetError, match="smallest that works with the policy dynaexq") as refused:
        run(both, expert_ram=1, hot_experts=0)
    least = refused.value.needed_bytes
    for budget in (least, 2 * least):
        with opened(both, expert_ram=budget, hot_experts=0) as runtime, runtime.evaluator() as e:
            assert "a cache for" in runtime.mode
            np.testing.assert_array_equal(logits(e), reference)
            stats = e.inside.store.stats()
            assert stats.slot_bytes_peak <= stats.budget_bytes
            assert sum(stats.demand_bytes) > 0
            e.inside.store.check()


def test_no_token_waits_while_the_topic_changes():
    """With a third of the demo model's experts high, promotions never make a token wait."""
    options = {"high_tier": "q4_k", "low_tier": "q2_k", "hot_experts": 5, "update_steps": 8}
    with opened(DEMO, Answering(), ctx=1024, ubatch=128, **options) as runtime:
        assert "5 of 16 experts per layer in q4_k" in runtime.mode
        store, asked = runtime.inside.store, 0

        def ask():
            nonlocal asked
            question = ("Tell me a story about a fox.", "What is photosynthesis?")[asked % 2]
            messages = [{"role": "user", "content": question}]
            body = {"messages": messages, "max_tokens": 60, "temperature": 0}
            with closing(runtime.submit(json.dumps(body).encode())) as answer:
                assert next(iter(answer))["choices"][0]["message"]["content"]
                last = answer.costs()
            assert (last["hit_rate"], last["prefill_hit_rate"], last["wait_ms"]) == (1.0, 1.0, 0.0)
            assert 0 < last["mix"]["q4_k"] < 1
            assert last["mix"] == last["computed"] and set(last["mix"]) == {"q4_k", "q2_k"}
            asked += 1

        # on a slow disk, promotions take longer than two answers
        until(lambda: asked >= 2 and store.stats().experts_promoted, ask)
        stats, told = store.stats(), runtime.stats().policy
        assert 0 <= stats.experts_demoted - stats.experts_promoted <= 4
        assert told["promotions"] <= stats.experts_promoted and told["high_per_layer"] == [5, 5]
        assert list(stats.demand_bytes) == list(stats.prefetch_bytes) == [0, 0]
        assert list(stats.wait_us) == list(stats.callbacks) == [0, 0]
        assert stats.evictions == stats.waves == stats.transitions_failed == 0
        assert stats.transitions_rejected == 0
        assert stats.slot_bytes_peak <= stats.budget_bytes
        assert not (store.resident() == ABSENT).any()
        store.check()


def test_counts_equal_the_routed_experts(both):
    """A step's counts equal the routed experts of a prompt, one token, and three sequences."""
    with opened(both, update_steps=0, sequences=3) as runtime, runtime.evaluator() as e:
        policy = e.inside.policy
        seen = []
        original = policy.on_step

        def on_step(report):
            seen.append(report.counts)
            return original(report)

        policy.on_step = on_step
        policy._wants_report = lambda _: True
        k, n_layers = e.inside.model.n_expert_used, e.inside.model.n_layers
        e.eval(PROMPT[:20], 0)
        e.eval([7], 20)
        for sequence in range(3):
            e.fork(sequence)
        e.decode_batch([7, 8, 7], [0, 1, 2])
        # in a prompt's last layer, only the token with logits is routed
        assert seen[0].sum(axis=1).tolist() == [20 * k] * (n_layers - 1) + [k]
        for counts, n_tokens in zip(seen[1:], (1, 3), strict=True):
            assert counts.sum(axis=1).tolist() == [n_tokens * k] * n_layers
        assert seen[2].max() > 1
        assert not e.inside.store.take_counts().any()


def test_hotness_is_kept_in_the_profile(both, tmp_path):
    options = {"hot_experts": 2, "profile": tmp_path / "hot.json"}
    with opened(both, **options) as runtime:
        with runtime.evaluator() as e:
            logits(e)
        learned = runtime.inside.policy.learned().hotness
        runtime.set(policy="lru")  # switching policies keeps what was learned
        runtime.set(policy="dynaexq")
        np.testing.assert_array_equal(runtime.inside.policy.learned().hotness, learned)
    with opened(both, **options, update_steps=0) as runtime, runtime.evaluator() as e:
        expected = np.argsort(-learned, axis=1, kind="stable")[:, :2]
        found = [sorted(np.flatnonzero(row == 0)) for row in e.inside.store.resident()]
        assert found == [sorted(row) for row in expected.tolist()]


def test_conflicting_settings_are_refused(one, both, tmp_path):
    with pytest.raises(PolicyError, match="--low FILE"):
        run(one)
    with pytest.raises(PolicyError, match="leave out --low-tier skip"):
        run(both, low_tier="skip")
    with pytest.raises(ConfigError, match="--retention has no effect with --policy dynaexq"):
        run(both, retention=0.5)
    with pytest.raises(ConfigError, match="--profile has no effect with --policy dymoe"):
        run(both, policy="dymoe", profile=tmp_path / "hot.json")


@pytest.mark.parametrize(
    ("budget_share", "high", "pair"),
    [
        (0.9, None, "q4_k/q2_k"),
        (1.2, None, "q8_0/q4_k"),
        (5.0, None, "q8_0/q4_k"),
        (0.9, "q8_0", "q8_0/q2_k"),  # q2_k, because q4_k does not fit
        (1.2, "q8_0", "q8_0/q4_k"),
    ],
)
def test_the_best_pair_of_tiers_that_fits_is_used(three, budget_share, high, pair):
    """The low tier is the best one in which all experts fit.

    The high tier is the next better one, or the named one.
    """
    with (
        opened(three, policy="lru", high_tier="q4_k", expert_ram=None) as runtime,
        runtime.evaluator() as e,
    ):
        whole = e.plan.slots.total_bytes
    with (
        opened(three, expert_ram=int(budget_share * whole), high_tier=high) as runtime,
        runtime.evaluator() as e,
    ):
        assert pair in runtime.mode
