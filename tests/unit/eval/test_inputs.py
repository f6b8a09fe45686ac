"""Texts and questions from files, and errors of one sentence for bad ones."""

import json
import lzma
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.lab.calibrate.capture import read_calibration
from orchestrator.lab.eval import EvalOptions
from orchestrator.lab.eval.judge import read_questions
from orchestrator.lab.eval.text import (
    Document,
    needed_tokens,
    read_documents,
    windows_of,
)


class Letters:
    """An engine whose tokens are characters. begin: list with the begin token, or empty."""

    def __init__(self, begin):
        self.begin, self.n_ctx = begin, 1 << 20

    def tokenize(self, text):
        return self.begin + [ord(letter) for letter in text]


def cut(documents, length, limit, begin):
    options = EvalOptions(Path("text.txt"), tokens=limit, window=length)
    return options.windows(Letters(begin), documents)


def test_windows_hold_every_token_once():
    text = "".join(chr(97 + i % 26) for i in range(50))
    windows = cut([Document(text)], 16, None, [])
    assert [token for window in windows for token in window.tokens] == [ord(c) for c in text]
    assert [window.first for window in windows] == [1, 1, 1, 1]
    windows = cut([Document(text)], 16, None, [7])
    assert all(window.tokens[0] == 7 and len(window.tokens) <= 16 for window in windows)
    assert [t for window in windows for t in window.tokens[1:]] == [ord(c) for c in text]
    assert sum(window.n_scored for window in windows) == 50


def test_a_context_is_read_and_not_scored():
    document = Document("y" * 30, context="x" * 20)
    for begin in ([], [7]):
        windows = cut([document], 100, None, begin)
        assert len(windows) == 1 and windows[0].n_scored == 30
        assert windows[0].tokens[windows[0].first] == ord("y")
        windows = cut([document], 16, None, begin)
        scored = [t for window in windows for t in window.tokens[window.first :]]
        assert set(scored) == {ord("y")}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.xz"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, name):
    text = json.dumps({"text": "wö"}) if "jsonl" in name else "wö"
    data = text.encode("utf-8-sig")
    (tmp_path / name).write_bytes(lzma.compress(data) if name.endswith(".xz") else data)
    assert read_documents(tmp_path / name) == [Document("wö")]


def test_a_limit_counts_scored_tokens():
    documents = [Document("a" * 30), Document("b" * 30, context="c" * 5)]
    windows = cut(documents, 64, 40, [])
    assert [window.n_scored for window in windows] == [29, 11]


@pytest.mark.parametrize("text", ["short", "a" * 16])
def test_too_short_a_text_is_refused(text):
    with pytest.raises(ConfigError, match=r"text.txt: \d+ tokens are too few"):
        cut([Document(text)], 64, None, [])


def test_documents_of_each_kind_of_file(tmp_path):
    plain = tmp_path / "a.txt"
    plain.write_text("Grüße")
    assert read_documents(plain) == [Document("Grüße")]
    packed = tmp_path / "a.jsonl.xz"
    records = [{"text": "one"}, {"text": "two", "context": "c", "domain": "d"}]
    with lzma.open(packed, "wt", encoding="utf-8") as file:
        file.write("\n\n".join(json.dumps(record) for record in records))
    assert read_documents(packed) == [Document("one"), Document("two", "c", "d")]


BAD_TEXTS = [
    ("a.txt", b" \n", "holds no text"),
    ("a.txt", b"\xff\xfe\x00", "is not a text in UTF-8"),
    ("a.xz", b"no xz at all", "is not an xz file"),
    ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', 'line 2: "text"'),
    ("a.jsonl", b"{\n", "line 1 is not JSON"),
    ("a.jsonl", b"[1]\n", "line 1 is not a JSON object"),
    ("a.jsonl", b"", "holds no text"),
]


@pytest.mark.parametrize(("name", "data", "message"), BAD_TEXTS)
def test_bad_texts(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_documents(path)
    assert str(path) in str(caught.value)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_answers_are_indices_or_letters(tmp_path):
    both = {"question": "Q", "choices": ["x", "y"]}
    path = write(tmp_path / "q.jsonl", both | {"answer": 1}, both | {"answer": "b", "context": "C"})
    first, second = read_questions(path)
    assert (first.prompt, first.answer) == ("Q", 1)
    assert (second.prompt, second.answer) == ("C\n\nQ", 1)


GOOD = {"question": "Q", "choices": ["x", "y"], "answer": 0}
BAD_QUESTIONS = [
    ({"question": ""}, '"question"'),
    ({"choices": ["x"]}, '"choices"'),
    ({"choices": ["x", 3]}, '"choices"'),
    ({"choices": ["x", ""]}, '"choices"'),
    ({"answer": 2}, '"answer"'),
    ({"answer": "c"}, '"answer"'),
    ({"answer": True}, '"answer"'),
    ({"answer": None}, '"answer"'),
    ({"context": 3}, '"context"'),
]


@pytest.mark.parametrize(("change", "message"), BAD_QUESTIONS)
def test_bad_questions(tmp_path, change, message):
    with pytest.raises(ConfigError, match=f"line 2.*{message}"):
        read_questions(write(tmp_path / "q.jsonl", GOOD, GOOD | change))


class Words:
    """A tokenizer with words of four characters that counts the characters it gets."""

    def __init__(self):
        self.n_characters = 0

    def tokenize(self, text):
        self.n_characters += len(text)
        return [1, *(int(text[at : at + 3]) for at in range(0, len(text) - 2, 4))]


@pytest.mark.parametrize("prompt", [None, 24])
def test_no_more_of_a_long_text_is_read_than_its_tokens_need(tmp_path, prompt):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"{n % 1000:03} " for n in range(200_000)))
    whole = windows_of(Words().tokenize, read_documents(path), 32, None, prompt)
    tokenizer = Words()
    documents = read_documents(path, needed_tokens(100, 32, prompt))
    found = windows_of(tokenizer.tokenize, documents, 32, 100, prompt)
    assert sum(each.n_scored for each in found) == 100
    assert [each.tokens for each in found[:-1]] == [each.tokens for each in whole[: len(found) - 1]]
    last = found[-1].tokens
    assert last == whole[len(found) - 1].tokens[: len(last)]
    assert len(documents[0].text) < 80_000 and tokenizer.n_characters < 30_000


def test_a_text_with_few_tokens_is_read_until_there_are_enough(tmp_path):
    class Sparse(Words):
        def tokenize(self, text):
            self.n_characters += len(text)
            return [1, *([2] * (len(text) // 60))]

    found = windows_of(Sparse().tokenize, [Document("x" * 1_000_000)], 32, 1000)
    assert sum(each.n_scored for each in found) == 1000


def test_no_more_lines_are_read_than_their_tokens_need(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text('{"text": "one two three"}\n' * 50_000 + "no JSON\n")
    found = read_documents(path, 100)
    assert 100 * 64 <= sum(len(each.text) for each in found) < 100 * 64 + 20
    with pytest.raises(ConfigError, match="line 50001 is not JSON"):
        read_documents(path)


def test_a_device_is_refused_for_calibration():
    with pytest.raises(ConfigError, match="/dev/zero is not a regular file"):
        read_calibration(Words().tokenize, Path("/dev/zero"))
