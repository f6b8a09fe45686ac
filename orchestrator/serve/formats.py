"""Which form a request asks its answer to have: what llama.cpp's server does not read of it."""

from __future__ import annotations

from typing import Any

from orchestrator.serve.wire import ANTHROPIC, Refusal

_RESPONSES = "/v1/responses"


def settle_format(route: str, data: dict[str, Any]) -> None:
    """Turns the forms that OpenAI's responses and Anthropic's messages have for a schema into that
    of OpenAI's chat, which llama.cpp reads.

    Raises Refusal for a schema that is none: llama.cpp would leave it out, and the client would get
    any text.
    """
    text = data.get("text")
    if route == _RESPONSES and isinstance(text, dict) and text.get("format") is not None:
        asked = text["format"]
        if isinstance(asked, dict) and asked.get("type") == "json_schema":
            asked = {"type": "json_schema", "json_schema": asked}
        data["response_format"] = asked
    if route == ANTHROPIC:
        config = data.get("output_config")
        asked = config.get("format") if isinstance(config, dict) else None
        asked = data.get("output_format") if asked is None else asked  # as it was called in beta
        if asked is not None:
            if not isinstance(asked, dict) or asked.get("type") != "json_schema":
                raise Refusal(400, "the format in output_config must be a json_schema")
            data["response_format"] = {"type": "json_schema", "json_schema": asked}
    _check(data)


def _check(data: dict[str, Any]) -> None:
    asked = data.get("response_format")
    wrapper = asked.get("json_schema") if isinstance(asked, dict) else None
    for what, found in (("response_format", asked), ("its json_schema", wrapper)):
        if found is not None and not isinstance(found, dict):
            raise Refusal(400, f"{what} must be an object")
    schemas = [(asked or {}).get("schema"), (wrapper or {}).get("schema"), data.get("json_schema")]
    if any(schema is not None and not isinstance(schema, dict) for schema in schemas):
        raise Refusal(400, "a JSON schema must be an object")
