"""The sequence that a request gets: that of its conversation, or else the least recently used
one."""

import asyncio
import json
from threading import Event

from asgi import ask, begun, in_a_loop, until
from fake_served import FakeServed, app_for, quiet, state_with, whole
from paths import CHAT
from served import running
from speaking import CAPITAL
from tables import cases

from orchestrator.serve.admission import Conversation, SlotManager, conversations_of
from orchestrator.serve.app import application

SYSTEM = {"role": "system", "content": "You are a helper who knows many countries. " * 6}


def chat(*said):
    """A conversation with alternating turns of user and assistant."""
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)
    ]
    return {"messages": [SYSTEM, *turns]}


def asked(data):
    (found,) = conversations_of(data, 4)
    return found


def take(seats, *said):
    taken, _ = seats.take([asked(chat(*said))])
    seats.leave(taken)
    return taken[0]


def test_conversations_with_one_system_prompt_keep_their_sequences():
    seats = SlotManager(3)
    assert [take(seats, "one"), take(seats, "two")] == [0, 1]
    for _ in range(3):
        assert take(seats, "one", "said", "more") == 0
        assert take(seats, "two", "said", "more") == 1
    # The same request again, and with another last message.
    assert take(seats, "one", "said", "more") == 0
    assert take(seats, "one", "said", "another") == 0
    assert take(seats, "one", "said", "another", "said", "more") == 0


def test_a_new_conversation_gets_the_least_recently_used_sequence():
    seats = SlotManager(2)
    assert [take(seats, "one"), take(seats, "two"), take(seats, "one", "said", "more")] == [0, 1, 0]
    assert take(seats, "three") == 1
    assert take(seats, "two", "said", "more") == 0


def test_cells_that_a_sequence_still_holds_are_returned():
    seats = SlotManager(2)
    for said, cells in (("one", 300), ("two", 200)):
        taken, held = seats.take([asked(chat(said))], cells)
        assert held == 0
        seats.leave(taken)
    first, held = seats.take([asked(chat("three"))], 10)
    assert (first, held) == ([0], 300)
    seats.leave(first)
    assert seats.take([asked(chat("four")), Conversation()], 5) == ([1, 0], 210)


def test_a_decoding_sequence_is_not_shared():
    seats = SlotManager(2)
    assert seats.take([asked(chat("one"))])[0] == [0]
    assert seats.take([asked(chat("one", "said", "more"))])[0] == [1]


def test_tools_are_part_of_the_shared_prefix():
    with_tools = {**chat("one"), "tools": [CAPITAL]}
    assert asked(with_tools).n_shared_with(asked(chat("one"))) == 0
    assert asked({**chat("two"), "tools": [CAPITAL]}).n_shared_with(asked(with_tools)) == 0
    assert asked(with_tools).n_shared_with(asked(with_tools)) > 0


@cases(
    "before, after, goes_on",
    ({"prompt": "a" * 640}, {"prompt": "a" * 640 + "b"}, True),
    ({"prompt": "a" * 640}, {"prompt": "b" + "a" * 640}, False),
    ({"prompt": list(range(640))}, {"prompt": list(range(700))}, True),
    ({"prompt": list(range(640))}, {"prompt": list(range(1, 700))}, False),
    ({"input": "one"}, {"input": "one"}, True),
    ({"input": "one"}, {"input": "two"}, False),
    ({"input": "one"}, {"input": "one", "instructions": "be short"}, False),
)
def test_prompts_of_texts_and_tokens_are_compared(before, after, goes_on):
    assert (asked(after).n_shared_with(asked(before)) > 0) is goes_on


@cases(
    "data, n, known",
    ({**chat("one"), "n": 3}, 3, 1),
    ({"prompt": ["one", "two"]}, 2, 2),
    ({"prompt": [[1, 2], [3]], "n": 1}, 2, 2),
    # Each waits for the previous one, and their sequences are not known yet.
    ({"prompt": ["one"] * 5}, 4, 0),
    ({"prompt": []}, 1, 0),
    ({}, 1, 0),
)
def test_several_answers_and_several_prompts_take_a_sequence_each(data, n, known):
    found = conversations_of(data, 4)
    assert len(found) == n and sum(bool(each.pieces) for each in found) == known


def test_the_server_chooses_the_sequence():
    served = FakeServed(*(whole() for _ in range(6)))
    app = app_for(served, parallel=2)
    for text in ("one", "two"):
        ask(app, CHAT, {**chat(text), "id_slot": 7})
    ask(app, CHAT, chat("one", "said", "more"))
    # The same conversation in another form of request.
    ask(app, "/v1/messages", {**chat("two", "said", "more"), "max_tokens": 1})
    ask(app, "/v1/completions", {"prompt": ["one", "two"]})
    assert served.sequences == [[0], [1], [0], [1], [0, 1]]
    assert not any("id_slot" in json.loads(body) for _, body in served.asked)
    alone = FakeServed(whole())
    ask(app_for(alone), CHAT, chat("one"))
    assert alone.sequences == [[0]]


def test_a_client_that_leaves_frees_its_sequence():
    served = FakeServed(whole(hold=Event()), whole())
    app = app_for(served, parallel=2)

    async def leave():
        client, running = begun(app, CHAT, chat("one"))
        await until(lambda: served.asked)
        client.leave()
        await running

    asyncio.run(leave())
    ask(app, CHAT, chat("one", "said", "more"))
    assert served.sequences == [[0], [0]]


@in_a_loop
async def test_cells_of_a_sequence_are_dropped_if_the_context_is_too_small():
    """Both sequences have held 500 of 1,000 KV cells. While one runs a request for 512, a new
    request on the other cannot keep these 500, so they are dropped."""
    held = Event()
    served = FakeServed(whole(), whole(), whole(hold=held), whole())
    served.parallel = 2
    state = state_with(served, parallel=2)
    state.gate.open(served.about.n_cells)
    app = application(state, quiet)

    def request(token, n, limit):
        return begun(app, "/v1/completions", {"prompt": [token] * n, "max_tokens": limit})[1]

    for token in (1, 2):
        await request(token, 400, 100)
    long = request(3, 490, 22)
    await until(lambda: len(served.asked) == 3)
    assert served.forgotten == []
    await request(4, 10, 10)
    assert served.forgotten == [1]
    held.set()
    await long


served = running(
    *("--ram", "160MiB", "--policy", "lru", "--high-tier", "q4_k", "--ctx", "512"),
    *("--parallel", "2"),
)


def test_neither_of_two_conversations_is_read_again(served):
    """Both conversations keep their sequence, although they share a system prompt of more than half
    of their length. With its own choice, llama.cpp would give the second one the sequence of the
    first."""
    texts = {country: f"{country} is a country. " * 8 for country in ("Norway", "Peru")}
    said = {country: [text] for country, text in texts.items()}
    n_read = {country: [] for country in texts}
    for _turn in range(3):
        for country, turns in said.items():
            data = {**chat(*turns), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = served.post(CHAT, data)
            n_read[country].append(answer["timings"]["prompt_n"])
            turns += [answer["choices"][0]["message"]["content"], "And what else?"]
    for first, *later in n_read.values():
        assert first > 60
        assert max(later) < 30, n_read
