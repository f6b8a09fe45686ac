"""Which of llama.cpp's sequences a request gets, where several decode together.

Left to itself, llama.cpp gives a request the idle sequence whose tokens begin most like it, from a
tenth of the prompt on, and writes over what follows there. Conversations with one system prompt so
take each other's place, even while another sequence is free. Here a request gets the sequence that
holds its own conversation, and any other one gets the sequence that was used the longest ago. What
conversations have in common is then read once for each sequence, and no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from orchestrator.serve.wire import ANTHROPIC

# llama.cpp's form of Anthropic's requests drops the field that names a sequence.
NAMELESS = (ANTHROPIC,)
# A text without messages is compared in pieces of so many characters.
_PIECE_CHARS = 64
_SHARED = ("system", "developer")


@dataclass(frozen=True)
class Conversation:
    """A request as pieces whose beginnings can be compared. n_common: how many of the first ones
    others have, too, without being the same conversation: tools, and what a system says."""

    pieces: tuple[bytes, ...] = ()
    n_common: int = 0

    def goes_on(self, before: Conversation) -> int:
        """How many pieces it shares with one that it continues, repeats, or says the last piece of
        in another way; else 0."""
        shared = 0
        for ours, theirs in zip(self.pieces, before.pieces, strict=False):
            if ours != theirs:
                break
            shared += 1
        enough = max(self.n_common + 1, len(before.pieces) - 1)
        return shared if shared >= enough else 0


def conversation_of(route: str, data: dict[str, Any]) -> Conversation | None:
    """What a request goes on from; None where no sequence can be named for it."""
    prompt = data.get("prompt", data.get("input_prefix"))
    if route in NAMELESS or data.get("n_cmpl", data.get("n", 1)) not in (None, 1):
        return None
    messages = data.get("messages", data.get("input"))
    if messages is not None:
        return _of_messages(messages, data)
    if isinstance(prompt, str):
        cut = range(0, len(prompt), _PIECE_CHARS)
        return Conversation(_digests(prompt[at : at + _PIECE_CHARS] for at in cut))
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        cut = range(0, len(prompt), _PIECE_CHARS)
        return Conversation(_digests(prompt[at : at + _PIECE_CHARS] for at in cut))
    return None  # several prompts, each of which takes a sequence


def _of_messages(messages: Any, data: dict[str, Any]) -> Conversation:
    said = messages if isinstance(messages, list) else [messages]
    before = [data.get("tools"), data.get("instructions")]
    n_system = 0
    for each in said:
        if not isinstance(each, dict) or each.get("role") not in _SHARED:
            break
        n_system += 1
    return Conversation(_digests([*before, *said]), len(before) + n_system)


def _digests(pieces: Iterable[Any]) -> tuple[bytes, ...]:
    return tuple(
        hashlib.sha256(json.dumps(piece, sort_keys=True).encode()).digest() for piece in pieces
    )


@dataclass
class _Seat:
    holds: Conversation = field(default_factory=Conversation)
    busy: bool = False
    last: int = 0


class Seats:
    """The sequences of one server, each with the conversation that it was last given. Of one event
    loop. Who takes gives back what it got, by leave, once."""

    def __init__(self, n: int) -> None:
        self._seats = [_Seat() for _ in range(n)]
        self._taken = 0
        self._nameless = 0

    def take(self, asked: Conversation | None) -> int | None:
        """The sequence for a request; None where llama.cpp has to choose: for a request for which
        none can be named, and beside such a one, which may have got any."""
        idle = [seat for seat in self._seats if not seat.busy]
        if asked is None or self._nameless or not idle:
            self._nameless += 1
            return None
        seat = max(idle, key=lambda each: (asked.goes_on(each.holds), -each.last))
        self._taken += 1
        seat.holds, seat.busy, seat.last = asked, True, self._taken
        return self._seats.index(seat)

    def leave(self, taken: int | None) -> None:
        if taken is not None:
            self._seats[taken].busy = False
            return
        self._nameless -= 1
        for seat in self._seats:
            seat.holds = Conversation()


def with_seat(body: bytes, taken: int | None) -> bytes:
    """A JSON object's text with the field that names a sequence. The object has none."""
    if taken is None:
        return body
    rest = body.lstrip()[1:].lstrip()
    comma = b"" if rest.startswith(b"}") else b","
    return b'{"id_slot":%d%s' % (taken, comma) + rest
