"""Which tools a request offers, and whether one has to be called: what llama.cpp's server does not
read of it."""

from __future__ import annotations

from typing import Any

from orchestrator.serve.wire import ANTHROPIC, Refusal

_MODES = ("auto", "none", "required")


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
    if tools is not None and not isinstance(tools, list):
        raise Refusal(400, "tools must be a list")
    if mode == "required" and not tools:
        raise Refusal(400, "tool_choice asks for a call, and the request has no tools")
    offered = tools or []
    if names is not None:
        offered = [tool for tool in offered if _name_of(tool) in names]
        if not offered:
            raise Refusal(400, f"tool_choice names {_listed(names)}, which is none of the tools")
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


def _name_of(tool: Any) -> str | None:
    """A tool's name in OpenAI's two forms and in Anthropic's."""
    if not isinstance(tool, dict):
        return None
    inner = tool.get("function")
    found = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    return found if isinstance(found, str) else None


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name[:80]) for name in names)
