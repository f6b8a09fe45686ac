"""`floor` on a model: refused without a loss table, replayed, and evaluated in virtual time."""

import json

import numpy as np
import pytest
from answering import answered

from orchestrator.cost import losses
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.eval import EvalOptions, evaluate, render
from orchestrator.policy.floor import Floor
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn, save_losses
from .replayed import recorded, reported

ANSWER = drawn(60, 3)
N_EXPERT = 8


def save_table(path, model, **ranges):
    """Write a loss table in which skipping expert i has the power 1 + i."""
    fit, power = (0.02, ("q4_k", "q2_k", "skip")), 1.0 + np.arange(N_EXPERT)
    save_losses(path, model, [0.0, 0.1], power=power, gates=0.1, fit=fit, **ranges)


def floor(model, table, share=1.0, **options):
    asked = {"policy": "floor", "max_loss": 0.01, "ctx": 128, "high_tier": "q4_k", "losses": table}
    return build(model, share, **(asked | options))


def infinite(data):
    data["kl"]["factors"][0] = float("inf")
    return json.dumps(data)


def unfitted(data):
    return json.dumps({key: value for key, value in data.items() if key != "kl"})


TABLES = [
    (None, "has no loss table: run `moe-edge calibrate"),
    (
        lambda data: json.dumps({**data, "version": 2}),
        "has another format version: run `moe-edge calibrate",
    ),
    (
        lambda data: json.dumps({**data, "model": "0" * 64}),
        "another file .*run `moe-edge calibrate",
    ),
    (
        lambda data: json.dumps(data)[:-9],
        "not a loss table, or is damaged: run `moe-edge calibrate",
    ),
    (infinite, "not a loss table, or is damaged: run `moe-edge calibrate"),
    (unfitted, "cannot predict the quality loss.*run `moe-edge calibrate"),
]


@pytest.mark.parametrize(
    "asked", [{"policy": "floor"}, {"max_loss": 0.01}, {"policy": "floor", "max_loss": 0.0}]
)
@pytest.mark.parametrize(("damage", "said"), TABLES)
def test_refused_without_a_valid_loss_table(damage, said, asked, both, tmp_path):
    """The refusal is one line, before anything is loaded.

    A running model with another policy continues.
    """
    model = tmp_path / both.name
    model.symlink_to(both)
    table = losses.default_path(model)
    if damage is not None:
        save_table(table, model)
        table.write_text(damage(json.loads(table.read_text())))
    config = build(model, 0.7, ctx=128, high_tier="q4_k", **asked)
    with pytest.raises(ConfigError, match=said) as refused:
        Runtime.open(config)
    assert "moe-edge calibrate" in str(refused.value) and "\n" not in str(refused.value)
    if damage is not None:
        with pytest.raises(ConfigError, match=said):
            Runtime.open(config.with_changes(losses=table))
    with (
        Runtime.open(build(model, 0.7, ctx=128, policy="lru")) as runtime,
        runtime.evaluator() as e,
    ):
        before = e.eval([1], 0)
        with pytest.raises(ConfigError, match=said):
            runtime.set(policy="floor")
        np.testing.assert_array_equal(e.eval([1], 0), before)


@pytest.mark.parametrize("low", [None, "q2_k"])
def test_the_reported_loss_and_its_replay(low, both, tmp_path):
    """The reported loss equals the meter's mean, and a replay stays below 1.2 times `max_loss`."""
    table = tmp_path / "t.json"
    save_table(table, both)

    def answer(e):
        assert isinstance(e.inside.policy, Floor) and e.plan.skip
        assert e.plan.tier_names == (("q4_k",) if low is None else ("q4_k", "q2_k"))
        for position, token in enumerate(ANSWER):
            e.eval([token], position, phase=Phase.DECODE)
        return e.inside.driver.meter.mean(Phase.DECODE)

    more = {} if low is None else {"low_tier": low}
    run = recorded(floor(both, table, 0.7, **more), tmp_path, answer)
    said = run.policy.report()
    assert run.said == pytest.approx(said["loss"]) and 0 < said["lowered"] < said["missing"]
    again = reported(run.trace)["runs"]["floor"]
    assert 0 < again["kl_estimate"] <= 0.012 and again["decode"]["mix"]["skip"] > 0
    other = reported(run.trace, settings={"max_loss": 0.0})
    assert other["runs"]["floor"]["kl_estimate"] == 0


def test_evaluation_in_virtual_time(both, tmp_path):
    """Results depend on the simulated disk only, not on the real memory and disk."""
    table, text = tmp_path / "t.json", tmp_path / "t.txt"
    save_table(table, both)
    text.write_text("The fox sat by the river and looked at the boats. " * 4)
    found = []
    for bandwidth, direct in ((10**6, True), (10**6, False), (10**11, True)):
        options = EvalOptions(
            text=text, tokens=40, window=64, kl=True, bandwidth=bandwidth, latency_us=9,
            compute_ms=0.1,
        )  # fmt: skip
        config = floor(both, table, 0.6, direct_io=direct)
        found.append(evaluate(config, options, lambda *_: None))
    slow, again, fast = found
    assert slow["text"] == again["text"] and slow["usage"] == again["usage"]
    assert slow["virtual"]["tpot_ms_mean"] > 10 * fast["virtual"]["tpot_ms_mean"]
    assert 0 < slow["usage"]["kl_estimate"] <= 0.012 and slow["usage"]["skip"] > 0
    assert slow["text"]["kl"][0] > 0
    printed = render(slow)
    assert (
        "KL estimated" in printed
        and "(simulated: the disk reads 977 KiB/s with a latency of 9 us" in printed
    )


@pytest.mark.parametrize(("routing", "halved"), [((-9.0, 9.0), False), ((8.0, 9.0), True)])
@pytest.mark.parametrize("virtual", [False, True])
def test_unusual_routing_halves_the_limit(virtual, routing, halved, both, tmp_path, monkeypatch):
    """`max_loss` is halved if the routing is outside the range of the loss table.

    This starts after the first 24 tokens. Evaluation and answers report the halved limit.
    """
    monkeypatch.setattr("orchestrator.runtime.driver.ROUTING_TOKENS", 24)
    table, text = tmp_path / "t.json", tmp_path / "t.txt"
    save_table(table, both, routing=routing)
    config = floor(both, table, 0.6)
    text.write_text("The fox sat by the river and looked at the boats. " * 4)
    simulated = {"bandwidth": 10**6, "latency_us": 9, "compute_ms": 0.1} if virtual else {}
    options = EvalOptions(text=text, tokens=100, window=64, kl=True, **simulated)
    usage = evaluate(config, options, lambda *_: None)["usage"]
    assert (0.5 < usage["limit_halved"] < 1.0) if halved else usage["limit_halved"] == 0.0
    limit = 0.006 if halved else 0.01
    assert 0 < usage["kl_estimate"] <= 1.2 * limit
    assert usage["kl_low"] == usage["kl_estimate"]
    if virtual:
        return
    with Runtime.open(config, answering=Answering()) as runtime:
        found = answered(runtime, ANSWER[:30], 20, ignore_eos=True)
        assert found["costs"]["limit_halved"] == halved
        assert runtime.stats().policy["max_loss"] == (0.005 if halved else 0.01)
        runtime.set(max_loss=0.02)
        assert runtime.inside.policy.allowed == (0.01 if halved else 0.02)
