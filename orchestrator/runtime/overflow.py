"""Leaves the oldest exchanges out of a conversation that outgrows the context.

An exchange is a question of the user with everything up to the next question: calls of tools, their
results, and answers. System messages stay. The result depends only on the messages, the tools, the
context and the limit of the answer: the conversation is replayed from its first request. So a
client that sends its whole conversation each time gets the same cut each time, and the rest of the
prompt is found in the prompt cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from orchestrator.runtime.images import has_images

Message = dict[str, Any]

# Returns the number of tokens of a prompt with these messages, or None if the chat template refuses
# them. If the second argument is True, the prompt also has the tools and the system prompt of the
# request.
Count = Callable[[list[Message], bool], int | None]

# Free space for an answer, as a fraction of the context. An answer with a larger limit gets
# 1/MOST_FREE. One with a smaller limit gets 1/LEAST_FREE, because a prompt can be a few tokens
# longer than the sum of its parts.
MOST_FREE, LEAST_FREE = 4, 16
# How many lengths of parts are remembered. Each takes about 200 bytes.
MOST_LENGTHS = 4096
# A message of the user that stands next to a part whose tokens are counted, and one of the model.
FILLER = {"type": "message", "role": "user", "content": "."}
_ANSWER = {**FILLER, "role": "assistant"}


class Author(Enum):
    """The author of a message: the program, the user, a tool that was called, or the model."""

    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    MODEL = "assistant"


def author_of(message: Message) -> Author:
    """Return the author of a message in the form of OpenAI's chat or responses, or of Anthropic."""
    kind, role, content = (message.get(name) for name in ("type", "role", "content"))
    if role in ("system", "developer"):
        return Author.SYSTEM
    if role == "assistant" or kind in ("function_call", "reasoning"):
        return Author.MODEL
    blocks = content if isinstance(content, list) else []
    types = {each.get("type") for each in blocks if isinstance(each, dict)}
    if role in ("tool", "function") or kind == "function_call_output" or "tool_result" in types:
        return Author.TOOL
    return Author.USER


def _is_system(message: Message) -> bool:
    return author_of(message) is Author.SYSTEM


class PartType(Enum):
    """The type of a part of a conversation. CALLS are calls of tools with their results."""

    SYSTEM = "system"
    QUESTION = "question"
    CALLS = "calls"
    ANSWER = "answer"


class Part(NamedTuple):
    """A part of a conversation, such as a user's question or tool calls with their results.

    start: index of its first message in the conversation. messages: all messages of the part.
    """

    start: int
    type: PartType
    messages: list[Message]

    @property
    def is_generated(self) -> bool:
        """Whether the part begins with a message of the model, which answered a request."""
        return self.type in (PartType.CALLS, PartType.ANSWER)

    def length(self, count: Count) -> int | None:
        """Return the number of tokens that the part adds to a prompt, or None if not known.

        count: returns the number of tokens of messages. Short filler messages are counted together
        with the part, because chat templates want a user's message first. Filler lengths are then
        subtracted. A question is counted one filler too short and an answer one filler too long, so
        sums are right.
        """
        if self.type is PartType.SYSTEM:
            before, after = [FILLER, _ANSWER], [FILLER]
        else:
            before = [FILLER] if self.is_generated else []
            after = [FILLER] if self.type is PartType.ANSWER else []
        n = count([*before, *self.messages, *after], False)
        n_fillers = count([*before, *after] if self.type is PartType.SYSTEM else [FILLER], False)
        return None if n is None or n_fillers is None else n - n_fillers


def parts_of(messages: Sequence[Message]) -> list[Part]:
    """Divide a conversation into questions, answers, tool calls with results, and system messages.

    The parts are in the order of their first messages. User messages next to tool results belong to
    the same part as the results.
    """
    authors = [author_of(each) for each in messages]
    places = [at for at, author in enumerate(authors) if author is not Author.SYSTEM]
    found: list[tuple[PartType, list[int]]] = []
    for is_model, group in groupby(places, lambda at: authors[at] is Author.MODEL):
        run = [*group]
        if found and not is_model and any(authors[at] is Author.TOOL for at in run):
            found[-1] = PartType.CALLS, found[-1][1] + run
        else:
            found.append((PartType.ANSWER if is_model else PartType.QUESTION, run))
    found += [
        (PartType.SYSTEM, [at]) for at, author in enumerate(authors) if author is Author.SYSTEM
    ]
    parts = [Part(run[0], type, [messages[at] for at in run]) for type, run in found]
    return sorted(parts, key=lambda part: part.start)


def first_kept(
    parts: Sequence[Part], lengths: Sequence[int], n_head: int, n_ctx: int, n_answer: int
) -> int:
    """Return the index of the first message to keep, so that the conversation fits in the context.

    The requests of the conversation are replayed in turn. When a prompt leaves too little space for
    an answer, old exchanges are dropped until the prompt takes at most half of the context. An
    exchange is a question and everything up to the next one. The latest exchange and all system
    messages are always kept.

    lengths: number of tokens of each part. n_head: number of tokens of a prompt without the parts.
    n_ctx: length of the context in tokens. n_answer: maximum length of an answer in tokens.
    """
    most = n_ctx - min(max(n_answer, n_ctx // LEAST_FREE), n_ctx // MOST_FREE)
    n_prompt, exchanges = n_head, deque[list[int]]()  # of each: first message, number of tokens

    def make_room() -> None:
        nonlocal n_prompt
        if n_prompt > most:
            while len(exchanges) > 1 and n_prompt > n_ctx // 2:
                n_prompt -= exchanges.popleft()[1]

    for part, length in zip(parts, lengths, strict=True):
        if part.is_generated:
            make_room()
        if part.type is PartType.QUESTION or (not exchanges and part.type is not PartType.SYSTEM):
            exchanges.append([part.start, 0])
        if part.type is not PartType.SYSTEM:
            exchanges[-1][1] += length
        n_prompt += length
    make_room()
    return exchanges[0][0] if exchanges else 0


def shortened(
    messages: Sequence[Message], n_bytes: int, count: Count, n_ctx: int, n_answer: int
) -> list[Message]:
    """Return a conversation without the oldest exchanges if they do not fit in the context.

    An exchange is a question and everything up to the next one. n_bytes: length of the request as
    JSON, an upper limit for its tokens if it has no images. If it is small, nothing is counted.
    count: returns the number of tokens of messages. n_ctx: length of the context in tokens.
    n_answer: maximum length of the answer in tokens. If the chat template refuses a part, all
    messages are returned.
    """
    said = list(messages)
    head = list(takewhile(_is_system, said))
    parts = parts_of(said[len(head) :])
    is_short = n_bytes <= n_ctx // 2 and not has_images(said)
    if is_short or sum(part.type is PartType.QUESTION for part in parts) < 2:
        return said
    lengths = [count([*head, FILLER], True), *(part.length(count) for part in parts)]
    known = [each for each in lengths if each is not None]
    if len(known) < len(lengths):
        return said

    def rest(n_more: int) -> list[Message]:
        """Return what stays of the conversation if each prompt has n_more further tokens."""
        first = len(head) + first_kept(parts, known[1:], known[0] + n_more, n_ctx, n_answer)
        return [each for at, each in enumerate(said) if at >= first or _is_system(each)]

    kept = rest(0)
    n_tokens = count(kept, True)
    if n_tokens is None or n_tokens < n_ctx:
        return kept
    # A few templates write the latest messages at greater length than the earlier ones.
    return rest(n_tokens - n_ctx + n_ctx // LEAST_FREE)


class PromptLengths:
    """A cache of the number of tokens of the latest MOST_LENGTHS prompts.

    A client repeats its conversation in each request, and counting takes some milliseconds.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def of(self, request: bytes, count: Callable[[bytes], int | None]) -> int | None:
        """Return the number of tokens of a request's prompt, from the cache or from `count`.

        `count` returns None if the tokens cannot be counted. This result is not cached.
        """
        key = hashlib.sha256(request).digest()[:16]
        found = self._known.pop(key, None)
        if found is None:
            found = count(request)
        if found is not None:
            self._known[key] = found
            if len(self._known) > MOST_LENGTHS:
                self._known.popitem(last=False)
        return found
