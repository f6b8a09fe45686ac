"""Conversations of a server share one context, whose memory is taken from expert slots when
used."""

import json
import re
from types import SimpleNamespace

import pytest
from asgi import begun, in_a_loop
from fake_served import whole
from paths import CHAT, COMPLETIONS
from real_served import app_of, served_with
from served import DEMO
from tables import cases

from orchestrator.config import Config
from orchestrator.native import touched_memory
from orchestrator.serve.admission import Bodies, Body
from orchestrator.serve.requests import RESERVED_TOKENS, settle_length
from orchestrator.serve.wire import Refusal


def counting(n_prompt):
    """A model that counts n_prompt tokens for every prompt."""
    answer = json.dumps({"input_tokens": n_prompt}).encode()
    about = SimpleNamespace(n_cells=60_000, n_ctx=30_000)
    runtime = SimpleNamespace(query=lambda *_: whole(answer))
    return SimpleNamespace(about=about, runtime=runtime, parallel=3, max_tokens=None)


@cases(
    "data, n_prompt, cells, limit",
    ({"max_tokens": 100}, 50, 150, 100),
    ({"max_tokens": 0}, 50, 50, 0),
    ({"max_tokens": 10**6}, 50, 30_000, 10**6),  # no more than its own context
    ({}, 50, 20_000, 19_950),  # an even share of the context
    ({}, 18_000, 18_000 + RESERVED_TOKENS, RESERVED_TOKENS),
    ({}, 29_000, 30_000, 1000),
    ({"n": 3, "max_tokens": 100}, 50, 350, 100),  # several answers share their prompt
    ({"n": 3}, 18_000, 18_000 + 3 * RESERVED_TOKENS, RESERVED_TOKENS),
    ({"n": 3, "max_tokens": 29_000}, 500, 60_000, 29_000),  # all KV cells of the context
    # without counting: at most one token per byte
    ({"prompt": ["a", "b"], "max_tokens": 100}, None, 241, 100),
)
def test_kv_cells_that_a_request_reserves(data, n_prompt, cells, limit):
    served = counting(n_prompt)
    asked = dict(data)
    route = CHAT if n_prompt is not None else COMPLETIONS
    found = settle_length(route, asked, served, data.get("n", 1), Body(Bodies(None), 2**17))
    assert (found, asked["max_tokens"]) == (cells, limit)


def test_a_prompt_beyond_the_context_is_refused_before_anything_begins():
    with pytest.raises(Refusal, match="the prompt of 30000 tokens exceeds"):
        settle_length(CHAT, {}, counting(30_000), 1, Body(Bodies(None), 2**17))


@pytest.fixture(scope="module")
def served():
    """Three sequences of up to 1,024 tokens each, in a context of 2,048 KV cells that takes memory
    from expert slots."""
    settings = {"policy": "lru", "high_tier": "q4_k", "exact": True}
    sizes = {"ctx": 1024, "threads": 1, "ubatch": 64, "ram": 165 * 2**20}
    config = Config.build(model=DEMO, **settings, **sizes)
    with served_with(config, parallel=3) as made:
        yield made


def prompt(model, topic, n):
    text = f"Tell me about {topic}, please. "
    return (model.tokenize(text, add_special=True, parse_special=True) * n)[:n]


@in_a_loop
async def test_more_conversations_than_the_context_holds_are_all_answered(served):
    """Six requests on three sequences: some wait for KV cells, and the cells of idle sequences are
    freed for them."""
    model, store = served.runtime.vocabulary, served.runtime.inside.store
    shared = served.runtime.plan.shared
    assert shared is not None and served.about.n_ctx == 1024
    assert served.about.n_ctx < served.about.n_cells < 3 * served.about.n_ctx
    app = app_of(served)
    topics = ("Norway", "spiders", "the moon", "bread", "rivers", "Peru")
    usual = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    asked = [{"prompt": prompt(model, topic, 840), **usual} for topic in topics]
    for _ in range(2):
        work = [begun(app, COMPLETIONS, each)[1] for each in asked]
        answers = [(await each).json() for each in work]
        assert [each["usage"]["completion_tokens"] for each in answers] == [40] * len(topics)
        touched = touched_memory(store.library)
        held = store.stats().slot_bytes
        assert held + sum(each.resident for each in touched) <= shared.n_bytes
        assert held < shared.n_bytes // 2
        in_use = re.search(r"\((\d+) in use\)", served.runtime.mode)
        assert in_use and 840 <= int(in_use[1]) <= served.about.n_cells
    # Two idle sequences keep their KV cells until short prompts use the sequences, after a long
    # prompt.
    for topic in topics[:2]:
        await begun(app, COMPLETIONS, {"prompt": prompt(model, topic, 980), **usual})[1]
    sizes = zip(topics[2:], (980, 12, 15), strict=False)
    asked = [{"prompt": prompt(model, topic, n), **usual} for topic, n in sizes]
    work = [begun(app, COMPLETIONS, each)[1] for each in asked]
    assert [(await each).status for each in work] == [200] * 3
    store.check()
