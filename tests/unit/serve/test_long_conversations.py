"""Conversations that outgrow the context of a server, through each API."""

import json
from itertools import pairwise

import pytest
from asgi import ask
from fake_served import FakeServed, app_for, assert_refused, quiet, state_with, whole
from paths import CHAT, MESSAGES, RESPONSES
from real_served import served_with
from served import DEMO
from tables import cases

from orchestrator.config import Config
from orchestrator.serve.app import application

OLLAMA = "/api/chat"
N_CTX, N_TURNS, N_ANSWER = 512, 24, 12
SYSTEM = "Answer in one short sentence."
CITIES = "Oslo Lima Rome Cairo Paris Tokyo Quito Delhi Berlin Madrid Athens Dublin".split()


@pytest.fixture(scope="module")
def served():
    config = Config.build(model=DEMO, ctx=N_CTX, threads=1, ram=200 << 20, policy="lru")
    with served_with(config) as made:
        yield made


def app_with(served, **settings):
    state = state_with(served, **settings)
    state.gate.open(served.about.n_cells)
    return application(state, quiet)


def question(turn):
    return f"Question {turn}: what do people like about the city of {CITIES[turn % 12]}?"


def said(text):
    return {"role": "user", "content": text}


def openai(app, messages, **more):
    """Return (text, prompt tokens read, prompt tokens, dropped messages or None) of an answer."""
    asked = {"messages": [{"role": "system", "content": SYSTEM}, *messages]}
    asked |= {"max_tokens": N_ANSWER, "temperature": 0, **more}
    found = ask(app, CHAT, asked).json()
    usage, timings = found["usage"], found["timings"]
    text = found["choices"][0]["message"]["content"]
    return text, timings["prompt_n"], usage["prompt_tokens"], usage.get("dropped_messages")


def anthropic(app, messages, **more):
    asked = {"messages": messages, "system": SYSTEM}
    asked |= {"max_tokens": N_ANSWER, "temperature": 0, **more}
    found = ask(app, MESSAGES, asked).json()
    usage, text = found["usage"], found["content"][0]["text"]
    read, cached = usage["input_tokens"], usage["cache_read_input_tokens"]
    return text, read, read + cached, usage.get("dropped_messages")


def responses(app, messages, **more):
    asked = {"input": messages, "instructions": SYSTEM, "truncation": "auto"}
    asked |= {"max_output_tokens": N_ANSWER, "temperature": 0, **more}
    found = ask(app, RESPONSES, asked).json()
    usage, text = found["usage"], found["output"][-1]["content"][0]["text"]
    n, cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return text, n - cached, n, usage.get("dropped_messages")


def ollama(app, messages, **more):
    options = {"num_predict": N_ANSWER, "temperature": 0}
    asked = {"messages": [{"role": "system", "content": SYSTEM}, *messages], "options": options}
    found = ask(app, OLLAMA, {**asked, "stream": False, **more}).json()
    timings, text = found["timings"], found["message"]["content"]
    return text, timings["prompt_n"], found["prompt_eval_count"], found.get("dropped_messages")


DROPPING = {"overflow": "drop"}


@cases(
    "client, more",
    (openai, DROPPING),
    (anthropic, DROPPING),
    (responses, {}),
    (ollama, {}),
)
def test_a_turn_reads_its_new_tokens_unless_messages_leave(served, client, more):
    """A stateless client repeats its whole conversation in each request."""
    app, messages, turns = app_with(served), [], []
    for turn in range(N_TURNS):
        messages.append(said(question(turn)))
        text, read, length, dropped = client(app, messages, **more)
        messages.append({"role": "assistant", "content": text})
        turns.append((dropped or 0, read, length))
    drops = [dropped for dropped, _, _ in turns]
    assert drops == sorted(drops) and len(set(drops)) in (3, 4) and drops[0] == 0
    for (before, _, _), (dropped, read, length) in pairwise(turns):
        assert length < N_CTX - N_ANSWER and dropped % 2 == 0
        # A question has about 30 tokens with the marks of the template.
        assert read < 40 if dropped == before else length <= N_CTX // 2
    # The same request gets the same cut, and reads nothing but the last token.
    assert client(app, messages[:-1], **more)[1:] == (1, turns[-1][2], drops[-1])


# (client, fields of the request, --overflow)
@cases(
    "client, more, setting",
    (openai, {}, None),
    (openai, {"overflow": "refuse"}, None),
    (openai, DROPPING, "refuse"),
    (anthropic, {}, None),
    (responses, {"truncation": "disabled"}, None),
    (ollama, {"truncate": False}, None),
    (ollama, {}, "refuse"),
)
def test_a_conversation_is_refused(served, client, more, setting):
    messages = [said(question(turn)) for turn in range(2 * N_TURNS)]
    for at in range(1, len(messages), 2):
        messages[at] = {"role": "assistant", "content": "People like its old streets very much."}
    app = app_with(served, overflow=setting)
    with pytest.raises(KeyError, match=r"usage|timings"):
        client(app, messages[:-1], **more)
    asked = {"messages": messages[:-1], "max_tokens": 4}
    assert_refused(app_with(served), CHAT, asked, "exceeds the available context size")
    assert openai(app_with(served, overflow="drop"), messages[:-1])[3] > 0


def events_of(parts):
    """Return the JSON of the events of a stream."""
    lines = b"".join(parts).split(b"\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def test_a_stream_reports_dropped_messages(served):
    messages = [said("word " * 300), {"role": "assistant", "content": "So."}, said("word " * 300)]
    asked = {"messages": messages, "max_tokens": 4, "stream": True, **DROPPING}
    parts = ask(app_with(served), CHAT, {**asked, "stream_options": {"include_usage": True}}).parts
    assert events_of(parts)[-1]["usage"]["dropped_messages"] == 2
    found = events_of(ask(app_with(served), MESSAGES, asked).parts)
    usages = [event.get("usage") or event.get("message", {}).get("usage") for event in found]
    assert [usage["dropped_messages"] for usage in usages if usage] == [2, 2]
    asked = {"input": messages, "max_output_tokens": 4, "stream": True, "truncation": "auto"}
    last = events_of(ask(app_with(served), RESPONSES, asked).parts)[-1]
    assert last["response"]["usage"]["dropped_messages"] == 2
    asked = {"messages": messages, "options": {"num_predict": 4}}
    last = b"".join(ask(app_with(served), OLLAMA, asked).parts).splitlines()[-1]
    assert json.loads(last)["dropped_messages"] == 2


def test_messages_are_counted_as_the_client_sent_them(served):
    """A message with results of tools and a text is one message, though llama.cpp gets two."""
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "word " * 300}
    messages = [
        said("Call f."),
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Now answer."}]},
        {"role": "assistant", "content": "It says word."},
        said("word " * 300),
    ]
    asked = {"messages": messages, "max_tokens": 4, "tools": [], **DROPPING}
    found = ask(app_with(served), MESSAGES, asked).json()
    assert found["usage"]["dropped_messages"] == 4


@cases(
    "path, more, says",
    (CHAT, {"overflow": "shift"}, 'overflow must be "drop" or "refuse"'),
    (MESSAGES, {"overflow": True, "max_tokens": 1}, 'overflow must be "drop" or "refuse"'),
    (RESPONSES, {"input": "a", "truncation": "x"}, 'truncation must be "auto" or "disabled"'),
)
def test_wrong_values_are_refused(path, more, says):
    assert_refused(app_for(FakeServed(whole())), path, {"messages": [said("a")], **more}, says)


def test_a_wrong_truncate_of_ollama_is_refused():
    asked = {"messages": [said("a")], "truncate": "no"}
    reply = ask(app_for(FakeServed(whole())), OLLAMA, asked)
    assert reply.status == 400 and reply.json()["error"] == "truncate must be true or false"
