"""Context-aware placement on the demo model's three precisions, and its replay."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from orchestrator.cli.options import DEMO
from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.events import Phase
from orchestrator.lab.replay import read_trace, write_trace
from orchestrator.lab.replay.record import Disk, Recorder
from orchestrator.policy.context import ContextAware

from .replayed import replayed_exactly
from .transition_driver import HANG_S

pytestmark = pytest.mark.usefixtures("library_folder")

REPO = Path(__file__).resolve().parents[2]
PROMPTS = (
    "<|im_start|>user\ntell me a story about a bear<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nwhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
)
ANSWER = "Once upon a time a kind bear lived by the sea, and one day it found a big basket. " * 3


def build(**options: object) -> Config:
    asked = {"policy": "context", "hot_experts": 4, "ctx": 256, "transition_rate": 0} | options
    return Config.build(model=REPO / DEMO, threads=1, **asked)


def converse(engine: Engine) -> None:
    """Two conversations, with forced answers."""
    for text in PROMPTS:
        prompt, answer = engine.tokenize(text), engine.tokenize(ANSWER)
        engine.eval(prompt, 0)
        for at, token in enumerate(answer):
            engine.eval([token], len(prompt) + at)


def until_placed(engine: Engine, policy: ContextAware) -> None:
    """One token again and again: a disk that rests for a moment outlasts an answer."""
    end = monotonic() + HANG_S
    while policy._wanted is not None:
        assert monotonic() < end, "the experts are never placed"
        engine.eval([engine.tokenize("day")[0]], 60)


@pytest.mark.parametrize("exact", [False, True])
def test_it_places_every_expert_and_no_token_waits(exact: bool) -> None:
    """Also where studies ask for decisions that do not depend on what is in memory."""
    with Engine.open(build(exact_tiers=exact)) as engine:
        policy, store = engine.policy, engine.store
        assert isinstance(policy, ContextAware)
        converse(engine)
        until_placed(engine, policy)
        stats = store.stats()
        assert list(stats.hits) == list(stats.requests)
        assert list(stats.demand_bytes) == list(stats.wait_us) == [0, 0]
        assert policy.updates == 2 and stats.transition_bytes > 0
        assert stats.transitions_rejected == stats.transitions_failed == 0
        resident, target = store.states()
        assert (resident == target).all() and policy._wanted is None
        for tier, n in enumerate((4, 6, 6)):
            assert ((resident == tier).sum(axis=1) == n).all()
        assert min(stats.computed[Phase.DECODE][:3]) > 0
        # Placed, it reads nothing more.
        read = store.stats().transition_bytes
        for at, token in enumerate(engine.tokenize("It was a good day.")):
            engine.eval([token], 60 + at)
        assert store.stats().transition_bytes == read


@pytest.mark.parametrize(
    "options", [{}, {"ubatch": 8, "near_tiers": "q2_k", "near_bits": 2.0, "prior_tokens": 0.0}]
)
def test_its_replay_is_exact(tmp_path: Path, options: dict[str, object]) -> None:
    """Hits, mix and moves on the recorded clock, also where a prompt comes in parts."""
    with Engine.open(build(**options)) as engine:
        assert isinstance(engine.policy, ContextAware)
        with Recorder(engine) as recorder:
            converse(engine)
            until_placed(engine, engine.policy)
        trace, stats = recorder.trace(Disk(10**9, 50)), engine.store.stats()
        learned = engine.policy.hotness
    assert learned is not None and len(np.unique(trace.arrays["published"][:, 3])) > 1
    write_trace(tmp_path / "t.npz", trace)
    trace = read_trace(tmp_path / "t.npz")
    rows = replayed_exactly(trace)
    assert rows["promoted"]["recorded"] == stats.experts_promoted > 0
