"""The steps that a model computes to see what they take leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.engine import Engine
from orchestrator.native import Library

POLICIES = (
    {"policy": "lru", "expert_ram": 300_000},
    {"policy": "dynaexq", "expert_ram": 2_200_000, "update_steps": 1},
    {"policy": "context", "expert_ram": 2_200_000},
)


@pytest.mark.parametrize("settings", POLICIES, ids=lambda each: each["policy"])
def test_a_warm_up_leaves_nothing_behind(
    library: Library, tiny_model: Callable[..., Path], settings: dict[str, object]
) -> None:
    config = Config.build(
        model=tiny_model("qwen3moe", "q4_k", "q2_k"), ctx=64, ubatch=16, threads=1, **settings
    )
    rows = []
    for warm in (False, True):
        with Engine.open(config) as engine:
            if warm:
                engine._loaded.warm_up()
                stats = engine.store.stats()
                assert not any(stats.requests) and not any(map(sum, stats.routed))
                assert not engine.store.take_counts().any()
                # one expert a layer is what it reads
                assert (engine.store.resident() < 255).any()
            rows.append(engine.eval([5, 6, 7, 8], 0))
            engine.store.check()
    if settings["policy"] == "lru":  # others compute with what is there by now
        np.testing.assert_array_equal(rows[0], rows[1])
