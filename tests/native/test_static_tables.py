"""All experts are resident, and no policy decides.

Steps without the route hook count and compute the same as steps with it.
"""

import numpy as np
import pytest

from orchestrator.events import ABSENT

from .conftest import drawn, opened

TOKENS = drawn(90, 11)
COUNTED = ("requests", "hits", "routed", "computed", "demand_bytes")


def run(e):
    """Return logits, statistics and tokens per expert, for a prompt and 40 tokens."""
    store = e.inside.store
    layers, experts = range(e.inside.model.n_layers), range(e.inside.model.n_expert)
    store.warm([(layer, expert, 0) for layer in layers for expert in experts])
    store.reset_stats()
    store.reset_counts()
    rows = [e.eval(TOKENS[:50], 0)]
    rows += [e.eval([token], 50 + at) for at, token in enumerate(TOKENS[50:])]
    store.check()
    stats = store.stats()
    return (
        np.concatenate(rows),
        {name: np.ctypeslib.as_array(getattr(stats, name)).tolist() for name in COUNTED},
        store.take_counts(),
    )


@pytest.mark.parametrize("shape", ["qwen3moe", "olmoe", "deepseek2-fused"])
@pytest.mark.parametrize("layout", ["file", "cpu"])
def test_counts_and_logits_equal_those_with_the_hook(shape, layout, tiny_model):
    settings = {"ubatch": 32, "threads": 2, "policy": "lru", "force_managed": True}
    found = []
    for has_hook in (True, False):
        with (
            opened(tiny_model(shape, "q4_k"), layout=layout, **settings) as runtime,
            runtime.evaluator() as e,
        ):
            if has_hook:
                driver = e.inside.loaded.driver
                driver.set_route(driver.on_route_unasked)  # as a recorder does
            found.append(run(e))
            assert (sum(e.inside.store.stats().callbacks) > 0) == has_hook
            assert (e.inside.store.resident() != ABSENT).all()
    (with_hook, expected, by_hook), (without, stats, by_executor) = found
    np.testing.assert_array_equal(without, with_hook)
    np.testing.assert_array_equal(by_executor, by_hook)
    assert stats == expected
    assert stats["requests"] == stats["hits"] and min(stats["requests"]) > 0
