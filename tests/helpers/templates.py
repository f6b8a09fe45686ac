"""Upstream's chat templates, and the server's handling of requests with them.

tests/native/templates.json has a row for each template: an answer (`text`) and a call (`call`) in
its model's format, and the outcome of each column: RIGHT, or a known fault. `python
tests/helpers/templates.py` writes the current outcomes into it.
"""

import json
import re
import sys
import tarfile
from functools import lru_cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a script

from real_cache import REAL_CACHE
from served import REPO, server_library

from orchestrator.native.llama import Bindings
from patches.upstream import read_upstream

TABLE = REPO / "tests/native/templates.json"
COLUMNS = ("plain", "system", "tools", "result", "required", "schema", "prefill")
RIGHT = "right"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How is the weather?"}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_4711_of_another_server",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Zagreb"}'},
        }
    ],
}
RESULT = {
    "role": "tool",
    "tool_call_id": "call_4711_of_another_server",
    "name": "get_weather",
    "content": "It rains.",
}
# Text and two calls in one message, as agents of other servers send them.
AT_ONCE = {
    "role": "assistant",
    "content": "I will look.",
    "tool_calls": [
        {
            "id": f"toolu_{city}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
        }
        for city in ("Zagreb", "Split")
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "toolu_Zagreb", "name": "get_weather", "content": "It rains."},
    {"role": "tool", "tool_call_id": "toolu_Split", "name": "get_weather", "content": "It snows."},
]
BEGUN = {"role": "assistant", "content": "The weather"}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
SHAPED = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
GOOD_JSON, BAD_JSON = '{"answer": "yes"}', '{"answer": "maybe"}'

# Placeholders for the text and the reasoning in the answers of the table.
TEXT, REASONING = "{text}", "{reasoning}"


class Wrong(Exception):
    """The fault of a case, in a few words."""


@lru_cache
def upstream_templates():
    """Return the templates of the pinned release by name.

    Skip the test if the cache has only a part of them.
    """
    upstream = read_upstream()
    path = REAL_CACHE / "sdist" / upstream.sdist_name
    found = {}
    if path.exists():
        with tarfile.open(path) as archive:
            for member in archive:
                match = re.search(r"/models/templates/([^/]+)\.jinja$", member.name)
                if match:
                    found[match[1]] = archive.extractfile(member).read().decode()
    if not found:
        pytest.skip("the whole source of llama-cpp-python is not in the cache")
    return found


@lru_cache
def library():
    Bindings.load()
    return server_library()


def filled(pattern, text):
    """Return an answer of the table with this text."""
    return pattern.replace(REASONING, "Because.").replace(TEXT, text)


def in_parts(*messages):
    """Return the messages with lists of parts as content."""
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


def requests(row):
    """Return {column: (request, answers)} for a row of the table."""
    text, call = row["text"], filled(row["call"], "")
    hello = filled(text, "Hello.")
    tools = {"messages": [USER], "tools": [TOOL]}
    shaped = [filled(row.get("json", text), each) for each in (GOOD_JSON, BAD_JSON, "Hello.")]
    rest = filled(text[text.index(TEXT) :], " is fine.")
    return {
        "plain": ({"messages": [USER]}, [hello]),
        "system": ({"messages": [SYSTEM, USER]}, [hello]),
        "tools": (tools, [call, hello]),
        "result": ({"messages": [USER, CALLING, RESULT], "tools": [TOOL]}, []),
        "results": ({"messages": [USER, AT_ONCE, *RESULTS], "tools": [TOOL]}, []),
        "parts": ({"messages": in_parts(USER, AT_ONCE, *RESULTS), "tools": [TOOL]}, []),
        "required": (
            tools | {"tool_choice": "required"},
            [call, hello, call.replace("city", "town")],
        ),
        "schema": ({"messages": [USER], "response_format": SHAPED}, shaped),
        "prefill": ({"messages": [USER, BEGUN]}, [rest]),
        "echo": ({"messages": [USER, BEGUN], "echo": True}, [rest]),
    }


def outcomes(source, row):
    """Return {column: RIGHT or the fault} for a template."""
    asked = requests(row)
    cases = [{"request": request, "answers": answers} for request, answers in asked.values()]
    made = dict(zip(asked, library().try_template(source, cases, "<s>", "</s>"), strict=True))
    found = {}
    for column in COLUMNS:
        try:
            if "error" in made[column]:
                raise Wrong(f"refused: {made[column]['error']}")
            globals()[f"check_{column}"](made, row)
            found[column] = RIGHT
        except Wrong as wrong:
            found[column] = f"known: {wrong}"
    return found


def shows(prompt, *texts):
    """Raise Wrong unless a prompt has these texts, in this order."""
    at = 0
    for text in texts:
        at = prompt.find(text, at)
        if at < 0:
            raise Wrong(f"the prompt lacks {text!r}")


def messages_of(answer):
    """Yield the messages of a complete answer and of a stream.

    Raises Wrong if the parser returns none.
    """
    for way in ("message", "streamed"):
        message = answer[way]
        if "error" in message:
            raise Wrong(message["error"])
        yield way, message


def has_text(answer, text, reasoning=""):
    for way, message in messages_of(answer):
        said = (message.get("content") or "").strip()
        thought = (message.get("reasoning_content") or "").strip()
        if (said, thought) != (text.strip(), reasoning):
            raise Wrong(f"{way}: content {said!r}, reasoning {thought!r}")


def has_call(answer):
    for way, message in messages_of(answer):
        functions = [call["function"] for call in message.get("tool_calls") or []]
        if [each["name"] for each in functions] != ["get_weather"]:
            raise Wrong(f"{way}: the call is {message['content']!r}")
        try:
            arguments = json.loads(functions[0]["arguments"])
        except ValueError:
            arguments = None
        if arguments != {"city": "Zagreb"}:
            raise Wrong(f"{way}: arguments {functions[0]['arguments']}")
        if (message.get("content") or "").strip():
            raise Wrong(f"{way}: text next to the call: {message['content']!r}")


def accepts(answer, is_right, what):
    if answer.get("matches") is not is_right:
        raise Wrong(f"the grammar {'refuses' if is_right else 'accepts'} {what}")


def reasoning_of(row):
    return row.get("reasoning", "Because." if REASONING in row["text"] else "")


def check_plain(made, row):
    shows(made["plain"]["prompt"], USER["content"])
    has_text(made["plain"]["answers"][0], "Hello.", reasoning_of(row))


def check_system(made, row):
    shows(made["system"]["prompt"], SYSTEM["content"])
    shows(made["system"]["prompt"], USER["content"])


def check_tools(made, row):
    prompt = made["tools"]["prompt"]
    for text in ("get_weather", "The weather of a city.", "city", USER["content"]):
        shows(prompt, text)
    called, said = made["tools"]["answers"]
    has_call(called)
    has_text(said, "Hello.", reasoning_of(row))


def check_result(made, row):
    shows(made["result"]["prompt"], USER["content"], "get_weather", "Zagreb", "It rains.")
    if "error" in made["results"]:
        raise Wrong(f"two calls: {made['results']['error']}")
    for call, result in (("Zagreb", "It rains."), ("Split", "It snows.")):
        shows(made["results"]["prompt"], USER["content"], call, result)
    if made["parts"]["prompt"] != made["results"]["prompt"]:
        raise Wrong("parts of a text are not shown as the text")
    shows(made["results"]["prompt"], USER["content"], AT_ONCE["content"], "Zagreb")


def check_required(made, row):
    if "grammar" not in made["required"]:
        raise Wrong("no grammar")
    called, said, misnamed = made["required"]["answers"]
    has_call(called)
    accepts(called, True, "the model's own call")
    accepts(said, False, "a text")
    accepts(misnamed, False, "an unknown argument")


def check_schema(made, row):
    if "grammar" not in made["schema"]:
        raise Wrong("no grammar")
    good, bad, other = made["schema"]["answers"]
    accepts(good, True, "what the schema allows")
    accepts(bad, False, "what the schema forbids")
    accepts(other, False, "a text")
    has_text(good, GOOD_JSON, reasoning_of(row))


def check_prefill(made, row):
    if not made["prefill"]["prompt"].endswith(BEGUN["content"]):
        raise Wrong(f"the prompt ends with {made['prefill']['prompt'][-20:]!r}")
    has_text(made["prefill"]["answers"][0], " is fine.")
    has_text(made["echo"]["answers"][0], "The weather is fine.")


def write_table(rows):
    """Write the table with one field per line."""
    lines = []
    for name, row in sorted(rows.items()):
        fields = [f" {json.dumps(key)}: {json.dumps(row[key], ensure_ascii=False)}" for key in row]
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n}")
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    sources = upstream_templates()
    rows = json.loads(TABLE.read_text())
    for name, row in rows.items():
        row["outcomes"] = outcomes(sources[name], row)
    write_table(rows)


if __name__ == "__main__":
    main()
