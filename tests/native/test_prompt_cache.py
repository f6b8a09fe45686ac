"""No part of a prompt is read twice: further turns, other conversations in between, a restart."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from answering import evaluated, first_logits
from served import library_path

from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

from .conftest import build

DRAWN = np.random.default_rng(0).integers(10, 300, (6, 200)).tolist()
FIRST, OTHER, THIRD, QUESTION, ANOTHER, SYSTEM = DRAWN
MIB = 2**20
CALL = {"function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 3}'}}
CALLED = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", **CALL}]},
    {"role": "tool", "tool_call_id": "a", "content": '{"celsius": [-3, 1.5, 0]}'},
]
TOOLS = Path(__file__).parents[1] / "unit/serve/tools.jinja"


@pytest.fixture(scope="module")
def path(library, tiny_model):
    return tiny_model("qwen3moe", "q8_0", "q4_k", "q2_k", seed=1)


def opened(path, notes=None, **settings):
    """Open the runtime of a chat. notes: receives its messages for the user."""
    library_path()
    usual = {"policy": "lru", "expert_ram": 2 * MIB, "ctx": 1024, "cache_ram": 8 * MIB}
    config = build(path, **(usual | settings))
    say = print if notes is None else notes.append
    answering = Answering(chat_template=TOOLS.read_text(), reads_ahead=False)
    return Runtime.open(config, answering=answering, say=say)


@pytest.fixture
def runtime(path):
    with opened(path) as made:
        yield made


def held(runtime):
    """Return the tokens that the conversation's sequence holds."""
    return runtime._core.tokens(0)


def said(runtime, prompt):
    """Return the conversation so far, without the answer's last token, which no step has read."""
    evaluated(runtime, prompt)
    return held(runtime)


def rendered(runtime, messages):
    """Return the tokens of a conversation rendered by the chat template."""
    body = json.dumps({"messages": messages}).encode()
    with closing(runtime.submit(body, "/apply-template")) as answer:
        (made,) = answer
    return runtime.vocabulary.tokenize(made["prompt"], add_special=True, parse_special=True)


def test_a_new_turn_a_repeated_turn_and_an_edited_message(runtime):
    before = said(runtime, FIRST)
    assert len(before) > 200
    assert evaluated(runtime, before + QUESTION[:30]) == 30
    assert evaluated(runtime, before + QUESTION[:30]) == 1
    assert evaluated(runtime, before + ANOTHER[:20]) == 20
    assert runtime._core.match(0, before + QUESTION[:30]) == (len(before), False)


@pytest.mark.parametrize("policy", ["lru", "dymoe", "plain"])
def test_another_conversation_in_between(path, policy):
    memory = {"expert_ram": None} if policy == "plain" else {}
    with opened(path, policy=policy, **memory) as runtime:
        first = said(runtime, FIRST)
        assert evaluated(runtime, OTHER) == 200
        assert evaluated(runtime, first + QUESTION[:30]) == 30
        assert evaluated(runtime, [*OTHER, 11, 12]) == 2


def test_a_shared_prefix_is_read_once(runtime):
    for text in (FIRST, OTHER, THIRD):
        evaluated(runtime, SYSTEM + text)
    assert evaluated(runtime, SYSTEM + QUESTION) == 200
    assert evaluated(runtime, SYSTEM + FIRST + [9]) == 1
    evaluated(runtime, ANOTHER)
    assert evaluated(runtime, SYSTEM + ANOTHER[:50]) == 50
    # The copy with which this conversation began is still there.
    for text in (FIRST, OTHER, THIRD, QUESTION):
        assert evaluated(runtime, SYSTEM + text) <= 1


@pytest.mark.parametrize(("cache_ram", "n_kept"), [(MIB, 1), (0, 0)])
def test_prompt_copies_stay_within_cache_ram(path, cache_ram, n_kept):
    """Prompt copies take at most `cache_ram` bytes, and older ones are dropped first.

    A conversation of 200 tokens takes 0.4 MiB.
    """
    with opened(path, cache_ram=cache_ram) as runtime:
        assert runtime.plan.prompt_bytes == cache_ram
        for text in (FIRST, OTHER, THIRD, ANOTHER):
            evaluated(runtime, text)
            assert runtime.inside.driver.prompts <= cache_ram
        assert evaluated(runtime, THIRD) == (1 if n_kept else 200)
        assert evaluated(runtime, FIRST) == 200


@pytest.mark.parametrize("with_tools", [False, True])
def test_restored_prompts_give_the_same_logits(path, tmp_path, with_tools):
    """A restored conversation continues with the same logits.

    It is restored from memory, and from disk after a restart. The conversation may have a tool call
    and its result.
    """
    prompt, further = FIRST, QUESTION[:30]
    with opened(path) as runtime:
        if with_tools:
            prompt = rendered(runtime, CALLED)
            words = "And in Bergen?<|im_end|>"
            further = runtime.vocabulary.tokenize(words, add_special=False, parse_special=False)
        known = said(runtime, prompt)
        expected = first_logits(runtime, known + further)

    def goes_on(runtime):
        assert evaluated(runtime, known + further, 1) == len(further)
        np.testing.assert_array_equal(runtime.inside.context.logits(), expected)

    with opened(path) as runtime:
        assert said(runtime, prompt) == known
        evaluated(runtime, OTHER)
        goes_on(runtime)
    with opened(path, prompt_cache=tmp_path) as runtime:
        assert said(runtime, prompt) == known
        evaluated(runtime, OTHER)
    assert len(list(tmp_path.iterdir())) == 2
    notes = []
    with opened(path, notes, prompt_cache=tmp_path, cache_ram=0) as runtime:
        goes_on(runtime)
        text = b"".join(map(runtime.vocabulary.piece, held(runtime))).decode(errors="replace")
        for each in ('"arguments": {"city": "Oslo", "days": 3}}', '{"celsius": [-3, 1.5, 0]}'):
            assert (each in text) == with_tools
        assert evaluated(runtime, [*OTHER, 11, 12]) == 2
    assert notes == []
    # The first conversation replaced the file that it was restored from. The second one's prompt
    # differs from the answer in its file, so that file stays.
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("settings", "n_read"),
    [
        ({"kv": "q8_0"}, 200),
        ({"high_tier": "q4_k"}, 200),
        ({"policy": "dymoe", "low_tier": "skip"}, 200),
        ({"expert_ram": 3 * MIB}, 1),  # a budget does not change the prompt's state
    ],
)
def test_prompts_of_other_settings_are_not_reused(path, tmp_path, settings, n_read):
    notes = []
    with opened(path, notes, prompt_cache=tmp_path) as runtime:
        evaluated(runtime, FIRST)
    with opened(path, notes, prompt_cache=tmp_path, **settings) as runtime:
        assert evaluated(runtime, FIRST) == n_read
    assert notes == []


def test_changed_settings_do_not_reuse_prompts(path, tmp_path):
    with opened(path, prompt_cache=tmp_path) as runtime:
        evaluated(runtime, FIRST)
        runtime.set(kv="q8_0")
        assert evaluated(runtime, FIRST) == 200
        runtime.set(kv="f16")
        assert evaluated(runtime, FIRST) == 1
        runtime.set(policy="firm")  # with one precision, no policy changes the computed state
        assert evaluated(runtime, FIRST) == 1


def test_a_shorter_context_keeps_files_of_long_prompts(path, tmp_path):
    notes = []
    with opened(path, prompt_cache=tmp_path) as runtime:
        evaluated(runtime, SYSTEM + FIRST)
    with opened(path, notes, prompt_cache=tmp_path, ctx=256) as runtime:
        assert evaluated(runtime, SYSTEM + QUESTION[:20]) == 220
    assert len(list(tmp_path.iterdir())) == 2
    with opened(path, prompt_cache=tmp_path) as runtime:
        assert evaluated(runtime, SYSTEM + FIRST) == 1


def test_usage_counts_are_restored_with_a_prompt(path, tmp_path):
    def counts(runtime):
        state = runtime.inside.driver.save_sequence(0)
        return np.frombuffer(state[len(b"moe-edge use 1\n") :], "<f8")

    settings = {"policy": "context", "expert_ram": 4 * MIB, "prompt_cache": tmp_path}
    with opened(path, **settings) as runtime:
        evaluated(runtime, FIRST)
        first = counts(runtime)
        known = said(runtime, OTHER)
        other = counts(runtime)
        assert not np.array_equal(first, other)
        assert evaluated(runtime, FIRST, 1) == 1
        np.testing.assert_allclose(counts(runtime), first, atol=20)
    with opened(path, **settings) as runtime:
        assert evaluated(runtime, [*known, 11], 1) == 1
        np.testing.assert_allclose(counts(runtime), other, atol=20)
