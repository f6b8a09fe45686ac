"""What llama.cpp's server holds of a conversation: matched by text, looked at between two steps,
and written to files."""

import json
import threading

import numpy as np
import pytest

from .conftest import HANG_S
from .servers import MIB, serving
from .test_server_cancel import DYMOE, Held

KEPT = {"policy": "lru", "high_tier": "q4_k", "expert_ram": 16 * MIB, "ctx": 1024}
USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Norway is a country"


@pytest.fixture(scope="module")
def backend():
    with serving(2, **KEPT, cache_ram=8 * MIB) as made:
        yield made


@pytest.fixture(autouse=True)
def empty(backend):
    """Each test begins with sequences and copies that hold nothing."""
    for sequence in range(2):
        backend._native.forget(sequence)


def tokens_of(backend, text):
    return backend.engine.tokenize(text)


def letters(backend, text):
    """Other tokens for the same text: one for each letter."""
    return [t for each in text for t in backend.engine.tokenize(each, special=False)]


def request_for(backend, prompt, sequence=0, **data):
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "return_tokens": True, **data}
    return backend.request("/completion", json.dumps(body).encode(), [sequence])


def ask(backend, prompt, sequence=0, **data):
    """(tokens of the prompt that were read, that were there, tokens of the answer)."""
    status, text = request_for(backend, prompt, sequence, **data).whole()
    assert status == 200, text
    answer = json.loads(text)
    return answer["timings"]["prompt_n"], answer["timings"]["cache_n"], answer["tokens"]


def text_of(backend, tokens):
    return b"".join(backend.engine.llama.piece(each, True) for each in tokens)


# (what is held, a prompt, what is held of it): texts, letter by letter in braces.
AS_HELD = [
    # An answer keeps the tokens that it was given in, and its last one may not have been read.
    (
        "<|im_start|>{Norway is}",
        "<|im_start|>Norway is<|im_end|>",
        "<|im_start|>{Norway is}<|im_end|>",
    ),
    ("<|im_start|>{Norw}", "<|im_start|>Norway is<|im_end|>", "<|im_start|>{Norw}ay is<|im_end|>"),
    # Another text stays as it is.
    ("<|im_start|>{Norwegian}", "<|im_start|>Norway<|im_end|>", "<|im_start|>Norway<|im_end|>"),
    ("<|im_start|>{Norways}", "<|im_start|>Norway<|im_end|>", "<|im_start|>Norway<|im_end|>"),
    ("{Peru}", "<|im_start|>Norway<|im_end|>", "<|im_start|>Norway<|im_end|>"),
    ("", "<|im_start|>Norway<|im_end|>", "<|im_start|>Norway<|im_end|>"),
    # Texts are not compared across control tokens.
    (
        "<|im_start|>{Nor}<|im_end|>way",
        "<|im_start|>Norway<|im_end|>",
        "<|im_start|>Norway<|im_end|>",
    ),
    # Nothing changes after a place that differs.
    ("Peru<|im_end|>{Norway}", "Kenya<|im_end|>Norway", "Kenya<|im_end|>Norway"),
    # Several texts.
    (
        "{Peru}<|im_end|>{Norway}<|im_end|>",
        "Peru<|im_end|>Norway<|im_end|>x",
        "{Peru}<|im_end|>{Norway}<|im_end|>x",
    ),
]


def spelled(backend, text):
    """Tokens of a text whose parts in braces have a token for each letter."""
    found = []
    for part in text.replace("}", "{").split("{"):
        found.append(part)
    return [
        token
        for i, part in enumerate(found)
        for token in (letters if i % 2 else tokens_of)(backend, part)
    ]


@pytest.mark.parametrize(("held", "prompt", "expected"), AS_HELD)
def test_a_prompt_takes_the_tokens_that_are_held(backend, held, prompt, expected):
    given, found = spelled(backend, prompt), spelled(backend, expected)
    assert backend._native.as_held(given, spelled(backend, held)) == found


def test_tokens_that_the_vocabulary_lacks_change_nothing(backend):
    given = tokens_of(backend, "Norway")
    assert backend._native.as_held(given, [-1, 10**6]) == given
    assert backend._native.as_held([*given, 10**6], [3]) == [*given, 10**6]


def test_an_answer_in_other_tokens_is_not_read_again(backend):
    held = tokens_of(backend, USER.format("Where is it?")) + letters(backend, ANSWER)
    ask(backend, held)
    text = USER.format("Where is it?") + ANSWER + "<|im_end|>\n" + USER.format("And Peru?")
    prompt = tokens_of(backend, text)
    assert backend._native.reusable(0, prompt) == len(held)
    n_read, n_cached, _ = ask(backend, prompt)
    assert n_cached == len(held)
    read = backend._native.tokens(0)
    assert read[: len(held)] == held and text_of(backend, read) == text_of(backend, prompt)
    assert n_read == len(read) - len(held)


def test_a_prompt_that_would_not_fit_in_the_held_tokens_is_left_alone(backend):
    text = " ".join([ANSWER] * 60)
    held = letters(backend, text)[:1000]
    ask(backend, held)
    prompt = tokens_of(backend, f"{text} {ANSWER}")
    assert len(prompt) < 512 and ask(backend, prompt)[:2] == (len(prompt), 0)


def test_a_copy_in_memory_is_matched_by_text(backend):
    first = tokens_of(backend, USER.format("Where is it?")) + letters(backend, ANSWER)
    ask(backend, first)
    other = tokens_of(backend, USER.format("Tell me about Peru, its mountains and its coast."))
    assert backend._native.match(0, other)[1]  # another conversation
    ask(backend, other)
    further = tokens_of(
        backend,
        USER.format("Where is it?") + ANSWER + "<|im_end|>\n" + USER.format("And Peru?"),
    )
    assert backend._native.match(0, further) == (len(first), True)
    assert ask(backend, further)[1] == len(first)
    assert ask(backend, other)[0] == 1


def test_a_copy_stays_for_others_that_begin_as_it_does(backend):
    system = tokens_of(backend, USER.format("You are a guide. " * 12))
    texts = [
        system + tokens_of(backend, f"{name}: where is it?") for name in ("Oslo", "Lima", "Cairo")
    ]
    for text in texts:
        ask(backend, text)
    ask(backend, tokens_of(backend, "An entirely different text, about nothing in particular."))
    for text in texts:
        assert ask(backend, text)[0] == 1


@pytest.mark.parametrize(
    ("data", "stop"),
    [
        ({"n_predict": 3, "ignore_eos": True}, "limit"),
        ({"n_predict": 40, "ignore_eos": True, "stop": [" ", "a", "e", "o", "\n"]}, "word"),
        ({"n_predict": 3, "logit_bias": [[2, 1000]]}, "end"),
    ],
)
def test_how_an_answer_ended_and_when_each_token_was_known(backend, data, stop):
    prompt = tokens_of(backend, USER.format("Where is it?"))
    request = request_for(backend, prompt, **data)
    status, text = request.whole()
    answer = json.loads(text)
    times = request.token_times()
    assert status == 200 and len(times) == answer["timings"]["predicted_n"]
    assert times == sorted(times) and times[0] > 0
    assert times[-1] - times[0] == pytest.approx(
        1000 * answer["timings"]["predicted_ms"], abs=20_000
    )
    look = backend._native.look(0)
    assert look == (len(prompt) + len(times) - 1, stop, False)


def test_an_answer_that_fills_the_context_says_so(backend):
    with serving(**KEPT | {"ctx": 128}) as small:
        ask(small, tokens_of(small, ANSWER), n_predict=-1, ignore_eos=True)
        assert small._native.look(0)[1:] == ("limit", True)
        ask(small, tokens_of(small, ANSWER))
        assert small._native.look(0)[1:] == ("limit", False)


def test_a_cancelled_answer_did_not_end_by_itself(monkeypatch):
    with serving(**DYMOE) as backend:
        held = Held(backend.engine.policy, monkeypatch)
        ask(backend, tokens_of(backend, ANSWER))
        held.hold(0)
        request = request_for(backend, tokens_of(backend, ANSWER), n_predict=40, ignore_eos=True)
        thread = threading.Thread(target=request.run)
        thread.start()
        assert held.reached.wait(HANG_S)
        request.cancel()
        held.go_on.set()
        thread.join(HANG_S)
        backend._native.settle()
        assert backend._native.look(0).stop == "none"


def test_work_on_a_slot_waits_for_its_answer_and_for_no_other(monkeypatch):
    with serving(2, **DYMOE) as backend:
        native, held = backend._native, Held(backend.engine.policy, monkeypatch)
        prompt = tokens_of(backend, ANSWER)
        ask(backend, prompt, 1)
        held.hold(0)
        answering = [
            threading.Thread(target=request_for(backend, prompt, n_predict=n, ignore_eos=True).run)
            for n in (8, 1)
        ]
        for each in answering:
            each.start()
        assert held.reached.wait(HANG_S)
        found = {}
        asking = [
            threading.Thread(target=lambda n=n: found.setdefault(n, len(native.tokens(n))))
            for n in range(2)
        ]
        for each in asking:
            each.start()
        held.go_on.set()
        for each in (*asking, *answering):
            each.join(HANG_S)
            assert not each.is_alive()
        # Of the answer that decodes now, the last token is not read.
        assert found[1] == len(prompt)
        assert found[0] in (len(prompt) + 7, len(prompt))


def test_a_file_holds_the_answer_and_more_may_follow_in_it(backend, tmp_path):
    prompt = tokens_of(backend, USER.format("Where is it?"))
    ask(backend, prompt, n_predict=6, ignore_eos=True)
    native, path = backend._native, tmp_path / "kept"
    held = native.tokens(0)
    n_bytes, n_tokens, marks = native.save(0, path)
    assert (n_tokens, marks) == (len(held), []) and n_bytes == path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100))
    assert native.forget(0) and native.tokens(0) == []
    assert native.restore(0, path) and native.tokens(0) == held
    assert ask(backend, [*held, 67])[0] == 1
    assert not native.restore(0, tmp_path / "missing")
    assert native.tokens(0) == []


def test_what_a_policy_knows_goes_with_the_tokens():
    """It is noted where a prompt and an answer end, and comes back with a prefix or a copy."""
    said, notes = [], []

    def noted(_sequence):
        notes.append(len(notes))
        return b"%d" % notes[-1]

    with serving(**KEPT, cache_ram=8 * MIB) as backend:
        backend._native.keep_notes(noted, lambda sequence, state: said.append((sequence, state)))
        first = tokens_of(backend, USER.format("Where is it, and who lives there?"))
        other = tokens_of(backend, "An entirely different text, about nothing in particular.")
        ask(backend, first, n_predict=4, ignore_eos=True)
        assert (len(notes), said) == (1, [])  # where the answer begins
        ask(backend, first, n_predict=4, ignore_eos=True)
        assert (len(notes), said) == (3, [(0, b"0")])
        held = backend._native.tokens(0)
        ask(backend, other, n_predict=4, ignore_eos=True)
        assert (len(notes), said) == (5, [(0, b"0")])  # another conversation takes nothing over
        assert ask(backend, [*held, 67], n_predict=1)[0] == 1
        # What was known at the end of the first conversation, before the other one.
        assert said[1:] == [(0, b"3")]


def test_a_copy_brings_back_what_context_counted():
    with serving(policy="context", ram=160 * MIB, ctx=1024, cache_ram=8 * MIB) as backend:

        def counts():
            state = backend.engine.driver.save_sequence(0)
            return np.frombuffer(state[len(b"moe-edge use 1\n") :], "<f8")

        first = tokens_of(backend, USER.format("Where is it, and who lives there? " * 8))
        other = tokens_of(backend, "An entirely different text, about nothing in particular. " * 8)
        ask(backend, first)
        known = counts()
        ask(backend, other)
        assert not np.allclose(counts(), known, atol=20)
        assert ask(backend, first)[0] == 1
        np.testing.assert_allclose(counts(), known, atol=20)
