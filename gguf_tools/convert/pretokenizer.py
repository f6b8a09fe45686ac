"""Recognize llama.cpp's pre-tokenizers in a tokenizer.json.

llama.cpp's converter recognizes a pre-tokenizer by a hash of the tokens of a test text, so it only
knows published vocabularies. This module compares the pre-tokenizer's rules instead, which works
for any vocabulary.
"""

import json
from pathlib import Path
from typing import Any

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = _WORDS.format(digits=r"\p{N}")
LLAMA3_SPLIT = _WORDS.format(digits=r"\p{N}{1,3}")
_SPLITS = {QWEN2_SPLIT: "qwen2", LLAMA3_SPLIT: "llama-bpe"}


def pre_tokenizer(folder: Path) -> str | None:
    """Return llama.cpp's name of the rules by which a checkpoint's tokenizer splits texts.

    The name is the value of the GGUF key `tokenizer.ggml.pre`. Return None if tokenizer.json is
    missing, is not a byte-level BPE, or has rules that this module does not know.
    """
    try:
        rules = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        if rules["model"]["type"] != "BPE" or not _is_neutral(rules.get("normalizer")):
            return None
        return _known(rules.get("pre_tokenizer") or {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _is_neutral(normalizer: Any) -> bool:
    """Return whether llama.cpp can ignore this normalizer of a tokenizer.json.

    The normalizer NFC is ignored, because texts usually contain composed characters already.
    """
    return normalizer is None or normalizer == {"type": "NFC"}


def _known(pre: dict[str, Any]) -> str | None:
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not splits:
        return "gpt-2" if last.get("use_regex", True) else None
    split = splits[0]
    whole = len(splits) == 1 and split["type"] == "Split" and split["behavior"] == "Isolated"
    if not whole or split.get("invert") or last.get("use_regex", True):
        return None
    return _SPLITS.get(split["pattern"].get("Regex", ""))
