"""Client libraries for Python with the server: chat, streams, tools, JSON by a schema, and
disconnecting."""

import json
import os
import subprocess
import sys

import pytest
from command_line import python
from served import running
from speaking import ARGUMENTS, CAPITAL, object_of

ASK = "What is the capital of Norway?"
MESSAGES = [{"role": "user", "content": ASK}]
LONG = [{"role": "user", "content": "Tell me a story about a brave rabbit."}]
CAPITALS = ["Oslo", "Lima"]
SCHEMA = {"title": "Capital", **object_of(capital={"enum": CAPITALS})}
FORMAT = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}}
# The command `llm` has no option for tool_choice. The demo model needs it, because it was not
# trained on tools.
LLM_CALL = """
import json, sys, llm
model = llm.get_model("local")
asked = model.build_kwargs
model.build_kwargs = lambda *a, **k: {**asked(*a, **k), "tool_choice": "required"}
tool = llm.Tool(name="capital", description="The capital of a country.",
    input_schema=json.loads(sys.argv[1]), implementation=lambda country: f"of {country}")
made = []
for stream in (True, False):
    response = model.prompt("The capital?", tools=[tool], stream=stream, max_tokens=200)
    calls, results = response.tool_calls(), response.execute_tool_calls()
    assert calls
    made += [(c.name, c.arguments, r.output) for c, r in zip(calls, results, strict=True)]
print(json.dumps(made))
"""
served = running("--ram", "160MiB", "--policy", "dymoe", "--ctx", "1024", "--temp", "0")


def is_a_call(name, arguments):
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    return name == "capital" and found["country"] in ("Norway", "Peru")


def test_openai(served):
    openai = pytest.importorskip("openai", reason="the openai package is missing")
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    common = {"model": "any", "messages": MESSAGES, "max_tokens": 200}
    whole = client.chat.completions.create(**common, response_format=FORMAT)
    assert json.loads(whole.choices[0].message.content)["capital"] in CAPITALS
    named = {"type": "function", "function": {"name": "capital"}}
    other = {"type": "function", "function": {"name": "other", "parameters": ARGUMENTS}}
    for choice in ("required", named):
        offered = [CAPITAL] if choice == "required" else [other, CAPITAL]
        made = client.chat.completions.create(**common, tools=offered, tool_choice=choice)
        assert made.choices[0].finish_reason == "tool_calls"
        for call in made.choices[0].message.tool_calls:
            assert is_a_call(call.function.name, call.function.arguments)
    # Calls are streamed in pieces with an index. The first piece of a call has its name.
    calls = {}
    finish = None
    stream = client.chat.completions.create(
        **common, tools=[CAPITAL], tool_choice="required", stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or ():
                if piece.index not in calls:
                    assert piece.id and piece.function.name
                    calls[piece.index] = {"name": piece.function.name, "arguments": ""}
                calls[piece.index]["arguments"] += piece.function.arguments or ""
    assert finish == "tool_calls" and sorted(calls) == list(range(len(calls))) and calls
    assert all(is_a_call(**call) for call in calls.values())
    # The result of the tool is sent back.
    turn = [
        *MESSAGES,
        whole_call := made.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": whole_call["tool_calls"][0]["id"], "content": "Oslo"},
    ]
    after = client.chat.completions.create(**{**common, "messages": turn}, tools=[CAPITAL])
    assert after.choices[0].finish_reason in ("stop", "tool_calls", "length")
    leaving = client.chat.completions.create(**{**common, "messages": LONG}, stream=True)
    next(iter(leaving))
    leaving.close()
    served.until_running(0)
    with pytest.raises(openai.BadRequestError, match="tools has no such function"):
        client.chat.completions.create(**common, tools=[other], tool_choice=named)


def test_openai_responses(served):
    openai = pytest.importorskip("openai", reason="the openai package is missing")
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    tool = {"type": "function", **CAPITAL["function"]}
    made = client.responses.create(
        model="any", input=ASK, tools=[tool], tool_choice="required", max_output_tokens=200
    )
    calls = [each for each in made.output if each.type == "function_call"]
    assert calls and all(is_a_call(call.name, call.arguments) for call in calls)
    # /v1/responses has another form for schemas, which llama.cpp does not know.
    form = {"format": {"type": "json_schema", "name": "capital", "schema": SCHEMA}}
    shaped = client.responses.create(model="any", input=ASK, text=form, max_output_tokens=200)
    assert json.loads(shaped.output_text)["capital"] in CAPITALS
    plain = client.responses.create(model="any", input=ASK, text={"format": {"type": "text"}})
    assert "Oslo" in plain.output_text


def test_a_conversation_goes_on_after_an_answer_that_was_cut(served):
    openai = pytest.importorskip("openai", reason="the openai package is missing")
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    common = {"model": "any", "tools": [CAPITAL], "tool_choice": "required"}
    n_tokens, cut = 1, ""
    while not cut:  # until the call's arguments have started
        n_tokens += 1
        made = client.chat.completions.create(**common, messages=MESSAGES, max_tokens=n_tokens)
        assert made.choices[0].finish_reason == "length"
        calls = made.choices[0].message.tool_calls or ()
        cut = "".join(call.function.arguments for call in calls)
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut)
    said = made.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "what?"}
    turn = [*MESSAGES, said, result]
    after = client.chat.completions.create(model="any", messages=turn, max_tokens=5)
    assert after.choices[0].message.content is not None
    # Items of a response, as a client without reasoning keeps them.
    call = {"type": "function_call", "call_id": "c", "name": "capital", "arguments": cut}
    items = [
        {"role": "user", "content": ASK},
        {"type": "reasoning", "id": "r", "summary": []},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "what?"},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": ASK},
    ]
    assert client.responses.create(model="any", input=items, max_output_tokens=5).output


def test_a_prompt_of_claude_code_is_read_once(served):
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is missing")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    system = {"type": "text", "text": "You help with code. " * 20}
    for version, cch in (("2.1.1.abc", "12345"), ("2.1.1.def", "0"), ("2.2", "0123456789")):
        header = f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli; cch={cch};"
        blocks = [{"type": "text", "text": header}, system]
        common = {"model": "any", "max_tokens": 2, "messages": MESSAGES}
        usage = client.messages.create(**common, system=blocks).usage
    assert usage.cache_read_input_tokens > 50 and usage.input_tokens < 5


def test_anthropic(served):
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is missing")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    common = {"model": "any", "max_tokens": 200, "messages": MESSAGES}
    whole = client.messages.create(**common).content[0].text
    with client.messages.stream(**common) as stream:
        assert "".join(stream.text_stream) == whole and "Oslo" in whole
    tool = {"name": "capital", "description": "A capital.", "input_schema": ARGUMENTS}
    other = {"name": "other", "description": "Another.", "input_schema": ARGUMENTS}
    common["tools"] = [other, tool]
    choice = {"type": "tool", "name": "capital"}
    with client.messages.stream(**common, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    for made in (client.messages.create(**common, tool_choice=choice), streamed):
        blocks = [block for block in made.content if block.type == "tool_use"]
        assert blocks and all(is_a_call(block.name, block.input) for block in blocks)
        assert made.stop_reason == "tool_use"
    none = client.messages.create(**common, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]
    shape = {"format": {"type": "json_schema", "schema": SCHEMA}}
    plain = {"model": "any", "max_tokens": 200, "messages": MESSAGES, "output_config": shape}
    shaped = client.messages.create(**plain)
    assert json.loads(shaped.content[0].text)["capital"] in CAPITALS
    assert shaped.stop_reason == "end_turn"
    with client.messages.stream(**plain) as stream:
        assert json.loads("".join(stream.text_stream))["capital"] in CAPITALS
    with client.messages.stream(model="any", max_tokens=200, messages=LONG) as stream:
        next(iter(stream.text_stream))
    served.until_running(0)


def test_ollama(served):
    ollama = pytest.importorskip("ollama", reason="the ollama package is missing")
    client = ollama.Client(host=served.url)
    (listed,) = client.list().models
    shown = client.show(listed.model)
    assert listed.model == "moe-edge-demo" and listed.size > 2**20
    assert shown.modelinfo["qwen3moe.context_length"] == 1024 and shown.template
    (loaded,) = client.ps().models
    assert loaded.details.quantization_level == "Q8_0" and loaded.size_vram == 0
    assert loaded.digest == listed.digest and len(loaded.digest) == 64
    assert shown.modified_at == listed.modified_at < loaded.expires_at
    assert client.generate("any", "").done_reason == "load"
    # Whole answers and streams have the same text and costs.
    for call, text in (
        (lambda **more: client.chat("any", MESSAGES, **more), lambda part: part.message.content),
        (lambda **more: client.generate("any", ASK, **more), lambda part: part.response),
    ):
        whole = call(options={"seed": 1})
        parts = list(call(stream=True, think=False))
        assert "Oslo" in text(whole) and text(whole) == "".join(map(text, parts))
        assert len(parts) > 3 and [part.done for part in parts].index(True) == len(parts) - 1
        for last in (whole, parts[-1]):
            assert last.done_reason == "stop" and last.eval_count > 3 < last.prompt_eval_count
            assert last.total_duration > last.eval_duration > 0
    cut = client.chat("any", LONG, options={"num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)
    raw = client.generate("any", "Once there was", raw=True, options={"stop": ["."]}).response
    assert raw and "." not in raw
    found = client.chat("any", MESSAGES, format=SCHEMA)
    assert json.loads(found.message.content)["capital"] in CAPITALS
    # The result of a tool is sent back for its call.
    function = {"name": "capital", "arguments": {"country": "Norway"}}
    said = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "tool_name": "capital", "content": "Oslo"},
    ]
    assert client.chat("any", said, tools=[CAPITAL]).message.content
    for wrong, why in (
        ({"messages": [{"role": "user", "content": "?", "images": ["aGk="]}]}, "--mmproj"),
        ({"messages": MESSAGES, "options": {"top_p": 2}}, "options.top_p must be a number from 0"),
    ):
        with pytest.raises(ollama.ResponseError, match=why) as refused:
            client.chat("any", **wrong)
        assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="/api/embed is not a path of this server"):
        client.embed("any", "text")


def test_langchain_openai(served):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is missing")
    model = langchain.ChatOpenAI(
        base_url=served.url + "/v1", api_key="none", model="any", max_tokens=200, max_retries=0
    )
    assert "Oslo" in model.invoke(ASK).content
    assert "Oslo" in "".join(part.content for part in model.stream(ASK))
    calls = model.bind_tools([CAPITAL], tool_choice="capital").invoke(ASK).tool_calls
    assert calls and all(is_a_call(call["name"], call["args"]) for call in calls)
    shaped = model.with_structured_output(SCHEMA, method="json_schema").invoke(ASK)
    assert shaped["capital"] in CAPITALS
    leaving = model.stream(LONG[0]["content"])
    next(leaving)
    leaving.close()
    served.until_running(0)


def test_llm(served, tmp_path):
    pytest.importorskip("llm", reason="llm is missing")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: any\n  api_base: {served.url}/v1\n"
        "  supports_schema: true\n  supports_tools: true\n"
    )
    own = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def run(*command):
        done = python(*command, **own)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(*options):
        return run("-m", "llm", "-m", "local", "-o", "max_tokens", "200", *options)

    assert "Oslo" in ask(ASK)
    assert "Oslo" in ask("--no-stream", ASK)
    assert json.loads(ask("--schema", json.dumps(SCHEMA), ASK))["capital"] in CAPITALS
    for name, arguments, output in json.loads(run("-c", LLM_CALL, json.dumps(ARGUMENTS))):
        assert is_a_call(name, arguments) and output == f"of {arguments['country']}"
    command = [sys.executable, "-m", "llm", "-m", "local", LONG[0]["content"]]
    with subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE) as leaving:
        assert leaving.stdout is not None and leaving.stdout.read(1)
        leaving.kill()
    served.until_running(0)
