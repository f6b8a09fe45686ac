"""The server's surface as OpenAPI 3.1 describes it: paths, requests and answers."""

from __future__ import annotations

from typing import Any

from orchestrator.serve.requests import (
    COUNT,
    FLAG,
    NUMBER,
    REQUESTS,
    STRING,
    Schema,
    listed,
    named,
    record,
)

JSON, STREAM, TEXT = "application/json", "text/event-stream", "text/plain"
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
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

SCHEMAS: dict[str, Schema] = {
    **REQUESTS,
    "Error": record(
        "error",
        error=record("code message type", code={"type": "integer"}, message=STRING, type=STRING),
    ),
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
        **record(" ".join(COSTS.keys() - {"kl_estimate"}), **COSTS),
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
MODEL = get("The one model, by its name.", record("id", id=STRING))
MODEL["get"]["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": STRING}]
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
    "/v1/messages/count_tokens": post("How long a message's prompt is.", "MessagesRequest", TOKENS),
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
    "/v1/models/{id}": MODEL,
    "/models/{id}": MODEL,
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
