"""The conversation in chat: its messages, the part that the model sees, stopped answers, and saved
files."""

import json
import os
import signal
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runtime import STATS, FakeRuntime, n_tokens
from pictures import black, grey, url
from tables import cases

from gguf_tools import interrupts
from orchestrator.chat.chat import one_shot, stats_fields
from orchestrator.chat.console import Console
from orchestrator.chat.session import (
    KEPT_CONVERSATIONS,
    Session,
    latest_conversation,
    new_conversation,
    read_conversation,
    write_conversation,
)
from orchestrator.config import Config
from orchestrator.errors import ConfigError, GGUFError
from orchestrator.runtime.images import ImageLimits, image_part


def make(**settings):
    config = Config.build(model=Path("x.gguf"), **settings)
    return Session(FakeRuntime(config), config)


SYSTEM_BRIEF = {"role": "system", "content": "Be brief."}


def said(pieces):
    return [piece.text for piece in pieces]


def turns(*texts):
    """Messages of user and assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def test_an_answer_joins_the_conversation():
    session = make(system="Be brief.")
    assert said(session.answer("hello")) == ["Hi", " there", "!"]
    list(session.answer("more"))
    assert session.messages == [SYSTEM_BRIEF, *turns("hello", "Hi there!", "more", "<more>")]
    assert session.runtime.seen[-1] == session.messages[:-1]
    session.reset()
    assert session.messages == [SYSTEM_BRIEF]


def test_a_repeated_answer_replaces_the_last_one():
    session = make()
    list(session.answer("hello"))
    list(session.answer("more"))
    session.messages[-1]["content"] = "an unwanted answer"
    assert said(session.answer_again()) == ["<more>"]
    assert session.messages == turns("hello", "Hi there!", "more", "<more>")
    session.reset()
    with pytest.raises(ConfigError, match="nothing was answered"):
        list(session.answer_again())


@pytest.mark.parametrize("text", ["fail", "silence"])
def test_the_old_answer_stays_if_its_repetition_fails(text):
    session = make()
    session.messages = turns(text, "old")
    with suppress(GGUFError):
        list(session.answer_again())
    assert session.messages == turns(text, "old")


def test_an_error_in_the_output_ends_the_answer_at_once(monkeypatch):
    """If the answer ended later, with the frames of the error, the runtime could be closed."""

    def broken(_console, _text):
        raise BrokenPipeError

    monkeypatch.setattr(Console, "answer", broken)
    session = make()
    with pytest.raises(BrokenPipeError) as error:
        one_shot(session, Console(), "hello", as_json=False)
    assert error.tb and session.last_stats is not None
    assert session.messages == turns("hello", "Hi")


def test_without_a_limit_an_answer_ends_with_the_context():
    session = make(ctx=100)
    assert len(list(session.answer("long"))) == 100
    assert session.last_stats.finish == "length"
    assert len(list(make(ctx=100, max_tokens=5).answer("long"))) == 5


@pytest.mark.parametrize("text", ["fail", "silence"])
def test_a_message_without_an_answer_is_forgotten(text):
    session = make()
    list(session.answer("hello"))
    with pytest.raises(GGUFError, match="offset 4096") if text == "fail" else nullcontext():
        assert list(session.answer(text)) == []
    assert session.messages == turns("hello", "Hi there!")


@pytest.mark.parametrize(
    ("at", "text", "most"),
    [("submit", "long", 0), ("submit", "endless prompt", 0)],
)
def test_ctrl_c_before_the_answer_begins_is_not_lost(monkeypatch, at, text, most):
    session = make()
    begins = getattr(session.runtime, at)

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return begins(*args)

    monkeypatch.setattr(session.runtime, at, interrupted)
    with interrupts.calling(session.stop):
        pieces = list(session.answer(text))
    assert session.stopped
    assert len(pieces) <= most and len(session.messages) == 2 * len(pieces)


def test_an_abandoned_answer_restores_the_signal_handler():
    session = make()
    with interrupts.calling(session.stop), closing(session.answer("long")) as pieces:
        next(pieces)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert session.messages[-1] == {"role": "assistant", "content": "0 "}


def test_the_oldest_messages_are_left_out_of_a_full_context():
    session = make(ctx=160, max_tokens=40, system="Be brief.")
    for number in range(40):
        list(session.answer(f"message number {number} of forty"))
        seen = session.runtime.seen[-1]
        assert seen[0]["role"] == "system"
        pairs = len(seen) // 2 - 1
        assert [each["role"] for each in seen[1:]] == ["user", "assistant"] * pairs + ["user"]
        assert seen[-1]["content"] == f"message number {number} of forty"
        assert sum(map(n_tokens, seen)) <= 120
    assert len(session.messages) == 81
    assert session.left_out > 0
    # Messages are dropped down to half of the context at once, so that most turns keep their
    # prefix.
    starts = [seen[1]["content"] for seen in session.runtime.seen]
    assert len(set(starts)) <= 12
    session.reset()
    assert session.left_out == 0


def test_one_long_message_is_passed_on_whole():
    session = make(ctx=64)
    list(session.answer("word " * 100))
    assert session.left_out == 0
    assert len(session.runtime.seen[-1]) == 1


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    session = make()
    list(session.answer("hello"))
    path = tmp_path / "talk.jsonl"
    path.write_text("before")

    def fail(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_conversation(path, session.messages)
    assert os.listdir(tmp_path) == ["talk.jsonl"]
    assert path.read_text() == "before"


def test_the_statistics_line_of_a_managed_model():
    assert stats_fields(STATS, 2**30) == [
        *("first word 12 ms", "48.9 tok/s", "experts 93 % in memory", "memory 300 MiB of 1 GiB")
    ]


PLAIN = {"tokens_per_s": float("nan"), "hit_rate": None, "bytes_read": 0, "budget_bytes": 0}
PLAIN["mode"] = "llama.cpp's own path: everything fits (0.05 of 12.0 GiB)"


@cases(
    "changes, first",
    (PLAIN, ["first word 12 ms", "memory 300 MiB of 1 GiB"]),
    ({"finish": "end", "ttft_ms": 61234.0}, ["first word 61.2 s"]),
    ({"finish": "length"}, ["cut at --max-tokens"]),
    ({"finish": "context"}, ["answer cut: the context (--ctx) is full"]),
    ({"finish": "cancelled"}, ["stopped"]),
    (
        {"kl_estimate": 0.0098, "hit_rate": None},
        ["first word 12 ms", "48.9 tok/s", "estimated loss 0.0098"],
    ),
    (
        {"kl_estimate": 0.0049, "hit_rate": None, "limit_halved": True},
        ["first word 12 ms", "48.9 tok/s", "estimated loss 0.0049, limit halved"],
    ),
)
def test_the_statistics_line_of_other_answers(changes, first):
    found = stats_fields(replace(STATS, **changes), 2**30)
    assert found[: len(first)] == first and (changes != PLAIN or found == first)


TURNS = turns("wö bist du\n?", "here \u2028 there", "two", "")
SYSTEM = {"role": "system", "content": "Be short."}
SEEN = [image_part(url(black())), {"type": "text", "text": "wö ist das?"}]
SHOWN = [{"role": "user", "content": SEEN}, {"role": "assistant", "content": "Black."}]


@cases(
    "written, read",
    (TURNS, TURNS),
    ([SYSTEM, *TURNS[:2]], [SYSTEM, *TURNS[:2]]),
    (TURNS[:3], TURNS[:2]),  # a question without an answer is left out
    (SHOWN, SHOWN),
)
def test_a_written_conversation_is_read_back(tmp_path, written, read):
    path = tmp_path / "saved.jsonl"
    write_conversation(path, written)
    assert read_conversation(path) == read
    assert path.stat().st_mode & 0o777 == 0o600
    assert "wö" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


WRONG = {
    "nothing": b"",
    "a text": b"hello\n",
    "not UTF-8": b"\xff\xfe\n",
    "a list": b"[1]\n",
    "a number": b'{"role": "user", "content": 1}\n',
    "more": b'{"role": "user", "content": "a", "name": "b"}\n',
    "an unknown part": b'{"role": "user", "content": [{"type": "audio"}]}\n',
    "a part of two kinds": b'{"role": "user", "content": [{"type": "text", "text": 1}]}\n',
    "an image of the model": json.dumps({**SHOWN[0], "role": "assistant"}).encode(),
    "an image without data": b'{"role": "user", "content": [{"type": "image_url"}]}\n',
    "a system prompt alone": json.dumps(SYSTEM).encode(),
    "two in a row": b'{"role": "user", "content": "a"}\n' * 2,
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused(tmp_path, name):
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(WRONG[name])
    with pytest.raises(ConfigError, match=r"wrong\.jsonl: this file is not a conversation"):
        read_conversation(path)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: No such file"):
        read_conversation(tmp_path / "gone.jsonl")


def test_a_loaded_conversation_goes_on():
    talk = make(system="Be long.")
    list(talk.answer("hello"))
    talk.load([SYSTEM, *TURNS[:2]])
    list(talk.answer("three"))
    assert talk.runtime.seen[-1] == [SYSTEM, *TURNS[:2], *turns("three")]
    talk.load(TURNS)
    talk.reset()
    assert talk.messages == []  # the loaded conversation has no system prompt


def test_the_latest_conversation_is_kept_after_each_answer(tmp_path):
    talk = make(system="Be long.")
    talk.kept = tmp_path / "last.jsonl"
    for text in ("hello", "more"):
        list(talk.answer(text))
        assert read_conversation(talk.kept) == talk.messages
    list(talk.answer("silence"))
    assert read_conversation(talk.kept) == talk.messages
    talk.kept = tmp_path / "new" / "last.jsonl"
    list(talk.answer("hello"))
    assert read_conversation(talk.kept) == talk.messages
    talk.kept = talk.kept / "last.jsonl"
    list(talk.answer("hello"))  # a failed save is ignored


def test_the_oldest_conversations_go(tmp_path):
    paths = [tmp_path / f"{n}.jsonl" for n in range(KEPT_CONVERSATIONS)]
    for n, path in enumerate(reversed(paths)):
        path.write_text("")
        os.utime(path, (n, n))
    made = new_conversation(tmp_path)
    assert latest_conversation(tmp_path) == paths[0]
    assert sorted(tmp_path.iterdir()) == sorted(paths[:-1])
    write_conversation(made, TURNS)
    assert latest_conversation(tmp_path) == made
    assert latest_conversation(tmp_path / "none") is None


def test_images_stay_in_the_conversation(tmp_path):
    talk = make()
    talk.kept = tmp_path / "last.jsonl"
    assert said(talk.answer("shown", images=[url(black()), url(black())])) == ["I see 2 images"]
    assert said(talk.answer("shown")) == ["I see 2 images"]
    parts = [image_part(url(black()))] * 2
    assert talk.messages[0]["content"] == [*parts, {"type": "text", "text": "shown"}]
    assert read_conversation(talk.kept) == talk.messages
    del talk.messages[2:]
    talk.messages[-1]["content"] = "wrong"
    assert said(talk.answer_again()) == ["I see 2 images"]
    assert len(talk.messages) == 2 and talk.messages[0]["content"][:2] == parts
    again = make()
    again.load(read_conversation(talk.kept)[:2])
    assert said(again.answer("shown")) == ["I see 2 images"]


def test_images_that_the_model_cannot_read_are_refused(tmp_path):
    talk = make()
    list(talk.answer("shown", images=[url(black())]))
    talk.change_model(Path("blind.gguf"))
    with pytest.raises(ConfigError, match="--mmproj"):
        list(talk.answer("what was it?"))
    assert len(talk.messages) == 2
    with pytest.raises(ConfigError, match="--mmproj"):
        talk.load(SHOWN)
    talk.reset()
    assert said(talk.answer("hello")) == ["Hi", " there", "!"]
    few = make()
    few.runtime.images = ImageLimits(count=1)
    few.check_images([url(grey())])
    list(few.answer("a", images=[url(grey())]))
    with pytest.raises(ConfigError, match="2 images, and the limit is 1"):
        few.check_images([url(grey())])


def test_images_count_when_exchanges_are_left_out():
    talk = make(ctx=160, max_tokens=40)
    for _ in range(8):
        list(talk.answer("shown", images=[url(black())]))
        assert sum(map(n_tokens, talk.runtime.seen[-1])) <= 120
    assert talk.left_out > 0 and len(talk.messages) == 16
