"""Estimates the memory for reading a body: its number of tokens and its longest word."""

from __future__ import annotations

import re
import unicodedata
from functools import cached_property

from gguf_tools.experts import ExpertModel
from gguf_tools.file.reader import metadata_value
from orchestrator.native.llama import Model
from orchestrator.serve.admission import BODY_FACTOR, WHOLE_FACTOR

# Texts are tokenized in pieces of this length, so that counting needs little memory.
PIECE_CHARS = 8192
# Values of `tokenizer.ggml.pre` for which llama.cpp does not split a text into words before it
# merges. It splits into clauses (words joined across spaces) or into lines instead.
_BY_CLAUSE, _BY_LINE = ("exaone-moe", "deepseek-llm"), ("gemma4", "sarvam-moe")
# The range of code points that contains combining marks. A mark belongs to the letter before it.
_MARKED = range(0x300, 0x1F000)


class Words:
    """Estimates how much memory tokenizing a text takes.

    The memory depends on the number of tokens and on the longest word, because a tokenizer merges
    bytes or characters only within a word. This class may find longer words than llama.cpp's
    tokenizer, but never shorter ones. `is_whole` tells whether the tokenizer merges across the
    whole text, instead of within words.
    """

    def __init__(self, kind: str, cut: str) -> None:
        """Choose the units for a tokenizer.

        `kind` and `cut` are a model's values of `tokenizer.ggml.model` and `tokenizer.ggml.pre`.
        """
        self.is_whole = kind not in ("gpt2", "gemma4")
        # A symbol is a byte, or a character for tokenizers that split into lines.
        self._by_byte = kind == "gpt2" and cut not in _BY_LINE
        self._joins_spaces = cut in _BY_CLAUSE

    @classmethod
    def of(cls, model: ExpertModel) -> Words:
        """Return an estimator of the memory that the tokenizer of a model takes."""
        keys = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
        return cls(*(metadata_value(model.parts[0], key, str, "") for key in keys))

    @property
    def body_factor(self) -> int:
        """Memory for parsing and tokenizing a request body, in bytes for each byte of the body."""
        return WHOLE_FACTOR if self.is_whole else BODY_FACTOR

    def count_tokens(self, text: str, model: Model) -> tuple[int, int]:
        """Return (approximate number of tokens, length of the longest word) of a text.

        The length is in characters. Returns (0, 0) if `is_whole` is true, because the tokenizer
        then does not split texts into words. A long text can take seconds.
        """
        if self.is_whole:
            return 0, 0
        n_tokens = sum(
            len(model.tokenize(text[at : at + PIECE_CHARS], add_special=False, parse_special=True))
            for at in range(0, len(text), PIECE_CHARS)
        )
        return n_tokens, self.longest(text)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        """Regular expressions that each match one kind of word.

        They are computed on first use, because collecting all combining marks takes 0.05 s.
        """
        if not self._by_byte:
            return [re.compile(r"[^\n]+"), re.compile(r"\n+")]
        marks = "".join(chr(n) for n in _MARKED if unicodedata.category(chr(n)).startswith("M"))
        spaces = r"|[^\S\r\n]" if self._joins_spaces else ""
        letters = re.compile(rf"(?:[^\W_]|[{marks}]{spaces})+")
        return [letters, re.compile(r"[\W_]+")]

    def longest(self, text: str) -> int:
        """Return the length of the longest word of a text, in symbols (bytes or characters).

        The text is searched in pieces, so that other threads can run between two pieces.
        """
        return max((self._longest_of(each, text) for each in self._patterns), default=0)

    def _longest_of(self, pattern: re.Pattern[str], text: str) -> int:
        longest = 0
        begun = 0  # length of the word that reaches the end of the previous piece
        for at in range(0, len(text), PIECE_CHARS):
            piece = text[at : at + PIECE_CHARS]
            goes_on = False
            for found in pattern.finditer(piece):
                word = found[0]
                length = len(word.encode() if self._by_byte else word)
                if found.start() == 0:
                    length += begun
                longest = max(longest, length)
                if found.end() == len(piece):
                    begun, goes_on = length, True
            begun = begun if goes_on else 0
        return longest
