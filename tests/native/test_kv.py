"""Keys and values in 8 bits: less memory, nearly the same logits, the same token importance."""

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.engine.engine import Engine
from orchestrator.errors import ConfigError
from orchestrator.native import context_memory

TOKENS = np.random.default_rng(0).integers(10, 300, 60).tolist()
SHAPES = ["qwen3moe", "mixtral", "deepseek2"]


def opened(path, **settings):
    usual = {"ctx": 512, "threads": 1, "policy": "lru", "expert_ram": 2**21}
    return Engine.open(Config.build(model=path, **{**usual, **settings}))


@pytest.mark.parametrize("shape", SHAPES)
def test_it_takes_what_the_plan_says(library, shape, tiny_model):
    path, taken, planned = tiny_model(shape, "q4_k"), {}, {}
    for kv in ("f16", "q8_0"):
        with opened(path, kv=kv) as engine:
            context = engine._loaded.context
            engine.eval(TOKENS, 0)
            taken[kv] = engine._steps.state.n_bytes()
            planned[kv] = engine.plan.kv_bytes
            assert sum(context_memory(library, context.handle)) > 0
            assert (" in q8_0" in engine.mode) == (kv == "q8_0")
    assert planned["q8_0"] * 32 == planned["f16"] * 17
    assert taken["q8_0"] == pytest.approx(taken["f16"] * 17 / 32, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_near(library, shape, tiny_model):
    path, logits = tiny_model(shape, "q4_k"), {}
    for kv in ("f16", "q8_0"):
        with opened(path, kv=kv) as engine:
            logits[kv] = engine.eval(TOKENS, 0)[-1]
    difference = logits["q8_0"] - logits["f16"]
    assert 0 < np.sqrt(np.mean(difference**2)) < 0.15 * logits["f16"].std()


def test_the_exact_importance_is_refused(library, tiny_model):
    path = tiny_model("qwen3moe", "q8_0", "q4_k")
    with pytest.raises(ConfigError, match="--kv q8_0 needs flash attention"):
        opened(path, policy="dymoe", kv="q8_0", importance="exact")
