"""The studies' own decisions and arithmetic, how they divide a text, and what they refuse."""

import sys

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.events import SKIP, DecisionBuffer, Phase, RouteEvent, StoreView
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.eval.arithmetic import share
from orchestrator.lab.eval.text import Window
from orchestrator.lab.study import activations
from orchestrator.lab.study.near_bits import NearTiers
from orchestrator.lab.study.policies import RandomCritical
from orchestrator.lab.study.residency import NEVER, Residency
from orchestrator.lab.study.subject import Subject, halves

K, N = 4, 16


class Inner:
    """The two heaviest of a token's experts high, the others low; in prefill the first five."""

    critical = (1, 2)

    def decide(self, event, view, out):
        if event.phase == Phase.DECODE:
            out.tier_array[event.ids_array[0, 2:]] = 1
        else:
            out.tier_array[5:] = SKIP


def make_event(step, phase):
    ids, none = np.array([[3, 1, 9, 12]], np.int32), np.zeros((1, 1, K), np.float32)
    event = RouteEvent(
        *(ids, np.ones((1, K), np.float32), np.zeros(1, np.int32), none.astype(np.int32), none),
        *(np.zeros(1, np.float32), np.full(1, phase, np.uint8), np.zeros(1, np.int32)),
    )
    event.step, event.phase, event.layer = step, int(phase), 2
    return event


def decide(policy, event):
    out = DecisionBuffer(np.zeros(N, np.uint8), np.zeros(N, np.uint8), np.zeros(8, np.int64))
    policy.decide(event, StoreView(*np.zeros((2, 4, N), np.uint8)), out)
    return out.tier_array


def test_random_critical_experts_are_as_many_but_any():
    policy = RandomCritical(Inner(), seed=1)
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
    assert activations.recall(predicted, actual).tolist() == [1.0, 0.5]
    assert activations.recall(predicted, actual[:, :1]).tolist() == [1.0, 1.0]
    assert activations.top(np.array([[0.1, 0.9, 0.5]]), 2).tolist() == [[1, 2]]
    a, b = np.random.default_rng(1).normal(size=(2, 5, 8))
    expected = [x @ y / np.sqrt((x @ x) * (y @ y)) for x, y in zip(a, b, strict=True)]
    assert np.allclose(activations.cosine(a, b), expected)


def test_recorded_logits_choose_the_experts_that_the_store_sees(model):
    seen = {}
    config = Config.build(model=model, policy="dymoe", low_tier="q2_k", high_tier="q8_0", threads=1)
    with Engine.open(config) as engine:
        tokens = engine.tokenize("The fox sat by the river and looked at the stars.")

        class Watch:
            def __getattr__(self, name):
                return getattr(own, name)

            def decide(self, event, view, out):
                seen[event.layer] = event.ids_array.copy(), event.tokens_array.copy()

        own = engine.policy
        engine.driver.policy = Watch()
        engine.eval(tokens, 0, phase=Phase.PREFILL)
        layer_ids = list(engine.model.layer_ids)
        router = activations.dense(engine.model, f"blk.{layer_ids[0]}.ffn_gate_inp.weight")
    with activations.ActivationRecorder(model, 64, 1) as recorder:
        found = recorder.read(tokens)
        again = recorder.read(tokens)
    k = seen[0][0].shape[1]
    for layer, il in enumerate(layer_ids):
        ids, places = seen[layer]
        ours = np.sort(activations.top(found[activations.ROUTER_LOGITS, il], k)[places], axis=1)
        assert (ours == np.sort(ids, axis=1)).mean() > 0.95, f"layer {il}"
        assert np.array_equal(
            found[activations.ROUTER_LOGITS, il], again[activations.ROUTER_LOGITS, il]
        )
    x = found["ffn_norm", layer_ids[0]]
    assert np.allclose(x @ router.T, found[activations.ROUTER_LOGITS, layer_ids[0]], atol=1e-2)


def test_a_study_needs_matplotlib(study_on, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = study_on("depth", text, tmp_path)
    assert result.exit_code == 1
    assert "a plot needs matplotlib: run `pip install" in result.stderr


REFUSED = {
    "depth --policy lru": "leave out --policy",
    "depth --retention 0.5": "leave out --retention",
    "depth --reuse": "a study chooses how it judges",
    "depth --near-bits 3": "--near-bits is for context: the study depth has no use for it",
    "depth --uniform q3_k": "depth has no use for --uniform",
    "memory --uniform iq2_xxs": "give --calib TEXT",
    "memory --uniform q9_k": "unknown tier q9_k",
    "accuracy --max-tokens 78": "78 tokens are too few for a study, whose figures would be noise: "
    "512",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_no_study_can_do_is_said(study_on, text, tmp_path, monkeypatch, words):
    monkeypatch.setattr("orchestrator.lab.study.study.LEAST_TOKENS", 512)
    name, *options = words.split()
    result = study_on(name, text, tmp_path / "out", *options)
    assert result.exit_code == 1 and REFUSED[words] in result.stderr
    assert not (tmp_path / "out").exists()


def test_near_tiers_are_one_of_each_width():
    five = NearTiers.of(("q8_0", "q4_k", "q3_k", "iq3_xxs", "q2_k"))
    assert five == NearTiers(("q4_k", "q3_k", "q2_k"), (4, 3, 2))
    assert five.uniform(3.0) == "q3_k" and five.uniform(2.5) is None


def window(domain, n_scored):
    return Window(list(range(n_scored + 1)), 1, domain)


def test_each_domain_is_halved_in_the_order_of_the_text():
    windows = [window("a", 10), window("b", 5), window("a", 10), window("a", 10), window("b", 5)]
    windows += [window("a", 10), window("c", 90), window("c", 10)]
    first, second = halves(windows)
    assert first == [windows[i] for i in (0, 1, 2, 6)]
    assert second == [windows[i] for i in (3, 4, 5, 7)]
    assert halves([window("", 1), window("", 100)]) == ([window("", 1)], [window("", 100)])


def test_share_is_a_ratio_of_means_with_a_paired_error():
    rng = np.random.default_rng(1)
    whole = rng.normal(1.0, 2.0, 4000)
    exact = share(0.25 * whole, whole)
    assert exact.value == pytest.approx(0.25) and exact.error < 1e-12
    repeats = [
        share(0.25 * (draw := rng.normal(1.0, 0.5, 400)) + rng.normal(0, 0.3, 400), draw)
        for _ in range(400)
    ]
    spread = np.std([each.value for each in repeats])
    assert np.mean([each.error for each in repeats]) == pytest.approx(spread, rel=0.15)
    assert np.isnan(share(whole, np.zeros(4000)).value)


@pytest.fixture
def subject(model, text):
    config = Config.build(model=model, threads=1, ctx=64, ram=1 << 40)
    options = EvalOptions(text=text, tokens=64, window=16)
    return Subject(config, options, lambda what, done: None)


def fixed(subject, n_high, used):
    """The text with a hot set that never changes."""
    settings = Residency(subject).settings(n_high, **NEVER)
    with subject.open(settings, used) as engine:
        return subject.score(engine, "")


def test_what_hotness_says_is_high_is_resident_and_computed(subject):
    scores = subject.random_uses(seed=3)
    with subject.open(Residency(subject).settings(3, **NEVER), scores) as engine:
        assert subject.score(engine, "").slot_bytes == Residency(subject).budget_bytes(3)
        resident = engine.store.resident()
    high = np.sort(np.argsort(-scores, axis=1)[:, :3], axis=1)
    assert [np.flatnonzero(row == 0).tolist() for row in resident] == high.tolist()
    for n_high, tier in ((subject.n_expert, subject.high), (0, subject.low)):
        row = fixed(subject, n_high, None)
        with subject.open(subject.uniform(tier)) as engine:
            alone = subject.score(engine, "")
        assert np.array_equal(row.text.nll, alone.text.nll)
        assert row.high == (1.0 if n_high else 0.0)


def test_uses_are_what_was_routed(subject):
    found = subject.uses(subject.windows, subject.high)
    assert found.sum(axis=1) == pytest.approx(np.full(subject.n_layers, subject.n_expert_used))
    hottest, coldest = (fixed(subject, 2, used) for used in (found, found.max() - found))
    n_hot = np.sort(found, axis=1)[:, -2:].sum() / found.sum()
    assert hottest.high == pytest.approx(n_hot, abs=0.02)  # routing moves with precision
    assert coldest.high < n_hot
