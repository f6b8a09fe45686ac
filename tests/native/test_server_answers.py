"""Contents of answers, and the special tokens that a chat template gets.

Answers continue a message, end at their limit, or end inside a character.
"""

import json

import pytest
from templates import BEGUN, USER

from gguf_tools import synthetic
from gguf_tools.synthetic import metadata
from gguf_tools.synthetic.vocab import bpe

from .servers import MIB, answered, ask, serving

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, NATIVE, RENDER = "/v1/messages", "/completion", "/apply-template"
ITEMS = [
    {"type": "message", "role": each["role"], "content": [{"type": kind, "text": each["content"]}]}
    for each, kind in ((USER, "input_text"), (BEGUN, "output_text"))
]
SETTINGS = {"policy": "lru", "high_tier": "q4_k", "ctx": 1024, "ram": 150 * MIB}
# The text of an answer: in a complete body, and in the events of a stream.
TEXTS = {
    CHAT: (lambda answer: answer["choices"][0]["message"]["content"], ("choices", 0, "delta")),
    MESSAGES: (
        lambda answer: "".join(block["text"] for block in answer["content"]),
        ("delta", "text"),
    ),
    RESPONSES: (
        lambda answer: "".join(item["content"][0]["text"] for item in answer["output"]),
        ("delta",),
    ),
    COMPLETIONS: (lambda answer: answer["choices"][0]["text"], ("choices", 0, "text")),
    NATIVE: (lambda answer: answer["content"], ("content",)),
}
LIMITS = {RESPONSES: "max_output_tokens", NATIVE: "n_predict"}


@pytest.fixture(scope="module")
def runtime():
    with serving(**SETTINGS) as made:
        yield made


def events_of(runtime, route, **data):
    status, lines = ask(runtime, route, **data, stream=True)
    assert status == 200, lines
    return [json.loads(line) for line in lines if line.startswith("{")]


def streamed(route, events):
    """Return the text of a stream."""
    text = ""
    for event in events:
        if route == RESPONSES and event.get("type") != "response.output_text.delta":
            continue
        value = event
        for key in TEXTS[route][1]:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                value = ""
        text += (value.get("content") or "") if isinstance(value, dict) else value
    return text


@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
def test_a_continued_message_is_not_repeated(runtime, route):
    asked = {"input": ITEMS} if route == RESPONSES else {"messages": [USER, BEGUN]}
    asked |= {LIMITS.get(route, "max_tokens"): 8, "temperature": 0}
    whole = TEXTS[route][0](answered(runtime, route, **asked))
    assert whole and not whole.startswith(BEGUN["content"])
    assert streamed(route, events_of(runtime, route, **asked)) == whole
    if route == CHAT:
        echoed = answered(runtime, route, **asked, echo=True)
        assert TEXTS[route][0](echoed) == BEGUN["content"] + whole


@pytest.mark.parametrize(
    ("limit", "status", "reason"),
    [(2, "incomplete", {"reason": "max_output_tokens"}), (None, "completed", None)],
)
def test_a_response_reports_whether_the_limit_ended_it(runtime, limit, status, reason):
    asked = {"input": "Hi", "grammar": 'root ::= "Oslo is a city."', "temperature": 0}
    asked |= {} if limit is None else {"max_output_tokens": limit}
    answer = answered(runtime, RESPONSES, **asked)
    events = events_of(runtime, RESPONSES, **asked)
    last, done = events[-1], [each for each in events if "item" in each][-1]
    assert last["type"] == f"response.{status}"
    for response in (answer, last["response"]):
        assert response["status"] == status
        assert response.get("incomplete_details") == reason
        assert response["output"][-1]["status"] == status
    assert done["type"] == "response.output_item.done" and done["item"]["status"] == status
    assert (answer["completed_at"] is None) == (status == "incomplete")


@pytest.mark.parametrize("route", [CHAT, RESPONSES, COMPLETIONS, NATIVE])
def test_an_incomplete_last_character_is_left_out(runtime, route):
    text = "a日"
    n_tokens = len(answered(runtime, "/tokenize", content=text)["tokens"])
    assert n_tokens > 2  # the character takes more than one token
    name = {RESPONSES: "input", CHAT: "messages"}.get(route, "prompt")
    asked = {name: [USER] if route == CHAT else "Hi", "grammar": f'root ::= "{text}" "a"*'}
    asked |= {LIMITS.get(route, "max_tokens"): n_tokens - 1, "temperature": 0}
    assert TEXTS[route][0](answered(runtime, route, **asked)) == "a"
    assert streamed(route, events_of(runtime, route, **asked)) == "a"


@pytest.mark.parametrize(
    ("removed", "shown"),
    [((), "<|endoftext|>,<|im_end|>"), (("bos",), ",<|im_end|>"), (("bos", "eos"), ",")],
)
def test_a_template_gets_the_special_tokens_of_the_file(tmp_path, monkeypatch, removed, shown):
    left_out = {f"tokenizer.ggml.{name}_token_id" for name in removed}

    def vocabulary(n_vocab):
        return {key: value for key, value in bpe(n_vocab).items() if key not in left_out}

    monkeypatch.setattr(metadata, "bpe", vocabulary)
    model = synthetic.write(tmp_path / "model.gguf", "tiny-qwen3moe", tiers=("q8_0",))
    template = tmp_path / "template.jinja"
    template.write_text("{{ bos_token }},{{ eos_token }},{{ messages[0].content }}")
    with serving(template=template, model=model, policy="plain") as made:
        assert answered(made, RENDER, messages=[USER])["prompt"] == f"{shown},{USER['content']}"
