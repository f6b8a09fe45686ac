"""The server's surface: which paths there are, what each kind of request may have, and what answers
are, as JSON schemas. From this one declaration the paths are made, the description that is
published (OpenAPI 3.1), the checks of requests, and what llama.cpp gets to see of them."""

from __future__ import annotations

from typing import Any

from orchestrator.serve.wire import (
    ANTHROPIC,
    CHAT,
    COMPLETIONS,
    LIMITS,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
)

Schema = dict[str, Any]

MOST_INT = 2**31 - 1
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": MOST_INT}
FROM_1: Schema = {"type": "integer", "minimum": 1, "maximum": MOST_INT}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TOKEN: Schema = COUNT

# Each of these takes time or memory of its own, for every token or before the first one: 50,000
# biases took half a minute, 1,024 take a sixth of a second, and 64 breakers three seconds.
MOST_STOPS, MOST_BREAKERS, MOST_SAMPLERS, MOST_BIASES, MOST_PROMPTS = 128, 16, 32, 1024, 64
MOST_GRAMMAR_CHARS = 2**18
MOST_MESSAGES, MOST_TOOLS, MOST_NAMES = 4096, 512, 256


def listed(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def record(required: str = "", **properties: Schema) -> Schema:
    """An object. required: names of properties, with spaces between. Further ones are ignored."""
    made: Schema = {"type": "object", "properties": properties}
    if required:
        made["required"] = required.split()
    return made


def named(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


# -1: as many as the context has.
LIMIT: Schema = either({"const": -1}, FROM_1)
LIMIT_OR_0: Schema = {"type": "integer", "minimum": -1, "maximum": MOST_INT}
# A picture or a sound is a part too, and is refused: this server has text alone.
CONTENT: Schema = either(STRING, listed(record("type", type=STRING, text=STRING), minItems=1))
MESSAGES: Schema = listed(named("Message"), minItems=1, maxItems=MOST_MESSAGES)
ANSWERS: Schema = {**FROM_1, "description": "At most --parallel."}
LAST_N: Schema = {
    "type": "integer",
    "minimum": -1,
    "maximum": MOST_INT,
    "description": "At most the context counts; -1 for all of it.",
}
BIAS: Schema = either({"type": "number", "minimum": -100, "maximum": 100}, {"const": False})
COMMON: dict[str, Schema] = {
    "model": {**STRING, "description": "Any name: there is one model."},
    "stream": {**FLAG, "description": "Server-sent events, and `data: [DONE]` at the end."},
    "moe_edge": {
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": either(NUMBER, FLAG, {**STRING, "maxLength": 256}),
        "description": "Live settings of the policy, for this request. Only with --parallel 1.",
    },
}
PENALTIES: dict[str, Schema] = {
    "seed": {"type": "integer", "minimum": -1, "maximum": 2**63 - 1},
    "min_p": SHARE,
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repeat_penalty": {"type": "number", "minimum": 0.01, "maximum": 10},
    "logit_bias": {
        **either(
            {"type": "object", "additionalProperties": BIAS, "maxProperties": MOST_BIASES},
            listed(
                listed(either(TOKEN, STRING, BIAS), minItems=2, maxItems=2), maxItems=MOST_BIASES
            ),
        ),
        "description": "By token id or text; false for never.",
    },
    "return_progress": {**FLAG, "description": "In a stream: how much of the prompt is read."},
}
_OF_OLLAMA = ("seed", "min_p", "frequency_penalty", "presence_penalty", "repeat_penalty")
USUAL: dict[str, Schema] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 1e6},
    "top_p": SHARE,
    "top_k": {"type": "integer", "minimum": -1, "maximum": MOST_INT},
}
# llama.cpp's own: every path of OpenAI's and of its own takes them.
SAMPLING: dict[str, Schema] = {
    **COMMON,
    **USUAL,
    **PENALTIES,
    "stop": either(STRING, listed(STRING, maxItems=MOST_STOPS)),
    "stream_options": record(include_usage=FLAG),
    "json_schema": {**OBJECT, "description": "A schema that the answer keeps."},
    "grammar": {
        **STRING,
        "maxLength": MOST_GRAMMAR_CHARS,
        "description": "A grammar in GBNF that the answer keeps.",
    },
    "repeat_last_n": LAST_N,
    "dry_penalty_last_n": LAST_N,
    "dry_allowed_length": COUNT,
    "dry_multiplier": NUMBER,
    "dry_base": NUMBER,
    "dry_sequence_breakers": listed(STRING, minItems=1, maxItems=MOST_BREAKERS),
    "samplers": either(
        {**STRING, "maxLength": MOST_SAMPLERS}, listed(STRING, maxItems=MOST_SAMPLERS)
    ),
    "typical_p": NUMBER,
    "top_n_sigma": NUMBER,
    "xtc_probability": SHARE,
    "xtc_threshold": SHARE,
    "dynatemp_range": NUMBER,
    "dynatemp_exponent": NUMBER,
    "mirostat": {"type": "integer", "minimum": 0, "maximum": 2},
    "mirostat_tau": NUMBER,
    "mirostat_eta": NUMBER,
    "adaptive_target": {"type": "number", "maximum": 1},
    "adaptive_decay": {"type": "number", "minimum": 0, "maximum": 0.99},
    "min_keep": COUNT,
    "ignore_eos": FLAG,
    "n_indent": COUNT,
    "n_keep": {"type": "integer", "minimum": -1, "maximum": MOST_INT},
    "t_max_predict_ms": {"type": "integer", "minimum": -1, "maximum": 2**53},
    "cache_prompt": FLAG,
    "return_tokens": FLAG,
    "timings_per_token": FLAG,
    "verbose": FLAG,
}
# What makes a chat's prompt.
TEMPLATE: dict[str, Schema] = {
    "messages": MESSAGES,
    "tools": listed(
        record("type function", type={"const": "function"}, function=named("Function")),
        maxItems=MOST_TOOLS,
    ),
    "tool_choice": either({"enum": ["auto", "none", "required"]}, OBJECT),
    "parallel_tool_calls": FLAG,
    "response_format": record(
        "type",
        type={"enum": ["text", "json_object", "json_schema"]},
        json_schema=record(name=STRING, schema=OBJECT),
        schema=OBJECT,
    ),
    "chat_template_kwargs": OBJECT,
    "add_generation_prompt": FLAG,
    "continue_final_message": either(FLAG, {"enum": ["content", "reasoning_content"]}),
    "reasoning_format": {"enum": ["none", "auto", "deepseek", "deepseek-legacy"]},
    "reasoning_effort": STRING,
    "reasoning_budget_tokens": LIMIT_OR_0,
    "thinking_budget_tokens": LIMIT_OR_0,
    "reasoning_budget_message": STRING,
}
SEVERAL: dict[str, Schema] = {"n": ANSWERS, "n_cmpl": ANSWERS}
TOKENS: Schema = listed(TOKEN)
PROMPT: Schema = either(
    STRING,
    TOKENS,
    record("prompt_string", prompt_string=STRING),
    listed(
        either(STRING, TOKEN, record("prompt_string"), listed(either(TOKEN, STRING))),
        minItems=1,
        maxItems=MOST_PROMPTS,
    ),
)
# llama.cpp's own form of an answer.
OWN_FORM: dict[str, Schema] = {
    **SAMPLING,
    **SEVERAL,
    **dict.fromkeys(LIMITS, LIMIT_OR_0),
    "n_probs": {**COUNT, "description": "As many as an answer has memory for."},
    "post_sampling_probs": FLAG,
    "response_fields": listed(STRING, maxItems=MOST_NAMES),
}
BLOCKS: Schema = either(STRING, listed(record("type", type=STRING, text=STRING)))
CONVERSATION: dict[str, Schema] = {
    **COMMON,
    **USUAL,
    **PENALTIES,
    "messages": listed(
        record(
            "role content",
            role=STRING,
            content=either(STRING, listed(record("type", type=STRING, text=STRING), minItems=1)),
        ),
        minItems=1,
        maxItems=MOST_MESSAGES,
    ),
    "max_tokens": FROM_1,
    "system": BLOCKS,
    "stop_sequences": listed(STRING, maxItems=MOST_STOPS),
    "tools": listed(OBJECT, maxItems=MOST_TOOLS),
    "tool_choice": OBJECT,
    "thinking": record(type=STRING, budget_tokens=COUNT),
    "output_config": OBJECT,
    "output_format": OBJECT,
    "response_format": TEMPLATE["response_format"],
    "parallel_tool_calls": FLAG,
    "chat_template_kwargs": OBJECT,
}
# Ollama's form of both its paths.
OLLAMA: dict[str, Schema] = {
    "model": COMMON["model"],
    "stream": {**FLAG, "default": True, "description": "A line of JSON for each part."},
    "moe_edge": COMMON["moe_edge"],
    "format": either({"enum": ["", "json"]}, OBJECT),
    "think": either(FLAG, {"enum": ["low", "medium", "high"]}),
    "options": record(
        "",
        num_predict={"type": "integer", "minimum": -2, "maximum": MOST_INT},
        stop=SAMPLING["stop"],
        repeat_last_n=LAST_N,
        typical_p=NUMBER,
        mirostat=SAMPLING["mirostat"],
        mirostat_tau=NUMBER,
        mirostat_eta=NUMBER,
        **USUAL,
        **{name: schema for name, schema in PENALTIES.items() if name in _OF_OLLAMA},
    ),
}

REQUESTS: dict[str, Schema] = {
    "Message": record(
        "role",
        role={**STRING, "description": "system, developer, user, assistant or tool."},
        content=CONTENT,
        tool_call_id=STRING,
        tool_calls=listed(OBJECT),
        reasoning_content=STRING,
    ),
    "Function": record("name", name=STRING, description=STRING, parameters=OBJECT),
    "ChatRequest": record(
        "messages",
        **{
            **TEMPLATE,
            **SAMPLING,
            **SEVERAL,
            **dict.fromkeys(LIMITS, LIMIT),
            "logprobs": FLAG,
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
            "echo": {**FLAG, "description": "With continue_final_message: begin with its text."},
        },
    ),
    "CompletionRequest": record(
        "prompt",
        **{
            "prompt": PROMPT,
            **SAMPLING,
            **SEVERAL,
            **dict.fromkeys(LIMITS, LIMIT_OR_0),
            "logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
            "echo": FLAG,
        },
    ),
    "NativeRequest": record("prompt", prompt=PROMPT, **OWN_FORM),
    "InfillRequest": record(
        "input_prefix input_suffix",
        **{
            "input_prefix": STRING,
            "input_suffix": STRING,
            "prompt": STRING,
            "input_extra": listed(
                record("text", text=STRING, filename=STRING), maxItems=MOST_NAMES
            ),
            **OWN_FORM,
        },
    ),
    "ResponsesRequest": record(
        "input",
        **{
            "input": either(STRING, listed(OBJECT, minItems=1, maxItems=MOST_MESSAGES)),
            **SAMPLING,
            "instructions": STRING,
            "max_output_tokens": LIMIT,
            "previous_response_id": STRING,
            "text": record(format=OBJECT),
            "reasoning": record(effort=STRING),
            "tools": listed(OBJECT, maxItems=MOST_TOOLS),
            "tool_choice": TEMPLATE["tool_choice"],
            "parallel_tool_calls": FLAG,
            "response_format": TEMPLATE["response_format"],
            "chat_template_kwargs": OBJECT,
        },
    ),
    "MessagesRequest": record("messages", **CONVERSATION),
    "OllamaChatRequest": record(
        "",
        messages=listed(
            record(
                "role",
                role=STRING,
                content=STRING,
                thinking=STRING,
                tool_name=STRING,
                tool_calls=listed(
                    record("function", function=record("name", name=STRING, arguments=OBJECT))
                ),
            ),
            maxItems=MOST_MESSAGES,
        ),
        tools=TEMPLATE["tools"],
        **OLLAMA,
    ),
    "OllamaGenerateRequest": record("", prompt=STRING, system=STRING, raw=FLAG, **OLLAMA),
    "TokenizeRequest": record(
        "content",
        content=either(STRING, listed(either(TOKEN, STRING))),
        add_special=FLAG,
        parse_special=FLAG,
        with_pieces=FLAG,
    ),
    "DetokenizeRequest": record("tokens", tokens=TOKENS),
    "TemplateRequest": record("messages", **TEMPLATE),
}

# What llama.cpp's server makes itself of a chat, with the reasons why no request may have it.
INNER = dict.fromkeys(
    (
        "chat_parser",
        "chat_format",
        "grammar_triggers",
        "grammar_lazy",
        "grammar_type",
        "preserved_tokens",
        "generation_prompt",
        "message_delimiters",
        "parse_tool_calls",
        "reasoning_budget_start_tag",
        "reasoning_budget_end_tags",
        "reasoning_budget_end_tag",
    ),
    "it is made by the server",
) | {"lora": "there are no adapters"}

JSON, STREAM, TEXT = "application/json", "text/event-stream", "text/plain"
LINES = "application/x-ndjson"
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
COSTS: dict[str, Schema] = {
    "hit_rate": {"type": ["number", "null"], "description": "Of what answers asked for."},
    "prefill_hit_rate": {"type": ["number", "null"]},
    "kl_estimate": {
        "type": ["number", "null"],
        "description": "Foreseen KL divergence from the best tier in use, nats a token.",
    },
    "kl_learned": {"type": "boolean", "description": "At most: learned, and not calibrated."},
    "mix": {"type": "object", "description": "Shares of the precisions decided."},
    "computed": {"type": "object", "description": "Shares of the precisions computed."},
    "bytes_read": COUNT,
    "wait_ms": NUMBER,
    "budget_bytes": {"type": "integer"},
    "ram_bytes": {"type": "integer"},
    "peak_rss_bytes": {"type": "integer"},
    "policy": STRING,
    "shared_steps": FLAG,
}

SCHEMAS: dict[str, Schema] = {
    **REQUESTS,
    "Error": record(
        "error",
        error=record("code message type", code={"type": "integer"}, message=STRING, type=STRING),
    ),
    "OllamaError": record("error", error=STRING),
    "OllamaAnswer": record("model done", model=STRING, done=FLAG, timings=named("Timings")),
    "OllamaModels": record("models", models=listed(record("model", model=STRING))),
    "Event": {**record("data", data=STRING), "description": "JSON, or [DONE] at the end."},
    "Timings": {
        **record(
            "prompt_ms predicted_ms",
            prompt_n=COUNT,
            prompt_ms=NUMBER,
            predicted_n=COUNT,
            predicted_ms=NUMBER,
            **COSTS,
        ),
        "description": "llama.cpp's figures, and what the experts cost.",
    },
    "Costs": {
        **record(" ".join(COSTS.keys() - {"kl_estimate", "kl_learned"}), **COSTS),
        "description": "What the experts cost; llama.cpp has no figures of its own here.",
    },
    "ChatAnswer": record(
        "choices model object usage",
        id=STRING,
        object={"const": "chat.completion"},
        model=STRING,
        created={"type": "integer"},
        choices=listed(
            record(
                "index message finish_reason",
                index=COUNT,
                finish_reason=STRING,
                message=record("role", role={"const": "assistant"}, content=TEXT_OR_NULL),
            )
        ),
        usage={"type": "object"},
        timings=named("Timings"),
    ),
    "CompletionAnswer": record(
        "choices model object usage",
        choices=listed(record("index text finish_reason", index=COUNT, text=STRING)),
        object={"const": "text_completion"},
        model=STRING,
        usage={"type": "object"},
        timings=named("Timings"),
    ),
    "NativeAnswer": record("content", content=STRING, timings=named("Timings")),
    "ResponsesAnswer": record(
        "object output status",
        object={"const": "response"},
        output=listed({"type": "object"}),
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
        "mode layers memory",
        mode=STRING,
        memory={
            "type": "object",
            "additionalProperties": COUNT,
            "description": "Bytes of the host's memory by what they are for, the free ones last.",
        },
        layers={**COUNT, "description": "0 where experts are not managed; no more is said then."},
        experts=COUNT,
        tiers=listed(STRING),
        resident={**STRING, "description": "base64 of uint8 [layers, experts]; 254: on disk."},
        used={**STRING, "description": "base64 of little-endian uint32 [layers, experts]."},
        requests=COUNT,
        hits=COUNT,
        bytes_read=COUNT,
    ),
}


def operation(
    summary: str, answer: Schema, request: str = "", kind: str = JSON, fault: str = "Error"
) -> Schema:
    """answer: the schema of what comes back with 200; request: the name of what is sent; fault: of
    what comes back otherwise."""
    error = {JSON: {"schema": named(fault)}}
    made: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {"schema": answer}}},
            "default": {"description": "Why there is none, in a sentence.", "content": error},
        },
    }
    if request:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": named(request)}}}
    return made


def decoding(summary: str, request: str, answer: str) -> Schema:
    """An operation whose answer may come as a stream."""
    made = operation(summary, named(answer), request)
    made["responses"]["200"]["content"][STREAM] = {"schema": named("Event")}
    return made


def lined(summary: str, request: str) -> Schema:
    """An answer of Ollama's."""
    made = operation(summary, named("OllamaAnswer"), request, fault="OllamaError")
    made["responses"]["200"]["content"][LINES] = {"schema": named("OllamaAnswer")}
    return made


_TOKENS = record("input_tokens", input_tokens=COUNT)
_ID = record("id", id=STRING)
_ONE_MODEL = operation("The one model, by its name.", _ID)
_ONE_MODEL["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": STRING}]
# What decodes, and so takes its turn, by path.
GENERATING: dict[str, Schema] = {
    CHAT: decoding("OpenAI's chat.", "ChatRequest", "ChatAnswer"),
    COMPLETIONS: decoding("OpenAI's plain completion.", "CompletionRequest", "CompletionAnswer"),
    RESPONSES: decoding(
        "OpenAI's responses, without stored state.", "ResponsesRequest", "ResponsesAnswer"
    ),
    ANTHROPIC: decoding("Anthropic's messages.", "MessagesRequest", "MessagesAnswer"),
    "/completion": decoding("llama.cpp's completion.", "NativeRequest", "NativeAnswer"),
    "/infill": decoding(
        "llama.cpp's completion of a gap, for models that can.", "InfillRequest", "NativeAnswer"
    ),
    OLLAMA_CHAT: lined("Ollama's chat.", "OllamaChatRequest"),
    OLLAMA_GENERATE: lined("Ollama's answer to a prompt.", "OllamaGenerateRequest"),
}
QUICK: dict[str, Schema] = {
    f"{CHAT}/input_tokens": operation("How long a chat's prompt is.", _TOKENS, "ChatRequest"),
    f"{RESPONSES}/input_tokens": operation(
        "How long a response's prompt is.", _TOKENS, "ResponsesRequest"
    ),
    f"{ANTHROPIC}/count_tokens": operation(
        "How long a message's prompt is.", _TOKENS, "MessagesRequest"
    ),
    "/tokenize": operation(
        "A text as tokens.", record("tokens", tokens={"type": "array"}), "TokenizeRequest"
    ),
    "/detokenize": operation(
        "Tokens as text.", record("content", content=STRING), "DetokenizeRequest"
    ),
    "/apply-template": operation(
        "The prompt that messages make.", record("prompt", prompt=STRING), "TemplateRequest"
    ),
}
# Of these llama.cpp's server has the answer.
READ: dict[str, Schema] = {
    "/v1/models": operation("The one model.", record("data", data=listed(_ID))),
    "/props": operation("llama.cpp's settings.", OBJECT),
}
_HEALTH = operation("Whether the model is ready; needs no key.", record("status", status=STRING))
_OLLAMA_MODELS = operation("The one model.", named("OllamaModels"), fault="OllamaError")
OURS: dict[str, Schema] = {
    "/api/tags": _OLLAMA_MODELS,
    "/api/ps": _OLLAMA_MODELS,
    "/api/version": operation(
        "Of Ollama's interface.", record("version", version=STRING), fault="OllamaError"
    ),
    "/v1/models/{id}": _ONE_MODEL,
    "/health": _HEALTH,
    "/metrics": operation("Counters and gauges, for Prometheus.", STRING, kind=TEXT),
    "/experts": operation("Where each expert is, and how often tokens used it.", named("Experts")),
    "/openapi.json": operation("This description.", OBJECT),
    "/": operation("A page to chat with; needs no key.", STRING, kind="text/html"),
}
# What is sent says which model, and there is one.
SHOW = "/api/show"
_SHOW = operation("What the one model is.", OBJECT, fault="OllamaError")
# Other paths of the same.
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
# How long a prompt is, and the path to which the same request goes for an answer.
COUNTING = {
    f"{CHAT}/input_tokens": CHAT,
    f"{RESPONSES}/input_tokens": RESPONSES,
    f"{ANTHROPIC}/count_tokens": ANTHROPIC,
}


def paths(path: str) -> tuple[str, ...]:
    """A path with its other names."""
    return (path, ALIASES[path]) if path in ALIASES else (path,)


PATHS: dict[str, Schema] = {
    each: {method: operation}
    for method, operations in (
        ("post", GENERATING | QUICK | {SHOW: _SHOW}),
        ("get", READ | OURS),
    )
    for path, operation in operations.items()
    for each in paths(path)
}


def document(has_key: bool) -> dict[str, Any]:
    """What `/openapi.json` answers. has_key: whether requests bring one."""
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "moe-edge serve",
            "version": "1",
            "description": "A local model for other programs. Other fields are ignored.",
        },
        "paths": PATHS,
        "components": {"schemas": SCHEMAS},
    }
    if has_key:
        made["components"] = {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        made["security"] = [{"key": []}]
    return made
