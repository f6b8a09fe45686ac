"""KV cache in q8_0: less memory, nearly the same logits, and no exact token importance."""

import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.runtime.runtime import Runtime

TOKENS = np.random.default_rng(0).integers(10, 300, 60).tolist()


def opened(path, **settings):
    usual = {"ctx": 512, "threads": 1, "policy": "lru", "expert_ram": 2**21}
    return Runtime.open(Config.build(model=path, **{**usual, **settings}))


@pytest.mark.parametrize("shape", ["qwen3moe", "mixtral", "deepseek2"])
def test_planned_bytes_and_logits_of_q8_0(shape, tiny_model):
    """A q8_0 cache takes 17/32 of an f16 cache; logits differ by less than 0.15 of their spread."""
    path, taken, planned, logits = tiny_model(shape, "q4_k"), {}, {}, {}
    for kv in ("f16", "q8_0"):
        with opened(path, kv=kv) as runtime, runtime.evaluator() as e:
            logits[kv] = e.eval(TOKENS, 0)[-1]
            context = e.inside.context
            taken[kv] = context.api.llama_state_seq_get_size(context.handle, 0)
            planned[kv] = e.plan.kv_bytes
            assert (" in q8_0" in runtime.mode) == (kv == "q8_0")
    assert planned["q8_0"] * 32 == planned["f16"] * 17
    assert taken["q8_0"] == pytest.approx(taken["f16"] * 17 / 32, rel=0.02)
    difference = logits["q8_0"] - logits["f16"]
    assert 0 < np.sqrt(np.mean(difference**2)) < 0.15 * logits["f16"].std()


def test_the_exact_importance_is_refused(library, tiny_model):
    path = tiny_model("qwen3moe", "q8_0", "q4_k")
    with pytest.raises(ConfigError, match="--kv q8_0 needs flash attention"):
        opened(path, policy="dymoe", kv="q8_0", importance="exact")
