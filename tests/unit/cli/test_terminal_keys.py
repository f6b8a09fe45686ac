"""What the terminal makes of keys and widths: pastes, keys typed ahead, lines that are too long."""

import re

import pytest
from pseudo_terminal import CTRL_C, ESCAPES, UP, Terminal
from test_session import make

from gguf_tools import synthetic
from orchestrator.chat.console import WordWrap
from orchestrator.errors import GGUFError

PASTE = "\x1b[200~{}\x1b[201~"


def test_a_paste_of_several_lines_is_one_message(start):
    terminal = start()
    # Terminals mark a paste only where they were asked to.
    assert "\x1b[?2004h" in terminal.raw
    terminal.send(PASTE.format("/first\r\r\tsecond"))
    terminal.wait("second")
    assert "</first\n\n\tsecond!>" in terminal.ask("!").replace("       ", "\t")
    assert "Hi there!" in terminal.ask("hello")
    terminal.send(UP + UP)
    terminal.wait("second")
    assert "second!>" in terminal.ask("")


def test_a_paste_may_hold_a_quoted_message(start):
    terminal = start()
    terminal.send(PASTE.format('"""one\rtwo"""'))
    terminal.wait("two")
    assert "<one\ntwo>" in terminal.ask("")


def test_keys_typed_ahead_wait_for_the_prompt(start):
    terminal = start()
    terminal.send("long\n")
    terminal.wait("5 6 7")
    terminal.send("hello\x7f\x7fp me\n")
    # The keys are read as if they came at the prompt, with what deletes among them.
    answer = terminal.wait(r"<help me>\n(.+\n)+\n> \Z").partition("first word")[0]
    assert "498 499" in answer and "hel" not in answer
    assert "Hi there!" in terminal.ask("hello")


def test_ctrl_c_forgets_what_was_typed_ahead(start):
    terminal = start()
    terminal.send("endless\n")
    terminal.wait("5 6 7")
    terminal.send("hello\n" + CTRL_C)
    terminal.wait("stopped.*\n(.*\n)*> $")
    assert "<again>" in terminal.ask("again")


def test_lines_end_between_words(start):
    terminal = start(COLUMNS="60")
    said = terminal.ask("words").partition("first word")[0].splitlines()[1:]
    assert max(map(len, said)) <= 60
    assert (
        " ".join(line.strip() for line in said).split()
        == ("some lengthy words of an answer " * 12).split()
    )
    assert not re.search(r"^\s", "\n".join(said))


def test_one_answer_is_wrapped_and_has_its_statistics_and_json_is_not(tmp_path):
    args = ("-m", "x.gguf", "-p", "words")
    with Terminal(*args, home=tmp_path) as terminal:
        assert terminal.finish() == 0
        said, _, statistics = ESCAPES.sub("", terminal.raw).partition("\r\nfirst word")
        assert "\r\n" in said and statistics.startswith(" 12 ms · ")
    with Terminal(*args, "--json", home=tmp_path) as terminal:
        assert terminal.finish() == 0
        assert terminal.raw.count("\n") == 1


def wrapped(text, width, by=1):
    wrap = WordWrap(lambda: width)
    pieces = [text[i : i + by] for i in range(0, len(text), by)]
    return "".join(map(wrap.feed, pieces)) + wrap.end()


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("one two three", 7, "one two\nthree"),
        ("one two three", 8, "one two\nthree"),
        ("one  two", 5, "one\ntwo"),
        ("  indented words", 10, "  indented\nwords"),
        ("a verylongword b", 6, "a\nverylongword b"),
        ("one\ntwo three", 9, "one\ntwo three"),
        ("ends with a space ", 80, "ends with a space "),
        ("日本語日本語", 7, "日本語\n日本語"),
        ("a\tb cd", 9, "a\tb\ncd"),
        (
            "```\nsome code that is long\n```\nand words",
            8,
            "```\nsome code that is long\n```\nand\nwords",
        ),
        ("  ```\nx = 1  # y\n  ```\nwords are", 8, "  ```\nx = 1  # y\n  ```\nwords\nare"),
        ("a `` b ``` c", 6, "a `` b\n``` c"),
    ],
)
def test_wrapping(text, width, expected):
    for by in (1, 3, 100):
        assert wrapped(text, width, by) == expected


def test_a_word_is_shown_as_soon_as_it_ends():
    wrap = WordWrap(lambda: 80)
    assert [wrap.feed(piece) for piece in ("He", "llo wor", "ld.\n", "x")] == [
        *("", "Hello", " world.\n", "")
    ]


def test_another_model_goes_on_with_the_conversation(start, tmp_path):
    synthetic.write(tmp_path / "other.gguf", "tiny-olmoe")
    terminal = start()
    terminal.ask("hello")
    terminal.ask("/temp 0.5")
    said = terminal.ask(f"/model {tmp_path}/other.gguf")
    assert "fake other: 8 layers" in said
    assert "0.5 ()" in terminal.ask("sampling")
    assert "4 messages written" in terminal.ask("/save ~/talk.jsonl")


def test_a_model_that_fails_leaves_the_one_before():
    session = make(temp=0.0)
    first = session.engine
    opened = []

    def opens(config):
        opened.append(config)
        if config.model.name == "bad.gguf":
            raise GGUFError("bad.gguf: out of memory")
        return type(first)(config)

    with pytest.raises(GGUFError, match="out of memory"):
        session.change_model("bad.gguf", opens)
    assert first.closed
    assert [config.model.name for config in opened] == ["bad.gguf", "x.gguf"]
    assert list(session.answer("hello")) == ["Hi", " there", "!"]
