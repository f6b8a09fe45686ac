"""A request on its way to llama.cpp's server: the fields that it gets to see, what they may hold
and what they may cost, and in its words what its server would leave out without one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from gguf_tools.units import format_size
from orchestrator.serve.admission import PROBS_BYTES, Body
from orchestrator.serve.constraints import rewritten, rewritten_arguments
from orchestrator.serve.messages import settle_messages
from orchestrator.serve.schemas import (
    COMMON,
    COUNTING,
    GENERATING,
    INNER,
    PATHS,
    SCHEMAS,
    Schema,
)
from orchestrator.serve.served import Served
from orchestrator.serve.wire import (
    ANTHROPIC,
    CHAT,
    COMPLETIONS,
    LIMITS,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
    Refusal,
    Shaping,
    beyond_context,
    levels,
    limit_of,
    message_of,
    written,
)

# The field with live settings of the policy for one request.
_OURS = "moe_edge"
_TOKEN_LISTS = ("prompt", "content", "tokens")
# What is made of small values takes more than other bodies do, a hundred times their length and
# above: a request has one value for so many bytes of the longest body; and so is a text shorter
# whose tokens are written as pieces, which take 250 times its length.
VALUE_BYTES, PIECES_SHARE = 12, 8
# What reading a body takes of memory for each of its bytes; beside that for each token of its
# texts; and for each byte of the longest word, the part in which a tokenizer looks for merges.
# Measured: 10 to 18, up to 108 where each token is a word of its own, and up to 100.
BYTE_COST, TOKEN_COST, WORD_COST = 22, 108, 100
# What a prompt is made of.
_PROMPT = ("prompt", "messages", "input", "instructions", "system", "tools")
# A message has so many tokens at least, what the template has around it among them; a few always
# may be tried. Each takes 4 KiB until the prompt is made, and time.
MESSAGE_TOKENS, _FEW_MESSAGES = 4, 64
# Fields with messages or blocks, and the lists within these that a template writes part by part:
# blocks of text, calls, and blocks of results of tools.
_SAID = ("messages", "input", "system")
_PART_LISTS = ("content", "tool_calls", "output")
# No more than the context has any meaning here, and llama.cpp would take memory for more.
_LAST_N = ("repeat_last_n", "dry_penalty_last_n")
# Texts in `logit_bias` are as many entries as they have tokens.
MOST_BIAS_CHARS = 16384
# What llama.cpp takes for a token id among the names of `logit_bias`: strtol reads all of it.
_TOKEN_ID, _MOST_DIGITS = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]+"), 20
# Of an answer that shares the context with others, where it says no limit of its own.
RESERVED_TOKENS = 4096
# Of a name in a schema: llama.cpp's regular expressions recurse over each of its characters, and
# those of the names around it.
MOST_NAME_CHARS = 256
# Of an object: for each of its optional properties llama.cpp copies the list of those behind it,
# and for each of these again.
MOST_PROPERTIES = 512
# Texts that end an answer. An empty one would end every answer at once.
_STOPS = ("stop", "stop_sequences")
# Of a message with a path in a schema.
MOST_PATH_CHARS = 400
# Where a tool's schema has the one that its calls keep, if that is another one than the model sees
# (patches/native/server/moe-edge-tools.cpp).
GRAMMAR_SCHEMA = "x-moe-edge-grammar"
_SHAPES = ("json_schema", "response_format", "tools")
_TEMPLATE = "the model's own is used, or that of --chat-template"
_ECHO = "/v1/completions has it, for the likelihood of a prompt"
# Fields that change what an answer is, by path, and what to do about them.
_FIELDS = {
    CHAT: {
        "audio": "answers are text",
        "functions": "give them as tools",
        "web_search_options": "this server searches nothing",
    },
    COMPLETIONS: {"suffix": "/infill fills gaps, for models that can"},
    "/completion": {"echo": _ECHO},
    "/infill": {"echo": _ECHO},
    RESPONSES: {
        "echo": _ECHO,
        "conversation": "nothing is stored, so give the whole conversation as input",
        "background": "nothing is stored, so wait for the answer",
        "prompt": "nothing is stored, so give the text as input",
    },
    ANTHROPIC: {
        "echo": _ECHO,
        "mcp_servers": "this server runs no tools",
        "container": "this server runs no tools",
    },
    OLLAMA_CHAT: {"template": _TEMPLATE, "logprobs": "/v1/chat/completions has them"},
    OLLAMA_GENERATE: {
        "template": _TEMPLATE,
        "suffix": "/infill fills gaps, for models that can",
        "context": "/api/chat goes on with a conversation",
        "images": "the model reads text alone",
        "logprobs": "/v1/completions has them",
    },
}
# Blocks of Anthropic's messages that llama.cpp reads, or refuses by itself.
_BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
# How the types of tools begin that Anthropic's own servers run.
_RUN_THERE = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset")
_MODES = ("auto", "none", "required")
# Names of the most tokens of reasoning, in the order in which llama.cpp looks for them.
_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")
# What the tokens' probabilities of an answer take, for each alternative of each token: as long as
# the answer lasts, and while it is written whole, which a stream never is. Measured with 400 tokens
# of 21: 1.1 and 0.2 KiB, and twice as much where memory was fresh.
WHOLE_BYTES, STREAM_BYTES = 2048, 256
# The types of these, what people call them, and what there is a number of in them.
_KINDS: dict[str, tuple[type | tuple[type, ...], str, str]] = {
    "object": (dict, "an object", " entries"),
    "array": (list, "a list", " items"),
    "string": (str, "a text", " characters"),
    "boolean": (bool, "true or false", ""),
    "integer": (int, "a whole number", ""),
    "number": ((int, float), "a number", ""),
}


def settle_request(
    route: str, data: dict[str, Any], n_bytes: int, served: Served
) -> dict[str, Any]:
    """Turn a request's object into that for llama.cpp, in place, and return what it has for the
    policy.

    n_bytes: length of its body. May take long: a body may have a hundred thousand tokens. Raises
    Refusal for what cannot be served.
    """
    changes = data.pop(_OURS, None) or {}
    fault = fault_of(COMMON[_OURS], changes, _OURS)
    if fault is not None:
        raise Refusal(400, fault)
    _check_values(data, n_bytes, served.most_body_bytes)
    form = COUNTING.get(route, route)
    _settle_format(form, data)
    settle_fields(form, data, served.about.n_ctx, served.about.n_vocab)
    settle_tool_choice(form, data)
    settle_reasoning(form, data)
    settle_messages(form, data)
    _check_bounds(data)
    _check_biased_tokens(data.get("logit_bias"), served.about.n_vocab)
    _check_cost(route, data, n_bytes, served)
    _settle_schemas(form, data, served)
    return changes


def _check_values(data: dict[str, Any], n_bytes: int, longest_bytes: int) -> None:
    """Raises Refusal for a request of which more would be made than there is memory for."""
    most = longest_bytes // PIECES_SHARE
    if data.get("with_pieces") and n_bytes > most:
        raise Refusal(400, f"with_pieces takes a request of at most {format_size(most)}")
    most = longest_bytes // VALUE_BYTES
    # Tokens are numbers in lists of their own, which take no more than texts do.
    n_values = 0
    for level in levels([value for name, value in data.items() if name not in _TOKEN_LISTS]):
        n_values += len(level)
        if n_values > most:
            raise Refusal(400, f"a request has at most {most} values, and this one has more")


def _check_cost(route: str, data: dict[str, Any], n_bytes: int, served: Served) -> None:
    """Raises Refusal for a request that would take more memory than is held for one that is worked
    with: its text has many tokens for its length, or a long word."""
    most = served.body_factor * served.most_body_bytes
    if n_bytes * (BYTE_COST + TOKEN_COST + WORD_COST) <= most:
        return
    n_tokens = n_prompt = longest_word = 0
    for name, value in data.items():
        n_more, n_long = (0, 0) if name == "grammar" else _counted(value, served)
        n_tokens, longest_word = n_tokens + n_more, max(longest_word, n_long)
        n_prompt += n_more if name in _PROMPT else 0
    cost = BYTE_COST * n_bytes + TOKEN_COST * n_tokens + WORD_COST * longest_word
    if cost <= most:
        return
    # Of several prompts each is within the context, or not; gaps are cut to it.
    is_one = not isinstance(data.get("prompt"), list) and route != "/infill"
    if is_one and route in GENERATING and n_prompt > served.about.n_ctx:
        raise beyond_context(f"a prompt of {n_prompt} tokens", n_prompt, served.about.n_ctx)
    limit_kib = -(-cost // (served.body_factor * 1024))
    raise Refusal(
        400,
        "the text of the request has so many tokens for its length, or so long a word, that "
        f"reading it would take more than {format_size(most)}: send less of it, or start the "
        f"server with --body-limit {limit_kib}KiB",
    )


def _counted(value: Any, served: Served) -> tuple[int, int]:
    """(tokens, length of the longest word) of all texts in a value, names in objects among them,
    which templates write, too."""
    n_tokens = longest_word = 0
    for level in levels([value]):
        names = [name for each in level if isinstance(each, dict) for name in each]
        for text in [*(each for each in level if isinstance(each, str)), *names]:
            n_more, n_long = served.count_tokens(text)
            n_tokens, longest_word = n_tokens + n_more, max(longest_word, n_long)
    return n_tokens, longest_word


def request_schema(route: str) -> Schema:
    """What a POST to this path may have."""
    body = PATHS[route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return _resolved(body)


def _n_parts(said: Any) -> int:
    """Return how many parts a template writes for messages or blocks: those without lists of their
    own, at any depth."""
    if isinstance(said, list):
        return sum(map(_n_parts, said))
    lists = [said.get(name) for name in _PART_LISTS] if isinstance(said, dict) else []
    return max(1, sum(_n_parts(each) for each in lists if isinstance(each, list)))


def settle_fields(route: str, data: dict[str, Any], n_ctx: int, n_vocab: int = 0) -> None:
    """Leaves in a request what this path's schema has, with values for a context of n_ctx tokens
    and a vocabulary of n_vocab.

    Clients send fields that mean something to other servers alone, and null for what they leave
    open: both go. Raises Refusal for a value of another kind or beyond its bounds, for a field that
    is missing, for those that steer llama.cpp from inside, and for what cannot be served.
    """
    _settle_unserved(route, data)
    for name, why in INNER.items():
        if data.get(name) is not None and (name != "lora" or data[name]):
            raise Refusal(400, f"{name} cannot be set by a request: {why}")
    schema = request_schema(route)
    for name in _STOPS:
        if data.get(name) == "":
            del data[name]
        elif isinstance(data.get(name), list):
            data[name] = [each for each in data[name] if each != ""]
    for name in [name for name, value in data.items() if value is None]:
        del data[name]
    for name in data.keys() - schema["properties"].keys():
        del data[name]
    data.update(with_whole_numbers(schema, data))
    fault = fault_of(schema, data, "")
    if fault is not None:
        raise Refusal(400, fault)
    for name in _LAST_N:
        if name in data:
            data[name] = n_ctx if data[name] < 0 else min(data[name], n_ctx)
    said = [data[name] for name in _SAID if isinstance(data.get(name), list)]
    n_parts = _n_parts(said)
    if n_parts > max(_FEW_MESSAGES, n_ctx // MESSAGE_TOKENS):
        raise beyond_context(
            f"{n_parts} {'messages' if [n_parts] == [*map(len, said)] else 'parts of messages'}",
            MESSAGE_TOKENS * n_parts,
            n_ctx,
        )
    tokens = data.get("tokens") if route == "/detokenize" else None
    if tokens and not all(0 <= each < n_vocab for each in tokens):
        raise Refusal(
            400, f"tokens must be numbers from 0 to {n_vocab - 1}, the model's vocabulary"
        )


def with_whole_numbers(schema: Schema, value: Any) -> Any:
    """Return a value of JSON with an integer instead of each whole float (64.0) where the schema
    has integers: some clients have no other numbers."""
    choices = [_resolved(each) for each in _resolved(schema).get("anyOf", [_resolved(schema)])]
    if isinstance(value, float):
        kinds = {choice.get("type") for choice in choices}
        return (
            int(value)
            if value.is_integer() and "integer" in kinds and "number" not in kinds
            else value
        )
    for choice in choices:
        if isinstance(value, list) and choice.get("type") == "array":
            if float in set(map(type, value)) or any(
                isinstance(each, (list, dict)) for each in value
            ):
                value = [with_whole_numbers(choice.get("items", {}), each) for each in value]
        elif isinstance(value, dict) and choice.get("type") == "object":
            known, others = choice.get("properties", {}), choice.get("additionalProperties", {})
            value = {
                name: with_whole_numbers(known.get(name, others), each)
                for name, each in value.items()
            }
    return value


def fault_of(schema: Schema, value: Any, where: str) -> str | None:
    """Why a value of JSON is not what a schema says, in a sentence; None where it is. where: the
    value's name for people, "" for the whole request. A property that is null counts as absent."""
    fault = _fault(schema, value)
    if fault is None:
        return None
    below, wanted = fault
    name = f"{where}{below}".removeprefix(".")
    return f"{name} is missing" if wanted is None else f"{name} must be {_words(wanted)}"


def _fault(schema: Schema, value: Any) -> tuple[str, Schema | None] | None:
    """Where in a value something is wrong, as `.stop[1]`, and what it has to be; None for that
    where it has to be there at all. Names are made for what is wrong alone."""
    schema = _resolved(schema)
    if "anyOf" in schema:
        kind = "array" if isinstance(value, list) else "object" if isinstance(value, dict) else None
        near = []
        for choice in map(_resolved, schema["anyOf"]):
            fault = _fault(choice, value)
            if fault is None:
                return None
            if kind and choice.get("type") == kind:
                near.append(fault)
        # The fault within the one choice that is a list or an object as the value is.
        return near[0] if len(near) == 1 else ("", schema)
    if not _is_kind(schema, value):
        return "", schema
    if isinstance(value, list) and not _are_numbers(schema.get("items", {}), value):
        for at, each in enumerate(value):
            fault = _fault(schema.get("items", {}), each)
            if fault is not None:
                return f"[{at}]{fault[0]}", fault[1]
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if value.get(name) is None:
                return f".{name}", None
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            fault = None if inner is None or each is None else _fault(inner, each)
            if fault is not None:
                return f".{name[:80]}{fault[0]}", fault[1]
    return None


def _are_numbers(items: Schema, values: list[Any]) -> bool:
    """Whether all are whole numbers that fit. Prompts are lists of up to a hundred thousand: those
    are looked at together."""
    if not values or set(map(type, values)) != {int}:
        return False
    ends = min(values), max(values)
    return any(
        choice.get("type") in ("integer", "number") and not any(_fault(choice, n) for n in ends)
        for choice in map(_resolved, items.get("anyOf", [items]))
    )


def _is_kind(schema: Schema, value: Any) -> bool:
    """Whether a value is of the schema's type, one of its words, and within its bounds."""
    if "const" in schema or "enum" in schema:
        words = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(word) and value == word for word in words)
    kind = schema.get("type")
    if kind is None:
        return True
    if not isinstance(value, _KINDS[kind][0]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    size = len(value) if isinstance(value, (str, list, dict)) else value
    least, most = _bounds(schema)
    return (least is None or size >= least) and (most is None or size <= most)


def _bounds(schema: Schema) -> tuple[Any, Any]:
    """(least, most) of a number, or of how many there are of what."""
    ends = {"array": "Items", "string": "Length", "object": "Properties"}
    end = ends.get(schema.get("type", ""))
    names = (f"min{end}", f"max{end}") if end else ("minimum", "maximum")
    return schema.get(names[0]), schema.get(names[1])


def _words(schema: Schema) -> str:
    """What a value has to be, for people."""
    if "anyOf" in schema:
        said = dict.fromkeys(_words(_resolved(choice)) for choice in schema["anyOf"])
        return " or ".join(said)
    if "const" in schema or "enum" in schema:
        words = schema.get("enum", [schema.get("const")])
        return " or ".join(json.dumps(word) for word in words)
    least, most = _bounds(schema)
    _, name, unit = _KINDS.get(schema.get("type", ""), (object, "something else", ""))
    if least is not None and most is not None:
        return f"{name} {'of' if unit else 'from'} {least} to {most}{unit}"
    if least is not None:
        return f"{name} that is not empty" if unit else f"{name} from {least} on"
    if most is not None:
        return f"{name} {'of at most' if unit else 'up to'} {most}{unit}"
    return name


def _resolved(schema: Schema) -> Schema:
    """The schema that a reference names."""
    name = schema.get("$ref")
    return schema if name is None else SCHEMAS[name.rpartition("/")[2]]


def _settle_unserved(route: str, data: dict[str, Any]) -> None:
    """Leaves out tools that a server would run, where others stand beside them: agents offer them
    to any server.

    Raises Refusal for what cannot be served.
    """
    for name, why in _FIELDS.get(route, {}).items():
        if data.get(name):
            raise Refusal(400, f"{name} is not served: {why}")
    best_of, modalities = data.get("best_of"), data.get("modalities")
    if route == COMPLETIONS and best_of not in (None, 1):
        raise Refusal(400, "best_of is not served: each answer is one")
    if route == CHAT and isinstance(modalities, list) and set(map(str, modalities)) - {"text"}:
        raise Refusal(400, "modalities has more than text: answers are text")
    if route == ANTHROPIC:
        for kind in _blocks(data.get("messages")):
            if kind not in _BLOCKS:
                raise Refusal(400, f"content of type '{kind[:80]}' is not served: give it as text")
    tools = data.get("tools")
    if route not in (RESPONSES, ANTHROPIC) or not isinstance(tools, list):
        return
    own = [tool for tool in tools if not _runs_there(route, tool)]
    if tools and not own:
        raise Refusal(400, "this server runs no tools: give functions that the client runs")
    data["tools"] = own


def _blocks(messages: Any) -> Iterator[str]:
    """The types of all blocks, those of results of tools included."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict):
                yield str(block.get("type"))
                yield from _blocks([block])


def _runs_there(route: str, tool: Any) -> bool:
    kind = str(tool.get("type")) if isinstance(tool, dict) else "function"
    if route == RESPONSES:
        return kind != "function"
    return kind.startswith(_RUN_THERE)


def _settle_format(route: str, data: dict[str, Any]) -> None:
    """Turns the forms that OpenAI's responses and Anthropic's messages have for a schema into that
    of OpenAI's chat, which llama.cpp reads. Raises Refusal for a form that is none: llama.cpp would
    leave it out, and the client would get any text."""
    text, config = data.get("text"), data.get("output_config")
    if route == RESPONSES and isinstance(text, dict) and text.get("format") is not None:
        asked = text["format"]
        if isinstance(asked, dict) and asked.get("type") == "json_schema":
            asked = {"type": "json_schema", "json_schema": asked}
        data["response_format"] = asked
    if route == ANTHROPIC:
        asked = config.get("format") if isinstance(config, dict) else None
        asked = data.get("output_format") if asked is None else asked  # as it was called in beta
        if asked is not None:
            if not isinstance(asked, dict) or asked.get("type") != "json_schema":
                raise Refusal(400, "the format in output_config must be a json_schema")
            data["response_format"] = {"type": "json_schema", "json_schema": asked}


def settle_tool_choice(route: str, data: dict[str, Any]) -> None:
    """Turns a choice of tools into one of llama.cpp's words, and leaves out the tools that may not
    be called.

    A named function is required, once, and the only one that is offered. Raises Refusal for a
    choice that cannot be met.
    """
    choice, tools = data.get("tool_choice"), data.get("tools")
    if choice is None:
        return
    mode, names = _read(choice)
    if mode == "required" and not tools:
        raise Refusal(400, "tool_choice asks for a call, and the request has no tools")
    offered = tools or []
    if names is not None:
        offered = [tool for tool in offered if _name_of(tool) in names]
        if not offered:
            said = ", ".join(repr(name[:80]) for name in names)
            raise Refusal(400, f"tool_choice names {said}, which is none of the tools")
    if route == ANTHROPIC:
        # Its form has no word of llama.cpp's for none: without tools, none is called.
        words = {"auto": "auto", "required": "any"}
        data.pop("tool_choice")
        if mode == "none":
            data.pop("tools", None)
            return
        data["tool_choice"] = {"type": words[mode]}
        if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True:
            data["parallel_tool_calls"] = False
    else:
        data["tool_choice"] = mode
        if mode == "required" and names is not None:
            data["parallel_tool_calls"] = False
    if tools is not None:
        data["tools"] = offered


def _read(choice: Any) -> tuple[str, list[str] | None]:
    """(mode, names of the tools that may be called; None for all) of OpenAI's and Anthropic's
    forms."""
    if isinstance(choice, str) and choice in _MODES:
        return choice, None
    if isinstance(choice, dict):
        kind = choice.get("type")
        allowed = choice.get("allowed_tools", choice)
        if kind in ("auto", "none"):
            return str(kind), None
        if kind == "any":
            return "required", None
        if kind in ("function", "tool"):
            name = _name_of(choice)
            if name:
                return "required", [name]
        elif (
            kind == "allowed_tools"
            and isinstance(allowed, dict)
            and allowed.get("mode") in ("auto", "required")
            and isinstance(allowed.get("tools"), list)
        ):
            return str(allowed["mode"]), [_name_of(tool) or "" for tool in allowed["tools"]]
    raise Refusal(
        400, 'tool_choice must be "auto", "none", "required", or an object that names a function'
    )


def _settle_schemas(route: str, data: dict[str, Any], served: Served) -> None:
    """Rewrites schemas into the keywords that llama.cpp enforces. The log says once what is not
    enforced of a tool's arguments.

    Raises Refusal with the path of a constraint of an answer's format, or of a strict tool, that
    cannot be enforced.
    """
    asked = data.get("response_format")
    for name, holder in (("response_format", asked), ("", data)):
        inner = holder.get("json_schema") if isinstance(holder, dict) else None
        if name and isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
            inner["schema"] = _enforced(inner["schema"], f"{name}.json_schema.schema")
        elif name and isinstance(holder, dict) and isinstance(holder.get("schema"), dict):
            holder["schema"] = _enforced(holder["schema"], f"{name}.schema")
        elif not name and isinstance(inner, dict):
            data["json_schema"] = _enforced(inner, "json_schema")
    for number, tool in enumerate(data.get("tools") or ()):
        function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        key = "input_schema" if route == ANTHROPIC else "parameters"
        if not isinstance(function.get(key), dict):
            continue
        inside = ".function" if function is not tool else ""
        made, lost = rewritten_arguments(function[key], f"tools[{number}]{inside}.{key}")
        if lost and function.get("strict", tool.get("strict")) is True:
            raise Refusal(400, f"{_cut(lost[0])}; the tool is strict, so that it cannot be served")
        if lost:
            name = ascii(_name_of(tool))[:80]
            served.note_once(
                f"the arguments of the tool {name} are not fully enforced: {_cut(lost[0])}"
                + (f", and {len(lost) - 1} more" if len(lost) > 1 else "")
            )
        if made is not function[key]:
            function[key] = {**function[key], GRAMMAR_SCHEMA: made}


def _enforced(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """A schema of an answer as llama.cpp enforces it. Raises Refusal if it cannot."""
    made, lost = rewritten(schema, where)
    if lost:
        raise Refusal(400, f"{_cut(lost[0])}; the schema of an answer has to be enforceable")
    return dict(made)


def _cut(sentence: str) -> str:
    """A sentence that has names of the client's in it, for an answer or a log."""
    plain = ascii(sentence)[1:-1]
    return (
        plain
        if len(plain) <= MOST_PATH_CHARS
        else f"{plain[: MOST_PATH_CHARS // 2]} ... {plain[-MOST_PATH_CHARS // 2 :]}"
    )


def _name_of(tool: Any) -> str | None:
    """A tool's name in OpenAI's two forms and in Anthropic's."""
    if not isinstance(tool, dict):
        return None
    inner = tool.get("function")
    found = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    return found if isinstance(found, str) else None


def settle_reasoning(route: str, data: dict[str, Any]) -> None:
    """Turn what a request says about reasoning into the fields that llama.cpp reads.

    Anthropic's `thinking` and `output_config.effort`, OpenRouter's `reasoning` and a budget of 0
    tokens become `reasoning_effort`, a budget, or template arguments. A template argument that the
    client gave by its own name is kept.
    """
    wanted: dict[str, Any] = {}
    if route == ANTHROPIC:
        # Its converter in llama.cpp passes the budget and the template's arguments on, no effort.
        thinking = data.get("thinking", {})
        is_off = thinking.get("type") == "disabled" or thinking.get("budget_tokens") == 0
        effort = data.get("output_config", {}).get("effort")
        if effort is not None:
            wanted["reasoning_effort"] = effort
    else:
        asked = data.pop("reasoning", {}) if route != RESPONSES else {}
        for name, inner in (("reasoning_effort", "effort"), (_BUDGETS[0], "max_tokens")):
            if asked.get(inner) is not None:
                data.setdefault(name, asked[inner])
        budget = next((data[name] for name in _BUDGETS if name in data), None)
        is_off = asked.get("enabled") is False or budget == 0
    if is_off:
        wanted["enable_thinking"] = False
    if wanted:
        data["chat_template_kwargs"] = wanted | data.get("chat_template_kwargs", {})


def _check_bounds(data: dict[str, Any]) -> None:
    """Raises Refusal for a request for which llama.cpp would compute for long before anybody can
    end it, where the schema of a field cannot say so. How much work a grammar is cannot be told
    from its text: the native server counts it (`patches/native/server/moe-edge-bounds.h`)."""
    n_chars = sum(map(len, _texts(data.get("logit_bias"))))
    _refuse_above("the texts of logit_bias", n_chars, MOST_BIAS_CHARS, "characters")
    for name in _SHAPES:
        _check_schemas(name, data.get(name))


def _check_biased_tokens(bias: Any, n_vocab: int) -> None:
    """Raise Refusal if `logit_bias` names a token id that the model does not have. llama.cpp would
    ignore that entry. Names of an object that are whole numbers are ids, others are texts."""
    if isinstance(bias, dict):
        named = [name for name in bias if _TOKEN_ID.fullmatch(name)]
    else:
        given = [each[0] for each in bias or ()]
        for each in given:
            if isinstance(each, bool) or not isinstance(each, (int, str)):
                raise Refusal(400, f"logit_bias has {json.dumps(each)}: give a token id or a text")
        named = [str(each) for each in given if isinstance(each, int)]
    for name in named:
        if len(name) > _MOST_DIGITS or not 0 <= int(name) < n_vocab:
            said = name.strip()[:_MOST_DIGITS]
            has = f"the model has the tokens 0 to {n_vocab - 1}"
            raise Refusal(400, f"logit_bias has token {said}, and {has}")
    if isinstance(bias, dict) and "" in bias:
        raise Refusal(400, "logit_bias has an empty text: give a token id or a text")


def _refuse_above(what: str, n: int, most: int, of: str) -> None:
    if n > most:
        raise Refusal(400, f"{what}: {n} {of}, and {most} is the most that is taken")


def _texts(bias: Any) -> Iterator[str]:
    if isinstance(bias, dict):
        yield from bias
        return
    for each in bias or ():
        if isinstance(each[0], str):
            yield each[0]


def _check_schemas(name: str, asked: Any) -> None:
    """Of a schema, or of anything that has some in it."""
    for each in (each for level in levels([asked]) for each in level if isinstance(each, dict)):
        reference, properties = each.get("$ref"), each.get("properties")
        names = [*each, reference] if isinstance(reference, str) else each
        longest = max(map(len, names), default=0)
        _refuse_above(f"a name in {name}", longest, MOST_NAME_CHARS, "characters")
        n = len(properties) if isinstance(properties, dict) else 0
        _refuse_above(f"an object in {name}", n, MOST_PROPERTIES, "properties")


def settle_probs(route: str, data: dict[str, Any], most_tokens: int) -> Shaping | None:
    """Puts what a request asks of probabilities and of tokens into llama.cpp's words, and bounds
    both together. Returns what turns parts of its answer into the form of its path; None where they
    have it.

    llama.cpp keeps the answers to all prompts of a request until the last one is made, so that they
    share the memory. Further answers to a prompt (`n`) take a place each, and so have memory each.

    most_tokens: of an answer. Raises Refusal for more than an answer has memory for.
    """
    shaping = Shaping(route, data)  # by what the client sent
    name = {CHAT: "top_logprobs", COMPLETIONS: "logprobs"}.get(route, "n_probs")
    if route == CHAT and data.get("logprobs") and not data.get(name):
        data[name] = 1  # llama.cpp says nothing of the chosen token without another one
    if route == CHAT and not data.get("logprobs"):
        if data.get(name):
            raise Refusal(400, "top_logprobs needs logprobs to be true")
        data.pop(name, None)
    if route == COMPLETIONS and data.get(name) == 0:
        data[name] = 1
    _bound(name, data, most_tokens)
    if shaping.has_no_tokens:
        _limit(data, 1)  # llama.cpp reads the prompt for no less
    return shaping if shaping.is_needed else None


def _bound(name: str, data: dict[str, Any], most_tokens: int) -> None:
    n_probs = data.get(name, 0)
    if not n_probs:
        return
    each = (STREAM_BYTES if data.get("stream") else WHOLE_BYTES) * (2 if data.get("verbose") else 1)
    n_prompts = _prompts(data.get("prompt"))
    most = PROBS_BYTES // (each * n_prompts)  # tokens and alternatives of one answer
    room = most // (n_probs + 1)
    of = "an answer" if n_prompts == 1 else f"each of {n_prompts} answers"
    if room < 1:
        raise Refusal(400, f"{name} is {n_probs}: {of} has memory for {max(0, most - 1)}")
    limit = limit_of(data)
    if limit is None:
        if room < most_tokens:
            _limit(data, room)
    elif min(limit, most_tokens) > room:
        raise Refusal(
            400,
            f"{of} of {limit} tokens with {n_probs} alternatives each has no room in memory: "
            f"ask for {room} tokens or fewer alternatives"
            + ("" if data.get("stream") else ", or for a stream"),
        )


def _prompts(prompt: Any) -> int:
    """How many prompts llama.cpp takes a request's for: with a token in it, a list is one."""
    if not isinstance(prompt, list) or any(isinstance(each, int) for each in prompt):
        return 1
    return max(1, len(prompt))


def _limit(data: dict[str, Any], n_tokens: int) -> None:
    """Lets an answer have so many tokens, whatever the request says by any name."""
    for name in LIMITS:
        data.pop(name, None)
    data["max_tokens"] = n_tokens


def settle_length(
    route: str, data: dict[str, Any], served: Served, n_answers: int, asker: Body
) -> int:
    """Bounds an answer that shares the context with those of other sequences, and returns how many
    of its cells the request takes at most: nobody else is let into these.

    An answer without a limit may be as long as its sequence's even share of the context, and has
    RESERVED_TOKENS in any case, as far as the context goes. Raises Refusal as check_length.
    """
    body, most = written(data), served.about.n_ctx
    counted = check_length(route, body, served, asker)
    n_prompt = len(body) if counted is None else counted  # no token is shorter than a byte
    limit, share = limit_of(data), served.about.n_cells // served.parallel
    if limit is None:
        limit = served.max_tokens or max(RESERVED_TOKENS, share - n_prompt)
    limit = min(limit, most - (counted or 0))
    if limit_of(data) is None:
        _limit(data, limit)
    n_answers = max(n_answers, min(_prompts(data.get("prompt")), served.parallel))
    return min(served.about.n_cells, n_prompt + n_answers * limit)


def check_length(route: str, body: bytes, served: Served, asker: Body) -> int | None:
    """How many tokens a prompt has; None where no request that decodes nothing tells: of several
    texts, gaps, and what llama.cpp will refuse. Raises Refusal for a prompt that the context has no
    room for, and for one that cannot be read at all. On a thread."""
    counting = next((each for each, form in COUNTING.items() if form == route), None)
    prompt = json.loads(body).get("prompt")
    n_tokens: int | None = None
    if counting is not None:
        status, answer = asker.ask(served.runtime, counting, body)
        if status == 400:
            raise Refusal(400, message_of(answer))
        if status == 200:
            n_tokens = json.loads(answer)["input_tokens"]
    elif isinstance(prompt, str):
        text = {"content": prompt, "add_special": True, "parse_special": True}
        status, answer = asker.ask(served.runtime, "/tokenize", json.dumps(text).encode())
        n_tokens = len(json.loads(answer)["tokens"]) if status == 200 else None
    elif prompt and isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        n_tokens = len(prompt)
    most = served.about.n_ctx
    if n_tokens is not None and n_tokens >= most:
        raise beyond_context(f"the prompt of {n_tokens} tokens", n_tokens, most)
    return n_tokens
