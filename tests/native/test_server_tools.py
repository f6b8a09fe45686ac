"""Tool calls with chat templates that know tools, that know none, and that refuse what they do not
know: a choice of tools is kept, and conversations without tools are what they were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import DEMO, server_library
from speaking import CAPITAL

from orchestrator.config import Config
from orchestrator.engine.texts import ChatTemplate
from orchestrator.native import ServerLibrary
from orchestrator.serve.backend import Backend
from orchestrator.serve.settings import ServeSettings

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
BARE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
REASONING = THINKING.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}",
)

TEMPLATES = {
    "the demo's": None,
    "one that knows tools": Path(__file__).parents[1] / "unit/serve/tools.jinja",
    "ChatML": CHATML,
    "one that refuses": STRICT,
    "a bare one": BARE,
    "one that thinks": THINKING,
}


@pytest.fixture(scope="module")
def native(library: object) -> ServerLibrary:
    return server_library()


@contextmanager
def backend_with(native: ServerLibrary, folder: Path, template: str | Path | None) -> Iterator[Any]:
    path = template if isinstance(template, Path) else None
    if isinstance(template, str):
        path = folder / "template.jinja"
        path.write_text(template)
    config = Config.build(
        model=DEMO, ctx=1024, threads=1, policy="lru", high_tier="q4_k", ram=150 << 20
    )
    backend = Backend(config, ServeSettings(chat_template=path), native, lambda _done: None)
    try:
        yield backend
    finally:
        backend.close()


def ask(backend: Backend, route: str, **data: Any) -> Any:
    status, text = backend.request(route, json.dumps(data).encode()).whole()
    body = json.loads(text)
    assert status == 200, body
    return body


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_choice_of_tools_is_kept(native: ServerLibrary, tmp_path: Path, name: str) -> None:
    template = TEMPLATES[name]
    with backend_with(native, tmp_path, template) as backend:
        source = template.read_text() if isinstance(template, Path) else template
        if source is None:
            source = backend.engine.llama.chat_template()
        plain = ask(backend, "/apply-template", messages=TURNS)["prompt"]
        if not isinstance(template, Path):  # its block trimming is another one
            assert plain == ChatTemplate(source, "", "").render(TURNS)
        common = {"messages": TURNS, "tools": [CAPITAL], "temperature": 0, "max_tokens": 300}
        # A model that has never seen a tool calls without end where it may.
        common["parallel_tool_calls"] = False
        told = ask(backend, "/apply-template", **common)["prompt"]
        assert "The capital of a country." in told and "And of Peru?" in told
        made = ask(backend, "/v1/chat/completions", **common, tool_choice="required")
        (choice,) = made["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        assert not (choice["message"].get("content") or "").strip()
        for call in choice["message"]["tool_calls"]:
            assert call["function"]["name"] == "capital"
            assert json.loads(call["function"]["arguments"])["country"] in ("Norway", "Peru")
        # A format is about a text, and there is none.
        shaped = {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}
        made = ask(
            backend,
            "/v1/chat/completions",
            **common,
            tool_choice="required",
            response_format=shaped,
        )
        assert made["choices"][0]["finish_reason"] == "tool_calls"
        free = ask(backend, "/v1/chat/completions", **common, tool_choice="none")
        assert free["choices"][0]["finish_reason"] in ("stop", "length")
        after = ask(backend, "/apply-template", messages=AFTER_A_CALL, tools=[CAPITAL])["prompt"]
        assert after.index('{"country": "Peru"}') < after.index("Lima") < after.index("Really.")


def test_reasoning_stands_apart(native: ServerLibrary, tmp_path: Path) -> None:
    """In a whole answer, and in the pieces of a stream, of which the first one has the role."""
    data = {
        "messages": TURNS,
        "max_tokens": 60,
        "temperature": 0,
        # It has never seen a thought.
        "grammar": r'root ::= "Let me think.\n</think>\n\nIt is Lima."',
    }
    with backend_with(native, tmp_path, REASONING) as backend:
        whole = ask(backend, "/v1/chat/completions", **data)["choices"][0]["message"]
        assert whole["reasoning_content"].strip() == "Let me think."
        assert whole["content"].strip() == "It is Lima."
        request = backend.request(
            "/v1/chat/completions", json.dumps({**data, "stream": True}).encode()
        )
        status, text = request.whole()
        assert (status, request.is_stream) == (200, True)
        lines = text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert deltas[0]["role"] == "assistant"
    said = {
        kind: "".join(delta.get(kind) or "" for delta in deltas).strip()
        for kind in ("reasoning_content", "content")
    }
    assert said == {"reasoning_content": "Let me think.", "content": "It is Lima."}
