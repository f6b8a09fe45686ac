"""The queue before the model (order, limits, freed places) and the memory for request bodies."""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from asgi import HANG_S, Client, ask, begun, body_of, end_of, in_a_loop, until
from fake_served import FakeServed, app_for, served_by, whole
from paths import CHAT, COMPLETIONS, COUNT
from tables import cases

from orchestrator.config import Config
from orchestrator.runtime.answering import AHEAD_BYTES, AHEAD_COPIES, ANSWER_BYTES
from orchestrator.serve.admission import (
    BODY_FACTOR,
    KEPT,
    PROBS_BYTES,
    UNREAD_BYTES,
    WHOLE_FACTOR,
    Bodies,
    Gate,
    UnreadAnswers,
)
from orchestrator.serve.bodies import PIECE_CHARS, Words
from orchestrator.serve.served import PROCESS_BYTES, SCORE_BYTES, SCORED_MOST, answering
from orchestrator.serve.settings import ServeSettings
from orchestrator.serve.wire import Refusal

WORKERS = ThreadPoolExecutor(2)
LONG = body_of({"prompt": "a" * 100_000})


class Halted(Client):
    """A client that sends its headers and only parts of its body."""

    def sends(self, part):
        self._incoming = [{"type": "http.request", "body": part, "more_body": True}]


def test_memory_for_bodies_is_counted_by_received_bytes():
    """40 clients that announce large bodies and send one byte each do not block another request."""
    state, app = served_by(FakeServed(whole()))

    async def run():
        silent = []
        for _ in range(40):
            client = Halted(app, "POST", COMPLETIONS, b"", content_length=str(2**17))
            client.sends(b"{")
            silent.append((client, asyncio.create_task(client.run())))
        await asyncio.sleep(0)
        body = b'{"content": "a"}'
        served = Client(app, "POST", "/tokenize", body, content_length=str(len(body)))
        status = (await end_of(served.run())).status
        assert state.bodies.kept_bytes == 40
        for client, task in silent:
            client.leave()
            await task
        return status

    assert asyncio.run(run()) == 200
    assert state.bodies.kept_bytes == 0


@in_a_loop
async def test_waiting_requests_do_not_block_other_paths():
    """Six long requests do not block a short one on another path."""
    go_on = threading.Event()
    state, app = served_by(FakeServed(whole(hold=go_on), *(whole() for _ in range(7))))
    replies = [begun(app, COMPLETIONS, LONG)[1] for _ in range(6)]
    await until(lambda: state.gate.waiting == 5)
    assert state.bodies.kept_bytes == 5 * len(LONG)  # the running request is counted by the gate
    quick = await begun(app, "/tokenize", {"content": "a"})[1]
    go_on.set()
    assert [quick.status, *[(await reply).status for reply in replies]] == [200] * 7
    assert state.bodies.kept_bytes == 0


def test_a_body_beyond_the_memory_is_refused_at_once():
    state, app = served_by(FakeServed(whole()))
    state.bodies.kept_bytes += KEPT * 2**17 - 10
    reply = ask(app, COMPLETIONS, {"prompt": "a" * 20})
    assert reply.status == 503 and reply.headers["retry-after"] == "1"
    assert "try again later" in reply.json()["error"]["message"]
    assert state.bodies.refused == 1
    state.bodies.kept_bytes -= KEPT * 2**17 - 10
    assert state.bodies.kept_bytes == 0  # the refused request holds no memory
    assert ask(app, COMPLETIONS, {"prompt": "a" * 20}).status == 200


def test_each_request_frees_its_memory():
    """Memory is also freed by requests that are refused, that grow when rewritten, and whose client
    leaves."""
    state, app = served_by(FakeServed(*(whole() for _ in range(20))))

    async def run():
        bodies = [("/tokenize", {"content": "a" * 60_000})] * 10
        bodies += [(COMPLETIONS, b'{"prompt":[1,1,1,1,1,1]}'), (COMPLETIONS, b"{")]
        asked = [begun(app, path, body)[1] for path, body in [*bodies, ("/tokenize", b"")]]
        leaving = Halted(app, "POST", COMPLETIONS, b"")
        leaving.sends(b"{")
        leaving.leave()
        return [reply.status for reply in await asyncio.gather(*asked, leaving.run())]

    assert asyncio.run(run()) == [200] * 11 + [400] * 3
    assert state.bodies.kept_bytes == state.bodies.waiting == 0


@in_a_loop
async def test_one_thread_at_a_time_works_with_bodies():
    """If a client leaves while a thread works with its body, the memory is freed only after the
    work has ended."""
    at_work, go_on = threading.Event(), threading.Event()

    def work():
        at_work.set()
        go_on.wait(HANG_S)

    bodies = Bodies(WORKERS)
    first = asyncio.create_task(bodies.run(work, "a"))
    await asyncio.to_thread(at_work.wait, HANG_S)
    left = asyncio.create_task(bodies.run(work, "a"))
    second = asyncio.create_task(bodies.run(lambda: "second", "a"))
    await asyncio.sleep(0)
    assert bodies.waiting == 2
    left.cancel()
    first.cancel()
    await asyncio.wait({left})
    assert bodies.waiting == 1 and not first.done() and not second.done()
    go_on.set()
    assert await second == "second" and bodies.waiting == 0
    with pytest.raises(asyncio.CancelledError):
        await first


@in_a_loop
async def test_clients_take_turns_at_the_thread_that_works_with_bodies():
    go_on, order = threading.Event(), []
    bodies = Bodies(WORKERS)
    calls = [asyncio.create_task(bodies.run(partial(go_on.wait, HANG_S), "a"))]
    for client in ("a", "a", "b", "a", "c"):
        calls.append(asyncio.create_task(bodies.run(partial(order.append, client), client)))
    await until(lambda: bodies.waiting == 5)
    go_on.set()
    await end_of(asyncio.gather(*calls))
    assert order == ["a", "b", "c", "a", "a"]


def sent(app, path, data, address):
    """Start a request from this address and return its task."""
    client = Client(app, "POST", path, body_of(data))
    client._scope["client"] = (address, 1)
    return asyncio.create_task(client.run())


@in_a_loop
async def test_one_client_cannot_take_all_the_memory_for_bodies():
    go_on = threading.Event()
    state, app = served_by(FakeServed(*(whole(hold=go_on) for _ in range(30))), queue=30)

    async def arrived(address):
        gate, bodies = state.gate, state.bodies
        before = gate.running + gate.waiting + bodies.refused
        reply = sent(app, COMPLETIONS, LONG, address)
        await until(lambda: gate.running + gate.waiting + bodies.refused > before)
        return reply

    greedy = [await arrived("127.0.0.1") for _ in range(12)]  # the first runs, the others wait
    assert state.bodies.refused == 4 and state.bodies.kept_bytes == 7 * len(LONG)
    other = await arrived("127.0.0.2")
    assert state.bodies.refused == 4
    go_on.set()
    assert (await end_of(other)).status == 200
    assert [(await end_of(each)).status for each in greedy] == [200] * 8 + [503] * 4
    assert state.bodies.kept_bytes == 0


@in_a_loop
async def test_a_client_that_leaves_takes_its_waiting_body_along():
    """The body of a client that left is not parsed, and its running call is cancelled."""
    holding = whole(hold=threading.Event())
    state, app = served_by(FakeServed(holding, whole()))
    first, reply = begun(app, "/tokenize", {"content": "a"})
    await until(lambda: state.served.asked)
    gone = [begun(app, "/tokenize", {"content": "b"}) for _ in range(4)]
    await until(lambda: state.bodies.waiting == 4)
    for client, _ in gone:
        client.leave()
    assert [(await end_of(task)).status for _, task in gone] == [499] * 4
    assert state.bodies.waiting == 0 and len(state.served.asked) == 1
    first.leave()
    assert (await end_of(reply)).status == 499 and holding.cancelled.is_set()
    assert state.bodies.kept_bytes == 0
    assert (await end_of(begun(app, "/tokenize", {"content": "c"})[1])).status == 200


LIMIT = 2**17
HALF = LIMIT // 2
TEMPLATE = "/apply-template"
NEEDS, BEYOND = "--body-limit ", "available context size"


def said(text):
    return {"messages": [{"role": "user", "content": text}]}


def tool(n):
    """A tool with n properties, each with a name of 240 letters."""
    names = {"a" * 237 + f"{at:03}": {"type": "string"} for at in range(n)}
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": names}}}


@cases(
    "path, data, chars_a_token, word, says",
    # Accepted: any short text, and prose or code up to the limit.
    (COMPLETIONS, {"prompt": "a" * (LIMIT // 4)}, 1, LIMIT // 4, None),
    (COMPLETIONS, {"prompt": "a" * (LIMIT - 100)}, 4.2, 12, None),
    (CHAT, said("a" * (LIMIT - 100)), 3, 80, None),
    (COUNT, said("a" * (LIMIT - 100)), 2.7, 80, None),
    ("/tokenize", {"content": "a" * 64_000}, 1, 1, None),
    ("/tokenize", {"content": "a" * HALF}, 1000, HALF, None),
    # Refused: more tokens or a longer word than memory is reserved for.
    ("/tokenize", {"content": "a" * (LIMIT - 100)}, 2, 1, NEEDS + "152KiB"),
    ("/tokenize", {"content": "a" * 70_000}, 1000, 70_000, NEEDS + "131KiB"),
    (COMPLETIONS, {"prompt": "a" * HALF}, 1000, 200 * HALF, NEEDS),
    (COMPLETIONS, {"prompt": "a" * (LIMIT - 100)}, 2, 1, BEYOND),
    (CHAT, said("a" * (LIMIT - 100)), 2, 1, BEYOND),
    # In these requests the text is not a single prompt that is decoded.
    (COMPLETIONS, {"prompt": ["a" * 2000] * 64}, 2, 1, NEEDS),
    (TEMPLATE, said("a" * (LIMIT - 100)), 2, 1, NEEDS),
    (COUNT, said("a" * (LIMIT - 100)), 2, 1, NEEDS),
    ("/infill", {"input_prefix": "a" * HALF, "input_suffix": "a" * 60_000}, 2, 1, NEEDS),
    (CHAT, {**said("a"), "stop": "a" * (LIMIT - 100)}, 2, 1, NEEDS),
    # Chat templates write the names of properties, so these count too.
    (CHAT, {**said("a"), "tools": [tool(480)]}, 2, 1, BEYOND),
)
def test_texts_that_need_more_memory_than_reserved_are_refused(
    path, data, chars_a_token, word, says
):
    """If every character is a token, tokenizing takes 130 times the length of the text, and a
    single long word takes 160 times."""
    served = FakeServed(whole())
    served.count_tokens = lambda text: (int(len(text) / chars_a_token), word)
    reply = ask(app_for(served), path, data)
    assert (reply.status, bool(served.asked)) == ((200, True) if says is None else (400, False))
    assert says is None or says in reply.json()["error"]["message"]


@cases(
    "kind, cut, text, longest",
    ("gpt2", "qwen2", "one four, three", 5),
    ("gpt2", "qwen2", "snake_case_name", 5),
    ("gpt2", "qwen2", "a" + "_-" * 50, 100),
    ("gpt2", "qwen2", "das Übergrößenmaß", 17),  # in bytes
    ("gpt2", "qwen2", "a\u0301\u0302" * 20, 100),  # combining marks belong to a letter
    ("gpt2", "qwen2", "", 0),
    ("gpt2", "exaone-moe", "words joined by spaces. And more\nthan this", 22),
    ("gpt2", "deepseek-llm", "words joined by spaces. And more\nthan this", 22),
    ("gpt2", "sarvam-moe", "é é é é\na line", 7),
    ("gemma4", "", "é é é é, and\na line", 12),
)
def test_the_longest_word_of_a_tokenizer(kind, cut, text, longest):
    words = Words(kind, cut)
    assert not words.is_whole and words.longest(text) == longest
    assert all(Words(each, "default").is_whole for each in ("llama", "t5", "rwkv", ""))


class Searched:
    """A pattern that records the lengths of the texts in which it searches."""

    def __init__(self, pattern, lengths):
        self._pattern, self._lengths = pattern, lengths

    def finditer(self, text):
        self._lengths.append(len(text))
        return self._pattern.finditer(text)


def test_a_long_word_is_found_across_the_pieces_that_are_searched():
    """A search blocks all other threads, so it gets at most PIECE_CHARS characters. A word that is
    longer is found across the pieces."""
    words, lengths = Words("gpt2", "default"), []
    words._patterns = [Searched(each, lengths) for each in words._patterns]
    for text in ("a" * 50_000, " " * 50_000, "." * 8000 + "b" * 20_001 + " c"):
        longest = max(len(each) for each in re.findall(r"[^\W_]+|[\W_]+", text))
        assert words.longest(text) == longest
    assert lengths and max(lengths) <= PIECE_CHARS
    assert Words("gemma4", "").longest("x" * 9000 + "\n" * 9000) == 9000


def test_the_plan_includes_memory_for_bodies_and_answers():
    config = Config.build(model="a.gguf")

    def planned(parallel, longest, kind="gpt2"):
        settings = ServeSettings(parallel=parallel, body_limit=longest)
        return answering(config, settings, Words(kind, ""), "").request(config).needs.extra_bytes

    one, longer = planned(1, 1000), planned(1, 2000)
    more, joined = planned(4, 1000), planned(1, 1000, "llama")
    answers = ANSWER_BYTES + AHEAD_COPIES * AHEAD_BYTES + PROBS_BYTES
    bodies = (KEPT + 2 * BODY_FACTOR) * 1000
    scores = SCORE_BYTES * SCORED_MOST
    assert one == PROCESS_BYTES + bodies + UNREAD_BYTES + answers + scores
    assert longer - one == (KEPT + 2 * BODY_FACTOR) * 1000
    assert more - one == 3 * (answers + BODY_FACTOR * 1000)
    assert joined - one == 2 * (WHOLE_FACTOR - BODY_FACTOR) * 1000


@in_a_loop
async def test_requests_run_in_order():
    gate = Gate(places=2, queue=2)
    tickets = [gate.join() for _ in range(4)]
    assert [each.turn.done() for each in tickets] == [True, True, False, False]
    assert (gate.running, gate.waiting) == (2, 2)
    with pytest.raises(Refusal):
        gate.join()
    assert gate.refused == 1
    gate.leave(tickets[1])
    assert [each.turn.done() for each in tickets[2:]] == [True, False]
    gate.leave(tickets[0])
    gate.leave(tickets[2])
    gate.leave(tickets[3])
    assert (gate.running, gate.waiting) == (0, 0)


@in_a_loop
async def test_clients_take_turns_and_none_can_fill_the_queue():
    gate = Gate(places=1, queue=4)
    tickets = [gate.join(client="a") for _ in range(5)]
    with pytest.raises(Refusal, match="too many"):
        gate.join(client="a")
    other = gate.join(client="b")
    with pytest.raises(Refusal, match="too many"):
        # the last request of the client with the most requests was refused
        await tickets.pop().turn
    assert (gate.running, gate.waiting, gate.refused) == (1, 4, 2)
    order, waiting = [], [*tickets, other]
    while waiting:
        (running,) = [each for each in waiting if each.turn.done()]
        order.append(running.client)
        gate.leave(running)
        waiting.remove(running)
        if running is other:
            waiting.append(gate.join(client="c"))
    # c arrived when a's last request was already waiting
    assert order == ["a", "a", "b", "a", "a", "c"]
    assert gate.is_empty


@in_a_loop
async def test_leaving_the_queue_lets_the_next_request_run():
    gate = Gate(places=2, queue=4)
    first = gate.join()
    wide, narrow = gate.join(2), gate.join(1)
    assert not wide.turn.done() and not narrow.turn.done()  # no request overtakes another
    gate.leave(wide)
    assert wide.turn.cancelled() and narrow.turn.done()
    gate.leave(first)
    gate.leave(narrow)
    last = gate.join(2)
    assert last.turn.done()


@in_a_loop
async def test_a_request_after_a_wide_one_counts_as_waiting():
    gate = Gate(places=2, queue=1)
    gate.join()
    gate.join(2)
    with pytest.raises(Refusal):
        gate.join()  # a place is free, but the request would have to overtake


@in_a_loop
async def test_a_queue_of_zero_refuses_only_requests_that_would_wait():
    gate = Gate(places=1, queue=0)
    ticket = gate.join()
    with pytest.raises(Refusal):
        gate.join()
    gate.leave(ticket)
    assert gate.join().turn.done()
    with pytest.raises(ValueError, match="2 places of 1"):
        gate.join(2)


@in_a_loop
async def test_requests_share_the_context_by_their_maximum_length():
    gate = Gate(places=4, queue=4)
    gate.open(1000)
    long, short = gate.join(cells=700), gate.join(cells=300)
    waits, after = gate.join(cells=301), gate.join(cells=0)
    assert [each.turn.done() for each in (long, short, waits, after)] == [True, True, False, False]
    gate.leave(short)
    assert not waits.turn.done()
    gate.leave(long)
    assert waits.turn.done() and after.turn.done()
    gate.leave(waits)
    gate.leave(after)
    assert gate.join(cells=5000).turn.done()  # a request that runs alone may exceed the context


@in_a_loop
async def test_cells_held_by_the_sequence_count_for_its_request():
    gate = Gate(places=4, queue=4)
    gate.open(1000)
    first, second = gate.join(cells=400), gate.join(cells=100)
    assert gate.widen(second, 50) and gate.widen(second, 600) and not gate.widen(first, 401)
    assert not gate.join(cells=1).turn.done()
    gate.leave(second)
    assert gate.widen(first, 900)


def test_unread_answers_are_limited_and_the_oldest_is_dropped():
    gone = []
    unread = UnreadAnswers(100)
    for name, n_bytes in (("a", 60), ("b", 40), ("c", 50), ("d", 300)):
        unread.keep(name, n_bytes, partial(gone.append, name))
        assert unread.n_bytes <= 100 or name == "d"
    assert gone == ["a", "b", "c"] and unread.n_bytes == 300  # the last answer is kept
    for name in ("a", "d", "d"):
        unread.leave(name)
    assert unread.n_bytes == 0
