"""Declaring settings: a record is checked by what its fields declare."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from orchestrator.errors import ConfigError, SettingError
from orchestrator.settings import FROM_1, Notation, Settings, again, setting


def words_of(text: str) -> tuple[str, ...]:
    if not text:
        raise ConfigError("no words")
    return tuple(text.split("+"))


@dataclass(frozen=True)
class Few(Settings):
    n: int = setting(2, "How many.", within=FROM_1)
    share: float = setting(0.5, "Of them.", within=(0, 1))
    how: str = setting("on", "Or off.", choices=("on", "off"))
    more: int | None = setting(None, "Beside them.", within=FROM_1)
    words: tuple[str, ...] = setting(("a", "b"), "Said.", notation=Notation(words_of, "+".join))


@dataclass(frozen=True)
class Fewer(Few):
    n: int = again(Few, "n", 1)
    share: float = again(Few, "share", option=False, within=(0, 2))
    words: tuple[str, ...] = again(Few, "words", ("c", "d"))


def test_a_record_is_checked_by_what_it_declares() -> None:
    assert Few(more=None) == Few()
    for changes, message in (
        ({"n": 0}, "'n' must be 1 or more, not 0"),
        ({"n": True}, "'n' must be int, not True"),
        ({"share": 1.5}, "'share' must be 0 to 1, not 1.5"),
        ({"share": float("nan")}, "'share' must be 0 to 1, not nan"),
        ({"how": "maybe"}, "'how' must be on or off, not 'maybe'"),
        ({"more": 0}, "'more' must be 1 or more, not 0"),
        ({"words": ["a"]}, r"'words' must be tuple, not \['a'\]"),
    ):
        with pytest.raises(SettingError, match=message):
            Few(**changes)


def test_a_setting_may_be_declared_again_with_changes() -> None:
    before, after = Few.declared(), Fewer.declared()
    assert list(before) == list(after)
    assert (after["n"].default, after["n"].help, after["n"].within) == (1, "How many.", FROM_1)
    assert (after["share"].default, after["share"].option) == (0.5, False)
    assert (before["n"].default, before["share"].option) == (2, True)
    assert Fewer(share=1.5).n == 1
    with pytest.raises(SettingError, match="'n' must be 1 or more, not 0"):
        Fewer(n=0)


def test_a_notation_reads_a_value_and_shows_the_default() -> None:
    words = Fewer.declared()["words"]
    assert words.parse("x+y") == ("x", "y")
    assert (words.default_text, words.metavar) == ("c+d", "LIST")
    with pytest.raises(ConfigError, match="no words"):
        words.parse("")
