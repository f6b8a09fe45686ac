"""DynaExq end to end: what is resident is what is computed, and no token waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestrator.allocation.pools import Places, TierPools
from orchestrator.allocation.slots import ModelShape
from orchestrator.cache import profile
from orchestrator.config import Config
from orchestrator.engine.engine import Engine, Sampling
from orchestrator.errors import BudgetError, ConfigError, PolicyError
from orchestrator.events import ABSENT, Phase
from orchestrator.policy import dynaexq

from .conftest import DEVICES, greedy
from .transition_driver import HANG_S

pytestmark = pytest.mark.usefixtures("library_folder")

PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, 250, 40)]
DEMO = Path(__file__).parents[2] / "models/demo/moe-edge-demo.gguf"
PLENTY = 64 << 20


def build(model: Path, **options: object) -> Config:
    settings = {"ctx": 512, "ubatch": 32, "threads": 1, "use_extra_bufts": False} | options
    return Config.build(model=model, **settings)


def logits(engine: Engine, n_decode: int = 12) -> np.ndarray:
    """[1 + n_decode, n_vocab] of a prompt in two chunks and of greedy decoding."""
    return greedy(engine, PROMPT, n_decode)


def run(model: Path, **options: object) -> np.ndarray:
    with Engine.open(build(model, **options)) as engine:
        return logits(engine)


def arrive(engine: Engine) -> None:
    """Until every transition is complete, and one step further, so that it is published."""
    end = time.monotonic() + HANG_S
    while np.not_equal(*engine.store.states()).any():
        assert time.monotonic() < end
        engine.store.begin_step(Phase.DECODE)
        time.sleep(0.001)


def test_all_low_is_the_low_file(both: Path, tiny_model: Callable[..., Path]) -> None:
    found = run(both, policy="dynaexq", hot_experts=0, expert_ram=PLENTY)
    np.testing.assert_array_equal(found, run(tiny_model("qwen3moe", "q2_k")))


def test_all_high_is_the_high_file(both: Path, tiny_model: Callable[..., Path]) -> None:
    found = run(both, policy="dynaexq", expert_ram=PLENTY)
    np.testing.assert_array_equal(found, run(tiny_model("qwen3moe", "q4_k")))


@pytest.mark.parametrize("device", DEVICES)
def test_promoting_everything(
    both: Path,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    device: str | None,
) -> None:
    """From the low file to the high one and back, by transitions alone; also on a device."""

    def room_for_both(
        shape: ModelShape, _budget: int, _most: int | None
    ) -> tuple[TierPools, list[int]]:
        places = [Places((tier,), shape.n_expert, reserve=False) for tier in (0, 1)]
        return TierPools(shape, places), [0] * shape.n_layers

    monkeypatch.setattr(dynaexq, "resident_plan", room_for_both)
    options = {"policy": "dynaexq", "expert_ram": PLENTY, "update_steps": 0}
    with Engine.open(build(both, device=device or "cpu", **options)) as engine:
        store = engine.store
        everyone = np.argwhere(store.resident() == 1).tolist()
        low = logits(engine)
        np.testing.assert_array_equal(low, run(tiny_model("qwen3moe", "q2_k")))
        assert store.transition([(*each, 0) for each in everyone]) == len(everyone)
        arrive(engine)
        np.testing.assert_array_equal(logits(engine), run(tiny_model("qwen3moe", "q4_k")))
        assert store.transition([(*each, 1) for each in everyone]) == len(everyone)
        arrive(engine)
        np.testing.assert_array_equal(logits(engine), low)
        stats = store.stats()
        assert stats.experts_promoted == stats.experts_demoted == len(everyone)
        assert bool(sum(stats.copy_bytes)) == bool(sum(stats.host_hits)) == bool(device)
        store.check()


def test_a_hot_set_computes_alike_however_it_came_to_be(both: Path, tmp_path: Path) -> None:
    """Swapped into memory while running, or read so from a profile."""
    options = {"policy": "dynaexq", "expert_ram": PLENTY, "hot_experts": 3, "update_steps": 0}
    with Engine.open(build(both, **options)) as engine:
        first = logits(engine)
        n_expert = engine.model.n_expert
        wanted = [0, n_expert - 2, n_expert - 1]
        for layer in range(engine.model.n_layers):
            for down, up in ((1, wanted[1]), (2, wanted[2])):
                for move in ((layer, down, 1), (layer, up, 0)):
                    assert engine.store.transition([move]) == 1
                    arrive(engine)
        swapped = logits(engine)
        scores = np.zeros((engine.model.n_layers, n_expert))
        scores[:, wanted] = 1.0
        path = tmp_path / "hot.json"
        profile.save(path, engine.model, scores)
    assert not np.array_equal(first, swapped)
    np.testing.assert_array_equal(run(both, profile=path, **options), swapped)


def test_where_low_copies_do_not_fit_they_are_cached(
    both: Path, tiny_model: Callable[..., Path]
) -> None:
    reference = run(tiny_model("qwen3moe", "q2_k"))
    options = {"policy": "dynaexq", "hot_experts": 0}
    with pytest.raises(BudgetError, match="smallest that works with the policy dynaexq") as refused:
        run(both, expert_ram=1, **options)
    least = refused.value.needed_bytes
    for budget in (least, 2 * least):
        with Engine.open(build(both, expert_ram=budget, **options)) as engine:
            assert "caching" in engine.mode
            np.testing.assert_array_equal(logits(engine), reference)
            stats = engine.store.stats()
            assert stats.slot_bytes_peak <= stats.budget_bytes
            assert sum(stats.demand_bytes) > 0
            engine.store.check()


def test_no_token_waits_while_the_topic_changes() -> None:
    """The demo model with a third of its experts high, over several texts."""
    config = build(
        DEMO,
        policy="dynaexq",
        high_tier="q4_k",
        low_tier="q2_k",
        hot_experts=5,
        expert_ram=PLENTY,
        ctx=1024,
        ubatch=128,
        update_steps=8,
    )
    questions = ["Tell me a story about a fox.", "What is photosynthesis?"]
    end = time.monotonic() + HANG_S
    with Engine.open(config) as engine:
        assert "5 of 16 experts a layer high" in engine.mode
        for question in questions:
            tokens = engine.render_chat([{"role": "user", "content": question}])
            assert "".join(engine.generate(tokens, Sampling(temp=0.0), 60))
            last = engine.last_stats
            assert last is not None
            assert (last.hit_rate, last.prefill_hit_rate, last.wait_ms) == (1.0, 1.0, 0.0)
            assert 0 < last.mix["q4_k"] < 1
            assert last.mix == last.computed and set(last.mix) == {"q4_k", "q2_k"}
            if question == questions[-1] and engine.store.stats().experts_promoted == 0:
                assert time.monotonic() < end, "no expert was promoted"
                questions.append(questions[len(questions) % 2])  # a slow disk
        stats = engine.store.stats()
        assert stats.experts_promoted > 0
        assert 0 <= stats.experts_demoted - stats.experts_promoted <= 4
        assert last.policy["promotions"] <= stats.experts_promoted
        assert last.policy["high_per_layer"] == [5, 5]
        assert list(stats.demand_bytes) == list(stats.prefetch_bytes) == [0, 0]
        assert list(stats.wait_us) == list(stats.callbacks) == [0, 0]
        assert stats.evictions == stats.waves == stats.transitions_failed == 0
        assert stats.transitions_rejected == 0
        assert stats.slot_bytes_peak <= stats.budget_bytes
        assert not (engine.store.resident() == ABSENT).any()
        engine.store.check()


def test_counts_are_what_was_routed(both: Path) -> None:
    config = build(both, policy="dynaexq", expert_ram=PLENTY, update_steps=0)
    with Engine.open(config) as engine:
        policy = engine.policy
        seen: list[np.ndarray] = []
        original = policy.step_done

        def step_done(report):  # type: ignore[no-untyped-def]
            seen.append(report.counts)
            return original(report)

        policy.step_done = step_done  # type: ignore[method-assign]
        policy.wants_report = lambda _: True  # type: ignore[method-assign]
        k = engine.model.n_expert_used
        engine.eval(PROMPT[:20], 0)
        engine.eval([7], 20)
        # the last layer of a prompt sees only the token that has an output
        assert seen[0].sum(axis=1).tolist() == [20 * k] * (engine.model.n_layers - 1) + [k]
        assert seen[1].sum(axis=1).tolist() == [k] * engine.model.n_layers
        assert not engine.store.take_counts().any()


def test_hotness_outlives_the_engine(both: Path, tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    options = {"policy": "dynaexq", "expert_ram": PLENTY, "hot_experts": 2, "profile": path}
    with Engine.open(build(both, **options)) as engine:
        logits(engine)
        assert isinstance(engine.policy, dynaexq.DynaExq)
        learned = engine.policy.hotness
        engine.set_policy("lru")  # and back: nothing is forgotten
        engine.set_policy("dynaexq")
        assert isinstance(engine.policy, dynaexq.DynaExq)
        np.testing.assert_array_equal(engine.policy.hotness, learned)
    with Engine.open(build(both, **options, update_steps=0)) as engine:
        expected = np.argsort(-learned, axis=1, kind="stable")[:, :2]
        found = [sorted(np.flatnonzero(row == 0)) for row in engine.store.resident()]
        assert found == [sorted(row) for row in expected.tolist()]


def test_what_does_not_go_together_is_refused(
    both: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match="--low FILE"):
        run(tiny_model("qwen3moe", "q4_k"), policy="dynaexq")
    with pytest.raises(PolicyError, match="not --low-tier skip"):
        run(both, policy="dynaexq", low_tier="skip")
    with pytest.raises(ConfigError, match="--retention has no effect with --policy dynaexq"):
        run(both, policy="dynaexq", retention=0.5)
    with pytest.raises(ConfigError, match="--profile has no effect with --policy dymoe"):
        run(both, policy="dymoe", profile=tmp_path / "hot.json")


@pytest.mark.parametrize(
    ("budget_share", "high", "pair"),
    [
        (0.9, None, "q4_k/q2_k"),
        (1.2, None, "q8_0/q4_k"),
        (5.0, None, "q8_0/q4_k"),
        (0.9, "q8_0", "q8_0/q2_k"),  # the smaller low tier, since q4_k does not fit
        (1.2, "q8_0", "q8_0/q4_k"),
    ],
)
def test_the_pair_is_the_best_that_fits(
    tiny_model: Callable[..., Path], budget_share: float, high: str | None, pair: str
) -> None:
    """Low copies of all experts in the best tier possible, high ones in the next better, or in
    the one that was named."""
    model = tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k")
    with Engine.open(build(model, policy="lru", high_tier="q4_k")) as engine:
        assert engine.plan.slots is not None
        whole = engine.plan.slots.total_bytes
    options = {"policy": "dynaexq", "expert_ram": int(budget_share * whole), "high_tier": high}
    with Engine.open(build(model, **options)) as engine:
        assert pair in engine.mode
