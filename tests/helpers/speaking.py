"""A function that a model may call, and what it takes, for tests that speak to a server."""

from __future__ import annotations

from typing import Any

ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"country": {"enum": ["Norway", "Peru"]}},
    "required": ["country"],
    "additionalProperties": False,
}
CAPITAL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "capital",
        "description": "The capital of a country.",
        "parameters": ARGUMENTS,
    },
}
