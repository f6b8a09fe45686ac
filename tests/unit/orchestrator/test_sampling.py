"""Where an answer ends, and how settings of sampling are written."""

from __future__ import annotations

import pytest

from orchestrator.config import Config, Sampling
from orchestrator.engine.texts import StopTexts
from orchestrator.errors import SettingError


def streamed(pieces: list[str], *stop: str) -> tuple[list[str], bool]:
    texts = StopTexts(stop)
    shown = []
    for piece in pieces:
        shown.append(texts.feed(piece))
        if texts.found:
            return shown, True
    return [*shown, texts.rest()], False


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "found"),
    [
        (["one two"], [], "one two", False),
        (["one STOP two"], ["STOP"], "one ", True),
        (["one S", "TO", "P two"], ["STOP"], "one ", True),
        (["one ST", "AR"], ["STOP"], "one STAR", False),
        (["one ST"], ["STOP"], "one ST", False),
        (["SSTOP"], ["STOP"], "S", True),
        (["abab", "c"], ["ababc"], "", True),
        (["a b c"], ["c", "b"], "a ", True),
        (["x\n", "\ny"], ["\n\n"], "x", True),
    ],
)
def test_a_stop_text_ends_an_answer(pieces, stop, shown, found):
    said, ended = streamed(pieces, *stop)
    assert ("".join(said), ended) == (shown, found)
    # The same letter by letter.
    said, ended = streamed(list("".join(pieces)), *stop)
    assert ("".join(said), ended) == (shown, found)


def test_only_what_may_begin_a_stop_text_is_held_back():
    assert streamed(["one ", "ST", "AR", "T"], "STOP")[0] == ["one ", "", "STAR", "T", ""]


def test_a_config_has_the_settings_of_sampling():
    config = Config.build(model="m", temp=0.5, top_k=3, min_p=0.1, stop=("a", "b"))
    assert config.sampling == Sampling(temp=0.5, top_k=3, min_p=0.1, stop=("a", "b"))
    assert set(Sampling.declared()) <= set(Config.declared())


def test_texts_are_read_as_a_shell_reads_them():
    stop = Sampling.declared()["stop"]
    assert stop.parse("'the end' User:") == ("the end", "User:")
    assert stop.parse("-") == ()
    for wrong in ("'a", "''"):
        with pytest.raises(SettingError):
            stop.parse(wrong)
