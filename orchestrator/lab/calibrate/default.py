"""The text that `moe-edge calibrate` reads if none is given.

It has six kinds: prose, dialogue, code, documentation, German and Spanish. It was written for this
purpose and has the licence of moe-edge.
"""

from __future__ import annotations

import hashlib
from itertools import chain, zip_longest
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.lab.calibrate.capture import LEAST_TOKENS, Calibration
from orchestrator.lab.eval.text import Document, Tokenize, read_text, windows_of

NAME = "the default text"
KINDS = ("prose", "dialogue", "code", "documentation", "german", "spanish")
_FOLDER = Path(__file__).with_name("text")


def default_calibration(tokenize: Tokenize, limit: int, window: int) -> Calibration:
    """Return the built-in calibration text, cut into windows of exactly `window` tokens.

    At most `limit` tokens are returned. Each window contains one kind of text, such as prose or
    code, and the kinds alternate. Raises ConfigError if `limit` is less than LEAST_TOKENS.
    """
    if limit < LEAST_TOKENS:
        raise ConfigError(f"--calib-tokens {limit} is too few: the minimum is {LEAST_TOKENS}")
    texts = [read_text(_FOLDER / f"{kind}.txt") for kind in KINDS]
    of_kinds = [
        [each.tokens for each in windows_of(tokenize, [Document(text)], window, None)]
        for text in texts
    ]
    mixed = chain.from_iterable(zip_longest(*of_kinds, fillvalue=[]))
    windows = [tokens for tokens in mixed if len(tokens) == window]
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    return Calibration(NAME, digest, windows[: limit // window])
