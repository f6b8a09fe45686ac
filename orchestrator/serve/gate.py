"""Who is answered at once, who waits, and who is refused."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class TooMany(Exception):
    """The queue is full."""


class Ticket:
    """A request's place in the line. turn is done when it may run; leave gives the place back, at
    any time, and has to be called once."""

    def __init__(self, gate: Gate, places: int) -> None:
        self.places = places
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gate = gate

    def leave(self) -> None:
        self._gate._leave(self)


class Gate:
    """Lets requests in by their order, each with as many places as it takes. Of one event loop.

    running: requests now; refused: those that the queue had no room for, ever.
    """

    def __init__(self, places: int, queue: int) -> None:
        """places: answers at once; queue: requests that may wait."""
        self.places, self.queue = places, queue
        self.running = self.refused = 0
        self._free = places
        self._line: deque[Ticket] = deque()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def join(self, places: int = 1) -> Ticket:
        """A place in the line, of which its turn may come at once. Raises TooMany, and ValueError
        for more places than there are."""
        if not 1 <= places <= self.places:
            raise ValueError(f"{places} places of {self.places}")
        must_wait = self._line or places > self._free
        if must_wait and self.waiting >= self.queue:
            self.refused += 1
            raise TooMany
        ticket = Ticket(self, places)
        self._line.append(ticket)
        self._call_next()
        return ticket

    def _leave(self, ticket: Ticket) -> None:
        if ticket.turn.done():
            self.running -= 1
            self._free += ticket.places
        else:
            self._line.remove(ticket)
            ticket.turn.cancel()
        self._call_next()

    def _call_next(self) -> None:
        while self._line and self._line[0].places <= self._free:
            ticket = self._line.popleft()
            self._free -= ticket.places
            self.running += 1
            ticket.turn.set_result(None)


class Unread:
    """Answers that are made and that their clients have not taken, in memory. Of one event loop.

    n_bytes: of all of them.
    """

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
