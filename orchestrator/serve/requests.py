"""Prepares a request for llama.cpp's server.

Checks its fields, limits its costs, and translates fields that llama.cpp does not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from gguf_tools.units import format_size
from orchestrator.runtime.images import settle_images
from orchestrator.serve.admission import PROBS_BYTES, Body
from orchestrator.serve.constraints import rewritten, rewritten_arguments
from orchestrator.serve.messages import settle_messages
from orchestrator.serve.schemas import (
    COMMON,
    COUNTED_BY,
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
    too_long_text,
    written,
)

# The request field for live policy settings.
_OURS = "moe_edge"
_TOKEN_LISTS = ("prompt", "content", "tokens")
# Values that are short in JSON take much more memory than other text, 100 times their length and
# more. So a request may have one value for each VALUE_BYTES bytes of the longest allowed body. With
# `with_pieces`, tokens take 250 times the length of their text, so such a body may only have
# 1/PIECES_SHARE of the longest length.
VALUE_BYTES, PIECES_SHARE = 12, 8
# Memory for reading a body, in bytes: for each byte of the body, for each token, and for each
# symbol of the longest word (the unit in which the tokenizer merges). Measured: 10 to 18 for each
# byte, up to 108 for each token if every token is a word, and up to 100 for each symbol.
BYTE_COST, TOKEN_COST, WORD_COST = 22, 108, 100
# Fields that become part of the prompt.
_PROMPT = ("prompt", "messages", "input", "instructions", "system", "tools")
# A message has at least MESSAGE_TOKENS tokens, including those of the chat template. Up to
# _FEW_MESSAGES messages are always allowed. llama.cpp takes 4 KiB for each until the prompt is
# made.
MESSAGE_TOKENS, _FEW_MESSAGES = 4, 64
# Fields with messages or blocks, and the lists inside them that a template writes part by part:
# text blocks, tool calls, and blocks of tool results.
_SAID = ("messages", "input", "system")
_PART_LISTS = ("content", "tool_calls", "output")
# Lengths of penalty windows. They are cut to the context, because llama.cpp allocates memory for
# all.
_LAST_N = ("repeat_last_n", "dry_penalty_last_n")
# A text in `logit_bias` becomes one entry for each of its tokens.
MOST_BIAS_CHARS = 16384
# A name in `logit_bias` that llama.cpp reads as a token id: strtol parses all of it.
_TOKEN_ID, _MOST_DIGITS = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]+"), 20
# KV cells reserved for an answer without a limit, if it shares the context with other answers.
RESERVED_TOKENS = 4096
# The longest name in a schema. llama.cpp's regular expressions recurse over each character of a
# name and of the names around it.
MOST_NAME_CHARS = 256
# The most properties of an object in a schema. llama.cpp's work is cubic in the optional ones: for
# each it copies the list of the following ones, and again for each of these.
MOST_PROPERTIES = 512
# Fields with texts that end an answer. An empty text would end every answer at once.
_STOPS = ("stop", "stop_sequences")
# The longest error or log message that contains a path of a schema.
MOST_PATH_CHARS = 400
# Key of a tool's schema that holds the rewritten schema for the grammar, if the model should see
# the original one (patches/native/server/moe-edge-tools.cpp).
GRAMMAR_SCHEMA = "x-moe-edge-grammar"
_SHAPES = ("json_schema", "response_format", "tools")
_TEMPLATE = "to change the chat template, start the server with --chat-template FILE"
_ECHO = "only /v1/completions can return the log-probabilities of a prompt"
# Fields that would change the meaning of an answer and are refused: {path: {field: remedy}}.
_FIELDS = {
    CHAT: {
        "audio": "this server answers with text only",
        "functions": "give the functions in the field tools",
        "web_search_options": "this server cannot search the web",
    },
    COMPLETIONS: {"suffix": "use /infill, if the model supports filling a gap"},
    "/completion": {"echo": _ECHO},
    "/infill": {"echo": _ECHO},
    RESPONSES: {
        "echo": _ECHO,
        "conversation": "this server stores nothing, so give the whole conversation as input",
        "background": "this server stores no answers, so leave out the field background and "
        "read the answer from the response",
        "prompt": "this server stores no prompts, so give the text of the prompt as input",
    },
    ANTHROPIC: {
        "echo": _ECHO,
        "mcp_servers": "this server runs no tools",
        "container": "this server runs no tools",
    },
    OLLAMA_CHAT: {
        "template": _TEMPLATE,
        "logprobs": "use /v1/chat/completions for log-probabilities",
    },
    OLLAMA_GENERATE: {
        "template": _TEMPLATE,
        "suffix": "use /infill, if the model supports filling a gap",
        "context": "use /api/chat to continue a conversation",
        "logprobs": "use /v1/completions for log-probabilities",
    },
}
# Blocks of Anthropic's messages that llama.cpp reads or refuses itself.
_BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
# Prefixes of the types of tools that run on Anthropic's servers.
_SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset")
_MODES = ("auto", "none", "required")
# Names of the limit on reasoning tokens, in llama.cpp's order of precedence.
_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")
# Memory for token probabilities, in bytes for each alternative of each token: of a complete answer
# until it is written, and of a stream. Measured with 400 tokens of 21 alternatives: 1.1 and 0.2
# KiB, and twice as much in fresh memory.
WHOLE_BYTES, STREAM_BYTES = 2048, 256
# JSON types: the Python types, the name in messages, and the unit of the size.
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
    """Check a request, translate it in place for llama.cpp, and return its policy settings.

    `data` is the request, and `n_bytes` the length of its body. The policy settings are those in
    its field `moe_edge`. This can take seconds, because a body may have 100,000 tokens. Raises
    Refusal (an error response) for a request that cannot be served.
    """
    changes = data.pop(_OURS, None) or {}
    fault = fault_of(COMMON[_OURS], changes, _OURS)
    if fault is not None:
        raise Refusal(400, fault)
    _check_values(data, n_bytes, served.most_body_bytes)
    form = COUNTING.get(route, route)
    _settle_format(form, data)
    settle_fields(form, data, served.about.n_ctx, served.about.n_vocab)
    images = _settle_images(form, data, served)
    n_bytes -= sum(map(len, images))
    if n_bytes > served.most_body_bytes:
        raise too_long_text(served.most_body_bytes)
    settle_tool_choice(form, data)
    settle_reasoning(form, data)
    settle_messages(form, data)
    _check_bounds(data)
    _check_biased_tokens(data.get("logit_bias"), served.about.n_vocab)
    _check_cost(route, data, n_bytes, served, images)
    _settle_schemas(form, data, served)
    return changes


def _settle_images(route: str, data: dict[str, Any], served: Served) -> list[str]:
    """Check the images of a request, and rewrite them as llama.cpp reads them, in place.

    Returns the texts of the images, as they are in the request now. Raises Refusal (an error
    response) for images in a prompt without messages. Raises ConfigError for other images that the
    server cannot give to the model.
    """
    prompt = data.get("prompt")
    for each in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(each, dict) and each.get("multimodal_data"):
            raise Refusal(400, f"multimodal_data is not supported: send images to {CHAT}")
    field = "input" if route == RESPONSES else "messages"
    messages = data.get(field)
    if not isinstance(messages, list):
        return []
    return settle_images(messages, served.images, field)


def _check_values(data: dict[str, Any], n_bytes: int, longest_bytes: int) -> None:
    """Raise Refusal (an error response) if parsing a request would take too much memory.

    `n_bytes` is the length of its body, and `longest_bytes` that of the longest allowed body.
    """
    most = longest_bytes // PIECES_SHARE
    if data.get("with_pieces") and n_bytes > most:
        raise Refusal(
            400,
            f"the body has {format_size(n_bytes)}, but a request with the field with_pieces may "
            f"have at most {format_size(most)}: send less text, or leave out with_pieces",
        )
    most = longest_bytes // VALUE_BYTES
    # Lists of tokens are not counted: they take no more memory than texts do.
    n_values = 0
    for level in levels([value for name, value in data.items() if name not in _TOKEN_LISTS]):
        n_values += len(level)
        if n_values > most:
            raise Refusal(
                400,
                f"the request has more than {most} JSON values, which is the limit of this server",
            )


def _check_cost(
    route: str, data: dict[str, Any], n_bytes: int, served: Served, images: Sequence[str]
) -> None:
    """Raise Refusal (an error response) if tokenizing a request would take too much memory.

    The limit is the memory that is reserved for one body. A request exceeds it if its text has many
    tokens for its length, or a very long word. n_bytes is the length of the body without its
    `images`, which are objects in `data`. An equal text elsewhere counts, because it is tokenized.
    """
    skipped = frozenset(map(id, images))
    most = served.body_factor * served.most_body_bytes
    if n_bytes * (BYTE_COST + TOKEN_COST + WORD_COST) <= most:
        return
    n_tokens = n_prompt = longest_word = 0
    for name, value in data.items():
        n_more, n_long = (0, 0) if name == "grammar" else _counted(value, served, skipped)
        n_tokens, longest_word = n_tokens + n_more, max(longest_word, n_long)
        n_prompt += n_more if name in _PROMPT else 0
    cost = BYTE_COST * n_bytes + TOKEN_COST * n_tokens + WORD_COST * longest_word
    if cost <= most:
        return
    # Several prompts are checked one by one later. /infill cuts its texts to the context.
    is_one = not isinstance(data.get("prompt"), list) and route != "/infill"
    if is_one and route in GENERATING and n_prompt > served.about.n_ctx:
        raise beyond_context(f"a prompt of {n_prompt} tokens", n_prompt, served.about.n_ctx)
    limit_kib = -(-cost // (served.body_factor * 1024))
    raise Refusal(
        400,
        f"the request has too many tokens or a very long word: tokenizing the text would take "
        f"more than {format_size(most)} of memory. Send less text, or start the server with "
        f"--body-limit {limit_kib}KiB",
    )


def _counted(value: Any, served: Served, skipped: Collection[int]) -> tuple[int, int]:
    """Return (number of tokens, length of the longest word) of all texts in a JSON value.

    Names of properties count too, because chat templates write them. Texts whose identity (id) is
    in `skipped` do not count.
    """
    n_tokens = longest_word = 0
    for level in levels([value]):
        names = [name for each in level if isinstance(each, dict) for name in each]
        texts = [each for each in level if isinstance(each, str) and id(each) not in skipped]
        for text in [*texts, *names]:
            n_more, n_long = served.count_tokens(text)
            n_tokens, longest_word = n_tokens + n_more, max(longest_word, n_long)
    return n_tokens, longest_word


def request_schema(route: str) -> Schema:
    """Return the JSON schema of the body of a POST request to this path."""
    body = PATHS[route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return _resolved(body)


def _n_parts(said: Any) -> int:
    """Return into how many parts a chat template divides a list of messages or content blocks.

    A part is an element, at any depth, that contains no list of elements.
    """
    if isinstance(said, list):
        return sum(map(_n_parts, said))
    lists = [said.get(name) for name in _PART_LISTS] if isinstance(said, dict) else []
    return max(1, sum(_n_parts(each) for each in lists if isinstance(each, list)))


def settle_fields(route: str, data: dict[str, Any], n_ctx: int, n_vocab: int = 0) -> None:
    """Remove unknown fields and null fields from a request, and check the values of the others.

    Unknown fields are ignored, because clients send fields for other servers. The request is
    changed in place. `n_ctx` is the context length in tokens, and `n_vocab` the size of the
    vocabulary.

    Raises Refusal (an error response) for a wrong value, a missing field, an unsupported feature,
    and a field that controls llama.cpp's internals.
    """
    _refuse_unsupported(route, data)
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
        parts = "messages" if [n_parts] == [*map(len, said)] else "parts of messages"
        raise beyond_context(f"{n_parts} {parts}", MESSAGE_TOKENS * n_parts, n_ctx)
    tokens = data.get("tokens") if route == "/detokenize" else None
    if tokens and not all(0 <= each < n_vocab for each in tokens):
        raise Refusal(
            400, f"tokens must be numbers from 0 to {n_vocab - 1}, the model's vocabulary"
        )


def with_whole_numbers(schema: Schema, value: Any) -> Any:
    """Return a JSON value in which floats such as 64.0 are integers if the schema wants integers.

    Some clients have only one number type.
    """
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
    """Return a sentence that says why a JSON value violates a schema, or None if it is valid.

    `where` is the value's name in the sentence, or "" for the whole request. A property that is
    null counts as absent.
    """
    fault = _fault(schema, value)
    if fault is None:
        return None
    below, wanted = fault
    name = f"{where}{below}".removeprefix(".")
    return f"{name} is missing" if wanted is None else f"{name} must be {_describe(wanted)}"


def _fault(schema: Schema, value: Any) -> tuple[str, Schema | None] | None:
    """Return the first fault of a JSON value as (path, schema), such as (".stop[1]", {...}).

    The value at that path violates that schema. The schema is None if a required value is missing.
    Returns None if the value matches.
    """
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
        # Only one choice has the same type, list or object, as the value: report its fault.
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
    """Return whether all values are integers in the range that the schema `items` allows.

    This is a fast check for prompts of 100,000 tokens.
    """
    if not values or set(map(type, values)) != {int}:
        return False
    ends = min(values), max(values)
    return any(
        choice.get("type") in ("integer", "number") and not any(_fault(choice, n) for n in ends)
        for choice in map(_resolved, items.get("anyOf", [items]))
    )


def _is_kind(schema: Schema, value: Any) -> bool:
    """Return whether a value has the schema's type, constant and bounds.

    Values inside a list or an object are not checked.
    """
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
    """Return a schema's (minimum, maximum) for a number, or for the size of a list, text or object.

    A bound that the schema does not have is None.
    """
    ends = {"array": "Items", "string": "Length", "object": "Properties"}
    end = ends.get(schema.get("type", ""))
    names = (f"min{end}", f"max{end}") if end else ("minimum", "maximum")
    return schema.get(names[0]), schema.get(names[1])


def _describe(schema: Schema) -> str:
    """Describe the values that a schema allows, for example as "a whole number from 1 on"."""
    if "anyOf" in schema:
        said = dict.fromkeys(_describe(_resolved(choice)) for choice in schema["anyOf"])
        return " or ".join(said)
    if "const" in schema or "enum" in schema:
        words = schema.get("enum", [schema.get("const")])
        return " or ".join(json.dumps(word) for word in words)
    least, most = _bounds(schema)
    _, name, unit = _KINDS.get(schema.get("type", ""), (object, "of another type", ""))
    if least is not None and most is not None:
        return name + (" of " if unit else " from ") + f"{least} to {most}{unit}"
    if least is not None:
        return f"{name} that is not empty" if unit else f"{name} from {least} on"
    if most is not None:
        return name + (" of at most " if unit else " up to ") + f"{most}{unit}"
    return name


def _resolved(schema: Schema) -> Schema:
    """Return the schema that a `$ref` names, or the schema itself if it has no `$ref`."""
    name = schema.get("$ref")
    return schema if name is None else SCHEMAS[name.rpartition("/")[2]]


def _refuse_unsupported(route: str, data: dict[str, Any]) -> None:
    """Raise Refusal (an error response) if a request uses a feature that is not supported.

    Tools that would run on a server are removed from the request if other tools remain, because
    agents offer such tools to any server.
    """
    for name, why in _FIELDS.get(route, {}).items():
        if data.get(name):
            raise Refusal(400, f"{name} is not supported: {why}")
    best_of, modalities = data.get("best_of"), data.get("modalities")
    if route == COMPLETIONS and best_of not in (None, 1):
        raise Refusal(400, f"best_of is {best_of!r}: only 1 is supported")
    if route == CHAT and isinstance(modalities, list) and set(map(str, modalities)) - {"text"}:
        raise Refusal(400, 'modalities must be ["text"]: this server answers with text only')
    if route == ANTHROPIC:
        for kind in _blocks(data.get("messages")):
            if kind not in _BLOCKS:
                raise Refusal(
                    400, f"content of type '{kind[:80]}' is not supported: send text or images"
                )
    tools = data.get("tools")
    if route not in (RESPONSES, ANTHROPIC) or not isinstance(tools, list):
        return
    own = [tool for tool in tools if not _runs_on_server(route, tool)]
    if tools and not own:
        raise Refusal(400, "this server cannot run tools: offer functions that the client runs")
    data["tools"] = own


def _blocks(messages: Any) -> Iterator[str]:
    """Yield the types of all content blocks in messages, including those inside tool results."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict):
                yield str(block.get("type"))
                yield from _blocks([block])


def _runs_on_server(route: str, tool: Any) -> bool:
    """Return whether a tool would run on the server, instead of in the client."""
    kind = str(tool.get("type")) if isinstance(tool, dict) else "function"
    if route == RESPONSES:
        return kind != "function"
    return kind.startswith(_SERVER_TOOLS)


def _settle_format(route: str, data: dict[str, Any]) -> None:
    """Translate the response formats of OpenAI's Responses and Anthropic's Messages.

    The result is the `response_format` of OpenAI's chat, which llama.cpp reads. Raises Refusal (an
    error response) for an unknown format, because llama.cpp would ignore it and answer with any
    text.
    """
    text, config = data.get("text"), data.get("output_config")
    if route == RESPONSES and isinstance(text, dict) and text.get("format") is not None:
        asked = text["format"]
        if isinstance(asked, dict) and asked.get("type") == "json_schema":
            asked = {"type": "json_schema", "json_schema": asked}
        data["response_format"] = asked
    if route == ANTHROPIC:
        asked = config.get("format") if isinstance(config, dict) else None
        asked = data.get("output_format") if asked is None else asked  # the name in the beta
        if asked is not None:
            if not isinstance(asked, dict) or asked.get("type") != "json_schema":
                raise Refusal(400, "output_config.format.type must be json_schema")
            data["response_format"] = {"type": "json_schema", "json_schema": asked}


def settle_tool_choice(route: str, data: dict[str, Any]) -> None:
    """Translate the tool choice of a request for llama.cpp, in place.

    Tools that the choice excludes are removed. If the choice names a function, only that function
    is offered, and the model must call it once. Raises Refusal (an error response) for a choice
    that cannot be met.
    """
    choice, tools = data.get("tool_choice"), data.get("tools")
    if choice is None:
        return
    mode, names = _read(choice)
    if mode == "required" and not tools:
        raise Refusal(400, "tool_choice requires a call, but the request has no tools")
    offered = tools or []
    if names is not None:
        offered = [tool for tool in offered if _name_of(tool) in names]
        if not offered:
            functions = ", ".join(repr(name[:80]) for name in names)
            raise Refusal(400, f"tool_choice names {functions}, but tools has no such function")
    if route == ANTHROPIC:
        # llama.cpp's converter has no "none" in this format. Without tools, none is called.
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
    """Return a tool choice as (mode, names of the allowed tools), with None for all tools.

    The choice may have OpenAI's or Anthropic's format. Raises Refusal (an error response) for any
    other value.
    """
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
    """Rewrite the JSON schemas in a request into keywords that llama.cpp enforces, in place.

    Raises Refusal (an error response) for a constraint that cannot be enforced in the answer's
    format or in a strict tool. Other tools may have such constraints; each is logged once.
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
        fault = _cut(lost[0]) if lost else ""
        if lost and function.get("strict", tool.get("strict")) is True:
            raise Refusal(
                400,
                f"{fault}. The tool is strict, so this server must enforce all constraints of its "
                "schema: leave this constraint out, or set strict to false",
            )
        if lost:
            name, n_more = ascii(_name_of(tool))[:80], len(lost) - 1
            served.note_once(
                f"the arguments of the tool {name} are not fully enforced: {fault}"
                + (f" (further constraints: {n_more})" if n_more else "")
            )
        if made is not function[key]:
            function[key] = {**function[key], GRAMMAR_SCHEMA: made}


def _enforced(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the schema of an answer, rewritten into keywords that llama.cpp enforces.

    Raises Refusal (an error response) if a constraint cannot be enforced. `where` is the schema's
    path in the request.
    """
    made, lost = rewritten(schema, where)
    if lost:
        fault = _cut(lost[0])
        raise Refusal(400, f"{fault}. Leave this constraint out of the answer's schema")
    return dict(made)


def _cut(sentence: str) -> str:
    """Return a sentence that quotes the client, escaped and shortened for an answer or a log."""
    plain, half = ascii(sentence)[1:-1], MOST_PATH_CHARS // 2
    return plain if len(plain) <= MOST_PATH_CHARS else f"{plain[:half]} ... {plain[-half:]}"


def _name_of(tool: Any) -> str | None:
    """Return a tool's name in OpenAI's or Anthropic's format, or None if the tool has no name."""
    if not isinstance(tool, dict):
        return None
    inner = tool.get("function")
    found = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    return found if isinstance(found, str) else None


def settle_reasoning(route: str, data: dict[str, Any]) -> None:
    """Translate a request's reasoning settings into the fields that llama.cpp reads, in place.

    A client can set an effort, limit the reasoning tokens, or turn reasoning off. It uses
    Anthropic's fields `thinking` and `output_config.effort`, or OpenRouter's field `reasoning`. A
    limit of 0 tokens turns reasoning off. The request's own `chat_template_kwargs` take precedence
    over the translated settings.
    """
    wanted: dict[str, Any] = {}
    if route == ANTHROPIC:
        # llama.cpp's converter passes on the budget and the template arguments, but not the effort.
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
    """Raise Refusal (an error response) for fields that would make llama.cpp compute for too long.

    This checks limits that the schema of a field cannot express. llama.cpp's server itself limits
    the work for a grammar (`patches/native/server/moe-edge-bounds.h`).
    """
    n_chars = sum(map(len, _texts(data.get("logit_bias"))))
    _refuse_above("the texts of logit_bias", n_chars, MOST_BIAS_CHARS, "characters")
    for name in _SHAPES:
        _check_schemas(name, data.get(name))


def _check_biased_tokens(bias: Any, n_vocab: int) -> None:
    """Raise Refusal (an error response) if `logit_bias` names a token id that does not exist.

    llama.cpp would ignore such an entry. If `logit_bias` is an object, names that are whole numbers
    are ids and other names are texts.
    """
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
            token, last = name.strip()[:_MOST_DIGITS], n_vocab - 1
            raise Refusal(
                400, f"logit_bias names token {token}, but the model's token ids are 0 to {last}"
            )
    if isinstance(bias, dict) and "" in bias:
        raise Refusal(400, "logit_bias has an empty text: give a token id or a text")


def _refuse_above(field: str, count: int, most: int, unit: str) -> None:
    if count > most:
        raise Refusal(400, f"{field} has {count} {unit}, and the limit is {most}")


def _texts(bias: Any) -> Iterator[str]:
    """Yield the texts in `logit_bias` that are not token ids."""
    if isinstance(bias, dict):
        yield from bias
        return
    for each in bias or ():
        if isinstance(each[0], str):
            yield each[0]


def _check_schemas(name: str, asked: Any) -> None:
    """Raise Refusal (an error response) for long names and large objects in the schemas of a field.

    `name` is the field's name, and `asked` its value.
    """
    for each in (each for level in levels([asked]) for each in level if isinstance(each, dict)):
        reference, properties = each.get("$ref"), each.get("properties")
        names = [*each, reference] if isinstance(reference, str) else each
        longest = max(map(len, names), default=0)
        _refuse_above(f"a name in {name}", longest, MOST_NAME_CHARS, "characters")
        n = len(properties) if isinstance(properties, dict) else 0
        _refuse_above(f"an object in {name}", n, MOST_PROPERTIES, "properties")


def settle_probs(
    route: str, data: dict[str, Any], most_tokens: int, n_dropped: int = 0
) -> Shaping | None:
    """Translate the fields of a request for token probabilities into llama.cpp's fields, in place.

    Returns an object that converts llama.cpp's answer to the format of the path `route`, or None if
    no conversion is needed.

    The probabilities of an answer must fit in PROBS_BYTES of memory, so the number of tokens must
    be limited:

    - If the request `data` has a token limit that is too large, Refusal (an error response) is
      raised.
    - If the request has no token limit, a limit is added, unless an answer of `most_tokens` (the
      longest possible answer) fits.

    `n_dropped` is the number of messages that --overflow removed. The converted answer reports it.
    """
    shaping = Shaping(route, data, n_dropped)  # before the fields change
    name = {CHAT: "top_logprobs", COMPLETIONS: "logprobs"}.get(route, "n_probs")
    if route == CHAT and data.get("logprobs") and not data.get(name):
        data[name] = 1  # without alternatives llama.cpp does not report the chosen token either
    if route == CHAT and not data.get("logprobs"):
        if data.get(name):
            raise Refusal(400, "top_logprobs needs logprobs to be true")
        data.pop(name, None)
    if route == COMPLETIONS and data.get(name) == 0:
        data[name] = 1
    _bound(name, data, most_tokens)
    if shaping.has_no_tokens:
        _limit(data, 1)  # llama.cpp reads the prompt only if it generates a token
    return shaping if shaping.is_needed else None


def _bound(name: str, data: dict[str, Any], most_tokens: int) -> None:
    """Limit the length of the answer so that its token probabilities fit in PROBS_BYTES.

    `name` is the field with the number of alternatives per token. Raises Refusal (an error
    response) if the client's own limit is too large.
    """
    n_probs = data.get(name, 0)
    if not n_probs:
        return
    each = (STREAM_BYTES if data.get("stream") else WHOLE_BYTES) * (2 if data.get("verbose") else 1)
    n_prompts = _prompts(data.get("prompt"))
    most = PROBS_BYTES // (each * n_prompts)  # tokens and alternatives of one answer
    n_allowed = most // (n_probs + 1)
    answer = "an answer" if n_prompts == 1 else f"each of {n_prompts} answers"
    if n_allowed < 1:
        n_most = max(0, most - 1)
        raise Refusal(
            400,
            f"{name} is {n_probs}, and the limit is {n_most} alternatives for each token of "
            f"{answer}: lower {name}",
        )
    limit = limit_of(data)
    if limit is None:
        if n_allowed < most_tokens:
            _limit(data, n_allowed)
    elif min(limit, most_tokens) > n_allowed:
        ways = [f"request at most {n_allowed} tokens", f"lower {name}"]
        if not data.get("stream"):
            ways.append("set stream to true")
        raise Refusal(
            400,
            f"there is not enough memory for {answer} of {limit} tokens with {name} {n_probs}: "
            f"{', or '.join(ways)}",
        )


def _prompts(prompt: Any) -> int:
    """Return the number of prompts in the field `prompt`. A list of tokens is one prompt."""
    if not isinstance(prompt, list) or any(isinstance(each, int) for each in prompt):
        return 1
    return max(1, len(prompt))


def _limit(data: dict[str, Any], n_tokens: int) -> None:
    """Set the limit of generated tokens in a request to n_tokens, in the field `max_tokens`.

    All other fields for this limit are removed from the request.
    """
    for name in LIMITS:
        data.pop(name, None)
    data["max_tokens"] = n_tokens


def settle_length(
    route: str, data: dict[str, Any], served: Served, n_answers: int, asker: Body
) -> int:
    """Return the number of KV cells to reserve for a request: for its prompt and all its answers.

    Each answer needs KV cells for its maximum number of generated tokens. This maximum is:

    - The token limit of the request `data`, if it has one.
    - Otherwise --max-tokens, if the server has this option.
    - Otherwise an equal share of all KV cells (1/--parallel), minus the prompt's tokens. It is at
      least RESERVED_TOKENS.

    Each maximum is lowered if the prompt leaves less context free. If `data` has no token limit,
    the maximum is then written into `data` as its limit `max_tokens`.

    `n_answers` is the number of answers to one prompt. `asker` sends queries to llama.cpp's server,
    to count tokens. Raises Refusal (an error response) if the prompt is too long.
    """
    body, most = written(data), served.about.n_ctx
    counted = check_length(route, body, served, asker)
    n_prompt = len(body) if counted is None else counted  # a token has at least one byte
    limit, share = limit_of(data), served.about.n_cells // served.parallel
    if limit is None:
        limit = served.max_tokens or max(RESERVED_TOKENS, share - n_prompt)
    limit = min(limit, most - (counted or 0))
    if limit_of(data) is None:
        _limit(data, limit)
    n_answers = max(n_answers, min(_prompts(data.get("prompt")), served.parallel))
    return min(served.about.n_cells, n_prompt + n_answers * limit)


def check_length(route: str, body: bytes, served: Served, asker: Body) -> int | None:
    """Count the tokens of a request's prompt, and check that it fits in the context of the model.

    Returns the number of tokens, or None if they cannot be counted, for example for several
    prompts. Raises Refusal (an error response) if the prompt does not fit or the chat template
    fails.

    `body` is the request as JSON text, and `served` the loaded model. `asker` sends queries to
    llama.cpp's server, which counts tokens. Call this on a thread, because it waits for these
    queries.
    """
    counting = COUNTED_BY.get(route)
    prompt = json.loads(body).get("prompt") if counting is None else None
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
