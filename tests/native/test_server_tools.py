"""Tool calls with chat templates that know tools, that do not, and that refuse unknown roles.

A `tool_choice` holds in each. Conversations without tools are rendered as before.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from speaking import CAPITAL

from .servers import MIB, answered, ask, serving

CHAT, RENDER = "/v1/chat/completions", "/apply-template"
TURNS = [
    {"role": "user", "content": "What is the capital of Norway?"},
    {"role": "assistant", "content": "Oslo."},
    {"role": "user", "content": "And of Peru?"},
]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "capital", "arguments": '{"country": "Peru"}'},
}
AFTER_A_CALL = [
    {"role": "user", "content": "What is the capital of Peru?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "It is Lima."},
    {"role": "tool", "tool_call_id": "call00001", "content": "Really."},
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('no role') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]"
    "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)
# Like Mistral's templates: user and assistant alternate, except for calls and their results.
IN_TURNS = (
    "{% set turns = namespace(n=0) %}{% for message in messages %}"
    "{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{% if (message.role == 'user') != (turns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set turns.n = turns.n + 1 %}"
    "{% endif %}[{{ message.role }}]"
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{{ message.content }}\n{% endfor %}"
)
STRING = {"type": "string"}
BARE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
REASONING = THINKING.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}",
)

SAID = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TURNS)
# Renderings of TURNS without tools.
PLAIN = {
    "the demo's": SAID + "<|im_start|>assistant\n",
    "ChatML": SAID + "<|im_start|>assistant\n",
    "a strict one": "[INST] What is the capital of Norway? [/INST] Oslo.</s>"
    "[INST] And of Peru? [/INST]",
    "a bare one": "What is the capital of Norway?\nOslo.\nAnd of Peru?\n",
    "a thinking one": SAID + "<|im_start|>assistant\n<think>\n",
}

TEMPLATES = {
    "the demo's": None,
    "one that knows tools": Path(__file__).parents[1] / "unit/serve/tools.jinja",
    "ChatML": CHATML,
    "a strict one": STRICT,
    "a bare one": BARE,
    "a thinking one": THINKING,
}


@contextmanager
def serving_with(folder, template):
    """A server with this chat template."""
    path = template if isinstance(template, Path) else None
    if isinstance(template, str):
        path = folder / "template.jinja"
        path.write_text(template)
    settings = {"policy": "lru", "high_tier": "q4_k", "ctx": 1024, "ram": 150 * MIB}
    with serving(template=path, **settings) as runtime:
        yield runtime


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_choice_holds(tmp_path, name):
    with serving_with(tmp_path, TEMPLATES[name]) as runtime:
        plain = answered(runtime, RENDER, messages=TURNS)["prompt"]
        assert plain == PLAIN.get(name, plain)
        common = {"messages": TURNS, "tools": [CAPITAL], "max_tokens": 300}
        # A model that was not trained with tools would call without end.
        common["parallel_tool_calls"] = False
        rendering = answered(runtime, RENDER, **common)["prompt"]
        assert "The capital of a country." in rendering and "And of Peru?" in rendering
        made = answered(runtime, CHAT, **common, tool_choice="required")
        (choice,) = made["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        assert not (choice["message"].get("content") or "").strip()
        for call in choice["message"]["tool_calls"]:
            assert call["function"]["name"] == "capital"
            assert json.loads(call["function"]["arguments"])["country"] in ("Norway", "Peru")
        # A response format applies to text, and a call has none.
        common["response_format"] = {"type": "json_schema", "json_schema": {"schema": STRING}}
        made = answered(runtime, CHAT, **common, tool_choice="required")
        assert made["choices"][0]["finish_reason"] == "tool_calls"
        del common["response_format"]
        free = answered(runtime, CHAT, **common, tool_choice="none")
        assert free["choices"][0]["finish_reason"] in ("stop", "length")
        after = answered(runtime, RENDER, messages=AFTER_A_CALL, tools=[CAPITAL])["prompt"]
        assert after.index('{"country": "Peru"}') < after.index("Lima") < after.index("Really.")


def test_reasoning_is_separate_from_content(tmp_path):
    """Reasoning and content are separate, in a complete answer and in a stream.

    The first delta of the stream has the role.
    """
    # The demo model was not trained to reason.
    grammar = r'root ::= "Let me think.\n</think>\n\nIt is Lima."'
    data = {"messages": TURNS, "max_tokens": 60, "grammar": grammar}
    with serving_with(tmp_path, REASONING) as runtime:
        whole = answered(runtime, CHAT, **data)["choices"][0]["message"]
        status, lines = ask(runtime, CHAT, **data, stream=True, temperature=0)
    assert status == 200
    events = [json.loads(line) for line in lines if line.startswith("{")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert deltas[0]["role"] == "assistant"
    for kind, said in (("reasoning_content", "Let me think."), ("content", "It is Lima.")):
        assert whole[kind].strip() == said
        assert "".join(delta.get(kind) or "" for delta in deltas).strip() == said


def test_a_message_after_the_result_of_a_tool(tmp_path):
    """A user's message after a tool's result stays separate, unless the template refuses that."""
    asked = [*AFTER_A_CALL, {"role": "user", "content": [{"type": "text", "text": "Be brief."}]}]
    with serving_with(tmp_path, IN_TURNS) as runtime:
        prompt = answered(runtime, RENDER, messages=asked)["prompt"]
        assert "[tool]It is Lima.\n[tool]Really.\n\nBe brief.\n" in prompt
        status, refused = ask(runtime, RENDER, messages=TURNS[:1] * 2)
        assert status == 400 and "roles must alternate" in refused["error"]["message"]
    with serving_with(tmp_path, CHATML) as runtime:
        prompt = answered(runtime, RENDER, messages=asked)["prompt"]
        assert "user\nBe brief." in prompt and prompt.index("Really.") < prompt.index("Be brief.")
