"""The line before the model: order, bounds, and places that come back."""

import asyncio
from functools import partial, wraps

import pytest

from orchestrator.serve.admission import Gate, Unread
from orchestrator.serve.wire import Refusal


def in_a_loop(line):
    """A test of what only an event loop has."""

    @wraps(line)
    def run():
        asyncio.run(line())

    return run


@in_a_loop
async def test_requests_run_in_their_order_and_the_rest_waits():
    gate = Gate(places=2, queue=2)
    tickets = [gate.join() for _ in range(4)]
    assert [each.turn.done() for each in tickets] == [True, True, False, False]
    assert (gate.running, gate.waiting) == (2, 2)
    with pytest.raises(Refusal):
        gate.join()
    assert gate.refused == 1
    tickets[1].leave()
    assert [each.turn.done() for each in tickets[2:]] == [True, False]
    tickets[0].leave()
    tickets[2].leave()
    tickets[3].leave()
    assert (gate.running, gate.waiting) == (0, 0)


@in_a_loop
async def test_who_leaves_the_line_lets_the_next_one_pass():
    gate = Gate(places=2, queue=4)
    first = gate.join()
    wide, narrow = gate.join(2), gate.join(1)
    assert not wide.turn.done() and not narrow.turn.done()  # nobody overtakes
    wide.leave()
    assert wide.turn.cancelled() and narrow.turn.done()
    first.leave()
    narrow.leave()
    last = gate.join(2)
    assert last.turn.done()


@in_a_loop
async def test_who_would_wait_behind_a_wide_request_counts_as_waiting():
    gate = Gate(places=2, queue=1)
    gate.join()
    gate.join(2)
    with pytest.raises(Refusal):
        gate.join()  # a place is free, and it would have to overtake


@in_a_loop
async def test_an_empty_queue_refuses_only_who_would_have_to_wait():
    gate = Gate(places=1, queue=0)
    ticket = gate.join()
    with pytest.raises(Refusal):
        gate.join()
    ticket.leave()
    assert gate.join().turn.done()
    with pytest.raises(ValueError, match="2 places of 1"):
        gate.join(2)


@in_a_loop
async def test_requests_share_the_context_by_what_they_may_take():
    gate = Gate(places=4, queue=4)
    gate.open(1000)
    long, short = gate.join(cells=700), gate.join(cells=300)
    waits, behind = gate.join(cells=301), gate.join(cells=0)
    assert [each.turn.done() for each in (long, short, waits, behind)] == [True, True, False, False]
    short.leave()
    assert not waits.turn.done()
    long.leave()
    assert waits.turn.done() and behind.turn.done()
    waits.leave()
    behind.leave()
    assert gate.join(cells=5000).turn.done()  # alone: there is nobody to wait for


@in_a_loop
async def test_a_request_takes_what_its_sequence_still_holds():
    gate = Gate(places=4, queue=4)
    gate.open(1000)
    first, second = gate.join(cells=400), gate.join(cells=100)
    assert gate.widen(second, 50) and gate.widen(second, 600) and not gate.widen(first, 401)
    assert not gate.join(cells=1).turn.done()
    second.leave()
    assert gate.widen(first, 900)


def test_what_nobody_reads_is_bounded_and_the_oldest_goes_first():
    gone = []
    unread = Unread(100)
    for name, n_bytes in (("a", 60), ("b", 40), ("c", 50), ("d", 300)):
        unread.keep(name, n_bytes, partial(gone.append, name))
        assert unread.n_bytes <= 100 or name == "d"
    assert gone == ["a", "b", "c"] and unread.n_bytes == 300  # the last one stays
    for name in ("a", "d", "d"):
        unread.leave(name)
    assert unread.n_bytes == 0
