"""The text that a model is calibrated on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gguf_tools.file.chunks import sha256_of
from orchestrator.errors import ConfigError
from orchestrator.lab.calibrate.capture import WINDOW
from orchestrator.lab.eval.text import Tokenize, needed_tokens, read_documents, windows_of

# What 128 samples of 512 tokens have: more changes little, and takes its time.
MAX_TOKENS = 65536
LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Calibration:
    """Windows of tokens of a text. sha256: of the file, hexadecimal."""

    name: str
    sha256: str
    windows: list[list[int]]

    @property
    def n_tokens(self) -> int:
        return sum(len(window) for window in self.windows)

    def summary(self) -> str:
        """One line for a file's metadata."""
        return f"{self.name}, {self.n_tokens} tokens, sha256 {self.sha256}"


def read_calibration(
    tokenize: Tokenize, path: Path, limit: int = MAX_TOKENS, window: int = WINDOW
) -> Calibration:
    """The first limit tokens of a text (or JSON lines, .xz unpacked), in windows within one
    document each. Raises ConfigError for a text that cannot be read or is too short."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file: its checksum is kept beside what is made of it")
    documents = read_documents(path, needed_tokens(limit, window))
    cut = windows_of(tokenize, documents, window, limit)
    found = Calibration(path.name, sha256_of(path), [each.tokens for each in cut])
    if found.n_tokens < LEAST_TOKENS:
        raise ConfigError(
            f"{path}: {found.n_tokens} tokens are too few to calibrate on, {LEAST_TOKENS} are the"
            " least: give more text"
        )
    return found
