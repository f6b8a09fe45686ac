"""Micro-batches of several sizes: the same bits as upstream's of that size, and what they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.experts import ExpertModel
from orchestrator.config import Config
from orchestrator.engine.engine import Engine

pytestmark = pytest.mark.usefixtures("library_folder")

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 250, 1100)]


def build(model: Path, **settings: object) -> Config:
    usual = {"ctx": 1280, "threads": 1, "use_extra_bufts": False}
    return Config.build(model=model, **(usual | settings))


@pytest.mark.parametrize("n_ubatch", [512, 1024])
def test_equal_to_upstream_in_micro_batches_of_the_same_size(
    n_ubatch: int, tiny_model: Callable[..., Path]
) -> None:
    """With slots for a third of the experts."""
    model = tiny_model("qwen3moe", "q4_k")
    with Engine.open(build(model, ubatch=n_ubatch, policy="plain")) as engine:
        expected = engine.eval(PROMPT, 0)
    with ExpertModel.open(model) as opened:
        slots = opened.tier_bytes[0] // 3
    for policy in ("lru", "dymoe", "firm"):
        config = build(model, ubatch=n_ubatch, policy=policy, expert_ram=slots)
        with Engine.open(config) as engine:
            assert f"micro-batch {n_ubatch}, context" in engine.mode
            found = engine.eval(PROMPT, 0)
            engine.store.check()
        np.testing.assert_array_equal(found[-1], expected[-1], err_msg=policy)


def test_larger_ones_read_less(tiny_model: Callable[..., Path]) -> None:
    """The third prompt in a running process, with slots for 60 % of the experts."""
    model = tiny_model("olmoe", "q4_k")
    with ExpertModel.open(model) as opened:
        slots = int(opened.tier_bytes[0] * 0.6)
    read = {}
    for n_ubatch in (256, 1024):
        config = build(model, ubatch=n_ubatch, policy="lru", expert_ram=slots)
        with Engine.open(config) as engine:
            for _ in range(3):
                engine.store.reset_stats()
                engine.eval(PROMPT[:1024], 0)
            read[n_ubatch] = sum(engine.store.stats().demand_bytes)
    assert 0 < read[1024] <= read[256] / 3


def test_the_one_that_was_chosen_is_used(tiny_model: Callable[..., Path]) -> None:
    """By the context, the store and the promise."""
    model = tiny_model("qwen3moe", "q4_k")
    with Engine.open(build(model, policy="lru", ubatch=1024)) as engine:
        whole = engine.plan
    ram = whole.total_bytes - whole.expert_bytes // 2
    with Engine.open(build(model, policy="lru", ubatch=1024, ram=ram)) as engine:
        assert engine.context.n_ubatch == engine.plan.n_ubatch == 1024
        assert engine.store.spec.max_tokens == 1024
        seen: list[int] = []
        engine.store.set_route(lambda event: seen.append(event.n_tokens), 0)
        engine.eval(PROMPT, 0)
        assert max(seen) == 1024
