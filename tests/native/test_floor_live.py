"""floor on a model: what it refuses, a replay of its run, and judging it in virtual time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.eval import EvalOptions, evaluate, render
from orchestrator.policy.floor import Floor

from .conftest import build, drawn, save_losses
from .replayed import recorded, reported

ANSWER = drawn(60, 3)
N_EXPERT = 8


def save_table(path: Path, model: Path, fitted: bool = True) -> None:
    """A skipped expert loses as much as its index says."""
    fit = (0.02, ("q4_k", "q2_k", "skip")) if fitted else None
    save_losses(path, model, [0.0, 0.1], power=1.0 + np.arange(N_EXPERT), gates=0.1, fit=fit)


def floor(model: Path, table: Path | None, share: float = 1.0, **options: object) -> Config:
    asked = {"policy": "floor", "max_loss": 0.01, "ctx": 128, "high_tier": "q4_k", "losses": table}
    return build(model, share, **asked, **options)


def test_it_is_refused_where_nobody_measured(both: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no loss table, so .* run `moe-edge calibrate"):
        Engine.open(floor(both, None))
    table = tmp_path / "t.json"
    save_table(table, both, fitted=False)
    with pytest.raises(ConfigError, match=r"no factor that makes KL .* run `moe-edge calibrate"):
        Engine.open(floor(both, table))


@pytest.mark.parametrize("low", [None, "q2_k"])
def test_it_says_what_it_lost_as_a_replay_does(low: str | None, both: Path, tmp_path: Path) -> None:
    """What the run lost is known to the last digit."""
    table = tmp_path / "t.json"
    save_table(table, both)

    def answer(engine: Engine) -> float:
        assert isinstance(engine.policy, Floor) and engine.plan.skip
        assert engine.plan.tier_names == (("q4_k",) if low is None else ("q4_k", "q2_k"))
        for position, token in enumerate(ANSWER):
            engine.eval([token], position, phase=Phase.DECODE)
        return engine.driver.meter.mean(Phase.DECODE)

    more = {} if low is None else {"low_tier": low}
    run = recorded(floor(both, table, 0.7, **more), tmp_path, answer)
    said = run.policy.report()
    assert run.said == pytest.approx(said["loss"]) and 0 < said["lowered"] < said["missing"]
    again = reported(run.trace)["runs"]["floor"]
    assert 0 < again["kl_estimate"] <= 0.012 and again["decode"]["mix"]["skip"] > 0
    other = reported(run.trace, settings={"max_loss": 0.0})
    assert other["runs"]["floor"]["kl_estimate"] == 0


def test_it_is_judged_in_virtual_time(both: Path, tmp_path: Path) -> None:
    """The same whatever memory and disk there are in truth; another disk is another result."""
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
    assert "KL foreseen" in printed and "(virtual: reads of 977 KiB/s and 9 us" in printed
