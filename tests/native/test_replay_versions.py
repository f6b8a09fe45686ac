"""Replays of dynaexq, which learns usage and exchanges tiers."""

from time import monotonic

import numpy as np
import pytest

from orchestrator.cache import profile
from orchestrator.lab.replay.record import record_text
from orchestrator.lab.replay.simulate import Compute
from orchestrator.runtime.runtime import Runtime

from .conftest import build, drawn, until
from .replayed import SPEEDS, recorded, replayed

PROMPTS, ANSWER = (drawn(23, 11), drawn(9, 12)), drawn(80, 13)


def dynaexq(model, **options):
    return build(model, **({"policy": "dynaexq", "expert_ram": 2 << 20, "ubatch": 8} | options))


def evaluate(e):
    """Run two conversations: prompts in parts and forced answers. Then repeat one token.

    The repetition lasts until a promotion on a slow disk, and until update_ms has passed on a fast
    machine.
    """
    for prompt in PROMPTS:
        e.eval(prompt, 0)
        for i, token in enumerate(ANSWER):
            e.eval([token], len(prompt) + i)
    at, took_s = e.n_cached, 0.0
    wanted_s = 3e-3 * (e.inside.policy.settings.update_ms or 0)
    caching = e.inside.policy.caching

    def further():
        nonlocal took_s
        start = monotonic()
        e.eval([ANSWER[0]], at)
        took_s += monotonic() - start

    until(
        lambda: took_s >= wanted_s and (caching or e.inside.store.stats().experts_promoted), further
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transition_rate": 0, "update_steps": 8, "hysteresis": 0.0},
        {"hot_experts": 2, "hotness_decay": 0.5},
        {"expert_ram": 700 << 10, "ubatch": 1},  # low copies do not fit, so they are cached
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_a_replay_learns_the_same_hotness(both, tmp_path, options, warm):
    """The learned hotness is equal for every simulated disk, with and without a profile."""
    if warm:
        path = tmp_path / "hot.json"
        with Runtime.open(dynaexq(both)) as runtime, runtime.evaluator() as e:
            # the policy learns shares of tokens, which decay quickly
            size = e.inside.model.n_layers, e.inside.model.n_expert
            profile.save(path, e.inside.model, np.random.default_rng(11).random(size) * 0.1)
        options = options | {"profile": path}
    run = recorded(dynaexq(both, **options), tmp_path, evaluate)
    assert (run.stats.experts_promoted > 0) != ("expert_ram" in options)
    assert run.trace.arrays["start_hotness"].any() == warm
    for speed in SPEEDS[::2]:
        outcome, policy = replayed(run.trace, speed, Compute(1000.0, 1000.0))
        assert list(outcome.stats.requests) == list(run.stats.requests)
        found, learned = (each.learned().hotness for each in (policy, run.policy))
        np.testing.assert_array_equal(found, learned)


def test_measuring_the_dense_share_does_not_affect_the_policy(both, tmp_path):
    """The skipped steps after a recording are in neither the trace nor the profile."""
    path = tmp_path / "hot.json"
    with (
        Runtime.open(dynaexq(both, update_steps=1, profile=path)) as runtime,
        runtime.evaluator() as e,
    ):
        trace = record_text(e, "one two three four " * 20, 60, prefill=20)
        model = e.inside.model
    assert trace.arrays["step_tokens"].tolist() == [8, 8, 4] + 40 * [1]
    assert all(0 < share <= 1 for share in trace.header.dense_share)
    _, policy = replayed(trace, SPEEDS[0])
    np.testing.assert_allclose(profile.load(path, model), policy.learned().hotness, rtol=1e-5)
