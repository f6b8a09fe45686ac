"""Pre-tokenizers are recognised by their rules in tokenizer.json."""

import json

from tables import cases

from gguf_tools.convert.pretokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, pre_tokenizer

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
WORDS = {**BYTES, "use_regex": True}


def split(pattern, **changes):
    first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [{**first, **changes}, BYTES]}


def rules(pre, kind="BPE", normalizer=None):
    return {"model": {"type": kind}, "normalizer": normalizer, "pre_tokenizer": pre}


@cases(
    "content, expected",
    (rules(split(QWEN2_SPLIT)), "qwen2"),
    (rules(split(QWEN2_SPLIT), normalizer={"type": "NFC"}), "qwen2"),
    (rules(split(LLAMA3_SPLIT)), "llama-bpe"),
    (rules(WORDS), "gpt-2"),
    (rules(WORDS, normalizer={"type": "NFC"}), "gpt-2"),
    (rules(BYTES), None),
    (rules(split(r"\w+")), None),
    (rules(split(QWEN2_SPLIT, behavior="Removed")), None),
    (rules(split(QWEN2_SPLIT, invert=True)), None),
    (rules(split(QWEN2_SPLIT), kind="Unigram"), None),
    (rules(split(QWEN2_SPLIT), normalizer={"type": "Lowercase"}), None),
    (rules({**WORDS, "add_prefix_space": True}), None),
    (rules(None), None),
    (rules([1]), None),
    ([], None),
    ("{", None),
    ("", None),
)
def test_pre_tokenizers_are_recognised_by_their_rules(content, expected, tmp_path):
    """content: JSON or text of tokenizer.json; an empty text means no file."""
    if content != "":
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "tokenizer.json").write_text(text)
    assert pre_tokenizer(tmp_path) == expected
