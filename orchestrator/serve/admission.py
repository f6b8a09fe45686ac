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

from orchestrator.runtime.answering import IMAGE_FACTOR
from orchestrator.serve.wire import STOPPING, Refusal

T = TypeVar("T")


class NativeQuery(Protocol):
    """The interface of a query to llama.cpp's server that can be cancelled.

    NativeRequest has this interface.
    """

    def whole(self) -> tuple[int, bytes]:
        """Wait for the complete answer, and return (HTTP status, answer)."""
        ...

    def cancel(self) -> None:
        """End the query soon, and return at once. Any thread may call this."""
        ...

    def close(self) -> None:
        """Free the query after its answer is no longer needed."""
        ...


class QuerySender(Protocol):
    """The interface of an object that sends queries to llama.cpp's server, such as Runtime.

    The queries generate no tokens.
    """

    def query(self, route: str, body: bytes = b"") -> NativeQuery:
        """Send a query to a path of llama.cpp's server, without waiting for the answer."""
        ...


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
# The same for the images in bodies: how many bodies with the longest images.
KEPT_IMAGES = 2
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
    """A request in the queue of `Gate`, with the resources that it reserves.

    - places: the number of answers to the request. `Gate` limits how many answers run at once.
    - cells: the number of KV cells for the prompt and the answers.
    - client: the sender of the request: a digest of its API key, or its address.
    - turn: a future that completes when the request may run. It fails with Refusal (an error
      response) if another client's request displaces this one from a full queue.
    """

    places: int
    cells: int
    client: str
    turn: asyncio.Future[None]


class Gate:
    """Limits how many requests are answered at once, and queues the other requests.

    Each request reserves places (one for each of its answers) and KV cells of the shared context.
    Clients take turns, and each client's requests run in the order of their arrival. If the queue
    is full, a new request may replace the last request of the client with the most waiting
    requests.

    `running` is the number of requests that are being answered. `refused` counts the requests that
    found the queue full since the start.
    """

    def __init__(self, places: int, queue: int) -> None:
        """Create a gate for `places` answers at once and at most `queue` waiting requests."""
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
        """Set the number of KV cells that requests can reserve: the size of the shared context.

        Call this after a model was loaded. Requests that wait are not started by this call.
        """
        self._cells = cells

    def join(self, places: int = 1, cells: int = 0, client: str = "") -> Ticket:
        """Put a request into the queue and return its ticket.

        The future `turn` of the ticket completes when the request may run, possibly at once.
        `places` is the number of answers to the request, and `cells` the number of KV cells for its
        prompt and its answers. `client` names the sender.

        Raises Refusal (an error response) if the queue is full. Raises ValueError if `places`
        exceeds the number of answers that the gate allows at once.
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
        """Drop the last request of the client with the most waiting requests, to make space.

        The space is for a request of `client`. Raises Refusal (an error response) unless the other
        client has at least two more waiting requests than `client`.
        """
        full = Refusal(429, "too many requests wait already (--queue): try again later")
        longest = max(self._lines.values(), key=len, default=deque())
        if len(longest) <= len(self._lines.get(client, ())) + 1:
            raise full
        last = longest[-1]
        self._remove(last)
        last.turn.set_exception(full)

    def widen(self, ticket: Ticket, cells: int) -> bool:
        """Raise the number of KV cells that a running request reserves to `cells`.

        The larger reservation lasts until the request ends. Returns False and changes nothing if
        the context has too few free cells.
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
        """End a request: free its reservation, or remove it from the queue.

        Call this exactly once for each ticket.
        """
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
    """Limits the memory for computed answers that slow clients have not read yet.

    `n_bytes` is the total length of these answers.
    """

    def __init__(self, most_bytes: int) -> None:
        """Set the limit.

        If the unread answers take more than `most_bytes` in total, the oldest are dropped. The last
        remaining answer is kept, however long it is.
        """
        self.n_bytes = 0
        self._most_bytes = most_bytes
        self._kept: dict[object, tuple[int, Callable[[], None]]] = {}

    def keep(self, owner: object, n_bytes: int, give_up: Callable[[], None]) -> None:
        """Count n_bytes of an unread answer, and drop older answers if the limit is exceeded.

        `owner` is any object that identifies the answer. Call `leave` with it when the client has
        read everything or has disconnected. `give_up` is called if this answer is dropped.
        """
        self._kept[owner] = n_bytes, give_up
        self.n_bytes += n_bytes
        while self.n_bytes > self._most_bytes and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            _, give_up = self._kept[oldest]
            self.leave(oldest)
            give_up()

    def leave(self, owner: object) -> None:
        """Stop counting an answer towards the memory limit, for example after it was read.

        `owner` identifies the answer, as in `keep`. An unknown owner is ignored.
        """
        n_bytes, _ = self._kept.pop(owner, (0, None))
        self.n_bytes -= n_bytes


@dataclass(frozen=True)
class Conversation:
    """The digests of a request's text, to find earlier requests that begin with the same text.

    Each digest in `pieces` stands for a message, or for a fixed number of characters or tokens of a
    prompt. The first `n_common` digests stand for tools and system messages, which different
    conversations may share.
    """

    pieces: tuple[bytes, ...] = ()
    n_common: int = 0

    def n_shared_with(self, before: Conversation) -> int:
        """Return how many digests at the start of this and of an earlier conversation are equal.

        A digest stands for a message, or for a piece of a prompt. `before` is the earlier
        conversation. The result is 0 if this conversation does not continue it. To continue it, a
        conversation must meet two conditions:

        - It begins with all digests of `before`, except perhaps the last.
        - The equal digests include more than tools and system messages.
        """
        shared = 0
        for ours, theirs in zip(self.pieces, before.pieces, strict=False):
            if ours != theirs:
                break
            shared += 1
        enough = max(self.n_common + 1, len(before.pieces) - 1)
        return shared if shared >= enough else 0


def conversations_of(data: dict[str, Any], most: int) -> list[Conversation]:
    """Return a list with one Conversation for each of llama.cpp's sequences that a request uses.

    A Conversation has digests (hashes) of the successive pieces of one prompt. With them,
    `SlotManager` finds a sequence that already holds the beginning of the prompt. In two cases, a
    Conversation has no digests and can use any sequence:

    - If one prompt gets several answers, each uses a sequence. Only the first Conversation has
      digests.
    - If the request has more prompts than `most`, the prompts share the sequences. The result is
      then `most` Conversations without digests.

    `data` is the request, and `most` the number of sequences.
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
    """Chooses the slots of llama.cpp's server (one slot is one sequence) that answer a request.

    A request gets the slot that holds the beginning of its conversation, otherwise the least
    recently used slot. The caller must return its slots with `leave`, and may not take more slots
    than are free.

    llama.cpp alone would choose the idle slot with the longest common prefix. Conversations with
    the same system prompt would then evict each other even while another slot is free.
    """

    def __init__(self, n: int) -> None:
        self._slots = [_Slot() for _ in range(n)]
        self._n_taken = 0

    def take(self, asked: Iterable[Conversation], cells: int = 0) -> tuple[list[int], int]:
        """Take a free slot for each conversation. Return (slot numbers, number of old KV cells).

        A slot is a sequence of llama.cpp's server. After a request has ended, its KV cells stay in
        its slots as old cells. The second result is an upper bound of the old cells in all taken
        slots together.

        `asked` are the conversations. `cells` is the maximum number of KV cells that the new
        request will leave in each slot. The slot's next request gets them as old cells.
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
        """Mark slots as free again, after the request that took them has ended."""
        for number in taken:
            self._slots[number].busy = False


def client_left() -> Refusal:
    """Return the error response for a request whose client has disconnected.

    Its status is 499, as in nginx, and appears only in the log.
    """
    return Refusal(499, "the client has left")


async def finish_despite_cancel(
    work: asyncio.Future[T], give_up: Callable[[], None] = lambda: None
) -> T:
    """Wait for work that runs on a thread, and return its result.

    If the caller is cancelled, `give_up` is called to end the work soon. CancelledError is raised
    only after the work has ended, because the work uses the request's memory.
    """
    try:
        return await asyncio.shield(work)
    finally:
        if not work.done():
            give_up()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # marks it as retrieved, in case this coroutine was cancelled


def bodies_bytes(longest_bytes: int, parallel: int, factor: int, image_bytes: int = 0) -> int:
    """Return the memory to reserve for the bodies of all HTTP requests together, in bytes.

    It is enough for the bodies that arrive or wait, for a body that is being parsed, and for the
    bodies of `parallel` running answers.

    `longest_bytes` is the length of the longest allowed body without its images, and `image_bytes`
    the largest allowed length of its images. `factor` is the memory for parsing and tokenizing
    text, in bytes for each byte of the body.
    """
    images_bytes = image_bytes * (KEPT_IMAGES + IMAGE_FACTOR * (1 + parallel))
    return longest_bytes * (KEPT + factor * (1 + parallel)) + images_bytes


class Bodies:
    """Limits the memory for the bodies of all requests.

    A body is counted from its first byte until its request may run. Only one thread parses and
    tokenizes bodies, because this takes many times the memory of a body. Clients take turns on that
    thread.

    `kept_bytes` is the total length of the counted bodies. `refused` is the number of bodies that
    were refused since the start, because too little memory was free.
    """

    def __init__(self, workers: Executor, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Create an object that counts no bodies yet.

        `workers` parses the bodies; `is_stopping` tells whether the server is shutting down.
        """
        self.kept_bytes = self.refused = 0
        self.is_stopping = is_stopping
        self._workers = workers
        self._of_client: Counter[str] = Counter()  # kept bytes
        self._line = Gate(places=1, queue=sys.maxsize)

    @property
    def waiting(self) -> int:
        """Number of bodies that wait for the thread that parses them."""
        return self._line.waiting

    def keep(self, n_bytes: int, client: str, most_bytes: int) -> None:
        """Reserve n_bytes more memory for the bodies of a client's HTTP requests.

        A negative n_bytes frees memory. `client` names the sender of the requests. `most_bytes` is
        the limit for the bodies of all clients together. Raises Refusal (an error response) if too
        little memory is free for this client.
        """
        total, own = self.kept_bytes + n_bytes, self._of_client[client] + n_bytes
        if n_bytes > 0 and own > CLIENT_SHARE * (most_bytes - total):
            self.refused += 1
            raise Refusal(503, "the memory for requests is full: try again later")
        self.kept_bytes = total
        self._of_client[client] = own
        if not own:
            del self._of_client[client]

    async def run(
        self, call: Callable[[], T], client: str, give_up: Callable[[], None] = lambda: None
    ) -> T:
        """Run `call` on the thread that parses the bodies of requests, and return its result.

        `client` names the sender of the body that `call` parses. Clients that wait for the thread
        take turns.

        If the caller is cancelled before `call` starts, `call` never runs. If the caller is
        cancelled while `call` runs, this method calls `give_up`, which should make `call` end soon,
        and waits for its end.
        """
        ticket = self._line.join(client=client)
        try:
            await asyncio.wait({ticket.turn})  # unlike await, never cancels the turn
            loop = asyncio.get_running_loop()
            return await finish_despite_cancel(loop.run_in_executor(self._workers, call), give_up)
        finally:
            self._line.leave(ticket)


class Body:
    """The body of one HTTP request. Its memory counts towards the limit that `Bodies` enforces.

    `data` holds the bytes of the body. When the request may run, `take` returns them and frees the
    memory. The owner must also call `take` if the request fails before, because nothing else frees
    the memory.
    """

    def __init__(
        self, bodies: Bodies, longest_bytes: int, client: str = "", image_bytes: int = 0
    ) -> None:
        """Create the empty body of one request.

        longest_bytes is the longest allowed body without its images, and image_bytes the largest
        allowed length of its images. `client` names the sender: a digest of its API key, or its
        address.
        """
        self.data = b""
        self._asking: NativeQuery | None = None  # the query that a thread waits for
        self._is_given_up, self._lock = False, threading.Lock()
        self._bodies, self._client = bodies, client
        self._most_bytes = KEPT * longest_bytes + KEPT_IMAGES * image_bytes
        self._n_bytes = 0

    def count(self, n_bytes: int) -> None:
        """Record that the body takes n_bytes of memory so far.

        Raises Refusal (an error response) if too little memory is free.
        """
        self._bodies.keep(n_bytes - self._n_bytes, self._client, self._most_bytes)
        self._n_bytes = n_bytes

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call`, which parses this body, on the parsing thread, and return its result.

        One thread parses the bodies of all requests, and clients take turns. `call` may send
        queries to llama.cpp's server with the method `ask` of this body. If the caller of `run` is
        cancelled, the current query of `call` is cancelled, and `run` waits until `call` has ended.
        """
        return await self._bodies.run(call, self._client, self.give_up)

    def ask(self, runtime: QuerySender, route: str, text: bytes) -> tuple[int, bytes]:
        """Send llama.cpp's server a query that generates no tokens. Return (HTTP status, answer).

        Blocks until the answer is complete; another thread can end the wait with `give_up`. Raises
        Refusal (an error response) after `give_up` and during shutdown, because the answer may then
        be incomplete.
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
        """Cancel the query to llama.cpp's server that `ask` waits for, if there is one.

        Thread-safe.
        """
        with self._lock:
            self._is_given_up = True
            if self._asking is not None:
                self._asking.cancel()

    def take(self) -> bytes:
        """Return the bytes of the body, and free its memory. Later calls return an empty body."""
        data, self.data = self.data, b""
        self.count(0)
        return data


def return_memory() -> None:
    """Make glibc's allocator return freed memory to the operating system at once.

    By default the allocator keeps free memory at the end of each thread's arena, up to 64 MiB for
    each thread. `malloc_trim` does not release that memory. With another C library this function
    does nothing.
    """
    with suppress(AttributeError, OSError):
        allocator = ctypes.CDLL(None)
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            allocator.mallopt(option, RETURN_FROM_BYTES)
