"""The server's API as JSON schemas: its paths, the fields of each request, and the answers.

This declaration is used for routing, for the published description (OpenAPI 3.1), for checking
requests, and for choosing the fields that llama.cpp sees.
"""

from __future__ import annotations

from typing import Any

from orchestrator.serve.changes import ACTIONS
from orchestrator.serve.settings import DROP, REFUSE
from orchestrator.serve.wire import (
    ANTHROPIC,
    CHAT,
    COMPLETIONS,
    LIMITS,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
    is_ollama,
)

Schema = dict[str, Any]

# Paths of --allow-model-change.
MODELS, TASKS = "/local-models", "/local-models/task"
MOST_INT = 2**31 - 1
# Each of these costs time or memory, for every token or before the first one. 50,000 biases took
# half a minute, 1,024 take 0.17 s, and 64 sequence breakers took three seconds.
MOST_STOPS, MOST_BREAKERS, MOST_SAMPLERS, MOST_BIASES, MOST_PROMPTS = 128, 16, 32, 1024, 64
MOST_GRAMMAR_CHARS = 2**18
MOST_MESSAGES, MOST_TOOLS, MOST_NAMES = 4096, 512, 256


def integer(least: int, most: int = MOST_INT, **more: Any) -> Schema:
    """Return the JSON schema of a whole number from `least` to `most`."""
    return {"type": "integer", "minimum": least, "maximum": most, **more}


def number(least: float, most: float) -> Schema:
    """Return the JSON schema of a number from `least` to `most`."""
    return {"type": "number", "minimum": least, "maximum": most}


def listed(items: Schema, **more: Any) -> Schema:
    """Return the JSON schema of a list of `items`. `more` holds further keywords."""
    return {"type": "array", "items": items, **more}


def record(required: str = "", *groups: dict[str, Schema], **properties: Schema) -> Schema:
    """Return the JSON schema of an object, in which further properties are allowed.

    `required` lists the names of required properties, separated by spaces. `groups` and
    `properties` map the names of properties to their schemas.
    """
    every = {name: each for group in (*groups, properties) for name, each in group.items()}
    made: Schema = {"type": "object", "properties": every}
    if required:
        made["required"] = required.split()
    return made


def named(name: str) -> Schema:
    """Return a reference to the JSON schema with this name in SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


def either(*schemas: Schema) -> Schema:
    """Return a JSON schema that matches any of the given schemas."""
    return {"anyOf": list(schemas)}


def text(description: str, **more: Any) -> Schema:
    """Return the JSON schema of a text. `more` holds further keywords."""
    return {**STRING, **more, "description": description}


def flag(description: str, **more: Any) -> Schema:
    """Return the JSON schema of a boolean. `more` holds further keywords."""
    return {**FLAG, **more, "description": description}


NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
INTEGER: Schema = {"type": "integer"}
COUNT, FROM_1, FROM_MINUS_1 = integer(0), integer(1), integer(-1)
SHARE = number(0, 1)
# -1: no limit but the context.
LIMIT = either({"const": -1}, FROM_1)
PARTS = listed(record("type", type=STRING, text=STRING))
# Images and audio in parts are accepted here, and checked or refused later
# (orchestrator/runtime/images.py). An empty list is an empty text.
CONTENT = either(STRING, PARTS)
IMAGES: Schema = {**listed(STRING), "description": "PNG or JPEG files in base64."}
LAST_N = integer(
    -1, description="Number of latest tokens that the repetition penalty considers; -1 for all."
)
TOOLS = listed(OBJECT, maxItems=MOST_TOOLS)
BIAS = either(number(-100, 100), {"const": False})
COMMON: dict[str, Schema] = {
    "model": text("Name of the model. The server has one model and accepts any name."),
    "stream": flag("Answer with server-sent events that end with `data: [DONE]`."),
    "moe_edge": {
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": either(NUMBER, FLAG, {**STRING, "maxLength": 256}),
        "description": "Policy settings for this request, by name. Requires --parallel 1.",
    },
}
# Fields that Ollama's requests have too.
USUAL: dict[str, Schema] = {
    "temperature": number(0, 1e6),
    "top_p": SHARE,
    "top_k": FROM_MINUS_1,
    "seed": integer(-1, 2**63 - 1),
    "min_p": SHARE,
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repeat_penalty": number(0.01, 10),
}
# Fields that Anthropic's requests have too.
CHOSEN: dict[str, Schema] = {
    **COMMON,
    **USUAL,
    "logit_bias": {
        **either(
            {"type": "object", "additionalProperties": BIAS, "maxProperties": MOST_BIASES},
            listed(
                listed(either(COUNT, STRING, BIAS), minItems=2, maxItems=2), maxItems=MOST_BIASES
            ),
        ),
        "description": (
            "Logit bias of each token. A token is named by its id or text. The value false bans "
            "the token."
        ),
    },
    "return_progress": flag(
        "In a stream, also send events that report how much of the prompt is read."
    ),
}
# Fields that Ollama has among its options, and llama.cpp in the request itself.
MORE: dict[str, Schema] = {
    "stop": either(STRING, listed(STRING, maxItems=MOST_STOPS)),
    "repeat_last_n": LAST_N,
    "typical_p": NUMBER,
    "mirostat": integer(0, 2),
    "mirostat_tau": NUMBER,
    "mirostat_eta": NUMBER,
}
# llama.cpp's own fields, which all of OpenAI's paths and its own paths accept.
SAMPLING: dict[str, Schema] = {
    **CHOSEN,
    **MORE,
    "stream_options": record(include_usage=FLAG),
    "json_schema": {**OBJECT, "description": "A JSON schema that the answer follows."},
    "grammar": text("A GBNF grammar that the answer follows.", maxLength=MOST_GRAMMAR_CHARS),
    "dry_penalty_last_n": LAST_N,
    "dry_allowed_length": COUNT,
    "dry_multiplier": NUMBER,
    "dry_base": NUMBER,
    "dry_sequence_breakers": listed(STRING, minItems=1, maxItems=MOST_BREAKERS),
    "samplers": either(
        {**STRING, "maxLength": MOST_SAMPLERS}, listed(STRING, maxItems=MOST_SAMPLERS)
    ),
    "top_n_sigma": NUMBER,
    "xtc_probability": SHARE,
    "xtc_threshold": SHARE,
    "dynatemp_range": NUMBER,
    "dynatemp_exponent": NUMBER,
    "adaptive_target": {"type": "number", "maximum": 1},
    "adaptive_decay": number(0, 0.99),
    "min_keep": COUNT,
    "n_indent": COUNT,
    "n_keep": FROM_MINUS_1,
    "t_max_predict_ms": integer(-1, 2**53),
    **dict.fromkeys(
        ("ignore_eos", "cache_prompt", "return_tokens", "timings_per_token", "verbose"), FLAG
    ),
}
# Fields for the form of an answer, shared by OpenAI's and Anthropic's paths.
SHAPE: dict[str, Schema] = {
    "parallel_tool_calls": FLAG,
    "response_format": record(
        "type",
        type={"enum": ["text", "json_object", "json_schema"]},
        json_schema=record(name=STRING, schema=OBJECT),
        schema=OBJECT,
    ),
    "chat_template_kwargs": OBJECT,
}
# Fields that make up a chat's prompt.
TEMPLATE: dict[str, Schema] = {
    **SHAPE,
    "messages": listed(named("Message"), minItems=1, maxItems=MOST_MESSAGES),
    "tools": listed(
        record("type function", type={"const": "function"}, function=named("Function")),
        maxItems=MOST_TOOLS,
    ),
    "tool_choice": either({"enum": ["auto", "none", "required"]}, OBJECT),
    "add_generation_prompt": FLAG,
    "continue_final_message": either(FLAG, {"enum": ["content", "reasoning_content"]}),
    "reasoning_format": {"enum": ["none", "auto", "deepseek", "deepseek-legacy"]},
    "reasoning_effort": STRING,
    "reasoning": {
        **record("", effort=STRING, enabled=FLAG, max_tokens=COUNT),
        "description": "Reasoning settings as in OpenRouter's API. effort has the same meaning as "
        "the field reasoning_effort, and max_tokens the same as reasoning_budget_tokens.",
    },
    "reasoning_budget_tokens": FROM_MINUS_1,
    "thinking_budget_tokens": FROM_MINUS_1,
    "reasoning_budget_message": STRING,
}
OVERFLOW: Schema = {
    "enum": [DROP, REFUSE],
    "description": "Whether the oldest exchanges of a conversation are dropped if it outgrows the "
    "context. --overflow overrides this field.",
}
ANSWERS: Schema = {
    **FROM_1,
    "description": "Number of answers to generate; at most the value of --parallel.",
}
SEVERAL: dict[str, Schema] = {"n": ANSWERS, "n_cmpl": ANSWERS}
TOKENS = listed(COUNT)
PROMPT = either(
    STRING,
    TOKENS,
    record("prompt_string", prompt_string=STRING),
    listed(
        either(STRING, COUNT, record("prompt_string"), listed(either(COUNT, STRING))),
        minItems=1,
        maxItems=MOST_PROMPTS,
    ),
)
# Fields of llama.cpp's own completion paths.
OWN_FORM: dict[str, Schema] = {
    **SAMPLING,
    **SEVERAL,
    **dict.fromkeys(LIMITS, FROM_MINUS_1),
    "n_probs": {
        **COUNT,
        "description": (
            "Number of most likely tokens to report at each position. A number is refused if the "
            "answer would need too much memory."
        ),
    },
    "post_sampling_probs": FLAG,
    "response_fields": listed(STRING, maxItems=MOST_NAMES),
}
# Fields that both of Ollama's paths share.
OLLAMA: dict[str, Schema] = {
    "model": COMMON["model"],
    "stream": flag("Stream the answer as lines of JSON, one for each part.", default=True),
    "moe_edge": COMMON["moe_edge"],
    "format": either({"enum": ["", "json"]}, OBJECT),
    "think": either(FLAG, {"enum": ["low", "medium", "high"]}),
    "options": record("", USUAL, MORE, num_predict=integer(-2)),
}

REQUESTS: dict[str, Schema] = {
    "Message": record(
        "role",
        role=text("Author of the message: system, developer, user, assistant or tool."),
        content=CONTENT,
        tool_call_id=STRING,
        tool_calls=listed(OBJECT),
        reasoning_content=STRING,
    ),
    "Function": record("name", name=STRING, description=STRING, parameters=OBJECT),
    "ChatRequest": record(
        "messages",
        TEMPLATE,
        SAMPLING,
        SEVERAL,
        dict.fromkeys(LIMITS, LIMIT),
        logprobs=FLAG,
        top_logprobs=integer(0, 20),
        echo=flag(
            "Start the answer with the text of the last message. Only for an assistant message, "
            "which the model then continues."
        ),
        overflow=OVERFLOW,
    ),
    "CompletionRequest": record(
        "prompt",
        SAMPLING,
        SEVERAL,
        dict.fromkeys(LIMITS, FROM_MINUS_1),
        prompt=PROMPT,
        logprobs=integer(0, 5),
        echo=FLAG,
    ),
    "NativeRequest": record("prompt", OWN_FORM, prompt=PROMPT),
    "InfillRequest": record(
        "input_prefix input_suffix",
        OWN_FORM,
        input_prefix=STRING,
        input_suffix=STRING,
        prompt=STRING,
        input_extra=listed(record("text", text=STRING, filename=STRING), maxItems=MOST_NAMES),
    ),
    "ResponsesRequest": record(
        "input",
        SAMPLING,
        SHAPE,
        input=either(STRING, listed(OBJECT, minItems=1, maxItems=MOST_MESSAGES)),
        instructions=STRING,
        max_output_tokens=LIMIT,
        previous_response_id=STRING,
        text=record(format=OBJECT),
        reasoning=record(effort=STRING),
        truncation={
            "enum": ["auto", "disabled"],
            "description": "If a conversation outgrows the context, auto drops its oldest "
            "exchanges, and disabled refuses it. --overflow overrides this field.",
        },
        tools=TOOLS,
        tool_choice=TEMPLATE["tool_choice"],
    ),
    "MessagesRequest": record(
        "messages",
        CHOSEN,
        SHAPE,
        messages=listed(
            record("role content", role=STRING, content=CONTENT),
            minItems=1,
            maxItems=MOST_MESSAGES,
        ),
        max_tokens=FROM_1,
        system=either(STRING, PARTS),
        stop_sequences=listed(STRING, maxItems=MOST_STOPS),
        tools=TOOLS,
        tool_choice=OBJECT,
        thinking=record(
            "type", type={"enum": ["enabled", "disabled", "adaptive"]}, budget_tokens=COUNT
        ),
        output_config=record(
            "", effort={"enum": ["low", "medium", "high", "xhigh", "max"]}, format=OBJECT
        ),
        output_format=OBJECT,
        overflow=OVERFLOW,
    ),
    "OllamaChatRequest": record(
        "",
        OLLAMA,
        messages=listed(
            record(
                "role",
                role=STRING,
                content=STRING,
                images=IMAGES,
                thinking=STRING,
                tool_name=STRING,
                tool_call_id=STRING,
                tool_calls=listed(
                    record(
                        "function",
                        id=STRING,
                        function=record("name", name=STRING, arguments=either(OBJECT, STRING)),
                    )
                ),
            ),
            maxItems=MOST_MESSAGES,
        ),
        tools=TEMPLATE["tools"],
        truncate=flag(OVERFLOW["description"], default=True),
    ),
    "OllamaGenerateRequest": record(
        "", OLLAMA, prompt=STRING, images=IMAGES, system=STRING, raw=FLAG
    ),
    "TokenizeRequest": record(
        "content",
        content=either(STRING, listed(either(COUNT, STRING))),
        add_special=FLAG,
        parse_special=FLAG,
        with_pieces=FLAG,
    ),
    "DetokenizeRequest": record("tokens", tokens=TOKENS),
    "TemplateRequest": record("messages", TEMPLATE),
    "TaskRequest": record(
        "action",
        action={"enum": [*ACTIONS]},
        model=text(
            "For compare: a Hugging Face repository, OWNER/NAME. For pull: a model in a "
            "repository, OWNER/NAME/FILE. For load: the name of a model on this machine.",
            maxLength=512,
        ),
    ),
}

# Fields that llama.cpp's server derives itself: {name: why a request may not set it}.
INNER = dict.fromkeys(
    (
        *("chat_parser", "chat_format", "grammar_triggers", "grammar_lazy", "grammar_type"),
        *("preserved_tokens", "generation_prompt", "message_delimiters", "parse_tool_calls"),
        *("reasoning_budget_start_tag", "reasoning_budget_end_tags", "reasoning_budget_end_tag"),
    ),
    "the server sets it",
) | {"lora": "this server has no LoRA adapters"}

JSON, STREAM, TEXT = "application/json", "text/event-stream", "text/plain"
LINES = "application/x-ndjson"
SHARE_OR_NULL: Schema = {"type": ["number", "null"]}
COSTS: dict[str, Schema] = {
    "hit_rate": {
        **SHARE_OR_NULL,
        "description": "Fraction of expert requests in decode steps that were cache hits.",
    },
    "prefill_hit_rate": SHARE_OR_NULL,
    "kl_estimate": {
        **SHARE_OR_NULL,
        "description": "Upper estimate of the quality loss, in nats per token: the mean KL "
        "divergence from the best precision (--high-tier).",
    },
    "kl_low": {
        **SHARE_OR_NULL,
        "description": (
            "Lower estimate of the quality loss, in nats per token: the loss for texts that low "
            "precision affects least."
        ),
    },
    "limit_halved": flag(
        "Whether the policy limited the quality loss of some tokens to half of --max-loss, because "
        "the text was unlike the texts that `moe-edge calibrate` measured."
    ),
    "mix": {
        **OBJECT,
        "description": "Fraction of requested experts for which the policy chose each precision.",
    },
    "computed": {
        **OBJECT,
        "description": "Fraction of the expert matrices that were computed in each precision.",
    },
    "bytes_read": COUNT,
    "wait_ms": NUMBER,
    "budget_bytes": INTEGER,
    "ram_bytes": INTEGER,
    "peak_rss_bytes": INTEGER,
    "policy": STRING,
    "shared_steps": FLAG,
}

SCHEMAS: dict[str, Schema] = {
    **REQUESTS,
    "Error": record(
        "error", error=record("code message type", code=INTEGER, message=STRING, type=STRING)
    ),
    "OllamaError": record("error", error=STRING),
    "OllamaAnswer": record("model done", model=STRING, done=FLAG, timings=named("Timings")),
    "LocalModels": record(
        "models task compared",
        models=listed(record("name bytes loaded", name=STRING, bytes=COUNT, loaded=FLAG)),
        task={
            "type": ["object", "null"],
            "description": "The latest task, with the fields action, model, state, doing, done "
            "and error. The field `doing` names its current activity. The field `done` is the "
            "completed fraction of this activity, from 0 to 1, or null if this is unknown.",
        },
        compared={
            "type": ["object", "null"],
            "description": "Result of the latest task with the action compare: how each model of a "
            "repository would run here, in the format of `moe-edge plan hf:OWNER/NAME --json`.",
        },
    ),
    "OllamaModels": record("models", models=listed(record("model", model=STRING))),
    "Event": {
        **record("data", data=STRING),
        "description": "A part of the answer as JSON, or [DONE] at the end.",
    },
    "Timings": {
        **record(
            "prompt_ms predicted_ms",
            COSTS,
            prompt_n=COUNT,
            prompt_ms=NUMBER,
            predicted_n=COUNT,
            predicted_ms=NUMBER,
        ),
        "description": "llama.cpp's timings, and measurements of the experts, such as hit_rate.",
    },
    "Costs": {
        **record(" ".join(COSTS.keys() - {"kl_estimate", "kl_low"}), COSTS),
        "description": "Measurements of the experts, such as hit_rate. This endpoint does not "
        "report llama.cpp's timings.",
    },
    "ChatAnswer": record(
        "choices model object usage",
        id=STRING,
        object={"const": "chat.completion"},
        model=STRING,
        created=INTEGER,
        choices=listed(
            record(
                "index message finish_reason",
                index=COUNT,
                finish_reason=STRING,
                message=record(
                    "role", role={"const": "assistant"}, content={"type": ["string", "null"]}
                ),
            )
        ),
        usage=OBJECT,
        timings=named("Timings"),
    ),
    "CompletionAnswer": record(
        "choices model object usage",
        choices=listed(record("index text finish_reason", index=COUNT, text=STRING)),
        object={"const": "text_completion"},
        model=STRING,
        usage=OBJECT,
        timings=named("Timings"),
    ),
    "NativeAnswer": record("content", content=STRING, timings=named("Timings")),
    "ResponsesAnswer": record(
        "object output status",
        object={"const": "response"},
        output=listed(OBJECT),
        status=STRING,
        timings=named("Costs"),
    ),
    "MessagesAnswer": record(
        "type role content",
        type={"const": "message"},
        role={"const": "assistant"},
        content=listed(record("type", type=STRING)),
        timings=named("Costs"),
    ),
    "Experts": record(
        "model mode layers memory images",
        model=STRING,
        mode=STRING,
        memory={
            "type": "object",
            "additionalProperties": COUNT,
            "description": "Bytes of the host's memory by purpose. Free memory comes last.",
        },
        images={
            **either(
                record("bytes pixels count", bytes=COUNT, pixels=COUNT, count=COUNT),
                {"type": "null"},
            ),
            "description": "Limits for images: bytes of all images of a request, pixels of one "
            "image, and number of images. null if the model takes no images.",
        },
        layers={
            **COUNT,
            "description": "Number of layers with experts. With --policy plain it is 0, and the "
            "fields about experts are absent.",
        },
        streams_below={
            **COUNT,
            "description": "Suggested value of --ram, in bytes, for running with an expert cache. "
            "Only present if the server has no expert cache (the field `layers` is 0).",
        },
        experts=COUNT,
        tiers=listed(STRING),
        resident=text(
            "Precision (index in tiers) of each expert in memory, or 254 if it is on disk only: "
            "base64 of uint8 [layers, experts]."
        ),
        used=text(
            "How often tokens used each expert: base64 of little-endian uint32 [layers, experts]."
        ),
        requests=COUNT,
        hits=COUNT,
        bytes_read=COUNT,
    ),
}


def operation(
    summary: str, answer: Schema, request: str = "", stream: str = "", kind: str = JSON
) -> Schema:
    """Return the OpenAPI description of one method (GET or POST) of a path.

    `answer` is the schema of a successful answer, and `kind` its media type. `request` is the name
    of the request's schema, or "" without a body. `stream` is the media type of a streamed answer,
    or "" if the path does not stream.
    """
    content = {kind: {"schema": answer}}
    if stream:
        content[stream] = {"schema": named("Event") if stream == STREAM else answer}
    responses = {"200": {"description": "The answer.", "content": content}}
    made: Schema = {"summary": summary, "responses": responses}
    if request:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": named(request)}}}
    return made


_NATIVE, _OLLAMA = named("NativeAnswer"), named("OllamaAnswer")
_TOKENS = record("input_tokens", input_tokens=COUNT)
_ID = record("id", id=STRING)
# Requests that decode tokens and therefore wait for their turn: {path: description}.
GENERATING: dict[str, Schema] = {
    CHAT: operation("OpenAI's chat.", named("ChatAnswer"), "ChatRequest", STREAM),
    COMPLETIONS: operation(
        "OpenAI's plain completion.", named("CompletionAnswer"), "CompletionRequest", STREAM
    ),
    RESPONSES: operation(
        "OpenAI's responses, without stored state.",
        named("ResponsesAnswer"),
        "ResponsesRequest",
        STREAM,
    ),
    ANTHROPIC: operation(
        "Anthropic's messages.", named("MessagesAnswer"), "MessagesRequest", STREAM
    ),
    "/completion": operation("llama.cpp's completion.", _NATIVE, "NativeRequest", STREAM),
    "/infill": operation(
        "Fill a gap in a text, as llama.cpp's server does. For models that support this.",
        _NATIVE,
        "InfillRequest",
        STREAM,
    ),
    OLLAMA_CHAT: operation("Ollama's chat.", _OLLAMA, "OllamaChatRequest", LINES),
    OLLAMA_GENERATE: operation(
        "Ollama's answer to a prompt.", _OLLAMA, "OllamaGenerateRequest", LINES
    ),
}
QUICK: dict[str, Schema] = {
    f"{CHAT}/input_tokens": operation(
        f"Number of prompt tokens of a request to {CHAT}.", _TOKENS, "ChatRequest"
    ),
    f"{RESPONSES}/input_tokens": operation(
        f"Number of prompt tokens of a request to {RESPONSES}.", _TOKENS, "ResponsesRequest"
    ),
    f"{ANTHROPIC}/count_tokens": operation(
        f"Number of prompt tokens of a request to {ANTHROPIC}.", _TOKENS, "MessagesRequest"
    ),
    "/tokenize": operation(
        "Tokens of a text.", record("tokens", tokens={"type": "array"}), "TokenizeRequest"
    ),
    "/detokenize": operation(
        "Text of tokens.", record("content", content=STRING), "DetokenizeRequest"
    ),
    "/apply-template": operation(
        "The prompt that the chat template makes from messages.",
        record("prompt", prompt=STRING),
        "TemplateRequest",
    ),
}
# GET requests that llama.cpp's server answers.
READ: dict[str, Schema] = {
    "/v1/models": operation("The loaded model.", record("data", data=listed(_ID))),
    "/props": operation("llama.cpp's settings.", OBJECT),
}
OURS: dict[str, Schema] = {
    "/api/tags": operation("The loaded model.", named("OllamaModels")),
    "/api/ps": operation("The loaded model.", named("OllamaModels")),
    "/api/version": operation("The version of Ollama's API.", record("version", version=STRING)),
    "/v1/models/{id}": operation("The loaded model if id is its name, else status 404.", _ID)
    | {"parameters": [{"name": "id", "in": "path", "required": True, "schema": STRING}]},
    "/health": operation(
        "Whether the model is ready. Needs no API key.", record("status", status=STRING)
    ),
    "/metrics": operation("Counters and gauges, for Prometheus.", STRING, kind=TEXT),
    "/experts": operation(
        "The precision of each expert in memory, and how often tokens used each expert.",
        named("Experts"),
    ),
    MODELS: operation(
        "The models on this machine, and the latest task on them, such as a download. "
        "Requires --allow-model-change.",
        named("LocalModels"),
    ),
    "/openapi.json": operation("This description of the server's API.", OBJECT),
    "/": operation(
        "A web page to chat with the model. Needs no API key.", STRING, kind="text/html"
    ),
}
# Takes the name of a model in its body; any name means the loaded model.
SHOW = "/api/show"
_SHOW = operation("Details of the loaded model.", OBJECT)
_TASK = operation(
    "List, compare, download or load models, one task at a time. Requires --allow-model-change.",
    named("LocalModels"),
    "TaskRequest",
)
# A second name for a path.
ALIASES = {
    CHAT: "/chat/completions",
    f"{CHAT}/input_tokens": "/chat/completions/input_tokens",
    RESPONSES: "/responses",
    f"{RESPONSES}/input_tokens": "/responses/input_tokens",
    "/completion": "/completions",
    "/v1/models": "/models",
    "/v1/models/{id}": "/models/{id}",
    "/health": "/v1/health",
}
# Paths that count a prompt's tokens, and the path that would answer the same request.
COUNTING = {
    f"{CHAT}/input_tokens": CHAT,
    f"{RESPONSES}/input_tokens": RESPONSES,
    f"{ANTHROPIC}/count_tokens": ANTHROPIC,
}
COUNTED_BY = {answered: path for path, answered in COUNTING.items()}


def paths(path: str) -> tuple[str, ...]:
    """Return all paths of the endpoint `path`: the path itself, and its alias if it has one."""
    return (path, ALIASES[path]) if path in ALIASES else (path,)


def _fault(path: str) -> Schema:
    """Return the OpenAPI description of the error response of a path."""
    content = {JSON: {"schema": named("OllamaError" if is_ollama(path) else "Error")}}
    return {"description": "An error, with one sentence.", "content": content}


PATHS: dict[str, Schema] = {
    each: {method: made | {"responses": made["responses"] | {"default": _fault(path)}}}
    for method, operations in (
        ("post", GENERATING | QUICK | {SHOW: _SHOW, TASKS: _TASK}),
        ("get", READ | OURS),
    )
    for path, made in operations.items()
    for each in paths(path)
}


def document(has_key: bool) -> dict[str, Any]:
    """Return the OpenAPI description of the server, the answer of `/openapi.json`.

    `has_key` tells whether requests need an API key.
    """
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "moe-edge serve",
            "version": "1",
            "description": "A local model for other programs. Unknown request fields are ignored.",
        },
        "paths": PATHS,
        "components": {"schemas": SCHEMAS},
    }
    if has_key:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made
