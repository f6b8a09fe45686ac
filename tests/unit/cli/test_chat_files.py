"""Conversations in files: /save, /load, --resume."""

import json

import fake_engine
import pytest

from orchestrator.chat.session import (
    LastConversation,
    Session,
    read_conversation,
    write_conversation,
)
from orchestrator.config import Config
from orchestrator.errors import ConfigError

TURNS = [
    {"role": "user", "content": "wö bist du\n?"},
    {"role": "assistant", "content": "here \u2028 there"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": ""},
]
SYSTEM = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (TURNS, TURNS),
        ([SYSTEM, *TURNS[:2]], [SYSTEM, *TURNS[:2]]),
        (TURNS[:3], TURNS[:2]),  # a question without an answer is left out
    ],
)
def test_what_is_written_is_read(tmp_path, written, read):
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
    "a system prompt alone": json.dumps(SYSTEM).encode(),
    "two in a row": b'{"role": "user", "content": "a"}\n' * 2,
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_one_sentence(tmp_path, name):
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(WRONG[name])
    with pytest.raises(ConfigError, match=r"wrong\.jsonl: this is no conversation"):
        read_conversation(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: No such file"):
        read_conversation(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigError, match="--resume: no conversation is kept"):
        LastConversation(tmp_path).read()


def session():
    config = Config.build(model="fake.gguf", system="Be long.")
    return Session(fake_engine.FakeEngine(config), config)


def test_a_loaded_conversation_goes_on():
    talk = session()
    list(talk.answer("hello"))
    talk.load([SYSTEM, *TURNS[:2]])
    list(talk.answer("three"))
    assert [each["content"] for each in talk.engine.seen[-1]] == [
        "Be short.",
        *(each["content"] for each in TURNS[:2]),
        "three",
    ]
    talk.load(TURNS)
    talk.reset()
    assert talk.messages == []  # its system prompt is that of the conversation


def test_the_latest_conversation_is_kept_after_each_answer(tmp_path):
    talk = session()
    talk.keeper = LastConversation(tmp_path)
    for text in ("hello", "more"):
        list(talk.answer(text))
        assert talk.keeper.read() == talk.messages
    list(talk.answer("silence"))
    assert talk.keeper.read() == talk.messages
    talk.keeper = LastConversation(tmp_path / "gone")
    list(talk.answer("hello"))  # done without
