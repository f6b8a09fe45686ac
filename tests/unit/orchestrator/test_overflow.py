"""Which exchanges leave a conversation that outgrows the context."""

import itertools
import json
import random

import pytest
from tables import cases

from orchestrator.runtime.overflow import PartType, PromptLengths, first_kept, parts_of, shortened

SYSTEM = {"role": "system", "content": "Be brief."}
CONTEXT = 160


def user(text="a b c d e f"):
    return {"role": "user", "content": text}


def answer(text="g h i j"):
    return {"role": "assistant", "content": text}


def calling(*ids):
    calls = [{"id": id, "function": {"name": "f", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(id):
    return {"role": "tool", "tool_call_id": id, "content": "k l m"}


def of_anthropic(kind, id):
    role, name = ("assistant", "id") if kind == "tool_use" else ("user", "tool_use_id")
    return {"role": role, "content": [{"type": kind, name: id}]}


def item(kind, **fields):
    return {"type": kind, **fields}


class Counter:
    """Counts 3 tokens for each prompt, 2 for each message, one for each word, and 10 for tools.

    tokens: how many tokens were counted.
    """

    def __init__(self, refuses=""):
        self.tokens, self._refuses = 0, refuses

    def __call__(self, messages, is_head):
        if self._refuses and self._refuses in json.dumps(messages):
            return None
        n = length_of(messages) + 10 * is_head
        self.tokens += n
        return n


def length_of(messages):
    return 3 + sum(2 + len(str(each.get("content")).split()) for each in messages)


def cut(messages, n_answer=40, n_ctx=CONTEXT, refuses=""):
    return shortened(messages, 10**6, Counter(refuses), n_ctx, n_answer)


def many(n, *exchange):
    return [message for _ in range(n) for message in exchange]


S, Q, C, A = PartType.SYSTEM, PartType.QUESTION, PartType.CALLS, PartType.ANSWER


# (messages, (type, number of messages) of each part)
@cases(
    "messages, parts",
    ([user(), answer(), user()], [(Q, 1), (A, 1), (Q, 1)]),
    ([answer(), user(), user()], [(A, 1), (Q, 2)]),
    ([user(), SYSTEM, answer(), user()], [(Q, 1), (S, 1), (A, 1), (Q, 1)]),
    ([user(), calling("1", "2"), result("1"), result("2"), answer()], [(Q, 1), (C, 3), (A, 1)]),
    # A text next to results is no new question, because clients add reminders there.
    ([user(), calling("1"), result("1"), user(), answer()], [(Q, 1), (C, 3), (A, 1)]),
    # A call without a result.
    ([user(), calling("1"), user(), answer()], [(Q, 1), (A, 1), (Q, 1), (A, 1)]),
    (
        [user(), of_anthropic("tool_use", "1"), of_anthropic("tool_result", "1"), answer()],
        [(Q, 1), (C, 2), (A, 1)],
    ),
    (
        [
            item("message", role="user"),
            item("reasoning"),
            item("function_call", call_id="1"),
            item("function_call_output", call_id="1"),
            item("message", role="assistant"),
        ],
        [(Q, 1), (C, 3), (A, 1)],
    ),
)
def test_the_parts_of_a_conversation(messages, parts):
    assert [(part.type, len(part.messages)) for part in parts_of(messages)] == parts


# (messages, index of the first message that stays). 120 of 160 tokens are for the prompt. An
# exchange of user() and answer() has 14 tokens, and a prompt 13 more.
@cases(
    "messages, first",
    ([*many(7, user(), answer()), user()], 0),  # 119 tokens
    ([*many(8, user(), answer()), user()], 8),  # 133 tokens; half of the context is left
    ([*many(9, user(), answer()), user()], 8),  # the next requests drop nothing more
    ([*many(20, user(), answer()), user()], 32),
    ([user(), answer(), user("w " * 500)], 2),
    ([user("w " * 500)], 0),
    ([user("w " * 500), answer(), user()], 2),
    # The answer alone, which the client has to see once, may outgrow the context.
    ([user(), answer("w " * 500), user()], 2),
    # A long run of calls: the exchange stays whole, and the earlier ones leave.
    ([*many(4, user(), answer()), user(), *many(30, calling("1"), result("1"))], 8),
    # The oldest exchange leaves with its calls and their results.
    ([*many(8, user(), calling("1"), result("1"), answer()), user()], 24),
)
def test_what_stays(messages, first):
    assert cut(messages) == messages[first:]
    assert cut([SYSTEM, *messages], n_ctx=CONTEXT)[0] == SYSTEM


def test_system_messages_stay_where_they_are():
    later = {"role": "developer", "content": "Be long."}
    messages = [SYSTEM, user(), later, answer(), *many(20, user(), answer()), user()]
    kept = cut(messages)
    assert kept[:2] == [SYSTEM, later] and kept[2:] == messages[-len(kept) + 2 :]


def test_without_space_for_the_tools_the_latest_exchange_stays():
    messages = [{**SYSTEM, "content": "w " * 200}, *many(3, user(), answer()), user()]
    assert cut(messages) == [messages[0], user()]


@pytest.mark.parametrize("n_answer", [1, 40, 10**6])
def test_a_prompt_leaves_space_for_its_answer(n_answer):
    most = CONTEXT - min(max(n_answer, CONTEXT // 16), CONTEXT // 4)
    lengths = []
    for n in range(60):
        kept = cut([*many(n, user(), answer()), user()], n_answer)
        lengths.append(10 + length_of(kept))
    assert max(lengths) <= most and max(lengths) > most - 14
    drops = [now for before, now in itertools.pairwise(lengths) if now < before]
    assert len(drops) > 3 and max(drops) <= CONTEXT // 2


def conversation(seed):
    """A conversation with calls, results, system messages and texts of any length."""
    made, chance = [SYSTEM], random.Random(seed)
    text = lambda: "w " * chance.randint(0, 30)  # noqa: E731
    for number in range(60):
        made.append(user(text()))
        for call in range(chance.choice((0, 0, 1, 3))):
            ids = [f"{number}.{call}.{each}" for each in range(chance.randint(1, 3))]
            made += [calling(*ids), *map(result, ids)]
        made.append(answer(text()))
        if chance.random() < 0.1:
            made.append({"role": "system", "content": "Now."})
    return made


@pytest.mark.parametrize("seed", range(20))
def test_each_request_gets_the_cut_of_the_request_before_or_a_new_one(seed):
    """The prompts of a stateless client: each continues the one before unless messages leave."""
    messages, before, n_cuts, n_requests = conversation(seed), [], 0, 0
    for n, after in enumerate(messages[1:], 1):
        if after["role"] == "assistant":
            n_requests += 1
            kept = cut(messages[:n])
            if kept[: len(before)] != before:
                n_cuts += 1
                assert length_of(kept) <= CONTEXT // 2 or sum(x["role"] == "user" for x in kept) < 2
            # Every result has its call, and every call its results.
            called = [call["id"] for each in kept for call in each.get("tool_calls", ())]
            assert called == [each["tool_call_id"] for each in kept if each["role"] == "tool"]
            assert [each for each in kept if each["role"] == "system"] == [
                each for each in messages[:n] if each["role"] == "system"
            ]
            assert cut(messages[:n]) == kept
            before = kept
    assert 2 < n_cuts < n_requests / 2


def test_the_cost_is_linear():
    counted = []
    for n in (100, 200, 400):
        count = Counter()
        shortened([*many(n, user("w " * 20), answer("w " * 20)), user()], 10**6, count, 512, 40)
        counted.append(count.tokens)
    assert 1.9 < counted[1] / counted[0] < 2.1 and 1.9 < counted[2] / counted[1] < 2.1


def test_a_conversation_that_cannot_be_counted_stays_whole():
    messages = [*many(20, user(), answer()), user("odd"), answer(), user()]
    assert cut(messages, refuses="odd") == messages
    # A short one is not counted at all.
    assert shortened(messages, CONTEXT // 2, None, CONTEXT, 40) == messages


def test_a_prompt_that_is_longer_than_its_parts_loses_more_exchanges():
    def count(messages, is_head):
        n = length_of(messages)
        return n + 30 * (len(messages) > 3)

    messages = [*many(9, user(), answer()), user()]
    kept = shortened(messages, 10**6, count, CONTEXT, 1)
    assert 1 < len(kept) < len(messages) and count(kept, True) < CONTEXT
    assert first_kept([], [], 10, CONTEXT, 40) == 0


def test_a_length_is_counted_once():
    lengths, asked = PromptLengths(), []

    def count(request):
        asked.append(request)
        return None if request == b"odd" else len(request)

    assert [lengths.of(each, count) for each in (b"a", b"bb", b"a", b"odd", b"odd")] == [
        *(1, 2, 1, None, None)
    ]
    assert asked == [b"a", b"bb", b"odd", b"odd"]
    for n in range(5000):
        lengths.of(str(n).encode(), count)
    assert lengths.of(b"a", count) == 1 and asked[-1] == b"a"
