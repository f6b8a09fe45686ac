"""Admission control of the server: queues, slots, memory for request bodies, unread answers.

All objects of this module belong to one event loop and are not thread-safe, unless a docstring says
otherwise.
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


class NativeQuery(Protocol):
    """A running query to the native server, such as `NativeRequest`."""

    def whole(self) -> tuple[int, bytes]: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class QuerySender(Protocol):
    """Sends queries that decode nothing to the native server, such as `Runtime`."""

    def query(self, route: str, body: bytes = b"") -> NativeQuery: ...


# Memory for computed answers that their clients have not read yet.
UNREAD_BYTES = 4 * 2**20
# Memory for the token probabilities of each answer.
PROBS_BYTES = 5 << 20
# Peak memory for reading a body, in bytes for each byte of the longest allowed body. It includes
# the tokens and llama.cpp's objects. Prose and code take 25 to 50; `orchestrator.serve.requests`
# refuses a body that would take more than BODY_FACTOR. A tokenizer that merges across the whole
# text (SentencePiece) takes 45 to 70, and at most 91, because its tables are copied while they
# grow.
BODY_FACTOR, WHOLE_FACTOR = 64, 92
# KEPT: how many bodies of the longest length may arrive or wait at the same time. The bodies of one
# client may take up to CLIENT_SHARE times as many bytes as they leave free for other clients.
KEPT, CLIENT_SHARE = 8, 3
# Key in a request's scope state: the endpoint sets its own time limits for a slow client.
PACES_ITSELF = "paces_itself"
# Key in a request's scope state: the name of its client, a digest of its key or an address.
CLIENT = "client"
# Freed blocks of at least this length return to the operating system.
RETURN_FROM_BYTES = 2**19
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# A prompt without messages is compared in pieces of this many characters or tokens.
_PIECE_CHARS = 64
_SHARED = ("system", "developer")


@dataclass(eq=False)
class Ticket:
    """A request's place in the queue.

    turn: completes when the request may run. It fails with Refusal if another client displaces the
    request. client: the name of the client, a key or an address.
    """

    places: int
    cells: int
    client: str
    turn: asyncio.Future[None]


class Gate:
    """Admits requests. Each request reserves places (answers at once) and cells of the context.

    Clients take turns: the requests of one client run in order, and after each of them the other
    waiting clients come first. If the queue is full, a client with fewer waiting requests displaces
    the last request of the client with the most.

    running: number of admitted requests. refused: number of requests that found the queue full,
    since the start.
    """

    def __init__(self, places: int, queue: int) -> None:
        """places: how many answers may run at once. queue: how many requests may wait."""
        self.places, self.queue = places, queue
        self.running = self.refused = 0
        self._free, self._cells = places, 0
        # Keyed by client, in the order of their turns. No queue in it is empty.
        self._lines: dict[str, deque[Ticket]] = {}

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their turn."""
        return sum(map(len, self._lines.values()))

    @property
    def is_empty(self) -> bool:
        """Whether no request runs and no request waits."""
        return not (self.running or self._lines)

    def open(self, cells: int) -> None:
        """Set the number of cells in the shared context."""
        self._cells = cells

    def join(self, places: int = 1, cells: int = 0, client: str = "") -> Ticket:
        """Return a new place in the queue. Its turn may come at once.

        cells: KV cells to reserve for the prompt and its answers. Raises Refusal if the queue is
        full, and ValueError if the gate has fewer places in total.
        """
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
        """Remove the last request of the client with the most waiting requests.

        Raises Refusal unless that client has at least two waiting requests more than `client`.
        """
        full = Refusal(429, "too many requests wait already (--queue): try again later")
        longest = max(self._lines.values(), key=len, default=deque())
        if len(longest) <= len(self._lines.get(client, ())) + 1:
            raise full
        last = longest[-1]
        self._remove(last)
        last.turn.set_exception(full)

    def widen(self, ticket: Ticket, cells: int) -> bool:
        """Raise the reservation of a running request to `cells`, until it leaves.

        Returns False, without a change, if the context has too few free cells.
        """
        more = max(0, cells - ticket.cells)
        if more > self._cells:
            return False
        self._cells -= more
        ticket.cells += more
        return True

    def _fits(self, ticket: Ticket) -> bool:
        return ticket.places <= self._free and (ticket.cells <= self._cells or not self.running)

    def leave(self, ticket: Ticket) -> None:
        """Return a request's reservation, or remove it from the queue. Call this exactly once."""
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
                self._lines[client] = line  # moves the client to the end
            self._free -= ticket.places
            self._cells -= ticket.cells
            self.running += 1
            ticket.turn.set_result(None)


class UnreadAnswers:
    """Computed answers that wait in memory for slow clients. n_bytes: their total length."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: above this total, the oldest answers are dropped, except the last one."""
        self.n_bytes = 0
        self._most_bytes = most_bytes
        self._kept: dict[object, tuple[int, Callable[[], None]]] = {}

    def keep(self, owner: object, n_bytes: int, give_up: Callable[[], None]) -> None:
        """Register n_bytes of an unread answer. give_up: called if the answer is dropped.

        owner: identifies the answer. Call `leave` with it when the client has read everything or
        has disconnected.
        """
        self._kept[owner] = n_bytes, give_up
        self.n_bytes += n_bytes
        while self.n_bytes > self._most_bytes and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            _, give_up = self._kept[oldest]
            self.leave(oldest)
            give_up()

    def leave(self, owner: object) -> None:
        """Forget an answer. Unknown owners are ignored."""
        n_bytes, _ = self._kept.pop(owner, (0, None))
        self.n_bytes -= n_bytes


@dataclass(frozen=True)
class Conversation:
    """A request, cut into pieces that are compared by their digests.

    n_common: the number of leading pieces that different conversations may share, because they hold
    tools and system messages.
    """

    pieces: tuple[bytes, ...] = ()
    n_common: int = 0

    def n_shared_with(self, before: Conversation) -> int:
        """Return the number of leading pieces shared with `before` if this continues it, else 0.

        A request continues `before` if it appends to it, repeats it, or replaces its last piece.
        """
        shared = 0
        for ours, theirs in zip(self.pieces, before.pieces, strict=False):
            if ours != theirs:
                break
            shared += 1
        enough = max(self.n_common + 1, len(before.pieces) - 1)
        return shared if shared >= enough else 0


def conversations_of(data: dict[str, Any], most: int) -> list[Conversation]:
    """Return one conversation for each sequence that a request needs.

    A request with several prompts needs one sequence for each, up to `most`. A request with one
    prompt and `n` answers needs n; all except the first get an empty conversation.
    """
    n = data.get("n_cmpl", data.get("n", 1))  # llama.cpp prefers n_cmpl, too
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
class _Slot:
    holds: Conversation = field(default_factory=Conversation)
    busy: bool = False
    last: int = 0
    cells: int = 0


class SlotManager:
    """Assigns requests to the slots of the native server (one slot is one sequence).

    Each slot remembers the conversation that it was last given. A caller takes at most as many
    slots as the gate has places, and returns them with `leave`, once.

    llama.cpp alone would choose the idle slot with the longest common prefix (from a tenth of the
    prompt on) and overwrite the rest of its cells. Conversations with the same system prompt would
    then evict each other even while another slot is free. Here a request gets the slot that holds
    its own conversation; otherwise it gets the least recently used slot. So each slot reads a
    shared prefix only once.
    """

    def __init__(self, n: int) -> None:
        self._slots = [_Slot() for _ in range(n)]
        self._n_taken = 0

    def take(self, asked: Iterable[Conversation], cells: int = 0) -> tuple[list[int], int]:
        """Return one slot for each conversation, and how many KV cells these slots still hold.

        The old cells stay allocated until a prompt starts in the slot. cells: how many cells the
        request may leave in its slots.
        """
        taken, held = [], 0
        for each in asked:
            number = max(
                (number for number, slot in enumerate(self._slots) if not slot.busy),
                key=lambda at: (each.n_shared_with(self._slots[at].holds), -self._slots[at].last),
            )
            taken.append(number)
            held += self._slots[number].cells
            self._n_taken += 1
            self._slots[number] = _Slot(each, True, self._n_taken, cells)
        return taken, held

    def leave(self, taken: Iterable[int]) -> None:
        """Mark the slots as idle."""
        for number in taken:
            self._slots[number].busy = False


def client_left() -> Refusal:
    """Return the refusal for a request whose client has disconnected.

    499 is nginx's status for this; only the log shows it.
    """
    return Refusal(499, "the client has left")


async def finish_despite_cancel(
    work: asyncio.Future[T], give_up: Callable[[], None] = lambda: None
) -> T:
    """Return the result of work that runs on a thread.

    If the caller is cancelled, this still waits for the end of the work, because the work uses the
    request's memory until then. give_up: asks the work to end soon.
    """
    try:
        return await asyncio.shield(work)
    finally:
        if not work.done():
            give_up()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # marks it as retrieved, in case this coroutine was cancelled


def bodies_bytes(longest_bytes: int, parallel: int, factor: int) -> int:
    """Return the peak memory of all request bodies, in bytes.

    That is bodies that arrive or wait, one that is being read, and those of `parallel` answers.
    factor: peak memory for reading one body, for each byte of the longest body.
    """
    return longest_bytes * (KEPT + factor * (1 + parallel))


class Bodies:
    """Memory accounting for the bodies of all requests.

    A body counts from its first byte until the turn of its request. Reading a body takes many times
    its length, so only one thread reads bodies before their turn, and clients take turns on it.
    After that, at most as many bodies are in memory as requests are answered at once.

    kept_bytes: total length of the bodies that arrive or wait. refused: number of bodies that found
    no free memory, since the start.
    """

    def __init__(self, workers: Executor, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """workers: runs the reading of bodies. is_stopping: whether the server is shutting down."""
        self.kept_bytes = self.refused = 0
        self.is_stopping = is_stopping
        self._workers = workers
        self._of_client: Counter[str] = Counter()  # kept bytes
        self._line = Gate(places=1, queue=sys.maxsize)

    @property
    def waiting(self) -> int:
        """Number of bodies that wait for the reading thread."""
        return self._line.waiting

    def keep(self, n_bytes: int, client: str, most_bytes: int) -> None:
        """Add n_bytes to the kept bytes of a client, or remove them if negative.

        most_bytes: the limit for all clients together. Raises Refusal if there is not enough free
        memory. It does not wait for memory, because then a client that sends nothing could block
        the others.
        """
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
        """Run `call` on a thread at the client's turn, and return its result.

        `call` reads one body.

        If this is cancelled before the turn, `call` never runs. If it is cancelled later, give_up
        asks `call` to end soon, and this method returns after that.
        """
        ticket = self._line.join(client=client)
        try:
            await asyncio.wait({ticket.turn})  # unlike await, never cancels the turn
            loop = asyncio.get_running_loop()
            return await finish_despite_cancel(loop.run_in_executor(self._workers, call), give_up)
        finally:
            self._line.leave(ticket)


class Body:
    """The body of one request.

    data: its bytes, until the turn of the request. The owner calls `take` at the end in any case.
    """

    def __init__(self, bodies: Bodies, longest_bytes: int, client: str = "") -> None:
        """longest_bytes: the longest allowed body. client: a key or an address."""
        self.data = b""
        self._asking: NativeQuery | None = None  # the query that a thread waits for
        self._is_given_up, self._lock = False, threading.Lock()
        self._bodies, self._most_bytes, self._client = bodies, KEPT * longest_bytes, client
        self._n_bytes = 0

    def count(self, n_bytes: int) -> None:
        """Set the length of the body so far. Raises Refusal if there is no space for it."""
        self._bodies.keep(n_bytes - self._n_bytes, self._client, self._most_bytes)
        self._n_bytes = n_bytes

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call`, which reads this body, on a thread at its client's turn. Return its result.

        If this is cancelled, a native query that `call` waits for is cancelled too.
        """
        return await self._bodies.run(call, self._client, self.give_up)

    def ask(self, runtime: QuerySender, route: str, text: bytes) -> tuple[int, bytes]:
        """Send the native server a query that decodes nothing, such as the length of a prompt.

        Returns (HTTP status, answer). Blocks; `give_up`, from another thread, ends the wait. Raises
        Refusal after `give_up`, and during shutdown, because the answer may then be incomplete.
        """
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
        """Cancel the native query for this body, if one is running. Thread-safe."""
        with self._lock:
            self._is_given_up = True
            if self._asking is not None:
                self._asking.cancel()

    def take(self) -> bytes:
        """Return the bytes, and stop counting them. Later calls return an empty body."""
        data, self.data = self.data, b""
        self.count(0)
        return data


def return_memory() -> None:
    """Make glibc's allocator return freed memory to the operating system at once.

    By default it keeps free memory at the end of each thread's arena, up to 64 MiB for each thread,
    and `malloc_trim` does not release that. Does nothing with another C library.
    """
    with suppress(AttributeError, OSError):
        allocator = ctypes.CDLL(None)
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            allocator.mallopt(option, RETURN_FROM_BYTES)
