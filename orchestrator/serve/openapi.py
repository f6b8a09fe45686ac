"""The server's surface as OpenAPI 3.1 describes it: paths, requests and answers."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

JSON, STREAM, TEXT = "application/json", "text/event-stream", "text/plain"
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}


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


# A picture or a sound is a part too, and is refused: this server has text alone.
CONTENT: Schema = {
    "anyOf": [
        STRING,
        listed(record("type text", type={"const": "text"}, text=STRING), minItems=1),
    ]
}
SAMPLING: dict[str, Schema] = {
    "model": {**STRING, "description": "Any name: there is one model."},
    "stream": {**FLAG, "description": "Server-sent events, and `data: [DONE]` at the end."},
    "max_tokens": {**COUNT, "minimum": -1, "description": "-1 for as many as the context has."},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1e6},
    "top_p": SHARE,
    "min_p": SHARE,
    "top_k": COUNT,
    "seed": {"type": "integer", "minimum": -1, "maximum": 2**31 - 1},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repeat_penalty": {"type": "number", "minimum": 0.01, "maximum": 10},
    "stop": {"anyOf": [STRING, listed(STRING)]},
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "description": "By token id.",
    },
    "return_progress": {**FLAG, "description": "In a stream: how much of the prompt is read."},
    "stream_options": record(include_usage=FLAG),
    "moe_edge": {
        "type": "object",
        "description": "Live settings of the policy, for this request. Only with --parallel 1.",
    },
}
COSTS: dict[str, Schema] = {
    "hit_rate": {"type": ["number", "null"], "description": "Of what answers asked for."},
    "prefill_hit_rate": {"type": ["number", "null"]},
    "kl_estimate": {
        "type": ["number", "null"],
        "description": "Foreseen KL divergence from the best tier in use, nats a token.",
    },
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
FUNCTION = record("name", name=STRING, description=STRING, parameters={"type": "object"})
CHOICES: Schema = {"enum": ["auto", "none", "required"]}
MESSAGES: dict[str, Schema] = {
    "messages": listed(
        record("role content", role={"enum": ["user", "assistant"]}, content=CONTENT), minItems=1
    ),
    "max_tokens": {**COUNT, "minimum": 1},
    "system": CONTENT,
    "stop_sequences": listed(STRING),
    "model": STRING,
    "stream": FLAG,
    "temperature": SHARE,
    "top_k": COUNT,
    "top_p": SHARE,
}
PROMPT: Schema = {"anyOf": [STRING, listed({"type": "integer", "minimum": 0})]}

SCHEMAS: dict[str, Schema] = {
    "Error": record(
        "error",
        error=record("code message type", code={"type": "integer"}, message=STRING, type=STRING),
    ),
    "Event": {**record("data", data=STRING), "description": "JSON, or [DONE] at the end."},
    "Message": record(
        "role content",
        role={"enum": ["system", "developer", "user", "assistant", "tool"]},
        content=CONTENT,
        tool_call_id=STRING,
    ),
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
        **record(" ".join(COSTS.keys() - {"kl_estimate"}), **COSTS),
        "description": "What the experts cost; llama.cpp has no figures of its own here.",
    },
    "ChatRequest": record(
        "messages",
        messages=listed(named("Message"), minItems=1),
        **SAMPLING,
        n={"type": "integer", "minimum": 1, "description": "At most --parallel."},
        logprobs=FLAG,
        top_logprobs={"type": "integer", "minimum": 0, "maximum": 20},
        response_format=record(
            "type",
            type={"enum": ["text", "json_object", "json_schema"]},
            json_schema=record(name=STRING, schema={"type": "object"}),
        ),
        tools=listed(record("type function", type={"const": "function"}, function=FUNCTION)),
        tool_choice={"anyOf": [CHOICES, {"type": "object"}]},
        parallel_tool_calls=FLAG,
    ),
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
    "CompletionRequest": record(
        "prompt",
        prompt=PROMPT,
        **SAMPLING,
        echo={
            **FLAG,
            "description": "The likelihood of the prompt: with `logprobs`, `max_tokens` of 0 or 1, "
            "and temperature 0 where that is 1. Any other is refused.",
        },
    ),
    "NativeRequest": record("prompt", prompt=PROMPT, **SAMPLING),
    "CompletionAnswer": record(
        "choices model object usage",
        choices=listed(record("index text finish_reason", index=COUNT, text=STRING)),
        object={"const": "text_completion"},
        model=STRING,
        usage={"type": "object"},
        timings=named("Timings"),
    ),
    "NativeAnswer": record("content", content=STRING, timings=named("Timings")),
    "ResponsesRequest": record(
        "input",
        input={
            "anyOf": [
                STRING,
                listed(
                    record(
                        "role content",
                        role={"enum": ["system", "user", "assistant"]},
                        content=STRING,
                    ),
                    minItems=1,
                ),
            ]
        },
        instructions=STRING,
        max_output_tokens=COUNT,
        model=STRING,
        stream=FLAG,
        temperature=SAMPLING["temperature"],
        top_p=SHARE,
    ),
    "ResponsesAnswer": record(
        "object output status",
        object={"const": "response"},
        output=listed({"type": "object"}),
        status=STRING,
        timings=named("Costs"),
    ),
    "MessagesRequest": record("messages max_tokens", **MESSAGES),
    "CountRequest": record("messages", **MESSAGES),
    "MessagesAnswer": record(
        "type role content",
        type={"const": "message"},
        role={"const": "assistant"},
        content=listed(record("type", type=STRING)),
        timings=named("Costs"),
    ),
    "InfillRequest": record(
        "input_prefix input_suffix", input_prefix=STRING, input_suffix=STRING, prompt=STRING
    ),
    "TokenizeRequest": record(
        "content", content=STRING, add_special=FLAG, parse_special=FLAG, with_pieces=FLAG
    ),
    "DetokenizeRequest": record("tokens", tokens=listed({"type": "integer", "minimum": 0})),
    "TemplateRequest": record("messages", messages=listed(named("Message"), minItems=1)),
    "Experts": record(
        "mode layers",
        mode=STRING,
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
    summary: str, answer: Schema, request: str = "", kind: str = JSON, stream: bool = False
) -> Schema:
    """answer: the schema of what comes back with 200; request: the name of what is sent."""
    content: Schema = {kind: {"schema": answer}}
    if stream:
        content[STREAM] = {"schema": named("Event")}
    error = {JSON: {"schema": named("Error")}}
    made: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "Why there is none, in a sentence.", "content": error},
        },
    }
    if request:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": named(request)}}}
    return made


def post(summary: str, request: str, answer: Schema, stream: bool = False) -> Schema:
    return {"post": operation(summary, answer, request, stream=stream)}


def get(summary: str, answer: Schema, kind: str = JSON) -> Schema:
    return {"get": operation(summary, answer, kind=kind)}


CHAT = post("OpenAI's chat.", "ChatRequest", named("ChatAnswer"), stream=True)
COMPLETION = post(
    "OpenAI's plain completion.", "CompletionRequest", named("CompletionAnswer"), stream=True
)
NATIVE = post("llama.cpp's completion.", "NativeRequest", named("NativeAnswer"), stream=True)
RESPONSES = post(
    "OpenAI's responses, without stored state.",
    "ResponsesRequest",
    named("ResponsesAnswer"),
    stream=True,
)
TOKENS = record("input_tokens", input_tokens=COUNT)
CHAT_TOKENS = post("How long a chat's prompt is.", "ChatRequest", TOKENS)
RESPONSES_TOKENS = post("How long a response's prompt is.", "ResponsesRequest", TOKENS)
MODELS = get("The one model.", record("data", data=listed(record("id", id=STRING))))
HEALTH = get("Whether the model is ready; needs no key.", record("status", status=STRING))
PATHS: dict[str, Schema] = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/chat/completions/input_tokens": CHAT_TOKENS,
    "/chat/completions/input_tokens": CHAT_TOKENS,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES_TOKENS,
    "/responses/input_tokens": RESPONSES_TOKENS,
    "/v1/messages": post(
        "Anthropic's messages.", "MessagesRequest", named("MessagesAnswer"), stream=True
    ),
    "/v1/messages/count_tokens": post("How long a message's prompt is.", "CountRequest", TOKENS),
    "/completion": NATIVE,
    "/completions": NATIVE,
    "/infill": post(
        "llama.cpp's completion of a gap, for models that can.",
        "InfillRequest",
        named("NativeAnswer"),
        stream=True,
    ),
    "/tokenize": post(
        "A text as tokens.",
        "TokenizeRequest",
        record("tokens", tokens={"type": "array"}),
    ),
    "/detokenize": post("Tokens as text.", "DetokenizeRequest", record("content", content=STRING)),
    "/apply-template": post(
        "The prompt that messages make.", "TemplateRequest", record("prompt", prompt=STRING)
    ),
    "/v1/models": MODELS,
    "/models": MODELS,
    "/props": get("llama.cpp's settings.", {"type": "object"}),
    "/health": HEALTH,
    "/v1/health": HEALTH,
    "/metrics": get("Counters and gauges, for Prometheus.", STRING, TEXT),
    "/experts": get("Where each expert is, and how often tokens used it.", named("Experts")),
    "/openapi.json": get("This description.", {"type": "object"}),
    "/": get("A page to chat with; needs no key.", STRING, "text/html"),
}


def document(has_key: bool) -> dict[str, Any]:
    """What `/openapi.json` answers. has_key: whether requests bring one."""
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "moe-edge serve",
            "version": "1",
            "description": "A local model for other programs. Unknown fields are ignored.",
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
