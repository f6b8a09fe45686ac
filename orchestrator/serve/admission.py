"""What may be here at once: turns, sequences, bodies of requests, and answers that nobody reads.

All of it is of one event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from orchestrator.serve.wire import STOPPING, Refusal

T = TypeVar("T")


class Asked(Protocol):
    """A request to the native server, as NativeRequest."""

    def whole(self) -> tuple[int, bytes]: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Asks(Protocol):
    """Asks the native server what it need not compute for, as Runtime."""

    def query(self, route: str, body: bytes = b"") -> Asked: ...


# Of answers that are made and that nobody reads.
UNREAD_BYTES = 4 * 2**20
# What each answer may take for the probabilities of its tokens.
PROBS_BYTES = 5 << 20
# What reading a body may take, its tokens and llama.cpp's objects among it, for each byte of the
# longest one: prose and code take 25 to 50, and `orchestrator.serve.requests` refuses a body that
# would take more. A tokenizer that looks for merges in a whole text (SentencePiece's) takes 45 to
# 70, and 91 at most, whatever the text: its tables are in two places while they grow.
BODY_FACTOR, WHOLE_FACTOR = 64, 92
# So many of the longest bodies may arrive and wait at once. One client's bodies may take up to
# CLIENT_SHARE times as many bytes as they leave free for other clients.
KEPT, CLIENT_SHARE = 8, 3
# An entry of a request's state: its answer may wait for its client for longer than others.
PACES_ITSELF = "paces_itself"
# An entry of a request's state: the name of its client, a digest of its key or an address.
CLIENT = "client"
# What is freed goes back to the system from this length on.
RETURN_FROM_BYTES = 2**19
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# A text without messages is compared with others in pieces of so many characters.
_PIECE_CHARS = 64
_SHARED = ("system", "developer")


@dataclass(eq=False)
class Ticket:
    """A request's place in the line. turn is done when it may run, or fails with a Refusal if
    another client takes the place. client: who asks, a key or an address."""

    places: int
    cells: int
    client: str
    turn: asyncio.Future[None]


class Gate:
    """Lets requests in, each with the places and the part of the context that it takes.

    Clients take turns: each client's requests run in their order, and after one of them the other
    clients that wait come first. If the queue is full, a client with fewer waiting requests gets
    the place of the last request of the client with the most.

    running: requests now; refused: requests that the queue had no place for, since the start.
    """

    def __init__(self, places: int, queue: int) -> None:
        """places: answers at once; queue: requests that may wait."""
        self.places, self.queue = places, queue
        self.running = self.refused = 0
        self._free, self._cells = places, 0
        # By client, the one whose turn is next first. No line is empty.
        self._lines: dict[str, deque[Ticket]] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._lines.values()))

    @property
    def is_empty(self) -> bool:
        """Whether no request runs or waits."""
        return not (self.running or self._lines)

    def open(self, cells: int) -> None:
        """Sets how many cells the shared context has."""
        self._cells = cells

    def join(self, places: int = 1, cells: int = 0, client: str = "") -> Ticket:
        """Returns a place in the line, whose turn may come at once. cells: of the context, for the
        prompt and its answers. Raises Refusal if the queue is full, and ValueError for more places
        than there are."""
        if not 1 <= places <= self.places:
            raise ValueError(f"{places} places of {self.places}")
        ticket = Ticket(places, cells, client, asyncio.get_running_loop().create_future())
        if (self._lines or not self._fits(ticket)) and self.waiting >= self.queue:
            self.refused += 1
            self._make_place(client)
        self._lines.setdefault(client, deque()).append(ticket)
        self._call_next()
        return ticket

    def _make_place(self, client: str) -> None:
        """Takes the last place of the client with the most waiting requests for another client.
        Raises Refusal if that would not be fair."""
        full = Refusal(429, "too many requests wait already (--queue): try again later")
        longest = max(self._lines.values(), key=len, default=deque())
        if len(longest) <= len(self._lines.get(client, ())) + 1:
            raise full
        last = longest[-1]
        self._remove(last)
        last.turn.set_exception(full)

    def widen(self, ticket: Ticket, cells: int) -> bool:
        """Gives a running request more of the context, until it leaves; False if there is no
        more."""
        more = max(0, cells - ticket.cells)
        if more > self._cells:
            return False
        self._cells -= more
        ticket.cells += more
        return True

    def _fits(self, ticket: Ticket) -> bool:
        return ticket.places <= self._free and (ticket.cells <= self._cells or not self.running)

    def leave(self, ticket: Ticket) -> None:
        """Gives a place back, at any time, once."""
        turn = ticket.turn
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.running -= 1
            self._free += ticket.places
            self._cells += ticket.cells
        elif not turn.done():
            self._remove(ticket)
            turn.cancel()
        self._call_next()

    def _remove(self, ticket: Ticket) -> None:
        line = self._lines[ticket.client]
        line.remove(ticket)
        if not line:
            del self._lines[ticket.client]

    def _call_next(self) -> None:
        while self._lines:
            client, line = next(iter(self._lines.items()))
            if not self._fits(line[0]):
                return
            ticket = line.popleft()
            del self._lines[client]
            if line:
                self._lines[client] = line  # after the others
            self._free -= ticket.places
            self._cells -= ticket.cells
            self.running += 1
            ticket.turn.set_result(None)


class Unread:
    """Answers that are made and that their clients have not taken, in memory: n_bytes of them."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: beyond it the answer that waits the longest is given up, but never the last
        one."""
        self.n_bytes = 0
        self._most_bytes = most_bytes
        self._kept: dict[object, tuple[int, Callable[[], None]]] = {}

    def keep(self, owner: object, n_bytes: int, give_up: Callable[[], None]) -> None:
        """owner calls leave once its client has taken all, or is gone."""
        self._kept[owner] = n_bytes, give_up
        self.n_bytes += n_bytes
        while self.n_bytes > self._most_bytes and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            _, give_up = self._kept[oldest]
            self.leave(oldest)
            give_up()

    def leave(self, owner: object) -> None:
        n_bytes, _ = self._kept.pop(owner, (0, None))
        self.n_bytes -= n_bytes


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


def conversations_of(data: dict[str, Any], most: int) -> list[Conversation]:
    """What a request goes on from, for each sequence that it takes: one for each of its prompts,
    `most` of them at most; or for one prompt one for each of its answers."""
    n = data.get("n_cmpl", data.get("n", 1))  # in llama.cpp's order
    messages = data.get("messages", data.get("input"))
    if messages is not None:
        return [_of_messages(messages, data)] + [Conversation()] * (n - 1)
    prompt = data.get("prompt", data.get("input_prefix"))
    is_one = not isinstance(prompt, list) or any(isinstance(each, int) for each in prompt)
    if n > 1 or is_one or not prompt:
        return [_of_text(prompt)] + [Conversation()] * (n - 1)
    return [_of_text(each) if len(prompt) <= most else Conversation() for each in prompt[:most]]


def _of_text(prompt: Any) -> Conversation:
    if not isinstance(prompt, (str, list)):
        return Conversation()
    cut = range(0, len(prompt), _PIECE_CHARS)
    return Conversation(_digests(prompt[at : at + _PIECE_CHARS] for at in cut))


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
    cells: int = 0


class Seats:
    """The sequences of one server, each with the conversation that it was last given. Who takes
    gives back what it got, by leave, once, and takes no more than the gate has places.

    Left to itself, llama.cpp gives a request the idle sequence whose tokens begin most like it,
    from a tenth of the prompt on, and writes over what follows there. Conversations with one system
    prompt so take each other's place, even while another sequence is free. Here a request gets the
    sequence that holds its own conversation, and any other one gets the sequence that was used the
    longest ago. What conversations have in common is then read once for each sequence, and no more.
    """

    def __init__(self, n: int) -> None:
        self._seats = [_Seat() for _ in range(n)]
        self._n_taken = 0

    def take(self, asked: Iterable[Conversation], cells: int = 0) -> tuple[list[int], int]:
        """A sequence for each of these, and how many cells of the context they may still hold,
        which stay until a prompt begins there. cells: that the request may leave behind."""
        taken, held = [], 0
        for each in asked:
            number = max(
                (number for number, seat in enumerate(self._seats) if not seat.busy),
                key=lambda at: (each.goes_on(self._seats[at].holds), -self._seats[at].last),
            )
            taken.append(number)
            held += self._seats[number].cells
            self._n_taken += 1
            self._seats[number] = _Seat(each, True, self._n_taken, cells)
        return taken, held

    def leave(self, taken: Iterable[int]) -> None:
        for number in taken:
            self._seats[number].busy = False


def client_left() -> Refusal:
    """Return the refusal of a request whose client has left. Its status, nginx's, is for the
    log."""
    return Refusal(499, "the client has left")


async def outlasting(work: asyncio.Future[T], give_up: Callable[[], None] = lambda: None) -> T:
    """Return the result of work on a thread. If the caller is cancelled, wait for the work to end
    all the same, because its memory is in use until then. give_up: asks the work to end soon."""
    try:
        return await asyncio.shield(work)
    finally:
        if not work.done():
            give_up()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # nobody else asks for it where this was cancelled


def bodies_bytes(longest_bytes: int, parallel: int, factor: int) -> int:
    """What bodies take together: those that arrive and wait, one that is looked at, and those of
    the answers that decode. factor: what reading one takes for each byte of the longest."""
    return longest_bytes * (KEPT + factor * (1 + parallel))


class Bodies:
    """The bodies of all requests of a server.

    A body counts once, from its first byte until its turn. Working with a body takes many times
    its length. So one thread at a time works with a body before its turn, for the clients in turn.
    After that, as many bodies are in memory as requests are answered at once.

    kept_bytes: bytes of bodies that arrive or wait; refused: bodies without free space, since the
    start.
    """

    def __init__(self, workers: Executor, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """workers: runs the work with bodies; is_stopping: whether the server ends."""
        self.kept_bytes = self.refused = 0
        self.is_stopping = is_stopping
        self._workers = workers
        self._of_client: Counter[str] = Counter()  # kept bytes
        self._line = Gate(places=1, queue=sys.maxsize)

    @property
    def waiting(self) -> int:
        """Bodies that wait for the thread."""
        return self._line.waiting

    def keep(self, n_bytes: int, client: str, most_bytes: int) -> None:
        """Add n_bytes to the kept bytes of a client, or remove them if negative. most_bytes: of
        all clients. Raises Refusal if there is no space; waiting for space would let a client that
        sends nothing hold up the others."""
        total, own = self.kept_bytes + n_bytes, self._of_client[client] + n_bytes
        if n_bytes > 0 and own > CLIENT_SHARE * (most_bytes - total):
            self.refused += 1
            raise Refusal(503, "other requests take the memory for requests: try again later")
        self.kept_bytes = total
        self._of_client[client] = own
        if not own:
            del self._of_client[client]

    async def run(
        self, call: Callable[[], T], client: str, give_up: Callable[[], None] = lambda: None
    ) -> T:
        """Return the result of call, which works with one body on a thread, at the client's turn.

        If this is cancelled before the turn, call never runs. If it is cancelled later, give_up
        asks call to end soon, and this ends after it.
        """
        ticket = self._line.join(client=client)
        try:
            await asyncio.wait({ticket.turn})  # unlike await, never cancels the turn
            loop = asyncio.get_running_loop()
            return await outlasting(loop.run_in_executor(self._workers, call), give_up)
        finally:
            self._line.leave(ticket)


class Body:
    """The body of one request. data: its bytes, until its turn. The owner calls take at the end."""

    def __init__(self, bodies: Bodies, longest_bytes: int, client: str = "") -> None:
        """longest_bytes: of the body of any request; client: a key or an address."""
        self.data = b""
        self._asking: Asked | None = None  # what a thread asks the native server
        self._is_given_up, self._lock = False, threading.Lock()
        self._bodies, self._most_bytes, self._client = bodies, KEPT * longest_bytes, client
        self._n_bytes = 0

    def count(self, n_bytes: int) -> None:
        """Set the length of the body so far. Raises Refusal if there is no space for it."""
        self._bodies.keep(n_bytes - self._n_bytes, self._client, self._most_bytes)
        self._n_bytes = n_bytes

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of call, which works with this body on a thread, at its client's turn.
        If this is cancelled, what call asks the native server is given up."""
        return await self._bodies.run(call, self._client, self.give_up)

    def ask(self, runtime: Asks, route: str, text: bytes) -> tuple[int, bytes]:
        """Ask the native server something that decodes nothing, such as the length of a prompt.
        Return (status, answer). Blocks; give_up ends it soon. Raises Refusal after give_up, and if
        the server ends, because the answer may then be an error or empty."""
        request = runtime.query(route, text)
        with self._lock:
            if self._is_given_up:
                request.close()
                raise client_left()
            self._asking = request
        try:
            answer = request.whole()
        finally:
            with self._lock:
                self._asking = None
        if self._bodies.is_stopping():
            raise STOPPING
        return answer

    def give_up(self) -> None:
        """End what a thread asks the native server for this body."""
        with self._lock:
            self._is_given_up = True
            if self._asking is not None:
                self._asking.cancel()

    def take(self) -> bytes:
        """Return the bytes at the turn of the request. They no longer count as kept."""
        data, self.data = self.data, b""
        self.count(0)
        return data


def return_memory() -> None:
    """Lets the allocator (glibc) give memory back as soon as it is freed. Left to itself it keeps
    what is free at the end of a thread's arena, up to 64 MiB for each thread, and `malloc_trim`
    leaves that where it is."""
    with suppress(AttributeError, OSError):
        allocator = ctypes.CDLL(None)
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            allocator.mallopt(option, RETURN_FROM_BYTES)
