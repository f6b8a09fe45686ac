"""No prompt is read twice: turns, other conversations in between, a restart."""

from pathlib import Path

import numpy as np
import pytest
from answering import evaluated, first_logits
from orchestrator.runtime.texts import ChatTemplate

from .conftest import opened

DRAWN = np.random.default_rng(0).integers(10, 300, (6, 200)).tolist()
FIRST, OTHER, THIRD, QUESTION, ANOTHER, SYSTEM = DRAWN
MIB = 2**20
CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}}
CALLED = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"celsius": [-3, 1.5, 0]}'},
]
TOOLS = Path(__file__).parents[1] / "unit/serve/tools.jinja"


@pytest.fixture(scope="module")
def path(library, tiny_model):
    return tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k", seed=1)


def open_engine(path, **settings):
    usual = {"policy": "lru", "expert_ram": 2 * MIB, "ctx": 1024, "cache_ram": 8 * MIB}
    return opened(path, **(usual | settings))


@pytest.fixture
def engine(path):
    with open_engine(path) as opened:
        yield opened


def said(engine, prompt):
    """The conversation so far, with an answer to the prompt, all of it read."""
    evaluated(engine, prompt)
    return list(engine._steps.cached)


def test_a_further_turn_the_same_again_and_an_edited_message(engine):
    before = said(engine, FIRST)
    assert evaluated(engine, before + QUESTION[:30]) == 30
    assert evaluated(engine, before + QUESTION[:30]) == 1
    assert evaluated(engine, before + ANOTHER[:20]) == 20
    assert not engine._shelf.all()  # nothing but answers and a message was taken back
    engine.set_policy("lru")  # what that does not change is kept
    assert evaluated(engine, before + QUESTION[:30]) == 30


@pytest.mark.parametrize("policy", ["lru", "dymoe", "plain"])
def test_another_conversation_in_between(path, policy):
    memory = {"expert_ram": None} if policy == "plain" else {}
    with open_engine(path, policy=policy, **memory) as engine:
        first = said(engine, FIRST)
        assert evaluated(engine, OTHER) == 200
        assert evaluated(engine, first + QUESTION[:30]) == 30
        assert evaluated(engine, [*OTHER, 11, 12]) == 2
        assert engine._shelf.used_bytes <= engine.plan.prompt_bytes


def test_a_prefix_that_many_share_is_read_once(engine):
    for text in (FIRST, OTHER, THIRD):
        evaluated(engine, SYSTEM + text)
    assert evaluated(engine, SYSTEM + QUESTION) == 200
    assert evaluated(engine, SYSTEM + FIRST + [9]) == 1
    evaluated(engine, ANOTHER)
    assert evaluated(engine, SYSTEM + ANOTHER[:50]) == 50
    # The copy that this one began with is still there.
    for text in (FIRST, OTHER, THIRD, QUESTION):
        assert evaluated(engine, SYSTEM + text) <= 1


@pytest.mark.parametrize(("cache_ram", "n_kept"), [(600 * 2**10, 1), (None, 0)])
def test_conversations_stay_within_the_memory_that_is_set_aside(path, cache_ram, n_kept):
    with open_engine(path, cache_ram=cache_ram) as engine:
        assert engine.plan.prompt_bytes == (cache_ram or 0)
        for text in (FIRST, OTHER, THIRD, ANOTHER):
            evaluated(engine, text)
            assert engine._shelf.used_bytes <= (cache_ram or 0)
        assert len(engine._shelf.all()) == n_kept
        assert evaluated(engine, THIRD) == (1 if n_kept else 200)
        assert evaluated(engine, FIRST) == 200


@pytest.mark.parametrize("with_tools", [False, True])
def test_what_comes_back_gives_the_same_logits(path, tmp_path, with_tools):
    """From memory, and behind a restart from the disk; also where a template has written the
    arguments of a call and the tool's answer."""
    prompt, further = FIRST, QUESTION[:30]
    with open_engine(path) as engine:
        if with_tools:
            prompt = engine.tokenize(ChatTemplate(TOOLS.read_text(), "", "").render(CALLED))
            further = engine.tokenize("And in Bergen?<|im_end|>", special=False)
        known = said(engine, prompt)
        expected = first_logits(engine, known + further)

    def goes_on(engine):
        np.testing.assert_array_equal(first_logits(engine, known + further), expected)
        assert engine.last_stats.evaluated_tokens == len(further)

    with open_engine(path) as engine:
        assert said(engine, prompt) == known
        evaluated(engine, OTHER)
        goes_on(engine)
    with open_engine(path, prompt_cache=tmp_path) as engine:
        assert said(engine, prompt) == known
        evaluated(engine, OTHER)
    assert len(list(tmp_path.iterdir())) == 2
    with open_engine(path, prompt_cache=tmp_path, cache_ram=0) as engine:
        goes_on(engine)
        text = b"".join(map(engine.llama.piece, engine._steps.cached)).decode(errors="replace")
        for each in ('"arguments": {"city": "Oslo", "days": 3}}', '{"celsius": [-3, 1.5, 0]}'):
            assert (each in text) == with_tools
        assert evaluated(engine, [*OTHER, 11, 12]) == 2
        assert engine.prompt_notes() == []
    # The first one in the place of what it goes on from; the other went apart from its answer.
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("settings", "n_read"),
    [
        ({"kv": "q8_0"}, 200),
        ({"high_tier": "q4_k"}, 200),
        ({"policy": "dymoe", "low_tier": "skip"}, 200),
        ({"expert_ram": 3 * MIB}, 1),  # a budget changes nothing
    ],
)
def test_other_settings_have_other_prompts(path, tmp_path, settings, n_read):
    with open_engine(path, prompt_cache=tmp_path) as engine:
        evaluated(engine, FIRST)
    with open_engine(path, prompt_cache=tmp_path, **settings) as engine:
        assert evaluated(engine, FIRST) == n_read
        assert engine.prompt_notes() == []


def test_a_shorter_context_leaves_long_prompts_alone(path, tmp_path):
    with open_engine(path, prompt_cache=tmp_path) as engine:
        evaluated(engine, SYSTEM + FIRST)
    with open_engine(path, prompt_cache=tmp_path, ctx=256) as engine:
        assert evaluated(engine, SYSTEM + QUESTION[:20]) == 220
        assert engine.prompt_notes() == []
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_policy_learned_of_a_prompt_comes_back_with_it(path, tmp_path):
    def counts():
        state = engine.driver.save_sequence(0)
        return np.frombuffer(state[len(b"moe-edge use 1\n") :], "<f8")

    settings = {"policy": "context", "expert_ram": 4 * MIB, "prompt_cache": tmp_path}
    with open_engine(path, **settings) as engine:
        evaluated(engine, FIRST)
        first = counts()
        evaluated(engine, OTHER)
        other = counts()
        assert not np.array_equal(first, other)
        assert evaluated(engine, FIRST, 0) == 1
        np.testing.assert_allclose(counts(), first, atol=20)
    with open_engine(path, **settings) as engine:
        assert evaluated(engine, OTHER, 0) == 1
        np.testing.assert_allclose(counts(), other, atol=20)
