"""What a request may make llama.cpp compute before anybody can end it: how deeply it is nested, and
how much there is of what takes more work than its length.

Where the work cannot be told from the request, as with grammars, the native server counts it
(`patches/native/server/moe-edge-bounds.h`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.serve.wire import Refusal

MOST_NESTED = 100
# Entries of lists whose work for each token, or before the first one, grows with their length.
MOST_ENTRIES = {
    "logit_bias": 1024,
    "stop": 128,
    "stop_sequences": 128,
    "samplers": 64,
    "dry_sequence_breakers": 16,
    "reasoning_budget_end_tags": 64,
    "lora": 64,
    "response_fields": 128,
    "input_extra": 1024,
}
# A prompt may be a list of them, and each is a request of its own for llama.cpp.
MOST_PROMPTS = 128
# Texts in `logit_bias` are as many entries as they have tokens.
MOST_BIAS_CHARS = 16384
# Of a name in a schema: llama.cpp's regular expressions recurse over each of its characters, and
# those of the names around it.
MOST_NAME_CHARS = 256
# Of an object: for each of its optional properties llama.cpp copies the list of those behind it,
# and for each of these again.
MOST_PROPERTIES = 512
MOST_GRAMMAR_CHARS = 2**18
_SHAPES = ("json_schema", "response_format", "tools")


def settle_bounds(_route: str, data: dict[str, Any]) -> bool:
    """Raises Refusal for a request that is more than what is bounded here; never changes it."""
    _check_nesting(data)
    for name, most in MOST_ENTRIES.items():
        _check_entries(name, data.get(name), most)
    bias = data.get("logit_bias")
    if isinstance(bias, (list, dict)):
        n_chars = sum(map(len, _texts(bias)))
        _refuse_above("the texts of logit_bias", n_chars, MOST_BIAS_CHARS, "characters")
    for name in ("prompt", "content", "input"):
        prompts = data.get(name)
        if isinstance(prompts, list):
            n = sum(isinstance(each, (str, list)) for each in prompts)
            _refuse_above(name, n, MOST_PROMPTS, "prompts")
    grammar = data.get("grammar")
    if isinstance(grammar, str):
        _refuse_above("grammar", len(grammar), MOST_GRAMMAR_CHARS, "characters")
    for name in _SHAPES:
        _check_schemas(name, data.get(name))
    return False


def _refuse_above(what: str, n: int, most: int, of: str) -> None:
    if n > most:
        raise Refusal(400, f"{what}: {n} {of}, and {most} is the most that is taken")


def _check_entries(name: str, value: Any, most: int) -> None:
    if isinstance(value, (list, dict, str)):
        is_list = not isinstance(value, str) or name == "samplers"
        _refuse_above(name, len(value) if is_list else 1, most, "entries")


def _check_nesting(data: dict[str, Any]) -> None:
    level: list[Any] = [data]
    for _ in range(MOST_NESTED):
        level = [each for value in level for each in _inner(value)]
        if not level:
            return
    raise Refusal(400, f"the request is nested in more than {MOST_NESTED} levels")


def _inner(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value
    return [each for each in inner if isinstance(each, (dict, list))]


def _texts(bias: list[Any] | dict[str, Any]) -> Iterator[str]:
    if isinstance(bias, dict):
        yield from bias
        return
    for each in bias:
        if isinstance(each, list) and each and isinstance(each[0], str):
            yield each[0]


def _check_schemas(name: str, asked: Any) -> None:
    """Of a schema, or of anything that has some in it."""
    level = [asked] if isinstance(asked, (dict, list)) else []
    while level:
        for each in level:
            if isinstance(each, dict):
                reference = each.get("$ref")
                names = [*each, reference] if isinstance(reference, str) else each
                longest = max(map(len, names), default=0)
                _refuse_above(f"a name in {name}", longest, MOST_NAME_CHARS, "characters")
                properties = each.get("properties")
                n = len(properties) if isinstance(properties, dict) else 0
                _refuse_above(f"an object in {name}", n, MOST_PROPERTIES, "properties")
        level = [each for value in level for each in _inner(value)]
