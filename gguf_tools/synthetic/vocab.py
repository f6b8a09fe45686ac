"""Tokenizer metadata of synthetic models, with small vocabularies that can encode any text."""

from typing import Any

TOKEN_TYPE = "tokenizer.ggml.token_type"
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def bpe(n_vocab: int) -> dict[str, Any]:
    """Return GGUF metadata of a synthetic byte-level BPE vocabulary with n_vocab tokens.

    The tokens are 256 bytes, pairs of letters, unused tokens and three control tokens.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    symbols = [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]
    pairs = [(x, y) for x in "\u0120" + _LETTERS for y in _LETTERS][: n_vocab - 259]
    control = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokens = symbols + [x + y for x, y in pairs]
    tokens += [f"[unused{i}]" for i in range(n_vocab - 3 - len(tokens))] + control
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        TOKEN_TYPE: [_NORMAL] * (n_vocab - 3) + [_CONTROL] * 3,
        "tokenizer.ggml.merges": [f"{x} {y}" for x, y in pairs],
        "tokenizer.ggml.bos_token_id": n_vocab - 1,
        "tokenizer.ggml.eos_token_id": n_vocab - 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def spm(n_vocab: int) -> dict[str, Any]:
    """Return GGUF metadata of a synthetic SentencePiece vocabulary with n_vocab tokens.

    The tokens are three special tokens, 256 bytes, letters, pairs of letters and unused tokens.
    """
    pieces = ["\u2581", *_LETTERS] + [x + y for x in "\u2581" + _LETTERS for y in _LETTERS]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces = pieces[: n_vocab - len(tokens)]
    pieces += [f"[unused{i}]" for i in range(n_vocab - len(tokens) - len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        TOKEN_TYPE: [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
