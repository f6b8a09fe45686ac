"""Micro-batches of 512 and 1,024 tokens: logits equal upstream's of the same size."""

import numpy as np
import pytest
from answering import answered

from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from . import conftest
from .conftest import build, drawn

PROMPT = drawn(1100, 3)


def opened(model, share=0, **settings):
    return conftest.opened(model, share, ctx=1280, use_extra_bufts=False, **settings)


@pytest.mark.parametrize("n_ubatch", [512, 1024])
def test_equal_to_upstream_in_micro_batches_of_the_same_size(n_ubatch, one):
    with opened(one, ubatch=n_ubatch, policy="plain") as runtime, runtime.evaluator() as e:
        expected = e.eval(PROMPT, 0)
    for policy in ("lru", "dymoe", "firm"):
        with (
            opened(one, 1 / 3, ubatch=n_ubatch, policy=policy) as runtime,
            runtime.evaluator() as e,
        ):
            assert f"micro-batch {n_ubatch}, context" in runtime.mode
            found = e.eval(PROMPT, 0)
            e.inside.store.check()
        np.testing.assert_array_equal(found[-1], expected[-1], err_msg=policy)


def test_the_chosen_micro_batch_is_used(one):
    """The context, the store and the plan use the chosen micro-batch."""
    with opened(one, policy="lru", ubatch=1024) as runtime, runtime.evaluator() as e:
        whole = e.plan
    ram = whole.total_bytes - whole.expert_bytes // 2
    with opened(one, policy="lru", ubatch=1024, ram=ram) as runtime, runtime.evaluator() as e:
        assert e.inside.context.n_ubatch == e.plan.n_ubatch == 1024
        assert e.inside.store.spec.max_tokens == 1024
        seen = []
        e.inside.store.set_route(lambda event: seen.append(event.n_tokens), 0)
        e.eval(PROMPT, 0)
        assert max(seen) == 1024


def test_answers_are_computed_in_micro_batches_of_one_token(one):
    """The server core opens a context with a batch of two tokens."""
    answers = []
    for n_ubatch in (1, 8):
        config = build(one, policy="lru", ctx=64, ubatch=n_ubatch)
        with Runtime.open(config, answering=Answering()) as runtime:
            answers.append(answered(runtime, PROMPT[:12], 4, ignore_eos=True)["tokens"])
    assert answers[0] == answers[1] and len(answers[0]) == 4
