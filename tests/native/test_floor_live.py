"""floor on a model: what it refuses, a replay of its run, and judging it in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.cost import losses
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.events import Phase
from orchestrator.lab.eval import EvalOptions, evaluate, render
from orchestrator.lab.replay import ReplayOptions, read_trace, replay, write_trace
from orchestrator.lab.replay.record import Disk, Recorder
from orchestrator.native.llama import Bindings
from orchestrator.policy.floor import Floor

pytestmark = pytest.mark.usefixtures("library_folder")

RNG = np.random.default_rng(3)
ANSWER = [int(t) for t in RNG.integers(0, 250, 60)]
LAYERS_LOSE = 0.02


def save_table(path: Path, model: Path, fitted: bool = True) -> None:
    """A skipped expert loses as much as its index says."""
    with ExpertModel.open(model) as opened:
        size, names = (opened.n_layers, opened.n_expert), [tier.name for tier in opened.tiers]
        loss = np.zeros((*size, len(names)))
        loss[..., 1:] = 0.1
        power = np.broadcast_to(1.0 + np.arange(size[1]), size).copy()
        fit = losses.Fit((LAYERS_LOSE,) * size[0], (*names, "skip"), "none", 1.0)
        table = losses.LossTable(
            [losses.TablePrecision(name, 4.0, True) for name in names],
            *(loss, power, np.ones(size, np.int64), "r", "rtn", "c", 9, np.full(size, 0.1)),
            fit if fitted else None,
        )
        losses.save(path, opened, table)


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3moe", "q4_k", "q2_k")


def build(model: Path, table: Path | None, **options: Any) -> Config:
    asked = {"policy": "floor", "max_loss": 0.01, "ctx": 128, "high_tier": "q4_k", **options}
    return Config.build(model=model, losses=table, threads=1, **asked)


def budget(model: Path, share: float) -> int:
    with ExpertModel.open(model) as opened:
        return int(share * opened.tier_bytes[0])


def test_it_is_refused_where_nobody_measured(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no loss table, so .* run `moe-edge calibrate"):
        Engine.open(build(model, None))
    table = tmp_path / "t.json"
    save_table(table, model, fitted=False)
    with pytest.raises(ConfigError, match=r"no factor that makes KL .* run `moe-edge calibrate"):
        Engine.open(build(model, table))


@pytest.mark.parametrize("low", [None, "q2_k"])
def test_a_replay_decides_what_the_run_did(low: str | None, model: Path, tmp_path: Path) -> None:
    """Whatever a replay's disk does. What the run lost is known to the last digit."""
    table, path = tmp_path / "t.json", tmp_path / "t.npz"
    save_table(table, model)
    more = {} if low is None else {"low_tier": low}
    config = build(model, table, expert_ram=budget(model, 0.7), **more)
    with Engine.open(config) as engine:
        assert isinstance(engine.policy, Floor) and engine.plan.skip
        assert engine.plan.tier_names == (("q4_k",) if low is None else ("q4_k", "q2_k"))
        with Recorder(engine) as recorder:
            for position, token in enumerate(ANSWER):
                engine.eval([token], position, phase=Phase.DECODE)
        write_trace(path, recorder.trace(Disk(10**8, 50)))
        meter = engine.driver.meter
        assert meter is not None
        lost, said = meter.mean(Phase.DECODE), engine.policy.report()
    assert lost == pytest.approx(said["loss"]) and 0 < said["lowered"] < said["missing"]
    trace = read_trace(path)
    result = replay(Bindings.load().library(), trace, ReplayOptions())
    run = result["runs"]["floor"]
    assert run["decode"]["mix"] == result["recorded"]["decode"]["mix"]
    assert run["kl_estimate"] == pytest.approx(lost, rel=1e-12)
    other = replay(Bindings.load().library(), trace, ReplayOptions(settings={"max_loss": 0.0}))
    assert other["runs"]["floor"]["kl_estimate"] == 0


def test_it_is_judged_in_virtual_time(model: Path, tmp_path: Path) -> None:
    """The same whatever memory and disk there are in truth; another disk is another result."""
    table, text = tmp_path / "t.json", tmp_path / "t.txt"
    save_table(table, model)
    text.write_text("The fox sat by the river and looked at the boats. " * 4)
    found = []
    for bandwidth, direct in ((10**6, True), (10**6, False), (10**11, True)):
        config = build(model, table, expert_ram=budget(model, 0.6), direct_io=direct)
        options = EvalOptions(
            text=text, tokens=40, window=64, kl=True, bandwidth=bandwidth, latency_us=9,
            compute_ms=0.1,
        )  # fmt: skip
        found.append(evaluate(config, options, lambda *_: None))
    slow, again, fast = found
    assert slow["text"] == again["text"] and slow["usage"] == again["usage"]
    assert slow["virtual"]["tpot_ms_mean"] > 10 * fast["virtual"]["tpot_ms_mean"]
    assert 0 < slow["usage"]["kl_estimate"] <= 0.012 and slow["usage"]["skip"] > 0
    assert slow["text"]["kl"][0] > 0
    printed = render(slow)
    assert "KL foreseen" in printed and "(virtual: reads of 977 KiB/s and 9 us" in printed
