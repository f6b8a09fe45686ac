"""Answers that are computed again while nothing is asked for: what is learned of them, and that
everything else stays as it was."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.experts import ExpertModel
from gguf_tools.experts.hparams import Hyperparameters
from gguf_tools.file.layout import GATE_UP
from gguf_tools.quantize.ggml import load_ggml
from orchestrator.allocation.estimate import Outputs, Probed
from orchestrator.cache.profile import UsageKeeper
from orchestrator.config import Sampling
from orchestrator.cost import losses
from orchestrator.cost.planner import Planner
from orchestrator.engine import probe, sample
from orchestrator.engine.learned import Learned
from orchestrator.events import ABSENT, SKIP, Phase
from orchestrator.lab.calibrate.measure import stored
from orchestrator.memory.machine import Device
from orchestrator.native.llama import Model

from . import conftest
from .conftest import HANG_S, drawn

PROMPT, MORE = drawn(24, 5), drawn(9, 6)
N_ANSWER = 16
DEMO = Path(__file__).parents[2] / "models/demo/moe-edge-demo.gguf"


def opened(model, share=0.6, **settings):
    usual = {"remember": True, "probes": 2, "use_extra_bufts": False}
    return conftest.opened(model, share, **(usual | settings))


def answer(engine, prompt=PROMPT, seed=1):
    """What the context holds behind an answer."""
    list(engine.generate(prompt, Sampling(temp=1.0, seed=seed), N_ANSWER))
    return list(engine._steps.cached)


def idle(engine):
    engine.idle()
    engine.driver._idle.wait()
    engine.end_idle()
    engine.store.check()


def probed(engine):
    return engine._loader.learned.usage.probed()


@pytest.mark.parametrize("policy", ["lru", "dymoe", "floor"])
def test_it_leaves_everything_as_it_was(policy, one, monkeypatch):
    monkeypatch.setattr(UsageKeeper, "save", lambda _: None)  # all begin with nothing

    def told():
        """What is said behind an idle time: the next token's logits, an answer more, and counts;
        what was in memory; what experts put out; how many answers were probed."""
        with opened(one, policy=policy) as engine:
            driver = engine.driver
            tokens = answer(engine)
            idle(engine)
            used, resident = driver.used(), engine.store.resident() != ABSENT
            exact = [engine.eval([7], len(tokens)), answer(engine, [*tokens, *MORE], 2)]
            outputs = driver.outputs()
            engine.store.check()
            return [*exact, used, driver.used()], resident, outputs, probed(engine).answers

    exact, resident, outputs, n = told()
    with monkeypatch.context() as patched:
        patched.setattr(Learned, "probe", lambda *_: None)
        without, resident_without, outputs_without, none = told()
    assert (n, none) == (1, 0)
    for found, expected in zip(exact, without, strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(outputs.tokens, outputs_without.tokens)
    # Threads add up in any order.
    np.testing.assert_allclose(outputs.squares, outputs_without.squares, rtol=1e-6)
    # One slot of each kind is for what passes: the one that would have gone next.
    assert (resident_without & ~resident).sum(axis=1).max() <= 1


def test_it_ends_in_the_middle(one, monkeypatch):
    """Who asks waits for no more than the step that runs, which is cut off."""
    begun, seen = threading.Event(), []

    def slow(logits):
        seen.append(0)
        if len(seen) == 5:
            begun.set()
            assert conftest.until(lambda: engine.driver._idle._stopping) is None
        return real(logits)

    real = probe.log_softmax
    with opened(one, policy="lru") as engine:
        tokens = answer(engine)
        expected = engine.eval([7], len(tokens))
    with opened(one, policy="lru") as engine:
        answer(engine)
        monkeypatch.setattr(probe, "log_softmax", slow)
        engine.idle()
        assert begun.wait(HANG_S)
        np.testing.assert_array_equal(engine.eval([7], len(tokens)), expected)
        engine.store.check()
        # Two tokens were computed twice, and the third one once.
        found, n_used = probed(engine), engine.model.n_expert_used
        assert len(seen) == 5 and found.answers == 1 and (found.gates[0] == 3 * n_used).all()


def nothing(_model, _patch):
    pass


def calibrated(model, _patch):
    conftest.save_losses(losses.default_path(model), model, [0.0], gates=0.1, fit=(0.02, ("skip",)))


def damaged(model, _patch):
    losses.default_path(model).write_text("{")


def weighs_first(_model, patch):
    patch.setattr(Hyperparameters, "weighs_first", True)


def has_part(_model, patch):
    patch.setattr(Model, "has_part", True)


@pytest.mark.parametrize(
    ("is_learned", "case", "settings"),
    [
        (True, nothing, {}),
        (True, damaged, {}),
        (False, calibrated, {}),
        (False, weighs_first, {}),
        (False, has_part, {}),
        (False, nothing, {"remember": False}),
        (False, nothing, {"probes": 0}),
        (True, nothing, {"low_tier": "q2_k"}),
        (False, nothing, {"share": 2.0}),
    ],
)
def test_it_is_done_where_that_was_said(
    is_learned, case, settings, one, both, tmp_path, monkeypatch
):
    model = tmp_path / one.name
    model.symlink_to(both if "low_tier" in settings else one)
    case(model, monkeypatch)
    with opened(model, policy="floor", max_loss=0.5, **settings) as engine:
        said = "or chat on: what skipping loses is learned behind answers" in str(engine.note)
        for seed in range(3):
            answer(engine, drawn(24, seed), seed)
            idle(engine)
        assert said == is_learned and probed(engine).answers == 3 * is_learned
        plan, planner = engine.plan, engine._loader.planner
        assert planner.learns(engine.config, plan) == is_learned
        assert not planner.learns(
            engine.config, replace(plan, device=Device("cuda0", "a card", 1 << 33, 1 << 33))
        )
        answer(engine, drawn(24, 9), 9)
        assert engine.last_stats.kl_learned == is_learned
        assert (engine.policy.report()["lowered"] > 0) == (is_learned or case is calibrated)
    with opened(model, policy="floor", max_loss=0.5, **settings) as engine:
        assert not is_learned or "by what was learned" in engine.mode


def test_there_is_none_behind_a_full_context(one):
    with opened(one, policy="lru") as engine:
        answer(engine, drawn(engine.n_ctx - 3))  # an answer of three tokens, room for none
        idle(engine)
        assert not probed(engine).moments.any()


def test_a_policy_goes_by_what_is_learned(one):
    """Lossless until three answers have been probed; then it skips at once, and at the next start
    from the first token on."""
    allowed = {"policy": "floor", "max_loss": 0.5}

    def lowered(engine):
        return float(engine.policy.report()["lowered"] or 0.0)

    with opened(one, **allowed) as engine:
        assert "It is lossless, since there is no loss table" in str(engine.note)
        for seed in range(3):
            answer(engine, drawn(24, seed), seed)
            assert lowered(engine) == 0 and engine.last_stats.kl_estimate is None
            idle(engine)
        answer(engine, drawn(24, 8), 8)
        stats = engine.last_stats
        assert lowered(engine) > 0 and stats.kl_learned and 0 < stats.kl_estimate <= 0.5
        known = probed(engine)
        assert known.error > 0
        # Small moves cost more than in proportion: of another limit, the policy and what is said of
        # an answer have another scale from the next token on.
        policy, cost = engine.policy, engine.policy._costs[0].skip[0]
        engine.change("max_loss", float(known.moments[3] / known.moments[0] / 2))
        spent, n = policy._spent, policy._tokens
        answer(engine, drawn(24, 9), 9)
        mean = (policy._spent - spent) / (policy._tokens - n)
        assert policy._costs[0].skip[0] == pytest.approx(2**0.3 * cost)
        assert 0 < engine.last_stats.kl_estimate == pytest.approx(mean)
    with opened(one, **allowed) as engine:
        np.testing.assert_allclose(probed(engine).moments, known.moments)
        assert "lossless" not in str(engine.note)
        assert "at most 0.5 nats a token from q4_k by what was learned" in engine.mode
        answer(engine)
        assert lowered(engine) > 0 and engine.last_stats.kl_learned
    # A lossless chat says once that the next start could skip.
    with opened(one, policy="lru") as engine:
        usage = engine._loader.learned.usage
        usage._known = replace(usage._known, probed=Probed.none(engine.model.n_layers), errors={})
        said = []
        for seed in range(4):
            answer(engine, drawn(24, seed), seed)
            idle(engine)
            said.append(engine.prompt_notes())
        assert [len(each) for each in said] == [0, 0, 1, 0]


def test_a_lower_tier_is_used_by_what_is_learned(packed):
    asked, both = {"policy": "floor", "low_tier": "q2_k"}, packed("q8_0", "q2_k")
    for seed in range(3):  # in one run or in three
        with opened(both, max_loss=0.01, **asked) as engine:
            answer(engine, drawn(24, seed), seed)
            assert engine.store.stats().computed[Phase.DECODE][1] == 0
            idle(engine)
            sampled = engine._loader.learned.usage.errors(["q8_0", "q2_k"])
            assert sampled.tokens.all() and probed(engine).answers == seed + 1
    with opened(both, max_loss=0.01, **asked) as engine:
        assert "at most 0.01 nats a token from q8_0 by what was learned" in engine.mode
        for seed in range(3):
            answer(engine, drawn(24, seed), seed)
        assert engine.store.stats().computed[Phase.DECODE][1] > 0
        assert 0 < engine.last_stats.kl_estimate <= 0.01 and engine.last_stats.kl_learned
        # A probe needs high copies; the low ones that were there come back.
        for layer, expert in np.argwhere(engine.store.resident() == ABSENT).tolist():
            engine.store.bring(layer, expert, 1)
        low = engine.store.resident() == 1
        idle(engine)
        found = engine.store.resident()[low]
        assert probed(engine).answers == 4 and len(found) > 2 and (found != ABSENT).mean() > 0.6
    # Who spends no loss keeps to a table.
    with opened(both, policy="dymoe", low_tier="q2_k") as engine:
        assert not engine._loader.planner.learns(engine.config, engine.plan)
        assert engine.losses.of_plan(engine.plan) is None


def test_a_sample_says_how_far_a_tier_is_off(packed, tiny_model, monkeypatch):
    for path in (packed("q8_0", "q2_k"), tiny_model("deepseek2-fused", "q8_0", "q4_k")):
        with ExpertModel.open(path) as model, monkeypatch.context() as whole:
            none, ggml = Outputs.none((model.n_layers, model.n_expert)), load_ggml()
            few = sample.sample(model, (0, 1), none, lambda: True)
            whole.setattr(sample, "_ROWS", 10**9)
            every = sample.sample(model, (0, 1), none, lambda: True)
            of_last = 0.0
            for kind in model.kinds(-1):
                better, lower = (stored(model, -1, kind, 2, ggml, tier) for tier in (0, 1))
                error = np.square(better - lower).sum() / np.square(better).sum()
                of_last += error * (1 + (kind == GATE_UP))
            assert every.squares[-1, 2] / every.tokens[-1, 2] == pytest.approx(of_last, rel=1e-4)
            assert (few.tokens == 2 * len(model.kinds(0))).all()
            ratio = few.squares / few.tokens * every.tokens / every.squares
            assert 0.6 < ratio.min() < ratio.max() < 1.6

            # It ends before the next matrix, with whole experts, and goes on from there.
            left = iter([True] * (2 * len(model.kinds(0)) + 1) + [False])
            some = sample.sample(model, (0, 1), none, left.__next__)
            assert np.argwhere(some.tokens).tolist() == [[0, 0], [1, 0]]
            rest = sample.sample(model, (0, 1), some, lambda: True)
            np.testing.assert_array_equal((some + rest).squares, every.squares)
            monkeypatch.setattr(sample.os, "pread", lambda *_: b"")
            with pytest.raises(OSError, match="cut"):
                sample.sample(model, (0, 1), none, lambda: True)
            monkeypatch.undo()


def test_the_scale_of_the_demo(tmp_path, monkeypatch):
    """What is learned of a text that the model does not know by heart is off its table by no more
    than texts differ. A loss then takes a lossless plan or floor, and none that was not learned."""
    model = tmp_path / DEMO.name
    model.symlink_to(DEMO.resolve())
    lossless = {"policy": "lru", "threads": 1, "ctx": 512}
    with opened(model, **lossless) as engine:
        text = engine.tokenize((DEMO.parent / "README.md").read_text("utf-8"))
        for start in range(0, 4 * 64, 64):
            tokens = text[start : start + 64]
            engine.eval(tokens[:16], 0)
            for at in range(16, len(tokens)):
                engine.eval([tokens[at]], at, Phase.DECODE)
            engine._answer = range(16, len(tokens))
            idle(engine)
        found = engine.losses.learned(["q8_0"], engine.store.outputs())
        scale = np.exp(-probed(engine).error)
        uses = engine.driver.used() / 64
    with ExpertModel.open(DEMO) as file:
        table = losses.load(losses.default_path(DEMO), file).estimate(["q8_0"])
    skipped = np.full(uses.shape, SKIP)
    ratio = scale * found.of_uses(uses, skipped) / table.of_uses(uses, skipped)
    assert 0.5 < ratio < 5
    config = conftest.build(model, 0.6, max_loss=0.05)
    with ExpertModel.open(model) as file:
        shown = Planner(config, file).frontier(config)
    assert {each.kl for each in shown.candidates if each.policy == "floor"} == {0.05}
    others = [each.kl for each in shown.candidates if each.policy != "floor"]
    assert {*others} == {0.0, None} and shown.taken.kl is not None and not shown.why_not
