"""Conversations in files: JSON lines, a message each, as `/save` writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gguf_tools.file.opening import open_file
from orchestrator.cache.files import write_whole
from orchestrator.errors import ConfigError

Message = dict[str, str]

_MOST_BYTES = 1 << 27
# Of a file that is too long: enough to see that it is no text at all.
_FIRST_BYTES = 1 << 16
_WRONG = "this is no conversation that /save wrote"


def read_conversation(path: Path) -> list[Message]:
    """The messages in a file: a system prompt or none, then a user's and the assistant's in turns.

    A last message that was not answered is left out. Raises ConfigError for a file that cannot be
    read, or that is something else.
    """
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise ConfigError(f"{path}: {_WRONG}")
            lines = file.read().decode().split("\n")
        messages = [_message(json.loads(line)) for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {_WRONG}") from error
    first = 1 if messages and messages[0]["role"] == "system" else 0
    messages = messages[: len(messages) - (len(messages) - first) % 2]
    turns = messages[first:]
    wanted = ["user", "assistant"] * (len(turns) // 2)
    if not turns or [each["role"] for each in turns] != wanted:
        raise ConfigError(f"{path}: {_WRONG}")
    return messages


def goes_on(messages: Sequence[Message], path: Path) -> bool:
    """Whether all that a file holds is the beginning of these messages, so that nothing is lost
    where they take its place."""
    try:
        before = read_conversation(path)
    except ConfigError:
        return False
    return list(messages[: len(before)]) == before


def _message(data: object) -> Message:
    """Raises ValueError."""
    if not isinstance(data, dict) or data.keys() != {"role", "content"}:
        raise ValueError
    if not all(isinstance(value, str) for value in data.values()):
        raise ValueError
    return data


def write_conversation(path: Path, messages: Sequence[Message]) -> None:
    """Writes messages as JSON lines, all or none, for their owner alone. Raises OSError."""
    lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in messages]
    write_whole(path, "".join(lines), private=True)


class LastConversation:
    """The latest conversation, in the folder of the prompt cache. What cannot be written there is
    done without."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "last.jsonl"

    def keep(self, messages: Sequence[Message]) -> None:
        with suppress(OSError):
            write_conversation(self._path, messages)

    def forget(self) -> None:
        """Nobody goes on with what a user has dropped."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def read(self) -> list[Message]:
        """Raises ConfigError where there is none."""
        if not self._path.exists():
            raise ConfigError(f"--resume: no conversation is kept in {self._path.parent}")
        return read_conversation(self._path)


def read_text(path: Path, most_bytes: int, else_do: str) -> str:
    """The text in a file of at most so many bytes, without white space around it. else_do: what is
    said of a longer one. Raises ConfigError for what cannot be read, or is no text."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        with open_file(path) as file:
            is_longer = os.fstat(file.fileno()).st_size > most_bytes
            data = file.read(_FIRST_BYTES if is_longer else -1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    # No text holds a zero, and nearly every other file has one near its beginning.
    wrong = data.find(0)
    if wrong < 0 and is_longer:
        raise ConfigError(f"{path}: {else_do}")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        raise ConfigError(f"{path}: not a text in UTF-8, at byte {wrong}")
    return text.strip()
