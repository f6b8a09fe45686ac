"""Kept conversations in llama.cpp's server.

They are matched by text, inspected between steps, and written to files.
"""

import json
import threading

import pytest

from .conftest import HANG_S
from .servers import MIB, posted, serving, whole
from .test_server_cancel import DYMOE, Held, cancel_at_hold

KEPT = {"policy": "lru", "high_tier": "q4_k", "expert_ram": 16 * MIB, "ctx": 1024}
USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "Norway is a country"


@pytest.fixture(scope="module")
def runtime():
    with serving(2, **KEPT, cache_ram=8 * MIB) as made:
        yield made


@pytest.fixture(autouse=True)
def empty(runtime):
    """Each test begins with empty sequences and no copies."""
    for sequence in range(2):
        runtime._core.forget(sequence)


def tokens_of(runtime, text):
    return runtime.vocabulary.tokenize(text, add_special=True, parse_special=True)


def letters(runtime, text):
    """Return other tokens for the same text: one for each letter."""
    tokenize = runtime.vocabulary.tokenize
    return [t for each in text for t in tokenize(each, add_special=False, parse_special=False)]


def submitted(runtime, prompt, sequence=0, **data):
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "return_tokens": True, **data}
    return posted(runtime, "/completion", [sequence], **body)


def ask(runtime, prompt, sequence=0, **data):
    """Return (tokens read, tokens reused, tokens of the answer)."""
    status, text = whole(submitted(runtime, prompt, sequence, **data))
    assert status == 200, text
    answer = json.loads(text)
    return answer["timings"]["prompt_n"], answer["timings"]["cache_n"], answer["tokens"]


def text_of(runtime, tokens):
    return b"".join(runtime.vocabulary.piece(each, True) for each in tokens)


# (held text, prompt, expected spelling of the prompt). Text in braces has one token per letter.
AS_HELD = [
    # An answer keeps its own tokens, and its last token may not have been read.
    (
        "<|im_start|>{Norway is}",
        "<|im_start|>Norway is<|im_end|>",
        "<|im_start|>{Norway is}<|im_end|>",
    ),
    ("<|im_start|>{Norw}", "<|im_start|>Norway is<|im_end|>", "<|im_start|>{Norw}ay is<|im_end|>"),
    # A different text is not changed.
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
    # Nothing changes after the first difference.
    ("Peru<|im_end|>{Norway}", "Kenya<|im_end|>Norway", "Kenya<|im_end|>Norway"),
    # Several texts.
    (
        "{Peru}<|im_end|>{Norway}<|im_end|>",
        "Peru<|im_end|>Norway<|im_end|>x",
        "{Peru}<|im_end|>{Norway}<|im_end|>x",
    ),
]


def spelled(runtime, text):
    """Tokenize a text whose parts in braces have one token per letter."""
    found = []
    for part in text.replace("}", "{").split("{"):
        found.append(part)
    return [
        token
        for i, part in enumerate(found)
        for token in (letters if i % 2 else tokens_of)(runtime, part)
    ]


@pytest.mark.parametrize(("held", "prompt", "expected"), AS_HELD)
def test_a_prompt_is_spelled_with_the_held_tokens(runtime, held, prompt, expected):
    given, found = spelled(runtime, prompt), spelled(runtime, expected)
    assert runtime._core.as_held(given, spelled(runtime, held)) == found


def test_tokens_outside_the_vocabulary_change_nothing(runtime):
    given = tokens_of(runtime, "Norway")
    assert runtime._core.as_held(given, [-1, 10**6]) == given
    assert runtime._core.as_held([*given, 10**6], [3]) == [*given, 10**6]


def test_an_answer_in_other_tokens_is_not_read_again(runtime):
    held = tokens_of(runtime, USER.format("Where is it?")) + letters(runtime, ANSWER)
    ask(runtime, held)
    text = USER.format("Where is it?") + ANSWER + "<|im_end|>\n" + USER.format("And Peru?")
    prompt = tokens_of(runtime, text)
    assert runtime._core.reusable(0, prompt) == len(held)
    n_read, n_cached, _ = ask(runtime, prompt)
    assert n_cached == len(held)
    read = runtime._core.tokens(0)
    assert read[: len(held)] == held and text_of(runtime, read) == text_of(runtime, prompt)
    assert n_read == len(read) - len(held)


def test_a_prompt_too_long_in_held_tokens_is_unchanged(runtime):
    text = " ".join([ANSWER] * 60)
    held = letters(runtime, text)[:1000]
    ask(runtime, held)
    prompt = tokens_of(runtime, f"{text} {ANSWER}")
    assert len(prompt) < 512 and ask(runtime, prompt)[:2] == (len(prompt), 0)


def test_a_copy_in_memory_is_matched_by_text(runtime):
    first = tokens_of(runtime, USER.format("Where is it?")) + letters(runtime, ANSWER)
    ask(runtime, first)
    other = tokens_of(runtime, USER.format("Tell me about Peru, its mountains and its coast."))
    assert runtime._core.match(0, other)[1]  # another conversation
    ask(runtime, other)
    further = tokens_of(
        runtime,
        USER.format("Where is it?") + ANSWER + "<|im_end|>\n" + USER.format("And Peru?"),
    )
    assert runtime._core.match(0, further) == (len(first), True)
    assert ask(runtime, further)[1] == len(first)
    assert ask(runtime, other)[0] == 1


def test_a_copy_stays_for_further_prompts_with_its_prefix(runtime):
    system = tokens_of(runtime, USER.format("You are a guide. " * 12))
    texts = [
        system + tokens_of(runtime, f"{name}: where is it?") for name in ("Oslo", "Lima", "Cairo")
    ]
    for text in texts:
        ask(runtime, text)
    ask(runtime, tokens_of(runtime, "An entirely different text, about nothing in particular."))
    for text in texts:
        assert ask(runtime, text)[0] == 1


@pytest.mark.parametrize(
    ("data", "stop"),
    [
        ({"n_predict": 3, "ignore_eos": True}, "limit"),
        ({"n_predict": 40, "ignore_eos": True, "stop": [" ", "a", "e", "o", "\n"]}, "word"),
        ({"n_predict": 3, "logit_bias": [[2, 1000]]}, "end"),
    ],
)
def test_stop_reason_and_token_times(runtime, data, stop):
    prompt = tokens_of(runtime, USER.format("Where is it?"))
    running = submitted(runtime, prompt, **data)
    status, text = whole(running)
    answer = json.loads(text)
    times = running._request.token_times()
    assert status == 200 and len(times) == answer["timings"]["predicted_n"]
    assert times == sorted(times) and times[0] > 0
    assert times[-1] - times[0] == pytest.approx(
        1000 * answer["timings"]["predicted_ms"], abs=20_000
    )
    look = runtime._core.look(0)
    assert look == (len(prompt) + len(times) - 1, stop, False)


def test_an_answer_that_fills_the_context_reports_it(runtime):
    with serving(**KEPT | {"ctx": 128}) as small:
        ask(small, tokens_of(small, ANSWER), n_predict=-1, ignore_eos=True)
        assert small._core.look(0)[1:] == ("limit", True)
        ask(small, tokens_of(small, ANSWER))
        assert small._core.look(0)[1:] == ("limit", False)


def test_a_cancelled_answer_has_no_stop_reason(monkeypatch):
    with serving(**DYMOE) as runtime:
        held = Held(runtime.inside.policy, monkeypatch)
        ask(runtime, tokens_of(runtime, ANSWER))
        held.hold(0)
        prompt = tokens_of(runtime, ANSWER)
        cancel_at_hold(held, submitted(runtime, prompt, n_predict=40, ignore_eos=True))
        runtime._core.settle()
        assert runtime._core.look(0).stop == "none"


@pytest.mark.parametrize("order", ["reading last", "reading first", "reading after a refusal"])
def test_reading_a_sequence_waits_for_its_own_answer_only(monkeypatch, order):
    """Neither the reading nor another answer on this slot waits forever."""
    with serving(2, **DYMOE) as runtime:
        core, held = runtime._core, Held(runtime.inside.policy, monkeypatch)
        prompt = tokens_of(runtime, ANSWER)
        ask(runtime, prompt, 1)
        held.hold(0)
        answers = [submitted(runtime, prompt, n_predict=8, ignore_eos=True)]
        assert held.reached.wait(HANG_S)
        found = {}
        asking = [
            threading.Thread(target=lambda n=n: found.setdefault(n, len(core.tokens(n))))
            for n in range(2)
        ]
        if order == "reading first":
            asking[0].start()
            asking[0].join(0.1)  # nothing shows that it is queued; without this the order varies
        wrong = [10**6] if order == "reading after a refusal" else prompt
        answers.append(submitted(runtime, wrong, ignore_eos=True))
        if order != "reading first":
            answers[1].wait(0.1)  # the same
            asking[0].start()
        asking[1].start()
        held.go_on.set()
        for each in asking:
            each.join(HANG_S)
            assert not each.is_alive()
        assert [whole(each)[0] for each in answers] == [200, 400 if wrong != prompt else 200]
        # The last token of the running answer is not read yet.
        assert found[1] == len(prompt)
        assert found[0] in (len(prompt) + 7, len(prompt))


def test_a_conversation_is_restored_from_a_file(runtime, tmp_path):
    prompt = tokens_of(runtime, USER.format("Where is it?"))
    ask(runtime, prompt, n_predict=6, ignore_eos=True)
    core, path = runtime._core, tmp_path / "kept"
    held = core.tokens(0)
    n_bytes, n_tokens, marks = core.save(0, path)
    assert (n_tokens, marks) == (len(held), []) and n_bytes == path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100))
    assert core.forget(0) and core.tokens(0) == []
    assert core.restore(0, path) and core.tokens(0) == held
    assert ask(runtime, [*held, 67])[0] == 1
    assert not core.restore(0, tmp_path / "missing")
    assert core.tokens(0) == []


def test_policy_notes_are_kept_with_the_tokens():
    """The policy's state is noted at the end of each prompt and answer.

    It is returned with a prefix or a copy.
    """
    said, notes = [], []

    def noted(_sequence):
        notes.append(len(notes))
        return b"%d" % notes[-1]

    with serving(**KEPT, cache_ram=8 * MIB) as runtime:
        runtime._core.keep_notes(noted, lambda sequence, state: said.append((sequence, state)))
        first = tokens_of(runtime, USER.format("Where is it, and who lives there?"))
        other = tokens_of(runtime, "An entirely different text, about nothing in particular.")
        ask(runtime, first, n_predict=4, ignore_eos=True)
        assert (len(notes), said) == (1, [])  # at the beginning of the answer
        ask(runtime, first, n_predict=4, ignore_eos=True)
        assert (len(notes), said) == (3, [(0, b"0")])
        held = runtime._core.tokens(0)
        ask(runtime, other, n_predict=4, ignore_eos=True)
        assert (len(notes), said) == (5, [(0, b"0")])  # another conversation inherits nothing
        assert ask(runtime, [*held, 67], n_predict=1)[0] == 1
        # The state at the end of the first conversation, before the second one.
        assert said[1:] == [(0, b"3")]
